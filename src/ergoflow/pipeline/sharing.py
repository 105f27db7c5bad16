"""Several `ergoflow reproduce` below one root: each cell is made by one of them, and a device trains one at a time.

What is shared has a file in ROOT/runs/.locks. Its lock is the kernel's and goes with the process that holds it, so one
that was killed holds nobody up. The file is empty, or says why the cell could not be made.
"""

from __future__ import annotations

import gc
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.data.files import sole_holder
from ergoflow.pipeline.workspace import Workspace


def claim(workspace: Workspace, what: str) -> AbstractContextManager[bool]:
    """Make something this process's own inside the block, unless it is another's; yields whether it is."""
    return sole_holder(_lock_file(workspace, what), wait=False)


@contextmanager
def claim_run(workspace: Workspace, name: str, seed: int) -> Iterator[None]:
    """Make a run this process's own inside the block; refused while it is another's.

    The processes that read data in for one that was killed hold it for some seconds more.
    """
    with claim(workspace, f"training-{name}-seed{seed}") as mine:
        if not mine:
            raise ValueError(
                f"{workspace.run(name, seed)} is being made by another process, or by one that was killed seconds ago; "
                "wait for its end, or choose another --seed"
            )
        yield


@contextmanager
def alone(workspace: Workspace, what: str, console: Console, *, waiting: str) -> Iterator[None]:
    """Make something this process's own inside the block; `waiting` is printed if it is another's until then."""
    file = _lock_file(workspace, what)
    with sole_holder(file, wait=False) as mine:
        if mine:
            yield
            return
    console.print(f"waiting: {waiting}", highlight=False)
    with sole_holder(file, wait=True):
        yield


@contextmanager
def turn(workspace: Workspace, device: torch.device, console: Console) -> Iterator[None]:
    """Have a turn on the device inside the block, after all other processes below the root that have one.

    What memory of a GPU nobody needs any more is given back at its end: the next process may.
    """
    with alone(workspace, _device_name(device), console, waiting=f"another process has its turn on {device}"):
        yield
        give_memory_back(device)


def give_memory_back(device: torch.device) -> None:
    """Give back the memory of a GPU that torch keeps for later, and that of runs which have ended.

    The first optimizer of a process imports torch's compiler, and an error handled in there keeps its frames, which
    hold all of the run, until Python looks for cycles.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def give_up(workspace: Workspace, what: str, reason: str) -> None:
    """Tell the other processes why there is no use in making something; whoever has claimed it may."""
    _lock_file(workspace, what).write_text(reason)


def given_up(workspace: Workspace, what: str, *, since: float) -> str:
    """Why a process gave something up after `since`, a time of `time.time`; empty if none did."""
    file = _lock_file(workspace, what)
    return file.read_text() if file.exists() and file.stat().st_mtime > since else ""


def _lock_file(workspace: Workspace, what: str) -> Path:
    folder = workspace.root / "runs" / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / what


def _device_name(device: torch.device) -> str:
    """A name that all processes have for a device, whichever numbers they see."""
    if device.type == "cuda":
        return f"gpu-{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type}-{platform.node()}"

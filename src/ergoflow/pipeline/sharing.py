"""Several `ergoflow reproduce` below one root: each cell is made by one of them, and a device trains one at a time.

Locks are the kernel's and go with their process, so one that was killed holds nobody up. What stays is an empty file
for each device.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.data.files import sole_holder
from ergoflow.pipeline.workspace import Workspace


def claim(folder: Path) -> AbstractContextManager[bool]:
    """Make a folder this process's own inside the block, unless it is another's; yields whether it is."""
    folder.mkdir(parents=True, exist_ok=True)
    return sole_holder(folder, wait=False)


@contextmanager
def alone(path: Path, console: Console, *, waiting: str) -> Iterator[None]:
    """Make a file or folder this process's own inside the block; `waiting` is printed if it is another's until then."""
    with sole_holder(path, wait=False) as mine:
        if mine:
            yield
            return
    console.print(f"waiting: {waiting}", highlight=False)
    with sole_holder(path, wait=True):
        yield


@contextmanager
def turn(workspace: Workspace, device: torch.device, console: Console) -> Iterator[None]:
    """Have a turn on the device inside the block, after all other processes below the root that have one."""
    file = workspace.root / "runs" / f"{_device_name(device)}.turn"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with alone(file, console, waiting=f"another process has its turn on {device}"):
        yield


def _device_name(device: torch.device) -> str:
    """A name that all processes have for a device, whichever numbers they see."""
    if device.type == "cuda":
        return f"gpu-{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type}-{platform.node()}"

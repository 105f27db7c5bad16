"""What `auto` means on each device, and that freed memory is not paid for again."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import subprocess
import sys

import pytest
import torch

from ergoflow.cli import main
from ergoflow.training.processor import keep_freed_memory, trains_in_bf16

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PAGE = 4096
# Larger than what the C library keeps by itself (32 MB).
BLOCKS, SIZE = 2, 2**26


@pytest.mark.parametrize("has_units", [True, False])
def test_automatic_precision_is_bf16_only_on_a_cpu_with_units_for_it(monkeypatch, has_units):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    assert trains_in_bf16("auto", CPU) is has_units
    assert not trains_in_bf16("auto", CUDA)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_named_precision_is_the_same_everywhere(monkeypatch, device):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: device.type == "cuda")
    assert trains_in_bf16("bf16", device)
    assert not trains_in_bf16("fp32", device)


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs the GNU libc")
@pytest.mark.parametrize(("first", "keeps"), [("nothing", False), ("keep memory", True), ("command", True)])
def test_memory_that_is_freed_and_taken_again_causes_page_faults_unless_it_is_kept(first: str, keeps: bool) -> None:
    # In a process of its own: which memory is free, and was ever touched, depends on all that ran before.
    process = subprocess.run([sys.executable, __file__, first], capture_output=True, text=True, check=True)
    pages = BLOCKS * SIZE // PAGE
    assert (int(process.stdout) < pages / 10) if keeps else (int(process.stdout) >= pages)


def page_faults() -> int:
    """How often memory is touched for the first time, page by page, as blocks are taken and filled."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(BLOCKS)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def command() -> None:
    """A verb of the command line, run to its end."""
    sys.argv[1:] = ["--version"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
        main()


if __name__ == "__main__":
    preparations = {"nothing": int, "keep memory": keep_freed_memory, "command": command}
    preparations[sys.argv[1]]()
    # The first rounds make room: a hole of a block's size is too small for a block with its alignment.
    print([page_faults() for _ in range(10)][-1])

"""What `auto` means on each device, and that freed memory is not paid for again."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from ergoflow.training.processor import keep_freed_memory, trains_in_bf16

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PAGE = 4096


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
def test_memory_that_is_freed_and_taken_again_causes_no_page_faults():
    import resource

    keep_freed_memory()
    size = 2**24
    blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(4)]
    del blocks
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(size, dtype=torch.uint8)
    # Each of the four would touch all its pages for the first time.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < size // PAGE

"""What a CPU needs to be fast: products in bfloat16 where it has units for them, and memory that is not given back.

A step of a model frees and takes again some hundred megabytes. The C library returns large blocks to the system, which
hands them out anew page by page, zeroed: half a millisecond for a megabyte, a fifth of a step of a small model.
"""

from __future__ import annotations

import ctypes
import sys

import torch

# Of <malloc.h>: the free memory at the end of the heap above which it is given back, and the blocks outside the heap.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
# The largest number that mallopt takes.
NEVER = 2**31 - 1


def trains_in_bf16(precision: str, device: torch.device) -> bool:
    """Return whether products are to be in bfloat16; "auto": on a CPU that has instructions for them."""
    if precision == "auto":
        return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return precision == "bf16"


def keep_freed_memory() -> None:
    """Let this process keep the memory it frees; does nothing where the C library is not GNU's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_MMAP_MAX, 0)

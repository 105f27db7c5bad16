"""A rehearsal: what a function launches is compiled before it is called, by all cores at a time.

Kernels are compiled when they are first launched, one after the other, some of them for several seconds: a minute or
two for the first training step of a model on a machine. A rehearsed call meets them all, and runs none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ergoflow.ops.choice import has_triton, interpreted

# Of the error that a rehearsal ended with.
REASON_LENGTH = 200


def rehearsed(function: Callable[[], object], device: torch.device) -> None:
    """Call the function once without running its Triton kernels, and return when all of them are compiled.

    Torch's own operators do run, on memory that no kernel has filled: whatever the function computes, writes or draws
    is to be thrown away, and it must not use a kernel's results as indices or ask the device for a number, as nothing
    may that is to be recorded. Nothing happens on a CPU, without triton, or in its interpreter. A rehearsal that fails
    is a warning: the call it was for compiles its kernels itself, or says what is wrong.
    """
    if device.type != "cuda" or interpreted() or not has_triton():
        return
    try:
        from ergoflow.ops.rehearsal_triton import rehearsal

        with rehearsal():
            function()
    except Exception as error:
        reason = " ".join(str(error).split())[:REASON_LENGTH]
        warnings.warn(f"kernels are compiled one by one, as their rehearsal failed: {reason}", stacklevel=2)

"""Which implementation of an operator runs: the plain reference, the fast torch code, or the Triton kernel."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Impl = Literal["auto", "reference", "torch", "triton"]
HALF = (torch.bfloat16, torch.float16)
SINGLE = (*HALF, torch.float32)
# What "auto" means, last entry first; `use_impl` adds one for a while.
_AUTO: list[Impl] = ["auto"]
# Constants, which compiled models may ask for.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def use_impl(impl: Impl) -> Iterator[None]:
    """Within the block operators that are free to choose ("auto") run this implementation: to compare whole models."""
    _AUTO.append(impl)
    try:
        yield
    finally:
        _AUTO.pop()


def choose_impl(
    x: Tensor, impl: Impl, *, dtypes: tuple[torch.dtype, ...] = HALF
) -> Literal["reference", "torch", "triton"]:
    """Return what `impl` means for an operator on x; asking for what cannot run raises.

    "auto" takes Triton on CUDA, where the package is installed, for x of one of `dtypes`, and the fast torch code
    otherwise: in float32 torch's own products are faster than exact ones in Triton, so an operator that is something
    else than large products says SINGLE. Tensors without data take the reference, so that work is counted as it is
    written down.
    """
    device_type = x.device.type
    impl = _AUTO[-1] if impl == "auto" else impl
    if impl == "auto":
        if device_type == "meta" or isinstance(x, FakeTensor):
            return "reference"
        return "triton" if device_type == "cuda" and x.dtype in dtypes and has_triton() else "torch"
    if impl in ("reference", "torch"):
        return impl
    if impl != "triton":
        raise ValueError(f"impl must be 'auto', 'reference', 'torch' or 'triton', got {impl!r}; choose one of them")
    if not has_triton():
        raise ValueError("impl 'triton' needs the triton package, got none; install it or choose impl='torch'")
    if device_type != "cuda" and not interpreted():
        raise ValueError(
            f"impl 'triton' needs CUDA tensors or TRITON_INTERPRET=1, got tensors on {device_type}; choose impl='torch'"
        )
    if x.dtype == torch.float64:
        raise ValueError("the Triton kernels accumulate in float32, got float64 tensors; choose impl='torch'")
    return "triton"


def is_reference(x: Tensor) -> bool:
    """Return whether operators that are free to choose run their reference on x; models then skip their algebra too."""
    return choose_impl(x, "auto") == "reference"


def in_product_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype in which a matrix product of them would run: autocast's, if it is on."""
    device_type = tensors[0].device.type
    # Of a device without autocast one may not ask; torch's own question for that is none that torch 2.11 can compile.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors)


def short_products(device: torch.device) -> AbstractContextManager[object]:
    """Within the block products of few rows are made: on a CPU in float32, where casting them would take longer."""
    return torch.autocast("cpu", enabled=False) if device.type == "cpu" else nullcontext()


def has_triton() -> bool:
    """Return whether the package is installed."""
    return _HAS_TRITON


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return _INTERPRETED

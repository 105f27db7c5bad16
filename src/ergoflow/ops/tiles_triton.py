"""What the Triton kernels of this room share: block sizes, and products that also run in Triton's interpreter."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels were defined for Triton's interpreter, which runs on CPU tensors."""

# tl.dot takes no shorter sides.
SHORTEST = 16


def block(size: int, most: int | None = None) -> int:
    """Return the power of two that covers `size`, no shorter than a product may be, and no longer than `most`."""
    covering = max(SHORTEST, triton.next_power_of_2(size))
    return covering if most is None else min(covering, most)


def precision(x: Tensor) -> str:
    """Return how `product` multiplies tiles of x: float32 exactly; half precision as it is, or widened where it runs
    in the interpreter, which cannot multiply bfloat16. Both accumulate in float32."""
    if x.dtype == torch.float32:
        return "ieee"
    return "widen" if INTERPRETED else "half"


@triton.jit
def product(a: tl.tensor, b: tl.tensor, acc: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return acc + a @ b in float32."""
    if PRECISION == "half":
        return tl.dot(a, b, acc=acc)
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc, input_precision="ieee")

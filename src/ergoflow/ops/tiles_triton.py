"""What the Triton kernels of this room share: sizes of tiles and programs, products that the interpreter runs too."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels were defined for Triton's interpreter, which runs on CPU tensors."""

# tl.dot takes no shorter sides.
SHORTEST = 16
# Multiprocessors of an H200.
PROCESSORS = 132
# What a program does before its first tile (weights, the pipeline's filling) in times of tiles.
START = 2


class ProductSettings(NamedTuple):
    """Rows, columns and summands of a tile, warps, pipeline stages, and programs that a multiprocessor runs at a time.

    A program keeps what stays the same in shared memory and walks over the tiles: the next values arrive while these
    are multiplied and stored. Triton's pipeline does so from three stages on.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    resident: int = 1


def block(size: int, most: int | None = None) -> int:
    """Return the power of two that covers `size`, no shorter than a product may be, and no longer than `most`."""
    covering = max(SHORTEST, triton.next_power_of_2(size))
    return covering if most is None else min(covering, most)


@lru_cache
def count_walkers(groups: int, tiles: int, resident: int) -> int:
    """Return how many programs share the tiles of a group so that the last of all programs ends first."""
    at_a_time = PROCESSORS * resident

    def ends(programs: int) -> int:
        return triton.cdiv(groups * programs, at_a_time) * (triton.cdiv(tiles, programs) + START)

    return min(range(1, min(tiles, at_a_time) + 1), key=ends)


def can_describe(*fields: Tensor) -> bool:
    """Return whether the copy engine takes these, of half precision: 16 bytes divide places and strides.

    Products of float32 are made from registers, which have no room for large tiles; the interpreter needs none.
    """
    return all(
        (field.element_size() == 2 or INTERPRETED)
        and field.stride(-1) == 1
        and field.data_ptr() % 16 == 0
        and all(stride > 0 and stride * field.element_size() % 16 == 0 for stride in field.stride()[:-1])
        for field in fields
    )


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

"""The Triton twin of `ergoflow.ops.mlp`: what lies between the products, which stay with the library.

Every kernel here reads and writes each number once. Rows are points, columns channels; a program takes one block of
columns through many rows, so that a bias is read once and its gradient is added up on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.gelu_triton import bent, bent_and_slope


class Settings(NamedTuple):
    """Rows and columns of a tile, and warps of a program."""

    rows: int
    columns: int
    warps: int


# 384, 768 and 1280 hidden channels are whole blocks of 128; 96, 192 and 320 of the stream whole blocks of 32.
GELU_SETTINGS = Settings(rows=16, columns=128, warps=4)
GELU_GRADIENT_SETTINGS = Settings(rows=16, columns=128, warps=4)
ADD_SETTINGS = Settings(rows=64, columns=32, warps=4)
ROUND_SETTINGS = Settings(rows=64, columns=32, warps=4)
# Programs, as many as run at a time on 132 multiprocessors: eight on each, five of the gradient of the GELU.
PROGRAMS, GELU_GRADIENT_PROGRAMS = 1056, 660


def gelu(a: Tensor, bias: Tensor) -> Tensor:
    """Return GELU(a + bias) in the dtype of a (N, E), contiguous; bias (E,)."""
    (count, width), (rows, columns, warps) = a.shape, GELU_SETTINGS
    out = torch.empty_like(a)
    _gelu_kernel[_programs(a, GELU_SETTINGS, PROGRAMS)](
        a, bias, out, count, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=1
    )
    return out


def gelu_gradient(d_out: Tensor, a: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of a, which overwrites d_out; GELU(a + bias); and the gradient of the bias in float32."""
    (count, width), (rows, columns, warps) = a.shape, GELU_GRADIENT_SETTINGS
    blocks, splits = _programs(a, GELU_GRADIENT_SETTINGS, GELU_GRADIENT_PROGRAMS)
    out = torch.empty_like(a)
    parts = torch.empty(splits, width, device=a.device, dtype=torch.float32)
    _gelu_gradient_kernel[(blocks, splits)](
        d_out, a, bias, out, parts, count, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=1
    )
    return d_out, out, parts.sum(0)


def add(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Return x + y + bias in the dtype of x (N, D), contiguous; bias (D,)."""
    (count, width), (rows, columns, warps) = x.shape, ADD_SETTINGS
    out = torch.empty_like(x)
    _add_kernel[_programs(x, ADD_SETTINGS, PROGRAMS)](
        x, y, bias, out, count, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=1
    )
    return out


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x (N, D), contiguous, in `dtype`, and its sum over the rows in float32."""
    (count, width), (rows, columns, warps) = x.shape, ROUND_SETTINGS
    blocks, splits = _programs(x, ROUND_SETTINGS, PROGRAMS)
    out = torch.empty_like(x, dtype=dtype)
    parts = torch.empty(splits, width, device=x.device, dtype=torch.float32)
    _round_kernel[(blocks, splits)](
        x, out, parts, count, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=1
    )
    return out, parts.sum(0)


def _programs(x: Tensor, settings: Settings, programs: int) -> tuple[int, int]:
    """Return the blocks of columns of x (N, C), and the programs that share the rows of each."""
    blocks = triton.cdiv(x.shape[1], settings.columns)
    return blocks, max(1, min(triton.cdiv(x.shape[0], settings.rows), programs // blocks))


@triton.jit
def _gelu_kernel(
    a: tl.tensor,  # (count, WIDTH)
    bias: tl.tensor,  # (WIDTH,)
    out: tl.tensor,  # (count, WIDTH)
    count: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    n, e = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + e, mask=e < WIDTH, other=0.0).to(tl.float32)
    place = n[:, None] * WIDTH + e[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(count, ROWS), tl.num_programs(1)):
        start = tl.full((), tile, tl.int64) * ROWS
        inside = (n[:, None] < count - start) & (e[None, :] < WIDTH)
        wide = tl.load(a + start * WIDTH + place, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        tl.store(out + start * WIDTH + place, bent(wide).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_gradient_kernel(
    d_out: tl.tensor,  # (count, WIDTH), becomes the gradient of a
    a: tl.tensor,  # (count, WIDTH)
    bias: tl.tensor,  # (WIDTH,)
    out: tl.tensor,  # (count, WIDTH)
    parts: tl.tensor,  # (splits, WIDTH), float32
    count: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    n, e = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + e, mask=e < WIDTH, other=0.0).to(tl.float32)
    place = n[:, None] * WIDTH + e[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(count, ROWS), tl.num_programs(1)):
        start = tl.full((), tile, tl.int64) * ROWS
        inside = (n[:, None] < count - start) & (e[None, :] < WIDTH)
        wide = tl.load(a + start * WIDTH + place, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        g = tl.load(d_out + start * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        value, slope = bent_and_slope(wide)
        tl.store(out + start * WIDTH + place, value.to(out.dtype.element_ty), mask=inside)
        g = g * slope
        total += g
        tl.store(d_out + start * WIDTH + place, g.to(d_out.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(1) * WIDTH + e, tl.sum(total, axis=0), mask=e < WIDTH)


@triton.jit
def _add_kernel(
    x: tl.tensor,  # (count, WIDTH)
    y: tl.tensor,  # (count, WIDTH)
    bias: tl.tensor,  # (WIDTH,)
    out: tl.tensor,  # (count, WIDTH)
    count: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    n, d = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    place = n[:, None] * WIDTH + d[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(count, ROWS), tl.num_programs(1)):
        start = tl.full((), tile, tl.int64) * ROWS
        inside = (n[:, None] < count - start) & (d[None, :] < WIDTH)
        total = tl.load(x + start * WIDTH + place, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        total += tl.load(y + start * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + start * WIDTH + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _round_kernel(
    x: tl.tensor,  # (count, WIDTH)
    out: tl.tensor,  # (count, WIDTH)
    parts: tl.tensor,  # (splits, WIDTH), float32
    count: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    n, d = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = n[:, None] * WIDTH + d[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(count, ROWS), tl.num_programs(1)):
        start = tl.full((), tile, tl.int64) * ROWS
        inside = (n[:, None] < count - start) & (d[None, :] < WIDTH)
        values = tl.load(x + start * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        total += values
        tl.store(out + start * WIDTH + place, values.to(out.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(1) * WIDTH + d, tl.sum(total, axis=0), mask=d < WIDTH)

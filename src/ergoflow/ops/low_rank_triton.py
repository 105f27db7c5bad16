"""The Triton twin of `ergoflow.ops.low_rank`: q and k stay (B, S, H·m), and are scaled in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.tiles_triton import block, precision, product


class Settings(NamedTuple):
    """Rows, columns and summands of a tile, warps and pipeline stages of a kernel."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


PRODUCT_SETTINGS = Settings(rows=128, columns=128, depth=64, warps=8, stages=1)
GRADIENT_SETTINGS = Settings(rows=128, columns=64, depth=64, warps=4, stages=2)


def kernel_product(q: Tensor, k: Tensor, table: Tensor, heads: int, settings: Settings | None = None) -> Tensor:
    """Return K (B, H, S, S) of q and k (B, S, H·m) and of the table (S, 2m) in float32, all contiguous."""
    rows, columns, depth, warps, stages = settings or PRODUCT_SETTINGS
    batch, size, width = q.shape[0], q.shape[1], q.shape[2] // heads
    out = q.new_empty(batch, heads, size, size)
    block_i, block_j = block(size, rows), block(size, columns)
    # Tiles come last: programs that run at the same time share the tables' rows.
    _product_kernel[(heads, batch, triton.cdiv(size, block_i) * triton.cdiv(size, block_j))](
        q,
        k,
        table,
        out,
        size,
        width,
        width**-0.5,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        BLOCK_C=block(width, depth),
        PRECISION=precision(q),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def projection_gradient(d_kernel: Tensor, k: Tensor, table: Tensor, settings: Settings | None = None) -> Tensor:
    """Return dq (B, S, H·m) of dK (B, H, S, S), any strides, and k; of dKᵀ and q it is dk."""
    rows, columns, depth, warps, stages = settings or GRADIENT_SETTINGS
    batch, heads, size = d_kernel.shape[:3]
    width = k.shape[2] // heads
    out = torch.empty_like(k)
    block_i, block_c = block(size, rows), block(width, columns)
    _gradient_kernel[(heads, batch, triton.cdiv(size, block_i) * triton.cdiv(width, block_c))](
        d_kernel,
        k,
        table,
        out,
        size,
        width,
        *d_kernel.stride(),
        width**-0.5,
        BLOCK_I=block_i,
        BLOCK_J=block(size, depth),
        BLOCK_C=block_c,
        PRECISION=precision(k),
        num_warps=warps,
        num_stages=stages,
    )
    return out


@triton.jit
def _product_kernel(
    q: tl.tensor,  # (B, size, heads, width)
    k: tl.tensor,  # the same
    table: tl.tensor,  # (size, 2, width), float32: cosines and sines
    out: tl.tensor,  # (B, heads, size, size)
    size: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    head, heads = tl.program_id(0), tl.num_programs(0)
    sample = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(size, BLOCK_J)
    i = tl.program_id(2) // blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.program_id(2) % blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    q += sample * size * heads * width + head * width
    k += sample * size * heads * width + head * width
    acc = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for first in range(0, width, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        q_cos, q_sin = _turned(q, table, i, c, size, width, heads * width)
        k_cos, k_sin = _turned(k, table, j, c, size, width, heads * width)
        acc = product(q_cos, tl.trans(k_cos), acc, PRECISION)
        acc = product(q_sin, tl.trans(k_sin), acc, PRECISION)
    place = ((sample * heads + head) * size + i[:, None]) * size + j[None, :]
    inside = (i[:, None] < size) & (j[None, :] < size)
    tl.store(out + place, (acc * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    d_kernel: tl.tensor,  # (B, heads, size, size), any strides
    k: tl.tensor,  # (B, size, heads, width)
    table: tl.tensor,  # (size, 2, width), float32: cosines and sines
    out: tl.tensor,  # (B, size, heads, width)
    size: tl.tensor,
    width: tl.tensor,
    stride_b: tl.tensor,
    stride_h: tl.tensor,
    stride_i: tl.tensor,
    stride_j: tl.tensor,
    scale: tl.tensor,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    head, heads = tl.program_id(0), tl.num_programs(0)
    sample = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(width, BLOCK_C)
    i = tl.program_id(2) // blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    c = tl.program_id(2) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    start = sample * size * heads * width + head * width
    d_kernel += sample * stride_b + head.to(tl.int64) * stride_h
    of_cos = tl.zeros((BLOCK_I, BLOCK_C), tl.float32)
    of_sin = tl.zeros((BLOCK_I, BLOCK_C), tl.float32)
    for first in range(0, size, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        g = tl.load(
            d_kernel + i[:, None].to(tl.int64) * stride_i + j[None, :].to(tl.int64) * stride_j,
            mask=(i[:, None] < size) & (j[None, :] < size),
            other=0.0,
        )
        k_cos, k_sin = _turned(k + start, table, j, c, size, width, heads * width)
        of_cos = product(g, k_cos, of_cos, PRECISION)
        of_sin = product(g, k_sin, of_sin, PRECISION)
    inside = (i[:, None] < size) & (c[None, :] < width)
    turn = table + i[:, None] * 2 * width + c[None, :]
    total = of_cos * tl.load(turn, mask=inside, other=0.0)
    total += of_sin * tl.load(turn + width, mask=inside, other=0.0)
    target = out + start + i[:, None].to(tl.int64) * heads * width + c[None, :]
    tl.store(target, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turned(
    values: tl.tensor,
    table: tl.tensor,
    row: tl.tensor,
    c: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
) -> tl.tensor:
    """Return values ⊙ cos φ and values ⊙ sin φ in the dtype of the values, zero outside."""
    inside = (row[:, None] < size) & (c[None, :] < width)
    tile = tl.load(values + row[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0)
    turn = table + row[:, None] * 2 * width + c[None, :]
    cosine = tl.load(turn, mask=inside, other=0.0)
    sine = tl.load(turn + width, mask=inside, other=0.0)
    wide = tile.to(tl.float32)
    return (wide * cosine).to(tile.dtype), (wide * sine).to(tile.dtype)

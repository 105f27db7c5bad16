"""The Triton twin of `ergoflow.ops.transport`: one program per line and head, all its matrices on the chip.

The rotation exp(A) is a polynomial p(a) of the scaled A and two squarings, see `ergoflow.ops.skew_exponential_triton`.
With H = E − I the heat kernel joins it, y = x + (T + H + HT) x with T = exp(A) − I, before both act on x.

The gradient goes back through every product, in two kernels because the matrices of both would not fit into the
registers: from y to p(a), which the forward pass keeps, and from there to q and k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.skew_exponential_triton import (
    float32_product,
    plus_diagonal,
    polynomial,
    scaled_down,
    skew_gradient,
    squared,
    squared_gradient,
)
from ergoflow.ops.tiles_triton import block


class Settings(NamedTuple):
    """Channels of x at a time, warps, most registers of a thread, and precision ("tf32x3" or "ieee") of a program."""

    columns: int
    warps: int
    registers: int
    precision: str


# By the block of points, 16 to 64; for 32 the fastest of some ten on an H200. TF32 products take 16 rows per warp: more
# warps would do the same work twice.
SETTINGS = {
    16: Settings(columns=16, warps=1, registers=168, precision="tf32x3"),
    32: Settings(columns=64, warps=2, registers=168, precision="tf32x3"),
    64: Settings(columns=16, warps=4, registers=255, precision="tf32x3"),
}
# The gradients hold twice as many matrices as the forward pass.
VALUES_SETTINGS = CODES_SETTINGS = {size: own._replace(registers=255) for size, own in SETTINGS.items()}


def transport(
    x: Tensor, projected: Tensor, turns: Tensor, heat: Tensor, axis: int, heads: int, settings: Settings | None = None
) -> tuple[Tensor, Tensor]:
    """Return y (B, *grid, D) of contiguous x and projected, and p(a) (lines, H, S, S) in float32 for the gradient.

    turns (2, S, F); heat (2, H, S, S), or empty for none.
    """
    size, frequencies = turns.shape[1:]
    columns, warps, registers, precision = settings or SETTINGS[block(size)]
    out, turned = torch.empty_like(x), turns.new_empty(x.shape[:-1].numel() // size, heads, size, size)
    _transport_kernel[(turned.shape[:2].numel(),)](
        x,
        projected,
        turns,
        heat,
        out,
        turned,
        x.shape[2 + axis : -1].numel(),
        SIZE=size,
        FREQUENCIES=frequencies,
        DIM=x.shape[-1] // heads,
        HEADS=heads,
        HEAT=len(heat) > 0,
        WEIGHT=_weight(turns),
        BLOCK_S=block(size),
        BLOCK_F=block(frequencies),
        BLOCK_D=columns,
        PRECISION=precision,
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
    )
    return out, turned


def values_gradient(
    d_out: Tensor, x: Tensor, heat: Tensor, turned: Tensor, axis: int, settings: Settings | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of p(a) and, in float32, of the rates (H,), which without heat means nothing."""
    heads, size = turned.shape[1:3]
    columns, warps, registers, precision = settings or VALUES_SETTINGS[block(size)]
    d_x, d_turned, d_rates = torch.empty_like(x), torch.empty_like(turned), turned.new_empty(turned.shape[:2])
    _values_gradient_kernel[(d_rates.numel(),)](
        d_out,
        x,
        heat,
        turned,
        d_x,
        d_turned,
        d_rates,
        x.shape[2 + axis : -1].numel(),
        SIZE=size,
        DIM=x.shape[-1] // heads,
        HEADS=heads,
        HEAT=len(heat) > 0,
        BLOCK_S=block(size),
        BLOCK_D=columns,
        PRECISION=precision,
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
    )
    return d_x, d_turned, d_rates.sum(0) if len(heat) else d_rates[0]


def codes_gradient(
    d_turned: Tensor, projected: Tensor, turns: Tensor, axis: int, settings: Settings | None = None
) -> Tensor:
    """Return the gradient of projected from that of p(a) (lines, H, S, S)."""
    size, frequencies = turns.shape[1:]
    _, warps, registers, precision = settings or CODES_SETTINGS[block(size)]
    d_projected = torch.empty_like(projected)
    _codes_gradient_kernel[(d_turned.shape[:2].numel(),)](
        d_turned,
        projected,
        turns,
        d_projected,
        projected.shape[2 + axis : -1].numel(),
        SIZE=size,
        FREQUENCIES=frequencies,
        HEADS=d_turned.shape[1],
        WEIGHT=_weight(turns),
        BLOCK_S=block(size),
        BLOCK_F=block(frequencies),
        PRECISION=precision,
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
    )
    return d_projected


def _weight(turns: Tensor) -> float:
    """Return 1/(S √(2F))."""
    size, frequencies = turns.shape[1:]
    return float((2 * frequencies) ** -0.5 / size)


@triton.jit
def _transport_kernel(
    x: tl.tensor,  # (outer, SIZE, after, HEADS, DIM)
    projected: tl.tensor,  # (outer, SIZE, after, HEADS, 4, FREQUENCIES)
    turns: tl.tensor,  # (2, SIZE, FREQUENCIES), float32
    heat: tl.tensor,  # (2, HEADS, SIZE, SIZE), float32: E − I and dE/dr
    out: tl.tensor,  # as x
    turned: tl.tensor,  # (lines, HEADS, SIZE, SIZE), float32: p(a)
    after: tl.tensor,
    SIZE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAT: tl.constexpr,
    WEIGHT: tl.constexpr,  # 1/(S √(2F))
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first, head = _line(after, SIZE, HEADS)
    q_re, q_im, k_re, k_im = _turned(projected, turns, first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F)
    a, a2, _ = scaled_down(_skew(q_re, q_im, k_re, k_im, PRECISION) * WEIGHT, PRECISION)
    _, _, t = polynomial(a, a2, PRECISION)
    _store_matrix(turned + tl.program_id(0).to(tl.int64) * SIZE * SIZE, t, SIZE, BLOCK_S)
    t = squared(squared(t, PRECISION), PRECISION)
    if HEAT:
        h = _matrix(heat + head * SIZE * SIZE, SIZE, BLOCK_S)
        t += h + float32_product(h, t, PRECISION)
    for start in range(0, DIM, BLOCK_D):
        place, inside = _places(first, after, start, SIZE, DIM, HEADS, BLOCK_S, BLOCK_D)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        values += float32_product(t, values, PRECISION)
        tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _values_gradient_kernel(
    d_out: tl.tensor,  # (outer, SIZE, after, HEADS, DIM)
    x: tl.tensor,  # the same
    heat: tl.tensor,  # (2, HEADS, SIZE, SIZE), float32: E − I and dE/dr
    turned: tl.tensor,  # (lines, HEADS, SIZE, SIZE), float32: p(a)
    d_x: tl.tensor,  # as x
    d_turned: tl.tensor,  # as turned
    d_rates: tl.tensor,  # (lines, HEADS), float32
    after: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first, head = _line(after, SIZE, HEADS)
    matrix = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    g = tl.zeros((BLOCK_S, BLOCK_S), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        place, inside = _places(first, after, start, SIZE, DIM, HEADS, BLOCK_S, BLOCK_D)
        d_values = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        g += float32_product(d_values, tl.trans(values), PRECISION)
    t1 = squared(_matrix(turned + matrix, SIZE, BLOCK_S), PRECISION)
    t = squared(t1, PRECISION)
    if HEAT:
        slope = _matrix(heat + (HEADS + head) * SIZE * SIZE, SIZE, BLOCK_S)
        along = float32_product(slope, g, PRECISION) * plus_diagonal(t, 1.0)
        tl.store(d_rates + tl.program_id(0), tl.sum(tl.sum(along, axis=1), axis=0))
        h = _matrix(heat + head * SIZE * SIZE, SIZE, BLOCK_S)
        g += float32_product(h, g, PRECISION)
        t += h + float32_product(h, t, PRECISION)
    for start in range(0, DIM, BLOCK_D):
        place, inside = _places(first, after, start, SIZE, DIM, HEADS, BLOCK_S, BLOCK_D)
        d_values = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        d_values += float32_product(tl.trans(t), d_values, PRECISION)
        tl.store(d_x + place, d_values.to(d_x.dtype.element_ty), mask=inside)
    g = squared_gradient(g, t1, PRECISION)
    g = squared_gradient(g, _matrix(turned + matrix, SIZE, BLOCK_S), PRECISION)
    _store_matrix(d_turned + matrix, g, SIZE, BLOCK_S)


@triton.jit
def _codes_gradient_kernel(
    d_turned: tl.tensor,  # (lines, HEADS, SIZE, SIZE), float32
    projected: tl.tensor,  # (outer, SIZE, after, HEADS, 4, FREQUENCIES)
    turns: tl.tensor,  # (2, SIZE, FREQUENCIES), float32
    d_projected: tl.tensor,  # as projected
    after: tl.tensor,
    SIZE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHT: tl.constexpr,  # 1/(S √(2F))
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first, _ = _line(after, SIZE, HEADS)
    q_re, q_im, k_re, k_im = _turned(projected, turns, first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F)
    a, a2, scale = scaled_down(_skew(q_re, q_im, k_re, k_im, PRECISION) * WEIGHT, PRECISION)
    g = _matrix(d_turned + tl.program_id(0).to(tl.int64) * SIZE * SIZE, SIZE, BLOCK_S)
    d_a = skew_gradient(g, a, a2, scale, PRECISION)
    d_kernel = (d_a - tl.trans(d_a)) * (0.5 * scale * WEIGHT)
    # Read once more: the cache is faster than registers that spill.
    q_re, q_im, k_re, k_im = _turned(
        projected, turns, first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F, AGAIN=True
    )
    d_re, d_im = float32_product(d_kernel, k_re, PRECISION), float32_product(d_kernel, k_im, PRECISION)
    _store_turned_back(d_projected, turns, d_re, d_im, 0, first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F)
    d_re, d_im = -float32_product(d_kernel, q_re, PRECISION), -float32_product(d_kernel, q_im, PRECISION)
    _store_turned_back(d_projected, turns, d_re, d_im, 2, first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F)


@triton.jit
def _line(after: tl.tensor, SIZE: tl.constexpr, HEADS: tl.constexpr) -> tl.tensor:
    """Return the first point of this program's line, counted from the first of the batch, and its head."""
    line = tl.program_id(0) // HEADS
    return (line // after).to(tl.int64) * SIZE * after + line % after, tl.program_id(0) % HEADS


@triton.jit
def _places(
    first: tl.tensor,
    after: tl.tensor,
    start: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Return where the channels from `start` on of this line and head lie in x, and the mask, (BLOCK_S, BLOCK_D)."""
    i, c = tl.arange(0, BLOCK_S)[:, None], start + tl.arange(0, BLOCK_D)[None, :]
    place = (first + i * after) * (HEADS * DIM) + tl.program_id(0) % HEADS * DIM + c
    return place, (i < SIZE) & (c < DIM)


@triton.jit
def _turned(
    projected: tl.tensor,
    turns: tl.tensor,
    first: tl.tensor,
    after: tl.tensor,
    SIZE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
    AGAIN: tl.constexpr = False,  # loads that the compiler may not merge with earlier ones
) -> tl.tensor:
    """Return real and imaginary parts of q e^{iφ} and of k e^{iφ}, (BLOCK_S, BLOCK_F) each, zero outside."""
    place, turn, inside = _code_places(first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F)
    cosine = tl.load(turns + turn, mask=inside, other=0.0, volatile=AGAIN)
    sine = tl.load(turns + SIZE * FREQUENCIES + turn, mask=inside, other=0.0, volatile=AGAIN)
    q_re = tl.load(projected + place, mask=inside, other=0.0, volatile=AGAIN).to(tl.float32)
    q_im = tl.load(projected + FREQUENCIES + place, mask=inside, other=0.0, volatile=AGAIN).to(tl.float32)
    k_re = tl.load(projected + 2 * FREQUENCIES + place, mask=inside, other=0.0, volatile=AGAIN).to(tl.float32)
    k_im = tl.load(projected + 3 * FREQUENCIES + place, mask=inside, other=0.0, volatile=AGAIN).to(tl.float32)
    return (
        q_re * cosine - q_im * sine,
        q_re * sine + q_im * cosine,
        k_re * cosine - k_im * sine,
        k_re * sine + k_im * cosine,
    )


@triton.jit
def _store_turned_back(
    target: tl.tensor,
    turns: tl.tensor,
    real: tl.tensor,
    imaginary: tl.tensor,
    PART: tl.constexpr,
    first: tl.tensor,
    after: tl.tensor,
    SIZE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    """Write e^{−iφ}(real + i imaginary) where `projected` has the queries (PART 0) or the keys (PART 2)."""
    place, turn, inside = _code_places(first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F)
    cosine = tl.load(turns + turn, mask=inside, other=0.0)
    sine = tl.load(turns + SIZE * FREQUENCIES + turn, mask=inside, other=0.0)
    dtype = target.dtype.element_ty
    target += PART * FREQUENCIES
    tl.store(target + place, (real * cosine + imaginary * sine).to(dtype), mask=inside)
    tl.store(target + FREQUENCIES + place, (imaginary * cosine - real * sine).to(dtype), mask=inside)


@triton.jit
def _code_places(
    first: tl.tensor,
    after: tl.tensor,
    SIZE: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> tl.tensor:
    """Return where the first quarter of the codes of this line and head lies, where their turns do, and the mask."""
    i, c = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_F)[None, :]
    head = tl.program_id(0) % HEADS
    place = (first + i * after) * (HEADS * 4 * FREQUENCIES) + head * 4 * FREQUENCIES + c
    return place, i * FREQUENCIES + c, (i < SIZE) & (c < FREQUENCIES)


@triton.jit
def _matrix(matrix: tl.tensor, SIZE: tl.constexpr, BLOCK_S: tl.constexpr) -> tl.tensor:
    """Return a matrix (SIZE, SIZE), zero outside."""
    i, j = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_S)[None, :]
    return tl.load(matrix + i * SIZE + j, mask=(i < SIZE) & (j < SIZE), other=0.0)


@triton.jit
def _store_matrix(matrix: tl.tensor, values: tl.tensor, SIZE: tl.constexpr, BLOCK_S: tl.constexpr) -> None:
    i, j = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_S)[None, :]
    tl.store(matrix + i * SIZE + j, values, mask=(i < SIZE) & (j < SIZE))


@triton.jit
def _skew(q_re: tl.tensor, q_im: tl.tensor, k_re: tl.tensor, k_im: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return the skew part of Re Σ_c q_ic* k_jc."""
    kernel = float32_product(q_re, tl.trans(k_re), PRECISION) + float32_product(q_im, tl.trans(k_im), PRECISION)
    return 0.5 * (kernel - tl.trans(kernel))

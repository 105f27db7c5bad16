"""The Triton twin of `ergoflow.ops.transport`: one program per line and head, all its matrices on the chip.

The exponential takes six products where the reference takes eight. In float32 a polynomial may err by 1e-8, and the
angles of a skew matrix lie on the imaginary axis alone: there

    exp(a) − I ≈ p(a) = a + a²/2 + a³ M,     M = Σ_{n=3}^{9} c_n a^{n−3},

c_n the Chebyshev fit for angles up to 1, followed by two squarings, is orthogonal to 3e-8 at the angle 4, where it is
worst, and to 3e-10 up to the angle 2; Taylor's polynomial would need four squarings. With H = E − I the heat kernel
joins the rotation, y = x + (T + H + HT) x with T = exp(A) − I, before both act on x.

The gradient goes back through every product, in two kernels because the matrices of both would not fit into the
registers: from y to p(a), which the forward pass keeps, and from there to q and k. With G the gradient of the result of
each step, aᵀ = −a, and L = c₆ + c₇ a + c₈ a² + c₉ a³, so that M = c₃ + c₄ a + c₅ a² + a³ L,

    T' = 2T + TT     dT = 2G + G Tᵀ + Tᵀ G
    p(a)             dM = −a³ G,  dL = −a³ dM,  da³ = G Mᵀ + dM Lᵀ + c₉ dL
    a³ = a a²        da² −= Y,  Y = a B,  B the skew part of da³: a³ is skew whatever a is
    a² = a a         da += a (Y − da² − da²ᵀ), of which the skew part is the gradient of A.

A large A is scaled by its bound, which has a gradient too. A product in float32 is three of TF32 (2⁻²² of each summand
is lost) or exact, as `Settings` says; what is added to a product is added after it, rounded to nearest: the matrix
units cut off instead of rounding, and would shrink whatever they accumulate onto.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.tiles_triton import block
from ergoflow.ops.transport import MAX_ANGLE


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

# Bound on ‖A‖², beyond which A is scaled down; after the scaling two squarings end at MAX_ANGLE.
BOUND = tl.constexpr(MAX_ANGLE**2)
# Even coefficients fit (cos y − 1 + y²/2)/y⁴, odd ones (sin y − y)/y³, at the Chebyshev nodes of y² in (0, 1).
C3, C4, C5 = tl.constexpr(0.1666666665), tl.constexpr(0.04166665815), tl.constexpr(0.008333327149)
C6, C7 = tl.constexpr(0.001388735565), tl.constexpr(0.0001983817424)
C8, C9 = tl.constexpr(2.439173083e-5), tl.constexpr(2.706066854e-6)


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
    a, a2, _ = _scaled(_skew(q_re, q_im, k_re, k_im, PRECISION) * WEIGHT, PRECISION)
    _, _, t = _polynomial(a, a2, PRECISION)
    _store_matrix(turned + tl.program_id(0).to(tl.int64) * SIZE * SIZE, t, SIZE, BLOCK_S)
    t = _squared(_squared(t, PRECISION), PRECISION)
    if HEAT:
        h = _matrix(heat + head * SIZE * SIZE, SIZE, BLOCK_S)
        t += h + _product(h, t, PRECISION)
    for start in range(0, DIM, BLOCK_D):
        place, inside = _places(first, after, start, SIZE, DIM, HEADS, BLOCK_S, BLOCK_D)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        values += _product(t, values, PRECISION)
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
        g += _product(d_values, tl.trans(values), PRECISION)
    t1 = _squared(_matrix(turned + matrix, SIZE, BLOCK_S), PRECISION)
    t = _squared(t1, PRECISION)
    if HEAT:
        slope = _matrix(heat + (HEADS + head) * SIZE * SIZE, SIZE, BLOCK_S)
        along = _product(slope, g, PRECISION) * _plus_diagonal(t, 1.0)
        tl.store(d_rates + tl.program_id(0), tl.sum(tl.sum(along, axis=1), axis=0))
        h = _matrix(heat + head * SIZE * SIZE, SIZE, BLOCK_S)
        g += _product(h, g, PRECISION)
        t += h + _product(h, t, PRECISION)
    for start in range(0, DIM, BLOCK_D):
        place, inside = _places(first, after, start, SIZE, DIM, HEADS, BLOCK_S, BLOCK_D)
        d_values = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        d_values += _product(tl.trans(t), d_values, PRECISION)
        tl.store(d_x + place, d_values.to(d_x.dtype.element_ty), mask=inside)
    g = _squared_gradient(g, t1, PRECISION)
    g = _squared_gradient(g, _matrix(turned + matrix, SIZE, BLOCK_S), PRECISION)
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
    a, a2, scale = _scaled(_skew(q_re, q_im, k_re, k_im, PRECISION) * WEIGHT, PRECISION)
    g = _matrix(d_turned + tl.program_id(0).to(tl.int64) * SIZE * SIZE, SIZE, BLOCK_S)
    d_a = _skew_gradient(g, a, a2, scale, PRECISION)
    d_kernel = (d_a - tl.trans(d_a)) * (0.5 * scale * WEIGHT)
    # Read once more: the cache is faster than registers that spill.
    q_re, q_im, k_re, k_im = _turned(
        projected, turns, first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F, AGAIN=True
    )
    d_re, d_im = _product(d_kernel, k_re, PRECISION), _product(d_kernel, k_im, PRECISION)
    _store_turned_back(d_projected, turns, d_re, d_im, 0, first, after, SIZE, FREQUENCIES, HEADS, BLOCK_S, BLOCK_F)
    d_re, d_im = -_product(d_kernel, q_re, PRECISION), -_product(d_kernel, q_im, PRECISION)
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
def _product(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a @ b in float32: exactly, or as three products of TF32 numbers, a number being the sum of two of them."""
    if PRECISION == "ieee":
        return tl.dot(a, b, input_precision="ieee")
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        a_high, b_high = _rounded(a), _rounded(b)
        acc = tl.dot(a - a_high, b_high, input_precision="tf32")
        acc = tl.dot(a_high, b - b_high, acc=acc, input_precision="tf32")
        return tl.dot(a_high, b_high, acc=acc, input_precision="tf32")


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """Return x to the ten bits of TF32, to nearest: the remainder has either sign, and what is cut off it no bias."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _plus_diagonal(matrix: tl.tensor, value: tl.constexpr) -> tl.tensor:
    i, j = tl.arange(0, matrix.shape[0])[:, None], tl.arange(0, matrix.shape[0])[None, :]
    return tl.where(i == j, matrix + value, matrix)


@triton.jit
def _skew(q_re: tl.tensor, q_im: tl.tensor, k_re: tl.tensor, k_im: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return the skew part of Re Σ_c q_ic* k_jc."""
    kernel = _product(q_re, tl.trans(k_re), PRECISION) + _product(q_im, tl.trans(k_im), PRECISION)
    return 0.5 * (kernel - tl.trans(kernel))


@triton.jit
def _scaled(skew: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a = scale·A, a², and the scale, which brings the angles of a below 1."""
    square = _product(skew, skew, PRECISION)
    bound = tl.max(tl.sum(tl.abs(square), axis=1), axis=0)
    scale = tl.where(bound > BOUND, 1.0 / tl.sqrt(bound), BOUND**-0.5)
    return skew * scale, square * (scale * scale), scale


@triton.jit
def _factor(a: tl.tensor, a2: tl.tensor, a3: tl.tensor) -> tl.tensor:
    """Return L = c₆ + c₇ a + c₈ a² + c₉ a³."""
    return _plus_diagonal(a * C7 + a2 * C8 + a3 * C9, C6)


@triton.jit
def _polynomial(a: tl.tensor, a2: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a³, M and p(a), by Paterson and Stockmeyer's scheme."""
    a3 = _product(a, a2, PRECISION)
    m = _plus_diagonal(a * C4 + a2 * C5, C3) + _product(a3, _factor(a, a2, a3), PRECISION)
    return a3, m, a + 0.5 * a2 + _product(a3, m, PRECISION)


@triton.jit
def _skew_gradient(g: tl.tensor, a: tl.tensor, a2: tl.tensor, scale: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a matrix whose skew part is that of the gradient of A, over the scale, from the gradient g of p(a)."""
    a3, m, _ = _polynomial(a, a2, PRECISION)
    d_a3 = _product(g, tl.trans(m), PRECISION)
    d_m = -_product(a3, g, PRECISION)
    d_a3 += _product(d_m, tl.trans(_factor(a, a2, a3)), PRECISION)
    d_l = -_product(a3, d_m, PRECISION)
    d_a3 += d_l * C9
    y = _product(a, 0.5 * (d_a3 - tl.trans(d_a3)), PRECISION)
    d_a, d_a2 = g + d_m * C4 + d_l * C7, 0.5 * g + d_m * C5 + d_l * C8
    # Through the scale, bound^(−1/2) where it was needed: a, a² and a³ carry it once, twice and three times.
    d_scale = tl.sum(tl.sum(d_a * a + (2.0 * d_a2 - 3.0 * y) * a2, axis=1), axis=0)
    rows = tl.sum(tl.abs(a2), axis=1)
    largest = tl.where(rows == tl.max(rows, axis=0), 1.0, 0.0)
    share = tl.where(scale < BOUND**-0.5, -0.5 * d_scale, 0.0) * largest / tl.sum(largest, axis=0)
    d_a2 += share[:, None] * tl.where(a2 > 0, 1.0, tl.where(a2 < 0, -1.0, 0.0)) - y
    return d_a + _product(a, y - d_a2 - tl.trans(d_a2), PRECISION)


@triton.jit
def _squared(t: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return (I + T)² − I."""
    return 2.0 * t + _product(t, t, PRECISION)


@triton.jit
def _squared_gradient(g: tl.tensor, t: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    return 2.0 * g + _product(g, tl.trans(t), PRECISION) + _product(tl.trans(t), g, PRECISION)

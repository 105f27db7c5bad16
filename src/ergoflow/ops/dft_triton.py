"""Discrete Fourier transforms in the registers of a kernel, of N = L² complex numbers with L = 8 or 16.

    X[c] = Σ_n x[n] exp(SIGN·2πi·n·c/N),     SIGN = −1 or 1, never divided by N.

The numbers of one transform lie in L lanes of L registers: register a of lane b holds number L·a + b. With c = L·d + e
the sum falls into two of length L,

    X[L·d + e] = Σ_b exp(SIGN·2πi·b·d/L) · exp(SIGN·2πi·b·e/N) · Σ_a x[L·a + b] exp(SIGN·2πi·a·e/L),

so that a DFT of length L in registers, an exchange of lanes and registers through shared memory, a twiddle factor and a
second DFT give the transform in the same order: register d of lane e holds X[L·d + e]. The DFT of length 16 is 4 × 4,
that of length 8 is 4 × 2, and neither leaves its lane.

LANES is L, and TILE transforms are done at a time. Registers are a tuple or the last axis of an array; the elements of
each, LANES·TILE of them, are numbered tile by tile or lane by lane.
"""

# Triton builds tuples by addition; it does not know the star.
# ruff: noqa: RUF005

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.numerics.fourier import TWO_PI


def twiddle_factors(size: int) -> Tensor:
    """Return the cosines and sines of 2π·a·b/N, (2, L, L), in float32."""
    index = torch.arange(math.isqrt(size), dtype=torch.float64)
    angle = TWO_PI / size * index[:, None] * index[None, :]
    return torch.stack((angle.cos(), angle.sin())).float()


@triton.jit
def transform_registers(
    x: tl.tensor, w: tl.tensor, TILE: tl.constexpr, LANES: tl.constexpr, SIGN: tl.constexpr
) -> tl.tensor:
    """Transform a tuple of registers (re, im), elements numbered tile by tile, with the twiddle factors w."""
    x = _dft(x, LANES, SIGN)
    re: tl.tensor = ()
    im: tl.tensor = ()
    for a in tl.static_range(LANES):
        re = re + (x[a][0],)
        im = im + (x[a][1],)
    # (TILE, lanes, registers) with the last two exchanged.
    re = tl.permute(tl.reshape(_stack(re, LANES), [TILE, LANES, LANES]), (0, 2, 1))
    im = tl.permute(tl.reshape(_stack(im, LANES), [TILE, LANES, LANES]), (0, 2, 1))
    re = _unstack(tl.reshape(re, [TILE * LANES, LANES]), LANES)
    im = _unstack(tl.reshape(im, [TILE * LANES, LANES]), LANES)
    x = ((re[0], im[0]),)
    for a in tl.static_range(1, LANES):
        x = x + (_times((re[a], im[a]), w[a][0], SIGN * w[a][1]),)
    return _dft(x, LANES, SIGN)


@triton.jit
def transform_stacked(
    re: tl.tensor,
    im: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    SIGN: tl.constexpr,
) -> tl.tensor:
    """Transform two (LANES·TILE, LANES) arrays of real and imaginary parts, elements numbered lane by lane."""
    re, im = _dft_stacked(re, im, LANES, SIGN)
    # (lanes, TILE, registers) with the outer two exchanged.
    re = tl.permute(tl.reshape(re, [LANES, TILE, LANES]), (2, 1, 0))
    im = tl.permute(tl.reshape(im, [LANES, TILE, LANES]), (2, 1, 0))
    re = tl.reshape(re, [TILE * LANES, LANES])
    im = tl.reshape(im, [TILE * LANES, LANES])
    cosine = tl.load(cosines)
    sine = SIGN * tl.load(sines)
    return _dft_stacked(re * cosine - im * sine, re * sine + im * cosine, LANES, SIGN)


@triton.jit
def _dft_stacked(re: tl.tensor, im: tl.tensor, LENGTH: tl.constexpr, SIGN: tl.constexpr) -> tl.tensor:
    re_in = _unstack(re, LENGTH)
    im_in = _unstack(im, LENGTH)
    x: tl.tensor = ()
    for a in tl.static_range(LENGTH):
        x = x + ((re_in[a], im_in[a]),)
    x = _dft(x, LENGTH, SIGN)
    re_out: tl.tensor = ()
    im_out: tl.tensor = ()
    for a in tl.static_range(LENGTH):
        re_out = re_out + (x[a][0],)
        im_out = im_out + (x[a][1],)
    return _stack(re_out, LENGTH), _stack(im_out, LENGTH)


@triton.jit
def _unstack(x: tl.tensor, LENGTH: tl.constexpr) -> tl.tensor:
    """Return the columns of (E, LENGTH) as a tuple."""
    if LENGTH == 16:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2, 2, 2]))
        e = _split8(even)
        o = _split8(odd)
        return (e[0], o[0], e[1], o[1], e[2], o[2], e[3], o[3], e[4], o[4], e[5], o[5], e[6], o[6], e[7], o[7])
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        return _split8(tl.reshape(x, [x.shape[0], 2, 2, 2]))


@triton.jit
def _stack(x: tl.tensor, LENGTH: tl.constexpr) -> tl.tensor:
    """Return a tuple of (E,) as (E, LENGTH)."""
    if LENGTH == 16:
        even = _join8(x[0], x[2], x[4], x[6], x[8], x[10], x[12], x[14])
        odd = _join8(x[1], x[3], x[5], x[7], x[9], x[11], x[13], x[15])
        return tl.reshape(tl.join(even, odd), [x[0].shape[0], 16])
    else:  # noqa: RET505
        return tl.reshape(_join8(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]), [x[0].shape[0], 8])


@triton.jit
def _split8(x: tl.tensor) -> tl.tensor:
    """Return the eight tensors behind the last three axes, each of length 2."""
    even, odd = tl.split(x)
    even0, even1 = tl.split(even)
    odd0, odd1 = tl.split(odd)
    x0, x4 = tl.split(even0)
    x2, x6 = tl.split(even1)
    x1, x5 = tl.split(odd0)
    x3, x7 = tl.split(odd1)
    return (x0, x1, x2, x3, x4, x5, x6, x7)


@triton.jit
def _join8(
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    x3: tl.tensor,
    x4: tl.tensor,
    x5: tl.tensor,
    x6: tl.tensor,
    x7: tl.tensor,
) -> tl.tensor:
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.join(even, odd)


@triton.jit
def _dft(x: tl.tensor, LENGTH: tl.constexpr, SIGN: tl.constexpr) -> tl.tensor:
    """Return Σ_a x[a] exp(SIGN·2πi·a·c/LENGTH) for c = 0 .. LENGTH − 1, a tuple of (re, im) like x."""
    if LENGTH == 16:
        return _dft16(x, SIGN)
    else:  # noqa: RET505
        return _dft8(x, SIGN)


@triton.jit
def _dft16(x: tl.tensor, SIGN: tl.constexpr) -> tl.tensor:
    COS: tl.constexpr = 0.9238795325112867  # of π/8
    SIN: tl.constexpr = 0.3826834323650898
    HALF: tl.constexpr = 0.7071067811865476  # √½
    a0, a1, a2, a3 = _dft4(x[0], x[4], x[8], x[12], SIGN)
    b0, b1, b2, b3 = _dft4(x[1], x[5], x[9], x[13], SIGN)
    c0, c1, c2, c3 = _dft4(x[2], x[6], x[10], x[14], SIGN)
    d0, d1, d2, d3 = _dft4(x[3], x[7], x[11], x[15], SIGN)
    b1, b2, b3 = _times(b1, COS, SIGN * SIN), _times(b2, HALF, SIGN * HALF), _times(b3, SIN, SIGN * COS)
    c1, c2, c3 = _times(c1, HALF, SIGN * HALF), _turn(c2, SIGN), _times(c3, -HALF, SIGN * HALF)
    d1, d2, d3 = _times(d1, SIN, SIGN * COS), _times(d2, -HALF, SIGN * HALF), _times(d3, -COS, -SIGN * SIN)
    y0, y4, y8, y12 = _dft4(a0, b0, c0, d0, SIGN)
    y1, y5, y9, y13 = _dft4(a1, b1, c1, d1, SIGN)
    y2, y6, y10, y14 = _dft4(a2, b2, c2, d2, SIGN)
    y3, y7, y11, y15 = _dft4(a3, b3, c3, d3, SIGN)
    return (y0, y1, y2, y3, y4, y5, y6, y7, y8, y9, y10, y11, y12, y13, y14, y15)


@triton.jit
def _dft8(x: tl.tensor, SIGN: tl.constexpr) -> tl.tensor:
    HALF: tl.constexpr = 0.7071067811865476  # √½
    a0, a1, a2, a3 = _dft4(x[0], x[2], x[4], x[6], SIGN)
    b0, b1, b2, b3 = _dft4(x[1], x[3], x[5], x[7], SIGN)
    b1, b2, b3 = _times(b1, HALF, SIGN * HALF), _turn(b2, SIGN), _times(b3, -HALF, SIGN * HALF)
    y0, y4 = _plus(a0, b0), _minus(a0, b0)
    y1, y5 = _plus(a1, b1), _minus(a1, b1)
    y2, y6 = _plus(a2, b2), _minus(a2, b2)
    y3, y7 = _plus(a3, b3), _minus(a3, b3)
    return (y0, y1, y2, y3, y4, y5, y6, y7)


@triton.jit
def _dft4(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, SIGN: tl.constexpr) -> tl.tensor:
    p, q = _plus(a, c), _minus(a, c)
    r, s = _plus(b, d), _turn(_minus(b, d), SIGN)
    return _plus(p, r), _plus(q, s), _minus(p, r), _minus(q, s)


@triton.jit
def _plus(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a[0] + b[0], a[1] + b[1]


@triton.jit
def _minus(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a[0] - b[0], a[1] - b[1]


@triton.jit
def _turn(a: tl.tensor, SIGN: tl.constexpr) -> tl.tensor:
    """Return SIGN·i·a."""
    return -SIGN * a[1], SIGN * a[0]


@triton.jit
def _times(a: tl.tensor, re: tl.tensor, im: tl.tensor) -> tl.tensor:
    return a[0] * re - a[1] * im, a[0] * im + a[1] * re

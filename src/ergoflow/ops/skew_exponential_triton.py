"""The exponential of a small skew matrix inside a kernel, exp(A) − I, and its gradient: products alone.

It takes six products where the reference in `ergoflow.ops.transport` takes eight. In float32 a polynomial may err by
1e-8, and the angles of a skew matrix lie on the imaginary axis alone: there

    exp(a) − I ≈ p(a) = a + a²/2 + a³ M,     M = Σ_{n=3}^{9} c_n a^{n−3},

c_n the Chebyshev fit for angles up to 1, followed by two squarings, is orthogonal to 3e-8 at the angle 4, where it is
worst, and to 3e-10 up to the angle 2; Taylor's polynomial would need four squarings.

The gradient goes back through every product. With G the gradient of the result of each step, aᵀ = −a, and
L = c₆ + c₇ a + c₈ a² + c₉ a³, so that M = c₃ + c₄ a + c₅ a² + a³ L,

    T' = 2T + TT     dT = 2G + G Tᵀ + Tᵀ G
    p(a)             dM = −a³ G,  dL = −a³ dM,  da³ = G Mᵀ + dM Lᵀ + c₉ dL
    a³ = a a²        da² −= Y,  Y = a B,  B the skew part of da³: a³ is skew whatever a is
    a² = a a         da += a (Y − da² − da²ᵀ), of which the skew part is the gradient of A.

A large A is scaled by its bound, which has a gradient too. A product in float32 is three of TF32 (2⁻²² of each summand
is lost) or exact, as PRECISION says ("tf32x3" or "ieee"); what is added to a product is added after it, rounded to
nearest: the matrix units cut off instead of rounding, and would shrink whatever they accumulate onto.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ergoflow.ops.transport import MAX_ANGLE

# Bound on ‖A‖², beyond which A is scaled down; after the scaling two squarings end at MAX_ANGLE.
BOUND = tl.constexpr(MAX_ANGLE**2)
# Even coefficients fit (cos y − 1 + y²/2)/y⁴, odd ones (sin y − y)/y³, at the Chebyshev nodes of y² in (0, 1).
C3, C4, C5 = tl.constexpr(0.1666666665), tl.constexpr(0.04166665815), tl.constexpr(0.008333327149)
C6, C7 = tl.constexpr(0.001388735565), tl.constexpr(0.0001983817424)
C8, C9 = tl.constexpr(2.439173083e-5), tl.constexpr(2.706066854e-6)


@triton.jit
def scaled_down(skew: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a = scale·A, a², and the scale, which brings the angles of a below 1."""
    square = float32_product(skew, skew, PRECISION)
    bound = tl.max(tl.sum(tl.abs(square), axis=1), axis=0)
    scale = tl.where(bound > BOUND, 1.0 / tl.sqrt(bound), BOUND**-0.5)
    return skew * scale, square * (scale * scale), scale


@triton.jit
def polynomial(a: tl.tensor, a2: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a³, M and p(a), by Paterson and Stockmeyer's scheme."""
    a3 = float32_product(a, a2, PRECISION)
    m = plus_diagonal(a * C4 + a2 * C5, C3) + float32_product(a3, _factor(a, a2, a3), PRECISION)
    return a3, m, a + 0.5 * a2 + float32_product(a3, m, PRECISION)


@triton.jit
def skew_gradient(g: tl.tensor, a: tl.tensor, a2: tl.tensor, scale: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a matrix whose skew part is that of the gradient of A, over the scale, from the gradient g of p(a)."""
    a3, m, _ = polynomial(a, a2, PRECISION)
    d_a3 = float32_product(g, tl.trans(m), PRECISION)
    d_m = -float32_product(a3, g, PRECISION)
    d_a3 += float32_product(d_m, tl.trans(_factor(a, a2, a3)), PRECISION)
    d_l = -float32_product(a3, d_m, PRECISION)
    d_a3 += d_l * C9
    y = float32_product(a, 0.5 * (d_a3 - tl.trans(d_a3)), PRECISION)
    d_a, d_a2 = g + d_m * C4 + d_l * C7, 0.5 * g + d_m * C5 + d_l * C8
    # Through the scale, bound^(−1/2) where it was needed: a, a² and a³ carry it once, twice and three times.
    d_scale = tl.sum(tl.sum(d_a * a + (2.0 * d_a2 - 3.0 * y) * a2, axis=1), axis=0)
    rows = tl.sum(tl.abs(a2), axis=1)
    largest = tl.where(rows == tl.max(rows, axis=0), 1.0, 0.0)
    share = tl.where(scale < BOUND**-0.5, -0.5 * d_scale, 0.0) * largest / tl.sum(largest, axis=0)
    d_a2 += share[:, None] * tl.where(a2 > 0, 1.0, tl.where(a2 < 0, -1.0, 0.0)) - y
    return d_a + float32_product(a, y - d_a2 - tl.trans(d_a2), PRECISION)


@triton.jit
def squared(t: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return (I + T)² − I."""
    return 2.0 * t + float32_product(t, t, PRECISION)


@triton.jit
def squared_gradient(g: tl.tensor, t: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return the gradient of T from the gradient g of (I + T)² − I."""
    return 2.0 * g + float32_product(g, tl.trans(t), PRECISION) + float32_product(tl.trans(t), g, PRECISION)


@triton.jit
def float32_product(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return a @ b in float32: exactly, or as three products of TF32 numbers, a number being the sum of two of them."""
    if PRECISION == "ieee":
        return tl.dot(a, b, input_precision="ieee")
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        a_high, b_high = _rounded(a), _rounded(b)
        acc = tl.dot(a - a_high, b_high, input_precision="tf32")
        acc = tl.dot(a_high, b - b_high, acc=acc, input_precision="tf32")
        return tl.dot(a_high, b_high, acc=acc, input_precision="tf32")


@triton.jit
def plus_diagonal(matrix: tl.tensor, value: tl.constexpr) -> tl.tensor:
    """Return the matrix with `value` added to each number of its diagonal."""
    i, j = tl.arange(0, matrix.shape[0])[:, None], tl.arange(0, matrix.shape[0])[None, :]
    return tl.where(i == j, matrix + value, matrix)


@triton.jit
def _factor(a: tl.tensor, a2: tl.tensor, a3: tl.tensor) -> tl.tensor:
    """Return L = c₆ + c₇ a + c₈ a² + c₉ a³."""
    return plus_diagonal(a * C7 + a2 * C8 + a3 * C9, C6)


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """Return x to the ten bits of TF32, to nearest: the remainder has either sign, and what is cut off it no bias."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)

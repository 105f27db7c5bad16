"""Legendre multiwavelets on dyadic grids: the filters and one level of the transform in the plane.

The functions φ_i(x) = √(2i + 1) P_i(2x − 1), i < k, are an orthonormal basis of the polynomials of degree < k
on [0, 1]. Halving the interval gives twice as many functions, and (Alpert 1993; Gupta, Xiao and Bogdan 2021,
section 2)

    φ_i(x) = √2 Σ_j H0_ij φ_j(2x) + H1_ij φ_j(2x − 1)
    ψ_i(x) = √2 Σ_j G0_ij φ_j(2x) + G1_ij φ_j(2x − 1),

where the wavelets ψ_i, orthonormal and orthogonal to every polynomial of degree < k, span what the halving
added. So the coefficients of a function on a pair of neighbouring intervals become its coefficients s on their
union and details d,

    [s; d] = W [left; right],    W = [H0 H1; G0 G1],    WᵀW = I.

In the plane the bases are products, index (i, j) → i·k + j with i along x, and a level has four bands of k²
coefficients per cell: smooth-smooth, smooth-detail, detail-smooth, detail-detail. Coefficients have the
shape (B, X, Y, F), F = copies·k²: any number of functions side by side, the basis index fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def scaling_functions(order: int, x: Tensor) -> Tensor:
    """Return φ_i(x) = √(2i + 1) P_i(2x − 1) for i < order, (order, *x.shape), zero outside [0, 1)."""
    t = 2 * x - 1
    # Bonnet's recursion (i + 1) P_{i+1} = (2i + 1) t P_i − i P_{i−1}.
    polynomials = [torch.ones_like(t), t]
    for i in range(1, order - 1):
        polynomials.append(((2 * i + 1) * t * polynomials[i] - i * polynomials[i - 1]) / (i + 1))
    inside = (x >= 0) & (x < 1)
    return torch.stack([math.sqrt(2 * i + 1) * p * inside for i, p in enumerate(polynomials[:order])])


def wavelet_functions(order: int, x: Tensor) -> Tensor:
    """Return ψ_i(x) = √2 Σ_j G0_ij φ_j(2x) + G1_ij φ_j(2x − 1) for i < order, (order, *x.shape)."""
    details = two_scale_matrix(order)[order:].to(x)  # (k, 2k)
    halves = torch.cat([scaling_functions(order, 2 * x), scaling_functions(order, 2 * x - 1)])  # (2k, *x.shape)
    return math.sqrt(2) * torch.tensordot(details, halves, dims=1)


def two_scale_matrix(order: int) -> Tensor:
    """Return W = [H0 H1; G0 G1], (2k, 2k), float64 and orthogonal to round-off.

    H0_ij = 2^(−1/2) ∫ φ_i(t/2) φ_j(t) dt, exact by Gauss-Legendre quadrature with k points, and H1 by reflection.
    The wavelets are only fixed up to a rotation among themselves. Here, as in the paper, they are what the
    Gram-Schmidt process makes of the functions √2 φ_i(2x), i = 0, 1, ..., after the polynomials.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1, got {order}; choose 1 for Haar's wavelet, 4 as in the paper")
    nodes, weights = np.polynomial.legendre.leggauss(order)  # on [−1, 1]
    t = torch.from_numpy((nodes + 1) / 2)
    fine = scaling_functions(order, t) * torch.from_numpy(weights / 2)
    # φ_i(t/2) has degree i, so it is orthogonal to every φ_j with j > i.
    left = torch.tril(scaling_functions(order, t / 2) @ fine.T) / math.sqrt(2)
    # φ_i(1 − x) = (−1)^i φ_i(x)
    parity = (-1.0) ** torch.arange(order, dtype=torch.float64)
    smooth = torch.cat([left, parity[:, None] * left * parity], dim=1)  # (k, 2k)
    # Householder's QR is Gram-Schmidt up to signs, and stays orthogonal for large orders.
    q, r = torch.linalg.qr(torch.cat([smooth.T, torch.eye(2 * order, order, dtype=torch.float64)], dim=1))
    details = (q * torch.sign(torch.diagonal(r))).T[order:]  # (k, 2k)
    return torch.cat([smooth, details])


def plane_filters(order: int) -> Tensor:
    """Return the filters (2, 2, k², 4k²) in float64: band [a, b] of a cell from its four children.

    Band a is along x and b along y; 0 is smooth, 1 is detail. Children come in the order (left, left),
    (left, right), (right, left), (right, right), k² coefficients each. All four bands together, flattened to
    (4k², 4k²), are an orthogonal matrix.
    """
    line = two_scale_matrix(order).reshape(2, order, 2, order)  # (band, i, half, j)
    plane = torch.einsum("aihj,bmgn->abimhgjn", line, line)
    return plane.reshape(2, 2, order**2, 4 * order**2)


def analyse(x: Tensor, filters: Tensor) -> Tensor:
    """Return the bands (Z, B, X/2, Y/2, F) of the coefficients x (B, X, Y, F) for filters (Z, k², 4k²)."""
    B, X, Y, F = x.shape
    bands, basis, _ = filters.shape
    pairs = x.reshape(B, X // 2, 2, Y // 2, 2, F // basis, basis)
    children = pairs.permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, 4 * basis)  # (B·X/2·Y/2·copies, 4k²)
    # One batched product: both bands in one launch, each of them contiguous.
    out = torch.bmm(children.expand(bands, -1, -1), filters.mT)  # (Z, B·X/2·Y/2·copies, k²)
    return out.reshape(bands, B, X // 2, Y // 2, F)


def synthesise(bands: Sequence[Tensor], filters: Tensor) -> Tensor:
    """Return the coefficients (B, 2X, 2Y, F) of bands (B, X, Y, F), the transpose of `analyse`.

    With all four bands it is the inverse of `analyse`, with fewer a part of it: synthesise(analyse(x)) is then
    the orthogonal projection of x on the span of these bands.
    """
    B, X, Y, F = bands[0].shape
    basis = filters.shape[1]
    parents = torch.cat([band.reshape(-1, basis) for band in bands], dim=-1)  # (B·X·Y·copies, Z·k²)
    children = parents @ filters.flatten(0, 1)  # (B·X·Y·copies, 4k²)
    cells = children.reshape(B, X, Y, F // basis, 2, 2, basis)
    return cells.permute(0, 1, 4, 2, 5, 3, 6).reshape(B, 2 * X, 2 * Y, F)

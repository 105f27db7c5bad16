"""Layer norm over the channels and its gradient in Triton: what follows the convolution of `ergoflow.ops.depthwise`.

    z = γ r(y − μ) + β,     r = 1/√(σ² + eps),     μ and σ² of the D channels of a point,

all in float32, whatever comes and goes. A tile is points with all their channels, covered by a power of two. The
gradient makes μ and r again, in programs that walk over the tiles: each adds up its share of the gradients of γ and β,
and the sum of that of y, which is the gradient of the bias before the norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.tiles_triton import block


class NormSettings(NamedTuple):
    """Numbers of a tile, which are points with all their channels, and warps of a program."""

    size: int
    warps: int


NORM_SETTINGS = NormSettings(size=2048, warps=4)
NORM_GRADIENT_SETTINGS = NormSettings(size=2048, warps=4)
# Programs that walk, as many as run at a time on 132 multiprocessors: four on each.
NORM_PROGRAMS = 528


def layer_norm(y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return z = γ r(y − μ) + β in the dtype of y (B, *grid, D), contiguous."""
    dim = y.shape[-1]
    rows, width = y.numel() // dim, block(dim)
    points = max(1, NORM_SETTINGS.size // width)
    z = torch.empty_like(y)
    _norm_kernel[(triton.cdiv(rows, points),)](
        y,
        weight,
        bias,
        z,
        rows,
        eps,
        DIM=dim,
        POINTS=points,
        BLOCK_D=width,
        num_warps=NORM_SETTINGS.warps,
        num_stages=1,
    )
    return z


def layer_norm_gradient(d_z: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of y, and in float32 those of γ and β and the sum over all points of that of y."""
    dim = y.shape[-1]
    rows, width = y.numel() // dim, block(dim)
    points = max(1, NORM_GRADIENT_SETTINGS.size // width)
    programs = min(triton.cdiv(rows, points), NORM_PROGRAMS)
    d_y = torch.empty_like(y)
    parts = torch.empty(3, programs, dim, device=y.device, dtype=torch.float32)
    _norm_gradient_kernel[(programs,)](
        d_z,
        y,
        weight,
        d_y,
        parts,
        rows,
        eps,
        DIM=dim,
        POINTS=points,
        BLOCK_D=width,
        num_warps=NORM_GRADIENT_SETTINGS.warps,
        num_stages=1,
    )
    d_weight, d_bias, total = parts.sum(1)
    return d_y, d_weight, d_bias, total


@triton.jit
def _norm_kernel(
    y: tl.tensor,  # (rows, dim)
    weight: tl.tensor,  # (dim,)
    bias: tl.tensor,  # (dim,)
    z: tl.tensor,  # (rows, dim)
    rows: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * POINTS
    n, d = tl.arange(0, POINTS), tl.arange(0, BLOCK_D)
    inside = (n[:, None] < rows - start) & (d[None, :] < DIM)
    place = n[:, None] * DIM + d[None, :]
    values = tl.load(y + start * DIM + place, mask=inside, other=0.0).to(tl.float32)
    gap, rate = _centred(values, inside, DIM, eps)
    scale = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=d < DIM, other=0.0).to(tl.float32)
    normed = gap * rate[:, None] * scale[None, :] + shift[None, :]
    tl.store(z + start * DIM + place, normed.to(z.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gradient_kernel(
    d_z: tl.tensor,  # (rows, dim)
    y: tl.tensor,  # (rows, dim)
    weight: tl.tensor,  # (dim,)
    d_y: tl.tensor,  # (rows, dim)
    parts: tl.tensor,  # (3, programs, dim), float32
    rows: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    n, d = tl.arange(0, POINTS), tl.arange(0, BLOCK_D)
    place = n[:, None] * DIM + d[None, :]
    scale = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    d_weight = tl.zeros((POINTS, BLOCK_D), tl.float32)
    d_bias = tl.zeros((POINTS, BLOCK_D), tl.float32)
    total = tl.zeros((POINTS, BLOCK_D), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, POINTS), tl.num_programs(0)):
        start = tl.full((), tile, tl.int64) * POINTS
        inside = (n[:, None] < rows - start) & (d[None, :] < DIM)
        values = tl.load(y + start * DIM + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(d_z + start * DIM + place, mask=inside, other=0.0).to(tl.float32)
        gap, rate = _centred(values, inside, DIM, eps)
        normed = gap * rate[:, None]
        d_weight += g * normed
        d_bias += g
        # d_y = r (γg − ⟨γg⟩ − ŷ⟨γg ŷ⟩) with ŷ = r(y − μ).
        g = g * scale[None, :]
        along = tl.sum(g * normed, axis=1) / DIM
        level = tl.sum(g, axis=1) / DIM
        result = tl.where(inside, rate[:, None] * (g - level[:, None] - normed * along[:, None]), 0.0)
        total += result
        tl.store(d_y + start * DIM + place, result.to(d_y.dtype.element_ty), mask=inside)
    target = parts + tl.program_id(0) * DIM + d
    tl.store(target, tl.sum(d_weight, axis=0), mask=d < DIM)
    tl.store(target + tl.num_programs(0) * DIM, tl.sum(d_bias, axis=0), mask=d < DIM)
    tl.store(target + 2 * tl.num_programs(0) * DIM, tl.sum(total, axis=0), mask=d < DIM)


@triton.jit
def _centred(values: tl.tensor, inside: tl.tensor, dim: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """Return values less their mean over the channels, zero outside, and the inverse deviation (N,)."""
    mean = tl.sum(values, axis=1) / dim
    gap = tl.where(inside, values - mean[:, None], 0.0)
    return gap, 1.0 / tl.sqrt(tl.sum(gap * gap, axis=1) / dim + eps)

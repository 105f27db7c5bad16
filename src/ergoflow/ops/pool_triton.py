"""The Triton twin of `ergoflow.ops.pool`: projections live in registers, one tile at a time.

Forward: a program takes one coordinate s of one sample and BLOCK_E rows of w, walks over the R points of that
coordinate and keeps, for each of BLOCK_R lanes of points, the largest projection and the step at which it came; the
lanes are compared once, after the walk. Backward: the gradient of the projections is zero but at the places of the
maxima, so a tile of it is one comparison of places with positions; it is multiplied by w on the spot.

Every product accumulates in float32. `Settings` were the fastest of those that `ergoflow bench ops` tries on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import block, precision, product


class Settings(NamedTuple):
    """Points per tile, rows of w per tile, warps and pipeline stages of a kernel."""

    points: int
    rows: int
    warps: int
    stages: int


LARGEST_SETTINGS = Settings(points=64, rows=128, warps=4, stages=2)
GRADIENT_SETTINGS = Settings(points=64, rows=64, warps=4, stages=2)
# Rows of w per program, and (sample, coordinate) pairs per program, of the weight's gradient.
GATHER_ROWS, GATHER_PAIRS = 16, 64


def launch_largest(x: Tensor, weight: Tensor, settings: Settings | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (B, S, D), largest and place (B, S, E) for x (B, P, S, Q, D), contiguous, and weight (E, D)."""
    points, rows, warps, stages = settings or LARGEST_SETTINGS
    batch, before, size, after, dim = x.shape
    mean = x.new_empty(batch, size, dim)
    largest = x.new_empty(batch, size, len(weight))
    place = torch.empty(batch, size, len(weight), device=x.device, dtype=torch.int32)
    block_r = block(before * after, points)
    block_e = block(len(weight), rows)
    _largest_kernel[(triton.cdiv(len(weight), block_e), size, batch)](
        x,
        weight.contiguous(),
        mean,
        largest,
        place,
        before * after,
        size,
        after,
        dim,
        len(weight),
        BLOCK_R=block_r,
        BLOCK_E=block_e,
        BLOCK_D=block(dim),
        PRECISION=precision(x),
        num_warps=warps,
        num_stages=stages,
    )
    return mean, largest, place


def launch_gradient(
    x: Tensor,
    weights: Sequence[Tensor],
    places: Sequence[Tensor],
    axes: Sequence[int],
    d_means: Sequence[Tensor],
    d_largest: Sequence[Tensor],
    settings: Settings | None = None,
) -> list[Tensor]:
    """Return the gradients of x (B, *grid, D) and of each weight (E, D)."""
    points, rows, warps, stages = settings or GRADIENT_SETTINGS
    grid, dim = x.shape[1:-1], x.shape[-1]
    d_x = torch.empty_like(x)
    d_weights = []
    for i, (axis, weight, place) in enumerate(zip(axes, weights, places, strict=True)):
        _, size, after = sides(grid, axis)
        d_rows = d_largest[i].contiguous()
        block_n = block(grid.numel(), points)
        _features_gradient_kernel[(triton.cdiv(grid.numel(), block_n), len(x))](
            d_x,
            weight.contiguous(),
            place,
            d_rows,
            d_means[i].contiguous(),
            grid.numel(),
            size,
            after,
            dim,
            len(weight),
            size / grid.numel(),
            FIRST=i == 0,
            BLOCK_N=block_n,
            BLOCK_E=block(len(weight), rows),
            BLOCK_D=block(dim),
            PRECISION=precision(x),
            num_warps=warps,
            num_stages=stages,
        )
        d_weights.append(_weight_gradient(x, weight, place, d_rows, grid.numel()))
    return [d_x, *d_weights]


def _weight_gradient(x: Tensor, weight: Tensor, place: Tensor, d_rows: Tensor, points: int) -> Tensor:
    pairs, size = place.shape[0] * place.shape[1], place.shape[1]
    chunks = triton.cdiv(pairs, GATHER_PAIRS)
    parts = torch.empty(chunks, *weight.shape, device=x.device, dtype=torch.float32)
    _weight_gradient_kernel[(triton.cdiv(len(weight), GATHER_ROWS), chunks)](
        x,
        place,
        d_rows,
        parts,
        pairs,
        size,
        points,
        x.shape[-1],
        len(weight),
        PAIRS=GATHER_PAIRS,
        BLOCK_E=GATHER_ROWS,
        BLOCK_D=block(x.shape[-1]),
        num_warps=4,
    )
    return parts.sum(0).to(weight.dtype)


@triton.jit
def _largest_kernel(
    x: tl.tensor,  # (B, P, size, after, dim)
    weight: tl.tensor,  # (rows, dim)
    mean: tl.tensor,  # (B, size, dim)
    largest: tl.tensor,  # (B, size, rows)
    place: tl.tensor,  # (B, size, rows), int32
    count: tl.tensor,  # P·after points per coordinate
    size: tl.tensor,
    after: tl.tensor,
    dim: tl.tensor,
    rows: tl.tensor,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    s = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_R)
    w = tl.load(
        weight + e[None, :].to(tl.int64) * dim + d[:, None], mask=(d[:, None] < dim) & (e[None, :] < rows), other=0.0
    )  # (D, E)
    features = x + sample * count * size * dim
    best = tl.full((BLOCK_R, BLOCK_E), float("-inf"), tl.float32)
    step = tl.zeros((BLOCK_R, BLOCK_E), tl.int32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, count, BLOCK_R):
        r = start + lane
        point = (r // after * size + s) * after + r % after  # flat index within the sample
        tile = tl.load(
            features + point[:, None].to(tl.int64) * dim + d[None, :],
            mask=(r[:, None] < count) & (d[None, :] < dim),
            other=0.0,
        )
        total += tl.sum(tile.to(tl.float32), axis=0)
        projected = product(tile, w, tl.zeros((BLOCK_R, BLOCK_E), tl.float32), PRECISION)
        projected = tl.where(r[:, None] < count, projected, float("-inf"))
        # Strictly larger: the first of equals keeps the place. A number that is none wins, and is seen.
        better = (projected > best) | (projected != projected)
        best = tl.where(better, projected, best)
        step = tl.where(better, start, step)
    r = step + lane[:, None]  # (R, E): which of the points of s each lane's best was
    top = tl.max(best, axis=0)  # (E,)
    # Of the lanes that share the largest value the first point wins; `count` stands for none.
    first = tl.min(tl.where(best == top[None, :], r, count), axis=0)
    first = tl.minimum(first, count - 1)
    at = (first // after * size + s) * after + first % after
    out = (sample * size + s) * rows + e
    tl.store(largest + out, top.to(largest.dtype.element_ty), mask=e < rows)
    tl.store(place + out, at, mask=e < rows)
    if tl.program_id(0) == 0:
        line = mean + (sample * size + s) * dim + d
        tl.store(line, (total / count).to(mean.dtype.element_ty), mask=d < dim)


@triton.jit
def _features_gradient_kernel(
    d_x: tl.tensor,  # (B, points, dim)
    weight: tl.tensor,  # (rows, dim)
    place: tl.tensor,  # (B, size, rows), int32
    d_rows: tl.tensor,  # (B, size, rows)
    d_mean: tl.tensor,  # (B, size, dim)
    points: tl.tensor,
    size: tl.tensor,
    after: tl.tensor,
    dim: tl.tensor,
    rows: tl.tensor,
    share: tl.tensor,  # what the mean gives to each of its points
    FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sample = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < points) & (d[None, :] < dim)
    line = sample * size + n // after % size  # (N,): the row of place, d_rows and d_mean
    total = tl.load(d_mean + line[:, None] * dim + d[None, :], mask=inside, other=0.0).to(tl.float32) * share
    for start in range(0, rows, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        known = (n[:, None] < points) & (e[None, :] < rows)
        at = tl.load(place + line[:, None] * rows + e[None, :], mask=known, other=-1)
        gradient = tl.load(d_rows + line[:, None] * rows + e[None, :], mask=known & (at == n[:, None]), other=0.0)
        w = tl.load(
            weight + e[:, None].to(tl.int64) * dim + d[None, :],
            mask=(e[:, None] < rows) & (d[None, :] < dim),
            other=0.0,
        )
        total = product(gradient.to(w.dtype), w, total, PRECISION)
    target = d_x + (sample * points + n[:, None]) * dim + d[None, :]
    if not FIRST:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(d_x.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient_kernel(
    x: tl.tensor,  # (B, points, dim)
    place: tl.tensor,  # (B·size, rows), int32
    d_rows: tl.tensor,  # (B·size, rows)
    parts: tl.tensor,  # (chunks, rows, dim), float32
    pairs: tl.tensor,  # B·size
    size: tl.tensor,
    points: tl.tensor,
    dim: tl.tensor,
    rows: tl.tensor,
    PAIRS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    chunk = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for step in range(PAIRS):
        pair = chunk * PAIRS + step
        known = e < tl.where(pair < pairs, rows, 0)
        at = tl.load(place + pair * rows + e, mask=known, other=0)
        gradient = tl.load(d_rows + pair * rows + e, mask=known, other=0.0).to(tl.float32)
        row = pair // size * points + at  # (E,): where in x the maximum was taken
        features = tl.load(x + row[:, None] * dim + d[None, :], mask=known[:, None] & (d[None, :] < dim), other=0.0)
        total += gradient[:, None] * features.to(tl.float32)
    target = parts + (chunk * rows + e[:, None]) * dim + d[None, :]
    tl.store(target, total, mask=(e[:, None] < rows) & (d[None, :] < dim))

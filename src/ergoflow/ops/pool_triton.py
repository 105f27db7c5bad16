"""The Triton twin of `ergoflow.ops.pool`: projections live in registers, one tile at a time.

Forward: a program keeps w in shared memory and walks over coordinates, whose points arrive tile by tile meanwhile.
The rows of a tile of projections w xᵀ are rows of w, so that a thread holds many points of the same row and a maximum
is nearly all its own work: in half precision one comparison, because each projection carries the number of its point
in its last bits. The mean is one more product, of the same tile with ones.

Backward: the gradient of the projections is zero but at the places of the maxima. For the features, a tile of it is
one comparison of places with the points of one coordinate, and is multiplied by w, which stays in shared memory. For
w, the features are gathered from the places, those of several coordinates at a time.

Every product accumulates in float32. Shapes are constants of the compiled kernels: points are numbered by dividing by
them, and most are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import PROCESSORS, SHORTEST, block, precision, product


class Settings(NamedTuple):
    """Points and rows of w of a tile, warps, pipeline stages, and programs that a multiprocessor runs at a time."""

    points: int
    rows: int
    warps: int
    stages: int
    resident: int = 1


# Two programs to a multiprocessor: one compares while the other multiplies.
LARGEST_SETTINGS = Settings(points=64, rows=256, warps=8, stages=2, resident=2)
GRADIENT_SETTINGS = Settings(points=64, rows=256, warps=4, stages=1, resident=2)
# Rows of w and (sample, coordinate) pairs per program of the weight's gradient, and pairs in flight.
GATHER_ROWS, GATHER_PAIRS, GATHER_FLIGHT = 8, 64, 16
# Numbers of w that a program keeps in shared memory (256 rows of 128), and where exact products fill the registers.
KEPT, KEPT_EXACT = 2**15, 2**12


def launch_largest(x: Tensor, weight: Tensor, settings: Settings | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (B, S, D), largest and place (B, S, E) for x (B, P, S, Q, D), contiguous, and weight (E, D)."""
    settings = settings or LARGEST_SETTINGS
    batch, before, size, after, dim = x.shape
    mean = x.new_empty(batch, size, dim)
    largest = x.new_empty(batch, size, len(weight))
    place = torch.empty(batch, size, len(weight), device=x.device, dtype=torch.int32)
    block_e = _kept_rows(weight, settings.rows)
    blocks = triton.cdiv(len(weight), block_e)
    _largest_kernel[(blocks, _walkers(batch * size, settings, blocks))](
        x,
        weight.contiguous(),
        mean,
        largest,
        place,
        batch * size,
        count=before * after,
        size=size,
        after=after,
        dim=dim,
        rows=len(weight),
        BLOCK_R=block(before * after, settings.points),
        BLOCK_E=block_e,
        BLOCK_D=block(dim),
        PRECISION=precision(x),
        STAGES=settings.stages,
        num_warps=settings.warps,
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
    settings = settings or GRADIENT_SETTINGS
    d_x = torch.empty_like(x)
    d_weights = []
    for i, (axis, weight, place) in enumerate(zip(axes, weights, places, strict=True)):
        d_rows = d_largest[i].contiguous()
        add_features_gradient(d_x, axis, weight, place, d_rows, d_means[i], settings, first=i == 0)
        d_weights.append(weight_gradient(x, weight, place, d_rows))
    return [d_x, *d_weights]


def add_features_gradient(
    d_x: Tensor,
    axis: int,
    weight: Tensor,
    place: Tensor,
    d_rows: Tensor,
    d_mean: Tensor,
    settings: Settings,
    *,
    first: bool,
) -> None:
    """Add to d_x (B, *grid, D) what mean and largest of an axis give to it, or write it there if this is the first."""
    before, size, after = sides(d_x.shape[1:-1], axis)
    count, dim, block_e = before * after, d_x.shape[-1], _kept_rows(weight, settings.rows)
    pairs = d_x.shape[0] * size
    for start in range(0, len(weight), block_e):
        _features_gradient_kernel[(_walkers(pairs, settings),)](
            d_x,
            weight[start:].contiguous(),
            place[..., start:],
            d_rows[..., start:],
            d_mean.contiguous(),
            pairs,
            # The first block of rows brings the mean along.
            1 / count if start == 0 else 0.0,
            count=count,
            size=size,
            after=after,
            dim=dim,
            stride=len(weight),
            rows=min(len(weight) - start, block_e),
            FIRST=first and start == 0,
            BLOCK_R=block(count, settings.points),
            BLOCK_E=block_e,
            BLOCK_D=block(dim),
            PRECISION=precision(d_x),
            STAGES=settings.stages,
            num_warps=settings.warps,
        )


def weight_gradient(x: Tensor, weight: Tensor, place: Tensor, d_rows: Tensor) -> Tensor:
    """Return dw (E, D) of x (B, *grid, D), place and d_rows (B, S, E), contiguous."""
    batch, size, rows = place.shape
    chunks = triton.cdiv(batch * size, GATHER_PAIRS)
    parts = torch.empty(chunks, *weight.shape, device=x.device, dtype=torch.float32)
    _weight_gradient_kernel[(triton.cdiv(rows, GATHER_ROWS), chunks)](
        x,
        place,
        d_rows,
        parts,
        batch * size,
        points=x.shape[1:-1].numel(),
        size=size,
        dim=x.shape[-1],
        rows=rows,
        PAIRS=GATHER_PAIRS,
        FLIGHT=GATHER_FLIGHT,
        BLOCK_E=GATHER_ROWS,
        BLOCK_D=block(x.shape[-1]),
        num_warps=4,
    )
    return parts.sum(0).to(weight.dtype)


def _kept_rows(weight: Tensor, most: int) -> int:
    """Return how many rows of w a program keeps."""
    numbers = KEPT_EXACT if weight.dtype == torch.float32 else KEPT
    return block(len(weight), max(SHORTEST, min(most, numbers // block(weight.shape[1]))))


def _walkers(pairs: int, settings: Settings, blocks: int = 1) -> int:
    """Return how many programs share the (sample, coordinate) pairs, for each of the blocks of rows of w."""
    return min(pairs, triton.cdiv(PROCESSORS * settings.resident, blocks))


# Stands for projections of points beyond the last one: the lowest number whose last bits are free.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _largest_kernel(
    x: tl.tensor,  # (B, P, size, after, dim)
    weight: tl.tensor,  # (rows, dim)
    mean: tl.tensor,  # (B·size, dim)
    largest: tl.tensor,  # (B·size, rows)
    place: tl.tensor,  # (B·size, rows), int32
    pairs: tl.tensor,  # B·size
    count: tl.constexpr,  # P·after points per coordinate
    size: tl.constexpr,
    after: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    first, walkers = tl.program_id(1), tl.num_programs(1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_R)
    w = tl.load(
        weight + e[:, None].to(tl.int64) * dim + d[None, :], mask=(e[:, None] < rows) & (d[None, :] < dim), other=0.0
    )
    # As few columns as a product may have.
    ones = tl.full((BLOCK_R, 16), 1.0, tl.float32).to(x.dtype.element_ty)
    steps: tl.constexpr = (count + BLOCK_R - 1) // BLOCK_R
    best = tl.zeros((BLOCK_E,), tl.float32)
    best_r = tl.zeros((BLOCK_E,), tl.int32)
    total = tl.zeros((BLOCK_D, 16), tl.float32)  # the sum of the features, in each of the columns
    for i in tl.range(0, tl.cdiv(pairs - first, walkers) * steps, num_stages=STAGES):
        pair, step = first + i // steps * walkers, i % steps
        r = step * BLOCK_R + lane
        tile = tl.load(
            x + _rows_of(pair, r, count, size, after)[:, None] * dim + d[None, :],
            mask=(r[:, None] < count) & (d[None, :] < dim),
            other=0.0,
        )
        projected = product(w, tl.trans(tile), tl.zeros((BLOCK_E, BLOCK_R), tl.float32), PRECISION)
        sums = product(tl.trans(tile), ones, tl.zeros((BLOCK_D, 16), tl.float32), PRECISION)
        if count % BLOCK_R:
            projected = tl.where(r[None, :] < count, projected, LOWEST)
        top, top_lane = _largest(projected, lane, BLOCK_R, PRECISION)  # (E,)
        # Strictly larger: the first of equal tiles keeps the place. A number that is none wins, and is seen.
        better = (step == 0) | (top > best) | (top != top)
        best = tl.where(better, top, best)
        best_r = tl.where(better, step * BLOCK_R + top_lane, best_r)
        total = tl.where(step == 0, sums, total + sums)
        if step == steps - 1:
            out = pair.to(tl.int64) * rows + e
            at = _rows_of(pair % size, tl.minimum(best_r, count - 1), count, size, after)
            tl.store(largest + out, best.to(largest.dtype.element_ty), mask=e < rows)
            tl.store(place + out, at.to(tl.int32), mask=e < rows)
            # The programs of the first rows of w write the mean.
            column = tl.max(total, axis=1) / count
            known = d < tl.where(tl.program_id(0) == 0, dim, 0)
            tl.store(mean + pair.to(tl.int64) * dim + d, column.to(mean.dtype.element_ty), mask=known)


@triton.jit
def _rows_of(pair: tl.tensor, r: tl.tensor, count: tl.constexpr, size: tl.constexpr, after: tl.constexpr) -> tl.tensor:
    """Return the flat indices, int64, of the r-th points of a (sample, coordinate) pair among those of all samples."""
    return (pair // size).to(tl.int64) * (count * size) + (r // after * size + pair % size) * after + r % after


@triton.jit
def _largest(
    projected: tl.tensor, lane: tl.tensor, LANES: tl.constexpr, PRECISION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest number of each row and its lane, of equals the first.

    In half precision numbers that agree to all but the log2(LANES) last bits of float32 are equals (2⁻¹⁷ with 64 lanes;
    results are rounded to 2⁻⁹), and of negative ones the last lane wins: the lane takes the place of these bits, and
    one comparison decides on both. An infinite number becomes none.
    """
    if PRECISION == "ieee":
        top = tl.reduce(projected, 1, _larger)
        return top, tl.min(tl.where(projected == top[:, None], lane[None, :], LANES - 1), axis=1)
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        tagged = (projected.to(tl.int32, bitcast=True) & -LANES) | (LANES - 1 - lane)[None, :]
        top = tl.reduce(tagged.to(tl.float32, bitcast=True), 1, _larger)
        bits = top.to(tl.int32, bitcast=True)
        return (bits & -LANES).to(tl.float32, bitcast=True), LANES - 1 - (bits & (LANES - 1))


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _features_gradient_kernel(
    d_x: tl.tensor,  # (B, P, size, after, dim)
    weight: tl.tensor,  # (rows, dim)
    place: tl.tensor,  # (B·size, rows) int32, rows apart by `stride`
    d_rows: tl.tensor,  # the same in the dtype of x
    d_mean: tl.tensor,  # (B·size, dim)
    pairs: tl.tensor,  # B·size
    share: tl.tensor,  # what the mean gives to each of its points
    count: tl.constexpr,  # P·after points per coordinate
    size: tl.constexpr,
    after: tl.constexpr,
    dim: tl.constexpr,
    stride: tl.constexpr,
    rows: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    first, walkers = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_R)
    w = tl.load(
        weight + e[:, None].to(tl.int64) * dim + d[None, :], mask=(e[:, None] < rows) & (d[None, :] < dim), other=0.0
    )
    steps: tl.constexpr = (count + BLOCK_R - 1) // BLOCK_R
    for i in tl.range(0, tl.cdiv(pairs - first, walkers) * steps, num_stages=STAGES):
        pair = first + i // steps * walkers
        r = i % steps * BLOCK_R + lane
        inside = (r[:, None] < count) & (d[None, :] < dim)
        target = d_x + _rows_of(pair, r, count, size, after)[:, None] * dim + d[None, :]
        line = pair.to(tl.int64) * stride + e
        at = tl.load(place + line, mask=e < rows, other=0)
        gradient = tl.load(d_rows + line, mask=e < rows, other=0.0)
        lane_at = at // (size * after) * after + at % after - i % steps * BLOCK_R  # the lane of the place, if here
        spread = tl.where(lane_at[None, :] == lane[:, None], gradient[None, :], 0.0).to(w.dtype)  # (R, E)
        total = product(spread, w, tl.zeros((BLOCK_R, BLOCK_D), tl.float32), PRECISION)
        of_mean = tl.load(d_mean + pair.to(tl.int64) * dim + d, mask=d < dim, other=0.0).to(tl.float32) * share
        total += of_mean[None, :]
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
    points: tl.constexpr,
    size: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    PAIRS: tl.constexpr,
    FLIGHT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    first = tl.program_id(1) * PAIRS
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for step in tl.range(0, tl.minimum(PAIRS, pairs - first), loop_unroll_factor=FLIGHT):
        pair = first + step
        line = pair.to(tl.int64) * rows + e
        at = tl.load(place + line, mask=e < rows, other=0)
        gradient = tl.load(d_rows + line, mask=e < rows, other=0.0).to(tl.float32)
        row = (pair // size).to(tl.int64) * points + at  # (E,): where in x the maximum was taken
        features = tl.load(x + row[:, None] * dim + d[None, :], mask=d[None, :] < dim, other=0.0)
        total += gradient[:, None] * features.to(tl.float32)
    target = parts + (tl.program_id(1).to(tl.int64) * rows + e[:, None]) * dim + d[None, :]
    tl.store(target, total, mask=(e[:, None] < rows) & (d[None, :] < dim))

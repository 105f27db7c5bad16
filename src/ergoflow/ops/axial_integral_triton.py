"""The integral (1/S) Σ_j K_ij v_j of channel-last values (B, N, H·d) along a grid axis, in Triton.

Heads of the usual width go through Hopper's copy engine: a descriptor says how the values lie in memory, one thread
asks for a line of them, and neither addresses nor masks take registers; axes of the usual lengths have a kernel of
their own, in `axial_stream_triton`, and the first of them one that also makes the values, in `axial_value_triton`.
Other heads, longer axes and float32 take a kernel whose threads load by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ergoflow.ops.axial import HEAD_NORM_EPS
from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import (
    INTERPRETED,
    ProductSettings,
    block,
    can_describe,
    count_walkers,
    precision,
    product,
)

# The fastest of nine on an H200 for two axes together. Rows are the channels of a head, columns and summands the points
# i and j of a line: half of K stays in shared memory. (All of it would let every value be read once, not twice, but
# leaves room for two lines of values only.)
LINE_SETTINGS = ProductSettings(rows=64, columns=128, depth=256, warps=4, stages=4)
# In float32, and in half precision where an axis or a head has another length.
LONG_SETTINGS = ProductSettings(rows=128, columns=128, depth=64, warps=8, stages=3)
# The generation of GPUs whose matrix instructions `axial_stream_triton` uses; no other has them.
HOPPER = 9


def integrate(
    kernel: Tensor,
    values: Tensor,
    grid: Sequence[int],
    axis: int,
    *,
    out: Tensor | None = None,
    statistics: bool = False,
    settings: ProductSettings | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (1/S) Σ_j K_ij v_j along one axis of values (B, N, H·d), kernel (B, H, S, S) of any strides.

    Values and `out` may be some columns of wider fields. The second tensor is (B, H, parts, 3) in float32: the sum, the
    sum of squares about the mean, and the number of the results of each part; empty without `statistics`.
    """
    shape, head_dim = sides(grid, axis), values.shape[2] // kernel.shape[1]
    out = torch.empty_like(values) if out is None else out
    own = settings or LINE_SETTINGS
    if settings is None and _can_stream(kernel, values, out, shape):
        from ergoflow.ops.axial_stream_triton import stream

        # Twice as many programs as run at a time: those that wait for memory less than others take over.
        walkers = 2 * count_walkers(kernel.shape[0] * kernel.shape[1], shape[0] * shape[2] // 4, 1)
        return out, stream(kernel, values, out, shape, walkers, statistics=statistics)
    if head_dim == own.rows and shape[1] <= own.depth and can_describe(values, out):
        return out, _integrate_lines(kernel, values, out, shape, statistics, own)
    return out, _integrate_tiles(kernel, values, out, shape, statistics, settings or LONG_SETTINGS)


def integrate_values(
    kernel: Tensor, features: Tensor, value: Tensor, grid: Sequence[int], *, values: Tensor | None = None
) -> Tensor:
    """Return (1/S) Σ_j K_ij v_j along the first axis, v = x Wvᵀ being rounded; it is written to `values` if given.

    Features x are (B, N, D), the weight `value` is (H·d, D), the kernel (B, H, S, S).
    """
    shape, out = sides(grid, 0), features.new_empty(*features.shape[:2], len(value))
    if not _can_project(kernel, features, value, out, shape):
        return integrate(kernel, torch.matmul(features, value.mT, out=values), grid, 0, out=out)[0]
    from ergoflow.ops.axial_value_triton import project_and_integrate

    # Measured: as many programs as run at a time, and twice as many where they write two fields.
    walkers = (1 if values is None else 2) * count_walkers(kernel.shape[0] * kernel.shape[1], shape[2] // 4, 1)
    project_and_integrate(kernel, features, value, out, shape, walkers, values=values)
    return out


def _integrate_lines(
    kernel: Tensor, values: Tensor, out: Tensor, shape: tuple[int, int, int], statistics: bool, own: ProductSettings
) -> Tensor:
    """Integrate whole lines with all of K at hand; returns the moments."""
    before, size, after = shape
    (batch, heads), lines = kernel.shape[:2], before * after
    block_i, block_j = block(size, own.columns), block(size)
    blocks = triton.cdiv(size, block_i)
    # A shorter axis leaves room for more programs.
    walkers = count_walkers(blocks * heads * batch, lines, own.resident * own.depth // block_j)
    moments = values.new_empty(batch, heads, walkers * blocks if statistics else 0, 3, dtype=torch.float32)
    _line_kernel[(blocks, heads, batch * walkers)](
        kernel,
        _lines_of(values, shape, [1, block_j, 1, own.rows]),
        _lines_of(out, shape, [1, block_i, 1, own.rows]),
        moments,
        size,
        after,
        lines,
        walkers,
        heads,
        *kernel.stride(),
        1 / size,
        STATISTICS=statistics,
        FULL=size % block_i == 0,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        BLOCK_D=own.rows,
        PRECISION=precision(values),
        num_warps=own.warps,
        num_stages=own.stages,
    )
    return moments


def _integrate_tiles(
    kernel: Tensor, values: Tensor, out: Tensor, shape: tuple[int, int, int], statistics: bool, own: ProductSettings
) -> Tensor:
    """Integrate tiles of some points i and channels, a few j at a time; returns the moments."""
    before, size, after = shape
    (batch, heads), lines = kernel.shape[:2], before * after
    head_dim = values.shape[2] // heads
    block_d = triton.next_power_of_2(head_dim)
    block_l = max(1, min(block(lines * block_d), own.columns) // block_d)
    block_i, block_j = block(size, own.rows), block(size, own.depth)
    blocks = triton.cdiv(size, block_i)
    walkers = count_walkers(blocks * heads * batch, triton.cdiv(lines, block_l), own.resident)
    moments = values.new_empty(batch, heads, walkers * blocks if statistics else 0, 3, dtype=torch.float32)
    _tile_kernel[(blocks, heads, batch * walkers)](
        kernel,
        values,
        out,
        moments,
        size,
        after,
        lines,
        walkers,
        heads,
        head_dim,
        values.stride(1),
        out.stride(1),
        *kernel.stride(),
        1 / size,
        STATISTICS=statistics,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        BLOCK_L=block_l,
        BLOCK_D=block_d,
        PRECISION=precision(values),
        num_warps=own.warps,
        num_stages=own.stages,
    )
    return moments


def statistics_of(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return μ and (σ² + ε)^(−1/2), (B, H, 1), of parts (B, H, T, 3): sum, squares about the part's mean, number."""
    total, squares, count = moments.unbind(-1)  # (B, H, T) each
    number = count.sum(2, keepdim=True)
    mean = total.sum(2, keepdim=True) / number
    between = count * (total / count - mean).square()
    variance = (squares + between).sum(2, keepdim=True) / number
    return mean, (variance + HEAD_NORM_EPS).rsqrt()


def _can_stream(kernel: Tensor, values: Tensor, out: Tensor, shape: tuple[int, int, int]) -> bool:
    """Return whether `axial_stream_triton` takes these: the one place that says so."""
    if INTERPRETED or not values.is_cuda or not is_hopper(values.device):
        return False
    from ergoflow.ops.axial_stream_triton import BUFFERS, HEAD_DIM

    before, size, after = shape
    return (
        size in BUFFERS
        and before * after >= 4
        and values.shape[2] == HEAD_DIM * kernel.shape[1]
        and can_describe(values, out, kernel if kernel.stride(3) == 1 else kernel.mT)
    )


def _can_project(kernel: Tensor, features: Tensor, value: Tensor, out: Tensor, shape: tuple[int, int, int]) -> bool:
    """Return whether `axial_value_triton` takes these: the one place that says so. It streams lines too."""
    if kernel.stride(3) != 1 or not _can_stream(kernel, out, out, shape):
        return False
    from ergoflow.ops.axial_value_triton import FEATURES

    return features.shape[2] == FEATURES and can_describe(features, value)


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a GPU is one, and triton has the language to say so."""
    return torch.cuda.get_device_capability(device)[0] == HOPPER and find_spec("triton.experimental.gluon") is not None


def _lines_of(values: Tensor, shape: tuple[int, int, int], tile: list[int]) -> TensorDescriptor:
    """Describe values (B, N, H·d) on a grid (P, S, Q) as (B·P, S, Q, H·d)."""
    return TensorDescriptor.from_tensor(values.unflatten(1, shape).flatten(0, 1), tile)


@triton.jit
def _line_kernel(
    kernel: tl.tensor,  # (B, heads, size, size), any strides
    values: tl.tensor_descriptor,  # (B·P, size, after, heads·d)
    out: tl.tensor_descriptor,  # the same
    moments: tl.tensor,  # (B, heads, walkers, blocks of i, 3), float32
    size: tl.tensor,
    after: tl.tensor,
    lines: tl.tensor,  # P·after
    walkers: tl.tensor,
    heads: tl.tensor,
    stride_b: tl.tensor,
    stride_h: tl.tensor,
    stride_i: tl.tensor,
    stride_j: tl.tensor,
    scale: tl.tensor,
    STATISTICS: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Transposed, uᵀ = vᵀ Kᵀ: the channels of a line are the rows, and points i the columns of one product.

    A matrix instruction reads both its operands again for every 64 rows: with rows i it would wait for shared memory.
    The values pass through registers, which hold them while the next line takes their place.
    """
    # Blocks of i come first, then heads: those that read the same values, and the same rows of memory, run together.
    first_i = tl.program_id(0) * BLOCK_I
    head = tl.program_id(1)
    walker = tl.program_id(2) % walkers
    sample = tl.program_id(2) // walkers
    i = first_i + tl.arange(0, BLOCK_I)
    j = tl.arange(0, BLOCK_J)
    place = kernel + sample.to(tl.int64) * stride_b + head * stride_h
    place += j[:, None].to(tl.int64) * stride_j + i[None, :].to(tl.int64) * stride_i
    k = tl.load(place, mask=(j[:, None] < size) & (i[None, :] < size), other=0.0)
    outer = sample * (lines // after)
    # Of every channel and half of the points, about its own mean: no exchange between warps until the end.
    HALF: tl.constexpr = BLOCK_I // 2
    left = size - first_i - HALF * tl.arange(0, 2)
    number = tl.minimum(tl.maximum(left, 0), HALF).to(tl.float32)[None, :]
    known = tl.arange(0, HALF)[None, :] < left[:, None]
    count = 0.0
    mean = tl.zeros((BLOCK_D, 2), tl.float32)
    squares = tl.zeros((BLOCK_D, 2), tl.float32)
    for line in range(walker, lines, walkers):
        first, second = outer + line // after, line % after
        tile = values.load([first, 0, second, head * BLOCK_D]).reshape(BLOCK_J, BLOCK_D)
        acc = tl.zeros((BLOCK_D, BLOCK_I), tl.float32)
        result = product(tl.trans(tile), k, acc, PRECISION) * scale
        narrow = tl.trans(result.to(out.dtype)).reshape(1, BLOCK_I, 1, BLOCK_D)
        out.store([first, first_i, second, head * BLOCK_D], narrow)
        if STATISTICS:
            halves = result.reshape(BLOCK_D, 2, HALF)
            own = tl.sum(halves, axis=2) / tl.maximum(number, 1.0)
            gap = halves - own[:, :, None]
            if not FULL:
                gap = tl.where(known[None, :, :], gap, 0.0)
            share = 1 / (count + 1)
            shift = own - mean
            mean += shift * share
            squares += tl.sum(gap * gap, axis=2) + shift * shift * (number * count * share)
            count += 1
    if STATISTICS:
        total = tl.sum(mean * number) * count
        results = BLOCK_D * tl.sum(number) * count
        distance = mean - total / results
        spread = squares + count * number * distance * distance
        part = (sample.to(tl.int64) * heads + head) * walkers + walker
        place = moments + (part * tl.num_programs(0) + tl.program_id(0)) * 3
        tl.store(place, total)
        tl.store(place + 1, tl.sum(spread))
        tl.store(place + 2, results)


@triton.jit
def _tile_kernel(
    kernel: tl.tensor,  # (B, heads, size, size), any strides
    values: tl.tensor,  # (B, P, size, after, width), of which heads·head_dim are in use
    out: tl.tensor,  # (B, P, size, after, out_width)
    moments: tl.tensor,  # (B, heads, walkers, blocks of i, 3), float32
    size: tl.tensor,
    after: tl.tensor,
    lines: tl.tensor,  # P·after
    walkers: tl.tensor,
    heads: tl.tensor,
    head_dim: tl.tensor,
    width: tl.tensor,
    out_width: tl.tensor,
    stride_b: tl.tensor,
    stride_h: tl.tensor,
    stride_i: tl.tensor,
    stride_j: tl.tensor,
    scale: tl.tensor,
    STATISTICS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # Blocks of i come first, then heads: those that read the same values, and the same rows of memory, run together.
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    head = tl.program_id(1)
    walker = tl.program_id(2) % walkers
    sample = (tl.program_id(2) // walkers).to(tl.int64)
    column = tl.arange(0, BLOCK_L * BLOCK_D)
    channel = head * head_dim + column % BLOCK_D
    first_point = sample * lines * size
    weights = kernel + sample * stride_b + head * stride_h + i[:, None].to(tl.int64) * stride_i
    # Of every row i, about its own mean: no exchange between warps until the end.
    count = 0.0
    mean = tl.zeros((BLOCK_I,), tl.float32)
    squares = tl.zeros((BLOCK_I,), tl.float32)
    for first in range(walker * BLOCK_L, lines, walkers * BLOCK_L):
        line = first + column // BLOCK_D
        start = first_point + line // after * size * after + line % after
        known = (line < lines) & (column % BLOCK_D < head_dim)
        acc = tl.zeros((BLOCK_I, BLOCK_L * BLOCK_D), tl.float32)
        for first_j in range(0, size, BLOCK_J):
            j = first_j + tl.arange(0, BLOCK_J)
            part = tl.load(
                weights + j[None, :].to(tl.int64) * stride_j,
                mask=(i[:, None] < size) & (j[None, :] < size),
                other=0.0,
            )
            tile = tl.load(
                values + (start[None, :] + j[:, None] * after) * width + channel[None, :],
                mask=(j[:, None] < size) & known[None, :],
                other=0.0,
            )
            acc = product(part, tile, acc, PRECISION)
        result = acc * scale
        place = out + (start[None, :] + i[:, None] * after) * out_width + channel[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=(i[:, None] < size) & known[None, :])
        if STATISTICS:
            # Columns that do not exist are zero in the sums, and left out of the squares.
            number = (tl.minimum(BLOCK_L, lines - first) * head_dim).to(tl.float32)
            row_mean = tl.sum(result, axis=1) / number
            gap = tl.where(known[None, :], result - row_mean[:, None], 0.0)
            share = number / (count + number)
            shift = row_mean - mean
            mean += shift * share
            squares += tl.sum(gap * gap, axis=1) + shift * shift * count * share
            count += number
    if STATISTICS:
        inside = i < size
        rows = tl.sum(inside.to(tl.float32))
        centre = tl.sum(mean) / rows
        spread = tl.where(inside, squares + count * (mean - centre) * (mean - centre), 0.0)
        place = moments + (((sample * heads + head) * walkers + walker) * tl.num_programs(0) + tl.program_id(0)) * 3
        tl.store(place, centre * rows * count)
        tl.store(place + 1, tl.sum(spread))
        tl.store(place + 2, rows * count)

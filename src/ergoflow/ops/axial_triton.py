"""The Triton twin of `ergoflow.ops.axial`: channel-last values (B, N, H·d) throughout, no permuted copy anywhere.

The values are the large thing (134 MB per sample at 256² with 16 heads of 64 in bfloat16), and each of the steps

    v = x Wvᵀ  →  one product per axis  →  u  →  y = u (r Wm)ᵀ + shift

reads and writes them once. Only u is kept for the gradient; v and the partly integrated values are computed again, a
few samples, or a few heads of one, at a time. The products with dense weights are torch's own; here are the three
others: the integral along an axis (the last one also takes the statistics of u), the gradient of a kernel, and the
gradient of u, in which the head norm adds slope·u + offset to a product of two matrices.

Heads of the usual width go through Hopper's copy engine: a descriptor says how the values lie in memory, one thread
asks for a line of them, and neither addresses nor masks take registers. Other heads, longer axes and float32 take the
kernels whose threads load for themselves. Integrals along axes of the usual lengths have a kernel of their own, in
`axial_stream_triton`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ergoflow.ops.axial import HEAD_NORM_EPS, fold_norm, norm_gradient
from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import INTERPRETED, block, precision, product


class Settings(NamedTuple):
    """Rows, columns and summands of a tile, warps, pipeline stages, and programs that a multiprocessor runs at a time.

    A program keeps what stays the same in shared memory and walks over the tiles: the next values arrive while these
    are multiplied and stored. Triton's pipeline does so from three stages on.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    resident: int = 1


# Each was the fastest of some ten on an H200. Rows are the channels of a head, columns and summands the points i and j
# of a line: half of K stays in shared memory. (All of it would let every value be read once, not twice, but leaves room
# for two lines of values only, and few programs hide what the product waits for.)
LINE_SETTINGS = Settings(rows=64, columns=128, depth=256, warps=4, stages=4)
# Rows and columns are i and j, summands are the channels of a line.
KERNEL_SETTINGS = Settings(rows=128, columns=256, depth=64, warps=8, stages=4)
# Rows are points of the grid, columns are channels of u, summands are the outputs E.
NORM_SETTINGS = Settings(rows=64, columns=128, depth=128, warps=8, stages=4)
# Every kernel in float32, and in half precision where an axis, E or a head has another length than those above.
LONG_SETTINGS = Settings(rows=128, columns=128, depth=64, warps=8, stages=3)
# The generation of GPUs whose matrix instructions `axial_stream_triton` uses; no other has them.
HOPPER = 9
# Multiprocessors of an H200.
PROCESSORS = 132
# What a program does before its first tile (weights, the pipeline's filling) in times of tiles.
START = 2
# Numbers in the values that are worked on at a time: one sample at 256² with 16 heads of 64.
CHUNK = 2**26


def mix(x: Tensor, value: Tensor, merge: Tensor, kernels: Sequence[Tensor]) -> list[Tensor]:
    """Return y (B, *grid, E), μ and r (B, H, 1) in float32, and u (B, N, H·d)."""
    features = x.contiguous().view(x.shape[0], -1, x.shape[-1])  # (B, N, D)
    grid, last = x.shape[1:-1], len(kernels) - 1
    u = x.new_empty(*features.shape[:2], len(value))
    samples, groups = _chunks(u, kernels[0].shape[1])
    moments = []
    for part in samples:
        of_groups = []
        for group, columns in groups:
            values = F.linear(features[part], value[columns])
            for axis, kernel in enumerate(kernels[:-1]):
                values, _ = integrate(kernel[part, group], values, grid, axis)
            out = u[part, :, columns]
            of_groups.append(integrate(kernels[-1][part, group], values, grid, last, out=out, statistics=True)[1])
        moments.append(torch.cat(of_groups, 1))
    mean, rate = _statistics(torch.cat(moments))
    scaled, shift = fold_norm(merge, mean, rate)
    scaled, shift = scaled.to(u.dtype), shift.to(u.dtype)[:, 0]
    y = u.new_empty(*u.shape[:2], len(merge))
    for sample in range(len(u)):
        # A batched product would first copy the shift to every point; here cuBLAS adds it to its result.
        torch.addmm(shift[sample], u[sample], scaled[sample], out=y[sample])
    return [y.view(*x.shape[:-1], -1), mean, rate, u]


def mix_gradient(
    gradient: Tensor, x: Tensor, value: Tensor, merge: Tensor, kernels: Sequence[Tensor], kept: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of x, value, merge and the kernels."""
    mean, rate, u = kept
    batch, grid = x.shape[0], x.shape[1:-1]
    features = x.contiguous().view(batch, -1, x.shape[-1])  # (B, N, D)
    g = gradient.reshape(batch, -1, len(merge)).contiguous()  # (B, N, E)
    samples, groups = _chunks(u, mean.shape[1])
    heads = mean.shape[1] // len(groups)
    moments = u.new_empty(batch, len(value), len(merge))  # uᵀg
    for part in samples:
        torch.bmm(u[part].mT, g[part], out=moments[part])
    d_merge, scaled, slope, offset = norm_gradient(moments, g, merge, mean, rate)
    d_x = torch.empty_like(features)
    d_value = value.new_empty(len(samples), *value.shape)
    d_kernels = [torch.empty(kernel.shape, device=x.device, dtype=torch.float32) for kernel in kernels]
    for index, part in enumerate(samples):
        d_v = torch.empty_like(u[part])
        for group, columns in groups:
            own = part, group
            stages = [F.linear(features[part], value[columns])]
            for axis, kernel in enumerate(kernels[:-1]):
                stages.append(integrate(kernel[own], stages[-1], grid, axis)[0])
            d_values = add_norm_gradient(g[part], scaled[part, columns], u[part, :, columns], slope[own], offset[own])
            for axis in reversed(range(len(kernels))):
                kernel_gradient(d_values, stages.pop(), grid, axis, heads, out=d_kernels[axis][own])
                out = d_v[:, :, columns] if axis == 0 else None
                d_values, _ = integrate(kernels[axis][own].mT, d_values, grid, axis, out=out)
        torch.matmul(d_v, value, out=d_x[part])
        torch.mm(d_v.flatten(0, 1).mT, features[part].flatten(0, 1), out=d_value[index])
    weights = [d_value.sum(0, dtype=torch.float32).to(value.dtype), d_merge]
    return [d_x.view(x.shape), *weights, *(d.to(kernel.dtype) for d, kernel in zip(d_kernels, kernels, strict=True))]


def integrate(
    kernel: Tensor,
    values: Tensor,
    grid: Sequence[int],
    axis: int,
    *,
    out: Tensor | None = None,
    statistics: bool = False,
    settings: Settings | None = None,
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
        walkers = 2 * _walkers(kernel.shape[0] * kernel.shape[1], shape[0] * shape[2] // 4, 1)
        return out, stream(kernel, values, out, shape, walkers, statistics=statistics)
    if head_dim == own.rows and shape[1] <= own.depth and _can_describe(values, out):
        return out, _integrate_lines(kernel, values, out, shape, statistics, own)
    return out, _integrate_tiles(kernel, values, out, shape, statistics, settings or LONG_SETTINGS)


def _integrate_lines(
    kernel: Tensor, values: Tensor, out: Tensor, shape: tuple[int, int, int], statistics: bool, own: Settings
) -> Tensor:
    """Integrate whole lines with all of K at hand; returns the moments."""
    before, size, after = shape
    (batch, heads), lines = kernel.shape[:2], before * after
    block_i, block_j = block(size, own.columns), block(size)
    blocks = triton.cdiv(size, block_i)
    # A shorter axis leaves room for more programs.
    walkers = _walkers(blocks * heads * batch, lines, own.resident * own.depth // block_j)
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
    kernel: Tensor, values: Tensor, out: Tensor, shape: tuple[int, int, int], statistics: bool, own: Settings
) -> Tensor:
    """Integrate tiles of some points i and channels, a few j at a time; returns the moments."""
    before, size, after = shape
    (batch, heads), lines = kernel.shape[:2], before * after
    head_dim = values.shape[2] // heads
    block_d = triton.next_power_of_2(head_dim)
    block_l = max(1, min(block(lines * block_d), own.columns) // block_d)
    block_i, block_j = block(size, own.rows), block(size, own.depth)
    blocks = triton.cdiv(size, block_i)
    walkers = _walkers(blocks * heads * batch, triton.cdiv(lines, block_l), own.resident)
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


def kernel_gradient(
    d_out: Tensor,
    values: Tensor,
    grid: Sequence[int],
    axis: int,
    heads: int,
    *,
    out: Tensor | None = None,
    settings: Settings | None = None,
) -> Tensor:
    """Return (1/S) Σ d_out_i v_j over the lines of one axis and the channels of a head, (B, H, S, S) in float32.

    Both fields are (B, N, H·d). Each program adds up some of the lines; torch adds up the programs.
    """
    before, size, after = sides(grid, axis)
    batch, head_dim, lines = values.shape[0], values.shape[2] // heads, before * after
    own = settings or KERNEL_SETTINGS
    described = head_dim == own.depth and _can_describe(d_out, values)
    own = own if described or settings else LONG_SETTINGS
    block_d = triton.next_power_of_2(head_dim)
    block_l = triton.cdiv(block(block_d, own.depth), block_d)
    block_i, block_j = block(size, own.rows), block(size, own.columns)
    tiles = triton.cdiv(size, block_i) * triton.cdiv(size, block_j)
    splits = _walkers(tiles * batch * heads, triton.cdiv(lines, block_l), own.resident)
    lines_per_split = triton.cdiv(triton.cdiv(lines, splits), block_l) * block_l
    parts = torch.empty(splits, batch, heads, size, size, device=values.device, dtype=torch.float32)
    _kernel_gradient_kernel[(tiles, splits, batch * heads)](
        _rows_of(d_out, after, [block_i, block_d]) if described else d_out,
        _rows_of(values, after, [block_j, block_d]) if described else values,
        parts,
        size,
        after,
        lines,
        lines_per_split,
        batch,
        heads,
        head_dim,
        1 / size,
        DESCRIBED=described,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        BLOCK_L=block_l,
        BLOCK_D=block_d,
        PRECISION=precision(values),
        num_warps=own.warps,
        num_stages=own.stages,
    )
    return torch.sum(parts, 0, out=out)


def add_norm_gradient(
    g: Tensor, scaled: Tensor, u: Tensor, slope: Tensor, offset: Tensor, *, settings: Settings | None = None
) -> Tensor:
    """Return g·scaledᵀ + slope·u + offset (B, N, H·d) for g (B, N, E), scaled (B, H·d, E), slope, offset (B, H, 1).

    u may be some columns of a wider field.
    """
    batch, points, width = u.shape
    g, outputs, out = g.contiguous(), g.shape[2], u.new_empty(u.shape)
    own = settings or NORM_SETTINGS
    described = outputs <= own.depth and points % own.rows == 0 and _can_describe(g, u, out)
    own = own if described or settings else LONG_SETTINGS
    block_n, block_w, block_e = block(points, own.rows), block(width, own.columns), block(outputs, own.depth)
    blocks = triton.cdiv(width, block_w)
    walkers = _walkers(blocks * batch, triton.cdiv(points, block_n), own.resident)
    _norm_gradient_kernel[(blocks, walkers, batch)](
        _points_of(g, [block_n, block_e]) if described else g,
        scaled.contiguous(),
        _points_of(u, [block_n, block_w]) if described else u,
        slope.contiguous(),
        offset.contiguous(),
        _points_of(out, [block_n, block_w]) if described else out,
        points,
        width,
        u.stride(1),
        outputs,
        slope.shape[1],
        width // slope.shape[1],
        DESCRIBED=described,
        STAGES=own.stages,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        BLOCK_E=block_e,
        PRECISION=precision(u),
        num_warps=own.warps,
        num_stages=own.stages,
    )
    return out


def _can_stream(kernel: Tensor, values: Tensor, out: Tensor, shape: tuple[int, int, int]) -> bool:
    """Return whether `axial_stream_triton` takes these: the one place that says so."""
    if INTERPRETED or not values.is_cuda or not _is_hopper(values.device):
        return False
    from ergoflow.ops.axial_stream_triton import BUFFERS, HEAD_DIM

    before, size, after = shape
    return (
        size in BUFFERS
        and before * after >= 4
        and values.shape[2] == HEAD_DIM * kernel.shape[1]
        and _can_describe(values, out, kernel if kernel.stride(3) == 1 else kernel.mT)
    )


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    """Return whether a GPU is one, and triton has the language to say so."""
    return torch.cuda.get_device_capability(device)[0] == HOPPER and find_spec("triton.experimental.gluon") is not None


def _can_describe(*fields: Tensor) -> bool:
    """Return whether the copy engine takes these, of half precision: 16 bytes divide places and strides.

    Products of float32 are made from registers, which have no room for large tiles; the interpreter needs none.
    """
    return all(
        (field.element_size() == 2 or INTERPRETED)
        and field.stride(-1) == 1
        and field.data_ptr() % 16 == 0
        and all(stride > 0 and stride * field.element_size() % 16 == 0 for stride in field.stride()[:-1])
        for field in fields
    )


def _lines_of(values: Tensor, shape: tuple[int, int, int], tile: list[int]) -> TensorDescriptor:
    """Describe values (B, N, H·d) on a grid (P, S, Q) as (B·P, S, Q, H·d)."""
    return TensorDescriptor.from_tensor(values.unflatten(1, shape).flatten(0, 1), tile)


def _rows_of(values: Tensor, after: int, tile: list[int]) -> TensorDescriptor:
    """Describe contiguous values (B, N, H·d) as (B·P·S, Q·H·d): rows past the end of a line belong to the next one."""
    return TensorDescriptor.from_tensor(values.view(-1, after * values.shape[2]), tile)


def _points_of(values: Tensor, tile: list[int]) -> TensorDescriptor:
    """Describe values (B, N, C) as (B·N, C)."""
    return TensorDescriptor.from_tensor(values.flatten(0, 1), tile)


def _chunks(u: Tensor, heads: int) -> tuple[list[slice], list[tuple[slice, slice]]]:
    """Return the samples of u (B, N, H·d) to work on at a time, and of each the heads with their columns.

    Parts are of equal length, so that their statistics have the same shape.
    """
    batch, head_dim, numbers = len(u), u.shape[2] // heads, u[0].numel()
    groups = _parts(heads, CHUNK * heads // numbers)
    columns = [slice(group.start * head_dim, group.stop * head_dim) for group in groups]
    return _parts(batch, CHUNK // numbers), list(zip(groups, columns, strict=True))


def _parts(number: int, most: int) -> list[slice]:
    count = max(divisor for divisor in range(1, max(1, min(most, number)) + 1) if number % divisor == 0)
    return [slice(start, start + count) for start in range(0, number, count)]


@lru_cache
def _walkers(groups: int, tiles: int, resident: int) -> int:
    """Return how many programs share the tiles of a group so that the last of all programs ends first."""
    at_a_time = PROCESSORS * resident

    def ends(walkers: int) -> int:
        return triton.cdiv(groups * walkers, at_a_time) * (triton.cdiv(tiles, walkers) + START)

    return min(range(1, min(tiles, at_a_time) + 1), key=ends)


def _statistics(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return μ and (σ² + ε)^(−1/2), (B, H, 1), of parts (B, H, T, 3): sum, squares about the part's mean, number."""
    total, squares, count = moments.unbind(-1)  # (B, H, T) each
    number = count.sum(2, keepdim=True)
    mean = total.sum(2, keepdim=True) / number
    between = count * (total / count - mean).square()
    variance = (squares + between).sum(2, keepdim=True) / number
    return mean, (variance + HEAD_NORM_EPS).rsqrt()


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


@triton.jit
def _kernel_gradient_kernel(
    d_out: tl.tensor,  # (B, P, size, after, heads, head_dim)
    values: tl.tensor,  # the same
    parts: tl.tensor,  # (splits, B, heads, size, size), float32
    size: tl.tensor,
    after: tl.tensor,
    lines: tl.tensor,  # P·after
    lines_per_split: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    head_dim: tl.tensor,
    scale: tl.tensor,
    DESCRIBED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    blocks = tl.cdiv(size, BLOCK_J)
    i = tl.program_id(0) // blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.program_id(0) % blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    split = tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    sample, head = matrix // heads, matrix % heads
    width = heads * head_dim
    last = tl.minimum((split + 1) * lines_per_split, lines)
    acc = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    if DESCRIBED:
        # Rows i and j that do not exist are those of the next line: their products are not stored.
        first_i, first_j = tl.program_id(0) // blocks * BLOCK_I, tl.program_id(0) % blocks * BLOCK_J
        outer = (sample * (lines // after)).to(tl.int32)
        for line in range(split * lines_per_split, last):
            row, column = (outer + line // after) * size, (line % after * width + head * head_dim).to(tl.int32)
            a = d_out.load([row + first_i, column])
            b = values.load([row + first_j, column])
            acc = product(a, tl.trans(b), acc, PRECISION)
    else:
        summand = tl.arange(0, BLOCK_L * BLOCK_D)
        channel = summand % BLOCK_D
        base = sample * lines * size * width + head * head_dim
        left = d_out + base + i[:, None].to(tl.int64) * after * width
        right = values + base + j[:, None].to(tl.int64) * after * width
        for first in range(split * lines_per_split, last, BLOCK_L):
            line = first + summand // BLOCK_D
            known = (line < last) & (channel < head_dim)
            start = (line // after * size * after + line % after).to(tl.int64) * width + channel
            a = tl.load(left + start[None, :], mask=(i[:, None] < size) & known[None, :], other=0.0)
            b = tl.load(right + start[None, :], mask=(j[:, None] < size) & known[None, :], other=0.0)
            acc = product(a, tl.trans(b), acc, PRECISION)
    place = parts + ((split.to(tl.int64) * batch * heads + matrix) * size + i[:, None]) * size + j[None, :]
    tl.store(place, acc * scale, mask=(i[:, None] < size) & (j[None, :] < size))


@triton.jit
def _norm_gradient_kernel(
    g: tl.tensor,  # (B, points, outputs); described: (B·points, outputs), and so u and out
    scaled: tl.tensor,  # (B, width, outputs)
    u: tl.tensor,  # (B, points, u_width), of which width are in use
    slope: tl.tensor,  # (B, heads)
    offset: tl.tensor,  # (B, heads)
    out: tl.tensor,  # (B, points, width)
    points: tl.tensor,
    width: tl.tensor,
    u_width: tl.tensor,
    outputs: tl.tensor,
    heads: tl.tensor,
    head_dim: tl.tensor,
    DESCRIBED: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # Blocks of channels come first: those that read the same rows of g run at the same time.
    first_c = tl.program_id(0) * BLOCK_W
    c = first_c + tl.arange(0, BLOCK_W)
    sample = tl.program_id(2).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    head = sample * heads + c // head_dim
    factor = tl.load(slope + head, mask=c < width, other=0.0).to(tl.float32)
    constant = tl.load(offset + head, mask=c < width, other=0.0).to(tl.float32)
    weights = scaled + (sample * width + c[None, :]) * outputs
    start, step = tl.program_id(1) * BLOCK_N, tl.num_programs(1) * BLOCK_N
    # The product starts from the norm's part: u is then fetched ahead as g is.
    if DESCRIBED:
        w = tl.load(weights + e[:, None], mask=(c[None, :] < width) & (e[:, None] < outputs), other=0.0)
        for first in tl.range(start, points, step, num_stages=STAGES):
            row = (sample * points + first).to(tl.int32)
            acc = factor[None, :] * u.load([row, first_c]).to(tl.float32) + constant[None, :]
            acc = product(g.load([row, 0]), w, acc, PRECISION)
            out.store([row, first_c], acc.to(out.dtype))
    else:
        for first in tl.range(start, points, step, num_stages=1):
            n = first + tl.arange(0, BLOCK_N)
            point = sample * points + n[:, None]
            inside = (n[:, None] < points) & (c[None, :] < width)
            values = tl.load(u + point * u_width + c[None, :], mask=inside, other=0.0).to(tl.float32)
            acc = factor[None, :] * values + constant[None, :]
            for first_e in range(0, outputs, BLOCK_E):
                rest = first_e + e
                known = rest < outputs
                a = tl.load(g + point * outputs + rest[None, :], mask=(n[:, None] < points) & known[None, :], other=0.0)
                b = tl.load(weights + rest[:, None], mask=(c[None, :] < width) & known[:, None], other=0.0)
                acc = product(a, b, acc, PRECISION)
            tl.store(out + point * width + c[None, :], acc.to(out.dtype.element_ty), mask=inside)

"""The Triton twin of `ergoflow.ops.axial`: channel-last values (B, N, H·d) throughout, no permuted copy anywhere.

The values are the large thing (134 MB per sample at 256² with 16 heads of 64 in bfloat16), and each of the steps

    v = x Wvᵀ  →  one product per axis  →  u  →  y = u (r Wm)ᵀ + shift

reads and writes them once. Only u is kept for the gradient; v and the partly integrated values are computed again, a
few samples at a time. The products with dense weights are torch's own; here are the three others: the integral along
an axis (the last one also takes the statistics of u, row by row, about the row's own mean), the gradient of a kernel,
and the gradient of u, in which the head norm adds slope·u + offset to a product of two matrices. The first and the last
keep their weights in shared memory and walk over the values, the next of which arrive meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.axial import HEAD_NORM_EPS, fold_norm, norm_gradient
from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import INTERPRETED, block, precision, product


class Settings(NamedTuple):
    """Rows, columns and summands of a tile, warps, pipeline stages, and programs that a multiprocessor runs at a time.

    Where sums are no longer than `depth`, a program keeps its weights in shared memory and walks over the tiles: the
    next values arrive while these are multiplied and stored. Triton's pipeline does so from three stages on, and holds
    as many tiles in shared memory. The first three below were the fastest of some ten each on an H200.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    resident: int = 1


# Rows are points i, columns are channels of one or more lines. (256 rows would read every value once, not twice, but
# leave no room for a pipeline.)
INTEGRATE_SETTINGS = Settings(rows=128, columns=64, depth=256, warps=8, stages=4)
# Rows and columns are i and j, summands are channels of one or more lines.
KERNEL_SETTINGS = Settings(rows=128, columns=256, depth=64, warps=8, stages=4)
# Rows are points of the grid, columns are channels of u, summands are the outputs E.
NORM_SETTINGS = Settings(rows=128, columns=128, depth=128, warps=16, stages=3)
# Every kernel in float32, and in half precision where an axis, E or a head is longer than the tiles above.
LONG_SETTINGS = Settings(rows=128, columns=128, depth=64, warps=8, stages=3)
# Multiprocessors of an H200.
PROCESSORS = 132
# What a program does before its first tile (weights, the pipeline's filling) in times of tiles.
START = 2
# Numbers in the values of the samples that are worked on at a time: one sample at 256² with 16 heads of 64.
CHUNK = 2**26


def mix(x: Tensor, value: Tensor, merge: Tensor, kernels: Sequence[Tensor]) -> list[Tensor]:
    """Return y (B, *grid, E), μ and r (B, H, 1) in float32, and u (B, N, H·d)."""
    features = x.contiguous().view(x.shape[0], -1, x.shape[-1])  # (B, N, D)
    grid, last = x.shape[1:-1], len(kernels) - 1
    u = x.new_empty(*features.shape[:2], len(value))
    moments = []
    for part in _chunks(len(x), u[0].numel()):
        values = F.linear(features[part], value)
        for axis, kernel in enumerate(kernels[:-1]):
            values, _ = integrate(kernel[part], values, grid, axis)
        moments.append(integrate(kernels[-1][part], values, grid, last, out=u[part], statistics=True)[1])
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
    batch, grid, heads = x.shape[0], x.shape[1:-1], mean.shape[1]
    features = x.contiguous().view(batch, -1, x.shape[-1])  # (B, N, D)
    g = gradient.reshape(batch, -1, len(merge)).contiguous()  # (B, N, E)
    parts = _chunks(batch, u[0].numel())
    moments = u.new_empty(batch, len(value), len(merge))  # uᵀg
    for part in parts:
        torch.bmm(u[part].mT, g[part], out=moments[part])
    d_merge, scaled, slope, offset = norm_gradient(moments, g, merge, mean, rate)
    d_x = torch.empty_like(features)
    d_value = value.new_empty(len(parts), *value.shape)
    d_kernels = [torch.empty(kernel.shape, device=x.device, dtype=torch.float32) for kernel in kernels]
    for index, part in enumerate(parts):
        stages = [F.linear(features[part], value)]
        for axis, kernel in enumerate(kernels[:-1]):
            stages.append(integrate(kernel[part], stages[-1], grid, axis)[0])
        d_values = add_norm_gradient(g[part], scaled[part], u[part], slope[part], offset[part])
        for axis in reversed(range(len(kernels))):
            kernel_gradient(d_values, stages.pop(), grid, axis, heads, out=d_kernels[axis][part])
            d_values, _ = integrate(kernels[axis][part].mT, d_values, grid, axis)
        torch.matmul(d_values, value, out=d_x[part])
        torch.mm(d_values.flatten(0, 1).mT, features[part].flatten(0, 1), out=d_value[index])
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

    The second tensor is (B, H, programs, 3) in float32: the sum, the sum of squares about the mean, and the number of
    the results of each program; empty without `statistics`.
    """
    before, size, after = sides(grid, axis)
    batch, heads = kernel.shape[:2]
    head_dim, lines = values.shape[2] // heads, before * after
    block_d = triton.next_power_of_2(head_dim)
    own = settings or fitting(INTEGRATE_SETTINGS, values, size, columns=block_d)
    out = torch.empty_like(values) if out is None else out
    block_l = max(1, min(block(lines * block_d), own.columns) // block_d)
    block_i, block_j = block(size, own.rows), block(size, own.depth)
    blocks = triton.cdiv(size, block_i)
    walkers = _walkers(blocks * heads * batch, triton.cdiv(lines, block_l), own.resident)
    programs = walkers * blocks if statistics else 0
    moments = torch.empty(batch, heads, programs, 3, device=values.device, dtype=torch.float32)
    _integrate_kernel[(blocks, heads, batch * walkers)](
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
        *kernel.stride(),
        1 / size,
        STATISTICS=statistics,
        WHOLE=size <= block_j,
        FULL=head_dim == block_d and lines % block_l == 0,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        BLOCK_L=block_l,
        BLOCK_D=block_d,
        PRECISION=precision(values),
        num_warps=own.warps,
        num_stages=own.stages,
    )
    return out, moments


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
    block_d = triton.next_power_of_2(head_dim)
    own = settings or fitting(KERNEL_SETTINGS, values, block_d)
    block_l = triton.cdiv(block(block_d, own.depth), block_d)
    block_i, block_j = block(size, own.rows), block(size, own.columns)
    tiles = triton.cdiv(size, block_i) * triton.cdiv(size, block_j)
    splits = _walkers(tiles * batch * heads, triton.cdiv(lines, block_l), own.resident)
    lines_per_split = triton.cdiv(triton.cdiv(lines, splits), block_l) * block_l
    parts = torch.empty(splits, batch, heads, size, size, device=values.device, dtype=torch.float32)
    _kernel_gradient_kernel[(tiles, splits, batch * heads)](
        d_out,
        values,
        parts,
        size,
        after,
        lines,
        lines_per_split,
        batch,
        heads,
        head_dim,
        1 / size,
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
    """Return g·scaledᵀ + slope·u + offset (B, N, H·d) for g (B, N, E), scaled (B, H·d, E), slope, offset (B, H, 1)."""
    batch, points, width = u.shape
    outputs = g.shape[2]
    own = settings or fitting(NORM_SETTINGS, u, outputs)
    out = torch.empty_like(u)
    block_n, block_w, block_e = block(points, own.rows), block(width, own.columns), block(outputs, own.depth)
    # Tiles of g and u in float32 leave no room for a second one; a loop over E has stages of its own.
    stages = own.stages if u.element_size() == 2 and outputs <= block_e else 1
    blocks = triton.cdiv(width, block_w)
    walkers = _walkers(blocks * batch, triton.cdiv(points, block_n), own.resident)
    _norm_gradient_kernel[(blocks, walkers, batch)](
        g.contiguous(),
        scaled.contiguous(),
        u,
        slope.contiguous(),
        offset.contiguous(),
        out,
        points,
        width,
        outputs,
        slope.shape[1],
        width // slope.shape[1],
        WHOLE=outputs <= block_e,
        STAGES=stages,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        BLOCK_E=block_e,
        PRECISION=precision(u),
        num_warps=own.warps,
        num_stages=own.stages,
    )
    return out


def fitting(own: Settings, values: Tensor, depth: int, *, columns: int = 0) -> Settings:
    """Return a kernel's own settings where so many summands, and the columns of one line, fit; else those of long sums.

    Products of float32 are made from registers, which have no room for large tiles; the interpreter needs none.
    """
    narrow = values.element_size() == 2 or INTERPRETED
    return own if narrow and depth <= own.depth and columns <= own.columns else LONG_SETTINGS


def _chunks(batch: int, numbers: int) -> list[slice]:
    """Return parts of equal length, so that their statistics have the same shape."""
    most = max(1, CHUNK // numbers)
    count = max(divisor for divisor in range(1, min(most, batch) + 1) if batch % divisor == 0)
    return [slice(start, start + count) for start in range(0, batch, count)]


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
def _integrate_kernel(
    kernel: tl.tensor,  # (B, heads, size, size), any strides
    values: tl.tensor,  # (B, P, size, after, heads, head_dim)
    out: tl.tensor,  # the same
    moments: tl.tensor,  # (B, heads, walkers, blocks of i, 3), float32
    size: tl.tensor,
    after: tl.tensor,
    lines: tl.tensor,  # P·after
    walkers: tl.tensor,
    heads: tl.tensor,
    head_dim: tl.tensor,
    stride_b: tl.tensor,
    stride_h: tl.tensor,
    stride_i: tl.tensor,
    stride_j: tl.tensor,
    scale: tl.tensor,
    STATISTICS: tl.constexpr,
    WHOLE: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # Blocks of i come first, then heads: those that read the same values, and the same rows of memory, run together.
    i = tl.arange(0, BLOCK_I)
    # A single block of i needs the places of j only: half the registers for addresses.
    if not (WHOLE and BLOCK_I == BLOCK_J):
        i += tl.program_id(0) * BLOCK_I
    head = tl.program_id(1)
    walker = tl.program_id(2) % walkers
    sample = (tl.program_id(2) // walkers).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    column = tl.arange(0, BLOCK_L * BLOCK_D)
    width = heads * head_dim
    step = after * width
    base = sample * lines * size * width + head * head_dim
    weights = kernel + sample * stride_b + head * stride_h + i[:, None].to(tl.int64) * stride_i
    points = values + base + j[:, None].to(tl.int64) * step
    if WHOLE:
        whole = (i[:, None] < size) & (j[None, :] < size)
        k = tl.load(weights + j[None, :].to(tl.int64) * stride_j, mask=whole, other=0.0)
    # Of every row i, about its own mean: no exchange between warps until the end.
    count = 0.0
    mean = tl.zeros((BLOCK_I,), tl.float32)
    squares = tl.zeros((BLOCK_I,), tl.float32)
    for first in range(walker * BLOCK_L, lines, walkers * BLOCK_L):
        start, known = _columns(first, column, size, after, lines, head_dim, width, BLOCK_D)
        acc = tl.zeros((BLOCK_I, BLOCK_L * BLOCK_D), tl.float32)
        if WHOLE:
            tile = tl.load(points + start[None, :], mask=(j[:, None] < size) & known[None, :], other=0.0)
            acc = product(k, tile, acc, PRECISION)
        else:
            for first_j in range(0, size, BLOCK_J):
                rest = first_j + j
                part = tl.load(
                    weights + rest[None, :].to(tl.int64) * stride_j,
                    mask=(i[:, None] < size) & (rest[None, :] < size),
                    other=0.0,
                )
                tile = tl.load(
                    values + base + rest[:, None].to(tl.int64) * step + start[None, :],
                    mask=(rest[:, None] < size) & known[None, :],
                    other=0.0,
                )
                acc = product(part, tile, acc, PRECISION)
        result = acc * scale
        place = out + base + start[None, :] + i[:, None].to(tl.int64) * step
        tl.store(place, result.to(out.dtype.element_ty), mask=(i[:, None] < size) & known[None, :])
        if STATISTICS:
            # Columns that do not exist are zero in the sums, and left out of the squares.
            number = (tl.minimum(BLOCK_L, lines - first) * head_dim).to(tl.float32)
            row_mean = tl.sum(result, axis=1) / number
            gap = result - row_mean[:, None]
            if not FULL:
                gap = tl.where(known[None, :], gap, 0.0)
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
def _columns(
    first: tl.tensor,
    column: tl.tensor,
    size: tl.tensor,
    after: tl.tensor,
    lines: tl.tensor,
    head_dim: tl.tensor,
    width: tl.tensor,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return where the lines from the first on begin, channel by channel, and which of these columns exist."""
    line, channel = first + column // BLOCK_D, column % BLOCK_D
    start = (line // after * size * after + line % after).to(tl.int64) * width + channel
    return start, (line < lines) & (channel < head_dim)


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
    summand = tl.arange(0, BLOCK_L * BLOCK_D)
    channel = summand % BLOCK_D
    width = heads * head_dim
    base = sample * lines * size * width + head * head_dim
    step = after * width
    left = d_out + base + i[:, None].to(tl.int64) * step
    right = values + base + j[:, None].to(tl.int64) * step
    last = tl.minimum((split + 1) * lines_per_split, lines)
    acc = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
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
    g: tl.tensor,  # (B, points, outputs)
    scaled: tl.tensor,  # (B, width, outputs)
    u: tl.tensor,  # (B, points, width)
    slope: tl.tensor,  # (B, heads)
    offset: tl.tensor,  # (B, heads)
    out: tl.tensor,  # (B, points, width)
    points: tl.tensor,
    width: tl.tensor,
    outputs: tl.tensor,
    heads: tl.tensor,
    head_dim: tl.tensor,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # Blocks of channels come first: those that read the same rows of g run at the same time.
    c = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    sample = tl.program_id(2).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    head = sample * heads + c // head_dim
    factor = tl.load(slope + head, mask=c < width, other=0.0).to(tl.float32)
    constant = tl.load(offset + head, mask=c < width, other=0.0).to(tl.float32)
    weights = scaled + (sample * width + c[None, :]) * outputs
    if WHOLE:
        w = tl.load(weights + e[:, None], mask=(c[None, :] < width) & (e[:, None] < outputs), other=0.0)
    step = tl.num_programs(1) * BLOCK_N
    for first in tl.range(tl.program_id(1) * BLOCK_N, points, step, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        rows = g + (sample * points + n[:, None]) * outputs
        place = (sample * points + n[:, None]) * width + c[None, :]
        inside = (n[:, None] < points) & (c[None, :] < width)
        values = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
        # The product starts from the norm's part, and the loop says its stages: u is then fetched ahead as g is.
        acc = factor[None, :] * values + constant[None, :]
        if WHOLE:
            a = tl.load(rows + e[None, :], mask=(n[:, None] < points) & (e[None, :] < outputs), other=0.0)
            acc = product(a, w, acc, PRECISION)
        else:
            for first_e in range(0, outputs, BLOCK_E):
                rest = first_e + e
                a = tl.load(rows + rest[None, :], mask=(n[:, None] < points) & (rest[None, :] < outputs), other=0.0)
                b = tl.load(weights + rest[:, None], mask=(c[None, :] < width) & (rest[:, None] < outputs), other=0.0)
                acc = product(a, b, acc, PRECISION)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)

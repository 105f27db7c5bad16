"""The Triton twin of `ergoflow.ops.axial`: channel-last values (B, N, H·d) throughout, no permuted copy anywhere.

The values are the large thing (134 MB per sample at 256² with 16 heads of 64 in bfloat16), and each of the steps

    v = x Wvᵀ  →  one product per axis  →  u  →  y = u (r Wm)ᵀ + shift

reads and writes them once. Only u is kept for the gradient; v and the partly integrated values are computed again, a
few samples at a time. The products with dense weights are torch's own; here are the three others: the integral along
an axis (the last one also takes the statistics of u, tile by tile, about the tile's own mean), the gradient of a
kernel, and the gradient of u, in which the head norm adds slope·u + offset to a product of two matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.axial import HEAD_NORM_EPS, fold_norm, norm_gradient
from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import block, precision, product


class Settings(NamedTuple):
    """Rows, columns and summands of a tile, warps and pipeline stages of a kernel."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


INTEGRATE_SETTINGS = Settings(rows=128, columns=128, depth=64, warps=8, stages=3)
KERNEL_SETTINGS = Settings(rows=128, columns=128, depth=64, warps=8, stages=3)
NORM_SETTINGS = Settings(rows=128, columns=128, depth=64, warps=8, stages=2)
# Programs that keep all multiprocessors busy (132 on an H200, two programs each).
PROGRAMS = 264
# Numbers in the values of the samples that are worked on at a time: one sample at 256² with 16 heads of 64.
CHUNK = 2**26


def mix(x: Tensor, value: Tensor, merge: Tensor, kernels: Sequence[Tensor]) -> list[Tensor]:
    """Return y (B, *grid, E), μ and r (B, H, 1) in float32, and u (B, N, H·d)."""
    x = x.contiguous()
    batch, grid, heads = x.shape[0], x.shape[1:-1], kernels[0].shape[1]
    u = x.new_empty(batch, grid.numel(), len(value))
    y = x.new_empty(*x.shape[:-1], len(merge))
    mean = torch.empty(batch, heads, 1, device=x.device, dtype=torch.float32)
    rate = torch.empty_like(mean)
    for part in _chunks(batch, u[0].numel()):
        values = F.linear(x[part].view(-1, grid.numel(), x.shape[-1]), value)
        for axis, kernel in enumerate(kernels[:-1]):
            values, _ = integrate(kernel[part], values, grid, axis)
        _, moments = integrate(kernels[-1][part], values, grid, len(grid) - 1, out=u[part], statistics=True)
        mean[part], rate[part] = _statistics(moments)
        scaled, shift = fold_norm(merge, mean[part], rate[part])
        torch.baddbmm(shift.to(u.dtype), u[part], scaled.to(u.dtype), out=y[part].view(-1, grid.numel(), len(merge)))
    return [y, mean, rate, u]


def mix_gradient(
    gradient: Tensor, x: Tensor, value: Tensor, merge: Tensor, kernels: Sequence[Tensor], kept: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of x, value, merge and the kernels."""
    mean, rate, u = kept
    x = x.contiguous()
    batch, grid = x.shape[0], x.shape[1:-1]
    d_x = torch.empty_like(x)
    d_kernels = [torch.empty_like(kernel, memory_format=torch.contiguous_format) for kernel in kernels]
    d_value = torch.zeros(value.shape, device=x.device, dtype=torch.float32)
    d_merge = torch.zeros(merge.shape, device=x.device, dtype=torch.float32)
    for part in _chunks(batch, u[0].numel()):
        features = x[part].view(-1, grid.numel(), x.shape[-1])
        g = gradient[part].reshape(-1, grid.numel(), len(merge))
        stages = [F.linear(features, value)]
        for axis, kernel in enumerate(kernels[:-1]):
            stages.append(integrate(kernel[part], stages[-1], grid, axis)[0])
        d_part, scaled, slope, offset = norm_gradient(torch.bmm(u[part].mT, g), g, merge, mean[part], rate[part])
        d_merge += d_part
        d_values = add_norm_gradient(g, scaled, u[part], slope, offset)
        for axis in reversed(range(len(kernels))):
            d_kernels[axis][part] = kernel_gradient(d_values, stages.pop(), grid, axis, kernels[axis].shape[1])
            d_values, _ = integrate(kernels[axis][part].mT, d_values, grid, axis)
        torch.matmul(d_values, value, out=d_x[part].view(features.shape))
        d_value += torch.mm(d_values.flatten(0, 1).mT, features.flatten(0, 1))
    return [d_x, d_value.to(value.dtype), d_merge.to(merge.dtype), *d_kernels]


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

    The second tensor is (B, H, tiles, 3) in float32: the sum, the sum of squares about the mean, and the number of
    the results of each tile; empty without `statistics`.
    """
    rows, columns, depth, warps, stages = settings or INTEGRATE_SETTINGS
    before, size, after = sides(grid, axis)
    batch, heads = kernel.shape[:2]
    head_dim = values.shape[2] // heads
    out = torch.empty_like(values) if out is None else out
    block_d = triton.next_power_of_2(head_dim)
    block_l = max(1, min(block(before * after * block_d), columns) // block_d)
    block_i, block_j = block(size, rows), block(size, depth)
    tiles = triton.cdiv(size, block_i) * triton.cdiv(before * after, block_l)
    moments = torch.empty(batch, heads, tiles if statistics else 0, 3, device=values.device, dtype=torch.float32)
    _integrate_kernel[(tiles, heads, batch)](
        kernel,
        values,
        out,
        moments,
        size,
        after,
        before * after,
        heads,
        head_dim,
        *kernel.stride(),
        1 / size,
        STATISTICS=statistics,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        BLOCK_L=block_l,
        BLOCK_D=block_d,
        PRECISION=precision(values),
        num_warps=warps,
        num_stages=stages,
    )
    return out, moments


def kernel_gradient(
    d_out: Tensor, values: Tensor, grid: Sequence[int], axis: int, heads: int, settings: Settings | None = None
) -> Tensor:
    """Return (1/S) Σ d_out_i v_j over the lines of one axis and the channels, (B, H, S, S), both (B, N, H·d)."""
    rows, columns, depth, warps, stages = settings or KERNEL_SETTINGS
    before, size, after = sides(grid, axis)
    batch, head_dim, lines = values.shape[0], values.shape[2] // heads, before * after
    block_d = triton.next_power_of_2(head_dim)
    block_l = triton.cdiv(block(block_d, depth), block_d)
    block_i, block_j = block(size, rows), block(size, columns)
    tiles = triton.cdiv(size, block_i) * triton.cdiv(size, block_j)
    splits = max(1, min(triton.cdiv(PROGRAMS, tiles * batch * heads), triton.cdiv(lines, 4 * block_l)))
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
        num_warps=warps,
        num_stages=stages,
    )
    return parts.sum(0).to(values.dtype)


def add_norm_gradient(
    g: Tensor, scaled: Tensor, u: Tensor, slope: Tensor, offset: Tensor, settings: Settings | None = None
) -> Tensor:
    """Return g·scaledᵀ + slope·u + offset (B, N, H·d) for g (B, N, E), scaled (B, H·d, E), slope, offset (B, H, 1)."""
    rows, columns, depth, warps, stages = settings or NORM_SETTINGS
    batch, points, width = u.shape
    out = torch.empty_like(u)
    block_n, block_w, block_e = block(points, rows), block(width, columns), block(g.shape[2], depth)
    _norm_gradient_kernel[(triton.cdiv(width, block_w), triton.cdiv(points, block_n), batch)](
        g.contiguous(),
        scaled.contiguous(),
        u,
        slope.contiguous(),
        offset.contiguous(),
        out,
        points,
        width,
        g.shape[2],
        slope.shape[1],
        width // slope.shape[1],
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        BLOCK_E=block_e,
        PRECISION=precision(u),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _chunks(batch: int, numbers: int) -> list[slice]:
    count = max(1, CHUNK // numbers)
    return [slice(start, min(start + count, batch)) for start in range(0, batch, count)]


def _statistics(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return μ and (σ² + ε)^(−1/2), (B, H, 1), of tiles (B, H, T, 3): sum, squares about the tile's mean, number."""
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
    moments: tl.tensor,  # (B, heads, tiles, 3), float32
    size: tl.tensor,
    after: tl.tensor,
    lines: tl.tensor,  # P·after
    heads: tl.tensor,
    head_dim: tl.tensor,
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
    # Tiles of i come first: those that read the same values run at the same time.
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    blocks = tl.cdiv(size, BLOCK_I)
    i = tile % blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    column = tl.arange(0, BLOCK_L * BLOCK_D)
    line = tile // blocks * BLOCK_L + column // BLOCK_D
    channel = column % BLOCK_D
    known = (line < lines) & (channel < head_dim)
    width = heads * head_dim
    start = (line // after * size * after + line % after).to(tl.int64) * width + head * head_dim + channel
    start += sample * lines * size * width
    step = after * width
    matrix = kernel + sample * stride_b + head.to(tl.int64) * stride_h
    acc = tl.zeros((BLOCK_I, BLOCK_L * BLOCK_D), tl.float32)
    for first in range(0, size, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        k = tl.load(
            matrix + i[:, None].to(tl.int64) * stride_i + j[None, :].to(tl.int64) * stride_j,
            mask=(i[:, None] < size) & (j[None, :] < size),
            other=0.0,
        )
        v = tl.load(
            values + start[None, :] + j[:, None].to(tl.int64) * step,
            mask=(j[:, None] < size) & known[None, :],
            other=0.0,
        )
        acc = product(k, v, acc, PRECISION)
    inside = (i[:, None] < size) & known[None, :]
    result = (acc * scale).to(out.dtype.element_ty)
    tl.store(out + start[None, :] + i[:, None].to(tl.int64) * step, result, mask=inside)
    if STATISTICS:
        rounded = tl.where(inside, result.to(tl.float32), 0.0)
        count = tl.sum((i < size).to(tl.float32)) * tl.sum(known.to(tl.float32))
        total = tl.sum(tl.sum(rounded, axis=1), axis=0)
        gap = tl.where(inside, rounded - total / count, 0.0)
        place = moments + ((sample * heads + head) * tl.num_programs(0) + tile) * 3
        tl.store(place, total)
        tl.store(place + 1, tl.sum(tl.sum(gap * gap, axis=1), axis=0))
        tl.store(place + 2, count)


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
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # Tiles of channels come first: those that read the same rows of g run at the same time.
    c = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sample = tl.program_id(2).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    for first in range(0, outputs, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        a = tl.load(
            g + (sample * points + n[:, None]) * outputs + e[None, :],
            mask=(n[:, None] < points) & (e[None, :] < outputs),
            other=0.0,
        )
        b = tl.load(
            scaled + (sample * width + c[None, :]) * outputs + e[:, None],
            mask=(c[None, :] < width) & (e[:, None] < outputs),
            other=0.0,
        )
        acc = product(a, b, acc, PRECISION)
    head = sample * heads + c // head_dim
    a = tl.load(slope + head, mask=c < width, other=0.0).to(tl.float32)
    b = tl.load(offset + head, mask=c < width, other=0.0).to(tl.float32)
    place = (sample * points + n[:, None]) * width + c[None, :]
    inside = (n[:, None] < points) & (c[None, :] < width)
    values = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (acc + a[None, :] * values + b[None, :]).to(out.dtype.element_ty), mask=inside)

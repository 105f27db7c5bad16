"""Two gradients of `axial` on channel-last values (B, N, H·d) in Triton: of a kernel, and of u before its norm.

Both take their tiles through Hopper's copy engine where it can have them (`can_describe`), else threads load them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import ProductSettings, block, can_describe, count_walkers, precision, product

# Of seven or eight tried on an H200, the fastest for both axes together.
# Rows and columns are i and j, summands are the channels of a line.
KERNEL_SETTINGS = ProductSettings(rows=128, columns=256, depth=64, warps=8, stages=4)
# Rows are points of the grid, columns are channels of u, summands are the outputs E.
NORM_SETTINGS = ProductSettings(rows=64, columns=128, depth=128, warps=8, stages=4)
# In float32, and in half precision where E or a head has another length.
LONG_SETTINGS = ProductSettings(rows=128, columns=128, depth=64, warps=8, stages=3)


def kernel_gradient(
    d_out: Tensor,
    values: Tensor,
    grid: Sequence[int],
    axis: int,
    heads: int,
    *,
    out: Tensor | None = None,
    settings: ProductSettings | None = None,
) -> Tensor:
    """Return (1/S) Σ d_out_i v_j over the lines of one axis and the channels of a head, (B, H, S, S) in float32.

    Both fields are (B, N, H·d). Each program adds up some of the lines; torch adds up the programs.
    """
    before, size, after = sides(grid, axis)
    batch, head_dim, lines = values.shape[0], values.shape[2] // heads, before * after
    own = settings or KERNEL_SETTINGS
    described = head_dim == own.depth and can_describe(d_out, values)
    own = own if described or settings else LONG_SETTINGS
    block_d = triton.next_power_of_2(head_dim)
    block_l = triton.cdiv(block(block_d, own.depth), block_d)
    block_i, block_j = block(size, own.rows), block(size, own.columns)
    tiles = triton.cdiv(size, block_i) * triton.cdiv(size, block_j)
    splits = count_walkers(tiles * batch * heads, triton.cdiv(lines, block_l), own.resident)
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
    g: Tensor, scaled: Tensor, u: Tensor, slope: Tensor, offset: Tensor, *, settings: ProductSettings | None = None
) -> Tensor:
    """Return g·scaledᵀ + slope·u + offset (B, N, H·d) for g (B, N, E), scaled (B, H·d, E), slope, offset (B, H, 1).

    u may be some columns of a wider field.
    """
    batch, points, width = u.shape
    g, outputs, out = g.contiguous(), g.shape[2], u.new_empty(u.shape)
    own = settings or NORM_SETTINGS
    described = outputs <= own.depth and points % own.rows == 0 and can_describe(g, u, out)
    own = own if described or settings else LONG_SETTINGS
    block_n, block_w, block_e = block(points, own.rows), block(width, own.columns), block(outputs, own.depth)
    blocks = triton.cdiv(width, block_w)
    walkers = count_walkers(blocks * batch, triton.cdiv(points, block_n), own.resident)
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


def _rows_of(values: Tensor, after: int, tile: list[int]) -> TensorDescriptor:
    """Describe contiguous values (B, N, H·d) as (B·P·S, Q·H·d): rows past the end of a line belong to the next one."""
    return TensorDescriptor.from_tensor(values.view(-1, after * values.shape[2]), tile)


def _points_of(values: Tensor, tile: list[int]) -> TensorDescriptor:
    """Describe values (B, N, C) as (B·N, C)."""
    return TensorDescriptor.from_tensor(values.flatten(0, 1), tile)


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

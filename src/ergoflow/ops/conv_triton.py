"""The Triton twin of `ergoflow.ops.conv` on a plane: a grouped convolution as a product with band matrices.

A group has few channels (16 in, 8 out), too few for the matrix units. A block of eight neighbouring results along y
has eight times as many, and they depend on the same 8 + k − 1 columns of each of k rows: with

    T[t][(column, i), (y, o)] = w[o, i, t, column − y]        (zero outside the taps)

the convolution is y = Σ_t x[row + t − c] T[t], k products of (blocks × 16·16) by (16·16 × 8·8) for 9×9 taps; 16/9 of
the multiplications, all of them on the matrix units. Rows and columns wrap around by index arithmetic, without a padded
copy. The gradient of x is the same convolution with flipped weights; that of w is the gradient of T, its bands summed.
A number that is not finite spreads to the block of results it lies under, not only to its own neighbours.

Fields are channel-last, (B, X, Y, C).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.tiles_triton import SHORTEST, block, precision, product


class Settings(NamedTuple):
    """Blocks of results and summands of a tile, warps and pipeline stages of a kernel."""

    blocks: int
    depth: int
    warps: int
    stages: int


CONV_SETTINGS = Settings(blocks=128, depth=64, warps=8, stages=3)
WEIGHT_SETTINGS = Settings(blocks=64, depth=128, warps=4, stages=3)
# Results along y that one row of a tile holds.
RESULTS = 8
# Programs that keep all multiprocessors busy (132 on an H200, some programs each).
PROGRAMS = 1056


class _Bands(NamedTuple):
    """The padded sizes of the band matrices: results, columns, channels in and out of a group."""

    results: int
    columns: int
    inputs: int
    outputs: int


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, settings: Settings | None = None) -> Tensor:
    """Return the circular convolution (B, X, Y, O) of x (B, X, Y, C), contiguous, weight (O, C/G, k, k), bias (O,)."""
    blocks, depth, warps, stages = settings or CONV_SETTINGS
    batch, rows, columns, _ = x.shape
    outputs, taps = len(weight), weight.shape[2]
    bands = _sizes(weight, groups)
    out = x.new_empty(batch, rows, columns, outputs)
    tiles = rows * triton.cdiv(columns, bands.results)
    block_m = block(tiles, blocks)
    _conv_kernel[(triton.cdiv(tiles, block_m), groups, batch)](
        x,
        _band_matrices(weight, groups, bands).to(x.dtype),
        out if bias is None else bias.contiguous(),
        out,
        rows,
        columns,
        GROUPS=groups,
        GROUP_INPUTS=weight.shape[1],
        GROUP_OUTPUTS=outputs // groups,
        HAS_BIAS=bias is not None,
        TAPS_X=taps,
        TAPS_Y=weight.shape[3],
        RESULTS=bands.results,
        COLUMNS=bands.columns,
        INPUTS=bands.inputs,
        OUTPUTS=bands.outputs,
        BLOCK_M=block_m,
        BLOCK_K=min(depth, bands.columns * bands.inputs),
        PRECISION=precision(x),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def conv_gradient(gradient: Tensor, x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (B, X, Y, C) and weight for gradient (B, X, Y, O), both contiguous."""
    flipped = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)  # (C, O/G, k, k)
    return conv(gradient, flipped, None, groups), weight_gradient(gradient, x, weight, groups)


def weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, groups: int, settings: Settings | None = None
) -> Tensor:
    """Return the gradient (O, C/G, k, k) of the weight."""
    blocks, depth, warps, stages = settings or WEIGHT_SETTINGS
    batch, rows, columns, _ = x.shape
    outputs, inputs, taps_x, taps_y = weight.shape
    bands = _sizes(weight, groups)
    summands, results = bands.columns * bands.inputs, bands.results * bands.outputs
    block_k = min(depth, summands)
    tiles = batch * rows * triton.cdiv(columns, bands.results)
    programs = groups * taps_x * triton.cdiv(summands, block_k)
    splits = max(1, min(triton.cdiv(PROGRAMS, programs), triton.cdiv(tiles, 4 * blocks)))
    tiles_per_split = triton.cdiv(triton.cdiv(tiles, splits), blocks) * blocks
    parts = torch.empty(splits, groups, taps_x, summands, results, device=x.device, dtype=torch.float32)
    _weight_gradient_kernel[(triton.cdiv(summands, block_k), groups * taps_x, splits)](
        x,
        gradient,
        parts,
        rows,
        columns,
        tiles,
        tiles_per_split,
        GROUPS=groups,
        GROUP_INPUTS=inputs,
        GROUP_OUTPUTS=outputs // groups,
        TAPS_X=taps_x,
        TAPS_Y=taps_y,
        RESULTS=bands.results,
        COLUMNS=bands.columns,
        INPUTS=bands.inputs,
        OUTPUTS=bands.outputs,
        BLOCK_M=blocks,
        BLOCK_K=block_k,
        PRECISION=precision(x),
        num_warps=warps,
        num_stages=stages,
    )
    d_bands = parts.sum(0).view(groups, taps_x, bands.columns, bands.inputs, bands.results, bands.outputs)
    # Sum along the bands: column − y = t.
    d_bands = d_bands.permute(0, 5, 3, 1, 2, 4).flatten(-2)  # (G, O/G, C/G, k, columns·results)
    tap, y = torch.arange(taps_y, device=x.device)[:, None], torch.arange(bands.results, device=x.device)
    d_weight = d_bands[..., (tap + y) * bands.results + y].sum(-1)  # (G, O/G, C/G, k, k)
    return d_weight[:, : outputs // groups, :inputs].flatten(0, 1).to(weight.dtype)


def _sizes(weight: Tensor, groups: int) -> _Bands:
    outputs = triton.next_power_of_2(len(weight) // groups)
    inputs = triton.next_power_of_2(weight.shape[1])
    results = max(RESULTS, SHORTEST // outputs)
    columns = max(triton.next_power_of_2(results + weight.shape[3] - 1), SHORTEST // inputs)
    return _Bands(results, columns, inputs, outputs)


def _band_matrices(weight: Tensor, groups: int, bands: _Bands) -> Tensor:
    """Return T (G, k, columns·inputs, results·outputs) of weight (O, C/G, k, k)."""
    grouped = weight.unflatten(0, (groups, -1))  # (G, O/G, C/G, k, k)
    # One tap more, a zero, for all that is off the bands.
    missing = (0, 1, 0, 0, 0, bands.inputs - grouped.shape[2], 0, bands.outputs - grouped.shape[1])
    taps = weight.shape[3]
    tap = torch.arange(bands.columns, device=weight.device)[:, None] - torch.arange(bands.results, device=weight.device)
    table = F.pad(grouped, missing)[..., torch.where((tap >= 0) & (tap < taps), tap, taps)]
    return table.permute(0, 3, 4, 2, 5, 1).reshape(groups, weight.shape[2], -1, bands.results * bands.outputs)


@triton.jit
def _conv_kernel(
    x: tl.tensor,  # (B, rows, columns, C)
    table: tl.tensor,  # (G, TAPS_X, COLUMNS·INPUTS, RESULTS·OUTPUTS)
    bias: tl.tensor,  # (O,)
    out: tl.tensor,  # (B, rows, columns, O)
    rows: tl.tensor,
    columns: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    GROUP_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TAPS_X: tl.constexpr,
    TAPS_Y: tl.constexpr,
    RESULTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    group = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    across = tl.cdiv(columns, RESULTS)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, left = m // across, m % across * RESULTS
    n = tl.arange(0, RESULTS * OUTPUTS)
    acc = tl.zeros((BLOCK_M, RESULTS * OUTPUTS), tl.float32)
    field = x + sample * rows * columns * (GROUPS * GROUP_INPUTS) + group * GROUP_INPUTS
    matrices = table + group.to(tl.int64) * (TAPS_X * COLUMNS * INPUTS * RESULTS * OUTPUTS)
    steps: tl.constexpr = COLUMNS * INPUTS // BLOCK_K
    for step in range(TAPS_X * steps):
        k = step % steps * BLOCK_K + tl.arange(0, BLOCK_K)
        a = _window(
            field,
            tl.where(row < rows, row + (step // steps - TAPS_X // 2), 2 * rows),
            left - TAPS_Y // 2,
            k,
            rows,
            columns,
            GROUPS * GROUP_INPUTS,
            GROUP_INPUTS,
            TAPS_Y,
            INPUTS,
            RESULTS,
        )
        summand = step // steps * (COLUMNS * INPUTS) + k
        b = tl.load(matrices + summand[:, None] * (RESULTS * OUTPUTS) + n[None, :])
        acc = product(a, b, acc, PRECISION)
    channel = n % OUTPUTS
    y = left[:, None] + (n // OUTPUTS)[None, :]
    known = (row[:, None] < rows) & (y < columns) & (channel[None, :] < GROUP_OUTPUTS)
    if HAS_BIAS:
        acc += tl.load(bias + group * GROUP_OUTPUTS + channel, mask=channel < GROUP_OUTPUTS, other=0.0).to(tl.float32)[
            None, :
        ]
    place = (
        ((sample * rows + row[:, None]) * columns + y) * (GROUPS * GROUP_OUTPUTS)
        + group * GROUP_OUTPUTS
        + channel[None, :]
    )
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=known)


@triton.jit
def _weight_gradient_kernel(
    x: tl.tensor,  # (B, rows, columns, C)
    gradient: tl.tensor,  # (B, rows, columns, O)
    parts: tl.tensor,  # (splits, G, TAPS_X, COLUMNS·INPUTS, RESULTS·OUTPUTS), float32
    rows: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,  # blocks of results in the batch
    tiles_per_split: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    GROUP_OUTPUTS: tl.constexpr,
    TAPS_X: tl.constexpr,
    TAPS_Y: tl.constexpr,
    RESULTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    matrix = tl.program_id(1)
    group, tap = matrix // TAPS_X, matrix % TAPS_X
    split = tl.program_id(2)
    across = tl.cdiv(columns, RESULTS)
    n = tl.arange(0, RESULTS * OUTPUTS)
    channel = n % OUTPUTS
    last = tl.minimum((split + 1) * tiles_per_split, tiles)
    acc = tl.zeros((BLOCK_K, RESULTS * OUTPUTS), tl.float32)
    for first in range(split * tiles_per_split, last, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        sample = (m // (rows * across)).to(tl.int64)
        row, left = m // across % rows, m % across * RESULTS
        a = _window(
            x + (sample * rows * columns * (GROUPS * GROUP_INPUTS) + group * GROUP_INPUTS)[:, None],
            tl.where(m < last, row + (tap - TAPS_X // 2), 2 * rows),
            left - TAPS_Y // 2,
            k,
            rows,
            columns,
            GROUPS * GROUP_INPUTS,
            GROUP_INPUTS,
            TAPS_Y,
            INPUTS,
            RESULTS,
        )
        y = left[:, None] + (n // OUTPUTS)[None, :]
        known = (m[:, None] < last) & (y < columns) & (channel[None, :] < GROUP_OUTPUTS)
        place = (
            ((sample * rows + row)[:, None] * columns + y) * (GROUPS * GROUP_OUTPUTS)
            + group * GROUP_OUTPUTS
            + channel[None, :]
        )
        g = tl.load(gradient + place, mask=known, other=0.0)
        acc = product(tl.trans(a), g, acc, PRECISION)
    summands: tl.constexpr = COLUMNS * INPUTS
    place = (split.to(tl.int64) * tl.num_programs(1) + matrix) * summands + k[:, None]
    tl.store(parts + place * (RESULTS * OUTPUTS) + n[None, :], acc, mask=k[:, None] < summands)


@triton.jit
def _window(
    field: tl.tensor,
    row: tl.tensor,  # (M,), the input row, at most half a kernel outside; from 2·rows on: none
    left: tl.tensor,  # (M,), the first input column, likewise
    k: tl.tensor,  # (K,), column and channel
    rows: tl.tensor,
    columns: tl.tensor,
    CHANNELS: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    TAPS_Y: tl.constexpr,
    INPUTS: tl.constexpr,
    RESULTS: tl.constexpr,
) -> tl.tensor:
    """Return the inputs (M, K) that blocks of results see, wrapped around."""
    column, channel = k // INPUTS, k % INPUTS
    y = left[:, None] + column[None, :]
    # Columns that only results outside the field would see may lie more than one turn away.
    seen = (column < RESULTS + TAPS_Y - 1) & (channel < GROUP_INPUTS)
    known = seen[None, :] & (y < columns + TAPS_Y // 2) & (row[:, None] < rows + rows)
    row = tl.where(row < 0, row + rows, tl.where(row < rows, row, row - rows))
    y = tl.where(y < 0, y + columns, tl.where(y < columns, y, y - columns))
    place = (row[:, None].to(tl.int64) * columns + y) * CHANNELS + channel[None, :]
    return tl.load(field + place, mask=known, other=0.0)

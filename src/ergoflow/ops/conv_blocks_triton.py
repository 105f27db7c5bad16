"""A field in blocks of columns, as the convolution of `ergoflow.ops.conv_triton` takes it.

Fields (B, X, Y, C) are copied into blocks of r columns, group by group and wrapped around,

    (B, G, X + k − 1, blocks + 1, r·C/G),

beginning k/2 rows above the field and r/2 columns before it, so that a block of results sees two blocks of each of k
rows. A tile of inputs is then one piece of memory and the next tap is one row of blocks further: no masks, no
remainders. To that end X is rounded up to whole sets of q rows, which are computed together, and C/G to a power of two,
with zeros for the channels that it lacks.

On its way the copy bends x, where GELU(x) is the input, or adds it up: of a gradient that is the gradient of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.gelu_triton import bent as gelu
from ergoflow.ops.tiles_triton import SHORTEST

# Numbers of a tile of the copy.
COPIED = 8192
# The shortest block of inputs, in numbers: 64 bytes in half precision.
SHORTEST_BLOCK = 32
# Results of a tile of the convolution, of both its matrices: q rows are taken as long as they fit.
TILE_RESULTS = 128


class Blocks(NamedTuple):
    """How a convolution sees its input: true sizes, and r, q and the powers of two that cover a group's channels."""

    grid: tuple[int, int]
    taps: tuple[int, int]
    groups: int
    group_inputs: int
    group_outputs: int
    columns: int
    rows: int
    inputs: int
    outputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, blocks of a row (one more than there are blocks of results) and numbers of a block."""
        rows = triton.cdiv(self.grid[0], self.rows) * self.rows + self.taps[0] - 1
        return rows, triton.cdiv(self.grid[1], self.columns) + 1, self.columns * self.inputs


def blocks_of(grid: Sequence[int], weight: Tensor, groups: int, *, transposed: bool = False) -> Blocks:
    """Return the blocks of the input of a convolution with weight (O, C/G, k, k), or of one with it transposed.

    r is the smallest power of two that lets two blocks hold what a block of results sees, and fills a product.
    """
    group_outputs, group_inputs, *taps = len(weight) // groups, *weight.shape[1:]
    if transposed:
        group_inputs, group_outputs = group_outputs, group_inputs
    inputs, outputs = triton.next_power_of_2(group_inputs), triton.next_power_of_2(group_outputs)
    columns = max(triton.next_power_of_2(taps[1] - 1), SHORTEST_BLOCK // inputs, SHORTEST // outputs, 1)
    rows = 1
    while 2 * rows <= taps[0] and 4 * rows * columns * outputs <= TILE_RESULTS:
        rows *= 2
    sizes = (columns, rows, inputs, outputs)
    return Blocks((grid[0], grid[1]), (taps[0], taps[1]), groups, group_inputs, group_outputs, *sizes)


def in_blocks(x: Tensor, blocks: Blocks, *, bend: bool = False) -> Tensor:
    """Return the blocks (B, G, *shape) of x (B, X, Y, C), contiguous, or of GELU(x)."""
    return _copied(x, blocks, bend=bend, sums=False)[0]


def in_blocks_with_sum(x: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the blocks of x and its sum over samples and points (C,) in float32."""
    out, sums = _copied(x, blocks, bend=False, sums=True)
    return out, sums.flatten(0, -2).sum(0)


def _copied(x: Tensor, blocks: Blocks, *, bend: bool, sums: bool) -> tuple[Tensor, Tensor]:
    """Return x in blocks, and its sums over pieces of rows (B, X, pieces, C), which are written only if asked for."""
    rows, across, numbers = blocks.shape
    groups = triton.next_power_of_2(blocks.groups)
    points = max(SHORTEST, COPIED // (groups * blocks.inputs))
    pieces = triton.cdiv(across * blocks.columns, points)
    out = x.new_empty(len(x), blocks.groups, rows, across, numbers)
    part = x.new_empty(len(x), blocks.grid[0], pieces, x.shape[-1], dtype=torch.float32) if sums else out
    _copy_kernel[(pieces, rows, len(x))](
        x,
        out,
        part,
        *blocks.grid,
        -(blocks.taps[0] // 2) % blocks.grid[0],
        -(blocks.columns // 2) % blocks.grid[1],
        across,
        BEND=bend,
        HAS_SUMS=sums,
        GROUPS=blocks.groups,
        GROUP_INPUTS=blocks.group_inputs,
        COLUMNS=blocks.columns,
        INPUTS=blocks.inputs,
        BLOCK_G=groups,
        BLOCK_P=points,
        num_warps=4,
    )
    return out, part


@triton.jit
def _copy_kernel(
    x: tl.tensor,  # (B, rows, columns, C)
    out: tl.tensor,  # (B, G, padded rows, across, COLUMNS·INPUTS)
    sums: tl.tensor,  # (B, rows, pieces, C), float32
    rows: tl.tensor,
    columns: tl.tensor,
    first_row: tl.tensor,  # of x, that the first one of out holds
    first_column: tl.tensor,
    across: tl.tensor,
    BEND: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    row, padded_rows = tl.program_id(1), tl.num_programs(1)
    sample = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.arange(0, BLOCK_G * INPUTS)
    if GROUP_INPUTS == INPUTS:
        channel, known = c, c < GROUPS * INPUTS
    else:
        channel, known = c // INPUTS * GROUP_INPUTS + c % INPUTS, (c // INPUTS < GROUPS) & (c % INPUTS < GROUP_INPUTS)
    point = (sample * rows + (row + first_row) % rows) * columns + (place + first_column) % columns
    values = tl.load(
        x + point[:, None] * (GROUPS * GROUP_INPUTS) + channel[None, :],
        mask=(place < across * COLUMNS)[:, None] & known[None, :],
        other=0.0,
    )
    if BEND:
        values = gelu(values.to(tl.float32)).to(values.dtype)
    # The first rows and columns of the copy hold all of x once.
    if HAS_SUMS and row < rows:
        once = tl.sum(tl.where((place < columns)[:, None], values.to(tl.float32), 0.0), 0)
        part = (sample * rows + row) * tl.num_programs(0) + tl.program_id(0)
        tl.store(sums + part * (GROUPS * GROUP_INPUTS) + channel, once, mask=known)
    # Group by group, so that a program writes long pieces.
    pieces = values.reshape(BLOCK_P, BLOCK_G, INPUTS).permute(1, 0, 2).reshape(BLOCK_G, BLOCK_P * INPUTS)
    group = tl.arange(0, BLOCK_G)
    number = tl.program_id(0) * (BLOCK_P * INPUTS) + tl.arange(0, BLOCK_P * INPUTS)
    line = (sample * GROUPS + group) * padded_rows + row
    inside = (group < GROUPS)[:, None] & (number < across * (COLUMNS * INPUTS))[None, :]
    tl.store(out + line[:, None] * (across * (COLUMNS * INPUTS)) + number[None, :], pieces, mask=inside)

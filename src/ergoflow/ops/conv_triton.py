"""The Triton twin of `ergoflow.ops.conv` on a plane: a grouped convolution as a product with band matrices.

A group has few channels (16 in, 8 out), too few for the matrix units. A block of r neighbouring columns has r times as
many. With r ≥ k − 1 and blocks of x that begin r/2 columns before those of y, r results along y see two blocks of each
of k rows, b and b + 1:

    y[row, b] = Σ_t x[row + t − c, b] T[t, 0] + x[row + t − c, b + 1] T[t, 1],
    T[t, s][(column, i), (y, o)] = w[o, i, t, s·r + column − y + c − r/2]        (zero outside the taps).

For 9×9 taps and r = 8 these are 16/9 of the multiplications, all of them on the matrix units. What keeps these fed:

- Fields are first copied into blocks (`ergoflow.ops.conv_blocks_triton`): a tile of inputs is then one piece of memory.
- Both matrices are applied to a tile at once, Z[b] = Σ_t x[row + t − c, b] [T[t, 0] | T[t, 1]], and the results are
  moved instead of the inputs, y[b] = Z₀[b] + Z₁[b + 1]: a tile is read once per tap, and a product is twice as wide.
- Where it is still narrow, q rows of results share the rows they see: k + q − 1 tiles instead of q·k.
- The gradient of w is that of T, its bands summed: products of blocks of the gradient with the two blocks of x that
  they see, for several taps at a time, so that x is read once for these.
- Where the input is GELU(x), the copy bends x on its way, and the gradient is multiplied by GELU'(x) where it is made.

The gradient of x is the same convolution with flipped weights. A number that is not finite spreads to the blocks of
results that share a tile with it, not only to its own neighbours.

Fields are channel-last, (B, X, Y, C).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.conv_blocks_triton import TILE_RESULTS, Blocks, blocks_of, in_blocks_with_sum
from ergoflow.ops.gelu_triton import bent_and_slope
from ergoflow.ops.tiles_triton import SHORTEST, precision, product


class Settings(NamedTuple):
    """Blocks, results and summands of a tile, warps and pipeline stages of a kernel.

    In the gradient of w the sum is over blocks, and `depth` counts the numbers of x that a block of results sees.
    """

    blocks: int
    width: int
    depth: int
    warps: int
    stages: int


# Of some ten tried on an H200, those that took least for all three layers of the decoder together.
CONV_SETTINGS = Settings(blocks=128, width=TILE_RESULTS, depth=64, warps=4, stages=3)
# For blocks of less than 64 numbers, where the results take as long as the products.
NARROW_SETTINGS = Settings(blocks=64, width=128, depth=64, warps=4, stages=4)
WEIGHT_SETTINGS = Settings(blocks=64, width=128, depth=256, warps=8, stages=3)
# Programs of the weight's gradient, one at a time on each multiprocessor: five rounds on an H200.
PROGRAMS = 5 * 132


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    blocks: Blocks,
    *,
    transposed: bool = False,
    bent: Tensor | None = None,
    settings: Settings | None = None,
) -> Tensor:
    """Return the circular convolution (B, X, Y, O) of x in blocks with weight (O, C/G, k, k), bias (O,); or, with the
    weight transposed and flipped, the gradient (B, X, Y, C) for a gradient in blocks. Where the input was GELU(`bent`),
    the result is multiplied by GELU'(`bent`): then it is the gradient of `bent`, (B, X, Y, C), contiguous."""
    (rows, columns), (_, across, numbers) = blocks.grid, blocks.shape
    tile, width, depth, warps, stages = settings or (CONV_SETTINGS if numbers >= 64 else NARROW_SETTINGS)
    table = _band_matrices(x, weight, blocks, transposed)
    tile_k, tile_n = min(_summands(depth, x), numbers), min(width, table.shape[-1])
    out = x.new_empty(len(x), rows, columns, blocks.groups * blocks.group_outputs)
    places = triton.cdiv(rows, blocks.rows) * across
    tile_m = min(tile, max(SHORTEST, triton.next_power_of_2(places)))
    # Groups first: their programs write into the same lines of memory at about the same time.
    _conv_kernel[(blocks.groups * table.shape[-1] // tile_n, triton.cdiv(places, tile_m - 1), len(x))](
        x,
        table,
        out if bias is None else bias.contiguous(),
        out if bent is None else bent,
        out,
        rows,
        columns,
        x.shape[2],
        across,
        places,
        table.shape[1],
        GROUPS=blocks.groups,
        GROUP_OUTPUTS=blocks.group_outputs,
        HAS_BIAS=bias is not None,
        HAS_SLOPE=bent is not None,
        COLUMNS=blocks.columns,
        ROWS=blocks.rows,
        OUTPUTS=blocks.outputs,
        DEPTH=numbers,
        BLOCK_M=tile_m,
        BLOCK_N=tile_n,
        BLOCK_K=tile_k,
        PRECISION=precision(x),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def conv_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, groups: int, *, bent: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (B, X, Y, C), weight and bias for gradient (B, X, Y, O), contiguous; x is in blocks.
    Where x is GELU(`bent`), the first one is that of `bent`."""
    blocks = blocks_of(gradient.shape[1:3], weight, groups, transposed=True)
    gradient, d_bias = in_blocks_with_sum(gradient, blocks)
    d_x = conv(gradient, weight, None, blocks, transposed=True, bent=bent)
    return d_x, weight_gradient(gradient, x, weight, blocks), d_bias


def weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, blocks: Blocks, settings: Settings | None = None
) -> Tensor:
    """Return the gradient (O, C/G, k, k) of the weight for a gradient, laid out as `blocks` says, and x, both in
    blocks."""
    tile, width, depth, warps, stages = settings or WEIGHT_SETTINGS
    tile = _summands(tile, x)
    (rows, columns), (taps_x, taps_y), results = blocks.grid, blocks.taps, blocks.columns * blocks.inputs
    seen, x_columns = 2 * blocks.columns * blocks.outputs, x.shape[-1] // blocks.outputs
    # Taps of a program: their gradients lie among the rows that the copy has above the first one.
    taps = 1
    while 2 * taps <= taps_x // 2 + 1 and 2 * taps * results <= width:
        taps *= 2
    tile_n, tile_k = min(width, taps * results), min(depth, seen)
    tile_b = min(tile, triton.next_power_of_2(triton.cdiv(columns, blocks.columns)))
    tiles = (triton.cdiv(rows, tile // tile_b), triton.cdiv(columns, tile_b * blocks.columns))
    steps, sets = len(x) * tiles[0] * tiles[1], triton.cdiv(taps_x, taps)
    programs = blocks.groups * sets * (taps * results // tile_n) * (seen // tile_k)
    per_split = triton.cdiv(steps, max(1, min(PROGRAMS // programs, steps)))
    splits = triton.cdiv(steps, per_split)
    parts = torch.empty(splits, blocks.groups * sets, taps * results, seen, device=x.device, dtype=torch.float32)
    _weight_gradient_kernel[(seen // tile_k * (taps * results // tile_n), blocks.groups * sets, splits)](
        x,
        gradient,
        parts,
        rows,
        columns,
        x.shape[2],
        x.shape[3] * x.shape[4],
        gradient.shape[2],
        gradient.shape[3] * gradient.shape[4],
        steps,
        per_split,
        *tiles,
        SETS=sets,
        TAPS=taps,
        CENTRE=taps_x // 2,
        LEFT=max(x_columns - blocks.columns, 0) // 2,
        GROUPS=blocks.groups,
        COLUMNS=blocks.columns,
        INPUTS=blocks.outputs,
        OUTPUTS=blocks.inputs,
        BLOCK_B=tile_b,
        BLOCK_M=tile,
        BLOCK_N=tile_n,
        BLOCK_K=tile_k,
        PRECISION=precision(x),
        num_warps=warps,
        num_stages=stages,
    )
    # dw[o, i, t, t'] = Σ_y dT[t][(y, o), (first + y + t', i)]: along a band y and the column grow together.
    first = min(x_columns, blocks.columns) // 2 - taps_y // 2
    parts = parts.view(splits, blocks.groups, sets * taps, blocks.columns, blocks.inputs, -1, blocks.outputs)
    part, group, tap, y, o, column, i = parts.stride()
    bands = parts.as_strided(
        (splits, blocks.groups, taps_x, blocks.columns, blocks.group_inputs, taps_y, blocks.group_outputs),
        (part, group, tap, y + column, o, column, i),
        first * column,
    )
    d_weight = bands.sum((0, 3)).permute(0, 2, 4, 1, 3)  # (G, O/G, C/G, k, k)
    return d_weight.to(weight.dtype).reshape(weight.shape)


def _summands(count: int, x: Tensor) -> int:
    """Return the summands of a tile that take the memory of `count` in half precision."""
    return max(SHORTEST, 2 * count // x.element_size())


def _band_matrices(x: Tensor, weight: Tensor, blocks: Blocks, transposed: bool) -> Tensor:
    """Return [T[t, 0] | T[t, 1]] for each row of inputs that q rows of results see, (G, k + q − 1, r·inputs, N).

    N = q·r·outputs·2: the two matrices alternate, so that a thread holds what belongs together.
    """
    steps, results = blocks.taps[0] + blocks.rows - 1, 2 * blocks.rows * blocks.columns * blocks.outputs
    table = x.new_empty(blocks.groups, steps, blocks.columns * blocks.inputs, results)
    tile = min(4096, table[0, 0].numel())
    _table_kernel[(triton.cdiv(table[0, 0].numel(), tile), steps, blocks.groups)](
        weight.contiguous(),
        table,
        GROUP_INPUTS=blocks.group_inputs,
        GROUP_OUTPUTS=blocks.group_outputs,
        TRANSPOSED=transposed,
        TAPS_X=blocks.taps[0],
        TAPS_Y=blocks.taps[1],
        COLUMNS=blocks.columns,
        ROWS=blocks.rows,
        INPUTS=blocks.inputs,
        OUTPUTS=blocks.outputs,
        BLOCK=tile,
        num_warps=4,
    )
    return table


@triton.jit
def _table_kernel(
    weight: tl.tensor,  # (O, C/G, TAPS_X, TAPS_Y)
    table: tl.tensor,  # (G, steps, COLUMNS·INPUTS, ROWS·COLUMNS·OUTPUTS·2)
    GROUP_INPUTS: tl.constexpr,
    GROUP_OUTPUTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TAPS_X: tl.constexpr,
    TAPS_Y: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    step, group = tl.program_id(1), tl.program_id(2)
    results: tl.constexpr = ROWS * COLUMNS * OUTPUTS * 2
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, n = place // results, place % results
    side, o, y, row = n % 2, n // 2 % OUTPUTS, n // (2 * OUTPUTS) % COLUMNS, n // (2 * OUTPUTS * COLUMNS)
    i = k % INPUTS
    tap_x, tap_y = step - row, side * COLUMNS + k // INPUTS - y - (COLUMNS // 2 - TAPS_Y // 2)
    known = (tap_x >= 0) & (tap_x < TAPS_X) & (tap_y >= 0) & (tap_y < TAPS_Y) & (i < GROUP_INPUTS) & (o < GROUP_OUTPUTS)
    tap = tap_x * TAPS_Y + tap_y
    if TRANSPOSED:
        channel = (group * GROUP_INPUTS + i) * GROUP_OUTPUTS + o
        tap = TAPS_X * TAPS_Y - 1 - tap
    else:
        channel = (group * GROUP_OUTPUTS + o) * GROUP_INPUTS + i
    values = tl.load(weight + channel * (TAPS_X * TAPS_Y) + tap, mask=known, other=0.0)
    matrix = (group * tl.num_programs(1) + step).to(tl.int64) * (COLUMNS * INPUTS * results)
    tl.store(table + matrix + place, values.to(table.dtype.element_ty), mask=k < COLUMNS * INPUTS)


@triton.jit
def _conv_kernel(
    x: tl.tensor,  # (B, G, padded rows, across, DEPTH)
    table: tl.tensor,  # (G, steps, DEPTH, ROWS·COLUMNS·OUTPUTS·2)
    bias: tl.tensor,  # (O,)
    bent: tl.tensor,  # (B, rows, columns, O)
    out: tl.tensor,  # (B, rows, columns, O)
    rows: tl.tensor,
    columns: tl.tensor,
    padded_rows: tl.tensor,
    across: tl.tensor,  # blocks of a padded row
    places: tl.tensor,  # blocks of all sets of ROWS rows
    steps: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    results: tl.constexpr = ROWS * COLUMNS * OUTPUTS * 2
    chunks: tl.constexpr = DEPTH // BLOCK_K
    group, part = tl.program_id(0) // (results // BLOCK_N), tl.program_id(0) % (results // BLOCK_N)
    sample = tl.program_id(2).to(tl.int64)
    # The last block of a tile only completes the one before it.
    index = tl.arange(0, BLOCK_M)
    m = tl.program_id(1) * (BLOCK_M - 1) + index
    row, b = m // across * ROWS, m % across
    first = tl.minimum(m, places - 1)
    first = first // across * (ROWS * across) + first % across
    k, n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    field = x + (sample * GROUPS + group) * padded_rows * across * DEPTH
    a_place = field + first[:, None].to(tl.int64) * DEPTH + k[None, :]
    b_place = table + group.to(tl.int64) * (steps * (DEPTH * results)) + part * BLOCK_N
    b_place += k[:, None] * results + n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps * chunks):
        a = tl.load(a_place + (step // chunks * across * DEPTH + step % chunks * BLOCK_K))
        acc = product(a, tl.load(b_place + step * (BLOCK_K * results)), acc, PRECISION)
    own, following = acc.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
    following_index = tl.minimum(index + 1, BLOCK_M - 1)
    y = own + tl.gather(following, tl.broadcast_to(following_index[:, None], (BLOCK_M, BLOCK_N // 2)), 0)
    n = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    channel, column, set_row = n % OUTPUTS, n // OUTPUTS % COLUMNS, n // (OUTPUTS * COLUMNS)
    if HAS_BIAS:
        y += tl.load(bias + group * GROUP_OUTPUTS + channel, mask=channel < GROUP_OUTPUTS, other=0.0).to(tl.float32)
    known = (m < places) & (index < BLOCK_M - 1)
    known = known[:, None] & (b[:, None] * COLUMNS + column[None, :] < columns) & (channel < GROUP_OUTPUTS)[None, :]
    known &= row[:, None] + set_row[None, :] < rows
    outputs: tl.constexpr = GROUPS * GROUP_OUTPUTS
    corner = ((sample * rows + row) * columns + b * COLUMNS) * outputs + group * GROUP_OUTPUTS
    within = (set_row * columns + column) * outputs + channel
    place = corner[:, None] + within[None, :]
    if HAS_SLOPE:
        _, slope = bent_and_slope(tl.load(bent + place, mask=known, other=0.0).to(tl.float32))
        y *= slope
    tl.store(out + place, y.to(out.dtype.element_ty), mask=known)


@triton.jit
def _weight_gradient_kernel(
    x: tl.tensor,  # (B, G, x_rows, x_width)
    gradient: tl.tensor,  # (B, G, g_rows, g_width)
    parts: tl.tensor,  # (splits, G·SETS, TAPS·COLUMNS·OUTPUTS, 2·COLUMNS·INPUTS), float32
    rows: tl.tensor,
    columns: tl.tensor,
    x_rows: tl.tensor,
    x_width: tl.tensor,
    g_rows: tl.tensor,
    g_width: tl.tensor,
    steps: tl.tensor,  # tiles of the batch
    steps_per_split: tl.tensor,
    tiles_down: tl.tensor,  # tiles of a sample
    tiles_across: tl.tensor,
    SETS: tl.constexpr,
    TAPS: tl.constexpr,
    CENTRE: tl.constexpr,
    LEFT: tl.constexpr,  # columns of x left of the first window
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    results: tl.constexpr = COLUMNS * OUTPUTS
    seen: tl.constexpr = 2 * COLUMNS * INPUTS
    k = tl.program_id(0) % (seen // BLOCK_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0) // (seen // BLOCK_K) * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix, split = tl.program_id(1), tl.program_id(2)
    group, tap = matrix // SETS, matrix % SETS * TAPS
    m = tl.arange(0, BLOCK_M)
    row, b = m // BLOCK_B, m % BLOCK_B
    # Tap `tap + j` takes x from row + tap and the gradient from row − j, which may lie above the first one.
    x_place = (row[:, None] + tap) * x_width
    g_place = (row[:, None] - n[None, :] // results + CENTRE) * g_width
    x_number = b[:, None] * (COLUMNS * INPUTS) + k[None, :] + LEFT * INPUTS
    g_number = b[:, None] * results + n[None, :] % results
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in range(split * steps_per_split, tl.minimum((split + 1) * steps_per_split, steps)):
        sample = (step // (tiles_down * tiles_across)).to(tl.int64)
        top = step // tiles_across % tiles_down * (BLOCK_M // BLOCK_B)
        left = step % tiles_across * (BLOCK_B * COLUMNS)
        inside = (row < rows - top)[:, None]
        start = ((sample * GROUPS + group) * x_rows + top) * x_width + left * INPUTS
        a = tl.load(x + start + x_place + x_number, mask=inside & (x_number < x_width - left * INPUTS), other=0.0)
        start = ((sample * GROUPS + group) * g_rows + top) * g_width + (left + COLUMNS // 2) * OUTPUTS
        g = tl.load(
            gradient + start + g_place + g_number, mask=inside & (g_number < (columns - left) * OUTPUTS), other=0.0
        )
        acc = product(tl.trans(g), a, acc, PRECISION)
    place = (split.to(tl.int64) * tl.num_programs(1) + matrix) * (TAPS * results) + n[:, None]
    tl.store(parts + place * seen + k[None, :], acc)

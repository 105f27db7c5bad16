"""The Triton twin of `ergoflow.ops.depthwise` on a plane: the convolution and its gradients.

A k×k depthwise convolution has k² multiplications per number and no use for matrix units: on an H200 7×7 taps take as
long to multiply (49 of 33e12 a second) as 6 bytes take to move. So nothing may be spent on the way to the
multiplication. A thread owns one channel, whose taps stay in its registers, and patches of ROWS × COLUMNS results. It
goes down a patch row by row of the input: a number is read once per patch and multiplied by all taps at once that any
of the results has for it, with k rows of results under way. With 8 × 4 results that is 14·10/32 = 4.4 reads of 4 bytes
per result, 18 bytes through the L1 cache, whose 128 bytes a cycle leave it idle two thirds of the time. A warp is 32
channels of one patch: 96, 192 and 320 channels fill whole warps, where a tile of all channels would have to be a power
of two. That is also why the norm after it is a kernel of its own (`ergoflow.ops.layer_norm_triton`): it reads the
convolution once more, 2 bytes, mostly from L2, and the gradient needs that copy anyway.

The gradient of x is the same kernel with the taps turned around; the gradient of the taps has results and taps swap
their roles: taps are added up, while results stay. Indices wrap or stop at the ends of an axis, no copy is padded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.window_triton import add_products


class Settings(NamedTuple):
    """Results of a patch along both axes, and patches of a program, one for each of its warps."""

    rows: int
    columns: int
    warps: int


# For 7×7 taps 128 registers a thread, some 150 for their gradient, and none spilled. Triton takes 3 to 4 s to compile
# each, a time that grows with the square of a patch.
CONV_SETTINGS = Settings(rows=8, columns=4, warps=4)
CONV_GRADIENT_SETTINGS = Settings(rows=8, columns=4, warps=4)
TAPS_GRADIENT_SETTINGS = Settings(rows=8, columns=4, warps=4)
# Programs that walk, as many as run at a time on 132 multiprocessors: three on each.
TAPS_PROGRAMS = 396
# Channels of a warp.
CHANNELS = 32

# Sizes of the field: kernels for multiples of 16 would have the same machine code, compiled again.
SIDES = ("rows", "columns", "height", "width", "batch")

# What lies beyond the ends of an axis.
WRAP, REPLICATE, ZEROS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

Edges = tuple[int, int]


def conv(x: Tensor, taps: Tensor, bias: Tensor, edges: Edges, dtype: torch.dtype) -> Tensor:
    """Return y[n, d] = bias[d] + Σ_t taps[t, d] x[n + t − c, d] in `dtype`; x (B, X, Y, D), taps (k², D) in float32."""
    out = torch.empty_like(x, dtype=dtype)
    _launch_conv(x, taps, bias, None, out, edges, (0, 0), CONV_SETTINGS)
    return out


def conv_gradient(d_y: Tensor, d_stream: Tensor, taps: Tensor, edges: Edges) -> Tensor:
    """Return the gradient of x, added to another one in whose dtype it comes, both (B, X, Y, D)."""
    reach = _reach(taps)
    if REPLICATE.value not in edges:
        d_x = torch.empty_like(d_stream)
        _launch_conv(d_y, taps, None, d_stream, d_x, edges, (0, 0), CONV_GRADIENT_SETTINGS)
        return d_x
    # The last point of an axis has the gradients of its copies beyond the wall too.
    pads = tuple(reach if edge == REPLICATE.value else 0 for edge in edges)
    sizes = [size + 2 * pad for size, pad in zip(d_y.shape[1:3], pads, strict=True)]
    padded = torch.empty(len(d_y), *sizes, d_y.shape[3], device=d_y.device, dtype=torch.float32)
    beyond = tuple(ZEROS.value if edge == REPLICATE.value else edge for edge in edges)
    _launch_conv(d_y, taps, None, None, padded, (beyond[0], beyond[1]), (pads[0], pads[1]), CONV_GRADIENT_SETTINGS)
    for axis, (size, pad) in enumerate(zip(d_y.shape[1:3], pads, strict=True), start=1):
        inner = padded.narrow(axis, pad, size)
        if pad:
            inner.select(axis, 0).add_(padded.narrow(axis, 0, pad).sum(axis))
            inner.select(axis, size - 1).add_(padded.narrow(axis, pad + size, pad).sum(axis))
        padded = inner
    return (d_stream + padded).to(d_stream.dtype)


def taps_gradient(x: Tensor, d_y: Tensor, taps: Tensor, edges: Edges) -> Tensor:
    """Return the gradient (k², D) of the taps in float32."""
    rows, columns, warps = TAPS_GRADIENT_SETTINGS
    batch, height, width, dim = x.shape
    chunks = triton.cdiv(dim, CHANNELS)
    tiles = triton.cdiv(batch * triton.cdiv(height, rows) * triton.cdiv(width, columns), warps)
    splits = max(1, min(tiles, TAPS_PROGRAMS // chunks))
    parts = torch.empty(splits, *taps.shape, device=x.device, dtype=torch.float32)
    _taps_gradient_kernel[(chunks, splits)](
        x,
        d_y,
        parts,
        batch,
        height,
        width,
        DIM=dim,
        TAPS=2 * _reach(taps) + 1,
        EDGE_X=edges[0],
        EDGE_Y=edges[1],
        EVEN_X=height % rows == 0,
        EVEN_Y=width % columns == 0 and columns >= _reach(taps),
        ROWS=rows,
        COLUMNS=columns,
        PATCHES=warps,
        CHANNELS=CHANNELS,
        num_warps=warps,
        num_stages=1,
    )
    return parts.sum(0)


def _launch_conv(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    stream: Tensor | None,
    out: Tensor,
    edges: Edges,
    pads: Edges,
    settings: Settings,
) -> None:
    """Write to `out` the sum over taps plus the bias; or, over the taps turned around, plus the stream, if any.

    `out` has `pads` more points than x on both ends of each axis.
    """
    rows, columns, warps = settings
    dim, (height, width) = x.shape[-1], out.shape[1:3]
    patches = triton.cdiv(height, rows) * triton.cdiv(width, columns)
    _conv_kernel[(triton.cdiv(dim, CHANNELS), triton.cdiv(patches, warps), len(x))](
        x,
        taps,
        taps if bias is None else bias,
        out if stream is None else stream,
        out,
        x.shape[1],
        x.shape[2],
        height,
        width,
        DIM=dim,
        TAPS=2 * _reach(taps) + 1,
        TURNED=bias is None,
        BIAS=bias is not None,
        STREAM=stream is not None,
        EDGE_X=edges[0],
        EDGE_Y=edges[1],
        PAD_X=pads[0],
        PAD_Y=pads[1],
        EVEN_X=height % rows == 0,
        EVEN_Y=width % columns == 0 and columns >= _reach(taps),
        ROWS=rows,
        COLUMNS=columns,
        PATCHES=warps,
        CHANNELS=CHANNELS,
        num_warps=warps,
        num_stages=1,
    )


def _reach(taps: Tensor) -> int:
    """Return c of (2c + 1)² taps."""
    return (round(len(taps) ** 0.5) - 1) // 2


@triton.jit(do_not_specialize=SIDES)
def _conv_kernel(
    x: tl.tensor,  # (B, rows, columns, DIM)
    taps: tl.tensor,  # (TAPS², DIM), float32
    bias: tl.tensor,  # (DIM,)
    stream: tl.tensor,  # (B, height, width, DIM)
    out: tl.tensor,  # (B, height, width, DIM)
    rows: tl.tensor,
    columns: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    TURNED: tl.constexpr,
    BIAS: tl.constexpr,
    STREAM: tl.constexpr,
    EDGE_X: tl.constexpr,
    EDGE_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    EVEN_X: tl.constexpr,
    EVEN_Y: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PATCHES: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :] + tl.zeros((PATCHES, 1), tl.int32)
    # Reads need no mask: threads without a channel do the last one again.
    channel = tl.minimum(d, DIM - 1)
    sample = tl.program_id(2).to(tl.int64)
    field = x + sample * rows * columns * DIM + channel
    start = sample * height * width * DIM
    weights: tl.tuple = ()
    for t in tl.static_range(TAPS * TAPS):
        weights += (tl.load(taps + channel + (TAPS * TAPS - 1 - t if TURNED else t) * DIM),)
    level = tl.zeros((PATCHES, CHANNELS), tl.float32)
    if BIAS:
        level = tl.load(bias + channel).to(tl.float32)
    down = tl.cdiv(height, ROWS)
    patches = down * tl.cdiv(width, COLUMNS)
    number = tl.program_id(1) * PATCHES + tl.arange(0, PATCHES)[:, None]
    own = (number < patches) & (d < DIM)
    number = tl.minimum(number, patches - 1)
    top, left = number % down * ROWS, number // down * COLUMNS
    across, seen = _columns(left - PAD_Y, columns, DIM, TAPS, COLUMNS, EDGE_Y, EVEN_Y)
    corner = (top * width + left) * DIM + channel
    sums = (level,) * (ROWS * COLUMNS)
    for s in tl.static_range(ROWS + TAPS - 1):
        values = _line(
            field,
            top - PAD_X,
            s,
            across,
            seen,
            rows,
            columns,
            DIM,
            TAPS,
            ROWS,
            COLUMNS,
            EDGE_X,
            EDGE_Y,
            EVEN_X,
            EVEN_Y,
        )
        added: tl.tuple = ()
        for r in tl.static_range(ROWS):
            row = sums[r * COLUMNS : (r + 1) * COLUMNS]
            if r <= s and s < r + TAPS:
                row = add_products(row, values, weights[(s - r) * TAPS : (s - r + 1) * TAPS], COLUMNS, TAPS)
            added += row
        sums = added
        if s >= TAPS - 1:
            place = corner + (s - TAPS + 1) * width * DIM
            for m in tl.static_range(COLUMNS):
                total = sums[(s - TAPS + 1) * COLUMNS + m]
                known = own & (top + (s - TAPS + 1) < height) & (left + m < width)
                if STREAM:
                    total += tl.load(stream + start + place + m * DIM, mask=known, other=0.0).to(tl.float32)
                tl.store(out + start + place + m * DIM, total.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=SIDES)
def _taps_gradient_kernel(
    x: tl.tensor,  # (B, rows, columns, DIM)
    gradient: tl.tensor,  # (B, rows, columns, DIM)
    parts: tl.tensor,  # (splits, TAPS², DIM), float32
    batch: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    EDGE_X: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EVEN_X: tl.constexpr,
    EVEN_Y: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PATCHES: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :] + tl.zeros((PATCHES, 1), tl.int32)
    channel = tl.minimum(d, DIM - 1)
    down = tl.cdiv(rows, ROWS)
    patches = down * tl.cdiv(columns, COLUMNS)
    sums = (tl.zeros((PATCHES, CHANNELS), tl.float32),) * (TAPS * TAPS)
    for tile in range(tl.program_id(1), tl.cdiv(patches * batch, PATCHES), tl.num_programs(1)):
        number = tile * PATCHES + tl.arange(0, PATCHES)[:, None]
        own = number < patches * batch
        number = tl.minimum(number, patches * batch - 1)
        start = (number // patches).to(tl.int64) * rows * columns * DIM + channel
        number = number % patches
        top, left = number % down * ROWS, number // down * COLUMNS
        across, seen = _columns(left, columns, DIM, TAPS, COLUMNS, EDGE_Y, EVEN_Y)
        source = gradient + start + (top * columns + left) * DIM
        results: tl.tuple = ()
        for s in tl.static_range(ROWS + TAPS - 1):
            values = _line(
                x + start, top, s, across, seen, rows, columns, DIM, TAPS, ROWS, COLUMNS, EDGE_X, EDGE_Y, EVEN_X, EVEN_Y
            )
            if s < ROWS:
                row = source + s * columns * DIM
                for m in tl.static_range(COLUMNS):
                    known = own & (top + s < rows) & (left + m < columns)
                    results += (tl.load(row + m * DIM, mask=known, other=0.0).to(tl.float32),)
            added: tl.tuple = ()
            for t in tl.static_range(TAPS):
                row = sums[t * TAPS : (t + 1) * TAPS]
                if t <= s and s < t + ROWS:
                    row = add_products(row, values, results[(s - t) * COLUMNS : (s - t + 1) * COLUMNS], TAPS, COLUMNS)
                added += row
            sums = added
    target = parts + tl.program_id(1) * TAPS * TAPS * DIM
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    for t in tl.static_range(TAPS * TAPS):
        tl.store(target + t * DIM + d, tl.sum(sums[t], axis=0), mask=d < DIM)


@triton.jit
def _columns(
    left: tl.tensor,
    columns: tl.tensor,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDGE: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tuple:
    """Return where in a row the COLUMNS + TAPS − 1 inputs of a patch lie, and which of them exist.

    Where patches fit the axis, inputs before, in and after the patch are three runs: three places, not one per input.
    """
    if EVEN and EDGE == WRAP:
        before = tl.where(left == 0, columns, left)
        after = tl.where(left + COLUMNS == columns, 0, left + COLUMNS)
        return (before * DIM, left * DIM, after * DIM), ()
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        across: tl.tuple = ()
        seen: tl.tuple = ()
        for n in tl.static_range(COLUMNS + TAPS - 1):
            across += (_place(left, n, columns, TAPS // 2, COLUMNS, EDGE, EVEN) * DIM,)
            y = left + (n - TAPS // 2)
            seen += ((y >= 0) & (y < columns),)
        return across, seen


@triton.jit
def _line(
    field: tl.tensor,
    top: tl.tensor,
    s: tl.constexpr,
    across: tl.tuple,
    seen: tl.tuple,
    rows: tl.tensor,
    columns: tl.tensor,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDGE_X: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EVEN_X: tl.constexpr,
    EVEN_Y: tl.constexpr,
) -> tl.tuple:
    """Return the COLUMNS + TAPS − 1 inputs of a patch in its input row number s."""
    row = field + _place(top, s, rows, TAPS // 2, ROWS, EDGE_X, EVEN_X) * (columns * DIM)
    x = top + (s - TAPS // 2)
    values: tl.tuple = ()
    for n in tl.static_range(COLUMNS + TAPS - 1):
        if EVEN_Y and EDGE_Y == WRAP:
            if n < TAPS // 2:
                place = row + across[0] + (n - TAPS // 2) * DIM
            elif n < TAPS // 2 + COLUMNS:
                place = row + across[1] + (n - TAPS // 2) * DIM
            else:
                place = row + across[2] + (n - TAPS // 2 - COLUMNS) * DIM
        else:
            place = row + across[n]
        if EDGE_X == ZEROS and EDGE_Y == ZEROS:
            value = tl.load(place, mask=(x >= 0) & (x < rows) & seen[n], other=0.0)
        elif EDGE_X == ZEROS:
            value = tl.load(place, mask=(x >= 0) & (x < rows), other=0.0)
        elif EDGE_Y == ZEROS:
            value = tl.load(place, mask=seen[n], other=0.0)
        else:
            value = tl.load(place)
        values += (value.to(tl.float32),)
    return values


@triton.jit
def _place(
    first: tl.tensor,
    n: tl.constexpr,
    size: tl.tensor,
    REACH: tl.constexpr,
    LENGTH: tl.constexpr,
    EDGE: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Return the index of input number n of a patch that begins at `first`; EVEN: patches end where the axis does."""
    i = first + (n - REACH)
    if EDGE == WRAP:
        if n < REACH:
            i = tl.where(i < 0, i + size, i)
        if n > REACH and not EVEN:
            # Further inputs belong to results outside.
            i = tl.minimum(i, size + REACH - 1)
        if (n > REACH and not EVEN) or n >= REACH + LENGTH:
            i = tl.where(i < size, i, i - size)
        return i
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        return tl.maximum(tl.minimum(i, size - 1), 0)

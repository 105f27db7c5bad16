"""The Triton twin of `ergoflow.ops.interpolate`: sixteen loads per point and channel, all from the cache.

A program takes POINTS neighbouring points of one sample. Neighbours come from neighbouring places, so their loads share
lines of the cache, and memory sees every field once. The gradient walks the same places: the shift's is a sum over
them, the fields' is added to them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

POINTS = 256


def launch(fields: Tensor, shift: Tensor) -> Tensor:
    """Return fields (B, C, X, Y) at n + shift(n), shift (B, 2, X, Y), all contiguous float32."""
    batch, channels, size, length = fields.shape
    result = torch.empty_like(fields)
    _read_kernel[(triton.cdiv(size * length, POINTS), batch)](
        fields, shift, result, size=size, length=length, CHANNELS=channels, POINTS=POINTS, num_warps=4
    )
    return result


def launch_gradient(d_result: Tensor, fields: Tensor, shift: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of the fields, zero unless `wanted`, and of the shift."""
    batch, channels, size, length = fields.shape
    d_fields, d_shift = torch.zeros_like(fields), torch.empty_like(shift)
    _gradient_kernel[(triton.cdiv(size * length, POINTS), batch)](
        d_result,
        fields,
        shift,
        d_fields,
        d_shift,
        size=size,
        length=length,
        CHANNELS=channels,
        WANTED=wanted,
        POINTS=POINTS,
        num_warps=4,
    )
    return d_fields, d_shift


@triton.jit
def _weight(t: tl.tensor, TAP: tl.constexpr) -> tl.tensor:
    """The Lagrange polynomial of a tap, TAP = 0 .. 3 for −1 .. 2."""
    if TAP == 0:
        weight = -t * (t - 1) * (t - 2) / 6
    if TAP == 1:
        weight = (t + 1) * (t - 1) * (t - 2) / 2
    if TAP == 2:
        weight = -(t + 1) * t * (t - 2) / 2
    if TAP == 3:
        weight = (t + 1) * t * (t - 1) / 6
    return weight


@triton.jit
def _slope(t: tl.tensor, TAP: tl.constexpr) -> tl.tensor:
    """The derivative of `_weight`."""
    if TAP == 0:
        slope = -(3 * t * t - 6 * t + 2) / 6
    if TAP == 1:
        slope = (3 * t * t - 4 * t - 1) / 2
    if TAP == 2:
        slope = -(3 * t * t - 2 * t - 2) / 2
    if TAP == 3:
        slope = (3 * t * t - 1) / 6
    return slope


@triton.jit
def _around(index: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """A remainder that is not negative; indices may be many periods away."""
    rest = index % size
    return tl.where(rest < 0, rest + size, rest)


@triton.jit
def _place(
    shift: tl.tensor, sample: tl.tensor, point: tl.tensor, inside: tl.tensor, size: tl.constexpr, length: tl.constexpr
) -> tl.tensor:
    """The whole and the broken part of the place from which a point reads, along both axes."""
    plane = size * length
    s0 = tl.load(shift + sample * 2 * plane + point, inside, other=0.0)
    s1 = tl.load(shift + (sample * 2 + 1) * plane + point, inside, other=0.0)
    f0, f1 = tl.floor(s0), tl.floor(s1)
    return point // length + f0.to(tl.int32), point % length + f1.to(tl.int32), s0 - f0, s1 - f1


@triton.jit
def _read_kernel(
    fields: tl.tensor,
    shift: tl.tensor,
    result: tl.tensor,
    size: tl.constexpr,
    length: tl.constexpr,
    CHANNELS: tl.constexpr,
    POINTS: tl.constexpr,
) -> None:
    sample = tl.program_id(1).to(tl.int64)
    point = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    plane = size * length
    inside = point < plane
    row, column, t0, t1 = _place(shift, sample, point, inside, size, length)
    for channel in tl.static_range(CHANNELS):
        field = fields + (sample * CHANNELS + channel) * plane
        total = tl.zeros([POINTS], tl.float32)
        for i in tl.static_range(4):
            start = _around(row + (i - 1), size) * length
            line = tl.zeros([POINTS], tl.float32)
            for j in tl.static_range(4):
                line += _weight(t1, j) * tl.load(field + start + _around(column + (j - 1), length), inside, other=0.0)
            total += _weight(t0, i) * line
        tl.store(result + (sample * CHANNELS + channel) * plane + point, total, inside)


@triton.jit
def _gradient_kernel(
    d_result: tl.tensor,
    fields: tl.tensor,
    shift: tl.tensor,
    d_fields: tl.tensor,
    d_shift: tl.tensor,
    size: tl.constexpr,
    length: tl.constexpr,
    CHANNELS: tl.constexpr,
    WANTED: tl.constexpr,
    POINTS: tl.constexpr,
) -> None:
    sample = tl.program_id(1).to(tl.int64)
    point = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    plane = size * length
    inside = point < plane
    row, column, t0, t1 = _place(shift, sample, point, inside, size, length)
    d0, d1 = tl.zeros([POINTS], tl.float32), tl.zeros([POINTS], tl.float32)
    for channel in tl.static_range(CHANNELS):
        offset = (sample * CHANNELS + channel) * plane
        gradient = tl.load(d_result + offset + point, inside, other=0.0)
        for i in tl.static_range(4):
            start = _around(row + (i - 1), size) * length
            for j in tl.static_range(4):
                place = offset + start + _around(column + (j - 1), length)
                value = gradient * tl.load(fields + place, inside, other=0.0)
                d0 += _slope(t0, i) * _weight(t1, j) * value
                d1 += _weight(t0, i) * _slope(t1, j) * value
                if WANTED:
                    tl.atomic_add(d_fields + place, _weight(t0, i) * _weight(t1, j) * gradient, inside, sem="relaxed")
    tl.store(d_shift + sample * 2 * plane + point, d0, inside)
    tl.store(d_shift + (sample * 2 + 1) * plane + point, d1, inside)

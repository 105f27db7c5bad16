"""Kernels of the group norm on channel-last fields (B, N, C): sums per channel, linear combinations per channel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Points and channels of a tile, and tiles that a program adds up.
POINTS, CHANNELS, STEPS = 64, 64, 16


def channel_sums(p: Tensor, q: Tensor, shift: Tensor, *, centred: bool) -> tuple[Tensor, Tensor]:
    """Return Σ_n p and Σ_n p(q − shift), (B, C) in float32; `centred`: p too is taken less the shift (B, C)."""
    batch, points, channels = p.shape
    chunks = triton.cdiv(points, POINTS * STEPS)
    parts = torch.empty(2, batch, chunks, channels, device=p.device, dtype=torch.float32)
    _channel_sums_kernel[(triton.cdiv(channels, CHANNELS), chunks, batch)](
        p,
        q,
        shift.contiguous(),
        parts,
        points,
        channels,
        CENTRED=centred,
        POINTS=POINTS,
        CHANNELS=CHANNELS,
        STEPS=STEPS,
        num_warps=4,
    )
    first, second = parts.sum(2)
    return first, second


def scaled_sum(p: Tensor, q: Tensor | None, a: Tensor, b: Tensor | None, c: Tensor) -> Tensor:
    """Return a·p + b·q + c, (B, N, C) in the dtype of p, with float32 coefficients (B, C); without q: a·p + c."""
    batch, points, channels = p.shape
    out = torch.empty_like(p)
    _scaled_sum_kernel[(triton.cdiv(channels, CHANNELS), triton.cdiv(points, POINTS), batch)](
        p,
        p if q is None else q,
        a.contiguous(),
        a if b is None else b.contiguous(),
        c.contiguous(),
        out,
        points,
        channels,
        TWO=q is not None,
        POINTS=POINTS,
        CHANNELS=CHANNELS,
        num_warps=4,
    )
    return out


@triton.jit
def _channel_sums_kernel(
    p: tl.tensor,  # (B, points, channels)
    q: tl.tensor,  # the same
    shift: tl.tensor,  # (B, channels), float32
    parts: tl.tensor,  # (2, B, chunks, channels), float32
    points: tl.tensor,
    channels: tl.tensor,
    CENTRED: tl.constexpr,
    POINTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    origin = tl.load(shift + sample * channels + c, mask=c < channels, other=0.0)
    first = tl.zeros((POINTS, CHANNELS), tl.float32)
    second = tl.zeros((POINTS, CHANNELS), tl.float32)
    for step in range(STEPS):
        n = (chunk * STEPS + step) * POINTS + tl.arange(0, POINTS)
        inside = (n[:, None] < points) & (c[None, :] < channels)
        place = (sample * points + n[:, None]) * channels + c[None, :]
        left = tl.load(p + place, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(q + place, mask=inside, other=0.0).to(tl.float32) - origin[None, :]
        if CENTRED:
            left = tl.where(inside, left - origin[None, :], 0.0)
        first += left
        second += left * right
    place = (sample * tl.num_programs(1) + chunk) * channels + c
    half = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * channels
    tl.store(parts + place, tl.sum(first, axis=0), mask=c < channels)
    tl.store(parts + half + place, tl.sum(second, axis=0), mask=c < channels)


@triton.jit
def _scaled_sum_kernel(
    p: tl.tensor,  # (B, points, channels)
    q: tl.tensor,  # the same
    a: tl.tensor,  # (B, channels), float32
    b: tl.tensor,
    c: tl.tensor,
    out: tl.tensor,  # (B, points, channels)
    points: tl.tensor,
    channels: tl.tensor,
    TWO: tl.constexpr,
    POINTS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.program_id(1) * POINTS + tl.arange(0, POINTS)
    sample = tl.program_id(2).to(tl.int64)
    known = channel < channels
    inside = (n[:, None] < points) & known[None, :]
    place = (sample * points + n[:, None]) * channels + channel[None, :]
    of_channel = sample * channels + channel
    total = tl.load(p + place, mask=inside, other=0.0).to(tl.float32)
    total = total * tl.load(a + of_channel, mask=known, other=0.0)[None, :]
    if TWO:
        other = tl.load(q + place, mask=inside, other=0.0).to(tl.float32)
        total += other * tl.load(b + of_channel, mask=known, other=0.0)[None, :]
    total += tl.load(c + of_channel, mask=known, other=0.0)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)

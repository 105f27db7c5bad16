"""Kernels of the group norm on channel-last fields (B, N, C): sums per channel, coefficients, linear combinations.

Three launches each way. The first and the last read rows of points with all their channels, which lie together in
memory, and a program walks over the points of one sample with its sums or coefficients in registers; the one between
them is small, and does all arithmetic on sums and coefficients of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Settings(NamedTuple):
    """Numbers of a tile, which are points with their channels, the most channels, warps, stages and programs."""

    size: int
    channels: int
    warps: int
    stages: int
    programs: int


# Sums: as many programs as run at a time on 132 multiprocessors. Combinations: one for every tile or two.
SUMS_SETTINGS = Settings(size=4096, channels=256, warps=4, stages=1, programs=528)
SCALE_SETTINGS = Settings(size=4096, channels=256, warps=4, stages=1, programs=32768)
# Partial sums that are added up at a time.
CHUNKS = 64


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = γ r (x − μ) + β in the dtype of x (B, N, C), and μ and r (B, G) in float32, all contiguous."""
    batch, points, channels = x.shape
    # Sums are about the first point of a channel, so that a mean far from zero costs no digits.
    parts = _channel_sums(x, None, None, groups)
    mean = torch.empty(batch, groups, device=x.device, dtype=torch.float32)
    rate = torch.empty_like(mean)
    coefficients = torch.empty(3, batch, channels, device=x.device, dtype=torch.float32)
    _coefficients_kernel[(groups, batch)](
        x,
        parts,
        weight,
        bias,
        mean,
        rate,
        coefficients,
        points,
        parts.shape[2],
        eps,
        WIDTH=channels // groups,
        BLOCK_W=triton.next_power_of_2(channels // groups),
        CHUNKS=CHUNKS,
        num_warps=1,
        num_stages=1,
    )
    return _scaled_sum(x, None, coefficients), mean, rate


def group_norm_gradient(g: Tensor, x: Tensor, mean: Tensor, rate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return d_x for d_y = g (B, N, C), and the gradients (2, C) of γ and β in float32; all contiguous."""
    batch, points, channels = x.shape
    groups = mean.shape[1]
    parts = _channel_sums(g, x, mean, groups)
    coefficients = torch.empty(3, batch, channels, device=x.device, dtype=torch.float32)
    d_scale = torch.empty(2, batch, channels, device=x.device, dtype=torch.float32)
    _gradient_coefficients_kernel[(groups, batch)](
        parts,
        weight,
        mean,
        rate,
        coefficients,
        d_scale,
        points,
        parts.shape[2],
        WIDTH=channels // groups,
        BLOCK_W=triton.next_power_of_2(channels // groups),
        CHUNKS=CHUNKS,
        num_warps=1,
        num_stages=1,
    )
    return _scaled_sum(g, x, coefficients), d_scale.sum(1)


def _channel_sums(p: Tensor, q: Tensor | None, mean: Tensor | None, groups: int) -> Tensor:
    """Return Σ_n p and Σ_n p(q − μ) over parts of the points, (2, B, parts, C) in float32.

    Without q both factors are p less its first point.
    """
    batch, points, channels = p.shape
    columns, rows, blocks, programs = _tiles(p, SUMS_SETTINGS)
    parts = torch.empty(2, batch, programs, channels, device=p.device, dtype=torch.float32)
    _channel_sums_kernel[(blocks, programs, batch)](
        p,
        p if q is None else q,
        parts if mean is None else mean,
        parts,
        points,
        channels,
        groups,
        TWO=q is not None,
        POINTS=rows,
        CHANNELS=columns,
        STAGES=SUMS_SETTINGS.stages,
        num_warps=SUMS_SETTINGS.warps,
        num_stages=SUMS_SETTINGS.stages,
    )
    return parts


def _scaled_sum(p: Tensor, q: Tensor | None, coefficients: Tensor) -> Tensor:
    """Return a·p + b·q + c, (B, N, C) in the dtype of p, with float32 coefficients (3, B, C); without q: a·p + c."""
    batch, points, channels = p.shape
    columns, rows, blocks, programs = _tiles(p, SCALE_SETTINGS)
    out = torch.empty_like(p)
    _scaled_sum_kernel[(blocks, programs, batch)](
        p,
        p if q is None else q,
        coefficients,
        out,
        points,
        channels,
        TWO=q is not None,
        POINTS=rows,
        CHANNELS=columns,
        STAGES=SCALE_SETTINGS.stages,
        num_warps=SCALE_SETTINGS.warps,
        num_stages=SCALE_SETTINGS.stages,
    )
    return out


def _tiles(p: Tensor, settings: Settings) -> tuple[int, int, int, int]:
    """Return channels and points of a tile, blocks of channels, and programs that share the points of a sample."""
    batch, points, channels = p.shape
    columns = min(triton.next_power_of_2(channels), settings.channels)
    rows, blocks = max(1, settings.size // columns), triton.cdiv(channels, columns)
    return columns, rows, blocks, max(1, min(triton.cdiv(points, rows), settings.programs // (blocks * batch)))


@triton.jit
def _channel_sums_kernel(
    p: tl.tensor,  # (B, points, channels)
    q: tl.tensor,  # the same
    mean: tl.tensor,  # (B, groups), float32
    parts: tl.tensor,  # (2, B, programs, channels), float32
    points: tl.tensor,
    channels: tl.tensor,
    groups: tl.tensor,
    TWO: tl.constexpr,
    POINTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    n = tl.arange(0, POINTS)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    sample = tl.program_id(2).to(tl.int64)
    known = c < channels
    place = n[:, None] * channels + c[None, :]
    if TWO:
        origin = tl.load(mean + sample * groups + c // (channels // groups), mask=known, other=0.0)
    else:
        origin = tl.load(p + sample * points * channels + c, mask=known, other=0.0).to(tl.float32)
    first = tl.zeros((POINTS, CHANNELS), tl.float32)
    second = tl.zeros((POINTS, CHANNELS), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(points, POINTS), tl.num_programs(1), num_stages=STAGES):
        inside = (n[:, None] < points - tile * POINTS) & known[None, :]
        at = (sample * points + tile * POINTS) * channels
        left = tl.load(p + at + place, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            right = tl.load(q + at + place, mask=inside, other=0.0).to(tl.float32) - origin[None, :]
        else:
            left = tl.where(inside, left - origin[None, :], 0.0)
            right = left
        first += left
        second += left * right
    target = parts + (sample * tl.num_programs(1) + tl.program_id(1)) * channels + c
    half = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * channels
    tl.store(target, tl.sum(first, axis=0), mask=known)
    tl.store(target + half, tl.sum(second, axis=0), mask=known)


@triton.jit
def _coefficients_kernel(
    x: tl.tensor,  # (B, points, channels)
    parts: tl.tensor,  # (2, B, chunks, channels), float32
    weight: tl.tensor,  # (channels,)
    bias: tl.tensor,  # (channels,)
    mean: tl.tensor,  # (B, groups), float32
    rate: tl.tensor,  # (B, groups), float32
    coefficients: tl.tensor,  # (3, B, channels), float32
    points: tl.tensor,
    chunks: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """y = a·x + c with a = r γ and c = β − a μ."""
    group, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels, batch = tl.num_programs(0) * WIDTH, tl.num_programs(1)
    known = tl.arange(0, BLOCK_W) < WIDTH
    c = group * WIDTH + tl.arange(0, BLOCK_W)
    first, second = _totals(parts, sample, c, known, batch, chunks, channels, BLOCK_W, CHUNKS)
    origin = tl.load(x + sample * points * channels + c, mask=known, other=0.0).to(tl.float32)
    shift = first / points
    average = origin + shift
    mu = tl.sum(average, axis=0) / WIDTH
    # Within the channels, and between them.
    gap = tl.where(known, average - mu, 0.0)
    variance = tl.sum(second / points - shift * shift + gap * gap, axis=0) / WIDTH
    r = tl.rsqrt(variance + eps)
    tl.store(mean + sample * tl.num_programs(0) + group, mu)
    tl.store(rate + sample * tl.num_programs(0) + group, r)
    slope = r * tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    level = tl.load(bias + c, mask=known, other=0.0).to(tl.float32) - slope * mu
    target = coefficients + sample * channels + c
    tl.store(target, slope, mask=known)
    tl.store(target + 2 * batch * channels, level, mask=known)


@triton.jit
def _gradient_coefficients_kernel(
    parts: tl.tensor,  # (2, B, chunks, channels), float32
    weight: tl.tensor,  # (channels,)
    mean: tl.tensor,  # (B, groups), float32
    rate: tl.tensor,  # (B, groups), float32
    coefficients: tl.tensor,  # (3, B, channels), float32
    d_scale: tl.tensor,  # (2, B, channels), float32
    points: tl.tensor,
    chunks: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """d_x = r γ g − r⟨γ g⟩ − r z⟨γ g z⟩ = a·g + b·x + c with z = r(x − μ)."""
    group, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels, batch = tl.num_programs(0) * WIDTH, tl.num_programs(1)
    known = tl.arange(0, BLOCK_W) < WIDTH
    c = group * WIDTH + tl.arange(0, BLOCK_W)
    total, product = _totals(parts, sample, c, known, batch, chunks, channels, BLOCK_W, CHUNKS)
    mu = tl.load(mean + sample * tl.num_programs(0) + group)
    r = tl.load(rate + sample * tl.num_programs(0) + group)
    scale = tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    count = 1.0 * WIDTH * points
    towards = r * r * r * (tl.sum(scale * product, axis=0) / count)
    level = towards * mu - r * (tl.sum(scale * total, axis=0) / count)
    target = coefficients + sample * channels + c
    tl.store(target, r * scale, mask=known)
    tl.store(target + batch * channels, tl.zeros((BLOCK_W,), tl.float32) - towards, mask=known)
    tl.store(target + 2 * batch * channels, tl.zeros((BLOCK_W,), tl.float32) + level, mask=known)
    target = d_scale + sample * channels + c
    tl.store(target, r * product, mask=known)
    tl.store(target + batch * channels, total, mask=known)


@triton.jit
def _totals(
    parts: tl.tensor,
    sample: tl.tensor,
    c: tl.tensor,
    known: tl.tensor,
    batch: tl.tensor,
    chunks: tl.tensor,
    channels: tl.tensor,
    BLOCK_W: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """Return both sums of a sample over its parts for channels c, zero where these are not known."""
    first = tl.zeros((CHUNKS, BLOCK_W), tl.float32)
    second = tl.zeros((CHUNKS, BLOCK_W), tl.float32)
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        inside = (chunk[:, None] < chunks) & known[None, :]
        place = parts + (sample * chunks + chunk[:, None]) * channels + c[None, :]
        first += tl.load(place, mask=inside, other=0.0)
        second += tl.load(place + batch.to(tl.int64) * chunks * channels, mask=inside, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _scaled_sum_kernel(
    p: tl.tensor,  # (B, points, channels)
    q: tl.tensor,  # the same
    coefficients: tl.tensor,  # (3, B, channels), float32
    out: tl.tensor,  # (B, points, channels)
    points: tl.tensor,
    channels: tl.tensor,
    TWO: tl.constexpr,
    POINTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    n = tl.arange(0, POINTS)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    sample = tl.program_id(2).to(tl.int64)
    known = c < channels
    place = n[:, None] * channels + c[None, :]
    of_channel = coefficients + sample * channels + c
    after = tl.num_programs(2) * channels
    slope = tl.load(of_channel, mask=known, other=0.0)
    if TWO:
        other = tl.load(of_channel + after, mask=known, other=0.0)
    level = tl.load(of_channel + 2 * after, mask=known, other=0.0)
    for tile in tl.range(tl.program_id(1), tl.cdiv(points, POINTS), tl.num_programs(1), num_stages=STAGES):
        inside = (n[:, None] < points - tile * POINTS) & known[None, :]
        at = (sample * points + tile * POINTS) * channels
        total = tl.load(p + at + place, mask=inside, other=0.0).to(tl.float32) * slope[None, :] + level[None, :]
        if TWO:
            total += tl.load(q + at + place, mask=inside, other=0.0).to(tl.float32) * other[None, :]
        tl.store(out + at + place, total.to(out.dtype.element_ty), mask=inside)

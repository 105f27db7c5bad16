"""Kernels on channel-last fields (B, N, C): sums per channel, linear combinations per channel, the layer norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Points and channels of a tile, and tiles that a program adds up.
POINTS, CHANNELS, STEPS = 64, 64, 16
# The same of the layer norm, whose tiles hold all channels.
NORM_POINTS, NORM_STEPS = 16, 8


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


def add_norm(
    x: Tensor, code: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return p = x + code in the dtype of x, and z = γ r(p − μ) + β in `dtype`; x (B, *grid, D), code (*grid, D)."""
    points, dim = code.numel() // code.shape[-1], code.shape[-1]
    total, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _add_norm_kernel[(triton.cdiv(points, NORM_POINTS), len(x))](
        x,
        code,
        weight.contiguous(),
        bias.contiguous(),
        total,
        normed,
        points,
        dim,
        eps,
        POINTS=NORM_POINTS,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return total, normed


def add_norm_gradient(
    d_total: Tensor, d_normed: Tensor, x: Tensor, code: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of p, which is that of x, and those of γ and β in float32; p is added up again."""
    points, dim = code.numel() // code.shape[-1], code.shape[-1]
    chunks = triton.cdiv(points, NORM_POINTS * NORM_STEPS)
    d_x = torch.empty_like(x)
    parts = torch.empty(2, len(x), chunks, dim, device=x.device, dtype=torch.float32)
    _add_norm_gradient_kernel[(chunks, len(x))](
        d_total,
        d_normed,
        x,
        code,
        weight.contiguous(),
        d_x,
        parts,
        points,
        dim,
        eps,
        POINTS=NORM_POINTS,
        STEPS=NORM_STEPS,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )
    d_weight, d_bias = parts.sum((1, 2))
    return d_x, d_weight, d_bias


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


@triton.jit
def _add_norm_kernel(
    x: tl.tensor,  # (B, points, dim)
    code: tl.tensor,  # (points, dim)
    weight: tl.tensor,  # (dim,)
    bias: tl.tensor,  # (dim,)
    total: tl.tensor,  # (B, points, dim)
    normed: tl.tensor,  # (B, points, dim)
    points: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    POINTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    n = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    sample = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < points) & (d[None, :] < dim)
    within = n[:, None].to(tl.int64) * dim + d[None, :]
    place = sample * points * dim + within
    p = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    p += tl.load(code + within, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + place, p.to(total.dtype.element_ty), mask=inside)
    gap, rate = _centred(p, inside, dim, eps)
    scale = tl.load(weight + d, mask=d < dim, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=d < dim, other=0.0).to(tl.float32)
    z = gap * rate[:, None] * scale[None, :] + shift[None, :]
    tl.store(normed + place, z.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_gradient_kernel(
    d_total: tl.tensor,  # (B, points, dim)
    d_normed: tl.tensor,  # (B, points, dim)
    x: tl.tensor,  # (B, points, dim)
    code: tl.tensor,  # (points, dim)
    weight: tl.tensor,  # (dim,)
    d_x: tl.tensor,  # (B, points, dim)
    parts: tl.tensor,  # (2, B, chunks, dim), float32
    points: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    POINTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    scale = tl.load(weight + d, mask=d < dim, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK_D,), tl.float32)
    d_bias = tl.zeros((BLOCK_D,), tl.float32)
    for step in range(STEPS):
        n = (chunk * STEPS + step) * POINTS + tl.arange(0, POINTS)
        inside = (n[:, None] < points) & (d[None, :] < dim)
        within = n[:, None].to(tl.int64) * dim + d[None, :]
        place = sample * points * dim + within
        p = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        p += tl.load(code + within, mask=inside, other=0.0).to(tl.float32)
        gap, rate = _centred(p, inside, dim, eps)
        z = gap * rate[:, None]
        g = tl.load(d_normed + place, mask=inside, other=0.0).to(tl.float32)
        d_weight += tl.sum(g * z, axis=0)
        d_bias += tl.sum(g, axis=0)
        # d_p = r (γg − ⟨γg⟩ − z⟨γg z⟩), beside what comes to p directly.
        g = g * scale[None, :]
        along = tl.sum(g * z, axis=1) / dim
        level = tl.sum(g, axis=1) / dim
        total = rate[:, None] * (g - level[:, None] - z * along[:, None])
        total += tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + place, total.to(d_x.dtype.element_ty), mask=inside)
    place = (sample * tl.num_programs(0) + chunk) * dim + d
    half = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * dim
    tl.store(parts + place, d_weight, mask=d < dim)
    tl.store(parts + half + place, d_bias, mask=d < dim)


@triton.jit
def _centred(p: tl.tensor, inside: tl.tensor, dim: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """Return p less its mean over the channels, zero outside, and the inverse deviation (N,)."""
    mean = tl.sum(p, axis=1) / dim
    gap = tl.where(inside, p - mean[:, None], 0.0)
    return gap, 1.0 / tl.sqrt(tl.sum(gap * gap, axis=1) / dim + eps)

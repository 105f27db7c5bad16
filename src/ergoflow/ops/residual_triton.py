"""Kernels of the residual stream: sums of it, a linear map and a code, with the layer norm of the sum.

They take a tile of points with all channels, and go through some samples of the batch with it: the code and the linear
map are read once for all of these, and the gradient of the code is added up on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.tiles_triton import block, precision, product


class Settings(NamedTuple):
    """Points of a tile, warps and pipeline stages of a kernel that holds all channels of its points."""

    points: int
    warps: int
    stages: int


# The layer norm alone, and with the linear map before it; forward and gradient.
NORM_SETTINGS, NORM_GRADIENT_SETTINGS = Settings(16, 4, 2), Settings(16, 4, 2)
MIX_SETTINGS, MIX_NORM_GRADIENT_SETTINGS = Settings(64, 4, 1), Settings(64, 8, 2)
# The gradient of the map.
MIX_GRADIENT_SETTINGS = Settings(64, 8, 2)
# Programs that keep all multiprocessors busy (132 on an H200): four each, and one of those that hold a matrix of sums.
PROGRAMS, MIX_GRADIENT_PROGRAMS = 528, 132


def add_norm(
    x: Tensor, code: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return p = x + code in float32, and z = γ r(p − μ) + β in `dtype`; x (B, *grid, D), code (*grid, D)."""
    total = torch.empty_like(x, dtype=torch.float32)
    normed = torch.empty_like(x, dtype=dtype)
    _launch_sum(x, None, None, code, weight, bias, total, normed, eps)
    return total, normed


def mix_add(x: Tensor, activation: Tensor, mix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x + GELU(a) Wᵀ in `dtype`, all contiguous."""
    total = torch.empty_like(x, dtype=dtype)
    _launch_sum(x, activation, mix, None, None, None, total, None, 0.0)
    return total


def mix_add_norm(
    x: Tensor,
    activation: Tensor,
    mix: Tensor,
    code: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return p = x + GELU(a) Wᵀ + code in float32, and its layer norm in `dtype`, all contiguous."""
    total = torch.empty_like(x, dtype=torch.float32)
    normed = torch.empty_like(x, dtype=dtype)
    _launch_sum(x, activation, mix, code, weight, bias, total, normed, eps)
    return total, normed


def add_norm_gradient(
    d_total: Tensor, d_normed: Tensor, x: Tensor, code: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, code, and of γ and β in float32; p is added up again."""
    d_x, _, d_code, d_weight, d_bias = _launch_gradient(d_total, d_normed, x, None, None, code, weight, eps)
    return d_x, d_code, d_weight, d_bias


def mix_add_gradient(
    d_total: Tensor, activation: Tensor, mix: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_p in `dtype`, which is the gradient of x, and the gradients of a and W."""
    batch, points, dim, width = _sizes(d_total, mix)
    rows, warps, stages = MIX_GRADIENT_SETTINGS
    programs = min(triton.cdiv(batch * points, rows), MIX_GRADIENT_PROGRAMS)
    d_x = d_total if dtype == d_total.dtype else torch.empty_like(d_total, dtype=dtype)
    d_activation = torch.empty_like(activation)
    parts = torch.empty(programs, dim, width, device=mix.device, dtype=torch.float32)
    _mix_gradient_kernel[(programs,)](
        d_total,
        activation,
        mix,
        d_x,
        d_activation,
        parts,
        batch * points,
        DIM=dim,
        WIDTH=width,
        COPY=d_x is not d_total,
        POINTS=rows,
        BLOCK_D=block(dim),
        BLOCK_E=block(width),
        PRECISION=precision(mix),
        num_warps=warps,
        num_stages=stages,
    )
    return d_x, d_activation, parts.sum(0).to(mix.dtype)


def mix_add_norm_gradient(
    d_total: Tensor,
    d_normed: Tensor,
    x: Tensor,
    activation: Tensor,
    mix: Tensor,
    code: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, a, W, code, and of γ and β in float32; p is added up again."""
    d_x, rounded, *d_others = _launch_gradient(d_total, d_normed, x, activation, mix, code, weight, eps)
    _, d_activation, d_mix = mix_add_gradient(rounded, activation, mix, rounded.dtype)
    return d_x, d_activation, d_mix, *d_others


def _launch_sum(
    x: Tensor,
    activation: Tensor | None,
    mix: Tensor | None,
    code: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor,
    normed: Tensor | None,
    eps: float,
) -> None:
    """Write x, plus GELU(a) Wᵀ if there is a map, plus the code if there is a norm, to `total`."""
    batch, points, dim, width = _sizes(x, mix)
    rows, warps, stages = NORM_SETTINGS if mix is None else MIX_SETTINGS
    tiles = triton.cdiv(points, rows)
    samples = _samples(tiles, batch, PROGRAMS)
    _sum_kernel[(tiles, triton.cdiv(batch, samples))](
        x,
        x if activation is None else activation,
        x if mix is None else mix,
        x if code is None else code,
        x if weight is None else weight,
        x if bias is None else bias,
        total,
        total if normed is None else normed,
        batch,
        samples,
        points,
        eps,
        DIM=dim,
        WIDTH=width,
        MIX=mix is not None,
        NORM=normed is not None,
        POINTS=rows,
        BLOCK_D=block(dim),
        BLOCK_E=block(width),
        PRECISION="ieee" if mix is None else precision(mix),
        num_warps=warps,
        num_stages=stages,
    )


def _launch_gradient(
    d_total: Tensor,
    d_normed: Tensor,
    x: Tensor,
    activation: Tensor | None,
    mix: Tensor | None,
    code: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return d_p, which is the gradient of x, the same in the dtype of the map, and the gradients of code, γ and β."""
    batch, points, dim, width = _sizes(x, mix)
    rows, warps, stages = NORM_GRADIENT_SETTINGS if mix is None else MIX_NORM_GRADIENT_SETTINGS
    tiles = triton.cdiv(points, rows)
    samples = _samples(tiles, batch, PROGRAMS)
    programs, splits = min(tiles, PROGRAMS), triton.cdiv(batch, samples)
    d_p = torch.empty_like(x)
    rounded = d_p if mix is None or mix.dtype == x.dtype else torch.empty_like(x, dtype=mix.dtype)
    # With several splits the sum over the batch ends in float32 too.
    code_parts = torch.empty(splits, *code.shape, device=x.device, dtype=code.dtype if splits == 1 else torch.float32)
    parts = torch.empty(2, splits * programs, dim, device=x.device, dtype=torch.float32)
    _sum_gradient_kernel[(programs, splits)](
        d_total,
        d_normed,
        x,
        x if activation is None else activation,
        x if mix is None else mix,
        code,
        weight.contiguous(),
        d_p,
        rounded,
        code_parts,
        parts,
        batch,
        samples,
        points,
        eps,
        DIM=dim,
        WIDTH=width,
        MIX=mix is not None,
        POINTS=rows,
        BLOCK_D=block(dim),
        BLOCK_E=block(width),
        PRECISION="ieee" if mix is None else precision(mix),
        num_warps=warps,
        num_stages=stages,
    )
    d_code = code_parts[0] if splits == 1 else code_parts.sum(0).to(code.dtype)
    d_weight, d_bias = parts.sum(1)
    return d_p, rounded, d_code, d_weight, d_bias


def _sizes(x: Tensor, mix: Tensor | None) -> tuple[int, int, int, int]:
    """Return the samples, the points of one, the channels, and the summands of the map."""
    return len(x), x[0].numel() // x.shape[-1], x.shape[-1], 1 if mix is None else mix.shape[1]


def _samples(tiles: int, batch: int, programs: int) -> int:
    """Return how many samples a program goes through, so that there are about as many programs as asked for."""
    return min(batch, max(1, tiles * batch // programs))


@triton.jit
def _sum_kernel(
    x: tl.tensor,  # (B, points, dim)
    activation: tl.tensor,  # (B, points, width)
    mix: tl.tensor,  # (dim, width)
    code: tl.tensor,  # (points, dim)
    weight: tl.tensor,  # (dim,)
    bias: tl.tensor,  # (dim,)
    total: tl.tensor,  # (B, points, dim)
    normed: tl.tensor,  # (B, points, dim)
    batch: tl.tensor,
    samples: tl.tensor,
    points: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MIX: tl.constexpr,
    NORM: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    start = tl.program_id(0) * POINTS
    first = tl.program_id(1) * samples
    n, d, e = tl.arange(0, POINTS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    inside = (n[:, None] < points - start) & (d[None, :] < DIM)
    known = (n[:, None] < points - start) & (e[None, :] < WIDTH)
    place, place_e = n[:, None] * DIM + d[None, :], n[:, None] * WIDTH + e[None, :]
    for sample in range(first, tl.minimum(first + samples, batch)):
        # One 64-bit number per tile: within it 32 bits do.
        row = tl.full((), sample, tl.int64) * points + start
        p = tl.load(x + row * DIM + place, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            p += tl.load(code + tl.full((), start, tl.int64) * DIM + place, mask=inside, other=0.0).to(tl.float32)
        if MIX:
            bent = _gelu(tl.load(activation + row * WIDTH + place_e, mask=known, other=0.0))
            p = product(bent, tl.trans(_matrix(mix, d, e, DIM, WIDTH)), p, PRECISION)
        tl.store(total + row * DIM + place, p.to(total.dtype.element_ty), mask=inside)
        if NORM:
            gap, rate = _centred(p, inside, DIM, eps)
            scale = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
            shift = tl.load(bias + d, mask=d < DIM, other=0.0).to(tl.float32)
            z = gap * rate[:, None] * scale[None, :] + shift[None, :]
            tl.store(normed + row * DIM + place, z.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _sum_gradient_kernel(
    d_total: tl.tensor,  # (B, points, dim)
    d_normed: tl.tensor,  # (B, points, dim)
    x: tl.tensor,  # (B, points, dim)
    activation: tl.tensor,  # (B, points, width)
    mix: tl.tensor,  # (dim, width)
    code: tl.tensor,  # (points, dim)
    weight: tl.tensor,  # (dim,)
    d_p: tl.tensor,  # (B, points, dim)
    rounded: tl.tensor,  # the same, as the products take it
    code_parts: tl.tensor,  # (splits, points, dim)
    parts: tl.tensor,  # (2, splits·programs, dim), float32
    batch: tl.tensor,
    samples: tl.tensor,
    points: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MIX: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    split = tl.program_id(1).to(tl.int64)
    first = tl.program_id(1) * samples
    n, d, e = tl.arange(0, POINTS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    place, place_e = n[:, None] * DIM + d[None, :], n[:, None] * WIDTH + e[None, :]
    d_weight = tl.zeros((BLOCK_D,), tl.float32)
    d_bias = tl.zeros((BLOCK_D,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(points, POINTS), tl.num_programs(0)):
        start = tile * POINTS
        inside = (n[:, None] < points - start) & (d[None, :] < DIM)
        known = (n[:, None] < points - start) & (e[None, :] < WIDTH)
        at_code = tl.full((), start, tl.int64) * DIM
        d_code = tl.zeros((POINTS, BLOCK_D), tl.float32)
        for sample in range(first, tl.minimum(first + samples, batch)):
            row = tl.full((), sample, tl.int64) * points + start
            p = tl.zeros((POINTS, BLOCK_D), tl.float32)
            if MIX:
                bent = _gelu(tl.load(activation + row * WIDTH + place_e, mask=known, other=0.0))
                p = product(bent, tl.trans(_matrix(mix, d, e, DIM, WIDTH)), p, PRECISION)
            p += tl.load(x + row * DIM + place, mask=inside, other=0.0).to(tl.float32)
            p += tl.load(code + at_code + place, mask=inside, other=0.0).to(tl.float32)
            gap, rate = _centred(p, inside, DIM, eps)
            z = gap * rate[:, None]
            g = tl.load(d_normed + row * DIM + place, mask=inside, other=0.0).to(tl.float32)
            d_weight += tl.sum(g * z, axis=0)
            d_bias += tl.sum(g, axis=0)
            # d_p = r (γg − ⟨γg⟩ − z⟨γg z⟩), beside what comes to p directly.
            g = g * tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
            along = tl.sum(g * z, axis=1) / DIM
            level = tl.sum(g, axis=1) / DIM
            total = rate[:, None] * (g - level[:, None] - z * along[:, None])
            total += tl.load(d_total + row * DIM + place, mask=inside, other=0.0).to(tl.float32)
            d_code += total
            tl.store(d_p + row * DIM + place, total.to(d_p.dtype.element_ty), mask=inside)
            if MIX:
                tl.store(rounded + row * DIM + place, total.to(rounded.dtype.element_ty), mask=inside)
        target = code_parts + split * points * DIM + at_code + place
        tl.store(target, d_code.to(code_parts.dtype.element_ty), mask=inside)
    place_sum = parts + (split * tl.num_programs(0) + tl.program_id(0)) * DIM + d
    half = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * DIM
    tl.store(place_sum, d_weight, mask=d < DIM)
    tl.store(place_sum + half, d_bias, mask=d < DIM)


@triton.jit
def _mix_gradient_kernel(
    d_total: tl.tensor,  # (rows, dim)
    activation: tl.tensor,  # (rows, width)
    mix: tl.tensor,  # (dim, width)
    d_x: tl.tensor,  # (rows, dim)
    d_activation: tl.tensor,  # (rows, width)
    parts: tl.tensor,  # (programs, dim, width), float32
    rows: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COPY: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    n, d, e = tl.arange(0, POINTS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    place, place_e = n[:, None] * DIM + d[None, :], n[:, None] * WIDTH + e[None, :]
    d_mix = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, POINTS), tl.num_programs(0)):
        start = tl.full((), tile, tl.int64) * POINTS
        inside = (n[:, None] < rows - start) & (d[None, :] < DIM)
        known = (n[:, None] < rows - start) & (e[None, :] < WIDTH)
        g = tl.load(d_total + start * DIM + place, mask=inside, other=0.0)
        if COPY:
            tl.store(d_x + start * DIM + place, g.to(d_x.dtype.element_ty), mask=inside)
        g = g.to(mix.dtype.element_ty)
        a = tl.load(activation + start * WIDTH + place_e, mask=known, other=0.0)
        d_mix = product(tl.trans(g), _gelu(a), d_mix, PRECISION)
        d_bent = tl.zeros((POINTS, BLOCK_E), tl.float32)
        d_bent = product(g, _matrix(mix, d, e, DIM, WIDTH), d_bent, PRECISION)
        wide = a.to(tl.float32)
        slope = _normal(wide) + wide * 0.3989422804014327 * tl.exp(-0.5 * wide * wide)  # 1/√(2π)
        d_a = (d_bent * slope).to(d_activation.dtype.element_ty)
        tl.store(d_activation + start * WIDTH + place_e, d_a, mask=known)
    target = parts + tl.program_id(0) * DIM * WIDTH + d[:, None] * WIDTH + e[None, :]
    tl.store(target, d_mix, mask=(d[:, None] < DIM) & (e[None, :] < WIDTH))


@triton.jit
def _matrix(mix: tl.tensor, d: tl.tensor, e: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    return tl.load(mix + d[:, None] * WIDTH + e[None, :], mask=(d[:, None] < DIM) & (e[None, :] < WIDTH), other=0.0)


@triton.jit
def _gelu(x: tl.tensor) -> tl.tensor:
    wide = x.to(tl.float32)
    return (wide * _normal(wide)).to(x.dtype)


@triton.jit
def _normal(x: tl.tensor) -> tl.tensor:
    """Return the normal distribution function of x: GELU(x) is x times it."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1/√2


@triton.jit
def _centred(p: tl.tensor, inside: tl.tensor, dim: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """Return p less its mean over the channels, zero outside, and the inverse deviation (N,)."""
    mean = tl.sum(p, axis=1) / dim
    gap = tl.where(inside, p - mean[:, None], 0.0)
    return gap, 1.0 / tl.sqrt(tl.sum(gap * gap, axis=1) / dim + eps)

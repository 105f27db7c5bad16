"""Kernels of the residual stream: sums of it, a linear map and a code, with the layer norm of the sum.

They take a tile of points with all channels, and go through some samples of the batch with it: the code and the linear
map are read once for all of these, and the gradient of the code is added up on the way. Sums and norms are bound by
memory as long as two things hold: enough loads are under way (small tiles and many programs, or the next tile copied to
shared memory while this one is worked on), and few instructions are spent on a number (a GELU without an error
function, sums over points once per program). The gradient of the norm takes p as the forward pass left it: the stream
is kept by whoever reads it next in any case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.ops.gelu_triton import bent, bent_and_slope
from ergoflow.ops.tiles_triton import block, precision, product


class Settings(NamedTuple):
    """Points of a tile, warps, pipeline stages and programs of a kernel that holds all channels of its points."""

    points: int
    warps: int
    stages: int
    programs: int


# As many programs as run at a time on 132 multiprocessors. The layer norm alone, and with the linear map before it
# (64 points for each four warps: with more warps each would bend the same activations):
NORM_SETTINGS, MIX_SETTINGS = Settings(16, 4, 3, 924), Settings(64, 4, 2, 264)
# The gradients of the norm and of the map, whose programs hold a matrix of sums.
NORM_GRADIENT_SETTINGS, MIX_GRADIENT_SETTINGS = Settings(4, 2, 1, 1320), Settings(64, 16, 4, 132)
# Both kernels of a map of more bytes than 128 × 128 numbers in half precision, beside which little else fits.
LARGE_SETTINGS, LARGEST_MAP = Settings(16, 8, 1, 132), 128 * 128 * 2


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


def norm_gradient(
    d_total: Tensor,
    d_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    eps: float,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d_p twice, its sum over the batch, and the gradients (2, D) of γ and β in float32.

    p (B, *grid, D) and the gradients that come to it directly and through its norm are contiguous; the dtypes are those
    of the first three results.
    """
    batch, points, dim, _ = _sizes(total, None)
    rows, warps, stages, programs = NORM_GRADIENT_SETTINGS
    tiles = triton.cdiv(points, rows)
    samples = _samples(tiles, batch, programs)
    programs, splits = min(tiles, programs), triton.cdiv(batch, samples)
    d_p = torch.empty_like(total, dtype=dtypes[0])
    rounded = d_p if dtypes[1] == dtypes[0] else torch.empty_like(total, dtype=dtypes[1])
    # With several splits the sum over the batch ends in float32 too.
    code_dtype = dtypes[2] if splits == 1 else torch.float32
    code_parts = torch.empty(splits, *total.shape[1:], device=total.device, dtype=code_dtype)
    parts = torch.empty(2, splits * programs, dim, device=total.device, dtype=torch.float32)
    _norm_gradient_kernel[(programs, splits)](
        d_total,
        d_normed,
        total,
        weight,
        d_p,
        rounded,
        code_parts,
        parts,
        batch,
        samples,
        points,
        eps,
        DIM=dim,
        ROUND=rounded is not d_p,
        POINTS=rows,
        BLOCK_D=block(dim),
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )
    d_code = code_parts[0] if splits == 1 else code_parts.sum(0).to(dtypes[2])
    return d_p, rounded, d_code, parts.sum(1)


def mix_add_gradient(
    d_total: Tensor, activation: Tensor, mix: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_p in `dtype`, which is the gradient of x, and the gradients of a and W."""
    batch, points, dim, width = _sizes(d_total, mix)
    rows, warps, stages, programs = _fitting(MIX_GRADIENT_SETTINGS, mix)
    programs = min(triton.cdiv(batch * points, rows), programs)
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
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )
    return d_x, d_activation, parts.sum(0).to(mix.dtype)


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
    rows, warps, stages, programs = NORM_SETTINGS if mix is None else _fitting(MIX_SETTINGS, mix)
    tiles = triton.cdiv(points, rows)
    samples = _samples(tiles, batch, programs)
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
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )


def _sizes(x: Tensor, mix: Tensor | None) -> tuple[int, int, int, int]:
    """Return the samples, the points of one, the channels, and the summands of the map."""
    return len(x), x[0].numel() // x.shape[-1], x.shape[-1], 1 if mix is None else mix.shape[1]


def _fitting(settings: Settings, mix: Tensor) -> Settings:
    size = block(mix.shape[0]) * block(mix.shape[1]) * mix.element_size()
    return settings if size <= LARGEST_MAP else LARGE_SETTINGS


def _samples(tiles: int, batch: int, programs: int) -> int:
    """Return how many samples a program goes through: the batch, where there are enough tiles for the programs."""
    return triton.cdiv(batch, min(batch, triton.cdiv(programs, tiles)))


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
    STAGES: tl.constexpr,
) -> None:
    start = tl.program_id(0) * POINTS
    first = tl.program_id(1) * samples
    n, d, e = tl.arange(0, POINTS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    inside = (n[:, None] < points - start) & (d[None, :] < DIM)
    known = (n[:, None] < points - start) & (e[None, :] < WIDTH)
    place, place_e = n[:, None] * DIM + d[None, :], n[:, None] * WIDTH + e[None, :]
    if MIX:
        # Turned around here: inside the loop it would be written to shared memory once per sample.
        matrix = tl.trans(_matrix(mix, d, e, DIM, WIDTH))
    if NORM:
        shared = tl.load(code + tl.full((), start, tl.int64) * DIM + place, mask=inside, other=0.0)
    for sample in tl.range(first, tl.minimum(first + samples, batch), num_stages=STAGES):
        # One 64-bit number per tile: within it 32 bits do.
        row = tl.full((), sample, tl.int64) * points + start
        p = tl.zeros((POINTS, BLOCK_D), tl.float32)
        if MIX:
            a = tl.load(activation + row * WIDTH + place_e, mask=known, other=0.0)
            p = product(bent(a.to(tl.float32)).to(a.dtype), matrix, p, PRECISION)
        p += tl.load(x + row * DIM + place, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            p += shared.to(tl.float32)
        tl.store(total + row * DIM + place, p.to(total.dtype.element_ty), mask=inside)
        if NORM:
            gap, rate = _centred(p, d, DIM, BLOCK_D, eps)
            # Here, because a thread of the product has so many channels that γ and β would fill its registers.
            scale = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
            shift = tl.load(bias + d, mask=d < DIM, other=0.0).to(tl.float32)
            z = gap * rate[:, None] * scale[None, :] + shift[None, :]
            tl.store(normed + row * DIM + place, z.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gradient_kernel(
    d_total: tl.tensor,  # (B, points, dim)
    d_normed: tl.tensor,  # (B, points, dim)
    total: tl.tensor,  # (B, points, dim)
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
    ROUND: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    split = tl.program_id(1).to(tl.int64)
    first = tl.program_id(1) * samples
    n, d = tl.arange(0, POINTS), tl.arange(0, BLOCK_D)
    place = n[:, None] * DIM + d[None, :]
    scale = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    # Sums over the points of a tile are left to the end: they would need all warps to meet once per sample.
    d_weight = tl.zeros((POINTS, BLOCK_D), tl.float32)
    d_bias = tl.zeros((POINTS, BLOCK_D), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(points, POINTS), tl.num_programs(0)):
        start = tile * POINTS
        inside = (n[:, None] < points - start) & (d[None, :] < DIM)
        d_code = tl.zeros((POINTS, BLOCK_D), tl.float32)
        for sample in tl.range(first, tl.minimum(first + samples, batch), num_stages=STAGES):
            at = (tl.full((), sample, tl.int64) * points + start) * DIM
            p = tl.load(total + at + place, mask=inside, other=0.0)
            g = tl.load(d_normed + at + place, mask=inside, other=0.0).to(tl.float32)
            direct = tl.load(d_total + at + place, mask=inside, other=0.0).to(tl.float32)
            gap, rate = _centred(p, d, DIM, BLOCK_D, eps)
            z = gap * rate[:, None]
            d_weight += g * z
            d_bias += g
            # d_p = r (γg − ⟨γg⟩ − z⟨γg z⟩), beside what comes to p directly.
            g *= scale[None, :]
            along = tl.sum(g * z, axis=1) / DIM
            level = tl.sum(g, axis=1) / DIM
            direct += rate[:, None] * (g - level[:, None] - z * along[:, None])
            d_code += direct
            tl.store(d_p + at + place, direct.to(d_p.dtype.element_ty), mask=inside)
            if ROUND:
                tl.store(rounded + at + place, direct.to(rounded.dtype.element_ty), mask=inside)
        target = code_parts + (split * points + start) * DIM + place
        tl.store(target, d_code.to(code_parts.dtype.element_ty), mask=inside)
    place_sum = parts + (split * tl.num_programs(0) + tl.program_id(0)) * DIM + d
    half = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * DIM
    tl.store(place_sum, tl.sum(d_weight, axis=0), mask=d < DIM)
    tl.store(place_sum + half, tl.sum(d_bias, axis=0), mask=d < DIM)


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
    STAGES: tl.constexpr,
) -> None:
    n, d, e = tl.arange(0, POINTS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    place, place_e = n[:, None] * DIM + d[None, :], n[:, None] * WIDTH + e[None, :]
    matrix = _matrix(mix, d, e, DIM, WIDTH)
    d_mix = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, POINTS), tl.num_programs(0), num_stages=STAGES):
        start = tl.full((), tile, tl.int64) * POINTS
        left = rows - tile * POINTS
        inside = (n[:, None] < left) & (d[None, :] < DIM)
        known = (n[:, None] < left) & (e[None, :] < WIDTH)
        g = tl.load(d_total + start * DIM + place, mask=inside, other=0.0)
        if COPY:
            tl.store(d_x + start * DIM + place, g.to(d_x.dtype.element_ty), mask=inside)
        g = g.to(mix.dtype.element_ty)
        a = tl.load(activation + start * WIDTH + place_e, mask=known, other=0.0)
        value, slope = bent_and_slope(a.to(tl.float32))
        d_bent = tl.zeros((POINTS, BLOCK_E), tl.float32)
        d_bent = product(g, matrix, d_bent, PRECISION)
        d_mix = product(tl.trans(g), value.to(a.dtype), d_mix, PRECISION)
        d_a = (d_bent * slope).to(d_activation.dtype.element_ty)
        tl.store(d_activation + start * WIDTH + place_e, d_a, mask=known)
    target = parts + tl.program_id(0) * DIM * WIDTH + d[:, None] * WIDTH + e[None, :]
    tl.store(target, d_mix, mask=(d[:, None] < DIM) & (e[None, :] < WIDTH))


@triton.jit
def _matrix(mix: tl.tensor, d: tl.tensor, e: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    return tl.load(mix + d[:, None] * WIDTH + e[None, :], mask=(d[:, None] < DIM) & (e[None, :] < WIDTH), other=0.0)


@triton.jit
def _centred(p: tl.tensor, d: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """Return p (N, BLOCK_D), zero beyond DIM channels, less its mean over these, and the inverse deviation (N,)."""
    gap = p - (tl.sum(p, axis=1) / DIM)[:, None]
    if DIM < BLOCK_D:
        gap = tl.where(d[None, :] < DIM, gap, 0.0)
    return gap, tl.rsqrt(tl.sum(gap * gap, axis=1) / DIM + eps)

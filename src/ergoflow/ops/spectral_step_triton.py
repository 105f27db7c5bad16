"""The fused Triton twin of the step in `ergoflow.ops.spectral_step`: two kernels per stage that hold their transforms.

With z = u + iv the products of both components are one: z² = (u² − v²) + 2i·uv. One field and stage:

    rows      for each x: z(k_y) -> FFT -> z² -> FFT -> q(k_y), |k_y| ≤ M_y, in place
    columns   for each pair ±k_y: q(x) -> FFT -> tendency, Runge–Kutta stage -> ω̂, h -> FFT -> z(x), in place

so that physical space is never stored. With α = −(i/4)(k_x − i k_y)² the tendency is −u·∇ω -> α q̂(k) + ᾱ m̂(k), where
m̂ transforms the conjugate of q(x, −k_y); and z(k) = ζω̂(k), z(x, −k_y) = the conjugate of the transform of −ζ̄ω̂, where
ζ = (k_x + i k_y)/|k|².

Arrays, real and imaginary parts apart: `work` (B, 2, X, 2·HALF) with k_y = 0 .. M_y from column 0 and −k_y from
column HALF; `vorticity` and `memory` (B, 2, X, HALF), rows in FFT order, those outside the mask never touched.

Transforms lie in registers, see `ergoflow.ops.dft_triton`; a program takes TILE of them in LANES·TILE threads. Its
elements are numbered so that neighbours are neighbours in memory; with one element per thread the compiler has no
choice of layout left, and each exchange is one store and one load (1000 instructions and 80 registers for `rows` at
256).
"""

# Triton builds tuples by addition; it does not know the star.
# ruff: noqa: RUF005

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ergoflow.numerics.fourier import TWO_PI, inverse_square, wavenumbers
from ergoflow.numerics.imex import DiagonalStage, diagonal_stages
from ergoflow.ops.dft_triton import transform_registers, transform_stacked, twiddle_factors
from ergoflow.ops.tiles_triton import INTERPRETED

if TYPE_CHECKING:
    from ergoflow.ops.spectral_step import SpectralFlow

# Warps per program, registers per thread or no limit. `columns` would take 168, and three of its programs would share
# a multiprocessor; 128 hold all but ten numbers of 256 points and make it four.
ROW_SETTINGS: tuple[int, int | None] = (4, None)
COLUMN_SETTINGS: tuple[int, int | None] = (4, 128)
# Fields that take all substeps before the next ones begin: 0.6 MB each at 256², so that they stay in the L2 cache.
FIELDS_PER_CHUNK = 64
# The interpreter's time goes by operations, not by numbers: few large programs.
INTERPRETED_TILE = 64
# A group of this many columns fills a sector of 32 bytes.
ALIGNMENT = 8


class Plan(NamedTuple):
    """What every launch of a flow needs, on one device."""

    grid: tuple[int, int]
    limits: tuple[int, int]
    half: int
    units: tuple[float, float]
    forcing: float
    forcing_wavenumber: int
    stages: tuple[DiagonalStage, ...]  # keep and gain of shape (X, HALF)
    inverse: Tensor  # (X, HALF): 1/(|k|²XY)
    row_tile: int
    column_tile: int
    row_twiddles: Tensor  # (2, L, L)
    column_twiddles: Tensor  # (2, L, L·TILE)


def fused_step(flow: SpectralFlow, substeps: int, *, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the step of vorticity (..., 1, X, Y), float32, by substeps·dt."""
    plan = make_plan(flow, device)
    X, Y = flow.grid

    def step(vorticity: Tensor) -> Tensor:
        fields = vorticity.reshape(-1, X, Y)
        chunks = fields.chunk(triton.cdiv(len(fields), FIELDS_PER_CHUNK))
        return torch.cat([_advance(chunk, plan, substeps) for chunk in chunks]).reshape(vorticity.shape)

    return step


def make_plan(flow: SpectralFlow, device: torch.device) -> Plan:
    """Return the tables of a flow, worked out in float64 and stored in float32."""
    X, Y = flow.grid
    limits = flow.limits
    half = triton.cdiv(limits[1] + 1, ALIGNMENT) * ALIGNMENT
    kx, ky = wavenumbers(flow.grid, flow.length)

    def place(table: Tensor) -> Tensor:
        columns = table[..., : limits[1] + 1].to(device=device, dtype=torch.float32)
        return torch.nn.functional.pad(columns, (0, half - columns.shape[-1])).contiguous()

    rows, columns = _tile(math.isqrt(Y), ROW_SETTINGS[0]), _tile(math.isqrt(X), COLUMN_SETTINGS[0])
    return Plan(
        grid=flow.grid,
        limits=limits,
        half=half,
        units=(TWO_PI / flow.length[0], TWO_PI / flow.length[1]),
        forcing=flow.forcing,
        forcing_wavenumber=flow.forcing_wavenumber,
        stages=tuple(
            DiagonalStage(stage.memory, place(stage.keep), place(stage.gain))
            for stage in diagonal_stages(flow.linear.double(), flow.dt)
        ),
        inverse=place(inverse_square(kx, ky) / (X * Y)),
        row_tile=rows,
        column_tile=columns,
        row_twiddles=twiddle_factors(Y).to(device),
        column_twiddles=twiddle_factors(X).repeat_interleave(columns, dim=-1).to(device),
    )


def launch_rows(work: Tensor, plan: Plan) -> None:
    """Replace z by the cut transform of z² along y, in place."""
    (X, Y), (_, limit) = plan.grid, plan.limits
    warps, registers = ROW_SETTINGS
    _rows_kernel[(len(work) * X // plan.row_tile,)](
        work,
        plan.row_twiddles,
        ROWS=X,
        SIZE=Y,
        LIMIT=limit,
        HALF=plan.half,
        TILE=plan.row_tile,
        LANES=math.isqrt(Y),
        num_warps=warps,
        maxnreg=registers,
    )


def launch_columns(work: Tensor, vorticity: Tensor, memory: Tensor, plan: Plan, stage: int | None) -> None:
    """Take stage `stage` in `vorticity` and `memory`, then write the new z into `work`.

    With None there is no stage: z is made of the vorticity alone.
    """
    (X, _), (x_limit, y_limit) = plan.grid, plan.limits
    warps, registers = COLUMN_SETTINGS
    this, following = stage or 0, ((stage or 0) + 1) % len(plan.stages)
    factors = plan.stages[this]
    _columns_kernel[(triton.cdiv(y_limit + 1, plan.column_tile), len(work))](
        work,
        vorticity,
        memory,
        factors.keep,
        factors.gain,
        plan.inverse,
        plan.column_twiddles,
        factors.memory,
        plan.stages[following].memory,
        *plan.units,
        plan.forcing,
        plan.forcing_wavenumber,
        SIZE=X,
        X_LIMIT=x_limit,
        Y_LIMIT=y_limit,
        HALF=plan.half,
        TILE=plan.column_tile,
        LANES=math.isqrt(X),
        STAGE=stage is not None,
        num_warps=warps,
        maxnreg=registers,
    )


def _advance(fields: Tensor, plan: Plan, substeps: int) -> Tensor:
    """Return fields (B, X, Y) after `substeps` steps."""
    vorticity = _to_parts(fields, plan)
    memory = torch.empty_like(vorticity)
    work = torch.empty(*vorticity.shape[:-1], 2 * plan.half, dtype=vorticity.dtype, device=vorticity.device)
    launch_columns(work, vorticity, memory, plan, None)
    for _ in range(substeps):
        for stage in range(len(plan.stages)):
            launch_rows(work, plan)
            launch_columns(work, vorticity, memory, plan, stage)
    return _to_fields(vorticity, plan)


def _to_parts(fields: Tensor, plan: Plan) -> Tensor:
    """Return the spectrum inside the mask, (B, 2, X, HALF), of fields (B, X, Y)."""
    (X, _), (x_limit, y_limit) = plan.grid, plan.limits
    spectrum = torch.view_as_real(torch.fft.rfft2(fields)[..., : y_limit + 1])  # (B, X, M_y + 1, 2)
    parts = spectrum.new_zeros(len(fields), 2, X, plan.half)
    inside = parts[..., : y_limit + 1]
    inside.copy_(spectrum.permute(0, 3, 1, 2))
    inside[..., x_limit + 1 : X - x_limit, :] = 0
    return parts


def _to_fields(parts: Tensor, plan: Plan) -> Tensor:
    (X, Y), (_, y_limit) = plan.grid, plan.limits
    spectrum = torch.zeros(len(parts), X, Y // 2 + 1, dtype=torch.complex64, device=parts.device)
    inside = torch.view_as_real(spectrum)[..., : y_limit + 1, :]  # (B, X, M_y + 1, 2)
    inside.copy_(parts[..., : y_limit + 1].permute(0, 2, 3, 1))
    return torch.fft.irfft2(spectrum, s=plan.grid)


def _tile(lanes: int, warps: int) -> int:
    """Transforms per program: one element of each register per thread."""
    return INTERPRETED_TILE if INTERPRETED else 32 * warps // lanes


@triton.jit
def _rows_kernel(
    work: tl.tensor,  # (B, 2, ROWS, 2·HALF)
    twiddles: tl.tensor,  # (2, LANES, LANES)
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    first = tl.program_id(0) * TILE
    field = (first // ROWS).to(tl.int64)
    element = tl.arange(0, TILE * LANES)
    lane = element % LANES
    row = first % ROWS + element // LANES
    real = work + field * (4 * ROWS * HALF) + row * (2 * HALF)
    imag = real + 2 * ROWS * HALF
    w: tl.tensor = ()
    for a in tl.static_range(LANES):
        w = w + ((tl.load(twiddles + a * LANES + lane), tl.load(twiddles + (LANES + a) * LANES + lane)),)

    z: tl.tensor = ()
    for a in tl.static_range(LANES):
        n = LANES * a + lane
        if LANES * a <= LIMIT:
            re = tl.load(real + n, mask=n <= LIMIT, other=0.0)
            im = tl.load(imag + n, mask=n <= LIMIT, other=0.0)
        elif LANES * (a + 1) > SIZE - LIMIT:
            # The mode n − SIZE stands in column HALF + SIZE − n.
            re = tl.load(real + (HALF + SIZE) - n, mask=n >= SIZE - LIMIT, other=0.0)
            im = tl.load(imag + (HALF + SIZE) - n, mask=n >= SIZE - LIMIT, other=0.0)
        else:
            re = tl.zeros((TILE * LANES,), tl.float32)
            im = tl.zeros((TILE * LANES,), tl.float32)
        z = z + ((re, im),)
    z = transform_registers(z, w, TILE, LANES, 1)
    q: tl.tensor = ()
    for a in tl.static_range(LANES):
        q = q + ((z[a][0] * z[a][0] - z[a][1] * z[a][1], 2 * z[a][0] * z[a][1]),)
    q = transform_registers(q, w, TILE, LANES, -1)
    for a in tl.static_range(LANES):
        n = LANES * a + lane
        if LANES * a <= LIMIT:
            tl.store(real + n, q[a][0], mask=n <= LIMIT)
            tl.store(imag + n, q[a][1], mask=n <= LIMIT)
        elif LANES * (a + 1) > SIZE - LIMIT:
            tl.store(real + (HALF + SIZE) - n, q[a][0], mask=n >= SIZE - LIMIT)
            tl.store(imag + (HALF + SIZE) - n, q[a][1], mask=n >= SIZE - LIMIT)
    # k_y = 0 is its own negative: `columns` reads it in both places.
    tl.store(real + HALF, q[0][0], mask=lane == 0)
    tl.store(imag + HALF, q[0][1], mask=lane == 0)


# Alignment unknown: loads of one number per thread, so that every tensor has the same layout.
@triton.jit(
    do_not_specialize_on_alignment=["work", "vorticity", "memory", "keep", "gain", "inverse", "twiddles"],
)
def _columns_kernel(
    work: tl.tensor,  # (B, 2, SIZE, 2·HALF)
    vorticity: tl.tensor,  # (B, 2, SIZE, HALF)
    memory: tl.tensor,  # (B, 2, SIZE, HALF)
    keep: tl.tensor,  # (SIZE, HALF)
    gain: tl.tensor,  # (SIZE, HALF)
    inverse: tl.tensor,  # (SIZE, HALF)
    twiddles: tl.tensor,  # (2, LANES, LANES·TILE)
    beta: tl.tensor,
    next_beta: tl.tensor,
    unit_x: tl.tensor,
    unit_y: tl.tensor,
    forcing: tl.tensor,
    forcing_wavenumber: tl.tensor,
    SIZE: tl.constexpr,
    X_LIMIT: tl.constexpr,
    Y_LIMIT: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    STAGE: tl.constexpr,
) -> None:
    field = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, TILE * LANES)[:, None]
    register = tl.arange(0, LANES)[None, :]
    lane = element // TILE
    n_y = tl.program_id(0) * TILE + element % TILE
    n = LANES * register + lane
    column = (n_y <= Y_LIMIT) & (n >= 0)
    inside = (n_y <= Y_LIMIT) & ((n <= X_LIMIT) | (n >= SIZE - X_LIMIT))
    k_x = tl.where(n < SIZE // 2, n, n - SIZE).to(tl.float32) * unit_x
    k_y = n_y.to(tl.float32) * unit_y
    cosines = twiddles + element + register * (TILE * LANES)
    sines = cosines + LANES * LANES * TILE

    # One pointer per thread, and the registers at constant distances from it.
    start = lane * (2 * HALF) + n_y
    distance = register * (2 * HALF * LANES)
    real = work + field * (4 * SIZE * HALF) + start
    imag = real + 2 * SIZE * HALF
    table_start = lane * HALF + n_y
    table_distance = register * (HALF * LANES)
    w_real = vorticity + field * (2 * SIZE * HALF) + table_start
    w_imag = w_real + SIZE * HALF
    h_real = memory + field * (2 * SIZE * HALF) + table_start
    h_imag = h_real + SIZE * HALF

    if STAGE:
        p_re = tl.load(real + distance, mask=column, other=0.0)
        p_im = tl.load(imag + distance, mask=column, other=0.0)
        p_re, p_im = transform_stacked(p_re, p_im, cosines, sines, TILE, LANES, -1)
        m_re = tl.load(real + HALF + distance, mask=column, other=0.0)
        m_im = -tl.load(imag + HALF + distance, mask=column, other=0.0)
        m_re, m_im = transform_stacked(m_re, m_im, cosines, sines, TILE, LANES, -1)
        a_re = -0.5 * k_x * k_y
        a_im = -0.25 * (k_x - k_y) * (k_x + k_y)
        h_re = a_re * (p_re + m_re) - a_im * (p_im - m_im)
        h_im = a_re * (p_im + m_im) + a_im * (p_re - m_re)
        h_re += tl.where((n == 0) & (n_y == forcing_wavenumber), forcing, 0.0)
        # The first stage forgets what stands in memory, so the last one need not write it.
        h_re += beta * tl.load(h_real + table_distance, mask=inside & (beta != 0), other=0.0)
        h_im += beta * tl.load(h_imag + table_distance, mask=inside & (beta != 0), other=0.0)
        tl.store(h_real + table_distance, h_re, mask=inside & (next_beta != 0))
        tl.store(h_imag + table_distance, h_im, mask=inside & (next_beta != 0))
        kept = tl.load(keep + table_start + table_distance, mask=inside, other=0.0)
        gained = tl.load(gain + table_start + table_distance, mask=inside, other=0.0)
        w_re = kept * tl.load(w_real + table_distance, mask=inside, other=0.0) + gained * h_re
        w_im = kept * tl.load(w_imag + table_distance, mask=inside, other=0.0) + gained * h_im
        tl.store(w_real + table_distance, w_re, mask=inside)
        tl.store(w_imag + table_distance, w_im, mask=inside)
    else:
        w_re = tl.load(w_real + table_distance, mask=inside, other=0.0)
        w_im = tl.load(w_imag + table_distance, mask=inside, other=0.0)

    stream = tl.load(inverse + table_start + table_distance, mask=inside, other=0.0)
    w_re *= stream
    w_im *= stream
    z_re, z_im = transform_stacked(k_x * w_re - k_y * w_im, k_y * w_re + k_x * w_im, cosines, sines, TILE, LANES, 1)
    tl.store(real + distance, z_re, mask=column)
    tl.store(imag + distance, z_im, mask=column)
    z_re, z_im = transform_stacked(-k_x * w_re - k_y * w_im, k_y * w_re - k_x * w_im, cosines, sines, TILE, LANES, 1)
    tl.store(real + HALF + distance, z_re, mask=column)
    tl.store(imag + HALF + distance, -z_im, mask=column)

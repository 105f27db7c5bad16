"""The fused Triton twin of `ergoflow.ops.lbm.reference_update`: one read and one write of every population.

A program takes BLOCK neighbouring cells of one wall-normal row y, so whether a wall is near is one scalar for the
whole program. Row and direction make a 64-bit base address; only the place inside the row, below 2³¹, is 32-bit.
In half storage a "cell" of the text below is a pair: one 32-bit word, collided twice in float32. Populations
keep their factor HALF_SCALE in registers: the collision needs only the ratios j/ρ and Π/ρ, so replacing
the density at rest, 1, by HALF_SCALE saves every multiplication by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ergoflow.ops.lbm import Collision

# (cells or pairs per program, warps, registers per thread or no limit), the fastest of 25 settings on an H200: two
# per thread keep enough bytes in flight, and without the limit half storage spends 159 registers on four cells.
SINGLE_SETTINGS: tuple[int, int, int | None] = (512, 8, None)
HALF_SETTINGS: tuple[int, int, int | None] = (256, 4, 128)
_MAX_PLANE = 2**31 - 1


def launch(populations: Tensor, out: Tensor, collision: Collision, *, half: bool) -> None:
    """Write the next populations into `out`; both as `stream_collide` has checked them."""
    from ergoflow.ops.lbm import EDDY_FACTOR, HALF_SCALE

    if populations.dtype == torch.float64:
        raise ValueError("the Triton kernel computes in float32, got float64 populations; choose impl='torch'")
    _, rows, columns, depth = populations.shape[:4]
    if columns * depth > _MAX_PLANE:
        raise ValueError(f"X*Z must stay below 2^31, got {columns * depth}; choose a smaller box")
    unit = HALF_SCALE if half else 1.0
    block, warps, registers = HALF_SETTINGS if half else SINGLE_SETTINGS
    _stream_collide_kernel[(triton.cdiv(columns * depth, block), rows)](
        populations.view(torch.int32) if half else populations,
        out.view(torch.int32) if half else out,
        rows,
        unit,
        collision.tau,
        collision.force * unit,
        EDDY_FACTOR * collision.smagorinsky**2,
        1 / collision.damping_length if collision.damping_length else 0.0,
        COLUMNS=columns,
        DEPTH=depth,
        BLOCK=block,
        HALF=half,
        WALLS=collision.walls,
        DAMPED=collision.damping_length > 0,
        EDDY=collision.smagorinsky > 0,
        REGULARIZED=collision.operator == "regularized",
        TRACELESS=collision.trace_removal,
        num_warps=warps,
        maxnreg=registers,
    )


@triton.jit
def _stream_collide_kernel(
    source: tl.tensor,  # (19, rows, COLUMNS, DEPTH), float32 or pairs of float16 as int32
    target: tl.tensor,  # the same
    rows: tl.tensor,
    unit: tl.tensor,  # density at rest, in units of the stored numbers
    tau: tl.tensor,
    force: tl.tensor,
    eddy: tl.tensor,
    damping: tl.tensor,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    WALLS: tl.constexpr,
    DAMPED: tl.constexpr,
    EDDY: tl.constexpr,
    REGULARIZED: tl.constexpr,
    TRACELESS: tl.constexpr,
) -> None:
    row = tl.program_id(1)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < COLUMNS * DEPTH
    x = cell // DEPTH
    z = cell - x * DEPTH

    # Where in its row the population that arrives with c_x = +1 or −1, c_z = +1 or −1 comes from.
    from_west = tl.where(x == 0, (COLUMNS - 1) * DEPTH, -DEPTH) + cell
    from_east = tl.where(x == COLUMNS - 1, (1 - COLUMNS) * DEPTH, DEPTH) + cell
    back = tl.where(z == 0, DEPTH - 1, -1)
    front = tl.where(z == DEPTH - 1, 1 - DEPTH, 1)

    # The rows below and above. A wall sends back what left this row, reversed.
    on_floor = (row == 0) & WALLS
    on_roof = (row == rows - 1) & WALLS
    below = tl.where(row == 0, tl.where(on_floor, 0, rows - 1), row - 1)
    above = tl.where(row == rows - 1, tl.where(on_roof, row, 0), row + 1)
    plane = COLUMNS * DEPTH
    lattice = tl.full((), COLUMNS * DEPTH, tl.int64) * rows
    here = source + row.to(tl.int64) * plane
    lower = source + below.to(tl.int64) * plane
    upper = source + above.to(tl.int64) * plane

    # Half storage: a pair that comes from across z = 0 or z = Z/2 arrives with its two cells exchanged.
    behind = z == 0
    ahead = z == DEPTH - 1
    never = behind & ahead & (z < 0)
    floor_behind, floor_ahead = behind & (not on_floor), ahead & (not on_floor)
    roof_behind, roof_ahead = behind & (not on_roof), ahead & (not on_roof)
    # What comes up from the row below stays in place on the floor, and what comes down on the roof.
    up_west, up_east = tl.where(on_floor, cell, from_west), tl.where(on_floor, cell, from_east)
    up_back, up_front = tl.where(on_floor, cell, cell + back), tl.where(on_floor, cell, cell + front)
    down_west, down_east = tl.where(on_roof, cell, from_west), tl.where(on_roof, cell, from_east)
    down_back, down_front = tl.where(on_roof, cell, cell + back), tl.where(on_roof, cell, cell + front)

    a0, b0 = _load(here, cell, never, inside, HALF)
    a1, b1 = _load(here + 1 * lattice, from_west, never, inside, HALF)
    a2, b2 = _load(here + 2 * lattice, from_east, never, inside, HALF)
    a3, b3 = _load(lower + tl.where(on_floor, 4, 3) * lattice, cell, never, inside, HALF)
    a4, b4 = _load(upper + tl.where(on_roof, 3, 4) * lattice, cell, never, inside, HALF)
    a5, b5 = _load(here + 5 * lattice, cell + back, behind, inside, HALF)
    a6, b6 = _load(here + 6 * lattice, cell + front, ahead, inside, HALF)
    a7, b7 = _load(lower + tl.where(on_floor, 8, 7) * lattice, up_west, never, inside, HALF)
    a8, b8 = _load(upper + tl.where(on_roof, 7, 8) * lattice, down_east, never, inside, HALF)
    a9, b9 = _load(upper + tl.where(on_roof, 10, 9) * lattice, down_west, never, inside, HALF)
    a10, b10 = _load(lower + tl.where(on_floor, 9, 10) * lattice, up_east, never, inside, HALF)
    a11, b11 = _load(here + 11 * lattice, from_west + back, behind, inside, HALF)
    a12, b12 = _load(here + 12 * lattice, from_east + front, ahead, inside, HALF)
    a13, b13 = _load(here + 13 * lattice, from_west + front, ahead, inside, HALF)
    a14, b14 = _load(here + 14 * lattice, from_east + back, behind, inside, HALF)
    a15, b15 = _load(lower + tl.where(on_floor, 16, 15) * lattice, up_back, floor_behind, inside, HALF)
    a16, b16 = _load(upper + tl.where(on_roof, 15, 16) * lattice, down_front, roof_ahead, inside, HALF)
    a17, b17 = _load(lower + tl.where(on_floor, 18, 17) * lattice, up_front, floor_ahead, inside, HALF)
    a18, b18 = _load(upper + tl.where(on_roof, 17, 18) * lattice, down_back, roof_behind, inside, HALF)

    if DAMPED:
        distance = tl.minimum(row, rows - 1 - row).to(tl.float32) + 0.5
        damped = 1 - tl.exp(-distance * damping)
        eddy = eddy * damped * damped
    first = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18)
    first = _collide(first, unit, tau, force, eddy, EDDY, REGULARIZED, TRACELESS)
    second = first
    if HALF:
        second = (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b16, b17, b18)
        second = _collide(second, unit, tau, force, eddy, EDDY, REGULARIZED, TRACELESS)

    there = target + row.to(tl.int64) * plane
    for q in tl.static_range(19):
        _store(there + q * lattice, cell, first[q], second[q], inside, HALF)


@triton.jit
def _load(base: tl.tensor, place: tl.tensor, swapped: tl.tensor, inside: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Return the population of a cell twice, or in half storage those of the pair's two cells."""
    word = tl.load(base + place, mask=inside, other=0)
    if HALF:
        low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.where(swapped, high, low), tl.where(swapped, low, high)
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        return word, word


@triton.jit
def _store(
    base: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    if HALF:
        low = first.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = second.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(base + place, low | high, mask=inside)
    else:
        tl.store(base + place, first, mask=inside)


@triton.jit
def _collide(
    f: tl.tensor,
    unit: tl.tensor,
    tau: tl.tensor,
    force: tl.tensor,
    eddy: tl.tensor,
    EDDY: tl.constexpr,
    REGULARIZED: tl.constexpr,
    TRACELESS: tl.constexpr,
) -> tl.tensor:
    """Return the 19 collided populations; opposite ones share the even and the odd part of their equilibrium."""
    # Sums over the three pairs of diagonals of each coordinate plane, then the moments.
    plus_xy, minus_xy = f[7] + f[8], f[9] + f[10]
    plus_xz, minus_xz = f[11] + f[12], f[13] + f[14]
    plus_yz, minus_yz = f[15] + f[16], f[17] + f[18]
    axis_x, axis_y, axis_z = f[1] + f[2], f[3] + f[4], f[5] + f[6]
    sum_xy, sum_xz, sum_yz = plus_xy + minus_xy, plus_xz + minus_xz, plus_yz + minus_yz
    d7, d9, d11, d13, d15, d17 = (
        f[7] - f[8],
        f[9] - f[10],
        f[11] - f[12],
        f[13] - f[14],
        f[15] - f[16],
        f[17] - f[18],
    )
    excess = f[0] + (axis_x + axis_y + axis_z) + (sum_xy + sum_xz + sum_yz)
    m_x = (f[1] - f[2]) + (d7 + d9) + (d11 + d13) + 0.5 * force
    m_y = (f[3] - f[4]) + (d7 - d9) + (d15 + d17)
    m_z = (f[5] - f[6]) + (d11 - d13) + (d15 - d17)
    per_density = 1.0 / (unit + excess)
    u_x, u_y, u_z = m_x * per_density, m_y * per_density, m_z * per_density

    # Π = Σ c c f − ρ/3 − ρuu + ½(uF + Fu), for populations stored less their weight.
    third = excess * (1.0 / 3.0)
    p_xx = axis_x + sum_xy + sum_xz - third - (m_x - force) * u_x
    p_yy = axis_y + sum_xy + sum_yz - third - m_y * u_y
    p_zz = axis_z + sum_xz + sum_yz - third - m_z * u_z
    p_xy = plus_xy - minus_xy - (m_x - 0.5 * force) * u_y
    p_xz = plus_xz - minus_xz - (m_x - 0.5 * force) * u_z
    p_yz = plus_yz - minus_yz - m_y * u_z
    trace = p_xx + p_yy + p_zz
    if TRACELESS:
        p_xx -= trace * (1.0 / 3.0)
        p_yy -= trace * (1.0 / 3.0)
        p_zz -= trace * (1.0 / 3.0)
    if EDDY:
        norm = tl.sqrt(p_xx * p_xx + p_yy * p_yy + p_zz * p_zz + 2 * (p_xy * p_xy + p_xz * p_xz + p_yz * p_yz))
        omega = 2.0 / (tau + tl.sqrt(tau * tau + eddy * norm * per_density))
    else:
        omega = 1.0 / tau + 0.0 * excess
    keep = 1 - omega

    if REGULARIZED:
        p_xx, p_yy, p_zz = keep * p_xx, keep * p_yy, keep * p_zz
        p_xy, p_xz, p_yz = keep * p_xy, keep * p_xz, keep * p_yz
        # Third moments over 4, named by the axis that stands once, then the one that stands twice.
        y_xx = 0.25 * (u_x * (m_x * u_y + 2 * p_xy) + u_y * p_xx)
        z_xx = 0.25 * (u_x * (m_x * u_z + 2 * p_xz) + u_z * p_xx)
        x_yy = 0.25 * (u_y * (m_x * u_y + 2 * p_xy) + u_x * p_yy)
        z_yy = 0.25 * (u_y * (m_y * u_z + 2 * p_yz) + u_z * p_yy)
        x_zz = 0.25 * (u_z * (m_x * u_z + 2 * p_xz) + u_x * p_zz)
        y_zz = 0.25 * (u_z * (m_y * u_z + 2 * p_yz) + u_y * p_zz)
        p_xx += (m_x + force) * u_x
        p_yy += m_y * u_y
        p_zz += m_z * u_z
        p_xy += (m_x + 0.5 * force) * u_y
        p_xz += (m_x + 0.5 * force) * u_z
        p_yz += m_y * u_z
        base = (excess - 1.5 * (p_xx + p_yy + p_zz)) * (1.0 / 36.0)
        p_xx, p_yy, p_zz = p_xx * 0.125, p_yy * 0.125, p_zz * 0.125
        p_xy, p_xz, p_yz = p_xy * 0.25, p_xz * 0.25, p_yz * 0.25
        v_x, v_y, v_z = (m_x + 0.5 * force) * (1.0 / 12.0), m_y * (1.0 / 12.0), m_z * (1.0 / 12.0)
        e_xy, e_xz, e_yz = base + p_xx + p_yy, base + p_xx + p_zz, base + p_yy + p_zz
        f0 = 12 * base
        f1, f2 = _pair(2 * (base + p_xx), 2 * (v_x - x_yy - x_zz))
        f3, f4 = _pair(2 * (base + p_yy), 2 * (v_y - y_xx - y_zz))
        f5, f6 = _pair(2 * (base + p_zz), 2 * (v_z - z_xx - z_yy))
        f7, f8 = _pair(e_xy + p_xy, (v_x + x_yy) + (v_y + y_xx))
        f9, f10 = _pair(e_xy - p_xy, (v_x + x_yy) - (v_y + y_xx))
        f11, f12 = _pair(e_xz + p_xz, (v_x + x_zz) + (v_z + z_xx))
        f13, f14 = _pair(e_xz - p_xz, (v_x + x_zz) - (v_z + z_xx))
        f15, f16 = _pair(e_yz + p_yz, (v_y + y_zz) + (v_z + z_yy))
        f17, f18 = _pair(e_yz - p_yz, (v_y + y_zz) - (v_z + z_yy))
    else:
        # ω f_eq + (1 − ω/2) S = w [B + (9/2)(c·u)(c·b) ± 3 c·a], a = ωm + h, b = a + h, h = (1 − ω/2)F.
        h = (1 - 0.5 * omega) * force
        a_x, a_y, a_z = omega * m_x + h, omega * m_y, omega * m_z
        b_x = a_x + h
        # ωρ|u|² + 2h u_x = b·u, so B = ω(ρ − 1) − (3/2) b·u.
        base = (omega * excess - 1.5 * (b_x * u_x + a_y * u_y + a_z * u_z)) * (1.0 / 36.0)
        u_x, u_y, u_z = u_x * 0.125, u_y * 0.125, u_z * 0.125
        v_x, v_y, v_z = a_x * (1.0 / 12.0), a_y * (1.0 / 12.0), a_z * (1.0 / 12.0)
        rest, diagonal = 12 * base, base
        if TRACELESS:
            # The second-order part of a pure trace is w (3/2) tr Π (c² − 1): nothing on the axes.
            rest += 0.5 * keep * trace
            diagonal -= keep * trace * (1.0 / 24.0)
        f0 = keep * f[0] + rest
        f1, f2 = _relax(f[1], f[2], keep, 2 * (base + u_x * b_x), 2 * v_x)
        f3, f4 = _relax(f[3], f[4], keep, 2 * (base + u_y * a_y), 2 * v_y)
        f5, f6 = _relax(f[5], f[6], keep, 2 * (base + u_z * a_z), 2 * v_z)
        f7, f8 = _relax(f[7], f[8], keep, diagonal + (u_x + u_y) * (b_x + a_y), v_x + v_y)
        f9, f10 = _relax(f[9], f[10], keep, diagonal + (u_x - u_y) * (b_x - a_y), v_x - v_y)
        f11, f12 = _relax(f[11], f[12], keep, diagonal + (u_x + u_z) * (b_x + a_z), v_x + v_z)
        f13, f14 = _relax(f[13], f[14], keep, diagonal + (u_x - u_z) * (b_x - a_z), v_x - v_z)
        f15, f16 = _relax(f[15], f[16], keep, diagonal + (u_y + u_z) * (a_y + a_z), v_y + v_z)
        f17, f18 = _relax(f[17], f[18], keep, diagonal + (u_y - u_z) * (a_y - a_z), v_y - v_z)
    return (f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18)


@triton.jit
def _relax(forward: tl.tensor, backward: tl.tensor, keep: tl.tensor, even: tl.tensor, odd: tl.tensor) -> tl.tensor:
    return keep * forward + (even + odd), keep * backward + (even - odd)


@triton.jit
def _pair(even: tl.tensor, odd: tl.tensor) -> tl.tensor:
    return even + odd, even - odd

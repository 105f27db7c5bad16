"""One lattice-Boltzmann step of a channel: stream, bounce off the walls, collide.

Layout. Populations are post-collision, stored as f − w in one array (Q=19, Y, X, Z): the wall-normal axis y is
outermost and the spanwise axis z contiguous, so that a wall is a contiguous plane and a run of cells along z is one
wide access. Half-precision storage is (Q, Y, X, Z/2, 2): the two cells of a pair lie half a box apart,
z and z + Z/2, so that a pair shifted by one cell is again a pair on a 32-bit boundary. It holds HALF_SCALE·(f − w).
`to_half_storage` and `from_half_storage` convert; arithmetic is always at least float32.

Scheme. Pull streaming in two lattices, half-way bounce-back at y = −½ and Y − ½, BGK or regularised collision
with Guo's forcing (Guo, Zheng & Shi, PRE 2002), eddy viscosity from the non-equilibrium stress (Hou et al. 1994).
With f the streamed populations, ρ = Σf, ρu = Σcf + F/2 and

    Π = Σ c c (f − f_eq) + ½(uF + Fu),     τ = ½(τ₀ + √(τ₀² + 18√2 Cs²|Π|/ρ)),     ω = 1/τ,

BGK is f ← f − ω(f − f_eq) + (1 − ω/2) w [3(c − u) + 9(c·u)c]·F. The regularised collision keeps of f only ρ, u and
Π and rebuilds the third moments from them, Σ c_a² c_b f = ρu_a²u_b + (1 − ω)(2u_aΠ_ab + u_bΠ_aa) beyond the
linear ones (recursive regularisation: Malaspinas 2015; on D3Q19 Jacob, Malaspinas & Sagaut 2018). Without
them (Latt & Chopard 2006) the flow at τ near ½ is unstable where it is fast. Trace removal sets the
trace of Π to zero first: bulk viscosity relaxes in one step.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ergoflow.numerics.lattice import (
    OPPOSITE,
    VELOCITIES,
    along_velocities,
    density_excess,
    equilibrium,
    first_moment,
    from_moments,
    second_moment,
    third_order,
    trace,
    weights_like,
)
from ergoflow.ops.choice import has_triton, interpreted

Impl = Literal["auto", "torch", "compiled", "triton"]

# A power of two that lifts populations well above float16's subnormal numbers; |f − w| < 2 still fits.
HALF_SCALE = 2.0**15
# 18√2 in τ_eff: τ(τ − τ₀) = 3Cs²|S|τ with |S| = √2·3|Π|/(2ρτ), a quadratic equation for τ.
EDDY_FACTOR = 18 * math.sqrt(2)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Collision:
    """What happens at a cell, in lattice units.

    `force` acts along x. `damping_length` > 0 multiplies Cs by van Driest's 1 − exp(−d/length), d the distance to
    the nearer wall in cells. Without `walls` the box is periodic along y too.
    """

    tau: float
    force: float = 0.0
    smagorinsky: float = 0.0
    damping_length: float = 0.0
    operator: Literal["bgk", "regularized"] = "bgk"
    trace_removal: bool = False
    walls: bool = True

    def __post_init__(self) -> None:
        """Refuse what has no positive viscosity."""
        if not (self.tau > 0.5 and math.isfinite(self.tau)):
            raise ValueError(f"tau must be above 0.5, got {self.tau}; viscosity is (tau - 0.5)/3")
        for name in ("smagorinsky", "damping_length"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must not be negative, got {value}; choose 0 for none")
        if not math.isfinite(self.force):
            raise ValueError(f"force must be finite, got {self.force}; choose 0 for none")
        if self.operator not in ("bgk", "regularized"):
            raise ValueError(f"operator must be 'bgk' or 'regularized', got {self.operator!r}; choose one of them")
        if self.damping_length > 0 and not self.walls:
            raise ValueError(f"damping_length needs walls, got {self.damping_length} without; set it to 0")


def stream_collide(
    populations: Tensor, collision: Collision, *, impl: Impl = "auto", out: Tensor | None = None
) -> Tensor:
    """Return the populations one time step later, in `out` where given (never the input itself).

    `impl`: "torch" is the reference; "compiled" a fused CPU twin (some twenty times as fast, after ten seconds of
    compilation per box shape); "triton" the fused GPU kernel; "auto" takes Triton for CUDA
    tensors and the reference otherwise. Input (19, Y, X, Z) or half storage (19, Y, X, Z/2, 2).
    """
    half = is_half_storage(populations)
    chosen = choose_impl(populations.device.type, impl)
    if out is not None:
        _check_out(out, populations)
    if chosen == "triton":
        from ergoflow.ops.lbm_triton import launch

        out = torch.empty_like(populations) if out is None else out
        launch(populations, out, collision, half=half)
        return out
    full = from_half_storage(populations) if half else populations
    if chosen == "compiled":
        from ergoflow.ops.lbm_compiled import compiled_update

        eddy = EDDY_FACTOR * smagorinsky_by_row(full[0], collision).square()[:, None, None]
        stepped = compiled_update()(full, eddy, collision)
    else:
        stepped = reference_update(full, collision)
    stepped = to_half_storage(stepped) if half else stepped
    return stepped if out is None else out.copy_(stepped)


def reference_update(populations: Tensor, collision: Collision) -> Tensor:
    """Return one step of (19, Y, X, Z), the text of this file's first lines made code."""
    return collide(stream(populations, walls=collision.walls), collision)


def stream(populations: Tensor, *, walls: bool) -> Tensor:
    """Return the populations moved by their velocities; at a wall they return reversed to where they left."""
    streamed = []
    for q, (cx, cy, cz) in enumerate(VELOCITIES):
        moved = torch.roll(populations[q], shifts=(cy, cx, cz), dims=(0, 1, 2))  # (Y, X, Z)
        if walls and cy == 1:
            moved = torch.cat((populations[OPPOSITE[q]][:1], moved[1:]))
        if walls and cy == -1:
            moved = torch.cat((moved[:-1], populations[OPPOSITE[q]][-1:]))
        streamed.append(moved)
    return torch.stack(streamed)


def collide(populations: Tensor, collision: Collision) -> Tensor:
    """Return the collided populations of streamed ones (19, Y, X, Z)."""
    force = torch.zeros(3, 1, 1, 1, dtype=populations.dtype, device=populations.device)
    force[0] = collision.force
    excess = density_excess(populations)
    u = (first_moment(populations) + force / 2) / (1 + excess)
    rest = equilibrium(excess, u)
    work = u[:, None] * force[None] + force[:, None] * u[None]  # uF + Fu, (3, 3, Y, X, Z)
    stress = second_moment(populations - rest) + work / 2
    isotropic = torch.zeros_like(stress)
    if collision.trace_removal:
        for axis in range(3):
            isotropic[axis, axis] = trace(stress) / 3
        stress = stress - isotropic
    omega = 1 / relaxation_time(stress, excess, collision)
    if collision.operator == "regularized":
        flux = (1 + excess) * u[:, None] * u[None] + (1 - omega) * stress + work / 2
        left = (1 - omega) * stress
        skew = torch.stack(  # (3, 3, Y, X, Z): entry [a, b] is the third moment of a, a, b
            [
                torch.stack(
                    [u[a] * ((1 + excess) * u[a] * u[b] + 2 * left[a, b]) + u[b] * left[a, a] for b in range(3)]
                )
                for a in range(3)
            ]
        )
        return from_moments(excess, (1 + excess) * u + force / 2, flux) + third_order(skew)
    along_f = along_velocities(force)
    work_done = (u * force).sum(dim=0)
    source = weights_like(populations) * (3 * along_f - 3 * work_done + 9 * along_velocities(u) * along_f)
    collided = populations - omega * (populations - rest) + (1 - omega / 2) * source
    if collision.trace_removal:
        nothing = torch.zeros_like(excess)
        collided = collided - (1 - omega) * from_moments(nothing, torch.zeros_like(u), isotropic)
    return collided


def density(populations: Tensor) -> Tensor:
    """Return ρ (Y, X, Z) of post-collision populations in either storage."""
    return 1 + density_excess(_full(populations))


def velocity(populations: Tensor, *, force: float) -> Tensor:
    """Return u (3, Y, X, Z) in cells per step at the time of the last collision, from post-collision populations.

    The collision added F to the momentum, of which half belongs to this instant: ρu = Σcf − F/2.
    """
    full = _full(populations)
    momentum = first_moment(full)
    momentum[0] -= force / 2
    return momentum / (1 + density_excess(full))


def relaxation_time(stress: Tensor, excess: Tensor, collision: Collision) -> Tensor:
    """Return τ_eff (Y, X, Z) for the force-corrected non-equilibrium stress Π (3, 3, Y, X, Z)."""
    norm = stress.square().sum(dim=(0, 1)).sqrt()
    eddy = EDDY_FACTOR * smagorinsky_by_row(excess, collision).square()[:, None, None]
    return 0.5 * (collision.tau + torch.sqrt(collision.tau**2 + eddy * norm / (1 + excess)))


def smagorinsky_by_row(cells: Tensor, collision: Collision) -> Tensor:
    """Return Cs (Y,) at each height of `cells` (Y, X, Z), damped towards the walls if the collision asks for it."""
    rows = cells.shape[0]
    if collision.damping_length == 0:
        return torch.full((rows,), collision.smagorinsky, dtype=cells.dtype, device=cells.device)
    row = torch.arange(rows, dtype=cells.dtype, device=cells.device)
    distance = torch.minimum(row, rows - 1 - row) + 0.5
    return collision.smagorinsky * (1 - torch.exp(-distance / collision.damping_length))


def is_half_storage(populations: Tensor) -> bool:
    """Return whether `populations` is half storage; raise if it is neither that nor a plain (19, Y, X, Z)."""
    shape = tuple(populations.shape)
    half = populations.dtype == torch.float16
    good = (populations.ndim == 5 and shape[-1] == 2) if half else populations.ndim == 4
    if not good or shape[0] != len(VELOCITIES) or not populations.is_contiguous():
        raise ValueError(
            f"populations must be contiguous (19, Y, X, Z), or float16 (19, Y, X, Z/2, 2), got {shape}"
            f" {populations.dtype}; see to_half_storage"
        )
    if not half and populations.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"populations must be float16, float32 or float64, got {populations.dtype}; convert them")
    return half


def to_half_storage(populations: Tensor) -> Tensor:
    """Return (19, Y, X, Z) populations in half storage, float16 (19, Y, X, Z/2, 2)."""
    if populations.shape[-1] % 2:
        raise ValueError(f"half storage needs an even Z, got {populations.shape[-1]}; choose an even box or float32")
    pairs = populations.unflatten(-1, (2, -1)).transpose(-1, -2)  # (19, Y, X, Z/2, 2)
    return (pairs * HALF_SCALE).to(torch.float16).contiguous()


def from_half_storage(populations: Tensor) -> Tensor:
    """Return half storage as float32 (19, Y, X, Z) populations f − w."""
    return populations.to(torch.float32).transpose(-1, -2).flatten(-2).mul_(1 / HALF_SCALE)


def obstacle_indices(solid: Tensor, *, half: bool) -> tuple[Tensor, Tensor]:
    """Return for each solid cell of (Y, X, Z) and direction where in the flat arrays `reflect` writes and reads."""
    rows, columns, depth = solid.shape
    if rows < 3 or bool(solid[[0, -1]].any()):
        raise ValueError("solid cells must leave the rows at the walls free, got some there; move the obstacle inwards")
    y, x, z = torch.nonzero(solid, as_tuple=True)
    c_x, c_y, c_z = torch.tensor(VELOCITIES, device=solid.device).T[:, :, None]  # (19, 1) each
    q = torch.arange(len(VELOCITIES), device=solid.device)[:, None]
    backwards = torch.tensor(OPPOSITE, device=solid.device)[:, None]

    def flat(q: Tensor, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        in_row = (z % (depth // 2)) * 2 + z // (depth // 2) if half else z
        return (((q * rows + y) * columns + x) * depth + in_row).flatten()

    return flat(backwards, y, x, z), flat(q, y - c_y, (x - c_x) % columns, (z - c_z) % depth)


def reflect(populations: Tensor, out: Tensor, indices: tuple[Tensor, Tensor]) -> None:
    """Overwrite, in `out` after a step from `populations`, the solid cells: what arrives leaves reversed.

    This full-way bounce-back puts the obstacle's faces half-way between solid and fluid cells.
    """
    write, read = indices
    out.view(-1)[write] = populations.view(-1)[read]


def _check_out(out: Tensor, populations: Tensor) -> None:
    if out.shape != populations.shape or out.dtype != populations.dtype or out.device != populations.device:
        raise ValueError(
            f"out must match {tuple(populations.shape)} {populations.dtype}, got {tuple(out.shape)} {out.dtype};"
            " use empty_like"
        )
    if not out.is_contiguous() or out.data_ptr() == populations.data_ptr():
        raise ValueError("out must be contiguous memory of its own, got a view or the input; keep two lattices")


def _full(populations: Tensor) -> Tensor:
    return from_half_storage(populations) if is_half_storage(populations) else populations


def choose_impl(device_type: str, impl: Impl) -> Literal["torch", "compiled", "triton"]:
    """Return the implementation that `impl` means on this device; asking for one that cannot run raises."""
    if impl not in ("auto", "torch", "compiled", "triton"):
        raise ValueError(f"impl must be 'auto', 'torch', 'compiled' or 'triton', got {impl!r}; choose one of them")
    if impl == "auto":
        return _choose_automatically(device_type)
    if impl == "triton":
        reason = _why_not_triton(device_type)
        if reason:
            raise ValueError(f"impl 'triton' must be able to run here, got {reason}; choose impl='torch'")
    return impl


@functools.cache
def _choose_automatically(device_type: str) -> Literal["torch", "triton"]:
    # Cached, so that the choice is logged once per kind of device.
    reason = _why_not_triton(device_type) if device_type == "cuda" else "the tensors are not on a GPU"
    chosen: Literal["torch", "triton"] = "torch" if reason else "triton"
    log.info("lattice Boltzmann on %s: impl %s%s", device_type, chosen, f" ({reason})" if reason else "")
    return chosen


def _why_not_triton(device_type: str) -> str:
    """Return the reason, or nothing when the kernel can run."""
    if not has_triton():
        return "no triton package"
    if device_type != "cuda" and not interpreted():
        return f"tensors on {device_type} without TRITON_INTERPRET=1"
    return ""

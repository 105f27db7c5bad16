"""Turbulent channel flow between two plates by lattice Boltzmann: the paper's second benchmark.

x is streamwise and z spanwise, both periodic; walls lie half a cell outside the first and the last row of y. A
constant force along x drives the flow. The state is the post-collision populations, (19, Y, X, Z) or, stored as
float16, (19, Y, X, Z/2, 2); `ergoflow.ops.lbm` has the layout and the scheme, `ergoflow.solvers.units` the units.
The populations are everything: save them, load them, and the run continues as if it had not stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ergoflow.numerics.lattice import density_excess, first_moment, from_moments, second_moment
from ergoflow.numerics.trajectory import Step
from ergoflow.ops import lbm
from ergoflow.solvers.units import DNS_REYNOLDS_TAU, ChannelUnits

# Reichardt's mean profile: von Kármán's constant, and the constants of its inner part.
KARMAN, REICHARDT_OFFSET, REICHARDT_LENGTH, REICHARDT_SHORT = 0.41, 7.8, 11.0, 3.0
# A⁺ of van Driest's damping.
VAN_DRIEST_PLUS = 26.0
# The fast start: how many random modes, their largest wavenumbers along x and z in periods per box.
START_MODES, START_MAX_X, START_MAX_Z = 40, 4, 6
# The paper's obstacle on 192 cells between the walls: 20 × 20 × 100 cells at x = 192.
BLOCK_CELLS, BLOCK_REFERENCE = (20, 20, 100), 192
# Noise, in u_τ, that makes the seeds of a start from rest differ.
REST_NOISE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ChannelConfig:
    """The channel and how it is solved. `box` counts cells along (x, y, z).

    `van_driest` damps Smagorinsky's constant towards the walls; without it the eddy viscosity at the wall is
    ν_t/ν = (Cs Δx⁺)², 4 % for .1 on 192 cells and 7 % for .07 on 96, and the mean profile is as much too low there.
    `trace_removal` damps the acoustic noise that the paper's plain BGK grows at the wall on coarse grids; below about
    64 cells between the walls choose the regularised collision too.
    """

    box: tuple[int, int, int] = (1024, 192, 192)
    reynolds_tau: float = DNS_REYNOLDS_TAU
    bulk_velocity: float = 0.1
    smagorinsky: float = 0.1
    van_driest: bool = True
    collision: Literal["bgk", "regularized"] = "bgk"
    trace_removal: bool = True
    init: Literal["reichardt", "block"] = "reichardt"
    storage: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        """Refuse what the solver cannot do."""
        if len(self.box) != 3 or min(self.box) < 4:
            raise ValueError(f"box must have three sides of at least 4 cells, got {self.box}; give (x, y, z)")
        if self.init not in ("reichardt", "block"):
            raise ValueError(f"init must be 'reichardt' or 'block', got {self.init!r}; choose one of them")
        if self.storage not in ("float32", "float16"):
            raise ValueError(f"storage must be 'float32' or 'float16', got {self.storage!r}; choose one of them")
        if self.storage == "float16" and self.box[2] % 2:
            raise ValueError(f"float16 storage needs an even z, got {self.box[2]}; choose {self.box[2] + 1}")
        self.lattice_collision()

    @property
    def units(self) -> ChannelUnits:
        """The lattice units of this channel."""
        return ChannelUnits(cells=self.box[1], reynolds_tau=self.reynolds_tau, bulk_velocity=self.bulk_velocity)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the populations."""
        x, y, z = self.box
        return (19, y, x, z) if self.storage == "float32" else (19, y, x, z // 2, 2)

    def lattice_collision(self) -> lbm.Collision:
        """Return the collision in lattice units."""
        units = self.units
        return lbm.Collision(
            tau=units.tau,
            force=units.force,
            smagorinsky=self.smagorinsky,
            damping_length=VAN_DRIEST_PLUS / units.cell_plus if self.van_driest else 0.0,
            operator=self.collision,
            trace_removal=self.trace_removal,
        )


def make_step(
    config: ChannelConfig,
    *,
    substeps: int = 1,
    device: torch.device | str = "cpu",
    impl: lbm.Impl = "auto",
    obstacle: Tensor | None = None,
) -> Step:
    """Return the Step that advances populations by `substeps` time steps.

    An `obstacle` (Y, X, Z) of true for solid cells stands in the flow, such as `block(config)` in the first phase of
    the paper's start; None leaves the channel free. float32 storage also takes float64 populations (not in Triton).
    """
    if substeps < 1:
        raise ValueError(f"substeps must be at least 1, got {substeps}; choose a positive whole number")
    collision = config.lattice_collision()
    half = config.storage == "float16"
    indices = None if obstacle is None else lbm.obstacle_indices(obstacle.to(device), half=half)

    def step(populations: Tensor) -> Tensor:
        _check_populations(populations, config)
        for _ in range(substeps):
            stepped = lbm.stream_collide(populations, collision, impl=impl)
            if indices is not None:
                lbm.reflect(populations, stepped, indices)
            populations = stepped
        return populations

    return step


def initial_populations(
    config: ChannelConfig, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the populations a run starts from; `dtype` is that of the arithmetic, and of float32 storage.

    "reichardt": the mean profile plus 40 random modes, free of divergence and at rest at the walls, of about one u_τ
    each; turbulent after 2 to 3 δ/u_τ. "block": the fluid at rest but for a thousandth of u_τ of noise; use `block`
    as the obstacle of the first steps. The random numbers depend on the seed alone, not on the device.
    """
    rng = np.random.default_rng(seed)
    x, y, z = config.box
    if config.init == "block":
        noise = torch.from_numpy(rng.standard_normal((3, y, x, z), dtype=np.float32))
        velocity = (REST_NOISE * config.units.friction_velocity * noise).to(device=device, dtype=dtype)
    else:
        velocity = _random_modes(config, rng, device, dtype)
        velocity[0] += reichardt_profile(config).to(velocity)[:, None, None]
        velocity *= config.units.friction_velocity
    return populations_from_velocity(velocity, config)


def populations_from_velocity(
    velocity: Tensor, config: ChannelConfig, *, excess: Tensor | None = None, stress: Tensor | None = None
) -> Tensor:
    """Return post-collision populations with velocity (3, Y, X, Z) in cells per step.

    `excess` is ρ − 1 (Y, X, Z), None for density one; `stress` the non-equilibrium stress Π (3, 3, Y, X, Z) before
    the collision, None for none.
    """
    force = torch.zeros_like(velocity[:, :1, :1, :1])
    force[0] = config.units.force
    excess = torch.zeros_like(velocity[0]) if excess is None else excess
    density = 1 + excess
    flux = density * velocity[:, None] * velocity[None] + (velocity[:, None] * force + force[:, None] * velocity) / 2
    if stress is not None:
        flux += (1 - 1 / config.units.tau) * stress
    populations = from_moments(excess, density * velocity + force / 2, flux)
    return lbm.to_half_storage(populations) if config.storage == "float16" else populations


def refine(populations: Tensor, coarse: ChannelConfig, fine: ChannelConfig) -> Tensor:
    """Return the state on `fine`, twice as many cells along each side as `coarse`, that continues `populations`.

    Density, velocity and Π are interpolated linearly between cell centres (velocity vanishes at the wall).
    Π = −(2/3)ρτS is rescaled by ½τ_fine/τ_coarse: at the same velocity its gradient per cell halves.
    """
    if fine.box != tuple(2 * side for side in coarse.box):
        raise ValueError(f"fine box must be twice {coarse.box}, got {fine.box}; choose it so")
    if (fine.reynolds_tau, fine.bulk_velocity) != (coarse.reynolds_tau, coarse.bulk_velocity):
        raise ValueError(
            f"fine and coarse must share reynolds_tau and bulk_velocity, got {fine.reynolds_tau}, {fine.bulk_velocity}"
            f" and {coarse.reynolds_tau}, {coarse.bulk_velocity}; change one config"
        )
    _check_populations(populations, coarse)
    excess, velocity, relaxed = moments(populations, coarse)
    stress = relaxed / (1 - 1 / coarse.units.tau)
    stress *= fine.units.tau / (2 * coarse.units.tau)
    return populations_from_velocity(
        _interpolate(velocity, wall_sign=-1),
        fine,
        excess=_interpolate(excess[None], wall_sign=1)[0],
        stress=_interpolate(stress.flatten(0, 1), wall_sign=1).unflatten(0, (3, 3)),
    )


def moments(populations: Tensor, config: ChannelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return ρ − 1 (Y, X, Z), u (3, Y, X, Z) and (1 − ω)Π (3, 3, Y, X, Z), all in lattice units."""
    full = lbm.from_half_storage(populations) if lbm.is_half_storage(populations) else populations
    excess = density_excess(full)
    velocity = first_moment(full)
    velocity[0] -= config.units.force / 2
    velocity /= 1 + excess
    force = torch.zeros_like(velocity[:, :1, :1, :1])
    force[0] = config.units.force
    relaxed = second_moment(full) - (velocity[:, None] * force + force[:, None] * velocity) / 2
    relaxed -= (1 + excess) * velocity[:, None] * velocity[None]
    for axis in range(3):
        relaxed[axis, axis] -= excess / 3
    return excess, velocity, relaxed


def plane_velocities(populations: Tensor, columns: Sequence[int], config: ChannelConfig) -> Tensor:
    """Return (P, 3, Y, Z): the velocity in units of u_τ on the planes of P columns x."""
    _check_populations(populations, config)
    for x in columns:
        if not 0 <= x < config.box[0]:
            raise ValueError(f"x must lie in 0 .. {config.box[0] - 1}, got {x}; planes are counted in cells")
    planes = torch.stack([populations[:, :, x] for x in columns], dim=2)  # (19, Y, P, Z), or Z/2 pairs
    velocity = lbm.velocity(planes, force=config.units.force) / config.units.friction_velocity
    return velocity.movedim(2, 0).contiguous()


def reichardt_profile(config: ChannelConfig) -> Tensor:
    """Return U⁺ (Y,) in float64 by Reichardt's formula, y⁺ counted from the nearer wall."""
    rows = torch.arange(config.box[1], dtype=torch.float64)
    y_plus = (torch.minimum(rows, config.box[1] - 1 - rows) + 0.5) * config.units.cell_plus
    inner = 1 - torch.exp(-y_plus / REICHARDT_LENGTH) - y_plus / REICHARDT_LENGTH * torch.exp(-y_plus / REICHARDT_SHORT)
    return torch.log1p(KARMAN * y_plus) / KARMAN + REICHARDT_OFFSET * inner


def block(config: ChannelConfig) -> Tensor:
    """Return (Y, X, Z), true in the paper's block: 20 × 20 × 100 cells per 192, a bar across mid-channel.

    At x = 192 as in the paper, or a quarter of the box where that is less.
    """
    sides = [max(2, round(side * config.box[1] / BLOCK_REFERENCE)) for side in BLOCK_CELLS]
    starts = [
        min(config.box[1], config.box[0] // 4),
        (config.box[1] - sides[1]) // 2,
        max(0, (config.box[2] - sides[2]) // 2),
    ]
    x, y, z = (slice(start, start + side) for start, side in zip(starts, sides, strict=True))
    solid = torch.zeros(config.box[1], config.box[0], config.box[2], dtype=torch.bool)
    solid[y, x, z] = True
    return solid


def _random_modes(
    config: ChannelConfig, rng: np.random.Generator, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Return (3, Y, X, Z): modes of amplitude about one with zero divergence that vanish at the walls.

    With k along the wall and phase k·x + θ, each is v = g(y) cos, with the horizontal velocity −g′(y)/|k| sin along k
    that makes it solenoidal, plus a streak h(y) cos across k; g = (1 − η²)²(1 or η), h = 1 − η², η = y/δ.
    """
    x, y, z = config.box
    delta = config.units.half_height

    def axis(count: int) -> Tensor:
        return torch.arange(count, device=device, dtype=dtype) + 0.5

    eta = axis(y) / delta - 1
    wall = 1 - eta.square()
    shapes = ((wall.square(), -4 * eta * wall / delta), (eta * wall.square(), wall * (wall - 4 * eta.square()) / delta))
    velocity = torch.zeros(3, y, x, z, device=device, dtype=dtype)
    for _ in range(START_MODES):
        n_x, n_z = (
            int(rng.integers(0, START_MAX_X + 1)),
            int(rng.integers(1, START_MAX_Z + 1)) * int(rng.choice((-1, 1))),
        )
        k_x, k_z = 2 * math.pi * n_x / x, 2 * math.pi * n_z / z
        k = math.hypot(k_x, k_z)
        upright, streak = rng.standard_normal(2).tolist()
        phase = k_x * axis(x)[:, None] + k_z * axis(z) + float(rng.uniform(0, 2 * math.pi))  # (X, Z)
        g, slope = shapes[int(rng.integers(2))]
        along = (-upright / k * slope)[:, None, None] * torch.sin(phase)
        across = (streak * wall)[:, None, None] * torch.cos(phase)
        velocity[0] += along * (k_x / k) - across * (k_z / k)
        velocity[1] += (upright * g)[:, None, None] * torch.cos(phase)
        velocity[2] += along * (k_z / k) + across * (k_x / k)
    return velocity


def _interpolate(field: Tensor, *, wall_sign: int) -> Tensor:
    """Return (C, Y, X, Z) on twice the cells: ¾ of the cell that holds the new centre and ¼ of its neighbour."""
    for dim in (1, 2, 3):
        before, after = field.roll(1, dim), field.roll(-1, dim)
        if dim == 1:
            before = torch.cat((wall_sign * field[:, :1], before[:, 1:]), dim=1)
            after = torch.cat((after[:, :-1], wall_sign * field[:, -1:]), dim=1)
        pair = torch.stack((0.75 * field + 0.25 * before, 0.75 * field + 0.25 * after), dim=dim + 1)
        field = pair.flatten(dim, dim + 1)
    return field


def _check_populations(populations: Tensor, config: ChannelConfig) -> None:
    good_types = (torch.float16,) if config.storage == "float16" else (torch.float32, torch.float64)
    if tuple(populations.shape) != config.shape or populations.dtype not in good_types:
        raise ValueError(
            f"populations must be {config.storage} of shape {config.shape}, got {populations.dtype}"
            f" {tuple(populations.shape)}; make them with initial_populations"
        )

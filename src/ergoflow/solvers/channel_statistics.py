"""What is measured of a running channel: wall statistics for the comparison with DNS, and the watchdog.

`ChannelStatistics` averages over planes parallel to the walls, over time and over both walls. `check` stops a
run that has left the physical range: plain BGK can grow acoustic noise at the wall long before it blows up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ergoflow.numerics.lattice import SOUND_SPEED_SQUARED
from ergoflow.ops import lbm
from ergoflow.solvers.channel import ChannelConfig, moments

# Fixed-point iterations for |Π| from (1 − ω)Π: each shrinks the error by the eddy's share of the viscosity.
EDDY_ITERATIONS = 6


@dataclass(frozen=True, kw_only=True)
class ChannelLimits:
    """Where `check` stops a run; in brackets what a developed channel has on 96 and 192 cells.

    `mach`: of the fastest cell (about half the limit: u reaches some 24 u_τ, and the bulk moves at 0.1 cells a step).
    `density_rms` (2e-4; up to 4e-4 in float16 storage).
    `first_cell_v` + `first_cell_v_per_plus`·y⁺: rms of v/u_τ in the first cells off the walls, y⁺ that of their nodes
    (.024 of .23 and .007 of .19; the DNS has .009 at y⁺ = 1, .12 at 5 and .29 at 10).
    """

    mach: float = 0.5
    density_rms: float = 1e-2
    first_cell_v: float = 0.15
    first_cell_v_per_plus: float = 0.04

    def first_cell(self, config: ChannelConfig) -> float:
        """Return the limit of v′ in the first cell of this channel."""
        return self.first_cell_v + self.first_cell_v_per_plus * config.units.first_node_plus


class ChannelUnphysical(RuntimeError):  # noqa: N818  (what happened, not whose fault it is)
    """A channel left the physical range; carries the `step`, the `quantity`, its `value` and the `limit`."""

    def __init__(self, *, step: int, quantity: str, value: float, limit: float) -> None:
        """Keep the facts as attributes and say them, with advice, in one line."""
        super().__init__(
            f"{quantity} must stay below {limit:.3g}, got {value:.3g} at step {step};"
            " set trace_removal, collision='regularized' or a lower bulk_velocity and start again"
        )
        self.step = step
        self.quantity = quantity
        self.value = value
        self.limit = limit

    def __reduce__(self) -> tuple[Callable[..., ChannelUnphysical], tuple[int, str, float, float]]:
        """Allow the error to travel between processes (keyword-only arguments defeat the default)."""
        return _rebuild_unphysical, (self.step, self.quantity, self.value, self.limit)


def monitor(populations: Tensor, config: ChannelConfig) -> dict[str, float]:
    """Return `mach` of the fastest cell, `density_rms`, and `first_cell_v`, the rms of v/u_τ next to the walls.

    Any number that is not finite makes at least one of the three NaN or infinite.
    """
    force, u_tau = config.units.force, config.units.friction_velocity
    density = lbm.density(populations)
    speed = lbm.velocity(populations, force=force).square().sum(dim=0).max().sqrt()
    edges = populations[:, [0, -1]]  # (19, 2, X, Z), or with the pairs of half storage
    v = lbm.velocity(edges, force=force)[1]
    return {
        "mach": float(speed) / math.sqrt(SOUND_SPEED_SQUARED),
        "density_rms": float(density.to(torch.float64).std(correction=0)),
        "first_cell_v": float(v.square().mean().sqrt()) / u_tau,
    }


def check(
    populations: Tensor, config: ChannelConfig, *, step: int, limits: ChannelLimits | None = None
) -> dict[str, float]:
    """Return `monitor`'s numbers, or raise ChannelUnphysical at the first that is above its limit or not finite.

    None for `limits` takes the defaults of ChannelLimits.
    """
    limits = ChannelLimits() if limits is None else limits
    values = monitor(populations, config)
    bounds = {
        "mach": limits.mach,
        "density_rms": limits.density_rms,
        "first_cell_v": limits.first_cell(config),
    }
    for quantity, limit in bounds.items():
        if not values[quantity] <= limit:  # NaN compares false
            raise ChannelUnphysical(step=step, quantity=quantity, value=values[quantity], limit=limit)
    return values


class ChannelStatistics:
    """Running sums over planes parallel to the walls, in float64 on the CPU.

    A class because an average over time needs a memory: `update` adds one state, `result` may be asked at any time.
    """

    def __init__(self, config: ChannelConfig) -> None:
        """Start with nothing."""
        rows, modes = config.box[1], config.box[2] // 2 + 1
        self.config = config
        self.samples = 0
        self.mean = torch.zeros(3, rows, dtype=torch.float64)
        self.products = torch.zeros(3, 3, rows, dtype=torch.float64)
        self.viscous = torch.zeros(rows, dtype=torch.float64)
        self.density = torch.zeros(2, dtype=torch.float64)
        self.power = torch.zeros(3, rows, modes, dtype=torch.float64)

    def update(self, populations: Tensor) -> None:
        """Add one state: means, products and spanwise spectra of u⁺, viscous stress, density."""
        units = self.config.units
        excess, velocity, relaxed = moments(populations, self.config)
        self.viscous += _plane_mean(self._viscous_stress(excess, relaxed)) / units.friction_velocity**2
        del relaxed
        velocity /= units.friction_velocity
        self.mean += _plane_mean(velocity)
        for a in range(3):
            for b in range(3):
                self.products[a, b] += _plane_mean(velocity[a] * velocity[b])
            modes = torch.fft.rfft(velocity[a], dim=-1, norm="forward")  # (Y, X, Z//2 + 1)
            self.power[a] += modes.abs().square().mean(dim=1).double().cpu()
        self.density += torch.stack((excess.double().mean(), excess.double().square().mean())).cpu()
        self.samples += 1

    def result(self) -> dict[str, Tensor | float]:
        """Return the profiles from wall to centre (H = ceil(Y/2) rows), both walls averaged, in wall units.

        `y_plus`, `u_plus`, `u_rms`, `v_rms`, `w_rms`, `uv` (−⟨u′v′⟩), `viscous` (with the eddies' share),
        `total_stress`, all (H,); `power` (3, H, Z//2 + 1), the spanwise spectrum of each component, which sums to its
        variance; `correlation` (3, H, Z//2 + 1), R(Δz)/R(0); and the numbers `bulk_plus`, `density_rms`,
        `first_node_v`, `samples`.
        """
        if self.samples == 0:
            raise ValueError("statistics need at least one state, got none; call update first")
        mean = self.mean / self.samples
        covariance = self.products / self.samples - mean[:, None] * mean[None]  # (3, 3, Y)
        first, second = (self.density / self.samples).tolist()
        rms = covariance.diagonal().T.clamp(min=0).sqrt()  # (3, Y)
        power = self._fluctuation_power(mean)
        correlation = torch.fft.irfft(power, n=self.config.box[2], norm="forward")[..., : power.shape[-1]]
        spectrum = power.clone()
        # All but the modes 0 and Z/2 stand for a conjugate pair.
        spectrum[..., 1 : (self.config.box[2] + 1) // 2] *= 2
        uv, viscous = _fold(-covariance[0, 1], odd=True), _fold(self.viscous / self.samples, odd=True)
        rows = torch.arange(uv.shape[-1], dtype=torch.float64)
        return {
            "y_plus": (rows + 0.5) * self.config.units.cell_plus,
            "u_plus": _fold(mean[0]),
            "u_rms": _fold(rms[0].square()).sqrt(),
            "v_rms": _fold(rms[1].square()).sqrt(),
            "w_rms": _fold(rms[2].square()).sqrt(),
            "uv": uv,
            "viscous": viscous,
            "total_stress": uv + viscous,
            "power": _fold(spectrum.transpose(-1, -2)).transpose(-1, -2),
            "correlation": _fold((correlation / correlation[..., :1]).transpose(-1, -2)).transpose(-1, -2),
            "bulk_plus": float(mean[0].mean()),
            "density_rms": math.sqrt(max(0.0, second - first**2)),
            "first_node_v": float(_fold(rms[1].square())[0].sqrt()),
            "samples": float(self.samples),
        }

    def _fluctuation_power(self, mean: Tensor) -> Tensor:
        power = self.power / self.samples
        power[..., 0] -= mean.square()
        # A component that does not vary along z would divide 0 by 0 in the correlation.
        return power.clamp(min=torch.finfo(torch.float64).tiny)

    def _viscous_stress(self, excess: Tensor, relaxed: Tensor) -> Tensor:
        """Return −(1 − ω/2)Π_xy (Y, X, Z), eddy viscosity included, from (1 − ω)Π."""
        collision = self.config.lattice_collision()
        stress = relaxed / (1 - 1 / collision.tau)
        for _ in range(EDDY_ITERATIONS):
            omega = 1 / lbm.relaxation_time(stress, excess, collision)
            stress = relaxed / (1 - omega)
        return -(1 - omega / 2) * stress[0, 1]


def _plane_mean(field: Tensor) -> Tensor:
    """Return the mean over x and z, (..., Y, X, Z) -> (..., Y) in float64 on the CPU."""
    return field.mean(dim=(-2, -1), dtype=torch.float64).cpu()


def _fold(profile: Tensor, *, odd: bool = False) -> Tensor:
    """Return the mean of both walls' halves, (..., Y) -> (..., ceil(Y/2)); `odd` for what changes sign."""
    mirrored = profile.flip(-1)
    half = (profile.shape[-1] + 1) // 2
    return 0.5 * (profile - mirrored if odd else profile + mirrored)[..., :half]


def _rebuild_unphysical(step: int, quantity: str, value: float, limit: float) -> ChannelUnphysical:
    return ChannelUnphysical(step=step, quantity=quantity, value=value, limit=limit)

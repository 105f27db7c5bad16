"""The units of a channel on a lattice: from the number of cells between the walls to wall units.

Lattice units: one cell, one time step, density one. With N cells between the walls, half height δ = N/2, a chosen
bulk velocity u_b and friction Reynolds number Re_τ,

    u_τ = u_b/U_b⁺,   ν = u_τ δ/Re_τ,   τ = 3ν + ½,   G = u_τ²/δ (force per volume),   c_s² = 1/3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ergoflow.numerics.lattice import SOUND_SPEED_SQUARED

# Bulk and centreline velocity in units of u_τ in the DNS of Moser, Kim & Mansour (Phys. Fluids 1999) at Re_τ = 180.
DNS_REYNOLDS_TAU = 180.0
DNS_BULK_PLUS = 15.68
DNS_CENTRE_PLUS = 18.30
# Dean's friction law c_f ∝ Re^(−1/4) means U_b⁺ ∝ Re_τ^(1/7).
DEAN_EXPONENT = 1 / 7


@dataclass(frozen=True, kw_only=True)
class ChannelUnits:
    """Lattice units of a channel of `cells` cells from wall to wall."""

    cells: int
    reynolds_tau: float = DNS_REYNOLDS_TAU
    bulk_velocity: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what is no channel."""
        if self.cells < 4:
            raise ValueError(f"cells must be at least 4 between the walls, got {self.cells}; choose 4 or more")
        for name in ("reynolds_tau", "bulk_velocity"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive, got {value}; choose a finite number above 0")

    @property
    def half_height(self) -> float:
        """δ in cells."""
        return self.cells / 2

    @property
    def friction_velocity(self) -> float:
        """u_τ in cells per step, with U_b⁺ of the DNS carried to other Re_τ by Dean's law."""
        bulk_plus = DNS_BULK_PLUS * (self.reynolds_tau / DNS_REYNOLDS_TAU) ** DEAN_EXPONENT
        return self.bulk_velocity / bulk_plus

    @property
    def viscosity(self) -> float:
        """ν in cells² per step."""
        return self.friction_velocity * self.half_height / self.reynolds_tau

    @property
    def tau(self) -> float:
        """Relaxation time in steps."""
        return self.viscosity / SOUND_SPEED_SQUARED + 0.5

    @property
    def force(self) -> float:
        """G, the body force per volume that balances the wall friction."""
        return self.friction_velocity**2 / self.half_height

    @property
    def mach(self) -> float:
        """Mach number of the mean centreline velocity."""
        centre = self.friction_velocity * DNS_CENTRE_PLUS * (self.reynolds_tau / DNS_REYNOLDS_TAU) ** DEAN_EXPONENT
        return centre / math.sqrt(SOUND_SPEED_SQUARED)

    @property
    def cell_plus(self) -> float:
        """Δx⁺, one cell in wall units."""
        return self.reynolds_tau / self.half_height

    @property
    def first_node_plus(self) -> float:
        """y⁺ of the cell next to the wall: half a cell, the wall lies half-way."""
        return self.cell_plus / 2

    @property
    def step_plus(self) -> float:
        """dt⁺, one time step in wall units."""
        return self.friction_velocity**2 / self.viscosity

    @property
    def turnover_steps(self) -> float:
        """δ/u_τ in steps."""
        return self.half_height / self.friction_velocity

    def through_steps(self, length: int) -> float:
        """Return the steps that the bulk velocity needs for a box of `length` cells."""
        return length / self.bulk_velocity

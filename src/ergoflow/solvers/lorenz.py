"""Lorenz's two systems: three variables (1963) and a ring of sites (1996), by the classic RK4.

Cheap references with known Lyapunov exponents: about 0.906 for Lorenz-63 and 1.67–1.70 for Lorenz-96 (N = 40,
F = 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ergoflow.numerics.imex import rk4
from ergoflow.numerics.trajectory import Step, repeat


@dataclass(frozen=True, kw_only=True)
class Lorenz63Config:
    """Lorenz, J. Atmos. Sci. 20 (1963): x' = σ(y − x), y' = x(ρ − z) − y, z' = xy − βz."""

    sigma: float = 10.0
    rho: float = 28.0
    beta: float = 8.0 / 3.0
    dt: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what the solver cannot do."""
        _check_positive_dt(self.dt)


@dataclass(frozen=True, kw_only=True)
class Lorenz96Config:
    """Lorenz (1996), "Predictability: a problem partly solved".

    x_i' = (x_{i+1} − x_{i−2}) x_{i−1} − x_i + F on a ring of sites.
    """

    num_sites: int = 40
    forcing: float = 8.0
    dt: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what the solver cannot do."""
        _check_positive_dt(self.dt)
        if self.num_sites < 4:
            raise ValueError(f"num_sites must be at least 4, got {self.num_sites}; the stencil spans four sites")


def make_lorenz63_step(
    config: Lorenz63Config,
    *,
    substeps: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return the Step that advances states (B, 3) of Lorenz-63 by `substeps`·dt."""

    def tendency(state: Tensor) -> Tensor:
        x, y, z = state.unbind(dim=-1)
        return torch.stack((config.sigma * (y - x), x * (config.rho - z) - y, x * y - config.beta * z), dim=-1)

    return _bordered(repeat(rk4(tendency, config.dt), substeps), (3,), device, dtype)


def make_lorenz96_step(
    config: Lorenz96Config,
    *,
    substeps: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return the Step that advances states (B, 1, N) of Lorenz-96 by `substeps`·dt."""

    def tendency(state: Tensor) -> Tensor:
        ahead, behind, behind2 = (state.roll(shift, dims=-1) for shift in (-1, 1, 2))
        return (ahead - behind2) * behind - state + config.forcing

    return _bordered(repeat(rk4(tendency, config.dt), substeps), (1, config.num_sites), device, dtype)


def _bordered(step: Step, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> Step:
    """Return `step` behind a check of the state's shape, dtype and device."""
    place = torch.device(device).type

    def bordered(state: Tensor) -> Tensor:
        if tuple(state.shape[1:]) != shape:
            raise ValueError(f"state must have shape (B, *{shape}), got {tuple(state.shape)}; reshape it")
        if state.dtype != dtype or state.device.type != place:
            raise ValueError(
                f"state must be {dtype} on {place}, got {state.dtype} on {state.device.type};"
                " move it or make a step for it"
            )
        return step(state)

    return bordered


def _check_positive_dt(dt: float) -> None:
    if not dt > 0:
        raise ValueError(f"dt must be positive, got {dt}; choose a step size above 0")

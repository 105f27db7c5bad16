"""The Kuramoto–Sivashinsky equation, the smallest chaotic partial differential equation.

    u_t = −u u_x − u_xx − u_xxxx     on [0, L), periodic, zero mean.

A mode of wavenumber q grows at the rate q² − q⁴ when small. At L = 22 the flow is chaotic with a largest
Lyapunov exponent of 0.043–0.05 (Cvitanović, Davidchack & Siminos, SIAM J. Appl. Dyn. Syst. 2010).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ergoflow.numerics.fourier import TWO_PI, dealias_mask, derivative_wavenumbers, wavenumbers
from ergoflow.numerics.imex import crank_nicolson_rk4
from ergoflow.numerics.trajectory import Step, repeat

# The lowest modes that a random initial state is made of.
INITIAL_MODES = 3


@dataclass(frozen=True, kw_only=True)
class KuramotoConfig:
    """Number of points, length of the domain, time step, and the rms of random initial states."""

    grid: int = 64
    length: float = 22.0
    dt: float = 0.05
    initial_rms: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what the solver cannot do."""
        if self.grid % 2:
            raise ValueError(
                f"grid must be even for the real FFT, got {self.grid}; choose {self.grid - 1} or {self.grid + 1}"
            )
        if self.grid < 3 * INITIAL_MODES + 1:
            raise ValueError(f"grid must hold {INITIAL_MODES} dealiased modes, got {self.grid}; choose 10 or more")
        for name in ("length", "dt", "initial_rms"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive, got {value}; choose a finite number above 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class KuramotoEquation:
    """The flow as an `Equation` for the spectrum û = rfft(u) of shape (B, 1, N//2 + 1)."""

    grid: int
    advection: Tensor  # (N//2 + 1,): spectrum of u² -> −(u²/2)_x, cut by the 2/3 rule
    linear: Tensor  # (N//2 + 1,): q² − q⁴

    def explicit_terms(self, state: Tensor) -> Tensor:
        """Return −u u_x = −(u²/2)_x."""
        return self.advection * torch.fft.rfft(torch.fft.irfft(state, n=self.grid).square())

    def implicit_terms(self, state: Tensor) -> Tensor:
        """Return −u_xx − u_xxxx."""
        return self.linear * state

    def implicit_solve(self, state: Tensor, dt: float) -> Tensor:
        """Return (1 − dt·(q² − q⁴))⁻¹ û."""
        return state / (1 - dt * self.linear)


def make_step(
    config: KuramotoConfig,
    *,
    substeps: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return the Step that advances states (B, 1, N) by `substeps`·dt."""
    (q,) = wavenumbers((config.grid,), config.length)
    (dx,) = derivative_wavenumbers((config.grid,), config.length)
    equation = KuramotoEquation(
        grid=config.grid,
        advection=(-0.5j * dx * dealias_mask((config.grid,))).to(device=device, dtype=dtype.to_complex()),
        linear=(q**2 - q**4).to(device=device, dtype=dtype),
    )
    advance = repeat(crank_nicolson_rk4(equation, config.dt), substeps)

    def step(state: Tensor) -> Tensor:
        if tuple(state.shape[1:]) != (1, config.grid):
            raise ValueError(f"state must have shape (B, 1, {config.grid}), got {tuple(state.shape)}; reshape it")
        if state.dtype != dtype:
            raise ValueError(f"state must be {dtype}, got {state.dtype}; convert it or make a step for it")
        return torch.fft.irfft(advance(torch.fft.rfft(state)), n=config.grid)

    return step


def initial_state(
    config: KuramotoConfig,
    count: int,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return `count` states (count, 1, N): a random phase and strength for each of the lowest modes, zero
    mean.

    Each has root mean square `initial_rms`. State i draws from the pair (seed, i), on the CPU in float64.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}; ask for one trajectory or more")
    x = TWO_PI * np.arange(config.grid) / config.grid
    modes = np.arange(1, INITIAL_MODES + 1)
    waves = np.concatenate([np.cos(modes[:, None] * x), np.sin(modes[:, None] * x)])  # (2 modes, N)
    states = np.stack(
        [np.random.default_rng((seed, i)).standard_normal(2 * INITIAL_MODES) @ waves for i in range(count)]
    )
    states *= config.initial_rms / np.sqrt(np.mean(states**2, axis=1, keepdims=True))
    return torch.from_numpy(states).unsqueeze(1).to(device=device, dtype=dtype)  # (count, 1, N)

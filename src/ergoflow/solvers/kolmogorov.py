"""Two-dimensional Kolmogorov flow: sheared turbulence driven at one wavenumber, with viscosity and drag.

Vorticity ω = ∂x v − ∂y u on the periodic box [0, Lx] × [0, Ly], first array axis x:

    ω_t = −u·∇ω + ν∇²ω − drag·ω − A·k_f·cos(k_f y),     k_f = forcing_wavenumber·2π/Ly,

which is the curl of a force A·sin(k_f y) along x. Fourier pseudo-spectral, the advection cut by the 2/3 rule;
in time Crank–Nicolson with the 5-stage RK4 of Carpenter & Kennedy. With the default config this is the flow
the paper takes from jax-cfd (Kochkov et al., PNAS 2021; Boffetta & Ecke, Annu. Rev. Fluid Mech. 2012).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ergoflow.numerics.fourier import (
    TWO_PI,
    dealias_mask,
    derivative_wavenumbers,
    inverse_curl,
    velocity_from_vorticity,
    wavenumbers,
)
from ergoflow.numerics.trajectory import Step
from ergoflow.ops.spectral_step import Impl, SpectralFlow, make_spectral_step

# Variance of ln k in the spectrum of the initial velocity (jax-cfd's filtered_velocity_field).
INITIAL_LOG_VARIANCE = 0.25


@dataclass(frozen=True, kw_only=True)
class KolmogorovConfig:
    """The flow, its grid and its time step. Wavenumbers count periods along y."""

    grid: tuple[int, int] = (256, 256)
    length: tuple[float, float] = (TWO_PI, TWO_PI)
    viscosity: float = 1e-3
    drag: float = 0.1
    forcing_wavenumber: int = 4
    forcing_amplitude: float = 1.0
    dt: float = 0.02 / 12
    peak_wavenumber: float = 4.0
    max_speed: float = 7.0

    def __post_init__(self) -> None:
        """Refuse what the solver cannot do."""
        if len(self.grid) != 2 or len(self.length) != 2:
            raise ValueError(f"grid and length must have 2 sides, got {self.grid} and {self.length}; give (x, y)")
        for size in self.grid:
            if size < 4:
                raise ValueError(f"grid must have at least 4 points a side, got {size}; choose 4 or more")
            if size % 2:
                raise ValueError(f"grid must be even for the real FFT, got {size}; choose {size - 1} or {size + 1}")
        for name, value in (
            ("length", min(self.length)),
            ("dt", self.dt),
            ("peak_wavenumber", self.peak_wavenumber),
            ("max_speed", self.max_speed),
        ):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive, got {value}; choose a finite number above 0")
        for name, value in (("viscosity", self.viscosity), ("drag", self.drag)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must not be negative, got {value}; choose 0 or more")
        if not math.isfinite(self.forcing_amplitude):
            raise ValueError(f"forcing_amplitude must be finite, got {self.forcing_amplitude}; choose 0 for no force")
        if not 1 <= self.forcing_wavenumber < self.grid[1] / 2:
            raise ValueError(
                f"forcing_wavenumber must lie in 1 .. {self.grid[1] // 2 - 1}, got {self.forcing_wavenumber};"
                " choose a smaller one or more grid points along y"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class KolmogorovEquation:
    """The flow as an `Equation` for the spectrum ω̂ = rfft2(ω) of shape (B, 1, X, Y//2 + 1)."""

    grid: tuple[int, int]
    to_velocity: Tensor  # (2, X, Y//2 + 1): ω̂ -> (û, v̂)/(XY)
    from_products: Tensor  # (2, X, Y//2 + 1): spectra of (uv, v² − u²) -> advection, cut by the 2/3 rule
    linear: Tensor  # (X, Y//2 + 1): −ν|k|² − drag
    forcing: Tensor  # (X, Y//2 + 1): spectrum of −A·k_f·cos(k_f y)

    def explicit_terms(self, state: Tensor) -> Tensor:
        """Return the advection and the forcing.

        For ∇·u = 0, −u·∇ω = −(∂xx − ∂yy)(uv) − ∂xy(v² − u²): two inverse and two forward transforms instead
        of four and one, equal to the advective form for every state inside the 2/3 mask.
        """
        # norm="forward" leaves the inverse transform unscaled: the 1/(XY) is part of `to_velocity`.
        velocity = torch.fft.irfft2(state * self.to_velocity, s=self.grid, norm="forward")  # (B, 2, X, Y)
        u, v = velocity.split(1, dim=1)
        shear = torch.fft.rfft2(u * v)  # (B, 1, X, Y//2 + 1)
        strain = torch.fft.rfft2(torch.addcmul(v * v, u, u, value=-1))
        from_shear, from_strain = self.from_products
        return torch.addcmul(self.forcing, shear, from_shear).addcmul_(strain, from_strain)

    def implicit_terms(self, state: Tensor) -> Tensor:
        """Return viscosity and drag, (−ν|k|² − drag) ω̂."""
        return self.linear * state

    def implicit_solve(self, state: Tensor, dt: float) -> Tensor:
        """Return (1 + dt·(ν|k|² + drag))⁻¹ ω̂."""
        return state / (1 - dt * self.linear)


def make_equation(
    config: KolmogorovConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> KolmogorovEquation:
    """Return the equation with its tables computed in float64 and rounded to the complex twin of `dtype`."""
    kx, ky = wavenumbers(config.grid, config.length)
    mask = dealias_mask(config.grid)
    forcing = torch.zeros(mask.shape, dtype=torch.complex128)
    forcing[0, config.forcing_wavenumber] = _forcing(config)

    def place(table: Tensor) -> Tensor:
        return table.to(device=device, dtype=dtype.to_complex())

    return KolmogorovEquation(
        grid=config.grid,
        to_velocity=place(inverse_curl(config.grid, config.length) / math.prod(config.grid)),
        from_products=place(torch.stack(((kx**2 - ky**2) * mask, kx * ky * mask))),
        linear=place(_linear(config)),
        forcing=place(forcing),
    )


def make_step(
    config: KolmogorovConfig,
    *,
    substeps: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    impl: Impl = "auto",
) -> Step:
    """Return the Step that advances vorticity (B, 1, X, Y) by `substeps`·dt.

    It is `KolmogorovEquation` under `crank_nicolson_rk4` for states inside the 2/3 mask, where every state of the flow
    lies; what an input has outside is dropped. The state is in Fourier space in between, one transform in and one
    out. `impl` as in `ergoflow.ops.spectral_step`. Wrap the Step in `ergoflow.numerics.trajectory.checked` to have
    non-finite numbers raise.
    """
    flow = SpectralFlow(
        grid=config.grid,
        length=config.length,
        linear=_linear(config),
        forcing=_forcing(config),
        forcing_wavenumber=config.forcing_wavenumber,
        dt=config.dt,
    )
    advance = make_spectral_step(flow, substeps=substeps, device=device, dtype=dtype, impl=impl)

    def step(vorticity: Tensor) -> Tensor:
        _check_vorticity(vorticity, config.grid)
        if vorticity.dtype != dtype:
            raise ValueError(f"vorticity must be {dtype}, got {vorticity.dtype}; convert it or make a step for it")
        return advance(vorticity)

    return step


def initial_vorticity(
    config: KolmogorovConfig,
    count: int,
    *,
    seed: int | Sequence[int],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return `count` random smooth vorticity fields (count, 1, X, Y) whose largest speed is max_speed.

    White noise in each velocity component is multiplied in Fourier space by a log-normal density of |k| with
    its mode at k_p = peak_wavenumber·2π/Ly, divided by the length of the shell,

        exp(−(ln k − ln k_p − s)²/(2s))/k²,     s = 0.25,

    then projected on zero divergence and scaled (jax-cfd's filtered_velocity_field). The gradient part that
    the projection removes has no curl, so taking the curl does the projection. Modes outside the 2/3 mask are
    dropped: advection never feeds them.

    A sequence of seeds gives one to each trajectory; with one seed, trajectory i draws from the pair (seed,
    i). Either way a field depends on its own seed alone. Drawn in float64 on the CPU, so every device and
    dtype starts from the same field.
    """
    draw = _sampler(config)
    fields = [draw(np.random.default_rng(entropy)) for entropy in _entropies(seed, count)]
    return torch.stack(fields).to(device=device, dtype=dtype)


def budget(vorticity: Tensor, config: KolmogorovConfig) -> dict[str, Tensor]:
    """Return the energy, the enstrophy and the three terms of dE/dt = input − viscous − drag, per trajectory.

    With ⟨·⟩ the mean over the box: energy ⟨|u|²⟩/2, enstrophy ⟨ω²⟩/2, input A⟨u sin(k_f y)⟩, viscous ν⟨ω²⟩,
    drag drag·⟨|u|²⟩. Shape (..., 1, X, Y) -> (...) for each.
    """
    _check_vorticity(vorticity, config.grid)
    velocity = velocity_from_vorticity(vorticity, config.length)
    turns = torch.arange(config.grid[1], dtype=torch.float64) * config.forcing_wavenumber / config.grid[1]
    force = (config.forcing_amplitude * torch.sin(TWO_PI * turns)).to(vorticity)  # (Y,)
    energy = velocity.square().sum(dim=-3).mean(dim=(-2, -1)) / 2
    enstrophy = vorticity.square().mean(dim=(-3, -2, -1)) / 2
    return {
        "energy": energy,
        "enstrophy": enstrophy,
        "input": (velocity[..., 0, :, :] * force).mean(dim=(-2, -1)),
        "viscous": 2 * config.viscosity * enstrophy,
        "drag": 2 * config.drag * energy,
    }


def _linear(config: KolmogorovConfig) -> Tensor:
    """−ν|k|² − drag, (X, Y//2 + 1) in float64."""
    kx, ky = wavenumbers(config.grid, config.length)
    return -config.viscosity * (kx**2 + ky**2) - config.drag


def _forcing(config: KolmogorovConfig) -> float:
    """The coefficient of −A·k_f·cos(k_f y): a cosine is half of each of ±n, and rfft2 multiplies by the points."""
    k_f = TWO_PI / config.length[1] * config.forcing_wavenumber
    return -config.forcing_amplitude * k_f * math.prod(config.grid) / 2


def _sampler(config: KolmogorovConfig) -> Callable[[np.random.Generator], Tensor]:
    """The function that draws one field (1, X, Y), with its tables worked out once."""
    kx, ky = wavenumbers(config.grid, config.length)
    dx, dy = derivative_wavenumbers(config.grid, config.length)
    log_k = 0.5 * torch.log(kx**2 + ky**2)
    peak = math.log(TWO_PI / config.length[1] * config.peak_wavenumber)
    density = torch.exp(-((log_k - peak - INITIAL_LOG_VARIANCE) ** 2) / (2 * INITIAL_LOG_VARIANCE) - 2 * log_k)
    # At k = 0 the logarithm is −∞ and the density NaN; the mask of k > 0 replaces it.
    density = torch.where(dealias_mask(config.grid) & (kx**2 + ky**2 > 0), density, 0.0)
    curl = torch.stack((-1j * dy * density, 1j * dx * density))  # (2, X, Y//2 + 1)
    to_velocity = inverse_curl(config.grid, config.length)

    def draw(rng: np.random.Generator) -> Tensor:
        noise = torch.fft.rfft2(torch.from_numpy(rng.standard_normal((2, *config.grid))))
        spectrum = (curl * noise).sum(dim=0, keepdim=True)
        vorticity, velocity = torch.fft.irfft2(torch.cat((spectrum, to_velocity * spectrum)), s=config.grid).split(
            (1, 2)
        )
        return vorticity * (config.max_speed / velocity.norm(dim=0).max())

    return draw


def _entropies(seed: int | Sequence[int], count: int) -> list[int | tuple[int, int]]:
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}; ask for one trajectory or more")
    if isinstance(seed, int | np.integer):
        return [(int(seed), index) for index in range(count)]
    if len(seed) != count:
        raise ValueError(f"seed must be one number or {count} of them, got {len(seed)}; give one per trajectory")
    return [int(one) for one in seed]


def _check_vorticity(vorticity: Tensor, grid: tuple[int, int]) -> None:
    if vorticity.ndim < 4 or tuple(vorticity.shape[-3:]) != (1, *grid):
        raise ValueError(
            f"vorticity must have shape (..., 1, {grid[0]}, {grid[1]}), got {tuple(vorticity.shape)};"
            " reshape it or change the config's grid"
        )

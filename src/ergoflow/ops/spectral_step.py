"""Steps of a forced vorticity equation in Fourier space, on the modes that advection reaches.

    ω_t = −u·∇ω + Lω + F,     û = i k_y ω̂/|k|²,     v̂ = −i k_x ω̂/|k|²,     F = f·cos(k_f y),

first array axis x, in time Crank–Nicolson for the diagonal L with the five-stage RK4 of Carpenter & Kennedy for the
rest (`ergoflow.numerics.imex`). For ∇·u = 0, −u·∇ω = −(∂xx − ∂yy)(uv) − ∂xy(v² − u²) (Basdevant, J. Comput. Phys.
1983): two inverse and two forward transforms in each stage. The 2/3 rule cuts the products at |n| ≤ M = ⌊(N − 1)/3⌋,
so a state inside the mask stays there, and only (2M_x + 1)(M_y + 1) of its X(Y/2 + 1) coefficients, 44 %, are
ever non-zero. A step drops what its input has outside.

Two implementations of the same arithmetic: `torch`, which transforms only the columns k_y ≤ M_y along x, for any
grid, dtype, device and derivative; and `triton` (float32, sides of 64 or 256), two fused kernels per stage that
hold the transforms themselves, see `spectral_step_triton`. On a GPU all substeps are one CUDA graph.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ergoflow.numerics.fourier import (
    dealias_limit,
    dealias_mask,
    derivative_wavenumbers,
    inverse_square,
    wavenumbers,
)
from ergoflow.numerics.imex import crank_nicolson_rk4_diagonal
from ergoflow.numerics.trajectory import Step, repeat
from ergoflow.ops.choice import has_triton, interpreted
from ergoflow.ops.cuda_graph import graphed, is_differentiated

Impl = Literal["auto", "torch", "triton"]

# The sides whose transform the kernels hold: squares of their radices, 8 and 16.
TRITON_SIDES = (64, 256)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class SpectralFlow:
    """The equation: `linear` is L in rfft layout, `forcing` the coefficient f·XY/2 at n = (0, ±forcing_wavenumber)."""

    grid: tuple[int, int]
    length: tuple[float, float]
    linear: Tensor  # (X, Y//2 + 1), float64
    forcing: float
    forcing_wavenumber: int
    dt: float

    @property
    def limits(self) -> tuple[int, int]:
        """The largest mode numbers (M_x, M_y) inside the 2/3 mask."""
        return dealias_limit(self.grid[0]), dealias_limit(self.grid[1])


def make_spectral_step(
    flow: SpectralFlow,
    *,
    substeps: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    impl: Impl = "auto",
) -> Step:
    """Return the Step of vorticity (..., 1, X, Y) by substeps·dt.

    `impl`: "auto" takes Triton on a GPU where it can run and torch otherwise; derivatives always go through torch,
    and asking for them with impl="triton" raises.
    """
    device = torch.device(device)
    by_torch = _torch_step(flow, substeps, device=device, dtype=dtype)
    if choose_impl(flow, device.type, dtype, impl) == "torch":
        return graphed(by_torch)
    from ergoflow.ops.spectral_step_triton import fused_step

    by_triton = graphed(fused_step(flow, substeps, device=device))

    def step(vorticity: Tensor) -> Tensor:
        if not is_differentiated(vorticity):
            return by_triton(vorticity)
        if impl == "triton":
            raise ValueError("impl 'triton' has no derivatives, got a tensor that asks for one; choose impl='torch'")
        return by_torch(vorticity)

    return step


def choose_impl(flow: SpectralFlow, device_type: str, dtype: torch.dtype, impl: Impl) -> Literal["torch", "triton"]:
    """Return the implementation that `impl` means for this flow; asking for one that cannot run raises."""
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"impl must be 'auto', 'torch' or 'triton', got {impl!r}; choose one of them")
    if impl == "torch" or (impl == "auto" and device_type != "cuda"):
        return "torch"
    inside = flow.forcing_wavenumber <= flow.limits[1]
    reason = _why_not_triton(flow.grid, inside, device_type, dtype)
    if impl == "triton" and reason:
        raise ValueError(f"impl 'triton' must be able to run here, got {reason}; choose impl='torch'")
    _log_choice(flow.grid, device_type, reason)
    return "torch" if reason else "triton"


def _torch_step(flow: SpectralFlow, substeps: int, *, device: torch.device, dtype: torch.dtype) -> Step:
    """Return the step in plain torch.

    Spectra are turned, (..., K, X) with k_y first: the transforms along x then run along contiguous memory and know
    nothing of the columns k_y ≥ K. All of it is functional, so derivatives pass through.
    """
    (X, Y), (_, limit) = flow.grid, flow.limits
    K = max(limit, flow.forcing_wavenumber) + 1
    kx, ky = wavenumbers(flow.grid, flow.length)
    dx, dy = derivative_wavenumbers(flow.grid, flow.length)
    mask = dealias_mask(flow.grid)
    kept, forcing = mask.clone(), torch.zeros(mask.shape, dtype=torch.complex128)
    # A force outside the mask is unusual but legal: its mode is kept beside the others.
    kept[0, flow.forcing_wavenumber] = True
    forcing[0, flow.forcing_wavenumber] = flow.forcing
    stream = 1j * inverse_square(kx, ky) / (X * Y)

    def turned(table: Tensor, to: torch.dtype) -> Tensor:
        return table[..., :K].transpose(-1, -2).to(device=device, dtype=to).contiguous()

    def real(table: Tensor) -> Tensor:
        return turned(table, dtype).unsqueeze(-1).expand(*table.shape[:-2], K, X, 2).contiguous()

    to_velocity = turned(torch.stack((dy * stream, -dx * stream)), dtype.to_complex())  # (2, K, X)
    # Real factors act on the two parts of a complex number alike, at half the arithmetic of a complex product.
    from_shear, from_strain = real((kx**2 - ky**2) * mask), real(kx * ky * mask)  # (K, X, 2)
    force = torch.view_as_real(turned(forcing, dtype.to_complex()))
    cut = turned(kept, dtype.to_complex())

    def forward(field: Tensor) -> Tensor:
        columns = torch.fft.rfft(field)[..., :K].transpose(-1, -2)  # (..., K, X)
        return torch.fft.fft(columns)

    def inverse(spectrum: Tensor, norm: str) -> Tensor:
        return torch.fft.irfft(torch.fft.ifft(spectrum, norm=norm).transpose(-1, -2), n=Y, norm=norm)

    def explicit_terms(state: Tensor) -> Tensor:  # (..., 1, K, X, 2)
        # norm="forward" leaves the inverse transform unscaled: the 1/(XY) is part of `to_velocity`.
        velocity = inverse(torch.view_as_complex(state) * to_velocity, "forward")  # (..., 2, X, Y)
        u, v = velocity.split(1, dim=-3)
        shear = torch.view_as_real(forward(u * v))
        strain = torch.view_as_real(forward(torch.addcmul(v * v, u, u, value=-1)))
        return torch.addcmul(force, shear, from_shear).addcmul_(strain, from_strain)

    advance = repeat(crank_nicolson_rk4_diagonal(explicit_terms, real(flow.linear), flow.dt), substeps)

    def step(vorticity: Tensor) -> Tensor:
        spectrum = torch.view_as_real(forward(vorticity) * cut)
        return inverse(torch.view_as_complex(advance(spectrum)), "backward")

    return step


def _why_not_triton(grid: tuple[int, int], forcing_inside: bool, device_type: str, dtype: torch.dtype) -> str:
    """Return the reason, or nothing when the kernels can run."""
    if not has_triton():
        return "no triton package"
    if device_type != "cuda" and not interpreted():
        return f"tensors on {device_type} without TRITON_INTERPRET=1"
    if dtype != torch.float32:
        return f"{dtype}, not torch.float32"
    if not set(grid) <= set(TRITON_SIDES):
        return f"a grid of {grid[0]}x{grid[1]}, not of sides in {TRITON_SIDES}"
    return "" if forcing_inside else "a force outside the 2/3 mask"


@functools.cache
def _log_choice(grid: tuple[int, int], device_type: str, reason: str) -> None:
    # Cached, so that each choice is logged once.
    chosen = "torch" if reason else "triton"
    log.info("spectral step %s on %s: impl %s%s", grid, device_type, chosen, f" ({reason})" if reason else "")

"""The velocity of a vorticity as input of a model: one FFT forth and one back, traceable by torch.compile.

A physics prior for flows on a periodic plane. Advection needs u, and u at a point is an integral of ω over the whole
plane, which a convolutional net has to assemble through its levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ergoflow.models.layers import at_least_float32
from ergoflow.numerics.fourier import TWO_PI, derivative_wavenumbers, inverse_square, wavenumbers

# A turbulent flow has |u| ~ |ω|/k at its energetic wavenumber, 4 in a box of 2π: this brings both to one scale.
VELOCITY_GAIN = 4.0


def scaled_velocity(vorticity: Tensor) -> Tensor:
    """Return VELOCITY_GAIN·(u, v) of a vorticity, (B, 1, X, Y) → (B, 2, X, Y), in float32 at least.

    ψ̂ = ω̂/|k|², u = ∂y ψ, v = −∂x ψ, as `ergoflow.numerics.fourier.velocity_from_vorticity`; the mean of ω has no
    velocity. The spacing of the grid is taken as equal along both axes, and the longer side of the box as 2π.
    """
    omega = at_least_float32(vorticity)  # an FFT in half precision would ruin the small scales
    grid = tuple(omega.shape[-2:])
    length = [TWO_PI * size / max(grid) for size in grid]
    kx, ky = wavenumbers(grid, length, device=omega.device)
    dx, dy = derivative_wavenumbers(grid, length, device=omega.device)
    table = torch.stack((dy + 0 * dx, -dx - 0 * dy)) * (VELOCITY_GAIN * inverse_square(kx, ky))  # (2, X, Y//2 + 1)
    return torch.fft.irfft2(torch.fft.rfft2(omega) * table.to(omega.dtype) * 1j, s=grid)

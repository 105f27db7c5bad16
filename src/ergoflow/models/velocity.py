"""The velocity of a vorticity as input of a model: one FFT forth and one back, traceable by torch.compile.

A physics prior for flows on a periodic plane. Advection needs u, and u at a point is an integral of ω over the whole
plane, which a convolutional net has to assemble through its levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ergoflow.models.layers import at_least_float32
from ergoflow.numerics.fourier import TWO_PI, inverse_curl

# A turbulent flow has |u| ~ |ω|/k at its energetic wavenumber, 4 in a box of 2π: this brings both to one scale.
VELOCITY_GAIN = 4.0
# Lengths may come from coordinates in float32.
SPACING_TOLERANCE = 1e-4


def is_evenly_spaced(grid: Sequence[int], length: Sequence[float]) -> bool:
    """Whether points lie equally close along every axis: a velocity is made of points, without their lengths."""
    spacing = [side / points for side, points in zip(length, grid, strict=True)]
    return math.isclose(min(spacing), max(spacing), rel_tol=SPACING_TOLERANCE)


def scaled_velocity(vorticity: Tensor) -> Tensor:
    """Return VELOCITY_GAIN·(u, v) of a vorticity, (B, 1, X, Y) → (B, 2, X, Y), in float32 at least.

    ψ̂ = ω̂/|k|², u = ∂y ψ, v = −∂x ψ, as `ergoflow.numerics.fourier.velocity_from_vorticity`; the mean of ω has no
    velocity. The spacing of the grid is taken as equal along both axes, and the longer side of the box as 2π.
    """
    omega = at_least_float32(vorticity)  # an FFT in half precision would ruin the small scales
    grid = tuple(omega.shape[-2:])
    # A compiler makes a constant of the table by itself, and tensors without data must not be kept for others.
    known = not torch.compiler.is_compiling() and not isinstance(omega, FakeTensor)
    table = (_known_table if known else velocity_table)(grid, omega.device, omega.dtype)
    return torch.fft.irfft2(torch.fft.rfft2(omega) * table, s=grid)


def velocity_table(grid: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return VELOCITY_GAIN·(i ky, −i kx)/|k|², by which a spectrum is multiplied, (2, X, Y//2 + 1)."""
    length = [TWO_PI * size / max(grid) for size in grid]
    gain = VELOCITY_GAIN * inverse_curl(grid, length, device=device)
    # dtype.to_complex() says the same, but torch.compile cannot trace it.
    return gain.to(torch.promote_types(dtype, torch.complex32))


@lru_cache
def _known_table(grid: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return `velocity_table`, kept: made anew it would be some thirty launches of every step, recorded or not."""
    # Kept from a roll-out, it must also serve in training.
    with torch.inference_mode(False):
        return velocity_table(grid, device, dtype)

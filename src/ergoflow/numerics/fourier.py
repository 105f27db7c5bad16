"""Fourier series on periodic boxes: wavenumbers, the 2/3 rule, velocity and vorticity, resampling.

Spectra are in the layout of `torch.fft.rfftn` over the grid axes: the last axis holds n = 0 .. N//2, the
others n = 0, 1, .., -2, -1. Any number of axes, even or odd sizes, any side lengths. Paper section: the
Kolmogorov flow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)
Length = float | Sequence[float]
TWO_PI = 2 * math.pi


def wavenumbers(
    grid: Sequence[int],
    length: Length = TWO_PI,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """Return one tensor of angular wavenumbers 2πn/L per axis, shaped to broadcast to the rfft layout.

    For a grid (X, Y) the shapes are (X, 1) and (1, Y//2 + 1). `length` is one number for all sides or one per
    side.
    """
    lengths = _lengths(grid, length)
    modes = mode_numbers(grid, device=device)
    return tuple((TWO_PI / side * n.double()).to(dtype) for side, n in zip(lengths, modes, strict=True))


def derivative_wavenumbers(
    grid: Sequence[int],
    length: Length = TWO_PI,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """Return `wavenumbers` with zero at the Nyquist mode of even axes, for derivatives of odd order.

    The Nyquist mode is cos(Nπx/L) alone: its derivative vanishes at every grid point, and i·k times its
    coefficient would be no real field.
    """
    waves = wavenumbers(grid, length, device=device, dtype=dtype)
    modes = mode_numbers(grid, device=device)
    return tuple(
        torch.where(2 * n.abs() == size, torch.zeros_like(k), k) for k, n, size in zip(waves, modes, grid, strict=True)
    )


def mode_numbers(grid: Sequence[int], *, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Return one int64 tensor of mode numbers n per axis, shaped to broadcast to the rfft layout."""
    last = len(grid) - 1
    result = []
    for axis, size in enumerate(grid):
        n = torch.arange(size, device=device)
        n = n[: size // 2 + 1] if axis == last else torch.where(n < (size + 1) // 2, n, n - size)
        result.append(n.reshape([-1 if other == axis else 1 for other in range(len(grid))]))
    return tuple(result)


def mode_multiplicity(size: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return of how many modes of the full transform each of the last axis in rfft layout stands, (N//2 + 1,).

    2 for a conjugate pair ±n, 1 for n = 0 and the Nyquist mode: sums over all modes are sums with these weights.
    """
    n = torch.arange(size // 2 + 1, device=device)
    return torch.where((n > 0) & (2 * n < size), 2, 1)


def shell_numbers(modes: Sequence[Tensor]) -> Tensor:
    """Return the shell floor(|n| + ½) of every mode, given its numbers axis by axis (`mode_numbers`)."""
    squares = torch.stack(torch.broadcast_tensors(*(n.double().square() for n in modes))).sum(0)
    return (squares.sqrt() + 0.5).long()


def dealias_limit(size: int) -> int:
    """Return the largest mode number that Orszag's 2/3 rule keeps on an axis of `size` points: 3n < N."""
    return (size - 1) // 3


def dealias_mask(grid: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
    """Return the boolean mask of Orszag's 2/3 rule in rfft layout: True where 3|n| < N on every axis.

    A product of two fields inside the mask is free of aliasing inside the mask. The mask is symmetric in n,
    so it keeps real fields real and respects reflections.
    """
    mask = torch.ones((), dtype=torch.bool, device=device)
    for n, size in zip(mode_numbers(grid, device=device), grid, strict=True):
        mask = mask & (n.abs() <= dealias_limit(size))
    return mask


def velocity_from_vorticity(vorticity: Array, length: Length = TWO_PI) -> Array:
    """Return the divergence-free velocity (u, v) of zero mean whose curl is the vorticity.

    ψ̂ = ω̂/|k|², u = ∂y ψ, v = −∂x ψ, with ω = ∂x v − ∂y u. Shapes (..., 1, X, Y) -> (..., 2, X, Y); an array
    gives an array, a tensor a tensor. The mean of ω, which no periodic velocity can have, is ignored.
    """
    _check_channels("vorticity", vorticity, 1)
    omega = _as_tensor(vorticity)
    grid = tuple(omega.shape[-2:])
    table = inverse_curl(grid, length, device=omega.device)
    spectrum = torch.fft.rfft2(omega) * table.to(omega.dtype.to_complex())
    return _like(torch.fft.irfft2(spectrum, s=grid), vorticity)


def vorticity_from_velocity(velocity: Array, length: Length = TWO_PI) -> Array:
    """Return the vorticity ω = ∂x v − ∂y u. Shapes (..., 2, X, Y) -> (..., 1, X, Y); array in, array out."""
    _check_channels("velocity", velocity, 2)
    flow = _as_tensor(velocity)
    grid = tuple(flow.shape[-2:])
    dx, dy = derivative_wavenumbers(grid, length, device=flow.device)
    curl = torch.stack((-dy + 0 * dx, dx + 0 * dy))  # (2, X, Y//2 + 1)
    spectrum = torch.fft.rfft2(flow) * (1j * curl).to(flow.dtype.to_complex())
    return _like(torch.fft.irfft2(spectrum.sum(dim=-3, keepdim=True), s=grid), velocity)


def inverse_curl(grid: Sequence[int], length: Length = TWO_PI, *, device: torch.device | str = "cpu") -> Tensor:
    """Return (i ky, −i kx)/|k|², (2, X, Y//2 + 1): times ω̂ it is the velocity whose curl is ω."""
    dx, dy = derivative_wavenumbers(grid, length, device=device)
    stream = 1j * inverse_square(*wavenumbers(grid, length, device=device))
    return torch.stack((dy * stream, -dx * stream))


def inverse_square(*waves: Tensor) -> Tensor:
    """Return 1/|k|² in rfft layout and 0 at k = 0: the inverse of −∇² on fields of zero mean."""
    square = sum((k**2 for k in waves), start=torch.zeros_like(waves[0]))
    return torch.where(square > 0, 1 / torch.where(square > 0, square, 1.0), 0.0)


def resample(field: Array, grid: Sequence[int]) -> Array:
    """Return the field's trigonometric interpolant at the points of another grid over the last len(grid)
    axes.

    Refining is exact; coarsening first removes what the coarse grid cannot hold. The Nyquist mode of the
    smaller even size is a cosine: half of it goes to each of ±n when refining, and the two halves are added
    when coarsening.
    """
    result = _as_tensor(field)
    if result.ndim < len(grid):
        raise ValueError(f"field must have at least {len(grid)} axes, got {result.ndim}; choose a grid of its axes")
    for axis, size in zip(range(-len(grid), 0), grid, strict=True):
        if size < 1:
            raise ValueError(f"grid sizes must be positive, got {tuple(grid)}; choose at least 1 point per axis")
        if size != result.shape[axis]:
            result = _resample_axis(result, axis, size)
    return _like(result, field)


def _resample_axis(field: Tensor, axis: int, size: int) -> Tensor:
    old = field.shape[axis]
    common = min(old, size)
    spectrum = torch.fft.rfft(field, dim=axis).movedim(axis, -1)[..., : common // 2 + 1]
    if common % 2 == 0:
        scale = torch.ones(common // 2 + 1, dtype=field.dtype, device=field.device)
        # irfft counts a Nyquist coefficient once and every other one twice (with its conjugate).
        scale[-1].fill_(0.5 if size > old else 2.0)
        spectrum = spectrum * scale
    return torch.fft.irfft(spectrum, n=size).movedim(-1, axis) * (size / old)


def _lengths(grid: Sequence[int], length: Length) -> tuple[float, ...]:
    lengths = (float(length),) * len(grid) if isinstance(length, int | float) else tuple(map(float, length))
    if len(lengths) != len(grid) or not all(side > 0 for side in lengths):
        raise ValueError(
            f"length must be one positive number or {len(grid)} of them, got {length}; give one per grid axis"
        )
    return lengths


def _check_channels(name: str, field: np.ndarray | Tensor, channels: int) -> None:
    if field.ndim < 3 or field.shape[-3] != channels:
        raise ValueError(
            f"{name} must have shape (..., {channels}, X, Y), got {tuple(field.shape)};"
            f" put its {channels} channel(s) on axis -3"
        )


def _as_tensor(field: np.ndarray | Tensor) -> Tensor:
    """Return a float32 or float64 tensor of the field, sharing memory where it can."""
    if isinstance(field, np.ndarray):
        # torch cannot wrap read-only memory or negative strides.
        field = torch.from_numpy(field if field.flags.writeable and field.flags.c_contiguous else field.copy())
    if field.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"fields must be float32 or float64 for the FFT, got {field.dtype}; convert the field first")
    return field


def _like(result: Tensor, field: Array) -> Array:
    return result.numpy() if isinstance(field, np.ndarray) else result

"""Energies: turbulent kinetic energy maps, energy and enstrophy in time, drifts and budgets (paper: TKE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_trajectories, chunks, like, to_float64
from ergoflow.numerics.fourier import derivative_wavenumbers

# Share of a series, at its end, whose mean counts as "where the roll-out went".
TAIL_SHARE = 0.1


def turbulent_kinetic_energy(velocity: Array, *, half: bool = False) -> Any:
    """Return the map (*grid) of (1/d) sum_i Var(u_i), population variance over time and trajectories pooled.

    d is the number of velocity components. `half` gives the textbook (1/2) sum_i Var(u_i) instead.
    """
    check_trajectories("velocity", velocity)
    frames = velocity.shape[0] * velocity.shape[1]
    mean = torch.stack([piece.sum(dim=(0, 1)) for piece in chunks(velocity, name="velocity")]).sum(0) / frames
    square = torch.stack([(piece - mean).square().sum(dim=(0, 1)) for piece in chunks(velocity)]).sum(0)
    factor = 0.5 if half else 1 / velocity.shape[2]
    return like(velocity, factor * square.sum(dim=0) / frames)


def tke_absolute_error(pred: Array, true: Array) -> Any:
    """Return the map |TKE_pred - TKE_true| of two TKE maps."""
    p, z = _maps(pred, true)
    return like(true, (p - z).abs())


def tke_percentage_error(pred: Array, true: Array) -> Any:
    """Return the map 100 |TKE_pred - TKE_true| / TKE_true; inf where the truth does not fluctuate at all."""
    p, z = _maps(pred, true)
    error = 100 * (p - z).abs() / z
    return like(true, torch.where(torch.isnan(error), torch.inf, error))


def tke_error(pred: Array, true: Array) -> float:
    """Return the scalar mean |TKE_pred - TKE_true| / mean TKE_true; inf for a non-finite prediction."""
    p, z = _maps(pred, true)
    error = float((p - z).abs().mean() / z.mean())
    return error if np.isfinite(error) else float("inf")


def kinetic_energy(velocity: Array) -> Any:
    """Return (J, T): the grid mean of |u|^2 / 2."""
    return _half_mean_square("velocity", velocity)


def enstrophy(vorticity: Array) -> Any:
    """Return (J, T): the grid mean of omega^2 / 2."""
    return _half_mean_square("vorticity", vorticity)


def in_plane_vorticity(velocity: Tensor, length: Sequence[float], *, periodic: Sequence[bool]) -> Tensor:
    """Return (..., *grid): d_0 c_1 - d_1 c_0 of the last two components on a plane, du/dx on a line.

    On (x, y) with (u, v) this is the vorticity; on the channel's (y, z) plane with (u, v, w) it is
    omega_x = dw/dy - dv/dz. Of one scalar on a plane it is the size of its gradient. Periodic axes are differentiated
    spectrally, others by differences of second order, of first order in the rows at the walls.
    """
    if len(length) == 1:
        return _derivative(velocity[..., -1, :], 0, length, periodic)
    if len(length) != 2:
        raise ValueError(
            f"velocity must have shape (..., C, X, Y) or (..., C, X), got {tuple(velocity.shape)} "
            f"with {len(length)} lengths; pass the in-plane components last"
        )
    if velocity.shape[-3] == 1:
        return torch.hypot(*(_derivative(velocity[..., 0, :, :], axis, length, periodic) for axis in (0, 1)))
    first = _derivative(velocity[..., -1, :, :], 0, length, periodic)
    return first - _derivative(velocity[..., -2, :, :], 1, length, periodic)


def relative_drift(series: Array, reference: Array) -> float:
    """Return (mean of the last tenth of `series` - mean of `reference`) / |mean of `reference`|, signed.

    Both are (J, T) energies or enstrophies, the reference being the truth's; non-finite values give inf.
    """
    values, truth = to_float64(series), to_float64(reference)
    if values.ndim != 2 or truth.ndim != 2:
        raise ValueError(
            f"series must have axes (J, T), got {tuple(values.shape)} and {tuple(truth.shape)}; "
            "use kinetic_energy or enstrophy to make them"
        )
    tail = max(1, int(TAIL_SHARE * values.shape[1]))
    mean = float(truth.mean())
    drift = (float(values[:, -tail:].mean()) - mean) / abs(mean) if mean else float("inf")
    return drift if bool(torch.isfinite(values).all()) and np.isfinite(drift) else float("inf")


def budget_closure(energy: Array, gain: Array, loss: Array, step_time: float) -> float:
    """Return |E(T) - E(0) - integral (gain - loss) dt| / integral |gain| dt, the share the budget misses.

    Series (..., T) sampled every `step_time`; integrals by the trapezoidal rule, mean over leading axes.
    """
    E, P, D = (to_float64(series) for series in (energy, gain, loss))
    if not E.shape == P.shape == D.shape or E.shape[-1] < 2:
        raise ValueError(
            f"energy, gain and loss must share one shape with T >= 2, got {tuple(E.shape)}, {tuple(P.shape)} "
            f"and {tuple(D.shape)}; sample them at the same times"
        )
    change = E[..., -1] - E[..., 0]
    supply = torch.trapezoid(P - D, dx=step_time, dim=-1)
    scale = torch.trapezoid(P.abs(), dx=step_time, dim=-1)
    return float(((change - supply).abs() / scale).mean())


def _half_mean_square(name: str, field: Array) -> Any:
    check_trajectories(name, field)
    rows = [
        0.5 * piece.square().sum(dim=2).flatten(2).mean(dim=2)  # (J, t)
        for piece in chunks(field, name=name)
    ]
    return like(field, torch.cat(rows, dim=1))


def _derivative(field: Tensor, axis: int, length: Sequence[float], periodic: Sequence[bool]) -> Tensor:
    """Return the derivative of (..., *grid) along grid axis `axis`."""
    dim = axis - len(length)
    size = field.shape[dim]
    if not periodic[axis]:
        # Nodes of a wall-bounded axis lie half a cell from both walls, so the spacing is length / size.
        return torch.gradient(field, spacing=length[axis] / size, dim=dim)[0]
    (k,) = derivative_wavenumbers((size,), length[axis], device=field.device, dtype=field.dtype)
    k = k.reshape([-1] + [1] * (-dim - 1))
    return torch.fft.irfft(1j * k * torch.fft.rfft(field, dim=dim), n=size, dim=dim)


def _maps(pred: Array, true: Array) -> tuple[Tensor, Tensor]:
    p, z = to_float64(pred), to_float64(true)
    if p.shape != z.shape:
        raise ValueError(
            f"TKE maps must share one grid, got {tuple(p.shape)} and {tuple(z.shape)}; resample one of them"
        )
    if not bool(torch.isfinite(z).all()) or float(z.mean()) <= 0:
        raise ValueError(
            f"the true TKE must be finite with a positive mean, got {float(z.mean())}; pass more than one snapshot"
        )
    return p.to(z.device), z

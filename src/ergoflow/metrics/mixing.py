"""How fast a flow forgets: autocorrelation, mixing rate, integral time (paper: mixing rate).

The difference of two mixing rates rewards a model that has collapsed onto a slow state, so the integral time
and the largest difference of the two normalised autocorrelations are always given beside it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from scipy.integrate import trapezoid
from scipy.optimize import least_squares
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_trajectories, chunk_starts, chunks, like, to_float64


def autocorrelation(z: Array, max_lag: int = 20, *, estimator: Literal["default", "literal"] = "default") -> Any:
    """Return C(0..K): the autocovariance of z (J, T, C, *grid) about its mean field.

    "default": C(l) = mean over trajectories, grid and origins k = 0..T-K-1 (the same for all lags) of
    (z_k - m)(z_{k+l} - m), with m(x) the mean over trajectories and time.
    "literal": the paper's formula with T = frames - 1: origins k = 0..T-K-l, divided by T-K-l (one less than
    their number), and m the sum of the T+1 snapshots divided by T.
    """
    check_trajectories("z", z)
    frames = z.shape[1]
    least = max_lag + 1 if estimator == "default" else 2 * max_lag + 2
    if max_lag < 0 or frames < least:
        raise ValueError(
            f"z must have at least {least} frames for max_lag {max_lag}, got {frames}; "
            "pass a longer record or a smaller max_lag"
        )
    if estimator == "default":
        origins = [frames - max_lag] * (max_lag + 1)
        counts, mean_count = origins, frames
    elif estimator == "literal":
        origins = [frames - max_lag - lag for lag in range(max_lag + 1)]
        counts, mean_count = [n - 1 for n in origins], frames - 1
    else:
        raise ValueError(f'estimator must be "default" or "literal", got {estimator!r}; choose one of the two')
    mean = torch.stack([piece.sum(dim=(0, 1)) for piece in chunks(z, name="z")]).sum(0)
    mean = mean / (z.shape[0] * mean_count)  # (C, *grid)
    products = _lagged_products(z, mean, origins)
    points = z.shape[0] * math.prod(z.shape[2:])
    return like(z, products / (points * torch.tensor(counts, dtype=torch.float64, device=products.device)))


def normalized_correlation(correlation: Array) -> np.ndarray:
    """Return C(t) / C(0) as an array; raises where C(0) is not positive (a constant signal)."""
    values = to_float64(correlation).cpu().numpy()
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(
            f"correlation must be one series C(0..K) with K >= 1, got shape {values.shape}; "
            "use autocorrelation to make it"
        )
    if not np.isfinite(values).all() or values[0] <= 0:
        raise ValueError(
            f"correlation must be finite with C(0) > 0, got C(0) = {values[0]}; a constant or failed signal has no rate"
        )
    return np.asarray(values / values[0])


def fit_mixing_rate(correlation: Array, *, step_time: float = 1.0) -> float:
    """Return lambda of the least-squares fit of exp(-lambda t) to C(t)/C(0), t = 0..K, per step.

    With `step_time` in seconds the rate is per second.
    """
    target = normalized_correlation(correlation)
    lags = np.arange(len(target))

    def residual(rate: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(-rate[0] * lags) - target)

    def jacobian(rate: np.ndarray) -> np.ndarray:
        return np.asarray(-lags * np.exp(-rate[0] * lags))[:, None]

    # exp(-lambda t) integrates to 1 / lambda, so the area under C gives a start near the minimum. The floor
    # keeps that start finite for a C that falls to zero within one step.
    area = max(float(trapezoid(target)), 0.2)
    fit = least_squares(residual, [1 / area], jac=jacobian, xtol=1e-14, ftol=1e-14, gtol=1e-14)
    return float(fit.x[0]) / step_time


def integral_time(correlation: Array, *, step_time: float = 1.0) -> float:
    """Return the area under C(t)/C(0) to lag K or to its first zero, by the trapezoidal rule, in steps.

    The zero between two lags is found by linear interpolation; `step_time` in seconds gives seconds.
    """
    values = normalized_correlation(correlation)
    below = np.flatnonzero(values <= 0)
    if len(below) == 0:
        return float(trapezoid(values)) * step_time
    last = int(below[0])
    before = values[last - 1]
    triangle = 0.5 * before * before / (before - values[last])
    return (float(trapezoid(values[:last])) + triangle) * step_time


def max_correlation_error(pred: Array, true: Array) -> float:
    """Return max over lags of |C_pred(t)/C_pred(0) - C_true(t)/C_true(0)|."""
    p, z = normalized_correlation(pred), normalized_correlation(true)
    if p.shape != z.shape:
        raise ValueError(
            f"both correlations must have the same lags, got {len(p)} and {len(z)}; use one max_lag for both"
        )
    return float(np.abs(p - z).max())


def _lagged_products(z: Array, mean: Tensor, origins: list[int]) -> Tensor:
    """Return (K+1,): sum over trajectories, channels, grid and k < origins[l] of (z_k - m)(z_{k+l} - m)."""
    max_lag = len(origins) - 1
    total = torch.zeros(max_lag + 1, dtype=torch.float64, device=mean.device)
    for start, stop in chunk_starts(z, overlap=max_lag):
        window = to_float64(z[:, start : stop + max_lag]) - mean  # (J, t + K, C, *grid)
        for lag, count in enumerate(origins):
            last = min(stop, count) - start
            if last > 0:
                total[lag] += torch.sum(window[:, :last] * window[:, lag : lag + last])
    return total

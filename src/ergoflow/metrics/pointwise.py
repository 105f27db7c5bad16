"""Errors at a lead time: how far a forecast is from the one true trajectory (paper: short-term accuracy).

All take (J, T, C, *grid). A non-finite forecast has infinite error from that step on, so no mean can hide it;
a non-finite truth is an error of the caller and raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_finite, check_pair, chunk_starts, like, to_float64

# The Well adds this to the variance of the truth so that a constant field does not divide by zero.
WELL_EPSILON = 1e-7


def relative_l2_per_trajectory(
    pred: Array, true: Array, *, per_channel: bool = False, mean_field: Array | None = None
) -> Any:
    """Return (J, T) values of |pred - true| / |true|, one norm over grid and channels.

    `per_channel` takes one ratio per channel and averages the ratios. `mean_field` (C, *grid) is subtracted
    from the arguments of both norms (None: nothing is subtracted): the error of the fluctuations.
    """
    rows = []
    mean = None if mean_field is None else _mean_field(mean_field, true)
    for p, z, start in _pairs(pred, true):
        reference = z if mean is None else z - mean
        first = 3 if per_channel else 2
        error = (p - z).flatten(first).norm(dim=-1)  # (J, t) or (J, t, C)
        size = reference.flatten(first).norm(dim=-1)
        if bool((size == 0).any()):
            step = start + int((size == 0).nonzero()[0][1])
            raise ValueError(
                f"true must have a positive norm at every step, got zero at step {step}; "
                "drop that step or another mean_field"
            )
        ratio = error / size
        rows.append(ratio.mean(dim=2) if per_channel else ratio)
    return like(true, _infinite_after_failure(torch.cat(rows, dim=1)))


def relative_l2(pred: Array, true: Array, *, per_channel: bool = False, mean_field: Array | None = None) -> Any:
    """Return (T,): per lead time the mean over trajectories of |pred - true| / |true| (a mean of ratios)."""
    return relative_l2_per_trajectory(pred, true, per_channel=per_channel, mean_field=mean_field).mean(0)


def vrmse(pred: Array, true: Array) -> Any:
    """Return (T,): sqrt(mean (pred - true)^2 / (Var true + 1e-7)), mean over trajectories and channels.

    The Well's convention: mean and (unbiased) variance over the grid, per channel and frame.
    """
    rows = []
    for p, z, _ in _pairs(pred, true):
        error = (p - z).square().flatten(3).mean(dim=3)  # (J, t, C)
        variance = z.flatten(3).var(dim=3, correction=1) if z[0, 0, 0].numel() > 1 else 0 * error
        rows.append((error / (variance + WELL_EPSILON)).sqrt().mean(dim=2))
    return like(true, _infinite_after_failure(torch.cat(rows, dim=1)).mean(dim=0))


def pearson(pred: Array, true: Array) -> Any:
    """Return (J, T): correlation coefficient over the grid, mean over channels; -inf where pred has failed.

    r = sum (p - <p>)(z - <z>) / (|p - <p>| |z - <z>|). For vorticity, whose mean is zero, this is jax-cfd's
    correlation. A constant forecast (zero, for one) has r = 0.
    """
    rows = []
    for p, z, _ in _pairs(pred, true):
        p = p.flatten(3) - p.flatten(3).mean(dim=3, keepdim=True)  # (J, t, C, points)
        z = z.flatten(3) - z.flatten(3).mean(dim=3, keepdim=True)
        sizes = p.norm(dim=3) * z.norm(dim=3)
        correlation = (p * z).sum(dim=3) / torch.where(sizes == 0, 1.0, sizes)
        rows.append(correlation.mean(dim=2))
    return like(true, -_infinite_after_failure(-torch.cat(rows, dim=1)))


def high_correlation_time(pred: Array, true: Array, *, threshold: float = 0.8, step_time: float = 1.0) -> Any:
    """Return (J,): time of the first frame whose Pearson correlation is below `threshold`.

    A trajectory that stays above it gets T * step_time, the length of the record. Frame k is at k *
    step_time.
    """
    correlation = torch.as_tensor(pearson(pred, true))
    return like(true, _first_true(correlation < threshold) * step_time)


def valid_prediction_time(pred: Array, true: Array, *, threshold: float = 0.5, step_time: float = 1.0) -> Any:
    """Return (J,): time of the first frame with sqrt(<|pred - true|^2> / <|true - mean|^2>) > `threshold`.

    The denominator is the truth's mean square fluctuation about its mean field, pooled over trajectories and
    time. Pass step_time = dt * lambda_1 to count in Lyapunov times.
    """
    mean: Tensor | float = 0.0
    frames = true.shape[0] * true.shape[1]
    for _, z, _ in _pairs(pred, true):
        mean = mean + z.sum(dim=(0, 1)) / frames  # (C, *grid)
    variance, errors = 0.0, []
    for p, z, _ in _pairs(pred, true):
        variance += float((z - mean).square().flatten(2).mean(dim=2).sum()) / frames
        errors.append((p - z).square().flatten(2).mean(dim=2))
    if variance == 0.0:
        raise ValueError(
            "true must fluctuate about its mean field, got a constant truth; pass a longer record or more runs"
        )
    error = (_infinite_after_failure(torch.cat(errors, dim=1)) / variance).sqrt()  # (J, T)
    return like(true, _first_true(error > threshold) * step_time)


def _pairs(pred: Array, true: Array) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield float64 chunks of forecast and (finite) truth on the truth's device, with their first step."""
    check_pair(pred, true)
    for start, stop in chunk_starts(true):
        z = to_float64(true[:, start:stop])
        check_finite("true", z, first_step=start)
        yield to_float64(pred[:, start:stop]).to(z.device), z, start


def _mean_field(mean_field: Array, true: Array) -> Tensor:
    """Return the mean field as a float64 tensor of shape (C, *grid), checked."""
    if tuple(mean_field.shape) != tuple(true.shape[2:]):
        raise ValueError(
            f"mean_field must have the shape (C, *grid) = {tuple(true.shape[2:])}, "
            f"got {tuple(mean_field.shape)}; average the truth over its first two axes"
        )
    mean = to_float64(mean_field)
    return mean.to(true.device) if isinstance(true, Tensor) else mean.cpu()


def _infinite_after_failure(values: Tensor) -> Tensor:
    """Return (J, T) values that are +inf from the first non-finite one on."""
    failed = (~torch.isfinite(values)).cumsum(dim=1) > 0
    return torch.where(failed, torch.inf, values)


def _first_true(hit: Tensor) -> Tensor:
    """Return (J,) index of the first True along axis 1, or T where there is none, as float64."""
    frames = hit.shape[1]
    index = torch.where(hit.any(dim=1), hit.to(torch.int8).argmax(dim=1), frames)
    return index.to(torch.float64)

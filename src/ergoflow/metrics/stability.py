"""Did the roll-out survive: failure, survival share, share that stays inside the truth's range.

A roll-out has failed at the first step with a non-finite value or with |z| > 10 max|truth|.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ergoflow.metrics.arrays import Array, check_same_grid, check_trajectories, chunks, to_float64

# METRICS: ten times the largest absolute value of the truth is outside any attractor.
FAILURE_FACTOR = 10.0
RANGE_SIGMAS = 5.0


def failure_limit(true: Array) -> float:
    """Return 10 max|true|, the bound whose crossing is a failure."""
    check_trajectories("true", true)
    return FAILURE_FACTOR * max(float(piece.abs().max()) for piece in chunks(true, name="true"))


def first_failure(rollouts: Array, *, limit: float = math.inf) -> np.ndarray:
    """Return (J,) step of the first frame that is not finite or has |z| > `limit`, -1 for never."""
    check_trajectories("rollouts", rollouts)
    rows = []
    for piece in chunks(rollouts):
        largest = piece.abs().flatten(2).amax(dim=2)  # (J, t); amax keeps nan
        rows.append(~(torch.isfinite(largest) & (largest <= limit)))
    bad = torch.cat(rows, dim=1).cpu().numpy()
    return np.where(bad.any(axis=1), bad.argmax(axis=1), -1)


def survival(rollouts: Array, true: Array | None = None, *, steps: int | None = None) -> float:
    """Return the share of roll-outs that have not failed in their first `steps` steps (None: all of them).

    Without `true` only non-finite values count as failure; with it, so does |z| > 10 max|true|. Step k is
    frame k, frame 0 the initial state.
    """
    limit = math.inf
    if true is not None:
        check_same_grid(rollouts, true)
        limit = failure_limit(true)
    failed_at = first_failure(rollouts, limit=limit)
    last = rollouts.shape[1] - 1 if steps is None else steps
    if last >= rollouts.shape[1]:
        raise ValueError(f"steps must be below the number of frames {rollouts.shape[1]}, got {last}; roll out further")
    return float(np.mean((failed_at < 0) | (failed_at > last)))


def share_in_range(series: Array, true_series: Array, *, step: int, sigmas: float = RANGE_SIGMAS) -> float:
    """Return the share of trajectories whose energy (or enstrophy) at `step` is within 5 sigma of truth's.

    Mean and population sigma of the truth are taken over trajectories and time; non-finite values are
    outside.
    """
    values, truth = to_float64(series), to_float64(true_series)
    if values.ndim != 2 or truth.ndim != 2 or not 0 <= step < values.shape[-1]:
        raise ValueError(
            f"series must have axes (J, T) with T > step {step}, got {tuple(values.shape)} and "
            f"{tuple(truth.shape)}; roll out further or ask for an earlier step"
        )
    distance = (values[:, step] - truth.mean()).abs()
    return float((distance <= sigmas * truth.std(correction=0)).to(torch.float64).mean())

"""Errors over lead time, where truth still exists: the model's and the trivial forecasts'."""

from __future__ import annotations

import math

import numpy as np

from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics import Interval, relative_l2_per_trajectory
from ergoflow.pipeline.reference import Reference

COVERAGE = (2.5, 97.5)


def consecutive_steps(rollout: TrajectoryStore, truth_frames: int) -> int:
    """The last step up to which a roll-out kept every frame and truth exists."""
    steps = rollout.steps("test")
    return min(int(np.flatnonzero(steps == np.arange(len(steps)))[-1]), truth_frames - 1)


def short_term_errors(
    store: TrajectoryStore,
    rollout: TrajectoryStore,
    reference: Reference,
    *,
    stride: int,
    mean_field: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Relative L2 error (J, T) at lead steps 1..T of the model, persistence, climatology and zero.

    With a `mean_field` (C, *grid) both norms are of the departure from it: the error of the fluctuations.
    """
    frames = -(-store.num_frames("test") // stride)
    last = consecutive_steps(rollout, frames)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ("model", "persistence", "climatology", "zero")}
    for j in range(store.count("test")):
        truth = store.read("test", j, 0, last * stride + 1, stride)[None]  # (1, T+1, C, *grid)
        forecasts = {
            "model": rollout.read("test", j, 0, last + 1)[None, 1:],
            "persistence": np.broadcast_to(truth[:, :1], truth[:, 1:].shape),
            "climatology": np.broadcast_to(reference.climatology, truth[:, 1:].shape),
            "zero": np.zeros_like(truth[:, 1:]),
        }
        for name, forecast in forecasts.items():
            rows[name].append(np.asarray(relative_l2_per_trajectory(forecast, truth[:, 1:], mean_field=mean_field)[0]))
    return {name: np.stack(values) for name, values in rows.items()}


def mean_interval(values: np.ndarray, *, resamples: int, seed: int = 0) -> Interval:
    """Mean over trajectories (J,) with its 95 % bootstrap interval; infinite if any trajectory is."""
    mean = float(values.mean())
    if not math.isfinite(mean):
        return Interval(value=math.inf, low=math.inf, high=math.inf)
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), COVERAGE)
    return Interval(value=mean, low=min(float(low), mean), high=max(float(high), mean))

"""Errors over lead time, where truth still exists: the model's and the trivial forecasts'."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics import Interval, relative_l2_per_trajectory
from ergoflow.metrics.resampling import COVERAGE
from ergoflow.pipeline.reference import Reference


def consecutive_steps(rollout: TrajectoryStore, truth_frames: int) -> int:
    """The last step up to which a roll-out kept every frame and truth exists."""
    steps = rollout.steps("test")
    return min(int(np.flatnonzero(steps == np.arange(len(steps)))[-1]), truth_frames - 1)


class ShortTermErrors(NamedTuple):
    """Relative L2 errors (J, T) at lead steps 1..T of the model, persistence, climatology and zero."""

    states: dict[str, np.ndarray]
    fluctuations: dict[str, np.ndarray]
    """The same with both norms of the departure from the climatology."""


def short_term_errors(
    store: TrajectoryStore, rollout: TrajectoryStore, reference: Reference, *, stride: int, device: torch.device
) -> ShortTermErrors:
    """Compare the frames of a roll-out with the truth, one trajectory after the other."""
    frames = -(-store.num_frames("test") // stride)
    last = consecutive_steps(rollout, frames)
    climatology = torch.from_numpy(reference.climatology).to(device)
    rows: list[dict[str, list[np.ndarray]]] = [{}, {}]
    for j in range(store.count("test")):
        states = torch.from_numpy(store.read("test", j, 0, last * stride + 1, stride)).to(device)[None]
        truth = states[:, 1:]  # (1, T, C, *grid)
        forecasts = {
            "model": torch.from_numpy(rollout.read("test", j, 0, last + 1)).to(device)[None, 1:],
            "persistence": states[:, :1].expand_as(truth),
            "climatology": climatology.expand_as(truth),
            "zero": torch.zeros_like(truth),
        }
        for table, mean_field in zip(rows, (None, climatology), strict=True):
            for name, forecast in forecasts.items():
                error = relative_l2_per_trajectory(forecast, truth, mean_field=mean_field)[0]
                table.setdefault(name, []).append(error.cpu().numpy())
    return ShortTermErrors(*({name: np.stack(values) for name, values in table.items()} for table in rows))


def mean_interval(values: np.ndarray, *, resamples: int) -> Interval:
    """Mean over trajectories (J,) with its 95 % bootstrap interval; infinite if any trajectory is."""
    mean = float(values.mean())
    if not math.isfinite(mean):
        return Interval(value=math.inf, low=math.inf, high=math.inf)
    draws = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), COVERAGE)
    return Interval(value=mean, low=min(float(low), mean), high=max(float(high), mean))

"""How sure a long-term metric is: bootstrap over trajectories, the truth's own floor, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ergoflow.metrics.longterm import check_weights, prepare
from ergoflow.metrics.result import StatisticsResult

Verdict = Literal["at floor", "better", "worse", "failed"]

# Below so many trajectories a bootstrap says little: 95 % intervals of six covered 79 to 90 % (docs/decisions.md).
FEW = 6

# Ends of a 95 % interval, in percent.
COVERAGE = (2.5, 97.5)


def _ignore() -> None:
    """Do nothing."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch without threads: numpy's are as many as there are cores, and two such crowds wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with the ends of its 95 % interval; inf marks a failed roll-out."""

    value: float
    low: float
    high: float


@one_thread()
def bootstrap(
    model: StatisticsResult,
    truth: StatisticsResult,
    *,
    resamples: int = 200,
    seed: int = 0,
    model_weights: np.ndarray | None = None,
    on_resample: Callable[[], None] = _ignore,
) -> dict[str, Interval]:
    """Return value and 95 % interval of every long-term metric, resampling both sides' trajectories.

    Weights are multinomial, independent on the two sides. Resampling adds noise to both sides, which pushes
    every distance up; the interval is therefore the percentile interval moved so that the resamples' mean
    lies at the value, cut at zero. `model_weights` of zeros and ones restricts the model's trajectories
    (None: all). `on_resample` is called after each resample (a progress bar).
    """
    weights, ones = check_weights(model, model_weights), check_weights(truth, None)
    chosen = np.flatnonzero(weights)
    if len(chosen) < 2 or len(ones) < 2 or resamples < 2:
        raise ValueError(
            f"a bootstrap needs two trajectories a side and two resamples, got {len(chosen)}, {len(ones)} "
            "and "
            f"{resamples}; roll out more trajectories"
        )
    evaluation = prepare(model, truth)
    values = evaluation.metrics(weights, ones)
    if bool((model.failed_at[chosen] >= 0).any()):
        return {key: Interval(value=value, low=value, high=value) for key, value in values.items()}
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(resamples):
        drawn = np.zeros_like(weights)
        drawn[chosen] = rng.multinomial(len(chosen), np.full(len(chosen), 1 / len(chosen)))
        truth_drawn = rng.multinomial(len(ones), ones / len(ones)).astype(np.float64)
        rows.append(evaluation.metrics(drawn, truth_drawn))
        on_resample()
    return {key: centred_interval(value, np.array([row[key] for row in rows])) for key, value in values.items()}


@one_thread()
def noise_floor(
    truth: StatisticsResult, *, resamples: int = 40, seed: int = 0, on_resample: Callable[[], None] = _ignore
) -> dict[str, Interval]:
    """Return what each metric gives for truth against truth: mean and 95 % range over random halves.

    Each half holds half of the trajectories, so this floor is somewhat above that of two full sets.
    """
    count = truth.num_trajectories
    if count < 2 or resamples < 1:
        raise ValueError(
            f"halves need at least two trajectories and one resample, got {count} and {resamples}; simulate more truth"
        )
    evaluation = prepare(truth, truth)
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(resamples):
        half = np.zeros(count)
        half[rng.permutation(count)[: count // 2]] = 1.0
        rows.append(evaluation.metrics(half, 1.0 - half))
        on_resample()
    return {key: percentile_interval(np.array([row[key] for row in rows])) for key in evaluation.keys}


def few_trajectories(count: int) -> str:
    """Return what to think of verdicts that rest on `count` test trajectories; nothing if they are enough."""
    if count >= FEW:
        return ""
    return f"{count} test trajectories: intervals and floors are wide, so verdicts say little; bring {FEW} or more"


def verdict(score: Interval, floor: Interval | None, trivial: Mapping[str, Interval]) -> Verdict:
    """Return what a model's number means, given truth against truth and the trivial forecasts' numbers.

    failed     infinite: a roll-out failed
    at floor   its interval reaches down to the floor: with this much data it cannot be told from the truth
    better     above the floor (or there is none), but below every trivial forecast
    worse      neither
    """
    if not math.isfinite(score.value):
        return "failed"
    if floor is not None and score.low <= floor.high:
        return "at floor"
    return "better" if trivial and all(score.high < row.low for row in trivial.values()) else "worse"


def centred_interval(value: float, resampled: np.ndarray) -> Interval:
    """Return the percentile interval of the resamples, moved so that their mean is the value.

    Where resamples spread so far that this takes the lower end below zero, it is moved by a factor instead: else a
    large number with a heavy tail could not be told from none. An estimated divergence may be negative; the interval
    then begins at the value.
    """
    if not math.isfinite(value):
        return Interval(value=value, low=value, high=value)
    if not np.isfinite(resampled).all():
        return Interval(value=value, low=min(value, float(resampled.min())), high=math.inf)
    ends, mean = np.percentile(resampled, COVERAGE), resampled.mean()
    low, high = (float(end) for end in ends - mean + value)
    if low < 0:
        low = max(0.0, value * float(ends[0] / mean)) if mean > 0 else 0.0
    return Interval(value=value, low=min(low, value), high=max(high, value))


def percentile_interval(resampled: np.ndarray) -> Interval:
    """Return mean and percentile interval of the resamples."""
    if not np.isfinite(resampled).all():
        return Interval(value=math.inf, low=float(resampled.min()), high=math.inf)
    low, high = np.percentile(resampled, COVERAGE)
    return Interval(value=float(resampled.mean()), low=float(low), high=float(high))

"""What every model on a data set is measured against: the truth, its noise floor, and the trivial forecasts.

The reference depends on the data, the stride and the evaluation settings alone, so it is computed once, kept beside
the data, and shared by all models.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ergoflow.config import EvaluationConfig, Recipe, to_dict
from ergoflow.data.files import read_npz, write_npz_atomic
from ergoflow.data.normalize import Normalizer
from ergoflow.data.store import DatasetInfo, TrajectoryStore
from ergoflow.metrics import (
    Interval,
    PCABasis,
    StatisticsResult,
    TrajectoryStatistics,
    bootstrap,
    failure_limit,
    fit_pca,
    noise_floor,
)
from ergoflow.metrics.pca import MAX_SNAPSHOTS
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import require_finite

REFERENCE_FORMAT = 1
# Sliced Wasserstein distances look at this many components, the printed KL divergence at the first ten.
BASIS_SIZE = 64
# The histogram reaches this many standard deviations to either side of the mean.
HISTOGRAM_SIGMAS = 12.0
HISTOGRAM_BINS = 1200
# The climatology is the mean of every tenth training frame.
CLIMATOLOGY_STRIDE = 10
# One in each half.
MIN_TRAJECTORIES = 2
TRIVIAL = ("persistence", "climatology", "zero")
# Trivial rows need less precision than a model's.
TRIVIAL_RESAMPLES = 40

Intervals = dict[str, Interval]


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What two sets of roll-outs must share to be compared: principal components, histogram bins, the failure limit."""

    basis: PCABasis
    edges: np.ndarray
    limit: float


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The truth's statistics, what is needed to measure a model the same way, and the scores to hold it against.

    `floor` is truth against truth and `trivial` the scores of persistence, climatology and zero, each by metric.
    """

    yardstick: Yardstick
    climatology: np.ndarray
    truth: StatisticsResult
    floor: Intervals
    trivial: dict[str, Intervals]


def skipped_frames(evaluation: EvaluationConfig, truth_frames: int) -> int:
    """Frames of a roll-out (initial state included) before the window of the long-term statistics.

    The window is as long as the truth where the roll-out allows it.
    """
    return max(evaluation.discard, evaluation.steps + 1 - truth_frames)


def require_known_walls(info: DatasetInfo) -> None:
    """Refuse walls that the statistics do not know: they take spectra along the last axis, and vorticity across one."""
    if all(b == "PERIODIC" for b in info.boundaries[1:]) and (len(info.grid) > 1 or info.boundaries[0] == "PERIODIC"):
        return
    raise ValueError(
        f"walls can be on the first of two or three axes, got {', '.join(info.boundaries)} along "
        f"{', '.join(info.axes)}; put the axis between walls first"
    )


def new_statistics(
    info: DatasetInfo, yardstick: Yardstick, count: int, *, max_lag: int, skip: int, device: torch.device
) -> TrajectoryStatistics:
    """Empty statistics for `count` roll-outs: of a vorticity, of the components of a velocity, or of one scalar."""
    require_known_walls(info)
    return TrajectoryStatistics(
        count,
        len(info.fields),
        info.grid,
        length=info.length,
        kind="vorticity" if info.fields == ("vorticity",) else "velocity",
        spectrum="shells" if all(b == "PERIODIC" for b in info.boundaries) else "spanwise",
        max_lag=max_lag,
        basis=yardstick.basis,
        histogram_edges=yardstick.edges,
        skip=skip,
        limit=yardstick.limit,
        device=device,
    )


def load_reference(recipe: Recipe, store: TrajectoryStore, *, device: torch.device, console: Console) -> Reference:
    """The reference of a recipe's data and evaluation, from disk if it is there, and kept where it can be."""
    path = _path(recipe, store)
    if not path.exists():
        reference = _compute(recipe, store, device=device, console=console)
        if not os.access(store.folder, os.W_OK):
            return reference
        _write(path, reference)
    return _read(path)


def _compute(recipe: Recipe, store: TrajectoryStore, *, device: torch.device, console: Console) -> Reference:
    evaluation = recipe.evaluation
    truth = store.load("test", device=device, stride=recipe.task.stride)  # (J, T, C, *grid)
    if truth.shape[1] <= evaluation.max_lag:
        raise ValueError(
            f"the test split has {truth.shape[1]} frames at stride {recipe.task.stride}, but max_lag "
            f"{evaluation.max_lag} needs more; lower evaluation.max_lag or task.stride"
        )
    if len(truth) < MIN_TRAJECTORIES:
        raise ValueError(
            f"the test split of {store.folder} must have at least {MIN_TRAJECTORIES} trajectories, halves of which are "
            f"the noise floor, got {len(truth)}; add some"
        )
    require_finite(truth, store, "test")
    yardstick = Yardstick(basis=_basis(store, device), edges=_edges(store), limit=failure_limit(truth))
    mean_field = climatology(store)
    frames, initial = truth.shape[1], truth[:, 0]
    rows: dict[str, Iterator[Tensor]] = {
        "truth": iter(truth.unbind(1)),
        "persistence": _constant(initial, frames),
        "climatology": _constant(mean_field.to(device).expand_as(initial), frames),
        "zero": _constant(torch.zeros_like(initial), frames),
    }
    results = {}
    with bar(console, f"reference of {store.info.name}", frames * len(rows), "frames") as advance:
        for name, states in rows.items():
            statistics = new_statistics(
                store.info, yardstick, len(initial), max_lag=evaluation.max_lag, skip=0, device=device
            )
            for state in states:
                statistics.update(state)
                advance()
            results[name] = statistics.finish()
    resamples = evaluation.resamples + len(TRIVIAL) * TRIVIAL_RESAMPLES
    with bar(console, f"noise floor of {store.info.name}", resamples, "resamples") as advance:
        floor = noise_floor(results["truth"], resamples=evaluation.resamples, on_resample=advance)
        trivial = {
            name: bootstrap(results[name], results["truth"], resamples=TRIVIAL_RESAMPLES, on_resample=advance)
            for name in TRIVIAL
        }
    return Reference(
        yardstick=yardstick,
        climatology=mean_field.numpy(),
        truth=results["truth"],
        floor=floor,
        trivial=trivial,
    )


def _constant(state: Tensor, frames: int) -> Iterator[Tensor]:
    return (state for _ in range(frames))


def _basis(store: TrajectoryStore, device: torch.device) -> PCABasis:
    """Principal components of the training split: the test split and the model are then both out of sample.

    Components fitted to the very frames they judge would flatter these frames, and with them the noise floor.
    """
    count, frames = store.count("train"), store.num_frames("train")
    stride = -(-count * frames // MAX_SNAPSHOTS)
    return fit_pca(store.load("train", device=device, stride=stride), BASIS_SIZE)


def climatology(store: TrajectoryStore) -> Tensor:
    """Mean field (C, *grid) of the training split, over every CLIMATOLOGY_STRIDE-th frame."""
    total, count = np.zeros((len(store.info.fields), *store.info.grid)), 0
    for trajectory in range(store.count("train")):
        frames = store.read("train", trajectory, 0, store.num_frames("train"), CLIMATOLOGY_STRIDE)
        total += frames.sum(axis=0, dtype=np.float64)
        count += len(frames)
    return torch.from_numpy((total / count).astype(np.float32))


def _edges(store: TrajectoryStore) -> np.ndarray:
    """Histogram edges (C, bins + 1) around each field's training mean."""
    normalizer = Normalizer.from_store(store)
    mean, reach = normalizer.mean.double().numpy(), HISTOGRAM_SIGMAS * normalizer.std.double().numpy()
    return np.linspace(mean - reach, mean + reach, HISTOGRAM_BINS + 1, axis=-1)


def _path(recipe: Recipe, store: TrajectoryStore) -> Path:
    """A file name that changes with anything the reference depends on; of the data names, sizes and times are enough.

    Of `stats.yaml` mean and spread count: increments of further strides are added to it.
    """
    normalizer = Normalizer.from_store(store)
    known = [
        normalizer.mean.tolist(),
        normalizer.std.tolist(),
        to_dict(recipe.dataset),
        recipe.task.stride,
        recipe.evaluation.max_lag,
        recipe.evaluation.resamples,
        REFERENCE_FORMAT,
    ]
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for split in store.splits for p in store.files(split)]
    digest = hashlib.sha256(json.dumps([known, stamps]).encode()).hexdigest()[:12]
    return Path(store.folder) / f"reference-{digest}.npz"


def _write(path: Path, reference: Reference) -> None:
    yardstick = reference.yardstick
    arrays = {"limit": np.array(yardstick.limit), "edges": yardstick.edges, "climatology": reference.climatology}
    for name in ("mean", "components", "variances"):
        arrays[f"basis/{name}"] = getattr(yardstick.basis, name).cpu().numpy()
    arrays |= {f"truth/{name}": value for name, value in reference.truth.arrays().items()}
    arrays["metrics"] = np.array(list(reference.floor))
    for row, intervals in {"floor": reference.floor, **reference.trivial}.items():
        arrays[f"scores/{row}"] = np.array([(i.value, i.low, i.high) for i in intervals.values()])
    write_npz_atomic(path, arrays)


def _read(path: Path) -> Reference:
    arrays = read_npz(path, remedy="remove it: it is computed again")
    basis = {name: torch.from_numpy(arrays[f"basis/{name}"]) for name in ("mean", "components", "variances")}
    truth = {key.removeprefix("truth/"): value for key, value in arrays.items() if key.startswith("truth/")}

    def intervals(row: str) -> Intervals:
        values = zip(arrays["metrics"].tolist(), arrays[f"scores/{row}"].tolist(), strict=True)
        return {key: Interval(value=value, low=low, high=high) for key, (value, low, high) in values}

    return Reference(
        yardstick=Yardstick(basis=PCABasis(**basis), edges=arrays["edges"], limit=float(arrays["limit"])),
        climatology=arrays["climatology"],
        truth=StatisticsResult.from_arrays(truth, source=str(path)),
        floor=intervals("floor"),
        trivial={name: intervals(name) for name in TRIVIAL},
    )

"""What every model on a data set is measured against: the test split's statistics and the trivial forecasts.

The reference depends on the data, the stride and the evaluation settings alone, so it is computed once, kept beside
the data, and shared by all models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ergoflow.config import EvaluationConfig, Recipe, to_dict
from ergoflow.data.files import write_npz_atomic
from ergoflow.data.store import DatasetInfo, TrajectoryStore
from ergoflow.metrics import PCABasis, StatisticsResult, TrajectoryStatistics, failure_limit, fit_pca
from ergoflow.pipeline.progress import bar

REFERENCE_FORMAT = 1
# Sliced Wasserstein distances look at this many components; the printed KL divergence at evaluation.components of them.
BASIS_SIZE = 64
# The histogram reaches this many standard deviations to either side of the mean.
HISTOGRAM_SIGMAS = 12.0
HISTOGRAM_BINS = 240
# The climatology is the mean of every tenth training frame.
CLIMATOLOGY_STRIDE = 10
TRIVIAL = ("persistence", "climatology", "zero")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Statistics of the truth and of the trivial forecasts, and what is needed to measure a model the same way."""

    basis: PCABasis
    edges: np.ndarray
    climatology: np.ndarray
    rows: dict[str, StatisticsResult]
    limit: float

    @property
    def truth(self) -> StatisticsResult:
        """Statistics of the test split."""
        return self.rows["truth"]


def skipped_frames(evaluation: EvaluationConfig, truth_frames: int) -> int:
    """Frames of a roll-out (initial state included) before the window of the long-term statistics.

    The window is as long as the truth where the roll-out allows it.
    """
    return max(evaluation.discard, evaluation.steps + 1 - truth_frames)


def new_statistics(
    info: DatasetInfo,
    reference: Reference | None,
    count: int,
    *,
    max_lag: int,
    skip: int,
    device: torch.device,
) -> TrajectoryStatistics:
    """Empty statistics for `count` roll-outs of a flow; without a reference they are those of the truth itself."""
    vorticity = info.fields == ("vorticity",)
    return TrajectoryStatistics(
        count,
        len(info.fields),
        info.grid,
        length=info.length,
        kind="vorticity" if vorticity else "velocity",
        spectrum="shells" if all(b == "PERIODIC" for b in info.boundaries) else "spanwise",
        max_lag=max_lag,
        basis=reference.basis if reference else None,
        histogram_edges=reference.edges if reference else None,
        skip=skip,
        limit=reference.limit if reference else float("inf"),
        device=device,
    )


def load_reference(recipe: Recipe, store: TrajectoryStore, *, device: torch.device, console: Console) -> Reference:
    """The reference of a recipe's data and evaluation, from disk if it is there."""
    path = _path(recipe, store)
    if not path.exists():
        _write(path, _compute(recipe, store, device=device, console=console))
    return _read(path)


def _compute(recipe: Recipe, store: TrajectoryStore, *, device: torch.device, console: Console) -> Reference:
    truth = store.load("test", device=device, stride=recipe.task.stride)  # (J, T, C, *grid)
    if truth.shape[1] <= recipe.evaluation.max_lag:
        raise ValueError(
            f"the test split has {truth.shape[1]} frames at stride {recipe.task.stride}, but max_lag "
            f"{recipe.evaluation.max_lag} needs more; lower evaluation.max_lag or task.stride"
        )
    climatology = _climatology(store).to(device)
    partial = Reference(
        basis=fit_pca(truth, BASIS_SIZE),
        edges=_edges(store),
        climatology=climatology.cpu().numpy(),
        rows={},
        limit=failure_limit(truth),
    )
    frames, initial = truth.shape[1], truth[:, 0]
    rows: dict[str, Iterator[Tensor]] = {
        "truth": iter(truth.unbind(1)),
        "persistence": _constant(initial, frames),
        "climatology": _constant(climatology.expand_as(initial), frames),
        "zero": _constant(torch.zeros_like(initial), frames),
    }
    results = {}
    with bar(console, f"reference of {store.info.name}", frames * len(rows), "frames") as advance:
        for name, states in rows.items():
            statistics = new_statistics(
                store.info, partial, len(initial), max_lag=recipe.evaluation.max_lag, skip=0, device=device
            )
            for state in states:
                statistics.update(state)
                advance()
            results[name] = statistics.finish()
    return Reference(
        basis=partial.basis,
        edges=partial.edges,
        climatology=partial.climatology,
        rows=results,
        limit=partial.limit,
    )


def _constant(state: Tensor, frames: int) -> Iterator[Tensor]:
    return (state for _ in range(frames))


def _climatology(store: TrajectoryStore) -> Tensor:
    """Mean field (C, *grid) of the training split, over every CLIMATOLOGY_STRIDE-th frame."""
    total, count = np.zeros((len(store.info.fields), *store.info.grid)), 0
    for trajectory in range(store.count("train")):
        frames = store.read("train", trajectory, 0, store.num_frames("train"), CLIMATOLOGY_STRIDE)
        total += frames.sum(axis=0, dtype=np.float64)
        count += len(frames)
    return torch.from_numpy((total / count).astype(np.float32))


def _edges(store: TrajectoryStore) -> np.ndarray:
    """Histogram edges (C, bins + 1) around each field's training mean."""
    statistics, rows = store.statistics, []
    for name in store.info.fields:
        mean, std = float(statistics["mean"][name]), float(statistics["std"][name])
        rows.append(np.linspace(mean - HISTOGRAM_SIGMAS * std, mean + HISTOGRAM_SIGMAS * std, HISTOGRAM_BINS + 1))
    return np.stack(rows)


def _path(recipe: Recipe, store: TrajectoryStore) -> Path:
    """A file name that changes with anything the reference depends on, the data's checksums included."""
    known = [to_dict(recipe.dataset), recipe.task.stride, recipe.evaluation.max_lag, REFERENCE_FORMAT]
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for split in store.splits for p in store.files(split)]
    digest = hashlib.sha256(json.dumps([known, stamps]).encode()).hexdigest()[:12]
    return Path(store.folder) / f"reference-{digest}.npz"


def _write(path: Path, reference: Reference) -> None:
    arrays = {
        "limit": np.array(reference.limit),
        "edges": reference.edges,
        "climatology": reference.climatology,
    }
    for name in ("mean", "components", "variances"):
        arrays[f"basis/{name}"] = getattr(reference.basis, name).cpu().numpy()
    for row, statistics in reference.rows.items():
        arrays |= {f"{row}/{name}": value for name, value in statistics.arrays().items()}
    write_npz_atomic(path, arrays)


def _read(path: Path) -> Reference:
    with np.load(path) as file:
        arrays = dict(file.items())
    parts = {name: torch.from_numpy(arrays[f"basis/{name}"]) for name in ("mean", "components", "variances")}
    rows = {}
    for row in ("truth", *TRIVIAL):
        own = {key.removeprefix(f"{row}/"): value for key, value in arrays.items() if key.startswith(f"{row}/")}
        rows[row] = StatisticsResult.from_arrays(own)
    return Reference(
        basis=PCABasis(**parts),
        edges=arrays["edges"],
        climatology=arrays["climatology"],
        rows=rows,
        limit=float(arrays["limit"]),
    )

"""One scored run as the report sees it (`RunView`), and the seeds of one experiment together (`RunGroup`).

A run is what `scores.json`, `curves.npz`, `recipe.json`, `log.jsonl` and `training.json` hold, as plain dicts and
arrays. A view checks itself when built, so that nothing further down the page has to ask whether a key is there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

FORMAT = 1
VERDICTS = ("at floor", "better", "worse", "failed")
DIRECTIONS = ("lower", "higher")
REFERENCE_ROWS = ("persistence", "climatology", "zero")
#: Energy and enstrophy are in the truth's range within so many of its standard deviations (as the scores count).
RANGE_SIGMAS = 5.0

_SCORE_KEYS = (
    *("format", "name", "seed", "dataset", "stride", "step_seconds", "rollout_steps", "num_trajectories"),
    *("parameters", "metrics", "survival", "hardware", "versions", "commit", "timings"),
)
_METRIC_KEYS = ("label", "better", "headline", "variant_of", "definition", "floor", "rows")

#: abscissa -> families of curves that must have its length along their last (or, for fields, first) axis.
_ALONG_LAST = {
    "relative_l2/steps": ("relative_l2/", "relative_l2_low/", "relative_l2_high/"),
    "spectrum/shells": ("spectrum/", "spectrum_low/", "spectrum_high/"),
    "autocorrelation/lags": ("autocorrelation/", "autocorrelation_low/", "autocorrelation_high/"),
    "pdf/centers": ("pdf/",),
    "series/steps": ("series/energy/model", "series/enstrophy/model"),
    "wall/y_plus": ("wall/",),
}
_ALONG_FIRST = {"snapshots/steps": ("snapshots/",), "player/steps": ("player/",)}


@dataclass(frozen=True)
class RunView:
    """One run of one recipe with one seed; see the module docstring for where each part comes from.

    `training` is empty where nobody kept it; a model that came with the package was trained by an earlier commit than
    the one that scored it.
    """

    name: str
    seed: int
    recipe: Mapping[str, Any]
    scores: Mapping[str, Any]
    curves: Mapping[str, np.ndarray]
    log: Sequence[Mapping[str, Any]]
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"run {self.name!r} seed {self.seed}"
        if self.scores.get("format") != FORMAT:
            raise ValueError(
                f"{where}: scores.json must have format {FORMAT}, got {self.scores.get('format')!r}; "
                "score the run again"
            )
        _require(where, "scores.json", self.scores, _SCORE_KEYS)
        if (self.scores["name"], self.scores["seed"]) != (self.name, self.seed):
            raise ValueError(
                f"{where}: scores must belong to the run, got those of {self.scores['name']!r} seed "
                f"{self.scores['seed']}; pair each run with its own scores.json"
            )
        for key, metric in self.scores["metrics"].items():
            _check_metric(f"{where}, metric {key!r}", metric, self.scores["metrics"])
        _check_curves(where, self.curves)

    def curve(self, name: str) -> np.ndarray | None:
        """A curve in float64 (complex stays complex), or None when the run does not have it."""
        values = self.curves.get(name)
        if values is None:
            return None
        values = np.asarray(values)
        return values if np.iscomplexobj(values) else values.astype(np.float64)


def share_in_range(scores: Mapping[str, Any]) -> float:
    """The share of roll-outs that end with energy and enstrophy within 5 σ of the truth's; 1 where nobody looked."""
    survival = scores["survival"]
    last = survival.get("steps", scores["rollout_steps"])
    return float(min(survival.get(f"{name}_in_range@{last}", 1.0) for name in ("energy", "enstrophy")))


def has_strayed(scores: Sequence[Mapping[str, Any]]) -> bool:
    """Whether most roll-outs of the runs with these scores end outside of the truth's range."""
    return sum(map(share_in_range, scores)) < len(scores) / 2


def survival_text(runs: Sequence[RunView]) -> str:
    """The share of roll-outs that survive and, where it is less, of those in the truth's range at the end.

    Where some left it, also the median step at which they did, if their energies are known.
    """
    alive, inside = (
        sum(shares) / len(runs)
        for shares in (
            [run.scores["survival"]["fraction"] for run in runs],
            [share_in_range(run.scores) for run in runs],
        )
    )
    if inside >= 1:
        return f"{alive:.0%}"
    steps = [step for run in runs for step in steps_of_leaving(run.curves)]
    when = f", left at step {np.median(steps):.0f}" if steps else ""
    return f"{alive:.0%}{f', {inside:.0%} in range' if inside < alive else ''}{when}"


def steps_of_leaving(curves: Mapping[str, np.ndarray]) -> list[float]:
    """For each roll-out that is mostly outside of the truth's range in its second half, the step at which it left.

    That is the first step outside after which more of the rest is outside than inside: a roll-out along the edge of
    the range has left it once, however often it comes back for a moment.
    """
    outside: Any = False
    for name in ("energy", "enstrophy"):
        model, truth = (curves.get(f"series/{name}/{which}") for which in ("model", "truth"))
        if model is None or truth is None:
            return []
        wide = np.asarray(truth, dtype=np.float64)
        # What is not finite is not inside.
        inside = np.abs(np.asarray(model, dtype=np.float64) - wide.mean()) <= RANGE_SIGMAS * wide.std()
        outside = outside | ~inside
    steps = np.asarray(curves["series/steps"])
    rest = np.cumsum(outside[:, ::-1], axis=1)[:, ::-1] / np.arange(len(steps), 0, -1)
    gone = rest[:, len(steps) // 2] > 1 / 2
    return [float(steps[np.argmax(row)]) for row in (outside & (rest > 1 / 2))[gone]]


@dataclass(frozen=True)
class RunGroup:
    """All seeds of one experiment, in order of seed."""

    name: str
    runs: tuple[RunView, ...]

    @property
    def first(self) -> RunView:
        """The run of the smallest seed: the one whose fields are shown."""
        return self.runs[0]

    @property
    def scores(self) -> tuple[Mapping[str, Any], ...]:
        """The scores of all seeds."""
        return tuple(run.scores for run in self.runs)

    @property
    def plane_axes(self) -> tuple[str, ...]:
        """Names of the two array axes of a field: ("x", "y") unless the scores say otherwise."""
        return tuple(self.first.scores.get("axes", ("x", "y")))

    def curve(self, name: str) -> np.ndarray | None:
        """The mean of a curve over the seeds; None unless every seed has it.

        No seed is skipped: where one seed is infinite so is the mean, because its roll-out failed.
        """
        stack = self._stack(name)
        return None if stack is None else stack.mean(axis=0)

    def spread(self, name: str) -> np.ndarray | None:
        """The sample standard deviation of a curve over the seeds; None with fewer than two seeds."""
        stack = self._stack(name)
        if stack is None or len(stack) < 2:
            return None
        # inf - inf is NaN by definition: a failed seed has no finite spread, and nothing is drawn there.
        with np.errstate(invalid="ignore"):
            return stack.std(axis=0, ddof=1)

    def _stack(self, name: str) -> np.ndarray | None:
        curves = [curve for run in self.runs if (curve := run.curve(name)) is not None]
        if len(curves) < len(self.runs):
            return None
        shapes = {curve.shape for curve in curves}
        if len(shapes) > 1:
            raise ValueError(
                f"seeds of {self.name!r} must share the shape of {name!r}, got {sorted(shapes)}; "
                "score every seed with the same settings"
            )
        return np.stack(curves)


def group_runs(runs: Sequence[RunView]) -> tuple[RunGroup, ...]:
    """Runs gathered by name in the order they come, each group sorted by seed, its densities on the same bins."""
    if not runs:
        raise ValueError("a report needs at least one run, got none; score a run first")
    by_name: dict[str, list[RunView]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    for name, members in by_name.items():
        seeds = sorted(run.seed for run in members)
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds of {name!r} must differ, got {seeds}; give each run once")
        tasks = sorted({task_of(run) for run in members})
        if len(tasks) > 1:
            raise ValueError(f"seeds of {name!r} must share dataset and step, got {tasks}; name them differently")
    return tuple(
        RunGroup(name, tuple(sorted(_on_common_bins(members), key=lambda run: run.seed)))
        for name, members in by_name.items()
    )


def task_of(run: RunView) -> tuple[str, float]:
    """(dataset, seconds per step): runs may be compared only where these agree."""
    return str(run.scores["dataset"]), float(run.scores["step_seconds"])


def slugify(name: str) -> str:
    """Letters, digits and single dashes: safe in file names, ids and addresses."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def finite_or_none(value: Any) -> float | None:
    """The number, or None when it is missing or not finite (which is how a failed score is stored)."""
    return float(value) if value is not None and math.isfinite(value) else None


def _on_common_bins(runs: Sequence[RunView]) -> list[RunView]:
    """Runs whose densities have the bins that any of them reaches, with zeros where a run comes to none.

    A run keeps the bins that its own values reach. Those of one data set are equally wide and one grid; where they are
    not, nothing is done.
    """
    centers = [run.curve("pdf/centers") for run in runs]
    known = [places for places in centers if places is not None and len(places) > 1]
    if len(known) < len(runs) or not np.allclose(
        [places[1] - places[0] for places in known], known[0][1] - known[0][0]
    ):
        return list(runs)
    start, width = min(places[0] for places in known), known[0][1] - known[0][0]
    starts = [round((places[0] - start) / width) for places in known]
    common = start + width * np.arange(max(first + len(places) for first, places in zip(starts, known, strict=True)))
    placed = []
    for run, first in zip(runs, starts, strict=True):
        names = [name for name in run.curves if name.startswith("pdf/") and name != "pdf/centers"]
        wide = {name: np.zeros(len(common)) for name in names}
        for name in names:
            wide[name][first : first + len(run.curves[name])] = run.curves[name]
        placed.append(replace(run, curves={**run.curves, **wide, "pdf/centers": common}))
    return placed


def _require(where: str, what: str, mapping: Mapping[str, Any], keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(
            f"{where}: {what} must have {', '.join(keys)}, got no {' and no '.join(missing)}; score the run again"
        )


def _check_metric(where: str, metric: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    _require(where, "a metric", metric, _METRIC_KEYS)
    _require(where, "rows", metric["rows"], ("model",))
    if metric["better"] not in DIRECTIONS:
        raise ValueError(f"{where}: better must be one of {DIRECTIONS}, got {metric['better']!r}; correct the score")
    parent = metric["variant_of"]
    if parent is not None and parent not in metrics:
        raise ValueError(f"{where}: variant_of must name a metric, got {parent!r}; one of {sorted(metrics)}")
    for row, cell in metric["rows"].items():
        _require(f"{where}, row {row!r}", "a cell", cell, ("value", "low", "high"))
        verdict = cell.get("verdict")
        if verdict not in VERDICTS and (verdict is not None or row == "model"):
            raise ValueError(f"{where}, row {row!r}: verdict must be one of {VERDICTS}, got {verdict!r}; correct it")


def _check_curves(where: str, curves: Mapping[str, np.ndarray]) -> None:
    for axis, relations in ((-1, _ALONG_LAST), (0, _ALONG_FIRST)):
        for abscissa, families in relations.items():
            present = [name for name in curves if name != abscissa and name.startswith(families)]
            if present and abscissa not in curves:
                raise ValueError(f"{where}: {present[0]!r} needs {abscissa!r}, got none; store both in curves.npz")
            for name in present:
                length, expected = np.shape(curves[name])[axis], len(curves[abscissa])
                if length != expected:
                    raise ValueError(
                        f"{where}: {name!r} must have the {expected} points of {abscissa!r}, got {length}; "
                        "score the run again"
                    )

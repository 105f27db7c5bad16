"""`ergoflow score`: measure a roll-out and write scores.json (numbers) and curves.npz (what the report draws).

Every number comes with a bootstrap interval over trajectories, the truth-against-truth floor, the scores of three
trivial forecasts, and the verdict that follows from them (`metrics.verdict`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ergoflow.config import Recipe, to_dict
from ergoflow.data.files import read_json, read_npz
from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics import (
    CATALOGUE,
    Interval,
    StatisticsResult,
    bootstrap,
    definition,
    survival_summary,
    verdict,
)
from ergoflow.metrics.resampling import few_trajectories
from ergoflow.models.own import OwnConfig
from ergoflow.pipeline.curves import write_curves
from ergoflow.pipeline.exponents import Exponents, measure_exponents, require_exponents
from ergoflow.pipeline.predict import FACTS_FILE, ROLLOUT_FILE
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.reference import TRIVIAL, Reference, load_reference
from ergoflow.pipeline.runs import (
    SUMMARY_FILE,
    build_step,
    is_of_these_weights,
    load_run,
    open_store,
    read_facts,
    require_same_run,
    write_json,
)
from ergoflow.pipeline.shortterm import mean_interval, short_term_errors
from ergoflow.pipeline.workspace import Workspace, commit, hardware, versions
from ergoflow.report.units import time_unit

SCORES_FORMAT = 1
# Ends of roll-outs against the mean of the truth.
DRIFTS = ("energy_drift", "enstrophy_drift")


def score(recipe: Recipe, workspace: Workspace, *, seed: int, device: torch.device, console: Console) -> Path:
    """Measure the roll-out of a run and return the run folder."""
    started = time.perf_counter()
    folder = workspace.run(recipe.name, seed)
    store, output = open_store(recipe, workspace), folder / "rollout"
    if not all((output / name).exists() for name in (FACTS_FILE, "statistics.npz", ROLLOUT_FILE)):
        raise ValueError(
            f"a roll-out was expected in {output}, but there is no whole one; "
            "run `ergoflow predict` with this recipe and seed"
        )
    require_same_run(folder, recipe)
    rolled_out = _same_rollout(folder, recipe)
    if recipe.evaluation.exponents:
        require_exponents(recipe, store)
    reference = load_reference(recipe, store, device=device, console=console)
    statistics = output / "statistics.npz"
    arrays = read_npz(statistics, remedy="run `ergoflow predict` again")
    model = StatisticsResult.from_arrays(arrays, source=str(statistics))
    rollout = TrajectoryStore(output)
    stride = recipe.task.stride
    errors, departures = short_term_errors(store, rollout, reference, stride=stride, device=device)
    metrics = _short_term(recipe, errors, departures) | _long_term(recipe, model, reference, console)
    exponents = None
    if recipe.evaluation.exponents:
        exponents = measure_exponents(recipe, store, load_run(folder, device=device), device=device, console=console)
        metrics["lambda1_error"] = _exponent_metric(recipe, exponents)
    facts = {
        "format": SCORES_FORMAT,
        "name": recipe.name,
        "seed": seed,
        "dataset": recipe.dataset.name,
        "stride": recipe.task.stride,
        "step_seconds": recipe.step_seconds,
        "axes": list(store.info.axes),
        "fields": list(store.info.fields),
        "weights": rolled_out.get("weights"),
        "evaluation": to_dict(recipe.evaluation),
        "rollout_steps": model.energy.shape[1] - 1,
        "num_trajectories": model.num_trajectories,
        "parameters": _parameters(folder, recipe),
        "remark": few_trajectories(model.num_trajectories),
        "metrics": metrics,
        "survival": _survival(model, reference),
        "hardware": hardware(device),
        "versions": versions(),
        "commit": commit(),
    }
    write_curves(folder, recipe, store, rollout, reference, model, errors, exponents)
    facts["timings"] = _timings(folder, store) | {"score_s": time.perf_counter() - started}
    write_json(folder / "scores.json", facts)
    return folder


def _same_rollout(folder: Path, recipe: Recipe) -> Mapping[str, Any]:
    """The facts of the roll-out; refused if of other weights than the run's, or with other lags than the recipe's."""
    facts = _read(folder / "rollout" / FACTS_FILE)
    again = f"run `ergoflow predict` again for {recipe.name}, with the same settings"
    if not is_of_these_weights(folder, facts):
        raise ValueError(f"a roll-out of the run's weights was expected in {folder}, got an earlier one; {again}")
    asked = recipe.evaluation.max_lag
    lag = facts.get("evaluation", {}).get("max_lag", asked)
    if lag != asked:
        raise ValueError(f"a roll-out with evaluation.max_lag={asked} was expected in {folder}, got {lag}; {again}")
    return facts


def _short_term(
    recipe: Recipe, errors: Mapping[str, np.ndarray], departures: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """relative_l2@τ, and its variant for the fluctuations about the climatology, from errors (J, T), T from 1."""
    metrics = {}
    (count, available), unit = errors["model"].shape, time_unit(to_dict(recipe.dataset)["kind"])
    for lead in (lead for lead in recipe.evaluation.lead_steps if lead <= available):
        key, label = f"relative_l2@{lead}", f"rel. L2, τ = {lead}"
        what = (
            f"mean over {count} test trajectories of ‖pred − true‖/‖true{{}}‖ "
            f"after {lead} × {recipe.step_seconds:.3g} {unit}."
        )
        metrics[key] = _short_metric(recipe, errors, lead, label, what.format(""), None)
        metrics[f"{key} fluctuations"] = _short_metric(
            recipe, departures, lead, f"{label}, fluctuations", what.format(" − climatology"), key
        )
    return metrics


def _short_metric(
    recipe: Recipe, errors: Mapping[str, np.ndarray], lead: int, label: str, definition: str, variant_of: str | None
) -> dict[str, Any]:
    resamples = recipe.evaluation.resamples
    rows = {name: mean_interval(values[:, lead - 1], resamples=resamples) for name, values in errors.items()}
    return {
        "label": label,
        "unit": "",
        "better": "lower",
        "headline": variant_of is None,
        "variant_of": variant_of,
        "definition": definition,
        "floor": None,
        "rows": _rows(rows, None, {name: rows[name] for name in TRIVIAL}),
    }


def _long_term(recipe: Recipe, model: StatisticsResult, reference: Reference, console: Console) -> dict[str, Any]:
    with bar(console, f"score {recipe.name}", recipe.evaluation.resamples, "resamples") as advance:
        scores = bootstrap(model, reference.truth, resamples=recipe.evaluation.resamples, on_resample=advance)
    rows = {"model": scores, **reference.trivial}
    floor = reference.floor
    metrics = {}
    # A roll-out that ends with the truth may follow a transient, whose end is not its mean.
    left_out = DRIFTS if model.skip == 0 else ()
    for key in (key for key in floor if key not in left_out):
        info = CATALOGUE[key]
        cells = {name: values[key] for name, values in rows.items()}
        trivial = {name: cells[name] for name in TRIVIAL}
        metrics[key] = {
            "label": info.label,
            "unit": info.unit,
            "better": "lower",
            "headline": info.headline,
            "variant_of": info.variant_of,
            "definition": definition(key, model, reference.truth),
            "floor": _cell(floor[key]),
            "rows": _rows(cells, floor[key], trivial),
        }
    return metrics


def _exponent_metric(recipe: Recipe, exponents: Exponents) -> dict[str, Any]:
    """Error of the largest Lyapunov exponent; a frozen or constant forecast has none, so only the model is scored."""
    count = recipe.evaluation.exponent_steps
    error, floor = exponents.leading_error(), exponents.leading_floor()
    return {
        "label": "λ₁ error",
        "unit": "",
        "better": "lower",
        "headline": True,
        "variant_of": None,
        "definition": f"|λ₁(model)/λ₁(solver) − 1| over {count} steps of {recipe.step_seconds:.3g} s from "
        f"{len(exponents.truth)} states; solver λ₁ = {exponents.truth[:, 0].mean():.3f} 1/s.",
        "floor": _cell(floor),
        "rows": _rows({"model": error}, floor, {}),
    }


def _rows(rows: Mapping[str, Interval], floor: Interval | None, trivial: Mapping[str, Interval]) -> dict[str, Any]:
    cells: dict[str, Any] = {name: _cell(row) for name, row in rows.items()}
    cells["model"]["verdict"] = verdict(rows["model"], floor, trivial)
    return cells


def _cell(interval: Interval) -> dict[str, float | None]:
    """JSON has no infinity: null is a failure."""
    values = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _survival(model: StatisticsResult, reference: Reference) -> dict[str, Any]:
    return {
        "fraction": float(np.mean(model.failed_at < 0)),
        "diverged_at": [int(k) for k in model.failed_at],
        "steps": model.energy.shape[1] - 1,
        **survival_summary(model, reference.truth),
    }


def _timings(folder: Path, store: TrajectoryStore) -> dict[str, float]:
    """The seconds of each stage; of a training that has not ended, or was elsewhere, none are known."""
    data, training = _read(Path(store.folder) / "dataset.json"), _read(folder / SUMMARY_FILE)
    return {
        "simulate_s": sum(entry["seconds"] for entry in data.get("timings", [])),
        **({"train_s": training["seconds"]} if training else {}),
        "predict_s": _read(folder / "rollout" / FACTS_FILE).get("seconds", 0.0),
    }


def _parameters(folder: Path, recipe: Recipe) -> int:
    """The size of a run's model; training.json, which knows it, is not there before training is complete."""
    if isinstance(recipe.model, OwnConfig):
        return recipe.model.parameters
    known = _read(folder / SUMMARY_FILE).get("parameters")
    if known is None:
        return sum(p.numel() for p in build_step(recipe, read_facts(folder), seed=0).parameters())
    return int(known)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    data: dict[str, Any] = read_json(path, remedy="remove it, and run the verb that writes it again")
    return data

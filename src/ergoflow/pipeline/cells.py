"""Results that travel: a scored run as one JSON file, with what the report draws beside it.

    RESULTS/<recipe>/seed<N>.json   recipe, scores, training, learning curve; hardware, versions and commit of each
    RESULTS/<recipe>/seed<N>.npz    curves and thinned fields, at most a megabyte at full size

A cell needs neither data nor weights, so a table begun on one machine is continued on another, and the report is
built again from the files alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ergoflow.config import FilesDatasetConfig, Recipe, first_difference, from_dict, to_dict
from ergoflow.data.files import read_json, read_npz, write_npz_atomic
from ergoflow.data.windows import WindowSampler
from ergoflow.pipeline.runs import SUMMARY_FILE, write_json
from ergoflow.pipeline.workspace import hardware
from ergoflow.report.runs import RunView
from ergoflow.training.plan import SECONDS_PER_MINUTE

CELL_FORMAT = 1
# Pictures of fields keep at most this many points a side, attention kernels as many coordinates.
PICTURE_SIDE = 64
# Series over a long roll-out keep every so many steps, learning curves at most so many records.
SERIES_STRIDE = 5
LOG_RECORDS = 200
# The faces of a channel's box share their axes, so they are thinned alike.
BOX_STRIDE = 4
# Frames for the player are two thirds of curves.npz and stay with the run.
LEFT_OUT = ("player/",)


def cell_path(results: Path, name: str, seed: int) -> Path:
    """Where the cell of a recipe and seed lives."""
    return results / name / f"seed{seed}.json"


def list_cells(results: Path) -> list[Path]:
    """The cells below a folder, in a stable order."""
    return sorted(path for path in results.glob("*/seed*.json") if path.with_suffix(".npz").exists())


def write_cell(folder: Path, results: Path, recipe: Recipe) -> Path:
    """Write the cell of a scored run folder and return its path; `recipe` is what it was trained and scored by."""
    scores = _read(folder / "scores.json")
    path = cell_path(results, scores["name"], scores["seed"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with np.load(folder / "curves.npz") as file:
        curves = {name: thin(name, values) for name, values in file.items() if not name.startswith(LEFT_OUT)}
    write_npz_atomic(path.with_suffix(".npz"), curves, compress=True)
    # The JSON file is written last: where it is, the cell is whole.
    write_json(
        path,
        {
            "format": CELL_FORMAT,
            "recipe": to_dict(recipe),
            "scores": scores,
            "training": _read(folder / SUMMARY_FILE),
            "log": _log(folder / "log.jsonl"),
        },
    )
    return path


def read_cell(path: Path) -> RunView:
    """A cell as the report sees a run."""
    data = _read(path)
    if data.get("format") != CELL_FORMAT:
        raise ValueError(
            f"{path} must be a cell of format {CELL_FORMAT}, got {data.get('format')}; use the version that wrote it"
        )
    curves = read_npz(path.with_suffix(".npz"), remedy=f"remove {path} to make it anew")
    scores = data["scores"]
    return RunView(scores["name"], scores["seed"], data["recipe"], scores, curves, data["log"], data["training"])


def is_done(path: Path, recipe: Recipe) -> bool:
    """Whether a cell is there, both files of it, and holds this very recipe; one made with other settings is refused.

    A setting added after the cell was written counts as having its default.
    """
    if not path.exists():
        return False
    if difference := first_difference(_recipe(path), recipe):
        key, known, asked = difference
        raise ValueError(
            f"{path} was made with {key}={known}, but {key}={asked} was asked for; "
            "name another --results folder, or remove the file to make it anew"
        )
    # A copy that was cut short may have one without the other.
    return path.with_suffix(".npz").exists()


def expected_minutes(recipe: Recipe, results: Path, device: torch.device) -> float | None:
    """The minutes of a training on a device: its limit, or its samples at the speed of a known cell, if that is less.

    None if it has no limit and no cell of the recipe tells: one counts if it was trained on such a device, in one
    process, with the same settings but for those that end a training.
    """
    limit = recipe.training.max_minutes
    for path in list_cells(results):
        if path.parent.name == recipe.name and (seconds := _expected_seconds(recipe, path, device)) is not None:
            return min(seconds / SECONDS_PER_MINUTE, math.inf if limit is None else limit)
    return limit


def _expected_seconds(recipe: Recipe, path: Path, device: torch.device) -> float | None:
    """The seconds of a training without a limit of time, as a cell tells them."""
    try:
        known = _recipe(path)
    except ValueError:
        # Of another version: refused where that very cell is asked for.
        return None
    facts = _read(path)["training"]
    here = facts["hardware"]["device"] == hardware(device)["device"] and facts["processes"] == 1
    if not here or _speed_settings(known) != _speed_settings(recipe):
        return None
    if known.training == recipe.training:
        return float(facts["seconds"])
    # How many samples an epoch has is not in a recipe for data of your own; a single update has no speed.
    if isinstance(recipe.dataset, FilesDatasetConfig) or not facts["samples_per_second"]:
        return None
    return _samples(recipe) / facts["samples_per_second"]


def thin(name: str, values: np.ndarray) -> np.ndarray:
    """A curve as it travels: fields and kernels on a coarser grid, long series at every few steps.

    What a picture in float16 cannot hold is infinite: its roll-out has diverged.
    """
    if name.startswith("series/"):
        return values[..., ::SERIES_STRIDE]
    if name.startswith("box/"):
        return values[::BOX_STRIDE, ::BOX_STRIDE].astype(np.float16)
    if name.startswith(("snapshots/", "tke/", "attention/", "attention_last/")) and name != "snapshots/steps":
        stride = max(1, -(-max(values.shape[-2:]) // PICTURE_SIDE))
        with np.errstate(over="ignore"):
            return values[..., ::stride, ::stride].astype(np.float32 if name.startswith("tke/") else np.float16)
    return values


def _speed_settings(recipe: Recipe) -> tuple[object, ...]:
    """All that the speed of a training may depend on: not the evaluation, and not what ends the training."""
    training = dataclasses.replace(recipe.training, epochs=1, halving_epochs=1, max_steps=None, max_minutes=None)
    return recipe.dataset, recipe.task, recipe.model, recipe.objective, training


def _samples(recipe: Recipe) -> int:
    """The samples of a training on simulated data that no clock ends."""
    dataset, training = recipe.dataset, recipe.training
    assert not isinstance(dataset, FilesDatasetConfig)
    sampler = WindowSampler(
        dataset.train,
        dataset.frames,
        window=recipe.objective.window,
        stride=recipe.task.stride,
        batch_size=training.batch_size,
        seed=0,
    )
    return training.total_steps(sampler.batches_per_epoch) * training.batch_size


def _log(path: Path) -> list[dict[str, Any]]:
    """The learning curve, thinned; the last record always stays."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    stride = max(1, -(-len(records) // LOG_RECORDS))
    return records[::-1][::stride][::-1]


def _recipe(path: Path) -> Recipe:
    """The recipe in a cell; a setting added after the cell was written has its default."""
    try:
        recipe: Recipe = from_dict(Recipe, _read(path)["recipe"])
    except ValueError as error:
        raise ValueError(f"{path} holds another version's recipe: {error}; remove it to make it anew") from None
    return recipe


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = read_json(path, remedy="remove it to make it anew")
    return data

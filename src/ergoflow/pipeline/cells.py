"""Results that travel: a scored run as one JSON file, with what the report draws beside it.

    RESULTS/<recipe>/seed<N>.json   recipe, scores, training, learning curve; hardware, versions and commit of each
    RESULTS/<recipe>/seed<N>.npz    curves and thinned fields, at most a megabyte at full size

A cell needs neither data nor weights, so a table begun on one machine is continued on another, and the report is
built again from the files alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ergoflow.config import Recipe, from_dict, to_dict
from ergoflow.data.files import read_json, read_npz, write_npz_atomic
from ergoflow.pipeline.runs import SUMMARY_FILE, write_json
from ergoflow.report.runs import RunView

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
    """Whether a cell holds this very recipe; one made with other settings is refused.

    A setting added after the cell was written counts as having its default.
    """
    if not path.exists():
        return False
    try:
        stored, asked = to_dict(from_dict(Recipe, _read(path)["recipe"])), to_dict(recipe)
    except ValueError as error:
        raise ValueError(f"{path} holds another version's recipe: {error}; remove it to make it anew") from None
    if stored["name"] != recipe.name:
        raise ValueError(
            f"{path} must be a cell of {recipe.name}, got one of {stored['name']}; "
            "name another --results folder, or remove the file to make it anew"
        )
    for part, settings in asked.items():
        if stored[part] == settings:
            continue
        changed = [key for key in settings if stored[part].get(key) != settings[key]]
        known = {key: stored[part].get(key) for key in changed}
        raise ValueError(
            f"{path} was made with {part} {known}, but { {key: settings[key] for key in changed} } was asked for; "
            "name another --results folder, or remove the file to make it anew"
        )
    return True


def thin(name: str, values: np.ndarray) -> np.ndarray:
    """A curve as it travels: fields and kernels on a coarser grid, long series at every few steps."""
    if name.startswith("series/"):
        return values[..., ::SERIES_STRIDE]
    if name.startswith("box/"):
        return values[::BOX_STRIDE, ::BOX_STRIDE].astype(np.float16)
    if name.startswith(("snapshots/", "tke/", "attention/", "attention_last/")) and name != "snapshots/steps":
        stride = max(1, -(-max(values.shape[-2:]) // PICTURE_SIDE))
        return values[..., ::stride, ::stride].astype(np.float32 if name.startswith("tke/") else np.float16)
    return values


def _log(path: Path) -> list[dict[str, Any]]:
    """The learning curve, thinned; the last record always stays."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    stride = max(1, -(-len(records) // LOG_RECORDS))
    return records[::-1][::stride][::-1]


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = read_json(path, remedy="remove it to make it anew")
    return data

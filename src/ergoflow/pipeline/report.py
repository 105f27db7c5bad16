"""`ergoflow report`: gather every scored run below a root into one page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ergoflow.pipeline.workspace import Workspace
from ergoflow.report.html import render
from ergoflow.report.runs import RunView


def report(workspace: Workspace, *, title: str) -> Path:
    """Write the page and return its path."""
    folders = workspace.scored_runs()
    if not folders:
        raise ValueError(
            f"scored runs were expected below {workspace.root / 'runs'}, but there are none; "
            "run `ergoflow score RECIPE` first"
        )
    return render([_view(folder) for folder in folders], workspace.report, title=title)


def _view(folder: Path) -> RunView:
    scores = json.loads((folder / "scores.json").read_text())
    with np.load(folder / "curves.npz") as file:
        curves = dict(file.items())
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return RunView(
        name=scores["name"],
        seed=scores["seed"],
        recipe=json.loads((folder / "recipe.json").read_text()),
        scores=scores,
        curves=curves,
        log=[json.loads(line) for line in lines],
    )

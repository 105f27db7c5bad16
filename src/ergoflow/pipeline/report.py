"""`ergoflow report`: gather every scored run below a root into one page."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from ergoflow.data.files import read_json, read_npz, remove_leftovers, write_bytes_atomic
from ergoflow.pipeline.cells import list_cells, read_cell
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import SUMMARY_FILE, weights_digest
from ergoflow.pipeline.workspace import Workspace
from ergoflow.report.html import names_drawn, render
from ergoflow.report.runs import RunView
from ergoflow.training.checkpoint import WEIGHTS_FILE


def report(workspace: Workspace, *, title: str, console: Console, results: Path | None = None) -> Path:
    """Write the page and return its path; cells of `results` join the runs below the root.

    Where a run is there and in a cell, the run is shown: it has frames to play. A run whose scores are not those of
    its weights is not shown.
    """
    views, outdated = [], []
    for folder in workspace.scored_runs():
        view = _view(folder)
        if _is_of_its_weights(view, folder):
            views.append(view)
        else:
            outdated.append(f"{view.name} seed {view.seed}")
    if outdated:
        console.print(
            f"left out, as they were trained further since they were scored: {', '.join(outdated)}; "
            "run `ergoflow predict` and `ergoflow score` again",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    here = {(view.name, view.seed) for view in views}
    cells = [read_cell(path) for path in list_cells(results)] if results is not None else []
    views += [cell for cell in cells if (cell.name, cell.seed) not in here]
    if not views:
        where = f" or in {results}" if results is not None else ""
        raise ValueError(
            f"scored runs were expected below {workspace.root / 'runs'}{where}, but there are none; "
            "run `ergoflow score RECIPE` first"
        )
    remove_leftovers(workspace.report)
    with bar(console, "report", len(names_drawn(views)), "parts") as advance:
        return render(
            views, workspace.report, title=title, write=write_bytes_atomic, drawn=lambda name: advance(note=name)
        )


def _is_of_its_weights(view: RunView, folder: Path) -> bool:
    """Whether the scores are of the weights that are there: they are unless either says otherwise."""
    known = view.scores.get("weights")
    return known is None or not (folder / WEIGHTS_FILE).exists() or known == weights_digest(folder)


def _view(folder: Path) -> RunView:
    again = "run `ergoflow score` again"
    scores = read_json(folder / "scores.json", remedy=again)
    curves = read_npz(folder / "curves.npz", remedy=again)
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    training = folder / SUMMARY_FILE
    # The recipe of a training: it may have been scored with another evaluation.
    recipe = json.loads((folder / "recipe.json").read_text())
    return RunView(
        name=scores["name"],
        seed=scores["seed"],
        recipe=recipe | {"evaluation": scores.get("evaluation", recipe["evaluation"])},
        scores=scores,
        curves=curves,
        log=[json.loads(line) for line in lines],
        training=read_json(training, remedy=again) if training.exists() else {},
    )

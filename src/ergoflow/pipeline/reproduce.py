"""`ergoflow reproduce`: a matrix of cells (recipe × seed) from simulation to report, doing only what is missing.

A cell that is in the results folder is done; a run that was interrupted goes on from its checkpoint. The report is
made of the cells, with the frames of those that were run here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ergoflow.config import Recipe, to_dict
from ergoflow.pipeline.cells import cell_path, is_done, list_cells, write_cell
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.report import report
from ergoflow.pipeline.runs import is_trained, require_same_run
from ergoflow.pipeline.score import score
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace
from ergoflow.training.plan import SECONDS_PER_MINUTE
from ergoflow.training.trainer import TrainingDiverged

# Epochs are stretched by this factor where time or samples end a run, so that they do not end it first.
NEVER_FIRST = 1000


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every model gets: so many minutes of training, or so many samples; None leaves that to the recipe."""

    minutes: float | None = None
    samples: int | None = None

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with its training cut to the budget; schedules end with it.

        Epochs and the epochs between two halvings are stretched together, so the number of halvings stays.
        """
        if self.minutes is None and self.samples is None:
            return recipe
        training = recipe.training
        training = dataclasses.replace(
            training,
            epochs=training.epochs * NEVER_FIRST,
            halving_epochs=training.halving_epochs * NEVER_FIRST,
            max_minutes=self.minutes,
            max_steps=None if self.samples is None else max(1, -(-self.samples // training.batch_size)),
        )
        return dataclasses.replace(recipe, training=training)


def reproduce(
    recipes: Sequence[Recipe],
    workspace: Workspace,
    *,
    seeds: Sequence[int],
    results: Path,
    device: torch.device,
    console: Console,
) -> Path:
    """Run every recipe with every seed and return the page."""
    diverged = []
    for recipe in recipes:
        for seed in seeds:
            if is_done(cell_path(results, recipe.name, seed), recipe):
                continue
            simulate(recipe.dataset, workspace, device=device, console=console)
            try:
                folder = run_one(recipe, workspace, seed=seed, device=device, console=console)
            except TrainingDiverged as error:
                # The other cells do not depend on this one.
                console.print(f"[red]{recipe.name}, seed {seed}: {error}[/red]")
                diverged.append(f"{recipe.name} seed {seed}")
                continue
            write_cell(folder, results)
    page = report(workspace, title="ergoflow report", results=results)
    if diverged:
        raise ValueError(
            f"every cell was expected to train, but {', '.join(diverged)} diverged; "
            f"the other cells are in {results} and in {page}; see the advice above"
        )
    return page


def run_one(recipe: Recipe, workspace: Workspace, *, seed: int, device: torch.device, console: Console) -> Path:
    """Train, predict and score one seed of a recipe, whatever of it is missing; return the run folder."""
    folder = workspace.run(recipe.name, seed)
    if (folder / "recipe.json").exists():
        require_same_run(folder, recipe)
    if not is_trained(folder):
        train(recipe, workspace, seed=seed, device=device, console=console, resume=(folder / "recipe.json").exists())
    if not _is_rolled_out(folder, recipe):
        predict(recipe, workspace, seed=seed, device=device, console=console)
    return score(recipe, workspace, seed=seed, device=device, console=console)


def print_plan(
    recipes: Sequence[Recipe], workspace: Workspace, *, seeds: Sequence[int], results: Path, console: Console
) -> None:
    """Print each cell, what is left of it, and how long its training takes as far as that is known."""
    table = Table("cell", "seed", "to do", "training", title=f"results in {results}", title_justify="left")
    table.box, table.columns[0].no_wrap = box.SIMPLE, True
    known, total, guessed = _known_minutes(results), 0.0, True
    for recipe in recipes:
        for seed in seeds:
            left = _left_to_do(recipe, workspace, seed, results)
            minutes = _minutes(recipe, known) if "train" in left else 0.0
            total, guessed = total + (minutes or 0.0), guessed and minutes is not None
            shown = "unknown" if minutes is None else f"{minutes:.1f} min" if minutes else ""
            table.add_row(recipe.name, str(seed), ", ".join(left) or "done", shown)
    console.print(table)
    bound = "" if guessed else "at least "
    console.print(f"training: {bound}{total:.1f} min in all; simulating, rolling out and scoring come on top")


def _left_to_do(recipe: Recipe, workspace: Workspace, seed: int, results: Path) -> list[str]:
    if is_done(cell_path(results, recipe.name, seed), recipe):
        return []
    folder = workspace.run(recipe.name, seed)
    simulated = (workspace.dataset(recipe.dataset.name) / "stats.yaml").exists()
    return [
        *([] if simulated else ["simulate"]),
        *([] if is_trained(folder) else ["train"]),
        *([] if _is_rolled_out(folder, recipe) else ["predict"]),
        "score",
    ]


def _minutes(recipe: Recipe, known: dict[str, float]) -> float | None:
    """Minutes that the training of a recipe takes: its limit, or what an earlier cell of it took."""
    if recipe.training.max_minutes is not None:
        return recipe.training.max_minutes
    return known.get(recipe.name)


def _known_minutes(results: Path) -> dict[str, float]:
    cells = [json.loads(path.read_text()) for path in list_cells(results)]
    return {cell["scores"]["name"]: cell["training"]["seconds"] / SECONDS_PER_MINUTE for cell in cells}


def _is_rolled_out(folder: Path, recipe: Recipe) -> bool:
    path = folder / "rollout" / "rollout.json"
    return path.exists() and json.loads(path.read_text())["evaluation"] == to_dict(recipe.evaluation)

"""`ergoflow reproduce`: a matrix of cells (recipe × seed) from simulation to report, doing only what is missing.

A cell that is in the results folder is done; a run that was interrupted goes on from its checkpoint. The report is
made of the cells, with the frames of those that were run here. Besides cells there are parts: the cost of every model
on this hardware, Lorenz-63, the shipped models over ten thousand steps, and the figures, which come last because they
are drawn from the results.

The same command may run several times below one root, once for each GPU or twice on one: each process makes cells
that no other is making (`ergoflow.pipeline.sharing`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ergoflow.config import Recipe
from ergoflow.data.files import read_json, remove_leftovers
from ergoflow.pipeline.cells import cell_path, expected_minutes, is_done, list_cells, write_cell
from ergoflow.pipeline.cost import cost_path, expected_seconds, is_measured, measure_cost
from ergoflow.pipeline.document import gather
from ergoflow.pipeline.long import long_to_do, measure_long
from ergoflow.pipeline.lorenz import EXPECTED_SECONDS as LORENZ_SECONDS
from ergoflow.pipeline.lorenz import lorenz_path, measure_lorenz
from ergoflow.pipeline.pictures import EXPECTED_SECONDS_EACH, draw_figures, figures_to_draw
from ergoflow.pipeline.predict import require_plane
from ergoflow.pipeline.report import report
from ergoflow.pipeline.runs import SUMMARY_FILE, is_trained
from ergoflow.pipeline.shards import is_whole
from ergoflow.pipeline.sharing import alone, claim, give_memory_back, give_up, given_up, turn
from ergoflow.pipeline.simulate import require_providable
from ergoflow.pipeline.stages import is_rolled_out, is_scored, provide_once, require_own_run, run_one
from ergoflow.pipeline.workspace import Workspace
from ergoflow.training.plan import SECONDS_PER_MINUTE
from ergoflow.training.trainer import TrainingDiverged

CPU = torch.device("cpu")
# Epochs are stretched by this factor where time or samples end a run, so that they do not end it first.
NEVER_FIRST = 1000
# What processes claim to draw.
RESULTS = "results"
# What loading, rolling out and scoring take besides training, until a cell has shown it.
EXPECTED_EXTRA_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every model gets: so many minutes of training, or so many samples; None leaves that to the recipe.

    `by_dataset` has other minutes for the models of some data sets: equal within a table is what matters.
    """

    minutes: float | None = None
    samples: int | None = None
    by_dataset: Mapping[str, float] = field(default_factory=dict)

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with its training cut to the budget; schedules end with it.

        Epochs and the epochs between two halvings are stretched together, so the number of halvings stays.
        """
        minutes = self.by_dataset.get(recipe.dataset.name, self.minutes)
        if minutes is None and self.samples is None:
            return recipe
        training = recipe.training
        training = dataclasses.replace(
            training,
            epochs=training.epochs * NEVER_FIRST,
            halving_epochs=training.halving_epochs * NEVER_FIRST,
            max_minutes=minutes,
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
    parts: Sequence[str] = (),
    within: float | None = None,
) -> Path:
    """Run every recipe with every seed, make the `parts` (of `recipes.PARTS`), and return the page.

    What is there with other settings is refused before anything is made. No cell is begun that would end more than
    `within` minutes from now, as far as that is known. Without any cell there is no page, and the results folder is
    returned.
    """
    since = time.time()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ValueError(
            f"reproduce makes each cell in one process, got {processes} of torchrun; start it once for each GPU, "
            "with CUDA_VISIBLE_DEVICES=0, =1, ..: they share the cells"
        )
    deadline = math.inf if within is None else time.monotonic() + within * SECONDS_PER_MINUTE
    results.mkdir(parents=True, exist_ok=True)
    remove_leftovers(results)
    for recipe, seed in itertools.product(recipes, seeds):
        if not is_done(cell_path(results, recipe.name, seed), recipe):
            require_own_run(workspace.run(recipe.name, seed), recipe)
            require_plane(recipe.dataset.grid)
            require_providable(recipe.dataset, workspace.dataset(recipe.dataset.name))
    for part in parts:
        if part != "figures":
            _measure(part, workspace, results, device=device, console=console)
    failed = _run_cells(
        recipes, workspace, seeds=seeds, results=results, device=device, console=console, since=since, deadline=deadline
    )
    # Whoever comes last draws all there is.
    with alone(workspace, RESULTS, console, waiting="another process draws"):
        if "figures" in parts:
            draw_figures(gather(results), results, console=console)
        shown = bool(list_cells(results) or workspace.scored_runs())
        page = report(workspace, title="ergoflow report", console=console, results=results) if shown else results
    if failed:
        others = f"the other cells are in {results} and in {page}; " if shown else ""
        raise ValueError(
            f"every cell was expected to end, but {', '.join(failed)} did not; {others}see the advice above"
        )
    return page


def _measure(part: str, workspace: Workspace, results: Path, *, device: torch.device, console: Console) -> None:
    """Measure what is missing of a part unless another process does."""
    with claim(workspace, part) as mine:
        if not mine:
            console.print(f"left to another process: {part}")
        elif part == "cost":
            with turn(workspace, device, console):
                measure_cost(results, device=device, console=console)
        elif part == "lorenz":
            measure_lorenz(results, console=console)
        elif part == "long":
            measure_long(results, workspace, device=device, console=console)


def _run_cells(
    recipes: Sequence[Recipe],
    workspace: Workspace,
    *,
    seeds: Sequence[int],
    results: Path,
    device: torch.device,
    console: Console,
    since: float,
    deadline: float,
) -> list[str]:
    """Make the cells that are missing and end before the deadline; return those that failed.

    One that has diverged in another process `since` this one began is not tried again. Another process may be killed:
    its cells are looked at once more after all others.
    """
    failed, postponed, elsewhere = list[str](), list[str](), list[str]()
    again: list[tuple[Recipe, int]] = []
    # Seconds of a training of which nothing is known, and of the rest of a cell.
    usual, extra = 0.0, EXPECTED_EXTRA_SECONDS
    for recipe, seed in itertools.chain(itertools.product(recipes, seeds), again):
        cell, label = cell_path(results, recipe.name, seed), f"{recipe.name} seed {seed}"
        if is_done(cell, recipe):
            continue
        seen = (recipe, seed) in again
        minutes = _training_minutes(recipe, workspace, seed, results, device)
        latest = deadline - extra - (usual if minutes is None else minutes * SECONDS_PER_MINUTE)
        if time.monotonic() > latest:
            (elsewhere if seen else postponed).append(label)
            continue
        with claim(workspace, _cell_name(recipe, seed)) as mine:
            if not mine:
                if seen:
                    elsewhere.append(label)
                else:
                    again.append((recipe, seed))
                continue
            # Another process may have made it since.
            if is_done(cell, recipe):
                continue
            untouched = not (workspace.run(recipe.name, seed) / "recipe.json").exists()
            try:
                folder, seconds = _run_in_time(
                    recipe, workspace, seed=seed, device=device, console=console, since=since, latest=latest
                )
            except _TooLate:
                postponed.append(label)
                continue
            except (TrainingDiverged, torch.OutOfMemoryError, ValueError) as error:
                # The other cells do not depend on this one.
                console.print(f"{label}: {error}", style="red", markup=False, soft_wrap=True)
                failed.append(label)
            else:
                write_cell(folder, results, recipe)
                # The next one takes as long as this one did, if that was the whole of it.
                if untouched:
                    usual = read_json(folder / SUMMARY_FILE, remedy="train it again")["seconds"]
                    extra = seconds - usual
                continue
            # What the error held is gone only here.
            give_memory_back(device)
    if postponed:
        console.print(f"no time left for {', '.join(postponed)}: the same command goes on with them")
    if elsewhere:
        console.print(f"left to another process: {', '.join(elsewhere)}")
    return failed


class _TooLate(Exception):  # noqa: N818
    """The turn on the device came too late for a cell to end in time."""


def _run_in_time(
    recipe: Recipe,
    workspace: Workspace,
    *,
    seed: int,
    device: torch.device,
    console: Console,
    since: float,
    latest: float,
) -> tuple[Path, float]:
    """The folder of a finished run, and its seconds from its turn to its scores; _TooLate if that is after `latest`.

    Other processes learn that a training has diverged. Memory may be enough where they are.
    """
    name = _cell_name(recipe, seed)
    if reason := given_up(workspace, name, since=since):
        raise TrainingDiverged(reason)
    provide_once(recipe.dataset, workspace, device=device, console=console)
    begun = time.monotonic()

    def on_turn() -> None:
        nonlocal begun
        begun = time.monotonic()
        if begun > latest:
            raise _TooLate

    try:
        folder = run_one(recipe, workspace, seed=seed, device=device, console=console, on_turn=on_turn)
    except TrainingDiverged as error:
        give_up(workspace, name, str(error))
        raise
    return folder, time.monotonic() - begun


def _cell_name(recipe: Recipe, seed: int) -> str:
    """By which processes know a cell."""
    return f"{recipe.name}-seed{seed}"


def print_plan(
    recipes: Sequence[Recipe],
    workspace: Workspace,
    *,
    seeds: Sequence[int],
    results: Path,
    console: Console,
    parts: Sequence[str] = (),
    device: torch.device = CPU,
) -> None:
    """Print each cell and part, what is left of it, and how long its training takes as far as that is known."""
    table = Table("cell", "seed", "to do", "time", title=f"results in {results}", title_justify="left")
    table.box, table.columns[0].no_wrap = box.SIMPLE, True
    total, guessed = 0.0, True
    for recipe in recipes:
        for seed in seeds:
            left = _left_to_do(recipe, workspace, seed, results)
            minutes = _training_minutes(recipe, workspace, seed, results, device) if left else 0.0
            total, guessed = total + (minutes or 0.0), guessed and minutes is not None
            table.add_row(recipe.name, str(seed), ", ".join(left) or "done", _shown(minutes))
    further, foreseen = 0.0, True
    for part in parts:
        left_of_part, seconds = _part_to_do(part, results, device, bool(total or not guessed))
        minutes = None if seconds is None else seconds / SECONDS_PER_MINUTE
        further, foreseen = further + (minutes or 0.0), foreseen and minutes is not None
        table.add_row(part, "", left_of_part, _shown(minutes))
    console.print(table)
    if recipes:
        console.print(f"training: {_in_all(total, guessed)}; simulating, rolling out and scoring come on top")
    if parts:
        console.print(f"{', '.join(parts)}: {_in_all(further, foreseen)}")


def _shown(minutes: float | None) -> str:
    return "unknown" if minutes is None else f"{minutes:.1f} min" if minutes else ""


def _in_all(minutes: float, known: bool) -> str:
    """A sum of minutes in words; `known` says whether it has all its terms."""
    return f"{'' if known else 'at least '}{minutes:.1f} min in all" if minutes or known else "unknown time"


def _part_to_do(part: str, results: Path, device: torch.device, cells_change: bool) -> tuple[str, float | None]:
    """What is left of a part, in words, and how many seconds that takes, as far as that is known."""
    if part == "cost":
        path = cost_path(results, device)
        return ("done", 0.0) if is_measured(path) else (f"measure into {path.name}", expected_seconds(results, device))
    if part == "lorenz":
        return ("done", 0.0) if lorenz_path(results).exists() else ("measure", LORENZ_SECONDS)
    if part == "long":
        left = long_to_do(results)
        return (f"roll out {', '.join(left)}", None) if left else ("done", 0.0)
    count = len(figures_to_draw(gather(results), results)) if results.is_dir() else 0
    drawn = [f"draw {count}"] if count else []
    later = [] if lorenz_path(results).exists() else ["Lorenz-63"]
    later += ["those of the cells above"] if cells_change else []
    return ", then ".join([*drawn, *later]) or "done", EXPECTED_SECONDS_EACH * (count + len(later))


def _left_to_do(recipe: Recipe, workspace: Workspace, seed: int, results: Path) -> list[str]:
    if is_done(cell_path(results, recipe.name, seed), recipe):
        return []
    folder = workspace.run(recipe.name, seed)
    left = [
        *([] if is_whole(recipe.dataset, workspace.dataset(recipe.dataset.name)) else ["simulate"]),
        *([] if is_trained(folder) else ["train"]),
        *([] if is_rolled_out(folder, recipe) else ["predict"]),
        *([] if is_rolled_out(folder, recipe) and is_scored(folder) else ["score"]),
    ]
    return left or ["gather"]


def _training_minutes(
    recipe: Recipe, workspace: Workspace, seed: int, results: Path, device: torch.device
) -> float | None:
    """The minutes of training that a cell still takes, as if from its start; None if that is unknown."""
    return 0.0 if is_trained(workspace.run(recipe.name, seed)) else expected_minutes(recipe, results, device)

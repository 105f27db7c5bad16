"""`ergoflow recipes`: the catalogue as three tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ergoflow.config import DatasetConfig, Recipe, to_dict
from ergoflow.pipeline.shards import trajectory_bytes
from ergoflow.recipes import PARTS, catalogue, collections, datasets
from ergoflow.report.units import time_unit


def print_catalogue(console: Console) -> None:
    """Print data sets, recipes by task, and groups of recipes."""
    sets = Table("name", "grid", "frames", "every", "splits", "size", title="data sets: ergoflow simulate NAME")
    for d in datasets().values():
        splits, grid = f"{d.train}/{d.valid}/{d.test}", "×".join(map(str, d.grid))
        size = f"{1e-6 * (d.train + d.valid + d.test) * trajectory_bytes(d):,.0f} MB"
        sets.add_row(d.name, grid, str(d.frames), _time(d, d.frame_seconds), splits, size)
    runs = Table("task", "step", "models", title="recipes TASK-MODEL: ergoflow train NAME (settings: recipes NAME)")
    for task, members in _by_task().items():
        models = [recipe.name.removeprefix(f"{task}-") for recipe in members]
        shown = [f"{m}\\[-common]" if f"{m}-common" in models else m for m in models if not m.endswith("-common")]
        runs.add_row(task, _time(members[0].dataset, members[0].step_seconds), " ".join(shown))
    sets.columns[3].no_wrap = True
    groups = Table("name", "recipes", title="groups: ergoflow reproduce NAME")
    for group, names in collections().items():
        groups.add_row(group, f"{len(names)}: {names[0]} … {names[-1]}")
    groups.add_row(", ".join(PARTS), "no recipes: costs, Lorenz-63, long roll-outs, figures")
    for table in (sets, runs, groups):
        table.box, table.title_justify, table.columns[0].no_wrap = box.SIMPLE, "left", True
        console.print(table)


def _time(dataset: DatasetConfig, value: float) -> str:
    return f"{value:.3g} {time_unit(to_dict(dataset)['kind'])}"


def _by_task() -> dict[str, list[Recipe]]:
    """The catalogue by what stands before the model in a name."""
    tasks: dict[str, list[Recipe]] = {}
    for recipe in catalogue().values():
        ending = "-coarse" if recipe.task.stride > 1 else ""
        tasks.setdefault(recipe.dataset.name + ending, []).append(recipe)
    return tasks

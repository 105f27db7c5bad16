"""`ergoflow recipes`: the catalogue as three tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ergoflow.config import Recipe
from ergoflow.pipeline.shards import trajectory_bytes
from ergoflow.recipes import PARTS, catalogue, collections, datasets


def print_catalogue(console: Console) -> None:
    """Print data sets, recipes by task, and groups of recipes."""
    sets = Table("name", "grid", "frames", "every", "trajectories", "size", title="data sets: ergoflow simulate NAME")
    for d in datasets().values():
        splits, grid = f"{d.train}/{d.valid}/{d.test}", "×".join(map(str, d.grid))
        size = f"{1e-6 * (d.train + d.valid + d.test) * trajectory_bytes(d):,.0f} MB"
        sets.add_row(d.name, grid, str(d.frames), f"{d.frame_seconds:.3g} s", splits, size)
    runs = Table("task", "step", "models", title="recipes TASK-MODEL: ergoflow train NAME (settings: recipes NAME)")
    for task, members in _by_task().items():
        models = [recipe.name.removeprefix(f"{task}-") for recipe in members]
        shown = [f"{m}\\[-common]" if f"{m}-common" in models else m for m in models if not m.endswith("-common")]
        runs.add_row(task, f"{members[0].step_seconds:.3g} s", " ".join(shown))
    groups = Table("name", "recipes", title="groups: ergoflow reproduce NAME")
    for group, names in collections().items():
        groups.add_row(group, f"{len(names)}: {names[0]} … {names[-1]}")
    groups.add_row(", ".join(PARTS), "no recipes: costs, Lorenz-63, long roll-outs, figures")
    for table in (sets, runs, groups):
        table.box, table.title_justify, table.columns[0].no_wrap = box.SIMPLE, "left", True
        console.print(table)


def _by_task() -> dict[str, list[Recipe]]:
    """The catalogue by what stands before the model in a name."""
    tasks: dict[str, list[Recipe]] = {}
    for recipe in catalogue().values():
        ending = "-coarse" if recipe.task.stride > 1 else ""
        tasks.setdefault(recipe.dataset.name + ending, []).append(recipe)
    return tasks

"""The catalogue: every data set, experiment and group of experiments that has a name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ergoflow.config import DatasetConfig, Recipe, load_recipe, override
from ergoflow.models.a3m import A3MConfig
from ergoflow.recipes.datasets import datasets
from ergoflow.recipes.experiments import SIGMAS, experiments, full_size_models
from ergoflow.recipes.own import own_recipe
from ergoflow.recipes.small import small_experiments, small_models

__all__ = [
    "PARTS",
    "catalogue",
    "collections",
    "datasets",
    "find_dataset",
    "find_parts",
    "find_recipe",
    "find_recipes",
    "full_size_models",
    "own_recipe",
]

#: What `ergoflow reproduce` makes besides cells, in this order.
PARTS = ("cost", "lorenz", "long", "figures")
# The strong baseline that the paper left out, and our own model.
OURS = ("convnext", "ergoformer")
# The rows of the paper's main tables, and these; a plane of a channel has futures to draw from.
MAIN_ROWS = ("mno", "uno", "mwt", "factformer", "a3m", "a3m-common", *OURS)
CHANNEL_ROWS = (*MAIN_ROWS, "ergoformer-drawn")


def catalogue() -> dict[str, Recipe]:
    """Recipes by name."""
    known = datasets()
    return {recipe.name: recipe for recipe in [*small_experiments(known), *experiments(known)]}


def collections() -> dict[str, tuple[str, ...]]:
    """Groups of recipes that `ergoflow reproduce` knows by one name.

    The trivial forecasts are in none: every score holds them.
    """
    variants = ("a3m", *(f"a3m-sigma{sigma}" for sigma in SIGMAS))
    paper = {
        "table1": tuple(f"kf256-coarse-{row}" for row in MAIN_ROWS),
        "table1-transient": tuple(f"kf256-transient-{row}" for row in ("a3m", "factformer", "convnext")),
        "table2": tuple(f"tcf192-{row}" for row in CHANNEL_ROWS),
        "table3": tuple(f"kf128-{row}" for row in ("a3m-base", "a3m-free", "a3m", "a3m-exact", *OURS)),
        "table4": tuple(f"kf128-{row}" for row in variants),
        "seeds": tuple(f"kf128-coarse-{row}" for row in ("a3m", "factformer", "convnext", "ergoformer")),
    }
    return {
        "mini": tuple(f"{flow}-{model}" for flow in ("kf64", "tcf32") for model in small_models()),
        **paper,
        # Where the budget does not reach for 192 cells.
        "table2-tcf96": tuple(f"tcf96-{row}" for row in CHANNEL_ROWS),
        "all": tuple(dict.fromkeys(name for members in paper.values() for name in members)),
    }


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`, or stored in the file or run folder `name`."""
    known = catalogue()
    if name in known:
        return known[name]
    if _is_path(name):
        path = Path(name) / "recipe.json" if Path(name).is_dir() else Path(name)
        if not path.is_file():
            raise ValueError(
                f"a recipe file was expected at {path}, but there is none; check the path or run `ergoflow recipes`"
            )
        return load_recipe(path)
    if name in datasets():
        members = [recipe.name for recipe in known.values() if recipe.dataset.name == name]
        raise ValueError(f"a recipe is needed, got the data set {name}; choose one on it, such as {members[0]}")
    raise ValueError(f"unknown recipe {name!r}; {_hint(name, list(known))}")


def find_recipes(names: Sequence[str]) -> list[Recipe]:
    """The recipes of a list of names, each once; a collection stands for its members, a part of PARTS for none."""
    groups, known = collections(), catalogue()
    for name in names:
        if not (name in PARTS or name in groups or name in known or _is_path(name)):
            raise ValueError(f"unknown recipe or group {name!r}; {_hint(name, [*PARTS, *groups, *known])}")
    members = [member for name in names if name not in PARTS for member in groups.get(name, (name,))]
    return [find_recipe(name) for name in dict.fromkeys(members)]


def find_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Which of PARTS a list of names asks for: `all` is all of them, and the figures show Lorenz-63."""
    asked = {*names, *(PARTS if "all" in names else ()), *(("lorenz",) if "figures" in names else ())}
    return tuple(part for part in PARTS if part in asked)


def find_dataset(name: str, assignments: Sequence[str]) -> DatasetConfig:
    """The data set called `name` or used by the recipe `name`, with `dataset.…` assignments applied."""
    known = datasets()
    trimmed = name.removesuffix("-coarse")
    if trimmed in known:
        carrier = Recipe(name=name, dataset=known[trimmed], model=A3MConfig())
    elif _is_path(name) or name in catalogue():
        carrier = find_recipe(name)
    else:
        raise ValueError(f"unknown data set {name!r}; {_hint(name, list(known))}")
    return override(carrier, assignments).dataset


def _is_path(name: str) -> bool:
    """Whether a name is that of a recipe file or a run folder."""
    return name.endswith(".json") or "/" in name or name in (".", "..")


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else "see `ergoflow recipes`"

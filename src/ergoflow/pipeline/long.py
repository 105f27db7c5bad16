"""`ergoflow reproduce long`: shipped models over ten thousand steps, with their largest Lyapunov exponent.

    RESULTS/long/<recipe>-long/seed<N>.{json,npz}   cells as any other (`ergoflow.pipeline.cells`)

No model is trained: the shipped weights are judged, so anybody can look at the same numbers. A plane of a channel is
not a whole state: it has no exponents, and its models are judged in the tables alone.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.config import EvaluationConfig, KolmogorovDatasetConfig, Recipe, load_recipe
from ergoflow.pipeline.cells import cell_path, is_done, write_cell
from ergoflow.pipeline.pretrained import install, pretrained_models
from ergoflow.pipeline.stages import provide_once, run_one
from ergoflow.pipeline.workspace import Workspace

# In tf32: on a GPU in half the time, and a rounding far below what training leaves.
EVALUATION = EvaluationConfig(steps=10_000, keep_every=500, precision="tf32", exponents=1)


def long_folder(results: Path) -> Path:
    """Where the cells of this kind live: beside those of the tables, in which they are no rows."""
    return results / "long"


def long_recipe(source: Path) -> Recipe:
    """The recipe of a shipped model with the long evaluation, under a name that no training run has."""
    recipe = load_recipe(source / "recipe.json")
    return dataclasses.replace(recipe, name=f"{recipe.name}-long", evaluation=EVALUATION)


def long_models() -> dict[str, Path]:
    """Folders of the shipped models that are judged here, those of whole states, by the name of their recipe."""
    return {
        name: source
        for name, source in pretrained_models().items()
        if isinstance(load_recipe(source / "recipe.json").dataset, KolmogorovDatasetConfig)
    }


def long_to_do(results: Path) -> list[str]:
    """Names of the models whose cell is missing."""
    return [name for name, source in long_models().items() if not is_done(*_cell(results, source))]


def measure_long(results: Path, workspace: Workspace, *, device: torch.device, console: Console) -> None:
    """Make the cells that are missing."""
    for name in long_to_do(results):
        source = long_models()[name]
        recipe = long_recipe(source)
        provide_once(recipe.dataset, workspace, device=device, console=console)
        install(source, workspace, seed=_seed(source), recipe=recipe)
        folder = run_one(recipe, workspace, seed=_seed(source), device=device, console=console)
        write_cell(folder, long_folder(results), recipe)


def _cell(results: Path, source: Path) -> tuple[Path, Recipe]:
    recipe = long_recipe(source)
    return cell_path(long_folder(results), recipe.name, _seed(source)), recipe


def _seed(source: Path) -> int:
    return int(json.loads((source / "scores.json").read_text())["seed"])

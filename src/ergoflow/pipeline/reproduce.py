"""`ergoflow reproduce`: recipes from simulation to report, doing only what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.config import Recipe, to_dict
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.report import report
from ergoflow.pipeline.runs import is_trained, require_same_run
from ergoflow.pipeline.score import score
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace


def reproduce(
    recipes: Sequence[Recipe],
    workspace: Workspace,
    *,
    seeds: Sequence[int],
    device: torch.device,
    console: Console,
) -> Path:
    """Run every recipe with every seed and return the page."""
    for recipe in recipes:
        simulate(recipe.dataset, workspace, device=device, console=console)
        for seed in seeds:
            run_one(recipe, workspace, seed=seed, device=device, console=console)
    return report(workspace, title="ergoflow report")


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


def _is_rolled_out(folder: Path, recipe: Recipe) -> bool:
    path = folder / "rollout" / "rollout.json"
    return path.exists() and json.loads(path.read_text())["evaluation"] == to_dict(recipe.evaluation)

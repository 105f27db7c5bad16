"""`ergoflow demo`: the whole tool on a small flow, or a shipped model on its own; ends in a verdict from the scores."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.config import EvaluationConfig, Recipe, load_recipe
from ergoflow.pipeline.check import run_check
from ergoflow.pipeline.demo_data import demo_dataset, make_demo_data
from ergoflow.pipeline.pretrained import best_small_model, find_model, install
from ergoflow.pipeline.report import report
from ergoflow.pipeline.simulate import provide
from ergoflow.pipeline.stages import run_one
from ergoflow.pipeline.summary import print_summary, read_scores
from ergoflow.pipeline.workspace import Workspace

LEAD = "relative_l2@5"
# How a shipped model is judged: 1000 steps, in float32 (bfloat16 is slow on most CPUs), no exponents.
EVALUATION = EvaluationConfig()


def demo(recipe: Recipe, workspace: Workspace, *, seed: int, device: torch.device, console: Console) -> bool:
    """Run everything that is missing; True if the model beats persistence at τ = 5 and survives the roll-out.

    The best small one of the shipped models stands beside it on the page, if it is of the same data.
    """
    started = time.perf_counter()
    provide(recipe.dataset, workspace, device=device, console=console)
    folder = run_one(recipe, workspace, seed=seed, device=device, console=console)
    source = best_small_model()
    beside = None
    if demo_dataset(load_recipe(source / "recipe.json").dataset) == recipe.dataset:
        beside = _run_shipped(source, workspace, device=device, console=console)
    return _conclude(folder, workspace, started, console, beside=beside)


def demo_pretrained(name: str | None, workspace: Workspace, *, device: torch.device, console: Console) -> bool:
    """Check a shipped model, roll it out on a small test set made here, and report; True as for `demo`.

    `name` is that of a model in the package, a folder that `export` wrote or a hub id; None is the best small one.
    """
    started = time.perf_counter()
    source = best_small_model() if name is None else find_model(name)
    check = run_check(source)
    check.require(source)
    console.print(
        f"{name or source.name}: the shipped weights reproduce their published score, relative L2 {check.error:.4f} "
        f"at τ = {check.lead} on {len(check.measured)} stored windows",
        highlight=False,
    )
    folder = _run_shipped(source, workspace, device=device, console=console)
    return _conclude(folder, workspace, started, console)


def demo_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a shipped model with data and evaluation for two cores, under a name that no training run has."""
    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}-pretrained",
        dataset=demo_dataset(recipe.dataset),
        evaluation=EVALUATION,
    )


def _run_shipped(source: Path, workspace: Workspace, *, device: torch.device, console: Console) -> Path:
    """Roll a shipped model out on its demo data and score it; return the run folder."""
    shipped = load_recipe(source / "recipe.json")
    recipe = demo_recipe(shipped)
    make_demo_data(demo_dataset(shipped.dataset), workspace, device=device, console=console)
    seed = json.loads((source / "scores.json").read_text())["seed"]
    install(source, workspace, seed=seed, recipe=recipe)
    return run_one(recipe, workspace, seed=seed, device=device, console=console)


def _conclude(
    folder: Path, workspace: Workspace, started: float, console: Console, *, beside: Path | None = None
) -> bool:
    """Write the page, print summary and verdict."""
    page = report(workspace, title="ergoflow demo", console=console)
    console.print()
    print_summary(folder, console)
    scores = read_scores(folder)
    rows, survival = scores["metrics"][LEAD]["rows"], scores["survival"]
    model, persistence = rows["model"]["value"], rows["persistence"]["value"]
    beats = model is not None and model < persistence
    survives = survival["fraction"] == 1.0
    verdict = "[green]passed[/green]" if beats and survives else "[red]failed[/red]"
    console.print(
        f"demo {verdict} in {time.perf_counter() - started:.0f} s: the model "
        f"{'beats' if beats else 'does not beat'} persistence at τ = 5 and "
        f"{'survives' if survives else 'does not survive'} {survival['steps']} steps",
        soft_wrap=True,
    )
    if beside is not None:
        other = read_scores(beside)
        error = other["metrics"][LEAD]["rows"]["model"]["value"]
        scored = "fails" if error is None else f"scores {error:.3g}"
        console.print(f"beside it on the page: {other['name']}, which {scored} at τ = 5", highlight=False)
    console.print(f"report: {page.resolve()}", soft_wrap=True)
    return beats and survives

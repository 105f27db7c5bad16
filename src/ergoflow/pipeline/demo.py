"""`ergoflow demo`: the whole tool on a small flow, ending in a verdict from its own scores."""

from __future__ import annotations

import time

import torch
from rich.console import Console

from ergoflow.config import Recipe
from ergoflow.pipeline.report import report
from ergoflow.pipeline.reproduce import run_one
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.summary import print_summary, read_scores
from ergoflow.pipeline.workspace import Workspace

LEAD = "relative_l2@5"


def demo(recipe: Recipe, workspace: Workspace, *, seed: int, device: torch.device, console: Console) -> bool:
    """Run everything that is missing; True if the model beats persistence at τ = 5 and survives the roll-out."""
    started = time.perf_counter()
    simulate(recipe.dataset, workspace, device=device, console=console)
    folder = run_one(recipe, workspace, seed=seed, device=device, console=console)
    page = report(workspace, title="ergoflow demo")
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
        f"{'survives' if survives else 'does not survive'} {survival['steps']} steps"
    )
    console.print(f"report: {page.resolve()}", soft_wrap=True)
    return beats and survives

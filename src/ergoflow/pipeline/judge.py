"""Any step, rolled out and scored as a trained run is: the page then shows it beside the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from ergoflow.config import Recipe, TaskConfig, load_recipe
from ergoflow.data.store import TrajectoryStore
from ergoflow.models.own import OwnConfig
from ergoflow.numerics.trajectory import Step
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.runs import RunFacts, normalizer_of, open_store, write_run
from ergoflow.pipeline.score import score
from ergoflow.pipeline.workspace import Workspace
from ergoflow.training.objectives import ObjectiveConfig
from ergoflow.training.trainer import TrainingConfig


def judge(
    step: Step, recipe: Recipe, workspace: Workspace, *, name: str, seed: int, device: torch.device, console: Console
) -> Path:
    """Roll a step out and score it under a recipe's data, stride and evaluation; returns the run folder.

    An earlier judgement of the same name is replaced, a trained run is not.
    """
    if recipe.evaluation.exponents:
        raise ValueError(
            "Lyapunov exponents are measured of trained models, got a step of your own; set evaluation.exponents=0, "
            "or call ergoflow.metrics.lyapunov_exponents"
        )
    store, folder = open_store(recipe, workspace), workspace.run(name, seed)
    if (folder / "recipe.json").exists() and not isinstance(load_recipe(folder / "recipe.json").model, OwnConfig):
        raise ValueError(f"{folder} holds a trained run, which is not replaced; choose another name or seed")
    if isinstance(step, nn.Module):
        step.eval()
        places = {p.device.type for p in step.parameters()} - {device.type}
        if places:
            raise ValueError(
                f"a module on {device} was expected, got one on {', '.join(places)}; give device= or move it"
            )
    _require_state_to_state(step, store, device)
    size = sum(p.numel() for p in step.parameters()) if isinstance(step, nn.Module) else 0
    own = Recipe(
        name=name,
        dataset=recipe.dataset,
        task=TaskConfig(stride=recipe.task.stride),
        model=OwnConfig(parameters=size),
        objective=ObjectiveConfig(unitary_weight=0.0),
        training=TrainingConfig(),
        evaluation=dataclasses.replace(recipe.evaluation, precision="fp32"),
    )
    write_run(folder, own, RunFacts.of(store.info, normalizer_of(store, stride=own.task.stride), own.step_seconds))
    # Not to be taken for those of this step if it does not come to its end.
    (folder / "scores.json").unlink(missing_ok=True)
    predict(own, workspace, seed=seed, device=device, console=console, step=step)
    return score(own, workspace, seed=seed, device=device, console=console)


@torch.inference_mode()
def _require_state_to_state(step: Step, store: TrajectoryStore, device: torch.device) -> None:
    """Refuse what does not make a state (B, C, *grid) of a state."""
    state = torch.from_numpy(store.read("test", 0, 0, 1, 1)).to(device)
    made = step(state)
    if not isinstance(made, torch.Tensor) or made.shape != state.shape:
        got = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise ValueError(
            f"a step must make a state {tuple(state.shape)}, (B, C, *grid), of one, got {got}; wrap what you have"
        )

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
from ergoflow.pipeline.predict import predict, require_plane
from ergoflow.pipeline.runs import RunFacts, normalizer_of, open_store, write_run
from ergoflow.pipeline.score import score
from ergoflow.pipeline.sharing import claim_run
from ergoflow.pipeline.words import LARGEST_SEED
from ergoflow.pipeline.workspace import Workspace
from ergoflow.training.objectives import ObjectiveConfig
from ergoflow.training.trainer import TrainingConfig


def judge(
    step: Step,
    recipe: Recipe,
    workspace: Workspace,
    *,
    name: str,
    seed: int,
    parameters: int | None = None,
    device: torch.device,
    console: Console,
) -> Path:
    """Roll a step out and score it under a recipe's data, stride and evaluation; returns the run folder.

    An earlier judgement of the same name is replaced, a trained run is not. `parameters` is the step's size (None: that
    of a module, and 0 for anything else).
    """
    if recipe.evaluation.exponents:
        raise ValueError(
            "Lyapunov exponents are measured of trained models, got a step of your own and a recipe with some; "
            "set evaluation.exponents to 0 in it, or call ergoflow.metrics.lyapunov_exponents"
        )
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"a seed must lie in 0 .. {LARGEST_SEED}, got {seed}; it numbers the runs of one name")
    store, folder = open_store(recipe, workspace), workspace.run(name, seed)
    require_plane(store.info.grid)
    if isinstance(step, nn.Module):
        step.eval()
        parameters = sum(p.numel() for p in step.parameters()) if parameters is None else parameters
    _require_state_to_state(step, store, device)
    own = Recipe(
        name=name,
        dataset=recipe.dataset,
        task=TaskConfig(stride=recipe.task.stride),
        model=OwnConfig(parameters=parameters or 0),
        objective=ObjectiveConfig(unitary_weight=0.0),
        training=TrainingConfig(),
        # A step is called as it is.
        evaluation=dataclasses.replace(recipe.evaluation, precision="fp32"),
    )
    facts = RunFacts.of(store.info, normalizer_of(store, stride=own.task.stride), own.step_seconds)
    with claim_run(workspace, name, seed):
        if (folder / "recipe.json").exists() and not isinstance(load_recipe(folder / "recipe.json").model, OwnConfig):
            raise ValueError(f"{folder} holds a trained run, which is not replaced; choose another name or seed")
        # Neither the roll-out nor the scores of an earlier step are to be taken for those of this one.
        for file in ("rollout/rollout.json", "scores.json"):
            (folder / file).unlink(missing_ok=True)
        write_run(folder, own, facts)
        predict(own, workspace, seed=seed, device=device, console=console, step=step)
        return score(own, workspace, seed=seed, device=device, console=console)


@torch.no_grad()
def _require_state_to_state(step: Step, store: TrajectoryStore, device: torch.device) -> None:
    """Refuse what does not make a state (B, C, *grid) of real numbers of a state on the device."""
    if isinstance(step, nn.Module) and (places := {p.device.type for p in step.parameters()} - {device.type}):
        found = ", ".join(places)
        raise ValueError(f"a module on {device} was expected, got one on {found}; give device= or move it")
    state = torch.from_numpy(store.read("test", 0, 0, 1, 1)).to(device)
    made = step(state)
    if not isinstance(made, torch.Tensor):
        raise ValueError(f"a step must make a tensor of a tensor, got {type(made).__name__}; wrap what you have")
    if made.shape != state.shape or not made.is_floating_point() or made.device != state.device:
        raise ValueError(
            f"a step must make a state of real numbers {tuple(state.shape)}, (B, C, *grid), on {state.device}, got "
            f"{made.dtype} {tuple(made.shape)} on {made.device}; wrap what you have"
        )

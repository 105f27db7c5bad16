"""One run from its data to its scores: what is missing of it is done, and nothing again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.config import DatasetConfig, Recipe, to_dict
from ergoflow.data.files import read_json
from ergoflow.pipeline.predict import FACTS_FILE, predict
from ergoflow.pipeline.runs import is_of_these_weights, is_trained, require_same_run
from ergoflow.pipeline.score import score
from ergoflow.pipeline.shards import is_whole
from ergoflow.pipeline.sharing import alone, turn
from ergoflow.pipeline.simulate import provide
from ergoflow.pipeline.simulate_kolmogorov import finer_copy
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace
from ergoflow.training.trainer import TrainingInterrupted


def provide_once(dataset: DatasetConfig, workspace: Workspace, *, device: torch.device, console: Console) -> None:
    """Make what is missing of a data set: one process below the root does; nothing trains while it simulates."""
    folder = workspace.dataset(dataset.name)
    with ExitStack() as block:
        if not is_whole(dataset, folder):
            block.enter_context(alone(workspace, "data", console, waiting="another process is simulating"))
        # Another process may have made it since. A subsampled copy is made without the device.
        if not is_whole(dataset, folder) and finer_copy(dataset, workspace) is None:
            block.enter_context(turn(workspace, device, console))
        provide(dataset, workspace, device=device, console=console)


def run_one(
    recipe: Recipe,
    workspace: Workspace,
    *,
    seed: int,
    device: torch.device,
    console: Console,
    on_turn: Callable[[], object] | None = None,
) -> Path:
    """Train, predict and score one seed of a recipe, whatever of it is missing; return the run folder.

    It has its turn on the device from the first update to the end of the roll-out: data are read in, and scores made,
    while another process trains. `on_turn`, if given, is called where it begins.
    """
    folder = workspace.run(recipe.name, seed)
    require_own_run(folder, recipe)
    with ExitStack() as block:

        @cache
        def take_turn() -> None:
            block.enter_context(turn(workspace, device, console))
            if on_turn is not None:
                on_turn()

        if not is_trained(folder):
            _train(recipe, workspace, seed=seed, device=device, console=console, on_data=take_turn)
        if not is_rolled_out(folder, recipe):
            take_turn()
            predict(recipe, workspace, seed=seed, device=device, console=console)
    if not is_scored(folder):
        score(recipe, workspace, seed=seed, device=device, console=console)
    return folder


def require_own_run(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds a run begun with other settings; one that is trained, with another training, too."""
    if (folder / "recipe.json").exists():
        ended = ("training",) if is_trained(folder) else ()
        require_same_run(folder, recipe, parts=("dataset", "task", "model", "objective", *ended))


def _train(
    recipe: Recipe,
    workspace: Workspace,
    *,
    seed: int,
    device: torch.device,
    console: Console,
    on_data: Callable[[], object],
) -> None:
    """Train, or resume the last checkpoint.

    An interruption says to repeat the same command, because every caller resumes.
    """
    folder = workspace.run(recipe.name, seed)
    resume = (folder / "recipe.json").exists()
    try:
        train(recipe, workspace, seed=seed, device=device, console=console, resume=resume, on_data=on_data)
    except TrainingInterrupted as error:
        raise TrainingInterrupted(
            f"the training of {recipe.name}, seed {seed}, was stopped; its checkpoint is in {folder}; "
            "the same command goes on from there"
        ) from error


def is_rolled_out(folder: Path, recipe: Recipe) -> bool:
    """Whether a run holds a roll-out of its weights under the recipe's evaluation."""
    path = folder / "rollout" / FACTS_FILE
    if not path.exists():
        return False
    facts = read_json(path, remedy="remove it to roll out again")
    return facts["evaluation"] == to_dict(recipe.evaluation) and is_of_these_weights(folder, facts)


def is_scored(folder: Path) -> bool:
    """Whether the scores are those of the roll-out that is there: not older than it."""
    scores, rollout = folder / "scores.json", folder / "rollout" / FACTS_FILE
    return scores.exists() and scores.stat().st_mtime_ns >= rollout.stat().st_mtime_ns

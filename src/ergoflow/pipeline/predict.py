"""`ergoflow predict`: roll a trained model out from the first frame of every test trajectory.

The roll-out streams: each state is added to the statistics and forgotten, except for the frames that the recipe
keeps. A roll-out that diverges is a result; when it did so is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ergoflow.config import EvaluationConfig, Recipe, to_dict
from ergoflow.data.files import remove_leftovers, write_npz_atomic
from ergoflow.data.store import ShardWriter, TrajectoryStore
from ergoflow.metrics import StatisticsResult
from ergoflow.numerics.trajectory import Step, rollout
from ergoflow.ops.inference import recorded_inference
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.reference import load_reference, new_statistics, skipped_frames
from ergoflow.pipeline.runs import (
    is_trained,
    load_run,
    open_store,
    read_facts,
    require_same_run,
    rollout_info,
    weights_digest,
    write_json,
)
from ergoflow.pipeline.video import check_video, write_video
from ergoflow.pipeline.workspace import Workspace, commit, hardware

ROLLOUT_FILE = Path("data") / "test" / "rollout.hdf5"
# Its presence means that the roll-out is whole.
FACTS_FILE = "rollout.json"
# Axes of a grid, at most, whose statistics and figures there are.
PLANE = 2


def predict(
    recipe: Recipe,
    workspace: Workspace,
    *,
    seed: int,
    device: torch.device,
    console: Console,
    video: Path | None = None,
    step: Step | None = None,
) -> Path:
    """Roll out, write frames and statistics, and return the roll-out folder; `step` stands for the run's own model."""
    store, folder = open_store(recipe, workspace), workspace.run(recipe.name, seed)
    require_plane(store.info.grid)
    if video is not None:
        check_video(video, store.info.axes)
    read_facts(folder)
    require_same_run(folder, recipe)
    weights = None
    if step is None:
        step, weights = rolled_out(load_run(folder, device=device), recipe, device), weights_digest(folder)
        if not is_trained(folder):
            console.print("[yellow]training is not complete: these are the weights of its last checkpoint[/yellow]")
    output = folder / "rollout"
    (output / ROLLOUT_FILE).parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(output)
    started = time.perf_counter()
    # A step of somebody's own may take gradients inside.
    with torch.inference_mode() if weights else torch.no_grad():
        statistics = _roll_out(recipe, store, step, output, device=device, console=console)
    write_npz_atomic(output / "statistics.npz", statistics.arrays())
    failed = [int(k) for k in statistics.failed_at]
    write_json(
        output / FACTS_FILE,
        {
            "evaluation": to_dict(recipe.evaluation),
            "weights": weights,
            "steps": recipe.evaluation.steps,
            "trajectories": len(failed),
            "diverged_at": failed,
            "seconds": time.perf_counter() - started,
            "hardware": hardware(device),
            "commit": commit(),
        },
    )
    if any(k >= 0 for k in failed):
        first = min(k for k in failed if k >= 0)
        console.print(
            f"[yellow]{sum(k >= 0 for k in failed)} of {len(failed)} roll-outs diverged, first at step {first}[/yellow]"
        )
    if video is not None:
        write_video(video, store, output, stride=recipe.task.stride)
    return output


def require_plane(grid: tuple[int, ...]) -> None:
    """Refuse a volume, of which there are no long-term statistics."""
    if len(grid) > PLANE:
        raise ValueError(
            f"long-term statistics are of lines and planes, got a volume {grid}; train on it with `ergoflow train`, "
            "roll it out in Python with ergoflow.load and rollout, or import planes of it"
        )


def rolled_out(step: Step, recipe: Recipe, device: torch.device) -> Step:
    """A loaded model as `predict` calls it: in the recipe's precision, and on a GPU as one recorded graph."""
    return recorded_inference(step, precision=recipe.evaluation.precision, device=device)


def kept_steps(evaluation: EvaluationConfig) -> list[int]:
    """Steps whose frames are stored: all of the first `keep_first`, then every `keep_every`-th, and the last."""
    first = range(min(evaluation.keep_first, evaluation.steps) + 1)
    return sorted({*first, *range(0, evaluation.steps + 1, evaluation.keep_every), evaluation.steps})


def _roll_out(
    recipe: Recipe,
    store: TrajectoryStore,
    step: Step,
    output: Path,
    *,
    device: torch.device,
    console: Console,
) -> StatisticsResult:
    evaluation = recipe.evaluation
    reference = load_reference(recipe, store, device=device, console=console)
    initial = store.load("test", device=device, stride=store.num_frames("test"))[:, 0]  # (J, C, *grid)
    skip = skipped_frames(evaluation, int(reference.truth.frames[0]))
    statistics = new_statistics(
        store.info, reference.yardstick, len(initial), max_lag=evaluation.max_lag, skip=skip, device=device
    )
    steps = kept_steps(evaluation)
    keep = set(steps)
    info = rollout_info(store.info, recipe)
    states: Iterator[Tensor] = rollout(step, initial, evaluation.steps, include_initial=True)
    writer = ShardWriter(output / ROLLOUT_FILE, info, count=len(initial), frames=len(steps), steps=steps)
    with bar(console, f"predict {recipe.name}", evaluation.steps + 1, "steps") as advance, writer:
        written = 0
        for k, state in enumerate(states):
            statistics.update(state)
            if k in keep:
                writer.write(written, state)
                written += 1
            advance()
        result = statistics.finish()
        writer.set_scalar("diverged_at", result.failed_at)
        # It says what the files beside it are: gone before they change, written after they have.
        (output / FACTS_FILE).unlink(missing_ok=True)
    return result

"""`ergoflow train`: fit a recipe's model to its data set.

The training split lives on the device when it fits, and is streamed from disk by workers when it does not; both
give the same batches. Under `torchrun` each process takes its share of every batch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from ergoflow.config import Recipe
from ergoflow.data.normalize import Normalizer
from ergoflow.data.store import TrajectoryStore
from ergoflow.data.windows import ResidentWindows, StreamedWindows, WindowSampler
from ergoflow.metrics import relative_l2
from ergoflow.models.trivial import Climatology
from ergoflow.numerics.trajectory import rollout
from ergoflow.ops.rehearsal import rehearsed
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.reference import climatology
from ergoflow.pipeline.runs import (
    SUMMARY_FILE,
    RunFacts,
    build_step,
    is_trained,
    normalizer_of,
    open_store,
    require_finite,
    require_same_data,
    require_same_run,
    training_climate,
    training_radius,
    write_json,
    write_run,
)
from ergoflow.pipeline.sharing import claim_run, give_memory_back
from ergoflow.pipeline.workspace import Workspace, commit, hardware, versions
from ergoflow.training.checkpoint import STATE_FILE, WEIGHTS_FILE, save_weights
from ergoflow.training.distributed import LaunchContext, RankSampler, launch_context
from ergoflow.training.loop import Validate
from ergoflow.training.objectives import Objective, check_operator, make_objective
from ergoflow.training.processor import trains_in_bf16
from ergoflow.training.stepper import NormalizedStep, NormalizedWindows, PhysicalStep, Windows
from ergoflow.training.symmetries import AugmentedWindows, flow_symmetries
from ergoflow.training.trainer import Progress, TrainResult
from ergoflow.training.trainer import train as fit

# Share of the free memory that resident data may take; activations need the rest.
RESIDENT_SHARE = 0.4
# Validation looks at this many trajectories and lead steps: enough to see a trend, cheap enough for every epoch.
VALID_TRAJECTORIES = 8
VALID_STEPS = 5


def train(
    recipe: Recipe,
    workspace: Workspace,
    *,
    seed: int,
    device: torch.device,
    console: Console,
    resume: bool = False,
    overwrite: bool = False,
    on_data: Callable[[], object] | None = None,
) -> Path:
    """Train and return the run folder; `on_data`, if given, is called between reading data in and the first update.

    It is called before reading them in if there is no room for them: what else runs on the device may end with it.
    """
    store = open_store(recipe, workspace)
    folder = workspace.run(recipe.name, seed)
    with ExitStack() as block:
        context = block.enter_context(launch_context(device))
        if context.is_main:
            block.enter_context(claim_run(workspace, recipe.name, seed))
            _require_told(folder, recipe, resume=resume, overwrite=overwrite)
        normalizer = normalizer_of(store, stride=recipe.task.stride)
        needs_radius = recipe.task.guard or recipe.objective.dissipativity_weight > 0
        radius = training_radius(store, normalizer) if needs_radius else None
        climate = training_climate(store, normalizer) if recipe.task.hold else None
        facts = RunFacts.of(store.info, normalizer, recipe.step_seconds, radius=radius, climate=climate)
        if resume and (folder / STATE_FILE).exists():
            # Its weights are in the units that it began with.
            facts = require_same_data(folder, facts)
            normalizer = facts.normalizer
        # Built before an earlier run may be discarded: what cannot be built must not cost one.
        step = build_step(recipe, facts, seed=seed).to(context.device)
        needs = None
        if any(p.requires_grad for p in step.parameters()):
            check_operator(step, recipe.objective)
            # Weights alone may also be what a kill left of the first checkpoint, whose state comes after them.
            if resume and is_trained(folder) and not (folder / STATE_FILE).exists():
                raise ValueError(
                    f"{folder} holds trained weights, but {STATE_FILE}, the state to go on from, is missing; "
                    "bring it back, or pass --overwrite to train from the start"
                )
            needs = _gather(recipe, store, facts, seed=seed, context=context, make_room=on_data)
            if on_data is not None:
                on_data()
        if context.is_main and overwrite and folder.exists():
            shutil.rmtree(folder)
        # A collective call is a barrier: nobody looks for a checkpoint before an old one is gone.
        context.largest(0.0)
        begin = partial(_begin, folder, recipe, facts)
        # When resuming, recipe.json is rewritten only after the first update: a refused resumption changes nothing.
        if context.is_main and not (folder / STATE_FILE).exists():
            begin()
        if needs is not None:
            result = _fit(
                recipe, step, needs, folder, seed=seed, context=context, console=console, resume=resume, begin=begin
            )
        else:
            result = _fill(step, store, normalizer, folder)
        if context.is_main:
            begin()  # a run that was at its end already had no update
            _write_summary(folder, recipe, step, result, context)
    return folder


class _Needs(NamedTuple):
    """What a fit takes from data and recipe besides the model."""

    windows: Windows
    resident: bool
    objective: Objective
    validate: Validate


def _gather(
    recipe: Recipe,
    store: TrajectoryStore,
    facts: RunFacts,
    *,
    seed: int,
    context: LaunchContext,
    make_room: Callable[[], object] | None,
) -> _Needs:
    windows = _windows(recipe, store, seed=seed, context=context, make_room=make_room)
    source: Windows = windows
    if recipe.training.augment:
        # Before normalisation: a component that changes sign must not have had its mean taken off.
        source = AugmentedWindows(windows, flow_symmetries(store.info), seed=seed, context=context)
    return _Needs(
        windows=NormalizedWindows(source, facts.normalizer),
        resident=isinstance(windows, ResidentWindows),
        objective=make_objective(
            recipe.objective,
            generator=torch.Generator(context.device).manual_seed(context.own_seed(seed)),
            radius=facts.radius,
            periodic=facts.periodic,
            length=facts.length,
        ),
        validate=_validator(recipe, store, facts.normalizer, context.device),
    )


def _fit(
    recipe: Recipe,
    step: NormalizedStep,
    needs: _Needs,
    folder: Path,
    *,
    seed: int,
    context: LaunchContext,
    console: Console,
    resume: bool,
    begin: Callable[[], None],
) -> TrainResult:
    total = recipe.training.total_steps(needs.windows.sampler.batches_per_epoch) * recipe.training.batch_size
    if context.is_main:
        where = "on the device" if needs.resident else "streamed from disk"
        count = sum(p.numel() for p in step.parameters())
        console.print(f"{recipe.name}: {count:,} parameters, data {where}", highlight=False)
        if context.device.type == "cuda":
            console.print("the first step compiles its kernels, once on every machine; that time is not counted")
    shown = bar(console, f"train {recipe.name}", total, "samples") if context.is_main else nullcontext()
    with shown as advance:
        seen = 0

        def on_progress(progress: Progress) -> None:
            nonlocal seen
            done, before = progress.step * recipe.training.batch_size, 0
            if not seen:
                begin()
                seen = before = done - recipe.training.batch_size
            valid = "".join(f", valid {name} {value:.4f}" for name, value in progress.valid.items())
            assert advance is not None
            advance(done - seen, note=f"loss {progress.loss:.4f}{valid}", before=before)
            seen = done

        return fit(
            step,
            needs.objective,
            needs.windows,
            config=recipe.training,
            folder=folder,
            seed=seed,
            resume=resume,
            validate=needs.validate,
            on_progress=on_progress,
            context=context,
            rehearse=rehearsed,
        )


def _fill(step: NormalizedStep, store: TrajectoryStore, normalizer: Normalizer, folder: Path) -> TrainResult:
    """A model without parameters needs no training; the climatology gets its field."""
    if isinstance(step.model, Climatology):
        step.model.field.copy_(normalizer.normalize(climatology(store)[None])[0])
    weights = folder / WEIGHTS_FILE
    save_weights(step.model, weights, metadata={})
    return TrainResult(step=0, epoch=0, loss=0.0, valid={}, seconds=0.0, weights=weights)


def _windows(
    recipe: Recipe,
    store: TrajectoryStore,
    *,
    seed: int,
    context: LaunchContext,
    make_room: Callable[[], object] | None,
) -> ResidentWindows | StreamedWindows:
    sampler = WindowSampler(
        store.count("train"),
        store.num_frames("train"),
        window=recipe.objective.window,
        stride=recipe.task.stride,
        batch_size=recipe.training.batch_size,
        seed=seed,
    )
    share = RankSampler(sampler, context)
    if make_room is not None and not _fits(store, context.device):
        make_room()
    if _fits(store, context.device):
        frames = store.load("train", device=context.device)
        require_finite(frames, store, "train")
        return ResidentWindows(frames, share)
    return StreamedWindows(store, "train", share, num_workers=4, device=context.device)


def _fits(store: TrajectoryStore, device: torch.device) -> bool:
    """Whether there is room for the training split on the device."""
    values = store.count("train") * store.num_frames("train") * len(store.info.fields)
    return 4 * values * math.prod(store.info.grid) <= RESIDENT_SHARE * _free_bytes(device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # Of an earlier cell of this process, which may have run out of memory.
        give_memory_back(device)
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 8 * 2**30


def _validator(recipe: Recipe, store: TrajectoryStore, normalizer: Normalizer, device: torch.device) -> Validate:
    """Relative L2 after 1 and VALID_STEPS steps from the first frame of a few validation trajectories."""
    stride, count = recipe.task.stride, min(VALID_TRAJECTORIES, store.count("valid"))
    steps = min(VALID_STEPS, (store.num_frames("valid") - 1) // stride)
    if steps < 1:
        raise ValueError(
            f"the valid split of {store.folder} must hold more than {stride} frames, one step of task.stride, got "
            f"{store.num_frames('valid')}; lower task.stride or make its trajectories longer"
        )
    read = [store.read("valid", j, 0, steps * stride + 1, stride) for j in range(count)]
    frames = torch.from_numpy(np.stack(read)).to(device)  # (J, T, C, *grid)
    require_finite(frames, store, "valid")

    def validate(step: NormalizedStep) -> Mapping[str, float]:
        physical = PhysicalStep(step, normalizer).to(device)
        predicted = torch.stack(list(rollout(physical, frames[:, 0], steps)), dim=1)
        errors = relative_l2(predicted, frames[:, 1:])
        return {"relative_l2@1": float(errors[0]), f"relative_l2@{steps}": float(errors[-1])}

    return validate


def _require_told(folder: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    """Refuse to touch an earlier run unless told how."""
    if resume and overwrite:
        raise ValueError("--resume keeps an earlier run and --overwrite discards it, got both; choose one")
    if overwrite or not (folder / "recipe.json").exists():
        return
    if not resume:
        raise ValueError(
            f"{folder} holds a run already; pass --resume to continue it, --overwrite to discard it, or another --seed"
        )
    require_same_run(folder, recipe, parts=("dataset", "task", "model", "objective"))


def _begin(folder: Path, recipe: Recipe, facts: RunFacts) -> None:
    """Write what a run is trained by; one that was complete is so no more."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    write_run(folder, recipe, facts)


def _write_summary(
    folder: Path, recipe: Recipe, step: NormalizedStep, result: TrainResult, context: LaunchContext
) -> None:
    """training.json marks the run as finished."""
    samples, timed = (steps * recipe.training.batch_size for steps in (result.step, result.step - 1))
    write_json(
        folder / SUMMARY_FILE,
        {
            "steps": result.step,
            "samples": samples,
            "seconds": result.seconds,
            # The first update is not in the time.
            "samples_per_second": timed / result.seconds if result.seconds else None,
            "parameters": sum(p.numel() for p in step.parameters()),
            "valid": dict(result.valid),
            "processes": context.world_size,
            "hardware": hardware(context.device),
            "precision": "bf16" if trains_in_bf16(recipe.training.precision, context.device) else "fp32",
            "versions": versions(),
            "commit": commit(),
        },
    )

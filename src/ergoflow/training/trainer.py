"""The training loop: one loop for every model, restartable at any step.

A run is a sequence of updates over (epoch, batch). Its learning rate is a pure function of its progress and
its batches are a pure function of (seed, epoch); everything else that moves is in the `RunState`. So a run
that was killed continues bit for bit (on the CPU) from its last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ergoflow.data.files import remove_leftovers
from ergoflow.training.checkpoint import STATE_FILE, WEIGHTS_FILE
from ergoflow.training.distributed import LaunchContext
from ergoflow.training.ema import copy_average, start_average
from ergoflow.training.interrupt import stop_requests
from ergoflow.training.log import TrainingLog
from ergoflow.training.loop import Loop, TrainingDiverged, Validate
from ergoflow.training.objectives import Objective
from ergoflow.training.optimizers import make_optimizer
from ergoflow.training.plan import TrainingConfig
from ergoflow.training.processor import keep_freed_memory
from ergoflow.training.recorded import Rehearse
from ergoflow.training.state import RunState
from ergoflow.training.stepper import NormalizedStep, Windows

__all__ = ["Progress", "TrainResult", "TrainingConfig", "TrainingDiverged", "TrainingInterrupted", "train"]


class TrainingInterrupted(RuntimeError):  # noqa: N818
    """A signal asked the run to stop; a checkpoint was written first."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is, after each step.

    `loss` and `valid` are the last known ones (nan and empty before the first).
    """

    step: int
    total_steps: int
    epoch: int
    fraction: float
    loss: float
    learning_rate: float
    seconds: float
    valid: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run.

    Its updates, the epochs it entered, the last logged losses, the time over all resumptions.
    """

    step: int
    epoch: int
    loss: float
    valid: Mapping[str, float]
    seconds: float
    weights: Path


def train(
    step: NormalizedStep,
    objective: Objective,
    windows: Windows,
    *,
    config: TrainingConfig,
    folder: Path,
    seed: int,
    resume: bool = False,
    validate: Validate | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    metadata: Mapping[str, str] | None = None,
    context: LaunchContext | None = None,
    clock: Callable[[], float] = time.monotonic,
    rehearse: Rehearse | None = None,
) -> TrainResult:
    """Fit the model inside `step`; its final (averaged, if asked) weights are then in it and in `folder`.

    `windows` yields batches (B, window, C, *grid) in normalised units. `resume` continues the checkpoint in
    `folder`, or starts if there is none; without it a folder that holds a checkpoint is refused. `validate`
    sees the averaged weights, every so many epochs and at the end. `seed` drives what a model of
    your own may draw (dropout). `metadata` joins the weights file. `context` is this process's place under torchrun
    (None: alone). `clock` gives seconds. `rehearse` compiles a step's kernels before they are first launched (None:
    each at its first launch). Raises TrainingDiverged or TrainingInterrupted; the last checkpoint stays on disk.
    """
    context = context or LaunchContext()
    state_path = folder / STATE_FILE
    if state_path.is_file() and not resume:
        raise ValueError(
            f"expected a folder without a checkpoint, but {state_path} exists; "
            "pass --resume to continue that run, or remove the folder to start again"
        )
    run = _new_run(step, objective, config)
    if run.device.type == "cpu":
        keep_freed_memory()
    if context.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []))
        # A model of your own may draw (dropout): neither processes nor seeds must share what it draws.
        torch.manual_seed(context.own_seed(seed))
        loop = Loop(step, objective, windows, config, run, folder, seed, context, clock, rehearse, stack)
        if state_path.is_file():
            loop.resume()
        stop = stack.enter_context(stop_requests())
        log = None
        if context.is_main:
            log = stack.enter_context(TrainingLog(folder, step=run.step, tensorboard=config.tensorboard))
        step.train()
        for batch in loop.batches():
            rate = loop.update(batch)
            stopped = loop.agree(stop.reason)
            validated = loop.validate(validate)
            if validated or loop.finished() or run.step % config.log_every == 0:
                record = loop.flush(rate, validated)
                if log is not None:
                    log.write(record)
            if on_progress is not None and context.is_main:
                on_progress(_progress(loop, rate))
            if loop.finished() or stopped or loop.checkpoint_due():
                loop.checkpoint(log, metadata or {})
            if stopped and not loop.finished():
                raise TrainingInterrupted(
                    f"training stopped by {stopped} at step {run.step} of {loop.total_steps}; the "
                    f"checkpoint is in {folder}; run the same command with --resume to continue"
                )
    if run.average is not None:
        copy_average(run.average, step.model)
    step.eval()
    return TrainResult(
        step=run.step,
        epoch=loop.epoch,
        loss=run.loss,
        valid=dict(run.valid),
        seconds=run.seconds,
        weights=folder / WEIGHTS_FILE,
    )


def _new_run(step: NormalizedStep, objective: Objective, config: TrainingConfig) -> RunState:
    trainable: list[nn.Parameter] = [p for p in step.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"expected a model with trainable parameters, {type(step.model).__name__} has none; "
            "predict and score it without training"
        )
    if config.compile:
        step.model.compile()
    return RunState(
        model=step.model,
        optimizer=make_optimizer(
            config.optimizer,
            trainable,
            learning_rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        ),
        average=None if config.ema_decay is None else start_average(step.model),
        generator=objective.generator,
        device=trainable[0].device,
    )


def _progress(loop: Loop, rate: float) -> Progress:
    run = loop.run
    return Progress(
        step=run.step,
        total_steps=loop.total_steps,
        epoch=loop.epoch,
        fraction=loop.fraction,
        loss=run.loss,
        learning_rate=rate,
        seconds=run.seconds,
        valid=dict(run.valid),
    )

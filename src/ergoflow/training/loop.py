"""The parts of one training step.

Update, agree, validate, flush, checkpoint. `trainer.train` says in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ergoflow.training.checkpoint import STATE_FILE, WEIGHTS_FILE, load_state, save_state, save_weights
from ergoflow.training.compact import compact, expand
from ergoflow.training.distributed import LaunchContext
from ergoflow.training.ema import averaged_weights, update_average
from ergoflow.training.log import TrainingLog
from ergoflow.training.objectives import Objective
from ergoflow.training.plan import SECONDS_PER_MINUTE, TrainingConfig
from ergoflow.training.processor import trains_in_bf16
from ergoflow.training.recorded import RecordedGradients, Rehearse
from ergoflow.training.state import RunState, capture, restore
from ergoflow.training.stepper import NormalizedStep, Windows

Validate = Callable[[NormalizedStep], Mapping[str, float]]


class TrainingDiverged(RuntimeError):  # noqa: N818
    """The loss or the weights left the finite numbers."""


class Loop:
    """A run in its surroundings.

    A class because the parts of a step share a dozen objects; the state itself is in `run`.
    """

    def __init__(
        self,
        step: NormalizedStep,
        objective: Objective,
        windows: Windows,
        config: TrainingConfig,
        run: RunState,
        folder: Path,
        seed: int,
        context: LaunchContext,
        clock: Callable[[], float],
        rehearse: Rehearse | None,
        block: ExitStack,
    ) -> None:
        self.step, self.windows, self.config, self.run = step, windows, config, run
        self.folder, self.context = folder, context
        self.batches_per_epoch = windows.sampler.batches_per_epoch
        if self.batches_per_epoch < 1:
            raise ValueError(
                f"an epoch must have at least one batch of {config.batch_size} windows, got none; "
                "lower training.batch_size or simulate more trajectories"
            )
        self.total_steps = config.total_steps(self.batches_per_epoch)
        # Matrix products in bfloat16 if asked; the losses switch it off for themselves.
        half = trains_in_bf16(config.precision, run.device)
        self._autocast = partial(torch.autocast, run.device.type, torch.bfloat16, enabled=half)
        losses = block.enter_context(context.parallel(_ObjectiveModule(step, objective, self._autocast)))
        # Processes that wait for each other, and compiled models, launch their kernels one by one.
        recordable = run.device.type == "cuda" and context.world_size == 1 and not config.compile
        # Neither holds this loop: what a run has on a device goes when the run ends, not when Python looks for cycles.
        self._gradients = RecordedGradients(
            losses,
            [p for p in step.parameters() if p.requires_grad],
            stage=objective.stage if recordable else None,
            generator=objective.generator,
            rehearse=rehearse,
        )
        self._facts = {
            "optimizer": config.optimizer,
            "batch size": config.batch_size,
            "averaging of weights": config.ema_decay is not None,
            "number of batches per epoch": self.batches_per_epoch,
            "seed": seed,
            "number of processes": context.world_size,
            "kind of device": run.device.type,
        }
        self._clock = clock
        self._started: float | None = None
        self._logged_step, self._logged_seconds = run.step, run.seconds
        self._saved_step: int | None = None
        self._saved_seconds = run.seconds

    @property
    def fraction(self) -> float:
        """The part of the run that is over."""
        return self.config.fraction(step=self.run.step, seconds=self.run.seconds, total_steps=self.total_steps)

    def finished(self) -> bool:
        """Whether the steps or the time are used up."""
        return self.fraction >= 1

    @property
    def epoch(self) -> int:
        """The epoch, counted from 1, that the last update belonged to."""
        return (self.run.step - 1) // self.batches_per_epoch + 1

    def checkpoint_due(self) -> bool:
        """Whether `checkpoint_minutes` have passed since the last checkpoint."""
        return self.run.seconds - self._saved_seconds >= SECONDS_PER_MINUTE * self.config.checkpoint_minutes

    def resume(self) -> None:
        """Continue from the state in the folder."""
        run = self.run
        restore(run, expand(load_state(self.folder / STATE_FILE)), self._facts, self.context)
        self._logged_step, self._logged_seconds = run.step, run.seconds
        self._saved_step, self._saved_seconds = run.step, run.seconds

    def batches(self) -> Iterator[Tensor]:
        """The batches (B, window, C, *grid) that are left, until the run is finished."""
        while not self.finished():
            before = self.run.step
            for batch in self.windows.epoch(self.run.epoch, self.run.batch):
                yield batch.to(self.run.device, non_blocking=True)
                if self.finished():
                    return
            assert self.run.step > before, "an epoch yielded no batches"

    def update(self, batch: Tensor) -> float:
        """One optimiser step; returns its learning rate. Nothing here waits for the device."""
        run, config = self.run, self.config
        size = len(batch) * self.context.world_size
        if size != config.batch_size:
            raise ValueError(
                f"training.batch_size is {config.batch_size}, but the windows come in batches of {size}; "
                "build the sampler with the same batch size"
            )
        rate = config.rate(self.fraction, step=run.step)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        total, parts = self._gradients(batch, self.fraction)
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(run.model.parameters(), config.clip_norm)
        run.optimizer.step()
        run.step += 1
        if run.average is not None and config.ema_decay is not None:
            update_average(run.average, run.model, decay=config.ema_decay, update=run.step)
        run.batch += 1
        if run.batch == self.batches_per_epoch:
            run.epoch, run.batch = run.epoch + 1, 0
        run.part_names = list(parts)
        run.pending.append(torch.stack([total, *parts.values()]).detach())
        return rate

    def agree(self, stop_reason: str) -> str:
        """Set the time trained, and return why to stop ("": go on), the same on all processes.

        It is counted from the end of a process's first update, which compiles kernels and records the step: minutes,
        the first time on a machine, that no budget of training should pay for.
        """
        if self._started is None:
            if self.run.device.type == "cuda":
                torch.cuda.synchronize(self.run.device)
            self._started = self._clock() - self.run.seconds
        seconds, stopped = self.context.largest(self._clock() - self._started, float(bool(stop_reason)))
        self.run.seconds = seconds
        return (stop_reason or "a signal to another process") if stopped else ""

    def validate(self, validate: Validate | None) -> bool:
        """Whether this step is one to validate at.

        The main process then has the new scores in `run.valid`.
        """
        at_epoch = self.run.batch == 0 and self.run.epoch % self.config.validate_every_epochs == 0
        if validate is None or not (at_epoch or self.finished()):
            return False
        if self.context.is_main:
            self.step.eval()
            with averaged_weights(self.run.average, self.run.model), torch.no_grad(), self._autocast():
                self.run.valid = dict(validate(self.step))
            self.step.train()
        return True

    def flush(self, rate: float, validated: bool) -> dict[str, Any]:
        """The log record of the steps since the last one; losses are means over them."""
        run = self.run
        loss, *parts = self._finite_losses().mean(dim=0).tolist()
        run.loss, run.pending = loss, []
        samples = (run.step - self._logged_step) * self.config.batch_size
        duration = run.seconds - self._logged_seconds
        self._logged_step, self._logged_seconds = run.step, run.seconds
        record = {
            "step": run.step,
            "epoch": self.epoch,
            "loss": loss,
            "parts": dict(zip(run.part_names, parts, strict=True)),
            "lr": rate,
            "samples_per_s": samples / duration if duration > 0 else None,
            "seconds": run.seconds,
        }
        return {**record, "valid": dict(run.valid)} if validated else record

    def checkpoint(self, log: TrainingLog | None, metadata: Mapping[str, str]) -> None:
        """Write state and weights, after making sure that they are worth keeping."""
        run = self.run
        if run.pending:
            self._finite_losses()
        if not all(bool(torch.isfinite(p).all()) for p in run.model.parameters()):
            raise TrainingDiverged(self._advice("the weights are not finite", run.step))
        state = capture(run, self._facts, self.context)
        if self.config.compact_state:
            state = compact(state)
        if log is not None:
            log.sync()
            facts = {"step": str(run.step), "averaged": str(run.average is not None).lower()}
            with averaged_weights(run.average, run.model):
                save_weights(run.model, self.folder / WEIGHTS_FILE, metadata={**metadata, **facts})
            # Last: a run killed before this line redoes its last steps, and writes the same weights again.
            save_state(self.folder / STATE_FILE, state)
        self._saved_step, self._saved_seconds = run.step, run.seconds

    def _finite_losses(self) -> Tensor:
        """The pending losses (steps, 1 + parts), averaged over processes, on the CPU.

        Raises if one is not finite.
        """
        run = self.run
        rows = self.context.mean(torch.stack(run.pending))
        run.pending = list(rows.unbind(0))
        rows = rows.cpu()
        bad = (~torch.isfinite(rows)).any(dim=1).nonzero()
        if len(bad):
            row = int(bad[0])
            message = f"the loss is {rows[row, 0].item()}"
            raise TrainingDiverged(self._advice(message, run.step - len(rows) + row + 1))
        return rows

    def _advice(self, symptom: str, step: int) -> str:
        if self._saved_step is None:
            kept = "no checkpoint had been written"
        else:
            kept = f"the checkpoint of step {self._saved_step} is kept in {self.folder}"
        return f'{symptom} at step {step}; {kept}; try a lower learning_rate, clip_norm=1 or precision="fp32"'


class _ObjectiveModule(nn.Module):
    """An objective as one forward pass, so that data-parallel training sees all of it, unrolled or not."""

    def __init__(self, step: NormalizedStep, objective: Objective, autocast: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.step, self._objective, self._autocast = step, objective, autocast

    def forward(self, batch: Tensor, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        with self._autocast():
            losses = self._objective(self.step, batch, progress)
        return losses.total, losses.parts

"""The plan of a run: how long, how fast, how often; and where a run stands in it.

A run ends at its number of steps or at its wall-clock budget, whichever comes first. Its progress is the
larger of the two fractions that are over, so every learning-rate schedule reaches its end exactly when the
run does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ergoflow.training.optimizers import OPTIMIZERS, OptimizerName
from ergoflow.training.schedules import SCHEDULES, Schedule, learning_rate_factor

SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a run. The defaults are the paper's: Adam, 1e-4 halved every 10 of 50 epochs, no averaging.

    `batch_size` is the global one, over all processes. `max_steps` and `max_minutes` end a run early, and None means no
    such limit; `clip_norm` None leaves gradients as they are, `ema_decay` None keeps no averaged weights. `augment`
    moves every window by a random exact symmetry of its flow. `precision` "auto" is bf16 on a CPU with instructions for
    it and fp32 elsewhere. `checkpoint_minutes` 0 writes after every step; `compact_state` halves what is written
    (`training/compact.py`), and a resumed run is then as good as the whole one, but not bit for bit the same. `compile`
    hands the model to torch.compile.
    """

    epochs: int = 50
    batch_size: int = 16
    optimizer: OptimizerName = "adam"
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: Schedule = "halving"
    halving_epochs: int = 10
    warmup_steps: int = 0
    clip_norm: float | None = None
    ema_decay: float | None = None
    augment: bool = False
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    max_steps: int | None = None
    max_minutes: float | None = None
    checkpoint_minutes: float = 10.0
    compact_state: bool = False
    validate_every_epochs: int = 1
    log_every: int = 10
    compile: bool = False
    tensorboard: bool = True

    def __post_init__(self) -> None:
        """Check names and ranges."""
        for name in ("epochs", "batch_size", "halving_epochs", "validate_every_epochs", "log_every"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        for name in ("learning_rate", "max_steps", "max_minutes", "clip_norm"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive", value)
        for name in ("weight_decay", "warmup_steps", "checkpoint_minutes"):
            _require(getattr(self, name) >= 0, f"{name} must be 0 or more", getattr(self, name))
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas must be two numbers in [0, 1)",
            self.betas,
        )
        _require(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay must be in (0, 1)", self.ema_decay)
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("precision", ("fp32", "bf16", "auto")),
        ):
            value = getattr(self, name)
            _require(value in known, f"{name} must be one of {', '.join(known)}", repr(value))

    def total_steps(self, batches_per_epoch: int) -> int:
        """Steps after which the run ends, if its time does not end first."""
        steps = self.epochs * batches_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def fraction(self, *, step: int, seconds: float, total_steps: int) -> float:
        """The part of the run that is over after `step` updates and `seconds`, at most 1."""
        fraction = step / total_steps
        if self.max_minutes is not None:
            fraction = max(fraction, seconds / (SECONDS_PER_MINUTE * self.max_minutes))
        return min(fraction, 1.0)

    def rate(self, fraction: float, *, step: int) -> float:
        """The learning rate of update number `step` (from 0) of a run of which `fraction` is over."""
        return self.learning_rate * learning_rate_factor(
            self.schedule,
            fraction,
            step=step,
            warmup_steps=self.warmup_steps,
            halvings=self.epochs / self.halving_epochs,
        )


def _require(condition: bool, expected: str, found: object) -> None:
    if not condition:
        raise ValueError(f"{expected}, got {found}; correct it in the recipe or with --set training.…")

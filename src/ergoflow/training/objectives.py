"""What is minimised: functions of a step and a batch of windows that return a total and its named parts.

An objective may look at the model it is given (the unitary term needs its operator); the trainer may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ergoflow.training.losses import UNITARY_FORMS, UnitaryForm, relative_l2_loss, unitary_loss
from ergoflow.training.stepper import NormalizedStep


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Settings of the unrolled relative L2 objective with the paper's unitary term.

    `unroll` steps are taken from the first frame of a window. With `pushforward` the state is detached before
    every step, so each step learns to correct what the earlier ones made without being differentiated through
    them. `unitary_weight` is the paper's lambda (its released script uses 1); a model without a latent
    operator needs 0.
    """

    unroll: int = 1
    pushforward: bool = False
    unitary_weight: float = 1.0
    unitary_form: UnitaryForm = "algorithm"
    unitary_samples: int = 64

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.unroll < 1:
            raise ValueError(f"unroll must be at least 1, got {self.unroll}; 1 is one-step training")
        if not self.unitary_weight >= 0:
            raise ValueError(f"unitary_weight must be 0 or more, got {self.unitary_weight}; 0 switches it off")
        if self.unitary_form not in UNITARY_FORMS:
            raise ValueError(
                f"unitary_form must be one of {', '.join(UNITARY_FORMS)}, got {self.unitary_form!r}; "
                'the default is "algorithm"'
            )
        if self.unitary_samples < 1:
            raise ValueError(f"unitary_samples must be at least 1, got {self.unitary_samples}; the default is 64")

    @property
    def window(self) -> int:
        """Number of frames that a training window needs."""
        return self.unroll + 1


@dataclass(frozen=True)
class Losses:
    """A scalar to minimise and the named scalars it is made of (unweighted)."""

    total: Tensor
    parts: dict[str, Tensor]


class Objective(Protocol):
    """A function (step, windows (B, window, C, *grid)) -> Losses.

    All its randomness comes from `generator`.
    """

    @property
    def generator(self) -> torch.Generator:
        """The source of randomness; the trainer keeps its state in every checkpoint."""
        ...

    def __call__(self, step: NormalizedStep, batch: Tensor) -> Losses:
        """The losses of one batch."""
        ...


def make_objective(config: ObjectiveConfig, *, generator: torch.Generator) -> Objective:
    """The objective mean_k relL2(z_k, window_k) + weight * unitary term, on decoded normalised fields.

    z_0 = window_0, z_k = step(z_{k-1}), k = 1 ... unroll. A `generator` on the device of the model avoids one
    copy per step.
    """
    return _UnrolledObjective(config, generator)


@dataclass(frozen=True)
class _UnrolledObjective:
    config: ObjectiveConfig
    generator: torch.Generator

    def __call__(self, step: NormalizedStep, batch: Tensor) -> Losses:
        forward = _unrolled_error(step, batch, self.config)
        parts = {"relative_l2": forward}
        matrix = _penalised_matrix(step, self.config)
        if matrix is None:
            return Losses(forward, parts)
        parts["unitary"] = unitary_loss(
            matrix,
            num_samples=self.config.unitary_samples,
            form=self.config.unitary_form,
            generator=self.generator,
        )
        return Losses(forward + self.config.unitary_weight * parts["unitary"], parts)


def _unrolled_error(step: NormalizedStep, batch: Tensor, config: ObjectiveConfig) -> Tensor:
    """Relative L2 error, mean over the unrolled steps."""
    if batch.shape[1] < config.window:
        raise ValueError(
            f"unroll={config.unroll} needs windows of {config.window} frames, got {batch.shape[1]}; "
            f"build the sampler with window={config.window}"
        )
    state = batch[:, 0]  # (B, C, *grid)
    errors = []
    for k in range(1, config.window):
        state = step(state.detach() if config.pushforward else state)
        errors.append(relative_l2_loss(state, batch[:, k]))
    return torch.stack(errors).mean()


def _penalised_matrix(step: NormalizedStep, config: ObjectiveConfig) -> Tensor | None:
    """The matrix the unitary term acts on.

    None where there is nothing to penalise (weight 0, mode free or exact).
    """
    if config.unitary_weight == 0:
        return None
    operator = getattr(step.model, "operator", None)
    if operator is None:
        raise ValueError(
            f"the unitary term needs a model with a latent operator, got {type(step.model).__name__}; "
            "set objective.unitary_weight=0"
        )
    return operator.matrix if operator.mode == "penalty" else None

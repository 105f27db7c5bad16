"""What is minimised: functions of a step and a batch of windows that return a total and its named parts.

An objective may look at the model it is given (the unitary term needs its operator); the trainer may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ergoflow.training.dissipation import OUTER_RADIUS, dissipativity_loss, shell_samples
from ergoflow.training.ensemble import ensemble_loss
from ergoflow.training.losses import (
    UNITARY_FORMS,
    UnitaryForm,
    log_spectrum_loss,
    relative_l2_loss,
    sobolev_loss,
    unitary_loss,
)
from ergoflow.training.stepper import NormalizedStep


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Settings of the unrolled relative L2 objective with the paper's unitary term and the baselines' own terms.

    `unroll` steps are taken from the first frame of a window; with `unroll_from` > 0 that part of the run trains on
    one step, and the rest on 2, 4, ... `unroll` steps in equal parts (0: on `unroll` steps throughout). With
    `pushforward` the state is detached before every step, so each step learns to correct what the earlier ones
    made without being differentiated through them. With `recompute` the inside of a step is computed again when it is
    differentiated: unrolling then needs the memory of one step, and a third more time. `noise` is the standard
    deviation, in normalised units, of what is added to the first frame.

    With `members` > 1 so many forecasts start from each first frame, told apart by its noise, and the relative L2 error
    is replaced by the probability score of what they draw (`training.ensemble`): for a model that draws its answer.

    `sobolev_order` k > 0 replaces the relative L2 error by that of the derivatives up to order k (MNO: 1).
    `spectral_weight` adds the mean squared difference of log spectra; it optimises what the spectral metrics report.
    `unitary_weight` is the paper's lambda (its released script uses 1); a model without a latent operator needs 0.
    `dissipativity_weight` (MNO: 0.01) asks the step to be z -> `dissipativity_scale` z on random states whose norms
    lie in `dissipativity_shell`, in units of the largest norm of the training states.
    """

    unroll: int = 1
    unroll_from: float = 0.0
    pushforward: bool = False
    recompute: bool = False
    noise: float = 0.0
    members: int = 1
    sobolev_order: int = 0
    spectral_weight: float = 0.0
    unitary_weight: float = 1.0
    unitary_form: UnitaryForm = "algorithm"
    unitary_samples: int = 64
    dissipativity_weight: float = 0.0
    dissipativity_scale: float = 0.5
    dissipativity_shell: tuple[float, float] = (1.0, OUTER_RADIUS)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.unroll < 1:
            raise ValueError(f"unroll must be at least 1, got {self.unroll}; 1 is one-step training")
        if self.members < 1:
            raise ValueError(f"members must be at least 1, got {self.members}; 1 is a forecast of the mean")
        if self.members > 1 and (self.noise == 0 or self.sobolev_order > 0):
            raise ValueError(
                f"{self.members} members need noise that tells them apart and no Sobolev error, got noise {self.noise} "
                f"and order {self.sobolev_order}; set objective.noise=0.01 and objective.sobolev_order=0"
            )
        if not 0 <= self.unroll_from < 1:
            raise ValueError(f"unroll_from must be in [0, 1), got {self.unroll_from}; 0 unrolls from the start")
        for name in ("noise", "sobolev_order", "spectral_weight", "unitary_weight", "dissipativity_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}; 0 switches it off")
        if self.unitary_form not in UNITARY_FORMS:
            raise ValueError(
                f"unitary_form must be one of {', '.join(UNITARY_FORMS)}, got {self.unitary_form!r}; "
                'the default is "algorithm"'
            )
        if self.unitary_samples < 1:
            raise ValueError(f"unitary_samples must be at least 1, got {self.unitary_samples}; the default is 64")
        if not 0 <= self.dissipativity_scale < 1:
            raise ValueError(
                f"dissipativity_scale must be in [0, 1) to contract, got {self.dissipativity_scale}; MNO's is 0.5"
            )
        if len(self.dissipativity_shell) != 2 or not 0 < self.dissipativity_shell[0] < self.dissipativity_shell[1]:
            raise ValueError(
                "dissipativity_shell must be two radii with 0 < inner < outer, "
                f"got {self.dissipativity_shell}; MNO's are (1.0, {OUTER_RADIUS})"
            )

    @property
    def window(self) -> int:
        """Number of frames that a training window needs."""
        return self.unroll + 1

    def unroll_at(self, progress: float) -> int:
        """Steps to take when the part `progress` of the run is over."""
        if self.unroll_from == 0 or self.unroll == 1:
            return self.unroll
        if progress < self.unroll_from:
            return 1
        # The stages 2, 4, ... below `unroll`, then `unroll` itself.
        stages = (self.unroll - 1).bit_length()
        stage = int(stages * (progress - self.unroll_from) / (1 - self.unroll_from))
        return min(2 ** (stage + 1), self.unroll)


@dataclass(frozen=True)
class Losses:
    """A scalar to minimise and the named scalars it is made of (unweighted)."""

    total: Tensor
    parts: dict[str, Tensor]


class Objective(Protocol):
    """A function (step, windows (B, window, C, *grid), progress of the run) -> Losses.

    All its randomness comes from `generator`; the names of its parts never change.
    """

    @property
    def generator(self) -> torch.Generator:
        """The source of randomness; the trainer keeps its state in every checkpoint."""
        ...

    def stage(self, progress: float) -> int:
        """All that the losses depend on of the run's progress, as a number: two with the same are the same function."""
        ...

    def __call__(self, step: NormalizedStep, batch: Tensor, progress: float = 1.0) -> Losses:
        """The losses of one batch when the part `progress`, in [0, 1], of the run is over."""
        ...


def make_objective(
    config: ObjectiveConfig,
    *,
    generator: torch.Generator,
    radius: float | None = None,
    periodic: tuple[bool, ...] | None = None,
    length: tuple[float, ...] | None = None,
) -> Objective:
    """The objective mean_k error(z_k, window_k) + weighted terms, on decoded normalised fields.

    z_0 = window_0 (+ noise), z_k = step(z_{k-1}), k = 1 ... unroll; the error is relative L2, Sobolev or an ensemble's.
    `radius` is the largest norm (`dissipation.state_norm`) of the normalised training states; None: not known, no
    dissipativity.
    `periodic` says axis by axis whether the grid wraps around, None that all axes do; `length` gives its sides, None
    means 2 pi each. A `generator` on the device of the model avoids one copy per step.
    """
    if config.dissipativity_weight > 0 and radius is None:
        raise ValueError(
            "the dissipativity term needs the largest norm of the training states as `radius`, got None; "
            "pass it, or set objective.dissipativity_weight=0"
        )
    if config.spectral_weight > 0 and periodic is not None and not all(periodic):
        raise ValueError(
            f"the spectral term needs a grid that is periodic along every axis, got periodic={periodic}; "
            "set objective.spectral_weight=0"
        )
    return _UnrolledObjective(config, generator, radius, periodic, length)


@dataclass(frozen=True)
class _UnrolledObjective:
    config: ObjectiveConfig
    generator: torch.Generator
    radius: float | None
    periodic: tuple[bool, ...] | None
    length: tuple[float, ...] | None

    def __call__(self, step: NormalizedStep, batch: Tensor, progress: float = 1.0) -> Losses:
        config = self.config
        parts = self._forecast(step, batch, config.unroll_at(progress))
        total = parts["ensemble" if config.members > 1 else "sobolev" if config.sobolev_order else "relative_l2"]
        if config.spectral_weight > 0:
            total = total + config.spectral_weight * parts["spectral"]
        matrix = _penalised_matrix(step, config)
        if matrix is not None:
            parts["unitary"] = unitary_loss(
                matrix, num_samples=config.unitary_samples, form=config.unitary_form, generator=self.generator
            )
            total = total + config.unitary_weight * parts["unitary"]
        if config.dissipativity_weight > 0:
            assert self.radius is not None
            inner, outer = (factor * self.radius for factor in config.dissipativity_shell)
            states = shell_samples(batch[:, 0], inner, outer, generator=self.generator)
            parts["dissipativity"] = dissipativity_loss(step, states, scale=config.dissipativity_scale)
            total = total + config.dissipativity_weight * parts["dissipativity"]
        return Losses(total, parts)

    def stage(self, progress: float) -> int:
        return self.config.unroll_at(progress)

    def _forecast(self, step: NormalizedStep, batch: Tensor, unroll: int) -> dict[str, Tensor]:
        """The errors of the unrolled steps by name, each the mean over the steps."""
        config = self.config
        if batch.shape[1] < config.window:
            raise ValueError(
                f"unroll={config.unroll} needs windows of {config.window} frames, got {batch.shape[1]}; "
                f"build the sampler with window={config.window}"
            )
        state = self._noisy(self._for_each_member(batch[:, 0]))  # (members B, C, *grid)
        errors = []
        for k in range(1, unroll + 1):
            state = self._stepped(step, state.detach() if config.pushforward else state)
            errors.append(self._errors(state, self._for_each_member(batch[:, k])))
            if config.members > 1:
                members = state.unflatten(0, (config.members, -1))
                change = batch[:, 1] - batch[:, 0]
                errors[-1]["ensemble"] = ensemble_loss(members, batch[:, k], change, periodic=self._wraps(state))
        return {name: torch.stack([error[name] for error in errors]).mean() for name in errors[0]}

    def _stepped(self, step: NormalizedStep, state: Tensor) -> Tensor:
        if not self.config.recompute:
            return step(state)
        # No model of ours draws from a generator (noise comes from the state); one with dropout must not be recomputed.
        moved: Tensor = checkpoint(step, state, use_reentrant=False, preserve_rng_state=False)
        return moved

    def _errors(self, pred: Tensor, true: Tensor) -> dict[str, Tensor]:
        """The errors of one forecast by name."""
        config = self.config
        errors = {"relative_l2": relative_l2_loss(pred, true)}
        if config.sobolev_order > 0 or config.members > 1:
            errors["relative_l2"] = errors["relative_l2"].detach()
        if config.sobolev_order > 0:
            errors["sobolev"] = sobolev_loss(
                pred, true, order=config.sobolev_order, periodic=self._wraps(pred), length=self.length
            )
        if config.spectral_weight > 0:
            errors["spectral"] = log_spectrum_loss(pred, true)
        return errors

    def _wraps(self, state: Tensor) -> tuple[bool, ...]:
        return self.periodic or (True,) * (state.ndim - 2)

    def _for_each_member(self, frame: Tensor) -> Tensor:
        return frame if self.config.members == 1 else torch.cat([frame] * self.config.members)

    def _noisy(self, state: Tensor) -> Tensor:
        if self.config.noise == 0:
            return state
        device = self.generator.device
        noise = torch.randn(state.shape, generator=self.generator, device=device, dtype=state.dtype)
        return state + self.config.noise * noise.to(state.device)


def check_operator(step: NormalizedStep, config: ObjectiveConfig) -> None:
    """Raise ValueError where the unitary term is asked for of a model without a latent operator."""
    if config.unitary_weight > 0 and getattr(step.model, "operator", None) is None:
        raise ValueError(
            f"the unitary term needs a model with a latent operator, got {type(step.model).__name__}; "
            "set objective.unitary_weight=0"
        )


def _penalised_matrix(step: NormalizedStep, config: ObjectiveConfig) -> Tensor | None:
    """The matrix the unitary term acts on.

    None where there is nothing to penalise (weight 0, mode free or exact).
    """
    if config.unitary_weight == 0:
        return None
    check_operator(step, config)
    operator: Any = step.model.operator
    return operator.matrix if operator.mode == "penalty" else None

"""A trained model as a Step: the only place where normalisation meets a model.

A model maps normalised fields to normalised fields and does not know whether its output is the next state or
an increment; `NormalizedStep` decides that. `PhysicalStep` puts physical units around it, so that a model can
be rolled out exactly like a solver. `NormalizedWindows` gives the trainer training windows in the same units.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from ergoflow.data.normalize import Normalizer
from ergoflow.data.windows import WindowOrder

Prediction = Literal["state", "increment"]


class NormalizedStep(nn.Module):
    """The next normalised state z' of a normalised state z (B, C, *grid).

    predict="state":      z' = model(z)
    predict="increment":  z' = (1 - r) z + s * model(z),  s = std_delta / std per channel,

    so that a model of increments sees targets of unit variance, and, for r = 0, a model whose output is zero is
    persistence. `scale` is s, shape (C,); a step that predicts states needs none. z' has the dtype of z also
    under autocast.

    With `relaxation` r > 0 no roll-out of a bounded model, |model(z)| <= B (a linear head on normalised features is
    one), grows without limit: |z'| <= (1 - r) |z| + s B, so it ends in the ball of radius s B / r.

    `kept_means` lists the channels, by number, whose mean over the grid no step changes, such as the flux through the
    planes of a channel. A model that has to learn this from small increments drifts.
    """

    scale: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        predict: Prediction = "state",
        scale: Tensor | None = None,
        *,
        relaxation: float = 0.0,
        kept_means: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if predict not in ("state", "increment"):
            raise ValueError(f'predict must be "state" or "increment", got {predict!r}; correct the recipe')
        if predict == "increment" and (scale is None or scale.ndim != 1):
            found = "none" if scale is None else f"shape {tuple(scale.shape)}"
            raise ValueError(
                f"increments need a scale of shape (C,), got {found}; pass std_delta / std of the normaliser"
            )
        self.model = model
        self.predict, self.relaxation, self.kept_means = predict, relaxation, tuple(kept_means)
        self.register_buffer("scale", None if scale is None else scale.detach().clone())

    def forward(self, state: Tensor) -> Tensor:
        """z' of shape (B, C, *grid)."""
        moved = self.model(state).to(state.dtype)
        if self.predict == "increment":
            assert self.scale is not None
            start = state if self.relaxation == 0 else (1 - self.relaxation) * state
            moved = start + _per_channel(self.scale, moved) * moved
        return with_means_of(state, moved, self.kept_means)


class PhysicalStep(nn.Module):
    """The next physical state x' of a physical state x (B, C, *grid): normalise, step, denormalise.

    z = (x - mean) / std,  x' = mean + std * step(z), with one mean and one std per channel. The model computes in its
    own dtype, and x' has that of x. On another `grid` than the model was trained on (None: any) it warns: a stencil
    of points is another one there.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, step: nn.Module, normalizer: Normalizer, *, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.step, self.grid = step, grid
        # Buffers, so that `.to(device)` moves the units together with the weights.
        self.register_buffer("mean", normalizer.mean.detach().clone())
        self.register_buffer("std", normalizer.std.detach().clone())

    def forward(self, state: Tensor) -> Tensor:
        """x' of shape (B, C, *grid)."""
        if self.grid is not None and tuple(state.shape[2:]) != self.grid:
            warnings.warn(f"trained on a grid {self.grid}, given {tuple(state.shape[2:])}", stacklevel=2)
        mean, std = _per_channel(self.mean, state), _per_channel(self.std, state)
        moved: Tensor = self.step(((state - mean) / std).to(self.mean.dtype)).to(state.dtype)
        return mean + std * moved


class Windows(Protocol):
    """A source of training windows.

    `epoch` is a pure function of its arguments, so a run resumes at any batch.
    """

    @property
    def sampler(self) -> WindowOrder:
        """What decides which windows make up each batch."""
        ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Batches (B, window, C, *grid) of one epoch, from batch number `start` on."""
        ...


@dataclass(frozen=True)
class NormalizedWindows:
    """The windows of a source in physical units, in normalised units."""

    source: Windows
    normalizer: Normalizer

    @property
    def sampler(self) -> WindowOrder:
        """As the source."""
        return self.source.sampler

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Batches z = (x - mean) / std, on the device of the source's batches."""
        normalizer = None
        for batch in self.source.epoch(epoch, start):  # (B, window, C, *grid)
            # Moved once per epoch: each move waits for the device.
            normalizer = normalizer or self.normalizer.to(batch.device)
            yield normalizer.normalize(batch, grid_ndim=batch.ndim - 3)


def with_means_of(state: Tensor, moved: Tensor, channels: Sequence[int]) -> Tensor:
    """The moved state (B, C, *grid), but some channels with the mean over the grid that the state has, in a copy."""
    if not channels:
        return moved
    moved, grid = moved.clone(), tuple(range(1, state.ndim - 1))
    for channel in channels:
        change = (moved[:, channel] - state[:, channel]).mean(grid, keepdim=True)
        moved[:, channel] = moved[:, channel] - change
    return moved


def _per_channel(values: Tensor, state: Tensor) -> Tensor:
    """Per-channel values (C,) shaped to multiply a state (B, C, *grid)."""
    if state.ndim < 3 or state.shape[1] != values.shape[0]:
        raise ValueError(
            f"a state must be (B, {values.shape[0]}, *grid), got {tuple(state.shape)}; "
            "add the axis of the batch, or build the step with the statistics of the same fields"
        )
    if not state.is_floating_point():
        raise ValueError(f"a state must hold real numbers of floating point, got {state.dtype}; use state.float()")
    return values.to(state.dtype).reshape(-1, *(1,) * (state.ndim - 2))

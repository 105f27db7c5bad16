"""A roll-out held at the climate of its training data: a thermostat for the waves of every length.

Let m be the mean of the training states over time and periodic axes, and x_k the Fourier coefficients of x - m along
those axes. A shell n holds the waves n - 1/2 <= |k| < n + 1/2, and e_n(x) is the mean of |x_k|^2 over it and over the
axes that end at walls. A step f held by the share a goes to

    x'_k = f_k (E_n / e_n(f))^(a/2),  n > 0,        x'_0 = (1 - a) f_0,

with E_n the mean of e_n over the training states. ln e_n so closes the part a of its distance from ln E_n in each step,
as in the thermostat of Berendsen et al. (1984). Energy that moves about E_n within 1/a steps is hardly touched. Where a
model lets ln e_n fall by r in every step, e_n settles at E_n exp(-r (1 - a) / a) in place of zero.

What a model draws or damps a little too much in each step adds up over thousands; one step of data does not show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ergoflow.numerics.fourier import mode_multiplicity, mode_numbers, shell_numbers
from ergoflow.training.stepper import NormalizedStep, with_means_of

# Shells with less than this part of the energy of the strongest hold rounding: those a solver's mask empties.
ROUNDING = 1e-10


class Climate(NamedTuple):
    """What a step is held at: m, (C, *grid) with one point along periodic axes, and E_n, (C, shells), n = 1, 2, ..."""

    mean: Tensor
    energy: Tensor

    @classmethod
    def of(cls, states: Iterable[Tensor], periodic: Sequence[bool]) -> Climate:
        """The climate of normalised states, given as batches (N, C, *grid); they are gone through once.

        Their mean need not be known before: it is in shell 0 alone.
        """
        axes = _periodic_axes(periodic)
        mean, energy, count = torch.zeros(()), torch.zeros(()), 0
        for batch in states:
            batch = batch.double()
            mean = mean + batch.mean(axes, keepdim=True).sum(0)
            energy = energy + _energies(_modes(batch, axes), batch.shape, axes).sum(0)
            count += len(batch)
        return cls(mean=(mean / count).float(), energy=(energy / count).float())

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {"mean": self.mean.tolist(), "energy": self.energy.tolist()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Climate:
        """The climate that `to_dict` wrote."""
        return cls(mean=torch.tensor(data["mean"]), energy=torch.tensor(data["energy"]))


class HeldStep(nn.Module):
    """A normalised step whose results are held at a climate by the share `share`; see the head of this file.

    Channels whose mean over the grid the step keeps have it kept here, too.
    """

    mean: Tensor
    energy: Tensor

    def __init__(self, step: NormalizedStep, climate: Climate, share: float, *, periodic: Sequence[bool]) -> None:
        super().__init__()
        if not any(periodic):
            raise ValueError("task.hold needs an axis along which the flow is periodic, got none; set task.hold=0")
        self.step, self.share, self.axes = step, share, _periodic_axes(periodic)
        self.register_buffer("mean", climate.mean)
        self.register_buffer("energy", climate.energy)

    @property
    def model(self) -> nn.Module:
        """The model inside the step."""
        return self.step.model

    def forward(self, state: Tensor) -> Tensor:
        """x' of shape (B, C, *grid)."""
        self._require_grid(state)
        moved = self.step(state)
        # The sum over a shell is a product.
        with torch.autocast(state.device.type, enabled=False):
            return with_means_of(moved, self._held(moved), self.step.kept_means)

    def _held(self, moved: Tensor) -> Tensor:
        modes = _modes(moved - self.mean, self.axes)
        energy = _energies(modes, moved.shape, self.axes)
        held = self.energy > ROUNDING * self.energy.amax(1, keepdim=True)
        tiny = torch.finfo(energy.dtype).tiny
        gain = torch.where(held, self.energy / energy.clamp(min=tiny), 1.0) ** (self.share / 2)  # (B, C, shells)
        # The shell 0 comes first.
        gain = torch.cat((torch.full_like(gain[..., :1], 1 - self.share), gain), dim=-1)
        gain = gain[..., _shells(moved.shape, self.axes, device=moved.device).flatten()]  # (B, C, modes)
        sizes = [1 if axis not in self.axes else modes.shape[axis] for axis in range(2, moved.ndim)]
        modes = modes * gain.reshape(*gain.shape[:2], *sizes)
        kept = [moved.shape[axis] for axis in self.axes]
        return self.mean + torch.fft.irfftn(modes, s=kept, dim=self.axes, norm="forward")

    def _require_grid(self, state: Tensor) -> None:
        """Refuse another grid than that of the climate: it has other waves, and other points between the walls."""
        walls = [1 if axis in self.axes else state.shape[axis] for axis in range(2, state.ndim)]
        if list(self.mean.shape[1:]) != walls or self.energy.shape[1] != _last_shell(state.shape, self.axes):
            raise ValueError(
                f"a held step needs the grid of its training data, got {tuple(state.shape[2:])}; "
                "interpolate the state to that grid, or set task.hold=0 and train anew"
            )


def _periodic_axes(periodic: Sequence[bool]) -> tuple[int, ...]:
    """Axes of a state (B, C, *grid)."""
    return tuple(2 + axis for axis, around in enumerate(periodic) if around)


def _modes(states: Tensor, axes: tuple[int, ...]) -> Tensor:
    return torch.fft.rfftn(states, dim=axes, norm="forward")


def _energies(modes: Tensor, shape: Sequence[int], axes: tuple[int, ...]) -> Tensor:
    """e_n of modes (B, C, ...) for n = 1, 2, ... up to the last one there is: (B, C, shells)."""
    walls = tuple(axis for axis in range(2, modes.ndim) if axis not in axes)
    squares = modes.abs().square()
    squares = (squares.mean(walls) if walls else squares).flatten(2)  # (B, C, modes)
    shells = _shells(shape, axes, device=modes.device)
    counts = mode_multiplicity(shape[axes[-1]], device=modes.device).expand_as(shells).flatten()
    last = _last_shell(shape, axes)
    on_shell = (shells.flatten()[:, None] == torch.arange(1, last + 1, device=modes.device)).to(squares.dtype)
    on_shell = on_shell * counts[:, None]
    return squares @ (on_shell / on_shell.sum(0).clamp(min=1))


def _last_shell(shape: Sequence[int], axes: tuple[int, ...]) -> int:
    """The shell of the shortest wave."""
    return int(math.sqrt(sum((shape[axis] // 2) ** 2 for axis in axes)) + 0.5)


def _shells(shape: Sequence[int], axes: tuple[int, ...], *, device: torch.device) -> Tensor:
    """The shell of every mode along the periodic axes."""
    return shell_numbers(mode_numbers([shape[axis] for axis in axes], device=device))

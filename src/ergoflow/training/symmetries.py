"""The exact symmetries of the flows, as augmentation of training windows.

A symmetry takes solutions to solutions, so the image of a training window is as true as the window. Here each one
relabels the points of the grid axis by axis and multiplies each channel by a sign,

    (g x)[c, i, j] = s_c · x[c, (σ_X i + a_X) mod X, (σ_Y j + a_Y) mod Y],     s, σ = ±1,

with one g per sample, the same for all frames of a window. Windows must be in physical units: a channel that changes
sign must not have had its mean taken off.

Kolmogorov flow, ω_t = −u·∇ω + ν∇²ω − drag·ω − A k cos(ky), k = 2πn/L_y. A mirror reverses vorticity:

    ω(x + a, y)                  any a                      the force does not depend on x
    −ω(−x, y + L_y/2n)           shift and reflect, S       both the mirror and the half period reverse the force
    ω(−x, −y)                    rotation by π, R           cos is even

S² is the shift by a period of the force, and S has the order 2n; with R and all a the group has 4nX elements. If a half
period is not a whole number of grid points, only those multiples of it that are whole numbers are used.

Channel, walls across y, (u, v, w) on planes normal to the stream. The three-dimensional flow is a solution again after

    shifts along z;   z → −z with w → −w;   y → −y with v → −v,

and its planes are then the images of its planes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ergoflow.data.info import DatasetInfo
from ergoflow.data.windows import WindowOrder
from ergoflow.training.distributed import LaunchContext
from ergoflow.training.stepper import Windows

# Keeps the draws apart from those of the sampler, which has the same seed and epoch.
AUGMENTATION_STREAM = 1
CHANNEL_FIELDS = ("velocity_x", "velocity_y", "velocity_z")


@dataclass(frozen=True, eq=False)
class Moves:
    """One symmetry per sample: index i of an axis reads σ·i + a modulo its size, channels are multiplied by signs."""

    flips: Tensor  # (B, axes), σ = ±1
    shifts: Tensor  # (B, axes), a
    signs: Tensor  # (B, C), ±1

    def __call__(self, windows: Tensor) -> Tensor:
        """Return the moved windows (B, window, C, *grid)."""
        flips, shifts, signs = (values.to(windows.device, non_blocking=True) for values in self._tables())
        axes = windows.ndim - 3
        index = torch.zeros((), dtype=torch.int64, device=windows.device)
        for axis, size in enumerate(windows.shape[3:]):
            points = torch.arange(size, device=windows.device)
            source = (flips[:, axis, None] * points + shifts[:, axis, None]) % size  # (B, S)
            index = index * size + source.reshape(-1, *(size if a == axis else 1 for a in range(axes)))
        flat = windows.flatten(3).flatten(1, 2)  # (B, window·C, N)
        moved = flat.gather(2, index.flatten(1)[:, None].expand_as(flat)).view(windows.shape)
        return moved * signs.to(windows.dtype).reshape(len(signs), 1, -1, *(1,) * axes)

    def share(self, context: LaunchContext) -> Moves:
        """Return the moves of one process's rows of the batch, as `RankSampler` shares it."""
        return Moves(*(values[context.rank :: context.world_size] for values in self._tables()))

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.flips, self.shifts, self.signs


class Symmetries(Protocol):
    """A group of symmetries from which elements are drawn uniformly."""

    def draw(self, count: int, rng: np.random.Generator) -> Moves:
        """Return `count` independent elements."""
        ...


@dataclass(frozen=True, kw_only=True)
class KolmogorovSymmetries:
    """The group of a Kolmogorov flow's vorticity on a grid (X, Y), the force having n periods along y."""

    grid: tuple[int, int]
    forcing_wavenumber: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        if len(self.grid) != 2 or min(self.grid) < 1 or self.forcing_wavenumber < 1:
            raise ValueError(
                f"a grid (X, Y) and a forcing wavenumber of at least 1 were expected, got {self.grid} and "
                f"{self.forcing_wavenumber}; take them from the data set"
            )

    @property
    def half_period_step(self) -> int:
        """The smallest number of half periods of the force that is a whole number of grid points."""
        half_periods = 2 * self.forcing_wavenumber
        return half_periods // math.gcd(half_periods, self.grid[1])

    def elements(self, x_shift: np.ndarray, half_periods: np.ndarray, rotated: np.ndarray) -> Moves:
        """Return S^j R^r followed by shifts along x, j `half_periods` and r 0 or 1, three arrays (B,)."""
        mirrored = 1 - 2 * (half_periods % 2)
        turned = 1 - 2 * rotated
        y_shift = half_periods * self.grid[1] // (2 * self.forcing_wavenumber)
        return _moves(flips=(mirrored * turned, turned), shifts=(x_shift, y_shift), signs=(mirrored,))

    def draw(self, count: int, rng: np.random.Generator) -> Moves:
        """Return `count` independent elements."""
        step = self.half_period_step
        return self.elements(
            x_shift=rng.integers(self.grid[0], size=count),
            half_periods=step * rng.integers(2 * self.forcing_wavenumber // step, size=count),
            rotated=rng.integers(2, size=count),
        )


@dataclass(frozen=True, kw_only=True)
class ChannelSymmetries:
    """The group of a channel's velocity (u, v, w) on planes (Y, Z), walls across y."""

    grid: tuple[int, int]

    def __post_init__(self) -> None:
        """Check the numbers."""
        if len(self.grid) != 2 or min(self.grid) < 1:
            raise ValueError(f"a grid (Y, Z) was expected, got {self.grid}; take it from the data set")

    def elements(self, z_shift: np.ndarray, y_mirrored: np.ndarray, z_mirrored: np.ndarray) -> Moves:
        """Return the two mirrors (0 or 1) followed by shifts along z, three arrays (B,)."""
        y_sign, z_sign = 1 - 2 * y_mirrored, 1 - 2 * z_mirrored
        # The wall-normal mirror reads Y − 1 − i.
        return _moves(
            flips=(y_sign, z_sign),
            shifts=(y_mirrored * (self.grid[0] - 1), z_shift),
            signs=(np.ones_like(y_sign), y_sign, z_sign),
        )

    def draw(self, count: int, rng: np.random.Generator) -> Moves:
        """Return `count` independent elements."""
        return self.elements(
            z_shift=rng.integers(self.grid[1], size=count),
            y_mirrored=rng.integers(2, size=count),
            z_mirrored=rng.integers(2, size=count),
        )


def flow_symmetries(info: DatasetInfo) -> Symmetries:
    """Return the symmetries of the flow that a data set holds."""
    if (
        info.fields == ("vorticity",)
        and info.boundaries == ("PERIODIC", "PERIODIC")
        and "forcing_wavenumber" in info.parameters
    ):
        return KolmogorovSymmetries(
            grid=(info.grid[0], info.grid[1]), forcing_wavenumber=round(info.parameters["forcing_wavenumber"])
        )
    if info.fields == CHANNEL_FIELDS and info.boundaries == ("WALL", "PERIODIC"):
        return ChannelSymmetries(grid=(info.grid[0], info.grid[1]))
    raise ValueError(
        "the symmetries of a Kolmogorov vorticity or of a channel's velocity planes are known, got fields "
        f"{info.fields} with boundaries {info.boundaries}; set training.augment=false"
    )


@dataclass(frozen=True)
class AugmentedWindows:
    """The windows of a source in physical units, each moved by a symmetry of its own.

    The draws are a pure function of (seed, epoch, number of the batch), so a run resumes at any batch. Under torchrun
    they are made for the whole batch and shared like it: `context` must be that of the source's `RankSampler`.
    """

    source: Windows
    symmetries: Symmetries
    _: KW_ONLY
    seed: int
    context: LaunchContext = field(default_factory=LaunchContext)

    @property
    def sampler(self) -> WindowOrder:
        """As the source."""
        return self.source.sampler

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Batches (B, window, C, *grid) of one epoch, from batch number `start` on."""
        for number, batch in enumerate(self.source.epoch(epoch, start), start):
            entropy = np.random.SeedSequence([self.seed, epoch, number], spawn_key=(AUGMENTATION_STREAM,))
            moves = self.symmetries.draw(len(batch) * self.context.world_size, np.random.default_rng(entropy))
            yield moves.share(self.context)(batch)


def _moves(*, flips: tuple[np.ndarray, ...], shifts: tuple[np.ndarray, ...], signs: tuple[np.ndarray, ...]) -> Moves:
    """Return the moves of columns (B,), one per axis or channel."""
    return Moves(*(torch.from_numpy(np.stack(columns, axis=1)) for columns in (flips, shifts, signs)))

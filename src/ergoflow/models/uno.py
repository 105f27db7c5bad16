"""`uno`, the U-shaped neural operator: Rahman et al. 2023, "U-NO: U-shaped neural operators".

The architecture is that of the authors' package `neuraloperator`. Coordinates are appended to the state and an
MLP lifts every point. Each of n blocks maps u on the grid of the block before it to the grid that its scaling
s_j asks for,

    v = SpectralConv(u) + b + R W₁u,    u ← MLP(v) + R W₂u,    MLP(v) = A₂ GELU(A₁v + a₁) + a₂,

R the resampling onto the new grid. Blocks 0, 1, .. below n/2 hand W₃u to blocks n − 1, n − 2, .., which take it,
resampled, as further channels of their input. An MLP projects every point. The GELUs inside the MLPs are the only
nonlinearities: in `neuraloperator` (1.0 to 2.0) a block applies its outer one only if it is not its own last layer,
which it always is.

Sizes. The grid after block j is round(s_j · the grid before it), the last one the input's grid: the scalings
must multiply to 1. With 1, ½, 1, 2 the blocks end on N, N/2, N/2, N. Odd N works: N/2 is rounded and the last
block returns to N.

Parameters of the default configuration, one channel in and out: 17,438,305, the printed count.

    lift        MLP 1 + 2 → 96 → 96                                              9,696
    block 0, 1  spectral 24·13·96·96 = 2,875,392; b 96; W₁, W₂ 2 × 9,216;
                MLP 96 → 48 → 96 9,360                                   2 × 2,903,280
    block 2, 3  spectral 24·13·192·96 = 5,750,784; b 96; W₁, W₂ 2 × 18,432;
                MLP 9,360                                                2 × 5,797,104
    bridges     W₃ 2 × 9,216                                                    18,432
    project     MLP 96 → 96 → 1                                                  9,409

Walls: axes that are not periodic get zeros beyond both ends after the lift, cropped before the projection.

Symmetries. The coordinates break translations; were their weights zero, the model would commute, along periodic
axes, with translations by whole points of its coarsest grid (resampling="fourier").

Differences from the authors' code:
* their spectral convolution cuts or pads the rows of the spectrum at the end of the array when the grid changes,
  so that negative k₁ are lost (½) or land next to the Nyquist wave (2); here they keep their place;
* their skips are resampled by bicubic interpolation between end points, which on a periodic grid moves a field by
  up to a cell and is exact for no wave: `resampling="bicubic"`; the default is the trigonometric interpolant;
* a grid that cannot hold the modes is refused (theirs drops weights).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.checks import check_choice, check_coordinate_range, check_counts, check_state
from ergoflow.models.layers import at_least_float32, linear
from ergoflow.models.spectral import (
    SpectralConv,
    append_coordinates,
    check_plane,
    check_resolution,
    crop_walls,
    normal_weight,
    pointwise,
    wall_widths,
    zeros_beyond_walls,
)
from ergoflow.numerics.fourier import resample

Resampling = Literal["fourier", "bicubic"]


@dataclass(frozen=True, kw_only=True)
class UNOConfig:
    """The architecture of `uno`; the defaults give the paper's parameter count."""

    hidden: int = 96
    """Channels after the lift."""
    lifting: int = 96
    """Hidden channels of the lift."""
    projection: int = 96
    """Hidden channels of the projection."""
    widths: tuple[int, ...] = (96, 96, 96, 96)
    """Channels after each block."""
    modes: int = 24
    """Waves of both signs that a block keeps per direction."""
    scalings: tuple[float, ...] = (1.0, 0.5, 1.0, 2.0)
    """Points per axis after each block, relative to those before it; they multiply to 1."""
    expansion: float = 0.5
    """Hidden channels of a block's MLP, relative to its channels."""
    resampling: Resampling = "fourier"
    """How the skips change grids: trigonometric interpolation, or bicubic between end points."""
    coordinate_range: tuple[float, float] = (0.0, 1.0)
    """Coordinates of an axis, end excluded."""
    domain_padding: float = 0.125
    """Zeros beyond each wall, as a fraction of the axis; periodic axes get none."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        check_counts(self, "hidden", "lifting", "projection", "modes")
        self._check_blocks()
        check_choice(self, "resampling", get_args(Resampling))
        check_coordinate_range(self.coordinate_range)
        if self.domain_padding < 0:
            raise ValueError(f"domain_padding must not be negative, got {self.domain_padding}; choose 0 for none")

    def _check_blocks(self) -> None:
        if not self.widths or len(self.widths) != len(self.scalings):
            raise ValueError(
                f"widths and scalings must be of one length, at least 1, got {self.widths} and {self.scalings}; "
                "give one scaling per width"
            )
        for width in self.widths:
            if width < 1 or round(width * self.expansion) < 1:
                raise ValueError(
                    f"a block needs at least one channel, and one in its MLP, got width {width} and expansion "
                    f"{self.expansion}; choose larger ones"
                )
        # Rounding of factors such as 1/3.
        if min(self.scalings) <= 0 or not math.isclose(math.prod(self.scalings), 1, rel_tol=1e-6):
            raise ValueError(
                f"scalings must be positive and multiply to 1, for the output to have the grid of the input, "
                f"got {self.scalings}; choose for example (1, 0.5, 1, 2)"
            )


class UNO(nn.Module):
    """The map (B, C_in, X, Y) → (B, C_out, X, Y) for grids of two axes that resolve the modes in every block."""

    def __init__(
        self,
        config: UNOConfig,
        in_channels: int,
        out_channels: int,
        grid: tuple[int, ...],
        *,
        periodic: tuple[bool, ...],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_plane(grid, periodic)
        self.in_channels = in_channels
        self.periodic = periodic
        self.config = config
        widths, count = config.widths, len(config.widths)
        modes = (config.modes, config.modes // 2 + 1)
        padding = wall_widths(grid, periodic, config.domain_padding)
        padded = [n + 2 * pad for n, pad in zip(grid, padding, strict=True)]
        for points in block_grids(padded, config.scalings):
            check_resolution(modes, points)

        self.bridged = count // 2
        self.lift = ChannelMLP(in_channels + len(grid), config.lifting, config.hidden, generator=generator)
        self.blocks = nn.ModuleList()
        for j, width in enumerate(widths):
            before = widths[j - 1] if j > 0 else config.hidden
            bridge = widths[count - 1 - j] if count - 1 - j < self.bridged else 0
            self.blocks.append(
                UNOBlock(
                    before + bridge,
                    width,
                    modes,
                    mlp_width=round(width * config.expansion),
                    resampling=config.resampling,
                    generator=generator,
                )
            )
        self.bridges = nn.ModuleList(
            linear(width, width, bias=False, generator=generator) for width in widths[: self.bridged]
        )
        self.project = ChannelMLP(widths[-1], config.projection, out_channels, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the projected features of the last block."""
        check_state(z, self.in_channels, 2)
        padding = wall_widths(z.shape[2:], self.periodic, self.config.domain_padding)
        u = zeros_beyond_walls(self.lift(append_coordinates(z, self.config.coordinate_range)), padding)
        kept: list[Tensor] = []
        for j, target in enumerate(block_grids(u.shape[2:], self.config.scalings)):
            opposite = len(self.blocks) - 1 - j
            if opposite < self.bridged:
                bridge = resample_features(kept[opposite], u.shape[2:], self.config.resampling)
                u = torch.cat([u, bridge], dim=1)  # (B, D + D', X_j, Y_j)
            u = self.blocks[j](u, target)
            if j < self.bridged:
                layer = self.bridges[j]
                assert isinstance(layer, nn.Linear)
                kept.append(pointwise(u, layer))
        field: Tensor = self.project(crop_walls(u, padding))
        return field


class UNOBlock(nn.Module):
    """v = SpectralConv(u) + b + R W₁u, then MLP(v) + R W₂u: (B, C_in, X, Y) → (B, C_out, X', Y')."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: tuple[int, int],
        *,
        mlp_width: int,
        resampling: Resampling = "fourier",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.resampling: Resampling = resampling
        self.spectral = SpectralConv(normal_weight(in_channels, out_channels, modes, generator=generator))
        # The law of the spectral weight, as in the authors' code.
        spread = math.sqrt(2 / (in_channels + out_channels))
        self.bias = nn.Parameter(torch.randn(out_channels, generator=generator) * spread)
        self.skip = linear(in_channels, out_channels, bias=False, generator=generator)
        self.mlp = ChannelMLP(out_channels, mlp_width, out_channels, generator=generator)
        self.mlp_skip = linear(in_channels, out_channels, bias=False, generator=generator)

    def forward(self, u: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the features on `grid`, in float32 under autocast."""
        v = self.spectral(u, grid) + self.bias[:, None, None]
        v = v + resample_features(pointwise(u, self.skip), grid, self.resampling)
        out: Tensor = self.mlp(v) + resample_features(pointwise(u, self.mlp_skip), grid, self.resampling)
        return out


class ChannelMLP(nn.Module):
    """A₂ GELU(A₁u + a₁) + a₂ at every grid point: (B, C_in, X, Y) → (B, C_out, X, Y)."""

    def __init__(
        self, in_channels: int, hidden: int, out_channels: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.first = linear(in_channels, hidden, generator=generator)
        self.second = linear(hidden, out_channels, generator=generator)

    def forward(self, u: Tensor) -> Tensor:
        """Return the mapped channels."""
        return pointwise(F.gelu(pointwise(u, self.first)), self.second)


def block_grids(grid: Sequence[int], scalings: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the grid after each block: scaled and rounded one after the other, the last one `grid` itself."""
    grids = [tuple(grid)]
    for scaling in scalings[:-1]:
        grids.append(tuple(round(size * scaling) for size in grids[-1]))
    return [*grids[1:], tuple(grid)]


def resample_features(u: Tensor, grid: Sequence[int], resampling: Resampling) -> Tensor:
    """Return u (B, C, X, Y) at the points of another grid, at least in float32."""
    u = at_least_float32(u)
    if tuple(u.shape[2:]) == tuple(grid):
        return u
    if resampling == "fourier":
        return resample(u, grid)
    return F.interpolate(u, size=tuple(grid), mode="bicubic", align_corners=True)

"""`mno`, the Markov neural operator: Li et al. 2022, "Learning chaotic dynamics in dissipative systems", section 4.

Coordinates are appended to the state, a linear map lifts it, four Fourier layers follow,

    u ← s(SpectralConv(u) + W u + b),    s = SELU in the first three, none in the last,

and an MLP with SELU decodes every point. Widths and modes follow the authors' code: w/2, 3w/4, w, w, 5w/4
channels, and m, 3m/4, m/2, m/2 modes; a layer with m modes keeps k₁ = −m .. m − 1 and k₂ = 0 .. m − 1.
What makes the operator dissipative, a loss on a shell around the data, belongs to the objective.

Parameters of the default configuration (width 64, 24 modes), one channel in and out: 6,467,425, the printed count.

    lift     Linear(1 + 2, 32)                                          128
    layer 1  spectral 48·24·32·48 = 1,769,472; Linear(32, 48)         1,584
    layer 2  spectral 36·18·48·64 = 1,990,656; Linear(48, 64)         3,136
    layer 3  spectral 24·12·64·64 = 1,179,648; Linear(64, 64)         4,160
    layer 4  spectral 24·12·64·80 = 1,474,560; Linear(64, 80)         5,200
    head     Linear(80, 160), Linear(160, 160), Linear(160, 1)       38,881

Walls: axes that are not periodic get zeros beyond both ends after the lift, cropped before the head, as in FNO.

Symmetries. The coordinates break translations; were their weights zero, the model would commute with
translations by grid points along periodic axes. Grids may be rectangular and odd, and a model runs on other
grids than the one it was built for, as long as they resolve its modes.

Differences from the authors' code: rectangular grids, walls, any number of channels; coordinates exclude the
end of the axis (theirs, linspace(0, 1, S), are `coordinate_range=(0, S/(S - 1))`); the two blocks of spectral
weights are one parameter; a grid that cannot hold the modes is refused (theirs overwrites one block by the other).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.checks import check_coordinate_range, check_state
from ergoflow.models.layers import at_least_float32, linear
from ergoflow.models.spectral import (
    SpectralConv,
    append_coordinates,
    check_plane,
    check_resolution,
    crop_walls,
    pointwise,
    uniform_weight,
    wall_widths,
    zeros_beyond_walls,
)

# Quarters of `width` before, between and after the layers, and quarters of `modes` in each layer (authors' code).
WIDTH_QUARTERS = (2, 3, 4, 4, 5)
MODE_QUARTERS = (4, 3, 2, 2)


@dataclass(frozen=True, kw_only=True)
class MNOConfig:
    """The architecture of `mno`; the defaults give the paper's parameter count."""

    width: int = 64
    """Channels of the third layer; the others have 1/2, 3/4, 1 and 5/4 of it, rounded down."""
    modes: int = 24
    """Waves per direction and sign in the first layer; the others have 3/4, 1/2 and 1/2 of it, rounded down."""
    coordinate_range: tuple[float, float] = (0.0, 1.0)
    """Coordinates of an axis, end excluded."""
    domain_padding: float = 0.125
    """Zeros beyond each wall, as a fraction of the axis; periodic axes get none."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        for name in ("width", "modes"):
            # Half of it must be a whole layer or wave.
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}; choose 2 or more")
        check_coordinate_range(self.coordinate_range)
        if self.domain_padding < 0:
            raise ValueError(f"domain_padding must not be negative, got {self.domain_padding}; choose 0 for none")


class MNO(nn.Module):
    """The map (B, C_in, X, Y) → (B, C_out, X, Y) for grids of two axes that resolve the modes."""

    def __init__(
        self,
        config: MNOConfig,
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
        self.coordinate_range = config.coordinate_range
        self.domain_padding = config.domain_padding
        widths = [config.width * quarters // 4 for quarters in WIDTH_QUARTERS]
        modes = [config.modes * quarters // 4 for quarters in MODE_QUARTERS]
        # The first layer has the most modes.
        padding = wall_widths(grid, periodic, config.domain_padding)
        check_resolution((2 * modes[0], modes[0]), [n + 2 * pad for n, pad in zip(grid, padding, strict=True)])

        self.lift = linear(in_channels + len(grid), widths[0], generator=generator)
        self.layers = nn.ModuleList(
            FourierLayer(widths[i], widths[i + 1], count, generator=generator) for i, count in enumerate(modes)
        )
        self.expand = linear(widths[-1], 2 * widths[-1], generator=generator)
        self.mix = linear(2 * widths[-1], 2 * widths[-1], generator=generator)
        self.project = linear(2 * widths[-1], out_channels, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the decoded features of the last Fourier layer."""
        check_state(z, self.in_channels, 2)
        padding = wall_widths(z.shape[2:], self.periodic, self.domain_padding)
        u = zeros_beyond_walls(pointwise(append_coordinates(z, self.coordinate_range), self.lift), padding)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            u = layer(u)  # (B, D_i, X, Y)
            if i < last:
                u = F.selu(u)
        u = F.selu(pointwise(crop_walls(u, padding), self.expand))
        u = F.selu(pointwise(u, self.mix))
        return pointwise(u, self.project)


class FourierLayer(nn.Module):
    """SpectralConv(u) + W u + b without activation, (B, C_in, X, Y) → (B, C_out, X, Y), in float32 under autocast."""

    def __init__(
        self, in_channels: int, out_channels: int, modes: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spectral = SpectralConv(uniform_weight(in_channels, out_channels, (2 * modes, modes), generator=generator))
        self.local = linear(in_channels, out_channels, generator=generator)

    def forward(self, u: Tensor) -> Tensor:
        """Return the sum of the global and the local map."""
        out: Tensor = self.spectral(u) + at_least_float32(pointwise(u, self.local))
        return out

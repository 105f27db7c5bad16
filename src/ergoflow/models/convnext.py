"""`convnext`, a three-level U-Net of ConvNeXt blocks: what a practitioner would pick today.

The block is that of Liu et al. 2022 ("A ConvNet for the 2020s"), on features x (B, *grid, D):

    x ← x + W₂ GELU(W₁ LN(dw(x)) + b₁) + b₂,   dw a 7×7 depthwise convolution, W₁: D → 4D, W₂: 4D → D.

Fields are cut into patches of 2×2 points, so that the first level works at half resolution; going down and up
a level is pixel-(un)shuffle by 2 and one linear map, and the level's features are added back on the way up.
Both halves of a block are operators with fast twins on a GPU, `ergoflow.ops.depthwise` and `ergoflow.ops.mlp`.
The head reads normalised features and starts at zero: a model of increments starts as persistence, and its
increments are bounded whatever goes in.

Parameters of the default configuration on a plane, one channel in and out: 6,301,796.

    lift     Linear(4, 96)                                                       480
    blocks   8D² + 57D each: 6 × 79,200 (D = 96); 6 × 305,856 (D = 192);
             4 × 837,440 (D = 320)                                         5,660,096
    down     Linear(384, 192) 73,920; Linear(768, 320) 246,080               320,000
    up       Linear(320, 768) 246,528; Linear(192, 384) 74,112               320,640
    head     LayerNorm 192; Linear(96, 4) 388                                    580

Symmetries. Along periodic axes the model commutes with translations by its total stride, 8 points by default;
shorter ones change which points share a patch. Reflections and rotations hold for no setting.

Differences from Liu et al.: no LayerScale and no stochastic depth, which are there for nets several times deeper;
no norm before a change of resolution; weights drawn by PyTorch's law.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor, nn

from ergoflow.models.checks import check_choice, check_counts, check_state
from ergoflow.models.layers import WallPadding, at_least_float32, convolution, linear
from ergoflow.ops.depthwise import depthwise_norm
from ergoflow.ops.mlp import add_mlp

# Between two levels.
STRIDE = 2


@dataclass(frozen=True, kw_only=True)
class ConvNeXtConfig:
    """The architecture of `convnext`."""

    widths: tuple[int, ...] = (96, 192, 320)
    """Channels of each level, the finest first."""
    blocks: tuple[int, ...] = (3, 3, 4, 3, 3)
    """Blocks of each stage: down the levels, at the coarsest, and up again."""
    patch: int = 2
    """Grid points per patch and axis; 1 lets the first level work at full resolution."""
    kernel: int = 7
    expansion: int = 4
    """Hidden channels of a block's MLP per channel."""
    wall_padding: WallPadding = "replicate"
    """What the convolutions see beyond the ends of an axis that is not periodic."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        check_counts(self, "patch", "kernel", "expansion")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}; choose {self.kernel + 1}")
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths must be positive, one per level, got {self.widths}; choose (96, 192, 320)")
        if len(self.blocks) != 2 * len(self.widths) - 1 or min(self.blocks) < 0:
            raise ValueError(
                f"blocks must be {2 * len(self.widths) - 1} numbers for {len(self.widths)} levels (down, coarsest, "
                f"up), none negative, got {self.blocks}; give one number per stage"
            )
        check_choice(self, "wall_padding", get_args(WallPadding))

    @property
    def stride(self) -> int:
        """Grid points per point of the coarsest level and axis."""
        return self.patch * STRIDE ** (len(self.widths) - 1)


class ConvNeXt(nn.Module):
    """The map (B, C_in, *grid) → (B, C_out, *grid) for grids of one to three axes, multiples of the stride."""

    def __init__(
        self,
        config: ConvNeXtConfig,
        in_channels: int,
        out_channels: int,
        grid: tuple[int, ...],
        *,
        periodic: tuple[bool, ...],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        assert len(grid) == len(periodic)
        self.config, self.in_channels, self.periodic = config, in_channels, periodic
        self.check_grid(grid)
        axes = len(periodic)
        widths, fold = config.widths, STRIDE**axes
        stages = [
            nn.Sequential(*(ConvNeXtBlock(config, width, periodic, generator=generator) for _ in range(count)))
            for width, count in zip((*widths, *widths[-2::-1]), config.blocks, strict=True)
        ]
        levels = len(widths) - 1
        self.lift = linear(in_channels * config.patch**axes, widths[0], generator=generator)
        self.encoder = nn.ModuleList(stages[:levels])
        self.down = nn.ModuleList(linear(fold * fine, coarse, generator=generator) for fine, coarse in pairwise(widths))
        self.middle = stages[levels]
        self.up = nn.ModuleList(
            linear(coarse, fold * fine, generator=generator) for coarse, fine in pairwise(widths[::-1])
        )
        self.decoder = nn.ModuleList(stages[levels + 1 :])
        self.norm = nn.LayerNorm(widths[0])
        self.head = linear(widths[0], out_channels * config.patch**axes, generator=generator)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, z: Tensor) -> Tensor:
        """Return the decoded field, (B, C_out, *grid)."""
        x = self._lift(z)  # (B, *grid / patch, D)
        skips = []
        for stage, down in zip(self.encoder, self.down, strict=True):
            x = stage(x)
            skips.append(x)
            x = at_least_float32(down(unshuffle(x, STRIDE)))
        x = self.middle(x)
        for up, stage in zip(self.up, self.decoder, strict=True):
            x = stage(skips.pop() + shuffle(up(x), STRIDE))
        return shuffle(self.head(self.norm(x)), self.config.patch).movedim(-1, 1)

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Raise unless the stride divides the grid and no convolution reaches around it more than once."""
        stride, reach = self.config.stride, self.config.kernel // 2
        if any(size < stride or size % stride for size in grid):
            raise ValueError(
                f"grid sides must be multiples of the stride {stride}, got {grid}; "
                "resample the data or choose fewer levels or a smaller patch"
            )
        if any(wraps and size // stride < reach for size, wraps in zip(grid, self.periodic, strict=True)):
            raise ValueError(
                f"periodic sides must have at least {reach} points on the coarsest level (stride {stride}), got {grid};"
                " use a finer grid, fewer levels or a smaller kernel"
            )

    def _lift(self, z: Tensor) -> Tensor:
        check_state(z, self.in_channels, len(self.periodic))
        self.check_grid(tuple(z.shape[2:]))
        # The residual stream stays in float32 under autocast.
        return at_least_float32(self.lift(unshuffle(z.movedim(1, -1), self.config.patch)))


class ConvNeXtBlock(nn.Module):
    """x ← x + MLP(LN(dw(x))) on features (B, *grid, D)."""

    def __init__(
        self,
        config: ConvNeXtConfig,
        dim: int,
        periodic: tuple[bool, ...],
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.periodic = periodic
        self.wall_padding: WallPadding = config.wall_padding
        self.conv = convolution(dim, dim, config.kernel, len(periodic), groups=dim, generator=generator)
        self.norm = nn.LayerNorm(dim)
        self.expand = linear(dim, config.expansion * dim, generator=generator)
        self.contract = linear(config.expansion * dim, dim, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        assert self.conv.bias is not None
        x, z = depthwise_norm(
            x,
            self.conv.weight,
            self.conv.bias,
            self.norm.weight,
            self.norm.bias,
            periodic=self.periodic,
            wall_padding=self.wall_padding,
        )
        expand, contract = self.expand, self.contract
        return add_mlp(x, z, expand.weight, expand.bias, contract.weight, contract.bias)


def unshuffle(x: Tensor, factor: int) -> Tensor:
    """Return features (B, *grid, C) as (B, *grid / factor, factor^axes · C), one channel group per point of a patch."""
    if factor == 1:
        return x
    axes = x.ndim - 2
    for axis in range(axes):
        x = x.unflatten(1 + 2 * axis, (-1, factor))  # (B, X/f, f, Y/f, f, ..., C)
    coarse, inner = range(1, 2 * axes, 2), range(2, 2 * axes + 1, 2)
    return x.permute(0, *coarse, *inner, -1).flatten(1 + axes)


def shuffle(x: Tensor, factor: int) -> Tensor:
    """Return features (B, *grid, factor^axes · C) as (B, *grid · factor, C): the inverse of `unshuffle`."""
    if factor == 1:
        return x
    axes = x.ndim - 2
    x = x.unflatten(-1, (*[factor] * axes, -1))  # (B, X, Y, ..., f, f, ..., C)
    x = x.permute(0, *(1 + axis + offset for axis in range(axes) for offset in (0, axes)), -1)
    for axis in range(axes):
        x = x.flatten(1 + axis, 2 + axis)
    return x

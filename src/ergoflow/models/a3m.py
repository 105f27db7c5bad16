"""`a3m`, the paper's transformer: lift, A3M blocks, latent operator, decoder (sections 3.1 to 3.3).

Parameters of the default configuration on a plane, one channel in and out: 7,325,665, the printed count.

    input    Linear(1, D)                                                        256
    block    position code 16,512; LayerNorm 256; values 131,072; context 16,384;
             2 axes × (3 reducers × 66,176 + queries and keys 2 × 262,144);
             merge 131,072; mix 16,384                             4 × 1,757,312
    operator expand 32,768; G 65,536                                          98,304
    decoder  GroupNorm 512; 168,192; 25,728; 3,392; 1×1 convolution 33       197,857

Symmetries. The positional codes are absolute, so the model is not equivariant under translations, not even
along periodic axes; with sigma = 0 the codes are constant and it is, along periodic axes. Exchanging two axes
of the grid and the weights of these axes exchanges the axes of the output. Reflections and rotations hold for
no setting: the decoder's convolutions are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.attention import FUSIONS, POOLINGS, AxialAttention
from ergoflow.models.blocks import AttentionBlock, attend
from ergoflow.models.checks import check_choice, check_coordinate_range, check_counts, check_state
from ergoflow.models.layers import ResidualConv, WallPadding, convolution, linear, precise_linear
from ergoflow.models.operator import LatentOperator, OperatorMode
from ergoflow.models.positions import PositionCode
from ergoflow.ops.choice import is_reference
from ergoflow.ops.linear import biased_linear
from ergoflow.ops.norm import group_norm, mix_add


@dataclass(frozen=True, kw_only=True)
class A3MConfig:
    """The architecture of `a3m`; the defaults are the paper's (KF256 and TCF; KF128 has 8 heads)."""

    dim: int = 128
    latent: int = 256
    depth: int = 4
    heads: int = 16
    head_dim: int = 64
    kernel_multiplier: int = 2
    """Channels of q and k per channel of a head."""
    sigma: float = 8.0
    """Spread of the random frequencies, in cycles per unit of coordinate; 0 switches the positions off."""
    coordinate_range: tuple[float, float] = (0.0, 1.0)
    pooling: tuple[str, ...] = POOLINGS
    fusion: Literal["heads", "sum"] = "heads"
    operator: OperatorMode = "penalty"
    decoder_widths: tuple[int, ...] = (128, 64, 32)
    decoder_kernels: tuple[int, ...] = (9, 7, 5)
    groups: int = 16
    """Groups of the decoder's group norm and convolutions."""
    wall_padding: WallPadding = "replicate"
    """What the decoder's convolutions see beyond the ends of an axis that is not periodic."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        check_counts(self, "dim", "latent", "depth", "heads", "head_dim", "kernel_multiplier", "groups")
        if self.dim % 2:
            raise ValueError(f"dim must be even (cosines and sines), got {self.dim}; choose {self.dim + 1}")
        if self.sigma < 0:
            raise ValueError(f"sigma must not be negative, got {self.sigma}; choose 8 as in the paper, or 0 for none")
        check_coordinate_range(self.coordinate_range)
        check_choice(self, "fusion", FUSIONS)
        check_choice(self, "operator", get_args(OperatorMode))
        check_choice(self, "wall_padding", get_args(WallPadding))
        self._check_pooling()
        self._check_decoder()

    def _check_pooling(self) -> None:
        if not self.pooling or len(set(self.pooling)) < len(self.pooling) or not set(self.pooling) <= set(POOLINGS):
            raise ValueError(f"pooling must be distinct kinds out of {POOLINGS}, got {self.pooling}; drop the others")
        if self.fusion == "heads" and self.heads < len(self.pooling):
            raise ValueError(
                f"fusion='heads' needs one head per pooling, {len(self.pooling)} or more, got {self.heads}; "
                "add heads, drop a pooling or choose fusion='sum'"
            )

    def _check_decoder(self) -> None:
        if not self.decoder_widths or len(self.decoder_widths) != len(self.decoder_kernels):
            raise ValueError(
                f"decoder_widths and decoder_kernels must be of one length, at least 1, "
                f"got {self.decoder_widths} and {self.decoder_kernels}; give one kernel size per width"
            )
        for kernel in self.decoder_kernels:
            if kernel < 1 or kernel % 2 == 0:
                raise ValueError(f"decoder_kernels must be odd and positive, got {kernel}; choose {kernel + 1}")
        for name, width in [
            ("latent", self.latent),
            *(("decoder_widths", width) for width in self.decoder_widths),
        ]:
            if width < 1 or width % self.groups:
                raise ValueError(
                    f"{name} must be a multiple of groups = {self.groups}, got {width}; "
                    "change it or choose other groups"
                )


class A3M(nn.Module):
    """The map (B, C_in, *grid) → (B, C_out, *grid) for grids of any size with len(periodic) axes."""

    def __init__(
        self,
        config: A3MConfig,
        in_channels: int,
        out_channels: int,
        *,
        periodic: tuple[bool, ...],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_axes = len(periodic)
        self.lift = linear(in_channels, config.dim, generator=generator)
        self.blocks = nn.ModuleList(_block(config, self.num_axes, generator=generator) for _ in range(config.depth))
        self.expand = linear(config.dim, config.latent, bias=False, generator=generator)
        self.operator = LatentOperator(config.latent, config.operator, generator=generator)
        self.decoder = Decoder(config, out_channels, periodic, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the decoded G φ(z)."""
        x = attend(self.blocks, self._lift(z))
        if is_reference(x):
            features = self.operator(self.expand(x))
        else:
            # Two linear maps in a row are one: G·expand is (L, D), and φ(z) itself need not be written.
            with torch.autocast(x.device.type, enabled=False):
                matrix = self.operator.matrix @ self.expand.weight
            features = precise_linear(x, matrix)
        out: Tensor = self.decoder(features)
        return out

    def encode(self, z: Tensor) -> Tensor:
        """Return the latent features φ(z), (B, *grid, L)."""
        features: Tensor = self.expand(attend(self.blocks, self._lift(z)))
        return features

    def attention_kernels(self, z: Tensor) -> list[tuple[Tensor, ...]]:
        """Return, for each block, the kernel (B, H, S, S) of each axis."""
        x = self._lift(z)
        kernels = []
        for block in self.blocks:
            assert isinstance(block, AttentionBlock)
            assert isinstance(block.attention, AxialAttention)
            placed, normed = block.placed(x)
            kernels.append(block.attention.kernels(normed))
            x = mix_add(placed, *block.update(normed))
        return kernels

    def _lift(self, z: Tensor) -> Tensor:
        check_state(z, self.in_channels, self.num_axes)
        return biased_linear(z.movedim(1, -1), self.lift.weight, self.lift.bias)  # (B, *grid, D)


def _block(config: A3MConfig, num_axes: int, *, generator: torch.Generator | None) -> AttentionBlock:
    position = PositionCode(
        config.dim,
        num_axes,
        sigma=config.sigma,
        coordinate_range=config.coordinate_range,
        generator=generator,
    )
    attention = AxialAttention(
        config.dim,
        num_axes,
        heads=config.heads,
        head_dim=config.head_dim,
        kernel_dim=config.head_dim * config.kernel_multiplier,
        pooling=config.pooling,
        fusion=config.fusion,
        sigma=config.sigma,
        coordinate_range=config.coordinate_range,
        generator=generator,
    )
    return AttentionBlock(position, attention)


class Decoder(nn.Module):
    """GroupNorm, residual convolutions each followed by GELU, 1×1 convolution: (B, *grid, L) → (B, C, *grid).

    The group norm removes the scale of the latent features: c·G decodes to the same field as G.
    """

    def __init__(
        self,
        config: A3MConfig,
        out_channels: int,
        periodic: tuple[bool, ...],
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        widths = (config.latent, *config.decoder_widths)
        self.norm = nn.GroupNorm(config.groups, config.latent)
        self.convs = nn.ModuleList(
            ResidualConv(
                widths[i],
                widths[i + 1],
                kernel,
                periodic,
                groups=config.groups,
                wall_padding=config.wall_padding,
                generator=generator,
            )
            for i, kernel in enumerate(config.decoder_kernels)
        )
        self.head = convolution(widths[-1], out_channels, 1, len(periodic), generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """Return the decoded field."""
        x = group_norm(features.movedim(-1, 1), self.norm.num_groups, self.norm.weight, self.norm.bias)  # (B, L, *grid)
        # Each GELU is applied where the next layer reads its input.
        for index, conv in enumerate(self.convs):
            x = conv(x, bend=index > 0)
        field: Tensor = self.head(F.gelu(x))
        return field

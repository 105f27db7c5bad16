"""`performer`: linear attention over all grid points in place of A3M, the same operator and decoder.

The variant of the paper's rebuttal, of which we know the parameter count and neither code nor settings.
Softmax attention with the positive random features of Choromanski et al. 2021 ("Rethinking Attention with
Performers", FAVOR+): with w ~ N(0, I) and x, y scaled by d^(−1/4),

    exp(⟨x, y⟩) = E_w φ_w(x) φ_w(y),   φ_w(x) = exp(⟨w, x⟩ − |x|²/2),

so m features per head turn N² products into N·m. The features are positive, and the ratio of two sums over them
is a product of two softmaxes, which is how it is computed, without overflow and without an epsilon:

    out_i = Σ_f p_if Σ_n s_fn v_n,   s_fn = softmax_n(κ_fn),   κ_fn = ⟨w_f, k_n⟩ − |k_n|²/2,
                                     p_if = softmax_f(⟨w_f, q_i⟩ + log Σ_n exp κ_fn).

The w are orthogonal in blocks of d, which lowers the variance; they are drawn once and kept (buffers). One feature
has the relative variance exp(|x + y|²) − 1, so few features estimate softmax attention well for short q and k only: in
a fresh model of the default widths, on 1024 normal points, the estimate is off by 1.4 of the norm of the exact
result with 256 features and by .6 with 4096. What is trained is attention with these features, not with softmax.

Parameters of the default configuration with three channels in and out: 7,717,931, the count of the rebuttal
(one channel: 7,717,609).

    input    Linear(3, D)                                                        512
    block    position code 16,512; LayerNorm 256; q, k, v and merge 4 × 262,144; gate 1;
             LayerNorm 256; MLP D → 3072 → D 789,632; gate 1          4 × 1,855,234
    norm     LayerNorm                                                           256
    operator expand 32,768; G 65,536                                          98,304
    decoder  as in `a3m`                                                     197,923

How the count was met. With the lift, operator and decoder of `a3m`, four equal blocks are possible for three
channels only (the rest is no multiple of four for one or two), which leaves 1,855,298 each. That is 66 modulo
128, where all usual layers are multiples of 128: two scalars per block, the gates of the two residual branches,
and 256 outside the blocks, the final norm, account for it. A search over pre-norm blocks with one attention layer
and one MLP (widths, biases, norms, two optional D × D layers) finds 86 that fit; two of these have the position
code of `a3m` and no further layer, this one and one whose MLP has 5120 channels and no biases. So the composition
is an inference, and a weak one: the count does not single it out, an MLP of 24·D channels is unusual, and
nothing else is known of the original. Read its scores as those of a linear attention of this size.

Walls: the decoder's convolutions are padded as in `a3m`; attention knows of walls through the codes only.

Symmetries. With sigma = 0 the encoder commutes with every permutation of the grid points, and the whole model
with translations along periodic axes; with codes it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.a3m import A3MConfig, Decoder
from ergoflow.models.checks import check_counts, check_state
from ergoflow.models.layers import WallPadding, at_least_float32, linear
from ergoflow.models.operator import LatentOperator, OperatorMode, random_orthogonal
from ergoflow.models.positions import PositionCode


@dataclass(frozen=True, kw_only=True)
class PerformerConfig:
    """The architecture of `performer`; the defaults meet the rebuttal's count, see the head of this file."""

    dim: int = 128
    latent: int = 256
    depth: int = 4
    heads: int = 16
    head_dim: int = 128
    """Channels of q, k and v per head."""
    features: int = 256
    """Random features per head; the error of the estimated softmax falls as features^(−1/2)."""
    mlp_width: int = 3072
    sigma: float = 8.0
    """Spread of the position code's frequencies, in cycles per unit of coordinate; 0 makes the code constant."""
    coordinate_range: tuple[float, float] = (0.0, 1.0)
    operator: OperatorMode = "penalty"
    decoder_widths: tuple[int, ...] = (128, 64, 32)
    decoder_kernels: tuple[int, ...] = (9, 7, 5)
    groups: int = 16
    """Groups of the decoder's group norm and convolutions."""
    wall_padding: WallPadding = "replicate"
    """What the decoder's convolutions see beyond the ends of an axis that is not periodic."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        check_counts(self, "features", "mlp_width")
        self.as_a3m()

    def as_a3m(self) -> A3MConfig:
        """Return the config of the `a3m` with the same lift, codes, operator and decoder; it checks these fields."""
        return A3MConfig(
            dim=self.dim,
            latent=self.latent,
            depth=self.depth,
            heads=self.heads,
            head_dim=self.head_dim,
            sigma=self.sigma,
            coordinate_range=self.coordinate_range,
            # One pooling, so that A3M's rule of a head per pooling does not bind here.
            pooling=("mean",),
            operator=self.operator,
            decoder_widths=self.decoder_widths,
            decoder_kernels=self.decoder_kernels,
            groups=self.groups,
            wall_padding=self.wall_padding,
        )


class Performer(nn.Module):
    """The map (B, C_in, *grid) → (B, C_out, *grid) for grids of any size with len(periodic) axes."""

    def __init__(
        self,
        config: PerformerConfig,
        in_channels: int,
        out_channels: int,
        grid: tuple[int, ...],
        *,
        periodic: tuple[bool, ...],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_axes = len(grid)
        self.lift = linear(in_channels, config.dim, generator=generator)
        self.blocks = nn.ModuleList(
            PerformerBlock(config, self.num_axes, generator=generator) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.expand = linear(config.dim, config.latent, bias=False, generator=generator)
        self.operator = LatentOperator(config.latent, config.operator, generator=generator)
        self.decoder = Decoder(config.as_a3m(), out_channels, periodic, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the decoded G φ(z)."""
        out: Tensor = self.decoder(self.operator(self.encode(z)))
        return out

    def encode(self, z: Tensor) -> Tensor:
        """Return the latent features φ(z), (B, *grid, L)."""
        check_state(z, self.in_channels, self.num_axes)
        # The residual stream stays in float32 under autocast.
        x = at_least_float32(self.lift(z.movedim(1, -1)))  # (B, *grid, D)
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.expand(self.norm(x))
        return features


class PerformerBlock(nn.Module):
    """x ← x + code(ξ), x ← x + a·attention(LN x), x ← x + b·MLP(LN x), on features (B, *grid, D)."""

    def __init__(self, config: PerformerConfig, num_axes: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.position = PositionCode(
            config.dim,
            num_axes,
            sigma=config.sigma,
            coordinate_range=config.coordinate_range,
            generator=generator,
        )
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = LinearAttention(
            config.dim, heads=config.heads, head_dim=config.head_dim, features=config.features, generator=generator
        )
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.widen = linear(config.dim, config.mlp_width, generator=generator)
        self.narrow = linear(config.mlp_width, config.dim, generator=generator)
        # Gates of the residual branches; at one the block starts as a plain pre-norm block.
        self.attention_gate = nn.Parameter(torch.ones(()))
        self.mlp_gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        x = x + self.position(x.shape[1:-1])
        x = x + self.attention_gate * self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp_gate * self.narrow(F.gelu(self.widen(self.mlp_norm(x))))
        return out


class LinearAttention(nn.Module):
    """Multi-head attention over all grid points at a cost linear in their number, (B, *grid, D) → (B, *grid, D)."""

    projection: Tensor

    def __init__(
        self, dim: int, *, heads: int, head_dim: int, features: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.query = linear(dim, width, bias=False, generator=generator)
        self.key = linear(dim, width, bias=False, generator=generator)
        self.value = linear(dim, width, bias=False, generator=generator)
        self.merge = linear(width, dim, bias=False, generator=generator)
        projection = orthogonal_gaussian(features, head_dim, generator=generator)
        self.register_buffer("projection", projection.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the merged heads."""
        points = x.flatten(1, -2)  # (B, N, D)
        mixed = linear_attention(
            self._heads(self.query(points)),
            self._heads(self.key(points)),
            self._heads(self.value(points)),
            self.projection,
        )  # (B, H, N, d)
        merged: Tensor = self.merge(mixed.transpose(1, 2).flatten(2))  # (B, N, D)
        return merged.unflatten(1, x.shape[1:-1])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, d)


def orthogonal_gaussian(count: int, dim: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Return (count, dim) float64 rows, each ~ N(0, I), orthogonal within every `dim` consecutive rows."""
    blocks = -(-count // dim)
    directions = torch.cat([random_orthogonal(dim, generator=generator) for _ in range(blocks)])[:count]
    lengths = torch.randn(count, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return directions * lengths


def linear_attention(queries: Tensor, keys: Tensor, values: Tensor, projection: Tensor) -> Tensor:
    """Return out_i = Σ_j A_ij v_j / Σ_j A_ij with A_ij = Σ_f φ_f(q_i) φ_f(k_j), as a product of two softmaxes.

    q, k, v are (B, H, N, d), the projection is (m, d); the result is (B, H, N, d). The factor exp(−|q|²/2) of the
    queries cancels. The softmaxes are taken in float32 or wider, also under autocast.
    """
    scale = queries.shape[-1] ** -0.25
    with torch.autocast(queries.device.type, enabled=False):
        q, k, w = at_least_float32(queries), at_least_float32(keys), projection * scale
        key_logits = w @ k.mT - (scale**2 / 2) * k.square().sum(-1)[:, :, None]  # (B, H, m, N)
        # A softmax over n by hand, because its normaliser is needed too; one tensor is kept for the gradient.
        peaks = key_logits.detach().amax(-1, keepdim=True)  # (B, H, m, 1)
        weights = (key_logits - peaks).exp()  # (B, H, m, N)
        masses = weights.sum(-1, keepdim=True)  # (B, H, m, 1), at least one
        shares = (q @ w.mT + (peaks + masses.log()).mT).softmax(-1)  # (B, H, N, m)
    averages = (weights @ values) / masses  # (B, H, m, d)
    return shares @ averages

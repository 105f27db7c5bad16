"""`performer`: linear attention over all grid points in place of A3M, the same operator and decoder.

The variant of the paper's rebuttal ("unitary performer"). Softmax attention with the positive random features of
Choromanski et al. 2021 ("Rethinking Attention with Performers", FAVOR+): with w ~ N(0, I) and x, y scaled by d^(−1/4),

    exp(⟨x, y⟩) = E_w φ_w(x) φ_w(y),   φ_w(x) = exp(⟨w, x⟩ − |x|²/2),

so m features per head turn N² products into N·m. The features are positive, and the ratio of two sums over them
is a product of two softmaxes, which is how it is computed, without overflow and without an epsilon:

    out_i = Σ_f p_if Σ_n s_fn v_n,   s_fn = softmax_n(κ_fn),   κ_fn = ⟨w_f, k_n⟩ − |k_n|²/2,
                                     p_if = softmax_f(⟨w_f, q_i⟩ + log Σ_n exp κ_fn).

The w are orthogonal in blocks of d, which lowers the variance; they are drawn once and kept (buffers). What is trained
is attention with these features, not with softmax: in a fresh model of the default widths, on 1024 normal points and
with gains of the norm from 1 to 16, they miss softmax attention by as much as a plain mean over all points does.

Parameters of the default configuration on 192² with three channels in and out: 7,717,931, the rebuttal's count. More
than half of them are a learned code for each point, so the model belongs to its grid and runs on no other.

    input    Linear(3, D) 512; code 192² × 128                             4,719,104
    block    gain 1; q, k, v 3 × 132,096; merge 131,200;
             gain 1; MLP D → 512 → D 131,712                             4 × 659,202
    operator expand 32,768; G 65,536                                          98,304
    decoder  Linear(L, L) 65,792; the rest as in `a3m` 197,923               263,715

The authors published this variant's script, though not its config file (docs/decisions.md says what was inferred and
where we depart from it). The count fits, and so do the multiply-adds: 271 G on 192², printed 271.

Walls: the decoder's convolutions are padded as in `a3m`; attention knows of walls through the code only.

Symmetries. With a constant code the encoder commutes with every permutation of the grid points, and the whole model
with translations along periodic axes; with a learned one it does not.
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

# Spread of the code at the start, and the least norm that `ScaleNorm` divides by.
CODE_SPREAD = 0.02
LEAST_NORM = 1e-5


@dataclass(frozen=True, kw_only=True)
class PerformerConfig:
    """The architecture of `performer`; the defaults are those of the rebuttal."""

    dim: int = 128
    latent: int = 256
    depth: int = 4
    heads: int = 16
    head_dim: int = 64
    """Channels of q, k and v per head."""
    features: int = 266
    """Random features per head, ⌊d ln d⌋; the error of the estimated softmax falls as features^(−1/2)."""
    mlp_width: int = 512
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
        """Return the config of the `a3m` with the same lift, operator and decoder; it checks these fields."""
        return A3MConfig(
            dim=self.dim,
            latent=self.latent,
            depth=self.depth,
            heads=self.heads,
            head_dim=self.head_dim,
            # One pooling, so that A3M's rule of a head per pooling does not bind here.
            pooling=("mean",),
            operator=self.operator,
            decoder_widths=self.decoder_widths,
            decoder_kernels=self.decoder_kernels,
            groups=self.groups,
            wall_padding=self.wall_padding,
        )


class Performer(nn.Module):
    """The map (B, C_in, *grid) → (B, C_out, *grid) for the grid it was built for, with len(periodic) axes."""

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
        self.grid = grid
        self.lift = linear(in_channels, config.dim, generator=generator)
        self.code = nn.Parameter(CODE_SPREAD * torch.randn(1, *grid, config.dim, generator=generator))
        self.blocks = nn.ModuleList(PerformerBlock(config, generator=generator) for _ in range(config.depth))
        self.expand = linear(config.dim, config.latent, bias=False, generator=generator)
        self.operator = LatentOperator(config.latent, config.operator, generator=generator)
        self.mix = linear(config.latent, config.latent, generator=generator)
        self.decoder = Decoder(config.as_a3m(), out_channels, periodic, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the decoded G φ(z)."""
        out: Tensor = self.decoder(self.mix(self.operator(self.encode(z))))
        return out

    def encode(self, z: Tensor) -> Tensor:
        """Return the latent features φ(z), (B, *grid, L)."""
        check_state(z, self.in_channels, len(self.grid))
        if tuple(z.shape[2:]) != self.grid:
            raise ValueError(
                f"performer learns a code for every point of its grid {self.grid}, got a state on "
                f"{tuple(z.shape[2:])}; train one for this grid"
            )
        # The residual stream stays in float32 under autocast.
        x = at_least_float32(self.lift(z.movedim(1, -1))) + self.code  # (B, *grid, D)
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.expand(x)
        return features


class PerformerBlock(nn.Module):
    """x ← x + attention(norm x), x ← x + MLP(norm x), on features (B, *grid, D)."""

    def __init__(self, config: PerformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.attention_norm = ScaleNorm()
        self.attention = LinearAttention(
            config.dim, heads=config.heads, head_dim=config.head_dim, features=config.features, generator=generator
        )
        self.mlp_norm = ScaleNorm()
        self.widen = linear(config.dim, config.mlp_width, generator=generator)
        self.narrow = linear(config.mlp_width, config.dim, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))
        return out


class ScaleNorm(nn.Module):
    """g x / ‖x‖ over channels, with one gain g (Nguyen and Salazar 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        return self.gain * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=LEAST_NORM)


class LinearAttention(nn.Module):
    """Multi-head attention over all grid points at a cost linear in their number, (B, *grid, D) → (B, *grid, D)."""

    projection: Tensor

    def __init__(
        self, dim: int, *, heads: int, head_dim: int, features: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.query = linear(dim, width, generator=generator)
        self.key = linear(dim, width, generator=generator)
        self.value = linear(dim, width, generator=generator)
        self.merge = linear(width, dim, generator=generator)
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

"""`factformer`, the factorised transformer of Li, Shu and Barati Farimani (NeurIPS 2023), one step per call.

"Scalable Transformer for PDE Surrogate Modeling". The integral operator of an attention layer gets a product
kernel, one low-rank factor per axis, so that N grid points cost N·(X + Y) products instead of N²:

    (K v)(x, y) = ∫∫ κ_x(x, x') κ_y(y, y') v(x', y') dx' dy',   κ_x = ⟨R(x) q(u_x), R(x') k(u_x')⟩,

where u_x is the mean of the projected features over all axes but x, followed by a gated MLP, and R(x) turns the channel
pair c by the angle s·10000^(−2c/m)·x (rotary code): κ_x sees positions through x − x' only.

Parameters of the default configuration on a plane, one channel in and out: 6,083,009, the count of the paper's
cost table (three channels: 6,083,395).

    input      Linear(1, D)                                                      256
    block      position code 16,512; LayerNorm 256; values 131,072; context 16,384;
               2 axes × (reducer 66,176 + queries and keys 2 × 262,144);
               merge 131,072; mix 16,384                           4 × 1,492,608
    expand     Linear(D, L)                                                   32,768
    step       embedding of the latent step                                      256
    propagator LayerNorm 512; Linear(L, D) 32,896; Linear(D, L) 33,024        66,432
    decoder    GroupNorm 512; grouped 1×1 4,096; 1×1 8,192; 1×1 65            12,865

The count is that of the authors' 2-D Kolmogorov model with 16 heads, one input frame and one latent step. Their
model marches: it encodes once and applies the propagator several times, one embedding per step, decoding each
time. Here a call is one step, encode, propagate, decode, as in the autoregressive use of the paper.

Differences from the authors' code:

* their channel-last group norm returns a flattened grid, which cannot be added to the residual stream (the
  revision before it had an instance norm over channel-last data); ours keeps the grid;
* they draw q and k with a gain of .02 and add 1e-8 to variances, which are then near 1e-15: attention starts
  switched off. Ours has the head norm of `a3m`, whose epsilon never counts, and the default law for q and k;
* quadrature weights 1/S and the factor m^(−1/2) on κ; the head norm removes both, so the function is the same;
* coordinates exclude the end point, which a periodic axis would count twice. The range 2π is theirs.

Walls: no layer looks at neighbours on the grid (the decoder is pointwise), so nothing is padded and `periodic`
changes nothing; a wall is known to the model through the absolute position code only.

Symmetries. Codes break translations. With sigma = 0 and rotary_scale = 0 there are no positions at all, and the
model commutes with every permutation of the coordinates of an axis, translations and reflections among them.
Exchanging two axes of the grid and the weights of these axes exchanges the axes of the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.attention import AxialReducer, reduce_axes
from ergoflow.models.blocks import AttentionBlock, attend
from ergoflow.models.checks import check_coordinate_range, check_counts, check_state
from ergoflow.models.layers import linear
from ergoflow.models.positions import PositionCode, axis_coordinates
from ergoflow.ops.axial import axial_mix
from ergoflow.ops.choice import is_reference
from ergoflow.ops.linear import biased_linear
from ergoflow.ops.mlp import add_mlp
from ergoflow.ops.norm import group_norm

# Angular rates fall geometrically from 1 to almost 1/10000 (Su et al. 2021, RoFormer).
ROTARY_BASE = 10_000.0

# The spread of the authors' step embedding at the start.
STEP_EMBEDDING_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class FactFormerConfig:
    """The architecture of `factformer`; the defaults are the cost table's (the authors' own has 8 heads)."""

    dim: int = 128
    latent: int = 256
    depth: int = 4
    heads: int = 16
    head_dim: int = 64
    kernel_multiplier: int = 2
    """Channels of q and k per channel of a head."""
    sigma: float = 8.0
    """Spread of the position code's frequencies, in cycles per unit of coordinate; 0 makes the code constant."""
    rotary_scale: float = 64.0
    """Largest angular rate of the rotary code, in radians per unit of coordinate; 0 switches it off."""
    coordinate_range: tuple[float, float] = (0.0, 2 * math.pi)
    norm_groups: int = 16
    """Groups of the decoder's group norm."""
    conv_groups: int = 8
    """Groups of the decoder's first 1×1 convolution."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        check_counts(
            self, "dim", "latent", "depth", "heads", "head_dim", "kernel_multiplier", "norm_groups", "conv_groups"
        )
        if self.dim % 2:
            raise ValueError(f"dim must be even (cosines and sines), got {self.dim}; choose {self.dim + 1}")
        if self.head_dim * self.kernel_multiplier % 2:
            raise ValueError(
                f"head_dim × kernel_multiplier must be even (rotary pairs), "
                f"got {self.head_dim} × {self.kernel_multiplier}; make one of them even"
            )
        for name in ("sigma", "rotary_scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}; choose 0 for no positions")
        check_coordinate_range(self.coordinate_range)
        for name, groups in (("latent", "norm_groups"), ("latent", "conv_groups"), ("dim", "conv_groups")):
            if getattr(self, name) % getattr(self, groups):
                raise ValueError(
                    f"{name} must be a multiple of {groups} = {getattr(self, groups)}, got {getattr(self, name)}; "
                    "change one of them"
                )


class FactFormer(nn.Module):
    """The map (B, C_in, *grid) → (B, C_out, *grid) for grids of any size with len(periodic) axes."""

    def __init__(
        self,
        config: FactFormerConfig,
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
        self.blocks = nn.ModuleList(_block(config, self.num_axes, generator=generator) for _ in range(config.depth))
        self.expand = linear(config.dim, config.latent, bias=False, generator=generator)
        self.step = nn.Parameter(torch.randn(config.latent, generator=generator) * STEP_EMBEDDING_STD)
        self.propagator = Propagator(config.latent, config.dim, generator=generator)
        self.decoder = PointwiseDecoder(config, out_channels, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the next state: D(w + P(w)) with w = φ(z) + e, P the propagator and D the decoder."""
        check_state(z, self.in_channels, self.num_axes)
        x = attend(self.blocks, biased_linear(z.movedim(1, -1), self.lift.weight, self.lift.bias))  # (B, *grid, D)
        features = biased_linear(x, self.expand.weight, self.step)  # (B, *grid, L)
        out: Tensor = self.decoder(self.propagator(features))
        return out


def _block(config: FactFormerConfig, num_axes: int, *, generator: torch.Generator | None) -> AttentionBlock:
    position = PositionCode(
        config.dim,
        num_axes,
        sigma=config.sigma,
        coordinate_range=config.coordinate_range,
        generator=generator,
    )
    return AttentionBlock(position, FactorizedAttention(config, num_axes, generator=generator))


class FactorizedAttention(nn.Module):
    """LayerNorm, values and kernels, integration axis by axis, head norm, Linear → GELU → Linear."""

    def __init__(self, config: FactFormerConfig, num_axes: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        dim, width = config.dim, config.heads * config.head_dim
        self.norm = nn.LayerNorm(dim)
        self.value = linear(dim, width, bias=False, generator=generator)
        self.context = linear(dim, dim, bias=False, generator=generator)
        self.axes = nn.ModuleList(RotaryKernel(config, axis, generator=generator) for axis in range(num_axes))
        self.merge = linear(width, dim, bias=False, generator=generator)
        self.mix = linear(dim, dim, bias=False, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, *grid, D) to (B, *grid, D)."""
        out: Tensor = self.mix(F.gelu(self.merged(self.norm(x))))
        return out

    def merged(self, normed: Tensor) -> Tensor:
        """Return the merged heads, (B, *grid, D), of normalised features (B, *grid, D)."""
        return axial_mix(normed, self.value.weight, self.kernels(normed), self.merge.weight)

    def kernels(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return the kernel (B, H, S, S) of each axis for normalised features (B, *grid, D)."""
        axes = [axis for axis in self.axes if isinstance(axis, RotaryKernel)]
        sequences = reduce_axes([[axis.reducer] for axis in axes], normed, self.context.weight)
        return tuple(axis.of_sequence(sequence) for axis, (sequence,) in zip(axes, sequences, strict=True))


class RotaryKernel(nn.Module):
    """The kernels of all heads along one axis, (B, H, S, S), from features averaged over the other axes."""

    def __init__(self, config: FactFormerConfig, axis: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        width = config.heads * config.head_dim * config.kernel_multiplier
        self.heads = config.heads
        self.rotary_scale = config.rotary_scale
        self.coordinate_range = config.coordinate_range
        self.reducer = AxialReducer(config.dim, axis, "mean", generator=generator)
        self.query = linear(config.dim, width, bias=False, generator=generator)
        self.key = linear(config.dim, width, bias=False, generator=generator)

    def forward(self, context: Tensor) -> Tensor:
        """Return κ from the features (B, *grid, D)."""
        return self.of_sequence(self.reducer(context))

    def of_sequence(self, sequence: Tensor) -> Tensor:
        """Return κ from what the reducer made of the features, (B, S, D)."""
        query, key = self.query.weight, self.key.weight
        channels = len(query) // self.heads
        xi = axis_coordinates(sequence.shape[1], self.coordinate_range, device=query.device, dtype=query.dtype)
        phases = rotary_phases(xi, channels, self.rotary_scale)
        if is_reference(sequence):
            queries, keys = (
                F.linear(sequence, weight).unflatten(-1, (self.heads, -1)).transpose(1, 2) for weight in (query, key)
            )  # (B, H, S, m)
            return rotary_kernel(queries, keys, phases)
        scaled = query * channels**-0.5
        return turned(sequence, scaled, self.heads, phases) @ turned(sequence, key, self.heads, phases).mT


def rotary_phases(xi: Tensor, channels: int, scale: float) -> Tensor:
    """Return the angles s·10000^(−2c/m)·ξ, (S, m/2), of m = `channels` channels at the coordinates ξ (S,)."""
    pairs = torch.arange(channels // 2, device=xi.device, dtype=xi.dtype)
    return scale * xi[:, None] * ROTARY_BASE ** (-2 * pairs / channels)


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """Return x (B, H, S, m) with the channel pair (c, c + m/2) at coordinate i turned by phases (S, m/2)."""
    first, second = x.chunk(2, dim=-1)  # (B, H, S, m/2) each
    cosines, sines = phases.cos(), phases.sin()
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


def rotary_kernel(queries: Tensor, keys: Tensor, phases: Tensor) -> Tensor:
    """Return κ_ij = m^(−1/2) ⟨R(φ_i) q_i, R(φ_j) k_j⟩, (B, H, S, S); q, k (B, H, S, m), φ (S, m/2)."""
    return (rotate(queries, phases) * queries.shape[-1] ** -0.5) @ rotate(keys, phases).mT


def turned(sequence: Tensor, weight: Tensor, heads: int, phases: Tensor) -> Tensor:
    """Return R(φ) q, (B, H, S, m), for q = s Wᵀ of the sequence s (B, S, D), `weight` W (H·m, D) and φ (S, m/2).

    A turn by a right angle, q → q' = (−b, a) of q = (a, b), is one of the rows of W: R(φ) q = cos φ ⊙ q + sin φ ⊙ q',
    and one product makes q and q'.
    """
    first, second = weight.unflatten(0, (heads, 2, -1)).unbind(1)  # (H, m/2, D) each
    right = torch.cat([-second, first], dim=1).flatten(0, 1)  # (H·m, D)
    projected = F.linear(sequence, torch.cat([weight, right])).unflatten(-1, (2, heads, -1))  # (B, S, 2, H, m)
    cosines, sines = (table.to(projected.dtype).repeat(1, 2)[:, None] for table in (phases.cos(), phases.sin()))
    along, across = projected.unbind(2)
    return torch.addcmul(along * cosines, across, sines).transpose(1, 2)


class Propagator(nn.Module):
    """The latent features after one step, w + P(w), P: LayerNorm, Linear L → D, GELU, Linear D → L."""

    def __init__(self, latent: int, hidden: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(latent)
        self.contract = linear(latent, hidden, generator=generator)
        self.expand = linear(hidden, latent, generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """Map (..., L) to (..., L)."""
        norm, contract, expand = self.norm, self.contract, self.expand
        if is_reference(features):
            out: Tensor = features + expand(F.gelu(contract(norm(features))))
            return out
        # Scale and shift of the norm go to the map that follows: nothing in float32 is written.
        with torch.autocast(features.device.type, enabled=False):
            normed = F.layer_norm(features, norm.normalized_shape, eps=norm.eps)
            weight, bias = contract.weight * norm.weight, contract.weight @ norm.bias + contract.bias
        return add_mlp(features, normed, weight, bias, expand.weight, expand.bias)


class PointwiseDecoder(nn.Module):
    """GroupNorm, then 1×1 convolutions L → D (grouped) → D/2 → C with GELU between: (B, *grid, L) → (B, C, *grid)."""

    def __init__(
        self, config: FactFormerConfig, out_channels: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        half = config.dim // 2
        self.norm = nn.GroupNorm(config.norm_groups, config.latent)
        self.first = _pointwise(config.latent, config.dim, groups=config.conv_groups, generator=generator)
        self.second = linear(config.dim, half, bias=False, generator=generator)
        self.head = linear(half, out_channels, generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """Return the decoded field."""
        norm = self.norm
        x = group_norm(features.movedim(-1, 1), norm.num_groups, norm.weight, norm.bias).movedim(1, -1)  # (B, *grid, L)
        if is_reference(features):
            x = self.first(x.flatten(1, -2).mT).mT.unflatten(1, features.shape[1:-1])  # (B, *grid, D)
        else:
            # One whole product with zeros between the groups: libraries have none for groups of so few channels.
            x = F.linear(x, torch.block_diag(*self.first.weight[..., 0].chunk(self.first.groups)))
        field: Tensor = self.head(F.gelu(self.second(F.gelu(x))))  # (B, *grid, C)
        return field.movedim(-1, 1)


def _pointwise(
    in_channels: int, out_channels: int, *, groups: int, generator: torch.Generator | None = None
) -> nn.Conv1d:
    """Return a grouped 1×1 convolution without bias drawn from `generator` (`layers.convolution` has a bias)."""
    layer = nn.Conv1d(in_channels, out_channels, 1, groups=groups, bias=False, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(in_channels // groups)
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    return layer

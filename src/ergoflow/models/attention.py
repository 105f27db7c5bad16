"""A3M: axial attention with mean, max and min pooling (paper sections 3.1 and 3.2).

Along an axis of length S, one vector per coordinate is obtained by pooling the features over all other axes;
queries and keys of these vectors, m channels per head, give one low-rank kernel without softmax,

    K_ij = m^(−1/2) Σ_c q_ic k_jc cos(2π b_c (ξ_i − ξ_j)),
    E_b K_ij = m^(−1/2) exp(−2π²σ²(ξ_i − ξ_j)²) ⟨q_i, k_j⟩,

the paper's Eq. 5 in expectation over the frequencies. The values are integrated against the kernels axis by
axis, with the quadrature weights 1/S of the rectangle rule, so that the result converges on finer grids:

    (K v)_i = (1/S) Σ_j K_ij v_j  →  ∫ K(ξ_i, ξ) v(ξ) dξ.

The integrand is not periodic (real frequencies on [0, 1)), hence the convergence is of first order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.layers import GatedMLP, at_least_float32, linear
from ergoflow.models.positions import draw_frequencies, fourier_phases
from ergoflow.ops.axial import apply_kernels, axial_mix, head_norm
from ergoflow.ops.choice import is_reference
from ergoflow.ops.pool import axial_pool

__all__ = [
    "FUSIONS",
    "POOLINGS",
    "AxialAttention",
    "AxialKernel",
    "AxialReducer",
    "apply_kernels",
    "head_norm",
    "low_rank_kernel",
    "pool",
    "reduce_axes",
    "split_heads",
]

POOLINGS = ("mean", "max", "min")
FUSIONS = ("heads", "sum")


def split_heads(heads: int, parts: int) -> list[int]:
    """Return how many heads each pooling gets, the first ones one more: 16 heads in 3 parts are 6, 5, 5."""
    return [heads // parts + (part < heads % parts) for part in range(parts)]


def pool(x: Tensor, kind: str, axes: Sequence[int]) -> Tensor:
    """Return the mean, max or min of x over `axes`; over no axes at all (a 1-D grid) it is x itself."""
    if not axes:
        return x
    match kind:
        case "mean":
            return x.mean(tuple(axes))
        case "max":
            return x.amax(tuple(axes))
        case "min":
            return x.amin(tuple(axes))
    raise ValueError(f"pooling must be one of {POOLINGS}, got {kind!r}; choose one of these")


def low_rank_kernel(queries: Tensor, keys: Tensor, phases: Tensor) -> Tensor:
    """Return K_ij = m^(−1/2) Σ_c q_ic k_jc cos(φ_ic − φ_jc), (B, H, S, S); q, k (B, H, S, m), φ (S, m)."""
    cosines, sines = phases.cos(), phases.sin()
    q = torch.cat([queries * cosines, queries * sines], dim=-1)  # (B, H, S, 2m)
    k = torch.cat([keys * cosines, keys * sines], dim=-1)  # (B, H, S, 2m)
    return (q * phases.shape[-1] ** -0.5) @ k.mT  # (B, H, S, S)


def reduce_axes(
    reducers: Sequence[Sequence[AxialReducer]], features: Tensor, first: Tensor | None = None
) -> list[list[Tensor]]:
    """Return what each reducer makes of the features (B, *grid, D), (B, S, D); the reducers of a list share an axis.

    With `first`, a linear map (D, D), the reducers see features·firstᵀ. The map is multiplied into their projections
    and never applied to the features themselves: D³ multiplications instead of N·D².
    """
    if first is not None and is_reference(features):
        features, first = F.linear(features, first), None
    weights = [torch.cat([reducer.signed_weight() for reducer in group]) for group in reducers]
    if first is not None:
        weights = [weight @ first for weight in weights]
    pooled = axial_pool(features, weights, [group[0].axis for group in reducers])
    sequences = []
    for group, (mean, largest) in zip(reducers, pooled, strict=True):
        mean = mean if first is None else F.linear(mean, first)
        parts = iter(largest.split(mean.shape[-1], dim=-1))
        sequences.append([reducer.refine(mean if reducer.pooling == "mean" else next(parts)) for reducer in group])
    return sequences


class AxialReducer(nn.Module):
    """One vector per coordinate of an axis: Linear, pooling over all other axes, LayerNorm, gated MLP."""

    def __init__(self, dim: int, axis: int, pooling: str, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.axis = axis
        self.pooling = pooling
        self.project = linear(dim, dim, bias=False, generator=generator)
        self.norm = nn.LayerNorm(dim)
        self.mlp = GatedMLP(dim, generator=generator)

    def forward(self, context: Tensor) -> Tensor:
        """Map (B, *grid, D) to (B, S, D)."""
        return reduce_axes([[self]], context)[0][0]

    def signed_weight(self) -> Tensor:
        """Return the rows (D, D) of which the largest is taken, none for the mean: min = −max of the negative."""
        match self.pooling:
            case "max":
                return self.project.weight
            case "min":
                return -self.project.weight
            case _:
                return self.project.weight[:0]

    def refine(self, pooled: Tensor) -> Tensor:
        """Return the sequence (B, S, D) of the pooled one: the mean of the features, or the largest of their map."""
        match self.pooling:
            case "mean":
                # The mean commutes with the linear map, which is then applied to S vectors instead of N.
                pooled = self.project(pooled)
            case "min":
                pooled = -pooled
        out: Tensor = self.mlp(self.norm(at_least_float32(pooled)))
        return out


class AxialKernel(nn.Module):
    """The kernels of all heads along one axis, (B, H, S, S).

    `fusion="heads"`: each pooled sequence feeds its own group of heads. `fusion="sum"`: their sum feeds all
    heads. Both have the same parameters.
    """

    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        axis: int,
        *,
        heads: int,
        kernel_dim: int,
        pooling: Sequence[str],
        fusion: str,
        sigma: float,
        coordinate_range: tuple[float, float],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.heads = heads
        self.fusion = fusion
        self.coordinate_range = coordinate_range
        self.reducers = nn.ModuleList(AxialReducer(dim, axis, kind, generator=generator) for kind in pooling)
        self.query = linear(dim, heads * kernel_dim, bias=False, generator=generator)
        self.key = linear(dim, heads * kernel_dim, bias=False, generator=generator)
        self.register_buffer("frequencies", draw_frequencies(1, kernel_dim, sigma, generator=generator))

    def forward(self, context: Tensor, sequences: list[Tensor] | None = None) -> Tensor:
        """Return K from the features (B, *grid, D), of which `reduce_axes` may have made the sequences already."""
        if sequences is None:
            (sequences,) = reduce_axes([self.reducer_list()], context)  # (B, S, D) each
        if self.fusion == "sum":
            sequences = [torch.stack(sequences).sum(0)]
        size = context.shape[self.axis + 1]
        phases = fourier_phases((size,), self.frequencies, self.coordinate_range)  # (S, m)
        return low_rank_kernel(self._project(self.query, sequences), self._project(self.key, sequences), phases)

    def reducer_list(self) -> list[AxialReducer]:
        """Return the reducers with their type."""
        return [reducer for reducer in self.reducers if isinstance(reducer, AxialReducer)]

    def _project(self, layer: nn.Linear, sequences: list[Tensor]) -> Tensor:
        """Return queries or keys (B, H, S, m): each sequence through the rows of its own heads."""
        kernel_dim = layer.out_features // self.heads
        rows = [count * kernel_dim for count in split_heads(self.heads, len(sequences))]
        parts = [
            F.linear(sequence, weight) for sequence, weight in zip(sequences, layer.weight.split(rows), strict=True)
        ]
        return torch.cat(parts, dim=-1).unflatten(-1, (self.heads, kernel_dim)).transpose(1, 2)


class AxialAttention(nn.Module):
    """LayerNorm, values and kernels, integration axis by axis, head norm, Linear → GELU → Linear."""

    def __init__(
        self,
        dim: int,
        num_axes: int,
        *,
        heads: int,
        head_dim: int,
        kernel_dim: int,
        pooling: Sequence[str],
        fusion: str,
        sigma: float,
        coordinate_range: tuple[float, float],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.value = linear(dim, heads * head_dim, bias=False, generator=generator)
        self.context = linear(dim, dim, bias=False, generator=generator)
        self.axes = nn.ModuleList(
            AxialKernel(
                dim,
                axis,
                heads=heads,
                kernel_dim=kernel_dim,
                pooling=pooling,
                fusion=fusion,
                sigma=sigma,
                coordinate_range=coordinate_range,
                generator=generator,
            )
            for axis in range(num_axes)
        )
        self.merge = linear(heads * head_dim, dim, bias=False, generator=generator)
        self.mix = linear(dim, dim, bias=False, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, *grid, D) to (B, *grid, D)."""
        return self.mix_normed(self.norm(x))

    def kernels(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the kernel (B, H, S, S) of each axis for features (B, *grid, D)."""
        return self.normed_kernels(self.norm(x))

    def mix_normed(self, normed: Tensor) -> Tensor:
        """Return what follows the layer norm, (B, *grid, D)."""
        kernels = self.normed_kernels(normed)
        merged = axial_mix(normed, self.value.weight, kernels, self.merge.weight)
        out: Tensor = self.mix(F.gelu(merged))
        return out

    def normed_kernels(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return the kernel (B, H, S, S) of each axis for normalised features (B, *grid, D)."""
        axes = [axis for axis in self.axes if isinstance(axis, AxialKernel)]
        sequences = reduce_axes([axis.reducer_list() for axis in axes], normed, self.context.weight)
        return tuple(axis(normed, of_axis) for axis, of_axis in zip(axes, sequences, strict=True))

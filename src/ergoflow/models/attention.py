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

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.layers import GatedMLP, at_least_float32, gated_mlps, linear
from ergoflow.models.positions import draw_frequencies, fourier_features
from ergoflow.ops.axial import axial_mix
from ergoflow.ops.choice import is_reference, short_products
from ergoflow.ops.low_rank import sequence_kernel, turned_product
from ergoflow.ops.pool import axial_pool

POOLINGS = ("mean", "max", "min")
FUSIONS = ("heads", "sum")


def split_heads(heads: int, parts: int) -> list[int]:
    """Return how many heads each pooling gets, the first ones one more: 16 heads in 3 parts are 6, 5, 5."""
    return [heads // parts + (part < heads % parts) for part in range(parts)]


def low_rank_kernel(queries: Tensor, keys: Tensor, phases: Tensor) -> Tensor:
    """Return K_ij = m^(−1/2) Σ_c q_ic k_jc cos(φ_ic − φ_jc), (B, H, S, S); q, k (B, H, S, m), φ (S, m)."""
    return turned_product(queries, keys, torch.cat([phases.cos(), phases.sin()], dim=-1))


def reduce_axes(
    reducers: Sequence[Sequence[AxialReducer]], features: Tensor, first: Tensor | None = None
) -> list[list[Tensor]]:
    """Return what each reducer makes of the features (B, *grid, D), (B, S, D); the reducers of a list share an axis.

    With `first`, a linear map (D, D), the reducers see features·firstᵀ. The map is multiplied into their projections
    and never applied to the features themselves: D³ multiplications instead of N·D².
    """
    if is_reference(features):
        features = features if first is None else F.linear(features, first)
        weights = [torch.cat([reducer.rows_of_largest() for reducer in group]) for group in reducers]
        pooled = axial_pool(features, weights, [group[0].axis for group in reducers])
        return [[reducer.refine(part) for reducer, part in _parts(*of)] for of in zip(reducers, pooled, strict=True)]
    # The rows of maxima first, then those of means, of one axis after the other: one product for all.
    ordered = [sorted(group, key=lambda reducer: reducer.pooling == "mean") for group in reducers]
    rows = torch.cat([reducer.signed_weight() for group in ordered for reducer in group])
    with short_products(features.device):
        rows = rows if first is None else rows @ first
    dim = features.shape[-1]
    weights = list(rows.split([dim * len(group) for group in reducers]))
    means = [sum(reducer.pooling == "mean" for reducer in group) for group in reducers]
    of_largest = [weight[: len(weight) - dim * count] for weight, count in zip(weights, means, strict=True)]
    pooled = axial_pool(features, of_largest, [group[0].axis for group in reducers])
    with short_products(features.device):
        projected = [
            (F.linear(mean.to(weight.dtype), weight[len(weight) - dim * count :]) if count else mean, largest)
            for weight, count, (mean, largest) in zip(weights, means, pooled, strict=True)
        ]
        parts = [list(_parts(group, pair)) for group, pair in zip(reducers, projected, strict=True)]
        refined = iter(_refine_together([pair for group in parts for pair in group]))
        return [[next(refined) for _ in group] for group in parts]


def _parts(group: Sequence[AxialReducer], pooled: tuple[Tensor, Tensor]) -> Iterator[tuple[AxialReducer, Tensor]]:
    """Yield each reducer of an axis with its own share (B, S, D) of the mean and of the largest."""
    mean, largest = pooled
    # Means alone leave no largest, and some versions of torch cannot split nothing.
    parts = iter(largest.split(mean.shape[-1], dim=-1) if largest.shape[-1] else ())
    for reducer in group:
        yield reducer, mean if reducer.pooling == "mean" else next(parts)


def _refine_together(parts: Sequence[tuple[AxialReducer, Tensor]]) -> list[Tensor]:
    """Return what each reducer's norm and MLP make of its signed, projected part (B, S, D).

    Sequences of one length are one batch, of R: six small products cost as much as one, and so do their gradients.
    """
    refined: dict[int, Tensor] = {}
    for size in dict.fromkeys(part.shape[1] for _, part in parts):
        indices = [i for i, (_, part) in enumerate(parts) if part.shape[1] == size]
        reducers = [parts[i][0] for i in indices]
        stacked = at_least_float32(torch.stack([parts[i][1] for i in indices])).flatten(1, 2)  # (R, B·S, D)
        # min = −max of the negative: the sign goes to the scale of the norm, which has no points.
        scale = torch.stack([-r.norm.weight if r.pooling == "min" else r.norm.weight for r in reducers])  # (R, D)
        shift = torch.stack([reducer.norm.bias for reducer in reducers])
        normed = F.layer_norm(stacked, stacked.shape[2:], eps=reducers[0].norm.eps)
        normed = torch.addcmul(shift[:, None], normed, scale[:, None])
        mixed = gated_mlps([reducer.mlp for reducer in reducers], normed).unflatten(1, (-1, size))  # (R, B, S, D)
        refined |= dict(zip(indices, mixed.unbind(), strict=True))
    return [refined[i] for i in range(len(parts))]


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
        """Return the rows (D, D) of which the mean or the largest is taken: min = −max of the negative."""
        return -self.project.weight if self.pooling == "min" else self.project.weight

    def rows_of_largest(self) -> Tensor:
        """Return the rows of which the largest is taken, none for the mean."""
        return self.project.weight[:0] if self.pooling == "mean" else self.signed_weight()

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

    def forward(self, context: Tensor) -> Tensor:
        """Return K from the features (B, *grid, D)."""
        (sequences,) = reduce_axes([self.reducer_list()], context)
        return self.of_sequences(sequences)

    def of_sequences(self, sequences: list[Tensor]) -> Tensor:
        """Return K from what the reducers made of the features, (B, S, D) each."""
        if self.fusion == "sum":
            sequences = [torch.stack(sequences).sum(0)]
        table = fourier_features((sequences[0].shape[1],), self.frequencies, self.coordinate_range)  # (S, 2m)
        counts = split_heads(self.heads, len(sequences))
        return sequence_kernel(sequences, self.query.weight, self.key.weight, table, counts)

    def reducer_list(self) -> list[AxialReducer]:
        """Return the reducers with their type."""
        return [reducer for reducer in self.reducers if isinstance(reducer, AxialReducer)]


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
        out: Tensor = self.mix(F.gelu(self.merged(self.norm(x))))
        return out

    def merged(self, normed: Tensor) -> Tensor:
        """Return the merged heads, (B, *grid, D), of normalised features (B, *grid, D)."""
        return axial_mix(normed, self.value.weight, self.kernels(normed), self.merge.weight)

    def kernels(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return the kernel (B, H, S, S) of each axis for normalised features (B, *grid, D)."""
        axes = [axis for axis in self.axes if isinstance(axis, AxialKernel)]
        sequences = reduce_axes([axis.reducer_list() for axis in axes], normed, self.context.weight)
        return tuple(axis.of_sequences(of_axis) for axis, of_axis in zip(axes, sequences, strict=True))

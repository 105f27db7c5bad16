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

POOLINGS = ("mean", "max", "min")
FUSIONS = ("heads", "sum")

# The head norm removes the scale of the kernels, which is about 1e-3 per axis in a freshly drawn model: the
# values leave two axes with a variance near 1e-13, three with 1e-18, which the usual 1e-5 would swallow.
HEAD_NORM_EPS = 1e-24


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


def apply_kernels(kernels: Sequence[Tensor], values: Tensor) -> Tensor:
    """Integrate values (B, H, *grid, d) against one kernel (B, H, S, S) per axis; returns (B, H, d, *grid).

    Each product takes the leading grid axis and leaves it last, (S, R) → (R, S): after the last axis the
    channels lead, and no transposed copy was ever made.
    """
    grid = values.shape[2:-1]
    out = values
    for kernel, size in zip(kernels, grid, strict=True):
        rest = out.shape[3:]
        out = out.flatten(3).mT @ (kernel / size).mT  # (B, H, R, S)
        out = out.unflatten(2, rest)  # (B, H, *rest, S)
    return out


def head_norm(x: Tensor) -> Tensor:
    """Return x (B, H, d, *grid) with mean 0 and variance 1 over each head's channels and whole domain."""
    flat = at_least_float32(x).flatten(2)  # (B, H, d·N)
    return F.layer_norm(flat, flat.shape[2:], eps=HEAD_NORM_EPS).view(x.shape)


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
        others = [axis for axis in range(1, context.ndim - 1) if axis != self.axis + 1]
        if self.pooling == "mean":
            # The mean commutes with the linear map, which is then applied to S vectors instead of N.
            pooled = self.project(pool(context, "mean", others))
        else:
            pooled = pool(self.project(context), self.pooling, others)
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
        sequences = [reducer(context) for reducer in self.reducers]  # (B, S, D) each
        if self.fusion == "sum":
            sequences = [torch.stack(sequences).sum(0)]
        size = context.shape[self.axis + 1]
        phases = fourier_phases((size,), self.frequencies, self.coordinate_range)  # (S, m)
        return low_rank_kernel(self._project(self.query, sequences), self._project(self.key, sequences), phases)

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

    def kernels(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the kernel (B, H, S, S) of each axis for features (B, *grid, D)."""
        return self._kernels(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, *grid, D) to (B, *grid, D)."""
        grid = x.shape[1:-1]
        normed = self.norm(x)
        values = self.value(normed).unflatten(-1, (self.heads, -1)).movedim(-2, 1)  # (B, H, *grid, d)
        mixed = head_norm(apply_kernels(self._kernels(normed), values))  # (B, H, d, *grid)
        # A batched product reads the transposed values in place; F.linear would copy them first.
        weight = self.merge.weight.mT.expand(x.shape[0], -1, -1)  # (B, H·d, D)
        merged = torch.bmm(mixed.view(x.shape[0], -1, grid.numel()).mT, weight)  # (B, N, D)
        out: Tensor = self.mix(F.gelu(merged)).unflatten(1, grid)  # (B, *grid, D)
        return out

    def _kernels(self, normed: Tensor) -> tuple[Tensor, ...]:
        context = self.context(normed)
        return tuple(axis(context) for axis in self.axes)

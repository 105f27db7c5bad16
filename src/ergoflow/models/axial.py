"""Low-rank kernels along the axes of a grid, drawn from the features and blind to the origin of a periodic axis.

Along an axis of S points each head has queries q_i and keys k_j of F complex channels (2F real ones) and

    K_ij = 1/(S √(2F)) Re Σ_c q_ic* k_jc exp(2πi n_c (j − i)/S),     n_c = 0, 1, .., F − 1,

without softmax; 1/S is the weight of the rectangle rule, so that a finer grid gives the same integral. The codes see
i − j alone, and modulo S because the n_c are integers: whatever is built on these kernels commutes with translations
along periodic axes. An axis between walls takes n_c/2, the frequencies of standing waves on it.

Real codes Σ q k cos(2πn(i − j)/S), the paper's, are even in i − j: with constant q and k they cannot tell left from
right, and the antisymmetric part that transport needs vanishes. Complex ones hold advection: with q ~ u and constant k
the antisymmetric part is ½(u_i + u_j)D(i − j), the twin of ½(u ∂ + ∂ u), D the spectral derivative of modes below F.

Queries and keys are made of pooled features (A3M: mean, max and min over all other axes, in separate heads), and all
lines of the axis share one kernel. Without pooling they are made of the features, and every line has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.attention import AxialReducer, low_rank_kernel, reduce_axes, split_heads
from ergoflow.models.layers import at_least_float32, linear
from ergoflow.models.positions import draw_frequencies
from ergoflow.ops.transport import complex_kernel

Codes = Literal["complex", "cosine", "random"]

# Spread of the paper's random frequencies, in cycles per axis.
RANDOM_SIGMA = 8.0


def code_phases(size: int, frequencies: Tensor) -> Tensor:
    """Return the phases 2π n_c i/S, (S, m); whole turns are taken off before rounding, so that S is a period."""
    points = torch.arange(size, device=frequencies.device, dtype=frequencies.dtype)
    return torch.remainder(points[:, None] * frequencies, size) * (2 * math.pi / size)


def apply_along(kernel: Tensor, values: Tensor, axis: int) -> Tensor:
    """Return Σ_j K_ij v_j along one grid axis of values (B, H, *grid, d).

    One kernel for all lines of the axis, (B, H, S, S), or one for each, (B, H, *other axes, S, S).
    """
    lines = values.movedim(2 + axis, -2)  # (B, H, *others, S, d)
    if kernel.ndim < values.ndim:
        others = lines.shape[2:-2]
        folded = lines.movedim(-2, 2).flatten(3)  # (B, H, S, R·d)
        lines = (kernel @ folded).unflatten(3, (*others, -1)).movedim(2, -2)
    else:
        lines = kernel @ lines
    return lines.movedim(-2, 2 + axis)


class AxisKernel(nn.Module):
    """The kernels of all heads along one axis: (B, H, S, S) with pooling, (B, H, *other axes, S, S) without."""

    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        axis: int,
        *,
        periodic: bool,
        pooling: Sequence[str],
        heads: int,
        frequencies: int,
        codes: Codes | None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.heads, self.codes = axis, heads, codes
        self.reducers = nn.ModuleList(AxialReducer(dim, axis, kind, generator=generator) for kind in pooling)
        # Row blocks of 4F per head: its queries, then its keys.
        self.project = linear(dim, heads * 4 * frequencies, bias=False, generator=generator)
        integers = torch.arange(frequencies, dtype=torch.get_default_dtype()) * (1.0 if periodic else 0.5)
        match codes:
            case "complex":
                table = integers
            case "cosine":
                table = integers.repeat(2)
            case "random":
                table = draw_frequencies(1, 2 * frequencies, RANDOM_SIGMA, generator=generator)[0]
            case None:
                table = torch.zeros_like(integers)
        self.register_buffer("frequencies", table)

    def forward(self, context: Tensor) -> Tensor:
        """Return K from the features (B, *grid, D), in float32 at least."""
        size = context.shape[1 + self.axis]
        queries, keys = at_least_float32(self._projected(context)).chunk(2, dim=-1)  # (B, H, *others, S, 2F)
        phases = code_phases(size, self.frequencies)
        kernel = low_rank_kernel if self.codes in ("cosine", "random") else complex_kernel
        with torch.autocast(context.device.type, enabled=False):
            return kernel(queries, keys / size, phases)

    @property
    def has_complex_lines(self) -> bool:
        """Whether every line has a kernel of its own, from complex codes: what `line_codes` is for."""
        # torch 2.11 cannot compile the truth of a ModuleList, only its length.
        return len(self.reducers) == 0 and self.codes in ("complex", None)

    def line_codes(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return what K is made of: queries and keys of all heads (B, *grid, H·4F), and their phases (S, F)."""
        return self.project(context), code_phases(context.shape[1 + self.axis], self.frequencies)

    def _reducers(self) -> list[AxialReducer]:
        return [reducer for reducer in self.reducers if isinstance(reducer, AxialReducer)]

    def _projected(self, context: Tensor) -> Tensor:
        """Return queries and keys (B, H, *others, S, 4F); each pooled sequence feeds its own heads."""
        # (B, S, D) each, or (B, *grid, D)
        sequences = reduce_axes([self._reducers()], context)[0] if len(self.reducers) else [context]
        width = self.project.out_features // self.heads
        rows = [count * width for count in split_heads(self.heads, len(sequences))]
        weights = self.project.weight.split(rows)
        parts = [F.linear(sequence, weight) for sequence, weight in zip(sequences, weights, strict=True)]
        projected = torch.cat(parts, dim=-1).unflatten(-1, (self.heads, width)).movedim(-2, 1)
        return projected if self.reducers else projected.movedim(2 + self.axis, -2)

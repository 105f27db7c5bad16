"""Random Fourier features of grid coordinates (paper section 3.1, Appendix B).

With frequencies b ~ N(0, σ²) the mean of cos(2π b·r) over frequencies tends to the characteristic function of
the normal distribution,

    E_b cos(2π b·r) = exp(−2π²σ²|r|²),

a Gaussian kernel of width 1/(2πσ). (The paper prints exp(−πσ²r²), which is another kernel.) Frequencies are
drawn once and kept: they are buffers, not parameters. Coordinates live on [0, 1) with the end excluded: the
periodic end point is not counted twice, and the points of a coarse grid are points of the grid twice as fine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ergoflow.models.layers import linear


def axis_coordinates(
    size: int, coordinate_range: tuple[float, float], *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the S coordinates start + (stop − start)·i/S of one grid axis, end excluded."""
    start, stop = coordinate_range
    return torch.arange(size, device=device, dtype=dtype) * ((stop - start) / size) + start


def draw_frequencies(num_axes: int, count: int, sigma: float, *, generator: torch.Generator | None = None) -> Tensor:
    """Return (num_axes, count) frequencies ~ N(0, σ²); σ = 0 gives constant codes: no positions."""
    return torch.randn(num_axes, count, generator=generator) * sigma


def fourier_phases(
    grid: Sequence[int], frequencies: Tensor, coordinate_range: tuple[float, float] = (0.0, 1.0)
) -> Tensor:
    """Return the phases 2π b·ξ at every grid point, (*grid, m), for frequencies of shape (len(grid), m).

    The products are elementwise on purpose: phases reach hundreds of radians, and a matrix product under
    autocast would round them to bfloat16.
    """
    num_axes, count = len(grid), frequencies.shape[1]
    phases = torch.zeros((), device=frequencies.device, dtype=frequencies.dtype)
    for axis, size in enumerate(grid):
        xi = axis_coordinates(size, coordinate_range, device=frequencies.device, dtype=frequencies.dtype)  # (S,)
        shape = [1] * num_axes + [count]
        shape[axis] = size
        phases = phases + (2 * math.pi * xi[:, None] * frequencies[axis]).reshape(shape)
    return phases  # (*grid, m)


class PositionCode(nn.Module):
    """The additive code of a block: Linear([cos 2πb·ξ, sin 2πb·ξ]) with D/2 frequency vectors, (*grid, D).

    The features keep unit amplitude; the 1/√m of the paper's θ belongs to inner products ⟨θ, θ'⟩ only, and a
    linear layer is free to choose its own scale.
    """

    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        num_axes: int,
        *,
        sigma: float,
        coordinate_range: tuple[float, float] = (0.0, 1.0),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim must be even (cosines and sines), got {dim}; choose {dim - 1} or {dim + 1}")
        self.coordinate_range = coordinate_range
        self.register_buffer("frequencies", draw_frequencies(num_axes, dim // 2, sigma, generator=generator))
        self.project = linear(dim, dim, generator=generator)

    def forward(self, grid: Sequence[int]) -> Tensor:
        """Return the code (*grid, D) of a grid; it does not depend on the batch."""
        phases = fourier_phases(grid, self.frequencies, self.coordinate_range)
        code: Tensor = self.project(torch.cat([phases.cos(), phases.sin()], dim=-1))
        return code

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
from functools import reduce

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from ergoflow.models.layers import linear
from ergoflow.ops.choice import in_product_dtype
from ergoflow.ops.linear import biased_linear

# Grids and dtypes whose features are kept per tensor of frequencies, the oldest one leaving first.
KEPT_TABLES = 8
# Kept features (version of the frequencies, features) by grid, range and dtype, of every living tensor of frequencies;
# outside the modules, so that nothing of it is saved, copied, moved or pickled with them.
_TABLES: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Features that a CUDA graph reads; they live as long as the frequencies.
_RECORDED: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
    terms = []
    for axis, size in enumerate(grid):
        xi = axis_coordinates(size, coordinate_range, device=frequencies.device, dtype=frequencies.dtype)  # (S,)
        shape = [1] * num_axes + [count]
        shape[axis] = size
        terms.append((2 * math.pi * xi[:, None] * frequencies[axis]).reshape(shape))
    return reduce(torch.add, terms)  # (*grid, m)


def fourier_features(
    grid: Sequence[int],
    frequencies: Tensor,
    coordinate_range: tuple[float, float] = (0.0, 1.0),
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [cos 2πb·ξ, sin 2πb·ξ] at every grid point, (*grid, 2m), rounded to `dtype` (None: as the frequencies).

    The features are kept and shared, not to be written to: they are made anew when `frequencies` is another tensor,
    as after `.to` or a copy, or has been written to since, as by `load_state_dict`. (Writing through `.data` is the one
    change that torch does not count.) A recorded CUDA graph keeps the features of its recording. A compiler, a
    transform of torch.func and a trainable `frequencies` get features of their own.
    """
    if not _can_be_kept(frequencies):
        return _fourier_features(grid, frequencies, coordinate_range, dtype)
    key = (tuple(grid), coordinate_range, dtype)
    tables: dict[tuple[object, ...], tuple[int, Tensor]] = _TABLES.setdefault(frequencies, {})
    version, features = tables.get(key, (-1, frequencies))
    recording = frequencies.is_cuda and torch.cuda.is_current_stream_capturing()
    if version != frequencies._version:
        # A tensor made in inference mode could not be used in training later.
        with torch.inference_mode(False), torch.no_grad():
            features = _fourier_features(grid, frequencies, coordinate_range, dtype)
        # What a recording computes is not there before the first replay; what a transform computes ends with it.
        if recording or _is_traced(features):
            return features
        tables.pop(key, None)
        if len(tables) >= KEPT_TABLES:
            tables.pop(next(iter(tables)))
        tables[key] = (frequencies._version, features)
    if recording:
        _RECORDED.setdefault(frequencies, []).append(features)
    return features


def _can_be_kept(frequencies: Tensor) -> bool:
    """Return whether the tensor holds numbers, whose changes torch counts, and nobody differentiates or traces it."""
    if torch.compiler.is_compiling() or frequencies.is_meta or _is_traced(frequencies):
        return False
    return not (frequencies.requires_grad or frequencies.is_inference())


def _is_traced(tensor: Tensor) -> bool:
    """Return whether the tensor has no data, or belongs to a transform of torch.func (level −1: to none)."""
    return isinstance(tensor, FakeTensor) or torch._C._functorch.maybe_get_level(tensor) >= 0


def _fourier_features(
    grid: Sequence[int], frequencies: Tensor, coordinate_range: tuple[float, float], dtype: torch.dtype | None
) -> Tensor:
    phases = fourier_phases(grid, frequencies, coordinate_range)
    return torch.cat([phases.cos(), phases.sin()], dim=-1).to(dtype or phases.dtype)


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
        # Rounded once, not by every product.
        dtype = in_product_dtype(self.frequencies.new_empty(0))[0].dtype
        features = fourier_features(grid, self.frequencies, self.coordinate_range, dtype=dtype)
        return biased_linear(features, self.project.weight, self.project.bias)

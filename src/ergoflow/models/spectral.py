"""The spectral convolution of the Fourier neural operators, and what `mno` and `uno` share around it.

The layer multiplies the low Fourier coefficients of a field by free complex matrices (Li et al. 2021, "Fourier
neural operator for parametric partial differential equations", section 4), for points x in [0, 1)²:

    v(x) = Re Σ_k c_k W(k) û(k) exp(2πi k·x),        û(k) = grid mean of u(x) exp(−2πi k·x),
    k₁ = −⌊R/2⌋ .. ⌈R/2⌉ − 1,  k₂ = 0 .. K − 1,      c_k = 1 where k₂ = 0, else 2 (for k and −k).

v is a trigonometric polynomial, so it can be evaluated on any grid: one layer both filters and resamples. Every
retained wave must lie below the Nyquist wave of both grids, 2|k| < N: there its sign and amplitude are defined.
Where k₂ = 0 both k₁ and −k₁ have weights of their own and the real part takes the mean of the two, explicitly:
what an inverse real FFT does with a spectrum that is not Hermitian differs between libraries.

Only the K columns that carry weights go through the second FFT. Transforms and products are at least float32
under autocast: the input is cast up, and autocast lowers neither FFTs nor complex products.

Symmetries: the layer commutes with all translations by grid points (with any translation, on fields that the
grid resolves). Reflections and rotations hold for no setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.layers import complex_dtype, on_pairs
from ergoflow.models.positions import axis_coordinates


class SpectralConv(nn.Module):
    """u (B, C_in, X, Y) → v (B, C_out, X', Y') with the complex weight W of shape (R, K, C_in, C_out).

    Rows of W are in FFT order, k₁ = 0, 1, .., −2, −1. The parameter is complex: one number per entry is counted.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, u: Tensor, grid: Sequence[int] | None = None) -> Tensor:
        """Return v on `grid`, or on the grid of u where it is None."""
        rows, columns = self.weight.shape[:2]
        target = u.shape[2:] if grid is None else grid
        for points in (u.shape[2:], target):
            check_resolution((rows, columns), points)
        positive, negative = (rows + 1) // 2, rows // 2

        u = u.to(self.weight.real.dtype)
        along_y = torch.fft.rfft(u, norm="forward")[..., :columns]  # (B, C_in, X, K)
        spectrum = torch.fft.fft(along_y, dim=2, norm="forward")
        # Split, not sliced: the compiler cannot add the complex gradients of two slices.
        first, _, last = spectrum.split([positive, u.shape[2] - rows, negative], dim=2)
        low = torch.cat([first, last], dim=2)  # (B, C_in, R, K)
        product = torch.einsum("birk,rkio->bork", low, self.weight)  # (B, C_out, R, K)

        gap = product.new_zeros(*product.shape[:2], target[0] - rows, columns)
        first, last = product.split([positive, negative], dim=2)
        along_y = torch.fft.ifft(torch.cat([first, gap, last], dim=2), dim=2, norm="forward")  # (B, C_out, X', K)
        return torch.fft.irfft(_real_mean(along_y), n=target[1], norm="forward")  # (B, C_out, X', Y')

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SpectralConv:
        """Move and cast the weight as a pair of real numbers."""
        super()._apply(on_pairs(fn), recurse)
        return self


def uniform_weight(
    in_channels: int, out_channels: int, modes: tuple[int, int], *, generator: torch.Generator | None = None
) -> Tensor:
    """Return W (R, K, C_in, C_out), real and imaginary parts ~ U(0, 1/(C_in C_out)): the law of FNO and MNO."""
    shape = (*modes, in_channels, out_channels)
    return torch.rand(shape, dtype=complex_dtype(), generator=generator) / (in_channels * out_channels)


def normal_weight(
    in_channels: int, out_channels: int, modes: tuple[int, int], *, generator: torch.Generator | None = None
) -> Tensor:
    """Return W (R, K, C_in, C_out), complex normal with E|W|² = 2/(C_in + C_out): the law of `neuraloperator`."""
    shape = (*modes, in_channels, out_channels)
    variance = 2 / (in_channels + out_channels)
    return torch.randn(shape, dtype=complex_dtype(), generator=generator) * variance**0.5


def pointwise(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return Wx + b at every grid point, (B, C_in, X, Y) → (B, C_out, X, Y): a 1×1 convolution."""
    return F.conv2d(x, layer.weight[:, :, None, None], layer.bias)


def append_coordinates(z: Tensor, coordinate_range: tuple[float, float]) -> Tensor:
    """Return z (B, C, X, Y) and the coordinates of its points as two more channels, (B, C + 2, X, Y).

    Point i of S has the coordinate start + (stop − start)·i/S, end excluded: on a periodic axis the end is the
    start. An end-included linspace(0, 1, S) is the range (0, S/(S − 1)).
    """
    x, y = (axis_coordinates(size, coordinate_range, device=z.device, dtype=z.dtype) for size in z.shape[2:])
    shape = (z.shape[0], 1, *z.shape[2:])
    return torch.cat([z, x[:, None].expand(shape), y.expand(shape)], dim=1)


def wall_widths(grid: Sequence[int], periodic: Sequence[bool], fraction: float) -> tuple[int, ...]:
    """Return the points to add beyond each end of each axis: round(fraction·S) at walls, none where it wraps."""
    return tuple(0 if wraps else round(fraction * size) for size, wraps in zip(grid, periodic, strict=True))


def zeros_beyond_walls(x: Tensor, widths: Sequence[int]) -> Tensor:
    """Return x (B, C, X, Y) with zeros beyond both ends of each axis; the Fourier layers then wrap around them."""
    across_x, across_y = widths
    return F.pad(x, [across_y, across_y, across_x, across_x])


def crop_walls(x: Tensor, widths: Sequence[int]) -> Tensor:
    """Return the inverse of `zeros_beyond_walls`."""
    across_x, across_y = widths
    return x[:, :, across_x : x.shape[2] - across_x, across_y : x.shape[3] - across_y]


def check_resolution(modes: tuple[int, int], grid: Sequence[int]) -> None:
    """Raise unless every wave of R × K modes lies below the Nyquist wave of the grid, 2|k| < N."""
    rows, columns = modes
    needed = (2 * (rows // 2) + 1, 2 * columns - 1)
    if grid[0] < needed[0] or grid[1] < needed[1]:
        raise ValueError(
            f"waves up to {(rows // 2, columns - 1)} need a grid of at least {needed} points, "
            f"got {tuple(grid)}; use a finer grid or fewer modes"
        )


def check_plane(grid: Sequence[int], periodic: Sequence[bool]) -> None:
    """Raise unless grid and periodic have two axes."""
    if len(grid) != 2 or len(periodic) != 2:
        raise ValueError(
            f"a grid with two axes was expected, got {tuple(grid)} with periodic = {tuple(periodic)}; "
            "choose a model for grids of any dimension (a3m)"
        )


def _real_mean(spectrum: Tensor) -> Tensor:
    """Return the spectrum (..., K) without the imaginary part of its first column, the mean over y."""
    parts = torch.view_as_real(spectrum)  # (..., K, 2)
    kept = torch.ones(parts.shape[-2:], device=parts.device, dtype=parts.dtype)
    kept[0, 1].zero_()
    return torch.view_as_complex(parts * kept)

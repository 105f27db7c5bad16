"""`mwt`, the multiwavelet neural operator (Gupta, Xiao and Bogdan, NeurIPS 2021, arXiv:2109.13459).

Every grid point carries c·k² features, read as c functions expanded in products of k Legendre polynomials on
the cell of that point. A block takes them apart level by level, lets the levels act on each other through the
non-standard form of a kernel, and puts them together again (section 2 of the paper):

    s_n, d_n = analyse(s_{n+1})                                    decompose, from the grid to level L
    u_L      = T s_L                                               the coarsest level
    u_{n+1}  = synthesise(u_n + C d_n, A d_n + B s_n)              reconstruct, up to the grid

with the same A, B and C on all levels of a block, and a ReLU after every block but the last. T is a matrix with
bias; A d = M relu(Re F* W F d) + m multiplies Fourier modes; B s = M' relu(conv s) + m' and C are 3×3
convolutions.

Parameters of the default configuration, one channel in and out: 5,089,153, the printed count (a complex
number counts once); 5,089,539 with 3 channels.

    lift     Linear(1, c·k² = 64)                                                        128
    block    A 24 × 12 modes × 64 × 64 complex 1,179,648, matrix 4,160;
             B and C 2 × (3×3 convolution 36,928, matrix 4,160); T 4,160       4 × 1,270,144
    head     Linear(64, 128) 8,320; Linear(128, 1) 129                                 8,449

Kept as in the authors' code (MWT2d, Legendre base), though the paper does not say so:
* two of the plane's four bands, smooth-smooth and detail-detail. The mixed ones are dropped, so a level of the
  bare transform is an orthogonal projection, not the identity;
* zeros beyond the edge of the grid for the convolutions, also on a torus;
* negative wavenumbers along x are counted from the most negative one kept: on levels of fewer than 2α cells a
  weight serves another wavenumber than on finer ones (`row_modes`);
* no coordinates among the inputs: the printed count has no room for them.

Different: any number of channels; sides that differ or are no powers of two. An axis is extended to the next
power of two, half of the new points before and half behind (periodically; at walls by the edge value or
zeros), and the output is cropped. Beyond that the modes of A wrap around on every axis: the extension is all that
the model knows of walls. Rectangles are halved until the shorter side has 2^L cells. F is a matrix product with
the modes that are kept, and one batched product mixes the modes of all levels; Re F* is defined on every
device, while an inverse real FFT of a spectrum that is not Hermitian is not.

Symmetries: none. Dyadic cells and the edges of the convolutions break translations and A's half spectrum, α modes
along y and 2α along x, breaks the exchange of axes. The model runs on other grids than the one it was built for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.models.checks import check_choice, check_counts, check_state
from ergoflow.models.layers import WallPadding, at_least_float32, complex_dtype, convolution, linear, on_pairs
from ergoflow.numerics.multiwavelets import analyse, plane_filters, synthesise

NUM_AXES = 2


@dataclass(frozen=True, kw_only=True)
class MWTConfig:
    """The architecture of `mwt`; the defaults are those of the authors' plane experiments and of the printed count."""

    order: int = 4
    """Legendre polynomials per axis, k in the paper."""
    copies: int = 4
    """Functions side by side, c in the paper: copies·order² features per grid point."""
    modes: int = 12
    """Fourier modes per axis of the kernel A, α in the paper."""
    depth: int = 4
    """Blocks."""
    hidden: int = 128
    """Width of the head."""
    coarsest_level: int = 0
    """The decomposition ends on 2^coarsest_level cells, L in the paper."""
    wall_padding: WallPadding = "replicate"
    """How an axis that is not periodic is extended to a power of two."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        check_counts(self, "order", "copies", "modes", "depth", "hidden")
        if self.coarsest_level < 0:
            raise ValueError(f"coarsest_level must not be negative, got {self.coarsest_level}; choose 0 for one cell")
        check_choice(self, "wall_padding", get_args(WallPadding))

    @property
    def features(self) -> int:
        """Features per grid point, c·k²."""
        return self.copies * self.order**2


class MWT(nn.Module):
    """The map (B, C_in, X, Y) → (B, C_out, X, Y) for sides of at least 2^(coarsest_level + 1) points."""

    filters: Tensor

    def __init__(
        self,
        config: MWTConfig,
        in_channels: int,
        out_channels: int,
        grid: tuple[int, ...],
        *,
        periodic: tuple[bool, ...],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if len(grid) != NUM_AXES or len(periodic) != NUM_AXES:
            raise ValueError(f"mwt needs a grid of {NUM_AXES} axes, got {grid}; choose another model or a plane flow")
        self.in_channels = in_channels
        self.periodic = periodic
        self.wall_padding: WallPadding = config.wall_padding
        self.coarsest_level = config.coarsest_level
        self._check_grid(grid)
        # Smooth-smooth and detail-detail. In float64, so that a model in double precision has exact filters.
        plane = plane_filters(config.order)
        self.register_buffer("filters", torch.stack([plane[0, 0], plane[1, 1]]), persistent=False)  # (2, k², 4k²)
        self.modes = FourierModes(config.modes, max(self._padded(grid)) // 2)
        self.lift = linear(in_channels, config.features, generator=generator)
        self.blocks = nn.ModuleList(MultiwaveletBlock(config, generator=generator) for _ in range(config.depth))
        self.hidden = _xavier_linear(config.features, config.hidden, generator=generator)
        self.head = _xavier_linear(config.hidden, out_channels, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the field (B, C_out, X, Y) after all blocks."""
        check_state(z, self.in_channels, NUM_AXES)
        grid = z.shape[2:]
        self._check_grid(grid)
        padded = self._padded(grid)
        for axis, size in enumerate(padded):
            z = extend_axis(z, 2 + axis, size, periodic=self.periodic[axis], wall_padding=self.wall_padding)
        # The stream stays in float32 under autocast.
        x = at_least_float32(self.lift(z.movedim(1, -1)))  # (B, X', Y', F)
        levels = min(padded).bit_length() - 1 - self.coarsest_level
        basis = Basis(
            filters=self.filters.to(x.dtype),
            modes=[self.modes(padded[0] >> n, padded[1] >> n, like=x) for n in range(1, levels + 1)],
        )
        for block in self.blocks[:-1]:
            x = F.relu(block(x, basis))
        x = self.blocks[-1](x, basis)
        for axis, size in enumerate(grid):
            x = x.narrow(1 + axis, (padded[axis] - size) // 2, size)
        out: Tensor = self.head(F.relu(self.hidden(x)))
        return out.movedim(-1, 1)  # (B, C_out, X, Y)

    def _padded(self, grid: Sequence[int]) -> tuple[int, int]:
        """Return the next power of two of each side."""
        X, Y = grid
        return 1 << (X - 1).bit_length(), 1 << (Y - 1).bit_length()

    def _check_grid(self, grid: Sequence[int]) -> None:
        smallest = 2 ** (self.coarsest_level + 1)
        if min(grid) < smallest:
            raise ValueError(
                f"mwt with coarsest_level = {self.coarsest_level} needs sides of at least {smallest} points, "
                f"got {tuple(grid)}; use a finer grid or a lower coarsest_level"
            )


class ModePair(NamedTuple):
    """The transform F of one level, axis by axis, scaled so that Re F* W F x = irfft2(W rfft2(x)).

    rows (4α, X) are real: the cosines of all modes along x, then minus the sines; columns (α, Y) are complex.
    """

    rows: Tensor
    columns: Tensor


class Basis(NamedTuple):
    """The constants of a forward pass: wavelet filters (2, k², 4k²) and one transform per level, finest first."""

    filters: Tensor
    modes: list[ModePair]


class FourierModes(nn.Module):
    """The transforms of the levels: buffers for all powers of two up to `largest`, computed for larger sides."""

    def __init__(self, modes: int, largest: int) -> None:
        super().__init__()
        self.count = modes
        self.largest = largest
        for exponent in range(largest.bit_length()):
            # In float64 for the same reason as the filters.
            self.register_buffer(f"rows{2**exponent}", row_modes(2**exponent, modes), persistent=False)
            self.register_buffer(f"columns{2**exponent}", column_modes(2**exponent, modes), persistent=False)

    def forward(self, X: int, Y: int, *, like: Tensor) -> ModePair:
        """Return the transform of a level of (X, Y) cells, on the device and in the precision of `like`."""
        rows = row_modes(X, self.count) if self.largest < X else self.get_buffer(f"rows{X}")
        columns = column_modes(Y, self.count) if self.largest < Y else self.get_buffer(f"columns{Y}")
        return ModePair(rows.to(like).flatten(0, 1), torch.complex(*columns.to(like)))


def row_modes(size: int, modes: int) -> Tensor:
    """Return (cos, −sin)(2π p x/X)/√X for the 2α wavenumbers p kept along x, (2, 2α, X), float64.

    With a = min(α, X/2 + 1), weight j < α serves p = j and weight α + j serves p = j − a, for j < a. Of two
    weights for one wavenumber (modulo X) the second is used; the row of a weight without wavenumber is zero.
    """
    kept = min(modes, size // 2 + 1)
    j = torch.arange(modes, dtype=torch.float64)
    wavenumber = torch.cat([j, j - kept])
    used = torch.cat([j < min(kept, size - kept), j < kept])
    return _waves(wavenumber, used.double(), size)


def column_modes(size: int, modes: int) -> Tensor:
    """Return √w (cos, −sin)(2π q y/Y)/√Y for q = 0 .. α − 1, (2, α, Y), float64, zero where q > Y/2.

    The half spectrum of a real field: w = 2 counts q and −q, except that w = 1 at q = 0 and q = Y/2.
    """
    q = torch.arange(modes, dtype=torch.float64)
    single = (q == 0) | (2 * q == size)
    multiplicity = torch.where(single, 1.0, 2.0).double() * (2 * q <= size)
    return _waves(q, multiplicity.sqrt(), size)


def _waves(wavenumber: Tensor, amplitude: Tensor, size: int) -> Tensor:
    x = torch.arange(size, dtype=torch.float64)
    # Phases are reduced modulo one turn before the multiplication by 2π: exact for powers of two.
    phase = 2 * math.pi * torch.remainder(wavenumber[:, None] * x / size, 1.0)
    return torch.stack([phase.cos(), -phase.sin()]) * amplitude[:, None] / math.sqrt(size)


class MultiwaveletBlock(nn.Module):
    """The non-standard form on features (B, X, Y, F), sides powers of two: see the top of the file."""

    def __init__(self, config: MWTConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        features = config.features
        self.detail_to_detail = FourierKernel(features, config.modes, generator=generator)
        self.smooth_to_detail = LocalKernel(features, generator=generator)
        self.detail_to_smooth = LocalKernel(features, generator=generator)
        self.coarsest = _xavier_linear(features, features, generator=generator)

    def forward(self, x: Tensor, basis: Basis) -> Tensor:
        """Return the features after the block."""
        # Filters in bfloat16 would not be orthogonal.
        precise = torch.autocast(x.device.type, enabled=False)
        smooths, details = [], []
        with precise:
            for _ in basis.modes:
                x, detail = analyse(x, basis.filters)
                smooths.append(x)
                details.append(detail)
        to_smooth = self.detail_to_smooth(details)
        to_detail = zip(self.detail_to_detail(details, basis.modes), self.smooth_to_detail(smooths), strict=True)
        x = at_least_float32(self.coarsest(x))
        for smooth, (far, near) in zip(reversed(to_smooth), reversed(list(to_detail)), strict=True):
            with precise:
                x = synthesise((x + smooth, far + near), basis.filters)
        return x


class FourierKernel(nn.Module):
    """A d = M relu(Re F* W F d) + m on every level, W a matrix (F, F) per mode, the same on all levels."""

    def __init__(self, features: int, modes: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        # Xavier's law for the authors' tensor (F, F, α, α): fan in and out are F α².
        spread = math.sqrt(2 / (2 * features * modes**2))
        draw = torch.randn(2 * modes, modes, features, features, dtype=complex_dtype(), generator=generator)
        self.weight = nn.Parameter(spread * draw)  # (2α, α, F_in, F_out)
        self.mix = linear(features, features, generator=generator)

    def forward(self, details: Sequence[Tensor], modes: Sequence[ModePair]) -> list[Tensor]:
        """Return A d for the details (B, X, Y, F) of every level."""
        with torch.autocast(details[0].device.type, enabled=False):
            spectra = torch.stack([to_modes(d, pair) for d, pair in zip(details, modes, strict=True)])
            N, B, P, Q, C = spectra.shape  # N levels
            spectra = spectra.reshape(N * B, P * Q, C).transpose(0, 1)  # (P·Q, N·B, F)
            acted = torch.bmm(spectra, self.weight.flatten(0, 1))
            acted = acted.transpose(0, 1).reshape(N, B, P, Q, C)
            fields = [from_modes(level, pair) for level, pair in zip(acted, modes, strict=True)]
        return on_all_levels(lambda x: self.mix(F.relu(x)), fields)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FourierKernel:
        """Move and cast the weight as a pair of real numbers."""
        super()._apply(on_pairs(fn), recurse)
        return self


def to_modes(x: Tensor, modes: ModePair) -> Tensor:
    """Return F x, the coefficients (B, 2α, α, F) of a real field x (B, X, Y, F)."""
    B, X, Y, C = x.shape
    parts = (modes.rows @ x.reshape(B, X, Y * C)).reshape(B, 2, -1, Y, C)
    return modes.columns @ torch.complex(parts[:, 0], parts[:, 1])  # (B, 2α, α, F)


def from_modes(spectrum: Tensor, modes: ModePair) -> Tensor:
    """Return Re F* c, the field (B, X, Y, F) of coefficients c (B, 2α, α, F)."""
    rows = torch.view_as_real(modes.columns.mH @ spectrum)  # (B, 2α, Y, F, 2)
    B, P, Y, C, _ = rows.shape
    parts = rows.movedim(-1, 1).reshape(B, 2 * P, Y * C)
    return (modes.rows.mT @ parts).reshape(B, -1, Y, C)  # (B, X, Y, F)


class LocalKernel(nn.Module):
    """M relu(3×3 convolution, zeros beyond the edge) + m on features (B, X, Y, F)."""

    def __init__(self, features: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        conv = convolution(features, features, 3, NUM_AXES, generator=generator)
        # The features are last in memory; weights in the same order spare a copy per call.
        self.conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.mix = linear(features, features, generator=generator)

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        """Return the kernel's action on the features (B, X, Y, F) of every level."""
        wide = [F.conv2d(x.permute(0, 3, 1, 2), self.conv.weight, self.conv.bias, padding=1) for x in levels]
        return on_all_levels(lambda x: self.mix(F.relu(x)), [x.permute(0, 2, 3, 1) for x in wide])


def on_all_levels(function: Callable[[Tensor], Tensor], levels: Sequence[Tensor]) -> list[Tensor]:
    """Return a pointwise function of features (B, X, Y, F) on every level, by one call for all of them.

    Most levels are tiny: on a GPU the number of calls costs more than the copies.
    """
    cells = [x.shape[1] * x.shape[2] for x in levels]
    joined = function(torch.cat([x.flatten(1, 2) for x in levels], dim=1))  # (B, all cells, F)
    return [part.reshape(x.shape) for part, x in zip(joined.split(cells, dim=1), levels, strict=True)]


def extend_axis(x: Tensor, axis: int, size: int, *, periodic: bool, wall_padding: WallPadding) -> Tensor:
    """Return x with `size` points along `axis`: half of the new ones before, the others (one more if odd) behind.

    A periodic axis goes on periodically (at most doubled), another one with its edge values or zeros.
    """
    points = x.shape[axis]
    before = (size - points) // 2
    behind = size - points - before
    if behind == 0:
        return x
    if periodic:
        first, last = x.narrow(axis, points - before, before), x.narrow(axis, 0, behind)
    else:
        # By hand, because the gradient of torch's replication padding is not deterministic on CUDA.
        shape = [-1] * x.ndim
        shape[axis] = before
        first = x.narrow(axis, 0, 1).expand(shape)
        shape[axis] = behind
        last = x.narrow(axis, points - 1, 1).expand(shape)
        if wall_padding == "zeros":
            first, last = torch.zeros_like(first), torch.zeros_like(last)
    return torch.cat([first, x, last], dim=axis)


def _xavier_linear(in_features: int, out_features: int, *, generator: torch.Generator | None = None) -> nn.Linear:
    """A linear layer whose matrix follows Xavier's normal law, as the authors draw it."""
    layer = linear(in_features, out_features, generator=generator)
    nn.init.xavier_normal_(layer.weight, generator=generator)
    return layer

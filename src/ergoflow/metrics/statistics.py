"""Long-term statistics of a roll-out, one frame at a time, as sums that add over trajectories.

A roll-out of 10,000 steps never has to exist as a whole: `TrajectoryStatistics` keeps sums per trajectory and
the last K+1 frames. Because the sums are per trajectory, a bootstrap or a split-half noise floor is only a
re-weighting (see longterm). Every sum is float64; FFTs run in the frame's own precision (float32 or float64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array
from ergoflow.metrics.energy import in_plane_vorticity
from ergoflow.metrics.histogram import check_edges
from ergoflow.metrics.pca import PCABasis
from ergoflow.metrics.result import StatisticsResult
from ergoflow.metrics.spectrum import mode_power, shells_and_weights, sum_over_shells
from ergoflow.numerics.fourier import inverse_curl


class TrajectoryStatistics:
    """Accumulates frames (J, C, *grid) in time order; `finish` returns a `StatisticsResult`.

    A class with state, because a stream has one: the sums so far and a ring of the last max_lag + 1 frames.
    `kind="vorticity"`: one channel on a periodic plane, velocities by inversion; "velocity": the channels are
    the components, the last two lying in the plane. `spectrum="spanwise"` is for the channel plane (walls on
    the first axis). The first `skip` frames are watched for failure and enter the energy series, nothing
    else. A trajectory fails at its first frame that is not finite or exceeds `limit` (10 max|truth|): it
    stops accumulating there and the step, counted from the first frame, is recorded. `histogram_edges` is
    (B+1,) or (C, B+1), evenly spaced; values outside count in the outermost bins.
    """

    _failed_at: Tensor  # (J,) step of the first bad frame, -1 for never
    _max_abs: Tensor  # (J,) largest |z| before failure

    def __init__(
        self,
        num_trajectories: int,
        channels: int,
        grid: Sequence[int],
        *,
        length: float | Sequence[float],
        kind: Literal["vorticity", "velocity"] = "vorticity",
        spectrum: Literal["shells", "spanwise"] = "shells",
        max_lag: int = 20,
        basis: PCABasis | None = None,
        histogram_edges: Array | None = None,
        skip: int = 0,
        limit: float = math.inf,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = (num_trajectories, channels, *grid)
        self.grid = tuple(grid)
        self.length = tuple(float(x) for x in length) if isinstance(length, Sequence) else (float(length),) * len(grid)
        self.kind, self.spectrum, self.max_lag, self.skip, self.limit = kind, spectrum, max_lag, skip, limit
        self.device = torch.device(device)
        self._check_settings()
        self._basis = None if basis is None else basis.to(self.device)
        self._edges = None if histogram_edges is None else check_edges(histogram_edges, channels).to(self.device)
        self._steps = 0
        self._allocate()

    @torch.no_grad()
    def update(self, frame: Tensor) -> None:
        """Add the next frame (J, C, *grid), on any device."""
        if tuple(frame.shape) != self.shape:
            raise ValueError(
                f"frame must have shape (J, C, *grid) = {self.shape}, got {tuple(frame.shape)}; "
                "feed all trajectories of one time together"
            )
        frame = frame.detach().to(self.device)
        frame = frame if frame.dtype in (torch.float32, torch.float64) else frame.to(torch.float32)
        alive = self._watch(frame)
        z = torch.where(alive.reshape(-1, *[1] * (frame.ndim - 1)), frame, 0.0)
        velocity, vorticity, power = self._flow(z)
        points = math.prod(self.grid)
        energy = 0.5 * velocity.square().flatten(1).sum(dim=1) / points
        enstrophy = 0.5 * vorticity.to(torch.float64).square().flatten(1).sum(dim=1) / points
        self._energy.append(torch.where(alive, energy, torch.inf))
        self._enstrophy.append(torch.where(alive, enstrophy, torch.inf))
        if self._steps >= self.skip:
            self._accumulate(z, velocity, power, alive)
        self._steps += 1

    def finish(self) -> StatisticsResult:
        """Return the sums so far; needs more than max_lag frames after the skipped ones."""
        kept = self._steps - self.skip
        if kept <= self.max_lag:
            raise ValueError(
                f"at least {self.max_lag + 1} frames after the {self.skip} skipped are needed for max_lag "
                f"{self.max_lag}, got {max(kept, 0)}; roll out further"
            )
        lag_gram, sum_gram = self._grams()
        dead = self._failed_at >= 0
        sums = {
            "spectrum_sum": self._spectrum_sum,
            "velocity_sum": self._velocity_sum,
            "velocity_square_sum": self._velocity_square_sum,
            "stress_sum": self._stress_sum,
            "state_sum": self._state_sum.reshape(*self.shape[:2], -1).sum(dim=2),
            "state_square_sum": self._state_square_sum,
            "lag_products": self._lag_products,
            "lag_gram": lag_gram,
            "sum_gram": sum_gram,
            "projections": self._stacked_projections(),
            "histogram": self._histogram,
        }
        for value in sums.values():
            value[dead] = 0.0  # a failed trajectory must not reach any pool, not even as 0 * inf
        lag_gram[:, dead], sum_gram[:, dead] = 0.0, 0.0
        arrays = {name: _copied(value) for name, value in sums.items()}
        edges = torch.zeros(self.shape[1], 1) if self._edges is None else self._edges
        variances = torch.zeros(0) if self._basis is None else self._basis.variances
        return StatisticsResult(
            frames=_copied(self._frames),
            failed_at=_copied(self._failed_at),
            max_abs=_copied(self._max_abs),
            energy=torch.stack(self._energy, dim=1).cpu().numpy(),
            enstrophy=torch.stack(self._enstrophy, dim=1).cpu().numpy(),
            edges=edges.cpu().numpy(),
            pca_variances=variances.cpu().numpy(),
            grid=self.grid,
            skip=self.skip,
            points=math.prod(self.shape[1:]),
            **arrays,
        )

    def _watch(self, frame: Tensor) -> Tensor:
        """Return (J,) whether each trajectory is still good, and record the first failure."""
        largest = frame.abs().flatten(1).amax(dim=1).to(torch.float64)  # amax keeps nan
        good = torch.isfinite(largest) & (largest <= self.limit)
        first = ~good & (self._failed_at < 0)
        self._failed_at = torch.where(first, self._steps, self._failed_at)
        alive = self._failed_at < 0
        self._max_abs = torch.where(alive, torch.maximum(self._max_abs, largest), self._max_abs)
        return alive

    def _flow(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return velocity (J, C_u, *grid) in float64, vorticity (J, ...), mode power (J, 1, *modes)."""
        if self.kind == "vorticity":
            modes = torch.fft.rfft2(z) * self._inverse_curl.to(z.dtype.to_complex())  # (J, 2, X, Y//2+1)
            power = (modes.real.square() + modes.imag.square()).sum(dim=1, keepdim=True)
            return torch.fft.irfft2(modes, s=self.grid).to(torch.float64), z, power
        if self.spectrum == "spanwise":
            power = torch.fft.rfft(z, dim=-1).abs().square().sum(dim=1).flatten(1, -2).mean(dim=1)
            power = power[:, None]  # (J, 1, Z//2+1)
        else:
            power = mode_power(z, len(self.grid)).sum(dim=1, keepdim=True)
        periodic = [self.spectrum != "spanwise"] + [True] * (len(self.grid) - 1)
        return z.to(torch.float64), in_plane_vorticity(z, self.length, periodic=periodic), power

    def _accumulate(self, z: Tensor, velocity: Tensor, power: Tensor, alive: Tensor) -> None:
        shells = sum_over_shells(power, self._shells, self._weights, count=self._num_shells)
        self._spectrum_sum += shells[:, 0]
        self._velocity_sum += velocity
        self._velocity_square_sum.addcmul_(velocity, velocity)
        if velocity.shape[1] > 1:
            self._stress_sum.addcmul_(velocity[:, 0], velocity[:, 1])
        state = z.to(torch.float64).flatten(1)  # (J, P)
        self._state_sum += state
        self._state_square_sum += state.square().reshape(*self.shape[:2], -1).sum(dim=2)
        if self._basis is not None:
            self._projections.append(self._basis.project(state))
        if self._edges is not None:
            self._count_values(z, alive)
        self._lag(state, z)
        self._frames += alive

    def _lag(self, state: Tensor, z: Tensor) -> None:
        """Put the frame in the ring; once that is full, multiply its oldest frame with all K+1 frames."""
        size = self.max_lag + 1
        index = self._steps - self.skip
        if index < self.max_lag:
            self._head.append(z.flatten(1))
        self._ring[:, index % size] = state
        if index >= self.max_lag:
            oldest = (index + 1) % size
            products = torch.bmm(self._ring, self._ring[:, oldest, :, None])[..., 0]  # (J, K+1) by slot
            self._lag_products += products.roll(-oldest, dims=1)

    def _grams(self) -> tuple[Tensor, Tensor]:
        """Return <S_i, B_jl> (J, J, K+1) and <S_i, S_j> (J, J).

        S_j is the sum of all frames, B_jl the sum of frames l..T-K-1+l, all that the removal of a mean field
        pooled over any choice of trajectories needs: B_jl = S_j - (first l frames) - (last K-l frames).
        """
        size, last = self.max_lag + 1, self._steps - self.skip - 1
        gram = torch.zeros(self.shape[0], *self._lag_products.shape, dtype=torch.float64, device=self.device)
        window = self._state_sum.clone()  # B_j0 after the loop below, then slid forward
        for back in range(self.max_lag):
            window -= self._ring[:, (last - back) % size]
        for lag in range(size):
            gram[:, :, lag] = self._state_sum @ window.T
            if lag < self.max_lag:
                window += self._ring[:, (last - self.max_lag + 1 + lag) % size] - self._head[lag]
        return gram, self._state_sum @ self._state_sum.T

    def _count_values(self, z: Tensor, alive: Tensor) -> None:
        assert self._edges is not None
        trajectories, channels = self.shape[:2]
        bins = self._histogram.shape[2]
        low = self._edges[:, 0].to(z.dtype)[None, :, None]
        width = ((self._edges[:, -1] - self._edges[:, 0]) / bins).to(z.dtype)[None, :, None]
        index = ((z.flatten(2) - low) / width).floor_().clamp_(0, bins - 1).to(torch.int64)
        row = torch.arange(trajectories * channels, device=z.device).reshape(trajectories, channels, 1)
        ones = alive.to(torch.float64)[:, None, None].expand(index.shape)
        self._histogram.view(-1).index_add_(0, (index + row * bins).flatten(), ones.flatten())

    def _stacked_projections(self) -> Tensor:
        if self._projections:
            return torch.stack(self._projections, dim=1)  # (J, T, K)
        return torch.zeros(self.shape[0], 0, 0, dtype=torch.float64)

    def _allocate(self) -> None:
        count, channels = self.shape[:2]
        components = 2 if self.kind == "vorticity" else channels
        if self.kind == "vorticity":
            self._inverse_curl = inverse_curl(self.grid, self.length, device=self.device)
        modes_grid = self.grid[-1:] if self.spectrum == "spanwise" else self.grid
        shells, weights = shells_and_weights(modes_grid)
        self._shells, self._weights = shells.to(self.device), weights.to(self.device)
        self._num_shells = min(modes_grid) // 2 + 1
        bins = 0 if self._edges is None else self._edges.shape[1] - 1
        points = math.prod(self.shape[1:])
        self._spectrum_sum = self._zeros(count, self._num_shells)
        self._velocity_sum = self._zeros(count, components, *self.grid)
        self._velocity_square_sum = self._zeros(count, components, *self.grid)
        self._stress_sum = self._zeros(count, *self.grid)
        self._state_sum = self._zeros(count, points)
        self._state_square_sum = self._zeros(count, channels)
        self._lag_products = self._zeros(count, self.max_lag + 1)
        self._ring = self._zeros(count, self.max_lag + 1, points)
        self._histogram = self._zeros(count, channels, bins)
        self._max_abs = self._zeros(count)
        self._frames = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._failed_at = torch.full((count,), -1, dtype=torch.int64, device=self.device)
        self._head: list[Tensor] = []
        self._projections: list[Tensor] = []
        self._energy: list[Tensor] = []
        self._enstrophy: list[Tensor] = []

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _check_settings(self) -> None:
        if self.kind not in ("vorticity", "velocity") or self.spectrum not in ("shells", "spanwise"):
            raise ValueError(
                'kind must be "vorticity" or "velocity" and spectrum "shells" or "spanwise", '
                f"got {self.kind!r} and {self.spectrum!r}; choose one of each"
            )
        plane = len(self.grid) == 2 and self.shape[1] == 1 and self.spectrum == "shells"
        if self.kind == "vorticity" and not plane:
            raise ValueError(
                f'kind "vorticity" needs one channel on a periodic plane, got {self.shape} and '
                f'{self.spectrum!r}; use kind "velocity"'
            )
        if min(self.shape) < 1 or self.max_lag < 1 or self.skip < 0 or len(self.length) != len(self.grid):
            raise ValueError(
                "sizes and max_lag must be positive, skip >= 0 and one length given per axis, got "
                f"{self.shape}, {self.max_lag}, {self.skip} and {self.length}; correct the one out of range"
            )


def _copied(values: Tensor) -> np.ndarray:
    """The values in an array of their own: on a CPU `numpy()` would go on changing with them."""
    return values.cpu().numpy().copy()

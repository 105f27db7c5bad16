"""The sums of a roll-out, trajectory by trajectory, and what weights over trajectories make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

# A correlation C(0) below this share of the truth's is round-off: the model stands still and has no rate.
STILL = 1e-12


@dataclass(frozen=True, kw_only=True)
class StatisticsResult:
    """Sums over time per trajectory (leading axis J), as NumPy arrays. Sums of failed trajectories are zero.

    T counts frames after the skipped ones, S shells, K lags, B bins, M principal components.
    """

    frames: np.ndarray  # (J,) frames accumulated
    failed_at: np.ndarray  # (J,) first bad frame, counted with the skipped ones; -1 for never
    max_abs: np.ndarray  # (J,) largest |z| seen before failure
    energy: np.ndarray  # (J, skip + T) grid mean of |u|^2/2; inf after failure
    enstrophy: np.ndarray  # (J, skip + T) grid mean of omega^2/2; inf after failure
    spectrum_sum: np.ndarray  # (J, S) raw energy spectrum
    velocity_sum: np.ndarray  # (J, C_u, *grid)
    velocity_square_sum: np.ndarray  # (J, C_u, *grid)
    stress_sum: np.ndarray  # (J, *grid) product of the first two components
    state_sum: np.ndarray  # (J, C) over time and grid
    state_square_sum: np.ndarray  # (J, C)
    lag_products: np.ndarray  # (J, K+1) sum over origins and points of z_k z_{k+l}
    lag_gram: np.ndarray  # (J, J, K+1) <S_i, B_jl>, see TrajectoryStatistics
    sum_gram: np.ndarray  # (J, J) <S_i, S_j>
    projections: np.ndarray  # (J, T, M); (J, 0, 0) without a basis
    pca_variances: np.ndarray  # (M,)
    histogram: np.ndarray  # (J, C, B); B = 0 without edges
    edges: np.ndarray  # (C, B+1)
    grid: tuple[int, ...]
    skip: int
    points: int  # channels times grid points

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories, failed ones included."""
        return len(self.failed_at)

    @property
    def max_lag(self) -> int:
        """The largest lag K."""
        return self.lag_products.shape[1] - 1

    @property
    def num_frames(self) -> int:
        """Frames per trajectory after the skipped ones."""
        return self.energy.shape[1] - self.skip

    def survivors(self) -> np.ndarray:
        """Return weights (J,): 1 for trajectories that never failed, 0 for the others."""
        return np.where(self.failed_at < 0, 1.0, 0.0)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all fields as arrays, the form in which they are kept in an .npz file."""
        return {name: np.asarray(value) for name, value in asdict(self).items()}

    @classmethod
    def load(cls, path: Path | str) -> StatisticsResult:
        """Return the result whose `arrays()` an .npz file holds."""
        with np.load(path, allow_pickle=False) as stored:
            return cls.from_arrays(dict(stored), source=str(path))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], *, source: str = "the file") -> StatisticsResult:
        """Return the result whose `arrays()` these are; `source` is named in errors."""
        values = dict(arrays)
        differing = set(cls.__dataclass_fields__) ^ set(values)
        if differing:
            raise ValueError(
                f"{source} must hold the statistics of this version, differs in {sorted(differing)}; predict "
                "the roll-out again"
            )
        skip, points = int(values.pop("skip")), int(values.pop("points"))
        return cls(grid=tuple(int(n) for n in values.pop("grid")), skip=skip, points=points, **values)


def mean_spectrum(result: StatisticsResult, weights: np.ndarray) -> np.ndarray:
    """Return (S,): the spectrum averaged over time and weighted trajectories."""
    return np.asarray(weights @ result.spectrum_sum / (weights @ result.frames))


def mean_velocity(result: StatisticsResult, weights: np.ndarray) -> np.ndarray:
    """Return (C_u, *grid): the mean velocity field."""
    return _pooled(result.velocity_sum, weights, result.frames)


def velocity_variance(result: StatisticsResult, weights: np.ndarray) -> np.ndarray:
    """Return (C_u, *grid): population variance of each component over time and trajectories pooled."""
    mean = mean_velocity(result, weights)
    return np.asarray(np.maximum(_pooled(result.velocity_square_sum, weights, result.frames) - mean**2, 0.0))


def tke_map(result: StatisticsResult, weights: np.ndarray) -> np.ndarray:
    """Return the TKE map (*grid): the mean over components of the pooled variance."""
    return np.asarray(velocity_variance(result, weights).mean(axis=0))


def correlation(result: StatisticsResult, weights: np.ndarray) -> np.ndarray:
    """Return C(0..K), the default `autocorrelation` of the weighted trajectories.

    With m = sum w_i S_i / (W T): W n P C(l) = sum w_j [P_jl - m.B_j0 - m.B_jl] + W n m.m, for n = T - K
    origins.
    """
    total, frames = weights.sum(), result.num_frames
    origins = frames - result.max_lag
    mean_dot = np.einsum("i,j,ijl->l", weights, weights, result.lag_gram) / (total * frames)
    mean_square = weights @ result.sum_gram @ weights / (total * frames) ** 2
    products = weights @ result.lag_products - mean_dot[0] - mean_dot + total * origins * mean_square
    return np.asarray(products / (total * origins * result.points))


def stands_still(pred: np.ndarray, true: np.ndarray) -> bool:
    """Return whether the variance C(0) of a forecast is round-off beside the truth's: it has no correlation in time."""
    return not pred[0] > STILL * true[0]


def histogram(result: StatisticsResult, weights: np.ndarray) -> np.ndarray:
    """Return (C, B) weighted counts of the point values."""
    return np.asarray(np.tensordot(weights, result.histogram, axes=1))


def point_moments(result: StatisticsResult, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation (C,) of the point values over trajectories, time and grid."""
    values = (weights @ result.frames) * (result.points // result.state_sum.shape[1])
    mean = weights @ result.state_sum / values
    return mean, np.sqrt(np.maximum(weights @ result.state_square_sum / values - mean**2, 0.0))


def _pooled(sums: np.ndarray, weights: np.ndarray, frames: np.ndarray) -> np.ndarray:
    flat = weights @ sums.reshape(len(sums), -1)
    return np.asarray(flat.reshape(sums.shape[1:]) / (weights @ frames))

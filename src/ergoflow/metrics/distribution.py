"""Distances between distributions of states and of values: PCA divergence, Wasserstein distances, tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_same_grid, check_trajectories, chunks, like
from ergoflow.metrics.density import kl_divergence, weighted_joint_kl
from ergoflow.metrics.pca import PCABasis, fit_pca, project_trajectories

NUM_DIRECTIONS = 512
DIRECTION_SEED = 0
# Samples a side for joint densities and sliced distances, and values a side for point statistics.
MAX_SAMPLES = 2000
MAX_VALUES = 2_000_000


def pca_kl_divergence(pred: Array, true: Array, num_components: int = 10, *, joint: int | None = None) -> float:
    """Return the mean over principal components of KL(true || pred) of the projections.

    PCA on the truth only, centred, unscaled. `joint=2` gives instead the one divergence of the joint density
    of the first two components (None: one-dimensional divergences); joint densities use at most 2000 frames a
    side, every s-th in time. A non-finite prediction gives inf.
    """
    check_same_grid(pred, true)
    basis = fit_pca(true, num_components if joint is None else joint)
    if not _is_finite(pred):
        return math.inf
    truth = project_trajectories(true, basis)  # (J, T, K)
    model = project_trajectories(pred, basis)
    if joint is None:
        components = range(truth.shape[2])
        return float(np.mean([kl_divergence(truth[..., k].ravel(), model[..., k].ravel()) for k in components]))
    p, q = (stride_samples(x, MAX_SAMPLES).reshape(-1, x.shape[2]).T for x in (truth, model))
    return weighted_joint_kl(p, np.ones(p.shape[1]), q, np.ones(q.shape[1]))


def sliced_wasserstein(
    pred: Array, true: Array, *, num_components: int = 64, num_directions: int = NUM_DIRECTIONS
) -> float:
    """Return the sliced W2: the root mean square over fixed directions of the 1-D W2 distances.

    States are whitened projections on the truth's first principal components, at most 2000 frames a side
    (every s-th in time). A shift of one sigma in every component scores 1.
    """
    check_same_grid(pred, true)
    basis = fit_pca(true, num_components)
    if not _is_finite(pred):
        return math.inf
    truth, model = (stride_samples(whiten(project_trajectories(x, basis), basis), MAX_SAMPLES) for x in (true, pred))
    slices = [slice_samples(x, num_directions=num_directions) for x in (model, truth)]
    return sliced_distance(slices[0], np.ones(len(model)), slices[1], np.ones(len(truth)))


def whiten(projections: np.ndarray, basis: PCABasis) -> np.ndarray:
    """Return projections (..., K) divided by the truth's standard deviation of each component."""
    return np.asarray(projections / np.sqrt(basis.variances.cpu().numpy()))


def stride_samples(values: np.ndarray, count: int) -> np.ndarray:
    """Return every s-th frame of (J, T, ...), s = ceil(J T / count): `count` samples at most, or up to J more."""
    stride = math.ceil(values.shape[0] * values.shape[1] / count)
    return values[:, ::stride]


@dataclass(frozen=True, kw_only=True)
class SlicedSamples:
    """States on fixed random directions, sorted once: re-weighting trajectories is a cumulative sum."""

    sorted_values: Tensor  # (D, J T)
    trajectory: Tensor  # (D, J T): which trajectory each sorted value came from
    frames: int

    def quantiles(self, weights: np.ndarray, levels: Tensor) -> Tensor:
        """Return (D, levels) quantiles when trajectory j is counted weights[j] times, a whole number."""
        counts = torch.from_numpy(np.asarray(weights, dtype=np.int64))[self.trajectory]  # (D, J T)
        repeated = self.sorted_values.flatten().repeat_interleave(counts.flatten())
        repeated = repeated.reshape(len(self.sorted_values), -1)  # (D, n), still sorted
        return repeated[:, (levels * repeated.shape[1]).to(torch.int64)]


def slice_samples(states: np.ndarray, *, num_directions: int = NUM_DIRECTIONS) -> SlicedSamples:
    """Return whitened states (J, T, K) projected on unit directions drawn from one fixed seed, and sorted."""
    directions = np.random.default_rng(DIRECTION_SEED).standard_normal((num_directions, states.shape[2]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    values = directions @ states.reshape(-1, states.shape[2]).T  # (D, J T)
    order = np.argsort(values, axis=1)
    return SlicedSamples(
        sorted_values=torch.from_numpy(np.take_along_axis(values, order, axis=1)),
        trajectory=torch.from_numpy(order // states.shape[1]),
        frames=states.shape[1],
    )


def sliced_distance(
    pred: SlicedSamples, pred_weights: np.ndarray, true: SlicedSamples, true_weights: np.ndarray
) -> float:
    """Return the sliced W2 of two weighted samples, by their quantiles at max(n_pred, n_true) mid-levels.

    Exact for equal sample counts.
    """
    count = int(max(pred_weights.sum() * pred.frames, true_weights.sum() * true.frames))
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    difference = pred.quantiles(pred_weights, levels) - true.quantiles(true_weights, levels)
    return float(difference.square().mean().sqrt())


def point_wasserstein(pred: Array, true: Array) -> float:
    """Return W1 of the point PDFs in units of the truth's standard deviation, mean over channels.

    All points are pooled; with more than 2 million values a side, every s-th frame is used.
    """
    check_same_grid(pred, true)
    distances = []
    for channel in range(true.shape[2]):
        z, p = _point_values(true, channel, "true"), _point_values(pred, channel, None)
        distances.append(_w1(p, z) / z.std() if np.isfinite(p).all() else math.inf)
    return float(np.mean(distances))


def quantile_ratios(pred: Array, true: Array, levels: Sequence[float] = (0.999, 0.9999)) -> np.ndarray:
    """Return (levels,): quantiles of |pred - m| over those of |true - m|, m = mean of true; channel mean."""
    check_same_grid(pred, true)
    if not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels must lie between 0 and 1, got {tuple(levels)}; write 99.9 % as 0.999")
    ratios = []
    for channel in range(true.shape[2]):
        z, p = _point_values(true, channel, "true"), _point_values(pred, channel, None)
        if not np.isfinite(p).all():
            return np.full(len(levels), math.inf)
        ratios.append(np.quantile(np.abs(p - z.mean()), levels) / np.quantile(np.abs(z - z.mean()), levels))
    return np.asarray(np.mean(ratios, axis=0))


def structure_function(field: Array, separations: Sequence[int], *, axis: int = -1) -> Any:
    """Return S2(r) = mean of sum_c (u_c(x + r) - u_c(x))^2, r in grid spacings along a periodic axis."""
    return like(field, _increment_moments(field, separations, axis)[0])


def increment_flatness(field: Array, separations: Sequence[int], *, axis: int = -1) -> Any:
    """Return <d^4> / <d^2>^2 of the increments d = z(x + r) - z(x), channels pooled; 3 if Gaussian."""
    second, fourth = _increment_moments(field, separations, axis)
    channels = field.shape[2]
    return like(field, channels * fourth / second.square())


def _increment_moments(field: Array, separations: Sequence[int], axis: int) -> tuple[Tensor, Tensor]:
    """Return sums over channels of <d^2> and <d^4>, each (separations,)."""
    check_trajectories("field", field)
    dims = field.ndim - 3
    if not -dims <= axis < 0 or any(not 0 < r < field.shape[axis] for r in separations):
        raise ValueError(
            f"axis must be -1..-{dims} and separations 1..size-1, got {axis} and {list(separations)}; "
            "count separations in grid spacings"
        )
    second, fourth = [], []
    for piece in chunks(field, name="field"):
        increments = [piece.roll(-r, dims=axis) - piece for r in separations]
        second.append(torch.stack([d.square().sum() for d in increments]))
        fourth.append(torch.stack([d.pow(4).sum() for d in increments]))
    values = math.prod(field.shape) // field.shape[2]
    return torch.stack(second).sum(0) / values, torch.stack(fourth).sum(0) / values


def _is_finite(field: Array) -> bool:
    return all(bool(torch.isfinite(piece).all()) for piece in chunks(field))


def _point_values(field: Array, channel: int, name: str | None) -> np.ndarray:
    stride = math.ceil(math.prod(field.shape) / field.shape[2] / MAX_VALUES)
    pieces = [piece.flatten() for piece in chunks(field[:, ::stride, channel : channel + 1], name=name)]
    return torch.cat(pieces).cpu().numpy()


def _w1(x: np.ndarray, y: np.ndarray) -> float:
    """Return the integral of |F_x - F_y|."""
    values = np.sort(np.concatenate([x, y]))
    below_x = np.searchsorted(np.sort(x), values[:-1], side="right") / len(x)
    below_y = np.searchsorted(np.sort(y), values[:-1], side="right") / len(y)
    return float(np.abs(below_x - below_y) @ np.diff(values))

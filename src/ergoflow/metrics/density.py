"""Kernel densities and their Kullback-Leibler divergence, exact and binned (paper: KL divergence).

Both follow scipy's `gaussian_kde` with Scott's rule: bandwidth matrix n^(-2/(D+4)) Cov, Cov unbiased. Weights
are *frequencies*: weight 2 is the same as listing the sample twice, so a bootstrap over trajectories is a
re-weighting. In one dimension and beyond `exact_pairs` kernel evaluations the density is looked up in a table
at steps of a sixteenth of the bandwidth; far from all samples it stays a sum of kernels, so far tails keep
their logarithm.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, to_float64

# Kernel evaluations up to which the double sum is done as written (2000 samples a side).
EXACT_PAIRS = 4_000_000
BINS_PER_BANDWIDTH = 16
# Bandwidths after which a kernel is no longer a normal number of float64.
REACH = 38
# A spread this much smaller than the other side's is a collapse onto a point, not a density.
COLLAPSE = 1e-6
# Numbers of the kernel matrix held at once: what a core's cache can keep, and too few to be worth several threads.
PAIRS = 2**15
# Below this sum a kernel that counts may have been rounded to a number without all its digits.
FAR = 1e-280
# So far out the logarithm is close to a parabola, of which so many points are enough.
FAR_PLACES = 500


def kl_divergence(p: Array, q: Array) -> float:
    """Return KL(P || Q): the mean over p's samples of log pdf_P - log pdf_Q, densities by Scott's rule.

    p and q are samples (D, n); (n,) means D = 1. A q that has collapsed onto a point (or plane) or is not
    finite gives inf.
    """
    first, second = _samples("p", p), _samples("q", q)
    if first.shape[0] != second.shape[0]:
        raise ValueError(
            f"p and q must have the same dimension, got {first.shape[0]} and {second.shape[0]}; samples are (D, n)"
        )
    if not np.isfinite(first).all():
        raise ValueError("p must be finite, got nan or inf; p holds the truth's samples, check them")
    if not np.isfinite(second).all():
        return math.inf
    ones = [np.ones(x.shape[1]) for x in (first, second)]
    if first.shape[0] == 1:
        return weighted_kl(first[0], ones[0], second[0], ones[1])
    return weighted_joint_kl(first, ones[0], second, ones[1])


def weighted_kl(
    p: np.ndarray,
    p_weights: np.ndarray,
    q: np.ndarray,
    q_weights: np.ndarray,
    *,
    exact_pairs: int = EXACT_PAIRS,
) -> float:
    """Return the one-dimensional divergence of samples (n,) with frequency weights (n,)."""
    p, p_weights = p[p_weights > 0], p_weights[p_weights > 0]
    q, q_weights = q[q_weights > 0], q_weights[q_weights > 0]
    width_p, width_q = _bandwidth(p, p_weights), _bandwidth(q, q_weights)
    if width_p == 0:
        raise ValueError("p must vary, got a constant sample; pass truth with more than one state")
    if width_q <= COLLAPSE * width_p:
        return math.inf
    mean_log = _mean_log_density if len(p) * max(len(p), len(q)) <= exact_pairs else _tabulated_mean_log_density
    return mean_log(p, p_weights, p, p_weights, width_p) - mean_log(p, p_weights, q, q_weights, width_q)


def weighted_joint_kl(p: np.ndarray, p_weights: np.ndarray, q: np.ndarray, q_weights: np.ndarray) -> float:
    """Return the divergence of D-dimensional samples (D, n) with frequency weights (n,)."""
    p, p_weights = p[:, p_weights > 0], p_weights[p_weights > 0]
    q, q_weights = q[:, q_weights > 0], q_weights[q_weights > 0]
    factor_p, factor_q = _bandwidth_factor(p, p_weights), _bandwidth_factor(q, q_weights)
    if factor_p is None:
        raise ValueError("p must span all its dimensions, got a flat sample; use fewer dimensions or more samples")
    if factor_q is None:
        return math.inf
    logs = [
        _log_density(np.linalg.solve(factor, p), np.linalg.solve(factor, x), w) - np.log(np.diagonal(factor)).sum()
        for x, w, factor in ((p, p_weights, factor_p), (q, q_weights, factor_q))
    ]
    return float(p_weights @ (logs[0] - logs[1]) / p_weights.sum())


def _samples(name: str, values: Array) -> np.ndarray:
    samples = np.atleast_2d(to_float64(values).cpu().numpy())
    if samples.ndim != 2 or samples.shape[1] < samples.shape[0] + 1:
        raise ValueError(
            f"{name} must hold at least D + 1 samples (D, n), got shape {samples.shape}; pass more samples or transpose"
        )
    return samples


def _bandwidth(samples: np.ndarray, weights: np.ndarray) -> float:
    """Return Scott's bandwidth n^(-1/5) sigma; 0 for a constant sample."""
    total = weights.sum()
    if total < 2:
        raise ValueError(f"a density needs at least 2 samples, got {total:g}; pass more samples")
    centred = samples - weights @ samples / total
    return float(math.sqrt(weights @ centred**2 / (total - 1)) * total**-0.2)


def _bandwidth_factor(samples: np.ndarray, weights: np.ndarray) -> np.ndarray | None:
    """Return the Cholesky factor of Scott's bandwidth matrix, or None when the samples are flat."""
    dims, total = len(samples), weights.sum()
    centred = samples - (samples @ weights / total)[:, None]
    covariance = (centred * weights) @ centred.T / (total - 1)
    eigenvalues = np.linalg.eigvalsh(covariance)
    if eigenvalues[0] <= COLLAPSE**2 * max(eigenvalues[-1], np.finfo(float).tiny):
        return None
    return np.asarray(np.linalg.cholesky(covariance) * total ** (-1 / (dims + 4)))


def _log_density(points: np.ndarray, samples: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return log of the unit-bandwidth kernel density at points (D, m), from samples (D, n).

    Kernels are added as they are, which is faster than adding them by their logarithms, and as exact wherever the sum
    can be told from zero; far from all samples it cannot.
    """
    dims = len(points)
    x, s, w = (torch.from_numpy(np.ascontiguousarray(values)) for values in (points.T, samples, weights))

    def exponents(block: Tensor) -> Tensor:
        square = sum((block[:, d, None] - s[d]).square_() for d in range(dims))
        return torch.as_tensor(square).mul_(-0.5)

    rows = max(1, PAIRS // len(w))
    total = torch.cat([exponents(block).exp_() @ w for block in x.split(rows)])
    logs, far = total.log(), total < FAR
    if far.any():
        log_weights = w.log()
        logs[far] = torch.cat([torch.logsumexp(exponents(block).add_(log_weights), 1) for block in x[far].split(rows)])
    return np.asarray(logs.numpy() - math.log(weights.sum()) - 0.5 * dims * math.log(2 * math.pi))


def _mean_log_density(
    points: np.ndarray, point_weights: np.ndarray, samples: np.ndarray, weights: np.ndarray, width: float
) -> float:
    """Return the mean over points (m,) of the log of the kernel density of samples (n,)."""
    logs = _log_density(points[None] / width, samples[None] / width, weights) - math.log(width)
    return float(point_weights @ logs / point_weights.sum())


def _tabulated_mean_log_density(
    points: np.ndarray, point_weights: np.ndarray, samples: np.ndarray, weights: np.ndarray, width: float
) -> float:
    """Return the same, the density being made once on a grid of bandwidth/16 and looked up linearly.

    Samples are shared linearly by their two neighbours, and the table is their convolution with the kernel. That
    sharing adds on average 1/6 of the squared spacing to the variance, which is taken back from the kernel.
    """
    spacing, first = width / BINS_PER_BANDWIDTH, samples.min()
    counts = _shared((samples - first) / spacing, weights)
    reach, kernel_width = REACH * BINS_PER_BANDWIDTH, math.sqrt(BINS_PER_BANDWIDTH**2 - 1 / 6)
    table = np.convolve(counts, np.exp(-0.5 * (np.arange(-reach, reach + 1) / kernel_width) ** 2))
    position = (points - first) / spacing + reach
    left = np.clip(position.astype(np.int64), 0, len(table) - 2)
    share = position - left
    near = (np.minimum(table[left], table[left + 1]) > FAR) & (np.abs(share - 0.5) <= 0.5)
    log_table = np.log(np.maximum(table, FAR)) - math.log(counts.sum()) - 0.5 * math.log(2 * math.pi)
    logs = np.where(near, (1 - share) * log_table[left] + share * log_table[left + 1], 0.0)
    total = point_weights @ logs
    if not near.all():
        occupied = np.flatnonzero(counts)
        places, place_weights = _thinned(position[~near] - reach, point_weights[~near])
        far_logs = _log_density(places[None] / kernel_width, occupied[None] / kernel_width, counts[occupied])
        total += place_weights @ far_logs
    return float(total / point_weights.sum()) - math.log(kernel_width * spacing)


def _thinned(points: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return many points as FAR_PLACES at most, each shared linearly by its two neighbours, and their weights."""
    if len(points) <= FAR_PLACES:
        return points, weights
    step = max(float(np.ptp(points)) / (FAR_PLACES - 2), 1.0)
    shared = _shared((points - points.min()) / step, weights)
    return points.min() + step * np.arange(len(shared)), shared


def _shared(position: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weights of samples shared linearly by the two whole numbers beside each position >= 0."""
    left = position.astype(np.int64)
    share = position - left
    # n samples of deviation sigma span at most sigma sqrt(2 n), so the number of bins is bounded by n^0.7.
    counts = np.bincount(left, weights * (1 - share), left.max() + 2)
    return np.asarray(counts + np.bincount(left + 1, weights * share, left.max() + 2))

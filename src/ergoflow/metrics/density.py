"""Kernel densities and their Kullback-Leibler divergence, exact and binned (paper: KL divergence).

Both follow scipy's `gaussian_kde` with Scott's rule: bandwidth matrix n^(-2/(D+4)) Cov, Cov unbiased. Weights
are *frequencies*: weight 2 is the same as listing the sample twice, so a bootstrap over trajectories is a
re-weighting. In one dimension and beyond `exact_pairs` kernel evaluations the samples are first gathered on
a grid of a sixteenth of the bandwidth; the sum stays a sum of kernels, so far tails keep their logarithm.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ergoflow.metrics.arrays import Array, to_float64

# Kernel evaluations up to which the double sum is done as written (2000 samples a side).
EXACT_PAIRS = 4_000_000
BINS_PER_BANDWIDTH = 16
# A spread this much smaller than the other side's is a collapse onto a point, not a density.
COLLAPSE = 1e-6
# Rows of the kernel matrix held at once.
ROWS = 512


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
    if len(p) * max(len(p), len(q)) > exact_pairs:
        p, p_weights, width_p = _compress(p, p_weights, width_p)
        q, q_weights, width_q = _compress(q, q_weights, width_q)
    log_p = _log_density(p[None] / width_p, p[None] / width_p, p_weights) - math.log(width_p)
    log_q = _log_density(p[None] / width_q, q[None] / width_q, q_weights) - math.log(width_q)
    return float(p_weights @ (log_p - log_q) / p_weights.sum())


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
    """Return log of the unit-bandwidth kernel density at points (D, m), from samples (D, n)."""
    dims = len(points)
    x, s = torch.from_numpy(points.T.copy()), torch.from_numpy(samples.T.copy())
    log_weights = torch.from_numpy(np.log(weights))
    rows = []
    for block in x.split(ROWS):
        square = sum((block[:, d, None] - s[None, :, d]).square() for d in range(dims))
        rows.append(torch.logsumexp(log_weights - 0.5 * square, dim=1))
    constant = math.log(weights.sum()) + 0.5 * dims * math.log(2 * math.pi)
    return np.asarray(torch.cat(rows).numpy() - constant)


def _compress(x: np.ndarray, weights: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Return samples gathered on a grid of bandwidth/16, their weights, and the bandwidth to use with them.

    Each sample is shared linearly by its two neighbours. That adds on average 1/6 of the squared spacing to
    the variance, which is taken back from the bandwidth.
    """
    spacing = width / BINS_PER_BANDWIDTH
    position = (x - x.min()) / spacing
    left = position.astype(np.int64)
    share = position - left
    # n samples of deviation sigma span at most sigma sqrt(2 n), so the number of bins is bounded by n^0.7.
    counts = np.bincount(left, weights * (1 - share), left.max() + 2)
    counts += np.bincount(left + 1, weights * share, left.max() + 2)
    occupied = np.flatnonzero(counts)
    return x.min() + spacing * occupied, counts[occupied], math.sqrt(width**2 - spacing**2 / 6)

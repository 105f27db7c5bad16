"""Every long-term metric from two sets of sums, under any weights over trajectories.

Weight 2 counts a trajectory twice, weight 0 leaves it out, so a bootstrap or a noise floor is the same
evaluation under other weights (see resampling). A roll-out that failed and has weight makes every metric
infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ergoflow.metrics.catalogue import JOINT_SAMPLES, PCA_COMPONENTS, SLICED_SAMPLES, available
from ergoflow.metrics.density import weighted_joint_kl, weighted_kl
from ergoflow.metrics.distribution import SlicedSamples, slice_samples, sliced_distance, stride_samples
from ergoflow.metrics.energy import TAIL_SHARE
from ergoflow.metrics.histogram import histogram_w1, tail_quantile
from ergoflow.metrics.mixing import fit_mixing_rate, integral_time, max_correlation_error
from ergoflow.metrics.result import (
    StatisticsResult,
    correlation,
    histogram,
    mean_spectrum,
    point_moments,
    stands_still,
    tke_map,
)
from ergoflow.metrics.spectrum import default_shells, log_ratio
from ergoflow.metrics.stability import share_in_range

# Up to 200 samples a side the kernel sums are done as written, beyond on a grid (see density).
EXACT_PAIRS = 40_000
# Shells with less than this part of the largest one's energy hold rounding: those that a solver's mask empties.
ROUNDING = 1e-10


def long_term_metrics(
    model: StatisticsResult,
    truth: StatisticsResult,
    *,
    model_weights: np.ndarray | None = None,
    truth_weights: np.ndarray | None = None,
) -> dict[str, float]:
    """Return every long-term metric (keys of CATALOGUE) under weights over trajectories (None: all ones).

    Lower is better for all. Metrics that need a PCA basis or a histogram are there only if both results hold
    one. To judge the survivors alone, say so: model_weights=model.survivors().
    """
    evaluation = prepare(model, truth)
    return evaluation.metrics(check_weights(model, model_weights), check_weights(truth, truth_weights))


def survival_summary(
    model: StatisticsResult, truth: StatisticsResult, *, steps: tuple[int, ...] = (1000, 10000)
) -> dict[str, float]:
    """Return survival@n and the shares within 5 sigma of truth's energy and enstrophy at each step n reached.

    Steps count frames from the first one fed. The last frame is always among them.
    """
    last = model.energy.shape[1] - 1
    summary: dict[str, float] = {}
    for step in sorted({n for n in steps if n <= last} | {last}):
        alive = (model.failed_at < 0) | (model.failed_at > step)
        summary[f"survival@{step}"] = float(alive.mean())
        for name in ("energy", "enstrophy"):
            reference = getattr(truth, name)[:, truth.skip :]
            summary[f"{name}_in_range@{step}"] = share_in_range(getattr(model, name), reference, step=step)
    return summary


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Two sets of sums with their samples strided and sorted once, ready for many re-weightings."""

    model: StatisticsResult
    truth: StatisticsResult
    keys: tuple[str, ...]
    sliced: tuple[SlicedSamples, SlicedSamples] | None  # model, truth; None without a basis

    def metrics(self, model_weights: np.ndarray, truth_weights: np.ndarray) -> dict[str, float]:
        """Return the metrics under these weights; inf for all if a failed trajectory has weight."""
        if bool(((self.model.failed_at >= 0) & (model_weights > 0)).any()):
            return dict.fromkeys(self.keys, math.inf)
        sides = (self.model, model_weights, self.truth, truth_weights)
        values = {**_spectral(*sides), **_temporal(*sides)}
        if "pca_kl" in self.keys:
            assert self.sliced is not None
            values |= _distributional(*sides)
            values["sliced_wasserstein"] = sliced_distance(self.sliced[0], model_weights, self.sliced[1], truth_weights)
        if "pdf_w1" in self.keys:
            values |= _pointwise(*sides)
        return {key: values[key] if math.isfinite(values[key]) else math.inf for key in self.keys}


def prepare(model: StatisticsResult, truth: StatisticsResult) -> Evaluation:
    """Return the evaluation of a model's sums against the truth's, checked to be comparable."""
    if model.grid != truth.grid or model.max_lag != truth.max_lag:
        raise ValueError(
            f"both results must share grid and lags, got {model.grid}, {model.max_lag} and {truth.grid}, "
            f"{truth.max_lag}; use the same settings for both"
        )
    if (truth.failed_at >= 0).any():
        raise ValueError(
            f"the truth must be finite, got failures at steps {truth.failed_at[truth.failed_at >= 0]}; check the data"
        )
    keys = available(model, truth)
    if "pdf_w1" in keys and not np.array_equal(model.edges, truth.edges):
        raise ValueError("both histograms must share their edges, got different ones; pass the truth's edges")
    if "pca_kl" not in keys:
        return Evaluation(model=model, truth=truth, keys=keys, sliced=None)
    if not np.array_equal(model.pca_variances, truth.pca_variances):
        raise ValueError("both results must share one basis, got different ones; fit it on the truth only")
    deviations = np.sqrt(truth.pca_variances)
    pred, true = (
        slice_samples(stride_samples(result.projections / deviations, SLICED_SAMPLES)) for result in (model, truth)
    )
    return Evaluation(model=model, truth=truth, keys=keys, sliced=(pred, true))


def check_weights(result: StatisticsResult, weights: np.ndarray | None) -> np.ndarray:
    """Return (J,) whole-number weights as floats, ones for None; raises on anything else or a zero sum."""
    values = np.ones(result.num_trajectories) if weights is None else np.asarray(weights, dtype=np.float64)
    whole = values.shape == (result.num_trajectories,) and bool((values == np.floor(values)).all())
    if not whole or (values < 0).any() or not values.sum() > 0:
        raise ValueError(
            f"weights must be {result.num_trajectories} whole numbers >= 0, not all 0, got {values}; "
            "give how often each trajectory counts"
        )
    return values


def _spectral(model: StatisticsResult, wm: np.ndarray, truth: StatisticsResult, wt: np.ndarray) -> dict[str, float]:
    pred, true = torch.from_numpy(mean_spectrum(model, wm)), torch.from_numpy(mean_spectrum(truth, wt))
    ratio = (pred - true).abs() / true
    held = true > ROUNDING * true[1:].max()
    held[0] = False
    first, last = default_shells(len(true))
    p, z = pred[first : last + 1], true[first : last + 1]
    maps = tke_map(model, wm), tke_map(truth, wt)
    return {
        "me_ape": float(ratio[first : last + 1].mean()),
        "me_ape@1..16": float(ratio[:17][held[:17]].mean()),
        "me_ape@1..N/2": float(ratio[held].mean()),
        "me_lrw": log_ratio(p, z, "true"),
        "me_lr@uniform": log_ratio(p, z, "uniform"),
        "me_lr@literal": log_ratio(p, z, "literal"),
        "me_lr@pred": log_ratio(p, z, "pred"),
        "tke_error": float(np.abs(maps[0] - maps[1]).mean() / maps[1].mean()),
    }


def _temporal(model: StatisticsResult, wm: np.ndarray, truth: StatisticsResult, wt: np.ndarray) -> dict[str, float]:
    pred, true = correlation(model, wm), correlation(truth, wt)
    values = {
        "energy_drift": _drift(model.energy, wm, truth.energy[:, truth.skip :], wt),
        "enstrophy_drift": _drift(model.enstrophy, wm, truth.enstrophy[:, truth.skip :], wt),
    }
    if stands_still(pred, true):
        return values | dict.fromkeys(("delta_lambda", "integral_time_error", "acf_max_error"), math.inf)
    return values | {
        "delta_lambda": abs(fit_mixing_rate(pred) - fit_mixing_rate(true)),
        "integral_time_error": abs(integral_time(pred) / integral_time(true) - 1),
        "acf_max_error": max_correlation_error(pred, true),
    }


def _drift(series: np.ndarray, wm: np.ndarray, reference: np.ndarray, wt: np.ndarray) -> float:
    tail = max(1, int(TAIL_SHARE * series.shape[1]))
    used = wm > 0  # a failed trajectory without weight is inf there
    end = wm[used] @ series[used, -tail:].mean(axis=1) / wm.sum()
    mean = wt @ reference.mean(axis=1) / wt.sum()
    return float(abs(end - mean) / abs(mean))


def _distributional(
    model: StatisticsResult, wm: np.ndarray, truth: StatisticsResult, wt: np.ndarray
) -> dict[str, float]:
    p, q = truth.projections, model.projections  # (J, T, M)
    wp, wq = np.repeat(wt, p.shape[1]), np.repeat(wm, q.shape[1])
    marginal = [
        weighted_kl(p[..., k].ravel(), wp, q[..., k].ravel(), wq, exact_pairs=EXACT_PAIRS)
        for k in range(min(PCA_COMPONENTS, p.shape[2]))
    ]
    pairs = [stride_samples(x[..., :2], JOINT_SAMPLES) for x in (p, q)]
    flat = [x.reshape(-1, x.shape[2]).T for x in pairs]  # (2, samples)
    joint = weighted_joint_kl(flat[0], np.repeat(wt, pairs[0].shape[1]), flat[1], np.repeat(wm, pairs[1].shape[1]))
    return {"pca_kl": float(np.mean(marginal)), "pca_kl@joint2": joint}


def _pointwise(model: StatisticsResult, wm: np.ndarray, truth: StatisticsResult, wt: np.ndarray) -> dict[str, float]:
    pred, true, edges = histogram(model, wm), histogram(truth, wt), truth.edges
    mean, deviation = point_moments(truth, wt)
    w1, tails = [], []
    for c in range(len(true)):
        w1.append(histogram_w1(pred[c], true[c], edges[c]) / deviation[c])
        quantiles = [
            [tail_quantile(counts[c], edges[c], mean[c], level) for level in (0.999, 0.9999)] for counts in (pred, true)
        ]
        tails.append(np.abs(np.array(quantiles[0]) / np.array(quantiles[1]) - 1))
    tail = np.mean(tails, axis=0)
    return {"pdf_w1": float(np.mean(w1)), "tail_error": float(tail[0]), "tail_error@99.99": float(tail[1])}

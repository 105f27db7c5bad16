"""The point PDF kept as counts on even bins: edges, W1 and tail quantiles."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_trajectories, chunks

# Bins beyond the truth's own range on either side, as a share of that range, for a model that overshoots.
MARGIN = 0.25


def point_edges(true: Array, *, bins: int = 1000) -> np.ndarray:
    """Return (C, bins+1) even edges: each channel's range in the truth and a quarter more on both sides."""
    check_trajectories("true", true)
    extremes = [
        torch.stack((piece.amin(dim=(0, 1)).flatten(1).amin(1), -piece.amax(dim=(0, 1)).flatten(1).amax(1)))
        for piece in chunks(true, name="true")
    ]
    low, minus_high = torch.stack(extremes).amin(dim=0).cpu().numpy()  # (C,) each
    span = -minus_high - low
    if not (span > 0).all():
        raise ValueError(f"every channel must vary, got ranges {span}; leave the constant channel out")
    return np.linspace(low - MARGIN * span, -minus_high + MARGIN * span, bins + 1, axis=-1)


def check_edges(edges: Array, channels: int) -> Tensor:
    """Return (C, B+1) evenly spaced float64 edges from (B+1,) or (C, B+1), checked."""
    values = edges.to(torch.float64) if isinstance(edges, Tensor) else torch.from_numpy(np.array(edges, float))
    values = values.expand(channels, -1) if values.ndim == 1 else values
    steps = values.diff(dim=-1)
    if values.ndim != 2 or len(values) != channels or steps.shape[1] < 1 or not bool((steps > 0).all()):
        raise ValueError(
            f"histogram_edges must be (B+1,) or ({channels}, B+1) increasing numbers, got shape "
            f"{tuple(values.shape)}; "
            "use numpy.linspace or point_edges"
        )
    if not torch.allclose(steps, steps.mean(dim=1, keepdim=True), rtol=1e-6):
        raise ValueError("histogram_edges must be evenly spaced, got unequal bins; use numpy.linspace")
    return values


def histogram_w1(pred: np.ndarray, true: np.ndarray, edges: np.ndarray) -> float:
    """Return the W1 distance of two histograms (B,) on the same even edges: the integral of |F - G|."""
    width = (edges[-1] - edges[0]) / (len(edges) - 1)
    cumulative = [np.cumsum(counts) / counts.sum() for counts in (pred, true)]
    return float(np.abs(cumulative[0] - cumulative[1]).sum() * width)


def tail_quantile(counts: np.ndarray, edges: np.ndarray, centre: float, level: float) -> float:
    """Return the `level` quantile of |z - centre| from one channel's counts (B,), spread evenly over each bin.

    F(r) = H(centre + r) - H(centre - r), H the piecewise linear cumulative count, is piecewise linear with its
    corners at the distances of the edges, so that its inverse is exact.
    """
    if counts.sum() <= 0:
        return math.nan
    cumulative = np.concatenate(([0.0], np.cumsum(counts)))
    radii = np.sort(np.abs(edges - centre))
    inside = np.interp(centre + radii, edges, cumulative) - np.interp(centre - radii, edges, cumulative)
    return float(np.interp(level * cumulative[-1], inside, radii))

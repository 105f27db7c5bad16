"""Principal components of the truth: the coordinates in which distributions of whole fields are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_finite, check_trajectories, chunk_starts, to_float64

# Snapshots used for a fit: enough for 64 components, and a Gram matrix of 2000 x 2000 costs seconds.
MAX_SNAPSHOTS = 2000
# Components with less than this share of the leading variance are round-off.
RANK_TOLERANCE = 1e-12
# Columns of the snapshot matrix turned into float64 at once.
COLUMN_CHUNK = 8192


@dataclass(frozen=True, kw_only=True)
class PCABasis:
    """Mean field (P,), orthonormal components (K, P) and variances (K,) of the truth, all float64 tensors.

    P counts channels times grid points. Centred, unscaled; variances are population variances over the
    snapshots.
    """

    mean: Tensor
    components: Tensor
    variances: Tensor

    def __post_init__(self) -> None:
        if self.components.shape != (len(self.variances), len(self.mean)):
            raise ValueError(
                f"components must have shape (K, P) = {(len(self.variances), len(self.mean))}, "
                f"got {tuple(self.components.shape)}; build the basis with fit_pca"
            )

    def to(self, device: torch.device | str) -> PCABasis:
        """Return the basis on another device."""
        return PCABasis(
            mean=self.mean.to(device),
            components=self.components.to(device),
            variances=self.variances.to(device),
        )

    def project(self, states: Tensor) -> Tensor:
        """Return (N, K) coordinates of flattened states (N, P), in float64."""
        return (states.to(torch.float64) - self.mean) @ self.components.T


def fit_pca(true: Array, num_components: int, *, max_snapshots: int = MAX_SNAPSHOTS) -> PCABasis:
    """Return the leading principal components of the truth (J, T, C, *grid) by the method of snapshots.

    With more than `max_snapshots` frames, every s-th frame of every trajectory is used, s = ceil(frames /
    max_snapshots), so that up to one more per trajectory may be left. The eigenvectors come from whichever is
    smaller of the Gram matrix (snapshots) and the covariance matrix (points); directions whose variance is
    round-off are left out, so fewer components may return.
    """
    check_trajectories("true", true)
    stride = math.ceil(true.shape[0] * true.shape[1] / max_snapshots)
    snapshots = _snapshots(true, stride)  # (n, P), dtype of the truth
    count, points = snapshots.shape
    if count < 2 or num_components < 1:
        raise ValueError(
            f"a fit needs at least two snapshots and one component, got {count} and {num_components}; pass more truth"
        )
    mean = snapshots.to(torch.float64).mean(dim=0) if points <= COLUMN_CHUNK else _column_means(snapshots)
    if count <= points:
        values, vectors = torch.linalg.eigh(_gram(snapshots, mean))
        keep = _leading(values, num_components)
        components = _combine(snapshots, mean, vectors[:, keep]) / values[keep].sqrt()[:, None]
        # Rounding leaves the rows orthogonal to about 1e-8 where eigenvalues are small; QR repairs that.
        components = _orthonormal(components)
    else:
        centred = snapshots.to(torch.float64) - mean
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        keep = _leading(values, num_components)
        components = vectors[:, keep].T.contiguous()
    return PCABasis(mean=mean, components=_fix_signs(components), variances=values[keep] / count)


def project_trajectories(field: Array, basis: PCABasis) -> np.ndarray:
    """Return (J, T, K) coordinates of every frame of (J, T, C, *grid) in the basis."""
    check_trajectories("field", field)
    rows = []
    for start, stop in chunk_starts(field):
        piece = to_float64(field[:, start:stop]).to(basis.mean.device)
        check_finite("field", piece, first_step=start)
        states = piece.flatten(0, 1).flatten(1)  # (J t, P)
        rows.append(basis.project(states).reshape(*piece.shape[:2], -1).cpu())
    return torch.cat(rows, dim=1).numpy()


def _snapshots(true: Array, stride: int) -> Tensor:
    picked = true[:, ::stride]
    values = picked.detach() if isinstance(picked, Tensor) else torch.from_numpy(np.array(picked))
    check_finite("true", values)
    if not values.is_floating_point() or values.dtype in (torch.float16, torch.bfloat16):
        values = values.to(torch.float32)
    return values.flatten(0, 1).flatten(1)  # (n, P)


def _column_means(snapshots: Tensor) -> Tensor:
    return torch.cat([columns.to(torch.float64).mean(dim=0) for columns in snapshots.split(COLUMN_CHUNK, 1)])


def _gram(snapshots: Tensor, mean: Tensor) -> Tensor:
    gram = torch.zeros(len(snapshots), len(snapshots), dtype=torch.float64, device=snapshots.device)
    for columns, centre in zip(snapshots.split(COLUMN_CHUNK, 1), mean.split(COLUMN_CHUNK), strict=True):
        centred = columns.to(torch.float64) - centre
        gram.addmm_(centred, centred.T)
    return gram


def _combine(snapshots: Tensor, mean: Tensor, vectors: Tensor) -> Tensor:
    """Return (K, P): vectors^T (snapshots - mean), chunk by chunk over the points."""
    pieces = [
        vectors.T @ (columns.to(torch.float64) - centre)
        for columns, centre in zip(snapshots.split(COLUMN_CHUNK, 1), mean.split(COLUMN_CHUNK), strict=True)
    ]
    return torch.cat(pieces, dim=1)


def _leading(values: Tensor, count: int) -> Tensor:
    """Return the positions of the largest eigenvalues, largest first, without round-off ones."""
    order = torch.argsort(values, descending=True)[:count]
    keep = order[values[order] > RANK_TOLERANCE * values[order[0]]]
    if float(values[order[0]]) <= 0 or len(keep) == 0:
        raise ValueError("the truth must vary between snapshots, got a constant one; pass a longer record")
    return keep


def _orthonormal(components: Tensor) -> Tensor:
    q, r = torch.linalg.qr(components.T)  # (P, K)
    return (q * torch.sign(torch.diagonal(r))).T.contiguous()


def _fix_signs(components: Tensor) -> Tensor:
    """Return the components with their largest entry positive, so that two fits can be compared."""
    largest = components.abs().argmax(dim=1, keepdim=True)
    return components * torch.sign(components.gather(1, largest))

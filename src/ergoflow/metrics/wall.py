"""Wall statistics of the channel plane (J, T, 3, Y, Z).

Axes y wall-normal and z spanwise, channels u, v, w in units of u_tau. Only z is periodic.
Profiles average over trajectories, time and z; fluctuations are about the mean profile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_trajectories, chunks, like
from ergoflow.metrics.dns import PROFILE_NAMES
from ergoflow.metrics.energy import relative_drift


def mean_profile(velocity: Array) -> Any:
    """Return (3, Y): mean of u, v, w at each height; the first row is U+."""
    return like(velocity, _moments(velocity)[0])


def rms_profiles(velocity: Array) -> Any:
    """Return (3, Y): root mean square of the fluctuations u', v', w'."""
    return like(velocity, torch.diagonal(_covariance(velocity), dim1=0, dim2=1).T.clamp(min=0).sqrt())


def reynolds_stress(velocity: Array) -> Any:
    """Return (Y,): -<u'v'>, positive near the lower wall and negative near the upper one."""
    return like(velocity, -_covariance(velocity)[0, 1])


def fold(profile: Array, *, odd: bool = False) -> Any:
    """Return the mean of both walls' halves (..., ceil(Y/2)); `odd` for profiles that change sign."""
    mirrored = profile.flip(-1) if isinstance(profile, Tensor) else np.flip(profile, -1)
    half = (profile.shape[-1] + 1) // 2
    return 0.5 * (profile - mirrored if odd else profile + mirrored)[..., :half]


def wall_profiles(
    mean: np.ndarray, squares: np.ndarray, stress: np.ndarray, *, reynolds_tau: float
) -> dict[str, np.ndarray]:
    """Return wall-to-centre profiles (ceil(Y/2),), both walls averaged, under the names of `dns.PROFILE_NAMES`.

    `mean` (3, Y) is <u_i>, `squares` (3, Y) <u_i²> and `stress` (Y,) <uv>, all in units of u_tau. Rows are cells of
    equal height 2/Y with the walls half a cell outside the first and the last.
    """
    rms = np.sqrt(fold(np.maximum(squares - mean**2, 0.0)))
    rows = (np.arange(rms.shape[1]) + 0.5) * 2 * reynolds_tau / mean.shape[1]
    uv = fold(mean[0] * mean[1] - stress, odd=True)
    return dict(zip(PROFILE_NAMES, (rows, fold(mean[0]), *rms, uv), strict=True))


def spanwise_correlation(velocity: Array, row: int, *, component: int = 0) -> Any:
    """Return R(dz) / R(0), dz = 0..Z//2 cells, of one component's fluctuation at wall-normal index `row`."""
    _check(velocity)
    if not 0 <= row < velocity.shape[3] or not 0 <= component < 3:
        raise ValueError(
            f"row must be below {velocity.shape[3]} and component below 3, got {row} and {component}; "
            "rows count from the lower wall"
        )
    line = velocity[:, :, component : component + 1, row : row + 1]
    total, products, frames = 0.0, torch.zeros(1), velocity.shape[0] * velocity.shape[1]
    for piece in chunks(line, name="velocity"):
        total += float(piece.mean(dim=-1).sum())
        modes = torch.fft.rfft(piece, dim=-1).abs().square()  # Wiener-Khinchin: R is its inverse transform
        products = products + torch.fft.irfft(modes, n=piece.shape[-1], dim=-1).sum(dim=(0, 1, 2, 3)).cpu()
    covariance = products / (frames * velocity.shape[-1]) - (total / frames) ** 2
    if float(covariance[0]) <= 0:
        raise ValueError(
            f"the component must fluctuate at row {row}, got variance {float(covariance[0])}; take another row"
        )
    return like(velocity, covariance[: velocity.shape[-1] // 2 + 1] / covariance[0])


def wall_shear(velocity: Array, *, first_node_plus: float) -> Any:
    """Return (J, T, 2, Z): tau_w+ = u+(first node) / y+(first node) at the lower and the upper wall.

    One-sided and first order, which inside the viscous sublayer (first node at y+ < 1) is exact to a percent.
    """
    _check(velocity)
    if not first_node_plus > 0:
        raise ValueError(f"first_node_plus must be positive, got {first_node_plus}; it is half a cell in wall units")
    rows = [piece[:, :, 0, [0, -1], :] / first_node_plus for piece in chunks(velocity, name="velocity")]
    return like(velocity, torch.cat(rows, dim=1))


def wall_shear_pdf(velocity: Array, edges: np.ndarray) -> np.ndarray:
    """Return (B,): the density of tau_w / <tau_w> in bins with the given edges, both walls pooled.

    The distance of the first node cancels. Mass outside the edges is missing from the integral, so the sum
    times the bin width shows how much was cut off.
    """
    shear = np.asarray(torch.as_tensor(wall_shear(velocity, first_node_plus=1.0)).cpu())
    edges = np.asarray(edges, dtype=np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise ValueError(f"edges must be two or more increasing numbers, got {edges}; use numpy.linspace")
    counts = np.histogram(shear / shear.mean(), bins=edges)[0]
    return np.asarray(counts / (shear.size * np.diff(edges)))


def bulk_velocity(velocity: Array) -> Any:
    """Return (J, T): the plane mean of u, the flow rate per area."""
    _check(velocity)
    rows = [piece[:, :, 0].mean(dim=(2, 3)) for piece in chunks(velocity, name="velocity")]
    return like(velocity, torch.cat(rows, dim=1))


def flow_rate_drift(pred: Array, true: Array) -> float:
    """Return (bulk velocity in the last tenth of pred - mean of true) / mean of true."""
    return relative_drift(bulk_velocity(pred), bulk_velocity(true))


def _check(velocity: Array) -> None:
    check_trajectories("velocity", velocity)
    if velocity.ndim != 5 or velocity.shape[2] != 3:
        raise ValueError(f"velocity must have shape (J, T, 3, Y, Z), got {tuple(velocity.shape)}; channels are u, v, w")


def _moments(velocity: Array) -> tuple[Tensor, Tensor]:
    """Return <u_i> (3, Y) and <u_i u_j> (3, 3, Y) over trajectories, time and z."""
    _check(velocity)
    count = velocity.shape[0] * velocity.shape[1] * velocity.shape[4]
    first, second = [], []
    for piece in chunks(velocity, name="velocity"):
        first.append(piece.sum(dim=(0, 1, 4)))
        second.append(torch.einsum("jtayz,jtbyz->aby", piece, piece))
    return torch.stack(first).sum(0) / count, torch.stack(second).sum(0) / count


def _covariance(velocity: Array) -> Tensor:
    mean, second = _moments(velocity)
    return second - mean[:, None] * mean[None]  # (3, 3, Y)

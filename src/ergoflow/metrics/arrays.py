"""What every metric asks of its input: rank, matching shapes, finite truth, float64 one time chunk at a time.

A roll-out of 30 x 1000 frames of 256 x 256 points is 8 GB in float32, so no metric converts one as a whole:
`chunks` walks along time and yields float64 pieces of about 64 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any] | Tensor

# Values per float64 chunk: 8 million of 8 bytes are 64 MB.
CHUNK_VALUES = 8_000_000


def check_trajectories(name: str, field: Array) -> None:
    """Raise unless `field` has the axes (J, T, C, *grid), at least one grid axis and no empty one."""
    if field.ndim < 4:
        raise ValueError(
            f"{name} must have axes (J, T, C, *grid), got shape {tuple(field.shape)}; "
            "add the missing axes with field[None] or field[:, :, None]"
        )
    if 0 in field.shape:
        raise ValueError(f"{name} must hold at least one value, got shape {tuple(field.shape)}; drop the empty axis")


def check_pair(pred: Array, true: Array) -> None:
    """Raise unless both are trajectories of one shape."""
    check_trajectories("pred", pred)
    check_trajectories("true", true)
    if tuple(pred.shape) != tuple(true.shape):
        raise ValueError(
            f"pred must have the shape of true {tuple(true.shape)}, got {tuple(pred.shape)}; "
            "cut both to the same trajectories, times, channels and grid"
        )


def check_same_grid(pred: Array, true: Array) -> None:
    """Raise unless both are trajectories with the same channels and grid (J and T may differ)."""
    check_trajectories("pred", pred)
    check_trajectories("true", true)
    if tuple(pred.shape[2:]) != tuple(true.shape[2:]):
        raise ValueError(
            f"pred must have the channels and grid of true {tuple(true.shape[2:])}, "
            f"got {tuple(pred.shape[2:])}; resample one of them"
        )


def to_float64(values: Array) -> Tensor:
    """Return a float64 tensor on the device of `values`; a NumPy array is copied, never aliased."""
    if isinstance(values, Tensor):
        return values.detach().to(torch.float64)
    return torch.from_numpy(np.array(values, dtype=np.float64))


def like(original: Array, values: Tensor) -> Any:
    """Return `values` as an array if `original` was one, as a tensor otherwise."""
    return values if isinstance(original, Tensor) else values.cpu().numpy()


def chunk_starts(field: Array, *, overlap: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) along the time axis so that (stop + overlap - start) frames make one chunk."""
    per_frame = max(1, int(np.prod(field.shape)) // field.shape[1])
    length = max(1, CHUNK_VALUES // per_frame - overlap)
    frames = field.shape[1]
    for start in range(0, frames, length):
        yield start, min(start + length, frames)


def chunks(field: Array, *, name: str | None = None) -> Iterator[Tensor]:
    """Yield float64 pieces (J, t, C, *grid) in time order; with a `name`, a non-finite value raises."""
    for start, stop in chunk_starts(field):
        piece = to_float64(field[:, start:stop])
        if name is not None:
            check_finite(name, piece, first_step=start)
        yield piece


def check_finite(name: str, piece: Tensor, *, first_step: int = 0) -> None:
    """Raise with trajectory and step of the first non-finite value of a (J, t, ...) piece."""
    good = torch.isfinite(piece).flatten(2).all(dim=2)  # (J, t)
    if not bool(good.all()):
        trajectory, step = (~good).nonzero()[0].tolist()
        raise ValueError(
            f"{name} must be finite, got nan or inf in trajectory {trajectory} at step {first_step + step}; "
            "score a failed roll-out as failed (see survival) and leave it out here"
        )

"""Mean, spread and increments of the training trajectories, in The Well's `stats.yaml` format.

Every number is a mean over trajectories, frames and grid points of the train split, accumulated block by
block in float64 with the update of Chan, Golub & LeVeque (1983), which loses no digits however
large the mean is. Increments are x[t + stride] - x[t].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from ergoflow.data.files import write_text_atomic

if TYPE_CHECKING:
    from ergoflow.data.store import TrajectoryStore

STATISTICS_FILE = "stats.yaml"
STATISTICS_KEYS = ("mean", "std", "rms", "mean_delta", "std_delta", "rms_delta")
# Frames are read in blocks of about this size.
BLOCK_BYTES = 4 * 2**20


class ChannelMoments:
    """The running mean (C,) and variance (C,) of everything given to `update`, in float64."""

    def __init__(self, channels: int) -> None:
        self.count = 0
        self.mean = np.zeros(channels)
        self._squares = np.zeros(channels)  # sum of (x - mean)^2

    def update(self, values: np.ndarray) -> None:
        """Add a block (T, C, *grid) of float64 numbers."""
        axes = (0, *range(2, values.ndim))
        count = values.size // len(self.mean)
        mean = values.mean(axis=axes)
        total = self.count + count
        shift = mean - self.mean
        self._squares += values.var(axis=axes) * count + shift**2 * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """The population standard deviation (C,)."""
        return np.sqrt(self._squares / self.count)

    @property
    def rms(self) -> np.ndarray:
        """The root of the mean square (C,)."""
        return np.sqrt(self.mean**2 + self._squares / self.count)


def increment_key(stride: int) -> str:
    """Return the key of the increments' spread: The Well's `std_delta`, or `std_delta@5` for stride 5."""
    return "std_delta" if stride == 1 else f"std_delta@{stride}"


def compute_statistics(
    store: TrajectoryStore, *, split: str = "train", strides: Sequence[int] = (1,)
) -> dict[str, dict[str, Any]]:
    """Return {key: {field: number, or list for a vector}} for the keys of The Well's `stats.yaml`.

    Each stride other than 1 adds the key `std_delta@<stride>`, which other readers of the file ignore.
    """
    channels = len(store.info.fields)
    state = ChannelMoments(channels)
    deltas = {stride: ChannelMoments(channels) for stride in {1, *strides}}
    _require_frames(store, split, max(deltas))
    for block, new in _blocks(store, split, max(deltas)):
        state.update(block[:new])
        for stride, delta in deltas.items():
            # Increments start at the block's new frames; the frames after those only end them.
            pairs = min(new, len(block) - stride)
            if pairs > 0:
                delta.update(block[stride : stride + pairs] - block[:pairs])
    stats = {
        "mean": _by_field(store, state.mean),
        "std": _by_field(store, state.std),
        "rms": _by_field(store, state.rms),
        "mean_delta": _by_field(store, deltas[1].mean),
        "rms_delta": _by_field(store, deltas[1].rms),
    }
    return stats | {increment_key(stride): _by_field(store, delta.std) for stride, delta in deltas.items()}


def compute_increment_std(store: TrajectoryStore, stride: int, *, split: str = "train") -> np.ndarray:
    """Return the standard deviation (C,) of x[t + stride] - x[t]."""
    _require_frames(store, split, stride)
    delta = ChannelMoments(len(store.info.fields))
    for block, new in _blocks(store, split, stride):
        pairs = min(new, len(block) - stride)
        if pairs > 0:
            delta.update(block[stride : stride + pairs] - block[:pairs])
    return delta.std


def add_increment_std(store: TrajectoryStore, stride: int) -> None:
    """Add the spread of the increments over `stride` frames to `stats.yaml`, unless it is there."""
    stats, key = store.statistics, increment_key(stride)
    if key not in stats:
        _write(store.folder, stats | {key: _by_field(store, compute_increment_std(store, stride))})


def write_statistics(folder: str | Path, stats: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `stats.yaml` into a data set's folder, atomically."""
    missing = [key for key in STATISTICS_KEYS if key not in stats]
    if missing:
        raise ValueError(f"statistics must hold {STATISTICS_KEYS}, missing {missing}; use compute_statistics")
    _write(folder, stats)


def _write(folder: str | Path, stats: Mapping[str, Mapping[str, Any]]) -> None:
    for key, fields in stats.items():
        for name, value in fields.items():
            if not all(math.isfinite(number) for number in np.ravel(value)):
                raise ValueError(f"statistics must be finite, got {key} of {name} = {value}; check the data")
    plain = {key: dict(fields) for key, fields in stats.items()}
    write_text_atomic(Path(folder) / STATISTICS_FILE, yaml.safe_dump(plain, sort_keys=False))


def _require_frames(store: TrajectoryStore, split: str, stride: int) -> None:
    frames = store.num_frames(split)
    if not 0 < stride < frames:
        raise ValueError(f"increments need 0 < stride < {frames} frames, got stride {stride}; choose a smaller one")


def _blocks(store: TrajectoryStore, split: str, stride: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (float64 block (T, C, *grid), new): `new` unseen frames, then up to `stride` that come again."""
    frames = store.num_frames(split)
    per_frame = 8 * len(store.info.fields) * int(np.prod(store.info.grid))
    length = max(1, BLOCK_BYTES // per_frame)
    for trajectory in range(store.count(split)):
        for start in range(0, frames, length):
            new = min(length, frames - start)
            stop = min(start + new + stride, frames)
            yield store.read_stored(split, trajectory, start, stop).astype(np.float64), new


def _by_field(store: TrajectoryStore, values: np.ndarray) -> dict[str, Any]:
    """Return {field: number}, or {vector field: list of its components} as The Well writes them."""
    result: dict[str, Any] = {}
    channel = 0
    for field in store.stored_fields:
        numbers = [float(value) for value in values[channel : channel + field.components]]
        name = field.dataset.rsplit("/", 1)[-1]
        size = len(store.info.axes)
        if field.order == 0:
            result[name] = numbers[0]
        elif field.order == 1:
            result[name] = numbers
        else:
            result[name] = [numbers[row : row + size] for row in range(0, len(numbers), size)]
        channel += field.components
    return result

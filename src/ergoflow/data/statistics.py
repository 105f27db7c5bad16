"""Mean, spread and increments of the training trajectories, in The Well's `stats.yaml` format.

Every number is a mean over trajectories, frames and grid points of the train split, gathered block by block in float64
and added up by the rule of Chan, Golub & LeVeque (1983), which loses no digits however large the mean is. Increments
are x[t + stride] - x[t]. Trajectories are read by several threads at a time, and added up in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from threading import Lock
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


@dataclass(frozen=True)
class Moments:
    """How many numbers there are per channel, their mean (C,) and the sum (C,) of their squared distances from it."""

    count: int
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """The moments of a block (T, C, *grid) of float64 numbers, which it overwrites."""
        axes = (0, *range(2, values.ndim))
        mean = values.mean(axis=axes, keepdims=True)
        values -= mean
        return cls(values.size // values.shape[1], mean.ravel(), np.square(values, out=values).sum(axis=axes))

    def __add__(self, other: Moments) -> Moments:
        """The moments of both."""
        count, shift = self.count + other.count, other.mean - self.mean
        squares = self.squares + other.squares + shift**2 * (self.count * other.count / count)
        return Moments(count, self.mean + shift * (other.count / count), squares)

    @property
    def std(self) -> np.ndarray:
        """The population standard deviation (C,)."""
        return np.sqrt(self.squares / self.count)

    @property
    def rms(self) -> np.ndarray:
        """The root of the mean square (C,)."""
        return np.sqrt(self.mean**2 + self.squares / self.count)


def increment_key(stride: int) -> str:
    """Return the key of the increments' spread: The Well's `std_delta`, or `std_delta@5` for stride 5."""
    return "std_delta" if stride == 1 else f"std_delta@{stride}"


def compute_statistics(
    store: TrajectoryStore, *, split: str = "train", strides: Sequence[int] = (1,)
) -> dict[str, dict[str, Any]]:
    """Return {key: {field: number, or list for a vector}} for the keys of The Well's `stats.yaml`.

    Each stride other than 1 adds the key `std_delta@<stride>`, which other readers of the file ignore.
    """
    moments = _moments(store, split, {0, 1, *strides})
    state, delta = moments.pop(0), moments[1]
    stats = {
        "mean": _by_field(store, state.mean),
        "std": _by_field(store, state.std),
        "rms": _by_field(store, state.rms),
        "mean_delta": _by_field(store, delta.mean),
        "rms_delta": _by_field(store, delta.rms),
    }
    return stats | {increment_key(stride): _by_field(store, moments[stride].std) for stride in sorted(moments)}


def compute_increment_std(store: TrajectoryStore, stride: int, *, split: str = "train") -> np.ndarray:
    """Return the standard deviation (C,) of x[t + stride] - x[t]."""
    return _moments(store, split, {stride})[stride].std


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


def _moments(store: TrajectoryStore, split: str, lags: set[int]) -> dict[int, Moments]:
    """Return, by lag, the moments of x[t + lag] - x[t]; a lag of 0 stands for x[t] itself."""
    frames, last = store.num_frames(split), max(lags)
    if not 0 < last < frames:
        raise ValueError(f"increments need 0 < stride < {frames} frames, got stride {last}; choose a smaller one")

    # One read at a time: the store may close a file that another thread is reading, and HDF5 serialises reads anyway.
    reading = Lock()

    def of_trajectory(trajectory: int) -> dict[int, Moments]:
        blocks = _blocks(store, split, trajectory, last, reading)
        return reduce(_added, ({lag: Moments.of(x) for lag, x in _by_lag(*block, lags)} for block in blocks))

    with ThreadPoolExecutor() as threads:
        return reduce(_added, threads.map(of_trajectory, range(store.count(split))))


def _added(one: dict[int, Moments], other: dict[int, Moments]) -> dict[int, Moments]:
    """Return the moments of both for each lag that either has."""
    return one | other | {lag: one[lag] + other[lag] for lag in one.keys() & other.keys()}


def _by_lag(block: np.ndarray, new: int, lags: set[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (lag, x[t + lag] − x[t]), for lag 0 (0, x[t]), over the new frames t of a block.

    Frames after the new ones serve only as end points.
    """
    for lag in lags:
        pairs = min(new, len(block) - lag)
        if pairs > 0:
            later, earlier = block[lag : lag + pairs], block[:pairs] if lag else 0.0
            yield lag, np.subtract(later, earlier, dtype=np.float64)


def _blocks(
    store: TrajectoryStore, split: str, trajectory: int, lag: int, reading: Lock
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (block (T, C, *grid) as it is stored, new): `new` unseen frames, then up to `lag` that come again."""
    frames = store.num_frames(split)
    per_frame = 8 * len(store.info.fields) * int(np.prod(store.info.grid))
    length = max(1, BLOCK_BYTES // per_frame)
    for start in range(0, frames, length):
        new = min(length, frames - start)
        stop = min(start + new + lag, frames)
        with reading:
            block = store.read_stored(split, trajectory, start, stop)
        yield block, new


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

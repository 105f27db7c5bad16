"""The files of a data set: which there are, the seed of each trajectory, and the way of a frame to its file.

Frames are written behind the simulation: a thread hashes and writes them while the next ones are computed.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ergoflow.config import SPLITS, ChannelDatasetConfig, DatasetConfig, FilesDatasetConfig, SimulatedDatasetConfig
from ergoflow.data.statistics import STATISTICS_FILE
from ergoflow.data.store import is_complete


@dataclass(frozen=True)
class Shard:
    """One file: `count` trajectories of a split, beginning with number `first`."""

    split: str
    first: int
    count: int
    path: Path

    @property
    def title(self) -> str:
        """How a progress bar calls it."""
        return f"{self.split}[{self.first}:{self.first + self.count}]"


def list_shards(dataset: SimulatedDatasetConfig, folder: Path) -> Iterator[Shard]:
    """Every shard of a data set, in the order of making."""
    size = len(dataset.planes) if isinstance(dataset, ChannelDatasetConfig) else dataset.shard_size
    for split in SPLITS:
        total = dataset.count(split)
        for first in range(0, total, size):
            path = folder / "data" / split / f"{dataset.name}_{first:04d}.hdf5"
            yield Shard(split, first, min(size, total - first), path)


def trajectory_bytes(dataset: SimulatedDatasetConfig) -> int:
    """What the frames of one trajectory take on disk."""
    fields = 3 if isinstance(dataset, ChannelDatasetConfig) else 1
    return dataset.frames * fields * math.prod(dataset.grid) * np.dtype(dataset.storage).itemsize


def completeness(dataset: SimulatedDatasetConfig, folder: Path) -> str:
    """How much of a data set lies in its folder, in words."""
    shards = list(list_shards(dataset, folder))
    made = sum(shard.count for shard in shards if is_complete(shard.path))
    total = sum(shard.count for shard in shards)
    return "complete" if made == total else f"{made} of {total} trajectories"


def is_whole(dataset: DatasetConfig, folder: Path) -> bool:
    """Whether a data set is there in full: its statistics and, of a simulated one, every shard."""
    if not (folder / STATISTICS_FILE).exists():
        return False
    return isinstance(dataset, FilesDatasetConfig) or completeness(dataset, folder) == "complete"


def batches(shards: Iterable[Shard], size: int) -> Iterator[tuple[Shard, ...]]:
    """Runs of neighbouring shards to be simulated together, of at most `size` trajectories unless one shard has more.

    They are a function of the data set, not of what is missing: a trajectory has the same companions, and the same
    last digits, when its file is made again.
    """
    batch: list[Shard] = []
    for shard in shards:
        if batch and sum(other.count for other in batch) + shard.count > size:
            yield tuple(batch)
            batch = []
        batch.append(shard)
    if batch:
        yield tuple(batch)


class FrameQueue:
    """Frames between the thread that computes them and the thread that writes them, at most `capacity` at a time.

    A frame stays where it was computed until it is taken. Either side that fails says so, and the other side's next
    call raises: a writer then removes its file, and a solver stops.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frames: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, frame: Tensor) -> None:
        """Hand over a frame (J, C, *grid) that nobody will change; wait while the queue is full."""
        ready = None
        if frame.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(frame.device))
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or len(self._frames) < self._capacity)
            self.check()
            self._frames.append((frame, ready))
            self._changed.notify_all()

    def take(self) -> Tensor:
        """Return the next frame, on the host; wait while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or len(self._frames) > 0)
            self.check()
            frame, ready = self._frames.popleft()
            self._changed.notify_all()
        return frame if ready is None else _to_host(frame, ready)

    def fail(self, error: BaseException) -> None:
        """Say that this side has ended with an error; the first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._frames.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what the other side failed with, if it did."""
        if self._failure is not None:
            raise self._failure


def _to_host(frame: Tensor, ready: torch.cuda.Event) -> Tensor:
    """Copy a frame while the device goes on computing: on a stream of its own, into pinned memory.

    Torch hands out 32 streams of each priority in turn. A recording of the solver in another thread has one of the
    usual priority, which must not be used meanwhile.
    """
    stream = torch.cuda.Stream(frame.device, priority=-1)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        host = torch.empty(frame.shape, dtype=frame.dtype, pin_memory=True)
        host.copy_(frame.contiguous(), non_blocking=True)
        # The frame must live until here: its memory belongs to the stream that computed it.
        stream.synchronize()
    return host


def trajectory_seed(dataset: SimulatedDatasetConfig, split: str, number: int) -> int:
    """A 63-bit seed, a function of data-set seed, split and trajectory (or simulation) number alone."""
    words = np.random.SeedSequence([dataset.seed, SPLITS.index(split), number]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))

"""Windows of a few frames for training: which ones, in which order, and from memory or from disk.

A window is `window` frames, `stride` apart, of one trajectory. The order of an epoch is a pure function of
(seed, epoch), so a run can stop and resume at any batch, and the two sources below give the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ergoflow.data.store import TrajectoryStore

# Batches each worker prepares ahead.
PREFETCH_BATCHES = 4


class WindowOrder(Protocol):
    """Which windows make up each batch of an epoch: a `WindowSampler`, or one process's share of it."""

    @property
    def window(self) -> int:
        """Frames per window."""
        ...

    @property
    def stride(self) -> int:
        """Stored frames from one frame of a window to the next."""
        ...

    @property
    def batches_per_epoch(self) -> int:
        """Batches per epoch."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Yield (B, 2) indices on the host: trajectory and first frame."""
        ...


@dataclass(frozen=True)
class WindowSampler:
    """Every window of J trajectories of T frames once per epoch, shuffled, in batches.

    Windows that do not fill a last batch are left out; they differ from epoch to epoch.
    """

    num_trajectories: int
    num_frames: int
    _: KW_ONLY
    window: int
    stride: int = 1
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        """Check that there is at least one batch to give."""
        if min(self.num_trajectories, self.window, self.stride, self.batch_size) < 1:
            raise ValueError(
                "num_trajectories, window, stride and batch_size must be at least 1, got "
                f"{self.num_trajectories}, {self.window}, {self.stride}, {self.batch_size}; raise them"
            )
        if self.starts_per_trajectory < 1:
            raise ValueError(
                f"{self.window} frames {self.stride} apart need {_span(self)} frames, got {self.num_frames}; "
                "shorten the window or the stride"
            )
        if self.batches_per_epoch < 1:
            raise ValueError(f"a batch needs {self.batch_size} windows, got {self.num_windows}; choose a smaller batch")

    @property
    def starts_per_trajectory(self) -> int:
        """The number of first frames from which a window fits."""
        return self.num_frames - _span(self) + 1

    @property
    def num_windows(self) -> int:
        """The number of distinct windows, J·(T - (window - 1)·stride)."""
        return self.num_trajectories * self.starts_per_trajectory

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self.num_windows // self.batch_size

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Yield batches `start`, `start` + 1, ... of an epoch, each (B, 2): trajectory and first frame."""
        if not 0 <= start <= self.batches_per_epoch:
            raise ValueError(f"start must lie in 0..{self.batches_per_epoch}, got {start}; resume inside the epoch")
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, epoch]))
        order = generator.permutation(self.num_windows)
        for batch in range(start, self.batches_per_epoch):
            windows = torch.from_numpy(order[batch * self.batch_size : (batch + 1) * self.batch_size])
            trajectory = torch.div(windows, self.starts_per_trajectory, rounding_mode="floor")
            yield torch.stack((trajectory, windows % self.starts_per_trajectory), dim=1)


class ResidentWindows:
    """Windows from trajectories (J, T, C, *grid) that already lie on the device, as float32.

    Storing them in float16 halves the memory; the cast happens when a batch is gathered.
    """

    def __init__(self, data: Tensor, sampler: WindowOrder) -> None:
        if not data.is_contiguous():
            raise ValueError(
                "resident data must be contiguous (a copy would double its memory), got strides "
                f"{data.stride()}; load it with TrajectoryStore.load"
            )
        self.sampler = sampler
        self._sizes = tuple(data.shape[:2])
        self._frames = data.flatten(0, 1)  # J·T C *grid
        self._offsets = torch.arange(sampler.window, device=data.device) * sampler.stride

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Yield batches (B, window, C, *grid) of an epoch from batch `start` on."""
        for index in self.sampler.batches(epoch, start):
            _check_inside(index, self.sampler, self._sizes)
            trajectory, first = index.to(self._frames.device, non_blocking=True).unbind(1)
            rows = (trajectory * self._sizes[1] + first)[:, None] + self._offsets  # B window
            frames = self._frames.index_select(0, rows.flatten())
            yield frames.unflatten(0, rows.shape).float()  # B window C *grid


class StreamedWindows:
    """Windows read from disk while the model works, the same batches as `ResidentWindows` gives.

    `num_workers` processes read ahead (0 reads in this one). For a CUDA device batches go through pinned
    memory, and the next one is copied on a stream of its own while the current one is in use.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        split: str,
        sampler: WindowOrder,
        num_workers: int = 0,
        device: str | torch.device = "cpu",
        *,
        start_method: str | None = None,
    ) -> None:
        self.sampler = sampler
        self._device = torch.device(device)
        self._order = _EpochOrder(sampler)
        # The workers stay alive between epochs: starting them costs seconds where they are spawned.
        self._loader = DataLoader(
            _WindowReader(store, split, span=_span(sampler), stride=sampler.stride),
            batch_size=None,
            sampler=self._order,
            num_workers=num_workers,
            prefetch_factor=PREFETCH_BATCHES if num_workers else None,
            persistent_workers=num_workers > 0,
            multiprocessing_context=start_method if num_workers else None,
            pin_memory=self._device.type == "cuda",
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Yield batches (B, window, C, *grid) of an epoch from batch `start` on; one epoch at a time."""
        self._order.epoch, self._order.start = epoch, start
        if self._device.type == "cuda":
            yield from _copied_ahead(iter(self._loader), self._device)
        else:
            for batch in self._loader:
                yield batch.to(self._device).float()


class _EpochOrder(Sampler[list[list[int]]]):
    """The sampler as the DataLoader sees it: it is asked anew at the start of every epoch."""

    def __init__(self, sampler: WindowOrder) -> None:
        self.sampler = sampler
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[list[list[int]]]:
        for index in self.sampler.batches(self.epoch, self.start):
            yield index.tolist()

    def __len__(self) -> int:
        return self.sampler.batches_per_epoch - self.start


class _WindowReader(Dataset[Tensor]):
    """Reads one batch of windows in the dtype of the file, (B, window, C, *grid)."""

    def __init__(self, store: TrajectoryStore, split: str, *, span: int, stride: int) -> None:
        self.store = store
        self.split = split
        self.span = span
        self.stride = stride

    def __getitem__(self, index: list[list[int]]) -> Tensor:
        windows = [self.store.read_stored(self.split, j, t, t + self.span, self.stride) for j, t in index]
        return torch.from_numpy(np.stack(windows))


def _copied_ahead(batches: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield pinned batches as float32 on a CUDA device, the copy of the next one already under way."""
    side = torch.cuda.Stream(device)

    def copy(batch: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(side):
            copied = batch.to(device, non_blocking=True).float()
            done = torch.cuda.Event()
            done.record(side)
        return copied, done

    waiting: tuple[Tensor, torch.cuda.Event] | None = None
    for batch in batches:
        upcoming = copy(batch)
        if waiting is not None:
            yield _hand_over(*waiting, device)
        waiting = upcoming
    if waiting is not None:
        yield _hand_over(*waiting, device)


def _hand_over(batch: Tensor, done: torch.cuda.Event, device: torch.device) -> Tensor:
    """Return the batch safe for use on the current stream, and its memory safe from reuse before that."""
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    batch.record_stream(current)
    return batch


def _span(order: WindowOrder) -> int:
    """Return the frames a window reaches over, first and last included."""
    return (order.window - 1) * order.stride + 1


def _check_inside(index: Tensor, order: WindowOrder, sizes: tuple[int, ...]) -> None:
    """Raise unless every window of a batch lies inside (J, T); the flat index would not notice."""
    trajectory, first = index.amax(dim=0).tolist()
    if trajectory >= sizes[0] or first + _span(order) > sizes[1]:
        raise ValueError(
            f"windows must lie in {sizes[0]} trajectories of {sizes[1]} frames, got trajectory {trajectory} "
            f"and first frame {first} of {_span(order)}; build the sampler from the data"
        )

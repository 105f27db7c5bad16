"""Kolmogorov flow to disk: shards of trajectories, each from a seed of its own.

Small shards are simulated together, and files are written by threads while the simulation goes on. A subsampled
set whose trajectories lie complete on the full grid below the same root is read from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ergoflow import __version__
from ergoflow.config import DatasetConfig, KolmogorovDatasetConfig, to_dict
from ergoflow.data.store import DatasetInfo, ShardWriter, TrajectoryStore, is_complete
from ergoflow.numerics.trajectory import SimulationDiverged, Step, checked, rollout
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.shards import FrameQueue, Shard, batches, list_shards, trajectory_seed
from ergoflow.pipeline.workspace import Workspace, commit, load_dataset_config
from ergoflow.solvers.kolmogorov import initial_vorticity, make_step

Statistics = dict[str, dict[str, float]]

FIELD = "vorticity"
# Batches that may be written at the same time: the one that is simulated and the one before.
WRITERS = 2
# Looking at a GPU's state makes it wait; a number that is not finite stays so.
FRAMES_PER_CHECK = 10
# Frames per read of the finer data set; a single read call costs as much as copying 256 KiB.
FRAMES_PER_READ = 16
# Memory for frames that wait for their writer: one part in eight of a GPU's free memory, or bytes on the host.
WAITING_SHARE = 8
WAITING_BYTES = 2**28


def make_kolmogorov(
    dataset: KolmogorovDatasetConfig,
    missing: list[Shard],
    workspace: Workspace,
    *,
    device: torch.device,
    dtype: torch.dtype,
    console: Console,
) -> tuple[str, Statistics | None]:
    """Make the missing shards; return what they were made of, and the statistics of the train split.

    They are made by the solver or of a finer data set. The statistics are those of `compute_statistics`, gathered on
    the way; None where not every train trajectory came by.
    """
    parent = finer_copy(dataset, workspace, dtype=dtype)
    if parent is None:
        return "solver", _simulate(dataset, missing, workspace, device=device, dtype=dtype, console=console)
    for shard in missing:
        _subsample_shard(dataset, shard, parent, dtype=dtype, console=console)
    return parent.info.name, None


def dataset_info(
    dataset: KolmogorovDatasetConfig, seeds: list[int], *, dtype: torch.dtype = torch.float32
) -> DatasetInfo:
    """What every file of the data set says about itself."""
    flow = dataset.flow
    return DatasetInfo(
        name=dataset.name,
        fields=(FIELD,),
        grid=dataset.grid,
        length=tuple(flow.length),
        boundaries=("PERIODIC", "PERIODIC"),
        axes=("x", "y"),
        frame_seconds=dataset.frame_seconds,
        parameters={
            "viscosity": flow.viscosity,
            "drag": flow.drag,
            "forcing_wavenumber": float(flow.forcing_wavenumber),
        },
        provenance={
            "solver": f"ergoflow {__version__} kolmogorov",
            "arithmetic": dtype_name(dtype),
            "commit": commit(),
            "dataset": to_dict(dataset),
            "seeds": seeds,
        },
    )


def arithmetic(info: DatasetInfo) -> str:
    """The dtype that the trajectories of a file were computed in; files that do not say so are of float32."""
    return str(info.provenance.get("arithmetic", dtype_name(torch.float32)))


def dtype_name(dtype: torch.dtype) -> str:
    """Its name without the module, such as float32."""
    return str(dtype).removeprefix("torch.")


def _simulate(
    dataset: KolmogorovDatasetConfig,
    missing: list[Shard],
    workspace: Workspace,
    *,
    device: torch.device,
    dtype: torch.dtype,
    console: Console,
) -> Statistics | None:
    """Simulate batch by batch, each written behind; a file appears when it is whole, as ever."""
    moments = TrainMoments(dataset, device)
    step = make_step(dataset.flow, substeps=dataset.substeps, device=device, dtype=dtype)
    shards = list_shards(dataset, workspace.dataset(dataset.name))
    with ThreadPoolExecutor(max_workers=WRITERS) as writers:
        written: list[Future[None]] = []
        for batch in batches(shards, dataset.shard_size):
            if not set(batch) & set(missing):
                continue
            # Nothing more is begun once a writer has failed.
            for earlier in written:
                if earlier.done():
                    earlier.result()
            frames = FrameQueue(_capacity(dataset, batch, device, dtype))
            written.append(writers.submit(_write_batch, dataset, batch, missing, frames, dtype))
            try:
                _simulate_batch(dataset, batch, step, frames, moments, device=device, dtype=dtype, console=console)
            except BaseException as error:
                frames.fail(error)
                raise
        for one in written:
            one.result()
    return moments.statistics() if moments.trajectories == dataset.train else None


def _simulate_batch(
    dataset: KolmogorovDatasetConfig,
    batch: tuple[Shard, ...],
    step: Step,
    frames: FrameQueue,
    moments: TrainMoments,
    *,
    device: torch.device,
    dtype: torch.dtype,
    console: Console,
) -> None:
    """Spin up, then hand over frame by frame; a state that left the finite numbers raises before the last frame."""
    seeds = [seed for shard in batch for seed in _seeds(dataset, shard)]
    # Train shards come first.
    train = sum(shard.count for shard in batch if shard.split == "train")
    moments.begin(train)
    state = initial_vorticity(dataset.flow, len(seeds), seed=seeds, device=device, dtype=dtype)
    every = 1 if device.type == "cpu" else FRAMES_PER_CHECK
    calls = dataset.spin_up_frames + dataset.frames - 1
    watched = checked(step, dt=dataset.frame_seconds, every=every)
    states = rollout(watched, state, calls, include_initial=True)
    title = f"simulate {dataset.name} {' '.join(shard.title for shard in batch)}"
    work = len(seeds) * dataset.substeps
    with bar(console, title, work * (calls + 1), "field-steps") as advance:
        for _ in range(dataset.spin_up_frames):
            next(states)
            frames.check()
            advance(work)
        for t, frame in enumerate(states):
            if t == dataset.frames - 1 and not bool(torch.isfinite(frame).all()):
                raise SimulationDiverged(step=calls, time=calls * dataset.frame_seconds)
            kept = _subsample(frame, dataset.subsample)
            frames.put(kept)
            moments.add(kept[:train])
            advance(work)


class TrainMoments:
    """Mean and spread of the stored train frames and of their increments, summed in float64 where the frames are.

    Vorticity has no mean, so plain sums lose no digits.
    """

    def __init__(self, dataset: KolmogorovDatasetConfig, device: torch.device) -> None:
        self._dataset = dataset
        self._sums = torch.zeros(2, 2, dtype=torch.float64, device=device)  # x and Δx; Σ and Σ of squares
        self._last: Tensor | None = None
        self.trajectories = 0

    def begin(self, trajectories: int) -> None:
        """Expect the frames of so many more trajectories."""
        self._last = None
        self.trajectories += trajectories

    def add(self, frame: Tensor) -> None:
        """Add the next frame (J, 1, *grid), as it will be stored."""
        stored = frame.to(getattr(torch, self._dataset.storage)).double()
        self._sums[0] += torch.stack((stored.sum(), stored.square().sum()))
        if self._last is not None:
            change = stored - self._last
            self._sums[1] += torch.stack((change.sum(), change.square().sum()))
        self._last = stored

    def statistics(self) -> Statistics:
        """Return what `compute_statistics` would read off the files."""
        points = self.trajectories * math.prod(self._dataset.grid)
        result: Statistics = {}
        for (total, squares), frames, suffix in zip(
            self._sums.tolist(), (self._dataset.frames, self._dataset.frames - 1), ("", "_delta"), strict=True
        ):
            mean, square = total / (points * frames), squares / (points * frames)
            # Rounding may leave a difference of equal numbers below zero.
            spread = math.sqrt(max(0.0, square - mean**2))
            numbers = {"mean": mean, "std": spread, "rms": math.sqrt(square)}
            result |= {f"{name}{suffix}": {FIELD: value} for name, value in numbers.items()}
        return result


def _write_batch(
    dataset: KolmogorovDatasetConfig,
    batch: tuple[Shard, ...],
    missing: list[Shard],
    frames: FrameQueue,
    dtype: torch.dtype,
) -> None:
    """Write the missing shards of a batch from its frames; the work of a thread."""
    counts = [shard.count for shard in batch]
    try:
        with contextlib.ExitStack() as stack:
            writers = {
                row: stack.enter_context(
                    ShardWriter(
                        shard.path,
                        dataset_info(dataset, _seeds(dataset, shard), dtype=dtype),
                        count=shard.count,
                        frames=dataset.frames,
                        dtype=dataset.storage,
                    )
                )
                for row, shard in enumerate(batch)
                if shard in missing
            }
            for t in range(dataset.frames):
                parts = frames.take().split(counts)
                for row, writer in writers.items():
                    writer.write(t, parts[row])
    except BaseException as error:
        frames.fail(error)
        raise


def _capacity(
    dataset: KolmogorovDatasetConfig, batch: tuple[Shard, ...], device: torch.device, dtype: torch.dtype
) -> int:
    """Frames that may wait for their writer: on a GPU, whose bursts are long, up to a share of its free memory."""
    frame_bytes = dtype.itemsize * sum(shard.count for shard in batch) * math.prod(dataset.flow.grid)
    room = torch.cuda.mem_get_info(device)[0] // WAITING_SHARE if device.type == "cuda" else WAITING_BYTES
    return min(max(2, room // frame_bytes), dataset.frames)


def _seeds(dataset: KolmogorovDatasetConfig, shard: Shard) -> list[int]:
    numbers = range(shard.first, shard.first + shard.count)
    return [trajectory_seed(dataset, shard.split, number) for number in numbers]


def _subsample(frame: Any, factor: int) -> Any:
    return frame[..., ::factor, ::factor] if factor > 1 else frame


def finer_copy(
    dataset: DatasetConfig, workspace: Workspace, *, dtype: torch.dtype = torch.float32
) -> TrajectoryStore | None:
    """A complete data set below the same root that holds these very trajectories on the full grid, if there is one."""
    if not isinstance(dataset, KolmogorovDatasetConfig) or dataset.subsample == 1:
        return None
    for path in sorted(workspace.root.glob("data/*/dataset.json")):
        other = load_dataset_config(path.parent)
        if not isinstance(other, KolmogorovDatasetConfig):
            continue
        same = dataclasses.replace(
            dataset, name=other.name, subsample=1, storage=other.storage, shard_size=other.shard_size
        )
        if other == same and all(is_complete(s.path) for s in list_shards(other, path.parent)):
            store = TrajectoryStore(path.parent)
            if arithmetic(store.info) == dtype_name(dtype):
                return store
    return None


def _subsample_shard(
    dataset: KolmogorovDatasetConfig, shard: Shard, parent: TrajectoryStore, *, dtype: torch.dtype, console: Console
) -> None:
    title = f"subsample {parent.info.name} to {dataset.name} {shard.title}"
    info = dataset_info(dataset, _seeds(dataset, shard), dtype=dtype)
    with (
        bar(console, title, dataset.frames, "frames") as advance,
        ShardWriter(shard.path, info, count=shard.count, frames=dataset.frames, dtype=dataset.storage) as writer,
    ):
        rows = range(shard.first, shard.first + shard.count)
        for start in range(0, dataset.frames, FRAMES_PER_READ):
            stop = min(start + FRAMES_PER_READ, dataset.frames)
            finer = (parent.read(shard.split, row, start, stop) for row in rows)
            frames = np.stack([_subsample(part, dataset.subsample) for part in finer], axis=1)  # (T, J, 1, *grid)
            for t, frame in enumerate(frames, start=start):
                writer.write(t, frame)
            advance(stop - start)

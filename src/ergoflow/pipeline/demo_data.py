"""The data of `ergoflow demo --pretrained`: a few trajectories of a model's own flow, cheap enough for two CPU cores.

A flow of at most 64² points is simulated as its recipe says. A finer one is cut to five trajectories of six seconds, on
its full grid with a longer time step, and spun up on half the grid:

    half the grid, 28 s   ->   trigonometric interpolation   ->   full grid, 2 s   ->   frames

Half the grid throughout would be another flow: 0.4 % of the enstrophy of kf256, 7 % of the norm, lies beyond the waves
that 128² points hold, and the two solvers are 8 % apart after 0.5 s. The waves beyond refill within a second. The
longer time step is no error: 2e-5 after 0.5 s, as much as float32 makes (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ergoflow.config import (
    ChannelDatasetConfig,
    DatasetConfig,
    FilesDatasetConfig,
    KolmogorovDatasetConfig,
    SimulatedDatasetConfig,
    to_dict,
)
from ergoflow.data.store import ShardWriter
from ergoflow.numerics.fourier import resample
from ergoflow.numerics.trajectory import checked, rollout
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import write_json
from ergoflow.pipeline.shards import Shard, list_shards, trajectory_seed
from ergoflow.pipeline.simulate import DATASET_FORMAT, simulate
from ergoflow.pipeline.simulate_kolmogorov import dataset_info
from ergoflow.pipeline.workspace import Workspace, hardware
from ergoflow.solvers.kolmogorov import KolmogorovConfig, initial_vorticity, make_step

# What two cores simulate in seconds as it is: points of a Kolmogorov flow, cells of a channel.
SMALL_GRID = 64**2
SMALL_CHANNEL = 2**17
# The cut of a finer flow. Two trajectories give climatology and principal components, two are rolled out.
TRAIN, VALID, TEST = 2, 1, 2
FRAMES = 300
# The start has three times the energy of the attractor and forgets it at twice the drag, e^(-0.2 t).
SPIN_UP_SECONDS = 30.0
# The last part of the spin-up, on the full grid: ten times as long as the smallest waves need.
SETTLE_SECONDS = 2.0
# Largest speed · largest wavenumber · dt; the time scheme is stable to 3 on the imaginary axis.
COURANT = 2.0
# The speed of the spun-up flow in units of the start's: 3.7 of 7 (docs/lab_log.md), with a margin.
SPUN_UP_SPEED = 2 / 3


def demo_dataset(dataset: DatasetConfig) -> SimulatedDatasetConfig:
    """The data set itself if two cores simulate it in seconds, otherwise its cut, called `<name>-demo`."""
    if isinstance(dataset, FilesDatasetConfig):
        raise ValueError(
            f"a demo simulates its test set, got {dataset.name}, which was brought; "
            "use `ergoflow.load`, or the verbs with its recipe"
        )
    if isinstance(dataset, ChannelDatasetConfig):
        if math.prod(dataset.flow.box) > SMALL_CHANNEL:
            raise ValueError(
                f"a demo simulates its test set on the CPU, got {dataset.name} with {dataset.flow.box} cells; "
                "choose a model of a Kolmogorov flow, or simulate on a GPU and use `ergoflow.load`"
            )
        return dataset
    if math.prod(dataset.flow.grid) <= SMALL_GRID:
        return dataset
    spin_up = min(dataset.spin_up_seconds, SPIN_UP_SECONDS)
    speed = dataset.flow.max_speed * (SPUN_UP_SPEED if spin_up > SETTLE_SECONDS else 1.0)
    return dataclasses.replace(
        dataset,
        name=f"{dataset.name}-demo",
        flow=_with_longest_step(dataset.flow, dataset.frame_seconds, speed),
        spin_up_seconds=spin_up,
        frames=min(dataset.frames, FRAMES),
        train=TRAIN,
        valid=VALID,
        test=TEST,
    )


def make_demo_data(
    dataset: SimulatedDatasetConfig, workspace: Workspace, *, device: torch.device, console: Console
) -> Path:
    """Make the data set of `demo_dataset` unless it is there, and return its folder."""
    folder = workspace.dataset(dataset.name)
    cut = isinstance(dataset, KolmogorovDatasetConfig) and math.prod(dataset.flow.grid) > SMALL_GRID
    # dataset.json is written after the last frame; `simulate` refuses another set and gathers the statistics.
    if cut and not (folder / "dataset.json").exists():
        assert isinstance(dataset, KolmogorovDatasetConfig)
        started = time.perf_counter()
        _make_cut(dataset, folder, device=device, console=console)
        facts = {
            "seconds": time.perf_counter() - started,
            "made_of": "solver, spun up on half the grid",
            "trajectories": dataset.train + dataset.valid + dataset.test,
            "hardware": hardware(device),
        }
        data = {"format": DATASET_FORMAT, "dataset": to_dict(dataset), "timings": [facts]}
        write_json(folder / "dataset.json", data)
    return simulate(dataset, workspace, device=device, console=console)


def _make_cut(dataset: KolmogorovDatasetConfig, folder: Path, *, device: torch.device, console: Console) -> None:
    """Simulate all trajectories together and write one file per split."""
    shards = list(list_shards(dataset, folder))
    seeds = [[trajectory_seed(dataset, s.split, n) for n in range(s.first, s.first + s.count)] for s in shards]
    calls = dataset.spin_up_frames + dataset.frames
    with bar(console, f"simulate {dataset.name}", calls, "frames") as advance, contextlib.ExitStack() as stack:
        writers = [stack.enter_context(_writer(dataset, shard, own)) for shard, own in zip(shards, seeds, strict=True)]
        for t, state in enumerate(_states(dataset, [seed for own in seeds for seed in own], device)):
            advance()
            if t >= dataset.spin_up_frames:
                kept = state[..., :: dataset.subsample, :: dataset.subsample]
                for writer, part in zip(writers, kept.split([shard.count for shard in shards]), strict=True):
                    writer.write(t - dataset.spin_up_frames, part)


def _states(dataset: KolmogorovDatasetConfig, seeds: list[int], device: torch.device) -> Iterator[Tensor]:
    """Every frame from the start (J, 1, X, Y): of the spin-up on half the grid, then on the full one."""
    settle = min(dataset.spin_up_frames, round(SETTLE_SECONDS / dataset.frame_seconds))
    coarse_frames = dataset.spin_up_frames - settle
    flow, seconds = dataset.flow, dataset.frame_seconds
    if coarse_frames:
        half = dataclasses.replace(flow, grid=(flow.grid[0] // 4 * 2, flow.grid[1] // 4 * 2))
        coarse = _with_longest_step(half, seconds, flow.max_speed)
        step = make_step(coarse, substeps=round(seconds / coarse.dt), device=device)
        start = state = initial_vorticity(coarse, len(seeds), seed=seeds, device=device)
        for state in rollout(checked(step, dt=seconds), start, coarse_frames):
            yield state
        state = resample(state, flow.grid)
    else:
        state = initial_vorticity(flow, len(seeds), seed=seeds, device=device)
    step = make_step(flow, substeps=dataset.substeps, device=device)
    yield from rollout(checked(step, dt=seconds), state, settle + dataset.frames - 1, include_initial=True)


def _with_longest_step(flow: KolmogorovConfig, frame_seconds: float, speed: float) -> KolmogorovConfig:
    """The flow with the longest step that divides a frame and keeps speed · wavenumber · dt below COURANT."""
    largest = max(2 * math.pi * (n // 3) / length for n, length in zip(flow.grid, flow.length, strict=True))
    return dataclasses.replace(flow, dt=frame_seconds / math.ceil(frame_seconds * speed * largest / COURANT))


def _writer(dataset: KolmogorovDatasetConfig, shard: Shard, seeds: list[int]) -> ShardWriter:
    info = dataset_info(dataset, seeds)
    return ShardWriter(shard.path, info, count=shard.count, frames=dataset.frames, dtype=dataset.storage)

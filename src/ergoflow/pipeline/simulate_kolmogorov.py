"""Kolmogorov flow to disk: shards of trajectories, each from a seed of its own.

A subsampled set whose trajectories lie complete on the full grid below the same root is read from there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ergoflow import __version__
from ergoflow.config import KolmogorovDatasetConfig, to_dict
from ergoflow.data.store import DatasetInfo, ShardWriter, TrajectoryStore, is_complete
from ergoflow.numerics.trajectory import checked, rollout
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.shards import Shard, list_shards, trajectory_seed
from ergoflow.pipeline.workspace import Workspace, commit, load_dataset_config
from ergoflow.solvers.kolmogorov import initial_vorticity, make_step


def make_kolmogorov(
    dataset: KolmogorovDatasetConfig,
    missing: list[Shard],
    workspace: Workspace,
    *,
    device: torch.device,
    dtype: torch.dtype,
    console: Console,
) -> str:
    """Make the missing shards; return what they were made of: the solver, or a finer data set."""
    parent = _finer_copy(dataset, workspace)
    for shard in missing:
        if parent is None:
            _simulate_shard(dataset, shard, device=device, dtype=dtype, console=console)
        else:
            _subsample_shard(dataset, shard, parent, console=console)
    return parent.info.name if parent else "solver"


def _info(dataset: KolmogorovDatasetConfig, seeds: list[int]) -> DatasetInfo:
    """What every file of the data set says about itself."""
    flow = dataset.flow
    return DatasetInfo(
        name=dataset.name,
        fields=("vorticity",),
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
            "commit": commit(),
            "dataset": to_dict(dataset),
            "seeds": seeds,
        },
    )


def _simulate_shard(
    dataset: KolmogorovDatasetConfig, shard: Shard, *, device: torch.device, dtype: torch.dtype, console: Console
) -> None:
    """Spin up frame by frame, then write frame by frame; the state is checked after each."""
    seeds = _seeds(dataset, shard)
    state = initial_vorticity(dataset.flow, shard.count, seed=seeds, device=device, dtype=dtype)
    substeps = dataset.substeps
    step = checked(make_step(dataset.flow, substeps=substeps, device=device, dtype=dtype), dt=dataset.frame_seconds)
    spin_up = dataset.spin_up_frames
    states = rollout(step, state, spin_up + dataset.frames - 1, include_initial=True)
    title = f"simulate {dataset.name} {shard.title}"
    work = shard.count * substeps
    with bar(console, title, work * (spin_up + dataset.frames), "field-steps") as advance:
        for _ in range(spin_up):
            next(states)
            advance(work)
        with ShardWriter(
            shard.path,
            _info(dataset, seeds),
            count=shard.count,
            frames=dataset.frames,
            dtype=dataset.storage,
        ) as writer:
            for t, frame in enumerate(states):
                writer.write(t, _subsample(frame, dataset.subsample))
                advance(work)


def _seeds(dataset: KolmogorovDatasetConfig, shard: Shard) -> list[int]:
    numbers = range(shard.first, shard.first + shard.count)
    return [trajectory_seed(dataset, shard.split, number) for number in numbers]


def _subsample(frame: Any, factor: int) -> Any:
    return frame[..., ::factor, ::factor] if factor > 1 else frame


def _finer_copy(dataset: KolmogorovDatasetConfig, workspace: Workspace) -> TrajectoryStore | None:
    """A complete data set below the same root that holds these very trajectories on the full grid, if there is one."""
    if dataset.subsample == 1:
        return None
    for path in sorted(workspace.root.glob("data/*/dataset.json")):
        other = load_dataset_config(path.parent)
        if not isinstance(other, KolmogorovDatasetConfig):
            continue
        same = dataclasses.replace(
            dataset, name=other.name, subsample=1, storage=other.storage, shard_size=other.shard_size
        )
        if other == same and all(is_complete(s.path) for s in list_shards(other, path.parent)):
            return TrajectoryStore(path.parent)
    return None


def _subsample_shard(
    dataset: KolmogorovDatasetConfig, shard: Shard, parent: TrajectoryStore, *, console: Console
) -> None:
    title = f"subsample {parent.info.name} to {dataset.name} {shard.title}"
    info = _info(dataset, _seeds(dataset, shard))
    with (
        bar(console, title, dataset.frames, "frames") as advance,
        ShardWriter(shard.path, info, count=shard.count, frames=dataset.frames, dtype=dataset.storage) as writer,
    ):
        for t in range(dataset.frames):
            rows = range(shard.first, shard.first + shard.count)
            frame = np.stack([parent.read(shard.split, j, t, t + 1)[0] for j in rows])
            writer.write(t, _subsample(frame, dataset.subsample))
            advance()

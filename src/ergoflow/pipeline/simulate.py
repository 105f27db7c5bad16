"""`ergoflow simulate`: from a flow to a data set on disk.

Trajectories are made in shards. A shard is one HDF5 file, written under a temporary name and renamed when it is
whole, so a run that was stopped continues with the first shard that is missing.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ergoflow import __version__
from ergoflow.config import SPLITS, DatasetConfig, from_dict, to_dict
from ergoflow.data.files import write_text_atomic
from ergoflow.data.store import (
    DatasetInfo,
    ShardWriter,
    TrajectoryStore,
    compute_statistics,
    is_complete,
    remove_leftovers,
    write_statistics,
)
from ergoflow.numerics.trajectory import checked, rollout
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.workspace import Workspace, commit, hardware
from ergoflow.solvers.kolmogorov import initial_vorticity, make_step

DATASET_FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One file: `count` trajectories of a split, beginning with number `first`."""

    split: str
    first: int
    count: int
    path: Path


def simulate(
    dataset: DatasetConfig,
    workspace: Workspace,
    *,
    device: torch.device,
    console: Console,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Make what is missing of a data set and return its folder."""
    folder = workspace.dataset(dataset.name)
    _require_same_dataset(dataset, folder)
    shards = list(_shards(dataset, folder))
    for split in SPLITS:
        (folder / "data" / split).mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder / "data" / split)
    missing = [shard for shard in shards if not is_complete(shard.path)]
    _require_disk_space(dataset, folder, sum(shard.count for shard in missing))
    _write_dataset_json(dataset, folder)
    started = time.perf_counter()
    parent = _finer_copy(dataset, workspace)
    for shard in missing:
        if parent is None:
            _simulate_shard(dataset, shard, device=device, dtype=dtype, console=console)
        else:
            _subsample_shard(dataset, shard, parent, console=console)
    if missing or not (folder / "stats.yaml").exists():
        write_statistics(folder, compute_statistics(TrajectoryStore(folder)))
        facts = {
            "seconds": time.perf_counter() - started,
            "made_of": str(parent.folder.name) if parent else "solver",
        }
        facts |= {"trajectories": sum(shard.count for shard in missing), "hardware": hardware(device)}
        _append_timing(folder, facts)
    return folder


def info_of(dataset: DatasetConfig, seeds: list[int]) -> DatasetInfo:
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


def load_dataset_config(folder: Path) -> DatasetConfig:
    """The configuration a data folder was made with."""
    data = json.loads((folder / "dataset.json").read_text())
    config: DatasetConfig = from_dict(DatasetConfig, data["dataset"])
    return config


def _shards(dataset: DatasetConfig, folder: Path) -> Iterator[Shard]:
    for split in SPLITS:
        total = dataset.count(split)
        for first in range(0, total, dataset.shard_size):
            count = min(dataset.shard_size, total - first)
            yield Shard(split, first, count, folder / "data" / split / f"{dataset.name}_{first:04d}.hdf5")


def _seeds(dataset: DatasetConfig, shard: Shard) -> list[int]:
    """One 63-bit seed per trajectory, a function of data-set seed, split and trajectory number alone."""
    split = SPLITS.index(shard.split)
    numbers = range(shard.first, shard.first + shard.count)
    words = [np.random.SeedSequence([dataset.seed, split, n]).generate_state(1, np.uint64)[0] for n in numbers]
    return [int(word >> np.uint64(1)) for word in words]


def _simulate_shard(
    dataset: DatasetConfig, shard: Shard, *, device: torch.device, dtype: torch.dtype, console: Console
) -> None:
    """Spin up frame by frame, then write frame by frame; the state is checked after each."""
    seeds = _seeds(dataset, shard)
    state = initial_vorticity(dataset.flow, shard.count, seed=seeds, device=device, dtype=dtype)
    substeps = dataset.substeps
    step = checked(make_step(dataset.flow, substeps=substeps, device=device, dtype=dtype), dt=dataset.frame_seconds)
    spin_up = dataset.spin_up_frames
    states = rollout(step, state, spin_up + dataset.frames - 1, include_initial=True)
    title = f"simulate {dataset.name} {shard.split}[{shard.first}:{shard.first + shard.count}]"
    work = shard.count * substeps
    with bar(console, title, work * (spin_up + dataset.frames), "field-steps") as advance:
        for _ in range(spin_up):
            next(states)
            advance(work)
        with ShardWriter(
            shard.path,
            info_of(dataset, seeds),
            count=shard.count,
            frames=dataset.frames,
            dtype=dataset.storage,
        ) as writer:
            for t, frame in enumerate(states):
                writer.write(t, _subsample(frame, dataset.subsample))
                advance(work)


def _subsample(frame: Any, factor: int) -> Any:
    return frame[..., ::factor, ::factor] if factor > 1 else frame


def _finer_copy(dataset: DatasetConfig, workspace: Workspace) -> TrajectoryStore | None:
    """A complete data set below the same root that holds these very trajectories on the full grid, if there is one."""
    if dataset.subsample == 1:
        return None
    for path in sorted(workspace.root.glob("data/*/dataset.json")):
        other = load_dataset_config(path.parent)
        same = dataclasses.replace(
            dataset, name=other.name, subsample=1, storage=other.storage, shard_size=other.shard_size
        )
        if other == same and all(is_complete(s.path) for s in _shards(other, path.parent)):
            return TrajectoryStore(path.parent)
    return None


def _subsample_shard(dataset: DatasetConfig, shard: Shard, parent: TrajectoryStore, *, console: Console) -> None:
    title = f"subsample {parent.info.name} to {dataset.name} {shard.split}[{shard.first}:{shard.first + shard.count}]"
    info = info_of(dataset, _seeds(dataset, shard))
    with (
        bar(console, title, dataset.frames, "frames") as advance,
        ShardWriter(shard.path, info, count=shard.count, frames=dataset.frames, dtype=dataset.storage) as writer,
    ):
        for t in range(dataset.frames):
            rows = range(shard.first, shard.first + shard.count)
            frame = np.stack([parent.read(shard.split, j, t, t + 1)[0] for j in rows])
            writer.write(t, _subsample(frame, dataset.subsample))
            advance()


def _require_same_dataset(dataset: DatasetConfig, folder: Path) -> None:
    if not (folder / "dataset.json").exists():
        if next(folder.rglob("*.hdf5"), None) is not None:
            raise ValueError(
                f"{folder} holds data that `ergoflow simulate` did not make; choose another --root or data set name"
            )
        return
    known, wanted = to_dict(load_dataset_config(folder)), to_dict(dataset)
    if known != wanted:
        flat = {**wanted, **{f"flow.{k}": v for k, v in wanted["flow"].items()}}
        other = {**known, **{f"flow.{k}": v for k, v in known["flow"].items()}}
        key = next(k for k in flat if k != "flow" and flat[k] != other.get(k))
        raise ValueError(
            f"{folder} holds {dataset.name} with {key}={other.get(key)}, but {key}={flat[key]} was asked for; "
            "choose another --root or remove that folder"
        )


def _require_disk_space(dataset: DatasetConfig, folder: Path, trajectories: int) -> None:
    itemsize = 2 if dataset.storage == "float16" else 4
    need = trajectories * dataset.frames * int(np.prod(dataset.grid)) * itemsize
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(
            f"{dataset.name} needs {need / 1e9:.1f} GB below {folder}, but {free / 1e9:.1f} GB are free; "
            "make room or choose another --root"
        )


def _write_dataset_json(dataset: DatasetConfig, folder: Path) -> None:
    path = folder / "dataset.json"
    if not path.exists():
        write_text_atomic(
            path,
            json.dumps({"format": DATASET_FORMAT, "dataset": to_dict(dataset), "timings": []}, indent=2) + "\n",
        )


def _append_timing(folder: Path, facts: dict[str, Any]) -> None:
    path = folder / "dataset.json"
    data = json.loads(path.read_text())
    data["timings"].append(facts)
    write_text_atomic(path, json.dumps(data, indent=2) + "\n")

"""`ergoflow simulate`: from a flow to a data set on disk.

Trajectories are made in shards. A shard is one HDF5 file, written under a temporary name and renamed when it is
whole, so a run that was stopped continues with the first shard that is missing.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ergoflow.config import (
    SPLITS,
    ChannelDatasetConfig,
    DatasetConfig,
    FilesDatasetConfig,
    SimulatedDatasetConfig,
    first_difference,
    to_dict,
)
from ergoflow.data.files import write_text_atomic
from ergoflow.data.layout import read_layout
from ergoflow.data.store import TrajectoryStore, compute_statistics, is_complete, remove_leftovers, write_statistics
from ergoflow.pipeline.shards import list_shards, trajectory_bytes
from ergoflow.pipeline.simulate_channel import make_channel
from ergoflow.pipeline.simulate_kolmogorov import arithmetic, dtype_name, make_kolmogorov
from ergoflow.pipeline.workspace import Workspace, hardware, load_dataset_config

DATASET_FORMAT = 1


def simulate(
    dataset: SimulatedDatasetConfig,
    workspace: Workspace,
    *,
    device: torch.device,
    console: Console,
    dtype: torch.dtype = torch.float32,
    minutes: float | None = None,
) -> Path:
    """Make what is missing of a data set and return its folder.

    `minutes` ends a channel early with what fits; None makes all of it.
    """
    folder = workspace.dataset(dataset.name)
    if minutes is not None and not isinstance(dataset, ChannelDatasetConfig):
        raise ValueError(
            f"--minutes is for channel data, whose trajectories follow each other, got {dataset.name}; drop it"
        )
    if dtype != torch.float32 and isinstance(dataset, ChannelDatasetConfig):
        raise ValueError(f"a channel is computed in float32, got {dataset.name} with --precision float64; drop it")
    _require_same_dataset(dataset, folder, dtype)
    _require_disk_space(dataset, workspace.root, folder)
    for split in SPLITS:
        (folder / "data" / split).mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    missing = [shard for shard in list_shards(dataset, folder) if not is_complete(shard.path)]
    _write_dataset_json(dataset, folder)
    started = time.perf_counter()
    statistics = None
    if isinstance(dataset, ChannelDatasetConfig):
        make_channel(dataset, missing, folder, device=device, console=console, minutes=minutes)
        made_of = "solver"
    else:
        made_of, statistics = make_kolmogorov(dataset, missing, workspace, device=device, dtype=dtype, console=console)
    if missing or not (folder / "stats.yaml").exists():
        write_statistics(folder, statistics or compute_statistics(TrajectoryStore(folder)))
        made = sum(shard.count for shard in missing if is_complete(shard.path))
        facts = {"seconds": time.perf_counter() - started, "made_of": made_of, "trajectories": made}
        _append_timing(folder, facts | {"hardware": hardware(device)})
    return folder


def provide(dataset: DatasetConfig, workspace: Workspace, *, device: torch.device, console: Console) -> Path:
    """The folder of a data set, simulated if it was not brought."""
    if not isinstance(dataset, FilesDatasetConfig):
        return simulate(dataset, workspace, device=device, console=console)
    folder = workspace.dataset(dataset.name)
    require_providable(dataset, folder)
    return folder


def require_providable(dataset: DatasetConfig, folder: Path) -> None:
    """Refuse data that were made with other settings, and data of your own that are not there."""
    if not isinstance(dataset, FilesDatasetConfig):
        _require_same_dataset(dataset, folder, torch.float32)
    elif not (folder / "stats.yaml").exists():
        raise ValueError(f"data of your own were expected in {folder}, but there are none; run `ergoflow import`")


def _require_same_dataset(dataset: SimulatedDatasetConfig, folder: Path, dtype: torch.dtype) -> None:
    if not (folder / "dataset.json").exists():
        if next(folder.rglob("*.hdf5"), None) is not None:
            raise ValueError(
                f"{folder} holds data that `ergoflow simulate` did not make; choose another --root or data set name"
            )
        return
    if difference := first_difference(load_dataset_config(folder), dataset):
        key, known, asked = difference
        raise ValueError(
            f"{folder} holds {dataset.name} with {key}={known}, but {key}={asked} was asked for; "
            "choose another --root or remove that folder"
        )
    made = next((shard.path for shard in list_shards(dataset, folder) if is_complete(shard.path)), None)
    if made is not None and (begun := arithmetic(read_layout(made).info)) != dtype_name(dtype):
        raise ValueError(
            f"{folder} holds {dataset.name} computed in {begun}, but {dtype_name(dtype)} was asked for; "
            f"choose --precision {begun}, another --root, or remove that folder"
        )


def _require_disk_space(dataset: SimulatedDatasetConfig, root: Path, folder: Path) -> None:
    missing = sum(shard.count for shard in list_shards(dataset, folder) if not is_complete(shard.path))
    need = missing * trajectory_bytes(dataset)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise OSError(
            f"{dataset.name} needs {need / 1e9:.1f} GB below {root}, but {free / 1e9:.1f} GB are free; "
            "make room or choose another --root"
        )


def _write_dataset_json(dataset: SimulatedDatasetConfig, folder: Path) -> None:
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

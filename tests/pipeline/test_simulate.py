"""Which arithmetic a data set was made in: it is written into its files, and one set never holds two."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import h5py
import pytest
import torch
from rich.console import Console

from ergoflow.config import KolmogorovDatasetConfig
from ergoflow.data.store import TrajectoryStore
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.verify import verify
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import find_recipe
from ergoflow.solvers.kolmogorov import KolmogorovConfig

QUIET = Console(quiet=True)
SMALL = KolmogorovDatasetConfig(
    name="small",
    flow=KolmogorovConfig(grid=(16, 20), viscosity=0.02, dt=0.05),
    spin_up_seconds=0.4,
    frame_seconds=0.2,
    frames=6,
    train=2,
    valid=1,
    test=1,
    shard_size=1,
)


def make(root: Path, dtype: torch.dtype, dataset: KolmogorovDatasetConfig = SMALL) -> Path:
    return simulate(dataset, Workspace(root), device=torch.device("cpu"), console=QUIET, dtype=dtype)


def checksums(folder: Path) -> dict[str, str]:
    """The sums over everything that the files say, their numbers and their provenance."""
    found = {}
    for path in folder.rglob("*.hdf5"):
        with h5py.File(path) as file:
            found[str(path)] = str(file.attrs["sha256"])
    return found


def lose_a_shard(folder: Path) -> Path:
    lost = folder / "data" / "train" / "small_0001.hdf5"
    lost.unlink()
    return lost


@pytest.mark.parametrize(("begun", "asked"), [("float32", "float64"), ("float64", "float32")])
def test_a_set_begun_in_one_arithmetic_is_not_completed_in_another(tmp_path: Path, begun: str, asked: str) -> None:
    folder = make(tmp_path, getattr(torch, begun))
    assert TrajectoryStore(folder).info.provenance["arithmetic"] == begun
    lost = lose_a_shard(folder)
    with pytest.raises(ValueError, match=f"computed in {begun}, but {asked} was asked for; choose --precision {begun}"):
        make(tmp_path, getattr(torch, asked))
    assert not lost.exists()


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_set_goes_on_in_its_own_arithmetic_to_the_bit(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, getattr(torch, name))
    before = checksums(folder)
    lose_a_shard(folder)
    make(tmp_path, getattr(torch, name))
    assert checksums(folder) == before
    assert verify(folder, console=QUIET)


def test_a_set_that_names_no_arithmetic_goes_on_in_float32_only(tmp_path: Path) -> None:
    folder = make(tmp_path, torch.float32)
    for path in folder.rglob("*.hdf5"):
        with h5py.File(path, "r+") as file:
            provenance = json.loads(file.attrs["provenance"])
            del provenance["arithmetic"]
            file.attrs["provenance"] = json.dumps(provenance)
    lost = lose_a_shard(folder)
    with pytest.raises(ValueError, match="computed in float32, but float64 was asked for"):
        make(tmp_path, torch.float64)
    make(tmp_path, torch.float32)
    assert lost.exists()
    assert TrajectoryStore(folder).count("train") == 2


def test_a_finer_set_of_another_arithmetic_is_not_taken_for_the_same_trajectories(tmp_path: Path) -> None:
    half = dataclasses.replace(SMALL, name="half", subsample=2)
    make(tmp_path, torch.float64)
    folder = make(tmp_path, torch.float32, half)
    assert json.loads((folder / "dataset.json").read_text())["timings"][0]["made_of"] == "solver"
    again = make(tmp_path, torch.float64, dataclasses.replace(half, name="half64"))
    assert json.loads((again / "dataset.json").read_text())["timings"][0]["made_of"] == "small"
    assert TrajectoryStore(again).info.provenance["arithmetic"] == "float64"


def test_a_channel_in_float64_is_refused_before_work(tmp_path: Path) -> None:
    dataset = find_recipe("tcf32-a3m").dataset
    with pytest.raises(ValueError, match=r"computed in float32, got tcf32 with --precision float64; drop it"):
        simulate(dataset, Workspace(tmp_path), device=torch.device("cpu"), console=QUIET, dtype=torch.float64)
    assert not list(tmp_path.rglob("*"))

"""Data of one's own: arrays in, a data set and a recipe that leads to scores out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ergoflow.config import FilesDatasetConfig, load_recipe, override
from ergoflow.data.store import TrajectoryStore
from ergoflow.models.build import build_model
from ergoflow.models.ergoformer import ErgoformerConfig
from ergoflow.pipeline import reference
from ergoflow.pipeline.import_data import Description, describe, import_arrays, import_folder
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.report import report
from ergoflow.pipeline.reproduce import reproduce
from ergoflow.pipeline.train import train
from ergoflow.pipeline.verify import verify
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import own_recipe

CPU = torch.device("cpu")
QUICK = [
    "training.max_steps=2",
    "training.tensorboard=false",
    "evaluation.steps=45",
    "evaluation.discard=5",
    "evaluation.keep_first=30",
    "evaluation.resamples=20",
]


def quiet() -> Console:
    return Console(quiet=True)


def waves(trajectories: int, frames: int, *grid: int, fields: int = 2, seed: int = 0) -> np.ndarray:
    """Travelling waves with noise, (trajectories, frames, fields, *grid)."""
    rng = np.random.default_rng(seed)
    x = np.arange(grid[0]).reshape(-1, *(1,) * (len(grid) - 1)) * 2 * np.pi / grid[0]
    phase = rng.uniform(0, 2 * np.pi, (trajectories, 1, fields)) + 0.3 * np.arange(frames)[:, None]
    values = np.sin(x + phase.reshape(*phase.shape, *(1,) * len(grid)))
    return values + 0.1 * rng.standard_normal((trajectories, frames, fields, *grid))


def brought(tmp_path: Path, array: np.ndarray, **changes: object) -> tuple[Path, Path]:
    np.save(tmp_path / "mine.npy", array)
    settings = {"name": "mine", "fields": ("u", "v"), "frame_seconds": 0.25} | changes
    description = Description(**settings)  # type: ignore[arg-type]
    where = Workspace(tmp_path / "root")
    return import_arrays(tmp_path / "mine.npy", description, where, shares=(0.1, 0.2), console=quiet())


def test_what_is_read_back_is_what_was_brought(tmp_path: Path) -> None:
    array = waves(9, 12, 15, 10)
    folder, path = brought(tmp_path, array, length=(3.0, 2.0), walls=("x",))
    store = TrajectoryStore(folder)
    splits = {split: store.load(split, device=CPU).numpy() for split in ("train", "valid", "test")}
    assert [len(values) for values in splits.values()] == [6, 1, 2]
    assert np.array_equal(np.concatenate(list(splits.values())), array.astype(np.float32))
    assert (store.info.length, store.info.boundaries) == ((3.0, 2.0), ("WALL", "PERIODIC"))
    mean = np.ravel([store.statistics["mean"][name] for name in ("u", "v")])
    assert mean == pytest.approx(array[:6].mean((0, 1, 3, 4)), abs=1e-6)
    assert verify(folder, console=quiet())
    recipe = load_recipe(path)
    assert recipe.dataset == FilesDatasetConfig(name="mine", grid=(15, 10), frame_seconds=0.25)
    assert recipe.step_seconds == 0.25


def test_what_was_understood_is_said(tmp_path: Path) -> None:
    folder, _ = brought(tmp_path, waves(9, 12, 15, 10), length=(3.0, 2.0), walls=("x",))
    assert describe(folder) == [
        "6 train, 1 valid, 2 test trajectories of 12 frames, 0.25 s apart",
        "fields u, v on a grid 15 x 10 of size 3 x 2, periodic along y",
        "2 test trajectories: intervals and floors are wide, so verdicts say little; bring 6 or more",
    ]


def test_a_volume_is_said_not_to_be_scored(tmp_path: Path) -> None:
    folder, _ = brought(tmp_path, waves(4, 3, 8, 8, 8), axes=("x", "y", "z"))
    assert "`predict` refuses it" in describe(folder)[2]


def test_species_are_said_to_be_scored_as_a_velocity_and_velocities_are_not(tmp_path: Path) -> None:
    for k, (fields, told) in enumerate({("activator", "inhibitor"): 1, ("velocity_x", "velocity_y"): 0}.items()):
        place = tmp_path / str(k)
        place.mkdir()
        folder, _ = brought(place, waves(40, 4, 8, 8), fields=fields)
        assert sum("scored as components of a velocity" in line for line in describe(folder)) == told
        assert len(describe(folder)) == 2 + told  # eight trajectories to test with are enough


def test_three_arrays_are_three_splits_and_one_field_needs_no_axis(tmp_path: Path) -> None:
    sizes = {"train": (3, 8), "valid": (1, 6), "test": (2, 7)}
    arrays = {split: waves(count, frames, 6, 4, fields=1)[:, :, 0] for split, (count, frames) in sizes.items()}
    np.savez(tmp_path / "mine.npz", **arrays)
    description = Description(name="mine", fields=("vorticity",), frame_seconds=1.0)
    where = Workspace(tmp_path / "root")
    folder, _ = import_arrays(tmp_path / "mine.npz", description, where, shares=(0.5, 0.5), console=quiet())
    store = TrajectoryStore(folder)
    for split, array in arrays.items():
        assert np.array_equal(store.load(split, device=CPU).numpy()[:, :, 0], array.astype(np.float32))
    assert describe(folder)[0] == "3 train, 1 valid, 2 test trajectories of 8, 6, 7 frames, 1 s apart"


@pytest.mark.parametrize("fields", [("u", "v"), ("heat",)])
@pytest.mark.parametrize(("grid", "axes"), [((16, 12), ("x", "y")), ((16,), ("x",))])
def test_the_recipe_leads_to_scores_and_a_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    grid: tuple[int, ...],
    axes: tuple[str, ...],
    fields: tuple[str, ...],
) -> None:
    monkeypatch.setattr(reference, "TRIVIAL_RESAMPLES", 2)
    _, path = brought(tmp_path, waves(8, 40, *grid, fields=len(fields)), axes=axes, fields=fields)
    recipe, where = override(load_recipe(path), QUICK), Workspace(tmp_path / "root")
    page = reproduce([recipe], where, seeds=[0], results=tmp_path / "cells", device=CPU, console=quiet())
    scores = json.loads((where.run("mine-ergoformer", 0) / "scores.json").read_text())
    assert (scores["dataset"], scores["survival"]["steps"]) == ("mine", 45)
    assert "mine-ergoformer" in page.read_text()
    assert report(where, title="mine", console=quiet()).exists()


@pytest.mark.parametrize(
    ("changes", "flow"),
    [({}, "carried"), ({"length": (1.0, 2.0)}, None), ({"walls": ("x",)}, None), ({"fields": ("heat",)}, None)],
)
def test_a_vorticity_on_an_even_periodic_plane_is_carried(tmp_path: Path, changes: dict, flow: str | None) -> None:
    _, path = brought(tmp_path, waves(4, 8, 16, 16, fields=1), **{"fields": ("vorticity",), **changes})
    model = load_recipe(path).model
    assert isinstance(model, ErgoformerConfig)
    assert model.flow == flow


@pytest.mark.parametrize(
    ("grid", "stride"),
    [((64, 48), 8), ((16, 16), 4), ((12, 20), 4), ((15, 9), 1), ((6, 8), 2), ((32,), 8), ((2, 2), 1)],
)
def test_the_net_goes_as_far_down_as_the_grid_allows(grid: tuple[int, ...], stride: int) -> None:
    dataset = FilesDatasetConfig(name="mine", grid=grid, frame_seconds=1.0)
    sides = len(grid)
    recipe = own_recipe(dataset, fields=("u", "v"), length=(1.0,) * sides, periodic=(True,) * sides, frames=50)
    assert isinstance(recipe.model, ErgoformerConfig)
    assert recipe.model.unet.stride == stride
    if min(grid) > 2:
        build_model(recipe.model, 2, 2, grid)(torch.zeros(1, 2, *grid))


def test_a_volume_is_trained_on_and_its_roll_out_is_refused_before_work(tmp_path: Path) -> None:
    _, path = brought(tmp_path, waves(4, 8, 8, 8, 8), axes=("x", "y", "z"))
    recipe, where = (
        override(load_recipe(path), ["training.max_steps=1", "training.batch_size=2"]),
        Workspace(tmp_path / "root"),
    )
    train(recipe, where, seed=0, device=CPU, console=quiet())
    with pytest.raises(ValueError, match=r"lines and planes, got a volume \(8, 8, 8\); train on it with"):
        predict(recipe, where, seed=0, device=CPU, console=quiet())
    untrained = dataclasses.replace(recipe, name="not-begun")
    with pytest.raises(ValueError, match="lines and planes, got a volume"):
        reproduce([untrained], where, seeds=[0], results=tmp_path / "cells", device=CPU, console=quiet())
    assert not where.run("not-begun", 0).exists()


def test_a_short_trajectory_has_the_leads_and_lags_it_can_have(tmp_path: Path) -> None:
    _, path = brought(tmp_path, waves(4, 8, 9, 9))
    evaluation = load_recipe(path).evaluation
    assert (evaluation.lead_steps, evaluation.max_lag) == ((1, 5), 4)


def with_nan() -> np.ndarray:
    array = waves(8, 12, 8, 8)
    array[7, 3, 1, 2, 2] = np.nan
    return array


@pytest.mark.parametrize(
    ("array", "changes", "reason"),
    [
        (with_nan(), {}, "trajectory 1 of test, frame 3"),
        (waves(3, 12, 8, 8), {}, r"array.reshape\(pieces, frames"),
        (waves(8, 12, 8, 8), {"fields": ("u",)}, r"1 fields, x, y\) .* shape \(8, 12, 2, 8, 8\)"),
        (waves(8, 12, 8, 8), {"axes": ("x",)}, "2 fields, x"),
        (waves(8, 12, 8, 8) * 1j, {}, "of real numbers, got complex128"),
        (waves(8, 12, 8, 8), {"walls": ("z",)}, "axes out of x, y, got z"),
        (waves(8, 12, 8, 8), {"walls": ("y",)}, "got PERIODIC, WALL along x, y; put the axis between walls first"),
        (
            waves(8, 12, 8),
            {"axes": ("x",), "walls": ("x",)},
            "on the first of two or three axes, got WALL",
        ),
        (waves(8, 12, 8, 8), {"name": "a/b"}, "must be a word without '/'"),
        (waves(8, 12, 8, 8), {"frame_seconds": 0.0}, "must be positive"),
        (np.ones((8, 12, 2, 8, 8)), {}, "drop constant channels"),
        (waves(8, 1, 8, 8), {}, "at least 2 frames, a state and the next, got 1"),
        (waves(8, 12, 8, 8) * 1e39, {}, "finite in float32"),
        (np.array(3.0), {}, r"got float64 of shape \(\)"),
    ],
)
def test_what_cannot_be_brought_leaves_nothing_behind(
    tmp_path: Path, array: np.ndarray, changes: dict, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        brought(tmp_path, array, **changes)
    assert not [path for path in (tmp_path / "root").rglob("*") if path.is_file()]


def test_a_folder_in_the_layout_of_the_well_is_linked(tmp_path: Path) -> None:
    theirs, _ = brought(tmp_path, waves(8, 40, 16, 12))
    where = Workspace(tmp_path / "other")
    folder, path = import_folder(theirs, "linked", where)
    assert folder.resolve() == theirs.resolve()
    recipe = load_recipe(path)
    assert (recipe.name, recipe.dataset.grid, recipe.step_seconds) == ("linked-ergoformer", (16, 12), 0.25)
    assert (train(override(recipe, QUICK), where, seed=0, device=CPU, console=quiet()) / "training.json").exists()
    with pytest.raises(ValueError, match="is there already"):
        import_folder(theirs, "linked", where)
    with pytest.raises(ValueError, match="expected HDF5 files"):
        import_folder(tmp_path / "other" / "runs", "another", where)
    assert not where.dataset("another").exists()


def test_nothing_that_is_there_is_replaced(tmp_path: Path) -> None:
    folder, path = brought(tmp_path, waves(4, 8, 8, 8))
    before = path.read_text()
    with pytest.raises(ValueError, match="is there already; choose another name"):
        brought(tmp_path, waves(4, 8, 8, 8, seed=1))
    assert path.read_text() == before
    assert np.array_equal(
        TrajectoryStore(folder).load("train", device=CPU).numpy(), waves(4, 8, 8, 8)[:1].astype(np.float32)
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mine.txt", b""),
        ("none.npy", None),
        ("mine.npy", b"not an array"),
        ("empty.npy", b""),
        ("cut.npz", b"PK\x03\x04"),
    ],
)
def test_a_file_that_holds_no_array_is_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    description = Description(name="mine", fields=("u", "v"), frame_seconds=1.0)
    with pytest.raises(ValueError, match=name):
        import_arrays(tmp_path / name, description, Workspace(tmp_path), shares=(0.1, 0.2), console=quiet())

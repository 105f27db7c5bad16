from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from ergoflow.data.store import DatasetInfo, ShardWriter, TrajectoryStore

GRID = (6, 5)
INFO = DatasetInfo(
    name="small",
    fields=("a", "b", "c"),
    grid=GRID,
    length=(2.0, 3.0),
    boundaries=("PERIODIC", "PERIODIC"),
    axes=("x", "y"),
    frame_seconds=0.5,
    provenance={"solver": "test"},
)


def write(path: Path, data: np.ndarray, dtype: str = "float32") -> None:
    with ShardWriter(path, INFO, count=data.shape[0], frames=data.shape[1], dtype=dtype) as shard:  # type: ignore[arg-type]
        for t in range(data.shape[1]):
            shard.write(t, data[:, t])


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((6, 8, 3, *GRID)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, data: np.ndarray) -> Path:
    # Files of 1, 3 and 2 trajectories.
    for name, rows in (("000", slice(0, 1)), ("001", slice(1, 4)), ("002", slice(4, 6))):
        write(tmp_path / "data" / "train" / f"{name}.hdf5", data[rows])
    write(tmp_path / "data" / "test" / "000.hdf5", data[:2, :5])
    return tmp_path


def write_foreign(path: Path, velocity: np.ndarray, density: np.ndarray, stress: np.ndarray) -> None:
    """A file as other producers of The Well write it: vectors, tensors, constants, no provenance."""
    count, frames = density.shape[:2]
    with h5py.File(path, "w") as file:
        file.attrs.update(
            dataset_name="foreign", grid_type="cartesian", n_spatial_dims=2, n_trajectories=count, Re=10.0
        )
        file.attrs["simulation_parameters"] = ["Re"]
        dimensions = file.create_group("dimensions")
        dimensions.attrs["spatial_dims"] = ["x", "y"]
        for name, values in (
            ("time", np.arange(frames) * 0.1),
            ("x", np.arange(6) / 6),
            ("y", np.arange(5) / 2),
        ):
            dimensions.create_dataset(name, data=values).attrs["sample_varying"] = False
        for axis in ("x", "y"):
            group = file.create_group(f"boundary_conditions/{axis}_open_or_not")
            group.attrs.update(associated_dims=axis, bc_type="periodic" if axis == "x" else "open")
        file.create_group("scalars").attrs["field_names"] = []
        for order, fields in enumerate(({"density": density}, {"velocity": velocity}, {"stress": stress})):
            group = file.create_group(f"t{order}_fields")
            group.attrs["field_names"] = [*fields, *(["mask"] if order == 0 else [])]
            for name, values in fields.items():
                field = group.create_dataset(name, data=values, chunks=True)
                field.attrs.update(dim_varying=[True, True], sample_varying=True, time_varying=True)
        mask = file["t0_fields"].create_dataset("mask", data=np.ones((6, 5)))
        mask.attrs.update(dim_varying=[True, True], sample_varying=False, time_varying=False)


def test_trajectories_are_numbered_through_files_of_unequal_size(folder: Path, data: np.ndarray) -> None:
    store = TrajectoryStore(folder)
    assert store.splits == ("train", "test")
    assert [path.name for path in store.files("train")] == ["000.hdf5", "001.hdf5", "002.hdf5"]
    assert (store.count("train"), store.num_frames("train")) == (6, 8)
    assert (store.count("test"), store.num_frames("test")) == (2, 5)
    for trajectory in range(6):
        np.testing.assert_array_equal(store.read("train", trajectory, 2, 7), data[trajectory, 2:7])


@pytest.mark.parametrize(("start", "stop", "stride"), [(0, 8, 1), (1, 8, 3), (3, 4, 5), (0, 7, 2)])
def test_strided_reads_match_slices(folder: Path, data: np.ndarray, start: int, stop: int, stride: int) -> None:
    read = TrajectoryStore(folder).read("train", 4, start, stop, stride)
    np.testing.assert_array_equal(read, data[4, start:stop:stride])


def test_load_gives_all_or_the_chosen_trajectories_in_order(folder: Path, data: np.ndarray) -> None:
    store = TrajectoryStore(folder)
    np.testing.assert_array_equal(store.load("train").numpy(), data)
    np.testing.assert_array_equal(store.load("train", stride=3, trajectories=[5, 0]).numpy(), data[[5, 0]][:, ::3])
    half = store.load("train", dtype=torch.float16, trajectories=range(2))
    assert half.dtype == torch.float16
    np.testing.assert_array_equal(half.numpy(), data[:2].astype(np.float16))


def test_load_in_small_pieces_gives_the_same_tensor(
    folder: Path, data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ergoflow.data.store.LOAD_BYTES", 8 * 3 * 6 * 5 * 3)
    np.testing.assert_array_equal(TrajectoryStore(folder).load("train", stride=2).numpy(), data[:, ::2])


def test_files_stay_open_between_reads_and_never_more_than_the_limit(
    folder: Path, data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr("ergoflow.data.store.MAX_OPEN_FILES", 2)
    monkeypatch.setattr("ergoflow.data.store.open_shard", lambda path: opened.append(path.name) or h5py.File(path, "r"))
    store = TrajectoryStore(folder)
    for trajectory in (0, 0, 1, 2, 0, 3):
        np.testing.assert_array_equal(store.read("train", trajectory, 0, 8), data[trajectory])
    assert opened == ["000.hdf5", "001.hdf5"]
    np.testing.assert_array_equal(store.read("train", 5, 0, 8), data[5])  # closes 000, the least recently used
    np.testing.assert_array_equal(store.read("train", 0, 0, 8), data[0])
    assert opened == ["000.hdf5", "001.hdf5", "002.hdf5", "000.hdf5"]


def test_a_pickled_store_reads_the_same(folder: Path, data: np.ndarray) -> None:
    store = TrajectoryStore(folder)
    store.read("train", 0, 0, 1)
    copy = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(copy.read("train", 3, 0, 8), data[3])
    np.testing.assert_array_equal(store.read("train", 3, 0, 8), data[3])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_files_of_its_own(folder: Path, data: np.ndarray) -> None:
    store = TrajectoryStore(folder)
    store.read("train", 0, 0, 1)
    inherited = next(iter(store._handles.values()))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        values = store.read("train", 0, 0, 8)
        sender.send((values, any(handle is inherited for handle in store._handles.values())))

    process = context.Process(target=child)
    process.start()
    values, shared = receiver.recv()
    process.join()
    np.testing.assert_array_equal(values, data[0])
    assert not shared
    np.testing.assert_array_equal(store.read("train", 0, 0, 8), data[0])


def test_foreign_vectors_and_tensors_become_channels(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    (tmp_path / "data" / "train").mkdir(parents=True)
    parts = []
    for number, count in enumerate((1, 2)):
        velocity = rng.standard_normal((count, 4, 6, 5, 2)).astype(np.float32)
        density = rng.standard_normal((count, 4, 6, 5)).astype(np.float32)
        stress = rng.standard_normal((count, 4, 6, 5, 2, 2)).astype(np.float32)
        write_foreign(tmp_path / "data" / "train" / f"{number}.hdf5", velocity, density, stress)
        parts.append(
            np.stack(
                [
                    density,
                    *np.moveaxis(velocity, -1, 0),
                    *np.moveaxis(stress.reshape(*stress.shape[:4], 4), -1, 0),
                ],
                axis=2,
            )
        )
    store = TrajectoryStore(tmp_path)
    assert store.info.fields == (
        *("density", "velocity_x", "velocity_y", "stress_xx", "stress_xy", "stress_yx", "stress_yy"),
    )
    assert store.info.boundaries == ("PERIODIC", "OPEN")
    assert store.info.frame_seconds == pytest.approx(0.1)
    assert store.info.length == pytest.approx((1.0, 2.5))
    assert store.info.parameters == {"Re": 10.0}
    np.testing.assert_array_equal(store.load("train").numpy(), np.concatenate(parts))
    np.testing.assert_array_equal(store.read("train", 2, 1, 4, 2), parts[1][1, 1:4:2])


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "data" / "train" / "001.hdf5"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"001\.hdf5: expected a whole HDF5 file.*; delete") as caught:
        TrajectoryStore(folder).count("train")
    assert "\n" not in str(caught.value)


def test_a_missing_group_is_named(folder: Path) -> None:
    with h5py.File(folder / "data" / "train" / "001.hdf5", "r+") as file:
        del file["t1_fields"]
    with pytest.raises(ValueError, match=r"001\.hdf5: expected the groups.*found no t1_fields; delete"):
        TrajectoryStore(folder).read("train", 0, 0, 1)


def test_a_file_unlike_its_siblings_is_named(folder: Path, data: np.ndarray) -> None:
    write(folder / "data" / "train" / "003.hdf5", data[:1, :7])
    with pytest.raises(ValueError, match=r"003\.hdf5: expected frames 8 as in 000\.hdf5, found 7; delete"):
        TrajectoryStore(folder).count("train")


def test_a_split_with_other_fields_than_the_training_split_is_named(folder: Path, data: np.ndarray) -> None:
    path = folder / "data" / "test" / "000.hdf5"
    info = dataclasses.replace(INFO, fields=INFO.fields[:2])
    with ShardWriter(path, info, count=2, frames=1) as shard:
        shard.write(0, data[:2, 0, :2])
    with pytest.raises(ValueError, match=r"test/000\.hdf5: expected fields .* as in train/000\.hdf5, found"):
        TrajectoryStore(folder).read("test", 0, 0, 1)


def test_a_field_of_the_wrong_shape_is_named(folder: Path) -> None:
    with h5py.File(folder / "data" / "train" / "002.hdf5", "r+") as file:
        file.attrs["n_trajectories"] = 3
    with pytest.raises(ValueError, match=r"002\.hdf5: expected field a of shape \(3, 8, 6, 5\), found \(2, 8, 6, 5\)"):
        TrajectoryStore(folder).count("train")


def test_questions_outside_the_data_raise(folder: Path, tmp_path: Path) -> None:
    store = TrajectoryStore(folder)
    with pytest.raises(ValueError, match=r"split 'valid', got \('train', 'test'\); put HDF5 files into data/valid"):
        store.count("valid")
    with pytest.raises(ValueError, match=r"0\.\.5, got 6"):
        store.read("train", 6, 0, 1)
    for start, stop, stride in ((0, 9, 1), (3, 3, 1), (-1, 2, 1), (0, 2, 0)):
        with pytest.raises(ValueError, match="start < stop"):
            store.read("train", 0, start, stop, stride)
    with pytest.raises(ValueError, match=r"stats\.yaml, found no file"):
        _ = store.statistics
    (folder / "stats.yaml").write_text("mean: [\n")
    with pytest.raises(ValueError, match=r"stats\.yaml: expected a YAML mapping of statistics, found .*; delete"):
        _ = store.statistics
    with pytest.raises(ValueError, match="scalar 'speed'"):
        store.scalar("train", "speed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="found none; generate"):
        TrajectoryStore(tmp_path / "empty")

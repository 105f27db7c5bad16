from __future__ import annotations

import dataclasses
from pathlib import Path

import h5py
import numpy as np
import pytest

from ergoflow.data.store import (
    DatasetInfo,
    ShardWriter,
    TrajectoryStore,
    compute_statistics,
    write_statistics,
)
from ergoflow.data.verify import check_store

INFO = DatasetInfo(
    name="small",
    fields=("a", "b"),
    grid=(6, 5),
    length=(1.0, 2.0),
    boundaries=("PERIODIC", "PERIODIC"),
    axes=("x", "y"),
    frame_seconds=0.1,
    parameters={"nu": 1.25},
    provenance={"solver": "test", "seeds": [1]},
)


def write(
    path: Path,
    data: np.ndarray,
    info: DatasetInfo = INFO,
    diverged_at: list[int] | None = None,
    steps: list[int] | None = None,
) -> None:
    with ShardWriter(path, info, count=data.shape[0], frames=data.shape[1], steps=steps) as shard:
        for t in range(data.shape[1]):
            shard.write(t, data[:, t])
        if diverged_at is not None:
            shard.set_scalar("diverged_at", diverged_at)


def numbers(frames: int = 6) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, frames, 2, 6, 5)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, names in (("train", ("0", "1", "2")), ("valid", ("0",))):
        for name in names:
            write(tmp_path / "data" / split / f"{name}.hdf5", numbers())
    write_statistics(tmp_path, compute_statistics(TrajectoryStore(tmp_path)))
    return tmp_path


def only_broken(folder: Path) -> tuple[str, str]:
    """The one broken file and the reason, which is one line."""
    ((path, reason),) = [(path, reason) for path, reason in check_store(folder) if reason is not None]
    assert reason is not None
    assert "\n" not in reason
    return str(path.relative_to(folder)), reason


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def test_every_file_of_a_good_store_is_good(folder: Path) -> None:
    verdicts = list(check_store(folder))
    assert [str(path.relative_to(folder)) for path, _ in verdicts] == [
        *(f"data/train/{n}.hdf5" for n in range(3)),
        "data/valid/0.hdf5",
        "stats.yaml",
    ]
    assert all(reason is None for _, reason in verdicts)


@pytest.mark.parametrize("channel", ["a", "b"])
def test_one_flipped_bit_of_a_field_is_found(folder: Path, channel: str) -> None:
    path = folder / "data" / "train" / "1.hdf5"
    with h5py.File(path, "r") as file:
        offset = file["t0_fields"][channel].id.get_offset()
    flip(path, offset + 3 * 6 * 6 * 5 * 4 - 4)
    name, reason = only_broken(folder)
    assert name == "data/train/1.hdf5"
    assert reason.startswith("checksum: expected")


@pytest.mark.parametrize("what", ["parameter", "coordinate", "provenance", "scalar"])
def test_changed_metadata_is_found(folder: Path, what: str) -> None:
    with h5py.File(folder / "data" / "train" / "2.hdf5", "r+") as file:
        if what == "parameter":
            file.attrs["nu"] = 1.5
        elif what == "coordinate":
            file["dimensions/x"][1] = 9.0
        elif what == "provenance":
            file.attrs["provenance"] = '{"solver": "other"}'
        else:
            file["scalars/nu"][()] = 1.5
    name, reason = only_broken(folder)
    assert name == "data/train/2.hdf5"
    assert reason.startswith("checksum")


def test_a_truncated_file_is_found(folder: Path) -> None:
    path = folder / "data" / "train" / "0.hdf5"
    path.write_bytes(path.read_bytes()[:-1000])
    name, reason = only_broken(folder)
    assert name == "data/train/0.hdf5"
    assert "truncated" in reason


def test_a_file_that_is_not_hdf5_is_found(folder: Path) -> None:
    (folder / "data" / "valid" / "1.hdf5").write_text("not a number in sight")
    name, reason = only_broken(folder)
    assert name == "data/valid/1.hdf5"
    assert "expected a whole HDF5 file" in reason


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_found_and_located(folder: Path, bad: float) -> None:
    data = numbers()
    data[2, 4, 1, 0, 3] = bad
    write(folder / "data" / "train" / "1.hdf5", data)
    name, reason = only_broken(folder)
    assert name == "data/train/1.hdf5"
    assert reason == "non-finite number in frame 4, trajectory 2, channel 1"


def test_a_roll_out_may_be_infinite_after_it_diverged_but_not_before(tmp_path: Path) -> None:
    data = numbers()
    data[1, 3:] = np.inf
    write(tmp_path / "a.hdf5", data, diverged_at=[-1, 3, -1])
    assert [reason for _, reason in check_store(tmp_path)] == [None]
    write(tmp_path / "a.hdf5", data, diverged_at=[3, 4, -1])
    assert only_broken(tmp_path)[1] == "non-finite number in frame 3, trajectory 1, channel 0"


def test_divergence_is_counted_in_steps_where_not_every_step_is_kept(tmp_path: Path) -> None:
    data = numbers()
    data[1, 3:] = np.nan
    steps = [0, 10, 20, 30, 40, 50]
    write(tmp_path / "a.hdf5", data, diverged_at=[-1, 21, -1], steps=steps)
    assert [reason for _, reason in check_store(tmp_path)] == [None]
    write(tmp_path / "a.hdf5", data, diverged_at=[-1, 31, -1], steps=steps)
    assert only_broken(tmp_path)[1] == "non-finite number in frame 3, trajectory 1, channel 0"


def test_missing_provenance_is_found(folder: Path) -> None:
    write(folder / "data" / "train" / "1.hdf5", numbers(), dataclasses.replace(INFO, provenance={}))
    name, reason = only_broken(folder)
    assert name == "data/train/1.hdf5"
    assert "no provenance" in reason


def test_a_missing_checksum_is_found(folder: Path) -> None:
    with h5py.File(folder / "data" / "train" / "1.hdf5", "r+") as file:
        del file.attrs["sha256"]
    assert "no checksum" in only_broken(folder)[1]


@pytest.mark.parametrize("group", ["t2_fields", "boundary_conditions", "scalars"])
def test_a_missing_group_is_found(folder: Path, group: str) -> None:
    with h5py.File(folder / "data" / "train" / "1.hdf5", "r+") as file:
        del file[group]
    name, reason = only_broken(folder)
    assert name == "data/train/1.hdf5"
    assert f"no {group}" in reason


def test_a_file_of_another_shape_is_found(folder: Path) -> None:
    write(folder / "data" / "train" / "1.hdf5", numbers(frames=5))
    name, reason = only_broken(folder)
    assert name == "data/train/1.hdf5"
    assert "expected frames 6 as in 0.hdf5, found 5" in reason


def test_a_split_of_other_fields_is_found(folder: Path) -> None:
    info = dataclasses.replace(INFO, fields=("a", "c"))
    write(folder / "data" / "valid" / "0.hdf5", numbers(frames=4), info)
    name, reason = only_broken(folder)
    assert name == "data/valid/0.hdf5"
    assert "expected fields ('a', 'b') as in train/0.hdf5, found ('a', 'c')" in reason


def test_splits_may_differ_in_their_number_of_frames(folder: Path) -> None:
    write(folder / "data" / "valid" / "0.hdf5", numbers(frames=4))
    write(folder / "data" / "valid" / "1.hdf5", numbers(frames=4))
    assert all(reason is None for _, reason in check_store(folder))
    assert TrajectoryStore(folder).num_frames("valid") == 4


def test_a_leftover_temporary_file_is_found(folder: Path) -> None:
    leftover = folder / "data" / "train" / ".3.hdf5.0a1b2c3d.ergoflow-tmp"
    leftover.write_bytes(b"half")
    name, reason = only_broken(folder)
    assert name.endswith(leftover.name)
    assert "killed writer" in reason


def test_missing_or_incomplete_statistics_are_found(folder: Path) -> None:
    (folder / "stats.yaml").write_text("mean: {a: 1.0}\n")
    assert only_broken(folder) == (
        "stats.yaml",
        "no std, rms, mean_delta, std_delta, rms_delta: expected the keys "
        "mean, std, rms, mean_delta, std_delta, rms_delta",
    )
    (folder / "stats.yaml").unlink()
    assert only_broken(folder)[1].startswith("missing")


def test_an_empty_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        next(check_store(tmp_path))

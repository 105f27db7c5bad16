from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from ergoflow.data.files import find_leftovers, remove_leftovers
from ergoflow.data.info import DatasetInfo
from ergoflow.data.shard_writer import ShardWriter, is_complete
from ergoflow.data.store import TrajectoryStore
from ergoflow.data.verify import check_store

INFO = DatasetInfo(
    name="plane",
    fields=("u", "v", "w"),
    grid=(6, 5),
    length=(2.0, 3.0),
    boundaries=("WALL", "PERIODIC"),
    axes=("y", "z"),
    frame_seconds=0.25,
    parameters={"viscosity": 1e-3, "drag": 0.1},
    provenance={"solver": "test 1", "config": {"dt": 0.25}, "seeds": [3, 4]},
)


def trajectories(count: int = 4, frames: int = 7, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, frames, 3, 6, 5)).astype(np.float32)


def write(path: Path, data: np.ndarray | torch.Tensor, info: DatasetInfo = INFO, **options: object) -> None:
    with ShardWriter(path, info, count=data.shape[0], frames=data.shape[1], **options) as shard:  # type: ignore[arg-type]
        for t in range(data.shape[1]):
            shard.write(t, data[:, t])


def test_layout_is_the_wells_to_the_letter(tmp_path: Path) -> None:
    data = trajectories()
    write(tmp_path / "a.hdf5", data)
    with h5py.File(tmp_path / "a.hdf5", "r") as file:
        assert file.attrs["dataset_name"] == "plane"
        assert file.attrs["grid_type"] == "cartesian"
        assert file.attrs["n_spatial_dims"] == 2
        assert file.attrs["n_trajectories"] == 4
        assert list(file.attrs["simulation_parameters"]) == ["viscosity", "drag"]
        assert file.attrs["viscosity"] == file["scalars/viscosity"][()] == 1e-3
        assert file.attrs["drag"] == file["scalars/drag"][()] == 0.1
        assert list(file["scalars"].attrs["field_names"]) == ["viscosity", "drag"]
        assert set(file) == {*("dimensions", "boundary_conditions", "scalars", "t0_fields", "t1_fields", "t2_fields")}
        dimensions = file["dimensions"]
        assert list(dimensions.attrs["spatial_dims"]) == ["y", "z"]
        assert bool(dimensions["time"].attrs["time_varying"]) is True
        assert bool(dimensions["time"].attrs["sample_varying"]) is False
        for axis in ("y", "z"):
            assert bool(dimensions[axis].attrs["time_varying"]) is False
            assert bool(dimensions[axis].attrs["sample_varying"]) is False
        assert all(dimensions[name].dtype == np.float32 for name in ("time", "y", "z"))
        np.testing.assert_allclose(dimensions["time"][()], 0.25 * np.arange(7))
        np.testing.assert_allclose(dimensions["y"][()], (np.arange(6) + 0.5) / 3, rtol=1e-6)  # cell centres
        np.testing.assert_allclose(dimensions["z"][()], np.arange(5) * 0.6, rtol=1e-6)  # z = 0 is z = 3
        assert set(file["boundary_conditions"]) == {"y_wall", "z_periodic"}
        for axis, name, kind, size in (("y", "y_wall", "WALL", 6), ("z", "z_periodic", "PERIODIC", 5)):
            group = file["boundary_conditions"][name]
            assert list(group.attrs["associated_dims"]) == [axis]
            assert len(group.attrs["associated_fields"]) == 0
            assert group.attrs["bc_type"] == kind
            assert not group.attrs["sample_varying"]
            assert not group.attrs["time_varying"]
            assert group["mask"].dtype == bool
            assert group["mask"][()].tolist() == [True, *[False] * (size - 2), True]
            assert group["values"].dtype.kind == "f"
        assert [list(file[f"t{k}_fields"].attrs["field_names"]) for k in range(3)] == [
            ["u", "v", "w"],
            [],
            [],
        ]
        for channel, name in enumerate(("u", "v", "w")):
            field = file["t0_fields"][name]
            assert field.dtype == np.float32
            assert field.attrs["dim_varying"].dtype == bool
            assert field.attrs["dim_varying"].tolist() == [True, True]
            assert bool(field.attrs["sample_varying"])
            assert bool(field.attrs["time_varying"])
            np.testing.assert_array_equal(field[()], data[:, :, channel])
        assert json.loads(file.attrs["provenance"]) == INFO.provenance


@pytest.mark.parametrize("grid", [(), (9,), (6, 5), (4, 3, 5)])
def test_round_trip_is_exact_on_every_kind_of_grid(tmp_path: Path, grid: tuple[int, ...]) -> None:
    n = len(grid)
    info = DatasetInfo(
        name="any",
        fields=("a", "b", "c"),
        grid=grid,
        length=(1.0, 2.0, 3.0)[:n],
        boundaries=("PERIODIC",) * n,
        axes=("x", "y", "z")[:n],
        frame_seconds=0.1,
        provenance={"solver": "test"},
    )
    data = np.random.default_rng(1).standard_normal((3, 11, 3, *grid)).astype(np.float32)
    write(tmp_path / "a.hdf5", data, info)
    store = TrajectoryStore(tmp_path)
    np.testing.assert_array_equal(store.load("all").numpy(), data)
    assert store.info == info
    assert [reason for _, reason in check_store(tmp_path)] == [None]


def test_more_frames_than_the_buffer_holds_come_back_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two frames per system call and an odd number of frames: the last flush is a partial one.
    monkeypatch.setattr("ergoflow.data.shard_writer.WRITE_BYTES", 2 * 6 * 5 * 4)
    data = trajectories()
    write(tmp_path / "a.hdf5", data)
    np.testing.assert_array_equal(TrajectoryStore(tmp_path).load("all").numpy(), data)


def test_half_precision_keeps_three_digits_and_half_the_bytes(tmp_path: Path) -> None:
    data = trajectories()
    write(tmp_path / "a.hdf5", data, dtype="float16")
    with h5py.File(tmp_path / "a.hdf5", "r") as file:
        assert file["t0_fields/u"].dtype == np.float16
    read = TrajectoryStore(tmp_path).read("all", 2, 0, 7)
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, data[2], rtol=2**-11, atol=2**-24)
    np.testing.assert_array_equal(read, data[2].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_number_too_large_for_half_precision_raises_instead_of_becoming_infinite(
    tmp_path: Path, as_tensor: bool
) -> None:
    data = trajectories()
    data[1, 3, 2, 0, 0] = 1e5
    frames = torch.from_numpy(data) if as_tensor else data
    with pytest.raises(ValueError, match=r"65504.*frame 3"):
        write(tmp_path / "a.hdf5", frames, dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_any_dtype_and_layout_are_written_like_arrays(tmp_path: Path) -> None:
    data = trajectories()
    strided = torch.from_numpy(data).double().permute(0, 1, 2, 4, 3).contiguous().permute(0, 1, 2, 4, 3)
    with ShardWriter(tmp_path / "a.hdf5", INFO, count=4, frames=7) as shard:
        for t in range(7):
            shard.write(t, strided[:, t].requires_grad_())
    np.testing.assert_array_equal(TrajectoryStore(tmp_path).load("all").numpy(), data)


def test_checksum_depends_on_contents_alone(tmp_path: Path) -> None:
    def checksum(name: str) -> str:
        with h5py.File(tmp_path / name, "r") as file:
            return str(file.attrs["sha256"])

    write(tmp_path / "a.hdf5", trajectories())
    write(tmp_path / "b.hdf5", trajectories())
    write(tmp_path / "c.hdf5", trajectories(seed=1))
    assert checksum("a.hdf5") == checksum("b.hdf5") != checksum("c.hdf5")
    assert len(checksum("a.hdf5")) == 64


def test_steps_and_scalars_are_stored_per_frame_and_trajectory(tmp_path: Path) -> None:
    for name, diverged_at in (("a", [-1, 2]), ("b", [5, -1])):
        steps = [0, 10, 20]
        with ShardWriter(tmp_path / f"{name}.hdf5", INFO, count=2, frames=3, steps=steps) as shard:
            shard.set_scalar("diverged_at", diverged_at)
            shard.set_scalar("energy", np.arange(6.0).reshape(2, 3))
            for t in range(3):
                shard.write(t, np.zeros((2, 3, 6, 5)))
    store = TrajectoryStore(tmp_path)
    assert store.steps("all").tolist() == [0, 10, 20]
    assert store.scalar("all", "diverged_at").tolist() == [-1, 2, 5, -1]
    assert store.scalar("all", "energy").shape == (4, 3)
    assert store.scalar("all", "drag").tolist() == [0.1] * 4
    with h5py.File(tmp_path / "a.hdf5", "r") as file:
        assert "diverged_at" in file["scalars"].attrs["field_names"]
        assert bool(file["scalars/diverged_at"].attrs["sample_varying"])
        assert not file["scalars/diverged_at"].attrs["time_varying"]


def test_an_exception_leaves_no_file_and_earlier_ones_intact(tmp_path: Path) -> None:
    write(tmp_path / "a.hdf5", trajectories())

    def failing() -> None:
        with ShardWriter(tmp_path / "b.hdf5", INFO, count=4, frames=7) as shard:
            shard.write(0, trajectories()[:, 0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert [path.name for path in tmp_path.iterdir()] == ["a.hdf5"]
    assert is_complete(tmp_path / "a.hdf5")
    assert not is_complete(tmp_path / "b.hdf5")


def test_a_missing_frame_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="expected 7 frames, got 1"),
        ShardWriter(tmp_path / "a.hdf5", INFO, count=4, frames=7) as shard,
    ):
        shard.write(0, trajectories()[:, 0])
    assert list(tmp_path.iterdir()) == []


def test_frames_out_of_order_or_of_another_shape_raise(tmp_path: Path) -> None:
    frame = trajectories()[:, 0]
    for index, bad, message in (
        (1, frame, "in order"),
        (0, frame[:3], r"shape \(4, 3, 6, 5\), got \(3, 3, 6, 5\)"),
        (0, frame.swapaxes(2, 3), "shape"),
    ):
        with (
            pytest.raises(ValueError, match=message),
            ShardWriter(tmp_path / "a.hdf5", INFO, count=4, frames=7) as shard,
        ):
            shard.write(index, bad)
    with pytest.raises(ValueError, match="float64"):
        ShardWriter(tmp_path / "a.hdf5", INFO, count=4, frames=7, dtype="float64")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"steps must have shape \(7,\)"):
        ShardWriter(tmp_path / "a.hdf5", INFO, count=4, frames=7, steps=[0, 1])
    shard = ShardWriter(tmp_path / "a.hdf5", INFO, count=4, frames=7)
    with pytest.raises(ValueError, match="reshape"):
        shard.set_scalar("diverged_at", [1, 2, 3])
    with pytest.raises(ValueError, match="rename"):
        shard.set_scalar("drag", 1.0)


def test_a_killed_writer_leaves_no_complete_file_and_the_next_run_resumes(tmp_path: Path) -> None:
    write(tmp_path / "a.hdf5", trajectories())
    program = f"""
import os, sys
import numpy as np
from ergoflow.data.store import DatasetInfo, ShardWriter
info = DatasetInfo(**{INFO.__dict__!r})
with ShardWriter(sys.argv[1], info, count=4, frames=7) as shard:
    for t in range(7):
        if t == 5:
            os._exit(9)
        shard.write(t, np.zeros((4, 3, 6, 5)))
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "b.hdf5")], check=False)
    assert killed.returncode == 9
    assert not is_complete(tmp_path / "b.hdf5")
    assert is_complete(tmp_path / "a.hdf5")
    np.testing.assert_array_equal(TrajectoryStore(tmp_path).load("all").numpy(), trajectories())
    reasons = dict(check_store(tmp_path))
    assert reasons.pop(tmp_path / "a.hdf5") is None
    ((leftover, reason),) = reasons.items()
    assert reason is not None
    assert "killed writer" in reason
    assert remove_leftovers(tmp_path) == [leftover]
    write(tmp_path / "b.hdf5", trajectories(seed=1))
    assert TrajectoryStore(tmp_path).count("all") == 8


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "free disk space"), (errno.EROFS, "mend that")])
def test_a_failed_write_is_one_line_and_leaves_earlier_files_intact(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.hdf5", trajectories())
    monkeypatch.setattr("ergoflow.data.shard_writer.WRITE_BYTES", 1)
    calls = []

    def full(descriptor: int, content: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 30:
            raise OSError(number, os.strerror(number))
        return os.pwritev(descriptor, [content], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=f"{os.strerror(number)}; {remedy}, run again") as caught:
        write(tmp_path / "b.hdf5", trajectories())
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path / "b.hdf5")
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["a.hdf5"]
    assert [reason for _, reason in check_store(tmp_path)] == [None]


def test_a_disk_too_small_is_noticed_before_the_first_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        assert size >= 4 * 7 * 3 * 6 * 5 * 4
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="frame 0 of 7: No space left"):
        write(tmp_path / "a.hdf5", trajectories())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    huge = ShardWriter(tmp_path / "a.hdf5", INFO, count=10**12, frames=7)
    with pytest.raises(OSError, match="frame 0 of 7: No space left"):
        huge.__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_write_the_kernel_refuses_ends_the_process_cleanly(tmp_path: Path) -> None:
    # A real failing write: the file-size limit of the process. HDF5 would crash the interpreter on exit here.
    program = f"""
import resource, signal, sys
import numpy as np
import ergoflow.data.shard_writer as writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
writer._reserve = lambda descriptor, size: None
info = writer.DatasetInfo(**({INFO.__dict__!r} | dict(grid=(64, 64))))
with writer.ShardWriter(sys.argv[1], info, count=4, frames=70) as shard:
    for t in range(70):
        shard.write(t, np.zeros((4, 3, 64, 64)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.hdf5")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "cannot write frame" in ended.stderr.strip().splitlines()[-1]
    assert find_leftovers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": (1.0,)}, "one entry per axis"),
        ({"fields": ("u", "u")}, "distinct"),
        ({"axes": ("time", "z")}, "other than 'time'"),
        ({"boundaries": ("WALL", "periodic")}, "PERIODIC"),
        ({"parameters": {"sha256": 1.0}}, "rename"),
        ({"fields": ("a/b",)}, "rename"),
        ({"grid": (6, 0)}, "positive"),
        ({"length": (2.0, float("nan"))}, "positive and finite"),
        ({"length": (float("inf"), 3.0)}, "positive and finite"),
        ({"length": (2.0, -3.0)}, "positive"),
        ({"frame_seconds": 0.0}, "positive"),
        ({"frame_seconds": float("inf")}, "positive and finite"),
        ({"frame_seconds": float("nan")}, "positive and finite"),
        ({"provenance": {"seeds": list(range(20_000))}}, "60000 bytes"),
    ],
)
def test_a_description_that_contradicts_itself_raises(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetInfo(**(INFO.__dict__ | change))

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from ergoflow.data.normalize import Normalizer
from ergoflow.data.statistics import STATISTICS_KEYS, add_increment_std
from ergoflow.data.store import (
    DatasetInfo,
    ShardWriter,
    TrajectoryStore,
    compute_increment_std,
    compute_statistics,
    write_statistics,
)

FIELDS = ("a", "b", "c")


def make_store(folder: Path, data: np.ndarray, sizes: tuple[int, ...], dtype: str = "float32") -> TrajectoryStore:
    grid = data.shape[3:]
    info = DatasetInfo(
        name="known",
        fields=FIELDS,
        grid=grid,
        length=(1.0,) * len(grid),
        boundaries=("PERIODIC",) * len(grid),
        axes=("x", "y", "z")[: len(grid)],
        frame_seconds=0.1,
        provenance={"solver": "test"},
    )
    first = 0
    for number, size in enumerate(sizes):
        path = folder / "data" / "train" / f"{number}.hdf5"
        with ShardWriter(path, info, count=size, frames=data.shape[1], dtype=dtype) as shard:  # type: ignore[arg-type]
            for t in range(data.shape[1]):
                shard.write(t, data[first : first + size, t])
        first += size
    with ShardWriter(folder / "data" / "valid" / "0.hdf5", info, count=1, frames=data.shape[1]) as shard:
        for t in range(data.shape[1]):
            shard.write(t, 1e3 + data[:1, t])  # must not enter the statistics
    return TrajectoryStore(folder)


def known(grid: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(3)
    walk = np.cumsum(rng.standard_normal((5, 9, 3, *grid)), axis=1)
    scale = np.array([1.0, 0.01, 30.0]).reshape(3, *(1,) * len(grid))
    shift = np.array([0.0, 1000.0, -5.0]).reshape(3, *(1,) * len(grid))
    return (walk * scale + shift).astype(np.float32)


def test_threads_share_a_store_that_keeps_one_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ergoflow.data.statistics.BLOCK_BYTES", 1)
    monkeypatch.setattr("ergoflow.data.store.MAX_OPEN_FILES", 1)
    data = np.concatenate([known((7,))] * 20)
    store = make_store(tmp_path, data, (5,) * 20)
    expected = (data[:, 4:].astype(np.float64) - data[:, :-4]).std((0, 1, 3))
    np.testing.assert_allclose(compute_increment_std(store, 4), expected, rtol=1e-10)


@pytest.mark.parametrize("grid", [(7,), (6, 5), (4, 3, 5)])
@pytest.mark.parametrize("block_frames", [1, 4, 1000])
def test_streamed_statistics_equal_two_passes_over_the_whole_array(
    tmp_path: Path, grid: tuple[int, ...], block_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ergoflow.data.statistics.BLOCK_BYTES", block_frames * 8 * 3 * int(np.prod(grid)))
    data = known(grid)
    store = make_store(tmp_path, data, (2, 3))
    stats = compute_statistics(store, strides=(1, 4))
    x = data.astype(np.float64)
    axes = (0, 1, *range(3, x.ndim))
    delta, delta4 = np.diff(x, axis=1), x[:, 4:] - x[:, :-4]
    expected = {
        "mean": x.mean(axes),
        "std": x.std(axes),
        "rms": np.sqrt((x**2).mean(axes)),
        "mean_delta": delta.mean(axes),
        "std_delta": delta.std(axes),
        "rms_delta": np.sqrt((delta**2).mean(axes)),
        "std_delta@4": delta4.std(axes),
    }
    assert set(stats) == set(expected)
    for key, values in expected.items():
        assert list(stats[key]) == list(FIELDS)
        np.testing.assert_allclose(list(stats[key].values()), values, rtol=1e-10, err_msg=key)
    np.testing.assert_allclose(compute_increment_std(store, 4), expected["std_delta@4"], rtol=1e-10)
    np.testing.assert_allclose(compute_increment_std(store, 8), (x[:, 8:] - x[:, :-8]).std(axes), rtol=1e-10)


def test_a_large_mean_costs_no_digits(tmp_path: Path) -> None:
    # Naive mean(x^2) - mean(x)^2 in float32 gives zero or nonsense here.
    data = known((6, 5))
    data[:, :, 0] += 1e6
    stats = compute_statistics(make_store(tmp_path, data, (5,)))
    np.testing.assert_allclose(stats["std"]["a"], data[:, :, 0].astype(np.float64).std(), rtol=1e-9)


def test_statistics_file_is_the_wells_and_reads_back_exactly(tmp_path: Path) -> None:
    store = make_store(tmp_path, known((6, 5)), (5,))
    stats = compute_statistics(store)
    write_statistics(tmp_path, stats)
    content = yaml.safe_load((tmp_path / "stats.yaml").read_text())
    assert set(content) == set(STATISTICS_KEYS)
    assert all(isinstance(value, float) for fields in content.values() for value in fields.values())
    assert store.statistics == stats == content


def test_bad_statistics_are_not_written(tmp_path: Path) -> None:
    good = {key: {"a": 1.0} for key in STATISTICS_KEYS}
    with pytest.raises(ValueError, match="finite, got std of a = nan"):
        write_statistics(tmp_path, good | {"std": {"a": float("nan")}})
    with pytest.raises(ValueError, match="rms_delta"):
        write_statistics(tmp_path, {key: value for key, value in good.items() if key != "rms_delta"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="stride < 9 frames, got stride 9"):
        compute_increment_std(make_store(tmp_path, known((7,)), (5,)), 9)


def test_normaliser_of_a_stride_missing_in_the_file_is_computed(tmp_path: Path) -> None:
    store = make_store(tmp_path, known((6, 5)), (5,))
    write_statistics(tmp_path, compute_statistics(store))
    computed = Normalizer.from_store(store, stride=3)
    write_statistics(tmp_path, compute_statistics(store, strides=(3,)))
    stored = Normalizer.from_store(store, stride=3)
    assert computed.std_delta.tolist() == stored.std_delta.tolist()
    assert computed.std_delta.tolist() != Normalizer.from_store(store).std_delta.tolist()


def test_increments_of_a_stride_are_added_once_and_nothing_else_changes(tmp_path: Path) -> None:
    store = make_store(tmp_path, known((6, 5)), (5,))
    before = compute_statistics(store)
    # A file of somebody else's need not hold all that ours do.
    del before["rms_delta"]
    (tmp_path / "stats.yaml").write_text(yaml.safe_dump(before))
    expected = Normalizer.from_store(store, stride=3)
    add_increment_std(store, 3)
    added = store.statistics
    assert added.pop("std_delta@3") == compute_statistics(store, strides=(3,))["std_delta@3"]
    assert added == before
    assert Normalizer.from_store(store, stride=3).std_delta.tolist() == expected.std_delta.tolist()
    made = (tmp_path / "stats.yaml").stat().st_mtime_ns
    add_increment_std(store, 3)
    assert (tmp_path / "stats.yaml").stat().st_mtime_ns == made

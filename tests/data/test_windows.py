from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from ergoflow.data.store import DatasetInfo, ShardWriter, TrajectoryStore
from ergoflow.data.windows import ResidentWindows, StreamedWindows, WindowSampler

J, T, GRID = 5, 11, (6, 5)


def sampler(**change: object) -> WindowSampler:
    return WindowSampler(J, T, **({"window": 3, "stride": 2, "batch_size": 4, "seed": 7} | change))  # type: ignore[arg-type]


def trajectories() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((J, T, 3, *GRID)).astype(np.float32)


def make_store(folder: Path, dtype: str = "float32") -> TrajectoryStore:
    info = DatasetInfo(
        name="small",
        fields=("a", "b", "c"),
        grid=GRID,
        length=(1.0, 2.0),
        boundaries=("PERIODIC", "PERIODIC"),
        axes=("x", "y"),
        frame_seconds=0.1,
        provenance={"solver": "test"},
    )
    data = trajectories()
    for name, rows in (("0", slice(0, 2)), ("1", slice(2, 5))):
        part = data[rows]
        path = folder / "data" / "train" / f"{name}.hdf5"
        with ShardWriter(path, info, count=len(part), frames=T, dtype=dtype) as shard:  # type: ignore[arg-type]
            for t in range(T):
                shard.write(t, part[:, t])
    return TrajectoryStore(folder)


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b)


def test_an_epoch_holds_every_window_once() -> None:
    order = sampler(batch_size=5)
    starts = T - 2 * 2
    assert order.num_windows == J * starts == 35
    assert order.batches_per_epoch == 7
    seen = torch.cat(list(order.batches(0)))
    assert seen.dtype == torch.int64
    assert sorted(map(tuple, seen.tolist())) == list(itertools.product(range(J), range(starts)))


def test_the_last_incomplete_batch_is_dropped() -> None:
    assert [len(batch) for batch in sampler().batches(0)] == [4] * 8
    dropped = torch.cat(list(sampler().batches(0)))
    assert len({tuple(row) for row in dropped.tolist()}) == 32


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(epoch: int, seed: int = 7) -> list[list[int]]:
        return torch.cat(list(sampler(seed=seed).batches(epoch))).tolist()

    torch.manual_seed(0)
    first = order(3)
    torch.manual_seed(1)
    assert order(3) == first
    assert order(4) != first
    assert order(3, seed=8) != first
    assert order(8, seed=3) != order(3, seed=8)  # seed and epoch are not simply added


@pytest.mark.parametrize("start", [0, 3, 8])
def test_resuming_gives_the_rest_of_the_epoch(start: int) -> None:
    whole = [batch.tolist() for batch in sampler().batches(2)]
    assert [batch.tolist() for batch in sampler().batches(2, start)] == whole[start:]


def test_resident_windows_are_the_frames_they_name() -> None:
    data = torch.from_numpy(trajectories())
    for index, batch in zip(sampler().batches(1), ResidentWindows(data, sampler()).epoch(1), strict=True):
        assert batch.shape == (4, 3, 3, *GRID)
        for (trajectory, first), window in zip(index.tolist(), batch, strict=True):
            assert torch.equal(window, data[trajectory, first : first + 5 : 2])


def test_half_precision_residents_give_single_precision_batches() -> None:
    data = torch.from_numpy(trajectories())
    half = list(ResidentWindows(data.half(), sampler()).epoch(0))
    assert_same(half, list(ResidentWindows(data.half().float(), sampler()).epoch(0)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_streamed_batches_equal_resident_ones_for_any_number_of_workers(
    tmp_path: Path, num_workers: int, dtype: str
) -> None:
    store = make_store(tmp_path, dtype)
    store.read("train", 0, 0, 1)  # an open file in the parent must not trouble the workers
    resident = ResidentWindows(store.load("train"), sampler())
    streamed = StreamedWindows(store, "train", sampler(), num_workers, "cpu")
    for epoch in (0, 1):
        assert_same(list(streamed.epoch(epoch)), list(resident.epoch(epoch)))
    assert_same(list(streamed.epoch(1, 5)), list(resident.epoch(1))[5:])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_epoch_left_in_the_middle_does_not_leak_into_the_next(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    streamed = StreamedWindows(store, "train", sampler(), num_workers=2)
    left = streamed.epoch(0)
    next(left)
    left.close()
    assert_same(list(streamed.epoch(1)), list(ResidentWindows(store.load("train"), sampler()).epoch(1)))


@pytest.mark.slow
def test_spawned_workers_read_the_same_windows(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    streamed = StreamedWindows(store, "train", sampler(), num_workers=2, start_method="spawn")
    assert_same(list(streamed.epoch(0)), list(ResidentWindows(store.load("train"), sampler()).epoch(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_copied_ahead_to_the_gpu_equal_those_on_the_host(tmp_path: Path, num_workers: int) -> None:
    store = make_store(tmp_path, "float16")
    expected = list(ResidentWindows(store.load("train"), sampler()).epoch(0))
    resident = ResidentWindows(store.load("train", device="cuda", dtype=torch.float16), sampler())
    streamed = StreamedWindows(store, "train", sampler(), num_workers, "cuda")
    assert_same([batch.cpu() for batch in resident.epoch(0)], expected)
    copied = []
    for batch in streamed.epoch(0):
        copied.append(batch.clone())
        batch.fill_(float("nan"))  # a batch belongs to its user
    assert_same([batch.cpu() for batch in copied], expected)


def test_settings_that_leave_nothing_to_train_on_raise() -> None:
    for change, message in (
        ({"window": 7}, r"7 frames 2 apart need 13 frames, got 11"),
        ({"batch_size": 36}, "a batch needs 36 windows, got 35"),
        ({"stride": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler(**change)
    with pytest.raises(ValueError, match=r"0\.\.8, got 9"):
        next(sampler().batches(0, 9))
    data = torch.from_numpy(trajectories())
    with pytest.raises(ValueError, match="contiguous"):
        ResidentWindows(data[:, ::2], sampler())
    for other in (data[:4].clone(), data[:, :10].clone()):
        with pytest.raises(ValueError, match="windows must lie in"):
            list(ResidentWindows(other, sampler()).epoch(0))

"""Frames on their way to disk: nothing is lost, nothing half is left, and a failure on either side is heard."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import pytest
import torch
from rich.console import Console
from torch import Tensor

import ergoflow.pipeline.simulate_kolmogorov as module
from ergoflow.config import KolmogorovDatasetConfig
from ergoflow.data.store import TrajectoryStore, compute_statistics
from ergoflow.numerics.trajectory import SimulationDiverged
from ergoflow.pipeline.shards import FrameQueue, Shard, batches, list_shards
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.workspace import Workspace
from ergoflow.solvers.kolmogorov import KolmogorovConfig

CPU = torch.device("cpu")
SMALL = KolmogorovDatasetConfig(
    name="small",
    flow=KolmogorovConfig(grid=(16, 20), viscosity=0.02, dt=0.05),
    spin_up_seconds=0.4,
    frame_seconds=0.2,
    frames=6,
    train=5,
    valid=1,
    test=2,
    shard_size=3,
)


def make(root: Path, dataset: KolmogorovDatasetConfig = SMALL) -> Path:
    return simulate(dataset, Workspace(root), device=CPU, console=Console(quiet=True))


def fill(shards: list[int]) -> list[Shard]:
    return [Shard("train", 0, count, Path(f"{number}")) for number, count in enumerate(shards)]


def counts(shards: list[int], size: int) -> list[list[int]]:
    return [[shard.count for shard in batch] for batch in batches(fill(shards), size)]


def checksum_of(path: Path) -> str:
    with h5py.File(path) as file:
        return str(file.attrs["sha256"])


def test_neighbouring_shards_share_a_batch_while_they_fit() -> None:
    assert counts([50, 50, 50, 40, 30], 50) == [[50], [50], [50], [40], [30]]
    assert counts([20, 4, 8], 36) == [[20, 4, 8]]
    assert counts([3, 2, 1, 2], 3) == [[3], [2, 1], [2]]
    assert counts([9, 1], 3) == [[9], [1]]
    assert counts([], 3) == []


@pytest.mark.gpu
def test_frames_reach_the_host_while_another_thread_records() -> None:
    """More frames than torch has streams of one priority: one of them would be the recording's."""
    device = torch.device("cuda")
    queue, numbers = FrameQueue(64), range(64)
    for number in numbers:
        queue.put(torch.full((2, 3), float(number), device=device))
    source, graph = torch.zeros(5, device=device), torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        target = source + 1
        taken = pool.submit(lambda: [queue.take() for _ in numbers]).result(timeout=60)
    graph.replay()
    assert [int(frame[0, 0]) for frame in taken] == list(numbers)
    assert target.tolist() == [1.0] * 5


def test_queue_keeps_the_order_and_holds_no_more_than_its_capacity() -> None:
    queue, put, taken = FrameQueue(2), [], []

    def produce() -> None:
        for number in range(20):
            queue.put(torch.tensor(float(number)))
            put.append(number)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(produce)
        for _ in range(20):
            time.sleep(0.001)
            assert len(put) - len(taken) <= 3
            taken.append(int(queue.take()))
        done.result(timeout=60)
    assert taken == list(range(20))


@pytest.mark.parametrize("waiting_side", ["put", "take"])
def test_a_failure_wakes_the_side_that_waits(waiting_side: str) -> None:
    queue = FrameQueue(1)
    if waiting_side == "put":
        queue.put(torch.zeros(1))
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            queue.take() if waiting_side == "take" else queue.put(torch.zeros(1))
        except ZeroDivisionError as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    first = ZeroDivisionError()
    queue.fail(first)
    queue.fail(KeyError())
    thread.join(timeout=60)
    assert heard == [first]


def test_frames_on_disk_are_the_rollout_of_each_trajectory(tmp_path: Path) -> None:
    folder = make(tmp_path)
    store = TrajectoryStore(folder)
    step = module.make_step(SMALL.flow, substeps=SMALL.substeps)
    for split in ("train", "valid", "test"):
        seeds = [module.trajectory_seed(SMALL, split, number) for number in range(SMALL.count(split))]
        state = module.initial_vorticity(SMALL.flow, len(seeds), seed=seeds)
        for _ in range(SMALL.spin_up_frames):
            state = step(state)
        stored = store.load(split)
        for t in range(SMALL.frames):
            torch.testing.assert_close(stored[:, t], state, rtol=1e-3, atol=1e-4)
            state = step(state)
        assert not torch.allclose(stored[:, 0], stored[:, 1], rtol=1e-2)


def test_a_lost_shard_comes_back_bit_by_bit_and_its_companions_stay(tmp_path: Path) -> None:
    folder = make(tmp_path)
    # The second train shard and the valid shard were simulated together.
    assert [len(batch) for batch in batches(list_shards(SMALL, folder), 3)] == [1, 2, 1]
    before = TrajectoryStore(folder).load("train")
    lost, kept = folder / "data/train/small_0003.hdf5", folder / "data/valid/small_0000.hdf5"
    checksum, stamp = checksum_of(lost), kept.stat().st_mtime_ns
    lost.unlink()
    make(tmp_path)
    assert torch.equal(TrajectoryStore(folder).load("train"), before)
    assert checksum_of(lost) == checksum
    assert kept.stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    "changes", [{}, {"storage": "float16"}, {"subsample": 2}, {"shard_size": 30}, {"shard_size": 1}], ids=str
)
def test_statistics_gathered_on_the_way_are_those_of_the_files(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = make(tmp_path, dataclasses.replace(SMALL, **changes))  # type: ignore[arg-type]
    store = TrajectoryStore(folder)
    assert store.statistics.keys() == compute_statistics(store).keys()
    for key, expected in compute_statistics(store).items():
        assert store.statistics[key] == pytest.approx(expected, rel=1e-12, abs=1e-12), key


def test_statistics_are_read_off_the_files_where_only_some_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path)
    before = TrajectoryStore(folder).statistics
    (folder / "data/train/small_0003.hdf5").unlink()
    monkeypatch.setattr(module.TrainMoments, "statistics", lambda self: pytest.fail("not all of them came by"))
    make(tmp_path)
    for key, expected in before.items():
        assert TrajectoryStore(folder).statistics[key] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "data").rglob("*") if path.is_file() and path.suffix != ".json")


def test_a_flow_that_diverges_in_its_last_step_leaves_nothing_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = module.make_step

    def broken(*args: object, **options: object) -> object:
        step = real(*args, **options)  # type: ignore[arg-type]

        def until_the_end(state: Tensor) -> Tensor:
            calls.append(len(state))
            last_call_of_second_batch = len(calls) == 2 * (SMALL.spin_up_frames + SMALL.frames - 1)
            return step(state) * (float("nan") if last_call_of_second_batch else 1.0)

        return until_the_end

    monkeypatch.setattr(module, "make_step", broken)
    # As on a GPU, where only every tenth state is looked at: the last one still is.
    monkeypatch.setattr(module, "checked", lambda step, **_: step)
    with pytest.raises(SimulationDiverged, match="step 7 "):
        make(tmp_path)
    assert left(tmp_path) == ["small_0000.hdf5"]
    monkeypatch.undo()
    folder = make(tmp_path)
    assert TrajectoryStore(folder).count("train") == 5


def test_a_disk_that_fills_up_stops_the_simulation_and_leaves_whole_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ergoflow.data.shard_writer as writer

    real, calls = writer._write_at, []

    def full(descriptor: int, content: memoryview, offset: int) -> None:
        calls.append(offset)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        real(descriptor, content, offset)

    monkeypatch.setattr(writer, "_write_at", full)
    monkeypatch.setattr(module, "WAITING_BYTES", 1)
    with pytest.raises(OSError, match="cannot write frame"):
        make(tmp_path)
    assert [name for name in left(tmp_path) if not name.endswith(".hdf5")] == []
    monkeypatch.undo()
    folder = make(tmp_path)
    assert [TrajectoryStore(folder).count(split) for split in ("train", "valid", "test")] == [5, 1, 2]


def test_half_precision_storage_still_refuses_numbers_it_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.make_step
    monkeypatch.setattr(module, "make_step", lambda *a, **k: lambda state: real(*a, **k)(state) * 0 + 1e5)
    with pytest.raises(ValueError, match="65504"):
        make(tmp_path, dataclasses.replace(SMALL, storage="float16"))
    assert left(tmp_path) == []

"""Films of truth beside prediction."""

from __future__ import annotations

import gc
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest

from ergoflow.data.store import DatasetInfo, ShardWriter, TrajectoryStore
from ergoflow.pipeline.video import check_video, write_video

GRID = (12, 16)


def write_store(
    folder: Path, values: np.ndarray, steps: list[int], axes: tuple[str, str] = ("x", "y")
) -> TrajectoryStore:
    """A store whose frame t is values[t], a constant or a field."""
    info = DatasetInfo(
        name="flow",
        fields=("vorticity",),
        grid=GRID,
        length=(1.0, 1.0),
        boundaries=("PERIODIC", "PERIODIC"),
        axes=axes,
        frame_seconds=0.1,
    )
    path = folder / "data" / "test" / "flow.hdf5"
    path.parent.mkdir(parents=True)
    with ShardWriter(path, info, count=1, frames=len(values), steps=steps) as shard:
        for t, value in enumerate(values):
            shard.write(t, np.broadcast_to(np.float32(value), (1, 1, *GRID)))
    return TrajectoryStore(folder)


# imageio leaves the pipes of its film reader and writer to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("ending", ["gif", "mp4"])
def test_film_shows_truth_prediction_and_error_of_consecutive_steps(tmp_path: Path, ending: str) -> None:
    truth = write_store(tmp_path / "truth", np.array([1.0, -1.0, 1.0, -1.0, 1.0]), list(range(5)))
    write_store(tmp_path / "model", np.array([1.0, -1.0, 1.0, 5.0]), [0, 1, 2, 10])
    film = tmp_path / f"film.{ending}"
    write_video(film, truth, tmp_path / "model", stride=1)
    frames = iio.imread(film).astype(int)
    gc.collect()
    assert len(frames) == 3
    panel = frames.shape[2] // 3
    rows = frames.shape[1] // 2
    colours = frames[:, rows, [panel // 2, panel + panel // 2, 2 * panel + panel // 2]]  # (time, panel, rgb)
    assert np.abs(colours[:, 0] - colours[:, 1]).max() < 25
    red, blue = colours[0, 0], colours[1, 0]
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert np.ptp(colours[:, 2]) < 40


def test_walls_of_a_channel_are_below_and_above(tmp_path: Path) -> None:
    planes = np.broadcast_to(np.linspace(1, 20, GRID[0])[:, None], (2, *GRID))  # u grows from the lower wall
    truth = write_store(tmp_path / "truth", planes, [0, 1], ("y", "z"))
    write_store(tmp_path / "model", planes, [0, 1], ("y", "z"))
    film = tmp_path / "film.gif"
    write_video(film, truth, tmp_path / "model", stride=1)
    frame = iio.imread(film)[0].astype(int)
    height, panel = frame.shape[0], frame.shape[1] // 3
    assert panel > height
    above, below = (frame[row, panel // 2] for row in (height // 20, height - height // 20))
    assert above.sum() > below.sum() + 200  # one sign: dark is slow, bright is fast


def test_what_cannot_be_filmed_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"must end in \.mp4 or \.gif"):
        check_video(Path("film.avi"), ("x", "y"))
    with pytest.raises(ValueError, match="--video shows planes, got states along x; drop it"):
        check_video(Path("film.gif"), ("x",))

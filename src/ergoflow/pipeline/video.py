"""A film of truth beside prediction, from the frames a roll-out kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ergoflow.data.store import TrajectoryStore
from ergoflow.pipeline.shortterm import consecutive_steps
from ergoflow.report.canvas import color_map
from ergoflow.report.maps import scale_of, upright

FRAMES_PER_SECOND = 15
# Height of the film in pixels; fields are enlarged by whole numbers to reach about this.
TARGET_HEIGHT = 384
FORMATS = (".mp4", ".gif")


def write_video(path: Path, store: TrajectoryStore, rollout_folder: Path, *, stride: int) -> None:
    """Write truth, prediction and error side by side, for all consecutive kept steps.

    Of the first channel of the first trajectory, in the colours and the orientation of the page.
    """
    check_video(path, store.info.axes)
    prediction = TrajectoryStore(rollout_folder)
    last = consecutive_steps(prediction, -(-store.num_frames("test") // stride))
    model = prediction.read("test", 0, 0, last + 1)[:, 0]  # (T, X, Y)
    truth = store.read("test", 0, 0, last * stride + 1, stride)[:, 0]
    name, low, high = scale_of(truth)
    span = (high - low) / 2
    errors = _paint(upright(model - truth, store.info.axes), "balance", -span, span)
    panels = [_paint(upright(fields, store.info.axes), name, low, high) for fields in (truth, model)] + [errors]
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, np.concatenate(panels, axis=2))


def check_video(path: Path, axes: Sequence[str]) -> None:
    """Refuse a name whose ending is not a film's, and states that are no planes, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--video must end in .mp4 or .gif, got {path.name!r}; rename it")
    if len(axes) != 2:
        raise ValueError(f"--video shows planes, got states along {', '.join(axes)}; drop it")


def _write(path: Path, frames: np.ndarray) -> None:
    import imageio.v3 as iio

    if path.suffix.lower() == ".mp4":
        iio.imwrite(path, frames, fps=FRAMES_PER_SECOND, codec="libx264", macro_block_size=2)
    else:
        iio.imwrite(path, frames, duration=1000 / FRAMES_PER_SECOND, loop=0)


def _paint(values: np.ndarray, name: str, low: float, high: float) -> np.ndarray:
    """Colours (T, rows, columns, 3) with a white margin, the lowest row last; non-finite points are grey."""
    finite = np.isfinite(values)
    unit = np.clip((np.where(finite, values, low) - low) / (high - low), 0, 1)
    colours = (color_map(name)(unit)[..., :3] * 255).astype(np.uint8)
    colours[~finite] = 128
    colours = colours[:, ::-1]
    factor = max(1, TARGET_HEIGHT // colours.shape[1])
    colours = colours.repeat(factor, axis=1).repeat(factor, axis=2)
    margin = 4
    return np.pad(colours, ((0, 0), (margin, margin), (margin, margin), (0, 0)), constant_values=255)

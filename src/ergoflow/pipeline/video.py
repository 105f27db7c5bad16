"""A film of truth beside prediction, from the frames a roll-out kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ergoflow.data.store import TrajectoryStore
from ergoflow.pipeline.shortterm import consecutive_steps
from ergoflow.report.canvas import color_map

FRAMES_PER_SECOND = 15
# Height of the film in pixels; fields are enlarged by whole numbers to reach about this.
TARGET_HEIGHT = 384
FORMATS = (".mp4", ".gif")


def write_video(path: Path, store: TrajectoryStore, rollout_folder: Path, *, stride: int) -> None:
    """Write truth, prediction and error side by side, for all consecutive kept steps.

    Of the first channel of the first trajectory.
    """
    check_video(path, store.info.axes)
    prediction = TrajectoryStore(rollout_folder)
    last = consecutive_steps(prediction, -(-store.num_frames("test") // stride))
    model = prediction.read("test", 0, 0, last + 1)[:, 0]  # (T, X, Y)
    truth = store.read("test", 0, 0, last * stride + 1, stride)[:, 0]
    limit = float(np.abs(truth).max())
    panels = [_paint(values, limit) for values in (truth, model, model - truth)]
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


def _paint(values: np.ndarray, limit: float) -> np.ndarray:
    """Colours (T, Y, X, 3), x to the right and y upwards, with a white margin; non-finite points are grey."""
    shown = np.nan_to_num(values, nan=0.0, posinf=limit, neginf=-limit)
    unit = np.clip(shown / (2 * limit) + 0.5, 0, 1)
    colours = (color_map("balance")(unit)[..., :3] * 255).astype(np.uint8)
    colours[~np.isfinite(values)] = 128
    colours = colours.transpose(0, 2, 1, 3)[:, ::-1]
    factor = max(1, TARGET_HEIGHT // colours.shape[1])
    colours = colours.repeat(factor, axis=1).repeat(factor, axis=2)
    margin = 4
    return np.pad(colours, ((0, 0), (margin, margin), (margin, margin), (0, 0)), constant_values=255)

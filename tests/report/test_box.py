"""The picture of the channel."""

from __future__ import annotations

import numpy as np

from ergoflow.report.box import draw_box


def test_box_has_three_faces_painted_on_one_scale() -> None:
    rng = np.random.default_rng(0)
    front, side, floor = rng.random((8, 20)), rng.random((8, 6)), 1 + rng.random((20, 6))
    figure = draw_box(front, side, floor)
    faces = figure.axes[0].collections
    assert [len(face.get_facecolor()) for face in faces] == [floor.size, side.size, front.size]
    brightness = [face.get_facecolor()[:, :3].mean() for face in faces]
    assert brightness[0] > max(brightness[1:])

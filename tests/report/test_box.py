"""The picture of the channel."""

from __future__ import annotations

import numpy as np

from ergoflow.report.box import draw_box


def test_box_has_three_faces_painted_on_one_scale_that_meet_and_fill_the_figure() -> None:
    rng = np.random.default_rng(0)
    front, side, floor = rng.random((8, 20)), rng.random((8, 6)), 1 + rng.random((20, 6))
    figure = draw_box(front, side, floor)
    faces = figure.axes[0].collections[:3]
    assert [face.get_array().size for face in faces] == [floor.size, front.size, side.size]
    assert len({face.get_clim() for face in faces}) == 1
    corners = [face.get_coordinates() for face in faces]
    np.testing.assert_allclose(corners[0][:, -1], corners[1][0])  # floor and back
    np.testing.assert_allclose(corners[0][-1], corners[2][0])  # floor and end
    np.testing.assert_allclose(corners[1][:, -1], corners[2][:, -1])  # back and end
    places = np.concatenate([corner.reshape(-1, 2) for corner in corners])
    size = figure.get_size_inches()
    assert (places >= 0).all()
    assert (places <= size).all()
    assert (np.ptp(places, axis=0) > 0.8 * size).all()


def test_lengths_are_told_in_half_heights() -> None:
    figure = draw_box(np.ones((8, 20)), np.zeros((8, 6)), np.ones((20, 6)))
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"x, 5 δ; stream →", "y, 2 δ", "z, 1.5 δ"} <= words

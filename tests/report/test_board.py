"""Panels on one pair of axes: where they stand, and what their scales say."""

from __future__ import annotations

import numpy as np
import pytest

from ergoflow.report.board import SCALE_POINT, Board, draw_field, draw_scale, label_row, new_board
from ergoflow.report.canvas import TICK_SIZE
from ergoflow.report.saving import to_png

RNG = np.random.default_rng(2)


def full_board() -> Board:
    """Two rows of three wide panels with titles, labels and scales on every place."""
    board = new_board(2, 3, width=1.5, shape=(5, 9), labelled=True, titled_rows=True, scales=(0, 2, 2))
    for row in range(2):
        for column in range(3):
            image = draw_field(board, row, column, RNG.random((5, 9)), "amp", -2.0, 3.0, title="title")
        label_row(board, row, "some words")
    for place in range(3):
        draw_scale(board, image, place, rows=(0, 1), label="quantity (unit)", extend="both")
    return board


def test_words_and_panels_lie_on_the_figure_and_not_on_one_another() -> None:
    board = full_board()
    to_png(board.figure, dpi=72)
    axes = board.axes
    boxes = [artist.get_window_extent() for artist in (*axes.images, *axes.texts)]
    for n, box in enumerate(boxes):
        assert board.figure.bbox.x0 <= box.x0 < box.x1 <= board.figure.bbox.x1
        assert board.figure.bbox.y0 <= box.y0 < box.y1 <= board.figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:n])


@pytest.mark.parametrize(("low", "high", "logarithmic"), [(-2.0, 3.0, False), (1e-3, 20.0, True)])
def test_a_tick_stands_at_the_colour_of_its_value(low: float, high: float, logarithmic: bool) -> None:
    board = new_board(1, 1, width=2.0, shape=(4, 4), scales=(0,))
    field = np.full((4, 4), high)
    image = draw_field(board, 0, 0, field, "thermal", low, high, logarithmic=logarithmic)
    draw_scale(board, image, 0, rows=(0, 0), label="")
    scale = board.axes.images[1]
    bottom, top = scale.get_extent()[2:]
    ticks = [text for text in board.axes.texts if text.get_fontsize() == TICK_SIZE]
    assert len(ticks) >= 3
    for tick in ticks:
        value = float(tick.get_text().replace("−", "-").replace("10⁻³", "1e-3"))
        share = (tick.get_position()[1] - bottom) / (top - bottom)
        np.testing.assert_allclose(image.get_cmap()(image.norm(value)), scale.get_cmap()(share), atol=0.02)


def test_only_the_ends_that_hide_larger_values_are_pointed() -> None:
    board = new_board(1, 1, width=2.0, shape=(4, 4), scales=(0,))
    image = draw_field(board, 0, 0, np.ones((4, 4)), "thermal", 0.0, 1.0)
    draw_scale(board, image, 0, rows=(0, 0), extend="max")
    (point,) = board.axes.patches
    top = board.axes.images[1].get_extent()[3]
    assert point.get_path().vertices[:, 1].max() == pytest.approx(top + SCALE_POINT)
    assert point.get_facecolor() == pytest.approx(image.get_cmap()(1.0))

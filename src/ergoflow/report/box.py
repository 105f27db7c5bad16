"""The channel as a box: streamwise velocity on three of its faces, in oblique projection."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from ergoflow.report.board import draw_scale, new_board
from ergoflow.report.canvas import INK, LABEL_SIZE, color_map, shrink
from ergoflow.report.digits import in_digits

#: Points along the longest side of a face.
SIDE = 160
#: Where a depth of one goes on the paper: to the left and upwards, so that the eye looks into the box.
LEFT, UP = 0.4, 0.5
#: Inches.
WIDTH, WORDS = 8.0, 0.24


def draw_box(front: np.ndarray, side: np.ndarray, floor: np.ndarray) -> Figure:
    """u⁺ on the plane z = 0 (Y, X), the plane x = 0 (Y, Z) and one near the lower wall (X, Z), on one scale.

    The box is periodic in x and z: the first two stand at its back and at its end. It is two half heights δ high.
    """
    (rows, columns), deep = front.shape, side.shape[1]
    inch = WIDTH / (columns + LEFT * deep)
    length, height, left, up = (inch * size for size in (columns, rows, LEFT * deep, UP * deep))
    board = new_board(
        1, 1, width=WIDTH, shape=((height + up + WORDS) / WIDTH, 1), labelled=True, title_lines=0, scales=(0,)
    )
    origin = np.add(board.corner(0, 0), (left, WORDS))
    x, y, z = np.array((length, 0)), np.array((0, height)), np.array((-left, up))
    low, high = min(face.min() for face in (front, side, floor)), max(face.max() for face in (front, side, floor))
    for values, down, across, corner in ((floor, x, z, 0), (front, y, x, z), (side, y, z, x)):
        face = shrink(values, SIDE)
        i, j = (np.linspace(0, 1, count + 1)[:, None] for count in face.shape)
        places = origin + corner + i[:, None] * down + j[None] * across  # (rows + 1, columns + 1, 2)
        image = board.axes.pcolormesh(
            *np.moveaxis(places, -1, 0), face, cmap=color_map("thermal"), vmin=low, vmax=high, rasterized=True
        )
    for text, place, alignment in (
        (f"x, {in_digits(2 * columns / rows)} δ; stream →", x / 2 - (0, 0.06), {"ha": "center", "va": "top"}),
        (f"z, {in_digits(2 * deep / rows)} δ", z / 2 - (0.08, 0), {"ha": "right", "va": "top"}),
        ("y, 2 δ", z + y / 2 - (0.06, 0), {"ha": "right", "va": "center", "rotation": 90}),
    ):
        at = origin + place
        board.axes.text(at[0], at[1], text, fontsize=LABEL_SIZE, color=INK, **alignment)
    draw_scale(board, image, 0, rows=(0, 0), label="u⁺")
    return board.figure

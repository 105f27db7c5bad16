"""The channel as a box: streamwise velocity on three of its faces."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from ergoflow.report.canvas import color_map, new_figure, shrink

#: Points along the longest side of the picture.
SIDE = 160


def draw_box(front: np.ndarray, side: np.ndarray, floor: np.ndarray) -> Figure:
    """u⁺ on the front (Y, X), the inflow side (Y, Z) and a plane near the lower wall (X, Z), seen from above.

    One colour scale for all three; the stream runs along x.
    """
    (height, length), width = front.shape, side.shape[1]
    front, side, floor = (shrink(face, SIDE) for face in (front, side, floor))
    figure, ((axes,),) = new_figure(9.4, 3.6, subplot_kw={"projection": "3d"})
    low, high = min(f.min() for f in (front, side, floor)), max(f.max() for f in (front, side, floor))
    paint = color_map("thermal")

    def corners(first: float, second: float, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        grids = np.meshgrid(*(np.linspace(0, end, n + 1) for end, n in zip((first, second), shape, strict=True)))
        return grids[0].T, grids[1].T

    def face(x: np.ndarray, z: np.ndarray, y: np.ndarray, values: np.ndarray) -> None:
        colours = paint((values - low) / (high - low))
        axes.plot_surface(
            x, z, y, facecolors=colours, rstride=1, cstride=1, shade=False, linewidth=0, antialiased=False
        )

    x, z = corners(length, width, floor.shape)
    face(x, z, np.zeros_like(x), floor)
    y, z = corners(height, width, side.shape)
    face(np.full_like(y, length), z, y, side)
    y, x = corners(height, length, front.shape)
    face(x, np.full_like(y, width), y, front)
    axes.set_box_aspect((length, width, height), zoom=1.25)
    axes.view_init(elev=24, azim=-62)
    axes.set_axis_off()
    return figure

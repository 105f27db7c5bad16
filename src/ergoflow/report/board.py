"""Panels side by side: fields in rows and columns with their titles and colour scales, on one bare pair of axes.

One pair for all, measured in inches: matplotlib takes longer to make, place and draw the axes of a panel than the
field in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, MaxNLocator

from ergoflow.report.canvas import INK, LABEL_SIZE, TICK_SIZE, TITLE_SIZE, color_map, power_of_ten

#: Inches: around everything and between panels, a line of a title, a label beside a row.
EDGE, GAP, TITLE_LINE, ROW_LABEL = 0.05, 0.1, 0.18, 0.22
#: Inches of a colour scale: its width, its pointed ends, its ticks, and the room it takes with its words.
SCALE_WIDTH, SCALE_POINT, SCALE_TICK, SCALE_ROOM = 0.11, 0.11, 0.04, 0.8
SCALE_OVERLAP = 0.03
#: The part of its rows' height that a scale takes.
SCALE_SHARE = 0.86
NOT_FINITE_COLOR = "#8c8c8c"


@dataclass(frozen=True, kw_only=True)
class Board:
    """A grid of panels; row 0 is the upper one. `scales` names the columns with a colour scale on their right."""

    axes: Axes
    rows: int
    width: float
    height: float
    above: float
    left: float
    scales: tuple[int, ...]

    @property
    def figure(self) -> Figure:
        """The drawing the board fills."""
        figure = self.axes.get_figure()
        assert isinstance(figure, Figure)
        return figure

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """The lower left corner of a panel in inches from that of the figure."""
        x = self.left + column * (self.width + GAP) + SCALE_ROOM * sum(scale < column for scale in self.scales)
        return x, EDGE + (self.rows - 1 - row) * (self.height + GAP + self.above)


def new_board(
    rows: int,
    columns: int,
    *,
    width: float,
    shape: tuple[int, ...],
    labelled: bool = False,
    title_lines: int = 1,
    titled_rows: bool = False,
    scales: Sequence[int] = (),
) -> Board:
    """Empty panels `width` inches wide for fields of `shape` (rows, columns of points) on a figure that they fill.

    Titles stand above the upper row, or above each; labels stand on the left of rows.
    """
    titles = TITLE_LINE * title_lines
    height = width * shape[0] / shape[1]
    left, above = EDGE + (ROW_LABEL if labelled else 0.0), titles if titled_rows else 0.0
    across = left + columns * (width + GAP) - GAP + SCALE_ROOM * len(scales) + EDGE
    upwards = 2 * EDGE + rows * (height + GAP + above) - GAP - above + titles
    figure = Figure(figsize=(across, upwards))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, across), ylim=(0, upwards))
    return Board(axes=axes, rows=rows, width=width, height=height, above=above, left=left, scales=tuple(scales))


def draw_field(
    board: Board,
    row: int,
    column: int,
    field: np.ndarray,
    name: str,
    low: float,
    high: float,
    *,
    title: str = "",
    logarithmic: bool = False,
) -> AxesImage:
    """One field in a colour map with its origin below; values that are not finite are grey."""
    colors = color_map(name).with_extremes(bad=NOT_FINITE_COLOR)
    norm = (LogNorm if logarithmic else Normalize)(low, high)
    x, y = board.corner(row, column)
    if title:
        write_title(board, row, column, title)
    return board.axes.imshow(
        # Matplotlib computes in the field's own precision, and half of it overflows.
        np.ma.masked_invalid(field.astype(np.promote_types(field.dtype, np.float32))),
        origin="lower",
        cmap=colors,
        norm=norm,
        interpolation="none",
        aspect="auto",
        extent=(x, x + board.width, y, y + board.height),
    )


def write_title(board: Board, row: int, column: int, text: str) -> None:
    """Words above a panel."""
    x, y = board.corner(row, column)
    place = (x + board.width / 2, y + board.height + 0.05)
    board.axes.text(*place, text, ha="center", va="bottom", fontsize=TITLE_SIZE, color=INK)


def label_row(board: Board, row: int, text: str) -> None:
    """What a row of panels shows, written upwards beside the first of them."""
    x, y = board.corner(row, 0)
    place = (x - 0.06, y + board.height / 2)
    board.axes.text(*place, text, ha="right", va="center", rotation=90, fontsize=LABEL_SIZE, color=INK)


def draw_scale(
    board: Board, image: ScalarMappable, place: int, *, rows: tuple[int, int], label: str = "", extend: str = "neither"
) -> None:
    """The colours of an image at one of the board's places for scales, beside the rows from first to last.

    A pointed end ("min", "max", "both") says that values beyond it have its colour.
    """
    column = board.scales[place]
    x = board.corner(0, column)[0] + board.width + 1.5 * GAP + SCALE_ROOM * board.scales[:place].count(column)
    first, last = (board.corner(row, column)[1] for row in rows)
    total = first + board.height - last
    bottom, top = last + total * (1 - SCALE_SHARE) / 2, last + total * (1 + SCALE_SHARE) / 2
    right, axes = x + SCALE_WIDTH, board.axes
    axes.imshow(
        np.linspace(0, 1, 256)[:, None],
        origin="lower",
        cmap=image.get_cmap(),
        aspect="auto",
        interpolation="none",
        extent=(x, right, bottom, top),
    )
    for end, start, sign, value in (("min", bottom, -1, 0.0), ("max", top, 1, 1.0)):
        if extend in (end, "both"):
            # A point begins inside of the bar: the edge of an image is soft, and a pale line would show.
            base = start - sign * SCALE_OVERLAP
            corners = (
                (x, x, x + SCALE_WIDTH / 2, right, right),
                (base, start, start + sign * SCALE_POINT, start, base),
            )
            axes.fill(*corners, color=image.get_cmap()(value), linewidth=0)
    ticks = _ticks(image)
    heights = bottom + (top - bottom) * np.asarray(image.norm(np.array(ticks)), dtype=float)
    axes.hlines(heights, right, right + SCALE_TICK, color=INK, linewidth=0.7)
    words = [power_of_ten(tick) if isinstance(image.norm, LogNorm) else f"{tick:g}" for tick in ticks]
    for height, word in zip(heights, words, strict=True):
        text = word.replace("-", "−")
        axes.text(right + 0.07, height, text, ha="left", va="center", fontsize=TICK_SIZE, color=INK)
    axes.text(
        right + 0.12 + 0.065 * max((len(word) for word in words), default=0),
        (bottom + top) / 2,
        label,
        ha="left",
        va="center",
        rotation=90,
        fontsize=LABEL_SIZE,
        color=INK,
    )


def _ticks(image: ScalarMappable) -> list[float]:
    """At most seven round values between the ends of a scale."""
    low, high = image.get_clim()
    assert low is not None
    assert high is not None
    logarithmic = isinstance(image.norm, LogNorm)
    locator = LogLocator(numticks=7) if logarithmic else MaxNLocator(nbins=6, steps=[1, 2, 5, 10])
    # A locator also gives the round values just outside.
    return [float(value) for value in locator.tick_values(low, high) if low <= value <= high]

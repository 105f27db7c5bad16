"""How every figure looks: inks, line styles, legends, ticks, colours of fields."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from ergoflow.report.names import short_names, shorten

#: Text, axes and the truth. An odd value, because the SVG writer finds it again by its name.
INK = "#1d2531"

#: Mid tones with a contrast of at least 3:1 on the light and on the dark page. Colours that look alike without red or
#: green cones (blue and purple, orange and olive, green and red, teal and magenta) share no dash among twenty.
PALETTE = ("#3a7fc1", "#cf6a26", "#2f9160", "#238f9a", "#c9495f", "#8a6bc4", "#7b8a1f", "#c0589a")
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1.2, 2)), (0, (3, 1.5)))
COLOURS_PER_DASH = 4
#: So many names have styles that anybody can tell apart.
MAX_STYLES = COLOURS_PER_DASH * len(DASHES)

REFERENCE_DASHES = {"persistence": (0, (4, 2)), "climatology": (0, (1, 1.5)), "zero": (0, (6, 2, 1, 2))}
#: Of a legend, in units of its font's size: the line before a name, and the gap between two columns.
LEGEND_LINE, LEGEND_GAP = 2.6, 1.4
#: A logarithmic axis whose ends have a smaller ratio than this labels 2 and 5 as well.
LABEL_MINOR_BELOW = 100.0

#: In points.
TITLE_SIZE, LABEL_SIZE, TICK_SIZE = 9.5, 9.0, 8.0

_STYLE: Any = {
    "font.size": LABEL_SIZE,
    "axes.titlesize": TITLE_SIZE,
    "axes.labelsize": LABEL_SIZE,
    "xtick.labelsize": TICK_SIZE,
    "ytick.labelsize": TICK_SIZE,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
}


@dataclass(frozen=True)
class LineStyle:
    """Name, colour, dash and width of one run, the same in every figure."""

    label: str
    color: str
    dash: Any
    width: float


Styles = Mapping[str, LineStyle]


def line_styles(names: Sequence[str], order: Sequence[str] = ()) -> Styles:
    """A distinct style per name, thinner where many share an axis.

    Legends leave out what all names begin with. `order` lists short names of several figures, so that one has the same
    colour and dash in all of them.
    """
    width = 1.7 if len(names) <= 4 else 1.2 if len(names) <= 10 else 0.9
    labels = short_names(names)
    places = {label: place for place, label in enumerate(dict.fromkeys([*order, *labels]))}
    return {
        name: LineStyle(
            label=shorten(label),
            color=PALETTE[places[label] % len(PALETTE)],
            dash=DASHES[places[label] // COLOURS_PER_DASH % len(DASHES)],
            width=width,
        )
        for name, label in zip(names, labels, strict=True)
    }


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **layout: Any
) -> tuple[Figure, np.ndarray]:
    """A styled figure of the given inches and its (rows, columns) array of axes.

    No global state is touched.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **layout)
    return figure, axes


def add_grid(axes: Axes) -> None:
    """Faint lines behind the data."""
    axes.grid(visible=True, color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)


def set_title(axes: Axes, text: str) -> None:
    """A panel's title in the page's ink and size."""
    axes.set_title(text, fontsize=TITLE_SIZE, color=INK)


def add_legend(figure: Figure, axes: Axes) -> None:
    """A legend under the axes in as many columns as fit; the figure grows by what the legend needs."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    size = 7.0 if len(labels) > 8 else 8.0
    # In units of the font's size: letters of 0.6, the line before them, the gaps around both.
    width = (0.6 * max(map(len, labels)) + LEGEND_LINE + LEGEND_GAP + 0.8) * size / 72
    columns = max(1, min(len(labels), int(figure.get_figwidth() / width)))
    lines = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + lines * size * 0.0235 + 0.08)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=size,
        labelcolor=INK,
        handlelength=LEGEND_LINE,
        columnspacing=LEGEND_GAP,
        labelspacing=0.3,
    )


def log_ticks(axes: Axes, which: str) -> None:
    """Decade ticks on a logarithmic axis, written with Unicode exponents so that SVG text stays plain.

    An axis of less than two decades also shows 2 and 5, or it might show no number at all.
    """
    axis = axes.yaxis if which == "y" else axes.xaxis

    def between_decades(value: float, _: int) -> str:
        low, high = axis.get_view_interval()
        return power_of_ten(value) if high < LABEL_MINOR_BELOW * low else ""

    axis.set_major_locator(LogLocator(base=10.0, numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axis.set_minor_locator(LogLocator(base=10.0, subs=(2.0, 5.0), numticks=7))
    axis.set_minor_formatter(FuncFormatter(between_decades))


def power_of_ten(value: float) -> str:
    """1000.0 -> "10³"; plain digits between 0.01 and 100."""
    if value <= 0:
        return ""
    if 0.0099 < value < 101:
        return f"{value:g}"
    exponent = round(np.log10(value))
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def color_map(name: str) -> Colormap:
    """A cmocean map: `balance` for signed fields, `thermal` or `amp` for magnitudes."""
    with warnings.catch_warnings():
        # cmocean 4.0 builds its maps with an argument that matplotlib 3.11 announced the end of.
        warnings.filterwarnings("ignore", message="Passing 'N' to ListedColormap")
        import cmocean
    maps: dict[str, Colormap] = cmocean.cm.cmap_d
    if name not in maps:
        raise ValueError(f"colour map must be one of cmocean's, got {name!r}; try balance, thermal or amp")
    return maps[name]


def shrink(field: np.ndarray, side: int) -> np.ndarray:
    """The last two axes averaged over equal blocks until neither is longer than `side`.

    The last block may be shorter than the others.
    """
    for axis in (-1, -2):
        length = field.shape[axis]
        block = -(-length // side)
        if block > 1:
            starts = np.arange(0, length, block)
            sizes = np.diff(np.append(starts, length))
            # inf - inf inside a block is NaN, which is drawn as "not finite" like its neighbours.
            with np.errstate(invalid="ignore"):
                sums = np.add.reduceat(field, starts, axis=axis)
            field = sums / (sizes if axis == -1 else sizes[:, None])
    return field

"""Figures that are images: kinetic energy, forecasts beside the truth, attention kernels.

Fields come with array axes (first, second). `upright` orients them for the page: x to the right and y
upwards, or, on a channel plane (y, z), the wall-normal axis upwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from ergoflow.report.canvas import add_colorbar, color_map, new_figure, set_title, shrink
from ergoflow.report.digits import in_digits

#: The colour scale ends at this quantile of the truth, so that one extreme does not wash out the rest.
SCALE_QUANTILE = 0.995
MAX_HEADS = 8


def upright(field: np.ndarray, axes: Sequence[str] = ("x", "y")) -> np.ndarray:
    """The last two axes ordered (row, column), rows pointing up when the origin is drawn below."""
    return field if axes[0] == "y" else np.swapaxes(field, -1, -2)


def scale_of(truth: np.ndarray) -> tuple[str, float, float]:
    """(colour map, lowest, highest): symmetric about zero for a signed field, plain for one of one sign."""
    low, high = np.quantile(truth, (1 - SCALE_QUANTILE, SCALE_QUANTILE))
    if low < 0 < high and min(-low, high) > 0.1 * max(-low, high):
        limit = float(max(-low, high))
        return "balance", -limit, limit
    return "thermal", float(low), float(high) if high > low else float(low) + 1.0


def draw_kinetic_energy(truth: np.ndarray, model: np.ndarray, *, side: int, axes: Sequence[str] = ("x", "y")) -> Figure:
    """Turbulent kinetic energy of truth and model (one scale), and the model's absolute error in per cent."""
    figure, panels = new_figure(9.4, 2.9, columns=3)
    truth, model = (shrink(upright(field, axes), side) for field in (truth, model))
    highest = float(truth.max()) or 1.0
    # Relative to the map's own mean where the truth is nearly zero (at a wall the percentage has no meaning).
    percent = 100 * np.abs(model - truth) / np.maximum(truth, 0.05 * truth.mean())
    for panel, field, title in zip(panels[0], (truth, model), ("truth", "model"), strict=False):
        image = draw_field(panel, field, "thermal", 0.0, highest, title=title)
    add_colorbar(figure, image, list(panels[0, :2]), label="TKE", extend="max")
    error = draw_field(panels[0, 2], percent, "amp", 0.0, 100.0, title=f"error, mean {percent_text(percent.mean())}")
    add_colorbar(figure, error, [panels[0, 2]], label="|error| (%)", extend="max")
    return figure


def draw_snapshots(
    steps: np.ndarray,
    truth: np.ndarray,
    model: np.ndarray,
    *,
    side: int,
    step_seconds: float,
    axes: Sequence[str] = ("x", "y"),
) -> Figure:
    """Truth, prediction and their difference (rows) at several lead times (columns); fields (S, X, Y)."""
    count = len(steps)
    figure, panels = new_figure(1.75 * count + 1.0, 5.3, rows=3, columns=count)
    name, low, high = scale_of(truth)
    truth, model = (shrink(upright(field, axes), side) for field in (truth, model))
    span = (high - low) / 2
    for column in range(count):
        title = f"step {int(steps[column])}\n{steps[column] * step_seconds:.3g} s"
        image = draw_field(panels[0, column], truth[column], name, low, high, title=title)
        draw_field(panels[1, column], model[column], name, low, high)
        error = draw_field(panels[2, column], model[column] - truth[column], "balance", -span, span)
    for row, text in enumerate(("truth", "prediction", "prediction − truth")):
        label_row(panels[row, 0], text)
    add_colorbar(figure, image, list(panels[:2].ravel()), extend="both")
    add_colorbar(figure, error, list(panels[2]), extend="both")
    return figure


def draw_attention(kernels: Mapping[str, np.ndarray], *, side: int) -> Figure:
    """Attention kernels (heads, S, S), a row per axis of the grid; each on its own symmetric scale."""
    columns = min(MAX_HEADS, max(len(kernel) for kernel in kernels.values()))
    figure, panels = new_figure(1.25 * columns + 0.6, 1.4 * len(kernels) + 0.3, rows=len(kernels), columns=columns)
    for row, (axis, kernel) in enumerate(kernels.items()):
        for head in range(columns):
            panel = panels[row, head]
            if head >= len(kernel):
                panel.set_axis_off()
                continue
            limit = float(np.abs(kernel[head]).max()) or 1.0
            draw_field(
                panel,
                shrink(kernel[head], side),
                "balance",
                -limit,
                limit,
                title=f"head {head + 1}" if row == 0 else "",
            )
        label_row(panels[row, 0], f"along {axis}")
    return figure


def draw_field(
    axes: Axes, field: np.ndarray, name: str, low: float, high: float, *, title: str = "", logarithmic: bool = False
) -> Any:
    """One field in a colour map; values that are not finite are grey."""
    colors = color_map(name).with_extremes(bad="#8c8c8c")
    norm = (LogNorm if logarithmic else Normalize)(low, high)
    image = axes.imshow(np.ma.masked_invalid(field), origin="lower", cmap=colors, norm=norm, interpolation="none")
    leave_blank(axes, title)
    return image


def leave_blank(axes: Axes, title: str = "") -> None:
    """A panel without axes and frame: what is hidden need not be measured to find the panel's place."""
    for hidden in (axes.xaxis, axes.yaxis, axes.patch, *axes.spines.values()):
        hidden.set_visible(False)
    set_title(axes, title)


def label_row(axes: Axes, text: str) -> None:
    """What a row of panels shows, written upwards beside the first of them."""
    axes.set(yticks=[], ylabel=text)
    axes.yaxis.set_visible(True)


def percent_text(percent: float) -> str:
    """A percentage in three digits."""
    return f"{in_digits(percent)} %" if np.isfinite(percent) else "failed"

"""Figures that are images: kinetic energy, forecasts beside the truth, attention kernels.

Fields come with array axes (first, second). `upright` orients them for the page: x to the right and y
upwards, or, on a channel plane (y, z), the wall-normal axis upwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ergoflow.report.board import draw_field, draw_scale, label_row, new_board
from ergoflow.report.canvas import shrink
from ergoflow.report.digits import in_digits
from ergoflow.report.units import with_unit

#: The colour scale ends at this quantile of the truth, so that one extreme does not wash out the rest.
SCALE_QUANTILE = 0.995
MAX_HEADS = 8
#: A map of percentages ends here.
PERCENT_LIMIT = 100.0
#: Where the truth is nearly zero (at a wall) percentages are taken of this share of the map's mean.
PERCENT_FLOOR = 0.05


def upright(field: np.ndarray, axes: Sequence[str] = ("x", "y")) -> np.ndarray:
    """The last two axes ordered (row, column), rows pointing up when the origin is drawn below."""
    return field if axes[0] == "y" else np.swapaxes(field, -1, -2)


def orientation(axes: Sequence[str]) -> str:
    """How `upright` lays the axes, in words."""
    up, right = axes if axes[0] == "y" else reversed(axes)
    return f"{right} to the right, {up} upwards"


def percent_error(model: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """|model − truth| in per cent of the truth (see `PERCENT_FLOOR`)."""
    return np.asarray(100 * np.abs(model - truth) / np.maximum(truth, PERCENT_FLOOR * truth.mean()))


def scale_of(truth: np.ndarray) -> tuple[str, float, float]:
    """(colour map, lowest, highest): symmetric about zero for a signed field, plain for one of one sign."""
    low, high = np.quantile(truth, (1 - SCALE_QUANTILE, SCALE_QUANTILE))
    if low < 0 < high and min(-low, high) > 0.1 * max(-low, high):
        limit = float(max(-low, high))
        return "balance", -limit, limit
    return "thermal", float(low), float(high) if high > low else float(low) + 1.0


def draw_kinetic_energy(
    truth: np.ndarray, model: np.ndarray, *, side: int, axes: Sequence[str] = ("x", "y"), unit: str = ""
) -> Figure:
    """Turbulent kinetic energy of truth and model (one scale), and the model's absolute error in per cent."""
    truth, model = (shrink(upright(field, axes), side) for field in (truth, model))
    highest = float(truth.max()) or 1.0
    percent, words = percent_error(model, truth), with_unit("TKE", unit)
    board = new_board(1, 3, width=2.5, shape=truth.shape, scales=(1, 2))
    for column, (field, title) in enumerate(((truth, "truth"), (model, "model"))):
        energy = draw_field(board, 0, column, field, "thermal", 0.0, highest, title=title)
    title = f"error, mean {percent_text(percent.mean())}"
    error = draw_field(board, 0, 2, percent, "amp", 0.0, PERCENT_LIMIT, title=title)
    draw_scale(board, energy, 0, rows=(0, 0), label=words, extend="max")
    draw_scale(board, error, 1, rows=(0, 0), label="|error| (%)", extend="max")
    return board.figure


def draw_snapshots(
    steps: np.ndarray,
    truth: np.ndarray,
    model: np.ndarray,
    *,
    side: int,
    step_seconds: float,
    axes: Sequence[str] = ("x", "y"),
    field: str = "",
    time_unit: str = "s",
) -> Figure:
    """Truth, prediction and their difference (rows) at several lead times (columns); fields (S, X, Y)."""
    name, low, high = scale_of(truth)
    truth, model = (shrink(upright(frames, axes), side) for frames in (truth, model))
    span, last = (high - low) / 2, len(steps) - 1
    board = new_board(3, len(steps), width=1.65, shape=truth.shape[1:], labelled=True, title_lines=2, scales=(last,))
    for column, step in enumerate(steps):
        title = f"step {int(step)}\n{in_digits(step * step_seconds)} {time_unit}"
        image = draw_field(board, 0, column, truth[column], name, low, high, title=title)
        draw_field(board, 1, column, model[column], name, low, high)
        error = draw_field(board, 2, column, model[column] - truth[column], "balance", -span, span)
    for row, text in enumerate(("truth", "prediction", "difference")):
        label_row(board, row, text)
    draw_scale(board, image, 0, rows=(0, 1), label=field, extend="both")
    draw_scale(board, error, 0, rows=(2, 2), label=field, extend="both")
    return board.figure


def draw_attention(kernels: Mapping[str, np.ndarray], *, side: int) -> Figure:
    """Attention kernels (heads, S, S), a row per axis of the grid; each on its own symmetric scale."""
    columns = min(MAX_HEADS, max(len(kernel) for kernel in kernels.values()))
    board = new_board(len(kernels), columns, width=1.15, shape=(1, 1), labelled=True)
    for row, (axis, kernel) in enumerate(kernels.items()):
        for head, weights in enumerate(kernel[:columns]):
            limit, title = largest(weights), f"head {head + 1}" if row == 0 else ""
            draw_field(board, row, head, shrink(weights, side), "balance", -limit, limit, title=title)
        label_row(board, row, f"along {axis}")
    return board.figure


def largest(weights: np.ndarray) -> float:
    """The largest finite absolute value (attention of a diverged state is not finite); 1 where there is none but 0."""
    return float(np.abs(weights[np.isfinite(weights)]).max(initial=0)) or 1.0


def percent_text(percent: float) -> str:
    """A percentage in three digits."""
    return f"{in_digits(percent)} %" if np.isfinite(percent) else "failed"

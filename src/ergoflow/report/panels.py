"""Figures with one panel per model, as in the paper: errors of forecasts and of kinetic energy, kernels by σ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ergoflow.report.board import draw_field, draw_scale, label_row, new_board, write_title
from ergoflow.report.canvas import INK, PALETTE, add_grid, new_figure, set_title, shrink
from ergoflow.report.maps import PERCENT_LIMIT, SCALE_QUANTILE, largest, percent_error, percent_text, upright
from ergoflow.report.names import shorten
from ergoflow.report.units import with_unit

#: Panels of a map stand in rows of at most this many.
PANELS_PER_ROW = 5
#: The smallest error that is told from none, as one part in this many of the truth's scale.
ERROR_SPAN = 1000.0


def draw_energy_errors(
    truth: np.ndarray, models: Mapping[str, np.ndarray | None], *, axes: Sequence[str], side: int, unit: str = ""
) -> Figure:
    """Kinetic energy of the truth, then |TKEp − TKEt|/TKEt of each model in per cent; None is a failed model."""
    field = shrink(upright(truth, axes), side)
    columns = min(PANELS_PER_ROW, 1 + len(models))
    rows, last = -(-(1 + len(models)) // columns), columns - 1
    board = new_board(rows, columns, width=1.75, shape=field.shape, titled_rows=True, scales=(last, last))
    energy = draw_field(board, 0, 0, field, "thermal", 0.0, float(field.max()) or 1.0, title="truth")
    for place, (name, model) in enumerate(models.items(), start=1):
        if model is None:
            percent, words = np.full_like(field, np.nan), f"{shorten(name)}: failed"
        else:
            percent = percent_error(shrink(upright(model, axes), side), field)
            words = f"{shorten(name)}, {percent_text(percent.mean())}"
        error = draw_field(board, *divmod(place, columns), percent, "amp", 0.0, PERCENT_LIMIT, title=words)
    draw_scale(board, energy, 0, rows=(0, rows - 1), label=with_unit("TKE of the truth", unit))
    if any(model is not None for model in models.values()):
        draw_scale(board, error, 1, rows=(0, rows - 1), label="|error| (%)", extend="max")
    return board.figure


def draw_forecast_errors(
    steps: np.ndarray,
    truth: np.ndarray,
    models: Mapping[str, np.ndarray],
    *,
    axes: Sequence[str],
    side: int,
    field: str = "field",
) -> Figure:
    """The truth and each model's |prediction − truth| (columns) at several lead times (rows); fields (S, X, Y).

    Errors are coloured by their logarithm: those of good and bad models stand side by side.
    """
    rows, last = len(steps), len(models)
    limit = float(np.quantile(np.abs(truth), SCALE_QUANTILE)) or 1.0
    floor = limit / ERROR_SPAN
    fields = shrink(upright(truth, axes), side)
    board = new_board(rows, 1 + last, width=1.2, shape=fields.shape[1:], labelled=True, scales=(last, last))
    for row, step in enumerate(steps):
        image = draw_field(board, row, 0, fields[row], "balance", -limit, limit, title="" if row else "truth")
        label_row(board, row, f"step {int(step)}")
    for column, (name, model) in enumerate(models.items(), start=1):
        errors = np.maximum(np.abs(shrink(upright(model, axes), side) - fields), floor)
        for row in range(rows):
            title = "" if row else shorten(name)
            error = draw_field(board, row, column, errors[row], "amp", floor, limit, title=title, logarithmic=True)
    draw_scale(board, image, 0, rows=(0, rows - 1), label=field, extend="both")
    if models:
        draw_scale(board, error, 1, rows=(0, rows - 1), label="|error|", extend="both")
    return board.figure


def draw_bandwidths(kernels: Mapping[str, Mapping[str, np.ndarray]], *, side: int) -> Figure:
    """One attention map (S, S) per block (rows) and σ (columns), each on its own symmetric scale."""
    blocks = list(dict.fromkeys(block for maps in kernels.values() for block in maps))
    board = new_board(len(blocks), len(kernels), width=1.6, shape=(1, 1), labelled=True)
    for column, (name, maps) in enumerate(kernels.items()):
        write_title(board, 0, column, name)
        for row, block in enumerate(blocks):
            if block in maps:
                limit = largest(maps[block])
                draw_field(board, row, column, shrink(maps[block], side), "balance", -limit, limit)
    for row, block in enumerate(blocks):
        label_row(board, row, block)
    return board.figure


def draw_lorenz(orbits: Mapping[str, np.ndarray], estimates: Mapping[str, np.ndarray], *, reference: float) -> Figure:
    """The attractor, x–z, of solver and learned map (orbits (T, 3)), and their estimates (groups, 3) of λ₁."""
    figure, (panels,) = new_figure(8.6, 3.0, columns=1 + len(orbits))
    for panel, (name, orbit) in zip(panels, orbits.items(), strict=False):
        panel.plot(orbit[:, 0], orbit[:, 2], color=INK, linewidth=0.5)
        panel.set(xlabel="x", ylabel="z")
        set_title(panel, name)
        add_grid(panel)
    last = panels[-1]
    last.axhline(reference, color=INK, alpha=0.6, linewidth=0.9, linestyle="dashed")
    last.text(0.5, reference, f"quoted\n{reference}", color=INK, fontsize=8, ha="center", va="center", linespacing=1.7)
    for place, (values, color) in enumerate(zip(estimates.values(), PALETTE, strict=False)):
        leading = values[:, 0]
        last.plot(np.full(len(leading), place), leading, "o", color=color, markersize=3, alpha=0.6)
        last.plot(place, leading.mean(), "_", color=INK, markersize=18)
    last.set_ylabel("λ₁ (1 / time unit)")
    last.set_xticks(range(len(estimates)), labels=list(estimates))
    last.set_xlim(-0.6, len(estimates) - 0.4)
    set_title(last, "largest exponent")
    add_grid(last)
    return figure

"""Figures with one panel per model, as in the paper: errors of forecasts and of kinetic energy, kernels by σ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ergoflow.report.canvas import INK, PALETTE, add_colorbar, add_grid, new_figure, set_title, shrink
from ergoflow.report.maps import SCALE_QUANTILE, draw_field, label_row, leave_blank, percent_text, upright
from ergoflow.report.names import shorten

#: Panels of a map stand in rows of at most this many.
PANELS_PER_ROW = 5
#: A map of percentages ends here.
PERCENT_LIMIT = 100.0
#: The smallest error that is told from none, as one part in this many of the truth's scale.
ERROR_SPAN = 1000.0
#: Where the truth is nearly zero (at a wall) percentages are taken of this share of the map's mean.
PERCENT_FLOOR = 0.05


def draw_energy_errors(
    truth: np.ndarray, models: Mapping[str, np.ndarray | None], *, axes: Sequence[str], side: int
) -> Figure:
    """Kinetic energy of the truth, then |TKEp − TKEt|/TKEt of each model in per cent; None is a failed model."""
    count = 1 + len(models)
    columns = min(PANELS_PER_ROW, count)
    rows = -(-count // columns)
    figure, panels = new_figure(1.9 * columns + 0.8, 2.0 * rows + 0.2, rows=rows, columns=columns)
    flat = panels.ravel()
    field = shrink(upright(truth, axes), side)
    energy = draw_field(flat[0], field, "thermal", 0.0, float(field.max()) or 1.0, title="truth")
    for panel, (name, model) in zip(flat[1:], models.items(), strict=False):
        if model is None:
            draw_field(panel, np.full_like(field, np.nan), "amp", 0.0, PERCENT_LIMIT, title=f"{shorten(name)}: failed")
            continue
        percent = 100 * np.abs(shrink(upright(model, axes), side) - field)
        percent /= np.maximum(field, PERCENT_FLOOR * field.mean())
        last = draw_field(
            panel, percent, "amp", 0.0, PERCENT_LIMIT, title=f"{shorten(name)}, {percent_text(percent.mean())}"
        )
    for panel in flat[count:]:
        panel.set_axis_off()
    add_colorbar(figure, energy, list(flat), label="TKE of the truth")
    if any(model is not None for model in models.values()):
        add_colorbar(figure, last, list(flat), label="|error| (%)", extend="max")
    return figure


def draw_forecast_errors(
    steps: np.ndarray, truth: np.ndarray, models: Mapping[str, np.ndarray], *, axes: Sequence[str], side: int
) -> Figure:
    """The truth and each model's |prediction − truth| (columns) at several lead times (rows); fields (S, X, Y).

    Errors are coloured by their logarithm: those of good and bad models stand side by side.
    """
    rows, columns = len(steps), 1 + len(models)
    figure, panels = new_figure(1.3 * columns + 1.6, 1.35 * rows + 0.4, rows=rows, columns=columns)
    limit = float(np.quantile(np.abs(truth), SCALE_QUANTILE)) or 1.0
    fields = shrink(upright(truth, axes), side)
    for row, step in enumerate(steps):
        image = draw_field(panels[row, 0], fields[row], "balance", -limit, limit, title="" if row else "truth")
        label_row(panels[row, 0], f"step {int(step)}")
    for column, (name, model) in enumerate(models.items(), start=1):
        errors = np.abs(shrink(upright(model, axes), side) - fields)
        for row in range(rows):
            field, title = np.maximum(errors[row], limit / ERROR_SPAN), "" if row else shorten(name)
            error = draw_field(
                panels[row, column], field, "amp", limit / ERROR_SPAN, limit, title=title, logarithmic=True
            )
    add_colorbar(figure, image, list(panels.ravel()), label="truth", extend="both")
    if models:
        add_colorbar(figure, error, list(panels.ravel()), label="|error|", extend="both")
    return figure


def draw_bandwidths(kernels: Mapping[str, Mapping[str, np.ndarray]], *, side: int) -> Figure:
    """One attention map (S, S) per block (rows) and σ (columns), each on its own symmetric scale."""
    blocks = list(dict.fromkeys(block for maps in kernels.values() for block in maps))
    figure, panels = new_figure(
        1.7 * len(kernels) + 0.5, 1.75 * len(blocks) + 0.3, rows=len(blocks), columns=len(kernels)
    )
    for column, (name, maps) in enumerate(kernels.items()):
        for row, block in enumerate(blocks):
            panel, title = panels[row, column], name if row == 0 else ""
            if block not in maps:
                leave_blank(panel, title)
                continue
            limit = float(np.abs(maps[block]).max()) or 1.0
            draw_field(panel, shrink(maps[block], side), "balance", -limit, limit, title=title)
    for row, block in enumerate(blocks):
        label_row(panels[row, 0], block)
    return figure


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

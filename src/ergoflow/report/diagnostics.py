"""Figures of the model itself: its operator, its Lyapunov spectrum, its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ergoflow.report.canvas import (
    INK,
    Styles,
    add_grid,
    add_legend,
    log_ticks,
    new_figure,
    set_title,
)

#: A training curve is thinned to this many points by averaging neighbours.
MAX_LOSS_POINTS = 400


def draw_operator(
    eigenvalues: Mapping[str, np.ndarray], singular_values: Mapping[str, np.ndarray], *, styles: Styles
) -> Figure:
    """Eigenvalues of G against the unit circle, and its sorted singular values; all ones means orthogonal."""
    figure, ((circle, values),) = new_figure(7.6, 3.5, columns=2)
    angle = np.linspace(0, 2 * np.pi, 181)
    circle.plot(np.cos(angle), np.sin(angle), color=INK, alpha=0.55, linewidth=0.8)
    # Points of later runs are smaller: those of earlier ones show around them.
    for size, (name, points) in zip(np.linspace(5.5, 2.5, len(eigenvalues)), eigenvalues.items(), strict=True):
        circle.plot(
            points.real,
            points.imag,
            marker="o",
            markersize=size,
            markeredgewidth=0.0,
            linestyle="none",
            color=styles[name].color,
            label=styles[name].label,
        )
    circle.set(aspect="equal", xlabel="Re", ylabel="Im")
    set_title(circle, "eigenvalues of G")
    for name, points in singular_values.items():
        style = styles[name]
        values.plot(
            np.sort(points)[::-1],
            color=style.color,
            linestyle=style.dash,
            linewidth=style.width,
            label=style.label,
        )
    values.axhline(1, color=INK, alpha=0.55, linewidth=0.8)
    values.set(xlabel="index", ylabel="singular value")
    set_title(values, "singular values of G")
    for axes in (circle, values):
        add_grid(axes)
    add_legend(figure, values if singular_values else circle)
    return figure


def draw_lyapunov(models: Mapping[str, np.ndarray], truth: np.ndarray | None, *, styles: Styles) -> Figure:
    """Lyapunov exponents in descending order, of the solver (truth) and of each learned map."""
    figure, ((axes,),) = new_figure(5.0, 3.1)
    axes.axhline(0, color=INK, alpha=0.5, linewidth=0.8)
    if truth is not None:
        axes.plot(
            np.arange(1, len(truth) + 1),
            truth,
            color=INK,
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            label="truth",
        )
    for name, exponents in models.items():
        style, index = styles[name], np.arange(1, len(exponents) + 1)
        axes.plot(
            index,
            exponents,
            color=style.color,
            linestyle=style.dash,
            linewidth=style.width,
            marker="s",
            markersize=2.8,
            label=style.label,
        )
    axes.set(xlabel="index", ylabel="Lyapunov exponent (1/s)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_grid(axes)
    add_legend(figure, axes)
    return figure


def draw_training(logs: Mapping[str, Sequence[Mapping[str, Any]]], *, styles: Styles) -> Figure:
    """Training loss against optimiser step (lines) and validation relative L2 where measured (dots)."""
    figure, ((axes,),) = new_figure(5.0, 3.1)
    for name, records in logs.items():
        style = styles[name]
        steps, losses = (np.array([record[key] for record in records], dtype=float) for key in ("step", "loss"))
        axes.plot(
            _thinned(steps),
            _thinned(losses),
            color=style.color,
            linestyle=style.dash,
            linewidth=style.width,
            label=style.label,
        )
        valid = [
            (record["step"], record["valid"]["relative_l2@1"])
            for record in records
            if "relative_l2@1" in (record.get("valid") or {})
        ]
        if valid:
            axes.plot(*np.array(valid, dtype=float).T, marker="o", markersize=3, color=style.color, linestyle="none")
    axes.set_yscale("log")
    log_ticks(axes, "y")
    axes.set(xlabel="optimiser step", ylabel="loss (line), validation (dots)")
    add_grid(axes)
    add_legend(figure, axes)
    return figure


def _thinned(values: np.ndarray) -> np.ndarray:
    """Means over consecutive blocks, so that at most `MAX_LOSS_POINTS` remain."""
    block = -(-len(values) // MAX_LOSS_POINTS)
    if block <= 1:
        return values
    starts = np.arange(0, len(values), block)
    return np.asarray(np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values))))

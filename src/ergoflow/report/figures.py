"""Figures of the flow: error growth, spectra, correlations, densities, stability, walls.

Each function takes arrays and returns a matplotlib `Figure`; nothing is computed here that a table reports.
Models come as a mapping from run name to curve; `styles` has the colour and dash of every run, so that one which a
figure lacks does not change the colours of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ergoflow.report.canvas import (
    INK,
    REFERENCE_DASHES,
    Styles,
    add_grid,
    add_legend,
    log_ticks,
    new_figure,
    set_title,
)
from ergoflow.report.units import with_unit

#: Beyond this many points per figure the series are thinned: a browser draws no more.
MAX_SERIES_POINTS = 16_000
#: With more trajectories than this a figure of them shows each model's median.
MAX_SERIES_LINES = 60
#: With more models than this their bands hide one another and are left out.
MAX_BANDS = 6
#: Energies smaller than the largest by more than this are not shown.
SPECTRUM_SPAN = 1e10
#: The stability band of METRICS.md, in standard deviations of the truth.
SIGMA_BAND = 5.0


@dataclass(frozen=True)
class Curve:
    """A line `y` over `x` with an optional band from `low` to `high`; the last axes have one length."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def times(self, factor: float) -> Curve:
        """The curve in other units."""
        low, high = (None if bound is None else factor * bound for bound in (self.low, self.high))
        return Curve(self.x, factor * self.y, low, high)


def draw_error_growth(
    models: Mapping[str, Curve], references: Mapping[str, Curve], *, step: str, styles: Styles
) -> Figure:
    """Relative L2 error against lead time on a logarithmic ordinate, where exponential growth is straight."""
    figure, ((axes,),) = new_figure(5.0, 3.1)
    for name, curve in references.items():
        dash = REFERENCE_DASHES.get(name, "dotted")
        axes.plot(curve.x, curve.y, color=INK, alpha=0.6, linewidth=1.1, linestyle=dash, label=name)
    _draw_models(axes, models, styles)
    axes.set_yscale("log")
    log_ticks(axes, "y")
    axes.set(xlabel=f"lead time (steps of {step})", ylabel="relative L2 error")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes)


def draw_spectrum(models: Mapping[str, Curve], truth: Curve, *, styles: Styles, unit: str = "") -> Figure:
    """|u|² per shell above, ratio to the truth below; the band is truth against truth."""
    figure, axes = new_figure(5.0, 4.0, rows=2, sharex=True, gridspec_kw={"height_ratios": (2.2, 1)})
    top, bottom = axes[:, 0]
    # A logarithmic axis has no room for the mean flow (shell 0).
    truth, models = _positive(truth), {name: _positive(curve) for name, curve in models.items()}
    _draw_truth(top, truth)
    _draw_models(top, models, styles)
    _draw_truth(bottom, _ratio(truth, truth))
    _draw_models(bottom, {name: _ratio(curve, truth) for name, curve in models.items()}, styles)
    for panel in (top, bottom):
        panel.set_xscale("log")
        panel.set_yscale("log")
        log_ticks(panel, "y")
        add_grid(panel)
    # Shells that the solver's dealiasing empties hold rounding errors: they would take half of the axis.
    lowest = min((float(c.y[c.y > 0].min()) for c in (truth, *models.values()) if (c.y > 0).any()), default=0.0)
    if lowest < truth.y.max() / SPECTRUM_SPAN:
        top.set_ylim(bottom=truth.y.max() / SPECTRUM_SPAN)
    bottom.set_ylim(0.2, 5.0)
    bottom.set_yticks([0.2, 0.5, 1, 2, 5], labels=["0.2", "0.5", "1", "2", "5"])
    bottom.minorticks_off()
    ticks = [2**power for power in range(12) if truth.x[0] <= 2**power <= truth.x[-1]]
    bottom.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    bottom.set(xlabel="wavenumber shell", ylabel="model / truth")
    top.set_ylabel(with_unit("|u|² per shell", unit))
    add_legend(figure, top)
    return figure


def draw_autocorrelation(models: Mapping[str, Curve], truth: Curve, *, step: str, styles: Styles) -> Figure:
    """Time correlation of the truth and of each model."""
    figure, ((axes,),) = new_figure(5.0, 3.1)
    axes.axhline(0, color=INK, alpha=0.4, linewidth=0.7)
    _draw_truth(axes, truth)
    _draw_models(axes, models, styles)
    axes.set(xlabel=f"lag (steps of {step})", ylabel="autocorrelation")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes)


def draw_density(models: Mapping[str, Curve], truth: Curve, *, styles: Styles, field: str = "field") -> Figure:
    """Probability density of the point values with a logarithmic ordinate, which shows the tails."""
    figure, ((axes,),) = new_figure(5.0, 3.1)
    _draw_truth(axes, truth)
    _draw_models(axes, models, styles)
    axes.set_yscale("log")
    log_ticks(axes, "y")
    axes.set(xlabel=field, ylabel="probability density")
    return _finish(figure, axes)


def draw_series(
    models: Mapping[str, Curve],
    truth: np.ndarray,
    *,
    quantity: str,
    diverged_at: Mapping[str, Sequence[int]],
    styles: Styles,
    unit: str = "",
) -> Figure:
    """Every trajectory's energy or enstrophy (J, T) over the roll-out, with the truth's mean ± 5 σ band.

    More trajectories than `MAX_SERIES_LINES` would hide one another: each model has the median over its own instead,
    which ends where half of them have failed. A cross marks the last value of a roll-out that left the finite numbers
    or is listed in `diverged_at` (-1 = never).
    """
    figure, ((axes,),) = new_figure(5.0, 3.1)
    mean, half = float(truth.mean()), SIGMA_BAND * float(truth.std())
    # Neither quantity can be negative.
    limits = (max(0.0, mean - 2 * half), mean + 2 * half)
    axes.axhspan(mean - half, mean + half, color=INK, alpha=0.09, linewidth=0, label=f"truth ± {SIGMA_BAND:g} σ")
    axes.axhline(mean, color=INK, linewidth=1.1, label="truth, mean")
    many = sum(len(curve.y) for curve in models.values()) > MAX_SERIES_LINES
    lines = {name: _median(curve.y) if many else curve.y for name, curve in models.items()}
    stride = max(1, -(-sum(line.size for line in lines.values()) // MAX_SERIES_POINTS))
    for name, curve in models.items():
        style = styles[name]
        for index, values in enumerate(lines[name]):
            (line,) = axes.plot(curve.x[::stride], values[::stride], color=style.color, linestyle=style.dash)
            line.set(linewidth=style.width if many else 0.8, label=style.label if index == 0 else "_nolegend_")
        _mark_divergences(axes, curve, diverged_at.get(name, ()), style.color, limits)
    if half > 0:
        axes.set_ylim(*limits)
    axes.set(xlabel="step of the roll-out", ylabel=with_unit(quantity, unit))
    return _finish(figure, axes)


def draw_walls(mean: Mapping[str, Curve], rms: Mapping[str, Mapping[str, Curve]], *, styles: Styles) -> Figure:
    """Mean profile U⁺(y⁺) with the law of the wall, and one panel per component of the fluctuations.

    `mean` and each entry of `rms` map a source ("truth", "dns" or a run name) to its profile over y⁺.
    """
    figure, axes = new_figure(10.8, 3.4, columns=1 + len(rms))
    panels = axes[0]
    edge = max(float(curve.x.max()) for curve in mean.values())
    # Kim, Moin & Moser (1987) at Re_tau = 180: U+ = y+ and U+ = 2.5 ln y+ + 5.5, which meet at y+ = 11.6.
    sublayer, log_layer = np.geomspace(1, 11.6, 20), np.geomspace(11.6, max(edge, 12), 20)
    law = {"color": INK, "alpha": 0.5, "linewidth": 0.8, "linestyle": "dotted"}
    panels[0].plot(sublayer, sublayer, label="law of the wall", **law)
    panels[0].plot(log_layer, 2.5 * np.log(log_layer) + 5.5, **law)
    panels[0].set_xscale("log")
    log_ticks(panels[0], "x")
    for panel, title, profiles in zip(panels, ("U⁺", *rms), (mean, *rms.values()), strict=True):
        if "dns" in profiles:
            dns = profiles["dns"]
            panel.plot(dns.x, dns.y, "o", color=INK, markersize=2.6, fillstyle="none", label="DNS")
        if "truth" in profiles:
            _draw_truth(panel, profiles["truth"])
        _draw_models(panel, {name: curve for name, curve in profiles.items() if name not in ("truth", "dns")}, styles)
        if "truth" in profiles:
            _stay_near(panel, profiles["truth"].y, np.concatenate([curve.y for curve in profiles.values()]))
        panel.set_xlabel("y⁺")
        set_title(panel, title)
        add_grid(panel)
    add_legend(figure, panels[0])
    return figure


def _stay_near(axes: Axes, truth: np.ndarray, shown: np.ndarray) -> None:
    """Let the panel reach half of the truth's range beyond it and zero at most; what lies farther leaves the panel."""
    low, high = min(0.0, float(truth.min())), max(0.0, float(truth.max()))
    beyond, margin = (high - low) / 2, (high - low) / 20
    finite = shown[np.isfinite(shown)]
    if high > low:
        axes.set_ylim(max(float(finite.min()), low - beyond) - margin, min(float(finite.max()), high + beyond) + margin)


def _draw_truth(axes: Axes, truth: Curve) -> None:
    if truth.low is not None and truth.high is not None:
        axes.fill_between(
            truth.x, truth.low, truth.high, color=INK, alpha=0.16, linewidth=0, label="truth against truth"
        )
    axes.plot(truth.x, truth.y, color=INK, linewidth=1.9, label="truth")


def _draw_models(axes: Axes, models: Mapping[str, Curve], styles: Styles) -> None:
    for name, curve in models.items():
        style = styles[name]
        if curve.low is not None and curve.high is not None and len(models) <= MAX_BANDS:
            axes.fill_between(curve.x, curve.low, curve.high, color=style.color, alpha=0.18, linewidth=0)
        (line,) = axes.plot(curve.x, curve.y, color=style.color, linestyle=style.dash, linewidth=style.width)
        line.set_label(style.label)
        lost = np.flatnonzero(~np.isfinite(curve.y))
        if lost.size and lost[0] > 0:
            axes.plot(curve.x[lost[0] - 1], curve.y[lost[0] - 1], "x", color=style.color, markersize=7)


def _mark_divergences(
    axes: Axes, curve: Curve, diverged_at: Sequence[int], color: str, limits: tuple[float, float]
) -> None:
    for index, values in enumerate(curve.y):
        lost = np.flatnonzero(~np.isfinite(values))
        step = diverged_at[index] if index < len(diverged_at) else -1
        if lost.size:
            last = max(int(lost[0]) - 1, 0)
        elif step >= 0:
            last = min(int(np.searchsorted(curve.x, step)), len(curve.x) - 1)
        else:
            continue
        # A roll-out that was never finite is marked at the top edge.
        height = float(np.clip(values[last], *limits)) if np.isfinite(values[last]) else limits[1]
        axes.plot(curve.x[last], height, "x", color=color, markersize=8, clip_on=False)


def _median(values: np.ndarray) -> np.ndarray:
    """The median over trajectories (1, T), where a failed one is infinite."""
    return np.asarray(np.median(np.where(np.isfinite(values), values, np.inf), axis=0, keepdims=True))


def _positive(curve: Curve) -> Curve:
    keep = curve.x > 0
    low, high = (None if bound is None else bound[keep] for bound in (curve.low, curve.high))
    return Curve(curve.x[keep], curve.y[keep], low, high)


def _ratio(curve: Curve, truth: Curve) -> Curve:
    """The curve divided by the truth on the abscissae they share."""
    shared, here, there = np.intersect1d(curve.x, truth.x, return_indices=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        y, low, high = (
            None if part is None else part[here] / truth.y[there] for part in (curve.y, curve.low, curve.high)
        )
    assert y is not None
    return Curve(shared, y, low, high)


def _finish(figure: Figure, axes: Axes) -> Figure:
    add_grid(axes)
    add_legend(figure, axes)
    return figure

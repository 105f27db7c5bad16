"""Which figures a task's runs allow, in which order. A figure exists when its curves exist.

Line figures compare all runs; map figures belong to one run each, and the page lets the reader choose the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ergoflow.report import diagnostics, figures, maps
from ergoflow.report.box import draw_box
from ergoflow.report.canvas import Styles, line_styles
from ergoflow.report.captions import CAPTIONS, TITLES
from ergoflow.report.figures import Curve
from ergoflow.report.runs import REFERENCE_ROWS, RunGroup, slugify, task_of
from ergoflow.report.units import step_of, units_of

_WALL_TITLES = {"rms_u": "u′⁺", "rms_v": "v′⁺", "rms_w": "w′⁺", "uv": "−uv⁺"}


@dataclass(frozen=True, kw_only=True)
class FigureItem:
    """A figure with its words. `run` names the one run a map shows; None when all runs are in it."""

    slug: str
    title: str
    caption: str
    alt: str
    figure: Figure
    wide: bool = False
    run: str | None = None


def figure_items(groups: Sequence[RunGroup], *, side: int, order: Sequence[str] = ()) -> Iterator[FigureItem]:
    """Every figure the curves of one task allow, drawn one at a time; maps at most `side` points wide.

    A run has one style in all figures of a task, whichever of them it is in; `order` as in `line_styles`.
    """
    styles = line_styles([group.name for group in groups], order)
    for make in _LINE_FIGURES:
        item = make(groups, styles)
        if item is not None:
            yield item
    for number, group in enumerate(groups):
        for kind, figure in _maps_of(group, side):
            seed = "" if len(group.runs) == 1 else f", seed {group.first.seed}"
            axes = "" if kind == "attention" else f" Axes: {maps.orientation(group.plane_axes)}."
            yield FigureItem(
                slug=f"{kind}-{number + 1}-{slugify(group.name)}"[:60],
                title=TITLES[kind],
                caption=f"{group.name}{seed}. {CAPTIONS[kind]}{axes}",
                alt=f"{TITLES[kind]}: {group.name} and the truth.",
                figure=figure,
                wide=True,
                run=group.name,
            )


def _compared(slug: str, names: Mapping[str, Any], figure: Figure, *, wide: bool = False) -> FigureItem:
    listing = ", ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    alt = f"{TITLES[slug]}: {listing}, and the references."
    return FigureItem(slug=slug, title=TITLES[slug], caption=CAPTIONS[slug], alt=alt, figure=figure, wide=wide)


def _error_growth(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    models = _models(groups, "relative_l2", "relative_l2/steps")
    if not models:
        return None
    found = {name: _shared(groups, "relative_l2", name, "relative_l2/steps") for name in REFERENCE_ROWS}
    references = {name: curve for name, curve in found.items() if curve is not None}
    figure = figures.draw_error_growth(models, references, styles=styles, step=step_of(groups[0].first))
    return _compared("error-growth", models, figure)


def _spectrum(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    scale, unit = _spectrum_scale(groups), units_of(groups[0].first).energy

    def draw(models: Mapping[str, Curve], truth: Curve) -> Figure:
        if scale is None:
            return figures.draw_spectrum(models, truth, styles=styles)
        scaled = {name: curve.times(scale) for name, curve in models.items()}
        return figures.draw_spectrum(scaled, truth.times(scale), styles=styles, unit=unit)

    return _against_truth(groups, "spectrum", "spectrum/shells", draw)


def _spectrum_scale(groups: Sequence[RunGroup]) -> float | None:
    """What the sums of an FFT are multiplied with, so that the truth's shells add up to the mean of |u|².

    By Parseval that is one over the squared number of points. It is found from the truth's energy ½⟨|u|²⟩, for the
    fields of results that travel are thinned. None where there is no energy.
    """
    truth = _shared(groups, "spectrum", "truth", "spectrum/shells")
    energy = _shared(groups, "series/energy", "truth", "series/steps")
    return None if truth is None or energy is None else 2 * float(energy.y.mean()) / float(truth.y.sum())


def _autocorrelation(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    draw = partial(figures.draw_autocorrelation, styles=styles, step=step_of(groups[0].first))
    return _against_truth(groups, "autocorrelation", "autocorrelation/lags", draw)


def _density(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    draw = partial(figures.draw_density, styles=styles, field=units_of(groups[0].first).field)
    return _against_truth(groups, "pdf", "pdf/centers", draw)


def _energy(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    return _series(groups, styles, "energy", units_of(groups[0].first).energy)


def _enstrophy(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    return _series(groups, styles, "enstrophy", units_of(groups[0].first).enstrophy)


def _series(groups: Sequence[RunGroup], styles: Styles, quantity: str, unit: str) -> FigureItem | None:
    models = _first_seeds(groups, f"series/{quantity}/model")
    truth = _shared(groups, f"series/{quantity}", "truth", "series/steps")
    if not models or truth is None:
        return None
    curves = {
        group.name: Curve(group.first.curves["series/steps"], models[group.name])
        for group in groups
        if group.name in models
    }
    diverged = {group.name: group.first.scores["survival"].get("diverged_at", ()) for group in groups}
    figure = figures.draw_series(curves, truth.y, quantity=quantity, diverged_at=diverged, styles=styles, unit=unit)
    return _compared(quantity, models, figure)


def _box(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    faces = [groups[0].first.curve(f"box/{name}") for name in ("front", "side", "floor")]
    if any(face is None for face in faces):
        return None
    front, side, floor = (np.asarray(face) for face in faces)
    return _compared("box", {"truth": None}, draw_box(front, side, floor), wide=True)


def _walls(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    mean = _profiles(groups, "wall/U_plus")
    rms = {title: _profiles(groups, f"wall/{key}") for key, title in _WALL_TITLES.items()}
    if not mean:
        return None
    rms = {title: profiles for title, profiles in rms.items() if profiles}
    figure = figures.draw_walls(mean, rms, styles=styles)
    return _compared("walls", mean, figure, wide=True)


def _profiles(groups: Sequence[RunGroup], family: str) -> dict[str, Curve]:
    references = {source: _shared(groups, family, source, "wall/y_plus") for source in ("dns", "truth")}
    models = _models(groups, family, "wall/y_plus")
    return {**{source: curve for source, curve in references.items() if curve is not None}, **models}


def _lyapunov(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    models, truths = _first_seeds(groups, "lyapunov/model"), _first_seeds(groups, "lyapunov/truth")
    if not models:
        return None
    figure = diagnostics.draw_lyapunov(models, next(iter(truths.values()), None), styles=styles)
    return _compared("lyapunov", models, figure)


def _training(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    logs = {group.name: [record for record in group.first.log if "loss" in record] for group in groups}
    logs = {name: records for name, records in logs.items() if records}
    return _compared("training", logs, diagnostics.draw_training(logs, styles=styles)) if logs else None


def _operator(groups: Sequence[RunGroup], styles: Styles) -> FigureItem | None:
    eigenvalues = _first_seeds(groups, "operator/eigenvalues")
    singular_values = _first_seeds(groups, "operator/singular_values")
    if not eigenvalues and not singular_values:
        return None
    figure = diagnostics.draw_operator(eigenvalues, singular_values, styles=styles)
    return _compared("operator", eigenvalues or singular_values, figure, wide=True)


_LINE_FIGURES: tuple[Callable[[Sequence[RunGroup], Styles], FigureItem | None], ...] = (
    _error_growth,
    _spectrum,
    _autocorrelation,
    _density,
    _energy,
    _enstrophy,
    _lyapunov,
    _training,
    _box,
    _walls,
    _operator,
)


def _maps_of(group: RunGroup, side: int) -> Iterator[tuple[str, Figure]]:
    run, axes = group.first, group.plane_axes
    truth, model = run.curve("tke/truth"), run.curve("tke/model")
    if truth is not None and model is not None and truth.ndim == 2:
        yield "kinetic-energy", maps.draw_kinetic_energy(truth, model, side=side, axes=axes, unit=units_of(run).energy)
    steps, truth, model = (run.curve(f"snapshots/{part}") for part in ("steps", "truth", "model"))
    # One-dimensional systems store (S, C, X): they have no map.
    if steps is not None and truth is not None and model is not None and truth.ndim == 4:
        yield (
            "snapshots",
            maps.draw_snapshots(
                steps,
                truth[:, 0],
                model[:, 0],
                side=side,
                axes=axes,
                field=units_of(run).field,
                step_seconds=task_of(run)[1],
                time_unit=units_of(run).time,
            ),
        )
    kernels = {
        name.removeprefix("attention/"): run.curves[name] for name in run.curves if name.startswith("attention/")
    }
    if kernels:
        yield "attention", maps.draw_attention(kernels, side=min(side, 64))


def _against_truth(
    groups: Sequence[RunGroup],
    family: str,
    abscissa: str,
    draw: Callable[[Mapping[str, Curve], Curve], Figure],
) -> FigureItem | None:
    models, truth = _models(groups, family, abscissa), _shared(groups, family, "truth", abscissa)
    if not models or truth is None:
        return None
    return _compared(family, models, draw(models, truth))


def _models(groups: Sequence[RunGroup], family: str, abscissa: str) -> dict[str, Curve]:
    """The mean over seeds of each group that has the curve.

    The band is ± the spread, or the run's own interval.
    """
    models = {}
    for group in groups:
        x, y = group.curve(abscissa), group.curve(f"{family}/model")
        if x is None or y is None:
            continue
        spread = group.spread(f"{family}/model")
        low, high = (group.curve(f"{family}_{bound}/model") for bound in ("low", "high"))
        models[group.name] = Curve(x, y, low, high) if spread is None else Curve(x, y, y - spread, y + spread)
    return models


def _shared(groups: Sequence[RunGroup], family: str, source: str, abscissa: str) -> Curve | None:
    """The curve of a reference, which depends on the test data alone: the first run that has it speaks."""
    for group in groups:
        x, y = group.first.curve(abscissa), group.first.curve(f"{family}/{source}")
        if x is not None and y is not None:
            low, high = (group.first.curve(f"{family}_{bound}/{source}") for bound in ("low", "high"))
            return Curve(x, y, low, high)
    return None


def _first_seeds(groups: Sequence[RunGroup], name: str) -> dict[str, np.ndarray]:
    """The curve of each group's first seed, where it has one."""
    return {group.name: curve for group in groups if (curve := group.first.curve(name)) is not None}

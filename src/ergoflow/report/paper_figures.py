"""The figures of the paper, drawn from cells alone: which runs each one shows, and how.

A `Picture` names the tasks whose cells it shows (the first that has any), the rows it needs (none: every row), and the
group of recipes that makes them. `draw` returns None where no run has the curves. What one task's page draws already
(`sections.figure_items`) is taken from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from matplotlib.figure import Figure

from ergoflow.report.evidence import Evidence
from ergoflow.report.maps import draw_attention
from ergoflow.report.panels import draw_bandwidths, draw_energy_errors, draw_forecast_errors
from ergoflow.report.runs import RunGroup
from ergoflow.report.sections import figure_items
from ergoflow.report.units import Units, units_of

#: Points a side of a map.
SIDE = 64
#: Lead times of the error maps: one step, and those of the printed columns.
LEAD_STEPS = (1, 5, 25)
#: Pictures are committed: none may be larger than this.
MAX_BYTES = 200_000
KOLMOGOROV, CHANNEL, MODULES = ("kf256-coarse",), ("tcf192", "tcf96"), ("kf128",)
SIGMA_ROWS = {"a3m-sigma1": 1, "a3m-sigma4": 4, "a3m": 8, "a3m-sigma16": 16, "a3m-sigma32": 32}
OPERATOR_ROWS = ("a3m-free", "a3m", "a3m-exact")
MAIN_ROWS = ("mno", "uno", "mwt", "factformer", "a3m", "a3m-common", "convnext", "ergoformer", "ergoformer-drawn")

Draw = Callable[[Mapping[str, RunGroup]], Figure | None]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One figure: its file name, where it stands in the paper, its words, its runs by row and its drawing.

    `draw` None is a figure that is not made of cells.
    """

    slug: str
    source: str
    title: str
    caption: str
    tasks: tuple[str, ...]
    rows: tuple[str, ...]
    command: str
    draw: Draw | None

    def groups(self, evidence: Evidence) -> dict[str, RunGroup]:
        """The runs it shows by row, in its order."""
        task = evidence.fullest_task(self.tasks)
        found = {} if task is None else evidence.rows(task)
        return {row: found[row] for row in self.rows if row in found}


def figures_block(evidence: Evidence) -> str:
    """Every figure with its caption and its files, or what is missing for it."""
    parts = []
    for picture in (*PICTURES, LORENZ):
        parts.append(f"### {picture.title}")
        entry = evidence.pictures.get(picture.slug)
        if entry is None:
            parts.append(f"{picture.source}. Not run yet: `ergoflow reproduce {picture.command} figures`.")
            continue
        if picture.slug in evidence.stale:
            parts.append("Its cells have changed since it was drawn: `ergoflow reproduce figures`.")
        files = evidence.link_cells(list(entry["cells"]))
        if entry["file"] is None:
            parts.append(f"{picture.source}. Not drawn: no cell has what it shows, {files}.")
            continue
        parts.append(f"![{picture.title}]({evidence.place}/figures/{entry['file']})")
        parts.append(f"{picture.source}. {picture.caption} From {files}.")
    return "\n\n".join(parts)


def headline_picture(evidence: Evidence) -> str:
    """The README's picture as Markdown; nothing where it is not drawn yet."""
    entry = evidence.pictures.get(HEADLINE)
    if entry is None or entry["file"] is None:
        return ""
    title = next(picture.title for picture in PICTURES if picture.slug == HEADLINE)
    return f"![{title}]({evidence.place}/figures/{entry['file']})"


def _line(slug: str, order: Sequence[str] = ()) -> Draw:
    """The drawing of a line figure of the report's page; rows in `order` look alike in all figures that share it."""

    def draw(groups: Mapping[str, RunGroup]) -> Figure | None:
        drawn = figure_items(tuple(groups.values()), side=SIDE, order=order)
        items = takewhile(lambda item: item.run is None, drawn)
        return next((item.figure for item in items if item.slug == slug), None)

    return draw


def _energy_errors(groups: Mapping[str, RunGroup]) -> Figure | None:
    maps = {row: group.first.curve("tke/model") for row, group in groups.items()}
    truth = _shared(groups, "tke/truth")
    return (
        None
        if truth is None
        else draw_energy_errors(truth, maps, axes=_axes(groups), side=SIDE, unit=_units(groups).energy)
    )


def _forecast_errors(groups: Mapping[str, RunGroup]) -> Figure | None:
    steps, truth = _shared(groups, "snapshots/steps"), _shared(groups, "snapshots/truth")  # (S,), (S, C, X, Y)
    if steps is None or truth is None:
        return None
    kept = np.flatnonzero(np.isin(steps, LEAD_STEPS))
    curves = {row: group.first.curve("snapshots/model") for row, group in groups.items()}
    models = {row: curve[kept, 0] for row, curve in curves.items() if curve is not None and curve.shape == truth.shape}
    shown, field = truth[kept, 0], _units(groups).field
    if _axes(groups)[0] == "y":
        # The mean flow of a channel would hide the rest.
        mean = shown.mean(axis=(0, 2), keepdims=True)
        shown, models = shown - mean, {row: model - mean for row, model in models.items()}
        field += " less its mean profile"
    return draw_forecast_errors(steps[kept], shown, models, axes=_axes(groups), side=SIDE, field=field)


def _bandwidths(groups: Mapping[str, RunGroup]) -> Figure | None:
    kernels = {}
    for row, group in groups.items():
        blocks = {"first block": group.first.curve("attention/x"), "last block": group.first.curve("attention_last/x")}
        found = {block: curve[0] for block, curve in blocks.items() if curve is not None}
        if found:
            kernels[f"σ = {SIGMA_ROWS[row]}"] = found
    return draw_bandwidths(kernels, side=SIDE) if kernels else None


def _heads(groups: Mapping[str, RunGroup]) -> Figure | None:
    curves = next(iter(groups.values())).first.curves
    kernels = {name.removeprefix("attention/"): curves[name] for name in curves if name.startswith("attention/")}
    return draw_attention(kernels, side=SIDE) if kernels else None


def _shared(groups: Mapping[str, RunGroup], name: str) -> np.ndarray | None:
    """A curve of the truth: the first run that has it speaks."""
    return next((curve for group in groups.values() if (curve := group.first.curve(name)) is not None), None)


def _units(groups: Mapping[str, RunGroup]) -> Units:
    return units_of(next(iter(groups.values())).first)


def _axes(groups: Mapping[str, RunGroup]) -> tuple[str, ...]:
    return next(iter(groups.values())).plane_axes


def _pair(slug: str, sources: tuple[str, str], title: str, caption: str, draw: Draw) -> tuple[Picture, Picture]:
    """The same figure on both flows."""
    flows = (("kf256", "Kolmogorov flow", KOLMOGOROV, "table1"), ("tcf", "turbulent channel", CHANNEL, "table2"))
    made = [
        Picture(
            slug=f"{slug}-{short}",
            source=source,
            title=f"{title}, {flow}",
            caption=caption,
            tasks=tasks,
            rows=MAIN_ROWS,
            command=command,
            draw=draw,
        )
        for source, (short, flow, tasks, command) in zip(sources, flows, strict=True)
    ]
    return made[0], made[1]


HEADLINE = "error-growth-kf256"
PICTURES: tuple[Picture, ...] = (
    *_pair(
        "time-correlation",
        ("Figure 5", "Figure 2"),
        "Time correlation",
        "C(t)/C(0) of truth and models about the mean field; the band is what two halves of the truth differ by.",
        _line("autocorrelation", MAIN_ROWS),
    ),
    *_pair(
        "energy-errors",
        ("Figure 6", "Figure 3"),
        "Turbulent kinetic energy",
        "The truth's, and the absolute error of each model's over the last steps of its roll-outs in per cent (of at "
        "least a twentieth of the map's mean), with its mean over the map; grey: the roll-outs failed.",
        _energy_errors,
    ),
    *_pair(
        "forecast-errors",
        ("Figure 4", "Figure 7"),
        "Short-term error maps",
        "One test trajectory: the truth (for the channel u less its mean profile) and each model's absolute error, all "
        "errors on one scale.",
        _forecast_errors,
    ),
    *_pair(
        "error-growth",
        ("Columns τ of Table 1", "Columns τ of Table 2"),
        "Error over lead time",
        "Relative L2 of models and trivial forecasts; on the logarithmic axis chaos is a straight line.",
        _line("error-growth", MAIN_ROWS),
    ),
    *_pair(
        "spectrum",
        ("ME-APE and ME-LRw of Table 1", "ME-APE and ME-LRw of Table 2"),
        "Energy spectrum",
        "Spectra over the last steps of the roll-outs, and their ratio to the truth's.",
        _line("spectrum", MAIN_ROWS),
    ),
    Picture(
        slug="operator-kf128",
        source="Section 3.3",
        title="Eigenvalues of G: free, penalised, exact",
        caption="Against the unit circle, and singular values; all ones means orthogonal. All start from one matrix.",
        tasks=MODULES,
        rows=OPERATOR_ROWS,
        command="table3",
        draw=_line("operator"),
    ),
    Picture(
        slug="attention-sigma",
        source="Figure 8",
        title="Attention maps by kernel bandwidth",
        caption="The first head along x, each map on its own scale (red is positive), for the first test state.",
        tasks=MODULES,
        rows=tuple(SIGMA_ROWS),
        command="table4",
        draw=_bandwidths,
    ),
    Picture(
        slug="attention-heads",
        source="Figure 8, σ = 8",
        title="Attention maps of the transformer on 128²",
        caption="All heads of the first block along both axes; heads of mean, max and min pooling in this order.",
        tasks=MODULES,
        rows=("a3m",),
        command="table4",
        draw=_heads,
    ),
    Picture(
        slug="spectrum-sigma",
        source="Section 4.3",
        title="Energy spectrum by kernel bandwidth",
        caption="Which σ keeps which shells; `a3m` has σ = 8.",
        tasks=MODULES,
        rows=tuple(SIGMA_ROWS),
        command="table4",
        draw=_line("spectrum"),
    ),
    Picture(
        slug="channel-box",
        source="Figure 9",
        title="The channel",
        caption="Streamwise velocity on three planes of our simulation, the lowest at y⁺ = 15; δ is half the height.",
        tasks=CHANNEL,
        rows=MAIN_ROWS,
        command="table2",
        draw=_line("box"),
    ),
)
#: Drawn from `results/lorenz`, not from cells.
LORENZ = Picture(
    slug="lorenz63",
    source="Authors' rebuttal",
    title="Lorenz-63",
    caption="Solver and learned map: an orbit of each, and their estimates of the largest exponent with their mean.",
    tasks=(),
    rows=(),
    command="lorenz",
    draw=None,
)

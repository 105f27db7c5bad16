"""The page people share: one self-contained HTML file, with PNG figures and plain tables beside it.

`render` writes `index.html`, the figures as `*.png`, `tables.json` and `tables.csv`. The page loads
nothing: style, script, drawings and frames are inside it, and its content policy forbids the rest. Equal
runs give equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import numpy as np

from ergoflow.report import markup, published, score_table
from ergoflow.report.canvas import MAX_STYLES
from ergoflow.report.names import short_names
from ergoflow.report.player import MAX_PIXELS, pack_player
from ergoflow.report.runs import RunGroup, RunView, group_runs, slugify, task_of
from ergoflow.report.saving import to_png, to_svg
from ergoflow.report.sections import figure_items
from ergoflow.report.summary import best_first, best_row, cards, sentence
from ergoflow.report.tables import Table, build_table, to_csv, to_json
from ergoflow.report.units import step_of, units_of

#: Points of all maps of a page (about a byte each), and the panels one run usually shows.
MAP_PIXELS = 2_000_000
PANELS_PER_RUN = 18


def render(
    runs: Sequence[RunView],
    folder: Path,
    *,
    title: str,
    write: Callable[[Path, bytes], object] = Path.write_bytes,
    drawn: Callable[[str], object] = lambda name: None,
) -> Path:
    """Write the report of all runs into `folder` and return the path of its `index.html`.

    `write` writes each file; the page comes last, and then the figures of an earlier page that this one does not have
    are removed. Drawing takes its time: `drawn` is told the name of every experiment whose figures are done, and of
    every task (see `names_drawn`).
    """

    def save(name: str, content: bytes) -> None:
        write(folder / name, content)

    by_task = _by_task(group_runs(runs))
    tables = [build_table(groups) for groups in by_task.values()]
    folder.mkdir(parents=True, exist_ok=True)
    chapters = []
    budget, order = _Budget.of(by_task), _order(by_task)
    for (slug, groups), table in zip(by_task.items(), tables, strict=True):
        chapters.append(_chapter(slug, groups, table, budget, order, save, drawn))
    sentences = [sentence(table, groups) for table, groups in zip(tables, by_task.values(), strict=True)]
    save("tables.json", to_json(tables).encode())
    save("tables.csv", to_csv(tables).encode())
    page, text = folder / "index.html", _page(title, sentences, by_task, tables, chapters)
    earlier = _figure_ids(page.read_text(encoding="utf-8", errors="replace")) if page.exists() else set()
    save(page.name, text.encode())
    for name in earlier - _figure_ids(text):
        (folder / f"{name}.png").unlink(missing_ok=True)
    return page


def names_drawn(runs: Sequence[RunView]) -> list[str]:
    """The names that `render` tells, each when it is done."""
    by_task = _by_task(group_runs(runs))
    return [name for slug, groups in by_task.items() for name in (slug, *(group.name for group in groups))]


@dataclass(frozen=True)
class _Budget:
    """How finely images are stored, so that the page stays small enough to send."""

    map_side: int
    player_pixels: int

    @classmethod
    def of(cls, by_task: Mapping[str, Sequence[RunGroup]]) -> _Budget:
        runs = sum(len(groups) for groups in by_task.values())
        side = int(np.clip((MAP_PIXELS / (PANELS_PER_RUN * runs)) ** 0.5, 24, 128))
        return cls(map_side=side, player_pixels=MAX_PIXELS // len(by_task))


def _by_task(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Groups gathered by dataset and step length, the best first, keyed by a slug that is unique on the page."""
    tasks: dict[tuple[str, float], list[RunGroup]] = {}
    for group in groups:
        tasks.setdefault(task_of(group.first), []).append(group)
    slugs: dict[str, list[RunGroup]] = {}
    for (dataset, _), members in tasks.items():
        slug = slugify(dataset)
        names = itertools.chain([slug], (f"{slug}-{n}" for n in itertools.count(2)))
        slugs[next(name for name in names if name not in slugs)] = best_first(members)
    return slugs


def _order(by_task: Mapping[str, Sequence[RunGroup]]) -> list[str]:
    """Short names of all runs, those of most tasks first: a model looks the same in every chapter.

    None where they are more than anybody could tell apart: then each chapter has colours of its own.
    """
    names = (name for groups in by_task.values() for name in short_names([group.name for group in groups]))
    order = [name for name, _ in Counter(names).most_common()]
    return order if len(order) <= MAX_STYLES else []


def _figure_ids(page: str) -> set[str]:
    """The ids of a page's figures, by which their PNG files are named."""
    return set(re.findall(r'<figure id="([a-z0-9-]+)" class="', page))


def _page(
    title: str,
    sentences: Sequence[str],
    by_task: Mapping[str, Sequence[RunGroup]],
    tables: Sequence[Table],
    chapters: Sequence[str],
) -> str:
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    links = "".join(
        f'<a href="#{slug}">{escape(table.dataset)} <span>{step_of(groups[0].first)}</span></a>'
        for (slug, groups), table in zip(by_task.items(), tables, strict=True)
    )
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        verdict=markup.verdicts(
            sentences, compared=any(sum(row.kind == "model" for row in table.rows) > 1 for table in tables)
        ),
        links=links if len(by_task) > 1 else "",
        style=_asset("page.css"),
        script=script,
        digest=digest,
        chapters="".join(chapters),
        printed=_printed() if any(_has_printed(table) for table in tables) else "",
    )


def _printed() -> str:
    """The paper's tables as printed."""
    tables = "".join(markup.published_table(table) for table in published.TABLES)
    return (
        '<section class="chapter" id="printed"><h2>The paper\'s printed numbers</h2>'
        f'<p class="meta">{escape(published.PAPER)}</p><p class="caveat">{escape(published.CAVEAT)}</p>'
        f"<details><summary>All printed tables</summary>{tables}</details></section>"
    )


def _has_printed(table: Table) -> bool:
    return any(row.kind == "printed" for row in table.rows)


def _chapter(
    slug: str,
    groups: Sequence[RunGroup],
    table: Table,
    budget: _Budget,
    order: Sequence[str],
    save: Callable[[str, bytes], object],
    drawn: Callable[[str], object],
) -> str:
    """One task's part of the page; its figures are also written as PNG."""
    best = best_row(table).label
    opening = best if len(groups) == 1 else f"Best of {len(groups)}: {best}"
    parts = [
        _heading(groups, table),
        f"<h3>{escape(opening)}</h3>",
        markup.card_list(cards(table, groups), chapter=slug),
    ]
    parts.append("<h3>Scores</h3>")
    parts.append(_tables(slug, table))
    parts.append(_player(slug, groups, budget))
    parts.append(_figures(slug, groups, budget, order, save, drawn))
    parts.append("<h3>Provenance</h3>")
    parts.append(markup.provenance(groups))
    return f'<section class="chapter" id="{slug}">{"".join(parts)}</section>'


def _heading(groups: Sequence[RunGroup], table: Table) -> str:
    tests = sorted(
        {(run.scores["num_trajectories"], run.scores["rollout_steps"]) for group in groups for run in group.runs}
    )
    words = "; ".join(f"{count} test trajectories, {steps:,} steps" for count, steps in tests)
    warning = "" if len(tests) == 1 else " Runs were scored on different tests: compare them with care."
    remarks = dict.fromkeys(run.scores.get("remark", "") for group in groups for run in group.runs)
    note = "".join(f'<p class="caveat">{escape(remark)}.</p>' for remark in remarks if remark)
    return (
        f"<h2>{escape(table.dataset)} <span>{step_of(groups[0].first)} per step</span></h2>"
        f'<p class="meta">{words}.{warning}</p>{note}'
    )


def _tables(slug: str, table: Table) -> str:
    caption = f"Headline metrics on {table.dataset}: value, verdict, 95 % interval"
    parts = [
        score_table.score_table(table, table.headlines, identifier=f"{slug}-scores", caption=caption),
        score_table.verdict_key(),
    ]
    if _has_printed(table):
        parts.append(f'<p class="caveat">{escape(published.CAVEAT)}</p>')
    if table.further:
        further = score_table.score_table(
            table, table.further, identifier=f"{slug}-further", caption=f"Further metrics on {table.dataset}"
        )
        parts.append(f"<details><summary>Further metrics ({len(table.further)})</summary>{further}</details>")
    return "".join([*parts, score_table.definitions(table, chapter=slug)])


def _figures(
    slug: str,
    groups: Sequence[RunGroup],
    budget: _Budget,
    order: Sequence[str],
    save: Callable[[str, bytes], object],
    drawn: Callable[[str], object],
) -> str:
    compared: list[str] = []
    maps: list[str] = []
    shown: list[str] = []
    left = [slug, *(group.name for group in groups)]
    for item in figure_items(groups, side=budget.map_side, order=order):
        while item.run is not None and left[0] != item.run:
            drawn(left.pop(0))
        identifier = f"{slug}-{item.slug}"
        save(f"{identifier}.png", to_png(item.figure))
        # The panels have found their places; finding them again takes as long as drawing.
        item.figure.set_layout_engine("none")
        svg = to_svg(item.figure, identifier=identifier, label=escape(item.alt))
        if item.run is not None and item.run not in shown:
            shown.append(item.run)
        hidden = item.run is not None and item.run != shown[0]
        block = markup.figure_block(item, svg, identifier=identifier, hidden=hidden)
        (compared if item.run is None else maps).append(block)
    for name in left:
        drawn(name)
    parts = []
    if compared:
        parts.append(f'<h3>Compare</h3><div class="figures">{"".join(compared)}</div>')
    if maps:
        menu = markup.run_menu(shown, identifier=f"{slug}-runs") if len(shown) > 1 else ""
        parts.append(f'<h3>Look closer</h3>{menu}<div class="figures maps">{"".join(maps)}</div>')
    return "".join(parts)


def _player(slug: str, groups: Sequence[RunGroup], budget: _Budget) -> str:
    """The player of all runs with frames at the steps of the first run that has any; "" without frames."""
    models: dict[str, np.ndarray] = {}
    left_out = []
    for group in groups:
        steps, truth, model = (group.first.curve(f"player/{part}") for part in ("steps", "truth", "model"))
        if steps is None or truth is None or model is None or truth.ndim != 3:
            continue
        if not models:
            shared_steps, shared_truth, axes = steps, truth, group.plane_axes
        if np.array_equal(steps, shared_steps) and model.shape == shared_truth.shape:
            models[group.name] = model
        else:
            left_out.append(group.name)
    if not models:
        return ""
    data = pack_player(
        shared_steps,
        shared_truth,
        models,
        step_seconds=task_of(groups[0].first)[1],
        time_unit=units_of(groups[0].first).time,
        field=units_of(groups[0].first).field,
        axes=axes,
        max_pixels=budget.player_pixels,
    )
    return f"<h3>Watch</h3>{markup.player_block(data, left_out, identifier=f'{slug}-player')}"


def _asset(name: str) -> str:
    return resources.files("ergoflow.report").joinpath(name).read_text(encoding="utf-8")

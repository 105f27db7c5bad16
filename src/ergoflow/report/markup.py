"""HTML of the page's parts: cards, tables, player, figures, provenance.

Every function returns a string; every text that comes from a run goes through `html.escape`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from ergoflow.report.published import PublishedTable
from ergoflow.report.runs import RunGroup, RunView, slugify, survival_text
from ergoflow.report.sections import FigureItem
from ergoflow.report.summary import Card, duration, number
from ergoflow.report.tables import STRAYED, UNDEFINED, Cell, Column, Row, Table

#: Verdict -> (CSS class, symbol, words); the symbol carries the meaning where colour cannot.
MARKS = {
    "at floor": ("floor", "●", "at the noise floor: not distinguishable from truth against truth"),
    "better": ("better", "▲", "better than every trivial forecast"),
    "worse": ("worse", "▼", "not better than the best trivial forecast (persistence, climatology or zero)"),
    STRAYED: ("worse", "†", "most roll-outs left the truth's range of energies: statistics of another flow"),
    "failed": ("failed", "✕", "failed: a roll-out became infinite or ten times larger than any truth"),
}

COMMIT_DIGITS = 12
SYMBOLS = (
    "p is the model's, t the truth's: Ep and Et are the energies of a shell, TKEp and TKEt those of fluctuations at a "
    "point, C(t) is the correlation over t steps."
)
#: More sentences than this open the page as a list in small type.
MAX_LARGE_SENTENCES = 2
#: How `summary` ranks models.
BEST = (
    "Best: most headline metrics at the noise floor or better than every trivial forecast (persistence, climatology, "
    "zero); then most at the floor; then the lowest first column."
)
_PUBLISHED_LABELS = {
    "relative_l2@5": "Rel-L2, τ = 5",
    "relative_l2@25": "Rel-L2, τ = 25",
    "me_ape": "ME-APE",
    "me_lrw": "ME-LRw",
    "delta_lambda": "Δλ",
    "pca_kl": "KLD",
    "parameters": "parameters",
    "runtime_ms": "runtime (ms)",
    "memory_mb": "memory (MB)",
    "gflops": "10⁹ multiply-adds",
}


def verdicts(sentences: Sequence[str], *, compared: bool) -> str:
    """The opening of the page: a sentence per task, many of them as a list; with `compared`, what "best" means."""
    if len(sentences) <= MAX_LARGE_SENTENCES:
        text = "".join(f'<p class="verdict">{escape(text)}</p>' for text in sentences)
    else:
        text = f'<ul class="verdicts">{"".join(f"<li>{escape(text)}</li>" for text in sentences)}</ul>'
    return text + (f'<p class="meta">{BEST}</p>' if compared else "")


def card_list(cards: Sequence[Card], *, chapter: str) -> str:
    """The cards on top of a chapter; the name of a metric leads to its definition."""
    items = []
    for card in cards:
        css = MARKS[card.verdict][0] if card.verdict else "plain"
        mark = f' <span class="mark" aria-hidden="true">{MARKS[card.verdict][1]}</span>' if card.verdict else ""
        label = f'<span class="label">{escape(card.label)}</span>'
        if card.metric is not None:
            label = f'<a class="label" href="#{_definition(chapter, card.metric)}">{escape(card.label)}</a>'
        items.append(
            f'<li class="card {css}">{label}'
            f'<span class="value">{escape(card.value)}{mark}</span>'
            f'<span class="note">{escape(card.note)}</span></li>'
        )
    return f'<ul class="cards">{"".join(items)}</ul>'


def score_table(table: Table, columns: Sequence[Column], *, identifier: str, caption: str) -> str:
    """A sortable table; a column with variants carries all of them and a menu that picks one."""
    head = "".join(_header(table, column) for column in columns)
    body = "".join(_row(table, row, columns) for row in table.rows if _has_any(table, row, columns))
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f'<table id="{identifier}" class="scores">'
        f"<caption><span>{escape(caption)}</span></caption>"
        f'<thead><tr><th scope="col" aria-sort="none">'
        f'<button type="button" class="sort" data-first="ascending">forecast</button></th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def verdict_key() -> str:
    """What the symbols mean."""
    items = "".join(
        f'<li><span class="mark {css}" aria-hidden="true">{symbol}</span> {escape(words)}</li>'
        for css, symbol, words in MARKS.values()
    )
    return f'<ul class="key">{items}</ul>'


def definitions(table: Table, *, chapter: str) -> str:
    """How each number of the table is defined, variants included; what all have in common is said once above."""
    samples = _shared_samples(table)
    direction = _shared_direction(table)
    items = []
    for column in table.columns:
        text = column.definition.removesuffix(f"; {samples}") if samples else column.definition
        text = text if text.endswith(".") else f"{text}."
        better = "" if direction else f" {column.better.capitalize()} is better."
        variant = " <em>variant</em>" if column.variant_of else ""
        items.append(
            f'<dt id="{_definition(chapter, column.key)}">{escape(column.label)}{variant}</dt>'
            f"<dd>{escape(text)}{better}</dd>"
        )
    above = [f"{direction.capitalize()} is better."] if direction else []
    above += [SYMBOLS] if any("Ep" in column.definition for column in table.columns) else []
    above += [f"Statistics are of {samples}"] if samples else []
    return (
        "<details><summary>How each number is defined</summary>"
        f'<p class="meta">{escape(" ".join(above))}</p><dl>{"".join(items)}</dl></details>'
    )


def _shared_samples(table: Table) -> str:
    """What stands behind the last semicolon of more than one definition: how many frames a statistic is of."""
    tails = Counter(column.definition.rpartition("; ")[2] for column in table.columns if "; " in column.definition)
    found = [tail for tail, count in tails.items() if count > 1 and tail.endswith("frames.")]
    return found[0] if len(found) == 1 else ""


def _shared_direction(table: Table) -> str:
    """The better direction where it is the same for all numbers of the table."""
    directions = {column.better for column in table.columns}
    return directions.pop() if len(directions) == 1 else ""


def published_table(table: PublishedTable) -> str:
    """One of the paper's tables as printed."""
    head = "".join(f'<th scope="col">{_PUBLISHED_LABELS[key]}</th>' for key in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th>{"".join(f"<td>{value:,}</td>" for value in values)}</tr>'
        for label, values in table.rows.items()
    )
    caption = f"<caption><span>{table.source}. {escape(table.caption)}</span></caption>"
    return (
        f'<div class="scroll"><table class="plain">{caption}'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def player_block(data: dict[str, Any], left_out: Sequence[str], *, identifier: str) -> str:
    """The player's shell, filled by the page's script from the JSON beside it, and who is not in it."""
    absent = f'<p class="meta">Frames at other steps, not shown: {escape(", ".join(left_out))}.</p>' if left_out else ""
    return (
        f'<section class="player" id="{identifier}" tabindex="0" '
        'aria-label="Player: truth, predictions and errors. Space plays, arrow keys step, Home and End jump, '
        'plus and minus change the speed.">'
        '<fieldset class="chips"><legend>Models</legend></fieldset>'
        '<div class="tiles"></div><div class="scales"></div>'
        '<div class="controls"><button type="button" class="back" aria-label="Step back">◀</button>'
        '<button type="button" class="play" aria-pressed="false">Play</button>'
        '<button type="button" class="next" aria-label="Step forward">▶</button>'
        '<label class="scrub">Frame <input type="range" class="frame" min="0" max="0" value="0"></label>'
        '<label>Speed <input type="range" class="speed" min="1" max="30" value="8"></label>'
        '<output class="readout" aria-live="off"></output></div>'
        "<noscript><p>The player needs JavaScript; the figures below show the same fields.</p></noscript>"
        f"{absent}{data_block(data)}</section>"
    )


def figure_block(item: FigureItem, svg: str, *, identifier: str, hidden: bool) -> str:
    """A figure with its title and caption; a map also carries the run it belongs to."""
    run = "" if item.run is None else f' data-run="{escape(item.run)}"'
    classes = "wide" if item.wide else "half"
    return (
        f'<figure id="{identifier}" class="{classes}"{run}{" hidden" if hidden else ""}>'
        f'<h4>{escape(item.title)}</h4><div class="drawing">{svg}</div>'
        f"<figcaption>{escape(item.caption)}</figcaption></figure>"
    )


def run_menu(names: Sequence[str], *, identifier: str) -> str:
    """A menu that chooses whose maps are shown."""
    options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in names)
    menu = f'<select class="runs" id="{identifier}">{options}</select>'
    return f'<p class="menu"><label>Maps of {menu}</label></p>'


def provenance(groups: Sequence[RunGroup]) -> str:
    """Who made these numbers: run by run, then recipe, hardware and versions in full."""
    runs = [run for group in groups for run in group.runs]
    stages = ("simulate_s", "train_s", "predict_s", "score_s")
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in (
            "run",
            "seed",
            "parameters",
            "finite",
            "commit",
            "simulate",
            "train",
            "predict",
            "score",
        )
    )
    rows = "".join(_provenance_row(run, stages) for run in runs)
    details = "".join(_recipe_details(run) for run in runs)
    return (
        f'<div class="scroll"><table class="plain"><caption><span>Runs behind this page</span></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<details><summary>Recipes, hardware and versions</summary>{details}</details>"
    )


def data_block(data: Any) -> str:
    """JSON inside the page, safe wherever it stands: no `<` of the data survives."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return f'<script type="application/json">{text.replace("<", chr(92) + "u003c")}</script>'


def _provenance_row(run: RunView, stages: Sequence[str]) -> str:
    scores = run.scores
    times = {stage: scores["timings"].get(stage) for stage in stages}
    texts = {stage: "–" if time is None else duration(time) for stage, time in times.items()}
    if run.recipe.get("dataset", {}).get("kind") == "files":
        texts["simulate_s"] = "imported"
    if run.training.get("commit", scores["commit"]) != scores["commit"]:
        texts["train_s"] += f", commit {str(run.training['commit'])[:COMMIT_DIGITS]}"
    cells = [
        str(run.seed),
        f"{scores['parameters']:,}",
        survival_text([run]),
        str(scores["commit"] or "–")[:COMMIT_DIGITS],
        *texts.values(),
    ]
    tds = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(run.name)}</th>{tds}</tr>'


def _recipe_details(run: RunView) -> str:
    shown = {"recipe": run.recipe, "hardware": run.scores["hardware"], "versions": run.scores["versions"]}
    if run.training:
        shown["training"] = run.training
    text = json.dumps(shown, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>{escape(run.name)}, seed {run.seed}</summary><pre>{escape(text)}</pre></details>"


def _definition(chapter: str, metric: str) -> str:
    """Where on the page a metric is defined."""
    return f"{chapter}-defines-{slugify(metric)}"


def _family(table: Table, column: Column) -> tuple[Column, ...]:
    return (column, *(table.column(key) for key in column.variants))


def _has_any(table: Table, row: Row, columns: Sequence[Column]) -> bool:
    return any(member.key in row.cells for column in columns for member in _family(table, column))


def _header(table: Table, column: Column) -> str:
    family = _family(table, column)
    first = "descending" if column.better == "higher" else "ascending"
    unit = f' <span class="unit">({escape(column.unit)})</span>' if column.unit else ""
    # An equation stays on one line: τ = 1.
    label = escape(column.label).replace(" = ", "&nbsp;=&nbsp;")
    menu = ""
    if len(family) > 1:
        options = "".join(
            f'<option value="{escape(m.key)}">{escape(_variant_name(m, column))}</option>' for m in family
        )
        words = f"Variant of {escape(column.label)}"
        menu = f'<select class="variant" aria-label="{words}" title="{words}">{options}</select>'
    return (
        f'<th scope="col" aria-sort="none"><button type="button" class="sort" data-first="{first}" '
        f'title="{escape(column.definition)}">{label}{unit}</button>{menu}</th>'
    )


def _variant_name(member: Column, column: Column) -> str:
    """What a menu under the column's heading calls one of its definitions."""
    return "main" if member is column else member.label.removeprefix(f"{column.label}, ")


def _row(table: Table, row: Row, columns: Sequence[Column]) -> str:
    note = f' <span class="tag">{escape(row.note)}</span>' if row.note else ""
    cells = "".join(f"<td>{_cells(table, row, column)}</td>" for column in columns)
    return f'<tr class="{row.kind}"><th scope="row">{escape(row.label)}{note}</th>{cells}</tr>'


def _cells(table: Table, row: Row, column: Column) -> str:
    return "".join(
        _cell(row.cells.get(member.key), member, kind=row.kind, hidden=position > 0)
        for position, member in enumerate(_family(table, column))
    )


def _cell(cell: Cell | None, column: Column, *, kind: str, hidden: bool) -> str:
    attributes = f'data-metric="{escape(column.key)}"{" hidden" if hidden else ""}'
    if cell is None:
        return f'<span class="cell missing" {attributes}>–<span class="sr">not measured</span></span>'
    if cell.verdict == UNDEFINED:
        words = "not defined for what does not change"
        return f'<span class="cell missing" {attributes} title="{words}">–<span class="sr">{words}</span></span>'
    # The paper prints two decimals; more would claim what it does not.
    text = f"{cell.value:.2f}" if kind == "printed" and cell.value is not None else number(cell.value)
    worst = "-Infinity" if column.better == "higher" else "Infinity"
    parts = [f"<b>{text}</b>"]
    if cell.spread is not None:
        parts.append(f'<span class="spread"> ± {number(cell.spread)}</span>')
    css = "plain"
    # A trivial forecast is what models are judged by.
    if cell.verdict is not None and kind == "model":
        css, symbol, words = MARKS[cell.verdict]
        parts.append(f'<span class="mark" aria-hidden="true">{symbol}</span><span class="sr">{words}</span>')
    if cell.low is not None and cell.high is not None:
        parts.append(f"<small>{number(cell.low)}…{number(cell.high)}</small>")
    value = worst if cell.value is None else repr(cell.value)
    return f'<span class="cell {css}" {attributes} data-value="{value}">{"".join(parts)}</span>'

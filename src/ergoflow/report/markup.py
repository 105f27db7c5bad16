"""HTML of the page's parts: opening, cards, printed tables, player, figures, provenance.

Every function returns a string; every text that comes from a run goes through `html.escape`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from ergoflow.report.published import PublishedTable, in_print
from ergoflow.report.runs import RunGroup, RunView, survival_text
from ergoflow.report.score_table import MARKS, definition_id, scrolled
from ergoflow.report.sections import FigureItem
from ergoflow.report.summary import Card, duration

COMMIT_DIGITS = 12
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
            label = f'<a class="label" href="#{definition_id(chapter, card.metric)}">{escape(card.label)}</a>'
        items.append(
            f'<li class="card {css}">{label}'
            f'<span class="value">{escape(card.value)}{mark}</span>'
            f'<span class="note">{escape(card.note)}</span></li>'
        )
    return f'<ul class="cards">{"".join(items)}</ul>'


def published_table(table: PublishedTable) -> str:
    """One of the paper's tables as printed."""
    head = "".join(f'<th scope="col">{_PUBLISHED_LABELS[key]}</th>' for key in table.columns)
    rows = ""
    for label, values in table.rows.items():
        texts = [in_print(label, key, value) for key, value in zip(table.columns, values, strict=True)]
        rows += f'<tr><th scope="row">{escape(label)}</th>{"".join(f"<td>{text}</td>" for text in texts)}</tr>'
    return scrolled(f'<th scope="col"></th>{head}', rows, caption=f"{table.source}. {table.caption}")


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
        '<button type="button" class="play">Play</button>'
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
    columns = ("run", "seed", "parameters", "finite", "commit", "simulate", "train", "predict", "score")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    rows = "".join(_provenance_row(run, stages) for run in runs)
    details = "".join(_recipe_details(run) for run in runs)
    return (
        f"{scrolled(head, rows, caption='Runs behind this page')}"
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
    if _made_elsewhere(run):
        texts["train_s"] = "elsewhere"
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
    # How a model was trained elsewhere is not known here.
    unknown = ("objective", "training") if _made_elsewhere(run) else ()
    recipe = {part: settings for part, settings in run.recipe.items() if part not in unknown}
    shown = {"recipe": recipe, "hardware": run.scores["hardware"], "versions": run.scores["versions"]}
    if run.training:
        shown["training"] = run.training
    text = json.dumps(shown, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>{escape(run.name)}, seed {run.seed}</summary><pre>{escape(text)}</pre></details>"


def _made_elsewhere(run: RunView) -> bool:
    """Whether the model came as a step of somebody's own (`ergoflow.judge`)."""
    return bool(run.recipe.get("model", {}).get("kind") == "own")

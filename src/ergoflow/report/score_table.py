"""HTML of the table of scores: values with their verdicts and intervals, what the marks mean, how numbers are defined.

Every function returns a string; every text that comes from a run goes through `html.escape`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from ergoflow.report.runs import slugify
from ergoflow.report.summary import number
from ergoflow.report.tables import STRAYED, UNDEFINED, Cell, Column, Row, Table

#: Verdict -> (CSS class, symbol, words); the symbol carries the meaning where colour cannot.
MARKS = {
    "at floor": ("floor", "●", "at the noise floor: not distinguishable from truth against truth"),
    "better": ("better", "▲", "better than every trivial forecast"),
    "worse": ("worse", "▼", "not better than the best trivial forecast (persistence, climatology or zero)"),
    STRAYED: ("worse", "†", "most roll-outs left the truth's range of energies: statistics of another flow"),
    "failed": ("failed", "✕", "failed: a roll-out became infinite or ten times larger than any truth"),
}
SYMBOLS = (
    "p is the model's, t the truth's: Ep and Et are the energies of a shell, TKEp and TKEt those of fluctuations at a "
    "point, C(t) is the correlation over t steps."
)


def score_table(table: Table, columns: Sequence[Column], *, identifier: str, caption: str) -> str:
    """A sortable table; a column with variants carries all of them and a menu that picks one."""
    head = "".join(_header(table, column) for column in columns)
    body = "".join(_row(table, row, columns) for row in table.rows if _has_any(table, row, columns))
    first = '<button type="button" class="sort" data-first="ascending">forecast</button>'
    head = f'<th scope="col" aria-sort="none">{first}</th>{head}'
    return scrolled(head, body, caption=caption, attributes=f'id="{identifier}" class="scores"')


def scrolled(head: str, body: str, *, caption: str, attributes: str = 'class="plain"') -> str:
    """A table that moves sideways where it does not fit, by keys as well."""
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table {attributes}>'
        f"<caption><span>{escape(caption)}</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
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
            f'<dt id="{definition_id(chapter, column.key)}">{escape(column.label)}{variant}</dt>'
            f"<dd>{escape(text)}{better}</dd>"
        )
    above = [f"{direction.capitalize()} is better."] if direction else []
    above += [SYMBOLS] if any("Ep" in column.definition for column in table.columns) else []
    above += [f"Statistics are of {samples}"] if samples else []
    return (
        "<details><summary>How each number is defined</summary>"
        f'<p class="meta">{escape(" ".join(above))}</p><dl>{"".join(items)}</dl></details>'
    )


def definition_id(chapter: str, metric: str) -> str:
    """Where on the page a metric is defined."""
    return f"{chapter}-defines-{slugify(metric)}"


def _shared_samples(table: Table) -> str:
    """What stands behind the last semicolon of more than one definition: how many frames a statistic is of."""
    tails = Counter(column.definition.rpartition("; ")[2] for column in table.columns if "; " in column.definition)
    found = [tail for tail, count in tails.items() if count > 1 and tail.endswith("frames.")]
    return found[0] if len(found) == 1 else ""


def _shared_direction(table: Table) -> str:
    """The better direction where it is the same for all numbers of the table."""
    directions = {column.better for column in table.columns}
    return directions.pop() if len(directions) == 1 else ""


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

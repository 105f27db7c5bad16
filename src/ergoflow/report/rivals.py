"""Where our model is not ahead of the net it was built to beat: every main column of every task that has both."""

from __future__ import annotations

from ergoflow.report.digits import in_digits
from ergoflow.report.evidence import Evidence
from ergoflow.report.rules import is_lower
from ergoflow.report.standing import TASKS
from ergoflow.report.tables import Cell, Column, build_table

OURS, RIVAL = "ergoformer", "convnext"
NOTE = (
    f"Columns in which `{OURS}` is not ahead of `{RIVAL}` are named with both "
    "numbers, ours first; means over seeds where there are several. At the floor neither can be told from the truth."
)


def rivals_block(evidence: Evidence) -> str:
    """How many main columns of a task our model leads in, and the others by name."""
    lines = [_line(task, evidence) for task in TASKS if OURS in evidence.rows(task)]
    if not lines:
        return "Not run at full size yet (`ergoflow reproduce table1`)."
    head = ["| recipes | ahead in | behind, both at the floor | behind otherwise |", "| --- | --- | --- | --- |"]
    return "\n".join([NOTE, "", *head, *lines])


def _line(task: str, evidence: Evidence) -> str:
    rows = evidence.rows(task)
    if RIVAL not in rows:
        return f"| {task} | `{RIVAL}` is not run yet | | |"
    table = build_table([rows[OURS], rows[RIVAL]])
    ours, theirs = (row.cells for row in table.rows[:2])
    columns = [column for column in table.headlines if column.key in ours and column.key in theirs]
    behind = [column for column in columns if not is_lower(ours[column.key].value, theirs[column.key].value)]
    level = [column for column in behind if ours[column.key].verdict == theirs[column.key].verdict == "at floor"]
    worse = [column for column in behind if column not in level]
    names = [
        ", ".join(f"{_label(c)} {_number(ours[c.key])} : {_number(theirs[c.key])}" for c in part) or "–"
        for part in (level, worse)
    ]
    return f"| {task} | {len(columns) - len(behind)} of {len(columns)} columns | {' | '.join(names)} |"


def _label(column: Column) -> str:
    return column.label.replace("|", "\\|")  # it stands in a table


def _number(cell: Cell) -> str:
    return "failed" if cell.value is None else in_digits(cell.value)

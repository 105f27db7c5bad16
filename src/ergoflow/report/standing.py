"""The README's second table: short-term errors of the main models on every task, a row for each."""

from __future__ import annotations

from ergoflow.report.digits import in_digits
from ergoflow.report.evidence import Evidence, cell_file
from ergoflow.report.reproduction import budget
from ergoflow.report.runs import RunGroup
from ergoflow.report.tables import Row, build_table
from ergoflow.report.units import step_of

TASKS = {
    "kf256-coarse": "Kolmogorov flow, 256²",
    "kf128-coarse": "Kolmogorov flow, 128²",
    "kf128": "Kolmogorov flow, 128²",
    "tcf192": "channel plane, 192²",
    "tcf96": "channel plane, 96²",
}
MODELS = ("ergoformer", "convnext", "factformer", "a3m")
TRIVIAL = ("persistence", "climatology")
LEADS = ("relative_l2@5", "relative_l2@25")
NOTE = (
    "Relative L2 at τ = 5/25 steps; over several seeds their mean; bold: the lowest at τ = 5. δ is half the height of "
    "the channel, u_τ its friction velocity."
)


def standing_block(evidence: Evidence) -> str:
    """Relative L2 at τ = 5/25 of `MODELS` and of trivial forecasts on every task that has one of the models."""
    head = ("flow", "step", "training", *(f"`{model}`" for model in MODELS), *(f"*{name}*" for name in TRIVIAL))
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [line for task in TASKS if (line := _line(task, evidence))]
    if len(lines) == 2:
        return "No model has been run at full size yet (`ergoflow reproduce table1`)."
    return "\n".join([NOTE, "", *lines])


def _line(task: str, evidence: Evidence) -> str:
    """The row of a task, empty if none of the models has been run; the lowest error at τ = 5 is bold."""
    groups = {model: group for model, group in evidence.rows(task).items() if model in MODELS}
    if not groups:
        return ""
    table = build_table(list(groups.values()))
    rows = dict(zip(groups, table.rows, strict=False))
    trivial = {row.label: _errors(row) for row in table.rows if row.label in TRIVIAL}
    best = min(groups, key=lambda model: rows[model].cells[LEADS[0]].value or float("inf"))
    cells = [_cell(groups[m], rows[m], evidence, bold=m == best) if m in groups else "–" for m in MODELS]
    step = step_of(groups[best].first, digits=2)
    trained = " or ".join(dict.fromkeys(budget(group.first).removesuffix(" of training") for group in groups.values()))
    return f"| {' | '.join([TASKS[task], step, trained, *cells, *(trivial.get(name, '') for name in TRIVIAL)])} |"


def _cell(group: RunGroup, row: Row, evidence: Evidence, *, bold: bool) -> str:
    text = f"**{_errors(row)}**" if bold else _errors(row)
    linked = evidence.link(cell_file(group.name, group.first.seed), text)
    return f"{linked} ({len(group.runs)} seeds)" if len(group.runs) > 1 else linked


def _errors(row: Row) -> str:
    values = [row.cells[lead].value for lead in LEADS]
    return "/".join("failed" if value is None else in_digits(value) for value in values)

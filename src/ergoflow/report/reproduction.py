"""The paper's tables with our numbers beside the printed ones, and a verdict for each claim, as Markdown.

Every number comes from the runs it is given; none is typed. A cell reads `ours [95 % interval] (printed)`. A claim
says that some rows are lower than others in every column of a table:

    reproduced       each column's mean is lower, as claimed;
    not reproduced   some column's mean is not: the columns are named, with those beyond the intervals in bold;
    not testable     a row that the claim needs was not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ergoflow.report.published import TABLE_1, TABLE_2, TABLE_3, TABLE_4, PublishedTable
from ergoflow.report.runs import RunGroup, RunView, group_runs
from ergoflow.report.tables import Cell, Row, Table, build_table

BASELINES = {"mno": "MNO", "uno": "UNO", "mwt": "MWT", "factformer": "FactFormer"}
MAIN_ROWS = {**BASELINES, "a3m": "Ours"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A printed table and the runs held against it: recipes `<task>-<row>`, the first task that has any run.

    `rows` maps what follows the task in a recipe's name to the printed row; with `open_ended` every other recipe of the
    task is a row, too.
    """

    printed: PublishedTable
    tasks: tuple[str, ...]
    rows: dict[str, str]
    open_ended: bool = False


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`better` is claimed to be lower than each of `worse` in every column of a printed table."""

    text: str
    table: PublishedTable
    better: str
    worse: tuple[str, ...]


COMPARISONS = (
    Comparison(printed=TABLE_1, tasks=("kf256-coarse",), rows=MAIN_ROWS, open_ended=True),
    Comparison(printed=TABLE_2, tasks=("tcf192", "tcf96"), rows=MAIN_ROWS, open_ended=True),
    Comparison(
        printed=TABLE_3,
        tasks=("kf128",),
        rows={"a3m-base": "Base", "a3m-free": "+ A3M Att.", "a3m": "+ Unitary Op.", "a3m-exact": ""},
    ),
    Comparison(
        printed=TABLE_4,
        tasks=("kf128",),
        rows={
            "a3m-sigma1": "σ = 1",
            "a3m-sigma4": "σ = 4",
            "a3m": "σ = 8",
            "a3m-sigma16": "σ = 16",
            "a3m-sigma32": "σ = 32",
        },
    ),
)
CLAIMS = (
    Claim(
        text="on KF256 the transformer is better than every baseline in every column",
        table=TABLE_1,
        better="a3m",
        worse=tuple(BASELINES),
    ),
    Claim(
        text="on TCF the transformer is better than every baseline in every column",
        table=TABLE_2,
        better="a3m",
        worse=tuple(BASELINES),
    ),
    Claim(
        text="mean, max and min pooling is better than mean pooling",
        table=TABLE_3,
        better="a3m-free",
        worse=("a3m-base",),
    ),
    Claim(
        text="the unitary term is better than a free operator",
        table=TABLE_3,
        better="a3m",
        worse=("a3m-free",),
    ),
    Claim(
        text="an operator that is exactly orthogonal is better than a free one (not in print)",
        table=TABLE_3,
        better="a3m-exact",
        worse=("a3m-free",),
    ),
    Claim(text="σ = 8 is better than σ = 1", table=TABLE_4, better="a3m", worse=("a3m-sigma1",)),
)


def reproduction(runs: Sequence[RunView]) -> str:
    """The Markdown of all comparisons and claims that the runs allow."""
    groups = group_runs(runs)
    parts = ["## Claims", "", *_claims(groups)]
    for comparison in COMPARISONS:
        task = _task(comparison, groups)
        title = f"## {comparison.printed.source}"
        if task is None:
            parts += ["", title, "", f"Not run: no recipe of {' or '.join(comparison.tasks)} is among the results."]
            continue
        members = _members(comparison, task, groups)
        parts += ["", f"{title}: {task}", "", *_table(comparison, task, members), "", *_files(members)]
    return "\n".join(parts) + "\n"


def _task(comparison: Comparison, groups: Sequence[RunGroup]) -> str | None:
    for task in comparison.tasks:
        if _members(comparison, task, groups):
            return task
    return None


def _members(comparison: Comparison, task: str, groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups that are rows of a comparison: those with a printed twin in its order, then the others."""
    by_row = {group.name.removeprefix(f"{task}-"): group for group in groups if group.name.startswith(f"{task}-")}
    # kf128-coarse-a3m begins with kf128-, but it is a row of another task.
    by_row = {row: group for row, group in by_row.items() if not row.startswith(("coarse-", "transient-"))}
    known = [by_row[row] for row in comparison.rows if row in by_row]
    if not comparison.open_ended:
        return known
    return known + [group for row, group in by_row.items() if row not in comparison.rows]


def _table(comparison: Comparison, task: str, members: Sequence[RunGroup]) -> list[str]:
    table, keys = build_table(members), comparison.printed.columns
    labels = [_label(table, key) for key in keys]
    lines = [f"| model | {' | '.join(labels)} | survived |", f"| --- |{' --- |' * (len(keys) + 1)}"]
    # The rows of the models come first, in the order of the groups.
    for group, row in zip(members, table.rows, strict=False):
        name = group.name.removeprefix(f"{task}-")
        printed = comparison.printed.rows.get(comparison.rows.get(name, ""))
        seeds = "" if len(group.runs) == 1 else f" ({len(group.runs)} seeds)"
        lines.append(f"| {name}{seeds} | {_cells(row, keys, printed)} | {_survival(group)} |")
    for row in table.rows[len(members) :]:
        if row.kind != "printed":
            lines.append(f"| *{row.label}* | {_cells(row, keys, None)} | |")
    return lines


def _label(table: Table, key: str) -> str:
    return next((column.label for column in table.columns if column.key == key), key)


def _cells(row: Row, keys: Sequence[str], printed: Sequence[float] | None) -> str:
    return " | ".join(_cell(row.cells.get(key), None if printed is None else printed[i]) for i, key in enumerate(keys))


def _cell(cell: Cell | None, printed: float | None) -> str:
    beside = "" if printed is None else f" ({printed:g})"
    if cell is None:
        return f"–{beside}"
    if cell.value is None:
        return f"failed{beside}"
    bounds = "" if cell.low is None or cell.high is None else f" [{cell.low:.2g}, {cell.high:.2g}]"
    return f"{cell.value:.3g}{bounds}{beside}"


def _survival(group: RunGroup) -> str:
    fractions = [run.scores["survival"]["fraction"] for run in group.runs]
    return f"{sum(fractions) / len(fractions):.0%}"


def _files(members: Sequence[RunGroup]) -> list[str]:
    """Where each row comes from, and under which budget it was trained."""
    lines = []
    for group in members:
        for run in group.runs:
            training, device = run.recipe["training"], run.scores["hardware"]["device"]
            minutes = training.get("max_minutes")
            budget = f"{minutes:g} min of training" if minutes is not None else f"{training['epochs']} epochs"
            lines.append(
                f"* `results/{run.name}/seed{run.seed}.json`: {run.scores['parameters']:,} parameters, {budget}, "
                f"{device}, commit {run.scores['commit']}"
            )
    return lines


def _claims(groups: Sequence[RunGroup]) -> list[str]:
    lines = ["| table | claim | verdict | because |", "| --- | --- | --- | --- |"]
    for claim in CLAIMS:
        comparison = next(c for c in COMPARISONS if c.printed is claim.table)
        verdict, reason = judge(claim, comparison, groups)
        lines.append(f"| {claim.table.source} | {claim.text} | **{verdict}** | {reason} |")
    return lines


def judge(claim: Claim, comparison: Comparison, groups: Sequence[RunGroup]) -> tuple[str, str]:
    """The verdict on a claim and its reason."""
    task = _task(comparison, groups)
    by_name = {group.name: group for group in groups}
    missing = [row for row in (claim.better, *claim.worse) if f"{task}-{row}" not in by_name]
    if task is None or missing:
        return "not testable", f"not run: {', '.join(missing)}"
    needed = [by_name[f"{task}-{row}"] for row in (claim.better, *claim.worse)]
    better, *worse = build_table(needed).rows[: len(needed)]
    against, shared = [], 0
    for name, row in zip(claim.worse, worse, strict=True):
        for key in claim.table.columns:
            if key not in better.cells or key not in row.cells:
                continue
            shared += 1
            ours, theirs = better.cells[key], row.cells[key]
            if not _lower(ours.value, theirs.value):
                mark = "**" if theirs.high is not None and _lower(theirs.high, ours.low) else ""
                against.append(f"{mark}{name} {key}{mark}")
    if against:
        return "not reproduced", f"lower or equal in {len(against)} of {shared} comparisons: {', '.join(against)}"
    return "reproduced", f"lower in all {shared} comparisons on {task}"


def _lower(a: float | None, b: float | None) -> bool:
    """Whether a is lower than b, where None is a failure: an infinite error."""
    return a is not None and (b is None or a < b)

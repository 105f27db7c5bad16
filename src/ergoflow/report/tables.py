"""The main table of each task: models, trivial forecasts, noise floor and the paper's printed rows.

One `Table` holds all runs of one task (dataset and step length). Its columns are metrics: headline metrics
first, each followed by its variants. A cell holds the mean over seeds, their spread, a 95 % interval and a
verdict. Statistics of roll-outs most of which have left the truth's range of energies are those of another flow: where
one looks good its verdict is `strayed`.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ergoflow.report import published
from ergoflow.report.runs import REFERENCE_ROWS, VERDICTS, RunGroup, finite_or_none, has_strayed, task_of

FLOOR_LABEL = "truth against truth"
RowKind = Literal["model", "reference", "floor", "printed"]

#: From best to worst; a group of seeds is judged by its worst one.
_SEVERITY = {verdict: rank for rank, verdict in enumerate(VERDICTS)}
GOOD = ("at floor", "better")
STRAYED = "strayed"
#: Of a trivial forecast and of the floor: they cannot fail, but what stands still has no spectrum or correlation.
UNDEFINED = "undefined"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number. `value` None means failed (an infinite error), or undefined where the verdict says so.

    `spread` over `seeds` is None for one seed. `low` and `high` bound the 95 % bootstrap interval; over several seeds,
    the hull of theirs.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    seeds: int = 1
    verdict: str | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric: `variants` lists the keys of other definitions of the same quantity."""

    key: str
    label: str
    unit: str
    better: str
    definition: str
    headline: bool
    variant_of: str | None
    variants: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; `cells` has no entry where nothing was measured or printed."""

    label: str
    kind: RowKind
    note: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows of one task."""

    dataset: str
    step_seconds: float
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def column(self, key: str) -> Column:
        """The column of a metric key."""
        return next(column for column in self.columns if column.key == key)

    @property
    def headlines(self) -> tuple[Column, ...]:
        """The columns that are shown first."""
        return tuple(column for column in self.columns if column.headline and column.variant_of is None)

    @property
    def further(self) -> tuple[Column, ...]:
        """The columns that are neither headlines nor variants of another column."""
        return tuple(column for column in self.columns if not column.headline and column.variant_of is None)


def build_table(groups: Sequence[RunGroup]) -> Table:
    """The table of one task; all groups must share dataset and step length."""
    tasks = sorted({task_of(group.first) for group in groups})
    if len(tasks) != 1:
        raise ValueError(f"one table needs runs of one task, got {tasks}; build a table per task")
    (dataset, step_seconds), metrics = tasks[0], _merged_metrics(groups)
    columns = tuple(_column(key, metrics) for key in metrics)
    references = [
        Row(label=name, kind="reference", note="", cells=_shared_cells(groups, name)) for name in REFERENCE_ROWS
    ]
    floor = Row(label=FLOOR_LABEL, kind="floor", note="noise floor", cells=_floor_cells(groups))
    rows = [_model_row(group) for group in groups] + [row for row in [*references, floor] if row.cells]
    rows += _printed_rows(dataset, metrics)
    return Table(dataset=dataset, step_seconds=step_seconds, columns=columns, rows=tuple(rows))


def to_json(tables: Sequence[Table]) -> str:
    """All tables as JSON; a failed or undefined value is null, a number that was never measured is absent."""
    return json.dumps({"format": 1, "tables": [asdict(table) for table in tables]}, indent=1, allow_nan=False)


def to_csv(tables: Sequence[Table]) -> str:
    """All tables as one long CSV, a line per number; one that is none is the word `failed` or `undefined`."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        [
            "dataset",
            "step_seconds",
            "row",
            "kind",
            "note",
            "metric",
            "value",
            "low",
            "high",
            "spread",
            "seeds",
            "verdict",
        ]
    )
    for table in tables:
        for row in table.rows:
            for key, cell in row.cells.items():
                missing = UNDEFINED if cell.verdict == UNDEFINED else "failed"
                value = missing if cell.value is None else repr(cell.value)
                bounds = ["" if bound is None else repr(bound) for bound in (cell.low, cell.high, cell.spread)]
                head = [table.dataset, repr(table.step_seconds), row.label, row.kind, row.note, key]
                writer.writerow([*head, value, *bounds, cell.seeds, cell.verdict or ""])
    return stream.getvalue()


def _merged_metrics(groups: Sequence[RunGroup]) -> dict[str, Mapping[str, Any]]:
    merged: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        for run in group.runs:
            for key, metric in run.scores["metrics"].items():
                merged.setdefault(key, metric)
    return merged


def _column(key: str, metrics: Mapping[str, Mapping[str, Any]]) -> Column:
    metric = metrics[key]
    return Column(
        key=key,
        label=metric["label"],
        unit=metric.get("unit", ""),
        better=metric["better"],
        definition=metric["definition"],
        headline=bool(metric["headline"]),
        variant_of=metric["variant_of"],
        variants=tuple(other for other in metrics if metrics[other]["variant_of"] == key),
    )


def _model_row(group: RunGroup) -> Row:
    keys = [key for key in group.first.scores["metrics"] if all(key in run.scores["metrics"] for run in group.runs)]
    cells = {key: _pooled([run.scores["metrics"][key]["rows"]["model"] for run in group.runs]) for key in keys}
    if has_strayed(group.scores):
        # Only statistics have a floor: forecasts of a few steps are what they are.
        good = [key for key in keys if group.first.scores["metrics"][key]["floor"] and cells[key].verdict in GOOD]
        cells |= {key: replace(cells[key], verdict=STRAYED) for key in good}
    seeds = "" if len(group.runs) == 1 else f"{len(group.runs)} seeds"
    return Row(label=group.name, kind="model", note=seeds, cells=cells)


def _pooled(cells: Sequence[Mapping[str, Any]]) -> Cell:
    """Mean and spread over seeds; one failed seed fails the group, for a mean must not skip it."""
    values = [finite_or_none(cell["value"]) for cell in cells]
    finite = [value for value in values if value is not None]
    verdict = max((cell["verdict"] for cell in cells), key=_SEVERITY.__getitem__)
    if len(finite) < len(values):
        return Cell(value=None, seeds=len(values), verdict="failed")
    lows, highs = ([finite_or_none(cell[bound]) for cell in cells] for bound in ("low", "high"))
    return Cell(
        value=statistics.fmean(finite),
        low=None if None in lows else min(low for low in lows if low is not None),
        high=None if None in highs else max(high for high in highs if high is not None),
        spread=statistics.stdev(finite) if len(finite) > 1 else None,
        seeds=len(values),
        verdict=verdict,
    )


def _shared_cells(groups: Sequence[RunGroup], row: str) -> dict[str, Cell]:
    """Cells of a trivial forecast, which depends on the test data alone: the first run that has it speaks."""
    cells: dict[str, Cell] = {}
    for group in groups:
        for key, metric in group.first.scores["metrics"].items():
            if row in metric["rows"]:
                cells.setdefault(key, _single(metric["rows"][row]))
    return cells


def _floor_cells(groups: Sequence[RunGroup]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for group in groups:
        for key, metric in group.first.scores["metrics"].items():
            if metric["floor"] is not None:
                cells.setdefault(key, _single(metric["floor"]))
    return cells


def _single(cell: Mapping[str, Any]) -> Cell:
    value = finite_or_none(cell["value"])
    if value is None:
        return Cell(value=None, verdict=UNDEFINED)
    return Cell(
        value=value,
        low=finite_or_none(cell.get("low")),
        high=finite_or_none(cell.get("high")),
        verdict=cell.get("verdict"),
    )


def _printed_rows(dataset: str, metrics: Mapping[str, Any]) -> list[Row]:
    table = published.main_table(dataset)
    if table is None:
        return []
    rows = []
    for label, values in table.rows.items():
        cells = {key: Cell(value=value) for key, value in zip(table.columns, values, strict=True) if key in metrics}
        # The advantage is a percentage over the other rows, not a score of its own.
        if cells and not label.startswith("Advantage"):
            rows.append(Row(label=label, kind="printed", note=f"printed, {table.source}", cells=cells))
    return rows

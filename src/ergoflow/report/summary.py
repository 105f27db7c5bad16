"""The page in one sentence and a few cards: which run did best, and how good that is.

The best run is the one with the most headline verdicts "at floor" or "better", then the most "at floor",
then the lowest first headline number. Verdicts come from the scores; none is made here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ergoflow.report.digits import in_digits
from ergoflow.report.runs import RunGroup, has_strayed, share_in_range
from ergoflow.report.tables import FLOOR_LABEL, STRAYED, Row, Table, build_table
from ergoflow.report.units import step_of

MAX_METRIC_CARDS = 6
_UNITS = ((3600, "h"), (60, "min"), (1, "s"))
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number on top of the page: what it is, its value, and what to hold it against; `metric` None is no score."""

    label: str
    value: str
    note: str
    verdict: str | None = None
    metric: str | None = None


def best_first(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups of one task from the best on the headline metrics to the worst (see the module docstring)."""
    table = build_table(groups)
    rows = {row.label: row for row in table.rows if row.kind == "model"}
    return sorted(groups, key=lambda group: _rank(table, rows[group.name]))


def best_row(table: Table) -> Row:
    """The model row that did best on the headline metrics."""
    return min((row for row in table.rows if row.kind == "model"), key=lambda row: _rank(table, row))


def sentence(table: Table, groups: Sequence[RunGroup]) -> str:
    """The verdict on one task in plain words."""
    row = best_row(table)
    verdicts = _verdicts(table, row)
    at_floor, better, worse, failed = (verdicts.count(v) for v in ("at floor", "better", "worse", "failed"))
    models = sum(other.kind == "model" for other in table.rows)
    task = f"on {table.dataset} in steps of {step_of(groups[0].first)}, {row.label}"
    opening = f"O{task[1:]}" if models == 1 else f"Of {models} models {task}"
    parts = []
    if at_floor:
        parts.append(f"cannot be told from the truth in {at_floor} of {len(verdicts)} headline metrics")
    if better:
        parts.append(f"beats every trivial forecast in {better}{' more' if at_floor else f' of {len(verdicts)}'}")
    if worse:
        parts.append(f"does not beat them in {worse}")
    if strayed := verdicts.count(STRAYED):
        parts.append(f"cannot be judged in {strayed}")
    if failed:
        parts.append(f"fails in {failed}")
    body = _joined(parts) if parts else "has no headline metric"
    does_best = " does best: it" if models > 1 else ""
    return f"{opening}{does_best} {body}; {_ending(next(group for group in groups if group.name == row.label))}."


def cards(table: Table, groups: Sequence[RunGroup]) -> tuple[Card, ...]:
    """Roll-outs that stay finite and in range, the first headline metrics, size and training time of the best run."""
    row = best_row(table)
    group = next(group for group in groups if group.name == row.label)
    finite, total, steps = survival(group)
    found = [
        Card(
            label="finite",
            value=f"{finite}/{total}",
            note=f"roll-outs of {steps:,} steps",
            verdict=None if finite == total else "failed",
        )
    ]
    if is_range_known(group):
        found.append(
            Card(
                label="in range",
                value=f"{in_range(group)}/{total}",
                note="end with the truth's energy and enstrophy",
                verdict=STRAYED if has_strayed(group.scores) else None,
            )
        )
    for column in table.headlines[:MAX_METRIC_CARDS]:
        cell = row.cells.get(column.key)
        if cell is not None:
            found.append(
                Card(
                    label=column.label,
                    value=number(cell.value),
                    note=_context(table, column.key),
                    verdict=cell.verdict,
                    metric=column.key,
                )
            )
    scores = group.first.scores
    train = scores["timings"].get("train_s")
    note = "training time not recorded" if train is None else f"trained in {duration(train)}"
    found.append(Card(label="parameters", value=f"{scores['parameters']:,}", note=note))
    return tuple(found)


def survival(group: RunGroup) -> tuple[int, int, int]:
    """(roll-outs that stayed finite, all roll-outs, steps), over all seeds of a group."""
    total = sum(int(run.scores["num_trajectories"]) for run in group.runs)
    alive = sum(run.scores["survival"]["fraction"] * run.scores["num_trajectories"] for run in group.runs)
    return (
        round(alive),
        total,
        int(group.first.scores["survival"].get("steps", group.first.scores["rollout_steps"])),
    )


def in_range(group: RunGroup) -> int:
    """Roll-outs that end in the truth's range, over all seeds of a group."""
    return round(sum(share_in_range(run.scores) * run.scores["num_trajectories"] for run in group.runs))


def is_range_known(group: RunGroup) -> bool:
    """Whether the scores of a group say how many of its roll-outs end in the truth's range."""
    return all(any("_in_range@" in name for name in run.scores["survival"]) for run in group.runs)


def number(value: float | None) -> str:
    """Two or three significant digits; "failed" for None, for that is what a missing score means."""
    if value is None:
        return "failed"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 < exponent < 5:
        decimals = 4 if exponent == -3 else min(3, max(0, 2 - exponent))
        return f"{value:.{decimals}f}".replace("-", "−")
    # Rounding may carry: 9.97e-5 is 1.0×10⁻⁴.
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPTS)}".replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds in the unit a person would use."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{in_digits(seconds / size, 2)} {unit}"


def _rank(table: Table, row: Row) -> tuple[int, int, float]:
    """The lower the better."""
    verdicts = _verdicts(table, row)
    first = row.cells.get(table.headlines[0].key) if table.headlines else None
    value = first.value if first is not None and first.value is not None else math.inf
    sign = -1 if table.headlines and table.headlines[0].better == "higher" else 1
    good = sum(verdict in ("at floor", "better") for verdict in verdicts)
    return -good, -verdicts.count("at floor"), sign * value


def _verdicts(table: Table, row: Row) -> list[str]:
    cells = [row.cells[column.key] for column in table.headlines if column.key in row.cells]
    return [cell.verdict for cell in cells if cell.verdict is not None]


def _context(table: Table, key: str) -> str:
    """What a number is held against: the floor, persistence, and the last row the paper prints."""
    rows = {row.label: row for row in table.rows if row.kind in ("reference", "floor")}
    printed = [row for row in table.rows if row.kind == "printed" and key in row.cells]
    parts = []
    for label, short in ((FLOOR_LABEL, "floor"), ("persistence", "persistence")):
        cell = rows[label].cells.get(key) if label in rows else None
        if cell is not None and cell.value is not None:
            parts.append(f"{short} {number(cell.value)}")
    if printed:
        parts.append(f"paper prints {printed[-1].cells[key].value:.2f}")
    return " · ".join(parts)


def _ending(group: RunGroup) -> str:
    """How many roll-outs of a group stay finite and, where some do not, how many keep the truth's energies."""
    (finite, total, steps), inside = survival(group), in_range(group)
    everyone = {1: "its roll-out", 2: "both roll-outs"}.get(total, f"all {total} roll-outs")
    some = f"{finite} of {total} roll-outs" if finite else "no roll-out"
    text = f"{everyone if finite == total else some} {'stays' if finite <= 1 else 'stay'} finite for {steps:,} steps"
    if inside < finite:
        text += f"; {inside} of {total} {'keeps' if inside == 1 else 'keep'} the truth's energy and enstrophy"
    return text


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]

"""The rules that decide a claim of the paper from the scores of the runs, and what a rule returns.

Each function makes a rule. Comparisons of two models use means; a difference beyond the 95 % intervals of both is in
bold. A failed roll-out is an infinite error. A rule whose cells are missing says so, and decides nothing, but that one
counterexample refutes what is claimed of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ergoflow.report.digits import in_digits
from ergoflow.report.evidence import Evidence
from ergoflow.report.reproduction import BASELINES, comparison
from ergoflow.report.runs import RunGroup, finite_or_none, has_strayed, share_in_range
from ergoflow.report.tables import Cell, build_table

Word = Literal["reproduced", "not reproduced", "not testable", "not run yet"]
LONG_TERM = ("me_ape", "me_lrw", "delta_lambda", "pca_kl")
SHORT_TERM = ("relative_l2@5", "relative_l2@25")


@dataclass(frozen=True)
class Verdict:
    """What a rule found, in a word and a reason."""

    word: Word
    reason: str


def decided(holds: bool, reason: str) -> Verdict:
    """The verdict of a rule whose cells are all there."""
    return Verdict("reproduced" if holds else "not reproduced", reason)


def lower(
    table: str, better: str, worse: Sequence[str], keys: Sequence[str] | None = None
) -> Callable[[Evidence], Verdict]:
    """A rule: `better` has a lower mean than each of `worse` in every column (None: all printed ones) of a table."""

    def judge(found: Mapping[str, RunGroup]) -> Verdict:
        cells, labels = _cells(found), _labels(found)
        wanted = keys or comparison(table).printed.columns
        others = [row for row in worse if row in found]
        columns = {row: [key for key in wanted if key in cells[better] and key in cells[row]] for row in others}
        against = {
            row: [key for key in shared if _loses(cells[better][key], cells[row][key])]
            for row, shared in columns.items()
        }
        total, lost = (sum(map(len, counted.values())) for counted in (columns, against))
        if not total:
            return Verdict("not run yet", f"no cell of {table} holds {', '.join(wanted)}")
        far = [row for row, group in found.items() if has_strayed(group.scores)]
        note = f". Most roll-outs of {', '.join(far)} left the truth's range" if far and not short_term(keys) else ""
        if not lost:
            return Verdict("reproduced", f"lower in all {total} comparisons{note}")
        shown = [
            _against(row, columns[row], keys_lost, cells[better], cells[row], labels)
            for row, keys_lost in against.items()
            if keys_lost
        ]
        return Verdict("not reproduced", f"the other way in {lost} of {total} comparisons: {'; '.join(shown)}{note}")

    return lambda evidence: against_all(evidence, table, better, worse, judge)


def short_term(keys: Sequence[str] | None) -> bool:
    """Whether all columns are errors of forecasts, not statistics of long roll-outs."""
    return keys is not None and set(keys) <= set(SHORT_TERM)


def advantage(table: str) -> Callable[[Evidence], Verdict]:
    """A rule: (best baseline − ours)/best baseline is at least the printed percentage in every column.

    A baseline more can only make it less.
    """

    def judge(found: Mapping[str, RunGroup]) -> Verdict:
        chosen = comparison(table)
        cells, labels, printed = _cells(found), _labels(found), chosen.printed.rows["Advantage (%)"]
        good, shown = True, []
        for key, least in zip(chosen.printed.columns, printed, strict=True):
            values = [finite_or_none(cells[row][key].value) for row in found if row != "a3m" and key in cells[row]]
            best, ours = min((v for v in values if v is not None), default=math.inf), cells["a3m"].get(key)
            if ours is None or ours.value is None or best == 0:
                good = False
                shown.append(f"{labels.get(key, key)}: failed ({least:g})")
                continue
            percent = 100 * (1 - ours.value / best)
            good = good and percent >= least
            shown.append(f"{labels[key]}: {in_digits(percent).replace('-', '−')} ({least:g})")
        return decided(good, "ours (printed), per cent: " + ", ".join(shown))

    return lambda evidence: against_all(evidence, table, "a3m", tuple(BASELINES), judge)


def survives(tables: Sequence[str]) -> Callable[[Evidence], Verdict]:
    """A rule: every roll-out of a3m stays finite for all of its steps and ends in the truth's range of energies."""

    def rule(evidence: Evidence) -> Verdict:
        shares = {}
        for table in tables:
            found = needed(evidence, table, ("a3m",))
            if isinstance(found, Verdict):
                return found
            runs = found["a3m"].runs
            shares_of_runs = [min(run.scores["survival"]["fraction"], share_in_range(run.scores)) for run in runs]
            share = sum(shares_of_runs) / len(runs)
            shares[found["a3m"].name] = (share, runs[0].scores["rollout_steps"])
        good = all(share == 1 for share, _ in shares.values())
        reason = ", ".join(
            f"{name}: {share:.0%} finish {steps} steps in range" for name, (share, steps) in shares.items()
        )
        return decided(good, reason)

    return rule


def at_floor(tables: Sequence[str]) -> Callable[[Evidence], Verdict]:
    """A rule: every long-term column of a3m is at the floor, that is, no worse than truth against truth."""

    def rule(evidence: Evidence) -> Verdict:
        above, high, count = [], 0, 0
        for table in tables:
            found = needed(evidence, table, ("a3m",))
            if isinstance(found, Verdict):
                return found
            cells, labels = _cells(found)["a3m"], _labels(found)
            count += sum(key in cells for key in LONG_TERM)
            lost = [labels[key] for key in LONG_TERM if key in cells and not _floors(cells[key])]
            high += len(lost)
            above += [f"{found['a3m'].name}: {', '.join(lost)}"] if lost else []
        if not count:
            return Verdict("not run yet", "no cell holds a long-term column")
        if above:
            return Verdict("not reproduced", f"above the floor in {high} of {count} columns: {'; '.join(above)}")
        return Verdict("reproduced", f"at the floor in all {count} columns")

    return rule


def beats_persistence(tables: Sequence[str]) -> Callable[[Evidence], Verdict]:
    """A rule: a3m is below persistence at τ = 5 and 25."""

    def rule(evidence: Evidence) -> Verdict:
        shown, good = [], True
        for table in tables:
            found = needed(evidence, table, ("a3m",))
            if isinstance(found, Verdict):
                return found
            metrics = found["a3m"].first.scores["metrics"]
            cells, labels = _cells(found)["a3m"], _labels(found)
            for key in SHORT_TERM:
                if key in metrics and "persistence" in metrics[key]["rows"]:
                    trivial = finite_or_none(metrics[key]["rows"]["persistence"]["value"])
                    good = good and is_lower(cells[key].value, trivial)
                    value = as_text(cells[key].value)
                    shown.append(f"{found['a3m'].name} {labels[key]}: {value} ({as_text(trivial)})")
        if not shown:
            return Verdict("not run yet", "no cell holds persistence")
        return decided(good, "persistence in brackets: " + ", ".join(shown))

    return rule


def settled(word: Word, reason: str) -> Callable[[Evidence], Verdict]:
    """A rule that no result can change: arithmetic of the printed numbers, mathematics, or other people's data."""
    return lambda evidence: Verdict(word, reason)


def both(first: Verdict, second: Verdict) -> Verdict:
    """The worse of two verdicts, with both reasons: what is refuted in one part is refuted."""
    order: tuple[Word, ...] = ("not reproduced", "not run yet", "not testable", "reproduced")
    word = min((first.word, second.word), key=order.index)
    reasons = (f"missing: {v.reason}" if v.word == "not run yet" else v.reason for v in (first, second))
    return Verdict(word, "; ".join(reasons))


def needed(evidence: Evidence, table: str, rows: Sequence[str]) -> dict[str, RunGroup] | Verdict:
    """The groups of some rows, or the verdict that they are missing."""
    found, missing = _measured(evidence, table, rows)
    return Verdict("not run yet", missing) if missing else found


def against_all(
    evidence: Evidence,
    table: str,
    ours: str,
    others: Sequence[str],
    judge: Callable[[Mapping[str, RunGroup]], Verdict],
) -> Verdict:
    """The verdict on what is claimed of one row against each of the others.

    With rows missing it stands where those that are there refute the claim; otherwise it waits for them.
    """
    found, missing = _measured(evidence, table, (ours, *others))
    if not missing:
        return judge(found)
    verdict = judge(found) if ours in found and len(found) > 1 else None
    if verdict is None or verdict.word != "not reproduced":
        return Verdict("not run yet", missing)
    return Verdict(verdict.word, f"{verdict.reason}. Not run yet: {missing}")


def _measured(evidence: Evidence, table: str, rows: Sequence[str]) -> tuple[dict[str, RunGroup], str]:
    """The groups of those rows that there are, and the names of the others."""
    tasks = comparison(table).tasks
    task = evidence.fullest_task(tasks)
    there = {} if task is None else evidence.rows(task)
    missing = ", ".join(row for row in rows if row not in there)
    return {row: there[row] for row in rows if row in there}, missing and f"{task or tasks[0]}: {missing}"


def _cells(groups: Mapping[str, RunGroup]) -> dict[str, Mapping[str, Cell]]:
    table = build_table(list(groups.values()))
    return {row: line.cells for row, line in zip(groups, table.rows, strict=False)}


def _labels(groups: Mapping[str, RunGroup]) -> dict[str, str]:
    """What heads each column, without a comma: it stands in lists."""
    return {column.key: column.label.replace(", ", " ") for column in build_table(list(groups.values())).columns}


def _loses(ours: Cell, theirs: Cell) -> bool:
    return not is_lower(ours.value, theirs.value)


def _against(
    row: str,
    columns: Sequence[str],
    lost: Sequence[str],
    ours: Mapping[str, Cell],
    theirs: Mapping[str, Cell],
    labels: Mapping[str, str],
) -> str:
    """The row that won, and the columns in which it did: bold where not even the intervals overlap."""
    clear = [_clearly_loses(ours[key], theirs[key]) for key in lost]
    if len(columns) == 1:
        return f"**{row}**" if clear[0] else row
    if len(lost) == len(columns) and all(clear):
        return f"{row}: **{'both' if len(lost) == 2 else f'all {len(lost)}'}**"
    return f"{row}: " + ", ".join(
        f"**{labels[k]}**" if sure else labels[k] for k, sure in zip(lost, clear, strict=True)
    )


def _clearly_loses(ours: Cell, theirs: Cell) -> bool:
    """Whether not even the intervals overlap."""
    return theirs.high is not None and is_lower(theirs.high, ours.low)


def is_lower(a: float | None, b: float | None) -> bool:
    """Whether a is lower than b, where None is a failure: an infinite error."""
    return a is not None and (b is None or a < b)


def _floors(cell: Cell) -> bool:
    return cell.verdict == "at floor"


def as_text(value: float | None) -> str:
    """A number in three digits; None is a failure."""
    return "failed" if value is None else in_digits(value)

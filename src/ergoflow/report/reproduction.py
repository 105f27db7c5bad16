"""The paper's tables with our numbers beside the printed ones, as Markdown.

Every number comes from the runs it is given; none is typed. A cell reads `ours [95 % interval] (printed)`, and the name
of its row links to the file it comes from. Which runs stand in which table is said in `COMPARISONS`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ergoflow.report.digits import in_digits
from ergoflow.report.evidence import Evidence, cell_file
from ergoflow.report.published import TABLE_1, TABLE_2, TABLE_3, TABLE_4, PublishedTable
from ergoflow.report.runs import RunGroup, RunView, survival_text
from ergoflow.report.tables import STRAYED, UNDEFINED, Cell, Row, Table, build_table

BASELINES = {"mno": "MNO", "uno": "UNO", "mwt": "MWT", "factformer": "FactFormer"}
# Rows without a printed twin.
UNPRINTED = dict.fromkeys(("a3m-common", "convnext", "ergoformer"), "")
MAIN_ROWS = {**BASELINES, "a3m": "Ours", **UNPRINTED}
SUBSAMPLED = "The grid is every second point of 256², unfiltered ([why it matters](decisions.md))."
LAST_STEP = (
    "One seed each, judged with the weights of the last step; for `a3m` that was a bad one ([lab log](lab_log.md)), so "
    "verdicts on it are thin."
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A printed table and the runs held against it: recipes `<task>-<row>`, the task with the most rows.

    `rows` maps what follows the task in a recipe's name to the printed row, or to "" where none is printed; with
    `open_ended` every other recipe of the task is a row, too. Each row is run with all of `seeds`. `command` makes the
    cells; `remark` says how the set-up differs from the printed one.
    """

    name: str
    title: str
    printed: PublishedTable
    tasks: tuple[str, ...]
    rows: dict[str, str]
    command: str
    remark: str
    open_ended: bool = False
    seeds: tuple[int, ...] = (0,)


COMPARISONS = (
    Comparison(
        name="table1",
        title="Table 1: Kolmogorov flow on 256²",
        printed=TABLE_1,
        tasks=("kf256-coarse",),
        rows=MAIN_ROWS,
        command="table1",
        remark="Steps of 0.1 s on the attractor, where persistence scores what the printed column says; the paper "
        "states 0.02 s.",
        open_ended=True,
    ),
    Comparison(
        name="table1-transient",
        title="Table 1 without a spin-up: the decaying flow, 0.02 s",
        printed=TABLE_1,
        tasks=("kf256-transient",),
        rows={"factformer": "FactFormer", "a3m": "Ours", "convnext": ""},
        command="table1-transient",
        remark="No spin-up, as printed: the flow decays for all of its ten seconds, so there is no long-term truth. "
        "Statistics compare the same ten seconds of both.",
        open_ended=True,
    ),
    Comparison(
        name="table2",
        title="Table 2: turbulent channel",
        printed=TABLE_2,
        tasks=("tcf192", "tcf96"),
        rows=MAIN_ROWS | {"ergoformer-drawn": ""},
        command="table2",
        remark="Planes of our own channel; a y–z plane is an open system, so no model can beat the conditional mean. "
        "Planes of one simulation replay each other downstream and count as trajectories of their own, so intervals "
        "and floors are too narrow here, by a factor of up to four. The printed grid is that of `tcf192`; `tcf96` has "
        "half the cells a side and twice the time per step (Δt⁺ = .60 against .30), and stands in for it: `tcf192` "
        "takes 76 GB.",
        open_ended=True,
    ),
    Comparison(
        name="table3",
        title="Table 3: modules, on 128²",
        printed=TABLE_3,
        tasks=("kf128",),
        rows={"a3m-base": "Base", "a3m-free": "+ A3M Att.", "a3m": "+ Unitary Op."}
        | dict.fromkeys(("a3m-exact", "convnext", "ergoformer"), ""),
        command="table3",
        remark=f"Steps of 0.02 s. {SUBSAMPLED} All variants of `a3m` start from the same weights; `exact` (an operator "
        f"that is orthogonal by construction), `convnext` and `ergoformer` are not in print. {LAST_STEP}",
    ),
    Comparison(
        name="table4",
        title="Table 4: kernel bandwidth, on 128²",
        printed=TABLE_4,
        tasks=("kf128",),
        rows={
            "a3m-sigma1": "σ = 1",
            "a3m-sigma4": "σ = 4",
            "a3m": "σ = 8",
            "a3m-sigma16": "σ = 16",
            "a3m-sigma32": "σ = 32",
        },
        command="table4",
        remark=f"Steps of 0.02 s; σ is in cycles per side of the domain. {SUBSAMPLED} {LAST_STEP}",
    ),
    Comparison(
        name="seeds",
        title="Three seeds, on 128² with steps of 0.1 s",
        printed=TABLE_3,
        tasks=("kf128-coarse",),
        rows={"a3m": "+ Unitary Op."} | dict.fromkeys(("factformer", "convnext", "ergoformer"), ""),
        command="seeds --seeds 0,1,2",
        remark=f"Mean over seeds; the interval is the hull of theirs. The printed row is that of Table 3. {SUBSAMPLED}",
        open_ended=True,
        seeds=(0, 1, 2),
    ),
)
#: Behind a number that looks good and is not.
MARK = "†"
REMARK = f"{MARK} Most of these roll-outs left the truth's range of energies: a statistic of another flow."
BOLD = "Bold: at the floor; in columns without a floor, the lowest of the models."
#: The columns of the README's table, and the comparison it is cut from.
HEADLINE = ("table1", ("relative_l2@5", "relative_l2@25", "me_ape", "me_lrw", "pca_kl"))


def comparison(name: str) -> Comparison:
    """The comparison called `name`."""
    return next(c for c in COMPARISONS if c.name == name)


def members(chosen: Comparison, evidence: Evidence) -> list[RunGroup]:
    """The groups that are rows of a comparison: those with a printed twin in its order, then the others."""
    task = evidence.fullest_task(chosen.tasks)
    found = {} if task is None else evidence.rows(task)
    known = [found[row] for row in chosen.rows if row in found]
    others = [group for row, group in found.items() if row not in chosen.rows]
    return known + others if chosen.open_ended else known


def table_block(chosen: Comparison, evidence: Evidence) -> str:
    """One table with its files, or the command that would make it."""
    groups, task = members(chosen, evidence), evidence.fullest_task(chosen.tasks)
    if not groups or task is None:
        return f"{chosen.remark}\n\nNot run yet: `ergoflow reproduce {chosen.command}` makes its cells."
    missing = _missing(chosen, task, groups)
    lines = [f"{chosen.remark} Recipes `{task}-<row>`.", "", *_table(chosen, task, groups, evidence)]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return "\n".join([*lines, "", *_files(groups, evidence)])


def _missing(chosen: Comparison, task: str, groups: Sequence[RunGroup]) -> list[str]:
    """The rows that are not there, and the seeds that rows are short of."""
    known = {group.name.removeprefix(f"{task}-"): {run.seed for run in group.runs} for group in groups}
    missing = []
    for row in chosen.rows:
        left = [str(seed) for seed in chosen.seeds if seed not in known.get(row, set())]
        if left:
            missing.append(row if row not in known else f"{row} with seed {' and '.join(left)}")
    return missing


def headline_block(evidence: Evidence) -> str:
    """The README's table: short- and long-term errors of every model on the main task, without the printed numbers."""
    name, keys = HEADLINE
    chosen = comparison(name)
    groups, task = members(chosen, evidence), evidence.fullest_task(chosen.tasks)
    if not groups or task is None:
        return f"The comparison at full size has not been run yet (`ergoflow reproduce {chosen.command}`)."
    table = build_table(groups)
    best = _best(table, keys)
    head = ["model", "parameters", *(_label(table, key) for key in keys), "survived"]
    lines = [_setting(chosen, groups), "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for group, row in zip(groups, table.rows, strict=False):
        cells = [_brief(row.cells.get(key), bold=(row.label, key) in best) for key in keys]
        parameters = f"{group.first.scores['parameters']:,}"
        lines.append(
            f"| {_linked(group, task, evidence)} | {parameters} | {' | '.join(cells)} | {survival_text(group.runs)} |"
        )
    for row in table.rows[len(groups) :]:
        if row.kind in ("floor", "reference") and row.label != "zero":
            lines.append(f"| *{row.label}* | | {' | '.join(_brief(row.cells.get(key)) for key in keys)} | |")
    return "\n".join([*lines, "", *_remarks(lines)])


def _setting(chosen: Comparison, groups: Sequence[RunGroup]) -> str:
    """What the README's table shows, in a line or two."""
    scores = groups[0].first.scores
    budgets = dict.fromkeys(f"{budget(group.first)} on {group.first.scores['hardware']['device']}" for group in groups)
    return (
        f"{chosen.title.partition(': ')[2]}, steps of {scores['step_seconds']:g} s; each model after "
        f"{' or '.join(budgets)}, {scores['num_trajectories']} roll-outs of {scores['rollout_steps']} steps. Errors at "
        "lead time τ and of long-term statistics, lower is better; *truth against truth* is what halves of the truth "
        "differ by: below it nothing can be told apart."
    )


def _table(chosen: Comparison, task: str, groups: Sequence[RunGroup], evidence: Evidence) -> list[str]:
    table, keys = build_table(groups), chosen.printed.columns
    best = _best(table, keys)
    labels = [_label(table, key) for key in keys]
    lines = [f"| model | {' | '.join(labels)} | survived |", f"| --- |{' --- |' * (len(keys) + 1)}"]
    # The rows of the models come first, in the order of the groups.
    for group, row in zip(groups, table.rows, strict=False):
        printed = chosen.printed.rows.get(chosen.rows.get(group.name.removeprefix(f"{task}-"), ""))
        lines.append(
            f"| {_linked(group, task, evidence)} | {_cells(row, keys, printed, best)} | {survival_text(group.runs)} |"
        )
    for row in table.rows[len(groups) :]:
        if row.kind != "printed":
            lines.append(f"| *{row.label}* | {_cells(row, keys, None, frozenset())} | |")
    return [*lines, "", *_remarks(lines)]


def _best(table: Table, keys: Sequence[str]) -> frozenset[tuple[str, str]]:
    """(row, key) of the models' numbers that none can beat: those at the floor, in columns without one the lowest."""
    models = [row for row in table.rows if row.kind == "model"]
    floors = {key for row in table.rows if row.kind == "floor" for key in row.cells}
    found = set()
    for key in keys:
        cells = {row.label: row.cells[key] for row in models if key in row.cells}
        values = {label: cell.value for label, cell in cells.items() if cell.value is not None}
        if key in floors:
            found |= {(label, key) for label, cell in cells.items() if cell.verdict == "at floor"}
        elif values:
            found |= {(label, key) for label, value in values.items() if value == min(values.values())}
    return frozenset(found)


def _remarks(lines: Sequence[str]) -> list[str]:
    """What bold means and, below a table that has it, what the mark means."""
    return [BOLD, *(["", REMARK] if any(MARK in line for line in lines) else [])]


def _linked(group: RunGroup, task: str, evidence: Evidence) -> str:
    """The row's name as a link to its file; over several seeds, a link for each."""
    name = group.name.removeprefix(f"{task}-")
    if len(group.runs) == 1:
        return evidence.link(cell_file(group.name, group.first.seed), name)
    seeds = ", ".join(evidence.link(cell_file(run.name, run.seed), str(run.seed)) for run in group.runs)
    return f"{name} (seeds {seeds})"


def _label(table: Table, key: str) -> str:
    return next((column.label for column in table.columns if column.key == key), key)


def _cells(row: Row, keys: Sequence[str], printed: Sequence[float] | None, best: Collection[tuple[str, str]]) -> str:
    return " | ".join(
        _cell(row.cells.get(key), None if printed is None else printed[i], bold=(row.label, key) in best)
        for i, key in enumerate(keys)
    )


def _cell(cell: Cell | None, printed: float | None, *, bold: bool) -> str:
    beside = "" if printed is None else f" ({printed:g})"
    if cell is None or cell.value is None:
        return f"{_brief(cell)}{beside}"
    bounds = "" if cell.low is None or cell.high is None else f" [{in_digits(cell.low, 2)}, {in_digits(cell.high, 2)}]"
    return f"{_brief(cell, bold=bold)}{bounds}{beside}"


def _brief(cell: Cell | None, *, bold: bool = False) -> str:
    """The number alone."""
    if cell is None or cell.verdict == UNDEFINED:
        return "–"
    text = "failed" if cell.value is None else in_digits(cell.value) + MARK * (cell.verdict == STRAYED)
    return f"**{text}**" if bold else text


def _files(groups: Sequence[RunGroup], evidence: Evidence) -> list[str]:
    """Which rows were trained how long, where and by which commit, and a warning where budgets differ."""
    made: dict[str, list[str]] = {}
    budgets = set()
    for run in (run for group in groups for run in group.runs):
        allowed, device = budget(run), run.scores["hardware"]["device"]
        link = evidence.link(cell_file(run.name, run.seed), f"`{cell_file(run.name, run.seed)}`")
        made.setdefault(f"{allowed}, {device}, commit {run.scores['commit']}", []).append(
            f"{link} ({run.scores['parameters']:,} parameters)"
        )
        if run.scores["parameters"]:
            budgets.add(f"{allowed} on {device}")
    lines = [f"* {how}: {', '.join(files)}" for how, files in made.items()]
    if len(budgets) > 1:
        lines += ["", f"The rows did not get the same: {'; '.join(sorted(budgets))}."]
    return lines


def budget(run: RunView) -> str:
    """How long a run was allowed to train."""
    training = run.recipe["training"]
    if training.get("max_minutes") is not None:
        return f"{training['max_minutes']:g} min of training"
    if training.get("max_steps") is not None:
        return f"{training['max_steps'] * training['batch_size']:,} samples"
    return f"{training['epochs']} epochs"

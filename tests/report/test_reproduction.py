"""The paper's tables beside ours: who is compared with whom, and what follows for each claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ergoflow.report.published import TABLE_1
from ergoflow.report.reproduction import CLAIMS, COMPARISONS, judge, reproduction
from ergoflow.report.runs import RunView, group_runs

MakeRun = Callable[..., RunView]
SKILLS = {"mno": 0.2, "uno": 0.15, "mwt": 0.12, "factformer": 0.09, "a3m": 0.05}


def table_1(make_run: MakeRun, **changed: float) -> list[RunView]:
    return [
        make_run(f"kf256-coarse-{name}", dataset="kf256", skill=skill) for name, skill in (SKILLS | changed).items()
    ]


def verdict_of(index: int, runs: list[RunView]) -> tuple[str, str]:
    claim = CLAIMS[index]
    comparison = next(c for c in COMPARISONS if c.printed is claim.table)
    return judge(claim, comparison, group_runs(runs))


def test_each_printed_row_and_column_is_paired_with_what_it_names() -> None:
    for comparison in COMPARISONS:
        named = [label for label in comparison.rows.values() if label]
        assert set(named) <= set(comparison.printed.rows)
        assert len(set(named)) == len(named)


def test_our_number_stands_before_the_printed_one(make_run: MakeRun) -> None:
    text = reproduction(table_1(make_run))
    row = next(line for line in text.splitlines() if line.startswith("| mno |"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    for cell, key, printed in zip(cells, TABLE_1.columns, TABLE_1.rows["MNO"], strict=False):
        value = table_1(make_run)[0].scores["metrics"][key]["rows"]["model"]["value"]
        assert cell.startswith(f"{value:.3g} [")
        assert cell.endswith(f"({printed:g})")
    assert cells[-1] == "100%"


def test_floor_and_trivial_rows_stand_in_the_table(make_run: MakeRun) -> None:
    lines = reproduction(table_1(make_run)).splitlines()
    assert any(line.startswith("| *truth against truth* |") for line in lines)
    assert any(line.startswith("| *persistence* |") for line in lines)


def test_a_claim_holds_where_every_column_is_lower(make_run: MakeRun) -> None:
    assert verdict_of(0, table_1(make_run))[0] == "reproduced"


def test_one_better_baseline_breaks_the_claim_and_is_named(make_run: MakeRun) -> None:
    verdict, reason = verdict_of(0, table_1(make_run, uno=0.01))
    assert verdict == "not reproduced"
    assert "**uno relative_l2@5**" in reason
    assert "mno" not in reason
    # Overlapping intervals: counted, but not in bold.
    assert "uno relative_l2@5" in verdict_of(0, table_1(make_run, uno=0.049))[1]
    assert "**" not in verdict_of(0, table_1(make_run, uno=0.049))[1]


def test_a_claim_without_its_rows_is_not_testable(make_run: MakeRun) -> None:
    runs = [run for run in table_1(make_run) if not run.name.endswith("mwt")]
    assert verdict_of(0, runs) == ("not testable", "not run: mwt")
    assert verdict_of(1, runs)[0] == "not testable"


def test_a_failed_row_loses_to_any_number(make_run: MakeRun) -> None:
    runs = table_1(make_run)
    for metric in runs[-1].scores["metrics"].values():
        metric["rows"]["model"].update(value=None, low=None, high=None, verdict="failed")
    assert verdict_of(0, runs)[0] == "not reproduced"
    assert "failed (0.86)" in reproduction(runs)


def test_further_models_are_rows_and_other_tasks_are_not(make_run: MakeRun) -> None:
    runs = [
        *table_1(make_run),
        make_run("kf256-coarse-convnext", dataset="kf256"),
        make_run("kf128-a3m", dataset="kf128"),
        make_run("kf128-coarse-a3m", dataset="kf128-coarse"),
    ]
    text = reproduction(runs)
    assert "| convnext |" in text
    table_3 = text.split("## Table 3: kf128")[1].split("## Table 4")[0]
    assert "| a3m |" in table_3
    assert "coarse" not in table_3
    assert "(1.3)" in table_3  # the printed row of the unitary operator at τ = 25


def test_the_channel_falls_back_to_the_coarser_one_and_says_so(make_run: MakeRun) -> None:
    assert "## Table 2: tcf96" in reproduction([make_run("tcf96-a3m", dataset="tcf96")])
    assert "Not run: no recipe of tcf192 or tcf96" in reproduction(table_1(make_run))


def test_seeds_are_averaged_and_every_file_is_named(make_run: MakeRun) -> None:
    runs = [make_run("kf256-coarse-a3m", dataset="kf256", seed=seed) for seed in (0, 1, 2)]
    text = reproduction(runs)
    assert "| a3m (3 seeds) |" in text
    for seed in (0, 1, 2):
        assert f"results/kf256-coarse-a3m/seed{seed}.json" in text
    values = [run.scores["metrics"]["relative_l2@5"]["rows"]["model"]["value"] for run in runs]
    row = next(line for line in text.splitlines() if line.startswith("| a3m (3 seeds)"))
    assert float(row.split("|")[2].split()[0]) == pytest.approx(sum(values) / 3, rel=5e-3)

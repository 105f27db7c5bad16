"""The paper's tables beside ours: who is compared with whom, and where each number comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ergoflow.report.evidence import Evidence
from ergoflow.report.published import TABLE_1
from ergoflow.report.reproduction import COMPARISONS, comparison, headline_block, table_block
from ergoflow.report.runs import RunView, group_runs

MakeRun = Callable[..., RunView]
SKILLS = {"mno": 0.2, "uno": 0.15, "mwt": 0.12, "factformer": 0.09, "a3m": 0.05}


def table_1(make_run: MakeRun, **changed: float) -> list[RunView]:
    return [
        make_run(f"kf256-coarse-{name}", dataset="kf256", skill=skill) for name, skill in (SKILLS | changed).items()
    ]


def block(name: str, runs: list[RunView]) -> str:
    return table_block(comparison(name), Evidence(groups=group_runs(runs), place="../results"))


def test_each_printed_row_and_column_is_paired_with_what_it_names() -> None:
    assert len({c.name for c in COMPARISONS}) == len(COMPARISONS)
    for chosen in COMPARISONS:
        named = [label for label in chosen.rows.values() if label]
        assert set(named) <= set(chosen.printed.rows)
        assert len(set(named)) == len(named)


def test_our_number_stands_before_the_printed_one(make_run: MakeRun) -> None:
    row = next(line for line in block("table1", table_1(make_run)).splitlines() if line.startswith("| [mno]("))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    for cell, key, printed in zip(cells, TABLE_1.columns, TABLE_1.rows["MNO"], strict=False):
        value = table_1(make_run)[0].scores["metrics"][key]["rows"]["model"]["value"]
        assert cell.replace("**", "").startswith(f"{value:.3g} [")
        assert cell.endswith(f"({printed:g})")
    assert cells[-1] == "100%"


def test_floor_and_trivial_rows_stand_in_the_table(make_run: MakeRun) -> None:
    lines = block("table1", table_1(make_run)).splitlines()
    assert any(line.startswith("| *truth against truth* |") for line in lines)
    assert any(line.startswith("| *persistence* |") for line in lines)


def test_bold_is_what_is_at_the_floor_and_the_lowest_where_there_is_no_floor(make_run: MakeRun) -> None:
    runs = table_1(make_run)
    for run in runs:
        run.scores["metrics"]["relative_l2@5"]["floor"] = None  # type: ignore[index]
        run.scores["metrics"]["me_ape"]["rows"]["model"]["verdict"] = "better"
    # The lowest of a column with a floor is not bold unless it is at the floor; two at the floor are bold both.
    for run in runs[:2]:
        run.scores["metrics"]["me_ape"]["rows"]["model"]["verdict"] = "at floor"
    # A row that failed has no number that could be the lowest.
    runs[3].scores["metrics"]["relative_l2@5"]["rows"]["model"].update(value=None, verdict="failed")
    for text in (block("table1", runs), headline_block(Evidence(groups=group_runs(runs)))):
        lines = text.splitlines()
        head = next([cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| model |"))
        rows = {line.split("]")[0][3:]: line.split("|") for line in lines if line.startswith("| [")}
        bold = {label: [row for row in rows if "**" in rows[row][head.index(label)]] for label in head if label}
        assert bold["Rel. L2, τ = 5"] == ["a3m"]
        assert bold["ME-APE"] == ["mno", "uno"]
        assert "Bold: at the floor" in text


def test_a_failed_row_says_so(make_run: MakeRun) -> None:
    runs = table_1(make_run)
    for metric in runs[-1].scores["metrics"].values():
        metric["rows"]["model"].update(value=None, low=None, high=None, verdict="failed")
    assert "failed (0.86)" in block("table1", runs)


def test_what_no_trivial_forecast_could_have_is_a_dash(make_run: MakeRun) -> None:
    runs = table_1(make_run)
    for run in runs:
        run.scores["metrics"]["me_lrw"]["rows"]["zero"].update(value=None, low=None, high=None)
    (zero,) = [line for line in block("table1", runs).splitlines() if line.startswith("| *zero* |")]
    assert [cell.strip() for cell in zero.split("|")].count("–") == 1
    assert "failed" not in zero


def test_statistics_of_roll_outs_that_left_are_marked_and_the_mark_is_explained(make_run: MakeRun) -> None:
    runs = table_1(make_run)
    assert "†" not in block("table1", runs)
    runs[-1].scores["survival"]["energy_in_range@1000"] = 0.0  # type: ignore[index]
    for text in (block("table1", runs), headline_block(Evidence(groups=group_runs(runs)))):
        marked = [line for line in text.splitlines() if "†" in line]
        assert [line[:6] for line in marked] == ["| [a3m", "† Most"]


def test_missing_rows_are_named_and_an_empty_table_says_how_to_make_it(make_run: MakeRun) -> None:
    runs = [run for run in table_1(make_run) if not run.name.endswith("mwt")]
    assert "Not run yet: mwt, a3m-common, convnext, ergoformer." in block("table1", runs)
    assert "Not run yet: `ergoflow reproduce table2`" in block("table2", runs)
    seeds = [make_run("kf128-coarse-a3m", dataset="kf128-coarse", seed=seed) for seed in (0, 1, 2)]
    seeds.append(make_run("kf128-coarse-convnext", dataset="kf128-coarse", seed=1))
    assert "Not run yet: factformer, convnext with seed 0 and 2, ergoformer." in block("seeds", seeds)
    assert "|" not in table_block(comparison("table1"), Evidence())


def test_a_first_cell_of_the_printed_grid_does_not_hide_the_table_of_its_stand_in(make_run: MakeRun) -> None:
    small = [make_run(f"tcf96-{row}", dataset="tcf96") for row in ("mno", "uno")]
    large = [make_run(f"tcf192-{row}", dataset="tcf192") for row in ("mno", "uno")]
    assert "Recipes `tcf96-<row>`" in block("table2", [*small, large[0]])
    assert "Recipes `tcf192-<row>`" in block("table2", [*small, *large])


def test_further_models_are_rows_and_other_tasks_are_not(make_run: MakeRun) -> None:
    runs = [
        *table_1(make_run),
        make_run("kf256-coarse-convnext", dataset="kf256"),
        make_run("kf128-a3m", dataset="kf128"),
        make_run("kf128-coarse-a3m", dataset="kf128-coarse"),
    ]
    assert "| [convnext](../results/kf256-coarse-convnext/seed0.json) |" in block("table1", runs)
    table_3 = block("table3", runs)
    assert "| [a3m](../results/kf128-a3m/seed0.json) |" in table_3
    assert "coarse" not in table_3
    assert "(1.3)" in table_3  # the printed row of the unitary operator at τ = 25


def test_the_channel_falls_back_to_the_coarser_one_and_says_so(make_run: MakeRun) -> None:
    assert "tcf96-<row>" in block("table2", [make_run("tcf96-a3m", dataset="tcf96")])


def test_seeds_are_averaged_and_every_file_is_named(make_run: MakeRun) -> None:
    runs = [make_run("kf256-coarse-a3m", dataset="kf256", seed=seed) for seed in (0, 1, 2)]
    text = block("table1", runs)
    row = next(line for line in text.splitlines() if line.startswith("| a3m (seeds [0]("))
    for seed in (0, 1, 2):
        assert f"[{seed}](../results/kf256-coarse-a3m/seed{seed}.json)" in row
        assert f"[`kf256-coarse-a3m/seed{seed}.json`](../results/kf256-coarse-a3m/seed{seed}.json)" in text
    values = [run.scores["metrics"]["relative_l2@5"]["rows"]["model"]["value"] for run in runs]
    assert float(row.split("|")[2].split()[0]) == pytest.approx(sum(values) / 3, rel=5e-3)


def test_unequal_budgets_are_pointed_out(make_run: MakeRun) -> None:
    runs = table_1(make_run)
    assert "did not get the same" not in block("table1", runs)
    recipe = {**runs[0].recipe, "training": {"epochs": 50_000, "max_minutes": 4.0}}
    text = block("table1", [dataclasses.replace(runs[0], recipe=recipe), *runs[1:]])
    assert "did not get the same: 4 min of training on one GPU; 50 epochs on one GPU." in text


def test_the_headline_has_every_model_the_floor_and_no_printed_number(make_run: MakeRun) -> None:
    text = headline_block(Evidence(groups=group_runs(table_1(make_run))))
    for name in SKILLS:
        assert f"| [{name}](results/kf256-coarse-{name}/seed0.json) | 7,325,665 |" in text
    assert "| *truth against truth* |" in text
    assert text.startswith("Kolmogorov flow on 256², steps of 0.1 s; each model after 50 epochs on one GPU, ")
    assert "(" not in text.split("| --- |")[-1].replace("](", "")
    assert "has not been run yet" in headline_block(Evidence())

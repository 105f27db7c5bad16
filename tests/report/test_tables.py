from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

import pytest

from ergoflow.report.runs import RunView, group_runs, survival_text
from ergoflow.report.summary import best_row, cards, duration, number, sentence
from ergoflow.report.tables import FLOOR_LABEL, Table, build_table, to_csv, to_json

Make = Callable[..., RunView]


def fail(run: RunView, key: str) -> RunView:
    run.scores["metrics"][key]["rows"]["model"].update(value=None, low=None, high=None, verdict="failed")
    return run


def table_of(*runs: RunView) -> Table:
    return build_table(group_runs(runs))


def test_rows_are_models_then_references_then_floor_then_print(make_run: Make) -> None:
    table = table_of(make_run("a", dataset="kf256"), make_run("b", dataset="kf256"))
    labels = [
        "a",
        "b",
        "persistence",
        "climatology",
        "zero",
        FLOOR_LABEL,
        "MNO",
        "UNO",
        "MWT",
        "FactFormer",
        "Ours",
    ]
    assert [row.label for row in table.rows] == labels
    ours = table.rows[-1]
    assert ours.kind == "printed"
    assert ours.note == "printed, Table 1"
    assert ours.cells["relative_l2@25"].value == 1.27
    assert "relative_l2@1" not in ours.cells


def test_a_dataset_without_printed_table_has_no_printed_row(make_run: Make) -> None:
    assert all(row.kind != "printed" for row in table_of(make_run()).rows)


def test_variants_hang_on_their_column(make_run: Make) -> None:
    table = table_of(make_run())
    assert table.column("me_ape").variants == ("me_ape@1..16",)
    assert "me_ape@1..16" not in [column.key for column in (*table.headlines, *table.further)]
    assert [column.key for column in table.further] == ["energy_drift"]


def test_a_group_is_mean_spread_hull_and_worst_verdict(make_run: Make) -> None:
    runs = [make_run(seed=seed) for seed in (0, 1)]
    first, second = (run.scores["metrics"]["me_lrw"]["rows"]["model"] for run in runs)
    first.update(value=0.1, low=0.05, high=0.2, verdict="at floor")
    second.update(value=0.3, low=0.25, high=0.4, verdict="worse")
    cell = table_of(*runs).rows[0].cells["me_lrw"]
    assert cell.value == pytest.approx(0.2)
    assert cell.spread == pytest.approx(0.2 / 2**0.5)
    assert (cell.low, cell.high, cell.seeds, cell.verdict) == (0.05, 0.4, 2, "worse")


def test_one_failed_seed_fails_the_group(make_run: Make) -> None:
    cell = table_of(make_run(seed=0), fail(make_run(seed=1), "me_ape")).rows[0].cells["me_ape"]
    assert cell.value is None
    assert cell.verdict == "failed"


def constant(run: RunView, key: str) -> RunView:
    """A run whose trivial forecast has no such number, as a constant has no spectrum."""
    run.scores["metrics"][key]["rows"]["zero"].update(value=None, low=None, high=None)
    return run


def test_a_trivial_forecast_without_a_value_has_not_failed_but_a_model_has(make_run: Make) -> None:
    table = table_of(fail(constant(make_run("m", dataset="kf256"), "me_lrw"), "me_ape"))
    rows = {row.label: row for row in table.rows}
    assert (rows["zero"].cells["me_lrw"].value, rows["zero"].cells["me_lrw"].verdict) == (None, "undefined")
    assert rows["m"].cells["me_ape"].verdict == "failed"
    lines = {(line["row"], line["metric"]): line["value"] for line in csv.DictReader(io.StringIO(to_csv([table])))}
    assert (lines["zero", "me_lrw"], lines["m", "me_ape"]) == ("undefined", "failed")


def test_infinity_counts_as_failed(make_run: Make) -> None:
    run = make_run()
    run.scores["metrics"]["me_ape"]["rows"]["model"]["value"] = float("inf")
    assert table_of(run).rows[0].cells["me_ape"].value is None


def test_json_holds_every_number_and_null_for_failed(make_run: Make) -> None:
    table = table_of(fail(make_run("a", dataset="kf256"), "me_ape"), make_run("b", dataset="kf256"))
    (loaded,) = json.loads(to_json([table]))["tables"]
    for row, stored in zip(table.rows, loaded["rows"], strict=True):
        assert stored["label"] == row.label
        assert {key: cell["value"] for key, cell in stored["cells"].items()} == {
            key: cell.value for key, cell in row.cells.items()
        }
    assert loaded["rows"][0]["cells"]["me_ape"]["value"] is None


def test_csv_holds_every_number_exactly_and_the_word_failed(make_run: Make) -> None:
    table = table_of(fail(make_run('a "quoted", name', skill=1 / 3), "me_ape"))
    read = list(csv.DictReader(io.StringIO(to_csv([table]))))
    wanted = [(row.label, key, cell) for row in table.rows for key, cell in row.cells.items()]
    assert len(read) == len(wanted)
    for line, (label, key, cell) in zip(read, wanted, strict=True):
        assert (line["row"], line["metric"], line["verdict"]) == (label, key, cell.verdict or "")
        assert line["value"] == "failed" if cell.value is None else float(line["value"]) == cell.value
        assert line["low"] == ("" if cell.low is None else repr(cell.low))
    assert sum(line["value"] == "failed" for line in read) == 1


def test_runs_of_two_tasks_do_not_share_a_table(make_run: Make) -> None:
    with pytest.raises(ValueError, match="one table needs runs of one task"):
        table_of(make_run("a"), make_run("b", dataset="kf128"))


def test_the_best_row_has_the_most_good_verdicts(make_run: Make) -> None:
    runs = (
        make_run("weak", skill=0.6),
        make_run("strong", skill=0.01),
        fail(make_run("brittle", skill=0.01), "me_ape"),
    )
    assert best_row(table_of(*runs)).label == "strong"


def test_the_sentence_counts_verdicts_and_survivors(make_run: Make) -> None:
    run = fail(make_run("m", skill=0.1), "me_ape")
    run.scores["survival"].update(fraction=0.75, diverged_at=[-1, 12, -1, -1])
    groups = group_runs([run])
    text = sentence(build_table(groups), groups)
    # Of τ = 1/5/25, ME-APE, ME-LRw, Δλ, KL: one failed, ME-LRw = .05 and Δλ = .02 and KL = .06.
    assert text == (
        "On kf64 in steps of 0.1 s, m cannot be told from the truth in 1 of 7 headline metrics, beats every trivial "
        "forecast in 5 more and fails in 1; 3 of 4 roll-outs stay finite for 1,000 steps."
    )


def test_a_run_that_left_the_attractor_has_not_just_survived(make_run: Make) -> None:
    run = make_run("m", skill=0.1)
    run.scores["survival"].update({"energy_in_range@1000": 1.0, "enstrophy_in_range@1000": 0.25})
    groups = group_runs([run])
    table = build_table(groups)
    text = "; all 4 roll-outs stay finite for 1,000 steps; 1 of 4 keeps the truth's energy and enstrophy."
    assert sentence(table, groups).endswith(text)
    found = {card.label: (card.value, card.verdict) for card in cards(table, groups)}
    assert (found["finite"], found["in range"]) == (("4/4", None), ("1/4", "strayed"))
    assert survival_text(groups[0].runs) == "100%, 25% in range"


def test_no_card_speaks_of_a_range_that_nobody_looked_at(make_run: Make) -> None:
    groups = group_runs([make_run("m")])
    assert "in range" not in [card.label for card in cards(build_table(groups), groups)]


@pytest.mark.parametrize(
    ("total", "finite", "inside", "text"),
    [
        (1, 1, 1, "its roll-out stays finite for 1,000 steps"),
        (2, 2, 1, "both roll-outs stay finite for 1,000 steps; 1 of 2 keeps the truth's energy and enstrophy"),
        (2, 1, 1, "1 of 2 roll-outs stays finite for 1,000 steps"),
        (8, 8, 8, "all 8 roll-outs stay finite for 1,000 steps"),
        (8, 5, 3, "5 of 8 roll-outs stay finite for 1,000 steps; 3 of 8 keep the truth's energy and enstrophy"),
        (8, 0, 0, "no roll-out stays finite for 1,000 steps"),
    ],
)
def test_the_sentence_counts_in_english(make_run: Make, total: int, finite: int, inside: int, text: str) -> None:
    run = make_run("m")
    run.scores["num_trajectories"] = total  # type: ignore[index]
    run.scores["survival"].update({"fraction": finite / total, "energy_in_range@1000": inside / total})
    groups = group_runs([run])
    assert sentence(build_table(groups), groups).endswith(f"; {text}.")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.45, "0.45 s"),
        (31.0, "31 s"),
        (64.0, "1.1 min"),
        (180.01, "3 min"),
        (5400.0, "1.5 h"),
        (432_000.0, "120 h"),
    ],
)
def test_a_duration_is_two_digits_in_a_unit_a_person_would_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("share", "strayed"), [(0.25, True), (0.75, False)])
def test_no_statistic_looks_good_over_roll_outs_that_left(make_run: Make, share: float, strayed: bool) -> None:
    run = make_run("m", skill=0.1)
    metrics = run.scores["metrics"]
    forecast, good, bad = metrics["relative_l2@5"], metrics["pca_kl"], metrics["me_ape"]
    forecast["floor"] = None
    for metric, verdict in ((forecast, "better"), (good, "at floor"), (bad, "worse")):
        metric["rows"]["model"]["verdict"] = verdict
    run.scores["survival"].update({"energy_in_range@1000": share})
    groups = group_runs([run])
    table = build_table(groups)
    cells = table.rows[0].cells
    assert cells["relative_l2@5"].verdict == "better"
    assert cells["me_ape"].verdict == "worse"
    assert cells["pca_kl"].verdict == ("strayed" if strayed else "at floor")
    assert cells["pca_kl"].value == good["rows"]["model"]["value"]
    assert ("cannot be judged in" in sentence(table, groups)) == strayed


def test_cards_hold_the_best_run_against_floor_and_print(make_run: Make) -> None:
    groups = group_runs([make_run("m", dataset="kf256", skill=0.1)])
    found = {card.label: card for card in cards(build_table(groups), groups)}
    assert found["finite"].value == "4/4"
    assert found["Rel. L2, τ = 25"].value == "0.500"
    assert found["Rel. L2, τ = 25"].note == "floor 0.030 · persistence 0.890 · paper prints 1.27"
    assert found["parameters"].value == "7,325,665"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "failed"),
        (0.0, "0"),
        (0.8949, "0.895"),
        (-0.05, "−0.050"),
        (0.00415, "0.0042"),
        (12.345, "12.3"),
        (1234.5, "1234"),
        (1.23e-6, "1.2×10⁻⁶"),
        (9.97e-5, "1.0×10⁻⁴"),
        (-9.97e6, "−1.0×10⁷"),
        (4.5e7, "4.5×10⁷"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text

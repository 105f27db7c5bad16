"""The table of columns in which our model is not ahead of the U-Net."""

from __future__ import annotations

from collections.abc import Callable

from ergoflow.report.evidence import Evidence
from ergoflow.report.rivals import rivals_block
from ergoflow.report.runs import RunView, group_runs

MakeRun = Callable[..., RunView]


def block(*runs: RunView) -> list[str]:
    """The cells of the last line of the table."""
    text = rivals_block(Evidence(groups=group_runs(list(runs))))
    return [cell.strip() for cell in text.splitlines()[-1].replace("\\|", "¦").strip("|").split("|")]


def pair(make_run: MakeRun, ours: float = 0.1, rival: float = 0.2) -> tuple[RunView, RunView]:
    return tuple(
        make_run(f"kf128-{name}", dataset="kf128", skill=skill)
        for name, skill in (("ergoformer", ours), ("convnext", rival))
    )


def set_row(run: RunView, key: str, value: float | None, verdict: str) -> None:
    run.scores["metrics"][key]["rows"]["model"] |= {"value": value, "verdict": verdict}


def test_a_model_ahead_everywhere_leaves_no_column_to_name(make_run: MakeRun) -> None:
    ahead, total = block(*pair(make_run))[1].removesuffix(" columns").split(" of ")
    assert ahead == total
    assert int(total) > 3
    assert block(*pair(make_run))[2:] == ["–", "–"]
    assert block(*pair(make_run, 0.2, 0.1))[1] == f"0 of {total} columns"


def test_only_what_is_at_the_floor_for_both_counts_as_level(make_run: MakeRun) -> None:
    for theirs, place in (("at floor", 2), ("worse", 3)):
        ours, rival = pair(make_run)
        set_row(ours, "me_ape", 0.03, "at floor")
        set_row(rival, "me_ape", 0.02, theirs)
        cells = block(ours, rival)
        assert cells[place] == "ME-APE 0.03 : 0.02"
        assert cells[5 - place] == "–"


def test_a_failure_is_behind_every_number_and_two_failures_are_no_lead(make_run: MakeRun) -> None:
    for theirs in (0.5, None):
        ours, rival = pair(make_run)
        set_row(ours, "me_ape", None, "failed")
        set_row(rival, "me_ape", theirs, "worse" if theirs else "failed")
        assert block(ours, rival)[3] == f"ME-APE failed : {theirs or 'failed'}"


def test_a_missing_rival_is_said_and_nothing_run_names_the_command(make_run: MakeRun) -> None:
    assert block(pair(make_run)[0])[:2] == ["kf128", "`convnext` is not run yet"]
    assert "ergoflow reproduce table1" in rivals_block(Evidence())

"""Ten thousand steps: what the table says, and when a model lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ergoflow.report.evidence import Evidence
from ergoflow.report.long import lasts, long_block
from ergoflow.report.rules import Verdict
from ergoflow.report.runs import RunView, group_runs

MakeRun = Callable[..., RunView]


def evidence(make_run: MakeRun, *, exponent: float = 0.05, skill: float = 0.05) -> Evidence:
    """One shipped model: ME-APE .4 and ME-LRw .5 times `skill`, floors of .03."""
    run = make_run("kf128-coarse-ergoformer-long", dataset="kf128", skill=skill)
    metrics = run.scores["metrics"]
    cell = {"value": exponent, "low": exponent, "high": exponent, "verdict": "better"}
    metrics["lambda1_error"] = metrics["me_ape"] | {"rows": {"model": cell}, "floor": None}
    return Evidence(long=group_runs([run]), place="../results")


def test_a_row_links_to_its_cell_and_shows_floors_and_gaps(make_run: MakeRun) -> None:
    row = long_block(evidence(make_run)).splitlines()[4]
    assert row.startswith("| [kf128-coarse-ergoformer](../results/long/kf128-coarse-ergoformer-long/seed0.json) |")
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[2:5] == ["100%", "0.02 (0.03)", "0.025 (0.03)"]
    assert cells[-1] == "0.05"
    assert "–" in cells  # a metric that this run has not


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exponent": 0.101}, "error of λ₁ 0.101, at most 0.1 allowed"),
        ({"exponent": float("inf")}, "error of λ₁ failed"),
        ({"skill": 0.0902}, "ME-LRw 0.0451, at most 0.045 allowed"),
        ({"skill": 0.12}, "ME-APE 0.048, at most 0.045 allowed; kf128-coarse-ergoformer: ME-LRw"),
    ],
)
def test_each_limit_is_one(make_run: MakeRun, changes: dict, reason: str) -> None:
    verdict = lasts(evidence(make_run, **changes))
    assert verdict.word == "not reproduced"
    assert reason in verdict.reason


def test_a_model_lasts_within_all_limits(make_run: MakeRun) -> None:
    for changes in ({}, {"skill": 0.0899, "exponent": 0.1}):
        assert lasts(evidence(make_run, **changes)).word == "reproduced"
    # ME-LRw .025 and the floor .03 are the worse of the two.
    assert lasts(evidence(make_run)).reason == "spectra within 0.83 floors, λ₁ within 5.0%: kf128-coarse-ergoformer"


@pytest.mark.parametrize("key", ["fraction", "energy_in_range@1000", "enstrophy_in_range@1000"])
def test_one_lost_roll_out_is_a_fault(make_run: MakeRun, key: str) -> None:
    found = evidence(make_run)
    found.long[0].first.scores["survival"][key] = 0.97
    assert lasts(found).reason == "kf128-coarse-ergoformer: 97% survive in range"
    assert "97%" in long_block(found)


def test_a_model_that_was_not_run_is_named_and_leaves_the_rule_open(make_run: MakeRun) -> None:
    shipped = ("kf128-coarse-ergoformer", "kf256-coarse-ergoformer")
    found = dataclasses.replace(evidence(make_run), shipped=shipped)
    assert lasts(found) == Verdict("not run yet", "kf256-coarse-ergoformer")
    assert "Not run yet: kf256-coarse-ergoformer." in long_block(found)
    assert lasts(dataclasses.replace(found, shipped=shipped[:1])).word == "reproduced"


def test_nothing_is_said_before_it_is_run() -> None:
    assert lasts(Evidence()).word == "not run yet"
    assert "ergoflow reproduce long" in long_block(Evidence())

"""The rules behind the verdicts: each one can be met, can be missed, and waits for the cells it needs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from ergoflow.report.claims import CLAIMS, SIGMAS, Claim, claims_block
from ergoflow.report.cost_rules import COST_NAMES
from ergoflow.report.costs import cost_block
from ergoflow.report.evidence import Evidence
from ergoflow.report.published import COST_BY_MODEL
from ergoflow.report.rules import Verdict
from ergoflow.report.runs import RunView, group_runs

MakeRun = Callable[..., RunView]
SKILLS = {"mno": 0.2, "uno": 0.15, "mwt": 0.12, "factformer": 0.09, "a3m": 0.05}


def named(text: str) -> Claim:
    (claim,) = [claim for claim in CLAIMS if text in claim.text]
    return claim


def judged(text: str, runs: list[RunView]) -> Verdict:
    return named(text).rule(Evidence(groups=group_runs(runs)))


def main_runs(make_run: MakeRun, task: str = "kf256-coarse", **changed: float) -> list[RunView]:
    dataset = task.split("-")[0]
    return [make_run(f"{task}-{name}", dataset=dataset, skill=skill) for name, skill in (SKILLS | changed).items()]


def with_curves(run: RunView, **curves: np.ndarray) -> RunView:
    return dataclasses.replace(run, curves={**run.curves, **{k.replace("__", "/"): v for k, v in curves.items()}})


def test_without_results_nothing_is_reproduced_and_nothing_is_invented() -> None:
    settled = {"not testable", "not reproduced"}
    verdicts = [claim.rule(Evidence()) for claim in CLAIMS]
    assert {v.word for v in verdicts} == {"not run yet", *settled}
    # What is settled without results is so by arithmetic, mathematics or other people's data.
    assert sum(v.word in settled for v in verdicts) == 6
    assert "mathematics" in next(v for v in verdicts if v.word == "not reproduced").reason
    text = claims_block(Evidence())
    assert "29 claims of the paper: 2 not reproduced, 4 not testable, 23 not run yet. " in text
    assert "6 more, not in print: 6 not run yet." in text


def test_what_the_paper_does_not_claim_is_met_or_not_and_counted_apart(make_run: MakeRun) -> None:
    """A row of ours must never raise the count of what of the paper was reproduced."""
    for skill, word in ((0.001, "met"), (0.9, "not met")):
        text = claims_block(Evidence(groups=group_runs(main_runs(make_run, convnext=0.1, ergoformer=skill))))
        (line,) = [line for line in text.splitlines() if "`ergoformer` is better than that U-Net" in line]
        assert f"| **{word}** |" in line
    reproduced = sum(line.count("**reproduced**") for line in text.splitlines())
    assert f"29 claims of the paper: {reproduced} reproduced, " in text


def test_a_claim_holds_where_every_column_is_lower(make_run: MakeRun) -> None:
    assert judged("on KF256 the transformer is better", main_runs(make_run)).word == "reproduced"


def test_one_better_baseline_breaks_the_claim_and_is_named(make_run: MakeRun) -> None:
    verdict = judged("on KF256 the transformer is better", main_runs(make_run, uno=0.01))
    assert verdict.word == "not reproduced"
    assert verdict.reason == "the other way in 6 of 24 comparisons: uno: **all 6**"
    # Overlapping intervals: counted, but not in bold.
    close = judged("on KF256 the transformer is better", main_runs(make_run, uno=0.049)).reason
    columns = "Rel. L2 τ = 5, Rel. L2 τ = 25, ME-APE, ME-LRw, Δλ, KL"
    assert close == f"the other way in 6 of 24 comparisons: uno: {columns}"


def test_columns_that_go_the_other_way_are_gathered_by_model_and_bold_only_beyond_the_intervals(
    make_run: MakeRun,
) -> None:
    runs = main_runs(make_run)
    for run, key, value, high in ((runs[0], "pca_kl", 0.001, 0.002), (runs[0], "me_ape", 0.019, 0.021),
                                  (runs[3], "delta_lambda", 0.001, 0.002)):  # fmt: skip
        run.scores["metrics"][key]["rows"]["model"].update(value=value, high=high)
    reason = judged("on KF256 the transformer is better", runs).reason
    assert reason == "the other way in 3 of 24 comparisons: mno: ME-APE, **KL**; factformer: **Δλ**"


def test_a_comparison_of_one_or_two_columns_is_said_in_fewer_words(make_run: MakeRun) -> None:
    two = [*main_runs(make_run, uno=0.01), *main_runs(make_run, "tcf192")]
    reason = judged("its short-term errors are the smallest", two).reason
    assert reason == "the other way in 2 of 8 comparisons: uno: **both**; lower in all 8 comparisons"
    missing = judged("its short-term errors are the smallest", [*two[:5], make_run("tcf192-a3m", dataset="tcf192")])
    assert missing.word == "not reproduced"
    assert missing.reason.endswith("uno: **both**; missing: tcf192: mno, uno, mwt, factformer")
    good = judged("its short-term errors are the smallest", main_runs(make_run))
    assert good == Verdict("not run yet", "lower in all 8 comparisons; missing: tcf192: a3m, mno, uno, mwt, factformer")
    one = main_runs(make_run, uno=0.01, mwt=0.049)
    for run in one:
        run.scores["metrics"]["tke_error"] = run.scores["metrics"]["me_ape"] | {"label": "TKE error"}
    assert judged("smallest error of the TKE", one).reason == "the other way in 2 of 4 comparisons: **uno**; mwt"


def test_a_claim_without_its_rows_is_not_run_yet_and_names_them(make_run: MakeRun) -> None:
    runs = [run for run in main_runs(make_run) if not run.name.endswith("mwt")]
    assert judged("on KF256 the transformer is better", runs) == Verdict("not run yet", "kf256-coarse: mwt")
    assert judged("on TCF the transformer is better", runs).word == "not run yet"


def test_one_counterexample_is_enough_whatever_is_missing(make_run: MakeRun) -> None:
    """Of all four baselines only one is there: it can refute the claim, and cannot confirm it."""
    claims = ("on TCF the transformer is better", "advantage over the best baseline on TCF")
    for skill, word in ((0.09, "not run yet"), (0.01, "not reproduced")):
        every = main_runs(make_run, "tcf96", factformer=skill)
        part = [run for run in every if run.name.endswith(("a3m", "factformer"))]
        for claim in claims:
            verdict = judged(claim, part)
            assert verdict.word == word
            assert verdict.reason.endswith("tcf96: mno, uno, mwt")
            assert (judged(claim, every).word == "not reproduced") == (word == "not reproduced")
        assert judged(claims[0], [run for run in part if not run.name.endswith("a3m")]).word == "not run yet"


def test_a_baseline_that_failed_does_not_take_the_advantage_away(make_run: MakeRun) -> None:
    runs = main_runs(make_run)
    for run in runs[:-1]:
        run.scores["metrics"]["me_ape"]["rows"]["model"].update(value=None, low=None, high=None, verdict="failed")
    verdict = judged("advantage over the best baseline on KF256", runs)
    assert verdict.word == "reproduced"
    assert "ME-APE: 100 (23.1)" in verdict.reason


def test_a_failed_row_loses_to_any_number(make_run: MakeRun) -> None:
    runs = main_runs(make_run)
    for metric in runs[-1].scores["metrics"].values():
        metric["rows"]["model"].update(value=None, low=None, high=None, verdict="failed")
    assert judged("on KF256 the transformer is better", runs).word == "not reproduced"
    assert ": failed (6.52)" in judged("advantage over the best baseline on KF256", runs).reason


def test_a_comparison_of_statistics_says_whose_roll_outs_left(make_run: MakeRun) -> None:
    runs = main_runs(make_run)
    runs[1].scores["survival"]["enstrophy_in_range@1000"] = 0.4  # type: ignore[index]
    note = ". Most roll-outs of uno left the truth's range"
    assert judged("on KF256 the transformer is better", runs).reason == f"lower in all 24 comparisons{note}"
    both = [*runs, *main_runs(make_run, "tcf192")]
    assert note not in judged("its short-term errors are the smallest", both).reason


def test_the_advantage_is_measured_against_the_best_baseline(make_run: MakeRun) -> None:
    # Scores are proportional to the skill: 1 − 0.05/0.09 = 44 % in every column, 1 − .08/.09 = 11 %.
    assert judged("advantage over the best baseline on KF256", main_runs(make_run)).word == "reproduced"
    less = judged("advantage over the best baseline on KF256", main_runs(make_run, a3m=0.08))
    assert less.word == "not reproduced"
    assert "Rel. L2 τ = 25: 11.1 (1.55), ME-APE: 11.1 (23.1)" in less.reason


@pytest.mark.parametrize("key", ["fraction", "energy_in_range@1000", "enstrophy_in_range@1000"])
def test_stability_needs_every_roll_out_on_both_flows(make_run: MakeRun, key: str) -> None:
    runs = [*main_runs(make_run), *main_runs(make_run, "tcf192")]
    assert judged("long roll-outs stably", runs).word == "reproduced"
    assert judged("long roll-outs stably", runs[:5]).word == "not run yet"
    lost = copy.deepcopy(runs)
    lost[-1].scores["survival"][key] = 0.75  # type: ignore[index]
    assert judged("long roll-outs stably", lost) == Verdict(
        "not reproduced",
        "kf256-coarse-a3m: 100% finish 1000 steps in range, tcf192-a3m: 75% finish 1000 steps in range",
    )


def test_statistics_are_preserved_at_the_floor_only(make_run: MakeRun) -> None:
    runs = [*main_runs(make_run), *main_runs(make_run, "tcf192")]
    assert judged("preserves the long-term statistics", runs).word == "reproduced"
    worse = [*main_runs(make_run, a3m=0.5), *runs[5:]]
    reason = judged("preserves the long-term statistics", worse).reason
    assert reason == "above the floor in 4 of 8 columns: kf256-coarse-a3m: ME-APE, ME-LRw, Δλ, KL"


def test_a_correlation_that_recovers_is_periodic(make_run: MakeRun) -> None:
    lags = np.arange(21)
    wave, decay = np.cos(lags / 3), np.exp(-lags / 6)
    text = "decreases monotonically"

    def runs(a3m: np.ndarray, mno: np.ndarray) -> list[RunView]:
        curves = {"a3m": a3m, "mno": mno, "uno": wave}
        return [
            with_curves(make_run(f"tcf192-{k}", dataset="tcf192"), autocorrelation__model=v) for k, v in curves.items()
        ]

    assert judged(text, runs(decay, wave)).word == "reproduced"
    assert judged(text, runs(decay, decay)).word == "not reproduced"
    assert judged(text, runs(wave, wave)).word == "not reproduced"


def test_errors_of_energy_are_judged_at_the_walls_alone(make_run: MakeRun) -> None:
    truth = np.ones((32, 8))
    edge, middle = (np.ones((32, 8)) for _ in range(2))
    edge[:3], middle[10:20] = 3.0, 9.0
    runs = [
        with_curves(
            make_run(f"tcf192-{k}", dataset="tcf192"), tke__truth=truth, tke__model=middle if k == "a3m" else edge
        )
        for k in SKILLS
    ]
    verdict = judged("at top and bottom", runs)
    assert verdict.word == "reproduced"
    assert "a3m 0, mno 0.75, uno 0.75, mwt 0.75, factformer 0.75" in verdict.reason
    swapped = [with_curves(run, tke__model=edge if run.name.endswith("a3m") else middle) for run in runs]
    assert judged("at top and bottom", swapped).word == "not reproduced"


def sigma_runs(make_run: MakeRun, curves: Mapping[str, Mapping[str, Any]]) -> list[RunView]:
    return [with_curves(make_run(f"kf128-{row}", dataset="kf128"), **curves[row]) for row in SIGMAS]


def test_bandwidths_split_the_spectrum_where_the_rule_says(make_run: MakeRun) -> None:
    truth = np.ones(31)  # shells 0 … 30, N = 60: 1 … 20 are judged, 1 … 10 are low

    def spectrum(low: float, high: float) -> dict[str, np.ndarray]:
        model = truth.copy()
        model[1:11], model[11:21] = np.exp(low), np.exp(high)
        return {"spectrum__truth": truth, "spectrum__model": model, "spectrum__shells": np.arange(31),
                "spectrum_low__truth": truth, "spectrum_high__truth": truth}  # fmt: skip

    small, large = spectrum(0.1, 0.6), spectrum(0.3, 0.2)
    as_claimed = dict(zip(SIGMAS, (small, small, large, large, large), strict=True))
    verdict = judged("high frequencies", sigma_runs(make_run, as_claimed))
    assert verdict.word == "reproduced"
    assert "σ = 1: 0.1/0.6, σ = 4: 0.1/0.6, σ = 8: 0.3/0.2" in verdict.reason
    only_high = as_claimed | {"a3m-sigma1": spectrum(0.4, 0.6)}
    assert "high shells only" in judged("high frequencies", sigma_runs(make_run, only_high)).reason


def test_roughness_tells_smooth_maps_from_noise(make_run: MakeRun) -> None:
    rng, x = np.random.default_rng(0), np.arange(64) / 64

    def kernel(sigma: float) -> dict[str, np.ndarray]:
        waves = np.cos(2 * np.pi * np.outer(rng.normal(size=32) * sigma, x))  # (32, 64)
        maps = np.einsum("ci,cj->ij", waves, waves)[None]
        return {"attention__x": maps, "attention__y": maps}

    maps = {row: kernel(sigma) for row, sigma in zip(SIGMAS, (1, 4, 8, 16, 32), strict=True)}
    assert judged("smooth for small", sigma_runs(make_run, maps)).word == "reproduced"
    swapped = maps | {"a3m-sigma1": maps["a3m-sigma32"], "a3m-sigma32": maps["a3m-sigma1"]}
    assert judged("smooth for small", sigma_runs(make_run, swapped)).word == "not reproduced"


def test_overfitting_is_better_training_and_worse_validation(make_run: MakeRun) -> None:
    def runs(errors: dict[str, tuple[float, float]]) -> list[RunView]:
        logs = {
            row: [{"step": 1, "loss": 9.0, "parts": {"relative_l2": t}, "valid": {"relative_l2@1": v}}]
            for row, (t, v) in errors.items()
        }
        return [dataclasses.replace(make_run(f"kf128-{row}", dataset="kf128"), log=log) for row, log in logs.items()]

    both = {"a3m-sigma1": (0.5, 0.5), "a3m": (0.2, 0.2), "a3m-sigma32": (0.1, 0.3)}
    assert judged("underfits", runs(both)).word == "reproduced"
    assert judged("underfits", runs(both | {"a3m-sigma32": (0.3, 0.3)})).word == "not reproduced"
    assert judged("underfits", [make_run(f"kf128-{row}", dataset="kf128") for row in both]).word == "not testable"


@pytest.mark.parametrize(
    ("stretch", "flip", "word"), [(1.0, 1, "reproduced"), (1.2, 1, "not reproduced"), (1.0, -1, "not reproduced")]
)
def test_an_operator_is_special_orthogonal_or_it_is_not(
    make_run: MakeRun, stretch: float, flip: int, word: str
) -> None:
    angle = 0.3
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = np.zeros((4, 4))
    matrix[:2, :2], matrix[2, 2], matrix[3, 3] = stretch * turn, 1, flip
    run = with_curves(
        make_run("kf128-a3m", dataset="kf128"),
        operator__eigenvalues=np.linalg.eigvals(matrix),
        operator__singular_values=np.linalg.svd(matrix, compute_uv=False),
    )
    assert judged("within SO(d)", [run]).word == word


def costs(**changed: int) -> Evidence:
    work = {"mno": 3.4, "uno": 7.1, "mwt": 10.1, "factformer": 229.0, "a3m": 259.0}
    parameters = {name: int(COST_BY_MODEL.rows[label][0]) for name, label in COST_NAMES.items()} | changed
    rows = [
        {"model": name, "grid": grid, "precision": "fp32", "parameters": parameters[name]}
        | {"G mult-adds": work[name] / less_work, "kept MB": 4000.0 / less_memory}
        for name in work
        for grid, less_work, less_memory in (("256×256", 1, 1), ("32×32", 110, 45))
    ]
    for row in rows:
        if row["grid"] == "256×256":
            row["printed parameters"] = COST_BY_MODEL.rows[COST_NAMES[row["model"]]][0]
    # On 256² it has more, one for each channel of each point: only the row on the printed grid counts.
    rows += [
        {
            "model": "performer",
            "grid": "192×192",
            "parameters": 7_717_931,
            "G mult-adds": 271,
            "printed parameters": 7_717_931,
        },
        {"model": "performer", "grid": "256×256", "parameters": 11_387_529, "G mult-adds": 481},
    ]
    return Evidence(costs={"one.json": {"rows": rows}})


def test_costs_are_judged_from_counts() -> None:
    assert named("printed numbers of parameters").rule(costs()).word == "reproduced"
    other = named("printed numbers of parameters").rule(costs(uno=1))
    assert (other.word, "uno 1 (17,438,305)" in other.reason) == ("not reproduced", True)
    without = costs()
    without.costs["one.json"]["rows"] = [row for row in costs().costs["one.json"]["rows"] if row["grid"] != "192×192"]
    assert named("printed numbers of parameters").rule(without).reason == "no cost of performer"
    assert named("attention is heavier").rule(costs()).word == "reproduced"
    growth = named("grow linearly").rule(costs())
    # ln 110/ln 64 and ln 45/ln 64.
    assert (growth.word, "N^1.13" in growth.reason, "N^0.92" in growth.reason) == ("reproduced", True, True)


def test_the_exponent_is_reproduced_inside_its_interval() -> None:
    row = {"exponents": [0.9, 0.0, -14.5], "low": [0.89, 0, 0], "high": [0.91, 0, 0], "sum": -13.6}
    data = {"truth": row, "model": row, "reference": 0.9056, "divergence": -13.67}
    claim = named("largest exponent of Lorenz-63")
    assert claim.rule(Evidence(lorenz=data)).word == "reproduced"
    assert claim.rule(Evidence(lorenz=data | {"reference": 0.95})).word == "not reproduced"
    learned = named("a small perceptron")
    assert learned.rule(Evidence(lorenz=data)).word == "reproduced"
    off = row | {"exponents": [0.8, 0.0, -14.0]}
    assert learned.rule(Evidence(lorenz=data | {"model": off})).word == "not reproduced"
    lost = row | {"exponents": [None] * 3}
    assert learned.rule(Evidence(lorenz=data | {"model": lost})).word == "not reproduced"


def test_a_cost_table_that_was_cut_short_says_so() -> None:
    def block(**facts: bool) -> str:
        hardware, versions = {"device": "a machine", "cores": 2}, {"torch": "2"}
        data = {"rows": [], "notes": [], "hardware": hardware, "versions": versions, "commit": "abc", **facts}
        return cost_block(Evidence(costs={"one.json": data}))

    assert "Cut short" in block(complete=False)
    assert "Cut short" not in block(complete=True)
    # Files from before costs were written piece by piece do not say.
    assert "Cut short" not in block()


def test_without_persistence_nothing_is_said_of_it(make_run: MakeRun) -> None:
    runs = [make_run(f"{task}-a3m", dataset=task, skill=0.05) for task in ("kf256-coarse", "tcf96")]
    assert judged("beats persistence", runs).word == "reproduced"
    for run in runs:
        for metric in run.scores["metrics"].values():
            metric["rows"].pop("persistence")
    assert judged("beats persistence", runs) == Verdict("not run yet", "no cell holds persistence")

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ergoflow.report.runs import RunView, group_runs, slugify, steps_of_leaving, survival_text

Make = Callable[..., RunView]


def changed(run: RunView, **scores: Any) -> RunView:
    return dataclasses.replace(run, scores={**run.scores, **scores})


def test_an_unknown_format_is_refused_with_what_to_do(make_run: Make) -> None:
    with pytest.raises(ValueError, match=r"must have format 1, got 2; score the run again"):
        changed(make_run(), format=2)


def test_a_missing_key_is_named(make_run: Make) -> None:
    run = make_run()
    scores = {key: value for key, value in run.scores.items() if key != "commit"}
    with pytest.raises(ValueError, match="got no commit; score"):
        dataclasses.replace(run, scores=scores)


def test_scores_of_another_run_are_refused(make_run: Make) -> None:
    with pytest.raises(ValueError, match="got those of 'kf64-a3m' seed 0"):
        dataclasses.replace(make_run(), seed=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"better": "smaller"}, "better must be one of .* got 'smaller'"),
        ({"variant_of": "nothing"}, "variant_of must name a metric, got 'nothing'"),
        ({"rows": {}}, "got no model"),
        ({"rows": {"model": {"value": 1.0, "low": 1.0, "high": 1.0, "verdict": "fine"}}}, "got 'fine'"),
    ],
)
def test_a_malformed_metric_is_refused(make_run: Make, change: dict[str, Any], message: str) -> None:
    run = make_run()
    metrics = {**run.scores["metrics"], "me_ape": {**run.scores["metrics"]["me_ape"], **change}}
    with pytest.raises(ValueError, match=message):
        changed(run, metrics=metrics)


def test_a_curve_that_does_not_fit_its_abscissa_is_refused(make_run: Make) -> None:
    run = make_run()
    with pytest.raises(ValueError, match=r"'spectrum/model' must have the 33 points .* got 32"):
        dataclasses.replace(run, curves={**run.curves, "spectrum/model": np.ones(32)})
    with pytest.raises(ValueError, match="'spectrum/model' needs 'spectrum/shells', got none"):
        dataclasses.replace(run, curves={"spectrum/model": np.ones(32)})


def test_seeds_are_gathered_in_order_and_averaged(make_run: Make) -> None:
    runs = [make_run(seed=seed) for seed in (2, 0, 1)]
    for run, level in zip(runs, (3.0, 1.0, 5.0), strict=True):
        run.curves["relative_l2/model"][:] = level  # type: ignore[index]
    (group,) = group_runs(runs)
    assert [run.seed for run in group.runs] == [0, 1, 2]
    mean, spread = group.curve("relative_l2/model"), group.spread("relative_l2/model")
    assert mean is not None
    assert spread is not None
    np.testing.assert_allclose(mean, 3.0)
    np.testing.assert_allclose(spread, 2.0)


def test_densities_of_seeds_that_reach_other_values_are_averaged_bin_by_bin(make_run: Make) -> None:
    def reaching(seed: int, centers: list[float], density: list[float]) -> RunView:
        run = make_run("kf64-a3m", seed=seed)
        pdf = {"pdf/centers": centers, "pdf/model": density, "pdf/truth": density}
        return dataclasses.replace(run, curves={**run.curves, **{name: np.array(pdf[name]) for name in pdf}})

    runs = [reaching(0, [-0.5, 0.0, 0.5], [0.5, 1.0, 0.5]), reaching(1, [0.0, 0.5, 1.0, 1.5], [0.4, 0.8, 0.4, 0.4])]
    (group,) = group_runs(runs)
    np.testing.assert_allclose(group.curve("pdf/centers"), [-0.5, 0.0, 0.5, 1.0, 1.5])
    np.testing.assert_allclose(group.curve("pdf/model"), [0.25, 0.7, 0.65, 0.2, 0.2])
    np.testing.assert_allclose(group.runs[0].curve("pdf/truth"), [0.5, 1.0, 0.5, 0.0, 0.0])
    (group,) = group_runs([reaching(0, [0.0, 0.5], [1.0, 1.0]), reaching(1, [0.0, 0.4, 0.8], [1.0, 1.0, 0.5])])
    with pytest.raises(ValueError, match="share the shape"):
        group.curve("pdf/model")


def test_one_infinite_seed_makes_the_mean_infinite(make_run: Make) -> None:
    runs = [make_run(seed=seed) for seed in (0, 1)]
    runs[1].curves["relative_l2/model"][40:] = np.inf
    (group,) = group_runs(runs)
    mean = group.curve("relative_l2/model")
    assert mean is not None
    assert np.isinf(mean[40:]).all()
    assert np.isfinite(mean[:40]).all()


def test_a_curve_that_one_seed_lacks_is_no_mean(make_run: Make) -> None:
    whole, poor = make_run(seed=0), make_run(seed=1)
    (group,) = group_runs([whole, dataclasses.replace(poor, curves={})])
    assert group.curve("relative_l2/model") is None


def test_the_same_seed_twice_is_refused(make_run: Make) -> None:
    with pytest.raises(ValueError, match=r"must differ, got \[0, 0\]; give each run once"):
        group_runs([make_run(), make_run()])


def test_one_name_on_two_tasks_is_refused(make_run: Make) -> None:
    with pytest.raises(ValueError, match="must share dataset and step"):
        group_runs([make_run(seed=0), make_run(seed=1, dataset="kf128")])


def test_no_run_makes_no_report() -> None:
    with pytest.raises(ValueError, match="at least one run, got none; score a run first"):
        group_runs([])


def test_slugs_are_safe_in_file_names() -> None:
    assert slugify("../KF 256/<b>") == "kf-256-b"
    assert slugify("///") == "unnamed"


def test_roll_outs_have_left_the_range_of_the_truth_once_most_of_the_rest_is_outside(make_run: Make) -> None:
    """Energies of 1 ± 1, a range of 1 ± 5."""
    steps = np.arange(0, 60, 10)
    rows = {
        "stays": ([1, 3, 1, 2, 6, 1], None),
        "was out once": ([1, 9, 1, 1, 1, 1], None),
        "is out at the very end": ([1, 1, 1, 1, 1, 9], None),
        "looks in": ([1, 9, 9, 1, 9, 9], 10),
        "leaves late": ([1, 1, 1, 1, 9, 9], 40),
        "was never there": ([8, 9, 9, 9, np.inf, np.nan], 0),
    }
    energy = np.array([series for series, _ in rows.values()], dtype=float)
    curves = {"series/steps": steps, "series/energy/model": energy, "series/enstrophy/model": np.ones((6, 6))}
    curves |= {f"series/{name}/truth": np.array([[0.0, 2.0], [2.0, 0.0]]) for name in ("energy", "enstrophy")}
    assert steps_of_leaving(curves) == [step for _, step in rows.values() if step is not None]
    assert steps_of_leaving(curves | {"series/enstrophy/model": np.full((6, 6), 7.0)}) == [0] * 6
    assert steps_of_leaving({}) == []
    run = make_run()
    survival = {"fraction": 1.0, "diverged_at": [-1] * 6, "steps": 50, "energy_in_range@50": 1 / 3}
    left = dataclasses.replace(changed(run, survival=survival), curves={**run.curves, **curves})
    assert survival_text([left]) == "100%, 33% in range, left at step 10"
    dead = changed(left, survival={**survival, "fraction": 0.0, "energy_in_range@50": 0.0})
    assert survival_text([dead]) == "0%, left at step 10"

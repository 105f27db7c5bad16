"""Truths about the long-term scores: who passes, who fails, and what cannot look good."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ergoflow.metrics import (
    CATALOGUE,
    Interval,
    StatisticsResult,
    TrajectoryStatistics,
    autocorrelation,
    bootstrap,
    definition,
    energy_spectrum,
    enstrophy,
    fit_mixing_rate,
    fit_pca,
    integral_time,
    kinetic_energy,
    long_term_metrics,
    max_correlation_error,
    me_ape,
    me_lr,
    noise_floor,
    pca_kl_divergence,
    point_edges,
    point_wasserstein,
    quantile_ratios,
    relative_drift,
    sliced_wasserstein,
    survival_summary,
    tke_error,
    turbulent_kinetic_energy,
    verdict,
)
from ergoflow.metrics.resampling import centred_interval
from ergoflow.metrics.result import stands_still
from ergoflow.numerics.fourier import velocity_from_vorticity

GRID, LENGTH, LAGS = (12, 12), 5.0, 8


def turbulence(count: int, frames: int, *, seed: int, rate: float = 0.1, size: float = 1.0) -> np.ndarray:
    """A Gaussian vorticity (J, T, 1, X, Y) with a k^-2 amplitude, forgetting at `rate` per step."""
    rng = np.random.default_rng(seed)
    kx, ky = np.meshgrid(np.fft.fftfreq(12, 1 / 12), np.fft.rfftfreq(12, 1 / 12), indexing="ij")
    filter_ = size / (1 + kx**2 + ky**2)

    def noise() -> np.ndarray:
        return np.fft.irfft2(filter_ * np.fft.rfft2(rng.standard_normal((count, 1, *GRID))), s=GRID)

    keep = math.exp(-rate)
    frame, series = noise(), []
    for _ in range(frames):
        series.append(frame)
        frame = keep * frame + math.sqrt(1 - keep**2) * noise()
    z = np.stack(series, axis=1)
    return z - z.mean(axis=(3, 4), keepdims=True)


def sums(field: np.ndarray, truth: np.ndarray, **settings: float) -> StatisticsResult:
    statistics = TrajectoryStatistics(
        len(field),
        1,
        GRID,
        length=LENGTH,
        max_lag=LAGS,
        basis=fit_pca(truth, 8),
        histogram_edges=point_edges(truth, bins=2000),
        limit=10 * float(np.abs(truth).max()),
        **settings,
    )
    for k in range(field.shape[1]):
        statistics.update(torch.tensor(field[:, k]))
    return statistics.finish()


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    return turbulence(12, 120, seed=0)


@pytest.fixture(scope="module")
def truth_sums(truth) -> StatisticsResult:
    return sums(truth, truth)


@pytest.fixture(scope="module")
def floor(truth_sums) -> dict[str, Interval]:
    return noise_floor(truth_sums, resamples=30)


def test_resampling_runs_with_one_thread_of_torch_and_gives_the_others_back(truth_sums):
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        noise_floor(truth_sums, resamples=1, on_resample=lambda: seen.append(torch.get_num_threads()))
        bootstrap(truth_sums, truth_sums, resamples=2, on_resample=lambda: seen.append(torch.get_num_threads()))
        with pytest.raises(ValueError, match="resamples"):
            bootstrap(truth_sums, truth_sums, resamples=0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("weights", [None, [2, 0, 1]])
def test_metrics_from_sums_agree_with_the_plain_functions(weights):
    truth = turbulence(3, 40, seed=1)
    model = turbulence(3, 40, seed=2, rate=0.2, size=1.1)
    w = None if weights is None else np.array(weights, dtype=float)
    scores = long_term_metrics(sums(model, truth), sums(truth, truth), model_weights=w)
    model = model if weights is None else np.repeat(model, weights, axis=0)
    velocities = [velocity_from_vorticity(x, LENGTH) for x in (model, truth)]
    spectra = [energy_spectrum(u) for u in velocities]
    tke = [turbulent_kinetic_energy(u) for u in velocities]
    memory = [autocorrelation(x, LAGS) for x in (model, truth)]
    energy = [kinetic_energy(u) for u in velocities]
    swirl = [enstrophy(x) for x in (model, truth)]
    expected = {
        "me_ape": me_ape(*spectra),
        "me_ape@1..16": me_ape(*spectra, shells=(1, 6)),
        "me_ape@1..N/2": me_ape(*spectra, shells=(1, 6)),
        "me_lrw": me_lr(*spectra),
        "me_lr@uniform": me_lr(*spectra, "uniform"),
        "me_lr@literal": me_lr(*spectra, "literal"),
        "me_lr@pred": me_lr(*spectra, "pred"),
        "tke_error": tke_error(*tke),
        "delta_lambda": abs(fit_mixing_rate(memory[0]) - fit_mixing_rate(memory[1])),
        "integral_time_error": abs(integral_time(memory[0]) / integral_time(memory[1]) - 1),
        "acf_max_error": max_correlation_error(*memory),
        "energy_drift": abs(relative_drift(*energy)),
        "enstrophy_drift": abs(relative_drift(*swirl)),
        "pca_kl": pca_kl_divergence(model, truth, 8),
        "pca_kl@joint2": pca_kl_divergence(model, truth, joint=2),
        "sliced_wasserstein": sliced_wasserstein(model, truth, num_components=8),
    }
    for key, value in expected.items():
        assert scores[key] == pytest.approx(value, rel=1e-7), key
    assert scores["pdf_w1"] == pytest.approx(point_wasserstein(model, truth), abs=0.005)
    assert scores["tail_error"] == pytest.approx(abs(quantile_ratios(model, truth)[0] - 1), abs=0.03)
    assert set(scores) == set(CATALOGUE)


def test_shells_run_from_the_first_to_the_sixteenth_and_to_the_last():
    rng = np.random.default_rng(3)
    model, truth = rng.standard_normal((2, 2, 12, 1, 40))
    results = []
    for field in (model, truth):
        statistics = TrajectoryStatistics(2, 1, (40,), length=LENGTH, kind="velocity", max_lag=LAGS)
        for k in range(12):
            statistics.update(torch.tensor(field[:, k]))
        results.append(statistics.finish())
    scores, spectra = long_term_metrics(*results), [energy_spectrum(x) for x in (model, truth)]
    assert scores["me_ape"] == pytest.approx(me_ape(*spectra, shells=(1, 13)), rel=1e-10)
    assert scores["me_ape@1..16"] == pytest.approx(me_ape(*spectra, shells=(1, 16)), rel=1e-10)
    assert scores["me_ape@1..N/2"] == pytest.approx(me_ape(*spectra, shells=(1, 20)), rel=1e-10)


def test_shells_that_hold_rounding_only_do_not_count():
    """A solver's mask leaves 1e-30 of the energy there, which a restart in float32 makes 1e-14. What holds 1e-8 is
    flow, whatever the mean."""
    rng = np.random.default_rng(4)
    wave = np.arange(21)
    amplitudes = np.where(wave < 12, 1.0, np.where(wave == 12, 1e-4, 1e-6))
    model, truth = 1e3 + np.fft.irfft(np.fft.rfft(rng.standard_normal((2, 2, 12, 1, 40))) * amplitudes, n=40)
    model = model + 1e-4 * rng.standard_normal(model.shape)
    results = []
    for field in (model, truth):
        statistics = TrajectoryStatistics(2, 1, (40,), length=LENGTH, kind="velocity", max_lag=LAGS)
        for k in range(12):
            statistics.update(torch.tensor(field[:, k]))
        results.append(statistics.finish())
    scores, spectra = long_term_metrics(*results), [energy_spectrum(x) for x in (model, truth)]
    expected = me_ape(*spectra, shells=(1, 12))
    for last, key in ((16, "me_ape@1..16"), (20, "me_ape@1..N/2")):
        assert me_ape(*spectra, shells=(1, last)) > 1e3
        assert scores[key] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("variance", "still"), [(1e-10, False), (1e-14, True), (0.0, True), (math.nan, True)])
def test_a_forecast_stands_still_where_its_variance_is_rounding(variance: float, still: bool):
    assert stands_still(np.array([2 * variance, variance]), np.array([2.0, 1.0])) == still


def test_the_divergence_is_the_mean_over_the_first_ten_components():
    truth, model = turbulence(3, 40, seed=1), turbulence(3, 40, seed=2, size=1.3)
    basis, results = fit_pca(truth, 12), []
    for field in (model, truth):
        statistics = TrajectoryStatistics(3, 1, GRID, length=LENGTH, max_lag=LAGS, basis=basis)
        for k in range(40):
            statistics.update(torch.tensor(field[:, k]))
        results.append(statistics.finish())
    scores = long_term_metrics(*results)
    assert scores["pca_kl"] == pytest.approx(pca_kl_divergence(model, truth, 10), rel=1e-7)
    assert scores["sliced_wasserstein"] == pytest.approx(sliced_wasserstein(model, truth, num_components=12), rel=1e-7)


def test_tails_and_densities_are_those_of_each_channel_about_the_truths_mean():
    rng = np.random.default_rng(4)
    shape, centre = (3, 40, 2, 15, 12), np.array([7.0, -2.0])[:, None, None]
    truth = centre + np.array([1.0, 0.3])[:, None, None] * rng.standard_normal(shape)
    model = centre + np.array([1.2, 0.4])[:, None, None] * (0.5 + rng.standard_normal(shape))
    edges, results = point_edges(np.concatenate((truth, model)), bins=4000), []
    for field in (model, truth):
        statistics = TrajectoryStatistics(
            3, 2, shape[3:], length=LENGTH, kind="velocity", max_lag=LAGS, histogram_edges=edges
        )
        for k in range(40):
            statistics.update(torch.tensor(field[:, k]))
        results.append(statistics.finish())
    scores = long_term_metrics(*results)
    assert scores["pdf_w1"] == pytest.approx(point_wasserstein(model, truth), rel=2e-3)
    ratios = [quantile_ratios(model[:, :, [c]], truth[:, :, [c]])[0] for c in range(2)]
    assert scores["tail_error"] == pytest.approx(np.mean(np.abs(np.array(ratios) - 1)), rel=0.02)


def test_truth_against_itself_scores_zero(truth_sums):
    for key, value in long_term_metrics(truth_sums, truth_sums).items():
        if key not in ("energy_drift", "enstrophy_drift"):  # these compare the last tenth with the whole
            assert value == pytest.approx(0, abs=1e-9), key


def test_an_independent_sample_of_the_truth_lands_at_the_floor(truth, truth_sums, floor):
    other = bootstrap(sums(turbulence(12, 120, seed=5), truth), truth_sums, resamples=40)
    verdicts = {key: verdict(score, floor[key], {}) for key, score in other.items()}
    assert "failed" not in verdicts.values()
    assert sum(v == "worse" for v in verdicts.values()) <= 1, verdicts
    for key, score in other.items():
        assert score.low <= score.value <= score.high, key


@pytest.mark.parametrize("model", ["frozen", "zero", "climatology", "weak", "fast", "shuffled"])
def test_wrong_models_are_flagged_by_a_headline_number(model, truth, truth_sums, floor):
    if model == "frozen":
        field = np.broadcast_to(truth[:, :1], truth.shape)
    elif model == "zero":
        field = 0 * truth
    elif model == "climatology":
        field = np.broadcast_to(truth.mean(axis=(0, 1)), truth.shape)
    elif model == "weak":
        field = 0.7 * truth
    elif model == "fast":
        field = turbulence(12, 120, seed=6, rate=0.3)
    else:  # right states in the wrong order: only the memory is wrong
        field = truth[:, np.random.default_rng(0).permutation(truth.shape[1])]
    scores = bootstrap(sums(field, truth), truth_sums, resamples=20)
    flagged = {
        key
        for key, score in scores.items()
        if CATALOGUE[key].headline and verdict(score, floor[key], {}) in ("worse", "failed")
    }
    assert flagged
    wanted = {
        "frozen": "delta_lambda",
        "zero": "me_ape",
        "climatology": "tke_error",
        "weak": "energy_drift",
        "fast": "delta_lambda",
        "shuffled": "acf_max_error",
    }
    assert wanted[model] in flagged


def test_a_rollout_that_blows_up_late_cannot_look_good_in_any_column(truth, truth_sums, floor):
    field = truth.copy()
    field[3, 100:] = np.nan
    result = sums(field, truth)
    assert all(value == math.inf for value in long_term_metrics(result, truth_sums).values())
    scores = bootstrap(result, truth_sums, resamples=3)
    assert {verdict(score, floor[key], {}) for key, score in scores.items()} == {"failed"}
    summary = survival_summary(result, truth_sums, steps=(99, 100, 1000))
    assert summary["survival@99"] == 1
    assert summary["survival@100"] == pytest.approx(11 / 12)
    assert summary["survival@119"] == pytest.approx(11 / 12)
    assert summary["energy_in_range@119"] <= 11 / 12


def test_survivors_are_judged_alone_only_when_asked(truth, truth_sums):
    field = truth.copy()
    field[3, 100:] = 1e9
    result = sums(field, truth)
    scores = long_term_metrics(result, truth_sums, model_weights=result.survivors())
    rest = np.ones(12)
    rest[3] = 0
    expected = long_term_metrics(truth_sums, truth_sums, model_weights=rest)
    assert scores == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_drifting_rollout_leaves_the_range_of_the_truth(truth, truth_sums):
    growing = truth * np.linspace(1, 4, truth.shape[1])[None, :, None, None, None]
    summary = survival_summary(sums(growing, truth), truth_sums, steps=(0,))
    assert summary["energy_in_range@0"] == 1
    assert summary["survival@119"] == 1
    assert summary["enstrophy_in_range@119"] < 0.5


def test_the_range_of_the_truth_is_that_of_its_kept_frames(truth):
    # A wild start that the statistics skip must not widen the range.
    started = np.concatenate((8 * truth[:, :10], truth), axis=1)
    model = sums(1.8 * truth, truth)
    assert survival_summary(model, sums(started, truth, skip=10)) == survival_summary(model, sums(truth, truth))


def test_bootstrap_and_floor_depend_on_the_seed_alone(truth_sums, floor):
    assert noise_floor(truth_sums, resamples=30) == floor
    assert noise_floor(truth_sums, resamples=30, seed=1) != floor
    other = sums(turbulence(4, 30, seed=9), turbulence(4, 30, seed=8))
    assert bootstrap(other, other, resamples=5) == bootstrap(other, other, resamples=5)


def test_the_bootstrap_interval_covers_the_known_answer():
    # Amplitudes 1 and 1.2: the enstrophies differ by .44, and nearly every 95 % interval must say so.
    hits = 0
    for seed in range(8):
        truth = turbulence(10, 60, seed=100 + seed)
        model = turbulence(10, 60, seed=200 + seed, size=1.2)
        pair = [TrajectoryStatistics(10, 1, GRID, length=LENGTH, max_lag=LAGS) for _ in range(2)]
        for k in range(60):
            for statistics, field in zip(pair, (model, truth), strict=True):
                statistics.update(torch.tensor(field[:, k]))
        interval = bootstrap(pair[0].finish(), pair[1].finish(), resamples=50)["enstrophy_drift"]
        hits += interval.low <= 0.44 <= interval.high
    assert hits >= 6


def test_the_floor_of_two_trajectories_is_one_against_the_other():
    pair = sums(turbulence(2, 30, seed=7), turbulence(2, 30, seed=7))
    one, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    both = [long_term_metrics(pair, pair, model_weights=w, truth_weights=v) for w, v in ((one, other), (other, one))]
    for key, floor in noise_floor(pair, resamples=30).items():
        assert (floor.low, floor.high) == pytest.approx(sorted(scores[key] for scores in both)), key


@pytest.mark.parametrize("seed", range(3))
def test_the_floor_is_of_disjoint_halves_of_equal_size(seed):
    # With one resample the floor is that resample's score.
    four = sums(turbulence(4, 30, seed=7), turbulence(4, 30, seed=7))
    halves = [np.isin(range(4), chosen).astype(float) for chosen in itertools.combinations(range(4), 2)]
    scores = [long_term_metrics(four, four, model_weights=half, truth_weights=1 - half) for half in halves]
    found = {key: floor.value for key, floor in noise_floor(four, resamples=1, seed=seed).items()}
    assert any(found == pytest.approx(score) for score in scores)


def test_trajectories_of_both_sides_are_drawn_anew():
    spread = sums(turbulence(5, 30, seed=1), turbulence(5, 30, seed=1))
    alike = sums(np.repeat(turbulence(1, 30, seed=2), 5, axis=0), turbulence(5, 30, seed=1))
    widths = [
        interval.high - interval.low
        for pair in ((spread, alike), (alike, spread), (alike, alike))
        for interval in [bootstrap(*pair, resamples=10)["energy_drift"]]
    ]
    assert widths[0] > 0.05
    assert widths[1] > 0.05
    assert widths[2] == pytest.approx(0, abs=1e-12)


def test_intervals_contain_their_value_and_stay_above_zero():
    # The percentiles of three numbers are 0.11 and 0.49, their mean 0.3.
    interval = centred_interval(0.25, np.array([0.1, 0.3, 0.5]))
    assert (interval.low, interval.high) == pytest.approx((0.25 - 0.19, 0.25 + 0.19))
    near = centred_interval(0.1, np.array([0.1, 0.3, 0.5]))
    assert (near.low, near.high) == pytest.approx((0.1 * 0.11 / 0.3, 0.1 + 0.19))
    assert centred_interval(0.1, np.array([-0.1, 0.3, 0.5])).low == 0
    assert centred_interval(0.1, np.array([-0.5, -0.1, 0.1])).low == 0
    assert centred_interval(math.inf, np.ones(3)).low == math.inf
    assert centred_interval(1.0, np.array([1.0, math.inf])).high == math.inf


def test_a_large_number_with_a_heavy_tail_is_not_at_the_floor():
    resampled = np.exp(np.random.default_rng(0).normal(7.0, 1.5, size=400))
    score = centred_interval(1400.0, resampled)
    assert resampled.mean() - np.percentile(resampled, 2.5) > 1400
    assert verdict(score, Interval(value=0.16, low=0.1, high=0.3), {}) == "worse"


def test_an_interval_contains_a_negative_value_too():
    # Kernel densities can estimate a divergence below zero.
    interval = centred_interval(-0.1, np.array([-0.1, 0.1, 0.3]))
    assert interval.low == -0.1
    assert interval.high == pytest.approx(-0.1 + 0.19)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ((0.1, 0.05, 0.2), "at floor"),
        ((0.02, 0.01, 0.03), "at floor"),
        ((0.3, 0.15, 0.4), "at floor"),
        ((0.3, 0.16, 0.4), "better"),
        ((0.5, 0.4, 0.6), "better"),
        ((0.6, 0.5, 0.75), "worse"),
        ((0.9, 0.85, 1.0), "worse"),
        ((math.inf, math.inf, math.inf), "failed"),
    ],
)
def test_verdict_follows_from_the_intervals(score, expected):
    floor = Interval(value=0.1, low=0.05, high=0.15)
    trivial = {"persistence": Interval(value=0.8, low=0.7, high=0.9), "zero": Interval(value=2.0, low=2.0, high=2.0)}
    value, low, high = score
    assert verdict(Interval(value=value, low=low, high=high), floor, trivial) == expected


def test_without_a_floor_or_trivial_forecasts_nothing_is_at_floor_or_better():
    score = Interval(value=0.1, low=0.05, high=0.2)
    assert verdict(score, None, {"zero": Interval(value=1.0, low=1.0, high=1.0)}) == "better"
    assert verdict(score, None, {}) == "worse"


def test_definitions_name_shells_lags_and_sample_counts(truth_sums):
    for key in CATALOGUE:
        text = definition(key, truth_sums, truth_sums)
        assert "{" not in text
        assert "12 x 120" in text
    assert "shells 1..4 " in definition("me_ape", truth_sums, truth_sums)
    assert "lags 0..8" in definition("acf_max_error", truth_sums, truth_sums)


def test_bad_input_raises_one_line(truth, truth_sums):
    failed = truth[:3].copy()
    failed[0, 5] = np.nan
    single = sums(truth[:1], truth)
    other_grid = TrajectoryStatistics(2, 1, (4, 4), length=1.0, max_lag=LAGS)
    for _ in range(10):
        other_grid.update(torch.ones(2, 1, 4, 4))
    for call in (
        lambda: long_term_metrics(truth_sums, sums(failed, truth)),
        lambda: long_term_metrics(truth_sums, other_grid.finish()),
        lambda: long_term_metrics(truth_sums, truth_sums, model_weights=np.ones(3)),
        lambda: long_term_metrics(truth_sums, truth_sums, model_weights=-np.ones(12)),
        lambda: long_term_metrics(truth_sums, truth_sums, model_weights=np.full(12, 0.5)),
        lambda: long_term_metrics(truth_sums, truth_sums, truth_weights=np.zeros(12)),
        lambda: long_term_metrics(sums(truth[:2], truth[:6]), truth_sums),
        lambda: noise_floor(single),
        lambda: bootstrap(single, truth_sums),
    ):
        with pytest.raises(ValueError, match=r", got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

"""Truths about memory: exponentials, autoregressive processes, and the paper's printed estimator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit

from ergoflow.metrics import arrays, autocorrelation, fit_mixing_rate, integral_time, max_correlation_error


def autoregressive(rate: float, frames: int, points: int, *, seed: int, count: int = 1) -> np.ndarray:
    """Stationary AR(1) of unit variance with C(l) = exp(-rate l), independent at every point."""
    rng = np.random.default_rng(seed)
    a = np.exp(-rate)
    z = np.empty((count, frames, 1, points))
    z[:, 0] = rng.standard_normal((count, 1, points))
    for k in range(1, frames):
        z[:, k] = a * z[:, k - 1] + np.sqrt(1 - a * a) * rng.standard_normal((count, 1, points))
    return z


def loops(z: np.ndarray, max_lag: int) -> np.ndarray:
    fluctuation = z - z.mean(axis=(0, 1))
    origins = z.shape[1] - max_lag
    return np.array(
        [np.mean([fluctuation[:, k] * fluctuation[:, k + lag] for k in range(origins)]) for lag in range(max_lag + 1)]
    )


@pytest.mark.parametrize("shape", [(1, 25, 1, 6, 5), (3, 30, 2, 4, 7), (2, 21, 1, 9)])
def test_autocorrelation_agrees_with_its_definition(shape, monkeypatch):
    z = np.random.default_rng(0).standard_normal(shape) + np.arange(shape[-1])
    expected = loops(z, 20)
    assert autocorrelation(z) == pytest.approx(expected, rel=1e-11, abs=1e-13)
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 1)
    assert autocorrelation(torch.tensor(z)).numpy() == pytest.approx(expected, rel=1e-11, abs=1e-13)


def test_the_mean_field_is_removed_not_the_mean_number():
    standing = np.broadcast_to(10 * np.sin(np.arange(64)), (2, 40, 1, 64))
    z = standing + autoregressive(5.0, 40, 64, seed=1, count=2)
    correlation = autocorrelation(z, 10)
    assert correlation[0] == pytest.approx(1, abs=0.1)  # 51 with only the mean number removed
    assert np.abs(correlation[1:]).max() < 0.1


def test_ornstein_uhlenbeck_correlation_decays_at_its_rate():
    correlation = autocorrelation(autoregressive(0.15, 4000, 300, seed=2), 20)
    assert correlation == pytest.approx(np.exp(-0.15 * np.arange(21)), abs=0.02)
    assert fit_mixing_rate(correlation) == pytest.approx(0.15, abs=0.005)


def test_literal_estimator_follows_the_printed_sums():
    z = np.random.default_rng(3).standard_normal((2, 31, 1, 5)) + 3
    T, K = 30, 6
    mean = z.sum(axis=(0, 1)) / (2 * T)
    expected = [
        sum(((z[i, k] - mean) * (z[i, k + t] - mean)).mean() for i in range(2) for k in range(T - K - t + 1))
        / (2 * (T - K - t))
        for t in range(K + 1)
    ]
    assert autocorrelation(z, K, estimator="literal") == pytest.approx(np.array(expected), rel=1e-12)


@pytest.mark.parametrize("rate", [0.003, 0.05, 0.5, 3.0, -0.02, 0.0])
def test_exact_exponentials_return_their_rate(rate):
    correlation = 7.0 * np.exp(-rate * np.arange(21))
    assert fit_mixing_rate(correlation) == pytest.approx(rate, rel=1e-6, abs=1e-9)
    assert fit_mixing_rate(correlation, step_time=0.1) == pytest.approx(10 * rate, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_fit_agrees_with_curve_fit(seed):
    lags = np.arange(21)
    noise = 0.05 * np.random.default_rng(seed).standard_normal(21)
    correlation = np.exp(-0.1 * (seed + 1) * lags) * np.cos(0.1 * lags) + noise * (lags > 0)
    (expected,), _ = curve_fit(lambda t, rate: np.exp(-rate * t), lags, correlation / correlation[0], p0=[0.3])
    assert fit_mixing_rate(correlation) == pytest.approx(expected, rel=1e-5)


def test_a_frozen_flow_has_rate_zero_and_integral_time_of_all_lags():
    assert fit_mixing_rate(np.full(21, 2.0)) == pytest.approx(0, abs=1e-12)
    assert integral_time(np.full(21, 2.0)) == pytest.approx(20)


def test_integral_time_stops_at_the_first_zero():
    assert integral_time(np.array([2.0, 1.0, 0.0, -5.0, 4.0]), step_time=0.5) == pytest.approx(0.5)
    # 1, 1/2, -1/2: zero half way between lags 1 and 2.
    assert integral_time(np.array([1.0, 0.5, -0.5, 1.0])) == pytest.approx(0.75 + 0.125)


def test_largest_difference_of_correlations_ignores_amplitude():
    true = np.exp(-0.1 * np.arange(21))
    assert max_correlation_error(5 * true, true) == pytest.approx(0, abs=1e-15)
    assert max_correlation_error(np.ones(21), true) == pytest.approx(1 - np.exp(-2.0))


def test_bad_input_raises_one_line():
    z = np.ones((1, 10, 1, 4))
    nan = z.copy()
    nan[0, 3] = np.nan
    for call in (
        lambda: autocorrelation(z),
        lambda: autocorrelation(z, 5, estimator="literal"),
        lambda: autocorrelation(z, 2, estimator="other"),
        lambda: autocorrelation(z[0, 0], 2),
        lambda: autocorrelation(nan, 2),
        lambda: fit_mixing_rate(np.zeros(5)),
        lambda: fit_mixing_rate(np.array([1.0, np.nan])),
        lambda: integral_time(np.ones((2, 2))),
        lambda: max_correlation_error(np.ones(4), np.ones(5)),
    ):
        with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

"""The error of a learned exponent and its interval."""

from __future__ import annotations

import numpy as np
import pytest

from ergoflow.pipeline.exponents import Exponents

STATES, SPREAD = 8, 0.05


def drawn(rng: np.random.Generator, error: float) -> Exponents:
    """Exponents of eight states around 2 for the truth and 2 (1 + error) for the model, with a spread of 5 % each."""
    truth = 2 * (1 + SPREAD * rng.normal(size=(STATES, 1)))
    return Exponents(truth=truth, model=2 * (1 + error) * (1 + SPREAD * rng.normal(size=(STATES, 1))))


@pytest.mark.parametrize("error", [0.2, -0.2])
def test_interval_of_the_exponent_holds_the_error_nineteen_times_of_twenty(error: float) -> None:
    rng = np.random.default_rng(0)
    intervals = [drawn(rng, error).leading_error() for _ in range(600)]
    assert all(0 <= i.low <= i.value <= i.high for i in intervals)
    covered = np.mean([i.low <= abs(error) <= i.high for i in intervals])
    assert 0.92 < covered < 0.98


def test_interval_of_a_right_exponent_reaches_zero() -> None:
    rng = np.random.default_rng(0)
    reaches = np.mean([drawn(rng, 0.0).leading_error().low == 0 for _ in range(600)])
    assert 0.92 < reaches < 0.98


def test_one_state_that_diverges_fails_the_exponent() -> None:
    rates = np.array([[0.3], [0.4], [0.5]])
    interval = Exponents(truth=rates, model=np.array([[0.3], [np.inf], [0.5]])).leading_error()
    assert (interval.value, interval.low, interval.high) == (np.inf, np.inf, np.inf)


def test_floor_of_the_exponent_is_what_halves_of_the_truth_differ_by() -> None:
    # Halves in order: (1 1)(2 2), (2 1)(1 2), (2 2)(1 1), (1 2)(2 1); the model has no part in it.
    truth = np.array([[1.0], [1.0], [2.0], [2.0]])
    floor = Exponents(truth=truth, model=np.full_like(truth, 9.0)).leading_floor()
    assert (floor.value, floor.low, floor.high) == (np.mean([0.5, 0, 1, 0]), 0, 1)


def test_equal_exponents_have_no_error_and_no_doubt() -> None:
    rates = np.array([[0.3], [0.4], [0.5]])
    interval = Exponents(truth=rates, model=1.1 * rates).leading_error()
    assert interval.value == pytest.approx(0.1)
    assert interval.low == pytest.approx(0.1)
    assert interval.high == pytest.approx(0.1)

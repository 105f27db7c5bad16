"""Truths about survival: what counts as failure, and when."""

from __future__ import annotations

import numpy as np
import pytest

from ergoflow.metrics import failure_limit, first_failure, share_in_range, survival


def rollouts() -> np.ndarray:
    z = np.ones((4, 20, 1, 3, 3))
    z[1, 7, 0, 2, 2] = np.nan
    z[2, 12, 0, 0, 1] = -11.0
    z[3, 19, 0, 1, 1] = np.inf
    return z


def test_failure_is_the_first_step_that_is_not_finite_or_ten_times_too_large():
    truth = np.ones((2, 5, 1, 3, 3))
    assert failure_limit(truth) == 10
    assert first_failure(rollouts()).tolist() == [-1, 7, -1, 19]
    assert first_failure(rollouts(), limit=10.0).tolist() == [-1, 7, 12, 19]
    assert first_failure(rollouts(), limit=11.0).tolist() == [-1, 7, -1, 19]


def test_survival_share_falls_with_the_number_of_steps():
    truth = np.ones((2, 5, 1, 3, 3))
    shares = [survival(rollouts(), truth, steps=n) for n in (0, 6, 7, 12, 18, 19)]
    assert shares == [1, 1, 0.75, 0.5, 0.5, 0.25]
    assert survival(rollouts(), truth) == 0.25
    assert survival(rollouts()) == 0.5


def test_share_in_range_counts_trajectories_within_five_sigma_of_the_truth():
    truth = np.array([[1.0, 3.0] * 10])  # mean 2, sigma 1
    series = np.array([[2.0, 6.9], [2.0, 7.1], [2.0, -2.9], [2.0, np.nan], [2.0, np.inf]])
    assert share_in_range(series, truth, step=0) == 1
    assert share_in_range(series, truth, step=1) == pytest.approx(0.4)


def test_bad_input_raises_one_line():
    truth = np.ones((2, 5, 1, 3, 3))
    for call in (
        lambda: survival(rollouts(), truth, steps=20),
        lambda: survival(rollouts(), truth[..., :2]),
        lambda: survival(np.ones((3, 3))),
        lambda: failure_limit(rollouts()),
        lambda: share_in_range(np.ones((2, 5)), np.ones((2, 5)), step=5),
        lambda: share_in_range(np.ones(5), np.ones((2, 5)), step=1),
    ):
        with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

"""Truths about errors at a lead time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ergoflow.metrics import (
    arrays,
    high_correlation_time,
    pearson,
    relative_l2,
    relative_l2_per_trajectory,
    valid_prediction_time,
    vrmse,
)


def fields(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_relative_l2_is_the_mean_of_ratios_not_the_ratio_of_means():
    true = np.ones((2, 1, 1, 3, 5))
    true[1] *= 10
    pred = true + 1.0  # ratios 1 and 1/10
    assert relative_l2(pred, true) == pytest.approx([0.55], rel=1e-14)


def test_zero_forecast_scores_one_and_perfect_forecast_scores_zero():
    true = fields(3, 4, 2, 5, 7)
    assert relative_l2(0 * true, true) == pytest.approx(np.ones(4), rel=1e-14)
    assert (relative_l2(true, true) == 0).all()


def test_one_norm_over_channels_differs_from_the_mean_of_channel_ratios():
    true = np.ones((1, 1, 2, 4, 4))
    true[:, :, 0] = 3.0
    pred = true.copy()
    pred[:, :, 1] = 0.0  # error 0 in the strong channel, 1 in the weak one
    assert relative_l2(pred, true)[0] == pytest.approx(1 / np.sqrt(10), rel=1e-14)
    assert relative_l2(pred, true, per_channel=True)[0] == pytest.approx(0.5, rel=1e-14)


def test_mean_field_is_taken_from_the_denominator_and_cancels_in_the_numerator():
    fluctuation, mean = fields(2, 3, 1, 4, 6), 100 + fields(1, 4, 6, seed=1)
    error = fields(2, 3, 1, 4, 6, seed=2)
    expected = relative_l2(fluctuation + error, fluctuation)
    assert relative_l2(mean + fluctuation + error, mean + fluctuation, mean_field=mean) == pytest.approx(
        expected, rel=1e-12
    )


def test_rows_are_trajectories_and_columns_are_lead_times():
    true = np.ones((2, 3, 1, 4))
    pred = true.copy()
    pred[1, 2] = 3.0
    expected = np.zeros((2, 3))
    expected[1, 2] = 2.0
    assert np.array_equal(relative_l2_per_trajectory(pred, true), expected)


def test_a_blown_up_forecast_is_infinite_from_there_on_and_cannot_be_averaged_away():
    true = fields(3, 6, 1, 4, 4)
    pred = true.copy()
    pred[1, 3, 0, 2, 2] = np.nan
    error = relative_l2(pred, true)
    assert np.isfinite(error[:3]).all()
    assert np.isinf(error[3:]).all()
    assert np.isinf(vrmse(pred, true)[3:]).all()
    assert (pearson(pred, true)[1, 3:] == -np.inf).all()
    assert high_correlation_time(pred, true).tolist() == [6, 3, 6]
    assert valid_prediction_time(pred, true).tolist() == [6, 3, 6]


def test_tensor_in_gives_tensor_out_and_chunks_do_not_change_the_answer(monkeypatch):
    true, pred = fields(2, 9, 1, 5, 5), fields(2, 9, 1, 5, 5, seed=1)
    whole = relative_l2(torch.tensor(pred), torch.tensor(true))
    assert isinstance(whole, torch.Tensor)
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 120)
    assert np.allclose(relative_l2(pred, true), whole.numpy(), rtol=1e-14)
    assert np.allclose(relative_l2(pred.astype(np.float32), true), whole.numpy(), rtol=1e-6)


def test_read_only_arrays_are_accepted():
    true = fields(1, 2, 1, 4)
    true.setflags(write=False)
    assert (relative_l2(true, true) == 0).all()


def test_vrmse_of_the_mean_forecast_is_nearly_one():
    true = fields(4, 2, 3, 32, 32)
    mean = np.broadcast_to(true.mean(axis=(3, 4), keepdims=True), true.shape)
    # The population variance in the numerator over the unbiased one below it.
    assert vrmse(mean, true) == pytest.approx(np.full(2, np.sqrt(1 - 1 / 1024)), rel=1e-6)


def test_pearson_ignores_scale_and_offset_but_not_sign():
    true = fields(2, 3, 2, 6, 5)
    assert pearson(3 * true + 7, true) == pytest.approx(np.ones((2, 3)), rel=1e-12)
    assert pearson(-true, true) == pytest.approx(-np.ones((2, 3)), rel=1e-12)
    assert pearson(0 * true, true) == pytest.approx(np.zeros((2, 3)), abs=1e-14)


def test_pearson_agrees_with_numpy():
    pred, true = fields(2, 3, 1, 6, 5), fields(2, 3, 1, 6, 5, seed=1)
    expected = np.corrcoef(pred[1, 2].ravel(), true[1, 2].ravel())[0, 1]
    assert pearson(pred, true)[1, 2] == pytest.approx(expected, rel=1e-12)


def test_high_correlation_time_is_the_first_frame_below_the_threshold():
    rng = np.random.default_rng(3)
    true = rng.standard_normal((1, 11, 1, 200, 200))
    noise = rng.standard_normal(true.shape)
    share = np.linspace(0, 1, 11)[None, :, None, None, None]  # correlation (1-s)/sqrt((1-s)^2+s^2)
    pred = (1 - share) * true + share * noise
    # .8 = (1-s)/sqrt(...) at s = 3/7 = .43: first frame below is s = .5, frame 5.
    assert high_correlation_time(pred, true, step_time=0.1) == pytest.approx([0.5])


def test_valid_prediction_time_measures_error_in_units_of_the_climatological_spread():
    true = np.zeros((1, 8, 1, 4))
    true[0, :, 0] = np.array([1.0, -1.0] * 4)[:, None] * 2 + 50  # spread 2 about the mean 50
    pred = true + 0.2 * np.arange(8)[None, :, None, None]  # normalised error .1 k
    assert valid_prediction_time(pred, true, threshold=0.45, step_time=2.0) == pytest.approx([10.0])


@pytest.mark.parametrize("metric", [relative_l2, vrmse, pearson, high_correlation_time, valid_prediction_time])
def test_bad_input_raises_one_line(metric):
    good = fields(2, 3, 1, 4, 4)
    nan = good.copy()
    nan[1, 2, 0, 0, 0] = np.nan
    for pred, true in ((good, good[:, :2]), (good[0, 0], good[0, 0]), (good, nan), (good[:0], good[:0])):
        with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
            metric(pred, true)
        assert "\n" not in str(caught.value)


def test_zero_truth_and_wrong_mean_field_raise():
    true = fields(1, 2, 1, 4, 4)
    with pytest.raises(ValueError, match="positive norm"):
        relative_l2(true, 0 * true)
    with pytest.raises(ValueError, match="mean_field must have the shape"):
        relative_l2(true, true, mean_field=true[0])

"""Truths about distributions of states: principal components, Wasserstein distances, tails, increments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import gaussian_kde, wasserstein_distance

from ergoflow.metrics import (
    fit_pca,
    increment_flatness,
    pca,
    pca_kl_divergence,
    point_edges,
    point_wasserstein,
    project_trajectories,
    quantile_ratios,
    sliced_wasserstein,
    structure_function,
)
from ergoflow.metrics.distribution import slice_samples, sliced_distance
from ergoflow.metrics.histogram import histogram_w1, tail_quantile


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("shape", [(2, 10, 1, 6, 5), (3, 40, 2, 3, 3)])  # fewer and more frames than points
def test_principal_components_agree_with_the_singular_value_decomposition(shape):
    true = gaussian(*shape) * np.linspace(1, 4, shape[-1]) + 5
    states = true.reshape(shape[0] * shape[1], -1)
    centred = states - states.mean(0)
    _, values, vectors = np.linalg.svd(centred, full_matrices=False)
    basis = fit_pca(true, 4)
    assert basis.mean.numpy() == pytest.approx(states.mean(0), rel=1e-12)
    assert basis.variances.numpy() == pytest.approx(values[:4] ** 2 / len(states), rel=1e-9)
    overlap = basis.components.numpy() @ vectors[:4].T
    assert np.abs(overlap) == pytest.approx(np.eye(4), abs=1e-7)
    projections = project_trajectories(true, basis)
    assert projections.shape == (*shape[:2], 4)
    assert projections.reshape(-1, 4).var(0) == pytest.approx(basis.variances.numpy(), rel=1e-9)


def test_components_of_float32_truth_are_orthonormal_and_round_off_directions_are_left_out():
    amplitudes = gaussian(1, 30, 3).astype(np.float32)
    shapes = gaussian(3, 200, seed=1).astype(np.float32)
    true = (amplitudes @ shapes).reshape(1, 30, 1, 200).astype(np.float64)
    basis = fit_pca(true, 10)
    assert len(basis.variances) == 3
    assert (basis.components @ basis.components.T).numpy() == pytest.approx(np.eye(3), abs=1e-12)


def test_column_chunks_and_snapshot_strides_are_honest(monkeypatch):
    true = gaussian(2, 9, 1, 8, 8)
    whole = fit_pca(true, 3)
    monkeypatch.setattr(pca, "COLUMN_CHUNK", 10)
    assert torch.allclose(fit_pca(true, 3).components, whole.components, atol=1e-10)
    assert torch.allclose(fit_pca(true, 3, max_snapshots=9).mean, fit_pca(true[:, ::2], 3).mean)


def test_pca_divergence_is_the_mean_of_the_scipy_divergences_on_the_truths_components():
    true, pred = gaussian(2, 40, 1, 4, 4), 1.3 * gaussian(3, 30, 1, 4, 4, seed=1) + 0.2
    states, model = true.reshape(80, 16), pred.reshape(90, 16)
    vectors = np.linalg.svd(states - states.mean(0))[2][:10]
    p, q = (vectors @ (x - states.mean(0)).T for x in (states, model))
    expected = np.mean(
        [np.mean(gaussian_kde(a).logpdf(a) - gaussian_kde(b).logpdf(a)) for a, b in zip(p, q, strict=True)]
    )
    assert pca_kl_divergence(pred, true) == pytest.approx(expected, rel=1e-7)
    joint = np.mean(gaussian_kde(p[:2]).logpdf(p[:2]) - gaussian_kde(q[:2]).logpdf(p[:2]))
    assert pca_kl_divergence(pred, true, joint=2) == pytest.approx(joint, rel=1e-7)


def test_pca_divergence_vanishes_for_truth_and_is_infinite_for_collapse_and_failure():
    true = gaussian(2, 40, 1, 4, 4)
    assert pca_kl_divergence(true, true, 3) == pytest.approx(0, abs=1e-12)
    assert pca_kl_divergence(0 * true, true, 3) == np.inf
    failed = true.copy()
    failed[1, 20:] = np.nan
    assert pca_kl_divergence(failed, true, 3) == np.inf
    assert sliced_wasserstein(failed, true, num_components=3) == np.inf
    assert point_wasserstein(failed, true) == np.inf
    assert np.isinf(quantile_ratios(failed, true)).all()


def test_sliced_distance_of_a_shift_by_one_sigma_in_every_component_is_about_one():
    # Shift s along every whitened axis: the mean of (s . theta)^2 over directions is |s|^2 / K = 1.
    states = gaussian(1, 500, 8)
    shifted = states + 1.0
    a, b = slice_samples(shifted), slice_samples(states)
    assert sliced_distance(a, np.ones(1), b, np.ones(1)) == pytest.approx(1.0, abs=0.1)
    direction_mean = np.random.default_rng(0).standard_normal((512, 8))
    direction_mean /= np.linalg.norm(direction_mean, axis=1, keepdims=True)
    exact = np.sqrt(np.mean(direction_mean.sum(1) ** 2))
    assert sliced_distance(a, np.ones(1), b, np.ones(1)) == pytest.approx(exact, rel=1e-12)


def test_sliced_distance_weights_count_repetitions():
    a, b = gaussian(4, 15, 3), gaussian(5, 12, 3, seed=1)
    weights = np.array([2.0, 0.0, 1.0, 1.0]), np.array([0.0, 3.0, 1.0, 1.0, 0.0])
    repeated = [np.repeat(x, w.astype(int), axis=0) for x, w in ((a, weights[0]), (b, weights[1]))]
    expected = sliced_distance(slice_samples(repeated[0]), np.ones(4), slice_samples(repeated[1]), np.ones(5))
    actual = sliced_distance(slice_samples(a), weights[0], slice_samples(b), weights[1])
    assert actual == pytest.approx(expected, rel=1e-12)


def test_sliced_distance_of_unequal_samples_has_no_preferred_side():
    a, b = gaussian(1, 50, 1), 0.2 + gaussian(1, 30, 1, seed=1)
    distances = [
        sliced_distance(*(x for z in (a, b) for x in (slice_samples(sign * z, num_directions=1), np.ones(1))))
        for sign in (1, -1)
    ]
    assert distances[0] == pytest.approx(distances[1], rel=1e-12)


def test_sliced_wasserstein_is_small_between_halves_and_large_for_a_frozen_state():
    true, other = gaussian(10, 50, 1, 5, 5), gaussian(10, 50, 1, 5, 5, seed=1)
    frozen = np.broadcast_to(true[:, :1], true.shape)
    near, far = (sliced_wasserstein(x, true, num_components=8) for x in (other, frozen))
    assert near < 0.15
    assert far > 2 * near
    assert sliced_wasserstein(true, true) == 0


def test_point_distance_agrees_with_scipy_and_the_shift_of_a_gaussian():
    true, pred = gaussian(2, 30, 1, 10, 10), 1.2 * gaussian(1, 40, 1, 10, 10, seed=1) + 0.5
    expected = wasserstein_distance(pred.ravel(), true.ravel()) / true.std()
    assert point_wasserstein(pred, true) == pytest.approx(expected, rel=1e-10)
    assert point_wasserstein(true + 0.3, true) == pytest.approx(0.3 / true.std(), rel=1e-10)


def test_point_distance_is_the_mean_over_channels_in_units_of_each_sigma():
    true = gaussian(1, 50, 2, 8) * np.array([1.0, 100.0])[:, None]
    shift = np.array([0.5, 100.0])[:, None]
    sigma = true.std(axis=(0, 1, 3))
    expected = 0.5 * (0.5 / sigma[0] + 100 / sigma[1])
    assert point_wasserstein(true + shift, true) == pytest.approx(expected, rel=1e-9)


def test_histograms_give_the_same_distance_and_tail_to_a_bin():
    true, pred = gaussian(1, 100, 1, 100), 1.3 * gaussian(1, 100, 1, 100, seed=1)
    edges = point_edges(true, bins=4000)[0]
    width = edges[1] - edges[0]
    counts = [np.histogram(x, edges)[0].astype(float) for x in (pred, true)]
    assert histogram_w1(*counts, edges) == pytest.approx(wasserstein_distance(pred.ravel(), true.ravel()), abs=width)
    assert tail_quantile(counts[1], edges, 0.0, 0.999) == pytest.approx(np.quantile(np.abs(true), 0.999), abs=0.05)
    assert (edges[0], edges[-1]) == pytest.approx((true.min() - 0.25 * np.ptp(true), true.max() + 0.25 * np.ptp(true)))


def test_quantile_ratios_see_a_scaled_tail():
    true = gaussian(2, 50, 1, 20, 20)
    scaled = true.mean() + 1.4 * (true - true.mean())
    assert quantile_ratios(scaled, true) == pytest.approx([1.4, 1.4], rel=1e-12)
    moved = np.quantile(np.abs(true + 3 - true.mean()), 0.999) / np.quantile(np.abs(true - true.mean()), 0.999)
    assert quantile_ratios(true + 3, true)[0] == pytest.approx(moved, rel=1e-12)
    clipped = np.clip(true, -2, 2)
    assert (quantile_ratios(clipped, true) < 0.7).all()


def test_structure_function_of_a_wave_has_its_closed_form():
    x = 2 * np.pi * np.arange(24) / 24
    field = np.stack((np.sin(3 * x), 2 * np.cos(x)))[None, None]  # (1, 1, 2, 24)
    r = 2 * np.pi * np.array([1, 5, 12]) / 24
    expected = (1 - np.cos(3 * r)) + 4 * (1 - np.cos(r))
    assert structure_function(field, [1, 5, 12]) == pytest.approx(expected, rel=1e-12)


def test_structure_function_follows_the_axis():
    field = np.broadcast_to(np.sin(2 * np.pi * np.arange(8) / 8)[:, None], (1, 1, 1, 8, 6))
    assert structure_function(field, [1, 2], axis=-1) == pytest.approx([0, 0], abs=1e-28)
    assert structure_function(field, [4], axis=-2) == pytest.approx([2.0])


def test_increments_of_gaussian_noise_have_flatness_three_and_of_a_sine_one_and_a_half():
    assert increment_flatness(gaussian(10, 20, 2, 40, 40), [1, 7]) == pytest.approx([3, 3], abs=0.03)
    sine = np.sin(2 * np.pi * np.arange(32) / 32)[None, None, None]
    assert increment_flatness(sine, [3]) == pytest.approx([1.5], rel=1e-12)


def test_bad_input_raises_one_line():
    good = gaussian(1, 5, 1, 4, 4)
    nan = good.copy()
    nan[0, 0, 0, 0, 0] = np.nan
    for call in (
        lambda: pca_kl_divergence(good, good[..., :3]),
        lambda: pca_kl_divergence(good, nan),
        lambda: sliced_wasserstein(good[0, 0], good),
        lambda: point_wasserstein(good, nan),
        lambda: quantile_ratios(good, good, [99.9]),
        lambda: structure_function(good, [4]),
        lambda: structure_function(good, [1], axis=0),
        lambda: fit_pca(good[:, :1], 2),
        lambda: fit_pca(np.ones((1, 5, 1, 4)), 2),
        lambda: point_edges(np.ones((1, 5, 1, 4))),
        lambda: pca.PCABasis(mean=torch.zeros(3), components=torch.zeros(2, 4), variances=torch.zeros(2)),
    ):
        with pytest.raises(ValueError, match=r", got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

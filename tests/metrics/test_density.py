"""Truths about kernel densities: Gaussians in closed form, scipy, gathered samples against all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import gaussian_kde

from ergoflow.metrics import kl_divergence
from ergoflow.metrics.density import weighted_joint_kl, weighted_kl


def scipy_kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.mean(gaussian_kde(p).logpdf(p) - gaussian_kde(q).logpdf(p)))


def test_divergence_of_gaussians_approaches_its_closed_form():
    rng = np.random.default_rng(0)
    p, q = rng.standard_normal(20000), 0.7 + 1.5 * rng.standard_normal(20000)
    closed = np.log(1.5) + (1 + 0.7**2) / (2 * 1.5**2) - 0.5
    assert kl_divergence(p, q) == pytest.approx(closed, abs=0.02)
    assert kl_divergence(q, p) > 0.4  # closed form .46: the divergence is not symmetric


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_divergence_agrees_with_scipy(dims):
    rng = np.random.default_rng(dims)
    p = rng.standard_normal((dims, 150))
    q = 0.5 + rng.standard_normal((dims, dims)) @ rng.standard_normal((dims, 90))
    assert kl_divergence(p, q) == pytest.approx(scipy_kl(p, q), rel=1e-9)
    assert kl_divergence(torch.tensor(p), torch.tensor(q)) == pytest.approx(scipy_kl(p, q), rel=1e-9)


def test_far_tails_keep_their_logarithm():
    p, q = np.array([0.0, 1.0, 200.0]), np.array([0.0, 1.0, 2.0])
    assert kl_divergence(p, q) == pytest.approx(scipy_kl(p, q), rel=1e-10)
    assert kl_divergence(p, q) > 1000


@pytest.mark.parametrize("shift", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.3, 1e-3])
def test_binned_densities_agree_with_the_double_sum(shift, scale):
    rng = np.random.default_rng(1)
    p, q = rng.standard_normal(1500), shift + scale * rng.standard_normal(1100)
    ones = np.ones_like(p), np.ones_like(q)
    exact = weighted_kl(p, ones[0], q, ones[1])
    binned = weighted_kl(p, ones[0], q, ones[1], exact_pairs=0)
    assert binned != exact
    assert binned == pytest.approx(exact, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_sharing_samples_between_bins_does_not_widen_the_density(shift):
    rng = np.random.default_rng(1)
    p, q = rng.standard_normal(1500), shift + rng.standard_normal(1100)
    ones = np.ones_like(p), np.ones_like(q)
    exact = weighted_kl(p, ones[0], q, ones[1])
    assert weighted_kl(p, ones[0], q, ones[1], exact_pairs=0) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("exact_pairs", [0, 10**9])
def test_weights_count_repetitions(exact_pairs):
    rng = np.random.default_rng(2)
    p, q = rng.standard_normal(60), rng.standard_normal(50) + 0.3
    wp, wq = rng.integers(0, 4, 60).astype(float), rng.integers(0, 4, 50).astype(float)
    repeated = np.repeat(p, wp.astype(int)), np.repeat(q, wq.astype(int))
    ones = [np.ones_like(x) for x in repeated]
    expected = weighted_kl(repeated[0], ones[0], repeated[1], ones[1], exact_pairs=exact_pairs)
    assert weighted_kl(p, wp, q, wq, exact_pairs=exact_pairs) == pytest.approx(expected, rel=1e-9)


def test_joint_weights_count_repetitions():
    rng = np.random.default_rng(3)
    p, q = rng.standard_normal((2, 40)), rng.standard_normal((2, 30)) + 0.3
    w = rng.integers(0, 3, 40).astype(float)
    repeated = np.repeat(p, w.astype(int), axis=1)
    assert weighted_joint_kl(p, w, q, np.ones(30)) == pytest.approx(scipy_kl(repeated, q), rel=1e-9)


def test_a_model_collapsed_onto_a_point_or_a_line_is_infinitely_far():
    rng = np.random.default_rng(4)
    p = rng.standard_normal((2, 100))
    assert kl_divergence(p[0], np.full(100, 0.3)) == np.inf
    assert kl_divergence(p[0], 0.3 + 1e-9 * p[1]) == np.inf
    assert kl_divergence(p, np.stack((p[0], 2 * p[0]))) == np.inf
    assert kl_divergence(p[0], np.full(100, np.nan)) == np.inf


def test_bad_input_raises_one_line():
    good = np.random.default_rng(5).standard_normal((2, 50))
    for call in (
        lambda: kl_divergence(good, good[:1]),
        lambda: kl_divergence(good[:, :2], good),
        lambda: kl_divergence(good[:, :, None], good),
        lambda: kl_divergence(np.nan * good, good),
        lambda: kl_divergence(np.ones(5), good[0]),
        lambda: kl_divergence(np.stack((good[0], good[0])), good),
    ):
        with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

"""Truths about the channel plane: profiles of known fields, symmetry, spanwise correlation, wall shear."""

from __future__ import annotations

import numpy as np
import pytest

from ergoflow.metrics import (
    bulk_velocity,
    flow_rate_drift,
    fold,
    mean_profile,
    reynolds_stress,
    rms_profiles,
    spanwise_correlation,
    wall_shear,
    wall_shear_pdf,
)


def channel(seed: int = 0, frames: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """u = U(y) + a, v = -s(y) a / 2 + b, w = 2 c with unit Gaussians a, b, c; s = +1 below, -1 above."""
    a, b, c = np.random.default_rng(seed).standard_normal((3, 2, frames, 10, 8))
    profile = np.array([1.0, 4, 7, 9, 10, 10, 9, 7, 4, 1])
    side = np.where(np.arange(10) < 5, 1.0, -1.0)[:, None]
    return np.stack((profile[:, None] + a, -side * a / 2 + b, 2 * c), axis=2), profile


def test_profiles_average_over_trajectories_time_and_span():
    velocity, profile = channel()
    assert mean_profile(velocity)[0] == pytest.approx(profile, abs=0.06)
    assert mean_profile(velocity) == pytest.approx(velocity.mean(axis=(0, 1, 4)), rel=1e-12, abs=1e-14)
    expected = np.sqrt(velocity.transpose(2, 3, 0, 1, 4).reshape(3, 10, -1).var(axis=2))
    assert rms_profiles(velocity) == pytest.approx(expected, rel=1e-10)
    assert rms_profiles(velocity)[:, 3] == pytest.approx([1, np.sqrt(1.25), 2], rel=0.05)


def test_shear_stress_is_odd_about_the_centre_and_folds_to_one_wall():
    stress = reynolds_stress(channel()[0])
    assert stress[:5] == pytest.approx(np.full(5, 0.5), abs=0.06)
    assert stress[5:] == pytest.approx(np.full(5, -0.5), abs=0.06)
    assert fold(stress, odd=True) == pytest.approx(np.full(5, 0.5), abs=0.05)
    assert np.abs(fold(stress)).max() < 0.06


def test_folding_an_odd_number_of_rows_keeps_the_centre():
    assert fold(np.array([1.0, 2, 5, 4, 3])).tolist() == [2, 3, 5]


def test_spanwise_correlation_of_a_wave_is_a_cosine():
    z = 2 * np.pi * np.arange(16) / 16
    phases = np.random.default_rng(1).uniform(0, 2 * np.pi, (3, 50, 1, 1))
    velocity = np.zeros((3, 50, 3, 4, 16))
    velocity[:, :, 0] = 15 + np.cos(2 * z + phases)
    velocity[:, :, 1] = np.cos(3 * z + phases)
    assert spanwise_correlation(velocity, 2) == pytest.approx(np.cos(2 * z[:9]), abs=1e-10)
    assert spanwise_correlation(velocity, 0, component=1) == pytest.approx(np.cos(3 * z[:9]), abs=1e-10)


def test_spanwise_correlation_agrees_with_shifted_products():
    line = np.random.default_rng(2).standard_normal((2, 30, 3, 4, 9)) + 3
    fluctuation = line[:, :, 0, 1] - line[:, :, 0, 1].mean()
    expected = [np.mean(fluctuation * np.roll(fluctuation, -s, axis=-1)) for s in range(5)]
    assert spanwise_correlation(line, 1) == pytest.approx(np.array(expected) / expected[0], rel=1e-9)


def test_wall_shear_is_the_slope_to_the_first_node_on_both_walls():
    velocity = np.zeros((1, 2, 3, 6, 4))
    velocity[:, :, 0, 0], velocity[:, :, 0, -1] = 0.94, 1.88
    shear = wall_shear(velocity, first_node_plus=0.94)
    assert shear.shape == (1, 2, 2, 4)
    assert shear[0, 0, :, 0] == pytest.approx([1, 2])


def test_wall_shear_pdf_integrates_to_the_mass_inside_its_edges():
    velocity = channel()[0]
    edges = np.linspace(-20, 20, 401)
    density = wall_shear_pdf(velocity, edges)
    assert density.sum() * 0.1 == pytest.approx(1)
    assert (0.5 * (edges[1:] + edges[:-1]) * density).sum() * 0.1 == pytest.approx(1, abs=0.01)
    assert wall_shear_pdf(velocity, np.array([-20.0, 1.0])) * 21 == pytest.approx([0.5], abs=0.03)


def test_flow_rate_drift_compares_bulk_velocities():
    velocity, profile = channel()
    assert bulk_velocity(velocity).mean() == pytest.approx(profile.mean(), abs=0.02)
    faster = velocity.copy()
    faster[:, :, 0] *= 1.1
    assert flow_rate_drift(faster, velocity) == pytest.approx(0.1, abs=0.01)


def test_bad_input_raises_one_line():
    velocity = channel(frames=3)[0]
    nan = velocity.copy()
    nan[0, 0, 0, 0, 0] = np.nan
    for call in (
        lambda: mean_profile(velocity[:, :, :2]),
        lambda: rms_profiles(velocity[0]),
        lambda: reynolds_stress(nan),
        lambda: spanwise_correlation(velocity, 10),
        lambda: spanwise_correlation(0 * velocity, 3),
        lambda: wall_shear(velocity, first_node_plus=0.0),
        lambda: wall_shear_pdf(velocity, np.array([1.0, 0.0])),
    ):
        with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

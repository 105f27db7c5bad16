"""Truths about energies: Taylor-Green vortices, pooled variances, drifts and budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ergoflow.metrics import (
    arrays,
    budget_closure,
    enstrophy,
    kinetic_energy,
    relative_drift,
    tke_absolute_error,
    tke_error,
    tke_percentage_error,
    turbulent_kinetic_energy,
)
from ergoflow.metrics.energy import in_plane_vorticity
from ergoflow.numerics.fourier import velocity_from_vorticity, vorticity_from_velocity


def taylor_green(grid: tuple[int, int], length: tuple[float, float], n: int, m: int) -> np.ndarray:
    """Vorticity (1, 1, 1, X, Y) of psi = sin(ax) sin(by)."""
    x = np.arange(grid[0])[:, None] / grid[0]
    y = np.arange(grid[1])[None] / grid[1]
    a, b = 2 * np.pi * n / length[0], 2 * np.pi * m / length[1]
    return ((a**2 + b**2) * np.sin(2 * np.pi * n * x) * np.sin(2 * np.pi * m * y))[None, None, None]


@pytest.mark.parametrize(("grid", "length"), [((16, 16), (2 * np.pi, 2 * np.pi)), ((15, 24), (3.0, 7.0))])
def test_taylor_green_energy_and_enstrophy_have_their_closed_forms(grid, length):
    omega = taylor_green(grid, length, 2, 3)
    k2 = (4 * np.pi / length[0]) ** 2 + (6 * np.pi / length[1]) ** 2
    velocity = velocity_from_vorticity(omega, length)
    assert kinetic_energy(velocity) == pytest.approx(np.array([[k2 / 8]]), rel=1e-12)
    assert enstrophy(omega) == pytest.approx(np.array([[k2**2 / 8]]), rel=1e-12)


def test_tke_is_the_pooled_population_variance_per_component():
    velocity = np.random.default_rng(0).standard_normal((3, 5, 2, 4, 6)) + 10
    pooled = velocity.reshape(15, 2, 4, 6).var(axis=0)
    assert turbulent_kinetic_energy(velocity) == pytest.approx(pooled.mean(0), rel=1e-12)
    assert turbulent_kinetic_energy(velocity, half=True) == pytest.approx(pooled.sum(0) / 2, rel=1e-12)


def test_trajectories_frozen_at_different_states_have_tke_and_one_frozen_trajectory_has_none():
    frozen = np.broadcast_to(np.random.default_rng(1).standard_normal((2, 1, 1, 4, 4)), (2, 9, 1, 4, 4))
    assert turbulent_kinetic_energy(frozen[:1]) == pytest.approx(np.zeros((4, 4)), abs=1e-28)
    assert turbulent_kinetic_energy(frozen).min() > 0


def test_three_components_divide_by_three():
    signs = np.array([1.0, -1.0])[None, :, None, None, None]
    velocity = signs * np.array([1.0, 2.0, 3.0])[None, None, :, None, None] * np.ones((1, 2, 3, 5, 5))
    assert turbulent_kinetic_energy(velocity) == pytest.approx(np.full((5, 5), 14 / 3))


def test_tke_does_not_depend_on_chunks(monkeypatch):
    velocity = torch.randn(2, 7, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = turbulent_kinetic_energy(velocity)
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 130)
    assert torch.allclose(turbulent_kinetic_energy(velocity), whole, rtol=1e-13)


def test_tke_errors_of_a_scaled_map():
    true = np.random.default_rng(2).uniform(1, 3, (4, 5))
    assert tke_absolute_error(1.25 * true, true) == pytest.approx(0.25 * true)
    assert tke_percentage_error(1.25 * true, true) == pytest.approx(np.full((4, 5), 25.0))
    assert tke_error(1.25 * true, true) == pytest.approx(0.25)
    assert tke_error(np.nan * true, true) == np.inf


def test_drift_compares_the_last_tenth_with_the_mean_truth():
    true = np.full((2, 50), 4.0)
    series = np.full((3, 100), 4.0)
    series[:, 90:] = 5.0
    assert relative_drift(series, true) == pytest.approx(0.25)
    assert relative_drift(-series + 8, true) == pytest.approx(-0.25)
    series[0, 10] = np.nan
    assert relative_drift(series, true) == np.inf


def test_an_exact_budget_closes_and_a_missing_sink_shows_its_share():
    t = np.linspace(0, 2, 2001)
    energy = 3 + np.sin(t)
    gain, loss = 2 + np.cos(t), np.full_like(t, 2.0)
    assert budget_closure(energy, gain, loss, step_time=0.001) < 1e-6
    supply = 4 + np.sin(2.0)
    assert budget_closure(energy, gain, 0 * loss, step_time=0.001) == pytest.approx(4 / supply, rel=1e-6)


def test_of_a_scalar_it_is_the_size_of_the_gradient():
    # On sides 3 and 7: sin(a x) cos(b y) with a = 2 pi / 3, b = 4 pi / 7.
    x, y = (torch.arange(n, dtype=torch.float64) * side / n for n, side in ((18, 3.0), (20, 7.0)))
    a, b = 2 * np.pi / 3, 4 * np.pi / 7
    theta = torch.sin(a * x)[:, None] * torch.cos(b * y)
    along_x, along_y = (
        a * torch.cos(a * x)[:, None] * torch.cos(b * y),
        b * torch.sin(a * x)[:, None] * torch.sin(b * y),
    )
    found = in_plane_vorticity(theta[None, None], (3.0, 7.0), periodic=(True, True))
    torch.testing.assert_close(found[0], (along_x.square() + along_y.square()).sqrt())


def test_in_plane_vorticity_agrees_with_the_spectral_curl_on_a_periodic_plane():
    velocity = torch.randn(2, 2, 12, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = vorticity_from_velocity(velocity, (3.0, 7.0))[:, 0]
    actual = in_plane_vorticity(velocity, (3.0, 7.0), periodic=(True, True))
    assert torch.allclose(actual, expected, atol=1e-11)


def test_streamwise_vorticity_of_the_channel_is_dw_dy_minus_dv_dz():
    y = ((torch.arange(20, dtype=torch.float64) + 0.5) / 20 * 2.0)[:, None]
    z = (torch.arange(16, dtype=torch.float64) / 16 * 4.0)[None]
    u, v, w = 7 * y * torch.ones_like(z), torch.sin(2 * torch.pi * z / 4) + 0 * y, 3 * y + 0 * z
    omega = in_plane_vorticity(torch.stack((u, v, w))[None], (2.0, 4.0), periodic=(False, True))
    expected = 3 - torch.pi / 2 * torch.cos(2 * torch.pi * z / 4) + 0 * y
    assert torch.allclose(omega[0], expected, atol=1e-12)


def test_bad_input_raises_one_line():
    good = np.ones((2, 3, 2, 4, 4))
    nan = good.copy()
    nan[0, 0, 0, 0, 0] = np.nan
    for call in (
        lambda: turbulent_kinetic_energy(good[0, 0]),
        lambda: turbulent_kinetic_energy(nan),
        lambda: kinetic_energy(nan),
        lambda: tke_error(np.ones((3, 4)), np.ones((4, 4))),
        lambda: tke_error(np.ones((4, 4)), np.zeros((4, 4))),
        lambda: relative_drift(np.ones(4), np.ones((1, 4))),
        lambda: budget_closure(np.ones(4), np.ones(3), np.ones(4), 0.1),
        lambda: in_plane_vorticity(torch.ones(1, 3, 4, 4, 4), (1.0, 1.0, 1.0), periodic=(True, True, True)),
    ):
        with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

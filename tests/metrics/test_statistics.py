"""Truths about streaming sums: they give what the plain functions give, for any weights over trajectories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ergoflow.metrics import (
    StatisticsResult,
    TrajectoryStatistics,
    autocorrelation,
    energy_spectrum,
    enstrophy,
    fit_pca,
    kinetic_energy,
    mean_profile,
    project_trajectories,
    reynolds_stress,
    rms_profiles,
    spanwise_spectrum,
    turbulent_kinetic_energy,
)
from ergoflow.metrics.result import (
    correlation,
    histogram,
    mean_spectrum,
    mean_velocity,
    point_moments,
    tke_map,
    velocity_variance,
)
from ergoflow.numerics.fourier import velocity_from_vorticity

LENGTH = (3.0, 5.0)


def memory(count: int, frames: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Correlated noise about a standing mean field, (J, T, *shape)."""
    rng = np.random.default_rng(seed)
    z = np.empty((count, frames, *shape))
    z[:, 0] = rng.standard_normal((count, *shape))
    for k in range(1, frames):
        z[:, k] = 0.9 * z[:, k - 1] + 0.4 * rng.standard_normal((count, *shape))
    return z + 3 * np.sin(np.arange(shape[-1]))


def feed(statistics: TrajectoryStatistics, field: np.ndarray) -> StatisticsResult:
    for k in range(field.shape[1]):
        statistics.update(torch.tensor(field[:, k]))
    return statistics.finish()


@pytest.mark.parametrize("weights", [[1, 1, 1], [2, 0, 1], [0, 1, 0]])
@pytest.mark.parametrize("grid", [(8, 8), (9, 12)])
def test_vorticity_sums_agree_with_the_plain_functions_on_repeated_trajectories(grid, weights):
    omega = memory(3, 34, 1, *grid)
    omega -= omega.mean(axis=(3, 4), keepdims=True)
    result = feed(TrajectoryStatistics(3, 1, grid, length=LENGTH, max_lag=6), omega)
    chosen = np.repeat(omega, weights, axis=0)
    velocity = velocity_from_vorticity(chosen, LENGTH)
    w = np.array(weights, dtype=float)
    assert mean_spectrum(result, w) == pytest.approx(energy_spectrum(velocity).mean((0, 1)), rel=1e-10, abs=1e-20)
    assert tke_map(result, w) == pytest.approx(turbulent_kinetic_energy(velocity), rel=1e-10)
    assert mean_velocity(result, w) == pytest.approx(velocity.mean((0, 1)), rel=1e-9, abs=1e-12)
    assert correlation(result, w) == pytest.approx(autocorrelation(chosen, 6), rel=1e-10)
    assert result.energy == pytest.approx(kinetic_energy(velocity_from_vorticity(omega, LENGTH)), rel=1e-12)
    assert result.enstrophy == pytest.approx(enstrophy(omega), rel=1e-12)
    mean, deviation = point_moments(result, w)
    assert (mean[0], deviation[0]) == pytest.approx((chosen.mean(), chosen.std()), rel=1e-10, abs=1e-12)


def test_sums_so_far_are_not_changed_by_later_frames():
    omega = memory(2, 20, 1, 4, 4)
    statistics = TrajectoryStatistics(2, 1, (4, 4), length=1.0, max_lag=3)
    early = feed(statistics, omega[:, :10])
    kept = {name: value.copy() for name, value in early.arrays().items()}
    feed(statistics, omega[:, 10:])
    assert all(np.array_equal(value, kept[name]) for name, value in early.arrays().items())


@pytest.mark.parametrize("frames", [7, 8, 13, 14])  # ring exactly full, just turned, and after a whole turn
def test_lagged_products_have_the_same_origins_for_every_length(frames):
    omega = memory(2, frames, 1, 4, 4)
    result = feed(TrajectoryStatistics(2, 1, (4, 4), length=1.0, max_lag=6), omega)
    assert correlation(result, np.ones(2)) == pytest.approx(autocorrelation(omega, 6), rel=1e-10, abs=1e-13)


def test_channel_sums_agree_with_the_wall_functions():
    velocity = memory(2, 30, 3, 7, 9) + np.array([20.0, 0, 0])[:, None, None]
    statistics = TrajectoryStatistics(2, 3, (7, 9), length=(2.0, 6.0), kind="velocity", spectrum="spanwise", max_lag=5)
    result = feed(statistics, velocity)
    ones = np.ones(2)
    assert mean_spectrum(result, ones) == pytest.approx(spanwise_spectrum(velocity).mean((0, 1)), rel=1e-10)
    assert mean_velocity(result, ones).mean(-1) == pytest.approx(mean_profile(velocity), rel=1e-11)
    # Fluctuations about the mean *profile*: variance of the map plus the spanwise variance of the mean.
    mean = mean_velocity(result, ones)
    rms = np.sqrt((velocity_variance(result, ones) + mean**2).mean(-1) - mean.mean(-1) ** 2)
    assert rms == pytest.approx(rms_profiles(velocity), rel=1e-8)
    stress = (result.stress_sum.sum(0) / 60).mean(-1) - mean[0].mean(-1) * mean[1].mean(-1)
    assert -stress == pytest.approx(reynolds_stress(velocity), rel=1e-7, abs=1e-9)
    assert correlation(result, ones) == pytest.approx(autocorrelation(velocity, 5), rel=1e-8)
    assert result.energy == pytest.approx(kinetic_energy(velocity), rel=1e-12)


def test_one_dimensional_fields_are_velocities_with_a_gradient():
    x = 2 * np.pi * np.arange(32) / 32
    field = np.broadcast_to(np.sin(3 * x), (1, 4, 1, 32))
    result = feed(TrajectoryStatistics(1, 1, (32,), length=11.0, kind="velocity", max_lag=2), field)
    assert result.energy == pytest.approx(np.full((1, 4), 0.25))
    assert result.enstrophy == pytest.approx(np.full((1, 4), 0.25 * (6 * np.pi / 11) ** 2), rel=1e-10)


def test_single_precision_frames_are_summed_in_double():
    omega = memory(2, 200, 1, 8, 8).astype(np.float32) + np.float32(1000)
    result = feed(TrajectoryStatistics(2, 1, (8, 8), length=1.0, max_lag=4), omega)
    assert correlation(result, np.ones(2)) == pytest.approx(autocorrelation(omega, 4), rel=1e-7)
    assert point_moments(result, np.ones(2))[1][0] == pytest.approx(omega.astype(float).std(), rel=1e-7)


def test_projections_and_histogram_are_those_of_the_frames_after_the_skipped_ones():
    omega = memory(2, 20, 1, 6, 6)
    basis, edges = fit_pca(omega, 3), np.linspace(-3, 3, 25)
    statistics = TrajectoryStatistics(2, 1, (6, 6), length=1.0, max_lag=3, basis=basis, histogram_edges=edges, skip=5)
    result = feed(statistics, omega)
    kept = omega[:, 5:]
    assert result.projections == pytest.approx(project_trajectories(kept, basis), rel=1e-10, abs=1e-12)
    assert result.frames.tolist() == [15, 15]
    assert result.energy.shape == (2, 20)
    assert correlation(result, np.ones(2)) == pytest.approx(autocorrelation(kept, 3), rel=1e-10)
    for j in range(2):
        clipped = np.clip(kept[j], -2.999, 2.999)
        assert result.histogram[j, 0].tolist() == np.histogram(clipped, edges)[0].tolist()
    assert histogram(result, np.array([2.0, 0.0])).sum() == 2 * 15 * 36


def test_a_failed_trajectory_stops_there_and_leaves_the_others_untouched():
    omega = memory(3, 30, 1, 6, 6)
    broken = omega.copy()
    broken[1, 12, 0, 2, 3] = np.nan
    broken[2, 20] = 1e3
    settings = {
        "length": 1.0,
        "max_lag": 3,
        "histogram_edges": np.linspace(-9, 9, 10),
        "basis": fit_pca(omega, 2),
    }
    result = feed(TrajectoryStatistics(3, 1, (6, 6), limit=50.0, **settings), broken)
    clean = feed(TrajectoryStatistics(3, 1, (6, 6), **settings), omega)
    assert result.failed_at.tolist() == [-1, 12, 20]
    assert result.frames.tolist() == [30, 12, 20]
    assert result.survivors().tolist() == [1, 0, 0]
    assert np.isinf(result.energy[1, 12:]).all()
    assert np.isfinite(result.energy[1, :12]).all()
    assert (result.max_abs < 50).all()
    only = np.array([1.0, 0, 0])
    for pooled in (mean_spectrum, tke_map, correlation, histogram):
        assert pooled(result, only) == pytest.approx(pooled(clean, only), rel=1e-12)
    for name, value in result.arrays().items():
        assert name in ("energy", "enstrophy") or np.isfinite(value).all(), name


def test_a_failure_among_the_skipped_frames_is_a_failure():
    omega = memory(2, 20, 1, 4, 4)
    omega[0, 2] = np.inf
    result = feed(TrajectoryStatistics(2, 1, (4, 4), length=1.0, max_lag=3, skip=5), omega)
    assert result.failed_at.tolist() == [2, -1]
    assert result.frames.tolist() == [0, 15]


def test_results_survive_saving_and_loading(tmp_path):
    omega = memory(2, 12, 1, 4, 5)
    result = feed(TrajectoryStatistics(2, 1, (4, 5), length=1.0, max_lag=3, basis=fit_pca(omega, 2)), omega)
    np.savez(tmp_path / "sums.npz", **result.arrays())
    loaded = StatisticsResult.load(tmp_path / "sums.npz")
    assert loaded.grid == (4, 5)
    for name, value in result.arrays().items():
        assert np.array_equal(value, loaded.arrays()[name]), name
        assert np.array_equal(value, StatisticsResult.from_arrays(result.arrays()).arrays()[name]), name
    np.savez(tmp_path / "other.npz", frames=np.ones(2))
    with pytest.raises(ValueError, match=r"must hold the statistics of this version, differs in .*; predict"):
        StatisticsResult.load(tmp_path / "other.npz")


def test_frames_are_not_kept_or_changed():
    statistics = TrajectoryStatistics(1, 1, (4, 4), length=1.0, max_lag=2)
    frame = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    copies = [frame * k for k in range(1, 6)]
    for k in range(1, 6):
        buffer = frame * k
        statistics.update(buffer)
        assert torch.equal(buffer, copies[k - 1])
        buffer.zero_()  # a caller may reuse its buffer
    expected = autocorrelation(torch.stack(copies, dim=1), 2)
    assert correlation(statistics.finish(), np.ones(1)) == pytest.approx(expected.numpy(), rel=1e-6)


@pytest.mark.gpu
def test_sums_on_the_gpu_agree_with_the_cpu():
    omega = memory(3, 30, 1, 32, 32)
    settings = {
        "length": 1.0,
        "max_lag": 5,
        "histogram_edges": np.linspace(-9, 9, 65),
        "basis": fit_pca(omega, 4),
    }
    cpu = feed(TrajectoryStatistics(3, 1, (32, 32), **settings), omega)
    gpu = feed(TrajectoryStatistics(3, 1, (32, 32), **settings, device="cuda"), omega)
    for name, value in cpu.arrays().items():
        assert gpu.arrays()[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_bad_input_raises_one_line():
    short = TrajectoryStatistics(1, 1, (4, 4), length=1.0, max_lag=5)
    short.update(torch.ones(1, 1, 4, 4))
    for call in (
        lambda: TrajectoryStatistics(1, 2, (4, 4), length=1.0),
        lambda: TrajectoryStatistics(1, 1, (4, 4), length=1.0, spectrum="spanwise"),
        lambda: TrajectoryStatistics(1, 1, (4, 4), length=1.0, kind="pressure"),
        lambda: TrajectoryStatistics(1, 1, (4, 4), length=(1.0, 1.0, 1.0)),
        lambda: TrajectoryStatistics(0, 1, (4, 4), length=1.0),
        lambda: TrajectoryStatistics(1, 1, (4, 4), length=1.0, histogram_edges=np.array([0.0, 1.0, 3.0])),
        lambda: TrajectoryStatistics(1, 1, (4, 4), length=1.0, histogram_edges=np.array([1.0, 0.0])),
        lambda: short.update(torch.ones(2, 1, 4, 4)),
        short.finish,
    ):
        with pytest.raises(ValueError, match=r", got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

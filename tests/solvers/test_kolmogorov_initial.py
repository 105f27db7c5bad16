from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from ergoflow.numerics.fourier import dealias_mask, mode_numbers, velocity_from_vorticity
from ergoflow.solvers.kolmogorov import KolmogorovConfig, initial_vorticity

UNEQUAL = KolmogorovConfig(grid=(40, 72), length=(3.0, 5.0), max_speed=2.5)


def test_largest_speed_is_the_configured_one() -> None:
    fields = initial_vorticity(UNEQUAL, 3, seed=0, dtype=torch.float64)
    speed = velocity_from_vorticity(fields, UNEQUAL.length).norm(dim=1).amax(dim=(-2, -1))
    torch.testing.assert_close(speed, torch.full((3,), 2.5, dtype=torch.float64))


def test_fields_have_zero_mean_and_lie_inside_the_mask() -> None:
    spectrum = torch.fft.rfft2(initial_vorticity(UNEQUAL, 2, seed=0, dtype=torch.float64))
    outside = ~dealias_mask(UNEQUAL.grid)
    assert spectrum[..., 0, 0].abs().max() < 1e-12 * spectrum.abs().max()
    assert spectrum[..., outside].abs().max() < 1e-12 * spectrum.abs().max()


def test_a_field_depends_on_its_own_seed_alone() -> None:
    many = initial_vorticity(UNEQUAL, 5, seed=11)
    assert torch.equal(initial_vorticity(UNEQUAL, 2, seed=11), many[:2])
    listed = initial_vorticity(UNEQUAL, 3, seed=[8, 4, 6])
    assert torch.equal(initial_vorticity(UNEQUAL, 1, seed=(4,)), listed[1:2])
    assert torch.equal(initial_vorticity(UNEQUAL, 2, seed=np.array([4, 6])), listed[1:])
    assert torch.equal(initial_vorticity(UNEQUAL, 2, seed=np.int64(11)), many[:2])


def test_different_seeds_and_indices_give_independent_fields() -> None:
    config = KolmogorovConfig(grid=(64, 64))
    fields = torch.cat([initial_vorticity(config, 8, seed=seed, dtype=torch.float64) for seed in range(4)])
    flat = fields.flatten(1)
    correlation = torch.corrcoef(flat) - torch.eye(32, dtype=torch.float64)
    # About 2π·4·4 modes near the peak carry the field: correlations of order 1/√100.
    assert correlation.abs().max() < 0.5
    assert abs(correlation.mean()) < 0.02


def test_velocity_spectrum_is_the_log_normal_filter_times_white_noise() -> None:
    config = KolmogorovConfig(grid=(64, 64), max_speed=1.0)
    fields = initial_vorticity(config, 256, seed=1, dtype=torch.float64)
    nx, ny = mode_numbers(config.grid)
    k = torch.sqrt((nx**2 + ny**2).double())
    power = torch.fft.rfft2(fields).abs().square().mean(dim=(0, 1))

    def ratio(low: int, high: int) -> float:
        """Return the measured over the expected ratio of vorticity power in two shells."""

        def shell(n: int) -> torch.Tensor:
            return (k.round() == n) & (ny > 0)

        def expected(q: torch.Tensor) -> torch.Tensor:
            # The curl multiplies the filter exp(−(ln k − ln 4 − ¼)²/½)/k² by k.
            return (torch.exp(-((q.log() - math.log(4) - 0.25) ** 2) / 0.5) / q) ** 2

        measured = power[shell(high)].mean() / power[shell(low)].mean()
        return float(measured / (expected(k[shell(high)]).mean() / expected(k[shell(low)]).mean()))

    # 256 fields times at least 6 modes a shell: 1/√1500 each, scaling by the largest speed adds little.
    assert ratio(4, 2) == pytest.approx(1, abs=0.15)
    assert ratio(4, 8) == pytest.approx(1, abs=0.15)
    assert ratio(4, 16) == pytest.approx(1, abs=0.15)


def test_peak_counts_periods_along_y_whatever_the_length() -> None:
    square = KolmogorovConfig(grid=(32, 32))
    scaled = dataclasses.replace(square, length=(5.0, 5.0))
    field, stretched = (initial_vorticity(c, 1, seed=0, dtype=torch.float64) for c in (square, scaled))
    # The same velocity on a box smaller by 5/2π has a vorticity larger by 2π/5.
    torch.testing.assert_close(stretched, field * (2 * math.pi / 5))


def test_every_dtype_starts_from_the_same_field() -> None:
    double = initial_vorticity(UNEQUAL, 2, seed=0, dtype=torch.float64)
    assert torch.equal(initial_vorticity(UNEQUAL, 2, seed=0), double.float())


@pytest.mark.gpu
def test_every_device_starts_from_the_same_field() -> None:
    assert torch.equal(
        initial_vorticity(UNEQUAL, 2, seed=0, device="cuda").cpu(), initial_vorticity(UNEQUAL, 2, seed=0)
    )


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="one number or 3 of them, got 2"):
        initial_vorticity(UNEQUAL, 3, seed=[1, 2])
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        initial_vorticity(UNEQUAL, 0, seed=1)

"""Truths about spectra: where a mode lands, what Parseval says, and what the errors of known spectra are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ergoflow.metrics import (
    arrays,
    binned_spectral_error,
    energy_spectrum,
    me_ape,
    me_lr,
    naive2d_spectrum,
    spanwise_spectrum,
)


def wave(grid: tuple[int, ...], mode: tuple[int, ...], phase: float = 0.3) -> np.ndarray:
    axes = np.meshgrid(*[np.arange(n) / n for n in grid], indexing="ij")
    return np.cos(2 * np.pi * sum(m * x for m, x in zip(mode, axes, strict=True)) + phase)


def brute_force(field: np.ndarray) -> np.ndarray:
    """Full complex FFT and one loop over modes, for one (C, *grid) field."""
    grid = field.shape[1:]
    spectrum = np.zeros(min(grid) // 2 + 1)
    hat = np.fft.fftn(field, axes=tuple(range(1, field.ndim)))
    for index in np.ndindex(*grid):
        n = [i if i <= size // 2 else i - size for i, size in zip(index, grid, strict=True)]
        shell = math.floor(math.sqrt(sum(m * m for m in n)) + 0.5)
        if shell < len(spectrum):
            spectrum[shell] += (np.abs(hat[(slice(None), *index)]) ** 2).sum()
    return spectrum


@pytest.mark.parametrize("grid", [(8, 8), (9, 9), (8, 6), (7, 10), (12,), (11,), (6, 4, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_spectrum_agrees_with_the_full_complex_transform(grid, channels):
    field = np.random.default_rng(0).standard_normal((2, 3, channels, *grid))
    spectrum = energy_spectrum(field)
    assert spectrum.shape == (2, 3, min(grid) // 2 + 1)
    assert spectrum[1, 2] == pytest.approx(brute_force(field[1, 2]), rel=1e-12)


@pytest.mark.parametrize(
    ("grid", "mode", "shell"),
    [
        ((16, 16), (3, 0), 3),
        ((16, 16), (0, 3), 3),
        ((16, 16), (-2, 2), 3),  # |n| = 2.83 rounds to 3
        ((16, 16), (1, 1), 1),  # 1.41 rounds to 1
        ((15, 15), (0, 7), 7),
        ((15, 20), (5, 2), 5),
        ((20, 15), (0, 7), 7),
    ],
)
def test_a_single_wave_puts_half_its_mean_square_on_each_of_two_modes(grid, mode, shell):
    spectrum = energy_spectrum(2 * wave(grid, mode)[None, None, None], norm="parseval")[0, 0]
    expected = np.zeros(min(grid) // 2 + 1)
    expected[shell] = 2.0  # mean of (2 cos)^2
    assert spectrum == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("mode", [(0, 8), (8, 0)])
def test_the_nyquist_mode_is_counted_once(mode):
    spectrum = energy_spectrum(wave((16, 16), mode, phase=0.0)[None, None, None], norm="parseval")[0, 0]
    assert spectrum[8] == pytest.approx(1.0, rel=1e-13)  # cos is +-1 on the grid
    assert spectrum[:8] == pytest.approx(np.zeros(8), abs=1e-14)


def test_corners_are_dropped():
    assert energy_spectrum(wave((16, 16), (7, 7))[None, None, None]).sum() == pytest.approx(0, abs=1e-20)


def test_parseval_total_is_the_mean_square_of_a_band_limited_field():
    rng = np.random.default_rng(1)
    field = sum(rng.standard_normal() * wave((15, 24), (a, b), rng.uniform(0, 6)) for a in range(5) for b in range(5))[
        None, None, None
    ]
    assert energy_spectrum(field, norm="parseval").sum() == pytest.approx((field**2).mean(), rel=1e-12)
    assert energy_spectrum(field) == pytest.approx(energy_spectrum(field, norm="parseval") * 360**2)


def test_components_are_summed_or_picked():
    field = np.random.default_rng(2).standard_normal((1, 2, 3, 8, 8))
    parts = sum(energy_spectrum(field, [c]) for c in range(3))
    assert energy_spectrum(field) == pytest.approx(parts, rel=1e-13)
    assert energy_spectrum(field, (0, 2)) == pytest.approx(energy_spectrum(field[:, :, [0, 2]]), rel=1e-13)


def test_chunks_and_tensors_do_not_change_the_spectrum(monkeypatch):
    field = np.random.default_rng(3).standard_normal((2, 7, 1, 8, 8))
    whole = energy_spectrum(field)
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 300)
    assert np.array_equal(energy_spectrum(torch.tensor(field)).numpy(), whole)


def test_spanwise_spectrum_sees_z_only_and_sums_to_the_mean_square():
    field = np.random.default_rng(4).standard_normal((2, 2, 3, 5, 9))
    spectrum = spanwise_spectrum(field, norm="parseval")
    assert spectrum.shape == (2, 2, 5)
    assert spectrum.sum(-1) == pytest.approx((field**2).sum(2).mean((2, 3)), rel=1e-12)
    profile = np.broadcast_to(np.arange(6.0)[:, None], (6, 8))[None, None, None]
    assert spanwise_spectrum(profile)[0, 0, 1:] == pytest.approx(np.zeros(4), abs=1e-20)
    assert naive2d_spectrum(profile)[0, 0, 1] > 1  # the jump between the walls leaks


def test_me_ape_of_a_spectrum_scaled_by_a_half_is_a_half():
    true = np.random.default_rng(5).uniform(1, 2, (3, 4, 17))
    assert me_ape(0.5 * true, true) == pytest.approx(0.5, rel=1e-14)
    assert me_ape(true, true) == 0


def test_spectra_are_averaged_before_they_are_compared():
    true = np.ones((1, 2, 5))
    pred = np.stack([np.full(5, 0.5), np.full(5, 1.5)])[None]
    assert me_ape(pred, true) == pytest.approx(0, abs=1e-15)
    assert me_lr(pred, true) == pytest.approx(0, abs=1e-15)


def test_shell_ranges_include_both_ends_and_default_to_a_third():
    true = np.ones(17)  # N = 32, default shells 1..10
    for shell, inside in ((0, False), (1, True), (10, True), (11, False)):
        pred = true.copy()
        pred[shell] = 2.0
        assert me_ape(pred, true) == pytest.approx(0.1 if inside else 0.0)
    pred = true.copy()
    pred[16] = 3.0
    assert me_ape(pred, true, shells=(1, 16)) == pytest.approx(2 / 16)
    assert me_ape(pred, true, shells=(16, 16)) == pytest.approx(2.0)


def test_me_lr_weights_follow_their_closed_forms():
    true = np.array([9.0, 3.0, 1.0])
    pred = np.array([9.0, 3.0 * np.e, np.exp(-2.0)])  # |ln| = 1 and 2
    shells = (1, 2)
    assert me_lr(pred, true, shells=shells) == pytest.approx((3 * 1 + 1 * 2) / 4)
    assert me_lr(pred, true, "uniform", shells) == pytest.approx(1.5)
    literal = 3 * np.e * 1 + np.exp(-2) * 2
    assert me_lr(pred, true, "literal", shells) == pytest.approx(literal / 4)
    assert me_lr(pred, true, "pred", shells) == pytest.approx(literal / (3 * np.e + np.exp(-2)))


def test_printed_weights_reward_a_dead_model_and_ours_do_not():
    true = np.ones(9)
    for factor in (0.0, 1e-6, 0.1, np.exp(-1)):
        assert me_lr(factor * true, true, "literal") <= 1 / np.e + 1e-12
    assert me_lr(0 * true, true, "literal") == 0
    for weights in ("true", "uniform", "pred"):
        assert me_lr(0 * true, true, weights) == np.inf


def test_a_failed_prediction_has_infinite_spectral_error():
    true, pred = np.ones(9), np.ones(9)
    pred[2] = np.nan
    assert me_ape(pred, true) == np.inf
    assert me_lr(pred, true) == np.inf


@pytest.mark.parametrize("grid", [(16, 16), (15, 21), (32,)])
def test_spectral_bins_sum_to_the_mean_squared_error(grid):
    rng = np.random.default_rng(6)
    pred, true = rng.standard_normal((2, 3, 4, 2, *grid))
    error = binned_spectral_error(pred, true)
    assert error.shape == (4, 3)
    assert error.sum(1) == pytest.approx(((pred - true) ** 2).mean((0, *range(2, true.ndim))), rel=1e-12)


def test_spectral_bins_have_logarithmic_edges():
    # N = 64: the corner is at 32 sqrt 2 = 45.3, the inner edges at 45.3^(1/3) = 3.6 and 45.3^(2/3) = 12.7.
    for mode, bin_number in (
        ((3, 0), 0),
        ((0, 4), 1),
        ((12, 0), 1),
        ((0, 13), 2),
        ((32, 0), 2),
        ((30, 30), 2),
    ):
        field = wave((64, 64), mode, phase=0.0)[None, None, None]
        error = binned_spectral_error(field, 0 * field)[0]
        assert error[bin_number] == pytest.approx((field**2).mean(), rel=1e-12)


def test_spectral_bins_start_at_the_fundamental_of_the_longest_side():
    # The edges of N = 64 again; a mode of the short side is four times as fine.
    for mode, bin_number in (((3, 0), 0), ((4, 0), 1), ((0, 1), 1), ((0, 3), 1), ((0, 4), 2)):
        field = wave((64, 16), mode, phase=0.3)[None, None, None]
        error = binned_spectral_error(field, 0 * field)[0]
        assert error[bin_number] == pytest.approx((field**2).mean(), rel=1e-12), mode


def test_bad_input_raises_one_line():
    field = np.ones((1, 1, 2, 8, 8))
    nan = field.copy()
    nan[0, 0, 0, 0, 0] = np.inf
    true = np.ones(9)
    hole = true.copy()
    hole[4] = 0
    for call in (
        lambda: energy_spectrum(field[0, 0]),
        lambda: energy_spectrum(nan),
        lambda: spanwise_spectrum(nan),
        lambda: energy_spectrum(field, [2]),
        lambda: energy_spectrum(field, []),
        lambda: energy_spectrum(field, norm="ortho"),
        lambda: me_ape(true, true[:5]),
        lambda: me_ape(true, true, shells=(5, 4)),
        lambda: me_ape(true, true, shells=(1, 9)),
        lambda: me_ape(true, hole),
        lambda: me_lr(true, true, "unknown"),
        lambda: binned_spectral_error(field, field[:, :, :1]),
    ):
        with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

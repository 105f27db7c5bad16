from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ergoflow.numerics.fourier import (
    dealias_limit,
    dealias_mask,
    derivative_wavenumbers,
    mode_numbers,
    resample,
    velocity_from_vorticity,
    vorticity_from_velocity,
    wavenumbers,
)

LENGTHS = (3.0, 5.0)


def mesh(grid: tuple[int, int], length: tuple[float, float] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(grid[0], dtype=torch.float64) * length[0] / grid[0]
    y = torch.arange(grid[1], dtype=torch.float64) * length[1] / grid[1]
    return x[:, None], y[None, :]


def random_spectrum_field(grid: tuple[int, ...], keep: int, seed: int = 0) -> torch.Tensor:
    """Return a random real field (2, 1, *grid) with modes |n| <= keep on every axis and zero mean."""
    noise = torch.randn(2, 1, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    dims = tuple(range(-len(grid), 0))
    spectrum = torch.fft.rfftn(noise, dim=dims)
    for n in mode_numbers(grid):
        spectrum = spectrum * (n.abs() <= keep)
    spectrum[(..., *(0,) * len(grid))] = 0
    return torch.fft.irfftn(spectrum, s=grid, dim=dims)


def test_wavenumbers_are_the_frequencies_of_the_discrete_transform() -> None:
    for grid in [(7,), (6, 5), (5, 8), (4, 3, 6)]:
        length = tuple(1.5 + axis for axis in range(len(grid)))
        waves = wavenumbers(grid, length)
        for axis, (k, size, side) in enumerate(zip(waves, grid, length, strict=True)):
            frequency = np.fft.rfftfreq if axis == len(grid) - 1 else np.fft.fftfreq
            np.testing.assert_allclose(k.flatten(), 2 * np.pi * frequency(size, side / size), rtol=1e-15)
        assert torch.broadcast_shapes(*(k.shape for k in waves)) == (*grid[:-1], grid[-1] // 2 + 1)


def test_wavenumbers_take_one_length_for_all_sides_and_the_asked_dtype() -> None:
    kx, ky = wavenumbers((4, 4), 2.0, dtype=torch.float32)
    assert kx.dtype == ky.dtype == torch.float32
    assert float(ky[0, 1]) == pytest.approx(math.pi)


def test_derivative_wavenumbers_vanish_at_nyquist_of_even_axes_only() -> None:
    dx, dy = derivative_wavenumbers((6, 5))
    assert dx.flatten().tolist() == [0, 1, 2, 0, -2, -1]
    assert dy.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("length", [(1.0,), (1.0, -2.0), 0.0, (1.0, 2.0, 3.0)])
def test_lengths_that_do_not_fit_the_grid_are_refused(length: object) -> None:
    with pytest.raises(ValueError, match="length must be"):
        wavenumbers((4, 4), length)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [12, 15, 16, 64, 255, 256])
def test_dealias_mask_keeps_exactly_the_modes_whose_products_do_not_alias_back(size: int) -> None:
    (n,) = mode_numbers((size,))
    kept = n[dealias_mask((size,))]
    largest = int(kept.max())
    # The sum of two kept modes, 2·largest, wraps to 2·largest − size, which must lie outside; one more would
    # not.
    assert size - 2 * largest > largest
    assert size - 2 * (largest + 1) <= largest + 1


def test_dealias_mask_is_the_product_of_its_axes_and_symmetric() -> None:
    mask = dealias_mask((16, 12))
    rows, columns = dealias_mask((16,)), dealias_mask((12,))
    both = torch.cat((rows, rows[1:-1].flip(0)))
    assert torch.equal(mask, both[:, None] & columns[None, :])


@pytest.mark.parametrize("grid", [(16, 24), (15, 9), (10, 7)])
@pytest.mark.parametrize(("m", "n"), [(1, 0), (0, 2), (2, 3), (-3, 1)])
def test_velocity_of_a_single_mode_is_analytic(grid: tuple[int, int], m: int, n: int) -> None:
    x, y = mesh(grid)
    kx, ky = 2 * math.pi * m / LENGTHS[0], 2 * math.pi * n / LENGTHS[1]
    phase = kx * x + ky * y + 0.3
    # ψ = cos(phase): ω = |k|² ψ, u = ∂y ψ, v = −∂x ψ.
    vorticity = ((kx**2 + ky**2) * torch.cos(phase))[None, None]
    velocity = velocity_from_vorticity(vorticity, LENGTHS)
    expected = torch.stack((-ky * torch.sin(phase), kx * torch.sin(phase)))[None]
    torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-12)


def test_velocity_is_free_of_divergence_and_mean() -> None:
    grid = (24, 18)
    velocity = velocity_from_vorticity(random_spectrum_field(grid, 99), LENGTHS)
    spectrum = torch.fft.rfft2(velocity)
    dx, dy = derivative_wavenumbers(grid, LENGTHS)
    divergence = dx * spectrum[:, 0] + dy * spectrum[:, 1]
    assert divergence.abs().max() < 1e-12 * spectrum.abs().max() * dx.abs().max()
    assert velocity.mean(dim=(-2, -1)).abs().max() < 1e-14


@pytest.mark.parametrize("grid", [(16, 24), (15, 9)])
def test_vorticity_and_velocity_are_inverse(grid: tuple[int, int]) -> None:
    vorticity = random_spectrum_field(grid, 4)
    again = vorticity_from_velocity(velocity_from_vorticity(vorticity, LENGTHS), LENGTHS)
    torch.testing.assert_close(again, vorticity, rtol=0, atol=1e-12)
    velocity = velocity_from_vorticity(vorticity, LENGTHS)
    back = velocity_from_vorticity(vorticity_from_velocity(velocity, LENGTHS), LENGTHS)
    torch.testing.assert_close(back, velocity, rtol=0, atol=1e-12)


def test_vorticity_has_the_sign_of_dv_dx_minus_du_dy() -> None:
    x, y = mesh((16, 16), (2 * math.pi, 2 * math.pi))
    velocity = torch.stack((torch.sin(4 * y) + 0 * x, torch.sin(3 * x) + 0 * y))[None]
    expected = 3 * torch.cos(3 * x) - 4 * torch.cos(4 * y)
    torch.testing.assert_close(vorticity_from_velocity(velocity)[0, 0], expected, rtol=0, atol=1e-12)


def test_arrays_give_arrays_equal_to_the_tensors() -> None:
    vorticity = random_spectrum_field((12, 10), 3)
    array = vorticity.numpy().copy()
    array.flags.writeable = False
    velocity = velocity_from_vorticity(array, LENGTHS)
    assert isinstance(velocity, np.ndarray)
    np.testing.assert_array_equal(velocity, velocity_from_vorticity(vorticity, LENGTHS).numpy())
    assert isinstance(vorticity_from_velocity(velocity, LENGTHS), np.ndarray)
    assert isinstance(resample(array, (6, 6)), np.ndarray)
    # A strided view, as one frame of a stored trajectory is.
    np.testing.assert_array_equal(velocity_from_vorticity(array[:, :, ::-1, ::2]).shape, (2, 2, 12, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_keep_the_dtype(dtype: torch.dtype) -> None:
    vorticity = random_spectrum_field((12, 10), 3).to(dtype)
    assert velocity_from_vorticity(vorticity).dtype == dtype
    assert resample(vorticity, (8, 20)).dtype == dtype


def test_velocity_lets_gradients_through() -> None:
    vorticity = random_spectrum_field((8, 6), 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda field: velocity_from_vorticity(field, LENGTHS), (vorticity,))


def test_wrong_channels_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(\.\.\., 1, X, Y\), got \(2, 8, 8\)"):
        velocity_from_vorticity(torch.zeros(2, 8, 8))
    with pytest.raises(ValueError, match=r"\(\.\.\., 2, X, Y\), got \(1, 8, 8\)"):
        vorticity_from_velocity(torch.zeros(1, 8, 8))
    with pytest.raises(ValueError, match="float16"):
        velocity_from_vorticity(np.zeros((1, 8, 8), dtype=np.float16))


@pytest.mark.parametrize("source", [(12, 15), (15, 12), (16, 16)])
@pytest.mark.parametrize("target", [(12, 15), (24, 31), (9, 10), (15, 14)])
def test_resample_is_exact_for_band_limited_fields(source: tuple[int, int], target: tuple[int, int]) -> None:
    def field(grid: tuple[int, int]) -> torch.Tensor:
        x, y = mesh(grid)
        x, y = 2 * math.pi * x / LENGTHS[0], 2 * math.pi * y / LENGTHS[1]
        return (0.5 + torch.cos(4 * x - 3 * y + 0.2) + torch.sin(2 * x + 4 * y) * 0.7 + torch.cos(x))[None, None]

    torch.testing.assert_close(resample(field(source), target), field(target), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("small", "large"), [((8, 6), (16, 7)), ((7, 8), (8, 20))])
def test_resample_up_and_down_again_is_the_identity_even_at_nyquist(
    small: tuple[int, int], large: tuple[int, int]
) -> None:
    field = torch.randn(2, 1, *small, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(resample(resample(field, large), small), field, rtol=0, atol=1e-13)


def test_refining_by_a_whole_factor_keeps_the_values_at_the_old_points() -> None:
    field = torch.randn(1, 1, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(resample(field, (24, 12))[..., ::3, ::2], field, rtol=0, atol=1e-13)


def test_coarsening_removes_what_the_coarse_grid_cannot_hold() -> None:
    x = torch.arange(32, dtype=torch.float64) * 2 * math.pi / 32
    fast = torch.cos(11 * x)[None, None]
    assert resample(fast, (16,)).abs().max() < 1e-14


def test_resample_works_on_one_and_three_axes_and_refuses_too_many() -> None:
    field = random_spectrum_field((8, 9, 10), 3)
    assert resample(field, (9, 8, 7)).shape == (2, 1, 9, 8, 7)
    torch.testing.assert_close(resample(resample(field, (16,)), (10,)), field, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="at least 2 axes"):
        resample(torch.zeros(4), (2, 2))
    with pytest.raises(ValueError, match="positive"):
        resample(torch.zeros(4, 4), (0, 2))


@pytest.mark.parametrize("size", range(4, 40))
def test_dealias_limit_is_the_last_mode_of_the_mask(size: int) -> None:
    inside = dealias_mask((size,)).nonzero().flatten()
    assert inside.tolist() == list(range(dealias_limit(size) + 1))
    # Two modes of the mask never alias into it.
    assert size - 2 * dealias_limit(size) > dealias_limit(size)

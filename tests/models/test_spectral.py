from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
import torch

from ergoflow.models.checks import check_state
from ergoflow.models.spectral import (
    SpectralConv,
    append_coordinates,
    check_plane,
    crop_walls,
    normal_weight,
    pointwise,
    uniform_weight,
    wall_widths,
    zeros_beyond_walls,
)

SHAPES = [((4, 3), (9, 12)), ((5, 2), (10, 7)), ((4, 4), (5, 8)), ((1, 1), (3, 2))]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def layer(modes, *, in_channels=2, out_channels=3, seed=0):
    return SpectralConv(normal_weight(in_channels, out_channels, modes, generator=seeded(seed))).double()


def noise(*shape, seed=1):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def wave_numbers(modes):
    """Waves of the rows in FFT order, and of the columns."""
    rows, columns = modes
    return [*range((rows + 1) // 2), *range(-(rows // 2), 0)], list(range(columns))


def direct_sum(u, weight, grid):
    """The definition with one loop per index: v(x) = Re Σ_k c_k W(k) û(k) exp(2πi k·x)."""
    batch, in_channels, X, Y = u.shape
    rows, columns = wave_numbers(weight.shape[:2])
    v = np.zeros((batch, weight.shape[3], *grid))
    for b in range(batch):
        for i, k1 in enumerate(rows):
            for j, k2 in enumerate(columns):
                transform = [
                    sum(
                        u[b, c, x, y].item() * cmath.exp(-2j * math.pi * (k1 * x / X + k2 * y / Y))
                        for x in range(X)
                        for y in range(Y)
                    )
                    / (X * Y)
                    for c in range(in_channels)
                ]
                for o in range(weight.shape[3]):
                    g = sum(weight[i, j, c, o].item() * transform[c] for c in range(in_channels))
                    for x in range(grid[0]):
                        for y in range(grid[1]):
                            wave = cmath.exp(2j * math.pi * (k1 * x / grid[0] + k2 * y / grid[1]))
                            v[b, o, x, y] += (1 if k2 == 0 else 2) * (g * wave).real
    return torch.from_numpy(v)


def polynomial(grid, highest, *, channels=2, seed=2):
    """Random real trigonometric polynomials with waves |k₁| ≤ highest[0], |k₂| ≤ highest[1], on a grid."""
    generator = seeded(seed)
    x, y = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) / n for n in grid), indexing="ij")
    fields = []
    for _ in range(channels):
        field = torch.zeros(grid, dtype=torch.float64)
        for k1 in range(-highest[0], highest[0] + 1):
            for k2 in range(highest[1] + 1):
                amplitude, phase = torch.randn(2, generator=generator, dtype=torch.float64)
                field = field + amplitude * torch.cos(2 * math.pi * (k1 * x + k2 * y) + phase)
        fields.append(field)
    return torch.stack(fields)[None]


# The map


@pytest.mark.parametrize(("modes", "grid"), SHAPES)
def test_spectral_convolution_is_the_direct_fourier_sum(modes, grid):
    conv, u = layer(modes), noise(2, 2, *grid)
    torch.testing.assert_close(conv(u), direct_sum(u, conv.weight, grid))


@pytest.mark.parametrize("target", [(5, 7), (6, 16), (18, 9), (13, 24)])
def test_spectral_convolution_is_the_direct_fourier_sum_on_another_grid(target):
    conv, u = layer((4, 3)), noise(1, 2, 9, 12)
    result = conv(u, target)
    assert result.shape == (1, 3, *target)
    torch.testing.assert_close(result, direct_sum(u, conv.weight, target))


@pytest.mark.parametrize(("modes", "grid"), SHAPES)
def test_spectral_convolution_commutes_with_translations(modes, grid):
    conv, u = layer(modes), noise(2, 2, *grid)
    torch.testing.assert_close(conv(u.roll((2, 1), (2, 3))), conv(u).roll((2, 1), (2, 3)))


@pytest.mark.parametrize(("first", "second"), [((12, 16), (24, 32)), ((11, 13), (18, 16)), ((20, 11), (13, 30))])
def test_one_function_on_two_grids_gives_one_function(first, second):
    """Also beyond the retained waves, as long as both grids resolve the function."""
    conv, highest = layer((6, 3)), (4, 4)
    coarse, fine = (polynomial(grid, highest) for grid in (first, second))
    torch.testing.assert_close(conv(coarse, second), conv(fine))
    torch.testing.assert_close(conv(fine, first), conv(coarse))


@pytest.mark.parametrize("target", [(9, 11), (8, 7), (16, 22), (31, 12)])
def test_identity_weights_evaluate_a_resolved_function_on_any_grid(target):
    """Waves of negative k₁ too: cutting the spectrum at the end of the array would lose or misplace them."""
    conv = SpectralConv(torch.eye(2, dtype=torch.complex128).expand(7, 4, 2, 2))
    torch.testing.assert_close(conv(polynomial((9, 11), (3, 3)), target), polynomial(target, (3, 3)))


def test_waves_that_are_not_retained_vanish():
    x, y = torch.meshgrid(torch.arange(16) / 16, torch.arange(12) / 12, indexing="ij")
    conv = layer((4, 3), in_channels=1)
    for k1, k2 in [(2, 1), (-3, 0), (0, 3), (7, 5), (8, 6)]:
        u = torch.cos(2 * math.pi * (k1 * x + k2 * y)).double()[None, None]
        assert conv(u).abs().max() < 1e-6, (k1, k2)
    for k1, k2 in [(1, 1), (-2, 2), (0, 0), (1, 0)]:
        u = torch.cos(2 * math.pi * (k1 * x + k2 * y)).double()[None, None]
        assert conv(u).abs().max() > 1e-2, (k1, k2)


def test_mean_of_a_field_sees_the_real_part_of_its_weight_alone():
    conv = SpectralConv(torch.full((1, 1, 1, 1), 3 + 5j, dtype=torch.complex128))
    torch.testing.assert_close(conv(torch.ones(1, 1, 4, 5).double()), torch.full((1, 1, 4, 5), 3.0).double())


def test_last_transform_gets_the_spectrum_of_a_real_field(monkeypatch):
    """Not every FFT library ignores the imaginary part of the mean."""
    inverse, seen = torch.fft.irfft, []

    def spy(spectrum, **options):
        seen.append(spectrum)
        return inverse(spectrum, **options)

    monkeypatch.setattr(torch.fft, "irfft", spy)
    layer((4, 3))(noise(1, 2, 9, 12))
    assert seen[0][..., 0].imag.abs().max() == 0
    assert seen[0][..., 1:].imag.abs().max() > 0


@pytest.mark.parametrize(
    ("modes", "grid", "needed"),
    [((4, 3), (4, 12), r"\(5, 5\)"), ((5, 3), (4, 12), r"\(5, 5\)"), ((4, 3), (9, 4), r"\(5, 5\)")],
)
def test_grids_that_cannot_hold_the_waves_are_refused(modes, grid, needed):
    conv, enough = layer(modes), (5, 5)
    with pytest.raises(ValueError, match=rf"need a grid of at least {needed} points, got .*; use a finer grid"):
        conv(noise(1, 2, *grid))
    with pytest.raises(ValueError, match="need a grid"):
        conv(noise(1, 2, *enough), grid)
    assert conv(noise(1, 2, *enough)).shape == (1, 3, *enough)


# Gradients, precision, weights


@pytest.mark.parametrize("target", [None, (4, 7)])
def test_gradients_match_finite_differences(target):
    conv = layer((3, 2), in_channels=1, out_channels=2)
    u = noise(1, 1, 5, 4).requires_grad_()

    def apply(field, weight):
        return torch.func.functional_call(conv, {"weight": weight}, (field, target))

    assert torch.autograd.gradcheck(apply, (u, conv.weight.detach().clone().requires_grad_()))


@pytest.mark.parametrize("cast", [lambda m: m.double(), lambda m: m.to(torch.float64)], ids=["double", "to"])
def test_casts_keep_the_imaginary_part(cast):
    weight = normal_weight(2, 3, (4, 3), generator=seeded(0))
    conv = cast(SpectralConv(weight.clone()))
    assert conv.weight.dtype == torch.complex128
    assert torch.equal(conv.weight, weight.to(torch.complex128))
    assert torch.equal(conv.float().weight, weight)
    assert isinstance(conv.weight, torch.nn.Parameter)


def test_complex_weights_count_once():
    assert sum(p.numel() for p in SpectralConv(uniform_weight(3, 5, (6, 4))).parameters()) == 6 * 4 * 3 * 5


def test_autocast_leaves_the_spectral_path_in_float32():
    conv = SpectralConv(normal_weight(2, 3, (4, 3), generator=seeded(0)))
    u = noise(2, 2, 9, 11).float()
    expected = conv(u)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(conv(u), expected)
        from_half = conv(u.bfloat16())
    assert from_half.dtype == torch.float32
    assert torch.equal(from_half, conv(u.bfloat16().float()))
    assert torch.equal(from_half, conv(u.bfloat16()))


def test_uniform_law_is_that_of_the_fourier_neural_operator():
    weight = uniform_weight(8, 10, (16, 8), generator=seeded(0)) * 80
    for part in (weight.real, weight.imag):
        assert part.min() >= 0
        assert part.max() <= 1
        # 10,240 draws: the mean of U(0, 1) has the spread .0029.
        assert part.mean().item() == pytest.approx(0.5, abs=0.015)
    assert torch.corrcoef(torch.stack([weight.real.flatten(), weight.imag.flatten()]))[0, 1].abs() < 0.05


def test_normal_law_has_the_stated_variance_and_no_preferred_phase():
    weight = normal_weight(6, 10, (16, 8), generator=seeded(0))
    # 7,680 draws: 5 % is four standard errors of E|W|².
    assert weight.abs().square().mean().item() == pytest.approx(2 / 16, rel=0.05)
    assert weight.square().mean().abs() < 0.05 * 2 / 16


# Around the layer


def test_pointwise_is_the_linear_layer_at_every_point():
    linear = torch.nn.Linear(3, 4)
    u = noise(2, 3, 5, 6).float()
    torch.testing.assert_close(pointwise(u, linear), linear(u.movedim(1, -1)).movedim(-1, 1))


def test_coordinates_exclude_the_periodic_end():
    out = append_coordinates(noise(2, 1, 4, 5), (0.0, 1.0))
    assert out.shape == (2, 3, 4, 5)
    torch.testing.assert_close(out[1, 1, :, 3], torch.tensor([0, 0.25, 0.5, 0.75]).double())
    torch.testing.assert_close(out[1, 2, 2], torch.tensor([0, 0.2, 0.4, 0.6, 0.8]).double())


def test_end_included_coordinates_are_a_coordinate_range():
    out = append_coordinates(noise(1, 1, 7, 7), (0.0, 7 / 6))
    torch.testing.assert_close(out[0, 1, :, 0], torch.linspace(0, 1, 7, dtype=torch.float64))


def test_walls_get_zeros_on_both_sides_and_periodic_axes_none():
    u = noise(1, 2, 8, 6)
    widths = wall_widths((8, 6), (False, True), 0.25)
    assert widths == (2, 0)
    padded = zeros_beyond_walls(u, widths)
    assert padded.shape == (1, 2, 12, 6)
    assert torch.equal(padded[:, :, 2:10], u)
    assert padded[:, :, :2].abs().max() == padded[:, :, 10:].abs().max() == 0
    assert torch.equal(crop_walls(padded, widths), u)
    assert wall_widths((8, 6), (True, False), 0.25) == (0, 2)
    assert torch.equal(crop_walls(zeros_beyond_walls(u, (1, 3)), (1, 3)), u)


def test_grids_and_states_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"two axes was expected, got \(8,\) .*; choose"):
        check_plane((8,), (True,))
    with pytest.raises(ValueError, match=r"two axes was expected, got \(8, 8, 8\) .*; choose"):
        check_plane((8, 8, 8), (True, True, True))
    for shape in [(2, 2, 9), (2, 2, 9, 9, 9), (2, 3, 9, 9)]:
        with pytest.raises(ValueError, match=r"must be \(B, 2, \*grid\) with 2 grid axes, got .*; build the model"):
            check_state(torch.zeros(shape), 2, 2)

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ergoflow.models.uno import UNO, UNOBlock, UNOConfig, block_grids, resample_features

SMALL = UNOConfig(hidden=6, lifting=7, projection=5, widths=(4, 6, 5, 4), modes=4)
PERIODIC = (True, True)
GRID = (12, 15)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def small_model(grid=GRID, *, periodic=PERIODIC, **changes):
    """A model with 1.5 times its initial matrices: a fresh one returns its biases and little else."""
    config = replace(SMALL, **changes)
    model = UNO(config, 2, 2, grid, periodic=periodic, generator=seeded(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if parameter.ndim > 1 else 1)
    return model


def state(grid=GRID, *, channels=2, dtype=torch.float32):
    return torch.randn(2, channels, *grid, generator=seeded(1), dtype=dtype)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def polynomial(grid, highest, *, channels=3, seed=2):
    """Random real trigonometric polynomials with waves |k₁|, |k₂| ≤ highest, on a grid."""
    generator = seeded(seed)
    x, y = torch.meshgrid(*(torch.arange(n).double() / n for n in grid), indexing="ij")
    fields = torch.zeros(1, channels, *grid, dtype=torch.float64)
    for channel in range(channels):
        for k1 in range(-highest, highest + 1):
            for k2 in range(highest + 1):
                amplitude, phase = torch.randn(2, generator=generator, dtype=torch.float64)
                fields[0, channel] += amplitude * torch.cos(2 * math.pi * (k1 * x + k2 * y) + phase)
    return fields


@pytest.fixture(scope="module")
def full_model():
    return UNO(UNOConfig(), 1, 1, (256, 256), periodic=PERIODIC, generator=seeded(0)).to("meta")


# Size


def test_every_part_has_the_printed_number_of_parameters(full_model):
    assert count(full_model) == 17_438_305
    assert count(full_model.lift) == 9_696
    assert [count(block) for block in full_model.blocks] == [2_903_280, 2_903_280, 5_797_104, 5_797_104]
    assert [count(block.spectral) for block in full_model.blocks] == [2_875_392, 2_875_392, 5_750_784, 5_750_784]
    assert [count(block.mlp) for block in full_model.blocks] == [9_360] * 4
    assert count(full_model.bridges) == 18_432
    assert count(full_model.project) == 9_409


@pytest.mark.parametrize("size", [128, 192, 256])
def test_one_channel_goes_through_the_full_model(full_model, size):
    assert full_model(torch.empty(2, 1, size, size, device="meta")).shape == (2, 1, size, size)


def test_three_channels_go_through_the_full_model_between_walls():
    model = UNO(UNOConfig(), 3, 3, (192, 192), periodic=(False, True)).to("meta")
    assert count(model) == 17_438_305 + 2 * 96 + 2 * 97
    for size in (128, 192, 256):
        assert model(torch.empty(1, 3, size, size, device="meta")).shape == (1, 3, size, size)


@pytest.mark.parametrize("size", [64, 32])
def test_small_model_runs_on_small_grids(size):
    config = UNOConfig(hidden=16, lifting=16, projection=16, widths=(16,) * 4, modes=8)
    model = UNO(config, 1, 1, (size, size), periodic=PERIODIC, generator=seeded(0))
    assert model(state((size, size), channels=1)).shape == (2, 1, size, size)


# Grids


@pytest.mark.parametrize(
    ("grid", "scalings", "expected"),
    [
        ((64, 32), (1, 0.5, 1, 2), [(64, 32), (32, 16), (32, 16), (64, 32)]),
        ((51, 33), (1, 0.5, 1, 2), [(51, 33), (26, 16), (26, 16), (51, 33)]),
        ((50, 64), (1, 0.5, 0.5, 2, 2), [(50, 64), (25, 32), (12, 16), (24, 32), (50, 64)]),
        ((9, 9), (1,), [(9, 9)]),
    ],
)
def test_blocks_scale_the_grid_and_the_last_one_restores_it(grid, scalings, expected):
    assert block_grids(grid, scalings) == expected


def test_blocks_work_on_the_grids_of_their_scalings():
    model, seen = small_model((24, 21)), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[1:])))
    model(state((24, 21)))
    assert seen == [(4, 24, 21), (6, 12, 10), (5, 12, 10), (4, 24, 21)]


@pytest.mark.parametrize("scalings", [(1.0, 1.0), (0.5, 2.0), (1.0, 0.5, 2.0), (2.0, 0.5, 0.5, 1.0, 2.0), (1.0,)])
def test_any_number_of_blocks_returns_to_the_grid(scalings):
    model = small_model(widths=tuple(range(3, 3 + len(scalings))), scalings=scalings, modes=2)
    for grid in [(12, 15), (13, 16)]:
        assert model(state(grid)).shape == (2, 2, *grid)


def test_one_model_runs_on_every_grid_whose_coarsest_level_resolves_its_waves():
    model = small_model()
    for grid in [(10, 10), (11, 31), (33, 16)]:
        assert model(state(grid)).shape == (2, 2, *grid)
    with pytest.raises(ValueError, match=r"waves up to \(2, 2\) need a grid of at least \(5, 5\) points, got \(4, 6\)"):
        model(state((8, 12)))


# Resampling


@pytest.mark.parametrize("target", [(8, 9), (7, 16), (24, 30), (25, 7), (12, 15)])
def test_fourier_resampling_is_exact_on_resolved_fields(target):
    result = resample_features(polynomial(GRID, 3), target, "fourier")
    torch.testing.assert_close(result, polynomial(target, 3))


def test_bicubic_resampling_moves_a_periodic_field():
    """Between end points the last point stays the last one: half a coarse cell beyond its place."""
    fine, coarse = polynomial((64, 64), 1), polynomial((32, 32), 1)
    assert relative(resample_features(fine, (32, 32), "fourier"), coarse) < 1e-12
    moved = resample_features(fine, (32, 32), "bicubic")
    torch.testing.assert_close(moved[..., -1, -1], fine[..., -1, -1])
    assert relative(moved, coarse) > 0.01


@pytest.mark.parametrize("target", [(8, 9), (24, 30), (25, 13)])
def test_block_maps_one_function_to_one_function_whatever_the_grids(target):
    """Spectral path, both skips and bias, with the MLP made linear: nothing but resampling is left."""
    block = UNOBlock(3, 4, (5, 3), mlp_width=4, generator=seeded(0)).double()
    block.mlp = torch.nn.Identity()
    here = block(polynomial(target, 3), target)
    torch.testing.assert_close(block(polynomial(GRID, 3), target), here)


# The map


def spectral_sum(u, weight, grid):
    """v(x) = Re Σ_k c_k W(k) û(k) exp(2πi k·x) by explicit matrices of waves."""
    rows, columns = weight.shape[:2]
    k1 = torch.tensor([*range((rows + 1) // 2), *range(-(rows // 2), 0)], dtype=torch.float64)
    k2 = torch.arange(columns, dtype=torch.float64)

    def waves(k, size):
        return torch.exp(2j * math.pi * torch.outer(k, torch.arange(size).double() / size))

    X, Y = u.shape[2:]
    transform = torch.einsum("bixy,rx,ky->birk", u + 0j, waves(k1, X).conj(), waves(k2, Y).conj()) / (X * Y)
    twice = torch.where(k2 > 0, 2.0, 1.0) + 0j
    terms = torch.einsum("birk,rkio,k->bork", transform, weight, twice.to(transform.dtype))
    return torch.einsum("bork,rx,ky->boxy", terms, waves(k1, grid[0]), waves(k2, grid[1])).real


def mapped(layer, u):
    return layer(u.movedim(1, -1)).movedim(-1, 1)


def mlp(module, u):
    return mapped(module.second, F.gelu(mapped(module.first, u)))


@pytest.mark.parametrize(("periodic", "padding"), [(PERIODIC, (0, 0)), ((False, True), (3, 0))])
def test_model_is_the_written_chain(periodic, padding):
    """Four blocks, no activation between them, bridges 0 → 3 and 1 → 2; bicubic: an independent resampling."""
    model = small_model(periodic=periodic, resampling="bicubic", domain_padding=0.25).double()
    z = state(dtype=torch.float64)

    def moved(u, grid):
        return F.interpolate(u, size=grid, mode="bicubic", align_corners=True)

    def block(module, u, grid):
        v = spectral_sum(u, module.spectral.weight, grid) + module.bias.reshape(-1, 1, 1)
        v = v + moved(mapped(module.skip, u), grid)
        return mlp(module.mlp, v) + moved(mapped(module.mlp_skip, u), grid)

    x, y = torch.meshgrid(*(torch.arange(n).double() / n for n in GRID), indexing="ij")
    u = mlp(model.lift, torch.cat([z, x.expand(2, 1, -1, -1), y.expand(2, 1, -1, -1)], dim=1))
    u = F.pad(u, [padding[1], padding[1], padding[0], padding[0]])
    full = tuple(u.shape[2:])
    half = tuple(round(n / 2) for n in full)
    u0 = block(model.blocks[0], u, full)
    u1 = block(model.blocks[1], u0, half)
    u2 = block(model.blocks[2], torch.cat([u1, mapped(model.bridges[1], u1)], dim=1), half)
    u3 = block(model.blocks[3], torch.cat([u2, moved(mapped(model.bridges[0], u0), half)], dim=1), full)
    expected = mlp(model.project, u3[:, :, padding[0] : padding[0] + 12, padding[1] : padding[1] + 15])
    torch.testing.assert_close(model(z), expected)


# Symmetries


def without_coordinates(model):
    with torch.no_grad():
        model.lift.first.weight[:, 2:] = 0
    return model.double()


def test_without_coordinates_a_periodic_model_commutes_with_translations_of_its_coarsest_grid():
    model, z = without_coordinates(small_model((12, 16))), state((12, 16), dtype=torch.float64)
    torch.testing.assert_close(model(z.roll((4, 6), (2, 3))), model(z).roll((4, 6), (2, 3)))


def test_coordinates_break_translations():
    model, z = small_model((12, 16)).double(), state((12, 16), dtype=torch.float64)
    assert relative(model(z.roll(4, 2)), model(z).roll(4, 2)) > 1e-2


def test_walls_break_translations_across_them_only():
    model = without_coordinates(small_model((12, 16), periodic=(False, True)))
    z = state((12, 16), dtype=torch.float64)
    torch.testing.assert_close(model(z.roll(6, 3)), model(z).roll(6, 3))
    assert relative(model(z.roll(4, 2)), model(z).roll(4, 2)) > 1e-2


# Borders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0; choose"),
        ({"modes": 0}, "modes must be at least 1, got 0; choose"),
        ({"widths": (4, 4)}, r"of one length, at least 1, got \(4, 4\) and .*; give one scaling"),
        ({"widths": (), "scalings": ()}, "of one length, at least 1, got .*; give"),
        ({"widths": (4, 0, 4, 4)}, "at least one channel, and one in its MLP, got width 0 .*; choose"),
        ({"expansion": 0.1}, "got width 4 and expansion 0.1; choose"),
        ({"scalings": (1.0, 0.5, 1.0, 1.0)}, r"multiply to 1, .* got \(1.0, 0.5, 1.0, 1.0\); choose"),
        ({"scalings": (1.0, -1.0, 1.0, -1.0)}, "must be positive and multiply to 1, .*; choose"),
        ({"resampling": "linear"}, "resampling must be one of .*, got 'linear'; choose"),
        ({"coordinate_range": (0.0, 0.0)}, "start < stop, got .*; choose"),
        ({"domain_padding": -1.0}, "domain_padding must not be negative, got -1.0; choose"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


def test_grids_that_do_not_fit_are_refused_at_construction():
    with pytest.raises(ValueError, match=r"at least \(25, 25\) points, got \(24, 32\); use"):
        UNO(UNOConfig(), 1, 1, (48, 64), periodic=PERIODIC)
    with pytest.raises(ValueError, match="two axes was expected"):
        UNO(SMALL, 1, 1, (32, 32, 32), periodic=(True, True, True))


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("resampling", ["fourier", "bicubic"])
def test_cuda_agrees_with_cpu_and_autocast_with_both(resampling):
    model, z = small_model((33, 31), periodic=(True, False), resampling=resampling), state((33, 31))
    expected = model(z).detach()
    model.cuda()
    assert relative(model(z.cuda()).cpu(), expected) < 1e-3
    with torch.autocast("cuda", torch.bfloat16):
        output = model(z.cuda())
    assert relative(output.float().cpu(), expected) < 0.05
    output.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

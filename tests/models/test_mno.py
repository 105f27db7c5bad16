from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ergoflow.models.mno import MNO, MNOConfig
from ergoflow.models.spectral import SpectralConv

SMALL = MNOConfig(width=8, modes=4)
PERIODIC = (True, True)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def small_model(grid=(12, 15), *, periodic=PERIODIC, config=SMALL):
    """A model whose spectral weights are of order one: the authors' law starts them near zero."""
    model = MNO(config, 2, 2, grid, periodic=periodic, generator=seeded(0))
    with torch.no_grad():
        for layer in model.layers:
            layer.spectral.weight.mul_(layer.spectral.weight.shape[-1])
    return model


def state(grid=(12, 15), *, channels=2, dtype=torch.float32):
    return torch.randn(2, channels, *grid, generator=seeded(1), dtype=dtype)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def full_model():
    return MNO(MNOConfig(), 1, 1, (256, 256), periodic=PERIODIC, generator=seeded(0)).to("meta")


# Size


def test_every_part_has_the_printed_number_of_parameters(full_model):
    assert count(full_model) == 6_467_425
    assert count(full_model.lift) == 128
    assert [count(layer.spectral) for layer in full_model.layers] == [1_769_472, 1_990_656, 1_179_648, 1_474_560]
    assert [count(layer.local) for layer in full_model.layers] == [1_584, 3_136, 4_160, 5_200]
    assert [count(part) for part in (full_model.expand, full_model.mix, full_model.project)] == [12_960, 25_760, 161]


@pytest.mark.parametrize("size", [128, 192, 256])
def test_one_channel_goes_through_the_full_model(full_model, size):
    assert full_model(torch.empty(2, 1, size, size, device="meta")).shape == (2, 1, size, size)


@pytest.mark.parametrize("periodic", [PERIODIC, (False, True)])
def test_three_channels_go_through_the_full_model(periodic):
    model = MNO(MNOConfig(), 3, 3, (192, 192), periodic=periodic).to("meta")
    assert count(model) == 6_467_425 + 2 * 32 + 2 * 161
    for size in (128, 192, 256):
        assert model(torch.empty(1, 3, size, size, device="meta")).shape == (1, 3, size, size)


@pytest.mark.parametrize("size", [64, 32])
def test_small_model_runs_on_small_grids(size):
    model = MNO(MNOConfig(modes=8, width=16), 1, 1, (size, size), periodic=PERIODIC, generator=seeded(0))
    assert model(state((size, size), channels=1)).shape == (2, 1, size, size)


# The map


def spectral_sum(u, weight):
    """v(x) = Re Σ_k c_k W(k) û(k) exp(2πi k·x) by explicit matrices of waves."""
    rows, columns = weight.shape[:2]
    k1 = torch.tensor([*range((rows + 1) // 2), *range(-(rows // 2), 0)], dtype=torch.float64)
    k2 = torch.arange(columns, dtype=torch.float64)
    X, Y = u.shape[2:]
    along_x = torch.exp(2j * math.pi * torch.outer(k1, torch.arange(X).double() / X))  # (R, X)
    along_y = torch.exp(2j * math.pi * torch.outer(k2, torch.arange(Y).double() / Y))  # (K, Y)
    transform = torch.einsum("bixy,rx,ky->birk", u.to(along_x.dtype), along_x.conj(), along_y.conj()) / (X * Y)
    twice = torch.where(k2 > 0, 2.0, 1.0)
    return torch.einsum("birk,rkio,k,rx,ky->boxy", transform, weight, twice.to(along_x.dtype), along_x, along_y).real


@pytest.mark.parametrize(
    ("periodic", "padding"), [(PERIODIC, (0, 0)), ((False, True), (3, 0)), ((True, False), (0, 4))]
)
def test_model_is_the_written_chain(periodic, padding):
    """Lift with coordinates, zeros beyond walls, SELU after three of four layers, crop, MLP with SELU."""
    grid = (12, 15)
    model = small_model(grid, periodic=periodic, config=replace(SMALL, domain_padding=0.25)).double()
    z = state(grid, dtype=torch.float64)
    x, y = torch.meshgrid(*(torch.arange(n).double() / n for n in grid), indexing="ij")
    u = torch.cat([z, x.expand(2, 1, -1, -1), y.expand(2, 1, -1, -1)], dim=1)
    u = model.lift(u.movedim(1, -1)).movedim(-1, 1)
    u = F.pad(u, [padding[1], padding[1], padding[0], padding[0]])
    for i, layer in enumerate(model.layers):
        u = spectral_sum(u, layer.spectral.weight) + layer.local(u.movedim(1, -1)).movedim(-1, 1)
        u = F.selu(u) if i < 3 else u
    u = u[:, :, padding[0] : padding[0] + 12, padding[1] : padding[1] + 15].movedim(1, -1)
    u = model.project(F.selu(model.mix(F.selu(model.expand(u)))))
    torch.testing.assert_close(model(z), u.movedim(-1, 1))


def test_layers_keep_as_many_waves_as_the_authors():
    shapes = [tuple(layer.spectral.weight.shape) for layer in small_model().layers]
    assert shapes == [(8, 4, 4, 6), (6, 3, 6, 8), (4, 2, 8, 8), (4, 2, 8, 10)]


def test_one_model_runs_on_every_grid_that_resolves_its_waves():
    model = small_model((12, 15))
    for grid in [(9, 7), (10, 31), (33, 16)]:
        assert model(state(grid)).shape == (2, 2, *grid)
    for grid in [(8, 7), (9, 6)]:
        with pytest.raises(ValueError, match=r"waves up to \(4, 3\) need a grid of at least \(9, 7\) points, got"):
            model(state(grid))


# Symmetries


def without_coordinates(model):
    with torch.no_grad():
        model.lift.weight[:, 2:] = 0
    return model.double()


def test_without_coordinates_a_periodic_model_commutes_with_translations():
    model, z = without_coordinates(small_model()), state(dtype=torch.float64)
    torch.testing.assert_close(model(z.roll((5, 4), (2, 3))), model(z).roll((5, 4), (2, 3)))


def test_coordinates_break_translations():
    model, z = small_model().double(), state(dtype=torch.float64)
    assert relative(model(z.roll(5, 2)), model(z).roll(5, 2)) > 1e-2


def test_walls_break_translations_across_them_only():
    model, z = without_coordinates(small_model(periodic=(False, True))), state(dtype=torch.float64)
    torch.testing.assert_close(model(z.roll(4, 3)), model(z).roll(4, 3))
    assert relative(model(z.roll(4, 2)), model(z).roll(4, 2)) > 1e-2


# Borders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 1}, "width must be at least 2, got 1; choose"),
        ({"modes": 1}, "modes must be at least 2, got 1; choose"),
        ({"coordinate_range": (1.0, 0.0)}, "start < stop, got .*; choose"),
        ({"domain_padding": -0.1}, "domain_padding must not be negative, got -0.1; choose"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


def test_grids_that_do_not_fit_are_refused_at_construction():
    with pytest.raises(ValueError, match=r"at least \(49, 47\) points, got \(48, 64\); use"):
        MNO(MNOConfig(), 1, 1, (48, 64), periodic=PERIODIC)
    with pytest.raises(ValueError, match="two axes was expected"):
        MNO(SMALL, 1, 1, (32,), periodic=(True,))
    # The padding beyond walls counts.
    MNO(SMALL, 1, 1, (8, 8), periodic=(False, True))


# Precision and devices


def test_fourier_transforms_are_float32_under_autocast(monkeypatch):
    seen = []
    forward = SpectralConv.forward

    def spy(self, u, grid=None):
        out = forward(self, u, grid)
        seen.append((self.weight.dtype, out.dtype))
        return out

    monkeypatch.setattr(SpectralConv, "forward", spy)
    with torch.autocast("cpu", torch.bfloat16):
        small_model()(state())
    assert seen == [(torch.complex64, torch.float32)] * 4


@pytest.mark.gpu
def test_cuda_agrees_with_cpu_and_autocast_with_both():
    model, z = small_model((33, 31), periodic=(True, False)), state((33, 31))
    expected = model(z).detach()
    model.cuda()
    assert relative(model(z.cuda()).cpu(), expected) < 1e-3
    with torch.autocast("cuda", torch.bfloat16):
        output = model(z.cuda())
    assert relative(output.float().cpu(), expected) < 0.05
    output.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

"""A step held at a climate: where its energy settles, what it leaves alone, and what a climate is."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from ergoflow.ops.inference import recorded_inference
from ergoflow.training.climate import Climate, HeldStep
from ergoflow.training.stepper import NormalizedStep

GRIDS = [((16,), (True,)), ((6, 16), (False, True)), ((16, 12), (True, True)), ((8, 5, 10), (True, False, True))]


class Shrunk(nn.Module):
    """z -> m + q (z - m)."""

    def __init__(self, mean: Tensor, factor: float) -> None:
        super().__init__()
        self.mean, self.factor = mean, factor

    def forward(self, state: Tensor) -> Tensor:
        return self.mean + self.factor * (state - self.mean)


def states(grid: tuple[int, ...], count: int = 40, seed: int = 0) -> Tensor:
    """Noise of unit variance about a mean that depends on the channel and on the place along every axis."""
    noise = torch.randn(count, 2, *grid, generator=torch.Generator().manual_seed(seed))
    places = torch.meshgrid(*(torch.linspace(0, 1, points) for points in grid), indexing="ij")
    return noise + torch.tensor([0.5, -2.0]).reshape(2, *(1,) * len(grid)) * (1 + sum(places))


def energies(fields: Tensor, mean: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """e_n (N, C, shells) by the definition, wave by wave, of the full transform."""
    axes = tuple(2 + a for a, around in enumerate(periodic) if around)
    walls = tuple(2 + a for a, around in enumerate(periodic) if not around)
    squares = torch.fft.fftn((fields - mean).double(), dim=axes, norm="forward").abs().square()
    squares = squares.mean(walls) if walls else squares
    waves = [torch.fft.fftfreq(fields.shape[axis], 1 / fields.shape[axis]) for axis in axes]
    length = torch.stack(torch.meshgrid(*waves, indexing="ij")).square().sum(0).sqrt()
    shells = [(length >= n - 0.5) & (length < n + 0.5) for n in range(1, int(length.max() + 0.5) + 1)]
    return torch.stack([squares[..., on].mean(-1) for on in shells], dim=-1)


@pytest.mark.parametrize(("grid", "periodic"), GRIDS)
def test_climate_is_that_of_its_definition_and_survives_json(grid, periodic) -> None:
    fields = states(grid)
    climate = Climate.of(fields.split(7), periodic)
    axes = (0, *(2 + a for a, around in enumerate(periodic) if around))
    torch.testing.assert_close(climate.mean, fields.mean(axes, keepdim=True)[0])
    expected = energies(fields, fields.mean(axes, keepdim=True), periodic).mean(0)
    torch.testing.assert_close(climate.energy, expected.float(), rtol=1e-4, atol=0)
    again = Climate.from_dict(json.loads(json.dumps(climate.to_dict())))
    assert torch.equal(again.mean, climate.mean)
    assert torch.equal(again.energy, climate.energy)


@pytest.mark.parametrize(("grid", "periodic"), GRIDS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_energy_of_a_model_that_shrinks_or_grows_settles_where_it_should(grid, periodic, size: float) -> None:
    """ln(e/E) = ln q^2 (1 - a) / a for a model z -> q z, whatever it starts from; unheld, nothing or all is left."""
    climate, share = Climate.of([states(grid)], periodic), 0.2
    for factor in (0.9, 1.05):
        step = HeldStep(NormalizedStep(Shrunk(climate.mean, factor)), climate, share, periodic=periodic)
        state = climate.mean + size * (states(grid, count=3, seed=1) - climate.mean)
        for _ in range(150):
            state = step(state)
        found = energies(state, climate.mean, periodic) / climate.energy
        expected = math.exp(2 * math.log(factor) * (1 - share) / share)
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("grid", "periodic"), GRIDS)
def test_phases_are_left_alone_and_the_mean_is_drawn_back(grid, periodic) -> None:
    climate, share = Climate.of([states(grid)], periodic), 0.3
    state = 3 * states(grid, count=2, seed=1)
    held = HeldStep(NormalizedStep(nn.Identity()), climate, share, periodic=periodic)(state)
    axes = tuple(2 + a for a, around in enumerate(periodic) if around)
    torch.testing.assert_close(
        held.mean(axes, keepdim=True) - climate.mean, (1 - share) * (state.mean(axes, keepdim=True) - climate.mean)
    )
    before, after = (torch.fft.fftn(field - climate.mean, dim=axes, norm="forward") for field in (state, held))
    gain = after / before
    torch.testing.assert_close(gain.imag, torch.zeros_like(gain.imag), rtol=0, atol=1e-3)
    assert gain.real.min() > 0


@pytest.mark.parametrize(("size", "left"), [(1e-4, math.sqrt(0.1 * 1e-4)), (1e-6, 0.1)])
def test_a_state_of_the_climate_stays_and_shells_of_rounding_are_not_held(size: float, left: float) -> None:
    """Of two waves one is weak: at a millionth of the other's size it is what a solver's mask leaves, and grows as it
    likes; at a ten-thousandth it is real, and half of its growth is taken back."""
    x = torch.arange(16) * (2 * math.pi / 16)
    state = (torch.sin(2 * x) + size * torch.sin(5 * x))[None, None]
    climate = Climate.of([state], (True,))
    step = HeldStep(NormalizedStep(nn.Identity()), climate, 0.5, periodic=(True,))
    torch.testing.assert_close(step(state), state, rtol=0, atol=1e-6)
    louder = state + 0.1 * torch.sin(5 * x)
    assert torch.fft.rfft(step(louder))[0, 0, 5].abs() == pytest.approx(left * 8, rel=1e-3)


def test_kept_means_stay_kept_and_nothing_at_all_becomes_a_number() -> None:
    fields = states((6, 16))
    climate = Climate.of([fields], (False, True))
    step = HeldStep(NormalizedStep(nn.Identity(), kept_means=(1,)), climate, 0.2, periodic=(False, True))
    held = step(fields)
    torch.testing.assert_close(held[:, 1].mean((1, 2)), fields[:, 1].mean((1, 2)))
    assert (held[:, 0].mean((1, 2)) - fields[:, 0].mean((1, 2))).abs().max() > 1e-3
    assert torch.isfinite(step(climate.mean.expand(1, 2, 6, 16))).all()


@pytest.mark.parametrize("grid", [(6, 12), (8, 16)])
def test_another_grid_is_refused(grid: tuple[int, int]) -> None:
    step = HeldStep(
        NormalizedStep(nn.Identity()), Climate.of([states((6, 16))], (False, True)), 0.1, periodic=(False, True)
    )
    with pytest.raises(ValueError, match=r"grid of its training data, got \(\d+, 1"):
        step(states(grid))


def test_products_in_half_precision_are_those_of_the_model_alone() -> None:
    fields = states((6, 16))
    step = HeldStep(NormalizedStep(nn.Identity()), Climate.of([fields], (False, True)), 0.3, periodic=(False, True))
    with torch.autocast("cpu", torch.bfloat16):
        half = step(2 * fields)
    assert torch.equal(half, step(2 * fields))


def test_a_flow_between_walls_alone_cannot_be_held() -> None:
    climate = Climate(mean=torch.zeros(1, 4), energy=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"an axis along which the flow is periodic.*task\.hold=0"):
        HeldStep(NormalizedStep(nn.Identity()), climate, 0.1, periodic=(False,))


@pytest.mark.gpu
def test_a_held_step_is_recorded_as_one_graph() -> None:
    fields = states((6, 16))
    step = HeldStep(
        NormalizedStep(nn.Softplus(), kept_means=(0,)), Climate.of([fields], (False, True)), 0.3, periodic=(False, True)
    ).to("cuda")
    recorded = recorded_inference(step, precision="fp32", device=torch.device("cuda"))
    with torch.inference_mode():
        for scale in (1.0, 2.0):
            state = scale * fields.to("cuda")
            torch.testing.assert_close(recorded(state), step(state))

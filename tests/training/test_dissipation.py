from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ergoflow.data.normalize import Normalizer
from ergoflow.training.dissipation import (
    DissipativeStep,
    dissipativity_loss,
    shell_samples,
    state_norm,
    transition,
)
from ergoflow.training.stepper import NormalizedStep, PhysicalStep


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Gain(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, state: Tensor) -> Tensor:
        return self.gain * state


class Squaring(nn.Module):
    """A network that overflows where it was never trained."""

    def forward(self, state: Tensor) -> Tensor:
        return state * state.abs()


def states(norm: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    z = torch.randn(*shape, generator=seeded(), dtype=dtype)
    return norm * z / state_norm(z).reshape(-1, *(1,) * (len(shape) - 1))


@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (3, 2, 5, 12), (3, 3, 64)])
def test_norm_of_a_field_does_not_depend_on_channels_or_resolution(shape: tuple[int, ...]) -> None:
    z = torch.full(shape, -2.0)
    z[1] *= 3
    torch.testing.assert_close(state_norm(z), torch.tensor([2.0, 6.0, 2.0]))


def test_shell_samples_have_uniform_norms_between_the_radii() -> None:
    z = shell_samples(torch.zeros(4000, 2, 3, 5), 1.5, 4.0, generator=seeded())
    norms = state_norm(z).sort().values
    assert 1.5 <= norms[0] < 1.51
    assert 3.99 < norms[-1] <= 4.0 + 1e-5
    # Uniform: the k-th of n norms lies near its quantile (Kolmogorov–Smirnov at 1 %: 1.63 / sqrt n).
    quantiles = (norms - 1.5) / 2.5
    assert (quantiles - (torch.arange(4000) + 0.5) / 4000).abs().max() < 1.63 / 4000**0.5


def test_shell_samples_have_no_preferred_direction() -> None:
    z = shell_samples(torch.zeros(4000, 2, 3, 5), 1.0, 1.0 + 1e-6, generator=seeded()).flatten(1)
    covariance = z.T @ z / 4000  # entries: unit variance, uncorrelated
    assert (covariance - torch.eye(30)).abs().max() < 0.12
    assert z.mean(dim=0).abs().max() < 0.08


def test_shell_samples_depend_on_their_generator_alone() -> None:
    like = torch.zeros(2, 1, 4)
    first = shell_samples(like, 1.0, 2.0, generator=seeded())
    torch.rand(3)
    assert torch.equal(first, shell_samples(like, 1.0, 2.0, generator=seeded()))
    assert not torch.equal(first, shell_samples(like, 1.0, 2.0, generator=seeded(8)))


def test_dissipativity_loss_is_the_squared_distance_from_the_contraction() -> None:
    """A step z -> w z has the loss (w - s)^2 mean |z|^2; the contraction itself has none."""
    z = shell_samples(torch.zeros(5, 2, 6, 4), 1.0, 3.0, generator=seeded())
    energy = state_norm(z).square().mean().item()
    assert dissipativity_loss(NormalizedStep(Gain(0.5)), z, scale=0.5).item() == 0
    loss = dissipativity_loss(NormalizedStep(Gain(1.7)), z, scale=0.5)
    assert loss.item() == pytest.approx(1.2**2 * energy, rel=1e-5)


def test_dissipativity_loss_judges_the_step_and_not_the_increment() -> None:
    z = shell_samples(torch.zeros(5, 2, 6, 4), 1.0, 3.0, generator=seeded())
    step = NormalizedStep(Gain(-5.0), "increment", torch.full((2,), 0.1))  # z - 0.5 z
    assert dissipativity_loss(step, z, scale=0.5).item() == pytest.approx(0, abs=1e-12)


def test_transition_is_a_smooth_partition_of_unity() -> None:
    norms = torch.linspace(0, 6, 601, dtype=torch.float64)
    rho = transition(norms, 1.0, 3.0)
    assert torch.equal(rho[norms <= 1], torch.ones(101, dtype=torch.float64))
    assert torch.equal(rho[norms >= 3], torch.zeros(301, dtype=torch.float64))
    assert rho[200].item() == pytest.approx(0.5)
    assert (rho.diff() <= 0).all()
    # rho at t and at 1 - t add up to one.
    inside = rho[100:301]
    torch.testing.assert_close(inside + inside.flip(0), torch.ones(201, dtype=torch.float64))
    # All derivatives vanish at the ends: one tenth inside, 1 - rho is exp(-1 / t + ...) = 1.4e-4.
    assert 1 - transition(torch.tensor(1.2, dtype=torch.float64), 1.0, 3.0).item() == pytest.approx(1.4e-4, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_inside_the_radius_are_stepped_as_before_to_the_last_bit(dtype: torch.dtype) -> None:
    step = NormalizedStep(nn.Tanh(), "increment", torch.full((2,), 0.3))
    for norm in (0.0, 0.5, 0.999, 1.249):
        z = states(norm, 4, 2, 6, 5, dtype=dtype)
        assert torch.equal(DissipativeStep(step, 1.25)(z), step(z)), norm


def test_states_beyond_the_shell_are_contracted_whatever_the_network_says() -> None:
    step = DissipativeStep(NormalizedStep(Squaring()), 1.0, outer=3.0, scale=0.25)
    # The square of the last overflows, and so does its norm.
    for norm in (3.001, 50.0, 1e15, 1e30):
        z = states(norm, 4, 2, 6, 5)
        assert torch.equal(step(z), 0.25 * z), norm


def test_between_the_radii_the_two_are_blended_state_by_state() -> None:
    inner_step = NormalizedStep(Gain(3.0))
    z = torch.cat([states(norm, 1, 2, 5) for norm in (1.0, 4.0, 18.0)])
    out = DissipativeStep(inner_step, 2.0, outer=3.0, scale=0.5)(z)
    torch.testing.assert_close(out[0], 3.0 * z[0])
    torch.testing.assert_close(out[1], (0.5 * 3.0 + 0.5 * 0.5) * z[1])  # half way: rho = 1/2
    torch.testing.assert_close(out[2], 0.5 * z[2])


def test_orbit_from_a_huge_state_enters_the_ball_and_stays() -> None:
    """An expanding map, unbounded on its own."""
    step = DissipativeStep(NormalizedStep(Gain(1.2)), 1.0, outer=2.0, scale=0.5)
    z = states(1e20, 3, 1, 8, 8)
    norms = []
    for _ in range(400):
        z = step(z)
        norms.append(state_norm(z).max().item())
    entered = next(k for k, norm in enumerate(norms) if norm <= 2.0)
    assert entered <= 70  # 1e20 / 2^67 < 1
    assert max(norms[entered:]) <= 1.2 * 2.0
    assert min(norms[entered:]) > 0.9  # it does not collapse either: inside, the map expands


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tangent_of_a_step_inside_is_that_of_the_network() -> None:
    step = NormalizedStep(nn.Tanh())
    z, direction = states(0.9, 2, 1, 6, dtype=torch.float64), states(1.0, 2, 1, 6, dtype=torch.float64)
    _, expected = torch.func.jvp(step, (z,), (direction,))
    _, pushed = torch.func.jvp(DissipativeStep(step, 1.0), (z,), (direction,))
    assert torch.equal(pushed, expected)


def test_guarded_step_takes_the_place_of_a_step_in_physical_units() -> None:
    units = Normalizer(mean=torch.tensor([2.0]), std=torch.tensor([3.0]), std_delta=torch.ones(1))
    step = DissipativeStep(NormalizedStep(Gain(1.0)), 1.0, outer=2.0, scale=0.5)
    physical = PhysicalStep(step, units)
    near, far = 2.0 + 3.0 * states(0.9, 1, 1, 8), 2.0 + 3.0 * states(10.0, 1, 1, 8)
    torch.testing.assert_close(physical(near), near)
    torch.testing.assert_close(physical(far) - 2.0, 0.5 * (far - 2.0))
    assert step.model is step.step.model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"radius": 0.0}, "radius must be positive, got 0.0; take"),
        ({"radius": float("nan")}, "radius must be positive, got nan; take"),
        ({"radius": 1.0, "outer": 1.0}, "outer must exceed 1, got 1.0; the"),
        ({"radius": 1.0, "scale": 1.0}, r"scale must be in \[0, 1\) to contract, got 1.0; the"),
    ],
)
def test_guard_that_does_not_contract_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DissipativeStep(NormalizedStep(Gain(1.0)), **settings)

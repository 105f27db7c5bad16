from __future__ import annotations

import itertools

import pytest
import torch

from ergoflow.numerics.lattice import (
    OPPOSITE,
    SOUND_SPEED_SQUARED,
    VELOCITIES,
    WEIGHTS,
    density_excess,
    equilibrium,
    first_moment,
    from_moments,
    second_moment,
    third_order,
)

CELLS = (3, 4, 5)


def random_state(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    excess = 0.02 * torch.randn(CELLS, generator=generator, dtype=torch.float64)
    velocity = 0.05 * torch.randn((3, *CELLS), generator=generator, dtype=torch.float64)
    return excess, velocity


def delta(*axes: int) -> float:
    return float(axes[0] == axes[1])


def test_velocities_are_the_19_of_length_at_most_sqrt_2() -> None:
    expected = {c for c in itertools.product((-1, 0, 1), repeat=3) if sum(v * v for v in c) <= 2}
    assert set(VELOCITIES) == expected
    assert len(VELOCITIES) == 19


def test_opposite_reverses_the_velocity_and_pairs_are_neighbours() -> None:
    for q, (x, y, z) in enumerate(VELOCITIES):
        assert VELOCITIES[OPPOSITE[q]] == (-x, -y, -z)
        assert OPPOSITE[q] == (0 if q == 0 else q + 1 if q % 2 else q - 1)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4, 5])
def test_lattice_tensors_are_isotropic_up_to_fifth_order(order: int) -> None:
    c2 = SOUND_SPEED_SQUARED
    for axes in itertools.product(range(3), repeat=order):
        total = sum(
            w * torch.tensor([c[a] for a in axes]).prod().item() for w, c in zip(WEIGHTS, VELOCITIES, strict=True)
        )
        if order == 0:
            expected = 1.0
        elif order == 2:
            expected = c2 * delta(*axes)
        elif order == 4:
            a, b, c, d = axes
            expected = c2**2 * (delta(a, b) * delta(c, d) + delta(a, c) * delta(b, d) + delta(a, d) * delta(b, c))
        else:
            expected = 0.0
        assert total == pytest.approx(expected, abs=1e-15)


def test_equilibrium_has_the_moments_of_a_maxwellian() -> None:
    excess, velocity = random_state()
    populations = equilibrium(excess, velocity)
    density = 1 + excess
    momentum_flux = density * velocity[:, None] * velocity[None]
    pressure = excess / 3 * torch.eye(3, dtype=torch.float64)[:, :, None, None, None]
    torch.testing.assert_close(density_excess(populations), excess, rtol=0, atol=1e-15)
    torch.testing.assert_close(first_moment(populations), density * velocity, rtol=0, atol=1e-15)
    torch.testing.assert_close(second_moment(populations), momentum_flux + pressure, rtol=0, atol=1e-15)


def test_rest_at_unit_density_is_zero_in_storage() -> None:
    assert not equilibrium(torch.zeros(CELLS), torch.zeros(3, *CELLS)).any()


def test_equilibrium_matches_the_formula_written_out_for_one_cell() -> None:
    rho, u = 1.03, (0.04, -0.02, 0.07)
    populations = equilibrium(torch.tensor(rho - 1, dtype=torch.float64), torch.tensor(u, dtype=torch.float64))
    for q, c in enumerate(VELOCITIES):
        along = sum(a * b for a, b in zip(c, u, strict=True))
        full = WEIGHTS[q] * rho * (1 + 3 * along + 4.5 * along**2 - 1.5 * sum(v * v for v in u))
        assert float(populations[q]) == pytest.approx(full - WEIGHTS[q], abs=1e-16)


def test_populations_from_moments_have_those_moments() -> None:
    excess, momentum = random_state(1)
    flux = 0.01 * torch.randn((3, 3, *CELLS), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    flux = flux + flux.transpose(0, 1)
    populations = from_moments(excess, momentum, flux)
    pressure = excess / 3 * torch.eye(3, dtype=torch.float64)[:, :, None, None, None]
    torch.testing.assert_close(density_excess(populations), excess, rtol=0, atol=1e-15)
    torch.testing.assert_close(first_moment(populations), momentum, rtol=0, atol=1e-15)
    torch.testing.assert_close(second_moment(populations), flux + pressure, rtol=0, atol=1e-15)


def test_from_moments_of_a_maxwellian_is_the_equilibrium() -> None:
    excess, velocity = random_state(3)
    density = 1 + excess
    populations = from_moments(excess, density * velocity, density * velocity[:, None] * velocity[None])
    torch.testing.assert_close(populations, equilibrium(excess, velocity), rtol=0, atol=1e-16)


def test_third_order_populations_have_only_the_moments_asked_for() -> None:
    skew = torch.randn((3, 3, *CELLS), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    populations = third_order(skew)
    for lower in (density_excess(populations), first_moment(populations), second_moment(populations)):
        assert float(lower.abs().max()) < 1e-14
    for a, b in itertools.permutations(range(3), 2):
        third = sum(c[a] ** 2 * c[b] * f for c, f in zip(VELOCITIES, populations, strict=True))
        torch.testing.assert_close(third, skew[a, b], rtol=0, atol=1e-14)

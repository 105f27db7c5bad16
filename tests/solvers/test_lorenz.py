from __future__ import annotations

import cmath
import math

import pytest
import torch

from ergoflow.numerics.trajectory import rollout
from ergoflow.solvers.lorenz import Lorenz63Config, Lorenz96Config, make_lorenz63_step, make_lorenz96_step


def ring(count: int, sites: int) -> torch.Tensor:
    return torch.randn(count, 1, sites, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_lorenz63_keeps_its_three_fixed_points() -> None:
    config = Lorenz63Config()
    c = math.sqrt(config.beta * (config.rho - 1))
    points = torch.tensor([[0, 0, 0], [c, c, config.rho - 1], [-c, -c, config.rho - 1]], dtype=torch.float64)
    step = make_lorenz63_step(config, substeps=10, dtype=torch.float64)
    torch.testing.assert_close(step(points), points, rtol=0, atol=1e-12)


def test_lorenz63_tendency_at_one_point_is_the_one_worked_out_by_hand() -> None:
    # At (1, 2, 20): 10·(2 − 1), 1·(28 − 20) − 2, 1·2 − 8/3·20.
    point = torch.tensor([[1.0, 2.0, 20.0]], dtype=torch.float64)
    step = make_lorenz63_step(Lorenz63Config(dt=1e-6), dtype=torch.float64)
    assert ((step(point) - point) / 1e-6)[0].tolist() == pytest.approx([10.0, 6.0, -154 / 3], abs=1e-3)


def test_lorenz63_decays_exactly_along_the_z_axis() -> None:
    config = Lorenz63Config(beta=2.0)
    step = make_lorenz63_step(config, substeps=100, dtype=torch.float64)
    result = step(torch.tensor([[0.0, 0.0, 5.0]], dtype=torch.float64))
    assert result[0].tolist() == pytest.approx([0, 0, 5 * math.exp(-2.0)], rel=1e-8)


def test_lorenz63_contracts_volume_at_the_rate_of_its_trace() -> None:
    config = Lorenz63Config(dt=0.002)
    step = make_lorenz63_step(config, substeps=100, dtype=torch.float64)
    point = torch.tensor([[1.0, 2.0, 20.0]], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(step, point)[0, :, 0]
    rate = -(config.sigma + 1 + config.beta)
    assert float(torch.logdet(jacobian)) == pytest.approx(rate * 0.2, rel=1e-5)


def test_lorenz63_commutes_with_its_half_turn() -> None:
    turn = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    step = make_lorenz63_step(Lorenz63Config(), substeps=200, dtype=torch.float64)
    point = torch.tensor([[1.0, 3.0, 15.0]], dtype=torch.float64)
    assert torch.equal(step(point * turn), step(point) * turn)


def test_lorenz63_stays_in_the_known_ellipsoid_and_visits_both_wings() -> None:
    step = make_lorenz63_step(Lorenz63Config(), substeps=10, dtype=torch.float64)
    orbit = torch.cat(list(rollout(step, torch.tensor([[1.0, 1.0, 20.0]], dtype=torch.float64), 1000)))
    assert orbit[:, 0].min() < -10
    assert orbit[:, 0].max() > 10
    assert orbit[:, 2].max() < 50


def test_lorenz96_rests_at_the_forcing() -> None:
    config = Lorenz96Config(num_sites=11, forcing=0.7)
    step = make_lorenz96_step(config, substeps=10, dtype=torch.float64)
    rest = torch.full((2, 1, 11), 0.7, dtype=torch.float64)
    torch.testing.assert_close(step(rest), rest, rtol=0, atol=1e-14)


def test_lorenz96_energy_feels_only_damping_and_forcing() -> None:
    # The quadratic term does no work: d/dt Σx²/2 = −Σx² + F Σx.
    config = Lorenz96Config(num_sites=13, forcing=3.0, dt=1e-4)
    step = make_lorenz96_step(config, dtype=torch.float64)
    before = 2 * ring(4, 13)
    middle = step(before)
    after = step(middle)
    rate = (after.square().sum(dim=-1) - before.square().sum(dim=-1)) / 2 / (2 * config.dt)
    work = config.forcing * middle.sum(dim=-1) - middle.square().sum(dim=-1)
    torch.testing.assert_close(rate, work, rtol=1e-5, atol=1e-5)


def test_lorenz96_small_waves_grow_at_the_linear_rate_and_drift() -> None:
    # About x = F a wave exp(i m 2πj/N) has the rate F(e^{iθ} − e^{−2iθ}) − 1: sees each index of the stencil.
    config = Lorenz96Config(num_sites=12, forcing=2.0, dt=0.01)
    theta = 2 * math.pi * 2 / 12
    wave = torch.cos(theta * torch.arange(12, dtype=torch.float64))
    step = make_lorenz96_step(config, substeps=50, dtype=torch.float64)
    result = torch.fft.rfft(step((2.0 + 1e-7 * wave)[None, None]) - 2.0)[0, 0, 2] / (1e-7 * 6)
    rate = config.forcing * (cmath.exp(1j * theta) - cmath.exp(-2j * theta)) - 1
    expected = torch.exp(torch.tensor(rate * 0.5, dtype=torch.complex128))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_lorenz96_commutes_with_turning_the_ring() -> None:
    step = make_lorenz96_step(Lorenz96Config(num_sites=9), substeps=20, dtype=torch.float64)
    start = ring(2, 9)
    assert torch.equal(step(start.roll(4, dims=-1)), step(start).roll(4, dims=-1))


def test_steps_are_fourth_order_and_leave_their_input_alone() -> None:
    for config_type, make, start in (
        (Lorenz63Config, make_lorenz63_step, torch.tensor([[1.0, 3.0, 15.0]], dtype=torch.float64)),
        (Lorenz96Config, make_lorenz96_step, ring(1, 40)),
    ):
        before = start.clone()
        results = [make(config_type(dt=0.4 / n), substeps=n, dtype=torch.float64)(start) for n in (40, 80, 640)]
        errors = [float((result - results[-1]).norm()) for result in results[:-1]]
        assert 3.8 < math.log2(errors[0] / errors[1]) < 4.2
        assert torch.equal(start, before)


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="dt must be positive, got 0"):
        Lorenz63Config(dt=0.0)
    with pytest.raises(ValueError, match="dt must be positive, got -1"):
        Lorenz96Config(dt=-1.0)
    with pytest.raises(ValueError, match="num_sites must be at least 4, got 3"):
        Lorenz96Config(num_sites=3)
    with pytest.raises(ValueError, match=r"shape \(B, \*\(3,\)\), got \(3,\)"):
        make_lorenz63_step(Lorenz63Config())(torch.zeros(3))
    with pytest.raises(ValueError, match=r"got \(1, 40\)"):
        make_lorenz96_step(Lorenz96Config())(torch.zeros(1, 40))
    with pytest.raises(ValueError, match=r"torch.float32 on cpu, got torch.float64 on cpu"):
        make_lorenz96_step(Lorenz96Config())(torch.zeros(1, 1, 40, dtype=torch.float64))

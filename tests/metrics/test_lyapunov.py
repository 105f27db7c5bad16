"""Truths about Lyapunov exponents: linear maps, Lorenz, Kuramoto-Sivashinsky, Kolmogorov flow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ergoflow.metrics import lyapunov_exponents
from ergoflow.solvers import kolmogorov, kuramoto, lorenz


def spin_up(step, state: torch.Tensor, count: int) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(count):
            state = step(state)
    return state


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
def test_linear_map_returns_the_logarithms_of_its_eigenvalues(method):
    generator = torch.Generator().manual_seed(3)
    basis = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    eigenvalues = torch.tensor([1.02, 0.9, 0.7, 0.2], dtype=torch.float64)
    matrix = basis @ torch.diag(eigenvalues) @ torch.linalg.inv(basis)
    state = 1e-3 * torch.randn(2, 1, 4, generator=generator, dtype=torch.float64)
    exponents = lyapunov_exponents(
        lambda z: z @ matrix.T, state, 4, num_steps=200, warmup=300, step_time=0.5, method=method
    )
    assert exponents == pytest.approx(np.log(eigenvalues.numpy()) / 0.5, abs=1e-6)


def test_the_differential_is_recorded_once_and_called_once_a_step():
    """What `record` sees maps [z, q] to [f(z), f'(z) q], and what it returns is used in its place."""
    seen, calls = [], []

    def record(differential):
        seen.append(differential)

        def call(pair):
            calls.append(pair)
            value, pushed = differential(pair)
            assert torch.equal(value, pair[0] ** 2)
            assert torch.equal(pushed, 2 * pair[0] * pair[1])
            return torch.stack((value, 3 * pushed))

        return call

    state = torch.ones(2, 1, dtype=torch.float64)
    exponents = lyapunov_exponents(lambda z: z**2, state, 1, num_steps=5, warmup=2, record=record)
    assert exponents == pytest.approx([math.log(3 * 2)])
    assert (len(seen), len(calls)) == (1, 7)


def test_exponents_of_the_doubling_cat_map_are_plus_and_minus_the_golden_rate():
    cat = torch.tensor([[2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    exponents = lyapunov_exponents(
        lambda z: (z @ cat.T) % 1.0, torch.tensor([[0.3, 0.7]], dtype=torch.float64), 2, num_steps=50
    )
    golden = 2 * math.log((1 + math.sqrt(5)) / 2)
    assert exponents == pytest.approx([golden, -golden], rel=1e-10)


@pytest.fixture(scope="module")
def lorenz63() -> tuple:
    step = lorenz.make_lorenz63_step(lorenz.Lorenz63Config(), dtype=torch.float64)
    draw = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return step, spin_up(step, draw + torch.tensor([0.0, 0.0, 25.0], dtype=torch.float64), 1000)


def test_lorenz63_largest_exponent_and_the_sum_of_all(lorenz63):
    step, state = lorenz63
    exponents = lyapunov_exponents(
        step, state, 3, num_steps=2000, warmup=300, step_time=0.01, method="finite_difference"
    )
    assert exponents[0] == pytest.approx(0.906, abs=0.03)
    assert exponents[1] == pytest.approx(0.0, abs=0.02)  # along the flow
    assert exponents.sum() == pytest.approx(-(10 + 1 + 8 / 3), abs=1e-3)  # the divergence of the vector field


def test_forward_derivatives_and_finite_differences_agree(lorenz63):
    step, state = lorenz63
    exact, differences = (
        lyapunov_exponents(step, state, 3, num_steps=60, warmup=20, step_time=0.01, method=method)
        for method in ("jvp", "finite_difference")
    )
    assert exact.sum() == pytest.approx(-(10 + 1 + 8 / 3), abs=1e-3)
    assert differences == pytest.approx(exact, abs=1e-5)


def test_forward_derivatives_pass_through_the_transforms_of_the_solvers():
    config = kolmogorov.KolmogorovConfig(grid=(16, 18), length=(5.0, 7.0), viscosity=0.05, dt=0.01)
    step = kolmogorov.make_step(config, substeps=2, dtype=torch.float64)
    state = kolmogorov.initial_vorticity(config, 2, seed=0, dtype=torch.float64)
    exact, differences = (
        lyapunov_exponents(step, state, 3, num_steps=5, warmup=2, step_time=0.02, method=method)
        for method in ("jvp", "finite_difference")
    )
    assert differences == pytest.approx(exact, abs=1e-6)


def test_single_precision_suffices(lorenz63):
    step = lorenz.make_lorenz63_step(lorenz.Lorenz63Config())
    exponents = lyapunov_exponents(
        step,
        lorenz63[1].float(),
        3,
        num_steps=2000,
        warmup=300,
        step_time=0.01,
        method="finite_difference",
    )
    assert exponents[0] == pytest.approx(0.906, abs=0.03)
    assert exponents.sum() == pytest.approx(-(10 + 1 + 8 / 3), abs=0.03)


def test_lorenz96_largest_exponent():
    step = lorenz.make_lorenz96_step(lorenz.Lorenz96Config(), substeps=2)
    draw = torch.randn(16, 1, 40, generator=torch.Generator().manual_seed(1))
    state = spin_up(step, 8 + draw, 500)
    exponents = lyapunov_exponents(
        step, state, 1, num_steps=1500, warmup=200, step_time=0.02, method="finite_difference"
    )
    assert exponents[0] == pytest.approx(1.685, abs=0.05)


def test_kuramoto_sivashinsky_largest_exponent():
    config = kuramoto.KuramotoConfig(dt=0.1)
    step = kuramoto.make_step(config, substeps=5)
    state = spin_up(step, kuramoto.initial_state(config, 32, seed=0), 400)
    exponents = lyapunov_exponents(step, state, 1, num_steps=800, warmup=200, step_time=0.5, method="finite_difference")
    assert exponents[0] == pytest.approx(0.0465, abs=0.006)


@pytest.mark.slow
def test_kolmogorov_flow_largest_exponent():
    config = kolmogorov.KolmogorovConfig(grid=(64, 64), dt=0.01)
    step = kolmogorov.make_step(config, substeps=10)
    state = spin_up(step, kolmogorov.initial_vorticity(config, 6, seed=0), 400)
    exponents = lyapunov_exponents(step, state, 1, num_steps=300, warmup=60, step_time=0.1, method="finite_difference")
    assert 0.5 < exponents[0] < 0.8


def test_the_first_tangents_come_from_the_generator_and_are_forgotten(lorenz63):
    step, state = lorenz63
    first, second = (
        lyapunov_exponents(
            step,
            state[:2],
            1,
            num_steps=20,
            warmup=2000,
            generator=torch.Generator().manual_seed(seed),
            method="finite_difference",
        )
        for seed in (1, 2)
    )
    assert first == pytest.approx(second, abs=1e-5)


def test_weights_of_a_learned_step_gather_no_gradients_and_the_state_is_left_alone():
    layer = torch.nn.Linear(3, 3)
    state = torch.ones(1, 3)
    lyapunov_exponents(layer, state, 2, num_steps=5, warmup=0)
    assert layer.weight.grad is None
    assert torch.equal(state, torch.ones(1, 3))


def test_a_step_that_blows_up_has_infinite_exponents():
    assert np.isinf(lyapunov_exponents(lambda z: 1e3 * z**2 + 1, torch.ones(1, 1, 4), 2, num_steps=50)).all()


def test_each_entry_has_exponents_of_its_own_and_the_mean_is_theirs():
    rates = torch.tensor([[0.5, 2.0], [3.0, 0.25]], dtype=torch.float64)  # (B, 2): entries of a diagonal map
    state = torch.ones(2, 2, dtype=torch.float64)

    def step(z: torch.Tensor) -> torch.Tensor:
        # The batch may be repeated for several tangents: an entry is known by the ratio it keeps.
        first = (z[:, :1] > 0).to(z)
        return z * (first * rates[0] + (1 - first) * rates[1])

    state[1] = -1.0
    each = lyapunov_exponents(step, state, 2, num_steps=40, warmup=60, each=True)
    assert each == pytest.approx(np.log([[2.0, 0.5], [3.0, 0.25]]), abs=1e-9)
    assert lyapunov_exponents(step, state, 2, num_steps=40, warmup=60) == pytest.approx(each.mean(0), abs=1e-9)


def test_an_entry_that_blows_up_leaves_the_others_alone():
    state = torch.tensor([[1.0], [1e-3]], dtype=torch.float64)
    each = lyapunov_exponents(lambda z: 0.5 * z + z**3, state, 1, num_steps=60, warmup=0, each=True)
    assert np.isinf(each[0]).all()
    assert each[1] == pytest.approx(math.log(0.5), abs=1e-5)


def test_bad_input_raises_one_line():
    state = torch.ones(2, 1, 4)
    for call in (
        lambda: lyapunov_exponents(torch.sin, torch.ones(4), 1),
        lambda: lyapunov_exponents(torch.sin, torch.ones(2, 4, dtype=torch.int64), 1),
        lambda: lyapunov_exponents(torch.sin, torch.nan * state, 1),
        lambda: lyapunov_exponents(torch.sin, state, 5),
        lambda: lyapunov_exponents(torch.sin, state, 0),
        lambda: lyapunov_exponents(torch.sin, state, 1, num_steps=0),
        lambda: lyapunov_exponents(torch.sin, state, 1, step_time=0.0),
        lambda: lyapunov_exponents(torch.sin, state, 1, method="adjoint"),
    ):
        with pytest.raises(ValueError, match=r"got .*; ") as caught:
            call()
        assert "\n" not in str(caught.value)

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.imex import crank_nicolson_rk4, crank_nicolson_rk4_diagonal, diagonal_stages, rk4
from ergoflow.numerics.trajectory import Step, repeat


@dataclass(frozen=True)
class Logistic:
    """u' = u − u² + rate·u, the first two terms explicit; a logistic curve of growth 1 + rate."""

    rate: float

    def explicit_terms(self, state: Tensor) -> Tensor:
        return state - state**2

    def implicit_terms(self, state: Tensor) -> Tensor:
        return self.rate * state

    def implicit_solve(self, state: Tensor, dt: float) -> Tensor:
        return state / (1 - dt * self.rate)

    def exact(self, start: float, time: float) -> float:
        growth = 1 + self.rate
        return growth * start / (start + (growth - start) * math.exp(-growth * time))


def error(step: Step, steps: int, exact: float) -> float:
    return abs(float(repeat(step, steps)(torch.tensor([0.1], dtype=torch.float64))) - exact)


def order(errors: list[float]) -> float:
    return math.log2(errors[-2] / errors[-1])


def test_cnrk4_is_fourth_order_in_explicit_terms() -> None:
    equation = Logistic(0.0)
    errors = [error(crank_nicolson_rk4(equation, 2.0 / n), n, equation.exact(0.1, 2.0)) for n in (20, 40)]
    assert 3.8 < order(errors) < 4.2
    assert errors[-1] < 1e-8


def test_cnrk4_is_second_order_in_implicit_terms() -> None:
    equation = Logistic(-0.5)
    errors = [error(crank_nicolson_rk4(equation, 2.0 / n), n, equation.exact(0.1, 2.0)) for n in (40, 80)]
    assert 1.9 < order(errors) < 2.1


def test_rk4_is_fourth_order() -> None:
    equation = Logistic(0.0)
    errors = [error(rk4(equation.explicit_terms, 2.0 / n), n, equation.exact(0.1, 2.0)) for n in (20, 40)]
    assert 3.8 < order(errors) < 4.2
    assert errors[-1] < 1e-8


def test_cnrk4_damps_a_stiff_term_at_a_step_far_beyond_the_explicit_limit() -> None:
    equation = Logistic(-1e4)
    assert error(crank_nicolson_rk4(equation, 0.05), 200, 0.0) < 0.1


def test_crank_nicolson_multiplies_a_linear_mode_by_the_product_of_its_stage_factors() -> None:
    rate, dt = -3.0, 0.1

    @dataclass(frozen=True)
    class Decay(Logistic):
        def explicit_terms(self, state: Tensor) -> Tensor:
            return torch.zeros_like(state)

    stages = (0.0, 0.1496590219993, 0.3704009573644, 0.6222557631345, 0.9582821306748, 1.0)
    factor = 1.0
    for start, end in pairwise(stages):
        half = (end - start) * dt / 2
        factor *= (1 + half * rate) / (1 - half * rate)
    result = crank_nicolson_rk4(Decay(rate), dt)(torch.ones(1, dtype=torch.float64))
    assert float(result) == pytest.approx(factor, rel=1e-15)


def test_diagonal_form_is_the_same_scheme() -> None:
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(3, 1, 7, dtype=torch.float64, generator=generator)
    rates = -10 * torch.rand(7, dtype=torch.float64, generator=generator)

    @dataclass(frozen=True)
    class Many(Logistic):
        def implicit_terms(self, state: Tensor) -> Tensor:
            return rates * state

        def implicit_solve(self, state: Tensor, dt: float) -> Tensor:
            return state / (1 - dt * rates)

    equation = Many(0.0)
    before = state.clone()
    slow = repeat(crank_nicolson_rk4(equation, 0.05), 5)(state)
    fast = repeat(crank_nicolson_rk4_diagonal(equation.explicit_terms, rates, 0.05), 5)(state)
    torch.testing.assert_close(fast, slow, rtol=1e-14, atol=1e-15)
    assert torch.equal(state, before)


def test_stage_factors_are_rounded_once_from_double_precision() -> None:
    rates = -(10 ** torch.linspace(-3, 4, 50, dtype=torch.float64))
    for single, double in zip(diagonal_stages(rates.float(), 0.01), diagonal_stages(rates, 0.01), strict=True):
        assert single.memory == double.memory
        assert single.keep.dtype == single.gain.dtype == torch.float32
        # The rates themselves were rounded; what is left of that is a relative 6e-8 of 1 − keep and of gain.
        torch.testing.assert_close(single.keep.double(), double.keep, rtol=2e-7, atol=1e-7)
        torch.testing.assert_close(single.gain.double(), double.gain, rtol=2e-7, atol=0)


def test_steps_do_not_change_their_input() -> None:
    equation = Logistic(-1.0)
    rates = torch.full((4,), -1.0)
    for step in (
        crank_nicolson_rk4(equation, 0.1),
        crank_nicolson_rk4_diagonal(equation.explicit_terms, rates, 0.1),
        rk4(equation.explicit_terms, 0.1),
    ):
        state = torch.full((4,), 0.5)
        assert not torch.equal(step(state), state)
        assert torch.equal(state, torch.full((4,), 0.5))


@pytest.mark.parametrize("dt", [0.0, -0.1, float("nan")])
def test_schemes_refuse_a_step_size_that_is_not_positive(dt: float) -> None:
    equation = Logistic(0.0)
    for make in (
        lambda: crank_nicolson_rk4(equation, dt),
        lambda: crank_nicolson_rk4_diagonal(equation.explicit_terms, torch.zeros(1), dt),
        lambda: rk4(equation.explicit_terms, dt),
    ):
        with pytest.raises(ValueError, match="dt must be positive"):
            make()

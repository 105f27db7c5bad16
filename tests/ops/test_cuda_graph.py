"""Recording a Step: who is recorded, and that a replay keeps the contract of a Step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import ergoflow
from ergoflow.ops.cuda_graph import graphed, is_differentiated


def double_and_add(state: Tensor) -> Tensor:
    return 2 * state + 1


def test_on_the_cpu_the_step_itself_is_called() -> None:
    calls = []

    def counted(state: Tensor) -> Tensor:
        calls.append(state)
        return double_and_add(state)

    state = torch.arange(3.0)
    step = graphed(counted)
    assert step(state).tolist() == [1, 3, 5]
    assert step(state).tolist() == [1, 3, 5]
    assert len(calls) == 2
    assert calls[0] is state


# torch's own forward-mode rules are still scripted, and say so on first use.
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")
def test_every_kind_of_derivative_is_seen() -> None:
    state = torch.zeros(3)
    seen = []

    def look(value: Tensor) -> Tensor:
        seen.append(is_differentiated(value))
        return 2 * value

    assert not is_differentiated(state)
    torch.func.jvp(look, (state,), (state,))
    torch.func.vjp(look, state)
    with torch.no_grad():
        torch.func.jvp(look, (state,), (state,))
    assert seen == [True, True, True]
    with forward_ad.dual_level():
        assert is_differentiated(forward_ad.make_dual(state, state))
        assert not is_differentiated(state)
    state.requires_grad_()
    assert is_differentiated(state)
    with torch.no_grad():
        assert not is_differentiated(state)


@pytest.mark.gpu
def test_a_replay_neither_changes_its_input_nor_earlier_results() -> None:
    step = graphed(double_and_add)
    first = torch.arange(4.0, device="cuda")
    results = [step(first)]
    for _ in range(3):
        results.append(step(results[-1]))
    assert first.tolist() == [0, 1, 2, 3]
    assert [r[1].item() for r in results] == [3, 7, 15, 31]
    assert step(torch.ones(2, 2, device="cuda")).tolist() == [[3, 3], [3, 3]]


@pytest.mark.gpu
def test_derivatives_pass_by_the_recording() -> None:
    step = graphed(double_and_add)
    state = torch.ones(2, device="cuda")
    step(state)
    step(state.requires_grad_()).sum().backward()
    assert state.grad is not None
    assert state.grad.tolist() == [2, 2]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")
def test_a_derivative_of_a_model_is_recorded_and_right() -> None:
    """The differential of a shipped model, as `measure_exponents` records it: no warning, and what jvp itself gives."""
    model = ergoflow.load("kf64-ergoformer").to("cuda")

    def differential(pair: Tensor) -> Tensor:
        return torch.stack(torch.func.jvp(model, (pair[0],), (pair[1],)))

    pairs = torch.randn(3, 2, 4, 1, 64, 64, device="cuda")
    recorded = graphed(differential)
    with torch.no_grad():
        for pair in pairs:
            torch.testing.assert_close(recorded(pair), differential(pair), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_step_that_asks_for_a_number_is_called_as_it_is_after_one_warning() -> None:
    step = graphed(lambda state: state * float(state.max()))
    state = torch.arange(3.0, device="cuda")
    with pytest.warns(UserWarning, match="kernel by kernel"):
        torch.testing.assert_close(step(state), 2 * state)
    torch.testing.assert_close(step(state), 2 * state)

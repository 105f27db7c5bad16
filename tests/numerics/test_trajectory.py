from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.trajectory import SimulationDiverged, checked, repeat, rollout


def increment(state: Tensor) -> Tensor:
    return state + 1


def values(states: object) -> list[float]:
    return [float(state) for state in states]  # type: ignore[attr-defined]


def test_rollout_yields_the_state_after_each_step() -> None:
    assert values(rollout(increment, torch.zeros(1), 4)) == [1, 2, 3, 4]


def test_rollout_can_begin_with_the_initial_state() -> None:
    assert values(rollout(increment, torch.zeros(1), 2, include_initial=True)) == [0, 1, 2]
    assert values(rollout(increment, torch.zeros(1), 0, include_initial=True)) == [0]
    assert values(rollout(increment, torch.zeros(1), 0)) == []


def test_rollout_yields_every_nth_of_num_steps() -> None:
    assert values(rollout(increment, torch.zeros(1), 6, every=3)) == [3, 6]
    assert values(rollout(increment, torch.zeros(1), 7, every=3, include_initial=True)) == [0, 3, 6]


def test_rollout_takes_no_step_that_nobody_asked_for() -> None:
    calls = []

    def counted(state: Tensor) -> Tensor:
        calls.append(1)
        return state + 1

    states = rollout(counted, torch.zeros(1), 7, every=3)
    assert len(calls) == 0
    next(states)
    assert len(calls) == 3
    list(states)
    assert len(calls) == 6


def test_rollout_leaves_the_initial_state_and_the_yielded_states_alone() -> None:
    start = torch.zeros(1)
    states = list(rollout(increment, start, 3, include_initial=True))
    assert values(states) == [0, 1, 2, 3]
    assert float(start) == 0


def test_rollout_lets_gradients_through() -> None:
    start = torch.ones(1, requires_grad=True)
    *_, last = rollout(lambda state: 3 * state, start, 4)
    last.backward()
    assert float(start.grad) == 81


@pytest.mark.parametrize(("num_steps", "every", "word"), [(-1, 1, "num_steps"), (3, 0, "every")])
def test_rollout_refuses_bad_counts_before_the_first_step(num_steps: int, every: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        rollout(increment, torch.zeros(1), num_steps, every=every)


def test_repeat_applies_the_step_count_times() -> None:
    assert float(repeat(increment, 5)(torch.zeros(1))) == 5
    with pytest.raises(ValueError, match="at least 1, got 0"):
        repeat(increment, 0)


def doubled_until_infinite(state: Tensor) -> Tensor:
    return state * 2.0**40


@pytest.mark.parametrize(("every", "seen_at"), [(1, 4), (3, 6)])
def test_checked_raises_with_step_and_time_at_the_first_check_after_divergence(every: int, seen_at: int) -> None:
    # float32 ends at 2^128: the fourth product with 2^40 is infinite.
    step = checked(doubled_until_infinite, dt=0.25, every=every)
    with pytest.raises(SimulationDiverged, match=rf"step {seen_at} \(time {seen_at * 0.25:g}\)") as caught:
        list(rollout(step, torch.ones(2, 1, 4), 10))
    assert (caught.value.step, caught.value.time) == (seen_at, seen_at * 0.25)


def test_checked_sees_one_bad_number_among_many() -> None:
    def poison(state: Tensor) -> Tensor:
        bad = state.clone()
        bad[1, 0, 2] = float("nan")
        return bad

    with pytest.raises(SimulationDiverged):
        checked(poison, dt=1.0)(torch.zeros(3, 1, 4))


def test_checked_returns_what_the_step_returns() -> None:
    assert float(checked(increment, dt=1.0)(torch.zeros(1))) == 1


def test_divergence_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(SimulationDiverged(step=7, time=0.5)))
    assert (error.step, error.time) == (7, 0.5)
    assert isinstance(error, RuntimeError)

"""What a Step is, and how one is applied many times.

Solvers and trained models are both Steps, so the one `rollout` below generates data, validates and evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]
"""Any map of one state to the next, both of shape (B, C, *grid). A Step does not change its input."""


class SimulationDiverged(RuntimeError):  # noqa: N818  (what happened, not whose fault it is)
    """A solver left the finite numbers; carries the `step` and the `time` at which this was seen."""

    def __init__(self, *, step: int, time: float) -> None:
        """Keep both numbers as attributes and say them in one line."""
        super().__init__(
            f"state must stay finite, got NaN or infinity at step {step} (time {time:g}); choose a smaller dt"
        )
        self.step = step
        self.time = time

    def __reduce__(self) -> tuple[Callable[..., SimulationDiverged], tuple[int, float]]:
        """Allow the error to travel between processes (keyword-only arguments defeat the default)."""
        return _rebuild_diverged, (self.step, self.time)


def rollout(
    step: Step, state: Tensor, num_steps: int, *, every: int = 1, include_initial: bool = False
) -> Iterator[Tensor]:
    """Yield the state after steps every, 2·every, ... up to num_steps, lazily.

    That is num_steps // every states, one more with `include_initial`, which yields `state` itself first.
    Nothing is stored and gradients are left to the caller (`torch.no_grad()` around the loop).
    """
    if num_steps < 0:
        raise ValueError(f"num_steps must not be negative, got {num_steps}; choose 0 or more")
    _check_positive("every", every)
    return _roll(step, state, num_steps // every, every, include_initial)


def repeat(step: Step, count: int) -> Step:
    """Return the Step that applies `step` `count` times."""
    _check_positive("count", count)

    def repeated(state: Tensor) -> Tensor:
        for _ in range(count):
            state = step(state)
        return state

    return repeated


def checked(step: Step, *, dt: float, every: int = 1) -> Step:
    """Return `step` with a finite-number check after each `every`-th call; failing it raises
    SimulationDiverged.

    The returned Step counts its own calls from zero, so wrap anew for each trajectory. `dt` is the time that
    one call of `step` advances. The check waits for the device: on a GPU choose `every` well above 1.
    """
    _check_positive("every", every)
    calls = 0

    def checked_step(state: Tensor) -> Tensor:
        nonlocal calls
        state = step(state)
        calls += 1
        if calls % every == 0 and not bool(torch.isfinite(state).all()):
            raise SimulationDiverged(step=calls, time=calls * dt)
        return state

    return checked_step


def _roll(step: Step, state: Tensor, count: int, every: int, include_initial: bool) -> Iterator[Tensor]:
    if include_initial:
        yield state
    for _ in range(count):
        for _ in range(every):
            state = step(state)
        yield state


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}; choose a positive whole number")


def _rebuild_diverged(step: int, time: float) -> SimulationDiverged:
    return SimulationDiverged(step=step, time=time)

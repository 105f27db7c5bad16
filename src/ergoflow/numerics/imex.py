"""Time schemes: an equation and a step size give a Step.

An implicit-explicit equation reads u_t = N(u) + L u: N is taken explicitly, the stiff linear L by
Crank–Nicolson. An equation never knows its scheme, and a scheme never knows its equation.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ergoflow.numerics.trajectory import Step

# Carpenter & Kennedy (1994), "Fourth-order 2N-storage Runge-Kutta schemes", NASA TM-109112, the 5-stage
# scheme: the time of each stage in units of dt, the memory of the last tendency, and its weight.
STAGE_TIMES = (0.0, 0.1496590219993, 0.3704009573644, 0.6222557631345, 0.9582821306748, 1.0)
MEMORY = (0.0, -0.4178904745, -1.192151694643, -1.697784692471, -1.514183444257)
WEIGHTS = (0.1496590219993, 0.3792103129999, 0.8229550293869, 0.6994504559488, 0.1530572479681)


class Equation(Protocol):
    """A tendency u_t = N(u) + L u with a linear L that can be inverted."""

    def explicit_terms(self, state: Tensor) -> Tensor:
        """Return N(u)."""
        ...

    def implicit_terms(self, state: Tensor) -> Tensor:
        """Return L u."""
        ...

    def implicit_solve(self, state: Tensor, dt: float) -> Tensor:
        """Return (1 − dt·L)⁻¹ u."""
        ...


def crank_nicolson_rk4(equation: Equation, dt: float) -> Step:
    """Return one step of Crank–Nicolson for L inside the low-storage RK4 of Carpenter & Kennedy for N.

    In each stage, with half of the stage's length μ = dt/2·(α[k+1] − α[k]):
        h ← N(u) + β[k]·h,    u ← (1 − μL)⁻¹ (u + γ[k]·dt·h + μ·L u).
    Fourth order in N alone, second order once L acts.
    """
    _check_step_size(dt)

    def step(state: Tensor) -> Tensor:
        memory = torch.zeros_like(state)
        for half, beta, gamma in zip(_half_stages(dt), MEMORY, WEIGHTS, strict=True):
            memory = equation.explicit_terms(state) + beta * memory
            state = equation.implicit_solve(state + gamma * dt * memory + half * equation.implicit_terms(state), half)
        return state

    return step


class DiagonalStage(NamedTuple):
    """One stage of `crank_nicolson_rk4` for a diagonal L: h ← N(u) + memory·h, then u ← keep·u + gain·h."""

    memory: float
    keep: Tensor
    gain: Tensor


def diagonal_stages(linear: Tensor, dt: float) -> tuple[DiagonalStage, ...]:
    """Return the five stages, with keep = (1 + μL)/(1 − μL) and gain = γ·dt/(1 − μL) worked out in double precision.

    `linear` is the diagonal of L; the factors have its dtype.
    """
    _check_step_size(dt)
    exact = linear.to(torch.complex128 if linear.is_complex() else torch.float64)
    stages = []
    for half, beta, gamma in zip(_half_stages(dt), MEMORY, WEIGHTS, strict=True):
        inverse = 1 / (1 - half * exact)
        stages.append(DiagonalStage(beta, ((1 + half * exact) * inverse).to(linear), (gamma * dt * inverse).to(linear)))
    return tuple(stages)


def crank_nicolson_rk4_diagonal(explicit_terms: Callable[[Tensor], Tensor], linear: Tensor, dt: float) -> Step:
    """Return the step of `crank_nicolson_rk4` for a diagonal L, with every factor worked out beforehand.

    A stage is then u ← keep·u + gain·h, two passes over memory instead of five. `linear` is the diagonal of L,
    real or of the state's dtype, broadcastable to the state; `explicit_terms` must return a fresh tensor, which
    this step overwrites.
    """
    first, *others = diagonal_stages(linear, dt)

    def step(state: Tensor) -> Tensor:
        memory = explicit_terms(state)
        state = (first.keep * state).addcmul_(first.gain, memory)
        for stage in others:
            memory = explicit_terms(state).add_(memory, alpha=stage.memory)
            state = state.mul_(stage.keep).addcmul_(stage.gain, memory)
        return state

    return step


def rk4(tendency: Callable[[Tensor], Tensor], dt: float) -> Step:
    """Return one step of the classic fourth-order Runge–Kutta scheme for u_t = tendency(u)."""
    _check_step_size(dt)

    def step(state: Tensor) -> Tensor:
        k1 = tendency(state)
        k2 = tendency(state + dt / 2 * k1)
        k3 = tendency(state + dt / 2 * k2)
        k4 = tendency(state + dt * k3)
        return state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return step


def _half_stages(dt: float) -> list[float]:
    return [dt / 2 * (end - start) for start, end in pairwise(STAGE_TIMES)]


def _check_step_size(dt: float) -> None:
    if not dt > 0:
        raise ValueError(f"dt must be positive, got {dt}; choose a step size above 0")

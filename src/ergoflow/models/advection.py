"""A vorticity carried along by its own velocity for one step: the part of the dynamics that is known from the state.

In two dimensions an inviscid flow carries its vorticity with it, ω(x, t + T) = ω(X(x), t), X the place from which the
flow comes to x. It does not compress, so ω ↦ ω∘X keeps every norm: this is the Koopman operator of the flow map, which
is unitary, and depends on the state. What viscosity, drag and force add is left to a net.

X is followed backwards through a velocity that changes meanwhile. Half a step comes first, with the velocity u₀ of ω
and then, once more, with the mean of u₀ and the velocity at its end; it gives u_½, and with it u₁ ≈ 2u_½ − u₀. Then

    X(x) = x − T (k₁ + 2k₂ + 2k₃ + k₄)/6,
    k₁ = u₁(x),   k₂ = u_½(x − Tk₁/2),   k₃ = u_½(x − Tk₂/2),   k₄ = u₀(x − Tk₃).

The error of one step is O(T³), and that of reading between grid points of fourth order (`ergoflow.ops.interpolate`):
the result is read off ω at once, not half by half, since each reading smooths it a little.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ergoflow.models.velocity import VELOCITY_GAIN, scaled_velocity
from ergoflow.numerics.fourier import TWO_PI
from ergoflow.ops.interpolate import interpolate


@dataclass(frozen=True)
class Pace:
    """How far one step of a data set goes, in the units of normalised states. The default is a step of no time."""

    turn: float = 0.0
    """The step's time multiplied by a unit of vorticity: radians."""
    change: float | None = 1.0
    """The spread of a step's change in units of that of the state; None for a model that predicts states."""


STILL = Pace()


def carried(vorticity: Tensor, turn: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ω∘X (B, 1, X, Y), and u₀ and u_½ as `scaled_velocity` returns them, (B, 2, X, Y) each; `turn` is T."""
    grid = vorticity.shape[-2:]
    # Grid points in the time T per unit of scaled velocity: the longer side of the box is 2π.
    reach = turn * max(grid) / (TWO_PI * VELOCITY_GAIN)
    first = scaled_velocity(vorticity)
    omega = vorticity.to(first.dtype)
    half = scaled_velocity(interpolate(omega, _midpoint(first, first, reach / 2)))
    half = scaled_velocity(interpolate(omega, _midpoint(half, first, reach / 2)))
    return interpolate(omega, _runge_kutta(2 * half - first, half, first, reach)), first, half


def _midpoint(end: Tensor, start: Tensor, time: float) -> Tensor:
    """Return X − x, (B, 2, X, Y) in grid points, of a velocity that goes from `start` to `end` in a time."""
    return -time * interpolate((start + end) / 2, -time / 2 * end)


def _runge_kutta(end: Tensor, middle: Tensor, start: Tensor, time: float) -> Tensor:
    """Return X − x of a velocity known at three times, by the classical rule."""
    second = interpolate(middle, -time / 2 * end)
    third = interpolate(middle, -time / 2 * second)
    fourth = interpolate(start, -time * third)
    return -time / 6 * (end + 2 * second + 2 * third + fourth)

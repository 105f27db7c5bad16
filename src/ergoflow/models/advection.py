"""A vorticity carried along by its own velocity for one step: the part of the dynamics that is known from the state.

In two dimensions an inviscid flow carries its vorticity with it, ω(x, t + T) = ω(X(x), t), X the place from which the
flow comes to x. It does not compress, so ω ↦ ω∘X keeps every norm: this is the Koopman operator of the flow map, which
is unitary, and depends on the state. What viscosity, drag and force add is left to a net.

X is followed backwards by the midpoint rule, first with the velocity u₀ of ω alone, then with one that goes from u₀ to
the velocity u₁ of the first guess ω₁ = ω∘X₁ within the step:

    X₁(x) = x − T u₀(x − T u₀(x)/2),     X(x) = x − T ū(x − T u₁(x)/2),     ū = (u₀ + u₁)/2.

The error of one step is O(T³), and that of reading between grid points of fourth order (`ergoflow.ops.interpolate`).
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
    """Return ω∘X (B, 1, X, Y), and u₀ and u₁ as `scaled_velocity` returns them, (B, 2, X, Y) each; `turn` is T."""
    grid = vorticity.shape[-2:]
    # Grid points in the time T per unit of scaled velocity: the longer side of the box is 2π.
    reach = turn * max(grid) / (TWO_PI * VELOCITY_GAIN)
    first = scaled_velocity(vorticity)
    omega = vorticity.to(first.dtype)
    guess = interpolate(omega, -reach * interpolate(first, -reach / 2 * first))
    second = scaled_velocity(guess)
    return interpolate(omega, -reach * interpolate((first + second) / 2, -reach / 2 * second)), first, second

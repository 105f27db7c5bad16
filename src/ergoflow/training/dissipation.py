"""Dissipativity as in MNO (Li et al. 2022, "Learning chaotic dynamics in dissipative systems").

Far from the attractor a dissipative system contracts, and no data say so. Two remedies, both in normalised units
and for any model:

* `dissipativity_loss` asks for it: on random states of a spherical shell around the data the step should be z -> s z;
* `DissipativeStep` enforces it: beyond the shell the step *is* z -> s z, whatever the network says.

Norms are root mean squares over channels and grid (the L2 norm of function space, unit measure), so that a radius
does not depend on the resolution: normalised states have norms near 1. Radii are in units of the largest norm of the
training data. (The authors' script draws states of Euclidean norm 156.25 S to 681.25 S on S x S points; the ratio of
its radii, 4.36, is kept in `objective.dissipativity_shell`.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ergoflow.models.layers import at_least_float32
from ergoflow.training.stepper import NormalizedStep

# The ratio of the outer to the inner radius in the authors' script for the Kolmogorov flow.
OUTER_RADIUS = 4.36
# Inside these ends the transition function is 0 or 1 to the last bit also in float64 (exp of 1000).
TRANSITION_END = 1e-3


def state_norm(state: Tensor) -> Tensor:
    """Root mean square of each state (B, C, *grid) over channels and grid, (B,)."""
    wide = at_least_float32(state).flatten(1)
    return torch.linalg.vector_norm(wide, dim=1) / math.sqrt(wide.shape[1])


def shell_samples(like: Tensor, inner: float, outer: float, *, generator: torch.Generator) -> Tensor:
    """Random states of the shape (B, C, *grid) of `like`, with norms between `inner` and `outer`.

    As the authors draw them: the direction is uniform on the sphere of state space (white noise, normalised), the
    norm uniform in [inner, outer]. Drawn on the generator's device.
    """
    noise = torch.randn(like.shape, generator=generator, device=generator.device, dtype=like.dtype)
    share = torch.rand(len(like), generator=generator, device=generator.device, dtype=like.dtype)
    gain = (inner + (outer - inner) * share) / state_norm(noise)
    return (gain.reshape(-1, *(1,) * (like.ndim - 1)) * noise).to(like.device)


def dissipativity_loss(step: NormalizedStep, states: Tensor, *, scale: float) -> Tensor:
    """Mean squared distance of step(z) from s z over all entries of states z (B, C, *grid), as in the authors' code."""
    return (at_least_float32(step(states)) - scale * at_least_float32(states)).square().mean()


def transition(norm: Tensor, inner: float, outer: float) -> Tensor:
    """A smooth partition of unity rho: 1 up to `inner`, 0 from `outer` on, smooth to all orders.

    rho = 1 / (1 + exp((2t - 1) / (t (1 - t)))), t = (norm - inner) / (outer - inner): the authors' logistic function,
    its argument stretched so that both limits are reached. It is flat at its ends: one tenth into the transition it
    has lost 1.4e-4.
    """
    t = ((norm - inner) / (outer - inner)).clamp(TRANSITION_END, 1 - TRANSITION_END)
    return torch.sigmoid((1 - 2 * t) / (t * (1 - t)))


class DissipativeStep(nn.Module):
    """A normalised step made dissipative: z' = rho(|z|) step(z) + (1 - rho(|z|)) s z, state by state.

    rho is `transition` from `radius` to `outer * radius`. So z' is step(z) to the last bit where |z| <= radius, and
    s z where |z| >= outer * radius, however large z is and whatever the network answers there, infinities included.
    Every orbit therefore enters the ball of `outer * radius` and, if the step is bounded on that ball, stays bounded
    for ever.
    """

    def __init__(self, step: NormalizedStep, radius: float, *, outer: float = OUTER_RADIUS, scale: float = 0.5) -> None:
        super().__init__()
        if not radius > 0:
            raise ValueError(f"radius must be positive, got {radius}; take the largest norm of the training states")
        if not outer > 1:
            raise ValueError(f"outer must exceed 1, got {outer}; the authors' is {OUTER_RADIUS}")
        if not 0 <= scale < 1:
            raise ValueError(f"scale must be in [0, 1) to contract, got {scale}; the authors' is 0.5")
        self.step = step
        self.radius, self.outer, self.scale = radius, outer, scale

    @property
    def model(self) -> nn.Module:
        """The model inside the step."""
        return self.step.model

    def forward(self, state: Tensor) -> Tensor:
        """z' of shape (B, C, *grid)."""
        rho = transition(state_norm(state), self.radius, self.outer * self.radius).to(state.dtype)
        rho = rho.reshape(-1, *(1,) * (state.ndim - 1))
        contracted = self.scale * state
        # Chosen, not multiplied by zero: an overflowing network would turn 0 * inf into nan.
        return torch.where(rho > 0, rho * self.step(state) + (1 - rho) * contracted, contracted)

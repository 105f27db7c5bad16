"""Axial transport: the features are moved along each axis by a norm-preserving map that they choose themselves.

With K the kernel of an axis and head (`ergoflow.models.axial`), A = (K − Kᵀ)/2 is skew, the discrete twin of the
advection ½(u ∂ + ∂ u), and

    x ← E_Y exp(A_Y) E_X exp(A_X) x,     E = exp(r ∂²), r = 1e-4·exp(a) one number per head and axis.

exp(A) is orthogonal: it moves features without creating or destroying their norm, whatever the weights are. E is the
heat kernel, a contraction: exact in Fourier space on a periodic axis, in cosines (no flux) between walls. So the layer
is unitary where the physics is, contracting where it must be, and never expands; creating features is left to
the MLPs of the blocks around it. At the start the angles of A are about .1 and r = 1e-4: close to the identity.

`mode="linear"` replaces exp(A) by I + K, the same kernel with nothing enforced: the ablation of unitarity.

The exponential needs products only (a batched solve of many small systems, as Cayley's transform needs, is slow on a
GPU): a Taylor polynomial and repeated squaring of exp(A) − I, which keeps round-off relative to the departure from the
identity. A fixed number of squarings needs a bound on A: ‖A‖² ≤ max row sum of |A²|, which is needed anyway and nearly
sharp for a translation. A larger A is scaled down to MAX_ANGLE, for the shortest wave an advection by over one cell.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ergoflow.models.axial import apply_along
from ergoflow.models.layers import at_least_float32

TransportMode = Literal["linear", "unitary"]

# The largest angle, in radians, by which exp(A) turns a mode; π moves the shortest wave by one cell.
MAX_ANGLE = 4.0
# With MAX_ANGLE the polynomial of degree 8 is used up to ¼: it errs by ¼⁹/9!, after squaring by 2e-10.
SQUARINGS = 4
# Of the heat kernel: of the order of viscosity × time step of the Kolmogorov tasks, in units of (cycles per axis)².
INITIAL_RATE = 1e-4


def skew_part(kernel: Tensor) -> Tensor:
    """Return (K − Kᵀ)/2."""
    return (kernel - kernel.mT) / 2


def rotation_minus_identity(skew: Tensor) -> Tensor:
    """Return exp(A) − I for skew A (..., S, S); A whose angles may exceed MAX_ANGLE is scaled down to it."""
    square = skew @ skew
    bound = square.abs().sum(-1).amax(-1).clamp_min(MAX_ANGLE**2)  # (...), at least ‖A‖²
    scale = (MAX_ANGLE / 2**SQUARINGS / bound.sqrt())[..., None, None]
    a, a2 = skew * scale, square * scale.square()
    a3 = a @ a2
    one = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    # Σ_{n=1}^{8} aⁿ/n!, by Paterson and Stockmeyer's scheme in a³.
    inner = a3 @ (one / 720 + a / 5040 + a2 / 40320)
    outer = a3 @ (one / 6 + a / 24 + a2 / 120 + inner)
    turned = a + a2 / 2 + outer
    for _ in range(SQUARINGS):
        turned = 2 * turned + turned @ turned  # (I + Y)² − I
    return turned


def heat_kernel(size: int, rates: Tensor, *, periodic: bool) -> Tensor:
    """Return E = exp(r ∂²) for each rate r ≥ 0, (H,) → (H, S, S), symmetric with eigenvalues exp(−r n²).

    n counts cycles per axis: the Fourier modes 0, ±1, .. on a periodic axis (in Hartley's real basis cos + sin),
    the half-integers of cos(2πn(i + ½)/S) between walls. A rate means the same on every grid.
    """
    n = torch.arange(size, device=rates.device, dtype=rates.dtype)
    if periodic:
        cycles = torch.minimum(n, size - n)
        turns = torch.remainder(n[:, None] * n, size) * (2 * math.pi / size)
        basis = (turns.cos() + turns.sin()) / math.sqrt(size)  # (n, S), orthonormal rows
    else:
        cycles = n / 2
        basis = torch.cos(n[:, None] * (n + 0.5) * (math.pi / size)) * math.sqrt(2 / size)
        basis = torch.cat((basis[:1] / math.sqrt(2), basis[1:]))
    decay = torch.exp(-rates[:, None] * cycles.square())  # (H, n)
    return basis.mT @ (decay[..., None] * basis)


class Transport(nn.Module):
    """x ← E_Y exp(A_Y) E_X exp(A_X) x on features (B, *grid, D) of H heads, the kernels read off LayerNorm(x)."""

    def __init__(
        self,
        dim: int,
        kernels: nn.ModuleList,
        periodic: tuple[bool, ...],
        *,
        heads: int,
        mode: TransportMode = "unitary",
        dissipation: bool = True,
    ) -> None:
        super().__init__()
        self.periodic, self.heads, self.mode = periodic, heads, mode
        self.norm = nn.LayerNorm(dim)
        self.kernels = kernels
        # One vector for all axes: weight decay and optimisers of matrices leave vectors alone.
        self.log_rates = nn.Parameter(torch.zeros(len(periodic) * heads)) if dissipation else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the moved features."""
        normed = self.norm(x)
        heads = at_least_float32(x).unflatten(-1, (self.heads, -1)).movedim(-2, 1)  # (B, H, *grid, d)
        for axis, kernel in enumerate(self.kernels):
            heads = self.move(heads, kernel(normed), axis)
        return heads.movedim(1, -2).flatten(-2)  # (B, *grid, D)

    def move(self, heads: Tensor, kernel: Tensor, axis: int) -> Tensor:
        """Return E exp(A) along one axis of heads (B, H, *grid, d), A from the kernel (B, H, [*other axes,] S, S)."""
        # Rounded to bfloat16 the map would no longer preserve the norm.
        with torch.autocast(heads.device.type, enabled=False):
            departure = rotation_minus_identity(skew_part(kernel)) if self.mode == "unitary" else kernel
            heads = heads + apply_along(departure, heads, axis)
            if self.log_rates is None:
                return heads
            rates = INITIAL_RATE * self.log_rates.unflatten(0, (-1, self.heads))[axis].exp()
            heat = heat_kernel(heads.shape[2 + axis], rates, periodic=self.periodic[axis])
            return apply_along(heat.expand(heads.shape[0], -1, -1, -1), heads, axis)

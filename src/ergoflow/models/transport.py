"""Axial transport: the features are moved along each axis by a norm-preserving map that they choose themselves.

With K the kernel of an axis and head (`ergoflow.models.axial`), A = (K − Kᵀ)/2 is skew, the discrete twin of the
advection ½(u ∂ + ∂ u), and

    x ← E_Y exp(A_Y) E_X exp(A_X) x,     E = exp(r ∂²), r = 1e-4·exp(a) one number per head and axis.

exp(A) is orthogonal: it moves features without creating or destroying their norm, whatever the weights are. E is the
heat kernel, a contraction: exact in Fourier space on a periodic axis, in cosines (no flux) between walls. So the layer
is unitary where the physics is, contracting where it must be, and never expands; creating features is left to
the MLPs of the blocks around it. At the start the angles of A are about .1 and r = 1e-4: close to the identity.

`mode="linear"` replaces exp(A) by I + K, the same kernel with nothing enforced: the ablation of unitarity.

Kernels of single lines go to `ergoflow.ops.transport` as queries and keys; all others are made here, one by one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ergoflow.models.axial import AxisKernel, apply_along
from ergoflow.models.layers import at_least_float32
from ergoflow.ops.transport import heat_kernel, rotation_minus_identity, skew_part, transport_lines

TransportMode = Literal["linear", "unitary"]

# Of the heat kernel: of the order of viscosity × time step of the Kolmogorov tasks, in units of (cycles per axis)².
INITIAL_RATE = 1e-4


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
        normed, features = self.norm(x), at_least_float32(x)
        if self.mode == "unitary" and all(kernel.has_complex_lines for kernel in self._kernels()):
            for axis, kernel in enumerate(self._kernels()):
                features = transport_lines(
                    features,
                    *kernel.line_codes(normed),
                    self._rates(axis),
                    axis=axis,
                    heads=self.heads,
                    periodic=self.periodic[axis],
                )
            return features
        heads = features.unflatten(-1, (self.heads, -1)).movedim(-2, 1)  # (B, H, *grid, d)
        for axis, kernel in enumerate(self._kernels()):
            heads = self.move(heads, kernel(normed), axis)
        return heads.movedim(1, -2).flatten(-2)  # (B, *grid, D)

    def move(self, heads: Tensor, kernel: Tensor, axis: int) -> Tensor:
        """Return E exp(A) along one axis of heads (B, H, *grid, d), A from the kernel (B, H, [*other axes,] S, S)."""
        # Rounded to bfloat16 the map would no longer preserve the norm.
        with torch.autocast(heads.device.type, enabled=False):
            departure = rotation_minus_identity(skew_part(kernel)) if self.mode == "unitary" else kernel
            heads = heads + apply_along(departure, heads, axis)
            rates = self._rates(axis)
            if rates is None:
                return heads
            heat = heat_kernel(heads.shape[2 + axis], rates, periodic=self.periodic[axis])
            return apply_along(heat.expand(heads.shape[0], -1, -1, -1), heads, axis)

    def _kernels(self) -> list[AxisKernel]:
        return [kernel for kernel in self.kernels if isinstance(kernel, AxisKernel)]

    def _rates(self, axis: int) -> Tensor | None:
        """Return the rates (H,) of an axis, None without dissipation."""
        if self.log_rates is None:
            return None
        return INITIAL_RATE * self.log_rates.unflatten(0, (-1, self.heads))[axis].exp()

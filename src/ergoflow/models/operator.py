"""The latent operator G of paper section 3.3: z_{k+1} features = G φ(z_k), applied at every grid point.

Three modes start from the same orthogonal matrix G₀, given the same generator:

* `free`     G is a plain matrix;
* `penalty`  the same, and the objective is expected to add the unitary term (`training.losses.unitary_loss`);
* `exact`    G = G₀ · Cayley(A), A skew, so that GᵀG = I whatever the optimiser does.

The Cayley transform (I − A/2)⁻¹(I + A/2) maps skew matrices one to one onto the rotations without eigenvalue
−1, so `exact` moves inside the component of O(d) that holds G₀; its determinant, ±1, never changes.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OperatorMode = Literal["free", "penalty", "exact"]


def random_orthogonal(dim: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Return a (dim, dim) float64 orthogonal matrix, uniform on O(dim): QR of a Gaussian, R positive."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r))


def cayley(skew: Tensor) -> Tensor:
    """Return (I − A/2)⁻¹(I + A/2): orthogonal for every skew A, I + A to first order."""
    identity = torch.eye(skew.shape[-1], device=skew.device, dtype=skew.dtype)
    # The eigenvalues of I − A/2 have real part 1, so it is never singular and needs no check (a device sync).
    return torch.linalg.solve_ex(identity - skew / 2, identity + skew / 2)[0]


class LatentOperator(nn.Module):
    """The linear map G on latent features, (..., L) → (..., L), without bias."""

    initial: Tensor

    def __init__(self, dim: int, mode: OperatorMode = "penalty", *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if mode not in get_args(OperatorMode):
            raise ValueError(f"mode must be one of {get_args(OperatorMode)}, got {mode!r}; choose one of these")
        self.dim = dim
        self.mode = mode
        initial = random_orthogonal(dim, generator=generator).to(torch.get_default_dtype())
        if mode == "exact":
            self.register_buffer("initial", initial)
            self.angles = nn.Parameter(torch.zeros(dim * (dim - 1) // 2))
        else:
            self.weight = nn.Parameter(initial)

    @property
    def matrix(self) -> Tensor:
        """G, (L, L), differentiable in the parameters."""
        if self.mode != "exact":
            return self.weight
        # In float64 the transform stays orthogonal to float32 round-off even for angles of thousands.
        rows, columns = torch.tril_indices(self.dim, self.dim, offset=-1, device=self.angles.device)
        lower = torch.zeros(self.dim, self.dim, device=self.angles.device, dtype=torch.float64)
        lower = lower.index_put((rows, columns), self.angles.double())
        return (self.initial.double() @ cayley(lower - lower.mT)).to(self.initial.dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Return G applied to the last axis, in the precision of G even under autocast.

        bfloat16 rounding of G, 2⁻⁹ per entry, would break the very property the operator is there for.
        """
        matrix = self.matrix
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features.to(matrix.dtype), matrix)

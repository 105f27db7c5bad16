"""The terms a model is trained on (paper: forward loss and unitary loss).

Every term is computed in float32 (float64 stays float64), also when the caller has switched autocast on: a
loss rounded to bfloat16 cannot see a relative error below half a per cent.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

UnitaryForm = Literal["algorithm", "trace", "frobenius"]
UNITARY_FORMS: tuple[UnitaryForm, ...] = ("algorithm", "trace", "frobenius")


def relative_l2_loss(pred: Tensor, true: Tensor) -> Tensor:
    """Relative L2 error, mean_b ||pred_b - true_b|| / ||true_b||, the norms over channels and grid together.

    Shapes (B, C, *grid). There is no epsilon: a true state of norm zero has no relative error, and gives nan
    or inf.
    """
    if pred.shape != true.shape:
        raise ValueError(
            f"prediction and truth must have one shape (B, C, *grid), got {tuple(pred.shape)} and "
            f"{tuple(true.shape)}; give the model as many output channels as the data have"
        )
    pred, true = _at_least_float32(pred).flatten(1), _at_least_float32(true).flatten(1)  # (B, C * grid)
    error = torch.linalg.vector_norm(pred - true, dim=1)
    return (error / torch.linalg.vector_norm(true, dim=1)).mean()


def unitary_loss(
    matrix: Tensor,
    *,
    num_samples: int = 64,
    form: UnitaryForm = "algorithm",
    generator: torch.Generator | None = None,
) -> Tensor:
    """How far a square matrix G (L, L) is from orthogonal, as one number >= 0.

    "algorithm": mean_b | ||G v_b||^2 - 1 | over `num_samples` random unit vectors v_b (the paper's
    algorithm). Zero
        almost surely only for orthogonal G; for G = c Q with orthogonal Q it is |c^2 - 1| whatever the
        samples.
    "trace": | E ||G v||^2 - 1 | = | tr(G'G) / L - 1 | (the paper's equation, its expectation in closed form,
    no
        samples). It fixes the mean gain alone: diag(sqrt 1.75, 1/2) scores zero.
    "frobenius": ||G'G - I||_F, exact, no samples. For G = c Q it is sqrt(L) |c^2 - 1|: it grows with the size
    of
        G where the other two do not, so the same weight presses sqrt(L) times harder.

    `generator` draws the vectors, on its own device; None takes torch's default generator.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"matrix must be square (L, L), got shape {tuple(matrix.shape)}; pass the operator's matrix")
    if form not in UNITARY_FORMS:
        raise ValueError(f"form must be one of {', '.join(UNITARY_FORMS)}, got {form!r}; correct the recipe")
    with torch.autocast(matrix.device.type, enabled=False):
        matrix = _at_least_float32(matrix)
        size = matrix.shape[0]
        if form == "frobenius":
            identity = torch.eye(size, device=matrix.device, dtype=matrix.dtype)
            return torch.linalg.matrix_norm(matrix.mT @ matrix - identity)
        if form == "trace":
            return (matrix.square().sum() / size - 1).abs()
        vectors = _unit_vectors(num_samples, size, like=matrix, generator=generator)  # (N, L)
        gains = (vectors @ matrix.mT).square().sum(dim=1)  # (N,): ||G v_b||^2
        return (gains - 1).abs().mean()


def _unit_vectors(count: int, size: int, *, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """`count` vectors drawn uniformly from the unit sphere in R^size, (count, size)."""
    if count < 1:
        raise ValueError(f"num_samples must be at least 1, got {count}; 64 is the default")
    device = like.device if generator is None else generator.device
    normal = torch.randn(count, size, generator=generator, device=device, dtype=like.dtype).to(like.device)
    return normal / torch.linalg.vector_norm(normal, dim=1, keepdim=True)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))

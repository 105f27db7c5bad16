"""The terms a model is trained on (paper: forward loss and unitary loss; MNO: Sobolev loss; log spectra).

Every term is computed in float32 (float64 stays float64), also when the caller has switched autocast on: a
loss rounded to bfloat16 cannot see a relative error below half a per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ergoflow.models.layers import at_least_float32
from ergoflow.numerics.fourier import TWO_PI, mode_multiplicity, mode_numbers, shell_numbers, wavenumbers

UnitaryForm = Literal["algorithm", "trace", "frobenius"]
UNITARY_FORMS: tuple[UnitaryForm, ...] = ("algorithm", "trace", "frobenius")


def relative_l2_loss(pred: Tensor, true: Tensor) -> Tensor:
    """Relative L2 error, mean_b ||pred_b - true_b|| / ||true_b||, the norms over channels and grid together.

    Shapes (B, C, *grid). There is no epsilon: a true state of norm zero has no relative error and gives nan or inf.
    """
    _check_pair(pred, true)
    pred, true = at_least_float32(pred).flatten(1), at_least_float32(true).flatten(1)  # (B, C * grid)
    error = torch.linalg.vector_norm(pred - true, dim=1)
    return (error / torch.linalg.vector_norm(true, dim=1)).mean()


def sobolev_loss(
    pred: Tensor, true: Tensor, *, order: int, periodic: Sequence[bool], length: Sequence[float] | None = None
) -> Tensor:
    """Relative error of the derivatives up to `order`: mean_j mean_b |pred_b - true_b|_j / |true_b|_j, j = 0 ... order.

    |f|_j^2 = sum_k |k|^2j |f_hat(k)|^2 over channels and modes is the squared L2 norm of all derivatives of order j,
    k = 2 pi n / L. Order 0 is the relative L2 error, order 1 the loss that MNO's authors train the Kolmogorov flow
    with (their "balanced" H1: were values and gradients added before the division, the gradients would drown the
    values). Along an axis that ends at walls, where half-way nodes see the wall half a cell outside, the field is
    continued evenly (a cosine series, k = pi n / L): continuous, so first derivatives are right; higher ones would
    see the kink at the wall. Shapes (B, C, *grid); `length` gives the sides L, None means 2 pi each. A truth without
    derivatives (a constant) gives nan or inf.
    """
    _check_pair(pred, true)
    sides = (TWO_PI,) * len(periodic) if length is None else tuple(length)
    pred, true = (mirrored(at_least_float32(field), periodic) for field in (pred, true))
    sides = tuple(side if wraps else 2 * side for side, wraps in zip(sides, periodic, strict=True))
    waves = wavenumbers(pred.shape[2:], sides, device=pred.device, dtype=pred.dtype)
    squares = sum((k.square() for k in waves), start=torch.zeros_like(waves[0]))  # *modes: |k|^2
    error_modes, true_modes = _half_spectrum(pred - true), _half_spectrum(true)  # (B, C, *modes)
    ratios = []
    for j in range(order + 1):
        weight = squares ** (j / 2)
        error = torch.linalg.vector_norm((weight * error_modes).flatten(1), dim=1)
        ratios.append((error / torch.linalg.vector_norm((weight * true_modes).flatten(1), dim=1)).mean())
    return torch.stack(ratios).mean()


def log_spectrum_loss(pred: Tensor, true: Tensor) -> Tensor:
    """Mean squared difference of log spectra, mean_b mean_n (ln E_pred,b(n) - ln E_true,b(n))^2, n = 1 ... N // 3.

    E(n) is the energy, summed over channels, of the modes with floor(|n| + 1/2) = n, mode numbers counted per axis
    in its own fundamental; N is the shortest side. Shapes (B, C, *grid), all axes periodic. There is no epsilon: a
    shell without energy has no logarithm, and gives inf.
    """
    _check_pair(pred, true)
    if min(pred.shape[2:]) < 3:
        raise ValueError(f"log spectra need at least 3 points per side, got {tuple(pred.shape[2:])}; use a finer grid")
    return (_log_spectrum(pred) - _log_spectrum(true)).square().mean()


def unitary_loss(
    matrix: Tensor,
    *,
    num_samples: int = 64,
    form: UnitaryForm = "algorithm",
    generator: torch.Generator | None = None,
) -> Tensor:
    """How far a square matrix G (L, L) is from orthogonal, as one number >= 0.

    "algorithm": mean_b | ||G v_b||^2 - 1 | over `num_samples` random unit vectors v_b (the paper's algorithm).
        Zero, almost surely, for orthogonal G alone; |c^2 - 1| for G = c Q with orthogonal Q, whatever the samples.
    "trace": | E ||G v||^2 - 1 | = | tr(G'G) / L - 1 |, without samples (the paper's equation). It fixes the mean
        gain alone: diag(sqrt 1.75, 1/2) scores zero.
    "frobenius": ||G'G - I||_F, without samples. For G = c Q it is sqrt(L) |c^2 - 1|: unlike the other two it grows
        with the size of G, so the same weight presses sqrt(L) times harder.

    `generator` draws the vectors, on its own device; None takes torch's default generator.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"matrix must be square (L, L), got shape {tuple(matrix.shape)}; pass the operator's matrix")
    if form not in UNITARY_FORMS:
        raise ValueError(f"form must be one of {', '.join(UNITARY_FORMS)}, got {form!r}; correct the recipe")
    with torch.autocast(matrix.device.type, enabled=False):
        matrix = at_least_float32(matrix)
        size = matrix.shape[0]
        if form == "frobenius":
            identity = torch.eye(size, device=matrix.device, dtype=matrix.dtype)
            return torch.linalg.matrix_norm(matrix.mT @ matrix - identity)
        if form == "trace":
            return (matrix.square().sum() / size - 1).abs()
        vectors = _unit_vectors(num_samples, size, like=matrix, generator=generator)  # (N, L)
        gains = (vectors @ matrix.mT).square().sum(dim=1)  # (N,): ||G v_b||^2
        return (gains - 1).abs().mean()


def _check_pair(pred: Tensor, true: Tensor) -> None:
    if pred.shape != true.shape:
        raise ValueError(
            f"prediction and truth must have one shape (B, C, *grid), got {tuple(pred.shape)} and "
            f"{tuple(true.shape)}; give the model as many output channels as the data have"
        )


def mirrored(field: Tensor, periodic: Sequence[bool]) -> Tensor:
    """A field (..., *grid) continued evenly along every axis that ends at walls: twice as long there, and periodic."""
    for axis, wraps in enumerate(periodic, start=field.ndim - len(periodic)):
        field = field if wraps else torch.cat((field, field.flip(axis)), dim=axis)
    return field


def mirrored_shells(grid: Sequence[int], periodic: Sequence[bool], *, device: torch.device) -> Tensor:
    """The shell of every mode of the real FFT of a `mirrored` field, counted in waves per side of the field itself."""
    sides = [size if wraps else 2 * size for size, wraps in zip(grid, periodic, strict=True)]
    modes = mode_numbers(sides, device=device)
    return shell_numbers([n if wraps else n / 2 for n, wraps in zip(modes, periodic, strict=True)])


def _half_spectrum(field: Tensor) -> Tensor:
    """Coefficients of the real FFT over the grid, (B, C, *modes), whose sum of squares is that over all modes.

    Columns that stand for a pair of conjugate modes are multiplied by sqrt 2.
    """
    weights = mode_multiplicity(field.shape[-1], device=field.device).to(field.dtype)
    return torch.fft.rfftn(field, dim=tuple(range(2, field.ndim))) * weights.sqrt()


def _log_spectrum(field: Tensor) -> Tensor:
    """ln E(n), n = 1 ... N // 3, of fields (B, C, *grid): (B, N // 3)."""
    field = at_least_float32(field)
    last = min(field.shape[2:]) // 3
    power = torch.view_as_real(_half_spectrum(field)).square().sum(dim=(1, -1))  # (B, *modes)
    # Shell 0, which is the mean, and all that lies beyond the last shell are summed, too, and dropped.
    shells = shell_numbers(mode_numbers(field.shape[2:], device=field.device)).clamp(max=last + 1)
    energy = power.new_zeros(len(field), last + 2).index_add(1, shells.flatten(), power.flatten(1))
    return energy[:, 1 : last + 1].log()


def _unit_vectors(count: int, size: int, *, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """`count` vectors drawn uniformly from the unit sphere in R^size, (count, size)."""
    if count < 1:
        raise ValueError(f"num_samples must be at least 1, got {count}; 64 is the default")
    device = like.device if generator is None else generator.device
    normal = torch.randn(count, size, generator=generator, device=device, dtype=like.dtype).to(like.device)
    return normal / torch.linalg.vector_norm(normal, dim=1, keepdim=True)

"""Energy over wavenumbers and its errors (paper: matching energy spectrum, ME-APE, ME-LR).

Wavenumbers are integers per axis, whatever the box: mode (n_x, n_y) belongs to shell n = floor(|n| + 1/2).
Shells run from 0 to min(side) // 2; the corners beyond are dropped. In a box with unequal lengths the shells
are therefore rings in units of each axis' own fundamental.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ergoflow.metrics.arrays import Array, check_pair, check_trajectories, chunks, like, to_float64
from ergoflow.numerics.fourier import mode_multiplicity, mode_numbers, shell_numbers

Weights = Literal["true", "uniform", "literal", "pred"]


def energy_spectrum(
    field: Array, components: Sequence[int] | None = None, *, norm: Literal["raw", "parseval"] = "raw"
) -> Any:
    """Return (J, T, shells): E(n) = sum over components and modes of the shell of |u_hat|^2.

    No factor 1/2. `components` picks channels (None: all). "raw" is the plain FFT sum; "parseval" divides by
    the squared number of points, so that the sum over all modes is the mean of |u|^2 over the grid.
    """
    field = _select(field, components)
    grid = tuple(field.shape[3:])
    shells, weights = shells_and_weights(grid)
    scale = _scale(norm, math.prod(grid))
    rows = [
        sum_over_shells(mode_power(piece, len(grid)).sum(dim=2), shells, weights, count=min(grid) // 2 + 1)
        for piece in chunks(field, name="field")
    ]
    return like(field, torch.cat(rows, dim=1) * scale)


def spanwise_spectrum(
    field: Array, components: Sequence[int] | None = None, *, norm: Literal["raw", "parseval"] = "raw"
) -> Any:
    """Return (J, T, Z//2+1): one-dimensional spectra along the last axis, averaged over the other grid axes.

    The default on the channel plane, which is periodic in z only. Components are summed.
    """
    field = _select(field, components)
    size = field.shape[-1]
    scale = _scale(norm, size)
    rows = []
    for piece in chunks(field, name="field"):
        power = torch.fft.rfft(piece, dim=-1).abs().square().sum(dim=2)  # (J, t, *rest, Z//2+1)
        power = power.flatten(2, -2).mean(dim=2) if power.ndim > 3 else power
        rows.append(power * mode_multiplicity(size, device=power.device))
    return like(field, torch.cat(rows, dim=1) * scale)


def naive2d_spectrum(field: Array, components: Sequence[int] | None = None) -> Any:
    """Return the shell spectrum of a channel plane as though it were periodic in y too.

    A variant for comparison only: the jump between the walls leaks into every shell.
    """
    return energy_spectrum(field, components)


def me_ape(E_pred: Array, E_true: Array, shells: tuple[int, int] | None = None) -> float:
    """Return the mean over the shells of |Ep - Et| / Et as a fraction (ME-APE; the paper prints percent).

    Spectra (..., shells) are averaged over all leading axes first. `shells` includes both ends; None is
    (1, N // 3) with N = 2 (number of shells - 1). A non-finite prediction gives inf.
    """
    pred, true = _mean_spectra(E_pred, E_true, shells)
    return _inf_if_nan(float(((pred - true).abs() / true).mean()))


def me_lr(E_pred: Array, E_true: Array, weights: Weights = "true", shells: tuple[int, int] | None = None) -> float:
    """Return sum_n w_n |ln(Ep / Et)|, the mean energy log ratio.

    "true": w = Et / sum Et, this is ME-LRw. "uniform": the plain mean, ME-LR. "pred": w = Ep / sum Ep.
    "literal": w = Ep / sum Et as printed in the paper, which is at most 1/e for a weak prediction and tends
    to zero for a vanishing one. An empty predicted shell makes every other variant infinite.
    """
    pred, true = _mean_spectra(E_pred, E_true, shells)
    return log_ratio(pred, true, weights)


def log_ratio(pred: Tensor, true: Tensor, weights: Weights) -> float:
    """Return sum w |ln(pred / true)| for two spectra already cut to their shells."""
    if not bool(torch.isfinite(pred).all()):
        return math.inf
    logs = (pred / true).log().abs()
    if weights == "true":
        total = (true / true.sum() * logs).sum()
    elif weights == "uniform":
        total = logs.mean()
    elif weights == "literal":
        # x ln x -> 0: an empty shell has no weight.
        total = torch.where(pred == 0, 0.0, pred * logs).sum() / true.sum()
    elif weights == "pred":
        total = torch.where(pred == 0, 0.0, pred * logs).sum() / pred.sum()
    else:
        raise ValueError(
            f'weights must be "true", "uniform", "literal" or "pred", got {weights!r}; choose one of the four'
        )
    return _inf_if_nan(float(total))


def binned_spectral_error(pred: Array, true: Array) -> Any:
    """Return (T, 3): mean squared error in The Well's three logarithmic wavenumber bins, low to high.

    |k| in radians per grid spacing; edges 0, then three equal ratios from 2 pi / N (N the longest side) to
    pi sqrt(d), the corner. The three sum to the mean squared error. Convention of The Well 1.2 (older ones
    ended at pi and dropped the corners). Mean over trajectories and channels; inf where pred is not finite.
    """
    check_pair(pred, true)
    grid = tuple(true.shape[3:])
    ends = math.log10(2 * math.pi / max(grid)), math.log10(math.pi * math.sqrt(len(grid)))
    edges = torch.logspace(*ends, 4, dtype=torch.float64)
    waves = [2 * math.pi * n.double() / side for n, side in zip(mode_numbers(grid), grid, strict=True)]
    size = torch.stack(torch.broadcast_tensors(*(k.square() for k in waves))).sum(dim=0).sqrt()
    bins = torch.bucketize(size, edges[1:-1], right=True)
    _, weights = shells_and_weights(grid)
    rows = []
    for p, z in zip(chunks(pred), chunks(true, name="true"), strict=True):
        power = mode_power(p.to(z.device) - z, len(grid)).mean(dim=(0, 2)).unsqueeze(0)  # (1, t, *modes)
        rows.append(sum_over_shells(power, bins.flatten(), weights, count=3)[0])
    error = torch.cat(rows) / math.prod(grid) ** 2
    return like(true, torch.where(torch.isfinite(error), error, torch.inf))


def shells_and_weights(grid: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return shell number and multiplicity of every mode of the real FFT, flattened."""
    shells = shell_numbers(mode_numbers(grid))
    return shells.flatten(), mode_multiplicity(grid[-1]).expand(shells.shape).flatten()


def mode_power(field: Tensor, dims: int) -> Tensor:
    """Return |u_hat|^2 in real-FFT layout over the last `dims` axes."""
    modes = torch.fft.rfftn(field, dim=tuple(range(-dims, 0)))
    return modes.real.square() + modes.imag.square()


def sum_over_shells(power: Tensor, shells: Tensor, weights: Tensor, *, count: int) -> Tensor:
    """Return (J, t, count): the weighted sum of (J, t, *modes) over the modes of each shell below `count`."""
    values = power.flatten(2).to(torch.float64) * weights.to(power.device)
    index = shells.clamp(max=count).to(power.device)  # everything beyond goes to one last, dropped shell
    total = torch.zeros(*values.shape[:2], count + 1, dtype=torch.float64, device=power.device)
    return total.index_add_(2, index, values)[..., :count]


def default_shells(count: int) -> tuple[int, int]:
    """Return (1, N // 3), the published range, for spectra with `count` = N // 2 + 1 shells."""
    return 1, max(1, 2 * (count - 1) // 3)


def check_shells(shells: tuple[int, int], count: int) -> None:
    """Raise unless first <= last and both lie in 0..count-1."""
    first, last = shells
    if not 0 <= first <= last < count:
        raise ValueError(
            f"shells must satisfy 0 <= first <= last <= {count - 1}, got {tuple(shells)}; both ends are included"
        )


def _mean_spectra(E_pred: Array, E_true: Array, shells: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    pred, true = to_float64(E_pred).cpu(), to_float64(E_true).cpu()
    if pred.ndim < 1 or true.ndim < 1 or pred.shape[-1] != true.shape[-1]:
        raise ValueError(
            f"spectra must share their last axis, got {tuple(pred.shape)} and {tuple(true.shape)}; "
            "compute both on one grid"
        )
    first, last = default_shells(true.shape[-1]) if shells is None else shells
    check_shells((first, last), true.shape[-1])
    true = true.reshape(-1, true.shape[-1]).mean(dim=0)[first : last + 1]
    pred = pred.reshape(-1, pred.shape[-1]).mean(dim=0)[first : last + 1]
    if not bool((torch.isfinite(true) & (true > 0)).all()):
        shell = first + int((~(torch.isfinite(true) & (true > 0))).nonzero()[0])
        raise ValueError(
            f"E_true must be finite and positive in every shell, got {float(true[shell - first])} in shell "
            f"{shell}; "
            "choose shells below it"
        )
    return pred, true


def _select(field: Array, components: Sequence[int] | None) -> Array:
    check_trajectories("field", field)
    if components is None:
        return field
    if not components or any(not 0 <= c < field.shape[2] for c in components):
        raise ValueError(
            f"components must be channel numbers below {field.shape[2]}, got {list(components)}; "
            "leave it out to sum all"
        )
    return field[:, :, list(components)]


def _scale(norm: str, points: int) -> float:
    if norm not in ("raw", "parseval"):
        raise ValueError(f'norm must be "raw" or "parseval", got {norm!r}; choose one of the two')
    return 1.0 if norm == "raw" else 1.0 / points**2


def _inf_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value

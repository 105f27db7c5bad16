"""How well drawn forecasts have the law of the truth: a probability score of points, of blocks and of waves.

For numbers a_1 ... a_M drawn for one number b, the fair continuous ranked probability score is

    S = mean_i |a_i - b| - 1 / (2 M (M - 1)) sum_ij |a_i - a_j|.

Its mean does not depend on M, and is least if the a_i have the law of b. Taken of the points of a field alone it does
not see how they hang together. So it is taken of means over blocks as well, which weigh what is large, and of modes,
shell by shell and each in units of its own, so that fine scales count though they hold little.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ergoflow.models.layers import at_least_float32
from ergoflow.training.distributed import mean_over_processes
from ergoflow.training.losses import mirrored, mirrored_shells

# Points a side of the blocks, where they divide the grid; 1 are the points themselves.
BLOCK_SIDES = (1, 2, 4, 8)
# Shells that change less than this part of the one that changes most hold rounding: those a solver's mask empties.
ROUNDING = 1e-5


def ensemble_loss(members: Tensor, true: Tensor, change: Tensor, *, periodic: Sequence[bool]) -> Tensor:
    """Score of members (M, B, C, *grid) drawn for a truth (B, C, *grid), the mean over channels of

        mean_s S(means over blocks of s points a side) / mean |change|                      s = 1, 2, 4, 8
        + mean_n S(modes on shell n) / mean |modes of change on shell n|,                   n = 1 ... N // 2,

    with `change` (B, C, *grid) what one step changes: a unit for all steps, so that later ones count as they err. Modes
    are real and imaginary parts, shells those of `losses.log_spectrum_loss`, N the shortest side; along an axis that
    ends at walls a field is continued evenly. A shell that holds nothing but rounding is left out. All others count:
    what is not scored is not kept, and grows in a roll-out until it is seen on larger scales (docs/lab_log.md).
    """
    if len(members) < 2 or members.shape[1:] != true.shape or change.shape != true.shape:
        raise ValueError(
            f"an ensemble needs two members or more, and a change, of the truth's shape {tuple(true.shape)}, "
            f"got {tuple(members.shape)} and {tuple(change.shape)}; pass members (M, B, C, *grid)"
        )
    # The sum over a shell is a product.
    with torch.autocast(members.device.type, enabled=False):
        members, true, change = (at_least_float32(field) for field in (members, true, change))
        return (_of_blocks(members, true, change) + _of_waves(members, true, change, periodic)).mean()


def _of_blocks(members: Tensor, true: Tensor, change: Tensor) -> Tensor:
    """The first term, channel by channel (C,)."""
    axes = true.ndim - 2
    sides = [side for side in BLOCK_SIDES if not any(points % side for points in true.shape[2:])]
    scores = [_score(*(_block_means(field, side, axes) for field in (members, true))) for side in sides]
    return torch.stack([_per_channel(score) for score in scores]).mean(0) / mean_over_processes(
        _per_channel(change.abs())
    )


def _of_waves(members: Tensor, true: Tensor, change: Tensor, periodic: Sequence[bool]) -> Tensor:
    """The second term, channel by channel (C,)."""
    drawn, truth, moved = (_modes(field, periodic) for field in (members, true, change))
    on_shell = _membership(true.shape[2:], periodic, like=truth)  # (modes, shells)
    scores, units = (modes.mean((0, 3)) @ on_shell for modes in (_score(drawn, truth), moved.abs()))  # (C, shells)
    units = mean_over_processes(units)
    held = units > ROUNDING * units.amax(1, keepdim=True)
    return (scores / units.where(held, torch.inf)).sum(1) / held.sum(1)


def _score(members: Tensor, true: Tensor) -> Tensor:
    """S of every number: (M, ...) and (...) to (...)."""
    count = len(members)
    pairs = [(members[i] - members[j]).abs() for i in range(count) for j in range(i)]
    return (members - true).abs().mean(0) - torch.stack(pairs).mean(0) / 2


def _per_channel(values: Tensor) -> Tensor:
    """Means (C,) of values (B, C, ...)."""
    return values.flatten(2).mean((0, 2))


def _block_means(field: Tensor, side: int, axes: int) -> Tensor:
    """Means over blocks of `side` points along each of the last `axes` axes."""
    for axis in range(field.ndim - axes, field.ndim):
        field = field.unflatten(axis, (-1, side)).mean(axis + 1)
    return field


def _modes(field: Tensor, periodic: Sequence[bool]) -> Tensor:
    """Fourier coefficients of fields (..., *grid) as (..., modes, 2)."""
    axes = tuple(range(-len(periodic), 0))
    modes = torch.fft.rfftn(mirrored(field, periodic), dim=axes)
    return torch.view_as_real(modes.flatten(axes[0]))


def _membership(grid: Sequence[int], periodic: Sequence[bool], *, like: Tensor) -> Tensor:
    """Which mode is on which of the shells 1 ... N // 2, as ones among zeros (modes, shells)."""
    last = min(grid) // 2
    if last < 1:
        raise ValueError(f"an ensemble's shells need at least 2 points per side, got {tuple(grid)}; use a finer grid")
    shells = mirrored_shells(grid, periodic, device=like.device).flatten()
    return (shells[:, None] == torch.arange(1, last + 1, device=like.device)).to(like.dtype)

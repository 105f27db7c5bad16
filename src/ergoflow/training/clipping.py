"""Gradients that are no longer than usual.

    g ← g · min(1, f n / |g|),     n ← n + (min(|g|, f n) − n) / 50,

n being the usual norm, at first that of the first gradient. Adam divides a step by the gradients of the last thousand:
when they begin to grow, its steps grow with them before that memory knows, and thirty steps later a U-Net may be dead.
A fixed bound must be known for every model and loss; this one comes from the run itself, and follows slow changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The part of n that is replaced per step: with f = 2 it can double in 35 steps.
SHARE = 1 / 50


@torch.no_grad()
def clip_to_usual(gradients: Sequence[Tensor], usual: Tensor | None, factor: float) -> Tensor:
    """Shorten the gradients, in place and together, to `factor` times the usual norm; return the new usual one."""
    norm = torch.nn.utils.get_total_norm(gradients)
    usual = norm if usual is None else usual
    kept = torch.minimum(norm, factor * usual)
    torch._foreach_mul_(list(gradients), kept / norm.clamp_min(torch.finfo(norm.dtype).tiny))
    return torch.lerp(usual, kept, SHARE)

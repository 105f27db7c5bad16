"""The optimiser of a run, from plain settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

OptimizerName = Literal["adam", "adamw"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adam", "adamw")


def make_optimizer(
    name: OptimizerName,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Adam (decay added to the gradient) or AdamW (decoupled decay) over the trainable parameters.

    Weight decay acts on matrices and convolution kernels alone: shrinking a bias or the gain of a
    normalisation towards zero regularises nothing.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # The fused kernel takes real tensors on the GPU; everywhere else torch chooses (spectral weights are
    # complex).
    fused = True if all(p.is_cuda and p.is_floating_point() for p in trainable) else None
    match name:
        case "adam":
            return torch.optim.Adam(groups, lr=learning_rate, betas=betas, fused=fused)
        case "adamw":
            return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}; correct the recipe")

"""The optimiser of a run, from plain settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from ergoflow.training.muon import Muon, is_hidden_matrix

OptimizerName = Literal["adam", "adamw", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adam", "adamw", "muon")


def make_optimizer(
    name: OptimizerName,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Adam (decay added to the gradient), AdamW (decoupled decay) or Muon over the trainable parameters.

    Muon takes the hidden matrices and AdamW the rest, with one learning rate (`training.muon`). Weight decay
    acts on matrices, convolution kernels and spectral weights alone: shrinking a bias or the gain of a
    normalisation towards zero regularises nothing.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    vectors = [p for p in trainable if p.ndim < 2]
    # The fused kernel takes real tensors on a CPU or GPU; elsewhere torch chooses (spectral weights are complex).
    fused = True if all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trainable) else None
    groups = _groups((matrices, {"weight_decay": weight_decay}), (vectors, {"weight_decay": 0.0}))
    match name:
        case "adam":
            return torch.optim.Adam(groups, lr=learning_rate, betas=betas, fused=fused)
        case "adamw":
            return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)
        case "muon":
            hidden = [p for p in matrices if is_hidden_matrix(p)]
            others = [p for p in matrices if not is_hidden_matrix(p)]
            groups = _groups(
                (hidden, {"weight_decay": weight_decay, "muon": True}),
                (others, {"weight_decay": weight_decay}),
                (vectors, {"weight_decay": 0.0}),
            )
            return Muon(groups, lr=learning_rate, betas=betas)
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}; correct the recipe")


def _groups(*groups: tuple[list[nn.Parameter], dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups with their settings, without the empty ones."""
    return [{"params": parameters, **settings} for parameters, settings in groups if parameters]

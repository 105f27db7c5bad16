"""An exponential moving average of the weights, as a plain dictionary of tensors.

e_t = d_t e_{t-1} + (1 - d_t) w_t with d_t = min(decay, t / (t + 9)), t = 1, 2, ...: while the run is young
the average forgets its initial value quickly, so that a short run is not dragged back to random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Average = dict[str, Tensor]
# d_1 = 1/10: the first update nearly replaces the initial weights; later t/(t + 9) exceeds the decay, which takes over.
WARMUP_STEPS = 9


def start_average(model: nn.Module) -> Average:
    """A copy of the trainable parameters, by name: the average before the first update."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def decay_at(decay: float, update: int) -> float:
    """d_t of update number t = 1, 2, ..."""
    return min(decay, update / (update + WARMUP_STEPS))


@torch.no_grad()
def update_average(average: Average, model: nn.Module, *, decay: float, update: int) -> None:
    """Move the average, in place, one update towards the weights of the model."""
    weights = dict(model.named_parameters())
    torch._foreach_lerp_(list(average.values()), [weights[name] for name in average], 1.0 - decay_at(decay, update))


@torch.no_grad()
def copy_average(average: Average, model: nn.Module) -> None:
    """Give the model the averaged weights."""
    weights = dict(model.named_parameters())
    for name, value in average.items():
        weights[name].copy_(value)


@contextmanager
def averaged_weights(average: Average | None, model: nn.Module) -> Iterator[None]:
    """The model has the averaged weights inside the block and its own again after it.

    None changes nothing.
    """
    if average is None:
        yield
        return
    own = start_average(model)
    copy_average(average, model)
    try:
        yield
    finally:
        copy_average(own, model)

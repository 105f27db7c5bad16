"""A trained model as it is rolled out: in one precision, on a GPU as a recorded graph of what depends on the state."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ergoflow.numerics.trajectory import Step
from ergoflow.ops.cuda_graph import graphed
from ergoflow.ops.folded import Folded


def recorded_inference(step: Step, *, bf16: bool, device: torch.device) -> Step:
    """Return `step`, with products in bfloat16 if asked for; the weights of a module must not change any more."""
    # On a CPU nothing is recorded, and looking at every operation costs more than it saves.
    folded = None
    if isinstance(step, nn.Module) and device.type == "cuda":
        folded = Folded((*step.parameters(), *step.buffers()))

    def forecast(state: Tensor) -> Tensor:
        # Torch's own store of casts ends with the block, and its casts would not be there when a recording is replayed.
        with folded or nullcontext(), torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            return step(state)

    return graphed(forecast)

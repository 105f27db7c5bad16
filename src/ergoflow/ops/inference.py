"""A trained model as it is rolled out: in one precision, on a GPU as a recorded graph of what depends on the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ergoflow.numerics.trajectory import Step
from ergoflow.ops.cuda_graph import graphed
from ergoflow.ops.folded import Folded

Precision = Literal["fp32", "tf32", "bf16"]


def recorded_inference(step: Step, *, precision: Precision, device: torch.device) -> Step:
    """Return `step` with its products in a precision; the weights of a module must not change any more.

    "tf32" rounds the factors of float32 products to eleven bits where a GPU has units for that; elsewhere it is the
    same as "fp32".
    """
    # On a CPU nothing is recorded, and looking at every operation costs more than it saves.
    folded = None
    if isinstance(step, nn.Module) and device.type == "cuda":
        folded = Folded((*step.parameters(), *step.buffers()))
    half = precision == "bf16"

    def forecast(state: Tensor) -> Tensor:
        # Torch's own store of casts ends with the block, and its casts would not be there when a recording is replayed.
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False)
        with folded or nullcontext(), _tf32(precision == "tf32"), autocast:
            return step(state)

    return graphed(forecast)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Within the block float32 products and convolutions may, or may not, use tf32; torch's default is half of each."""
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [library.allow_tf32 for library in libraries]
    for library in libraries:
        library.allow_tf32 = allowed
    try:
        yield
    finally:
        for library, value in zip(libraries, before, strict=True):
            library.allow_tf32 = value

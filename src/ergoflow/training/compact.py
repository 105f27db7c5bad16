"""A training state in half the bytes, for machines between which little can be carried.

Eight bytes a parameter instead of sixteen. Weights are kept as they are; second moments, and the average as its
distance from the weights, in bfloat16; momenta not at all: they are rebuilt within 1/(1 − β₁) steps. What belongs to
complex weights is not rounded, for want of a complex bfloat16: 24 bytes instead of 32. A run resumed from such a state
goes on as well as one that never stopped, but not bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# What optimisers call their first moments: Adam; Muon, for its matrices and for the rest.
MOMENTA = ("exp_avg", "momentum", "mean")


def compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a captured state (`state.capture`) in its small form."""
    model, average = state["model"], state["average"]

    def small(name: str, value: Tensor) -> Tensor:
        if name in MOMENTA:
            # One zero in memory and on disk, whatever the shape.
            return value.new_zeros(()).expand(value.shape)
        return _halved(value)

    distance = None
    if average is not None:
        distance = {name: _halved(value - model[name]) for name, value in average.items()}
    optimizer = state["optimizer"] | {"state": _each_tensor(state["optimizer"]["state"], small)}
    return dict(state) | {"average": distance, "optimizer": optimizer, "compact": True}


def expand(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in the form that `state.restore` takes; one that was never compacted as it is."""
    if not state.get("compact", False):
        return dict(state)
    model, distance = state["model"], state["average"]
    average = None
    if distance is not None:
        average = {name: model[name] + value.to(model[name].dtype) for name, value in distance.items()}

    def full(_: str, value: Tensor) -> Tensor:
        wide = value.float() if value.dtype == torch.bfloat16 else value
        return wide.clone(memory_format=torch.contiguous_format)

    optimizer = state["optimizer"] | {"state": _each_tensor(state["optimizer"]["state"], full)}
    return dict(state) | {"average": average, "optimizer": optimizer}


def _each_tensor(entries: Mapping[Any, Any], change: Callable[[str, Tensor], Tensor]) -> dict[Any, Any]:
    """The optimiser's entries (parameter → name → value) with their tensors changed."""
    return {
        parameter: {name: change(name, v) if isinstance(v, Tensor) else v for name, v in values.items()}
        for parameter, values in entries.items()
    }


def _halved(value: Tensor) -> Tensor:
    """The tensor in bfloat16 where that is worth it: a real number per parameter, not a count of steps."""
    return value.to(torch.bfloat16) if value.dtype == torch.float32 and value.ndim > 0 else value

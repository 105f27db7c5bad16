"""Everything that moves while a run trains, and its passage into and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ergoflow.training.checkpoint import random_state, set_random_state
from ergoflow.training.distributed import LaunchContext
from ergoflow.training.ema import Average


@dataclass(kw_only=True)
class RunState:
    """The moving parts of a run, mutable on purpose: this is what training happens to.

    `step` counts updates; (`epoch`, `batch`) is the next batch to read; `seconds` is the time trained over
    all resumptions. `pending` holds the losses (1 + number of parts,) of the steps since the last log line,
    on the device of the model, so that logging costs one synchronisation every so many steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    generator: torch.Generator
    device: torch.device
    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    valid: dict[str, float] = field(default_factory=dict)
    part_names: list[str] = field(default_factory=list)
    pending: list[Tensor] = field(default_factory=list)


def capture(run: RunState, facts: Mapping[str, Any], context: LaunchContext) -> dict[str, Any]:
    """The run as tensors and plain values. All processes must call: each adds its own random state."""
    return {
        "facts": dict(facts),
        "model": run.model.state_dict(),
        "average": run.average,
        "optimizer": run.optimizer.state_dict(),
        "generators": context.gather(run.generator.get_state()),
        "random": context.gather(random_state(run.device)),
        "position": {"step": run.step, "epoch": run.epoch, "batch": run.batch, "seconds": run.seconds},
        "loss": run.loss,
        "valid": dict(run.valid),
        "part_names": list(run.part_names),
        "pending": torch.stack(run.pending).cpu() if run.pending else None,
    }


def restore(run: RunState, state: Mapping[str, Any], facts: Mapping[str, Any], context: LaunchContext) -> None:
    """Put a captured run back; `facts` are the settings that may not change between start and resumption."""
    for name, value in facts.items():
        if state["facts"].get(name) != value:
            raise ValueError(
                f"a resumed run must keep its {name}: it was {state['facts'].get(name)}, now it is {value}; "
                "restore the setting, or train in another folder"
            )
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    if run.average is not None:
        for name, value in run.average.items():
            value.copy_(state["average"][name])
    # States of earlier versions hold one generator, which all processes shared.
    run.generator.set_state(state["generators"][context.rank] if "generators" in state else state["generator"])
    set_random_state(state["random"][context.rank], run.device)
    position = state["position"]
    run.step, run.epoch, run.batch = position["step"], position["epoch"], position["batch"]
    run.seconds, run.loss, run.valid = position["seconds"], state["loss"], dict(state["valid"])
    run.part_names = list(state["part_names"])
    pending = state["pending"]
    run.pending = [] if pending is None else list(pending.to(run.device).unbind(0))

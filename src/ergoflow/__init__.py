"""ergoflow: learn chaotic flows, and prove that you learned them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergoflow.training.stepper import PhysicalStep

__version__ = "0.1.0"


def load(run: str | Path, *, device: str = "cpu") -> PhysicalStep:
    """The trained model of a run folder as a step on physical states (B, C, *grid), ready for `rollout`."""
    from ergoflow.pipeline.runs import load_run

    return load_run(Path(run), device=device)

"""Learning rates as pure functions of the progress of a run, so that a schedule has no state to save.

Progress is the fraction of the run that is over, in [0, 1): of its steps, or of its wall-clock budget. The
warm-up alone counts steps, because it protects the first updates of Adam however long the run is.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "halving", "cosine", "wsd"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "halving", "cosine", "wsd")

# Warm-up, stable, decay: the last 30 % of the run decays.
WSD_DECAY_FRACTION = 0.3
# A product such as 3 / 11 * (11 / 3) may come out one rounding below an integer; the slack is far below one
# step of any run.
ROUNDING = 1e-9


def learning_rate_factor(
    schedule: Schedule, fraction: float, *, step: int, warmup_steps: int, halvings: float
) -> float:
    """The number in [0, 1] that multiplies the peak learning rate at a step (counted from 0).

    factor = min(1, (step + 1) / warmup_steps) * shape(fraction), where shape(f) is
      constant: 1;
      halving:  2^-floor(f * halvings); the paper halves every 10 of 50 epochs, so halvings = 5;
      cosine:   (1 + cos(pi f)) / 2;
      wsd:      1 until the last 30 % of the run, then linear to 0.
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    return warmup * _shape(schedule, min(max(fraction, 0.0), 1.0), halvings)


def _shape(schedule: Schedule, fraction: float, halvings: float) -> float:
    match schedule:
        case "constant":
            return 1.0
        case "halving":
            return 0.5 ** math.floor(fraction * halvings + ROUNDING)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * fraction))
        case "wsd":
            return min(1.0, (1.0 - fraction) / WSD_DECAY_FRACTION)
    raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}; correct the recipe")

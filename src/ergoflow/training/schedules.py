"""Learning rates as pure functions of the progress of a run, so that a schedule has no state to save.

Progress is the fraction of the run that is over, in [0, 1): of its steps, or of its wall-clock budget. The
warm-up alone counts steps, because it protects the first updates of Adam however long the run is.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "halving", "cosine", "wsd", "onecycle"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "halving", "cosine", "wsd", "onecycle")

# Warm-up, stable, decay: the last 30 % of the run decays.
WSD_DECAY_FRACTION = 0.3
# FactFormer's one cycle: up from 1e-4 of the peak in the first 20 % of the run, down to 1e-9 of it at the end.
ONE_CYCLE_RISE = 0.2
ONE_CYCLE_START = 1e-4
ONE_CYCLE_END = 1e-9
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
      wsd:      1 until the last 30 % of the run, then linear to 0;
      onecycle: half a cosine up from 1e-4 to 1 in the first 20 % of the run, then half a cosine down to 1e-9
                (Smith & Topin 2019, with FactFormer's numbers).
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
            return _half_cosine(1.0, 0.0, fraction)
        case "wsd":
            return min(1.0, (1.0 - fraction) / WSD_DECAY_FRACTION)
        case "onecycle":
            if fraction < ONE_CYCLE_RISE:
                return _half_cosine(ONE_CYCLE_START, 1.0, fraction / ONE_CYCLE_RISE)
            return _half_cosine(1.0, ONE_CYCLE_END, (fraction - ONE_CYCLE_RISE) / (1.0 - ONE_CYCLE_RISE))
    raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}; correct the recipe")


def _half_cosine(start: float, end: float, fraction: float) -> float:
    """From start to end, flat at both."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * fraction))

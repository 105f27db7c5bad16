"""What the command line shows as one line instead of a traceback: the user's errors and the machine's limits."""

from __future__ import annotations

import torch

from ergoflow.numerics.trajectory import SimulationDiverged
from ergoflow.solvers.channel_statistics import ChannelUnphysical
from ergoflow.training.trainer import TrainingDiverged, TrainingInterrupted

USER_ERRORS = (
    ValueError,
    OSError,
    SimulationDiverged,
    ChannelUnphysical,
    TrainingDiverged,
    TrainingInterrupted,
    torch.OutOfMemoryError,
)

"""A Step as one CUDA graph: hundreds of kernels for the price of one launch.

A step of small kernels spends its time waiting for Python to launch them. Recorded once and replayed, it runs at the
speed of the kernels. On the CPU there is nothing to record.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ergoflow.numerics.trajectory import Step
from ergoflow.ops.rehearsal import rehearsed

# Calls before recording: FFT plans, compiled kernels and library handles must exist by then.
WARM_UP = 2
# Of an error that a recording ended with.
REASON_LENGTH = 200


class Recording(NamedTuple):
    """A recorded step: write `source`, replay, read `target`."""

    graph: torch.cuda.CUDAGraph
    source: Tensor
    target: Tensor


def graphed(step: Step) -> Step:
    """Return `step` recorded on its first call for each shape, and replayed on every call.

    The contract of a Step holds: the input is copied in and the result copied out, so neither is touched by later
    calls. `step` must be a fixed sequence of kernels: no branch on values, no transfer from or to the host; one that is
    not is called as it is, after a warning. So is one on a CPU tensor, or on one that derivatives are taken of.
    """
    recordings: dict[tuple[torch.Size, torch.dtype, torch.device], Recording | None] = {}

    def replay(state: Tensor) -> Tensor:
        if state.device.type != "cuda" or is_differentiated(state):
            return step(state)
        key = (state.shape, state.dtype, state.device)
        if key not in recordings:
            recordings[key] = None
            try:
                recordings[key] = _record(step, state)
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:REASON_LENGTH]
                warnings.warn(f"step not recorded, launched kernel by kernel: {reason}", stacklevel=2)
        recording = recordings[key]
        if recording is None:
            return step(state)
        graph, source, target = recording
        source.copy_(state)
        graph.replay()
        return target.clone()

    return replay


def is_differentiated(state: Tensor) -> bool:
    """Tell whether anybody follows derivatives through `state`: backward, forward mode or a transform of torch.func."""
    if torch.is_grad_enabled() and state.requires_grad:
        return True
    # A transform wraps its tensors; only the wrapper's level tells (−1: none).
    if torch._C._functorch.maybe_get_level(state) >= 0:
        return True
    return forward_ad.unpack_dual(state).tangent is not None


def _record(step: Step, state: Tensor) -> Recording:
    with torch.no_grad(), torch.cuda.device(state.device):
        source = state.detach().clone(memory_format=torch.contiguous_format)
        # Warm-up on a side stream, as capturing asks for: memory it touches must not belong to the current one.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            rehearsed(lambda: step(source), source.device)
            for _ in range(WARM_UP):
                step(source)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a writer that copies frames to the host) may go on using the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            target = step(source)
    return Recording(graph, source, target)

"""Losses and gradients as one CUDA graph: a training step at the speed of its kernels, not of their launches.

Forward and backward pass are recorded once for each shape of batch and each stage of the objective (a number of
unrolled steps), and replayed: the batch is copied in, the gradients appear in the same tensors every time. Stages come
one after the other, so a new one frees the memory of the last. Random numbers go on from replay to replay, and
recording takes none of them, so a resumed run draws what the whole one drew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Losses = tuple[Tensor, dict[str, Tensor]]
Rehearse = Callable[[Callable[[], object], torch.device], None]
# Calls before recording: FFT plans, compiled kernels and library handles must exist by then.
WARM_UP = 2
# Of an error that a recording ended with.
REASON_LENGTH = 200


class _Recording(NamedTuple):
    """Write `batch`, replay, read the rest."""

    graph: torch.cuda.CUDAGraph
    batch: Tensor
    losses: Losses
    gradients: list[Tensor | None]


class RecordedGradients:
    """Calls `losses(batch, progress)` -> (total, parts), differentiates the total and leaves gradients in `.grad`.

    A class because recordings are kept. `stage(progress)` says on what of the progress the losses depend; None: never
    record. Nothing is recorded on a CPU. Losses that cannot be recorded (they ask the device for a number) are computed
    as they are written, after one warning. Before the first recording `rehearse(function, device)`, if given, may call
    its function to compile what it launches (`ergoflow.ops.rehearsal`); of that call nothing is kept.
    """

    def __init__(
        self,
        losses: Callable[[Tensor, float], Losses],
        parameters: Iterable[nn.Parameter],
        *,
        stage: Callable[[float], int] | None,
        generator: torch.Generator | None = None,
        rehearse: Rehearse | None = None,
    ) -> None:
        self._losses, self._parameters, self._stage = losses, list(parameters), stage
        self._generator, self._rehearse = generator, rehearse
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._recorded_stage: int | None = None
        self._reason: str | None = None

    def __call__(self, batch: Tensor, progress: float) -> Losses:
        """Return total and parts, which the next call overwrites, and set the gradients."""
        if self._stage is None or batch.device.type != "cuda" or self._reason is not None:
            return self._plain(batch, progress)
        stage = self._stage(progress)
        if stage != self._recorded_stage:
            torch.cuda.synchronize(batch.device)
            self._recordings.clear()
            self._recorded_stage = stage
        key = (batch.shape, batch.dtype, batch.device)
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(batch, progress)
            except RuntimeError as error:
                self._reason = " ".join(str(error).split())[:REASON_LENGTH]
            if self._reason is not None:
                # Outside the except clause, whose traceback would keep the memory of the failed recording.
                self._recordings.clear()
                torch.cuda.empty_cache()
                warnings.warn(f"training step not recorded, launched kernel by kernel: {self._reason}", stacklevel=2)
                return self._plain(batch, progress)
        recording = self._recordings[key]
        recording.batch.copy_(batch, non_blocking=True)
        recording.graph.replay()
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        return recording.losses

    def _plain(self, batch: Tensor, progress: float) -> Losses:
        for parameter in self._parameters:
            parameter.grad = None
        total, parts = self._losses(batch, progress)
        total.backward()
        return total.detach(), {name: part.detach() for name, part in parts.items()}

    def _record(self, batch: Tensor, progress: float) -> _Recording:
        static, graph = batch.clone(), torch.cuda.CUDAGraph()
        generators = [torch.cuda.default_generators[static.device.index]]
        if self._generator is not None and self._generator.device.type == "cuda":
            # The default one is known to every graph.
            graph.register_generator_state(self._generator)
            generators.append(self._generator)
        states = [generator.get_state() for generator in generators]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Later stages and shapes launch what the first one did.
            rehearse, self._rehearse = self._rehearse, None
            if rehearse is not None:
                rehearse(lambda: self._plain(static, progress), static.device)
            for _ in range(WARM_UP):
                self._plain(static, progress)
        torch.cuda.current_stream().wait_stream(side)
        for parameter in self._parameters:
            parameter.grad = None
        # Other threads (a reader that copies batches to the device) may go on using it meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            losses = self._plain(static, progress)
        # The capture set the graph's random numbers to their beginning, on a stream of its own; replays set them on.
        torch.cuda.synchronize(static.device)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return _Recording(graph, static, losses, [parameter.grad for parameter in self._parameters])

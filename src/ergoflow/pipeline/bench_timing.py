"""How the benches measure: times, memory, what the device can do at best, and what a training step costs.

Times are medians after a warm-up; a GPU is given call after call, as in a run, and the host waits for the last one
only. Memory is the allocator's peak, and memory that runs out is a result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ergoflow.config import ChannelDatasetConfig, FilesDatasetConfig, Recipe
from ergoflow.data.info import DatasetInfo
from ergoflow.data.normalize import Normalizer
from ergoflow.ops.inference import Precision, recorded_inference
from ergoflow.ops.rehearsal import rehearsed
from ergoflow.pipeline import simulate_channel, simulate_kolmogorov
from ergoflow.pipeline.runs import RunFacts
from ergoflow.training.losses import relative_l2_loss
from ergoflow.training.optimizers import make_optimizer
from ergoflow.training.recorded import RecordedGradients

WARM_UP = 3
REPEATS = 10
# Calls that take seconds are made less often: once this time is over, one for the warm-up and so many repeats will do.
PATIENCE_SECONDS = 5.0
FEWEST_REPEATS = 3
PRECISIONS = ("fp32", "bf16")
OUT_OF_MEMORY = "out of memory"

T = TypeVar("T")


@dataclass(frozen=True)
class Findings:
    """The rows of one bench, a column per key, and what a reader must know to read them."""

    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Seconds and bytes of one batch; the words `out of memory` where it does not fit.

    `forward_seconds` is a pass without autograd; `training_seconds` forward, backward and optimiser. The bytes are
    the allocator's peaks of a forward pass *with* autograd and of a training step; None on a CPU, which keeps no
    such count.
    """

    forward_seconds: float | str
    training_seconds: float | str
    forward_bytes: int | str | None
    training_bytes: int | str | None


def training_cost(
    model: nn.Module, shape: tuple[int, ...], *, precision: str, device: torch.device, recorded: bool = True
) -> TrainingCost:
    """What a model on `device` costs for batches of `shape` (B, C, *grid): forward alone, and trained by AdamW.

    The loss is the relative L2 error against noise; the weights change, the cost does not depend on them. `recorded`:
    on a GPU both passes are timed as `predict` and `train` run them, as CUDA graphs. Memory is that of plain calls:
    what a graph holds, the allocator does not count.
    """
    generator = torch.Generator().manual_seed(0)
    state, target = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    # Gradients of an earlier measurement would count as memory of this one.
    model.zero_grad(set_to_none=True)
    optimizer = make_optimizer("adamw", model.parameters(), learning_rate=1e-4, betas=(0.9, 0.999), weight_decay=0.0)

    def forward(batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            prediction: Tensor = model(batch)
        return prediction.float()

    def losses(batch: Tensor, _: float) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            prediction = model(batch)
        return relative_l2_loss(prediction.float(), target), {}

    def inference() -> float:
        with torch.inference_mode():
            asked: Precision = "bf16" if precision == "bf16" else "fp32"
            call = recorded_inference(model, precision=asked, device=device) if recorded else forward
            return median_seconds(lambda: call(state), device)

    def training(stage: Callable[[float], int] | None) -> Callable[[], None]:
        gradients = RecordedGradients(losses, trainable, stage=stage)

        def update() -> None:
            gradients(state, 1.0)
            optimizer.step()

        return update

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Kernels of both passes, by all cores at a time.
    within_memory(lambda: rehearsed(lambda: RecordedGradients(losses, trainable, stage=None)(state, 1.0), device))
    model.zero_grad(set_to_none=True)
    # The peak of the forward pass comes first: the optimiser has no moments yet.
    forward_bytes = within_memory(lambda: peak_bytes(lambda: forward(state), device))
    forward_seconds = within_memory(inference)
    stage = (lambda progress: 0) if recorded else None
    training_seconds = within_memory(lambda: median_seconds(training(stage), device))
    model.zero_grad(set_to_none=True)
    training_bytes = within_memory(lambda: peak_bytes(training(None), device))
    return TrainingCost(
        forward_seconds=forward_seconds,
        training_seconds=training_seconds,
        forward_bytes=forward_bytes,
        training_bytes=training_bytes,
    )


def within_memory(function: Callable[[], T]) -> T | str:
    """The function's value, or `out of memory` where the device has too little: a result, not a crash."""
    try:
        return function()
    except RuntimeError as error:
        # The GPU's allocator has an error of its own; the CPU's can be told by its words alone.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
    # Outside the except clause, whose traceback would keep the tensors of the failed call alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return OUT_OF_MEMORY


def median_seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call after a warm-up; on a GPU of calls in a row, between which the host does not wait."""
    warm_up, times = 0.0, list[float]()
    for _ in range(WARM_UP):
        warm_up += _seconds(function, device)
        if warm_up > PATIENCE_SECONDS:
            break
    if device.type == "cuda":
        return statistics.median(_seconds_in_a_row(function, device))
    while len(times) < REPEATS and (len(times) < FEWEST_REPEATS or sum(times) < PATIENCE_SECONDS):
        times.append(_seconds(function, device))
    return statistics.median(times)


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int | None:
    """Most bytes that the GPU's allocator held during a call, what was there before included; None on a CPU.

    A CPU has no allocator to ask, and the function is not called.
    """
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    function()
    return torch.cuda.max_memory_allocated(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / median_seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, precision: str) -> float:
    """Multiply-adds per second of a large square matrix product of random numbers, as torch runs it."""
    side = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return side**3 / median_seconds(lambda: left @ right, device)


def dataset_info(recipe: Recipe) -> DatasetInfo:
    """What the recipe's data set says of its fields, grid, domain and boundaries, whether it is made or not."""
    if isinstance(recipe.dataset, FilesDatasetConfig):
        raise ValueError(f"a bench needs a flow that `simulate` knows, got {recipe.dataset.name}; name another recipe")
    if isinstance(recipe.dataset, ChannelDatasetConfig):
        return simulate_channel.dataset_info(recipe.dataset, "test")
    return simulate_kolmogorov.dataset_info(recipe.dataset, [])


def recipe_facts(recipe: Recipe) -> RunFacts:
    """What a model must know of the recipe's data, with a stand-in for the normalisation that only data give."""
    info = dataset_info(recipe)
    ones = torch.ones(len(info.fields))
    # Increments a hundredth of the state: a random model then stays finite for the steps of a bench.
    return RunFacts.of(info, Normalizer(mean=0 * ones, std=ones, std_delta=0.01 * ones), recipe.step_seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def per_sample_ms(seconds: float | str, batch: int) -> float | str:
    """Milliseconds per sample of a batch that took `seconds`; words stay words."""
    return seconds if isinstance(seconds, str) else 1e3 * seconds / batch


def in_units(amount: float | str | None, unit: float) -> float | str | None:
    """The amount in units of `unit`; words and None stay what they are."""
    return amount if amount is None or isinstance(amount, str) else amount / unit


def with_crosses(sides: Sequence[int]) -> str:
    """A grid or box in words, such as 256×256."""
    return "×".join(map(str, sides))


def _seconds_in_a_row(function: Callable[[], Any], device: torch.device) -> list[float]:
    """The time from the end of each call to that of the next, on the GPU's own clock."""
    count = min(REPEATS, max(FEWEST_REPEATS, int(PATIENCE_SECONDS / _seconds(function, device))))
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            function()
            mark.record()
        synchronize(device)
    return [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)]


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started

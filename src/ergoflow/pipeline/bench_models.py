"""`ergoflow bench models`: what each model costs, beside what the paper prints (its two cost tables).

Parameters: trainable numbers, a complex one counted once. The rest is per sample or per batch:

multiply-adds, per sample
    Matrix products and convolutions count one per multiplication with its addition. That alone, with complex products
    counted like real ones and transforms left out, is the paper's count, `products`: on 256×256 its 3.45 G of mno
    come out as 3.446. Its 268 G of a3m come out as 267.7 with the mean taken after the projection, and as 259.1 with
    the mean taken first, as here; the two are the same function. The whole work, `total`, counts a complex product as
    the four real ones it is, and adds the transforms: 5 N log₂N operations for a complex FFT of N points, half of it
    for a real one, two operations to a multiply-add. Elementwise work, norms and pooling count nothing in either.
kept memory, per batch
    Parameters, buffers, input, output and whatever autograd keeps for the backward pass of one float32 forward pass,
    each storage once, of the model as it is written down. It is exact and the same on every device; without the fast
    operators, which keep less, it is a lower bound of the peak.
peak memory, per batch, on a GPU
    What the allocator held at most in a forward pass with autograd (the paper's memory) and in a training step.

Both counts run on tensors without data: no GPU, no memory, under a second for 256×256.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ergoflow.config import ModelConfig, Recipe
from ergoflow.models.build import build_model
from ergoflow.models.performer import PerformerConfig
from ergoflow.pipeline.bench_timing import OUT_OF_MEMORY, Findings, in_units, per_sample_ms, training_cost, with_crosses
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import RunFacts
from ergoflow.recipes import full_size_models
from ergoflow.report.published import COST_BY_GRID, COST_BY_MODEL, COST_IN_REBUTTAL, REBUTTAL_NAME

GRIDS = (32, 64, 128, 256)
# A training step takes up to this many times what it keeps. On a CPU a larger one is not tried: the system would not
# refuse the memory, but end the program that uses it.
PEAK_OVER_KEPT = 2
#: Names of our models in the paper's cost table by model, which is one channel on this grid.
PRINTED_NAMES = {"a3m": "Ours", "mno": "MNO", "uno": "UNO", "mwt": "MWT", "factformer": "FactFormer"}
PRINTED_GRID = (256, 256)
#: Channels and grid of the row that the rebuttal adds.
REBUTTAL_SHAPE = (3, 192, 192)
NOTES = [
    "in brackets: printed in the paper (A100, one channel, float32, batch 1), of performer in its rebuttal (three)",
    "G mult-adds per sample: products and convolutions, as the paper counts; with FFT: complex products as four, "
    "and the transforms",
    "kept MB: parameters, input, output and all that autograd keeps of a float32 forward pass; forward MB, training "
    "MB: the GPU allocator's peak in a forward pass with autograd, and in a training step (1 MB = 1e6 bytes)",
    "milliseconds are per sample: forward without autograd; training with backward pass and AdamW; on a GPU both as "
    "recorded graphs where that is possible, call after call without waiting",
]

aten = torch.ops.aten
# Operations of a complex FFT of N points are this times N log2 N; a transform from or to real numbers has half.
FFT_OPERATIONS = 5
# Real multiply-adds in a complex one.
COMPLEX_PRODUCT = 4
# torch's own table of products, (shapes) -> operations, two to a multiply-add. It lacks attention on a CPU.
PRODUCTS = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention]
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one grid."""

    name: str
    config: ModelConfig
    channels: int
    grid: tuple[int, ...]
    periodic: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Multiply-adds of one forward pass: of real products, of complex products counted once, of transforms."""

    real: int
    complex: int
    transforms: int

    @property
    def products(self) -> int:
        """As the paper counts: a complex product is one, a transform nothing."""
        return self.real + self.complex

    @property
    def total(self) -> int:
        """All of it, in real multiply-adds."""
        return self.real + COMPLEX_PRODUCT * self.complex + self.transforms


def paper_cases(grids: Sequence[int] | None) -> list[Case]:
    """Every model on square grids with one channel; None is the paper's grids, and what its rebuttal counts."""
    shapes = [(name, config, (1, n, n)) for name, config in full_size_models().items() for n in grids or GRIDS]
    if grids is None:
        shapes.append(("performer", PerformerConfig(), REBUTTAL_SHAPE))
    return [
        Case(name=name, config=config, channels=channels, grid=tuple(grid), periodic=(True, True))
        for name, config, (channels, *grid) in shapes
    ]


def recipe_case(recipe: Recipe, facts: RunFacts) -> Case:
    """The model of a recipe on the grid and channels of its data."""
    channels = len(facts.fields)
    return Case(name=recipe.name, config=recipe.model, channels=channels, grid=facts.grid, periodic=facts.periodic)


def bench_models(
    cases: Sequence[Case], *, device: torch.device, console: Console, precisions: Sequence[str], batch: int
) -> Findings:
    """One row per case and precision; a model that cannot take a grid is a note."""
    rows, refused = [], []
    with bar(console, "bench models", len(cases), "cases") as advance:
        for case in cases:
            advance(0, note=f"{case.name} {with_crosses(case.grid)}")
            found = bench_case(case, device=device, precisions=precisions, batch=batch)
            rows += found.rows
            refused += found.notes
            advance()
    if not rows:
        raise ValueError(f"no model takes what was asked for; choose other grids ({'; '.join(refused)})")
    return Findings(rows, NOTES + refused)


def bench_case(case: Case, *, device: torch.device, precisions: Sequence[str], batch: int) -> Findings:
    """The rows of one case, one per precision; or a note, where the model cannot take the grid."""
    # What earlier models and their recordings left behind is no cost of this one.
    before = _held_bytes(device)
    try:
        model = build(case)
    except ValueError as error:
        return Findings([], [f"{case.name} has no {with_crosses(case.grid)}: {error}"])
    # Counted before the model goes to the device: what carries no data needs none.
    counts = _counts(case, model, batch)
    model.to(device)
    return Findings(
        [
            _row(case, model, counts, precision=precision, batch=batch, device=device, before=before)
            for precision in precisions
        ]
    )


def build(case: Case) -> nn.Module:
    """The model of a case, always with the same weights."""
    generator = torch.Generator().manual_seed(0)
    return build_model(
        case.config, case.channels, case.channels, case.grid, periodic=case.periodic, generator=generator
    )


def count_work(model: nn.Module, shape: tuple[int, ...]) -> Work:
    """Multiply-adds of one forward pass of a model on the CPU for an input of `shape` (B, C, *grid)."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _WorkCounter() as counter:
        model(torch.empty(shape))
    return Work(real=counter.real, complex=counter.complex, transforms=counter.transforms)


def count_kept_bytes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Bytes that live between a float32 forward pass on the CPU and its backward pass, each storage counted once."""
    storages: dict[int, int] = {}
    # Alive until the end, so that no two of them can have one address.
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for tensor in (*model.parameters(), *model.buffers()):
            keep(mode.from_tensor(tensor))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            keep(model(keep(torch.empty(shape))))
    return sum(storages.values())


def printed_costs(case: Case, *, precision: str, batch: int) -> dict[str, float]:
    """What the paper prints for a case, by column of its tables; nothing where it prints nothing."""
    name = next((name for name, config in full_size_models().items() if config == case.config), "")
    table, label = COST_BY_MODEL, ""
    if (precision, batch) != ("fp32", 1):
        return {}
    if name == "performer" and (case.channels, *case.grid) == REBUTTAL_SHAPE:
        table, label = COST_IN_REBUTTAL, REBUTTAL_NAME
    elif name in PRINTED_NAMES and (case.channels, case.grid) == (1, PRINTED_GRID):
        label = PRINTED_NAMES[name]
    elif name == "a3m" and case.channels == 1:
        table, label = COST_BY_GRID, with_crosses(case.grid)
    return dict(zip(table.columns, table.rows.get(label, ()), strict=False))


def _counts(case: Case, model: nn.Module, batch: int) -> dict[str, Any]:
    shape = (case.channels, *case.grid)
    work = count_work(model, (1, *shape))
    return {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "G mult-adds": work.products / 1e9,
        "with FFT": work.total / 1e9,
        "kept MB": count_kept_bytes(model, (batch, *shape)) / 1e6,
    }


def _held_bytes(device: torch.device) -> int:
    """What the GPU's allocator holds once everything that nobody needs is gone; 0 on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _row(
    case: Case,
    model: nn.Module,
    counts: dict[str, Any],
    *,
    precision: str,
    batch: int,
    device: torch.device,
    before: int,
) -> dict[str, Any]:
    row = {"model": case.name, "grid": with_crosses(case.grid), "precision": precision, "batch": batch, **counts}
    if precision != "fp32":
        # What autocast casts differs between devices: only the float32 number is everyone's.
        row["kept MB"] = None
    row |= dict.fromkeys(("forward MB", "training MB"))
    if device.type == "cpu" and PEAK_OVER_KEPT * 1e6 * counts["kept MB"] > _memory_bytes():
        row |= dict.fromkeys(("forward ms", "training ms"), OUT_OF_MEMORY)
    else:
        cost = training_cost(model, (batch, case.channels, *case.grid), precision=precision, device=device)
        row["forward ms"] = per_sample_ms(cost.forward_seconds, batch)
        row["training ms"] = per_sample_ms(cost.training_seconds, batch)
        row["forward MB"] = _megabytes(cost.forward_bytes, before)
        row["training MB"] = _megabytes(cost.training_bytes, before)
    columns = {"parameters": "parameters", "runtime_ms": "forward ms"}
    columns |= {"memory_mb": "forward MB", "gflops": "G mult-adds"}
    printed = printed_costs(case, precision=precision, batch=batch)
    return row | {f"printed {columns[key]}": value for key, value in printed.items()}


def _memory_bytes() -> float:
    """The memory of this machine; infinite where the system does not say."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _megabytes(peak: int | str | None, before: int) -> float | str | None:
    return in_units(peak - before if isinstance(peak, int) else peak, 1e6)


class _WorkCounter(TorchDispatchMode):
    """Adds up the work of every operation inside the context; a mode, because torch shows operations to no one else."""

    def __init__(self) -> None:
        super().__init__()
        self.real = self.complex = self.transforms = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in PRODUCTS:
            multiply_adds = PRODUCTS[packet](*args, **(kwargs or {}), out_val=out) // 2
            if args[0].is_complex():
                self.complex += multiply_adds
            else:
                self.real += multiply_adds
        elif packet in (aten._fft_r2c, aten._fft_c2r, aten._fft_c2c):
            # The side with all N points: a real transform has half of them, plus one, on its other side.
            points = (out if packet is aten._fft_c2r else args[0]).shape
            share = 1 if packet is aten._fft_c2c else 2
            operations = FFT_OPERATIONS * math.prod(points) * math.log2(math.prod(points[axis] for axis in args[1]))
            self.transforms += round(operations / share / 2)
        return out

"""`ergoflow bench`: what this machine does per second, as numbers that can be compared.

Timings are medians over repeated calls after a warm-up, with the device synchronised around each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from ergoflow.config import KolmogorovDatasetConfig, Recipe
from ergoflow.models.build import build_model
from ergoflow.pipeline.runs import write_json
from ergoflow.pipeline.workspace import commit, hardware, versions
from ergoflow.solvers.channel import ChannelConfig, initial_populations
from ergoflow.solvers.channel import make_step as make_channel_step
from ergoflow.solvers.kolmogorov import initial_vorticity, make_step
from ergoflow.training.losses import relative_l2_loss

WARM_UP = 3
REPEATS = 10
# Bytes that one lattice update must move: 19 populations read and written, by storage.
FLOOR_BYTES: dict[Literal["float32", "float16"], int] = {"float32": 153, "float16": 77}


def bench(what: str, recipe: Recipe, *, device: torch.device, console: Console, output: Path | None) -> None:
    """Time the solver or the training step of a recipe; print a table and write JSON if asked."""
    benches = {"solver": _bench_solver, "training": _bench_training, "lbm": _bench_lbm}
    if what not in benches:
        raise ValueError(f"bench knows {', '.join(benches)}, got {what!r}; choose one of them")
    rows = benches[what](recipe, device)
    table = Table(title=f"{what} of {recipe.name} on {hardware(device)['device']}", title_justify="left")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(
            *(f"{v:,.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v) for v in row.values())
        )
    console.print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        facts = {"bench": what, "recipe": recipe.name, "rows": rows, "hardware": hardware(device)}
        write_json(output, facts | {"versions": versions(), "commit": commit()})


def _bench_solver(recipe: Recipe, device: torch.device) -> list[dict[str, Any]]:
    dataset = recipe.dataset
    if not isinstance(dataset, KolmogorovDatasetConfig):
        raise ValueError(f"bench solver times Kolmogorov flow, got {dataset.name}; use `ergoflow bench lbm`")
    flow, substeps = dataset.flow, dataset.substeps
    rows = []
    for batch in (1, 16, 64, 220) if device.type == "cuda" else (1, 8):
        state = initial_vorticity(flow, batch, seed=0, device=device)
        step = make_step(flow, substeps=substeps, device=device)
        seconds = _median_seconds(lambda step=step, state=state: step(state), device) / substeps  # type: ignore[misc]
        rows.append(
            {
                "grid": "×".join(map(str, flow.grid)),
                "batch": batch,
                "ms per step": 1e3 * seconds,
                "field-steps/s": batch / seconds,
            }
        )
    return rows


def _bench_lbm(recipe: Recipe, device: torch.device) -> list[dict[str, Any]]:
    """Lattice updates per second with walls, force and eddies, and their share of what the memory allows.

    One call in the suite of a CPU is small; the numbers that count come from a GPU.
    """
    bandwidth = _copy_bandwidth(device)
    boxes = ((512, 96, 96), (512, 192, 192), (1024, 192, 192)) if device.type == "cuda" else ((48, 32, 32),)
    rows = []
    for box in boxes:
        for storage, bytes_per_cell in FLOOR_BYTES.items():
            flow = ChannelConfig(box=box, storage=storage)
            state = initial_populations(flow, seed=0, device=device)
            steps = 100 if device.type == "cuda" else 2
            step = make_channel_step(flow, substeps=steps, device=device)
            seconds = _median_seconds(lambda step=step, state=state: step(state), device) / steps  # type: ignore[misc]
            rate = box[0] * box[1] * box[2] / seconds
            row = {
                "box": "×".join(map(str, box)),
                "storage": storage,
                "ms per step": 1e3 * seconds,
                "GLUPS": rate / 1e9,
            }
            rows.append(row | {"copy TB/s": bandwidth / 1e12, "share of floor": rate * bytes_per_cell / bandwidth})
            del state
    return rows


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / _median_seconds(lambda: target.copy_(source), device)


def _bench_training(recipe: Recipe, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for precision in ("fp32", "bf16"):
        for batch in (1, 8, 32) if device.type == "cuda" else (1, recipe.training.batch_size):
            try:
                rows.append(_training_row(recipe, device, precision, batch))
            except torch.OutOfMemoryError:
                rows.append({"precision": precision, "batch": batch, "forward ms": "out of memory"})
    return rows


def _training_row(recipe: Recipe, device: torch.device, precision: str, batch: int) -> dict[str, Any]:
    """Forward pass alone, and forward + backward + optimiser, in milliseconds per sample."""
    generator = torch.Generator().manual_seed(0)
    grid = recipe.dataset.grid
    model = build_model(recipe.model, 1, 1, grid, generator=generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    state, target = (torch.randn(batch, 1, *grid, generator=generator).to(device) for _ in range(2))

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            prediction: torch.Tensor = model(state)
        return prediction

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        relative_l2_loss(forward().float(), target).backward()
        optimizer.step()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        inference = _median_seconds(forward, device)
    training = _median_seconds(update, device)
    row = {
        "precision": precision,
        "batch": batch,
        "forward ms": 1e3 * inference / batch,
        "training ms": 1e3 * training / batch,
    }
    row["samples/s"] = batch / training
    row["GB"] = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    return row


def _median_seconds(function: Callable[[], Any], device: torch.device) -> float:
    times = []
    for index in range(WARM_UP + REPEATS):
        _synchronize(device)
        started = time.perf_counter()
        function()
        _synchronize(device)
        if index >= WARM_UP:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

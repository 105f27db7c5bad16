"""`ergoflow reproduce cost`: what `bench models` measures, kept once per kind of hardware.

RESULTS/cost/<device>.json    rows, notes, hardware, versions and commit, as `ergoflow bench models --output` writes
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ergoflow.pipeline.bench import BenchOptions, bench
from ergoflow.pipeline.runs import write_json
from ergoflow.pipeline.workspace import hardware
from ergoflow.report.runs import slugify

# bfloat16 on a CPU says nothing about training, which is done on a GPU.
PRECISIONS = {"cuda": ("fp32", "bf16"), "cpu": ("fp32",)}
# Rough, until a file of the same kind of device says how long it took.
EXPECTED_SECONDS = {"cuda": 180.0, "cpu": 120.0}


def cost_path(results: Path, device: torch.device) -> Path:
    """Where the costs on a kind of hardware live."""
    return results / "cost" / f"{slugify(hardware(device)['device'])}.json"


def measure_cost(results: Path, *, device: torch.device, console: Console) -> Path:
    """Write the cost of every model on this hardware unless it is there; return the file."""
    path = cost_path(results, device)
    if path.exists():
        return path
    started = time.perf_counter()
    options = BenchOptions(precision=PRECISIONS[device.type])
    bench("models", [], options, device=device, console=console, output=path)
    write_json(path, json.loads(path.read_text()) | {"seconds": time.perf_counter() - started})
    return path


def read_costs(results: Path) -> dict[str, dict[str, Any]]:
    """Every cost file of a results folder by its name."""
    return {path.name: json.loads(path.read_text()) for path in sorted((results / "cost").glob("*.json"))}


def expected_seconds(results: Path, device: torch.device) -> float:
    """How long measuring takes: what another file of this kind of device took, or a guess."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    known = [
        data["seconds"]
        for data in read_costs(results).values()
        if "seconds" in data and ("memory_gib" in data["hardware"]) == (kind == "cuda")
    ]
    return known[-1] if known else EXPECTED_SECONDS[kind]

"""`ergoflow reproduce cost`: what `bench models` measures, kept once per kind of hardware.

RESULTS/cost/<device>.json    rows, notes, hardware, versions and commit, as `ergoflow bench models --output` writes

The file is written after every model and grid, and a measurement that was stopped goes on from there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ergoflow.pipeline.bench import print_findings
from ergoflow.pipeline.bench_models import NOTES, bench_case, paper_cases
from ergoflow.pipeline.bench_timing import Findings, with_crosses
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import write_json
from ergoflow.pipeline.workspace import commit, hardware, versions
from ergoflow.report.runs import slugify

# bfloat16 on a CPU says nothing about training, which is done on a GPU.
PRECISIONS = {"cuda": ("fp32", "bf16"), "cpu": ("fp32",)}
# Rough, until a file of the same kind of device says how long it took.
EXPECTED_SECONDS = {"cuda": 180.0, "cpu": 430.0}


def cost_path(results: Path, device: torch.device) -> Path:
    """Where the costs on a kind of hardware live."""
    return results / "cost" / f"{slugify(hardware(device)['device'])}.json"


def measure_cost(results: Path, *, device: torch.device, console: Console) -> Path:
    """Write the cost of every model on this hardware unless it is there; return the file."""
    path = cost_path(results, device)
    if is_measured(path):
        return path
    known = _known(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    precisions = PRECISIONS[device.type]
    cases = paper_cases(None)
    facts = {"bench": "models", "recipes": [], "options": {"precision": list(precisions)}}
    facts |= {"hardware": hardware(device), "versions": versions(), "commit": commit()}
    rows, notes, done = known.get("rows", []), known.get("notes", NOTES), known.get("cases", 0)
    started = time.perf_counter() - known.get("seconds", 0.0)
    with bar(console, "cost of every model", len(cases), "cases") as advance:
        advance(done)
        for number, case in enumerate(cases[done:], start=done + 1):
            advance(0, note=f"{case.name} {with_crosses(case.grid)}")
            found = bench_case(case, device=device, precisions=precisions, batch=1)
            rows, notes = rows + found.rows, notes + found.notes
            progress = {"cases": number, "complete": number == len(cases), "seconds": time.perf_counter() - started}
            write_json(path, facts | {"rows": rows, "notes": notes} | progress)
            advance()
    print_findings(Findings(rows, notes), f"models on {hardware(device)['device']}", console)
    return path


def is_measured(path: Path) -> bool:
    """Whether a file of costs is there and complete; files from before they were written piece by piece are."""
    return path.exists() and bool(json.loads(path.read_text()).get("complete", True))


def _known(path: Path) -> dict[str, Any]:
    """What a run that was cut short has measured: nothing if that was another commit."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return data if data.get("commit") == commit() else {}


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

"""`ergoflow reproduce cost`: what `bench models` measures, kept once per kind of hardware.

RESULTS/cost/<device>.json    rows, notes, hardware, versions and commit, as `ergoflow bench models --output` writes

The file is written after every model and grid, and says in `done` at which commit each was measured: a measurement that
was stopped goes on from there, be it at another commit. To measure anew, remove the file.
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
    path.parent.mkdir(parents=True, exist_ok=True)
    precisions = PRECISIONS[device.type]
    cases = {f"{case.name} {with_crosses(case.grid)}": case for case in paper_cases(None)}
    facts = {"bench": "models", "recipes": [], "options": {"precision": list(precisions)}}
    facts |= {"hardware": hardware(device), "versions": versions()}
    known = _known(path)
    rows, notes, done = known.get("rows", []), known.get("notes", NOTES), known.get("done", {})
    started = time.perf_counter() - known.get("seconds", 0.0)
    with bar(console, "cost of every model", len(cases), "cases") as advance:
        advance(len(done))
        for label in [label for label in cases if label not in done]:
            advance(0, note=label)
            found = bench_case(cases[label], device=device, precisions=precisions, batch=1)
            rows, notes, done = rows + found.rows, notes + found.notes, done | {label: commit()}
            progress = {"complete": cases.keys() <= done.keys(), "seconds": time.perf_counter() - started}
            commits = {"commit": ", ".join(dict.fromkeys(done.values())), "done": done}
            write_json(path, facts | commits | {"rows": rows, "notes": notes} | progress)
            advance()
    print_findings(Findings(rows, notes), f"models on {hardware(device)['device']}", console)
    return path


def is_measured(path: Path) -> bool:
    """Whether a file of costs is there and complete; files from before they were written piece by piece are."""
    return path.exists() and bool(json.loads(path.read_text()).get("complete", True))


def _known(path: Path) -> dict[str, Any]:
    """What was measured before: nothing if that was under other versions, or by a version that kept no list."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return data if "done" in data and data["versions"] == versions() else {}


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

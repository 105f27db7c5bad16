"""Where files live below one root, and what is written beside every result about the machine that made it.

ROOT/data/<dataset>/            trajectories, stats.yaml, dataset.json
ROOT/runs/<recipe>/seed<N>/     recipe.json, model.safetensors, state/, log.jsonl, rollout/, scores.json, curves.npz
ROOT/report/                    index.html, figures, tables.json, tables.csv
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ergoflow import __version__
from ergoflow.config import SimulatedDatasetConfig, from_dict
from ergoflow.data.files import read_json
from ergoflow.training.processor import keep_freed_memory


@dataclass(frozen=True)
class Workspace:
    """The folders of one root."""

    root: Path

    def dataset(self, name: str) -> Path:
        """Folder of a data set."""
        return self.root / "data" / name

    def run(self, name: str, seed: int) -> Path:
        """Folder of one trained model."""
        return self.root / "runs" / name / f"seed{seed}"

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self.root / "report"

    def scored_runs(self) -> list[Path]:
        """Run folders that hold scores, in a stable order."""
        return sorted(path.parent for path in self.root.glob("runs/*/seed*/scores.json"))


def load_dataset_config(folder: Path) -> SimulatedDatasetConfig:
    """The configuration that `simulate` made a data folder with."""
    path, again = folder / "dataset.json", f"remove {folder} and simulate it again"
    data = read_json(path, remedy=again)
    if not isinstance(data, dict) or "dataset" not in data:
        raise ValueError(f"{path} must hold the settings of a data set, got none; {again}")
    config: SimulatedDatasetConfig = from_dict(SimulatedDatasetConfig, data["dataset"], "dataset")
    return config


def prepare_process() -> None:
    """Make this process ready to compute: every step takes and frees the same memory, which it then keeps."""
    keep_freed_memory()


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is the first GPU, or the CPU where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError(f"the device must be auto, cpu, cuda or cuda:N, got {name!r}; choose one of them")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device {name} needs a CUDA GPU, but this machine shows none; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"the device {name} needs more GPUs than the {torch.cuda.device_count()} of this machine; count from cuda:0"
        )
    return device


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine behind a number."""
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts["memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    return facts


def versions() -> dict[str, str]:
    """The software behind a number."""
    return {"ergoflow": __version__, "python": platform.python_version(), "torch": torch.__version__}


def commit() -> str:
    """Commit of the source tree, with `+` if files differ from it; `unknown` outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

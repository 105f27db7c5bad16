"""Where files live below one root, and what is written beside every result about the machine that made it.

ROOT/data/<dataset>/            trajectories, stats.yaml, dataset.json
ROOT/runs/<recipe>/seed<N>/     recipe.json, model.safetensors, state/, log.jsonl, rollout/, scores.json, curves.npz
ROOT/report/                    index.html, figures, tables.json, tables.csv
"""

from __future__ import annotations

import functools
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
    """Make this process ready to compute: every step takes and frees the same memory, which it then keeps.

    And the commit is read: what is written at the end of an hour was made by the code of its beginning.
    """
    keep_freed_memory()
    commit()


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


@functools.cache
def commit() -> str:
    """Commit of the source tree when first asked for, with `+` if files differ from it; `unknown` outside a checkout.

    A package installed into somebody's environment is no part of the checkout around that.
    """
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    """What git says of this file's folder."""
    done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

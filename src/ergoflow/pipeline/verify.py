"""`ergoflow verify`: is this data set whole, and is it the flow it says it is?

Files are checked one by one (layout, checksum, finite numbers). For Kolmogorov flow two laws follow:

    energy budget      E(T) − E(0) = ∫ (input − viscous − drag) dt   along each trajectory
    stationarity       the energy of the first and second halves agree over trajectories (after a spin-up)

A turbulent channel is held against direct numerical simulation (`verify_channel`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from scipy.integrate import simpson

from ergoflow.config import SPLITS, KolmogorovDatasetConfig
from ergoflow.data.store import TrajectoryStore
from ergoflow.data.verify import check_store
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.shards import completeness
from ergoflow.pipeline.verify_channel import channel_problems
from ergoflow.pipeline.workspace import load_dataset_config
from ergoflow.solvers.kolmogorov import KolmogorovConfig, budget

# The budget is closed by Simpson's rule over stored frames; its error and the storage rounding stay below this
# share of the energy put in and taken out, which is twice the input of a stationary flow.
BUDGET_TOLERANCE = 2.5e-3
# Of a t statistic of 220 trajectories once in 11,000 checks of a stationary flow, of 8 once in 190.
STATIONARITY_SIGMAS = 4.0
# A t statistic of fewer trajectories than this says little.
STATIONARITY_TRAJECTORIES = 8


def verify(folder: Path, *, console: Console) -> bool:
    """Print what was checked; False, with the first broken file named, if something is wrong."""
    if not folder.is_dir():
        raise ValueError(
            f"a data set folder was expected, got {folder}, which is not a folder; name one such as data/kf64"
        )
    checked = 0
    for path, reason in check_store(folder):
        if reason is not None:
            console.print(f"[red]broken[/red] {path}: {reason}", soft_wrap=True)
            return False
        checked += 1
    console.print(f"{checked} files: layout, checksums and finite numbers are good")
    if not (folder / "dataset.json").exists():
        console.print("no dataset.json: not made by `ergoflow simulate`, so the physics was not checked")
        return True
    store, dataset = TrajectoryStore(folder), load_dataset_config(folder)
    if isinstance(dataset, KolmogorovDatasetConfig):
        problems = _kolmogorov_problems(store, dataset, console)
        if (made := completeness(dataset, folder)) != "complete":
            problems.append(f"it holds {made}; `ergoflow simulate` makes the rest")
    else:
        problems = channel_problems(store, dataset, console)
    for problem in problems:
        console.print(f"[red]broken[/red] {folder}: {problem}", soft_wrap=True)
    return not problems


def _kolmogorov_problems(store: TrajectoryStore, dataset: KolmogorovDatasetConfig, console: Console) -> list[str]:
    x, y = store.info.grid
    flow = dataclasses.replace(dataset.flow, grid=(x, y))
    energies, residuals = [], []
    with bar(console, "budgets", sum(store.count(split) for split in SPLITS), "trajectories") as advance:
        for split in SPLITS:
            for trajectory in range(store.count(split)):
                energy, residual = _budget_of(store, split, trajectory, flow, dataset.frame_seconds)
                energies.append(energy)
                residuals.append((residual, split, trajectory))
                advance()
    problems = []
    worst, split, trajectory = max(residuals)
    console.print(
        f"energy budget closes within {worst:.1e} of the energy put in and taken out (allowed {BUDGET_TOLERANCE:.1e})"
    )
    if not worst <= BUDGET_TOLERANCE:
        problems.append(
            f"energy budget of {split} trajectory {trajectory} is open by {worst:.1e} of the energy put in and taken "
            "out; simulate it again"
        )
    if dataset.spin_up_seconds > 0 and len(energies) >= STATIONARITY_TRAJECTORIES:
        sigmas = _half_difference(np.array(energies))
        console.print(
            f"energy of the two halves differs by {sigmas:.1f} standard errors (allowed {STATIONARITY_SIGMAS:.0f})"
        )
        if not sigmas <= STATIONARITY_SIGMAS:
            problems.append(
                f"not stationary: the halves differ by {sigmas:.1f} standard errors; raise dataset.spin_up_seconds"
            )
    return problems


def _budget_of(
    store: TrajectoryStore, split: str, trajectory: int, flow: KolmogorovConfig, seconds: float
) -> tuple[np.ndarray, float]:
    """Energy series (T,) and the budget's defect as a share of the energy put in and taken out."""
    frames = torch.from_numpy(store.read(split, trajectory, 0, store.num_frames(split))).double()  # (T, 1, X, Y)
    terms = {name: value.numpy() for name, value in budget(frames, flow).items()}
    gain = terms["energy"][-1] - terms["energy"][0]
    net = simpson(terms["input"] - terms["viscous"] - terms["drag"], dx=seconds)
    turned_over = simpson(np.abs(terms["input"]) + terms["viscous"] + terms["drag"], dx=seconds)
    return terms["energy"], float(abs(gain - net) / turned_over)


def _half_difference(energies: np.ndarray) -> float:
    """Paired difference of the halves' mean energy over trajectories (J, T), in standard errors."""
    half = energies.shape[1] // 2
    difference = energies[:, :half].mean(1) - energies[:, -half:].mean(1)
    return float(abs(difference.mean()) / (difference.std(ddof=1) / np.sqrt(len(difference))))

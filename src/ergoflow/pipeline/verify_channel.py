"""A channel data set held against direct numerical simulation: mean profile, fluctuations, Reynolds stress."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from ergoflow.config import SPLITS, ChannelDatasetConfig
from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics import Check, compare_with_dns, wall_profiles
from ergoflow.metrics.dns import REYNOLDS_TAU
from ergoflow.pipeline.progress import bar
from ergoflow.solvers.channel import ChannelConfig

# Statistics over a shorter time than this, in δ/u_τ and summed over the splits, are printed but not judged.
JUDGED_FROM = 20.0
# The coarsest lattice that has bands.
FEWEST_CELLS = 96


def has_bands(flow: ChannelConfig) -> bool:
    """Whether there are DNS bands for this channel."""
    return flow.box[1] >= FEWEST_CELLS and flow.reynolds_tau == REYNOLDS_TAU


def channel_problems(store: TrajectoryStore, dataset: ChannelDatasetConfig, console: Console) -> list[str]:
    """Print the comparison; return the bands that are missed, if there is enough data to judge."""
    cells, reynolds = dataset.flow.box[1], dataset.flow.reynolds_tau
    if not has_bands(dataset.flow):
        console.print(f"no DNS bands for {cells} cells at Re_τ = {reynolds:g}: the turbulence was not judged")
        return []
    profiles = channel_profiles(store, reynolds_tau=reynolds, console=console)
    segments = sum(-(-store.count(split) // len(dataset.planes)) for split in SPLITS)
    turnovers = segments * dataset.frames * dataset.frame_seconds
    checks = compare_with_dns(profiles, cells=cells)
    print_checks(checks, f"{turnovers:.1f} δ/u_τ of {store.info.name} against DNS", console)
    if turnovers < JUDGED_FROM:
        console.print(f"{turnovers:.1f} δ/u_τ are too few to judge ({JUDGED_FROM:g} are needed)")
        return []
    return [f"{c.name} is {c.value:.4g}, expected {c.band}; spin up longer or refine" for c in checks if not c.passed]


def print_checks(checks: Sequence[Check], title: str, console: Console) -> None:
    """Show each quantity with its band."""
    table = Table("quantity", "value", "band", "", title=title, title_justify="left")
    for c in checks:
        table.add_row(c.name, f"{c.value:.4g}", c.band, "[green]good[/green]" if c.passed else "[red]outside[/red]")
    console.print(table)


def channel_profiles(store: TrajectoryStore, *, reynolds_tau: float, console: Console) -> dict[str, np.ndarray]:
    """Wall-to-centre profiles over every frame of every split, plane means weighted equally."""
    height = store.info.grid[0]
    mean, squares, stress, frames = np.zeros((3, height)), np.zeros((3, height)), np.zeros(height), 0
    with bar(console, "profiles", sum(store.count(split) for split in SPLITS), "trajectories") as advance:
        for split in SPLITS:
            for trajectory in range(store.count(split)):
                velocity = store.read(split, trajectory, 0, store.num_frames(split))  # (T, 3, Y, Z)
                mean += velocity.mean(axis=-1, dtype=np.float64).sum(axis=0)
                squares += np.square(velocity, dtype=np.float64).mean(axis=-1).sum(axis=0)
                stress += np.multiply(velocity[:, 0], velocity[:, 1], dtype=np.float64).mean(axis=-1).sum(axis=0)
                frames += len(velocity)
                advance()
    return wall_profiles(mean / frames, squares / frames, stress / frames, reynolds_tau=reynolds_tau)

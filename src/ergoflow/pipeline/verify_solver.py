"""`ergoflow verify tcf96`: run the channel itself, without a data set, and hold its turbulence against DNS.

The statistics use every cell of the box, so they converge many times faster than those of stored planes.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ergoflow.config import ChannelDatasetConfig, to_dict
from ergoflow.metrics import Check, compare_with_dns
from ergoflow.metrics.dns import PROFILE_NAMES
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import write_json
from ergoflow.pipeline.shards import trajectory_seed
from ergoflow.pipeline.simulate_channel import channel_impl, spun_up
from ergoflow.pipeline.verify_channel import JUDGED_FROM, has_bands, print_checks
from ergoflow.pipeline.workspace import commit, hardware, versions
from ergoflow.solvers.channel import make_step
from ergoflow.solvers.channel_statistics import ChannelStatistics, check

# Lattice steps between two samples, and samples between two looks of the watch-dogs.
STEPS_PER_SAMPLE = 200
SAMPLES_PER_CHECK = 10
# Largest departure of the total stress from 1 − y/δ, and largest density rms, on fine and coarse lattices.
STRESS_LIMIT = {True: 0.02, False: 0.03}
DENSITY_LIMIT = 4e-4


def verify_solver(
    dataset: ChannelDatasetConfig, *, turnovers: float, device: torch.device, console: Console, output: Path | None
) -> bool:
    """Spin the channel up, average over `turnovers` δ/u_τ and compare; True if no band is missed (or none exists)."""
    started = time.perf_counter()
    state = spun_up(dataset, trajectory_seed(dataset, "test", 0), device=device, console=console)
    result = _statistics(dataset, state, turnovers, device=device, console=console)
    profiles = {name: np.asarray(result[name]) for name in PROFILE_NAMES}
    flow = dataset.flow
    judged = has_bands(flow)
    checks = compare_with_dns(profiles, cells=flow.box[1]) + _balance_checks(result, flow.box[1]) if judged else []
    if judged:
        print_checks(checks, f"{turnovers:g} δ/u_τ of {dataset.name} against DNS", console)
    else:
        console.print(f"no DNS bands for {flow.box[1]} cells at Re_τ = {flow.reynolds_tau:g}: not judged")
    if output is not None:
        write_json(
            output,
            {
                "dataset": to_dict(dataset),
                "turnovers": turnovers,
                "seconds": time.perf_counter() - started,
                "checks": [{"name": c.name, "value": c.value, "band": c.band, "passed": c.passed} for c in checks],
                "profiles": {name: values.tolist() for name, values in profiles.items()},
                "hardware": hardware(device),
                "versions": versions(),
                "commit": commit(),
            },
        )
    if judged and turnovers < JUDGED_FROM:
        console.print(f"{turnovers:g} δ/u_τ are too few to judge ({JUDGED_FROM:g} are needed)")
        return True
    return all(c.passed for c in checks)


def _statistics(
    dataset: ChannelDatasetConfig, state: Tensor, turnovers: float, *, device: torch.device, console: Console
) -> dict[str, Tensor | float]:
    flow = dataset.flow
    step = make_step(flow, substeps=STEPS_PER_SAMPLE, device=device, impl=channel_impl(dataset, device))
    statistics = ChannelStatistics(flow)
    samples = max(1, round(turnovers * flow.units.turnover_steps / STEPS_PER_SAMPLE))
    with bar(console, f"statistics of {dataset.name}", samples * STEPS_PER_SAMPLE, "steps") as advance:
        for sample in range(1, samples + 1):
            state = step(state)
            statistics.update(state)
            if sample % SAMPLES_PER_CHECK == 0:
                check(state, flow, step=sample * STEPS_PER_SAMPLE)
            advance(STEPS_PER_SAMPLE)
    return statistics.result()


def _balance_checks(result: dict[str, Tensor | float], cells: int) -> list[Check]:
    """The momentum balance, total stress = 1 − y/δ, and the loudness of the sound."""
    y_plus, stress = np.asarray(result["y_plus"]), np.asarray(result["total_stress"])
    defect = float(np.abs(stress - (1 - y_plus * 2 / (cells * (y_plus[1] - y_plus[0])))).max())
    limit, density = STRESS_LIMIT[cells >= 192], float(result["density_rms"])
    return [
        Check(name="total stress off 1 − y/δ", value=defect, band=f"<= {limit}", passed=defect <= limit),
        Check(name="density rms", value=density, band=f"< {DENSITY_LIMIT:g}", passed=density < DENSITY_LIMIT),
    ]

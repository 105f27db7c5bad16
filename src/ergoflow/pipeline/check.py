"""A few test windows that travel with a model, and the score that it must reproduce on them.

    check.npz    states (J, 2, C, *grid): the first frame of a test trajectory and the one τ = 5 steps later (fewer
                 where the roll-out kept fewer), normalised, in half precision, at most 300 kB (one window if even that
                 is larger)
    check.json   relative L2 error at τ of each window: `published`, as the run was scored (in `precision`), and
                 `shipped`, as the weights in half precision give it in float32 on a CPU when they are exported

`shipped` must be met again to what float32 leaves on another machine. From `published` it may differ by half
precision: of the weights, of the states, and of the arithmetic if the run was scored in bfloat16. Rounding that moves
a forecast by δ, in units of the truth's norm, moves its error by δ at most: the tolerances are of the errors.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ergoflow.config import load_recipe
from ergoflow.data.files import write_npz_atomic
from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics import relative_l2_per_trajectory
from ergoflow.numerics.trajectory import rollout
from ergoflow.pipeline.runs import load_run, open_store, read_facts, write_json
from ergoflow.pipeline.shortterm import consecutive_steps
from ergoflow.pipeline.workspace import Workspace

CHECK_FORMAT = 1
STATES_FILE, SCORES_FILE = "check.npz", "check.json"
# The first column of the paper's tables: late enough to see a wrong model, too early for chaos.
LEAD = 5
MAX_BYTES = 300_000
MAX_WINDOWS = 4
# Forecasts of two small U-Nets moved by 1e-6 under rounding in float32, by .0017 under weights in half precision and by
# .009 under arithmetic in bfloat16. Weights that are off by 1e-3 of themselves move an error by 3e-4 or more.
FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = {"fp32": 3e-3, "tf32": 3e-3, "bf16": 1.5e-2}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Relative L2 errors after `lead` steps, one per window; `precision` is that of `published`, `measured` is now."""

    lead: int
    precision: Literal["fp32", "tf32", "bf16"]
    published: tuple[float, ...]
    shipped: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """The mean of the measured errors."""
        return float(np.mean(self.measured))

    def require(self, where: Path) -> None:
        """Raise ValueError unless the measured errors are the shipped and the published ones."""
        for name, known, tolerance in (
            ("shipped", self.shipped, FLOAT32_TOLERANCE),
            ("published", self.published, HALF_TOLERANCE[self.precision]),
        ):
            # A model that has become NaN must not pass: the comparison is then false.
            if not all(abs(a - b) <= tolerance for a, b in zip(known, self.measured, strict=True)):
                raise ValueError(
                    f"{where} must reproduce its {name} errors {_shown(known)} at τ = {self.lead} to {tolerance:g}, "
                    f"got {_shown(self.measured)}; train and export it again, or use the version that wrote it"
                )


def write_check(folder: Path, target: Path) -> Check:
    """Write the windows of a scored run `folder` and the scores of its exported weights in `target`."""
    recipe = load_recipe(folder / "recipe.json")
    # A run lies in ROOT/runs/<recipe>/seed<N>.
    store = open_store(recipe, Workspace(folder.parents[2]))
    stride, kept = recipe.task.stride, TrajectoryStore(folder / "rollout")
    lead = min(LEAD, consecutive_steps(kept, -(-store.num_frames("test") // stride)))
    windows = min(MAX_WINDOWS, store.count("test"), max(1, MAX_BYTES // (4 * _values(store))))
    truth = np.stack([store.read("test", j, 0, lead * stride + 1, lead * stride) for j in range(windows)])
    forecast = np.stack([kept.read("test", j, lead, lead + 1) for j in range(windows)])  # (J, 1, C, *grid)
    published = relative_l2_per_trajectory(forecast, truth[:, 1:])[:, 0]
    normalizer = read_facts(folder).normalizer
    states = normalizer.normalize(torch.from_numpy(truth), grid_ndim=len(store.info.grid)).half()
    write_npz_atomic(target / STATES_FILE, {"states": states.numpy()}, compress=True)
    shipped = _measure(target, lead)
    check = Check(
        lead=lead,
        precision=json.loads((folder / "rollout" / "rollout.json").read_text())["evaluation"]["precision"],
        published=tuple(published.tolist()),
        shipped=shipped,
        measured=shipped,
    )
    check.require(folder)
    facts = dataclasses.asdict(check)
    del facts["measured"]
    write_json(target / SCORES_FILE, {"format": CHECK_FORMAT, **facts})
    return check


def run_check(folder: Path) -> Check:
    """Measure an exported model on the windows that came with it."""
    path = folder / SCORES_FILE
    if not path.exists():
        raise ValueError(f"an exported model was expected in {folder}, but {SCORES_FILE} is missing; export it first")
    data = json.loads(path.read_text())
    if data.get("format") != CHECK_FORMAT:
        raise ValueError(
            f"{path} must have format {CHECK_FORMAT}, got {data.get('format')}; use the ergoflow version that wrote it"
        )
    return Check(
        lead=data["lead"],
        precision=data["precision"],
        published=tuple(data["published"]),
        shipped=tuple(data["shipped"]),
        measured=_measure(folder, data["lead"]),
    )


def _measure(folder: Path, lead: int) -> tuple[float, ...]:
    """Errors (J,) of the weights in a folder after `lead` steps, in float32 on the CPU."""
    facts = read_facts(folder)
    with np.load(folder / STATES_FILE) as file:
        states = torch.from_numpy(file["states"]).float()  # (J, 2, C, *grid)
    truth = facts.normalizer.denormalize(states, grid_ndim=len(facts.grid))
    step = load_run(folder)
    with torch.inference_mode():
        *_, forecast = rollout(step, truth[:, 0], lead)
    errors = relative_l2_per_trajectory(forecast[:, None], truth[:, 1:])[:, 0]
    return tuple(float(error) for error in errors)


def _values(store: TrajectoryStore) -> int:
    """Numbers in one state."""
    return len(store.info.fields) * int(np.prod(store.info.grid))


def _shown(errors: tuple[float, ...]) -> str:
    return ", ".join(f"{error:.4g}" for error in errors)

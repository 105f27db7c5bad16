"""`ergoflow reproduce lorenz`: the largest Lyapunov exponent of Lorenz-63, of the solver and of a learned map.

    RESULTS/lorenz/lorenz63.json   exponents with 95 % intervals, and what they rest on
    RESULTS/lorenz/lorenz63.npz    a stretch of both orbits and the single estimates, for the figure

The authors' rebuttal shows this system; the value everyone quotes is λ₁ = 0.9056 (Sprott, Chaos and Time-Series
Analysis, 2003). The forecaster is a multilayer perceptron on (B, 3, 1), trained by the same loop as every other model;
its exponents come from the same function as the solver's.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy.stats import t as student
from torch import Tensor, nn

from ergoflow.data.files import write_npz_atomic
from ergoflow.data.normalize import Normalizer
from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.metrics import lyapunov_exponents
from ergoflow.models.layers import linear
from ergoflow.numerics.trajectory import Step, rollout
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import write_json
from ergoflow.pipeline.workspace import commit, hardware, versions
from ergoflow.solvers.lorenz import Lorenz63Config, make_lorenz63_step
from ergoflow.training.objectives import ObjectiveConfig, make_objective
from ergoflow.training.plan import TrainingConfig
from ergoflow.training.stepper import NormalizedStep, NormalizedWindows, PhysicalStep
from ergoflow.training.trainer import train

LORENZ_FORMAT = 1
#: The quoted exponent (Sprott 2003), as in the authors' rebuttal.
REFERENCE_EXPONENT = 0.9056
# Measured on one core, for the plan of `reproduce`.
EXPECTED_SECONDS = 50.0
COVERAGE = 0.95
COUNT = 3
# The orbit that is drawn.
DRAWN_STEPS = 1500


@dataclass(frozen=True, kw_only=True)
class LorenzSettings:
    """How much is computed: `groups` independent estimates, each the mean over `states` orbits of `span` time units.

    Orbits first run for `spin_up`, tangents for `warm_up` time units. One step of the learned map is `substeps` of the
    solver; it sees `updates` batches of the increments of `train_orbits` orbits.
    """

    groups: int = 16
    states: int = 256
    span: float = 30.0
    spin_up: float = 40.0
    warm_up: float = 10.0
    substeps: int = 5
    train_orbits: int = 64
    train_frames: int = 1000
    width: int = 64
    updates: int = 3000
    batch_size: int = 512

    def __post_init__(self) -> None:
        """An interval needs two estimates."""
        if self.groups < 2:
            raise ValueError(f"groups must be at least 2 for an interval, got {self.groups}; choose 16")


class Perceptron(nn.Module):
    """A map (B, 3, 1) → (B, 3, 1) with two hidden layers of `width`: 3 → W → W → 3 with GELUs between."""

    def __init__(self, width: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            linear(COUNT, width, generator=generator),
            nn.GELU(),
            linear(width, width, generator=generator),
            nn.GELU(),
            linear(width, COUNT, generator=generator),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Return the increment in normalised units."""
        out: Tensor = self.layers(z.flatten(1)).reshape(z.shape)
        return out


def lorenz_path(results: Path) -> Path:
    """Where the exponents live."""
    return results / "lorenz" / "lorenz63.json"


def measure_lorenz(results: Path, *, console: Console, settings: LorenzSettings | None = None) -> Path:
    """Write the exponents of solver and learned map unless they are there; return the file. CPU, float64."""
    path, chosen = lorenz_path(results), settings or LorenzSettings()
    if path.exists():
        return path
    started = time.perf_counter()
    flow = Lorenz63Config()
    step = make_lorenz63_step(flow, substeps=chosen.substeps, dtype=torch.float64)
    seconds = flow.dt * chosen.substeps
    model, facts = _learn(step, seconds, chosen)
    starts = [_on_attractor(step, chosen.states, chosen, seconds, seed=1 + k) for k in range(chosen.groups)]
    truth, learned = _estimates({"truth": step, "model": _flat(model)}, starts, seconds, chosen, console)
    orbits = {f"orbit/{name}": _orbit(push, starts[0][:1]) for name, push in (("truth", step), ("model", _flat(model)))}
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = orbits | {"estimates/truth": truth, "estimates/model": learned}
    write_npz_atomic(path.with_suffix(".npz"), arrays, compress=True)
    # The JSON file is written last: where it is, the result is whole.
    write_json(
        path,
        {
            "format": LORENZ_FORMAT,
            "flow": dataclasses.asdict(flow),
            "settings": dataclasses.asdict(chosen),
            "step_seconds": seconds,
            "reference": REFERENCE_EXPONENT,
            "divergence": -(flow.sigma + 1 + flow.beta),
            "truth": _summary(truth),
            "model": _summary(learned) | facts,
            "seconds": time.perf_counter() - started,
            "hardware": hardware(torch.device("cpu")),
            "versions": versions(),
            "commit": commit(),
        },
    )
    return path


def _learn(step: Step, seconds: float, settings: LorenzSettings) -> tuple[PhysicalStep, dict[str, Any]]:
    """A perceptron trained on one-step increments of orbits that no estimate uses, and its one-step error."""
    started = time.perf_counter()
    first = _on_attractor(step, settings.train_orbits, settings, seconds, seed=0)
    orbits = torch.stack([first, *rollout(step, first, settings.train_frames)], dim=1)  # (J, T, 3)
    changes = orbits.diff(dim=1)
    normalizer = Normalizer(
        mean=orbits.mean(dim=(0, 1)).float(),
        std=orbits.std(dim=(0, 1)).float(),
        std_delta=changes.std(dim=(0, 1)).float(),
    )
    inner = NormalizedStep(
        Perceptron(settings.width, generator=torch.Generator().manual_seed(0)),
        predict="increment",
        scale=normalizer.std_delta / normalizer.std,
    )
    sampler = WindowSampler(*orbits.shape[:2], window=2, batch_size=settings.batch_size, seed=0)
    windows = NormalizedWindows(ResidentWindows(orbits[..., None].float().contiguous(), sampler), normalizer)
    objective = make_objective(ObjectiveConfig(unitary_weight=0.0), generator=torch.Generator().manual_seed(0))
    config = TrainingConfig(
        epochs=settings.updates,
        max_steps=settings.updates,
        batch_size=settings.batch_size,
        optimizer="adamw",
        learning_rate=3e-3,
        schedule="cosine",
        ema_decay=0.999,
        tensorboard=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(inner, objective, windows, config=config, folder=Path(folder), seed=0)
    model = PhysicalStep(inner, normalizer).double().eval()
    unseen = _on_attractor(step, settings.states, settings, seconds, seed=settings.groups + 1)
    facts = {
        "parameters": sum(p.numel() for p in inner.parameters()),
        "samples": settings.updates * settings.batch_size,
        "training_seconds": time.perf_counter() - started,
        "relative_l2@1": _relative_l2(_flat(model)(unseen), step(unseen)),
        "persistence@1": _relative_l2(unseen, step(unseen)),
    }
    return model, facts


def _estimates(
    maps: dict[str, Step], starts: list[Tensor], seconds: float, settings: LorenzSettings, console: Console
) -> list[np.ndarray]:
    """Exponents (groups, 3) of each map from the same starts, by central differences in float64."""
    found = []
    with bar(console, "Lyapunov exponents of Lorenz-63", len(maps) * len(starts), "estimates") as advance:
        for push in maps.values():
            rows = []
            for state in starts:
                rows.append(
                    lyapunov_exponents(
                        push,
                        state,
                        COUNT,
                        num_steps=round(settings.span / seconds),
                        warmup=round(settings.warm_up / seconds),
                        step_time=seconds,
                        method="finite_difference",
                    )
                )
                advance()
            found.append(np.stack(rows))
    return found


def _summary(estimates: np.ndarray) -> dict[str, Any]:
    """Mean and 95 % interval (Student's t over the groups) of each exponent; null where an orbit diverged."""
    if not np.isfinite(estimates).all():
        return {"exponents": [None] * COUNT, "low": [None] * COUNT, "high": [None] * COUNT, "sum": None}
    count = len(estimates)
    mean, error = estimates.mean(axis=0), estimates.std(axis=0, ddof=1) / math.sqrt(count)
    half = student.ppf(0.5 + COVERAGE / 2, count - 1) * error
    low, high = (mean - half).tolist(), (mean + half).tolist()
    return {"exponents": mean.tolist(), "low": low, "high": high, "sum": float(mean.sum())}


def _on_attractor(step: Step, count: int, settings: LorenzSettings, seconds: float, *, seed: int) -> Tensor:
    """States (count, 3) after the spin-up from normal draws around the middle of the attractor."""
    draw = torch.randn(count, COUNT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    state = draw + torch.tensor([0.0, 0.0, 25.0], dtype=torch.float64)
    for _ in range(round(settings.spin_up / seconds)):
        state = step(state)
    return state


def _flat(model: Callable[[Tensor], Tensor]) -> Step:
    """The model as a Step on (B, 3)."""

    def step(state: Tensor) -> Tensor:
        with torch.no_grad():
            return model(state[..., None])[..., 0]

    return step


def _orbit(step: Step, state: Tensor) -> np.ndarray:
    """One orbit (T, 3) from a state (1, 3)."""
    return torch.cat([state, *rollout(step, state, DRAWN_STEPS)]).float().numpy()


def _relative_l2(pred: Tensor, true: Tensor) -> float:
    return float((torch.linalg.vector_norm(pred - true, dim=1) / torch.linalg.vector_norm(true, dim=1)).mean())

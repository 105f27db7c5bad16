"""Lyapunov exponents of a learned map beside those of the solver that made its data.

Both come from `metrics.lyapunov_exponents`, from the same initial states. The model is differentiated (jvp); the solver
is pushed by central differences in float64, which agrees with jvp to 1e-5 and is many times faster on long steps. Where
a data set holds every n-th point, the solver starts from the interpolated state: exponents belong to the attractor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from scipy import stats
from torch import Tensor

from ergoflow.config import KolmogorovDatasetConfig, Recipe
from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics import Interval, lyapunov_exponents
from ergoflow.numerics.fourier import resample
from ergoflow.numerics.trajectory import Step
from ergoflow.ops.cuda_graph import graphed
from ergoflow.pipeline.progress import bar
from ergoflow.solvers.kolmogorov import make_step

# Initial states, one per test trajectory, all pushed at a time; their spread gives the interval.
STATES = 8
# Tangents need a while to find the unstable directions.
WARM_UP_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Exponents:
    """Exponents in 1/s, largest first, one row per initial state: (states, count) for the truth and the model."""

    truth: np.ndarray
    model: np.ndarray

    def leading_error(self) -> Interval:
        """|r|, r = λ₁(model)/λ₁(truth) − 1, with the 95 % interval of r by the jackknife over states.

        r_k leaves out state k; r ± t √((n − 1)/n Σ (r_k − r̄)²), t Student's with n − 1 degrees of freedom. Infinite if
        the model diverges from any state.
        """
        if not np.isfinite(self.model[:, 0]).all():
            return Interval(value=math.inf, low=math.inf, high=math.inf)
        model, truth, count = self.model[:, 0], self.truth[:, 0], len(self.truth)
        error = model.mean() / truth.mean() - 1
        left_out = (model.sum() - model) / (truth.sum() - truth) - 1
        reach = stats.t.ppf(0.975, count - 1) * math.sqrt(count - 1) * left_out.std()
        ends = sorted((abs(error - reach), abs(error + reach)))
        return Interval(value=abs(error), low=0.0 if reach > abs(error) else ends[0], high=ends[1])

    def leading_floor(self) -> Interval:
        """The same between two halves of the truth's states, over all ways to halve them in order."""
        first = self.truth[:, 0]
        halves = [np.roll(first, k) for k in range(len(first))]
        middle = len(first) // 2
        errors = [_relative(half[:middle].mean(), half[middle:].mean()) for half in halves]
        return Interval(value=float(np.mean(errors)), low=min(errors), high=max(errors))


def require_exponents(recipe: Recipe, store: TrajectoryStore) -> None:
    """Refuse data whose flow the solver does not know, before any work is done."""
    if not isinstance(recipe.dataset, KolmogorovDatasetConfig):
        raise ValueError(
            f"exponents need all of a Kolmogorov flow's state, got {recipe.dataset.name}; set evaluation.exponents=0"
        )
    if not (Path(store.folder) / "dataset.json").exists():
        raise ValueError(
            f"exponents need data made by `ergoflow simulate`, got data of your own in {store.folder}; "
            "set evaluation.exponents=0"
        )


def measure_exponents(
    recipe: Recipe, store: TrajectoryStore, step: Step, *, device: torch.device, console: Console
) -> Exponents:
    """The leading `evaluation.exponents` exponents of solver and model."""
    require_exponents(recipe, store)
    evaluation, dataset = recipe.evaluation, recipe.dataset
    assert isinstance(dataset, KolmogorovDatasetConfig)
    substeps = dataset.substeps * recipe.task.stride
    solver = make_step(dataset.flow, substeps=substeps, device=device, dtype=torch.float64)
    states = store.load("test", device=device, stride=store.num_frames("test"))[:STATES, 0]
    warmup = int(WARM_UP_SHARE * evaluation.exponent_steps)
    with bar(
        console, f"Lyapunov exponents of {recipe.name}", 2 * (warmup + evaluation.exponent_steps), "steps"
    ) as advance:

        def counted(push: Step) -> Step:
            def call(z: Tensor) -> Tensor:
                advance()
                return push(z)

            return call

        def of(push: Step, state: Tensor, method: Literal["jvp", "finite_difference"]) -> np.ndarray:
            return lyapunov_exponents(
                push,
                state,
                evaluation.exponents,
                num_steps=evaluation.exponent_steps,
                warmup=warmup,
                step_time=recipe.step_seconds,
                method=method,
                each=True,
                # Launched kernel by kernel it takes 210 ms for 8 states of 128² on an H200.
                record=lambda differential: counted(graphed(differential)),
            )

        truth = of(counted(solver), resample(states.double(), dataset.flow.grid), "finite_difference")
        return Exponents(truth=truth, model=of(step, states, "jvp"))


def _relative(value: float, reference: float) -> float:
    return float(abs(value / reference - 1)) if np.isfinite(value) else float("inf")

"""Plausible runs made of random fields, so that the report can be tested without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ergoflow.report.runs import RunView

STEP_SECONDS = 0.1


def smooth_fields(rng: np.random.Generator, count: int, grid: tuple[int, int], *, peak: float = 4.0) -> np.ndarray:
    """Vorticity-like frames (count, X, Y).

    Random modes whose phases turn at a rate that grows with wavenumber.
    """
    kx, ky = (np.fft.fftfreq(n, 1 / n) for n in grid)
    k = np.hypot(kx[:, None], ky[None, :])
    amplitude = k**1.5 / (1 + (k / peak) ** 4.5)
    phase = rng.uniform(0, 2 * np.pi, grid)
    turn = rng.normal(size=grid) * k * 0.05
    frames = [np.fft.ifft2(amplitude * np.exp(1j * (phase + turn * n))).real for n in range(count)]
    return 4.6 * np.stack(frames) / np.std(frames)


def make_curves(seed: int, grid: tuple[int, int], skill: float, *, frames: int) -> dict[str, np.ndarray]:
    """All curves of one run; a smaller `skill` number is a better model."""
    truth_rng, rng = np.random.default_rng(7), np.random.default_rng(seed + 1)
    fields, noise = smooth_fields(truth_rng, frames, grid), smooth_fields(rng, frames, grid)
    growth = np.minimum(1.0, skill * np.exp(0.09 * np.arange(frames)))[:, None, None]
    model = np.sqrt(1 - 0.9 * growth**2) * fields + growth * noise
    steps, lags, shells = np.arange(1, 61), np.arange(21), np.arange(33)
    energy = (1.0 + shells) * np.exp(-0.16 * shells) * 1e5
    bend = 1 + skill * rng.normal(size=33) * 0.3 - skill * (shells / 33) ** 2
    centers = np.linspace(-30, 30, 61)
    density = np.exp(-np.abs(centers) / 4.0) / 8
    correlation = np.exp(-lags / 6.0)
    series_steps = np.arange(0, 1000, 10)
    wander = 1 + 0.06 * np.sin(series_steps / 70 + rng.uniform(0, 6, (4, 1))) + skill * 0.05 * series_steps / 1000
    truth_wander = 1 + 0.06 * np.sin(series_steps / 70 + truth_rng.uniform(0, 6, (4, 1)))
    matrix = np.linalg.qr(rng.normal(size=(24, 24)))[0] @ np.diag(1 + 0.2 * skill * rng.normal(size=24))
    relative = np.minimum(1.38, skill * np.exp(0.06 * steps))
    return {
        "relative_l2/steps": steps,
        "relative_l2/model": relative,
        "relative_l2_low/model": 0.9 * relative,
        "relative_l2_high/model": 1.1 * relative,
        "relative_l2/persistence": 1.38 * (1 - np.exp(-steps / 4)),
        "relative_l2/climatology": np.full(60, 0.95),
        "relative_l2/zero": np.ones(60),
        "spectrum/shells": shells,
        "spectrum/truth": energy,
        "spectrum/model": energy * bend,
        "spectrum_low/truth": 0.95 * energy,
        "spectrum_high/truth": 1.05 * energy,
        "autocorrelation/lags": lags,
        "autocorrelation/truth": correlation,
        "autocorrelation/model": np.exp(-lags / (6.0 + 4 * skill)),
        "autocorrelation_low/truth": correlation - 0.03,
        "autocorrelation_high/truth": correlation + 0.03,
        "tke/truth": 1 + 0.3 * np.cos(np.linspace(0, 8 * np.pi, grid[1]))[None, :] + 0.05 * fields[0] / 4.6,
        "tke/model": 1 + 0.3 * np.cos(np.linspace(0, 8 * np.pi, grid[1]))[None, :] + 0.05 * noise[0] / 4.6,
        "snapshots/steps": np.array([1, 5, 10, 25, frames - 1]),
        "snapshots/truth": fields[[1, 5, 10, 25, frames - 1], None],
        "snapshots/model": model[[1, 5, 10, 25, frames - 1], None],
        "player/steps": np.arange(frames),
        "player/truth": fields.astype(np.float16),
        "player/model": model.astype(np.float16),
        "pdf/centers": centers,
        "pdf/truth": density,
        "pdf/model": density ** (1 + 0.2 * skill),
        "series/steps": series_steps,
        "series/energy/truth": truth_wander,
        "series/energy/model": wander,
        "series/enstrophy/truth": 10.5 * truth_wander,
        "series/enstrophy/model": 10.5 * wander,
        "operator/eigenvalues": np.linalg.eigvals(matrix),
        "operator/singular_values": np.linalg.svd(matrix, compute_uv=False),
        "attention/x": rng.normal(size=(4, 16, 16)) + 4 * np.eye(16),
        "attention/y": rng.normal(size=(4, 16, 16)) + 4 * np.eye(16),
        "lyapunov/truth": np.array([0.64, 0.4, 0.21, 0.05, -0.1]),
        "lyapunov/model": np.array([0.64, 0.4, 0.21, 0.05, -0.1]) * (1 - 0.3 * skill),
    }


def wall_curves() -> dict[str, np.ndarray]:
    """Profiles of a channel, roughly."""
    y = np.geomspace(0.9, 180, 40)
    profile = np.where(y < 11.6, y, 2.5 * np.log(y) + 5.5)
    curves = {"wall/y_plus": y}
    for source, factor in (("truth", 1.0), ("model", 0.96), ("dns", 1.01)):
        curves[f"wall/U_plus/{source}"] = factor * profile
        for name, peak in (("rms_u", 2.65), ("rms_v", 0.83), ("rms_w", 1.08)):
            curves[f"wall/{name}/{source}"] = factor * peak * (y / 15) * np.exp(1 - y / 15) ** 0.5
    return curves


def metric(label: str, value: float | None, *, skill: float, **extra: Any) -> dict[str, Any]:
    """One entry of scores["metrics"]; the trivial forecasts score 0.9, the floor 0.03."""

    def cell(number: float | None, verdict: str) -> dict[str, Any]:
        low, high = (None, None) if number is None else (0.9 * number, 1.1 * number)
        return {"value": number, "low": low, "high": high, "verdict": verdict}

    verdict = "failed" if value is None else "at floor" if value < 0.05 else "better" if value < 0.9 else "worse"
    rows = {
        "model": cell(value, verdict),
        "persistence": cell(0.89, "worse"),
        "climatology": cell(0.95, "worse"),
    }
    return {
        "label": label,
        "unit": "",
        "better": "lower",
        "headline": True,
        "variant_of": None,
        "definition": f"{label} over 8 trajectories and 900 snapshots.",
        "floor": {"value": 0.03, "low": 0.02, "high": 0.04},
        "rows": {**rows, "zero": cell(1.0, "worse")},
        **extra,
    }


def make_scores(name: str, seed: int, dataset: str, skill: float) -> dict[str, Any]:
    """scores.json of one run."""
    metrics = {
        f"relative_l2@{lead}": metric(f"Rel. L2, τ = {lead}", skill * lead**0.5, skill=skill) for lead in (1, 5, 25)
    }
    metrics["me_ape"] = metric("ME-APE", 0.4 * skill, skill=skill)
    metrics["me_ape@1..16"] = metric(
        "ME-APE, shells 1–16", 0.3 * skill, skill=skill, variant_of="me_ape", headline=False
    )
    metrics["me_lrw"] = metric("ME-LRw", 0.5 * skill, skill=skill)
    metrics["delta_lambda"] = metric("Δλ", 0.2 * skill, skill=skill, unit="1/s")
    metrics["pca_kl"] = metric("KL", 0.6 * skill, skill=skill)
    metrics["energy_drift"] = metric("Energy drift", 0.1 * skill, skill=skill, headline=False)
    return {
        "format": 1,
        "name": name,
        "seed": seed,
        "dataset": dataset,
        "stride": 5,
        "step_seconds": STEP_SECONDS,
        "rollout_steps": 1000,
        "num_trajectories": 4,
        "parameters": 7_325_665,
        "metrics": metrics,
        "survival": {"fraction": 1.0, "diverged_at": [-1, -1, -1, -1], "steps": 1000},
        "hardware": {"device": "one GPU"},
        "versions": {"torch": "2.13.0"},
        "commit": "0123456789abcdef",
        "timings": {"simulate_s": 31.0, "train_s": 640.0, "predict_s": 12.0, "score_s": 8.0},
    }


@pytest.fixture(scope="session")
def make_run() -> Callable[..., RunView]:
    """A factory of synthetic runs."""

    def make(
        name: str = "kf64-a3m",
        *,
        seed: int = 0,
        dataset: str = "kf64",
        skill: float = 0.05,
        grid: tuple[int, int] = (40, 24),
        frames: int = 30,
        walls: bool = False,
    ) -> RunView:
        curves = make_curves(seed + sum(map(ord, name)), grid, skill, frames=frames)
        log = [
            {
                "step": n,
                "loss": float(np.exp(-n / 30) + skill),
                "valid": {"relative_l2@1": 0.9 * float(np.exp(-n / 30) + skill)},
            }
            if n % 20 == 0
            else {"step": n, "loss": float(np.exp(-n / 30) + skill)}
            for n in range(120)
        ]
        recipe = {"model": {"kind": "a3m", "heads": 16}, "training": {"epochs": 50, "learning_rate": 1e-4}}
        scores = make_scores(name, seed, dataset, skill * (1 + 0.1 * seed))
        return RunView(name, seed, recipe, scores, {**curves, **(wall_curves() if walls else {})}, log)

    return make

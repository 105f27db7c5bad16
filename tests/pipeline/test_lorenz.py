"""Lorenz-63: the exponents of solver and learned map, small and quick."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ergoflow.pipeline import lorenz
from ergoflow.pipeline.lorenz import LorenzSettings, Perceptron, lorenz_path, measure_lorenz

SMALL = LorenzSettings(
    groups=3,
    states=64,
    span=6.0,
    spin_up=15.0,
    warm_up=4.0,
    train_orbits=8,
    train_frames=200,
    width=16,
    updates=500,
    batch_size=64,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    measure_lorenz(folder, console=Console(quiet=True), settings=SMALL)
    return folder


def test_exponents_of_the_solver_are_the_known_ones_within_their_intervals(results: Path) -> None:
    data = json.loads(lorenz_path(results).read_text())
    truth = data["truth"]
    # Three times the 95 % interval: a miss by chance is out of the question.
    for value, low, high, known in zip(
        truth["exponents"], truth["low"], truth["high"], (0.9056, 0, -14.572), strict=True
    ):
        assert abs(value - known) < 3 * (high - low) / 2 + 1e-3
    assert truth["sum"] == pytest.approx(data["divergence"], abs=1e-3)
    assert 0 < truth["high"][0] - truth["low"][0] < 1


def test_the_learned_map_is_better_than_persistence_and_its_facts_are_kept(results: Path) -> None:
    data = json.loads(lorenz_path(results).read_text())
    model = data["model"]
    assert model["relative_l2@1"] < model["persistence@1"] / 3
    assert model["parameters"] == 3 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3
    assert {"hardware", "versions", "commit", "settings", "seconds"} <= set(data)
    with np.load(lorenz_path(results).with_suffix(".npz")) as file:
        assert file["estimates/truth"].shape == (3, 3)
        assert file["orbit/truth"].shape == file["orbit/model"].shape


def test_what_is_there_is_not_measured_again(results: Path) -> None:
    before = lorenz_path(results).stat().st_mtime_ns
    assert measure_lorenz(results, console=Console(quiet=True)) == lorenz_path(results)
    assert lorenz_path(results).stat().st_mtime_ns == before


def test_the_perceptron_is_a_function_of_its_seed_alone() -> None:
    state = torch.get_rng_state()
    one, two = (Perceptron(8, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    z = torch.ones(2, 3, 1)
    assert torch.equal(one(z), two(z))
    assert one(z).shape == z.shape
    assert torch.equal(torch.get_rng_state(), state)


def test_intervals_are_students_over_the_estimates() -> None:
    """Of 1, 2 and 3: mean 2, standard error 1/√3, and t with two degrees of freedom is 4.3027 at 95 %."""
    summary = lorenz._summary(np.array([[1.0], [2.0], [3.0]]) * np.array([1.0, 0.0, 2.0]))
    half = 4.302652729696142 / math.sqrt(3)
    assert summary["low"] == pytest.approx([2 - half, 0, 4 - 2 * half])
    assert summary["high"] == pytest.approx([2 + half, 0, 4 + 2 * half])
    assert summary["sum"] == pytest.approx(6)


def test_one_estimate_has_no_interval() -> None:
    with pytest.raises(ValueError, match="groups must be at least 2"):
        LorenzSettings(groups=1)

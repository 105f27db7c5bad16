"""The matrix of cells: what is missing is made, what travelled is enough for the report."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ergoflow.config import Recipe, override
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig
from ergoflow.pipeline.cells import cell_path, is_done, list_cells, read_cell, thin
from ergoflow.pipeline.report import BEGIN, END, document, report
from ergoflow.pipeline.reproduce import Budget, print_plan, reproduce
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import find_recipe
from ergoflow.training.schedules import learning_rate_factor

CPU = torch.device("cpu")
TINY = [
    "dataset.flow.grid=[16, 16]",
    "dataset.flow.viscosity=0.02",
    "dataset.flow.dt=0.05",
    "dataset.spin_up_seconds=5",
    "dataset.frames=32",
    "dataset.train=4",
    "dataset.valid=2",
    "dataset.test=4",
    "dataset.shard_size=4",
    "model.dim=8",
    "model.latent=8",
    "model.depth=1",
    "training.max_steps=2",
    "training.tensorboard=false",
    "evaluation.steps=130",
    "evaluation.keep_first=30",
    "evaluation.resamples=20",
]


def tiny(*more: str) -> Recipe:
    return override(find_recipe("kf64-a3m"), [*TINY, *more])


def trivial(kind: str) -> Recipe:
    model = {"persistence": PersistenceConfig(), "climatology": ClimatologyConfig()}[kind]
    return dataclasses.replace(tiny(), name=f"kf64-{kind}", model=model)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Three cells, made in one call."""
    space = Workspace(tmp_path_factory.mktemp("root"))
    recipes = [tiny(), trivial("persistence"), trivial("climatology")]
    reproduce(recipes, space, seeds=[0], results=space.root / "results", device=CPU, console=Console(quiet=True))
    return space


def plan_of(recipes: list[Recipe], space: Workspace, seeds: list[int]) -> str:
    console = Console(record=True, width=160, file=io.StringIO())
    print_plan(recipes, space, seeds=seeds, results=space.root / "results", console=console)
    return console.export_text()


def test_every_cell_is_written_and_holds_all_that_made_it(space: Workspace) -> None:
    cells = list_cells(space.root / "results")
    assert [path.parent.name for path in cells] == ["kf64-a3m", "kf64-climatology", "kf64-persistence"]
    cell = json.loads(cells[0].read_text())
    assert {"recipe", "scores", "training", "log"} <= set(cell)
    assert {"hardware", "versions", "commit", "metrics"} <= set(cell["scores"])
    assert cell["training"]["steps"] == 2
    assert cell["log"][-1]["step"] == 2
    assert cell["recipe"]["training"]["max_steps"] == 2
    metric = cell["scores"]["metrics"]["me_ape"]
    assert {"value", "low", "high"} <= set(metric["floor"])


def test_report_is_built_again_from_the_cells_alone(space: Workspace, tmp_path: Path) -> None:
    shutil.copytree(space.root / "results", tmp_path / "results")
    elsewhere = Workspace(tmp_path)
    page = report(elsewhere, title="from cells", results=tmp_path / "results").read_text()
    for name in ("kf64-a3m", "kf64-persistence", "kf64-climatology"):
        assert name in page
    here = json.loads((space.root / "runs" / "kf64-a3m" / "seed0" / "scores.json").read_text())
    assert read_cell(cell_path(tmp_path / "results", "kf64-a3m", 0)).scores == here


def test_tables_are_written_between_the_marks_and_nowhere_else(space: Workspace, tmp_path: Path) -> None:
    results, page = space.root / "results", tmp_path / "page.md"
    page.write_text(f"# Ours\n\n{BEGIN}\nold\n{END}\n\nLast words.\n")
    document(results, page)
    text = page.read_text()
    assert text.startswith("# Ours\n\n<!--")
    assert text.endswith("<!-- end -->\n\nLast words.\n")
    assert "old" not in text
    assert "| Table 1 | on KF256" in text
    document(results, page)
    assert page.read_text() == text
    document(results, tmp_path / "new.md")
    assert "## Claims" in (tmp_path / "new.md").read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="must hold the lines"):
        document(results, page)
    with pytest.raises(ValueError, match="cells were expected"):
        document(tmp_path / "nothing", page)


def test_a_finished_cell_is_not_made_again_not_even_without_data(space: Workspace, tmp_path: Path) -> None:
    shutil.copytree(space.root / "results", tmp_path / "results")
    before = {path: path.stat().st_mtime_ns for path in list_cells(tmp_path / "results")}
    elsewhere = Workspace(tmp_path)
    recipes = [tiny(), trivial("persistence")]
    reproduce(recipes, elsewhere, seeds=[0], results=tmp_path / "results", device=CPU, console=Console(quiet=True))
    assert {path: path.stat().st_mtime_ns for path in list_cells(tmp_path / "results")} == before
    assert not (tmp_path / "data").exists()


def test_a_cell_of_other_settings_is_refused_with_the_setting(space: Workspace) -> None:
    path = cell_path(space.root / "results", "kf64-a3m", 0)
    assert is_done(path, tiny())
    with pytest.raises(ValueError, match=r"max_steps': 2.*max_steps': 3.*--results"):
        is_done(path, tiny("training.max_steps=3"))
    assert not is_done(cell_path(space.root / "results", "kf64-a3m", 1), tiny())


def test_plan_says_what_is_left_and_how_long_it_takes(space: Workspace) -> None:
    budget = Budget(minutes=1.5)
    plan = plan_of([tiny()], space, [0, 7])
    rows = [line.split() for line in plan.splitlines() if line.strip().startswith("kf64-a3m")]
    assert rows[0][2] == "done"
    assert rows[1][1:5] == ["7", "train,", "predict,", "score"]
    other = dataclasses.replace(tiny(), name="kf64-other")
    assert "unknown" in plan_of([other], space, [0])
    assert "at least 0.0 min in all" in plan_of([other], space, [0])
    assert "training: 3.0 min in all" in plan_of([budget.apply(other)], space, [0, 1])


def test_a_budget_ends_the_run_and_keeps_the_shape_of_its_schedule() -> None:
    recipe = find_recipe("kf128-a3m")
    timed = Budget(minutes=4).apply(recipe).training
    assert timed.max_minutes == 4
    # Half of the budget is over: two of the five halvings, however many epochs the data would allow.
    assert timed.fraction(step=100, seconds=120, total_steps=timed.total_steps(1000)) == pytest.approx(0.5)
    assert timed.rate(0.5, step=100) == recipe.training.rate(0.5, step=100)
    assert timed.rate(0.5, step=100) / timed.learning_rate == learning_rate_factor(
        "halving", 0.5, step=100, warmup_steps=0, halvings=5
    )
    counted = Budget(samples=1001).apply(recipe).training
    assert counted.total_steps(10) == -(-1001 // recipe.training.batch_size)
    assert Budget().apply(recipe) == recipe


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    wild = dataclasses.replace(tiny("training.learning_rate=1e30", "training.clip_norm=none"), name="kf64-wild")
    with pytest.raises(ValueError, match="kf64-wild seed 0 diverged"):
        reproduce(
            [wild, trivial("persistence")],
            space,
            seeds=[0],
            results=tmp_path / "results",
            device=CPU,
            console=Console(quiet=True),
        )
    assert [path.parent.name for path in list_cells(tmp_path / "results")] == ["kf64-persistence"]
    assert (tmp_path / "report" / "index.html").exists()


def test_thinning_keeps_series_with_their_steps_and_shrinks_fields() -> None:
    steps = thin("series/steps", np.arange(1001))
    energy = thin("series/energy/model", np.arange(2002.0).reshape(2, 1001))
    assert energy.shape == (2, len(steps))
    assert np.array_equal(energy[0], steps)
    field = np.random.default_rng(0).normal(size=(5, 3, 256, 192))
    thinned = thin("snapshots/truth", field)
    assert thinned.shape == (5, 3, 64, 48)
    assert np.allclose(thinned, field[..., ::4, ::4], atol=2e-3)
    assert np.array_equal(thin("snapshots/steps", np.arange(300)), np.arange(300))

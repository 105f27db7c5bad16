"""The matrix of cells: what is missing is made, what travelled is enough for the report."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from ergoflow.config import Recipe, override
from ergoflow.models.a3m import A3MConfig
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig
from ergoflow.pipeline import cost
from ergoflow.pipeline import reproduce as matrix
from ergoflow.pipeline.bench_models import Case
from ergoflow.pipeline.bench_timing import Findings
from ergoflow.pipeline.cells import cell_path, is_done, list_cells, read_cell, thin
from ergoflow.pipeline.cost import cost_path, expected_seconds, is_measured
from ergoflow.pipeline.document import gather
from ergoflow.pipeline.lorenz import lorenz_path
from ergoflow.pipeline.pictures import draw_figures, figures_to_draw
from ergoflow.pipeline.reproduce import Budget, print_plan, reproduce
from ergoflow.pipeline.train import _free_bytes
from ergoflow.pipeline.workspace import Workspace, commit
from ergoflow.recipes import PARTS, collections, find_parts, find_recipe, find_recipes
from ergoflow.report.claims import CLAIMS
from ergoflow.report.reproduction import comparison, table_block
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


def test_a_cell_of_another_recipe_is_refused(space: Workspace, tmp_path: Path) -> None:
    path = shutil.copyfile(cell_path(space.root / "results", "kf64-a3m", 0), tmp_path / "seed0.json")
    with pytest.raises(ValueError, match="must be a cell of kf64-other, got one of kf64-a3m; name another --results"):
        is_done(path, dataclasses.replace(tiny(), name="kf64-other"))


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


def test_finished_cells_are_not_made_again_and_the_report_needs_nothing_else(space: Workspace, tmp_path: Path) -> None:
    shutil.copytree(space.root / "results", tmp_path / "results")
    before = {path: path.stat().st_mtime_ns for path in list_cells(tmp_path / "results")}
    elsewhere = Workspace(tmp_path)
    recipes = [tiny(), trivial("persistence")]
    page = reproduce(
        recipes, elsewhere, seeds=[0], results=tmp_path / "results", device=CPU, console=Console(quiet=True)
    ).read_text()
    assert {path: path.stat().st_mtime_ns for path in list_cells(tmp_path / "results")} == before
    assert not (tmp_path / "data").exists()
    for name in ("kf64-a3m", "kf64-persistence", "kf64-climatology"):
        assert name in page
    here = json.loads((space.root / "runs" / "kf64-a3m" / "seed0" / "scores.json").read_text())
    assert read_cell(cell_path(tmp_path / "results", "kf64-a3m", 0)).scores == here


def test_a_run_that_was_scored_elsewhere_in_the_meantime_is_only_gathered(space: Workspace, tmp_path: Path) -> None:
    """As when cells are scored on the CPU while the GPU trains the next one."""
    scores = space.root / "runs" / "kf64-a3m" / "seed0" / "scores.json"
    before = scores.stat().st_mtime_ns
    console = Console(record=True, width=160, file=io.StringIO())
    print_plan([tiny()], space, seeds=[0], results=tmp_path, console=console)
    assert "gather" in console.export_text()
    reproduce([tiny()], space, seeds=[0], results=tmp_path, device=CPU, console=Console(quiet=True))
    assert read_cell(cell_path(tmp_path, "kf64-a3m", 0)).scores == json.loads(scores.read_text())
    assert scores.stat().st_mtime_ns == before


def test_a_run_trained_in_another_way_does_not_become_a_cell(space: Workspace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was trained with training\.max_steps=2, but training\.max_steps=3"):
        reproduce(
            [tiny("training.max_steps=3")], space, seeds=[0], results=tmp_path, device=CPU, console=Console(quiet=True)
        )
    assert not list_cells(tmp_path)


def test_a_cell_holds_the_evaluation_that_was_asked_for(space: Workspace, tmp_path: Path) -> None:
    root = Workspace(shutil.copytree(space.root, tmp_path / "copy"))
    shorter = tiny("evaluation.steps=125")
    for _ in range(2):
        reproduce([shorter], root, seeds=[0], results=tmp_path, device=CPU, console=Console(quiet=True))
    cell = json.loads(cell_path(tmp_path, "kf64-a3m", 0).read_text())
    assert cell["recipe"]["evaluation"]["steps"] == cell["scores"]["rollout_steps"] == 125


def test_a_cell_of_other_settings_is_refused_with_the_setting(space: Workspace) -> None:
    path = cell_path(space.root / "results", "kf64-a3m", 0)
    assert is_done(path, tiny())
    with pytest.raises(ValueError, match=r"max_steps': 2.*max_steps': 3.*--results"):
        is_done(path, tiny("training.max_steps=3"))
    assert not is_done(cell_path(space.root / "results", "kf64-a3m", 1), tiny())


def test_a_cell_older_than_a_setting_had_its_default(space: Workspace, tmp_path: Path) -> None:
    data = json.loads(cell_path(space.root / "results", "kf64-a3m", 0).read_text())
    assert data["recipe"]["task"].pop("relaxation") == 0
    path = tmp_path / "seed0.json"
    path.write_text(json.dumps(data))
    assert is_done(path, tiny())
    with pytest.raises(ValueError, match=r"relaxation': 0\.0.*relaxation': 0\.1"):
        is_done(path, tiny("task.predict=increment", "task.relaxation=0.1"))
    data["recipe"]["task"]["forgotten"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"seed0\.json holds another version's recipe: .*forgotten.*; remove it"):
        is_done(path, tiny())


def test_no_cell_is_begun_that_would_end_after_the_time_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of training and, as the first cell shows, 35 s besides: two cells end within 200 s, a third does not."""
    clock, made = [1000.0], []

    def run_one(recipe: Recipe, workspace: Workspace, *, seed: int, **_: object) -> Path:
        clock[0] += 60 + 35
        made.append(seed)
        return workspace.run(recipe.name, seed)

    monkeypatch.setattr(matrix, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(matrix, "run_one", run_one)
    monkeypatch.setattr(matrix, "provide_once", lambda *_, **__: None)
    monkeypatch.setattr(matrix, "write_cell", lambda *_: None)

    def run(minutes: float) -> str:
        made.clear()
        console = Console(record=True, width=160, file=io.StringIO())
        recipe = Budget(minutes=1.0).apply(tiny())
        reproduce(
            [recipe],
            Workspace(tmp_path),
            seeds=[0, 1, 2],
            results=tmp_path,
            device=CPU,
            console=console,
            within=minutes,
        )
        return console.export_text()

    assert "no time left for kf64-a3m seed 2: the same command goes on with them" in run(200 / 60)
    assert made == [0, 1]
    assert "no time left" not in run(290 / 60)
    assert made == [0, 1, 2]
    # Until a cell has shown what it takes, a minute besides training is kept free.
    assert "kf64-a3m seed 0, kf64-a3m seed 1, kf64-a3m seed 2" in run(119 / 60)
    assert made == []


def test_plan_says_what_is_left_and_how_long_it_takes(space: Workspace) -> None:
    budget = Budget(minutes=1.5)
    plan = plan_of([tiny()], space, [0, 7])
    rows = [line.split() for line in plan.splitlines() if line.strip().startswith("kf64-a3m")]
    assert rows[0][2] == "done"
    assert rows[1][1:5] == ["7", "train,", "predict,", "score"]
    other = dataclasses.replace(tiny(), name="kf64-other")
    assert "unknown" in plan_of([other], space, [0])
    assert "training: unknown time" in plan_of([other], space, [0])
    assert "at least 1.5 min in all" in plan_of([budget.apply(other), dataclasses.replace(other, name="x")], space, [0])
    assert "training: 3.0 min in all" in plan_of([budget.apply(other)], space, [0, 1])


def test_plan_says_what_is_left_of_the_parts(space: Workspace, tmp_path: Path) -> None:
    def rows(results: Path, recipes: list[Recipe]) -> dict[str, str]:
        console = Console(record=True, width=160, file=io.StringIO())
        print_plan(recipes, space, seeds=[0], results=results, console=console, parts=PARTS, device=CPU)
        lines = [line.split(maxsplit=1) for line in console.export_text().splitlines() if line.strip()]
        return {words[0]: " ".join(words[1].split()) for words in lines if len(words) > 1}

    before = rows(tmp_path / "none", [dataclasses.replace(tiny(), name="kf64-other")])
    assert before["cost"].startswith("measure into ")
    assert before["lorenz"].startswith("measure 0.8 min")
    assert before["figures"].startswith("Lorenz-63, then those of the cells above")
    assert before["long"].startswith("roll out kf128-coarse-ergoformer")
    assert before["long"].endswith("unknown")
    assert before["cost,"].startswith("lorenz, long, figures: at least ")
    done = shutil.copytree(space.root / "results", tmp_path / "results")
    for path in (cost_path(done, CPU), lorenz_path(done)):
        path.parent.mkdir(parents=True)
    cost_path(done, CPU).write_text('{"rows": [], "notes": [], "seconds": 6.0, "hardware": {}}')
    assert expected_seconds(done, CPU) == 6.0
    assert rows(done, [])["cost"].startswith("done")


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


def test_a_budget_by_data_set_is_that_of_every_task_on_it() -> None:
    budget = Budget(minutes=4, by_dataset={"kf128": 3})
    minutes = {
        name: budget.apply(find_recipe(name)).training.max_minutes
        for name in ("kf128-a3m", "kf128-coarse-convnext", "kf256-a3m", "tcf96-ergoformer")
    }
    assert minutes == {"kf128-a3m": 3, "kf128-coarse-convnext": 3, "kf256-a3m": 4, "tcf96-ergoformer": 4}
    alone = Budget(by_dataset={"kf128": 3})
    assert alone.apply(find_recipe("kf256-a3m")) == find_recipe("kf256-a3m")


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    wild = dataclasses.replace(tiny("training.learning_rate=1e30", "training.clip_norm=none"), name="kf64-wild")
    with pytest.raises(ValueError, match="kf64-wild seed 0 did not"):
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


def test_a_run_that_is_too_large_for_the_device_does_not_stop_the_others(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_one = matrix.run_one

    def run(recipe: Recipe, *arguments: object, **options: object) -> Path:
        if recipe.name == "kf64-large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_one(recipe, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(matrix, "run_one", run)
    large, results = dataclasses.replace(tiny(), name="kf64-large"), tmp_path / "results"
    with pytest.raises(ValueError, match="kf64-large seed 0 did not"):
        reproduce([large, tiny()], space, seeds=[0], results=results, device=CPU, console=Console(quiet=True))
    assert [path.parent.name for path in list_cells(results)] == ["kf64-a3m"]


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


def test_the_faces_of_a_box_stay_faces_of_one_box() -> None:
    faces = {"front": (192, 1024), "side": (192, 192), "floor": (1024, 192)}
    front, side, floor = (thin(f"box/{name}", np.ones(shape, np.float32)).shape for name, shape in faces.items())
    assert front == (side[0], floor[0])
    assert side[1] == floor[1]


def test_parts_are_made_once_and_names_say_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measured(case: Case, **_: object) -> Findings:
        calls.append(case.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return (
            Findings([{"model": case.name, "grid": "x"}]) if case.name == "a3m" else Findings([], [f"no {case.name}"])
        )

    monkeypatch.setattr(cost, "bench_case", measured)
    monkeypatch.setattr(cost, "paper_cases", lambda grids: cases)
    cases = [
        Case(name=n, config=A3MConfig(), channels=1, grid=(8, 8), periodic=(True, True)) for n in ("a3m", "mno", "uno")
    ]
    place, page = Workspace(tmp_path), tmp_path

    def run() -> Path:
        results, console = tmp_path / "results", Console(quiet=True)
        return reproduce([], place, seeds=[0], results=results, device=CPU, console=console, parts=["cost"])

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not is_measured(cost_path(tmp_path / "results", CPU))
    monkeypatch.setattr(cost, "commit", lambda: "later")
    for _ in range(2):
        page = run()
    # The third was stopped, and came again; nothing else did.
    assert calls == ["a3m", "mno", "uno", "uno"]
    found = json.loads(cost_path(page, CPU).read_text())
    assert found["rows"] == [{"model": "a3m", "grid": "x"}]
    assert found["notes"][-2:] == ["no mno", "no uno"]
    assert found["done"] == {"a3m 8×8": commit(), "mno 8×8": commit(), "uno 8×8": "later"}
    assert found["commit"] == f"{commit()}, later"
    assert page == tmp_path / "results"
    assert json.loads(cost_path(page, CPU).read_text())["seconds"] >= 0
    assert find_parts(["table1", "cost"]) == ("cost",)
    assert find_parts(["figures"]) == ("lorenz", "figures")
    assert find_parts(["all"]) == PARTS
    assert find_recipes(list(PARTS)) == []
    everything = {recipe.name for recipe in find_recipes(["all"])}
    for group in ("table1", "table1-transient", "table2", "table3", "table4", "seeds"):
        assert set(collections()[group]) <= everything
    assert not any(name.startswith("kf64") for name in everything)


def test_figures_and_verdicts_come_from_the_cells_of_real_runs(space: Workspace, tmp_path: Path) -> None:
    source, target = (
        cell_path(root, name, 0) for root, name in ((space.root / "results", "kf64-a3m"), (tmp_path, "kf128-a3m"))
    )
    target.parent.mkdir()
    cell = json.loads(source.read_text())
    cell["scores"]["name"] = "kf128-a3m"
    target.write_text(json.dumps(cell))
    shutil.copy(source.with_suffix(".npz"), target.with_suffix(".npz"))
    wanted = {picture.slug for picture in figures_to_draw(gather(tmp_path), tmp_path)}
    assert wanted == {"operator-kf128", "attention-sigma", "attention-heads", "spectrum-sigma"}
    draw_figures(gather(tmp_path), tmp_path, console=Console(quiet=True))
    evidence = gather(tmp_path)
    assert {slug for slug, entry in evidence.pictures.items() if entry["file"]} == wanted
    assert "[a3m](results/kf128-a3m/seed0.json)" in table_block(comparison("table4"), evidence)
    verdicts = {claim.text: claim.rule(evidence) for claim in CLAIMS}
    (orthogonal,) = [verdict for text, verdict in verdicts.items() if "within SO(d)" in text]
    assert "singular values" in orthogonal.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_an_earlier_cell_has_freed_is_counted_as_free() -> None:
    cuda = torch.device("cuda")
    before = _free_bytes(cuda)
    block = torch.empty(2**30, dtype=torch.uint8, device=cuda)
    del block
    assert torch.cuda.memory_reserved(cuda) >= 2**30
    assert _free_bytes(cuda) >= before

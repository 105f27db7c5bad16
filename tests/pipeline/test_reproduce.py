"""The matrix of cells: what is missing is made, what travelled is enough for the report."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from ergoflow.config import FilesDatasetConfig, Recipe, override
from ergoflow.data.files import TEMPORARY_SUFFIX, find_leftovers
from ergoflow.models.a3m import A3MConfig
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig
from ergoflow.pipeline import cost
from ergoflow.pipeline import reproduce as matrix
from ergoflow.pipeline.bench_models import Case
from ergoflow.pipeline.bench_timing import Findings
from ergoflow.pipeline.cells import cell_path, expected_minutes, is_done, list_cells, read_cell, thin
from ergoflow.pipeline.cost import cost_path, expected_seconds, is_measured
from ergoflow.pipeline.document import gather
from ergoflow.pipeline.lorenz import lorenz_path
from ergoflow.pipeline.pictures import draw_figures, figures_to_draw
from ergoflow.pipeline.reproduce import Budget, print_plan, reproduce
from ergoflow.pipeline.runs import SUMMARY_FILE
from ergoflow.pipeline.shards import is_whole, list_shards
from ergoflow.pipeline.sharing import claim
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
    with pytest.raises(ValueError, match="with name=kf64-a3m, but name=kf64-other was asked for; name another"):
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


def test_what_killed_processes_left_half_written_goes_with_the_next_command(space: Workspace, tmp_path: Path) -> None:
    """A state of a channel and a roll-out are gigabytes."""
    root = Workspace(shutil.copytree(space.root, tmp_path / "copy"))
    run = root.run("kf64-a3m", 0)
    places = [root.dataset("kf64") / "state" / "train.pt", run / "rollout" / "data" / "test" / "rollout.hdf5"]
    places.append(cell_path(root.root / "results", "kf64-a3m", 0))
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.with_name(f".{place.name}.0123abcd{TEMPORARY_SUFFIX}").touch()
    (run / "rollout" / "rollout.json").unlink()
    cell_path(root.root / "results", "kf64-a3m", 0).unlink()
    reproduce([tiny()], root, seeds=[0], results=root.root / "results", device=CPU, console=Console(quiet=True))
    assert find_leftovers(root.root) == []


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


@pytest.mark.parametrize("what", ["cell", "run", "data"])
def test_what_was_made_with_other_settings_is_refused_before_others_are_made(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It is the last of two cells: the first would take its hour, and the matrix end there."""
    root, named = Workspace(shutil.copytree(space.root, tmp_path / "copy")), "dataset.name=kf64-other"
    other = {"cell": "training.max_steps=3", "run": "training.max_steps=3", "data": "dataset.seed=1"}[what]
    if what == "run":
        cell_path(root.root / "results", "kf64-a3m", 0).unlink()
    if what == "data":
        shutil.copytree(root.dataset("kf64"), root.dataset("kf64-other"))
        path = root.dataset("kf64-other") / "dataset.json"
        path.write_text(path.read_text().replace('"name": "kf64"', '"name": "kf64-other"'))
        last = dataclasses.replace(tiny(named, other), name="last")
    else:
        last = tiny(other)
    monkeypatch.setattr(matrix, "run_one", lambda *_, **__: pytest.fail("made before"))
    with pytest.raises(ValueError, match=rf"{other.split('.')[1].split('=')[0]}=\d, but \S*{other.split('.')[1]}"):
        reproduce(
            [dataclasses.replace(tiny(), name="first"), last],
            root,
            seeds=[0],
            results=root.root / "results",
            device=CPU,
            console=Console(quiet=True),
        )


def test_a_run_that_cannot_go_on_does_not_stop_the_others(space: Workspace, tmp_path: Path) -> None:
    root = Workspace(shutil.copytree(space.root, tmp_path / "copy"))
    folder, console = root.run("kf64-a3m", 0), Console(file=io.StringIO(), width=80)
    (folder / SUMMARY_FILE).unlink()
    (folder / "state" / "state.pt").write_bytes(b"half")
    recipes, results = [tiny(), trivial("persistence")], tmp_path / "results"
    with pytest.raises(ValueError, match="kf64-a3m seed 0 did not; the other cells are in"):
        reproduce(recipes, root, seeds=[0], results=results, device=CPU, console=console)
    assert [path.parent.name for path in list_cells(results)] == ["kf64-persistence"]
    assert "state/state.pt must be a complete training state" in console.file.getvalue()  # type: ignore[attr-defined]


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
    with pytest.raises(ValueError, match=r"with training\.max_steps=2, but training\.max_steps=3 .*--results"):
        is_done(path, tiny("training.max_steps=3"))
    assert not is_done(cell_path(space.root / "results", "kf64-a3m", 1), tiny())


def test_half_a_cell_is_none(space: Workspace, tmp_path: Path) -> None:
    """Of a copy that was cut short; the page, too, shows whole cells alone."""
    path = shutil.copy(cell_path(space.root / "results", "kf64-a3m", 0), tmp_path / "seed0.json")
    assert not is_done(path, tiny())
    shutil.copy(cell_path(space.root / "results", "kf64-a3m", 0).with_suffix(".npz"), tmp_path / "seed0.npz")
    assert is_done(path, tiny())


def test_a_cell_older_than_a_setting_had_its_default(space: Workspace, tmp_path: Path) -> None:
    data = json.loads(cell_path(space.root / "results", "kf64-a3m", 0).read_text())
    assert data["recipe"]["task"].pop("hold") == 0
    path = tmp_path / "seed0.json"
    path.write_text(json.dumps(data))
    path.with_suffix(".npz").touch()
    assert is_done(path, tiny())
    with pytest.raises(ValueError, match=r"task\.hold=0\.0, but task\.hold=0\.1"):
        is_done(path, tiny("task.hold=0.1"))
    data["recipe"]["task"]["forgotten"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"seed0\.json holds another version's recipe: .*forgotten.*; remove it"):
        is_done(path, tiny())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds that were made, on a clock on which a training takes a minute and the rest of a cell 35 s."""
    clock, seeds = [1000.0], []

    def run_one(recipe: Recipe, workspace: Workspace, *, seed: int, **_: object) -> Path:
        folder = workspace.run(recipe.name, seed)
        clock[0] += 35 if (folder / "recipe.json").exists() else 60 + 35
        seeds.append(seed)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY_FILE).write_text('{"seconds": 60}')
        return folder

    monkeypatch.setattr(matrix, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr(matrix, "run_one", run_one)
    monkeypatch.setattr(matrix, "provide_once", lambda *_, **__: None)
    monkeypatch.setattr(matrix, "require_own_run", lambda *_: None)
    monkeypatch.setattr(matrix, "write_cell", lambda *_: None)
    monkeypatch.setattr(matrix, "report", lambda *_, **__: Path())
    return seeds


def told_within(seconds: float, recipe: Recipe, root: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> str:
    console = Console(record=True, width=160, file=io.StringIO())
    options = {"results": root / "results", "device": CPU, "console": console, "within": seconds / 60}
    reproduce([recipe], Workspace(root), seeds=seeds, **options)  # type: ignore[arg-type]
    return console.export_text()


@pytest.mark.parametrize("minutes", [1.0, None])
def test_no_cell_is_begun_that_would_end_after_the_time_given(
    made: list[int], tmp_path: Path, minutes: float | None
) -> None:
    """The first cell shows what is besides training, and what training without a limit takes."""
    recipe = Budget(minutes=minutes).apply(tiny())
    assert "no time left for kf64-a3m seed 2: the same command goes on with them" in told_within(200, recipe, tmp_path)
    assert made == [0, 1]
    made.clear()
    told_within(189, recipe, tmp_path)
    assert made == [0]
    made.clear()
    assert "no time left" not in told_within(290, recipe, tmp_path)
    assert made == [0, 1, 2]


def test_a_minute_besides_training_is_kept_free_until_a_cell_has_shown_what_it_takes(
    made: list[int], tmp_path: Path
) -> None:
    told = told_within(119, Budget(minutes=1.0).apply(tiny()), tmp_path)
    assert "kf64-a3m seed 0, kf64-a3m seed 1, kf64-a3m seed 2" in told
    assert made == []


def test_a_run_that_was_begun_earlier_does_not_show_what_a_cell_takes(made: list[int], tmp_path: Path) -> None:
    """Seed 0 takes 35 s of 128, which leaves too little for a minute of training and the minute kept besides."""
    folder = Workspace(tmp_path).run("kf64-a3m", 0)
    folder.mkdir(parents=True)
    (folder / "recipe.json").touch()
    assert "no time left for kf64-a3m seed 1" in told_within(128, Budget(minutes=1.0).apply(tiny()), tmp_path)
    assert made == [0]


def test_a_cell_of_another_process_is_left_to_it_whether_or_not_there_is_time_for_it(
    made: list[int], tmp_path: Path
) -> None:
    recipe = Budget(minutes=1.0).apply(tiny())
    with claim(Workspace(tmp_path), "kf64-a3m-seed0"):
        told = told_within(160, recipe, tmp_path, (0, 1))
    assert made == [1]
    assert "left to another process: kf64-a3m seed 0" in told
    assert "no time left" not in told


def test_a_trained_run_is_begun_where_there_is_no_time_for_a_training(made: list[int], tmp_path: Path) -> None:
    folder = Workspace(tmp_path).run("kf64-a3m", 1)
    folder.mkdir(parents=True)
    for name in ("recipe.json", SUMMARY_FILE, "model.safetensors"):
        (folder / name).touch()
    told_within(70, Budget(minutes=1.0).apply(tiny()), tmp_path)
    assert made == [1]


def test_time_is_kept_for_a_training_whose_time_a_cell_tells(space: Workspace, made: list[int], tmp_path: Path) -> None:
    known_cell(space, tmp_path / "results", seconds=60)
    assert "no time left for kf64-a3m seed 7" in told_within(119, tiny(), tmp_path, (7,))
    assert made == []
    told_within(121, tiny(), tmp_path, (7,))
    assert made == [7]


def known_cell(space: Workspace, results: Path, **facts: object) -> None:
    """The cell of seed 0 with other facts of its training."""
    shutil.copytree(space.root / "results", results, dirs_exist_ok=True)
    path = cell_path(results, "kf64-a3m", 0)
    cell = json.loads(path.read_text())
    path.write_text(json.dumps(cell | {"training": cell["training"] | facts}))


def test_a_training_is_expected_to_take_what_a_cell_of_its_settings_on_such_a_device_tells(
    space: Workspace, tmp_path: Path
) -> None:
    known_cell(space, tmp_path, seconds=600, samples_per_second=2.0)
    assert expected_minutes(tiny(), tmp_path, CPU) == 10
    # Another end: 30 updates, or 3 epochs of the windows of 4 trajectories with 32 frames, or 90 s.
    size, window = tiny().training.batch_size, tiny().objective.window
    assert expected_minutes(tiny("training.max_steps=30"), tmp_path, CPU) == 30 * size / 120
    epochs = tiny("training.max_steps=none", "training.epochs=3")
    assert expected_minutes(epochs, tmp_path, CPU) == 3 * (4 * (33 - window) // size) * size / 120
    assert expected_minutes(Budget(samples=100 * size).apply(tiny()), tmp_path, CPU) == 100 * size / 120
    assert expected_minutes(Budget(minutes=1.5).apply(tiny()), tmp_path, CPU) == 1.5
    assert expected_minutes(Budget(minutes=1.5, samples=size).apply(tiny()), tmp_path, CPU) == size / 120
    # Another speed.
    for setting in ("training.augment=true", "model.depth=2", "dataset.flow.grid=[32, 32]", "objective.unroll=2"):
        assert expected_minutes(tiny(setting), tmp_path, CPU) is None
    for elsewhere in ({"hardware": {"device": "NVIDIA H200"}}, {"processes": 4}):
        known_cell(space, tmp_path, **elsewhere)
        assert expected_minutes(tiny(), tmp_path, CPU) is None
        assert expected_minutes(Budget(minutes=1.5).apply(tiny()), tmp_path, CPU) == 1.5


def test_a_cell_of_another_version_tells_no_time(space: Workspace, tmp_path: Path) -> None:
    known_cell(space, tmp_path)
    path = cell_path(tmp_path, "kf64-a3m", 0)
    cell = json.loads(path.read_text())
    cell["recipe"]["task"]["forgotten"] = 1
    path.write_text(json.dumps(cell))
    assert expected_minutes(tiny(), tmp_path, CPU) is None


def test_data_of_your_own_tell_the_time_of_the_same_training_only(space: Workspace, tmp_path: Path) -> None:
    known_cell(space, tmp_path, seconds=600, samples_per_second=2.0)
    path = cell_path(tmp_path, "kf64-a3m", 0)
    cell = json.loads(path.read_text())
    cell["recipe"]["dataset"] = {"kind": "files", "name": "mine", "grid": [16, 16], "frame_seconds": 0.1}
    path.write_text(json.dumps(cell))
    brought = FilesDatasetConfig(name="mine", grid=(16, 16), frame_seconds=0.1)
    assert expected_minutes(dataclasses.replace(tiny(), dataset=brought), tmp_path, CPU) == 10
    longer = dataclasses.replace(tiny("training.max_steps=30"), dataset=brought)
    assert expected_minutes(longer, tmp_path, CPU) is None


def test_a_data_set_is_whole_with_its_statistics_and_every_file(space: Workspace, tmp_path: Path) -> None:
    root = Workspace(shutil.copytree(space.root, tmp_path / "copy"))
    dataset, folder = tiny().dataset, root.dataset("kf64")
    assert is_whole(dataset, folder)
    assert not isinstance(dataset, FilesDatasetConfig)
    *_, last = list_shards(dataset, folder)
    last.path.unlink()
    assert not is_whole(dataset, folder)
    assert is_whole(FilesDatasetConfig(name="kf64", grid=(16, 16), frame_seconds=0.1), folder)
    assert "simulate, train" in plan_of([tiny()], root, [7])
    assert "simulate, train" not in plan_of([tiny()], space, [7])
    shutil.copy(space.dataset("kf64") / last.path.relative_to(folder), last.path)
    (folder / "stats.yaml").unlink()
    assert not is_whole(dataset, folder)


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
def test_memory_that_an_earlier_cell_has_freed_is_counted_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    # The device as if no other process used it.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40 - torch.cuda.memory_reserved(device), 2**40))
    before = _free_bytes(cuda)
    block = torch.empty(2**30, dtype=torch.uint8, device=cuda)
    del block
    assert torch.cuda.memory_reserved(cuda) >= 2**30
    assert _free_bytes(cuda) >= before


def test_the_pictures_of_a_diverged_roll_out_are_infinite_without_a_warning() -> None:
    assert thin("snapshots/model", np.full((2, 1, 8, 8), [1e6, 1.0] * 4)).tolist()[0][0][0][:2] == [np.inf, 1.0]

"""Several processes below one root: what one makes, no other makes, and nobody trains beside another."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import io
import itertools
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ergoflow.config import Recipe, override, to_dict
from ergoflow.pipeline import reproduce as matrix
from ergoflow.pipeline import stages
from ergoflow.pipeline.cells import list_cells
from ergoflow.pipeline.reproduce import RESULTS, reproduce
from ergoflow.pipeline.runs import SUMMARY_FILE, is_trained
from ergoflow.pipeline.sharing import alone, claim, turn
from ergoflow.pipeline.simulate import provide
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import find_recipe
from ergoflow.training.trainer import TrainingDiverged

CPU = torch.device("cpu")
QUIET = Console(quiet=True)
PATIENCE = 30.0
TINY = [
    "dataset.flow.grid=[16, 16]",
    "dataset.flow.viscosity=0.02",
    "dataset.flow.dt=0.05",
    "dataset.spin_up_seconds=5",
    "dataset.frames=32",
    "dataset.train=4",
    "dataset.valid=2",
    "dataset.test=4",
    "model.dim=8",
    "model.latent=8",
    "model.depth=1",
    "training.max_steps=20",
    "training.tensorboard=false",
    "evaluation.steps=130",
    "evaluation.resamples=20",
]


def finish(recipe: Recipe, space: Workspace) -> Path:
    folder = space.run(recipe.name, 0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).write_text('{"seconds": 0}')
    return folder


def said(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_claim_is_one_holder_s_until_it_ends(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    with claim(space, "kf64-a3m-seed0") as first:
        with claim(space, "kf64-a3m-seed0") as second:
            assert first
            assert not second
        with claim(space, "kf64-a3m-seed1") as other:
            assert other
        with claim(space, "kf64-a3m-seed0") as third:
            assert not third
    with claim(space, "kf64-a3m-seed0") as later:
        assert later
    with claim(Workspace(tmp_path / "other"), "kf64-a3m-seed0") as elsewhere:
        assert elsewhere


def test_the_claim_of_a_killed_process_lapses(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from ergoflow.pipeline.sharing import claim\n"
        "from ergoflow.pipeline.workspace import Workspace\n"
        "with claim(Workspace(pathlib.Path(sys.argv[1])), 'cell') as mine:\n"
        "    print(mine, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        with claim(Workspace(tmp_path), "cell") as beside:
            assert not beside
        process.kill()
        process.wait()
        with claim(Workspace(tmp_path), "cell") as after:
            assert after


def test_a_process_forked_meanwhile_does_not_prolong_a_claim(tmp_path: Path) -> None:
    """Readers of data are forked while a cell is made, and may outlive it."""
    script = (
        "import os, pathlib, sys, time\n"
        "from ergoflow.pipeline.sharing import claim\n"
        "from ergoflow.pipeline.workspace import Workspace\n"
        "space = Workspace(pathlib.Path(sys.argv[1]))\n"
        "with claim(space, 'cell'):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        time.sleep(600)\n"
        "with claim(space, 'cell') as again:\n"
        "    os.kill(child, 9)\n"
        "    print(again)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout == "True\n"


def test_one_process_goes_on_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with claim(Workspace(tmp_path), "cell") as mine, turn(Workspace(tmp_path), CPU, QUIET):
        assert mine


def test_who_waits_says_so_and_goes_on_when_the_other_ends(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    entered = threading.Event()

    def wait() -> None:
        with alone(Workspace(tmp_path), "page", console, waiting="somebody draws"):
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with alone(Workspace(tmp_path), "page", QUIET, waiting=""):
            waiter = pool.submit(wait)
            assert not entered.wait(0.3)
        waiter.result(PATIENCE)
    assert said(console) == "waiting: somebody draws\n"


def test_an_error_in_a_turn_is_an_error_and_ends_the_turn(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), turn(space, CPU, QUIET):
            raise ZeroDivisionError
    with turn(Workspace(tmp_path / "other"), CPU, QUIET), turn(space, CPU, QUIET):
        assert len(list((tmp_path / "runs" / ".locks").iterdir())) == 1


def test_one_trains_while_another_reads_or_scores_and_never_beside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 0 trains until seed 1 has read its data, and scores until seed 1 trains."""
    space, recipe = Workspace(tmp_path), find_recipe("kf64-a3m")
    done = {(what, seed): threading.Event() for what in ("read", "train", "predict", "score") for seed in (0, 1)}

    def train(*_: object, seed: int, on_data, **__: object) -> None:  # type: ignore[no-untyped-def]
        if seed == 1:
            assert done["train", 0].wait(PATIENCE)
        done["read", seed].set()
        on_data()
        done["train", seed].set()
        if seed == 0:
            assert done["read", 1].wait(PATIENCE)
            assert not done["train", 1].wait(0.3)
        else:
            assert done["predict", 0].is_set()

    def predict(*_: object, seed: int, **__: object) -> None:
        done["predict", seed].set()
        assert done["train", 1].is_set() == (seed == 1)

    def score(*_: object, seed: int, **__: object) -> None:
        if seed == 0:
            assert done["train", 1].wait(PATIENCE)
        done["score", seed].set()

    for function in (train, predict, score):
        monkeypatch.setattr(stages, function.__name__, function)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(stages.run_one, recipe, space, seed=s, device=CPU, console=QUIET) for s in (0, 1)]
        for run in runs:
            run.result(PATIENCE)
    assert all(event.is_set() for event in done.values())


def test_a_cell_whose_turn_comes_too_late_is_left_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is kept for what comes besides training: of 61 seconds one is left to wait."""
    trained, console = [], Console(file=io.StringIO(), width=200)
    space, recipe = Workspace(tmp_path), dataclasses.replace(find_recipe("kf64-a3m"), name="kf64-late")
    recipe = override(recipe, ["training.max_minutes=none"])

    def train(*_: object, on_data, **__: object) -> None:  # type: ignore[no-untyped-def]
        on_data()
        trained.append(recipe.name)
        finish(recipe, space)

    monkeypatch.setattr(stages, "train", train)
    for place, name in ((stages, "predict"), (stages, "score"), (matrix, "provide_once"), (matrix, "write_cell")):
        monkeypatch.setattr(place, name, lambda *_, **__: None)

    def run() -> None:
        reproduce([recipe], space, seeds=[0], results=tmp_path, device=CPU, console=console, within=61 / 60)

    with ThreadPoolExecutor(1) as pool:
        with turn(space, CPU, QUIET):
            runner = pool.submit(run)
            time.sleep(1.5)
        runner.result(PATIENCE)
    assert "no time left for kf64-late seed 0" in said(console)
    assert trained == []
    run()
    assert trained == ["kf64-late"]


def test_a_run_whose_turn_comes_too_late_has_not_begun(tmp_path: Path) -> None:
    """Another command may begin it with other settings."""
    space, recipe = Workspace(tmp_path), override(find_recipe("kf64-a3m"), TINY)
    stages.provide_once(recipe.dataset, space, device=CPU, console=QUIET)

    def too_late() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        stages.run_one(recipe, space, seed=0, device=CPU, console=QUIET, on_turn=too_late)
    assert not space.run(recipe.name, 0).exists()


def test_data_are_made_by_one_process_and_while_nothing_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics do not say that every file is there: here is none."""
    space, dataset, made = Workspace(tmp_path), find_recipe("kf64-a3m").dataset, threading.Event()
    space.dataset("kf64").mkdir(parents=True)
    (space.dataset("kf64") / "stats.yaml").touch()
    monkeypatch.setattr(stages, "provide", lambda *_, **__: made.set())
    for held in (alone(space, "data", QUIET, waiting=""), turn(space, CPU, QUIET)):
        made.clear()
        with ThreadPoolExecutor(1) as pool:
            with held:
                maker = pool.submit(stages.provide_once, dataset, space, device=CPU, console=QUIET)
                assert not made.wait(0.3)
            maker.result(PATIENCE)
        assert made.is_set()


def test_a_subsampled_copy_is_made_while_another_process_trains(tmp_path: Path) -> None:
    """It is read from the finer data set: the device has nothing to do with it."""
    space, recipe = Workspace(tmp_path), override(find_recipe("kf64-a3m"), TINY)
    coarse = override(recipe, ["dataset.name=kf64-half", "dataset.subsample=2"]).dataset
    stages.provide_once(recipe.dataset, space, device=CPU, console=QUIET)
    with ThreadPoolExecutor(1) as pool, turn(space, CPU, QUIET):
        pool.submit(stages.provide_once, coarse, space, device=CPU, console=QUIET).result(PATIENCE)
    timings = json.loads((space.dataset("kf64-half") / "dataset.json").read_text())["timings"]
    assert [entry["made_of"] for entry in timings] == ["kf64"]


def test_data_that_find_no_room_beside_another_training_are_read_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed from disk, the same minutes would train less."""
    space, recipe = Workspace(tmp_path), override(find_recipe("kf64-a3m"), TINY)
    console, waits = Console(file=io.StringIO(), width=200), threading.Event()
    stages.provide_once(recipe.dataset, space, device=CPU, console=QUIET)
    trains = threading.Event()
    trains.set()

    def free_bytes(_: torch.device) -> int:
        waits.set()
        return 0 if trains.is_set() else 2**30

    monkeypatch.setattr("ergoflow.pipeline.train._free_bytes", free_bytes)
    with ThreadPoolExecutor(1) as pool:
        with turn(space, CPU, QUIET):
            run = pool.submit(stages.run_one, recipe, space, seed=0, device=CPU, console=console)
            assert waits.wait(PATIENCE)
            time.sleep(0.3)
            assert "parameters" not in said(console)
            trains.clear()
        run.result(PATIENCE)
    assert "data on the device" in said(console)


def test_what_memory_torch_keeps_is_given_back_with_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of 60 GB each, one after the other, fit into a GPU that both processes share; of a cycle as well."""
    events: list[str] = []
    run = torch.zeros(1)
    run.itself, gone = run, weakref.ref(run)  # type: ignore[attr-defined]
    monkeypatch.setattr("ergoflow.pipeline.sharing._device_name", lambda _: "gpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("given back" if gone() is None else "kept"))
    with turn(Workspace(tmp_path), torch.device("cuda"), QUIET):
        events.append("trained")
        del run
    assert events == ["trained", "given back"]
    with turn(Workspace(tmp_path), CPU, QUIET):
        pass
    assert len(events) == 2


def test_data_that_another_process_has_made_are_read_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, dataset, made = Workspace(tmp_path), find_recipe("kf64-a3m").dataset, threading.Event()
    asked = threading.Event()

    def is_whole(*_: object) -> bool:
        whole = made.is_set()
        asked.set()
        return whole

    monkeypatch.setattr(stages, "is_whole", is_whole)
    monkeypatch.setattr(stages, "provide", lambda *_, **__: None)
    with ThreadPoolExecutor(1) as pool, turn(space, CPU, QUIET):
        with alone(space, "data", QUIET, waiting=""):
            reader = pool.submit(stages.provide_once, dataset, space, device=CPU, console=QUIET)
            assert asked.wait(PATIENCE)
            made.set()
        reader.result(PATIENCE)


def test_a_cell_that_another_process_ends_before_the_claim_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()

    @contextlib.contextmanager
    def late_claim(*_: object) -> Iterator[bool]:
        done.set()
        yield True

    monkeypatch.setattr(matrix, "claim", late_claim)
    monkeypatch.setattr(matrix, "is_done", lambda *_: done.is_set())
    monkeypatch.setattr(matrix, "run_one", lambda *_, **__: pytest.fail("made again"))
    monkeypatch.setattr(matrix, "provide_once", lambda *_, **__: None)
    reproduce([find_recipe("kf64-a3m")], Workspace(tmp_path), seeds=[0], results=tmp_path, device=CPU, console=QUIET)
    assert done.is_set()


def test_the_cell_of_a_process_that_was_killed_is_made_by_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two cells is another's until the second is made; a third stays another's."""
    space, console, made = Workspace(tmp_path), Console(file=io.StringIO(), width=200), []
    one, two, three = (dataclasses.replace(find_recipe("kf64-a3m"), name=f"kf64-{n}") for n in ("one", "two", "three"))
    held = contextlib.ExitStack()

    def run_one(recipe: Recipe, *_: object, **__: object) -> Path:
        held.close()
        made.append(recipe.name)
        return finish(recipe, space)

    monkeypatch.setattr(matrix, "run_one", run_one)
    for name in ("provide_once", "write_cell"):
        monkeypatch.setattr(matrix, name, lambda *_, **__: None)
    with claim(space, "kf64-three-seed0"):
        held.enter_context(claim(space, "kf64-one-seed0"))
        reproduce([one, two, three], space, seeds=[0], results=tmp_path / "results", device=CPU, console=console)
    assert made == ["kf64-two", "kf64-one"]
    assert said(console) == "left to another process: kf64-three seed 0\n"


def test_a_part_is_left_to_the_process_that_measures_it_and_no_other_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, console, measured = Workspace(tmp_path), Console(file=io.StringIO(), width=200), []
    for part in ("cost", "lorenz", "long"):
        monkeypatch.setattr(matrix, f"measure_{part}", lambda *_, part=part, **__: measured.append(part))
    for other in ("cost", "lorenz", "long"):
        measured.clear()
        with claim(space, other):
            reproduce(
                [], space, seeds=[0], results=tmp_path, device=CPU, console=console, parts=["cost", "lorenz", "long"]
            )
        assert {other, *measured} == {"cost", "lorenz", "long"}
        assert len(measured) == 2
        assert f"left to another process: {other}\n" in said(console)


def test_costs_are_measured_while_nothing_trains_and_while_another_process_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, measured, drawn, shown = Workspace(tmp_path), threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(matrix, "measure_cost", lambda *_, **__: measured.set())
    monkeypatch.setattr(matrix, "draw_figures", lambda *_, **__: drawn.set())
    monkeypatch.setattr(matrix, "list_cells", lambda _: [tmp_path])
    monkeypatch.setattr(matrix, "report", lambda *_, **__: shown.set())
    options = {"seeds": [0], "results": tmp_path, "device": CPU, "console": QUIET, "parts": ["cost", "figures"]}
    with ThreadPoolExecutor(1) as pool:
        with alone(space, RESULTS, QUIET, waiting=""):
            with turn(space, CPU, QUIET):
                process = pool.submit(reproduce, [], space, **options)  # type: ignore[arg-type]
                assert not measured.wait(0.3)
            assert measured.wait(PATIENCE)
            assert not shown.wait(0.3)
            assert not drawn.is_set()
        process.result(PATIENCE)
    assert shown.is_set()
    assert drawn.is_set()


@pytest.mark.parametrize(("error", "times"), [(TrainingDiverged, 1), (torch.OutOfMemoryError, 2)])
def test_what_has_diverged_in_one_process_is_tried_again_by_a_later_command_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], times: int
) -> None:
    """One process makes another cell while a second one fails; memory may be enough where it was not."""
    space, console, tried = Workspace(tmp_path), Console(file=io.StringIO(), width=200), []
    slow, wild = (dataclasses.replace(find_recipe("kf64-a3m"), name=name) for name in ("kf64-slow", "kf64-wild"))
    begun, failed = threading.Event(), threading.Event()

    def run_one(recipe: Recipe, *_: object, **__: object) -> Path:
        if recipe is wild:
            tried.append(recipe.name)
            # Longer than a tick of the clock of files.
            time.sleep(0.1)
            raise error("the loss is not finite")
        begun.set()
        assert failed.wait(PATIENCE)
        return finish(recipe, space)

    monkeypatch.setattr(matrix, "run_one", run_one)
    for name in ("provide_once", "write_cell"):
        monkeypatch.setattr(matrix, name, lambda *_, **__: None)

    def fail(*recipes: Recipe) -> None:
        with pytest.raises(ValueError, match="kf64-wild seed 0 did not"):
            reproduce(recipes, space, seeds=[0], results=tmp_path / "results", device=CPU, console=console)

    with ThreadPoolExecutor(1) as pool:
        process = pool.submit(fail, slow, wild)
        assert begun.wait(PATIENCE)
        fail(wild)
        failed.set()
        process.result(PATIENCE)
    assert len(tried) == times
    assert said(console).count("kf64-wild seed 0: the loss is not finite") == 2
    fail(wild)
    assert len(tried) == times + 1


def test_two_processes_with_one_command_make_every_cell_once(tmp_path: Path) -> None:
    """Both need the data set, which is not there yet; whoever ends last draws a page of all cells."""
    recipe = dataclasses.replace(override(find_recipe("kf64-a3m"), TINY), name="kf64-tiny")
    (tmp_path / "kf64-tiny.json").write_text(json.dumps(to_dict(recipe)))
    command = [sys.executable, "-m", "ergoflow", "reproduce", "kf64-tiny.json", "--seeds", "0,1", "--device", "cpu"]
    with (
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as second,
    ):
        told = first.communicate()[0] + second.communicate()[0]
        assert (first.returncode, second.returncode) == (0, 0)
    timings = json.loads((tmp_path / "data" / "kf64" / "dataset.json").read_text())["timings"]
    assert [entry["trajectories"] for entry in timings] == [10]
    cells = list_cells(tmp_path / "results")
    assert [path.name for path in cells] == ["seed0.json", "seed1.json"]
    assert told.count("parameters, data on the device") == 2
    runs = [tmp_path / "runs" / "kf64-tiny" / f"seed{seed}" for seed in range(2)]
    turns = sorted(
        (
            (run / "training.json").stat().st_mtime - json.loads((run / "training.json").read_text())["seconds"],
            (run / "rollout" / "rollout.json").stat().st_mtime,
        )
        for run in runs
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns))
    page = (tmp_path / "report" / "index.html").read_text()
    assert all(f"kf64-tiny/seed{seed}" in page or f"seed {seed}" in page for seed in range(2))


def test_torchrun_is_told_how_cells_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"got 4 of torchrun; start it once for each GPU"):
        reproduce(
            [find_recipe("kf64-a3m")], Workspace(tmp_path), seeds=[0], results=tmp_path, device=CPU, console=QUIET
        )


def test_a_run_is_trained_by_one_process_at_a_time_whatever_it_was_told(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    recipe = override(find_recipe("kf64-a3m"), [*TINY, "name=kf64-a3m-once"])
    provide(recipe.dataset, space, device=CPU, console=QUIET)
    begun, released = threading.Event(), threading.Event()

    def stand_still() -> None:
        begun.set()
        assert released.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        where = {"seed": 0, "device": CPU, "console": QUIET}
        first = pool.submit(train, recipe, space, **where, on_data=stand_still)
        try:
            assert begun.wait(PATIENCE)
            for told in ({}, {"resume": True}, {"overwrite": True}):
                with pytest.raises(ValueError, match=r"seed0 is being made by another process.*wait for its end"):
                    train(recipe, space, **where, **told)
        finally:
            released.set()
        assert is_trained(first.result())
    train(recipe, space, **where, overwrite=True)

"""Shipped models: what goes with them, that they reproduce their published score, and the demo that shows them."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import ergoflow
from ergoflow.cli import main
from ergoflow.config import EvaluationConfig, KolmogorovDatasetConfig, Recipe, override, to_dict
from ergoflow.data.store import TrajectoryStore
from ergoflow.numerics.trajectory import rollout
from ergoflow.pipeline import check, demo_data, long, pretrained, reference
from ergoflow.pipeline import demo as demo_verb
from ergoflow.pipeline.cells import list_cells
from ergoflow.pipeline.check import run_check
from ergoflow.pipeline.demo import demo_pretrained, demo_recipe
from ergoflow.pipeline.demo_data import demo_dataset, make_demo_data
from ergoflow.pipeline.document import gather
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.pretrained import best_small_model, export_model, pretrained_models
from ergoflow.pipeline.reproduce import reproduce
from ergoflow.pipeline.runs import read_facts, weights_digest
from ergoflow.pipeline.score import score
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.stages import run_one
from ergoflow.pipeline.verify import verify
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import datasets, find_recipe
from ergoflow.solvers.kolmogorov import make_step
from ergoflow.training.checkpoint import WEIGHTS_FILE, load_weights, save_weights

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUIET = Console(quiet=True)
MAX_WEIGHTS_BYTES = 10_000_000
TINY = [
    "dataset.flow.grid=[32, 32]",
    "dataset.flow.viscosity=0.02",
    "dataset.flow.dt=0.05",
    "dataset.spin_up_seconds=5",
    "dataset.frames=32",
    "dataset.train=4",
    "dataset.valid=2",
    "dataset.test=4",
    "training.max_steps=30",
    "training.batch_size=4",
    "training.tensorboard=false",
    "evaluation.steps=130",
    "evaluation.keep_first=30",
    "evaluation.resamples=20",
]


def tiny() -> Recipe:
    return override(find_recipe("kf64-convnext"), TINY)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scored run folder."""
    space = Workspace(tmp_path_factory.mktemp("root"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "TRIVIAL_RESAMPLES", 2)
        simulate(tiny().dataset, space, device=CPU, console=QUIET)
        return run_one(tiny(), space, seed=0, device=CPU, console=QUIET)


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    return export_model(run, tmp_path / "shelf" / "kf64-convnext").parent


def test_a_loaded_step_holds_no_graph_and_can_be_differentiated_by_its_state() -> None:
    step, states = ergoflow.load("kf64-ergoformer"), ergoflow.example("kf64-ergoformer")
    assert not step(states[:1]).requires_grad
    state = states[:1].requires_grad_()
    assert torch.autograd.grad(step(state).square().sum(), state)[0].abs().max() > 0


def test_examples_are_states_of_the_flow_in_its_own_units() -> None:
    """Five steps from them the shipped model meets the truth that is stored beside them."""
    states = ergoflow.example("kf64-ergoformer")
    folder = pretrained_models()["kf64-ergoformer"]
    stored = torch.from_numpy(np.load(folder / "check.npz")["states"]).float()  # normalised
    later = read_facts(folder).normalizer.denormalize(stored, grid_ndim=2)[:, 1]
    with torch.inference_mode():
        *_, last = rollout(ergoflow.load("kf64-ergoformer"), states, 5)
    assert ((last - later).flatten(1).norm(dim=1) / later.flatten(1).norm(dim=1)).max() < 0.05
    assert 3 < states.std() < 5  # 1/s; its spread over the training split is 3.7


def test_a_run_folder_has_no_examples(run: Path) -> None:
    with pytest.raises(ValueError, match=r"check.npz was expected in .*, which has none; run `ergoflow export`"):
        ergoflow.example(run)


def change_weights(folder: Path, relative: float) -> None:
    """Multiply every weight by 1 ± `relative`; infinity makes them infinite or NaN."""
    model = pretrained.build_step(pretrained.load_recipe(folder / "recipe.json"), pretrained.read_facts(folder), seed=0)
    metadata = load_weights(model.model, folder / WEIGHTS_FILE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.model.parameters():
            weight.mul_(1 + relative * torch.randn(weight.shape, generator=generator))
    save_weights(model.model, folder / WEIGHTS_FILE, metadata=metadata)


@pytest.mark.parametrize("name", pretrained_models())
def test_shipped_weights_reproduce_their_published_score(name: str) -> None:
    """Skipped while none is shipped; the next tests show on a model of their own what this one would see."""
    folder = pretrained_models()[name]
    run_check(folder).require(folder)
    assert (folder / WEIGHTS_FILE).stat().st_size <= MAX_WEIGHTS_BYTES
    assert pretrained.load_recipe(folder / "recipe.json").name == name


def test_an_exported_model_reproduces_the_score_of_its_run(run: Path, exported: Path) -> None:
    result = run_check(exported)
    result.require(exported)
    rows = json.loads((run / "scores.json").read_text())["metrics"]["relative_l2@5"]["rows"]
    assert len(result.published) == 4
    assert np.mean(result.published) == pytest.approx(rows["model"]["value"], rel=1e-6)
    assert result.measured == pytest.approx(result.shipped, abs=1e-6)
    # Not the trivial agreement of a copy: the weights were rounded.
    assert result.shipped != result.published


def test_a_model_is_checked_over_the_steps_that_its_roll_out_kept(run: Path, tmp_path: Path) -> None:
    space, brief = Workspace(tmp_path), override(tiny(), ["evaluation.lead_steps=[1,3]", "evaluation.keep_first=3"])
    copy = shutil.copytree(run, space.run("kf64-convnext", 0))
    (tmp_path / "data").symlink_to(run.parents[2] / "data")
    predict(brief, space, seed=0, device=CPU, console=QUIET)
    score(brief, space, seed=0, device=CPU, console=QUIET)
    result = run_check(export_model(copy, tmp_path / "out").parent)
    rows = json.loads((copy / "scores.json").read_text())["metrics"]["relative_l2@3"]["rows"]
    assert (result.lead, np.mean(result.published)) == (3, pytest.approx(rows["model"]["value"], rel=1e-6))
    (copy / "rollout" / "rollout.json").unlink()
    with pytest.raises(ValueError, match="not complete; train, predict and score it first"):
        export_model(copy, tmp_path / "out")


@pytest.mark.parametrize("relative", [0.01, math.inf])
def test_other_weights_are_noticed(exported: Path, relative: float) -> None:
    change_weights(exported, relative)
    with pytest.raises(ValueError, match="must reproduce its shipped errors"):
        run_check(exported).require(exported)


def test_a_model_that_draws_its_forecasts_is_not_exported(run: Path, tmp_path: Path) -> None:
    drawing = shutil.copytree(run, tmp_path / "run")
    recipe = json.loads((drawing / "recipe.json").read_text())
    recipe["model"] = to_dict(find_recipe("tcf96-ergoformer-drawn").model)
    (drawing / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(ValueError, match=r"same on every machine.*draws them \(model\.noise=4\)"):
        export_model(drawing, tmp_path / "shelf")
    assert not (tmp_path / "shelf").exists()


def test_an_embellished_score_is_noticed(exported: Path) -> None:
    path = exported / "check.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"published": [0.8 * error for error in facts["published"]]}))
    with pytest.raises(ValueError, match="must reproduce its published errors"):
        run_check(exported).require(exported)


def test_weights_that_half_precision_cannot_hold_are_not_exported(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "kf64-convnext" / "seed0"
    shutil.copytree(run, copy)
    (tmp_path / "data").symlink_to(run.parents[2] / "data")
    export_model(copy, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    change_weights(copy, 1e8)
    scores = json.loads((copy / "scores.json").read_text())
    (copy / "scores.json").write_text(json.dumps(scores | {"weights": weights_digest(copy)}))
    with pytest.raises(ValueError, match=r"seed0 must reproduce its .* errors .*; train and export it again"):
        export_model(copy, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_run_that_was_trained_on_since_it_was_scored_is_not_exported(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "kf64-convnext" / "seed0"
    shutil.copytree(run, copy)
    (tmp_path / "data").symlink_to(run.parents[2] / "data")
    change_weights(copy, 1e-3)
    with pytest.raises(
        ValueError, match="trained further since it was scored; `ergoflow predict` and `score` it again"
    ):
        export_model(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_windows_fit_into_their_limit_and_one_is_always_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_bytes = 2 * 32 * 32
    for limit, windows in ((4 * frame_bytes, 2), (1, 1)):
        monkeypatch.setattr(check, "MAX_BYTES", limit)
        folder = export_model(run, tmp_path / str(limit)).parent
        with np.load(folder / "check.npz") as file:
            assert file["states"].shape == (windows, 2, 1, 32, 32)
            assert file["states"].dtype == np.float16


def test_a_folder_that_was_not_exported_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match=r"check\.json is missing; export it first"):
        run_check(run)


def test_the_demo_takes_the_shipped_model_that_gains_most_of_the_small_ones(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "SHELF", exported.parent)
    assert best_small_model() == exported
    better, larger = exported.parent / "better", exported.parent / "larger"
    for folder, factor in ((better, 0.5), (larger, 0.1)):
        shutil.copytree(exported, folder)
        scores = json.loads((folder / "scores.json").read_text())
        scores["metrics"]["relative_l2@5"]["rows"]["model"]["value"] *= factor
        (folder / "scores.json").write_text(json.dumps(scores))
    training = json.loads((larger / "training.json").read_text())
    (larger / "training.json").write_text(json.dumps(training | {"parameters": 10**9}))
    assert best_small_model() == better
    shutil.rmtree(exported)
    shutil.rmtree(better)
    with pytest.raises(ValueError, match="which holds larger; name one"):
        best_small_model()
    shutil.rmtree(larger)
    with pytest.raises(ValueError, match="which holds none"):
        best_small_model()


def test_the_demo_of_a_shipped_model_ends_in_a_report_and_is_not_repeated(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TRIVIAL_RESAMPLES", 2)
    monkeypatch.setattr(demo_verb, "EVALUATION", EvaluationConfig(steps=130, resamples=20))
    monkeypatch.setattr(pretrained, "SHELF", exported.parent)
    space, console = Workspace(tmp_path / "root"), Console(width=300, record=True, file=io.StringIO())
    mine = space.run("kf64-convnext", 0)
    mine.mkdir(parents=True)
    good = demo_pretrained(None, space, device=CPU, console=console)
    text = console.export_text()
    assert "reproduce their published score" in text
    assert ("demo passed" in text) == good
    folder = space.run("kf64-convnext-pretrained", 0)
    rows = json.loads((folder / "scores.json").read_text())["metrics"]["relative_l2@5"]["rows"]
    # Its data are the run's own test set here, and so is its score, but for rounding.
    published = json.loads((exported / "scores.json").read_text())["metrics"]["relative_l2@5"]["rows"]
    assert rows["model"]["value"] == pytest.approx(published["model"]["value"], abs=3e-3)
    assert rows["persistence"]["value"] == pytest.approx(published["persistence"]["value"], rel=1e-5)
    page = (space.report / "index.html").read_text()
    assert all(name in page.lower() for name in ("kf64-convnext-pretrained", "persistence", "climatology"))
    assert not list(mine.iterdir()), "a training run of that name is not touched"
    stamp = (folder / "rollout" / "rollout.json").stat().st_mtime_ns
    monkeypatch.setattr(demo_verb, "report", lambda *_, **__: space.report / "index.html")
    assert demo_pretrained(str(exported), space, device=CPU, console=QUIET) == good
    assert (folder / "rollout" / "rollout.json").stat().st_mtime_ns == stamp
    change_weights(folder, 0.01)
    with pytest.raises(ValueError, match="holds others; remove that folder"):
        demo_pretrained(str(exported), space, device=CPU, console=QUIET)


def test_the_demo_shows_a_shipped_model_of_the_same_data_beside_the_one_it_trains(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TRIVIAL_RESAMPLES", 2)
    monkeypatch.setattr(demo_verb, "EVALUATION", EvaluationConfig(steps=130, resamples=20))
    monkeypatch.setattr(pretrained, "SHELF", exported.parent)
    shutil.copytree(run.parents[2], tmp_path / "root")
    space = Workspace(tmp_path / "root")
    assert space.run("kf64-convnext", 0).is_dir()

    def shown() -> str:
        console = Console(width=300, record=True, file=io.StringIO())
        demo_verb.demo(tiny(), space, seed=0, device=CPU, console=console)
        return console.export_text()

    with monkeypatch.context() as patch:
        patch.setattr(demo_verb, "demo_dataset", lambda dataset: dataclasses.replace(dataset, frames=9))
        assert "beside it" not in shown()
    error = json.loads((exported / "scores.json").read_text())["metrics"]["relative_l2@5"]["rows"]["model"]["value"]
    line = next(line for line in shown().splitlines() if "beside it" in line)
    assert "kf64-convnext-pretrained, which scores" in line
    assert float(line.split()[-5]) == pytest.approx(error, abs=3e-3)
    page = (space.report / "index.html").read_text()
    assert page.count("kf64-convnext-pretrained") > 1


def test_models_of_a_plane_of_a_channel_are_not_rolled_out_for_long() -> None:
    assert {"kf64-ergoformer", "tcf96-ergoformer"} <= set(pretrained_models())
    assert set(pretrained_models()) - set(long.long_models()) == {"tcf96-ergoformer"}


def test_shipped_models_are_rolled_out_for_long_once_and_without_training(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "SHELF", exported.parent)
    evaluation = dataclasses.replace(tiny().evaluation, steps=150, exponents=1, exponent_steps=20)
    monkeypatch.setattr(long, "EVALUATION", evaluation)
    space, results = Workspace(tmp_path / "root"), tmp_path / "results"
    shutil.copytree(run.parents[2] / "data", space.root / "data")
    assert long.long_to_do(results) == ["kf64-convnext"]
    reproduce([], space, seeds=[0], results=results, device=CPU, console=QUIET, parts=["long"])
    (path,) = list_cells(long.long_folder(results))
    assert long.long_to_do(results) == [] == list_cells(results)
    cell = json.loads(path.read_text())
    assert cell["scores"]["rollout_steps"] == 150
    assert cell["training"] == json.loads((exported / "training.json").read_text())
    assert cell["scores"]["metrics"]["lambda1_error"]["rows"]["model"]["value"] > 0
    assert [group.name for group in gather(results).long] == ["kf64-convnext-long"]
    stamp = path.stat().st_mtime_ns
    reproduce([], space, seeds=[0], results=results, device=CPU, console=QUIET, parts=["long"])
    assert path.stat().st_mtime_ns == stamp


def test_a_small_flow_is_simulated_as_it_is_and_a_large_one_is_cut() -> None:
    known = datasets()
    assert demo_dataset(known["kf64"]) == known["kf64"]
    assert demo_dataset(known["tcf32"]) == known["tcf32"]
    with pytest.raises(ValueError, match="choose a model of a Kolmogorov flow"):
        demo_dataset(known["tcf96"])
    cut = demo_dataset(known["kf128"])
    assert isinstance(cut, KolmogorovDatasetConfig)
    assert (cut.name, cut.flow.grid, cut.grid, cut.substeps) == ("kf128-demo", (256, 256), (128, 128), 4)
    assert (cut.frame_seconds, cut.frames, cut.test) == (0.02, 300, 2)
    # Without a spin-up the flow is as fast as its start.
    transient = demo_dataset(known["kf256-transient"])
    assert isinstance(transient, KolmogorovDatasetConfig)
    assert (transient.spin_up_seconds, transient.substeps) == (0, 6)
    recipe = find_recipe("kf128-coarse-ergoformer")
    shown = demo_recipe(recipe)
    assert (shown.name, shown.dataset) == ("kf128-coarse-ergoformer-pretrained", cut)
    assert (shown.model, shown.task) == (recipe.model, recipe.task)
    assert shown.evaluation.steps == 1000


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> KolmogorovDatasetConfig:
    """A 32² flow that is cut as a 256² one would be."""
    monkeypatch.setattr(demo_data, "SMALL_GRID", 1)
    monkeypatch.setattr(demo_data, "SPIN_UP_SECONDS", 8.0)
    dataset = tiny().dataset
    assert isinstance(dataset, KolmogorovDatasetConfig)
    made = demo_dataset(dataclasses.replace(dataset, spin_up_seconds=20.0))
    assert isinstance(made, KolmogorovDatasetConfig)
    assert made.spin_up_seconds == 8
    return made


def test_a_cut_set_obeys_the_full_solver_and_holds_waves_that_half_the_grid_cannot(
    cut: KolmogorovDatasetConfig, tmp_path: Path
) -> None:
    folder = make_demo_data(cut, Workspace(tmp_path), device=CPU, console=QUIET)
    store = TrajectoryStore(folder)
    assert {split: store.count(split) for split in store.splits} == {"train": 2, "valid": 1, "test": 2}
    states = torch.cat([store.load(split, device="cpu") for split in ("train", "valid", "test")])  # (5, T, 1, X, Y)
    step = make_step(cut.flow, substeps=cut.substeps)
    torch.testing.assert_close(step(states[:, 0]), states[:, 1], rtol=1e-4, atol=1e-4)
    power = torch.fft.rfft2(states[:, 0, 0]).abs().square()
    beyond = power[:, 16 // 3 + 1 : 16, 16 // 3 + 1 :].sum((1, 2)) / power.sum((1, 2))
    assert float(beyond.min()) > 1e-6
    distances = torch.pdist(states[:, 0].flatten(1))
    assert float(distances.min()) > 0.1 * float(states[:, 0].flatten(1).norm(dim=1).mean())
    assert verify(folder, console=QUIET)


def test_a_cut_set_is_made_once_begun_anew_if_interrupted_and_not_mixed(
    cut: KolmogorovDatasetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Workspace(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(demo_data, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make_demo_data(cut, space, device=CPU, console=QUIET)
    folder = make_demo_data(cut, space, device=CPU, console=QUIET)
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*.hdf5")}
    make_demo_data(cut, space, device=CPU, console=QUIET)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.hdf5")} == files
    with pytest.raises(ValueError, match="with frames=32, but frames=31 was asked for"):
        make_demo_data(dataclasses.replace(cut, frames=31), space, device=CPU, console=QUIET)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["demo", "kf64-convnext"], "MODEL is only for --pretrained"),
        (["demo", "--pretrained", "kf46-convnext"], "choose one of: kf64-convnext"),
        (["demo", "--pretrained"], "check.json is missing"),
    ],
)
def test_bad_input_is_one_clear_line(
    words: list[str],
    expected: str,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (exported / "check.json").unlink()
    monkeypatch.setattr(pretrained, "SHELF", exported.parent)
    monkeypatch.setattr(sys, "argv", ["ergoflow", *words, "--root", str(exported.parent / "root")])
    with pytest.raises(SystemExit) as stop:
        main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert expected in line
    assert not (exported.parent / "root").exists()


def test_shipped_models_are_inside_the_wheel(exported: Path, tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    source = tmp_path / "source"
    shutil.copytree(exported, source / "src" / "ergoflow" / "pretrained" / "kf64-convnext")
    (source / "src" / "ergoflow" / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copyfile(ROOT / name, source / name)
    (built,) = wheel.WheelBuilder(str(source)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    with zipfile.ZipFile(built) as file:
        packed = {name for name in file.namelist() if "pretrained" in name}
    assert packed == {f"ergoflow/pretrained/kf64-convnext/{path.name}" for path in exported.iterdir()}
    assert f"ergoflow/pretrained/kf64-convnext/{WEIGHTS_FILE}" in packed

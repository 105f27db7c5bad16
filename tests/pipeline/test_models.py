"""Every model through the same verbs: trained, rolled out, scored, loaded again, and reported together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import ergoflow
from ergoflow.config import Recipe, override
from ergoflow.data.store import TrajectoryStore
from ergoflow.pipeline import pretrained
from ergoflow.pipeline.cells import list_cells
from ergoflow.pipeline.pretrained import export_model
from ergoflow.pipeline.reproduce import reproduce
from ergoflow.pipeline.runs import is_trained, read_facts
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.stages import run_one
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import catalogue, collections, datasets, find_recipe, find_recipes, full_size_models
from ergoflow.recipes.experiments import TASKS, trivial_models
from ergoflow.recipes.small import small_models
from ergoflow.training.dissipation import DissipativeStep, state_norm

CPU = torch.device("cpu")
TINY = [
    "dataset.flow.grid=[32, 32]",
    "dataset.flow.viscosity=0.02",
    "dataset.flow.dt=0.05",
    "dataset.spin_up_seconds=5",
    "dataset.frames=32",
    "dataset.train=4",
    "dataset.valid=2",
    "dataset.test=4",
    "dataset.shard_size=4",
    "training.max_steps=2",
    "training.batch_size=4",
    "training.tensorboard=false",
    "evaluation.steps=130",
    "evaluation.keep_first=30",
    "evaluation.resamples=20",
]


def tiny(model: str, *more: str) -> Recipe:
    return override(find_recipe(f"kf64-{model}"), [*TINY, *more])


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = Workspace(tmp_path_factory.mktemp("root"))
    simulate(tiny("a3m").dataset, space, device=CPU, console=Console(quiet=True))
    return space


@pytest.mark.parametrize("model", small_models())
def test_every_model_trains_rolls_out_and_comes_back_from_disk(space: Workspace, model: str) -> None:
    folder = run_one(tiny(model), space, seed=0, device=CPU, console=Console(quiet=True))
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["metrics"]["relative_l2@1"]["rows"]["model"]["value"] > 0
    assert scores["parameters"] > 0
    step = ergoflow.load(folder)
    state = torch.from_numpy(TrajectoryStore(space.dataset("kf64")).read("test", 0, 0, 1))
    with torch.inference_mode():
        moved = step(state)
    stored = TrajectoryStore(folder / "rollout").read("test", 0, 0, 2)
    assert moved.shape == state.shape
    torch.testing.assert_close(moved[0], torch.from_numpy(stored[1]), rtol=1e-4, atol=1e-4)


def test_all_models_stand_in_one_report(space: Workspace, tmp_path: Path) -> None:
    recipes = [tiny(name) for name in (*small_models(), *trivial_models())]
    results = tmp_path / "results"
    page = reproduce(recipes, space, seeds=[0], results=results, device=CPU, console=Console(quiet=True)).read_text()
    assert len(list_cells(results)) == len(recipes)
    assert all(recipe.name in page for recipe in recipes)


@pytest.mark.parametrize(("model", "moves"), [("persistence", True), ("climatology", False), ("zero", False)])
def test_a_forecast_that_does_not_change_has_no_correlation_in_time(space: Workspace, model: str, moves: bool) -> None:
    folder = run_one(tiny(model), space, seed=0, device=CPU, console=Console(quiet=True))
    with np.load(folder / "curves.npz") as curves:
        assert ("autocorrelation/model" in curves) == moves
        assert {"autocorrelation/truth", "spectrum/model"} <= set(curves)


def test_a_guarded_model_contracts_far_from_the_data_and_is_itself_on_them(space: Workspace) -> None:
    folder = run_one(tiny("mno"), space, seed=0, device=CPU, console=Console(quiet=True))
    step, facts = ergoflow.load(folder), read_facts(folder)
    assert isinstance(step.step, DissipativeStep)
    frames = torch.from_numpy(TrajectoryStore(space.dataset("kf64")).read("train", 1, 0, 31, 10))
    normalised = facts.normalizer.normalize(frames)
    assert facts.radius is not None
    assert float(state_norm(normalised).max()) <= facts.radius * (1 + 1e-6)
    with torch.inference_mode():
        assert torch.equal(step.step(normalised), step.step.step(normalised))
        far = 1e6 * normalised
        assert torch.allclose(step.step(far), 0.5 * far)


def test_augmentation_changes_the_windows_and_nothing_else(space: Workspace) -> None:
    weights = []
    for augment in ("false", "true", "true"):
        name = f"kf64-augment-{len(weights)}"
        recipe = dataclasses.replace(tiny("convnext", f"training.augment={augment}"), name=name)
        folder = run_one(recipe, space, seed=0, device=CPU, console=Console(quiet=True))
        weights.append(load_file(folder / "model.safetensors"))
    plain, moved, again = (torch.cat([w.flatten() for w in run.values()]) for run in weights)
    assert not torch.equal(plain, moved)
    assert torch.equal(moved, again)


def test_a_roll_out_in_bfloat16_stays_near_the_one_in_float32_and_is_float32(space: Workspace) -> None:
    frames = []
    for precision in ("fp32", "bf16"):
        recipe = dataclasses.replace(tiny("convnext", f"evaluation.precision={precision}"), name=f"kf64-{precision}")
        folder = run_one(recipe, space, seed=0, device=CPU, console=Console(quiet=True))
        frames.append(torch.from_numpy(TrajectoryStore(folder / "rollout").read("test", 0, 0, 2)))
    assert frames[0].dtype == frames[1].dtype == torch.float32
    assert not torch.equal(frames[0], frames[1])
    assert float((frames[0] - frames[1]).norm() / frames[0].norm()) < 0.02


def test_weights_of_another_model_are_refused_with_the_reason(space: Workspace) -> None:
    console = Console(quiet=True)
    ours = run_one(tiny("convnext"), space, seed=0, device=CPU, console=console)
    theirs = run_one(tiny("mno"), space, seed=0, device=CPU, console=console)
    kept = (ours / "model.safetensors").read_bytes()
    try:
        (ours / "model.safetensors").write_bytes((theirs / "model.safetensors").read_bytes())
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            ergoflow.load(ours)
    finally:
        (ours / "model.safetensors").write_bytes(kept)


def test_an_exported_model_is_half_as_large_and_forecasts_the_same(space: Workspace, tmp_path: Path) -> None:
    folder = run_one(tiny("uno"), space, seed=0, device=CPU, console=Console(quiet=True))
    weights = export_model(folder, tmp_path / "uno")
    real = [w for w in load_file(weights).values() if not w.is_complex()]
    assert {w.dtype for w in real} == {torch.float16}
    state = torch.from_numpy(TrajectoryStore(space.dataset("kf64")).read("test", 0, 0, 3))
    with torch.inference_mode():
        ours, theirs = ergoflow.load(folder)(state), ergoflow.load(tmp_path / "uno")(state)
    assert ours.dtype == theirs.dtype == torch.float32
    assert float((ours - theirs).norm() / ours.norm()) < 2e-3
    assert not torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="train, predict and score it first"):
        export_model(tmp_path, tmp_path / "none")


def test_a_shipped_model_is_found_by_name_and_takes_the_place_of_a_training(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_one(tiny("convnext"), space, seed=0, device=CPU, console=Console(quiet=True))
    monkeypatch.setattr(pretrained, "SHELF", tmp_path)
    with pytest.raises(ValueError, match="none is shipped"):
        ergoflow.load("kf64-convnext")
    export_model(folder, tmp_path / "kf64-convnext")
    assert list(pretrained.pretrained_models()) == ["kf64-convnext"]
    assert ergoflow.load("kf64-convnext").step.model is not None
    elsewhere = Workspace(tmp_path / "root")
    installed = pretrained.install("kf64-convnext", elsewhere, seed=0)
    assert is_trained(installed)
    (installed / "recipe.json").write_text("mine")
    assert (pretrained.install("kf64-convnext", elsewhere, seed=0) / "recipe.json").read_text() == "mine"


def test_every_task_has_every_model() -> None:
    known = catalogue()
    for task in TASKS:
        for model in (*full_size_models(), *trivial_models()):
            assert f"{task}-{model}" in known
        for model in ("a3m", "mno", "uno", "mwt", "factformer", "performer"):
            common = known[f"{task}-{model}-common"]
            assert common.task.predict == "increment"
            assert common.model == known[f"{task}-{model}"].model
    for flow in ("kf64", "tcf32"):
        assert all(f"{flow}-{model}" in known for model in (*small_models(), *trivial_models()))
    assert set(small_models()) == set(full_size_models())


def test_groups_name_recipes_that_exist_and_each_once() -> None:
    for name, members in collections().items():
        assert members, name
        assert len(set(members)) == len(members)
        assert [recipe.name for recipe in find_recipes([name, members[0]])] == list(members)
    assert not set(collections()) & (set(catalogue()) | set(datasets()))


def test_variants_of_a_table_share_everything_but_what_they_name() -> None:
    base = find_recipe("kf128-a3m")
    for suffix, changed in (
        ("free", {"operator": "free"}),
        ("exact", {"operator": "exact"}),
        ("base", {"operator": "free", "pooling": ("mean",)}),
        ("sigma16", {"sigma": 16.0}),
    ):
        recipe = find_recipe(f"kf128-a3m-{suffix}")
        assert recipe.model == dataclasses.replace(base.model, **changed)  # type: ignore[arg-type]
        assert dataclasses.replace(recipe, name=base.name, model=base.model) == base

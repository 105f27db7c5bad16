"""A step of one's own is rolled out, scored and shown as a trained run is, and takes no trained run's place."""

from __future__ import annotations

import json
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import ergoflow
from ergoflow.config import Recipe, override, to_dict
from ergoflow.pipeline import reference
from ergoflow.pipeline.judge import judge
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.report import report
from ergoflow.pipeline.score import score
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.stages import run_one
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import find_recipe

CPU = torch.device("cpu")
QUIET = Console(quiet=True)
TINY = [
    "dataset.flow.grid=[32, 32]",
    "dataset.flow.viscosity=0.02",
    "dataset.flow.dt=0.05",
    "dataset.spin_up_seconds=5",
    "dataset.frames=64",
    "dataset.train=4",
    "dataset.valid=2",
    "dataset.test=4",
    "training.max_steps=4",
    "training.batch_size=4",
    "training.tensorboard=false",
    "evaluation.steps=130",
    "evaluation.resamples=20",
    "task.stride=2",
]


def tiny(*more: str) -> Recipe:
    return override(find_recipe("kf64-convnext"), [*TINY, *more])


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Data, a trained run and the persistence of this package."""
    place = Workspace(tmp_path_factory.mktemp("root"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "TRIVIAL_RESAMPLES", 2)
        simulate(tiny().dataset, place, device=CPU, console=QUIET)
        run_one(tiny(), place, seed=0, device=CPU, console=QUIET)
    return place


def judged(step: object, space: Workspace, *, name: str = "mine", recipe: Recipe | None = None, seed: int = 0) -> Path:
    return judge(step, recipe or tiny(), space, name=name, seed=seed, device=CPU, console=QUIET)


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


def test_a_loaded_model_is_judged_as_the_run_that_it_is(space: Workspace) -> None:
    """Metrics, survival and curves to the digit; its size too, where it is a module."""
    trained = space.run("kf64-convnext", 0)
    folder = judged(ergoflow.load(trained), space)
    ours, theirs = scores_of(folder), scores_of(trained)
    same = ("metrics", "survival", "parameters", "stride", "step_seconds", "rollout_steps", "num_trajectories")
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert ours["parameters"] > 0
    with np.load(folder / "curves.npz") as a, np.load(trained / "curves.npz") as b:
        assert np.array_equal(a["relative_l2/model"], b["relative_l2/model"])


def test_the_page_shows_it_beside_the_others_and_again_after_a_second_judgement(space: Workspace) -> None:
    for factor in (0.9, 0.5):
        folder = judged(lambda state, factor=factor: factor * state, space, name="shrinking")
        assert scores_of(folder)["parameters"] == 0
        error = scores_of(folder)["metrics"]["relative_l2@25"]["rows"]["model"]["value"]
        assert error == pytest.approx(1, abs=0.15 if factor == 0.9 else 1e-6)
    text = report(space, title="x", console=QUIET).read_text()
    assert "shrinking" in text
    assert "kf64-convnext" in text
    details = unescape(text.split("<summary>shrinking, seed 0</summary>")[1].split("</details>")[0])
    assert '"parameters": 0' in details
    assert not any(f'"{part}"' in details for part in ("objective", "training", "learning_rate"))
    row = next(
        line for line in text.split("<tr>") if line.startswith('<th scope="row">shrinking<') and "commit" not in line
    )
    assert row.count("<td>elsewhere</td>") == 1
    assert "trained in 0 s" not in text


def test_a_module_is_judged_in_its_eval_mode(space: Workspace) -> None:
    class Noisy(nn.Module):
        def forward(self, state: Tensor) -> Tensor:
            return torch.randn_like(state) if self.training else state

    metrics = scores_of(judged(Noisy(), space, name="noisy"))["metrics"]
    rows = metrics["relative_l2@5"]["rows"]
    assert rows["model"]["value"] == rows["persistence"]["value"]


def test_what_is_no_step_and_what_would_cost_a_run_is_refused_before_anything_is_written(space: Workspace) -> None:
    before = (space.run("kf64-convnext", 0) / "recipe.json").read_bytes()
    with pytest.raises(ValueError, match="holds a trained run, which is not replaced; choose another name"):
        judged(lambda state: state, space, name="kf64-convnext")
    assert (space.run("kf64-convnext", 0) / "recipe.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"real numbers \(1, 1, 32, 32\).*got torch.float32 \(1, 1, 16, 16\)"):
        judged(lambda state: state[..., ::2, ::2], space, name="smaller")
    with pytest.raises(ValueError, match="a module on cpu was expected, got one on meta; give device= or move it"):
        judged(nn.Conv2d(1, 1, 1, device="meta"), space, name="meta")
    with pytest.raises(ValueError, match="a tensor of a tensor, got tuple; wrap"):
        judged(lambda state: (state, None), space, name="pair")
    with pytest.raises(ValueError, match=r"real numbers .*, got torch\.complex64 \(1, 1, 32, 32\)"):
        judged(lambda state: torch.fft.ifft(torch.fft.fft(state)), space, name="waves")
    with pytest.raises(ValueError, match=r"a seed must lie in 0 \.\. 4294967295, got -1"):
        judged(lambda state: state, space, name="minus", seed=-1)
    with pytest.raises(ValueError, match=r"set evaluation\.exponents to 0"):
        judged(lambda state: state, space, name="chaos", recipe=tiny("evaluation.exponents=1"))
    with pytest.raises(ValueError, match="names a folder"):
        judged(lambda state: state, space, name="a/b")
    assert not any(
        space.run(name, 0).exists() for name in ("smaller", "meta", "pair", "waves", "minus", "chaos", "a/b")
    )


def test_scores_of_an_earlier_step_are_not_those_of_one_that_fails_on_the_way(space: Workspace) -> None:
    folder = judged(lambda state: state, space, name="failing")
    calls = 0

    def fails(state: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise RuntimeError("no more")
        return state

    with pytest.raises(RuntimeError, match="no more"):
        judged(fails, space, name="failing")
    assert not (folder / "scores.json").exists()
    with pytest.raises(ValueError, match="there is no whole one"):
        score(find_recipe(str(folder)), space, seed=0, device=CPU, console=QUIET)


def test_a_step_may_take_gradients_inside_and_tell_its_size(space: Workspace) -> None:
    def descends(state: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = state.clone().requires_grad_()
            (slope,) = torch.autograd.grad(0.05 * leaf.square().sum(), leaf)
        return state - slope

    where = {"seed": 0, "device": CPU, "console": QUIET}
    scores = scores_of(judge(descends, tiny(), space, name="descends", parameters=7, **where))
    assert scores["parameters"] == 7
    plain = scores_of(judged(lambda state: 0.9 * state, space, name="plain"))
    key = "relative_l2@5"
    assert scores["metrics"][key]["rows"]["model"]["value"] == pytest.approx(
        plain["metrics"][key]["rows"]["model"]["value"]
    )


def test_a_judged_model_under_the_name_of_a_recipe_is_not_taken_for_its_run(space: Workspace) -> None:
    judged(lambda state: state, space, name="kf64-uno", seed=5)
    recipe = override(find_recipe("kf64-uno"), TINY)
    with pytest.raises(ValueError, match=r"a run of kf64-uno was expected in .*, got a judged model of your own"):
        run_one(recipe, space, seed=5, device=CPU, console=QUIET)


def test_verbs_that_need_a_model_say_where_it_is(space: Workspace, tmp_path: Path) -> None:
    folder = judged(lambda state: state, space, name="elsewhere")
    recipe = find_recipe(str(folder))
    where = {"seed": 0, "device": CPU, "console": QUIET}
    assert scores_of(score(recipe, space, **where))["name"] == "elsewhere"  # a roll-out is all it takes
    for verb, told in ((predict, {}), (train, {"overwrite": True})):
        with pytest.raises(ValueError, match=r"it cannot be built; hand it to ergoflow\.judge"):
            verb(recipe, space, **where, **told)
    assert (folder / "rollout" / "rollout.json").exists()
    shutil.copy(folder / "recipe.json", tmp_path / "recipe.json")
    assert to_dict(find_recipe(str(tmp_path)))["model"] == {"kind": "own", "parameters": 0}


def test_the_front_door_prints_a_summary(space: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(to_dict(tiny())))
    folder = ergoflow.judge(lambda state: state, tmp_path / "tiny.json", name="front", root=space.root, seed=3)
    assert folder == space.run("front", 3)
    assert "front, seed 3: 0 parameters, 4 test trajectories" in capsys.readouterr().out

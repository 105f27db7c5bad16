"""The page of a root: whose scores it shows, with which settings, and how its files are written."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from html import unescape
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ergoflow.config import Recipe, override
from ergoflow.data.files import TEMPORARY_SUFFIX
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.report import report
from ergoflow.pipeline.score import score
from ergoflow.pipeline.stages import provide_once, run_one
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import find_recipe

CPU = torch.device("cpu")
QUIET = Console(quiet=True)
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
    "training.tensorboard=false",
    "evaluation.resamples=20",
]


def tiny(*, updates: int = 3, steps: int = 130) -> Recipe:
    changed = [f"training.max_steps={updates}", f"evaluation.steps={steps}"]
    return override(find_recipe("kf64-a3m"), [*TINY, *changed])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A root with two scored runs."""
    space = Workspace(tmp_path_factory.mktemp("root"))
    provide_once(tiny().dataset, space, device=CPU, console=QUIET)
    for seed in range(2):
        run_one(tiny(), space, seed=seed, device=CPU, console=QUIET)
    return space


@pytest.fixture
def space(scored: Workspace, tmp_path: Path) -> Workspace:
    return Workspace(shutil.copytree(scored.root, tmp_path / "root"))


def page_of(space: Workspace) -> tuple[list[str], str, str]:
    """The seeds on the page, the page, and what was printed."""
    console = Console(file=io.StringIO(), width=80)
    text = report(space, title="t", console=console).read_text()
    printed = console.file.getvalue()
    return re.findall(r"<summary>kf64-a3m, seed (\d)</summary>", text), unescape(text), printed


def test_a_run_that_was_trained_on_is_left_out_until_it_is_scored_again(space: Workspace) -> None:
    seeds, _, printed = page_of(space)
    assert (seeds, "left out" in printed) == (["0", "1"], False)
    longer = tiny(updates=6)
    train(longer, space, seed=0, device=CPU, console=QUIET, resume=True)
    advice = (
        "trained further since they were scored: kf64-a3m seed 0; run `ergoflow predict` and `ergoflow score` again\n"
    )
    for verb in (predict, score):
        seeds, _, printed = page_of(space)
        assert seeds == ["1"]
        assert advice in printed
        verb(longer, space, seed=0, device=CPU, console=QUIET)
    seeds, _, printed = page_of(space)
    assert (seeds, "left out" in printed) == (["0", "1"], False)


def test_scores_outlive_weights_and_roll_out(space: Workspace) -> None:
    """Both take room and are deleted; and times are lost when a root is copied."""
    folder = space.run("kf64-a3m", 1)
    (folder / "model.safetensors").unlink()
    shutil.rmtree(folder / "rollout")
    os.utime(space.run("kf64-a3m", 0) / "scores.json", ns=(0, 0))
    seeds, _, printed = page_of(space)
    assert (seeds, "left out" in printed) == (["0", "1"], False)


def test_a_run_is_shown_with_the_evaluation_it_was_scored_by(space: Workspace) -> None:
    other = tiny(steps=140)
    for verb in (predict, score):
        verb(other, space, seed=0, device=CPU, console=QUIET)
    seeds, text, _ = page_of(space)
    assert seeds == ["0", "1"]
    facts = [json.loads(block) for block in re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)]
    assert [shown["recipe"]["evaluation"]["steps"] for shown in facts] == [140, 130]
    assert [shown["recipe"]["training"]["max_steps"] for shown in facts] == [3, 3]


def test_an_interrupted_report_leaves_the_old_page(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    page = report(space, title="old", console=QUIET)
    files = sorted(path.name for path in page.parent.iterdir())

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            report(space, title="new", console=QUIET)
    assert "<title>old</title>" in page.read_text()
    assert sorted(path.name for path in page.parent.iterdir()) == files
    (page.parent / f".index.html.0123{TEMPORARY_SUFFIX}").touch()
    report(space, title="new", console=QUIET)
    assert sorted(path.name for path in page.parent.iterdir()) == files

"""The paper's figures: each is drawn where its runs are, and shows the failed ones as failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.figure import Figure

from ergoflow.report.canvas import TITLE_SIZE
from ergoflow.report.evidence import Evidence
from ergoflow.report.paper_figures import LORENZ, PICTURES, SIGMA_ROWS, Picture, figures_block
from ergoflow.report.runs import RunView, group_runs

MakeRun = Callable[..., RunView]


@pytest.fixture(scope="module")
def evidence(make_run: MakeRun) -> Evidence:
    runs = []
    for task, dataset in (("kf256-coarse", "kf256"), ("tcf96", "tcf96")):
        for row in ("mno", "a3m", "ergoformer"):
            run = make_run(f"{task}-{row}", dataset=dataset)
            faces = {"box/front": np.ones((6, 20)), "box/side": np.ones((6, 8)), "box/floor": np.zeros((20, 8))}
            scores = {**run.scores, "axes": ["y", "z"] if dataset == "tcf96" else ["x", "y"]}
            curves = {**run.curves, **(faces if dataset == "tcf96" else {})}
            runs.append(dataclasses.replace(run, scores=scores, curves=curves))
    for row in (*SIGMA_ROWS, "a3m-free", "a3m-exact"):
        run = make_run(f"kf128-{row}", dataset="kf128")
        runs.append(dataclasses.replace(run, curves={**run.curves, "attention_last/x": np.eye(16)[None]}))
    return Evidence(groups=group_runs(runs))


def titles(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_fontsize() == TITLE_SIZE]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.slug)
def test_every_figure_of_the_paper_can_be_drawn_from_cells(picture: Picture, evidence: Evidence) -> None:
    assert picture.draw is not None
    assert isinstance(picture.draw(picture.groups(evidence)), Figure)


def drawn(slug: str, evidence: Evidence) -> Figure:
    picture = next(p for p in PICTURES if p.slug == slug)
    assert picture.draw is not None
    figure = picture.draw(picture.groups(evidence))
    assert figure is not None
    return figure


def test_maps_name_each_model_in_the_order_of_the_table(evidence: Evidence) -> None:
    assert titles(drawn("forecast-errors-kf256", evidence)) == ["truth", "mno", "a3m", "ergoformer"]
    assert [t.split(",")[0] for t in titles(drawn("energy-errors-tcf", evidence))] == [
        "truth",
        "mno",
        "a3m",
        "ergoformer",
    ]
    assert titles(drawn("attention-sigma", evidence)) == [f"σ = {sigma}" for sigma in (1, 4, 8, 16, 32)]


def test_a_model_that_failed_has_an_empty_panel_that_says_so(evidence: Evidence) -> None:
    def without(run: RunView) -> RunView:
        curves = {name: curve for name, curve in run.curves.items() if name != "tke/model"}
        return dataclasses.replace(run, curves=curves) if run.name == "kf256-coarse-mno" else run

    lost = Evidence(groups=group_runs([without(run) for group in evidence.groups for run in group.runs]))
    assert "mno: failed" in titles(drawn("energy-errors-kf256", lost))


def test_the_mean_profile_of_a_channel_is_taken_off(evidence: Evidence) -> None:
    fields = [image.get_array() for axes in drawn("forecast-errors-tcf", evidence).axes for image in axes.get_images()]
    assert abs(float(np.mean(fields[0]))) < 1.0


def test_what_is_not_drawn_yet_is_said_with_its_command(evidence: Evidence) -> None:
    text = figures_block(Evidence())
    for picture in (*PICTURES, LORENZ):
        assert f"### {picture.title}\n" in text
        assert f"Not run yet: `ergoflow reproduce {picture.command} figures`" in text
    entry = {"file": "lorenz63.png", "cells": {"lorenz/lorenz63.json": "0" * 16}}
    shown = Evidence(pictures={"lorenz63": entry}, place="../results", stale=("lorenz63",))
    assert "![Lorenz-63](../results/figures/lorenz63.png)" in figures_block(shown)
    assert "changed since it was drawn" in figures_block(shown)
    nothing = Evidence(pictures={"lorenz63": entry | {"file": None}})
    assert "Not drawn: no cell has what it shows, [`results/lorenz/lorenz63.json`]" in figures_block(nothing)


def test_a_caption_names_each_of_its_files_by_what_tells_it_from_the_others() -> None:
    evidence = Evidence(place="../results")
    files = ["kf128-a3m/seed0.json", "kf128-a3m-free/seed0.json", "kf128-a3m-free/seed1.json"]
    assert evidence.link_cells(files) == (
        "`results/kf128-<row>`: [a3m](../results/kf128-a3m/seed0.json), "
        "[a3m-free seed0](../results/kf128-a3m-free/seed0.json), [a3m-free seed1](../results/kf128-a3m-free/seed1.json)"
    )
    assert evidence.link_cells(files[:1]) == "[`results/kf128-a3m/seed0.json`](../results/kf128-a3m/seed0.json)"

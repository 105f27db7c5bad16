"""The script that draws the documentation's figures, on the shipped results and a small stand-in of the demo."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "make_figures.py"


def test_the_figures_of_the_documentation_can_be_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = runpy.run_path(str(SCRIPT))
    rng = np.random.default_rng(0)
    for name in drawn["DEMO"]:
        folder = tmp_path / "runs" / name / "seed0"
        folder.mkdir(parents=True)
        curves = {f"snapshots/{part}": rng.standard_normal((2, 1, 8, 8)) for part in ("truth", "model")}
        np.savez(folder / "curves.npz", **curves, **{"snapshots/steps": np.array([1, 5])})
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").symlink_to(SCRIPT.parents[1] / "results")
    monkeypatch.setitem(drawn["channel"].__globals__, "ROOT", tmp_path)
    drawn["channel"]()
    drawn["demo"](tmp_path)
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {"channel.png", "demo.png"}

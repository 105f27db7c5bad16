"""The energy budget of a data set: it closes for every flow that can be simulated, and for no other equation."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ergoflow.config import KolmogorovDatasetConfig
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.verify import BUDGET_TOLERANCE, verify
from ergoflow.pipeline.workspace import Workspace
from ergoflow.solvers.kolmogorov import KolmogorovConfig

SMALL = KolmogorovDatasetConfig(
    name="small",
    flow=KolmogorovConfig(grid=(16, 20), length=(5.0, 7.0), viscosity=0.05, dt=0.02),
    spin_up_seconds=4,
    frame_seconds=0.1,
    frames=41,
    train=2,
    valid=1,
    test=1,
)
FLOWS = {
    "forced": {},
    "forced the other way": {"forcing_amplitude": -1.0},
    "unforced": {"forcing_amplitude": 0.0},
    "unforced, without drag": {"forcing_amplitude": 0.0, "drag": 0.0},
}


def make(root: Path, changes: dict[str, float]) -> Path:
    dataset = dataclasses.replace(SMALL, flow=dataclasses.replace(SMALL.flow, **changes))
    return simulate(dataset, Workspace(root), device=torch.device("cpu"), console=Console(quiet=True))


def pretend(folder: Path, changes: dict[str, float]) -> None:
    """Let a data set say that it is another flow."""
    path = folder / "dataset.json"
    data = json.loads(path.read_text())
    data["dataset"]["flow"] |= changes
    path.write_text(json.dumps(data))


def test_the_start_of_a_flow_is_not_stationary_and_its_attractor_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same flow with and without a spin-up, both of which say that they had one."""
    for name, spin_up, good in (("attractor", 60.0, True), ("start", 0.0, False)):
        dataset = dataclasses.replace(SMALL, train=4, valid=2, test=2, spin_up_seconds=spin_up)
        folder = simulate(dataset, Workspace(tmp_path / name), device=torch.device("cpu"), console=Console(quiet=True))
        data = json.loads((folder / "dataset.json").read_text())
        data["dataset"]["spin_up_seconds"] = 60.0
        (folder / "dataset.json").write_text(json.dumps(data))
        assert verify(folder, console=Console(width=200)) == good
        assert ("not stationary" in capsys.readouterr().out) != good


def test_a_set_that_lacks_a_file_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = dataclasses.replace(SMALL, shard_size=1)
    folder = simulate(dataset, Workspace(tmp_path), device=torch.device("cpu"), console=Console(quiet=True))
    assert verify(folder, console=Console(width=200))
    next((folder / "data" / "train").glob("*.hdf5")).unlink()
    assert not verify(folder, console=Console(width=200))
    assert "it holds 3 of 4 trajectories; `ergoflow simulate` makes the rest" in capsys.readouterr().out


@pytest.mark.parametrize("flow", FLOWS)
def test_the_budget_of_a_flow_closes_far_below_what_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flow: str
) -> None:
    assert verify(make(tmp_path, FLOWS[flow]), console=Console(width=200))
    said = re.search(
        r"closes within (\S+) of the energy put in and taken out \(allowed 2.5e-03\)", capsys.readouterr().out
    )
    assert said is not None
    assert float(said.group(1)) < 0.1 * BUDGET_TOLERANCE


@pytest.mark.parametrize("flow", FLOWS)
def test_a_viscosity_that_is_off_by_a_fiftieth_opens_the_budget(tmp_path: Path, flow: str) -> None:
    folder = make(tmp_path, FLOWS[flow])
    pretend(folder, {"viscosity": 1.02 * SMALL.flow.viscosity})
    assert not verify(folder, console=Console(quiet=True))


@pytest.mark.parametrize("changes", [{"drag": 0.11}, {"forcing_amplitude": 1.02}, {"length": [5.0, 7.2]}], ids=str)
def test_another_drag_force_or_box_opens_the_budget(tmp_path: Path, changes: dict[str, float]) -> None:
    folder = make(tmp_path, {})
    pretend(folder, changes)
    assert not verify(folder, console=Console(quiet=True))

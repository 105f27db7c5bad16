"""The channel through the pipeline: simulate, resume, verify, train, predict, score, report on a tiny box."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from ergoflow.config import ChannelDatasetConfig, Recipe, override
from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics.dns import PROFILE_NAMES, REYNOLDS_TAU, dns_profiles
from ergoflow.metrics.wall import fold, reynolds_stress
from ergoflow.numerics.trajectory import Step
from ergoflow.pipeline import simulate_channel
from ergoflow.pipeline import verify_solver as verify_solver_module
from ergoflow.pipeline.report import report
from ergoflow.pipeline.runs import load_run
from ergoflow.pipeline.shards import FrameQueue, Shard, trajectory_bytes
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.stages import run_one
from ergoflow.pipeline.train import train
from ergoflow.pipeline.verify import verify
from ergoflow.pipeline.verify_channel import JUDGED_FROM, channel_problems, channel_profiles
from ergoflow.pipeline.verify_solver import verify_solver
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import find_recipe
from ergoflow.solvers.channel_statistics import ChannelUnphysical
from ergoflow.training.climate import HeldStep

CPU = torch.device("cpu")
TINY = [
    "dataset.flow.box=[16, 16, 16]",
    "dataset.plane_spacing=8",
    "dataset.spin_up=0.05",
    "dataset.steps_per_frame=2",
    "dataset.frames=40",
    "dataset.train=4",
    "dataset.valid=2",
    "dataset.test=4",
    "model.dim=8",
    "model.latent=8",
    "model.depth=1",
    "training.max_steps=4",
    "training.tensorboard=false",
    "evaluation.steps=140",
    "evaluation.keep_first=30",
    "evaluation.resamples=20",
]


def tiny(*more: str) -> Recipe:
    return override(find_recipe("tcf32-a3m"), [*TINY, *more])


def console() -> Console:
    return Console(quiet=True)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = Workspace(tmp_path_factory.mktemp("channel"))
    simulate(tiny().dataset, space, device=CPU, console=console())
    return space


def test_channel_data_are_planes_in_wall_units_with_walls_marked(workspace: Workspace) -> None:
    store = TrajectoryStore(workspace.dataset("tcf32"))
    assert store.info.fields == ("velocity_x", "velocity_y", "velocity_z")
    assert store.info.boundaries == ("WALL", "PERIODIC")
    assert store.info.axes == ("y", "z")
    assert [store.count(split) for split in ("train", "valid", "test")] == [4, 2, 4]
    dataset = tiny().dataset
    assert isinstance(dataset, ChannelDatasetConfig)
    assert store.info.frame_seconds == pytest.approx(2 / dataset.flow.units.turnover_steps, rel=1e-6)
    profile = store.load("train", device="cpu")[:, :, 0].mean(dim=(0, 1, 3))
    bulk = dataset.flow.bulk_velocity / dataset.flow.units.friction_velocity
    assert float(profile.mean()) == pytest.approx(bulk, rel=0.15)
    assert float(profile[0]) < 0.6 * float(profile.max())


def test_sides_of_a_plane_are_in_half_heights() -> None:
    dataset = tiny("dataset.flow.box=[16, 20, 32]").dataset
    assert isinstance(dataset, ChannelDatasetConfig)
    info = simulate_channel.dataset_info(dataset, "test")
    assert info.grid == (20, 32)
    assert info.length == (2.0, 3.2)


def test_size_on_disk_is_foretold(workspace: Workspace) -> None:
    dataset, folder = tiny().dataset, workspace.dataset("tcf32")
    assert isinstance(dataset, ChannelDatasetConfig)
    held = sum(path.stat().st_size for path in folder.glob("data/train/*.hdf5"))
    assert held == pytest.approx(4 * trajectory_bytes(dataset), rel=0.1)


def test_a_segment_continues_the_one_before_it(workspace: Workspace) -> None:
    """Trajectory 2 is plane 0 of the second segment: its first frame is one step after trajectory 0's last."""
    frames = TrajectoryStore(workspace.dataset("tcf32")).load("train", device="cpu")
    step = (frames[0, 1:] - frames[0, :-1]).flatten(1).norm(dim=1)
    gap = (frames[2, 0] - frames[0, -1]).norm()
    assert float(gap) < 2 * float(step.max())
    assert float((frames[2, 0] - frames[0, 0]).norm()) > 2 * float(gap)


def test_splits_are_simulations_of_their_own(workspace: Workspace) -> None:
    store = TrajectoryStore(workspace.dataset("tcf32"))
    first = [store.load(split, device="cpu")[0, 0] for split in ("train", "valid", "test")]
    assert float((first[0] - first[1]).norm() / first[0].norm()) > 0.01
    assert float((first[1] - first[2]).norm() / first[1].norm()) > 0.01


def test_a_stopped_simulation_continues_identically(workspace: Workspace, tmp_path: Path) -> None:
    whole = TrajectoryStore(workspace.dataset("tcf32")).load("train", device="cpu")
    part = Workspace(tmp_path)
    simulate(tiny().dataset, part, device=CPU, console=console(), minutes=0.0)
    assert TrajectoryStore(part.dataset("tcf32")).count("train") == 2
    simulate(tiny().dataset, part, device=CPU, console=console())
    assert torch.equal(TrajectoryStore(part.dataset("tcf32")).load("train", device="cpu"), whole)


@pytest.mark.parametrize("last_kept", [0, 1])
def test_a_simulation_killed_after_its_last_kept_state_continues_identically(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_kept: int
) -> None:
    """Two segments are on disk, and the state of the spin-up or of the first of them."""
    dataset, part = tiny("dataset.train=6").dataset, Workspace(tmp_path)
    keep, kept = simulate_channel._keep, []

    def die(folder: Path, split: str, segments: int, state: torch.Tensor, written: Sequence[Future[None]] = ()) -> None:
        if (split, segments) == ("train", 2):
            raise KeyboardInterrupt
        if split != "train" or segments <= last_kept:
            keep(folder, split, segments, state, written)
            kept.append((split, segments))

    monkeypatch.setattr(simulate_channel, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(simulate_channel, "_keep", die)
    with pytest.raises(KeyboardInterrupt):
        simulate(dataset, part, device=CPU, console=console())
    assert kept[-1] == ("train", last_kept)
    assert len(list(part.dataset("tcf32").glob("data/train/*.hdf5"))) == 2
    monkeypatch.setattr(simulate_channel, "_keep", keep)
    monkeypatch.setattr(simulate_channel, "spun_up", lambda *_, **__: pytest.fail("the spin-up is on disk"))
    simulate(dataset, part, device=CPU, console=console())
    frames = TrajectoryStore(part.dataset("tcf32")).load("train", device="cpu")
    assert len(frames) == 6
    assert torch.equal(frames[:4], TrajectoryStore(workspace.dataset("tcf32")).load("train", device="cpu"))
    step = (frames[2, 1:] - frames[2, :-1]).flatten(1).norm(dim=1)
    assert float((frames[4, 0] - frames[2, -1]).norm()) < 2 * float(step.max())


def test_no_state_is_kept_of_a_segment_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails under the second segment of train; what is there then is whole, and the run goes on from it."""
    write, part = simulate_channel._write, Workspace(tmp_path)

    def fail(dataset: ChannelDatasetConfig, shard: Shard, frames: FrameQueue) -> None:
        if (shard.split, shard.first) == ("train", 2):
            error = OSError("no room")
            frames.fail(error)
            raise error
        write(dataset, shard, frames)

    monkeypatch.setattr(simulate_channel, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(simulate_channel, "_write", fail)
    with pytest.raises(OSError, match="no room"):
        simulate(tiny().dataset, part, device=CPU, console=console())
    folder = part.dataset("tcf32")
    assert torch.load(folder / "state" / "train.pt", weights_only=True)["segments"] == 1
    assert [path.name for path in (folder / "data" / "train").iterdir()] == ["tcf32_0000.hdf5"]
    monkeypatch.setattr(simulate_channel, "_write", write)
    simulate(tiny().dataset, part, device=CPU, console=console())
    assert TrajectoryStore(folder).count("train") == 4


def test_a_simulation_does_not_wait_for_a_writer_that_could_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment has more frames than may wait for their writer."""
    dataset = tiny().dataset
    assert dataset.frames > simulate_channel.WAITING_FRAMES

    def fail() -> str:
        raise OSError("no process can be begun")

    monkeypatch.setattr(simulate_channel, "commit", fail)
    with pytest.raises(OSError, match="no process can be begun"):
        simulate(dataset, Workspace(tmp_path), device=CPU, console=console())


@pytest.mark.parametrize("broken_frame", [39, 79])
def test_a_flow_that_breaks_in_the_last_frame_of_a_segment_leaves_no_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_frame: int
) -> None:
    """Segments of 40 frames, on which every tenth is looked at from the first one on."""
    real, calls = simulate_channel.make_step, []
    dataset = tiny("dataset.train=2").dataset
    assert isinstance(dataset, ChannelDatasetConfig)

    def breaking(*args: Any, **options: Any) -> Step:
        step = real(*args, **options)

        def until_the_end(state: torch.Tensor) -> torch.Tensor:
            calls.append(options["substeps"])
            broken = calls.count(dataset.steps_per_frame) == broken_frame + 1
            return step(state) * (float("nan") if broken else 1.0)

        return until_the_end

    monkeypatch.setattr(simulate_channel, "make_step", breaking)
    with pytest.raises(ChannelUnphysical, match=f"at step {2 * (broken_frame + 1)};"):
        simulate(dataset, Workspace(tmp_path), device=CPU, console=console())
    whole = [path.name for path in (tmp_path / "data").rglob("*.hdf5")]
    assert whole == ["tcf32_0000.hdf5"] * (broken_frame // 40)


def test_a_missing_state_is_named(workspace: Workspace, tmp_path: Path) -> None:
    shutil.copytree(workspace.dataset("tcf32"), tmp_path / "data" / "tcf32")
    lost = sorted((tmp_path / "data" / "tcf32" / "data" / "train").glob("*.hdf5"))[-1]
    lost.unlink()
    (tmp_path / "data" / "tcf32" / "state" / "train.pt").unlink()
    with pytest.raises(ValueError, match="to simulate this split again"):
        simulate(tiny().dataset, Workspace(tmp_path), device=CPU, console=console())


def test_verify_checks_the_files_and_says_that_dns_has_no_band(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(workspace.dataset("tcf32"), console=Console(width=200))
    assert "no DNS bands for 16 cells" in capsys.readouterr().out


def test_the_channel_itself_is_run_and_its_profiles_written(tmp_path: Path) -> None:
    dataset = tiny().dataset
    assert isinstance(dataset, ChannelDatasetConfig)
    output = tmp_path / "profiles.json"
    assert verify_solver(dataset, turnovers=0.2, device=CPU, console=console(), output=output)
    data = json.loads(output.read_text())
    assert data["checks"] == []
    profile = np.array(data["profiles"]["u_plus"])
    assert len(profile) == 8
    assert (np.diff(profile) > 0).all()


DNS_CHANNEL = ["dataset.flow.box=[16, 96, 16]", f"dataset.flow.reynolds_tau={REYNOLDS_TAU}"]


def dns_on(cells: int, factor: float = 1.0) -> dict[str, np.ndarray]:
    """Wall-to-centre profiles of DNS, times a factor, on the rows of a lattice."""
    dns = dns_profiles()
    y_plus = (np.arange(cells // 2) + 0.5) * 2 * REYNOLDS_TAU / cells
    heights = np.concatenate(([0.0], dns.pop("y_plus")))
    return {"y_plus": y_plus} | {
        name: factor * np.interp(y_plus, heights, np.concatenate(([0.0], values))) for name, values in dns.items()
    }


@pytest.mark.parametrize(
    ("wrong", "turnovers", "good"),
    [
        ({}, 20.0, True),
        ({"factor": 1.2}, 20.0, False),
        ({"total_stress": 1.1}, 20.0, False),
        ({"density_rms": 1e-3}, 20.0, False),
        ({"factor": 1.2}, 19.9, True),
    ],
    ids=str,
)
def test_a_channel_that_is_not_the_dns_is_refused_once_it_ran_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, float], turnovers: float, good: bool
) -> None:
    dataset = tiny(*DNS_CHANNEL).dataset
    assert isinstance(dataset, ChannelDatasetConfig)
    profiles = dns_on(96, wrong.get("factor", 1.0))
    stress = wrong.get("total_stress", 1.0) * (1 - profiles["y_plus"] / REYNOLDS_TAU)
    measured = profiles | {"total_stress": stress, "density_rms": wrong.get("density_rms", 1e-4)}
    monkeypatch.setattr(verify_solver_module, "spun_up", lambda *_, **__: torch.zeros(()))
    monkeypatch.setattr(verify_solver_module, "_statistics", lambda *_, **__: measured)
    output = tmp_path / "profiles.json"
    assert verify_solver(dataset, turnovers=turnovers, device=CPU, console=console(), output=output) is good
    checks = json.loads(output.read_text())["checks"]
    assert all(check["passed"] for check in checks) is (not wrong)


@dataclasses.dataclass(frozen=True)
class PlanesOf:
    """In place of a store: planes whose mean, fluctuations and Reynolds stress are exactly those of the profiles."""

    profiles: dict[str, np.ndarray]
    points: int = 8

    @property
    def info(self) -> SimpleNamespace:
        return SimpleNamespace(name="planes", grid=(2 * len(self.profiles["y_plus"]), self.points))

    def count(self, split: str) -> int:
        return {"train": 3, "valid": 1, "test": 2}[split]

    def num_frames(self, split: str) -> int:
        return 2

    def read(self, split: str, trajectory: int, start: int, stop: int) -> np.ndarray:
        u, u_rms, v_rms, w_rms, uv = (self.profiles[name] for name in PROFILE_NAMES[1:])
        turns = 2 * np.pi * np.arange(self.points) / self.points
        waves = np.sqrt(2) * np.array([np.cos(turns), np.sin(turns), np.cos(2 * turns)])
        shared = -uv / u_rms
        lower = np.stack(
            [
                u[:, None] + np.outer(u_rms, waves[0]),
                np.outer(shared, waves[0]) + np.outer(np.sqrt(v_rms**2 - shared**2), waves[1]),
                np.outer(w_rms, waves[2]),
            ]
        )  # (3, Y/2, Z)
        upper = lower[:, ::-1] * np.array([1.0, -1.0, 1.0])[:, None, None]
        return np.broadcast_to(np.concatenate([lower, upper], axis=1), (stop - start, 3, *self.info.grid))


def test_profiles_of_planes_are_those_they_were_made_of() -> None:
    profiles = dns_on(96)
    measured = channel_profiles(PlanesOf(profiles), reynolds_tau=REYNOLDS_TAU, console=console())  # type: ignore[arg-type]
    assert measured.keys() == profiles.keys()
    for name, expected in profiles.items():
        assert measured[name] == pytest.approx(expected, abs=1e-9), name


def test_planes_that_are_not_the_dns_are_named_once_there_are_enough() -> None:
    """Six segments, one to a plane, of the frames that add up to the time from which they are judged."""
    dataset = tiny(*DNS_CHANNEL, "dataset.plane_spacing=16").dataset
    assert isinstance(dataset, ChannelDatasetConfig)
    enough = dataclasses.replace(dataset, frames=math.ceil(JUDGED_FROM / (6 * dataset.frame_seconds)))
    short = dataclasses.replace(enough, frames=enough.frames - 1)
    good, wrong = PlanesOf(dns_on(96)), PlanesOf(dns_on(96, 1.2))
    assert channel_problems(good, enough, console()) == []  # type: ignore[arg-type]
    assert channel_problems(wrong, short, console()) == []  # type: ignore[arg-type]
    problems = channel_problems(wrong, enough, console())  # type: ignore[arg-type]
    named = [problem.split(" is ")[0] for problem in problems]
    assert {"bulk velocity", "mean profile, largest error", "peak u_rms", "peak v_rms", "peak uv"} <= set(named)


def test_a_model_learns_and_is_scored_on_walls(workspace: Workspace) -> None:
    folder = run_one(tiny(), workspace, seed=0, device=CPU, console=console())
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["axes"] == ["y", "z"]
    assert scores["metrics"]["relative_l2@5"]["definition"].endswith(" δ/u_τ.")
    assert {"relative_l2@5", "relative_l2@5 fluctuations", "me_ape", "tke_error"} <= set(scores["metrics"])
    with np.load(folder / "curves.npz") as curves:
        assert {"wall/y_plus", "wall/U_plus/truth", "wall/U_plus/model", "wall/uv/model"} <= set(curves)
        assert curves["wall/U_plus/truth"].shape == (8,)
        stress = reynolds_stress(TrajectoryStore(workspace.dataset("tcf32")).load("test", device="cpu"))
        assert curves["wall/uv/truth"] == pytest.approx(fold(stress, odd=True).numpy(), rel=1e-3, abs=1e-4)
    page = report(workspace, title="channel", console=Console(quiet=True))
    assert "tcf32-a3m" in page.read_text()


def test_a_held_run_carries_its_climate_and_is_rolled_out_at_it(workspace: Workspace) -> None:
    """Untrained, a net of states leaves at once: held, the energies of its waves come to those of the training data."""
    recipe = dataclasses.replace(tiny("task.hold=0.9", "training.max_steps=1"), name="tcf32-held")
    folder = train(recipe, workspace, seed=0, device=CPU, console=console())
    data = TrajectoryStore(workspace.dataset("tcf32"))
    frames = data.load("train", device="cpu")
    free = load_run(folder)
    held, free.step = free.step, free.step.step
    assert isinstance(held, HeldStep)

    def energy(states: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(states, dim=-1).abs().square().mean((0, 2))[:, 1:]

    wanted = energy(frames.flatten(0, 1))
    far = (energy(free(frames[:, 0])) / wanted).log().abs().median()
    near = (energy(load_run(folder)(frames[:, 0])) / wanted).log().abs().median()
    assert near < 0.2 * far


def test_minutes_are_for_channels_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--minutes is for channel data"):
        simulate(find_recipe("kf64-a3m").dataset, Workspace(tmp_path), device=CPU, console=console(), minutes=1.0)
    assert not list(tmp_path.rglob("*"))

"""The verbs on a tiny flow, from simulation to report, and what they refuse."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

import ergoflow
from ergoflow.config import Recipe, load_recipe, override
from ergoflow.data.statistics import add_increment_std
from ergoflow.data.store import DatasetInfo, ShardWriter, TrajectoryStore, compute_statistics, write_statistics
from ergoflow.metrics import StatisticsResult
from ergoflow.models.convnext import ConvNeXtConfig
from ergoflow.models.mno import MNOConfig
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig
from ergoflow.numerics.trajectory import rollout
from ergoflow.pipeline.exponents import measure_exponents
from ergoflow.pipeline.predict import kept_steps, predict
from ergoflow.pipeline.reference import load_reference, skipped_frames
from ergoflow.pipeline.report import report
from ergoflow.pipeline.runs import RunFacts, is_trained, normalizer_of, open_store, write_run
from ergoflow.pipeline.score import score
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.stages import is_rolled_out, run_one
from ergoflow.pipeline.summary import print_summary
from ergoflow.pipeline.train import train
from ergoflow.pipeline.verify import verify
from ergoflow.pipeline.workspace import Workspace, pick_device
from ergoflow.recipes import find_recipe
from ergoflow.training.loop import Loop
from ergoflow.training.trainer import TrainingInterrupted

CPU = torch.device("cpu")
TINY = [
    "dataset.flow.grid=[16, 16]",
    "dataset.flow.viscosity=0.02",
    "dataset.flow.dt=0.05",
    "dataset.spin_up_seconds=20",
    "dataset.frames=64",
    "dataset.train=6",
    "dataset.valid=2",
    "dataset.test=6",
    "dataset.shard_size=4",
    "model.dim=8",
    "model.latent=8",
    "model.depth=1",
    "training.max_steps=6",
    "training.tensorboard=false",
    "evaluation.steps=160",
    "evaluation.keep_first=30",
    "evaluation.keep_every=40",
    "evaluation.resamples=20",
]


def console() -> Console:
    return Console(quiet=True)


def tiny(*more: str) -> Recipe:
    return override(find_recipe("kf64-a3m"), [*TINY, *more])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = Workspace(tmp_path_factory.mktemp("root"))
    simulate(tiny().dataset, space, device=CPU, console=console())
    return space


@pytest.fixture(scope="module")
def scored(workspace: Workspace) -> Path:
    return run_one(tiny(), workspace, seed=0, device=CPU, console=console())


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


def test_whole_pipeline_leaves_every_artefact(workspace: Workspace, scored: Path) -> None:
    page = report(workspace, title="test", console=Console(quiet=True))
    assert page.name == "index.html"
    assert "kf64-a3m" in page.read_text()
    for name in (
        "recipe.json",
        "run.json",
        "training.json",
        "model.safetensors",
        "log.jsonl",
        "scores.json",
        "curves.npz",
    ):
        assert (scored / name).is_file(), name
    scores = scores_of(scored)
    assert {
        "relative_l2@1",
        "relative_l2@5",
        "relative_l2@25",
        "me_ape",
        "me_lrw",
        "tke_error",
        "pca_kl",
        "delta_lambda",
    } <= set(scores["metrics"])
    for metric in scores["metrics"].values():
        assert set(metric["rows"]) == {"model", "persistence", "climatology", "zero"}
    rows = {key: metric["rows"] for key, metric in scores["metrics"].items()}
    for lead in (1, 5, 25):
        # Each is the unit of its error; neither is of the other's.
        plain, departure = rows[f"relative_l2@{lead}"], rows[f"relative_l2@{lead} fluctuations"]
        assert plain["zero"]["value"] == pytest.approx(1.0, abs=1e-6)
        assert departure["climatology"]["value"] == pytest.approx(1.0, abs=1e-6)
        assert plain["climatology"]["value"] < 0.99 < 1.01 < departure["zero"]["value"]


def test_simulation_resumes_with_the_missing_shard_only(workspace: Workspace, tmp_path: Path) -> None:
    recipe = tiny()
    copy = Workspace(tmp_path)
    shutil.copytree(workspace.dataset("kf64"), copy.dataset("kf64"))
    files = sorted(copy.dataset("kf64").rglob("*.hdf5"))
    lost, kept = files[0], files[1]
    before = TrajectoryStore(workspace.dataset("kf64")).load("train", device="cpu")
    stamp = kept.stat().st_mtime_ns
    lost.unlink()
    simulate(recipe.dataset, copy, device=CPU, console=console())
    assert kept.stat().st_mtime_ns == stamp
    assert torch.equal(TrajectoryStore(copy.dataset("kf64")).load("train", device="cpu"), before)


def test_subsampled_set_is_the_same_from_the_solver_and_from_the_finer_set(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last read is shorter.
    monkeypatch.setattr("ergoflow.pipeline.simulate_kolmogorov.FRAMES_PER_READ", 15)
    coarse = dataclasses.replace(tiny().dataset, name="half", subsample=2)
    simulate(coarse, Workspace(tmp_path), device=CPU, console=console())
    simulate(coarse, workspace, device=CPU, console=console())
    made = json.loads((workspace.dataset("half") / "dataset.json").read_text())["timings"][0]["made_of"]
    assert made == "kf64"
    direct, derived = (
        TrajectoryStore(w.dataset("half")).load("test", device="cpu") for w in (Workspace(tmp_path), workspace)
    )
    full = TrajectoryStore(workspace.dataset("kf64")).load("test", device="cpu")
    assert torch.equal(direct, derived)
    assert torch.equal(derived, full[..., ::2, ::2])


def test_other_settings_do_not_touch_an_existing_set(workspace: Workspace) -> None:
    with pytest.raises(ValueError, match="holds kf64 with frames=64, but frames=70 was asked for"):
        simulate(tiny("dataset.frames=70").dataset, workspace, device=CPU, console=console())


def test_a_set_too_large_for_the_disk_is_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"needs .* GB below .* are free"):
        simulate(
            tiny("dataset.train=1000", "dataset.frames=1000000000").dataset,
            Workspace(tmp_path),
            device=CPU,
            console=console(),
        )


def test_splits_and_trajectories_have_seeds_of_their_own(workspace: Workspace) -> None:
    store = TrajectoryStore(workspace.dataset("kf64"))
    states = torch.cat([store.load(split, device="cpu")[:, 0].flatten(1) for split in ("train", "valid", "test")])
    distances = torch.cdist(states.double(), states.double()) + 1e9 * torch.eye(len(states))
    assert float(distances.min()) > 0.1 * float(states.norm(dim=1).mean())


def test_verify_passes_good_data_and_names_a_broken_file(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "kf64"
    shutil.copytree(workspace.dataset("kf64"), folder)
    assert verify(folder, console=Console(width=300))
    victim = sorted((folder / "data" / "train").glob("*.hdf5"))[0]
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    assert not verify(folder, console=Console(width=300))
    assert victim.name in capsys.readouterr().out


def test_verify_sees_a_flow_that_does_not_obey_its_budget(workspace: Workspace, tmp_path: Path) -> None:
    folder = tmp_path / "kf64"
    shutil.copytree(workspace.dataset("kf64"), folder)
    data = json.loads((folder / "dataset.json").read_text())
    data["dataset"]["flow"]["drag"] = 0.2
    (folder / "dataset.json").write_text(json.dumps(data))
    assert not verify(folder, console=console())


def test_loaded_run_is_a_step_in_physical_units(workspace: Workspace, scored: Path) -> None:
    step = ergoflow.load(scored)
    store = TrajectoryStore(workspace.dataset("kf64"))
    initial = store.load("test", device="cpu")[:, 0]
    with torch.inference_mode():
        states = list(rollout(step, initial, 3))
    kept = TrajectoryStore(scored / "rollout").load("test", device="cpu")
    assert torch.equal(kept[:, 0], initial)
    assert torch.allclose(kept[:, 3], states[2], rtol=1e-4, atol=1e-4)


def test_a_second_training_needs_to_be_told_what_to_do(workspace: Workspace, scored: Path) -> None:
    weights = (scored / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="pass --resume to continue it, --overwrite"):
        train(tiny(), workspace, seed=0, device=CPU, console=console())
    with pytest.raises(ValueError, match="choose one"):
        train(tiny(), workspace, seed=0, device=CPU, console=console(), resume=True, overwrite=True)
    with pytest.raises(ValueError, match=r"was trained with model\.sigma="):
        train(tiny("model.sigma=2"), workspace, seed=0, device=CPU, console=console(), resume=True)
    assert (scored / "model.safetensors").read_bytes() == weights


def test_a_model_that_cannot_be_built_does_not_cost_the_earlier_run(workspace: Workspace, scored: Path) -> None:
    before = (scored / "model.safetensors").read_bytes()
    wide = tiny("model.decoder_kernels=[41, 41]")
    with pytest.raises(ValueError, match="already"):
        train(wide, workspace, seed=0, device=CPU, console=console())
    impossible = dataclasses.replace(tiny(), model=MNOConfig(modes=40))
    with pytest.raises(ValueError, match="waves up to"):
        train(impossible, workspace, seed=0, device=CPU, console=console(), overwrite=True)
    assert (scored / "model.safetensors").read_bytes() == before


def test_a_setting_that_cannot_be_trained_with_does_not_cost_the_earlier_run(
    workspace: Workspace, scored: Path
) -> None:
    before = (scored / "model.safetensors").read_bytes()
    without_operator = dataclasses.replace(tiny(), model=ConvNeXtConfig(widths=(8,), blocks=(1,)))
    for recipe, reason in (
        (tiny("training.batch_size=100000"), "choose a smaller batch"),
        (tiny("objective.unroll=64"), "shorten the window"),
        (without_operator, "set objective.unitary_weight=0"),
    ):
        with pytest.raises(ValueError, match=reason):
            train(recipe, workspace, seed=0, device=CPU, console=console(), overwrite=True)
        assert (scored / "model.safetensors").read_bytes() == before
        with pytest.raises(ValueError, match=reason):
            train(recipe, workspace, seed=6, device=CPU, console=console())
        assert not workspace.run("kf64-a3m", 6).exists()


def test_a_run_goes_on_in_the_units_it_began_with_and_not_with_other_data(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    simulate(tiny().dataset, space, device=CPU, console=console())
    train(tiny(), space, seed=0, device=CPU, console=console())
    facts, stats = (tmp_path / name for name in ("runs/kf64-a3m/seed0/run.json", "data/kf64/stats.yaml"))
    kept, known = facts.read_bytes(), stats.read_text()
    longer = tiny("training.max_steps=8")
    for factor, refused in ((3.0, True), (1.01, False)):
        spread = yaml.safe_load(known)
        spread["std"]["vorticity"] *= factor
        stats.write_text(yaml.safe_dump(spread))
        with pytest.raises(ValueError, match="was trained on data with std") if refused else nullcontext():
            train(longer, space, seed=0, device=CPU, console=console(), resume=True)
        assert facts.read_bytes() == kept


def test_a_trained_run_without_its_state_is_not_trained_from_the_start_under_its_name(
    workspace: Workspace, scored: Path, tmp_path: Path
) -> None:
    space = Workspace(tmp_path)
    (tmp_path / "data").symlink_to(workspace.root / "data")
    folder = Path(shutil.copytree(scored, space.run("kf64-a3m", 0)))
    (folder / "state" / "state.pt").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=r"holds trained weights, but state/state\.pt, .* is missing; bring it back"):
        train(tiny("training.max_steps=8"), space, seed=0, device=CPU, console=console(), resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_run_killed_within_its_first_checkpoint_begins_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are written, its state is not: there is nothing to go on from, and nothing to keep."""
    recipe = tiny("name=kf64-a3m-killed")
    with monkeypatch.context() as patch:
        patch.setattr("ergoflow.training.loop.save_state", _power_failure)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, workspace, seed=0, device=CPU, console=console())
    folder = workspace.run(recipe.name, 0)
    assert (folder / "model.safetensors").exists()
    train(recipe, workspace, seed=0, device=CPU, console=console(), resume=True)
    assert json.loads((folder / "training.json").read_text())["steps"] == 6


def test_a_bar_counts_what_was_trained_before_and_times_what_is_trained_now(workspace: Workspace) -> None:
    name = "name=kf64-a3m-counted"
    for steps, resume, samples in ((4, False, 16), (6, True, 8)):
        loud = Console(file=io.StringIO(), width=200)
        recipe = tiny(f"training.max_steps={steps}", "training.batch_size=4", name)
        train(recipe, workspace, seed=0, device=CPU, console=loud, resume=resume)
        assert f"train kf64-a3m-counted: {samples} samples in " in loud.file.getvalue()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("training.batch_size=3", "must keep its batch size"),
        ("objective.unitary_weight=2", r"trained with objective\.unitary_weight=1\.0, but .*=2\.0 was asked for"),
        ("objective.spectral_weight=0.1", r"trained with objective\.spectral_weight=0\.0"),
    ],
)
def test_a_refused_resumption_leaves_the_run_as_it_was(
    workspace: Workspace, scored: Path, change: str, reason: str
) -> None:
    before = {name: (scored / name).read_bytes() for name in ("recipe.json", "training.json", "state/state.pt")}
    longer = tiny("training.max_steps=8", change)
    with pytest.raises(ValueError, match=reason):
        train(longer, workspace, seed=0, device=CPU, console=console(), resume=True)
    assert {name: (scored / name).read_bytes() for name in before} == before


def test_a_complete_run_that_trains_on_is_incomplete_until_its_new_end(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "name=kf64-a3m-further"
    folder = train(tiny("training.max_steps=2", name), workspace, seed=0, device=CPU, console=console())
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "checkpoint", _power_failure)
        with pytest.raises(KeyboardInterrupt):
            train(tiny("training.max_steps=4", name), workspace, seed=0, device=CPU, console=console(), resume=True)
    assert not is_trained(folder)
    with monkeypatch.context() as patch:
        patch.setattr("ergoflow.pipeline.stages.train", _stopped)
        with pytest.raises(TrainingInterrupted, match=r"kf64-a3m-further, seed 0, .*; the same command goes on from"):
            run_one(tiny("training.max_steps=4", name), workspace, seed=0, device=CPU, console=console())
    assert load_recipe(folder / "recipe.json").training.max_steps == 4
    for steps in (4, 3):  # the second finds nothing to do
        train(tiny(f"training.max_steps={steps}", name), workspace, seed=0, device=CPU, console=console(), resume=True)
        assert is_trained(folder)
        assert load_recipe(folder / "recipe.json").training.max_steps == steps


def _power_failure(*_: object) -> None:
    raise KeyboardInterrupt


def _stopped(*_: object, **__: object) -> None:
    raise TrainingInterrupted("run the same command with --resume to continue")


def test_scores_are_never_those_of_earlier_weights(workspace: Workspace) -> None:
    recipe = tiny("training.max_steps=3", "name=kf64-a3m-longer")
    folder = run_one(recipe, workspace, seed=0, device=CPU, console=console())
    first = scores_of(folder)["metrics"]["relative_l2@1"]["rows"]["model"]["value"]
    longer = tiny("training.max_steps=8", "name=kf64-a3m-longer")
    train(longer, workspace, seed=0, device=CPU, console=console(), resume=True)
    with pytest.raises(ValueError, match="got an earlier one; run `ergoflow predict` again"):
        score(longer, workspace, seed=0, device=CPU, console=console())
    run_one(longer, workspace, seed=0, device=CPU, console=console())
    assert scores_of(folder)["metrics"]["relative_l2@1"]["rows"]["model"]["value"] != first


def test_a_roll_out_with_other_lags_is_refused_before_work(workspace: Workspace, scored: Path) -> None:
    references = sorted(workspace.dataset("kf64").glob("reference-*.npz"))
    with pytest.raises(
        ValueError, match=r"evaluation\.max_lag=7 was expected .*, got 20; run `ergoflow predict` again"
    ):
        score(tiny("evaluation.max_lag=7"), workspace, seed=0, device=CPU, console=console())
    assert sorted(workspace.dataset("kf64").glob("reference-*.npz")) == references


def test_an_interrupted_training_is_finished_before_it_is_scored(workspace: Workspace) -> None:
    recipe = tiny("training.max_steps=4")
    folder = train(recipe, workspace, seed=7, device=CPU, console=console())
    half_trained = (folder / "model.safetensors").read_bytes()
    complete = json.loads((folder / "training.json").read_text())
    (folder / "training.json").unlink()
    loud = Console(file=io.StringIO())
    predict(recipe, workspace, seed=7, device=CPU, console=loud)
    assert "training is not complete" in loud.file.getvalue()
    score(recipe, workspace, seed=7, device=CPU, console=console())
    assert scores_of(folder)["parameters"] == complete["parameters"] > 0
    longer = tiny("training.max_steps=9")
    with pytest.raises(ValueError, match=r"trained with objective\.noise=0\.0, but objective\.noise=0\.1"):
        run_one(override(longer, ["objective.noise=0.1"]), workspace, seed=7, device=CPU, console=console())
    run_one(longer, workspace, seed=7, device=CPU, console=console())
    assert json.loads((folder / "training.json").read_text())["steps"] == 9
    assert (folder / "model.safetensors").read_bytes() != half_trained


def test_a_run_is_not_evaluated_under_another_task_or_model(workspace: Workspace, scored: Path) -> None:
    for change, part in (("task.stride=2", "task.stride"), ("model.sigma=3", "model.sigma")):
        for verb in (predict, score):
            with pytest.raises(ValueError, match=f"was trained with {part}="):
                verb(tiny(change), workspace, seed=0, device=CPU, console=console())


def test_a_roll_out_over_the_times_of_the_truth_has_no_drift(workspace: Workspace) -> None:
    """It may follow a transient: the end of one is not its mean, and a frozen forecast would look better than truth."""
    drifts = {"energy_drift", "enstrophy_drift"}
    for settings, found in (("evaluation.steps=40", set()), ("evaluation.steps=180", drifts)):
        recipe = tiny(settings, "evaluation.discard=0")
        assert (skipped_frames(recipe.evaluation, recipe.dataset.frames) == 0) == (not found)
        folder = run_one(recipe, workspace, seed=9, device=CPU, console=console())
        assert drifts & set(scores_of(folder)["metrics"]) == found


def test_a_longer_roll_out_is_made_again_and_named_in_the_scores(workspace: Workspace) -> None:
    folder = run_one(tiny(), workspace, seed=8, device=CPU, console=console())
    assert scores_of(folder)["rollout_steps"] == 160
    run_one(tiny("evaluation.steps=180"), workspace, seed=8, device=CPU, console=console())
    assert scores_of(folder)["rollout_steps"] == 180


def test_a_roll_out_that_was_killed_is_made_again(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_one(tiny(), workspace, seed=10, device=CPU, console=console())
    with monkeypatch.context() as patch:
        # Between the frames and the last of the files that go with them.
        patch.setattr("ergoflow.pipeline.predict.write_json", _power_failure)
        with pytest.raises(KeyboardInterrupt):
            predict(tiny("evaluation.steps=180"), workspace, seed=10, device=CPU, console=console())
    assert not is_rolled_out(folder, tiny())
    with pytest.raises(ValueError, match="no whole one; run `ergoflow predict` with this recipe and seed"):
        score(tiny(), workspace, seed=10, device=CPU, console=console())
    run_one(tiny(), workspace, seed=10, device=CPU, console=console())
    assert scores_of(folder)["rollout_steps"] == 160


def test_data_of_ones_own_is_not_mixed_with_simulated_shards(workspace: Workspace, tmp_path: Path) -> None:
    shutil.copytree(workspace.dataset("kf64"), tmp_path / "data" / "kf64")
    (tmp_path / "data" / "kf64" / "dataset.json").unlink()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="did not make"):
        simulate(tiny().dataset, Workspace(tmp_path), device=CPU, console=console())
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def own_data(
    root: Path,
    splits: dict[str, int],
    *,
    spoiled: str = "",
    grid: tuple[int, int] = (16, 16),
    field: str = "vorticity",
    valid_frames: int = 64,
) -> Workspace:
    """A folder of noise with the fields and frame time of the tiny flow; split `spoiled` begins with a NaN."""
    folder = root / "data" / "kf64"
    info = DatasetInfo(
        name="noise",
        fields=(field,),
        grid=grid,
        length=(2 * math.pi, 2 * math.pi),
        boundaries=("PERIODIC", "PERIODIC"),
        axes=("x", "y"),
        frame_seconds=0.2,
    )
    rng = np.random.default_rng(0)
    for split, count in splits.items():
        frames = valid_frames if split == "valid" else 64
        with ShardWriter(folder / "data" / split / "noise.hdf5", info, count=count, frames=frames) as shard:
            for t in range(frames):
                frame = rng.standard_normal((count, 1, *grid))
                frame[0, 0, 0, 0] = math.nan if split == spoiled and t == 0 else 0.0
                shard.write(t, frame)
    write_statistics(folder, compute_statistics(TrajectoryStore(folder)))
    return Workspace(root)


def test_data_of_ones_own_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    def run(space: Workspace, *verbs: Callable[..., Path]) -> None:
        for verb in verbs:
            verb(tiny(), space, seed=0, device=CPU, console=console())

    whole = {"train": 2, "valid": 1, "test": 2}
    with pytest.raises(ValueError, match=r"must hold the split 'valid', got .*; put HDF5 files into data/valid"):
        run(own_data(tmp_path / "a", {"train": 2, "test": 2}), train)
    assert not (tmp_path / "a" / "runs" / "kf64-a3m").exists()
    with pytest.raises(ValueError, match=r"valid split of .* must hold finite numbers, got others in trajectory 0"):
        run(own_data(tmp_path / "b", whole, spoiled="valid"), train)
    with pytest.raises(ValueError, match=r"test split of .* must hold finite numbers.*run `ergoflow verify"):
        run(own_data(tmp_path / "c", whole, spoiled="test"), train, predict)
    with pytest.raises(ValueError, match=r"test split of .* must have at least 2 trajectories.*, got 1; add some"):
        run(own_data(tmp_path / "d", whole | {"test": 1}), train, predict)
    with pytest.raises(ValueError, match=r"got \(16, 18\); give the recipe the grid of the files"):
        run(own_data(tmp_path / "e", whole, grid=(16, 18)), train)
    space = own_data(tmp_path / "h", whole)
    with h5py.File(space.dataset("kf64") / "data" / "train" / "noise.hdf5", "r+") as file:
        file["t0_fields/vorticity"][1, 3, 2, 2] = math.nan  # after stats.yaml was written
    with pytest.raises(ValueError, match=r"train split of .* must hold finite numbers, got others in trajectory 1"):
        run(space, train)
    short = own_data(tmp_path / "g", whole, valid_frames=2)
    with pytest.raises(ValueError, match=r"valid split of .* more than 2 frames, one .*, got 2; lower task\.stride"):
        train(tiny("task.stride=2"), short, seed=0, device=CPU, console=console())
    assert not (tmp_path / "g" / "runs" / "kf64-a3m").exists()
    run(short, train)
    space = own_data(tmp_path / "f", whole)
    (space.dataset("kf64") / "stats.yaml").unlink()
    with pytest.raises(ValueError, match=r"stats\.yaml, but there are none; write them with compute_statistics"):
        run(space, train)


def test_data_that_cannot_be_written_to_are_scored_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = own_data(tmp_path, {"train": 2, "valid": 1, "test": 2})
    folder = run_one(tiny(), space, seed=0, device=CPU, console=console())
    expected = scores_of(folder)["metrics"]
    (reference,) = space.dataset("kf64").glob("reference-*.npz")
    reference.unlink()
    monkeypatch.setattr("ergoflow.pipeline.reference.os.access", lambda *_: False)
    predict(tiny(), space, seed=0, device=CPU, console=console())
    score(tiny(), space, seed=0, device=CPU, console=console())
    assert not reference.exists()
    assert scores_of(folder)["metrics"] == expected


def test_a_reference_is_that_of_the_mean_and_spread_it_was_made_with(tmp_path: Path) -> None:
    space = own_data(tmp_path, {"train": 2, "valid": 1, "test": 2})
    store = open_store(tiny(), space)

    def edges() -> np.ndarray:
        return load_reference(tiny(), store, device=CPU, console=console()).yardstick.edges

    before = edges()
    add_increment_std(store, 2)  # as a training at another stride does
    assert np.array_equal(edges(), before)
    assert len(list(space.dataset("kf64").glob("reference-*.npz"))) == 1
    statistics = store.statistics
    statistics["std"] = {name: 2 * value for name, value in statistics["std"].items()}
    write_statistics(store.folder, statistics)
    assert np.ptp(edges()) == pytest.approx(2 * np.ptp(before))


def test_a_reference_is_that_of_the_stride_lags_and_files_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kf128 and kf128-coarse share one folder: one must not be held against the other's truth."""
    monkeypatch.setattr("ergoflow.pipeline.reference.TRIVIAL_RESAMPLES", 2)
    space = own_data(tmp_path, {"train": 2, "valid": 1, "test": 2})

    def made(*settings: str) -> int:
        recipe = tiny("evaluation.max_lag=4", *settings)
        load_reference(recipe, open_store(recipe, space), device=CPU, console=console())
        return len(list(space.dataset("kf64").glob("reference-*.npz")))

    assert [made(), made(), made("task.stride=2"), made("evaluation.max_lag=5")] == [1, 1, 2, 3]
    assert made("evaluation.resamples=21") == 4
    assert made("evaluation.steps=170") == 4
    victim = next((space.dataset("kf64") / "data" / "test").glob("*.hdf5"))
    os.utime(victim, ns=(0, 0))
    assert made() == 5


def test_climatology_and_components_are_of_the_training_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ergoflow.pipeline.reference.TRIVIAL_RESAMPLES", 2)
    store = open_store(tiny(), own_data(tmp_path, {"train": 3, "valid": 1, "test": 2}))
    reference = load_reference(tiny(), store, device=CPU, console=console())
    train_frames, test_frames = (store.load(split).double() for split in ("train", "test"))
    assert np.allclose(reference.climatology, train_frames[:, ::10].mean((0, 1)), atol=1e-6)
    assert not np.allclose(reference.climatology, test_frames[:, ::10].mean((0, 1)), atol=0.1)
    assert np.allclose(reference.yardstick.basis.mean, train_frames.mean((0, 1)).flatten(), atol=1e-6)


def test_a_vorticity_is_carried_on_squares_only(tmp_path: Path) -> None:
    space = own_data(tmp_path, {"train": 2, "valid": 1, "test": 2}, grid=(16, 24))
    carried = find_recipe("kf64-ergoformer")
    recipe = dataclasses.replace(tiny("dataset.flow.grid=[16, 24]"), model=carried.model, task=carried.task)
    with pytest.raises(ValueError, match=r"needs equal spacing along both axes, got 0\.3927 and 0\.2618; resample"):
        train(recipe, space, seed=0, device=CPU, console=console())


def test_exponents_of_data_of_ones_own_are_refused_before_work(tmp_path: Path) -> None:
    space = own_data(tmp_path, {"train": 2, "valid": 1, "test": 2})
    recipe = tiny()
    train(recipe, space, seed=0, device=CPU, console=console())
    predict(recipe, space, seed=0, device=CPU, console=console())
    with pytest.raises(ValueError, match="made by `ergoflow simulate`, got data of your own"):
        score(tiny("evaluation.exponents=1"), space, seed=0, device=CPU, console=console())


@pytest.mark.parametrize("name", ["gpu", "meta", "mps", "cpu:3", "cuda:x", ""])
def test_devices_nobody_computes_on_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the device must be auto, cpu, cuda or cuda:N"):
        pick_device(name)


@pytest.mark.parametrize(
    ("config", "row"), [(PersistenceConfig(), "persistence"), (ClimatologyConfig(), "climatology")]
)
def test_trivial_models_run_like_any_other_and_score_their_own_row(
    workspace: Workspace, config: object, row: str
) -> None:
    recipe = dataclasses.replace(tiny(), name=row, model=config)
    metrics = scores_of(run_one(recipe, workspace, seed=0, device=CPU, console=console()))["metrics"]
    for key in ("relative_l2@5", "relative_l2@25"):
        assert metrics[key]["rows"]["model"]["value"] == pytest.approx(metrics[key]["rows"][row]["value"], rel=1e-5)


def test_exponents_of_solver_and_model_are_in_scores_and_curves(workspace: Workspace) -> None:
    recipe = tiny("evaluation.exponents=2", "evaluation.exponent_steps=20")
    folder = run_one(recipe, workspace, seed=9, device=CPU, console=console())
    cell = scores_of(folder)["metrics"]["lambda1_error"]
    with np.load(folder / "curves.npz") as curves:
        truth, model = curves["lyapunov/truth"], curves["lyapunov/model"]
    assert truth.shape == model.shape == (2,)
    assert cell["rows"]["model"]["value"] == pytest.approx(abs(model[0] / truth[0] - 1), rel=1e-6)


def test_exponents_of_the_solver_are_those_of_the_attractor_whatever_points_are_stored(workspace: Workspace) -> None:
    # So viscous that every second point holds all but 1.5 % of the state, and that the rest decays at once.
    settings = ("dataset.flow.viscosity=0.1", "evaluation.exponents=1", "evaluation.exponent_steps=60")
    exponents = []
    for name, subsample in (("smooth", 1), ("smooth-half", 2)):
        recipe = tiny(*settings, f"dataset.name={name}", f"dataset.subsample={subsample}")
        simulate(recipe.dataset, workspace, device=CPU, console=console())
        store = open_store(recipe, workspace)
        measured = measure_exponents(recipe, store, lambda z: 0.5 * z, device=CPU, console=console())
        assert measured.model == pytest.approx(math.log(0.5) / recipe.step_seconds, rel=1e-6)
        exponents.append(measured.truth)
    assert exponents[0].shape == (6, 1)
    assert exponents[1] == pytest.approx(exponents[0], abs=1e-3 * np.abs(exponents[0]).max())


@pytest.mark.parametrize(
    ("file", "verb", "remedy"),
    [
        ("runs/kf64-a3m/seed0/run.json", "predict", "train the run anew"),
        ("runs/kf64-a3m/seed0/rollout/statistics.npz", "score", "run `ergoflow predict` again"),
        ("runs/kf64-a3m/seed0/rollout/rollout.json", "score", "run the verb that writes it again"),
        ("runs/kf64-a3m/seed0/scores.json", "report", "run `ergoflow score` again"),
        ("runs/kf64-a3m/seed0/curves.npz", "report", "run `ergoflow score` again"),
        ("data/kf64/reference-*.npz", "predict", "remove it"),
        ("data/kf64/dataset.json", "simulate", "simulate it again"),
    ],
)
def test_a_damaged_file_is_named_with_what_makes_it_anew(
    scored: Path, workspace: Workspace, tmp_path: Path, file: str, verb: str, remedy: str
) -> None:
    space = Workspace(shutil.copytree(workspace.root, tmp_path / "copy", symlinks=True))
    for path in space.root.glob(file):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    where = {"device": CPU, "console": console()}
    verbs: dict[str, Callable[[], object]] = {
        "simulate": lambda: simulate(tiny().dataset, space, **where),
        "predict": lambda: predict(tiny(), space, seed=0, **where),
        "score": lambda: score(tiny(), space, seed=0, **where),
        "report": lambda: report(space, title="x", console=console()),
    }
    with pytest.raises(ValueError, match=f"{Path(file).name.replace('*', '.*')} must be a whole .*{remedy}"):
        verbs[verb]()


@pytest.mark.parametrize(("share", "verdict"), [(0.25, "strayed"), (0.75, "at floor")])
def test_what_is_printed_after_a_run_calls_no_statistic_good_where_most_roll_outs_left(
    scored: Path, tmp_path: Path, share: float, verdict: str
) -> None:
    scores = scores_of(scored)
    scores["metrics"]["pca_kl"]["rows"]["model"]["verdict"] = "at floor"
    scores["survival"][f"energy_in_range@{scores['survival']['steps']}"] = share
    scores["survival"][f"enstrophy_in_range@{scores['survival']['steps']}"] = 1.0
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    loud = Console(file=io.StringIO(), width=200)
    print_summary(tmp_path, loud)
    assert re.search(rf"PCA-KL \S+ \(floor \S+: {verdict}\)", loud.file.getvalue())


def test_missing_inputs_name_the_verb_that_makes_them(tmp_path: Path, workspace: Workspace) -> None:
    with pytest.raises(ValueError, match="run `ergoflow simulate` with this recipe"):
        train(tiny(), Workspace(tmp_path), seed=0, device=CPU, console=console())
    with pytest.raises(ValueError, match="ergoflow train"):
        predict(tiny(), workspace, seed=99, device=CPU, console=console())
    with pytest.raises(ValueError, match="run `ergoflow predict` with this recipe and seed"):
        score(tiny(), workspace, seed=98, device=CPU, console=console())
    with pytest.raises(ValueError, match="ergoflow score"):
        report(Workspace(tmp_path), title="x", console=Console(quiet=True))


def test_a_data_set_of_another_shape_is_refused(workspace: Workspace) -> None:
    with pytest.raises(ValueError, match=r"expected to hold a \(32, 32\) grid, got \(16, 16\)"):
        train(tiny("dataset.flow.grid=[32, 32]"), workspace, seed=5, device=CPU, console=console())


def test_a_data_set_that_was_simulated_otherwise_is_refused_by_every_verb(workspace: Workspace, scored: Path) -> None:
    for change, was in (("flow.drag=0.2", "flow.drag=0.1"), ("train=5", "train=6")):
        with pytest.raises(ValueError, match=rf"was simulated with {was}, but .*{change}; add --set dataset.{was}, or"):
            train(tiny(f"dataset.{change}"), workspace, seed=5, device=CPU, console=console())
    assert not workspace.run("kf64-a3m", 5).exists()


def test_a_data_set_that_lost_a_file_is_refused_until_it_is_made_again(workspace: Workspace, tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    shutil.copytree(workspace.dataset("kf64"), space.dataset("kf64"))
    (space.dataset("kf64") / "data" / "train" / "kf64_0004.hdf5").unlink()
    with pytest.raises(ValueError, match="holds 12 of 14 trajectories; run `ergoflow simulate`"):
        train(tiny(), space, seed=0, device=CPU, console=console())
    simulate(tiny().dataset, space, device=CPU, console=console())
    assert is_trained(train(tiny(), space, seed=0, device=CPU, console=console()))


def test_kept_steps_are_dense_first_then_sparse_with_the_last() -> None:
    evaluation = tiny("evaluation.steps=95", "evaluation.discard=10", "evaluation.max_lag=20").evaluation
    steps = kept_steps(evaluation)
    assert steps[:31] == list(range(31))
    assert steps[31:] == [40, 80, 95]


def test_the_window_of_statistics_is_as_long_as_the_truth() -> None:
    evaluation = tiny().evaluation
    assert evaluation.steps + 1 - skipped_frames(evaluation, 50) == 50
    assert skipped_frames(evaluation, 10_000) == evaluation.discard


def fake_rollout(recipe: Recipe, workspace: Workspace, name: str, frames: torch.Tensor) -> dict:
    """Scores of a roll-out whose every state is given (J, T, C, X, Y), through the real predict and score."""
    recipe = dataclasses.replace(recipe, name=name, model=PersistenceConfig())
    store = open_store(recipe, workspace)
    folder = workspace.run(name, 0)
    write_run(folder, recipe, RunFacts.of(store.info, normalizer_of(store, stride=1), recipe.step_seconds))
    (folder / "model.safetensors").touch()
    states = iter(frames.unbind(1)[1:])
    import ergoflow.pipeline.predict as module

    original = module.load_run
    module.load_run = lambda *_, **__: lambda _: next(states)  # type: ignore[assignment]
    try:
        predict(recipe, workspace, seed=0, device=CPU, console=console())
    finally:
        module.load_run = original
    import ergoflow.pipeline.curves as curves

    operator = curves._operator
    curves._operator = lambda *_: {}  # type: ignore[assignment]
    try:
        score(recipe, workspace, seed=0, device=CPU, console=console())
    finally:
        curves._operator = operator
    return scores_of(folder)


def long_truth(recipe: Recipe, workspace: Workspace) -> torch.Tensor:
    """The test trajectories, carried on by the solver for the whole length of the roll-out."""
    from ergoflow.solvers.kolmogorov import make_step

    initial = open_store(recipe, workspace).load("test", device="cpu")[:, 0]
    step = make_step(recipe.dataset.flow, substeps=recipe.dataset.substeps)
    return torch.stack(list(rollout(step, initial, recipe.evaluation.steps, include_initial=True)), dim=1)


def test_truth_scored_as_a_model_is_at_its_floor_everywhere(workspace: Workspace) -> None:
    scores = fake_rollout(tiny(), workspace, "truth-as-model", long_truth(tiny(), workspace))
    verdicts = {
        key: m["rows"]["model"]["verdict"] for key, m in scores["metrics"].items() if not key.startswith("relative_l2")
    }
    assert set(verdicts.values()) == {"at floor"}, verdicts
    assert scores["metrics"]["relative_l2@25"]["rows"]["model"]["value"] < 1e-3
    assert scores["survival"]["fraction"] == 1.0


def test_a_blow_up_cannot_look_good_in_any_long_term_column(workspace: Workspace) -> None:
    frames = long_truth(tiny(), workspace)
    frames[1, 140:] = math.nan
    scores = fake_rollout(tiny(), workspace, "blow-up", frames)
    assert scores["survival"]["diverged_at"][1] == 140
    assert scores["survival"]["fraction"] == pytest.approx(5 / 6)
    for key, metric in scores["metrics"].items():
        if not key.startswith("relative_l2"):
            assert metric["rows"]["model"] == {
                "value": None,
                "low": None,
                "high": None,
                "verdict": "failed",
            }, key


def test_frozen_and_constant_forecasts_are_flagged_by_what_can_see_them(scored: Path) -> None:
    metrics = {k: m for k, m in scores_of(scored)["metrics"].items() if m["headline"] and m["floor"] is not None}
    # A frozen forecast is a true state: only what looks at times can see it. No state is a constant one.
    in_time = {"delta_lambda", "integral_time_error", "acf_max_error"}
    for row, expected in (("persistence", in_time), ("climatology", set(metrics)), ("zero", set(metrics))):
        flagged = {
            key
            for key, metric in metrics.items()
            if metric["rows"][row]["value"] is None or metric["rows"][row]["low"] > metric["floor"]["high"]
        }
        assert flagged == expected, row
    assert in_time < set(metrics)


def test_statistics_of_the_rollout_agree_with_its_stored_frames(scored: Path) -> None:
    """Streaming sums against the plain metric on frames: the energy series at the kept steps."""
    from ergoflow.metrics import kinetic_energy
    from ergoflow.numerics.fourier import velocity_from_vorticity

    store = TrajectoryStore(scored / "rollout")
    statistics = StatisticsResult.load(scored / "rollout" / "statistics.npz")
    frames = store.load("test", device="cpu").double()
    energy = np.asarray(kinetic_energy(velocity_from_vorticity(frames)))
    np.testing.assert_allclose(statistics.energy[:, store.steps("test")], energy, rtol=1e-5)

"""A run folder: what is needed to build its model again, and how the model is loaded.

`run.json` holds what the recipe cannot know: the data set's fields, grid, domain and normalisation. With
`recipe.json` and `model.safetensors` beside it, a run needs no data to be used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ergoflow.config import (
    FilesDatasetConfig,
    KolmogorovDatasetConfig,
    Recipe,
    SimulatedDatasetConfig,
    first_difference,
    load_recipe,
    to_dict,
)
from ergoflow.data.files import read_json, write_text_atomic
from ergoflow.data.normalize import Normalizer
from ergoflow.data.statistics import add_increment_std
from ergoflow.data.store import DatasetInfo, TrajectoryStore, list_splits
from ergoflow.models.advection import Pace
from ergoflow.models.build import build_model
from ergoflow.models.ergoformer import ErgoformerConfig
from ergoflow.models.own import OwnConfig
from ergoflow.models.velocity import is_evenly_spaced
from ergoflow.pipeline.shards import completeness
from ergoflow.pipeline.workspace import Workspace, commit, load_dataset_config
from ergoflow.training.checkpoint import WEIGHTS_FILE, load_weights
from ergoflow.training.climate import Climate, HeldStep
from ergoflow.training.dissipation import DissipativeStep, state_norm
from ergoflow.training.stepper import NormalizedStep, PhysicalStep

RUN_FORMAT = 1
# Its presence means that training is complete.
SUMMARY_FILE = "training.json"
# Neighbouring frames have nearly the same norm.
RADIUS_STRIDE = 10
CLIMATE_STRIDE = 5
# A run may go on with data whose spreads differ by this share from those it began with.
SAME_DATA = 0.05


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a model must know of its data.

    `radius` is the largest norm of the normalised training states, and `climate` their mean and energies, where the
    recipe needs them (None elsewhere).
    """

    fields: tuple[str, ...]
    grid: tuple[int, ...]
    length: tuple[float, ...]
    periodic: tuple[bool, ...]
    step_seconds: float
    normalizer: Normalizer
    radius: float | None = None
    climate: Climate | None = None

    @classmethod
    def of(
        cls,
        info: DatasetInfo,
        normalizer: Normalizer,
        step_seconds: float,
        *,
        radius: float | None = None,
        climate: Climate | None = None,
    ) -> RunFacts:
        """The facts of a data set."""
        return cls(
            fields=info.fields,
            grid=info.grid,
            length=info.length,
            periodic=periodic_axes(info),
            step_seconds=step_seconds,
            normalizer=normalizer,
            radius=radius,
            climate=climate,
        )


def open_store(recipe: Recipe, workspace: Workspace) -> TrajectoryStore:
    """The recipe's data set; an error that says how to make it if it is not there or is another one."""
    folder = workspace.dataset(recipe.dataset.name)
    if not (folder / "stats.yaml").exists():
        brought = isinstance(recipe.dataset, FilesDatasetConfig)
        own = list_splits(folder) and not (folder / "dataset.json").exists()
        raise ValueError(
            f"statistics were expected in {folder / 'stats.yaml'}, but there are none; "
            "write them with compute_statistics and write_statistics of ergoflow.data.store"
            if own
            else f"data set {recipe.dataset.name} was expected in {folder}, but it is not complete; "
            f"{'bring it with `ergoflow import`' if brought else 'run `ergoflow simulate` with this recipe'}, "
            "or choose the --root that holds it"
        )
    store = TrajectoryStore(folder)
    if not math.isclose(store.info.frame_seconds, recipe.dataset.frame_seconds, rel_tol=1e-6):
        raise ValueError(
            f"{folder} was expected to hold frames every {recipe.dataset.frame_seconds} s, got "
            f"{store.info.frame_seconds} s; set dataset.frame_seconds or choose another --root"
        )
    if store.info.grid != recipe.dataset.grid:
        raise ValueError(
            f"{folder} was expected to hold a {recipe.dataset.grid} grid, got {store.info.grid}; "
            "give the recipe the grid of the files or choose another --root"
        )
    if isinstance(recipe.dataset, SimulatedDatasetConfig) and (folder / "dataset.json").exists():
        _require_simulated_as_asked(recipe.dataset, folder)
    return store


def _require_simulated_as_asked(dataset: SimulatedDatasetConfig, folder: Path) -> None:
    """Refuse a data set that was simulated with other settings, or a Kolmogorov set that has lost files."""
    if difference := first_difference(load_dataset_config(folder), dataset):
        key, known, asked = difference
        raise ValueError(
            f"{folder} was simulated with {key}={known}, but the recipe says {key}={asked}; add "
            f"--set dataset.{key}={json.dumps(known, separators=(',', ':'))}, or choose another --root and simulate it"
        )
    if isinstance(dataset, KolmogorovDatasetConfig) and (made := completeness(dataset, folder)) != "complete":
        raise ValueError(f"{folder} holds {made}; run `ergoflow simulate`, which makes the rest")


def require_finite(frames: Tensor, store: TrajectoryStore, split: str) -> None:
    """Refuse frames (J, T, C, *grid) of a split that hold a number that is not finite."""
    bad = ~torch.isfinite(frames).flatten(2).all(2)  # (J, T)
    if bad.any():
        trajectory = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"the {split} split of {store.folder} must hold finite numbers, got others in trajectory {trajectory}; "
            f"run `ergoflow verify {store.folder}`, which names the frame, and mend the data"
        )


def normalizer_of(store: TrajectoryStore, *, stride: int) -> Normalizer:
    """Mean and standard deviation of the training split, and those of its increments over `stride` frames.

    The latter mean reading all of it, which is done once where `stats.yaml` can be written to.
    """
    if os.access(store.folder, os.W_OK):
        add_increment_std(store, stride)
    return Normalizer.from_store(store, stride=stride)


def build_step(recipe: Recipe, facts: RunFacts, *, seed: int) -> NormalizedStep:
    """A fresh model as a step on normalised states; all initial randomness comes from `seed`."""
    _require_spacing(recipe, facts)
    channels = len(facts.fields)
    generator = torch.Generator().manual_seed(seed)
    scale = facts.normalizer.std_delta / facts.normalizer.std
    pace = Pace(
        turn=facts.step_seconds * facts.normalizer.std[0].item(),
        change=scale[0].item() if recipe.task.predict == "increment" else None,
    )
    model = build_model(
        recipe.model, channels, channels, facts.grid, periodic=facts.periodic, pace=pace, generator=generator
    )
    if not all(0 <= place < channels for place in recipe.task.kept_means):
        raise ValueError(
            f"task.kept_means must be places of the fields {', '.join(facts.fields)}, 0 .. {channels - 1}, got "
            f"{list(recipe.task.kept_means)}; name others or none"
        )
    return NormalizedStep(
        model,
        predict=recipe.task.predict,
        scale=scale,
        relaxation=recipe.task.relaxation,
        kept_means=recipe.task.kept_means,
    )


def _require_spacing(recipe: Recipe, facts: RunFacts) -> None:
    """Refuse unequal spacing where a velocity is made of the vorticity: the model sees points, not lengths."""
    if not isinstance(recipe.model, ErgoformerConfig) or recipe.model.flow is None:
        return
    if not is_evenly_spaced(facts.grid, facts.length):
        spacing = [length / size for length, size in zip(facts.length, facts.grid, strict=True)]
        raise ValueError(
            f"model.flow={recipe.model.flow} needs equal spacing along both axes, got "
            f"{' and '.join(f'{d:.4g}' for d in spacing)}; resample the data or set model.flow=none"
        )


def write_run(folder: Path, recipe: Recipe, facts: RunFacts) -> None:
    """Write recipe.json and run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "format": RUN_FORMAT,
        "fields": facts.fields,
        "grid": facts.grid,
        "length": facts.length,
        "periodic": facts.periodic,
    }
    data |= {
        "step_seconds": facts.step_seconds,
        "normalizer": facts.normalizer.to_dict(),
        "radius": facts.radius,
        "climate": facts.climate and facts.climate.to_dict(),
    }
    write_text_atomic(folder / "recipe.json", json.dumps(to_dict(recipe), indent=2) + "\n")
    write_text_atomic(folder / "run.json", json.dumps(data, indent=2) + "\n")


def read_facts(folder: Path) -> RunFacts:
    """The facts in run.json."""
    path = folder / "run.json"
    if not path.exists():
        raise ValueError(f"a run was expected in {folder}, but run.json is missing; run `ergoflow train` first")
    data = read_json(path, remedy="train the run anew with --overwrite")
    if data.get("format") != RUN_FORMAT:
        raise ValueError(
            f"{path} must have format {RUN_FORMAT}, got {data.get('format')}; use the ergoflow version that wrote it"
        )
    return RunFacts(
        fields=tuple(data["fields"]),
        grid=tuple(data["grid"]),
        length=tuple(data["length"]),
        periodic=tuple(data["periodic"]),
        step_seconds=data["step_seconds"],
        normalizer=Normalizer.from_dict(data["normalizer"]),
        radius=data.get("radius"),
        climate=Climate.from_dict(data["climate"]) if data.get("climate") else None,
    )


def require_same_run(folder: Path, recipe: Recipe, *, parts: Sequence[str] = ("dataset", "task", "model")) -> None:
    """Refuse a recipe whose data, task or model (or other parts) are not those the run was trained with."""
    stored = load_recipe(folder / "recipe.json")
    if isinstance(stored.model, OwnConfig) and not isinstance(recipe.model, OwnConfig):
        raise ValueError(
            f"a run of {recipe.name} was expected in {folder}, got a judged model of your own; "
            "choose another --seed or --root, or judge it under another name"
        )
    for part in parts:
        if difference := first_difference(getattr(stored, part), getattr(recipe, part)):
            key, known, asked = difference
            raise ValueError(
                f"{folder} was trained with {part}.{key}={known}, but {part}.{key}={asked} was asked "
                "for; use its own recipe.json, another --seed or --root, or train it anew with --overwrite"
            )


def require_same_data(folder: Path, facts: RunFacts) -> RunFacts:
    """The facts a run began with; refused if the data are others now.

    Data that were simulated anew on another machine differ by what a finite sample does.
    """
    known = read_facts(folder)
    pairs = {name: (getattr(known, name), getattr(facts, name)) for name in ("fields", "grid", "length", "periodic")}
    changed = [name for name, (before, now) in pairs.items() if before != now]
    for name in ("std", "std_delta"):
        before, now = (getattr(of.normalizer, name) for of in (known, facts))
        pairs[name] = (before.tolist(), now.tolist())
        if len(before) != len(now) or not torch.allclose(before, now, rtol=SAME_DATA):
            changed.append(name)
    if changed:
        before, now = pairs[changed[0]]
        raise ValueError(
            f"{folder} was trained on data with {changed[0]} {before}, got {now}; "
            "bring back the data set it began with, or train it anew with --overwrite"
        )
    return known


def is_trained(folder: Path) -> bool:
    """Whether the training of a run reached its end."""
    return (folder / SUMMARY_FILE).exists() and (folder / WEIGHTS_FILE).exists()


def weights_digest(folder: Path) -> str:
    """A fingerprint of a run's weights, by which a roll-out knows whose it is."""
    return hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()


def is_of_these_weights(folder: Path, rollout: Mapping[str, Any]) -> bool:
    """Whether the contents of rollout.json are of the run's weights; early ones, and those of own steps, name none."""
    return rollout.get("weights") is None or rollout["weights"] == weights_digest(folder)


def load_run(folder: Path, *, device: torch.device | str = "cpu") -> PhysicalStep:
    """The trained model of a run as a step on physical states (B, C, *grid), ready for `rollout`."""
    facts, recipe = read_facts(folder), load_recipe(folder / "recipe.json")
    weights = folder / WEIGHTS_FILE
    if not weights.exists() and not isinstance(recipe.model, OwnConfig):
        raise ValueError(
            f"a trained model was expected in {weights}, but there is none; run `ergoflow train` to its end"
        )
    step = build_step(recipe, facts, seed=0)
    load_weights(step.model, weights)
    return PhysicalStep(guarded(step, recipe, facts), facts.normalizer, grid=facts.grid).to(device).eval()


def guarded(step: NormalizedStep, recipe: Recipe, facts: RunFacts) -> nn.Module:
    """The step as it is rolled out: held at its climate, or dissipative far from the data, if the task asks for it."""
    if recipe.task.hold:
        assert facts.climate is not None
        return HeldStep(step, facts.climate, recipe.task.hold, periodic=facts.periodic)
    if not recipe.task.guard:
        return step
    assert facts.radius is not None
    inner, outer = recipe.objective.dissipativity_shell
    scale = recipe.objective.dissipativity_scale
    return DissipativeStep(step, inner * facts.radius, outer=outer / inner, scale=scale)


def training_radius(store: TrajectoryStore, normalizer: Normalizer) -> float:
    """The largest norm (root mean square) of the normalised training states, over every RADIUS_STRIDE-th frame."""
    frames = store.num_frames("train")
    return max(
        float(
            state_norm(normalizer.normalize(torch.from_numpy(store.read("train", j, 0, frames, RADIUS_STRIDE)))).max()
        )
        for j in range(store.count("train"))
    )


def training_climate(store: TrajectoryStore, normalizer: Normalizer) -> Climate:
    """The climate of the normalised training states, over every CLIMATE_STRIDE-th frame."""
    frames = store.num_frames("train")
    batches = (
        normalizer.normalize(torch.from_numpy(store.read("train", j, 0, frames, CLIMATE_STRIDE)))
        for j in range(store.count("train"))
    )
    return Climate.of(batches, periodic_axes(store.info))


def periodic_axes(info: DatasetInfo) -> tuple[bool, ...]:
    """Which axes of a data set's grid are periodic."""
    return tuple(boundary == "PERIODIC" for boundary in info.boundaries)


def rollout_info(info: DatasetInfo, recipe: Recipe) -> DatasetInfo:
    """How a roll-out describes itself: the data set's fields and grid, one frame per model step."""
    provenance = {"model": recipe.name, "dataset": info.name, "commit": commit()}
    return dataclasses.replace(info, name=recipe.name, frame_seconds=recipe.step_seconds, provenance=provenance)


def write_json(path: Path, data: Any) -> None:
    """Write strict JSON atomically."""
    write_text_atomic(path, json.dumps(data, indent=2, allow_nan=False) + "\n")

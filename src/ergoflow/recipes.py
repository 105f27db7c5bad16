"""The catalogue: every data set and experiment that has a name.

A name is `<data set>-<model>` or `<data set>-coarse-<model>`. Coarse recipes use the same trajectories with one
model step of five frames (0.1 s): the task on which persistence scores what the paper's tables say.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path

from ergoflow.config import (
    ChannelDatasetConfig,
    DatasetConfig,
    EvaluationConfig,
    KolmogorovDatasetConfig,
    Recipe,
    TaskConfig,
    load_recipe,
    override,
)
from ergoflow.models.a3m import A3MConfig
from ergoflow.solvers.channel import ChannelConfig
from ergoflow.solvers.kolmogorov import KolmogorovConfig
from ergoflow.training.trainer import TrainingConfig

COARSE_STRIDE = 5


def datasets() -> dict[str, DatasetConfig]:
    """Data sets by name."""
    kf256 = KolmogorovDatasetConfig(name="kf256", flow=KolmogorovConfig())
    kf64 = KolmogorovDatasetConfig(
        name="kf64",
        flow=KolmogorovConfig(grid=(64, 64), viscosity=1e-2, dt=0.02, max_speed=4.0),
        spin_up_seconds=30.0,
        frame_seconds=0.2,
        frames=150,
        train=20,
        valid=4,
        test=8,
        shard_size=36,
    )
    listed: list[DatasetConfig] = [
        kf256,
        dataclasses.replace(kf256, name="kf128", subsample=2),
        dataclasses.replace(kf256, name="kf256-transient", spin_up_seconds=0.0),
        kf64,
        ChannelDatasetConfig(name="tcf192", flow=ChannelConfig()),
        ChannelDatasetConfig(
            name="tcf96",
            flow=ChannelConfig(box=(512, 96, 96), smagorinsky=0.07),
            plane_spacing=64,
            coarse_spin_up=0.0,
            spin_up=12.0,
        ),
        ChannelDatasetConfig(
            name="tcf32",
            flow=ChannelConfig(box=(64, 32, 32), reynolds_tau=90.0, collision="regularized"),
            coarse_spin_up=0.0,
            spin_up=2.0,
            steps_per_frame=10,
            frames=60,
            plane_spacing=32,
            train=8,
            valid=2,
            test=4,
        ),
    ]
    return {d.name: d for d in listed}


def catalogue() -> dict[str, Recipe]:
    """Recipes by name."""
    known = datasets()
    recipes = [_small("kf64-a3m", known["kf64"])]
    for name, heads in (("kf256", 16), ("kf128", 8), ("kf256-transient", 16)):
        model = A3MConfig(heads=heads)
        recipes.append(Recipe(name=f"{name}-a3m", dataset=known[name], model=model, training=_paper_training()))
    for name, heads in (("kf256", 16), ("kf128", 8)):
        paper = Recipe(
            name=f"{name}-coarse-a3m",
            dataset=known[name],
            task=TaskConfig(stride=COARSE_STRIDE),
            model=A3MConfig(heads=heads),
            training=_paper_training(),
        )
        recipes += [paper, _common(paper)]
    for name in ("tcf192", "tcf96"):
        recipes.append(Recipe(name=f"{name}-a3m", dataset=known[name], model=A3MConfig(), training=_paper_training()))
    recipes.append(_small("tcf32-a3m", known["tcf32"]))
    return {r.name: r for r in recipes}


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`, or stored in the file `name`."""
    known = catalogue()
    if name in known:
        return known[name]
    if name.endswith(".json") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise ValueError(
                f"a recipe file was expected at {name}, but there is none; check the path or run `ergoflow recipes`"
            )
        return load_recipe(path)
    raise ValueError(f"unknown recipe {name!r}; {_hint(name, list(known))}")


def find_dataset(name: str, assignments: Sequence[str]) -> DatasetConfig:
    """The data set called `name` or used by the recipe `name`, with `dataset.…` assignments applied."""
    known = datasets()
    trimmed = name.removesuffix("-coarse")
    if trimmed in known:
        carrier = Recipe(name=name, dataset=known[trimmed], model=A3MConfig())
    elif name.endswith(".json") or name in catalogue():
        carrier = find_recipe(name)
    else:
        raise ValueError(f"unknown data set {name!r}; {_hint(name, list(known))}")
    return override(carrier, assignments).dataset


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else "see `ergoflow recipes`"


def _paper_training() -> TrainingConfig:
    """Adam, 1e-4 halved every 10 of 50 epochs (the paper's appendix; the batch size is not printed)."""
    return TrainingConfig(epochs=50, batch_size=8, optimizer="adam", learning_rate=1e-4, schedule="halving")


def _common(recipe: Recipe) -> Recipe:
    """The same model with what a practitioner would use today: increments, AdamW, warm-up and decay, EMA."""
    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}-common",
        task=dataclasses.replace(recipe.task, predict="increment"),
        training=TrainingConfig(
            epochs=50,
            batch_size=32,
            optimizer="adamw",
            learning_rate=1e-3,
            weight_decay=1e-2,
            schedule="wsd",
            clip_norm=1.0,
            ema_decay=0.999,
            precision="bf16",
        ),
    )


def _small(name: str, dataset: DatasetConfig) -> Recipe:
    """A small a3m that learns kf64 in about two minutes on two cores.

    It predicts states: its decoder begins with a group norm, so its output is bounded whatever goes in, and a model
    trained for minutes survives. (Predicting increments it was better at first and blew up: docs/lab_log.md.)
    """
    return Recipe(
        name=name,
        dataset=dataset,
        model=A3MConfig(
            dim=32, latent=32, depth=2, heads=3, head_dim=8, decoder_widths=(16, 16), decoder_kernels=(9, 5), groups=2
        ),
        training=TrainingConfig(
            epochs=2, batch_size=8, optimizer="adamw", learning_rate=4e-3, schedule="wsd", clip_norm=1.0, ema_decay=0.99
        ),
        evaluation=EvaluationConfig(steps=1000),
    )

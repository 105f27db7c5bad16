"""The experiments of a laptop: every model, small, on the 64² Kolmogorov flow and the 32² channel.

`kf64-a3m` is the demo. The others train for a few seconds each, so that `ergoflow reproduce mini` ends within a quarter
of an hour on two cores: enough to see every model run and be compared, not enough to rank them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ergoflow.config import DatasetConfig, EvaluationConfig, ModelConfig, Recipe, TaskConfig
from ergoflow.models.a3m import A3MConfig
from ergoflow.models.convnext import ConvNeXtConfig
from ergoflow.models.ergoformer import ErgoformerConfig
from ergoflow.models.factformer import FactFormerConfig
from ergoflow.models.mno import MNOConfig
from ergoflow.models.mwt import MWTConfig
from ergoflow.models.performer import PerformerConfig
from ergoflow.models.uno import UNOConfig
from ergoflow.recipes.experiments import fitted, own_objective, trivial_models
from ergoflow.training.trainer import TrainingConfig

SECONDS = 15.0


def small_models() -> dict[str, ModelConfig]:
    """Every learned model in a size that two cores train."""
    return {
        "a3m": A3MConfig(
            dim=32, latent=32, depth=2, heads=3, head_dim=8, decoder_widths=(16, 16), decoder_kernels=(9, 5), groups=2
        ),
        "mno": MNOConfig(width=16, modes=8),
        "uno": UNOConfig(hidden=16, lifting=16, projection=16, widths=(16, 16, 16, 16), modes=8),
        "mwt": MWTConfig(order=3, copies=2, modes=4, depth=2, hidden=32),
        "factformer": FactFormerConfig(dim=32, latent=32, depth=2, heads=3, head_dim=8, norm_groups=2, conv_groups=2),
        "performer": PerformerConfig(
            dim=32,
            latent=32,
            depth=2,
            heads=2,
            head_dim=16,
            features=32,
            mlp_width=64,
            decoder_widths=(16, 16),
            decoder_kernels=(9, 5),
            groups=2,
        ),
        "convnext": ConvNeXtConfig(widths=(16, 32, 48), blocks=(1, 1, 2, 1, 1)),
        "ergoformer": ErgoformerConfig(unet=ConvNeXtConfig(widths=(16, 32, 48), blocks=(1, 1, 2, 1, 1)), frequencies=4),
    }


def small_experiments(known: Mapping[str, DatasetConfig]) -> list[Recipe]:
    """The small models on the small flows.

    They predict states: a model trained for seconds then survives. (Predicting increments, the demo's model was better
    at first and blew up: docs/lab_log.md.)
    """
    demo = Recipe(
        name="kf64-a3m",
        dataset=known["kf64"],
        model=small_models()["a3m"],
        training=TrainingConfig(
            epochs=2,
            batch_size=8,
            optimizer="adamw",
            learning_rate=4e-3,
            schedule="wsd",
            clip_norm=1.0,
            ema_decay=0.99,
            precision="auto",
        ),
        evaluation=EvaluationConfig(steps=1000),
    )
    brief = dataclasses.replace(demo.training, precision="fp32", epochs=100, max_minutes=SECONDS / 60)
    recipes = []
    for flow in ("kf64", "tcf32"):
        for name, model in (small_models() | trivial_models()).items():
            recipe = dataclasses.replace(
                demo,
                name=f"{flow}-{name}",
                dataset=known[flow],
                task=TaskConfig(guard=name == "mno"),
                model=fitted(model, known[flow]),
                objective=own_objective(name),
            )
            keeps_its_length = name == "a3m"
            recipes.append(recipe if keeps_its_length else dataclasses.replace(recipe, training=brief))
    return recipes

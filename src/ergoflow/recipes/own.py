"""A first recipe for data of one's own: `ergoformer`, small, under a training that any flow bears."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ergoflow.config import EvaluationConfig, FilesDatasetConfig, Recipe, TaskConfig
from ergoflow.models.convnext import STRIDE, ConvNeXtConfig
from ergoflow.models.ergoformer import ErgoformerConfig
from ergoflow.models.velocity import is_evenly_spaced
from ergoflow.recipes.experiments import common_training
from ergoflow.training.objectives import ObjectiveConfig

WIDTHS = (32, 64, 128)
NOISE, UNROLL = 0.03, 4


def own_recipe(
    dataset: FilesDatasetConfig,
    *,
    fields: Sequence[str],
    length: Sequence[float],
    periodic: Sequence[bool],
    frames: int,
) -> Recipe:
    """The recipe `<data set>-ergoformer`; `frames` is how many a test trajectory has.

    A vorticity on a periodic plane of equal spacing is carried by its own flow. Symmetries are not assumed. Noise on
    the states it learns from costs accuracy in short forecasts, and keeps long ones from gathering noise of their own.
    """
    on_a_torus = tuple(periodic) == (True, True) and is_evenly_spaced(dataset.grid, length)
    carried = tuple(fields) == ("vorticity",) and on_a_torus
    leads = tuple(lead for lead in EvaluationConfig().lead_steps if lead < frames) or (1,)
    unroll = UNROLL if frames > UNROLL else 1
    return Recipe(
        name=f"{dataset.name}-ergoformer",
        dataset=dataset,
        task=TaskConfig(predict="increment"),
        model=ErgoformerConfig(unet=_unet(dataset.grid), flow="carried" if carried else None),
        objective=ObjectiveConfig(
            unitary_weight=0.0, noise=NOISE, unroll=unroll, unroll_from=0.85 if unroll > 1 else 0.0
        ),
        training=dataclasses.replace(
            common_training(),
            epochs=20,
            batch_size=8,
            warmup_steps=50,
            ema_decay=0.995,
            precision="auto",
            augment=False,
        ),
        evaluation=EvaluationConfig(lead_steps=leads, max_lag=max(1, min(EvaluationConfig().max_lag, frames // 2))),
    )


def _unet(grid: Sequence[int]) -> ConvNeXtConfig:
    """The U-Net that goes down furthest on a grid, up to three levels of patches of 2 points.

    Each level must have whole points, and the coarsest as many as its convolutions reach; a grid that is too small for
    any is left to the smallest, which says so.
    """
    reach = ConvNeXtConfig().kernel // 2

    def fits(patch: int, levels: int) -> bool:
        stride = patch * STRIDE ** (levels - 1)
        return all(points % stride == 0 and points // stride >= reach for points in grid)

    sizes = ((2, 3), (2, 2), (1, 3), (2, 1), (1, 2), (1, 1))
    patch, levels = next((size for size in sizes if fits(*size)), sizes[-1])
    blocks = (*(1,) * (levels - 1), 2, *(1,) * (levels - 1))
    return ConvNeXtConfig(widths=WIDTHS[:levels], blocks=blocks, patch=patch)

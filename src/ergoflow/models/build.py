"""From a model's config to the model: the one place that knows all of them."""

from __future__ import annotations

import torch
from torch import nn

from ergoflow.models.a3m import A3M, A3MConfig
from ergoflow.models.advection import STILL, Pace
from ergoflow.models.convnext import ConvNeXt, ConvNeXtConfig
from ergoflow.models.ergoformer import Ergoformer, ErgoformerConfig
from ergoflow.models.factformer import FactFormer, FactFormerConfig
from ergoflow.models.mno import MNO, MNOConfig
from ergoflow.models.mwt import MWT, MWTConfig
from ergoflow.models.own import OwnConfig
from ergoflow.models.performer import Performer, PerformerConfig
from ergoflow.models.trivial import (
    Climatology,
    ClimatologyConfig,
    Persistence,
    PersistenceConfig,
    Zero,
    ZeroConfig,
)
from ergoflow.models.uno import UNO, UNOConfig

ModelConfig = (
    A3MConfig
    | MNOConfig
    | UNOConfig
    | MWTConfig
    | FactFormerConfig
    | PerformerConfig
    | ConvNeXtConfig
    | ErgoformerConfig
    | OwnConfig
    | PersistenceConfig
    | ClimatologyConfig
    | ZeroConfig
)

# torch has convolutions over one, two and three axes.
MAX_AXES = 3


def build_model(
    config: ModelConfig,
    in_channels: int,
    out_channels: int,
    grid: tuple[int, ...],
    *,
    periodic: tuple[bool, ...] | None = None,
    pace: Pace = STILL,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return a freshly drawn model, (B, in_channels, *grid) → (B, out_channels, *grid), normalised units.

    `periodic` says axis by axis whether the grid wraps around; None means that all axes do. `pace` says how far a
    step of the data goes, for models that know how a flow moves. All weights come from
    `generator` (a CPU generator; None means torch's global one), so that equal seeds give equal models.
    """
    if not 1 <= len(grid) <= MAX_AXES:
        raise ValueError(f"grid must have one to {MAX_AXES} axes, got {grid}; drop or add axes")
    if periodic is None:
        periodic = (True,) * len(grid)
    if len(periodic) != len(grid):
        raise ValueError(f"periodic must have one entry per axis of {grid}, got {periodic}; give {len(grid)} entries")
    if min(in_channels, out_channels) < 1:
        raise ValueError(
            f"at least one channel in and out was expected, got {in_channels} and {out_channels}; "
            "choose positive numbers"
        )
    match config:
        case A3MConfig():
            return A3M(config, in_channels, out_channels, periodic=periodic, generator=generator)
        case MNOConfig():
            return MNO(config, in_channels, out_channels, grid, periodic=periodic, generator=generator)
        case UNOConfig():
            return UNO(config, in_channels, out_channels, grid, periodic=periodic, generator=generator)
        case MWTConfig():
            return MWT(config, in_channels, out_channels, grid, periodic=periodic, generator=generator)
        case FactFormerConfig():
            return FactFormer(config, in_channels, out_channels, grid, periodic=periodic, generator=generator)
        case PerformerConfig():
            return Performer(config, in_channels, out_channels, grid, periodic=periodic, generator=generator)
        case ConvNeXtConfig():
            return ConvNeXt(config, in_channels, out_channels, grid, periodic=periodic, generator=generator)
        case ErgoformerConfig():
            return Ergoformer(
                config, in_channels, out_channels, grid, periodic=periodic, pace=pace, generator=generator
            )
        case OwnConfig():
            raise ValueError(
                "a model of your own was expected as a step in Python, got a recipe, from which it cannot be built; "
                "hand it to ergoflow.judge"
            )
        case PersistenceConfig():
            if in_channels != out_channels:
                raise ValueError(
                    f"persistence needs as many channels out as in, got {in_channels} and {out_channels}; "
                    "predict the input channels"
                )
            return Persistence()
        case ClimatologyConfig():
            return Climatology(out_channels, grid)
        case ZeroConfig():
            return Zero(out_channels)
    raise ValueError(f"config must be one of the models' config dataclasses, got {config!r}; see ergoflow.models")

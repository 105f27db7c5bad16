"""The models: maps from one normalised state (B, C, *grid) to the next."""

from __future__ import annotations

from ergoflow.models.a3m import A3M, A3MConfig
from ergoflow.models.build import ModelConfig, build_model
from ergoflow.models.operator import LatentOperator
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig, ZeroConfig

__all__ = [
    "A3M",
    "A3MConfig",
    "ClimatologyConfig",
    "LatentOperator",
    "ModelConfig",
    "PersistenceConfig",
    "ZeroConfig",
    "build_model",
]

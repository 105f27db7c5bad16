"""The models: maps from one normalised state (B, C, *grid) to the next."""

from __future__ import annotations

from ergoflow.models.a3m import A3M, A3MConfig
from ergoflow.models.build import ModelConfig, build_model
from ergoflow.models.convnext import ConvNeXt, ConvNeXtConfig
from ergoflow.models.ergoformer import Ergoformer, ErgoformerConfig
from ergoflow.models.factformer import FactFormer, FactFormerConfig
from ergoflow.models.mno import MNO, MNOConfig
from ergoflow.models.mwt import MWT, MWTConfig
from ergoflow.models.operator import LatentOperator
from ergoflow.models.performer import Performer, PerformerConfig
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig, ZeroConfig
from ergoflow.models.uno import UNO, UNOConfig

__all__ = [
    "A3M",
    "MNO",
    "MWT",
    "UNO",
    "A3MConfig",
    "ClimatologyConfig",
    "ConvNeXt",
    "ConvNeXtConfig",
    "Ergoformer",
    "ErgoformerConfig",
    "FactFormer",
    "FactFormerConfig",
    "LatentOperator",
    "MNOConfig",
    "MWTConfig",
    "ModelConfig",
    "Performer",
    "PerformerConfig",
    "PersistenceConfig",
    "UNOConfig",
    "ZeroConfig",
    "build_model",
]

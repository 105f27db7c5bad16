"""Experiments as frozen dataclasses, and their JSON twins."""

from __future__ import annotations

from ergoflow.config.codec import first_difference, from_dict, load_recipe, override, to_dict
from ergoflow.config.datasets import (
    SPLITS,
    ChannelDatasetConfig,
    DatasetConfig,
    FilesDatasetConfig,
    KolmogorovDatasetConfig,
    SimulatedDatasetConfig,
)
from ergoflow.config.recipe import EvaluationConfig, ModelConfig, Recipe, TaskConfig

__all__ = [
    "SPLITS",
    "ChannelDatasetConfig",
    "DatasetConfig",
    "EvaluationConfig",
    "FilesDatasetConfig",
    "KolmogorovDatasetConfig",
    "ModelConfig",
    "Recipe",
    "SimulatedDatasetConfig",
    "TaskConfig",
    "first_difference",
    "from_dict",
    "load_recipe",
    "override",
    "to_dict",
]

"""A Recipe is one experiment, complete, as plain frozen dataclasses.

Recipe = dataset (which flow, how it is sampled) + task (what one model step means)
       + model + objective + training + evaluation
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ergoflow.config.datasets import (
    ChannelDatasetConfig,
    DatasetConfig,
    FilesDatasetConfig,
    KolmogorovDatasetConfig,
    require,
    require_folder_name,
)
from ergoflow.models.a3m import A3MConfig
from ergoflow.models.build import ModelConfig
from ergoflow.models.convnext import ConvNeXtConfig
from ergoflow.models.ergoformer import ErgoformerConfig
from ergoflow.models.factformer import FactFormerConfig
from ergoflow.models.mno import MNOConfig
from ergoflow.models.mwt import MWTConfig
from ergoflow.models.own import OwnConfig
from ergoflow.models.performer import PerformerConfig
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig, ZeroConfig
from ergoflow.models.uno import UNOConfig
from ergoflow.training.objectives import ObjectiveConfig
from ergoflow.training.trainer import TrainingConfig

# Where a field may hold one of several configurations, its JSON object carries one of these words as `kind`.
KINDS: dict[str, type] = {
    "kolmogorov": KolmogorovDatasetConfig,
    "channel": ChannelDatasetConfig,
    "files": FilesDatasetConfig,
    "a3m": A3MConfig,
    "mno": MNOConfig,
    "uno": UNOConfig,
    "mwt": MWTConfig,
    "factformer": FactFormerConfig,
    "performer": PerformerConfig,
    "convnext": ConvNeXtConfig,
    "ergoformer": ErgoformerConfig,
    "own": OwnConfig,
    "persistence": PersistenceConfig,
    "climatology": ClimatologyConfig,
    "zero": ZeroConfig,
}


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What one model step means: it advances `stride` stored frames and predicts the state or its increment.

    `relaxation` r shrinks the normalised state before an increment is added, z' = (1 − r) z + s·model(z); with r > 0
    roll-outs of a bounded model stay bounded (`training.stepper.NormalizedStep`).
    `kept_means` names fields, by their place, whose mean over the grid no step changes.
    With `guard` the trained step is made dissipative far from the data (`training.dissipation.DissipativeStep`, with
    the shell and scale of the objective), as MNO's authors do. With `hold` the waves of every length, and the mean, are
    drawn back to those of the training split by this share in each step of a roll-out (`training.climate.HeldStep`).
    """

    stride: int = 1
    predict: Literal["state", "increment"] = "state"
    relaxation: float = 0.0
    kept_means: tuple[int, ...] = ()
    guard: bool = False
    hold: float = 0.0

    def __post_init__(self) -> None:
        """Check the stride, the relaxation and what a roll-out is held by."""
        require(self.stride >= 1, f"task.stride must be at least 1 frame, got {self.stride}; raise it")
        require(
            self.relaxation == 0 or (0 < self.relaxation < 1 and self.predict == "increment"),
            f"task.relaxation must be in [0, 1), and 0 for a model of states, got {self.relaxation} for "
            f"{self.predict}s; set task.predict=increment or task.relaxation=0",
        )
        require(0 <= self.hold < 1, f"task.hold must be in [0, 1), got {self.hold}; 0.1 is a good first choice")
        require(
            not (self.hold and self.guard),
            f"a roll-out is either held or guarded, got task.hold={self.hold} beside task.guard; set one of them",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How a trained model is rolled out and judged (METRICS in docs/reference.md).

    Long-term statistics use the last steps of the roll-out, as many per trajectory as the truth has frames, and
    never the first `discard`. Frames are kept for the first `keep_first` steps and every `keep_every`-th after. With
    `precision` bf16 the model's products are in bfloat16, as in training, with tf32 in what a GPU has between that and
    float32; states stay in float32. The leading `exponents` Lyapunov exponents of model and solver are measured over
    `exponent_steps` steps; 0 is none.
    """

    steps: int = 1000
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    discard: int = 100
    keep_first: int = 100
    keep_every: int = 50
    max_lag: int = 20
    resamples: int = 100
    lead_steps: tuple[int, ...] = (1, 5, 25)
    exponents: int = 0
    exponent_steps: int = 400

    def __post_init__(self) -> None:
        """Check that the windows fit into the roll-out."""
        require(
            self.steps > self.discard + self.max_lag,
            f"evaluation.steps must exceed discard + max_lag = {self.discard + self.max_lag}, got {self.steps}; "
            "raise it, or lower evaluation.discard",
        )
        require(self.discard >= 0, f"evaluation.discard must be >= 0, got {self.discard}")
        require(
            self.keep_every >= 1,
            f"evaluation.keep_every must be >= 1, got {self.keep_every}; use 1 to keep all",
        )
        require(self.max_lag >= 1, f"evaluation.max_lag must be at least 1, got {self.max_lag}; raise it")
        require(
            len(self.lead_steps) > 0 and min(self.lead_steps) >= 1,
            f"evaluation.lead_steps must be whole numbers from 1 on, got {list(self.lead_steps)}; drop the others",
        )
        require(
            self.keep_first >= max(self.lead_steps),
            f"evaluation.keep_first must reach the largest lead step {max(self.lead_steps)}, got {self.keep_first}",
        )
        require(self.exponents >= 0, f"evaluation.exponents must be >= 0, got {self.exponents}; 0 leaves them out")
        require(self.exponent_steps >= 20, f"evaluation.exponent_steps must be at least 20, got {self.exponent_steps}")
        require(self.resamples >= 20, f"evaluation.resamples must be at least 20, got {self.resamples}; raise it")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One named experiment, complete."""

    name: str
    dataset: DatasetConfig
    model: ModelConfig
    task: TaskConfig = field(default_factory=TaskConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        """Check the name."""
        require_folder_name(self.name, "name")

    @property
    def step_seconds(self) -> float:
        """Time advanced by one model step."""
        return self.task.stride * self.dataset.frame_seconds

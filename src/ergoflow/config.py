"""A Recipe is one experiment as plain frozen dataclasses, and its exact twin in JSON.

    Recipe = dataset (which flow, how it is sampled) + task (what one model step means)
           + model + objective + training + evaluation

`recipe.json` is saved with every run, and a run can be rebuilt from that file alone. Where a field may hold one
of several configurations (the data set, the model) its JSON object carries a `kind`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ergoflow.models.a3m import A3MConfig
from ergoflow.models.trivial import ClimatologyConfig, PersistenceConfig, ZeroConfig
from ergoflow.solvers.channel import ChannelConfig
from ergoflow.solvers.kolmogorov import KolmogorovConfig
from ergoflow.training.objectives import ObjectiveConfig
from ergoflow.training.trainer import TrainingConfig

ModelConfig = A3MConfig | PersistenceConfig | ClimatologyConfig | ZeroConfig
KINDS: dict[str, type] = {
    "a3m": A3MConfig,
    "persistence": PersistenceConfig,
    "climatology": ClimatologyConfig,
    "zero": ZeroConfig,
}
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class KolmogorovDatasetConfig:
    """Trajectories of one flow: `spin_up` seconds are discarded, then `frames` states are kept, `frame_seconds` apart.

    Every `subsample`-th grid point is stored. Trajectory i of a split starts from a seed of its own.
    """

    name: str
    flow: KolmogorovConfig
    spin_up_seconds: float = 40.0
    frame_seconds: float = 0.02
    frames: int = 500
    train: int = 150
    valid: int = 40
    test: int = 30
    subsample: int = 1
    storage: Literal["float32", "float16"] = "float32"
    shard_size: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that the numbers describe a data set that can be made."""
        require(self.frames >= 2, f"dataset.frames must be at least 2, got {self.frames}; raise it")
        for split in SPLITS:
            count = getattr(self, split)
            require(count >= 1, f"dataset.{split} must be at least 1 trajectory, got {count}; raise it")
        require(self.shard_size >= 1, f"dataset.shard_size must be at least 1, got {self.shard_size}; raise it")
        require(self.spin_up_seconds >= 0, f"dataset.spin_up_seconds must be >= 0, got {self.spin_up_seconds}")
        require(
            self.subsample >= 1 and all(n % self.subsample == 0 for n in self.flow.grid),
            f"dataset.subsample must divide the grid {self.flow.grid}, got {self.subsample}; choose a divisor",
        )
        _whole(self.frame_seconds, self.flow.dt, "dataset.frame_seconds", "solver steps of flow.dt")
        _whole(
            self.spin_up_seconds,
            self.frame_seconds,
            "dataset.spin_up_seconds",
            "frames of dataset.frame_seconds",
        )

    @property
    def substeps(self) -> int:
        """Solver steps between two frames."""
        return round(self.frame_seconds / self.flow.dt)

    @property
    def spin_up_frames(self) -> int:
        """Frames that are discarded before the first stored one."""
        return round(self.spin_up_seconds / self.frame_seconds)

    @property
    def grid(self) -> tuple[int, ...]:
        """The stored grid."""
        return tuple(n // self.subsample for n in self.flow.grid)

    def count(self, split: str) -> int:
        """Trajectories of a split."""
        return int(getattr(self, split))


@dataclass(frozen=True, kw_only=True)
class ChannelDatasetConfig:
    """Velocity on planes normal to the stream of a turbulent channel, in units in which δ = 1 and u_τ = 1.

    A second is therefore δ/u_τ. Each split is a simulation of its own: `coarse_spin_up` δ/u_τ on half the cells (none
    for 0), refined, `spin_up` δ/u_τ, then segments of `frames` frames, `steps_per_frame` lattice steps apart. Planes
    `plane_spacing` cells apart give one trajectory each per segment.
    """

    name: str
    flow: ChannelConfig
    coarse_spin_up: float = 10.0
    spin_up: float = 3.0
    steps_per_frame: int = 25
    frames: int = 595
    plane_spacing: int = 128
    train: int = 240
    valid: int = 24
    test: int = 24
    storage: Literal["float32", "float16"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that planes, splits and the coarse grid exist."""
        require(self.frames >= 2, f"dataset.frames must be at least 2, got {self.frames}; raise it")
        require(self.steps_per_frame >= 1, f"dataset.steps_per_frame must be at least 1, got {self.steps_per_frame}")
        require(
            1 <= self.plane_spacing <= self.flow.box[0],
            f"dataset.plane_spacing must lie in 1..{self.flow.box[0]}, got {self.plane_spacing}; change it",
        )
        for split in SPLITS:
            count = getattr(self, split)
            require(count >= 1, f"dataset.{split} must be at least 1 trajectory, got {count}; raise it")
        require(
            self.coarse_spin_up == 0 or all(n % 4 == 0 for n in self.flow.box),
            f"a spin-up on half the cells needs sides that are multiples of 4, got {self.flow.box}; "
            "change the box or set dataset.coarse_spin_up=0",
        )

        require(
            self.coarse_spin_up == 0 or self.flow.init != "block",
            f"a block start needs dataset.coarse_spin_up=0, got {self.coarse_spin_up}; it is made on the full grid",
        )

    @property
    def grid(self) -> tuple[int, ...]:
        """The stored grid: wall-normal, spanwise."""
        return self.flow.box[1:]

    @property
    def frame_seconds(self) -> float:
        """Time between two frames, in δ/u_τ."""
        return self.steps_per_frame / self.flow.units.turnover_steps

    @property
    def planes(self) -> tuple[int, ...]:
        """Columns x of the sampled planes."""
        return tuple(range(0, self.flow.box[0] - self.plane_spacing + 1, self.plane_spacing))

    def count(self, split: str) -> int:
        """Trajectories of a split."""
        return int(getattr(self, split))


DatasetConfig = KolmogorovDatasetConfig | ChannelDatasetConfig
KINDS |= {"kolmogorov": KolmogorovDatasetConfig, "channel": ChannelDatasetConfig}


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What one model step means: it advances `stride` stored frames and predicts the state or its increment."""

    stride: int = 1
    predict: Literal["state", "increment"] = "state"

    def __post_init__(self) -> None:
        """Check the stride."""
        require(self.stride >= 1, f"task.stride must be at least 1 frame, got {self.stride}; raise it")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How a trained model is rolled out and judged (METRICS in docs/reference.md).

    Long-term statistics use the last steps of the roll-out, as many per trajectory as the truth has frames, and
    never the first `discard`. Frames are kept for the first `keep_first` steps and every `keep_every`-th after. The
    leading `exponents` Lyapunov exponents of model and solver are measured over `exponent_steps` steps; 0 is none.
    """

    steps: int = 1000
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
            f"evaluation.steps must exceed discard + max_lag = {self.discard + self.max_lag}, got {self.steps}",
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

    @property
    def step_seconds(self) -> float:
        """Time advanced by one model step."""
        return self.task.stride * self.dataset.frame_seconds


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def to_dict(config: Any) -> Any:
    """The JSON-ready twin of a configuration; objects that come in kinds carry their `kind`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        kinds = [name for name, cls in KINDS.items() if type(config) is cls]
        fields = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"kind": kinds[0], **fields} if kinds else fields
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    return config


def from_dict(cls: Any, data: Any, path: str = "") -> Any:
    """The configuration of type `cls` that `data` describes; errors name the dotted path of the offending key."""
    if dataclasses.is_dataclass(cls):
        return _dataclass_from_dict(cls, data, path)
    origin, choices = typing.get_origin(cls), typing.get_args(cls)
    if origin is Literal:
        require(data in choices, f"{path} must be one of {', '.join(map(str, choices))}, got {data!r}")
        return data
    if origin in (typing.Union, types.UnionType):
        return _union_from_dict(choices, data, path)
    if origin is tuple:
        require(isinstance(data, list | tuple), f"{path} must be a list such as [64, 64], got {data!r}")
        inner = [choices[0]] * len(data) if choices[-1] is Ellipsis else list(choices)
        require(len(data) == len(inner), f"{path} must have {len(inner)} entries, got {len(data)}: {data!r}")
        return tuple(
            from_dict(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(inner, data, strict=True))
        )
    if cls is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    require(
        isinstance(data, cls) and (cls is bool or not isinstance(data, bool)),
        f"{path} must be of type {cls.__name__}, got {data!r}",
    )
    return data


def load_recipe(path: Path) -> Recipe:
    """The recipe stored in a JSON file."""
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} must be a recipe in JSON, got a syntax error at line {error.lineno}; mend or replace it"
        ) from None
    recipe: Recipe = from_dict(Recipe, data)
    return recipe


def override(recipe: Recipe, assignments: typing.Sequence[str]) -> Recipe:
    """The recipe with dotted `key=value` assignments applied, e.g. `training.epochs=5`; values are typed."""
    data = to_dict(recipe)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        require(bool(equals and key), f"--set must look like training.epochs=5, got {assignment!r}")
        *parents, leaf = key.strip().split(".")
        target = data
        for depth, name in enumerate(parents):
            _require_key(name, target, ".".join(parents[: depth + 1]))
            target = target[name]
            require(
                isinstance(target, dict),
                f"{key} goes too deep: {'.'.join(parents[: depth + 1])} is a single value",
            )
        _require_key(leaf, target, key)
        require(leaf != "kind", "the kind of a model or flow cannot be set alone; choose a recipe that has it")
        if isinstance(target[leaf], dict):
            raise ValueError(f"{key} is a group of settings, got one value; set one of {', '.join(target[leaf])}")
        target[leaf] = _parse(text)
    changed: Recipe = from_dict(Recipe, data)
    return changed


def _whole(seconds: float, unit: float, name: str, what: str) -> None:
    count = seconds / unit
    require(
        math.isclose(count, round(count), rel_tol=1e-9, abs_tol=1e-6),
        f"{name}={seconds} must be a whole number of {what}={unit}, got {count:.4f}; change one of them",
    )


def _parse(text: str) -> Any:
    """A JSON value where the text is one, else the text itself."""
    if text.strip().lower() == "none":
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _require_key(name: str, known: typing.Iterable[str], path: str) -> None:
    names = [k for k in known if k != "kind"]
    if name not in names and name != "kind":
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names)}"
        raise ValueError(f"unknown key {path!r}; {hint}")


def _dataclass_from_dict(cls: Any, data: Any, path: str) -> Any:
    require(isinstance(data, dict), f"{path or 'the recipe'} must be an object with named settings, got {data!r}")
    hints = typing.get_type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in data:
        _require_key(key, hints, f"{prefix}{key}")
    needed = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        require(name in data, f"{prefix}{name} is missing; {cls.__name__} needs {', '.join(needed)}")
    return cls(**{key: from_dict(hints[key], value, f"{prefix}{key}") for key, value in data.items() if key != "kind"})


def _union_from_dict(choices: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None:
        require(type(None) in choices, f"{path} must not be null")
        return None
    choices = tuple(c for c in choices if c is not type(None))
    if all(dataclasses.is_dataclass(c) for c in choices) and len(choices) > 1:
        kinds = {name: cls for name, cls in KINDS.items() if cls in choices}
        kind = data.get("kind") if isinstance(data, dict) else None
        require(kind in kinds, f"{path}.kind must be one of {', '.join(kinds)}, got {kind!r}")
        return _dataclass_from_dict(kinds[str(kind)], data, path)
    require(len(choices) == 1, f"{path} has a type this reader does not know: {choices}")
    return from_dict(choices[0], data, path)

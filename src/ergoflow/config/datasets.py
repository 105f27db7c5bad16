"""Which flow a data set holds, and how it is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ergoflow.solvers.channel import ChannelConfig
from ergoflow.solvers.kolmogorov import KolmogorovConfig

SPLITS = ("train", "valid", "test")


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_folder_name(name: str, what: str) -> None:
    """Refuse a name that would put its folder elsewhere, or hide it."""
    require(
        bool(name.strip()) and "/" not in name and not name.startswith("."),
        f"{what} names a folder, so it must be a word without '/' or a leading '.', got {name!r}; rename it",
    )


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
        require_folder_name(self.name, "dataset.name")
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
        require(self.frame_seconds > 0, f"dataset.frame_seconds must be above 0, got {self.frame_seconds}; raise it")
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
        require_folder_name(self.name, "dataset.name")
        require(self.frames >= 2, f"dataset.frames must be at least 2, got {self.frames}; raise it")
        for name in ("coarse_spin_up", "spin_up"):
            turnovers = getattr(self, name)
            require(
                0 <= turnovers < math.inf,
                f"dataset.{name} must be a number of δ/u_τ from 0 on, got {turnovers}; 0 leaves it out",
            )
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


@dataclass(frozen=True, kw_only=True)
class FilesDatasetConfig:
    """Trajectories that were brought, not simulated: files with this grid and frames `frame_seconds` apart."""

    name: str
    grid: tuple[int, ...]
    frame_seconds: float

    def __post_init__(self) -> None:
        """Check what the files will be compared with."""
        require_folder_name(self.name, "dataset.name")
        require(
            len(self.grid) > 0 and min(self.grid) >= 1,
            f"dataset.grid must be points along each axis, got {list(self.grid)}; give those of the files",
        )
        require(
            0 < self.frame_seconds < math.inf,
            f"dataset.frame_seconds must be above 0, got {self.frame_seconds}; give that of the files",
        )


SimulatedDatasetConfig = KolmogorovDatasetConfig | ChannelDatasetConfig
DatasetConfig = SimulatedDatasetConfig | FilesDatasetConfig


def _whole(seconds: float, unit: float, name: str, what: str) -> None:
    count = seconds / unit
    require(
        math.isfinite(count) and math.isclose(count, round(count), rel_tol=1e-9, abs_tol=1e-6),
        f"{name}={seconds} must be a whole number of {what}={unit}, got {count:.4f}; change one of them",
    )

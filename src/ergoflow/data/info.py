"""What a data set is: its fields, grid, domain, boundaries, time step, parameters and origin."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BOUNDARIES = ("PERIODIC", "WALL", "OPEN")
# Root attributes of the layout itself and of ours; a parameter is a root attribute too and must not hide one.
RESERVED = (
    *("dataset_name", "grid_type", "n_spatial_dims", "n_trajectories", "simulation_parameters"),
    *("provenance", "sha256", "frame_seconds", "domain_length"),
)
# HDF5 keeps an attribute in the object header, which holds 64 KiB.
MAX_ATTRIBUTE_BYTES = 60_000


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What a data set is: one channel per entry of `fields` on a grid of `axes` (first axis x).

    `length` is the domain size per axis. Coordinates are i·L/N on a PERIODIC axis and cell centres (i+½)·L/N
    otherwise. `provenance` (solver version, config, seeds) travels as JSON in every file.
    """

    name: str
    fields: tuple[str, ...]
    grid: tuple[int, ...]
    length: tuple[float, ...]
    boundaries: tuple[str, ...]
    axes: tuple[str, ...]
    frame_seconds: float
    parameters: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the description agrees with itself."""
        sizes = {key: len(getattr(self, key)) for key in ("grid", "length", "boundaries", "axes")}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"grid, length, boundaries and axes must have one entry per axis, got {sizes}; align them")
        if not self.fields or len(set(self.fields)) != len(self.fields):
            raise ValueError(f"fields must be distinct names, at least one, got {self.fields}; rename them")
        if len(set(self.axes)) != len(self.axes) or "time" in self.axes:
            raise ValueError(f"axes must be distinct names other than 'time', got {self.axes}; rename them")
        for name in (*self.fields, *self.axes, *self.parameters):
            if not name or "/" in name or name in RESERVED:
                raise ValueError(
                    f"names must be non-empty, without '/', and none of {RESERVED}, got {name!r}; rename it"
                )
        for boundary in self.boundaries:
            if boundary not in BOUNDARIES:
                raise ValueError(f"a boundary must be one of {BOUNDARIES}, got {boundary!r}; choose one of them")
        if not all(0 < size < math.inf for size in (*self.grid, *self.length, self.frame_seconds)):
            raise ValueError(
                f"grid, length and frame_seconds must be positive and finite, got {self.grid}, {self.length}, "
                f"{self.frame_seconds}; correct them"
            )
        if len(json.dumps(dict(self.provenance)).encode()) > MAX_ATTRIBUTE_BYTES:
            raise ValueError(f"provenance must fit in {MAX_ATTRIBUTE_BYTES} bytes of JSON, got more; shorten it")

"""The Well's HDF5 layout: what one file of trajectories says about itself.

`write_layout` lays an empty file out and `read_layout` checks a file, ours or a foreign one of The Well, and
returns what it holds. Fields are tensors of order 0, 1 or 2 in the groups `t0_fields`, `t1_fields` and
`t2_fields`; we write order 0 only, one field per channel. The format: https://polymathic-ai.org/the_well/.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ergoflow.data.info import DatasetInfo

GROUPS = ("dimensions", "boundary_conditions", "scalars", "t0_fields", "t1_fields", "t2_fields")


@dataclass(frozen=True, kw_only=True)
class StoredField:
    """One HDF5 dataset of fields: `components` channels in the trailing axes of the array."""

    dataset: str
    order: int
    components: int
    sample_varying: bool


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """What one file holds: `count` trajectories of `frames` frames, channels in the order of `stored`."""

    path: Path
    info: DatasetInfo
    count: int
    frames: int
    stored: tuple[StoredField, ...]
    dtype: np.dtype[Any]


def write_layout(file: h5py.File, info: DatasetInfo, *, count: int, steps: np.ndarray, dtype: str) -> tuple[int, ...]:
    """Lay out all of The Well's groups in an empty file; return the byte offset of each field's array.

    The arrays are contiguous and allocated at once, so element (j, t) of a field lies at a known place:
    offset + (j·T + t)·frame_bytes. Their contents are not written here.
    """
    file.attrs["dataset_name"] = info.name
    file.attrs["grid_type"] = "cartesian"
    file.attrs["n_spatial_dims"] = len(info.grid)
    file.attrs["n_trajectories"] = count
    file.attrs["simulation_parameters"] = string_list(info.parameters)
    file.attrs["provenance"] = json.dumps(dict(info.provenance))
    file.attrs["frame_seconds"] = float(info.frame_seconds)
    file.attrs["domain_length"] = np.array(info.length, dtype=np.float64)
    _write_dimensions(file.create_group("dimensions"), info, steps)
    _write_boundaries(file.create_group("boundary_conditions"), info)
    file.create_group("scalars").attrs["field_names"] = string_list(())
    for name, value in info.parameters.items():
        file.attrs[name] = float(value)
        write_scalar(file, name, np.float64(value), sample_varying=False, time_varying=False)
    for order in range(3):
        file.create_group(f"t{order}_fields").attrs["field_names"] = string_list(info.fields if order == 0 else ())
    shape = (count, len(steps), *info.grid)
    return tuple(_allocate_field(file["t0_fields"], name, shape, dtype) for name in info.fields)


def write_scalar(file: h5py.File, name: str, values: Any, *, sample_varying: bool, time_varying: bool) -> None:
    """Add one entry to `/scalars`: a number, (J,) per trajectory, (T,) per frame or (J, T)."""
    scalars = file["scalars"]
    dataset = scalars.create_dataset(name, data=values)
    dataset.attrs["sample_varying"] = sample_varying
    dataset.attrs["time_varying"] = time_varying
    scalars.attrs["field_names"] = string_list([*scalars.attrs["field_names"], name])


def string_list(names: Sequence[str] | Mapping[str, Any]) -> np.ndarray:
    """Return names as an array HDF5 stores as strings, also when there are none."""
    return np.array(list(names), dtype=h5py.string_dtype())


def broken(path: Path, expected: str, found: str) -> ValueError:
    """Return the error that names a bad file, what it should hold and what it holds."""
    return ValueError(f"{path}: expected {expected}, found {found}; delete the file and generate or download it again")


def open_shard(path: Path) -> h5py.File:
    """Open a file for reading; a truncated or foreign one raises ValueError with its name."""
    try:
        return h5py.File(path, "r")
    except FileNotFoundError:
        raise broken(path, "an HDF5 file", "no file") from None
    except OSError as error:
        raise broken(path, "a whole HDF5 file", " ".join(str(error).split())) from None


def read_layout(path: Path) -> ShardLayout:
    """Return what a file holds, after checking every shape it states against every other."""
    with open_shard(path) as file:
        try:
            return _parse(path, file)
        except (KeyError, AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:
            if str(error).startswith(f"{path}: "):
                raise
            raise broken(path, "The Well's layout", " ".join(str(error).split())) from None


def read_steps(file: h5py.File, layout: ShardLayout) -> np.ndarray:
    """Return the frames' numbers (T,) in units of `frame_seconds`, from their times."""
    times = np.atleast_2d(file["dimensions/time"][()])[0].astype(np.float64)
    return np.rint(times / layout.info.frame_seconds).astype(np.int64)


def _parse(path: Path, file: h5py.File) -> ShardLayout:
    missing = [name for name in GROUPS if name not in file]
    if missing:
        raise broken(path, f"the groups {', '.join(GROUPS)}", f"no {', '.join(missing)}")
    dimensions = file["dimensions"]
    axes = tuple(str(name) for name in dimensions.attrs["spatial_dims"])
    grid = tuple(int(dimensions[name].shape[-1]) for name in axes)
    count, frames = int(file.attrs["n_trajectories"]), int(dimensions["time"].shape[-1])
    stored: list[StoredField] = []
    channels: list[str] = []
    dtypes = []
    for order in range(3):
        group = file[f"t{order}_fields"]
        suffixes = ["".join(("_", *parts)) if order else "" for parts in itertools.product(axes, repeat=order)]
        for name in group.attrs["field_names"]:
            dataset = group[name]
            if not dataset.attrs["time_varying"]:
                continue
            if not np.all(dataset.attrs["dim_varying"]):
                raise broken(path, f"field {name} varying along every axis", "one constant along an axis")
            varying = bool(dataset.attrs["sample_varying"])
            shape = (*((count,) if varying else ()), frames, *grid, *(len(axes),) * order)
            if dataset.shape != shape:
                raise broken(path, f"field {name} of shape {shape}", f"{dataset.shape}")
            channels += [f"{name}{suffix}" for suffix in suffixes]
            dtypes.append(dataset.dtype)
            stored.append(
                StoredField(dataset=dataset.name, order=order, components=len(suffixes), sample_varying=varying)
            )
    if not stored:
        raise broken(path, "at least one field that varies in time", "none")
    return ShardLayout(
        path=path,
        info=_read_info(file, tuple(channels), grid, axes),
        count=count,
        frames=frames,
        stored=tuple(stored),
        dtype=np.result_type(*dtypes).newbyteorder("="),
    )


def _read_info(file: h5py.File, channels: tuple[str, ...], grid: tuple[int, ...], axes: tuple[str, ...]) -> DatasetInfo:
    """Return the description; a foreign file has no length or frame time, so its coordinates tell them."""
    dimensions = file["dimensions"]
    if "domain_length" in file.attrs:
        length = tuple(float(value) for value in file.attrs["domain_length"])
    else:
        length = tuple(_spacing(dimensions[axis]) * size for axis, size in zip(axes, grid, strict=True))
    frame_seconds = file.attrs.get("frame_seconds")
    boundaries = dict.fromkeys(axes, "OPEN")
    for group in file["boundary_conditions"].values():
        for axis in np.atleast_1d(group.attrs["associated_dims"]):
            boundaries[str(axis)] = str(group.attrs["bc_type"]).upper()
    names = [str(name) for name in file.attrs["simulation_parameters"]]
    return DatasetInfo(
        name=str(file.attrs["dataset_name"]),
        fields=channels,
        grid=grid,
        length=length,
        boundaries=tuple(boundaries[axis] for axis in axes),
        axes=axes,
        frame_seconds=_spacing(dimensions["time"]) if frame_seconds is None else float(frame_seconds),
        parameters={name: float(file.attrs[name]) for name in names if np.ndim(file.attrs[name]) == 0},
        provenance=json.loads(file.attrs.get("provenance", "{}")),
    )


def _spacing(coordinate: h5py.Dataset) -> float:
    """Return the spacing of a uniform coordinate, 1 where a single point has none."""
    values = np.atleast_2d(coordinate[()])[0].astype(np.float64)
    return float(values[-1] - values[0]) / (len(values) - 1) if len(values) > 1 else 1.0


def _write_dimensions(group: h5py.Group, info: DatasetInfo, steps: np.ndarray) -> None:
    group.attrs["spatial_dims"] = string_list(info.axes)
    time = group.create_dataset("time", data=(steps * info.frame_seconds).astype(np.float32))
    time.attrs["sample_varying"] = False
    # The Well's checker fails unless `time` is marked as varying in time.
    time.attrs["time_varying"] = True
    for axis, size, length, boundary in zip(info.axes, info.grid, info.length, info.boundaries, strict=True):
        first = 0.0 if boundary == "PERIODIC" else 0.5
        points = group.create_dataset(axis, data=((np.arange(size) + first) * length / size).astype(np.float32))
        points.attrs["sample_varying"] = False
        points.attrs["time_varying"] = False


def _write_boundaries(group: h5py.Group, info: DatasetInfo) -> None:
    for axis, size, boundary in zip(info.axes, info.grid, info.boundaries, strict=True):
        condition = group.create_group(f"{axis}_{boundary.lower()}")
        condition.attrs["associated_dims"] = string_list([axis])
        condition.attrs["associated_fields"] = string_list(())
        condition.attrs["bc_type"] = boundary
        condition.attrs["sample_varying"] = False
        condition.attrs["time_varying"] = False
        mask = np.zeros(size, dtype=bool)
        mask[[0, -1]] = True
        condition.create_dataset("mask", data=mask)
        # One value per point of the mask; a wall and a periodic seam prescribe nothing but zero.
        condition.create_dataset("values", data=np.zeros(int(mask.sum()), dtype=np.float32))


def _allocate_field(group: h5py.Group, name: str, shape: tuple[int, ...], dtype: str) -> int:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    little_endian = h5py.h5t.py_create(np.dtype(dtype).newbyteorder("<"))
    identifier = h5py.h5d.create(group.id, name.encode(), little_endian, h5py.h5s.create_simple(shape), creation)
    dataset = h5py.Dataset(identifier)
    # Any False here crashes their loader.
    dataset.attrs["dim_varying"] = np.ones(len(shape) - 2, dtype=bool)
    dataset.attrs["sample_varying"] = True
    dataset.attrs["time_varying"] = True
    return int(identifier.get_offset())

"""`ergoflow import`: arrays of one's own become a data set in The Well's layout, with a recipe to begin with.

    FILE.npy   one array (trajectories, frames, fields, *grid), cut into splits trajectory by trajectory; one field may
               leave its axis out
    FILE.npz   arrays `train`, `valid` and `test` of that shape
    FOLDER     a data set in that layout already, with statistics: it is linked, not copied

An .npy is read frame by frame and may be larger than memory. The folder appears when it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from ergoflow.config import SPLITS, FilesDatasetConfig, Recipe, to_dict
from ergoflow.config.datasets import require_folder_name
from ergoflow.data.files import read_npz, write_text_atomic
from ergoflow.data.normalize import Normalizer
from ergoflow.data.store import DatasetInfo, ShardWriter, TrajectoryStore, compute_statistics, write_statistics
from ergoflow.metrics.resampling import few_trajectories
from ergoflow.pipeline.predict import PLANE
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.reference import require_known_walls
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import own_recipe

# Trajectories that a split needs: a floor compares two halves of the test split.
LEAST = {"train": 1, "valid": 1, "test": 2}
LEAST_FRAMES = 2
# Names that are understood as components of a velocity.
VELOCITY = re.compile(r"[uvw]|velocity_\w+|[uvw]_?[xyz]")


@dataclass(frozen=True, kw_only=True)
class Description:
    """What an array does not say of itself: names of fields and axes, sides, walls, and the time between frames."""

    name: str
    fields: tuple[str, ...]
    frame_seconds: float
    axes: tuple[str, ...] = ("x", "y")
    length: tuple[float, ...] | None = None
    """Sides of the domain; None means 2 pi each."""
    walls: tuple[str, ...] = ()
    """Axes that end at walls; the others are periodic."""

    def info(self, grid: tuple[int, ...], source: str) -> DatasetInfo:
        """The description of a data set on a grid."""
        unknown = [axis for axis in self.walls if axis not in self.axes]
        if unknown:
            raise ValueError(f"walls must be axes out of {', '.join(self.axes)}, got {', '.join(unknown)}; correct it")
        return DatasetInfo(
            name=self.name,
            fields=self.fields,
            grid=grid,
            length=self.length or (2 * np.pi,) * len(grid),
            boundaries=tuple("WALL" if axis in self.walls else "PERIODIC" for axis in self.axes),
            axes=self.axes,
            frame_seconds=self.frame_seconds,
            provenance={"source": source},
        )


def import_arrays(
    source: Path, description: Description, workspace: Workspace, *, shares: tuple[float, float], console: Console
) -> tuple[Path, Path]:
    """Write a data set and its first recipe; return the folder and the recipe's file.

    `shares` are the parts of one array that become the valid and the test split.
    """
    folder, path = _places(description.name, workspace)
    splits = _read(source, description, shares)
    grid = splits["train"].shape[3:]
    info = description.info(grid, source.name)
    recipe = _recipe(info, frames=splits["test"].shape[1])
    begun = folder.with_name(f".{folder.name}.import")
    shutil.rmtree(begun, ignore_errors=True)
    try:
        _write(begun, info, splits, console)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise
    begun.rename(folder)
    write_text_atomic(path, json.dumps(to_dict(recipe), indent=2) + "\n")
    return folder, path


def import_folder(source: Path, name: str, workspace: Workspace) -> tuple[Path, Path]:
    """Link a data set in The Well's layout and write its first recipe; return the link and the recipe's file."""
    folder, path = _places(name, workspace)
    store = TrajectoryStore(source)
    for split, least in LEAST.items():
        if store.count(split) < least:
            raise ValueError(
                f"{source} must hold at least {least} trajectories in {split}, got {store.count(split)}; add some"
            )
    Normalizer.from_store(store)
    recipe = _recipe(dataclasses.replace(store.info, name=name), frames=store.num_frames("test"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(source.resolve(), target_is_directory=True)
    write_text_atomic(path, json.dumps(to_dict(recipe), indent=2) + "\n")
    return folder, path


def describe(folder: Path) -> list[str]:
    """What a data set holds and how it will be understood, in a few lines to be read before training on it."""
    store = TrajectoryStore(folder)
    info = store.info
    counts = ", ".join(f"{store.count(split)} {split}" for split in SPLITS)
    frames = [store.num_frames(split) for split in SPLITS]
    lengths = ", ".join(map(str, frames if len(set(frames)) > 1 else frames[:1]))
    sides = " x ".join(f"{side:.3g}" for side in info.length)
    wraps = [axis for axis, boundary in zip(info.axes, info.boundaries, strict=True) if boundary == "PERIODIC"]
    lines = [
        f"{counts} trajectories of {lengths} frames, {info.frame_seconds:g} s apart",
        f"fields {', '.join(info.fields)} on a grid {' x '.join(map(str, info.grid))} of size {sides}, "
        f"periodic along {' and '.join(wraps) or 'no axis'}",
    ]
    if len(info.fields) > 1 and not all(VELOCITY.fullmatch(field) for field in info.fields):
        lines.append(
            "several fields are scored as components of a velocity: what the report calls energy is half the sum of "
            "their mean squares"
        )
    if len(info.grid) > PLANE:
        lines.append("a volume can be trained on, but not be scored: `predict` refuses it")
    remark = few_trajectories(store.count("test"))
    return [*lines, remark] if remark else lines


def _places(name: str, workspace: Workspace) -> tuple[Path, Path]:
    """Where a data set and its recipe go; neither may be there."""
    require_folder_name(name, "NAME")
    folder, path = workspace.dataset(name), workspace.root / f"{name}.json"
    for there in (folder, path):
        if there.exists():
            raise ValueError(f"{there} is there already; choose another name, or remove it")
    return folder, path


def _recipe(info: DatasetInfo, *, frames: int) -> Recipe:
    require_known_walls(info)
    return own_recipe(
        FilesDatasetConfig(name=info.name, grid=info.grid, frame_seconds=info.frame_seconds),
        fields=info.fields,
        length=info.length,
        periodic=[boundary == "PERIODIC" for boundary in info.boundaries],
        frames=frames,
    )


def _read(source: Path, description: Description, shares: tuple[float, float]) -> dict[str, np.ndarray]:
    """The arrays (trajectories, frames, fields, *grid) of the splits, cut out of the file's one array or by name."""
    if not source.exists():
        raise ValueError(f"a NumPy file .npy or .npz was expected at {source}, but there is none; check the path")
    if source.suffix not in (".npy", ".npz"):
        raise ValueError(f"a NumPy file .npy or .npz was expected, got {source}; save the trajectories with numpy.save")
    if source.suffix == ".npy":
        try:
            loaded = np.load(source, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{source} must hold numbers, got a file NumPy refuses: {error}; save it anew") from None
        return _cut(_with_fields(loaded, description), shares)
    named = read_npz(source, remedy="save it anew")
    if any(split not in named for split in SPLITS):
        raise ValueError(f"{source} must hold the arrays {', '.join(SPLITS)}, got {', '.join(named)}; add them")
    arrays = {split: _with_fields(named[split], description) for split in SPLITS}
    for split, array in arrays.items():
        if len(array) < LEAST[split]:
            raise ValueError(
                f"{split} must hold at least {LEAST[split]} trajectories, got shape {array.shape}; bring more"
            )
    return arrays


def _cut(array: np.ndarray, shares: tuple[float, float]) -> dict[str, np.ndarray]:
    """One array cut along its first axis: first the training, then the valid, then the test split."""
    valid, test = (
        max(LEAST[split], round(share * len(array))) for split, share in zip(("valid", "test"), shares, strict=True)
    )
    train = len(array) - valid - test
    if train < 1:
        raise ValueError(
            "at least one trajectory to train with, one to validate and two to test are needed, "
            f"got {len(array)} in all, with parts of {shares[0]:g} and {shares[1]:g} to validate and to test; "
            "cut a long one: array.reshape(pieces, frames, ...)"
        )
    return {"train": array[:train], "valid": array[train : train + valid], "test": array[train + valid :]}


def _with_fields(array: np.ndarray, description: Description) -> np.ndarray:
    """The array as (trajectories, frames, fields, *grid)."""
    fields, axes = description.fields, description.axes
    if array.ndim == 2 + len(axes) and len(fields) == 1:
        array = array[:, :, None]
    if array.ndim != 3 + len(axes) or array.shape[2] != len(fields) or array.dtype.kind not in "fiu":
        raise ValueError(
            f"an array must be (trajectories, frames, {len(fields)} fields, {', '.join(axes)}) of real numbers, got "
            f"{array.dtype} of shape {array.shape}; name its fields and axes with --fields and --axes, or bring them "
            "into this order with numpy.moveaxis"
        )
    if array.shape[1] < LEAST_FRAMES:
        raise ValueError(
            f"a trajectory must have at least {LEAST_FRAMES} frames, a state and the next, got {array.shape[1]} in an "
            f"array of shape {array.shape}; the order is trajectories, frames, fields and grid"
        )
    return array


def _write(folder: Path, info: DatasetInfo, splits: Mapping[str, np.ndarray], console: Console) -> None:
    total = sum(array.shape[0] * array.shape[1] for array in splits.values())
    with bar(console, f"import {info.name}", total, "frames") as advance:
        for split, array in splits.items():
            path = folder / "data" / split / f"{info.name}.hdf5"
            if array.shape[3:] != info.grid:
                raise ValueError(
                    f"all splits must have the grid {info.grid} of train, got {array.shape[3:]} in {split}; mend it"
                )
            with ShardWriter(path, info, count=array.shape[0], frames=array.shape[1]) as writer:
                for t in range(array.shape[1]):
                    with np.errstate(over="ignore"):  # what overflows is refused below
                        frame = np.asarray(array[:, t], dtype=np.float32)
                    bad = ~np.isfinite(frame).reshape(len(frame), -1).all(1)
                    if bad.any():
                        raise ValueError(
                            f"every number must be finite in float32, got others in trajectory {np.argmax(bad)} of "
                            f"{split}, frame {t}; mend or leave out that trajectory"
                        )
                    writer.write(t, frame)
                    advance(len(frame))
    write_statistics(folder, compute_statistics(TrajectoryStore(folder)))
    # A field that never changes has no unit: it is refused here, not when a training begins.
    Normalizer.from_store(TrajectoryStore(folder))

"""Read trajectories from a folder of HDF5 files in The Well's layout.

A data set is `<folder>/data/{train,valid,test}/*.hdf5` beside `stats.yaml`; a folder that holds the files
directly (a roll-out) has the one split "all". Trajectories of a split are numbered through its files in the
order of their names. Writing is in `shard_writer.py`, the layout in `layout.py`, `stats.yaml` in
`statistics.py`; their public names are importable from here.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
import yaml
from torch import Tensor

from ergoflow.data.files import remove_leftovers
from ergoflow.data.info import DatasetInfo
from ergoflow.data.layout import ShardLayout, StoredField, broken, open_shard, read_layout, read_steps
from ergoflow.data.shard_writer import ShardWriter, is_complete
from ergoflow.data.statistics import (
    STATISTICS_FILE,
    compute_increment_std,
    compute_statistics,
    write_statistics,
)

__all__ = [
    "DatasetInfo",
    "ShardWriter",
    "TrajectoryStore",
    "compute_increment_std",
    "compute_statistics",
    "is_complete",
    "remove_leftovers",
    "write_statistics",
]

SPLITS = ("train", "valid", "test")
WHOLE_FOLDER = "all"
FILE_PATTERNS = ("*.hdf5", "*.h5")
# Fewer than the 256 open files every system allows a process.
MAX_OPEN_FILES = 128
# `load` moves a trajectory in pieces of about this size.
LOAD_BYTES = 64 * 2**20


def list_splits(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return {split: its files by name}, train, valid, test first."""
    if not (folder / "data").is_dir():
        files = _files(folder)
        return {WHOLE_FOLDER: files} if files else {}
    names = {path.name for path in (folder / "data").iterdir() if path.is_dir()}
    order = [*(name for name in SPLITS if name in names), *sorted(names.difference(SPLITS))]
    return {name: files for name in order if (files := _files(folder / "data" / name))}


def check_siblings(layout: ShardLayout, first: ShardLayout) -> None:
    """Raise ValueError unless two files hold the same fields and grid and, in one split, the same number of frames."""
    same_split = layout.path.parent == first.path.parent
    where = first.path.name if same_split else f"{first.path.parent.name}/{first.path.name}"
    for name, found, expected in (
        ("fields", layout.info.fields, first.info.fields),
        ("grid", layout.info.grid, first.info.grid),
        ("frames", layout.frames, first.frames if same_split else layout.frames),
    ):
        if found != expected:
            raise broken(layout.path, f"{name} {expected} as in {where}", f"{found}")


class OpenShard(NamedTuple):
    """An open file and its open fields, as in `ShardLayout.stored`; opening one costs as much as a read."""

    file: h5py.File
    fields: tuple[h5py.Dataset, ...]


class TrajectoryStore:
    """A folder of trajectories, (T, C, *grid) each. Safe to pickle, to fork and to share."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = list_splits(self.folder)
        if not self._files:
            raise ValueError(
                f"expected HDF5 files in {self.folder / 'data'}/<split> or in {self.folder}, found none; "
                "generate the data first"
            )
        self._layouts: dict[str, tuple[ShardLayout, ...]] = {}
        self._handles: OrderedDict[Path, OpenShard] = OrderedDict()
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the open files, which do not travel between processes."""
        return self.__dict__ | {"_handles": OrderedDict(), "_owner": -1}

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that hold files."""
        return tuple(self._files)

    @property
    def info(self) -> DatasetInfo:
        """The description in the first file of the first split (provenance and all)."""
        return self._shards(self.splits[0])[0].info

    @property
    def stored_fields(self) -> tuple[StoredField, ...]:
        """The HDF5 datasets behind the channels, in channel order."""
        return self._shards(self.splits[0])[0].stored

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """The contents of `stats.yaml`."""
        path = self.folder / STATISTICS_FILE
        if not path.is_file():
            raise ValueError(f"expected {path}, found no file; write it with write_statistics and compute_statistics")
        try:
            content = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise broken(path, "a YAML mapping of statistics", " ".join(str(error).split())) from None
        if not isinstance(content, dict):
            raise broken(path, "a YAML mapping of statistics", type(content).__name__)
        return content

    def files(self, split: str) -> tuple[Path, ...]:
        """Return the files of a split in the order in which their trajectories are numbered."""
        if split not in self._files:
            raise ValueError(
                f"{self.folder} must hold the split {split!r}, got {self.splits}; put HDF5 files into data/{split}"
            )
        return self._files[split]

    def count(self, split: str) -> int:
        """Return the number of trajectories J of a split."""
        return sum(shard.count for shard in self._shards(split))

    def num_frames(self, split: str) -> int:
        """Return the number of frames T of every trajectory of a split."""
        return self._shards(split)[0].frames

    def steps(self, split: str) -> np.ndarray:
        """Return the frames' numbers (T,) in units of `info.frame_seconds`."""
        shard = self._shards(split)[0]
        return read_steps(self._open(shard).file, shard)

    def scalar(self, split: str, name: str) -> np.ndarray:
        """Return an entry of `/scalars` for every trajectory: (J,), or (J, T) where it varies in time."""
        parts = []
        for shard in self._shards(split):
            scalars = self._open(shard).file["scalars"]
            if name not in scalars:
                raise ValueError(
                    f"{shard.path}: expected scalar {name!r}, found {sorted(scalars)}; choose one of those"
                )
            values = np.asarray(scalars[name][()])
            varying = bool(scalars[name].attrs["sample_varying"])
            parts.append(values if varying else np.broadcast_to(values, (shard.count, *values.shape)))
        return np.concatenate(parts)

    def read(self, split: str, trajectory: int, start: int, stop: int, stride: int = 1) -> np.ndarray:
        """Return frames start, start + stride, ... < stop of one trajectory, (T, C, *grid) in float32."""
        return self.read_stored(split, trajectory, start, stop, stride).astype(np.float32, copy=False)

    def read_stored(self, split: str, trajectory: int, start: int, stop: int, stride: int = 1) -> np.ndarray:
        """Return what `read` does, in the dtype of the file."""
        shard, row = self._locate(split, trajectory)
        if not 0 <= start < stop <= shard.frames or stride < 1:
            raise ValueError(
                f"frames must satisfy 0 <= start < stop <= {shard.frames} and stride >= 1, "
                f"got {start}, {stop}, {stride}; choose frames inside"
            )
        frames = range(start, stop, stride)
        values = np.empty((len(frames), len(shard.info.fields), *shard.info.grid), dtype=shard.dtype)
        self._read_into(values, shard, row, frames)
        return values

    def load(
        self,
        split: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        stride: int = 1,
        trajectories: Sequence[int] | None = None,
    ) -> Tensor:
        """Return trajectories (J, T, C, *grid) on a device, all of them where `trajectories` is None.

        The result is allocated once and filled piece by piece, so the host never holds a second copy: a thread reads
        the next piece into one of two buffers while the other goes to its place.
        """
        chosen = range(self.count(split)) if trajectories is None else trajectories
        places = [self._locate(split, trajectory) for trajectory in chosen]
        shard = self._shards(split)[0]
        frames = range(0, shard.frames, stride)
        shape = (len(shard.info.fields), *shard.info.grid)
        loaded = torch.empty((len(places), len(frames), *shape), device=device, dtype=dtype)
        length = min(len(frames), max(1, LOAD_BYTES // (8 * math.prod(shape))))
        pieces = [(row, first) for row in range(len(places)) for first in range(0, len(frames), length)]
        # A GPU fetches faster from pinned memory.
        room = torch.empty(2, 8 * length * math.prod(shape), dtype=torch.uint8, pin_memory=loaded.is_cuda).numpy()

        def read(number: int) -> Tensor:
            (row, first), buffer = pieces[number], room[number % 2]
            part, of = frames[first : first + length], places[row][0].dtype
            values = buffer.view(of)[: len(part) * math.prod(shape)].reshape(len(part), *shape)
            self._read_into(values, *places[row], part)
            return torch.from_numpy(values)

        with ThreadPoolExecutor(max_workers=1) as reader:
            coming = [reader.submit(read, number) for number in range(min(1, len(pieces)))]
            for number, (row, first) in enumerate(pieces, start=1):
                values = coming.pop().result()
                if number < len(pieces):
                    coming.append(reader.submit(read, number))
                loaded[row, first : first + length].copy_(values)
        return loaded

    def _read_into(self, values: np.ndarray, shard: ShardLayout, row: int, frames: range) -> None:
        """Fill an array (T, C, *grid) of the file's dtype with chosen frames of one of its trajectories."""
        times = slice(frames.start, frames.stop, frames.step)
        channel = 0
        for field, dataset in zip(shard.stored, self._open(shard).fields, strict=True):
            chosen = (row, times) if field.sample_varying else (times,)
            if field.order == 0:
                dataset.read_direct(values, chosen, np.s_[:, channel])
            else:
                part = dataset[chosen].reshape(len(frames), *shard.info.grid, field.components)
                values[:, channel : channel + field.components] = np.moveaxis(part, -1, 1)
            channel += field.components

    def _shards(self, split: str) -> tuple[ShardLayout, ...]:
        """Return the layouts of a split's files, read once, compared with each other and with the first split's."""
        files = self.files(split)
        if split not in self._layouts:
            layouts = tuple(read_layout(path) for path in files)
            # A split of another name may be of another resolution.
            first = self._shards(self.splits[0])[0] if split in SPLITS and split != self.splits[0] else layouts[0]
            for sibling in (first, layouts[0]):
                for layout in layouts:
                    check_siblings(layout, sibling)
            self._layouts[split] = layouts
        return self._layouts[split]

    def _locate(self, split: str, trajectory: int) -> tuple[ShardLayout, int]:
        """Return the file that holds a trajectory and its row there."""
        shards = self._shards(split)
        ends = list(itertools.accumulate(shard.count for shard in shards))
        if not 0 <= trajectory < ends[-1]:
            raise ValueError(f"trajectory must lie in 0..{ends[-1] - 1}, got {trajectory}; choose one of those")
        place = int(np.searchsorted(ends, trajectory, side="right"))
        return shards[place], trajectory - (ends[place] - shards[place].count)

    def _open(self, shard: ShardLayout) -> OpenShard:
        """Return this process's open file; one inherited through a fork is dropped, not used."""
        path = shard.path
        if self._owner != os.getpid():
            self._handles, self._owner = OrderedDict(), os.getpid()
        if path not in self._handles:
            file = open_shard(path)
            self._handles[path] = OpenShard(file, tuple(file[field.dataset] for field in shard.stored))
            if len(self._handles) > MAX_OPEN_FILES:
                self._handles.popitem(last=False)[1].file.close()
        self._handles.move_to_end(path)
        return self._handles[path]


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for pattern in FILE_PATTERNS for path in folder.glob(pattern)))

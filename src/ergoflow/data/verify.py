"""Check a folder of trajectories file by file: layout, shape, provenance, checksum, finite numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import yaml

from ergoflow.data.checksum import CHECKSUM_ATTRIBUTE, frame_bytes, metadata_bytes, read_blocks
from ergoflow.data.files import find_leftovers
from ergoflow.data.layout import ShardLayout, open_shard, read_layout, read_steps
from ergoflow.data.statistics import STATISTICS_FILE, STATISTICS_KEYS
from ergoflow.data.store import SPLITS, check_siblings, list_splits


def check_store(folder: str | Path) -> Iterator[tuple[Path, str | None]]:
    """Yield (file, None) for each good file below `folder` and (file, reason on one line) for each bad one.

    Every byte is read. Temporary files of killed writers and, in a data set, `stats.yaml` are looked at too.
    A frame may be non-finite from the step `diverged_at` (a scalar) of its trajectory on: a diverged roll-out
    is a result.
    """
    folder = Path(folder)
    splits = list_splits(folder)
    if not splits:
        raise ValueError(f"expected HDF5 files below {folder}, found none; generate the data first")
    known: ShardLayout | None = None
    for split, files in splits.items():
        # Train, valid and test are one data set.
        first = known if split in SPLITS else None
        for path in files:
            try:
                layout = read_layout(path)
                if first is not None:
                    check_siblings(layout, first)
            except ValueError as error:
                yield path, _reason(path, str(error))
                continue
            if first is None or first.path.parent != path.parent:
                first = layout
            yield path, _check_content(layout)
        known = known or first
    for path in find_leftovers(folder):
        yield path, "a temporary file of a killed writer; remove it"
    if "train" in splits:
        yield folder / STATISTICS_FILE, _check_statistics(folder / STATISTICS_FILE)


def _check_content(layout: ShardLayout) -> str | None:
    """Return what is wrong with the contents of a file whose layout is right, or None."""
    if not layout.info.provenance:
        return "no provenance: expected a JSON object with the solver's version, config and seeds"
    with open_shard(layout.path) as file:
        expected = file.attrs.get(CHECKSUM_ATTRIBUTE)
        if expected is None:
            return f"no checksum: expected the attribute {CHECKSUM_ATTRIBUTE!r} of a finished file"
        try:
            digest = hashlib.sha256()
            limits = _finite_until(file, layout)
            broken_at = None
            for start, block in read_blocks(file, layout):
                digest.update(frame_bytes(block))
                broken_at = broken_at or _first_bad(block, start, limits)
            digest.update(metadata_bytes(file))
        except (KeyError, TypeError, OSError, RuntimeError, ValueError) as error:
            return f"unreadable: {' '.join(str(error).split())}"
    if digest.hexdigest() != expected:
        found = digest.hexdigest()
        return f"checksum: expected {str(expected)[:12]}..., found {found[:12]}...: the file has changed"
    return broken_at


def _finite_until(file: h5py.File, layout: ShardLayout) -> np.ndarray:
    """Return the stored frame (J,) from which each trajectory may be non-finite; T where it never may."""
    if "diverged_at" not in file["scalars"]:
        return np.full(layout.count, layout.frames)
    diverged_at = np.asarray(file["scalars/diverged_at"][()])
    # A roll-out may keep every tenth step only: the first kept frame at or after the step counts.
    first = np.searchsorted(read_steps(file, layout), diverged_at)
    return np.where(diverged_at < 0, layout.frames, first)


def _first_bad(block: np.ndarray, start: int, limits: np.ndarray) -> str | None:
    """Return where a block (T, J, C, *grid) first holds a number that is not finite, or None."""
    finite = np.isfinite(block).all(axis=tuple(range(3, block.ndim)))  # T J C
    frames = start + np.arange(len(block))
    bad = ~finite & (frames[:, None] < limits)[..., None]
    if not bad.any():
        return None
    frame, trajectory, channel = np.argwhere(bad)[0]
    return f"non-finite number in frame {start + frame}, trajectory {trajectory}, channel {channel}"


def _check_statistics(path: Path) -> str | None:
    if not path.is_file():
        return "missing: expected the statistics of the train split; write them with write_statistics"
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return f"not YAML: {' '.join(str(error).split())}"
    missing = [key for key in STATISTICS_KEYS if not isinstance(content, dict) or key not in content]
    return f"no {', '.join(missing)}: expected the keys {', '.join(STATISTICS_KEYS)}" if missing else None


def _reason(path: Path, message: str) -> str:
    """Return an error's message without the file name, which stands beside it."""
    return message.removeprefix(f"{path}: ")

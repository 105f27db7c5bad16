"""Write one file of trajectories frame by frame, whole or not at all.

HDF5 lays the file out, and its arrays are contiguous, so each frame goes straight to its place with `pwrite`.
HDF5 itself must not meet a full disk: after a failed write it can no longer close the file and crashes the
interpreter on exit (seen with HDF5 2.0). The space is reserved before the first frame for the same reason.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

import h5py
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ergoflow.data.checksum import CHECKSUM_ATTRIBUTE, frame_bytes, metadata_bytes
from ergoflow.data.files import replace_atomically
from ergoflow.data.info import DatasetInfo
from ergoflow.data.layout import open_shard, write_layout, write_scalar

DTYPES = ("float32", "float16")
# Small frames are gathered until one trajectory's run of them is worth a system call.
WRITE_BYTES = 2**18
BUFFER_BYTES = 2**26
# Room kept for attributes and scalars, which HDF5 writes after the last frame.
SPARE_BYTES = 2**20


def is_complete(path: str | Path) -> bool:
    """Tell whether `path` is a file that a ShardWriter finished (its contents are not read)."""
    path = Path(path)
    if not path.is_file():
        return False
    try:
        with open_shard(path) as file:
            return CHECKSUM_ATTRIBUTE in file.attrs
    except ValueError:
        return False


class ShardWriter:
    """A context manager that writes `count` trajectories of `frames` frames to `path`.

    Frames must come in order, all of them. The file appears at `path` when the block ends cleanly; after an
    exception nothing of it remains. `steps` are the frames' numbers in units of `frame_seconds`; None means
    0, 1, 2, ... (a roll-out may keep every tenth step).
    """

    def __init__(
        self,
        path: str | Path,
        info: DatasetInfo,
        *,
        count: int,
        frames: int,
        dtype: Literal["float32", "float16"] = "float32",
        steps: ArrayLike | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}; choose one of them")
        if count < 1 or frames < 1:
            raise ValueError(f"count and frames must be positive, got {count} and {frames}; give at least one")
        self.path = Path(path)
        self.info = info
        self.count = count
        self.frames = frames
        self.dtype = np.dtype(dtype)
        self.steps = np.arange(frames) if steps is None else np.asarray(steps)
        if self.steps.shape != (frames,):
            raise ValueError(f"steps must have shape ({frames},), got {self.steps.shape}; give one per frame")
        self._shape = (count, len(info.fields), *info.grid)
        self._scalars: dict[str, tuple[np.ndarray, bool, bool]] = {}
        self._frame_bytes = int(np.prod(info.grid)) * self.dtype.itemsize
        self._written = 0
        self._gathered = 0

    def __enter__(self) -> ShardWriter:
        """Lay the file out under its temporary name and reserve its space."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self.count * self.frames * len(self.info.fields) * self._frame_bytes + SPARE_BYTES
        with contextlib.ExitStack() as stack, self._one_line_errors():
            disk = os.statvfs(self.path.parent)
            if disk.f_bavail * disk.f_frsize < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._temporary = stack.enter_context(replace_atomically(self.path))
            with h5py.File(self._temporary, "w", locking=False) as file:
                self._offsets = write_layout(file, self.info, count=self.count, steps=self.steps, dtype=self.dtype.name)
            self._descriptor = os.open(self._temporary, os.O_RDWR)
            stack.callback(os.close, self._descriptor)
            _reserve(self._descriptor, size)
            self._stack = stack.pop_all()
        self._digest = hashlib.sha256()
        per_frame = self.count * len(self.info.fields) * self._frame_bytes
        gather = max(1, min(WRITE_BYTES // self._frame_bytes, BUFFER_BYTES // per_frame, self.frames))
        self._buffer = np.empty((*self._shape[:2], gather, *self.info.grid), dtype=self.dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish and rename the file, or remove it after an exception."""
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._one_line_errors(), self._stack:
            if self._written != self.frames:
                raise ValueError(f"{self.path}: expected {self.frames} frames, got {self._written}; write every frame")
            self._flush()
            self._finish()

    def write(self, index: int, frame: Tensor | np.ndarray) -> None:
        """Write frame `index` of all trajectories, (J, C, *grid), from any device."""
        if index != self._written:
            raise ValueError(f"frames must come in order: expected {self._written}, got {index}; write it first")
        if index >= self.frames:
            raise ValueError(f"the file holds {self.frames} frames, got index {index}; raise `frames`")
        if tuple(frame.shape) != self._shape:
            raise ValueError(f"a frame must have shape {self._shape}, got {tuple(frame.shape)}; reshape it")
        values = self._to_stored(frame)
        self._digest.update(frame_bytes(values))
        if self._buffer.shape[2] == 1:
            self._buffer = values[:, :, None]  # J C 1 *grid, written below without another copy
        else:
            self._buffer[:, :, self._gathered] = values
        self._gathered += 1
        self._written += 1
        if self._gathered == self._buffer.shape[2]:
            self._flush()

    def set_scalar(self, name: str, values: ArrayLike) -> None:
        """Add an entry to `/scalars`: one number, (J,) per trajectory, or (J, T) per trajectory and frame."""
        array = np.asarray(values)
        sample_varying, time_varying = array.ndim >= 1, array.ndim == 2
        if array.shape != (self.count, self.frames)[: array.ndim]:
            raise ValueError(
                f"scalar {name!r} must have shape (), ({self.count},) or ({self.count}, {self.frames}), "
                f"got {array.shape}; reshape it"
            )
        if name in self.info.parameters or "/" in name:
            raise ValueError(f"a scalar's name must be new and without '/', got {name!r}; rename it")
        self._scalars[name] = (array, sample_varying, time_varying)

    def _to_stored(self, frame: Tensor | np.ndarray) -> np.ndarray:
        """Return the frame in the stored dtype on the host; a finite number that overflows it raises."""
        if isinstance(frame, Tensor):
            # Cast on the device, so that half-precision storage also halves the transfer.
            stored = frame.detach().to(getattr(torch, self.dtype.name)).cpu().numpy()
        else:
            with np.errstate(over="ignore"):
                stored = frame.astype(self.dtype, copy=False)
        # A finite number turned infinite; the original is looked at only where an infinity shows.
        infinite = np.isinf(stored)
        if infinite.any() and _is_finite(frame)[infinite].any():
            raise ValueError(
                f"{self.path}: expected values up to {np.finfo(self.dtype).max:g} for {self.dtype.name}, got "
                f"larger ones in frame {self._written}; store float32, or NaN after a divergence"
            )
        return stored

    def _flush(self) -> None:
        """Write the gathered frames of each channel and trajectory to their place."""
        first = self._written - self._gathered
        with self._one_line_errors():
            for channel, offset in enumerate(self._offsets):
                for trajectory in range(self.count):
                    content = self._buffer[trajectory, channel, : self._gathered]
                    place = offset + (trajectory * self.frames + first) * self._frame_bytes
                    _write_at(self._descriptor, frame_bytes(content), place)
        self._gathered = 0

    def _finish(self) -> None:
        with h5py.File(self._temporary, "r+", locking=False) as file:
            for name, (values, sample_varying, time_varying) in self._scalars.items():
                write_scalar(file, name, values, sample_varying=sample_varying, time_varying=time_varying)
            self._digest.update(metadata_bytes(file))
            file.attrs[CHECKSUM_ATTRIBUTE] = self._digest.hexdigest()

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Turn what the operating system or HDF5 says about a failed write into one clear line."""
        try:
            yield
        # HDF5 reports a file it cannot close as a RuntimeError.
        except (OSError, RuntimeError) as error:
            if getattr(error, "filename", None) == str(self.path):
                raise
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number else " ".join(str(error).split())
            # HDF5 gives no number: a full disk is what it mostly means.
            remedy = "free disk space" if number in (None, errno.ENOSPC, errno.EDQUOT) else "mend that"
            message = f"cannot write frame {self._written} of {self.frames}: {reason}; {remedy}, run again"
            raise OSError(number or errno.EIO, message, str(self.path)) from error


def _is_finite(frame: Tensor | np.ndarray) -> np.ndarray:
    return torch.isfinite(frame).cpu().numpy() if isinstance(frame, Tensor) else np.isfinite(frame)


def _reserve(descriptor: int, size: int) -> None:
    """Reserve space on the disk, where the file system can."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    """Write bytes at a place of a file; the kernel may take them in several bites."""
    while content:
        taken = os.pwrite(descriptor, content, offset)
        content, offset = content[taken:], offset + taken

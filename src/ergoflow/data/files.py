"""Files that are either whole or absent.

A file is written under a temporary name in its own folder, synced to the disk and renamed. A reader therefore
never meets half a file, and a crash leaves at most a temporary file, which `remove_leftovers` clears away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

TEMPORARY_SUFFIX = ".ergoflow-tmp"


@contextlib.contextmanager
def replace_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends without an exception.

    The order is: fsync the file, rename it, fsync the folder. After an exception the temporary file is
    removed and whatever stood at `path` is untouched. The temporary file is locked while it is being written,
    so `remove_leftovers` in another process can tell a living writer from a dead one.
    """
    path = Path(path)
    temporary, descriptor = _open_locked(path)
    try:
        yield temporary
        os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


def write_bytes_atomic(path: str | Path, content: bytes) -> None:
    """Write `content` to `path`, which holds the old content or the new one at every moment."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content)


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, which holds the old text or the new one at every moment."""
    write_bytes_atomic(path, text.encode())


def write_npz_atomic(path: str | Path, arrays: Mapping[str, np.ndarray], *, compress: bool = False) -> None:
    """Write named arrays as .npz."""
    save: Any = np.savez_compressed if compress else np.savez
    with replace_atomically(path) as temporary, temporary.open("wb") as file:
        save(file, **arrays)


def read_json(path: str | Path, *, remedy: str) -> Any:
    """Return the content of a JSON file; `remedy` ends the error if it is missing or damaged."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a whole JSON file, but it cannot be read ({error}); {remedy}") from error


def read_npz(path: str | Path, *, remedy: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file; `remedy` ends the error if it is missing or damaged."""
    try:
        # Opened here: NumPy leaves a damaged file open.
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return dict(file.items())
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} must be a whole .npz file, but it cannot be read ({error}); {remedy}") from error


def find_leftovers(folder: str | Path) -> list[Path]:
    """Return the temporary files below `folder` that no living process is writing."""
    return list(_abandoned(folder))


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove the temporary files that killed writers left below `folder`, and return their paths."""
    removed = []
    for path in _abandoned(folder):
        path.unlink(missing_ok=True)
        removed.append(path)
    return removed


@contextlib.contextmanager
def sole_holder(path: str | Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a file, made if need be, inside the block; yield whether it is held.

    Somebody else's lock is waited for, or yields False at once. The kernel drops the lock of a process that dies. A
    file system without locks yields True to everybody.
    """
    # To be written to, as network file systems want it of a lock that only one may hold.
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError as error:
            held = not isinstance(error, BlockingIOError)
        yield held
    finally:
        # Closing is not enough: processes forked meanwhile (readers of data) have the descriptor, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _open_locked(path: Path) -> tuple[Path, int]:
    """Create a temporary file beside `path`, locked; return its path and its descriptor.

    `remove_leftovers` may meet the file before its lock: it holds the lock for a moment, and then the file is gone.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        # A file system without locks cannot protect the file; `remove_leftovers` then leaves it alone too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)


def _abandoned(folder: str | Path) -> Iterator[Path]:
    """Yield the temporary files below `folder` whose lock nobody holds; the kernel drops it when a writer dies.

    The lock is held until the next one is asked for, so no writer takes a file that is being removed.
    """
    for path in sorted(Path(folder).rglob(f".*{TEMPORARY_SUFFIX}")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A writer that has finished in the meantime has renamed its file.
            if path.exists():
                yield path
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

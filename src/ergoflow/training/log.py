"""The log of a run: one JSON object per line in `log.jsonl`, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from ergoflow.data.files import write_text_atomic

LOG_FILE = "log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class TrainingLog:
    """An open log that continues at a step: lines of later steps, left by a run that died, are dropped first.

    A class because it owns two open files; a context manager so that they are closed.
    """

    def __init__(self, folder: Path, *, step: int, tensorboard: bool) -> None:
        self._path = folder / LOG_FILE
        keep_lines(self._path, last_step=step)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            # Imported here: it is slow to import and only a training run needs it.
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; numbers that are not finite become null, which JSON can hold."""
        self._file.write(json.dumps(_finite(record)) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in _scalars(record):
                self._events.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Put what was written on the disk; a checkpoint must never be ahead of its log."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> TrainingLog:
        """The log itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close both files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def keep_lines(path: Path, *, last_step: int) -> None:
    """Drop the lines of steps after `last_step`, and a last line that was cut short."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except json.JSONDecodeError:
            break
        if step <= last_step:
            kept.append(line + "\n")
    write_text_atomic(path, "".join(kept))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """(name, number) of every entry; those of nested dictionaries are named parts/unitary, valid/relative_l2, ...

    An entry without a number, such as a rate over no time, is left out.
    """
    flat = []
    for name, value in record.items():
        if isinstance(value, dict):
            flat += [(f"{name}/{entry}", number) for entry, number in value.items()]
        elif name != "step" and value is not None:
            flat.append((name, value))
    return flat

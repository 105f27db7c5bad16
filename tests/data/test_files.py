from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ergoflow.data.files import (
    TEMPORARY_SUFFIX,
    find_leftovers,
    read_json,
    read_npz,
    remove_leftovers,
    replace_atomically,
    write_bytes_atomic,
    write_npz_atomic,
    write_text_atomic,
)


def test_text_and_bytes_come_back_as_written(tmp_path: Path) -> None:
    write_text_atomic(tmp_path / "a.txt", "ν = 1e-3\n")
    write_bytes_atomic(tmp_path / "b.bin", b"\x00\xff\r\n")
    assert (tmp_path / "a.txt").read_bytes() == "ν = 1e-3\n".encode()
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff\r\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.bin"]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def interrupted() -> None:
        with replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replace_atomically(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_content_is_on_the_disk_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    present_at_sync = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        present_at_sync.append(path.exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_text_atomic(path, "new")
    # The file is synced before the rename, the folder after it.
    assert present_at_sync == [False, True]


def test_files_get_the_permissions_of_ordinary_files(tmp_path: Path) -> None:
    write_text_atomic(tmp_path / "a.txt", "x")
    (tmp_path / "b.txt").write_text("x")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "b.txt").stat().st_mode


def test_leftovers_of_a_killed_writer_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kept.hdf5").write_text("kept")
    (tmp_path / "other.tmp").write_text("kept")
    program = (
        "import os, sys; from ergoflow.data.files import replace_atomically\n"
        "with replace_atomically(sys.argv[1]) as temporary: temporary.write_text('half'); os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "deep" / "a.hdf5")], check=False)
    assert killed.returncode == 9
    (leftover,) = find_leftovers(tmp_path)
    assert leftover.name.endswith(TEMPORARY_SUFFIX)
    assert remove_leftovers(tmp_path) == [leftover]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "kept.hdf5", "other.tmp"]


def test_the_file_of_a_living_writer_is_not_a_leftover(tmp_path: Path) -> None:
    with replace_atomically(tmp_path / "a.txt") as temporary:
        temporary.write_text("half")
        program = "import sys; from ergoflow.data import files; print(files.remove_leftovers(sys.argv[1]))"
        other = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == "[]"
        assert temporary.exists()
    assert (tmp_path / "a.txt").read_text() == "half"


def test_a_cleaner_that_meets_a_file_before_its_lock_does_not_take_it_from_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the making of the file and its lock, finds it free and removes it: another one is made."""
    removed = []

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        removed.extend(remove_leftovers(tmp_path))
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with replace_atomically(tmp_path / "a.txt") as temporary:
        assert len(removed) == 1
        temporary.write_text("whole")
        assert remove_leftovers(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "whole"


@pytest.mark.parametrize("look", [find_leftovers, remove_leftovers])
def test_a_writer_waits_for_a_cleaner_that_looks_at_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], list[Path]]
) -> None:
    """The writer asks for its lock while the other holds it: it waits, and then its file is its own."""
    flock, probing, asked = fcntl.flock, threading.Event(), threading.Event()

    def staged(descriptor: int, operation: int) -> None:
        if threading.current_thread() is threading.main_thread():
            if not probing.is_set():
                cleaner.start()
                assert probing.wait(timeout=60)
            asked.set()
            flock(descriptor, operation)
        else:
            flock(descriptor, operation)
            probing.set()
            assert asked.wait(timeout=60)
            time.sleep(0.05)

    cleaner = threading.Thread(target=look, args=(tmp_path,))
    monkeypatch.setattr(fcntl, "flock", staged)
    with replace_atomically(tmp_path / "a.txt") as temporary:
        cleaner.join(timeout=60)
        monkeypatch.undo()
        temporary.write_text("whole")
        assert remove_leftovers(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_that_is_finished_while_it_is_looked_at_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as writing:
        writing.enter_context(replace_atomically(tmp_path / "a.txt"))

        def flock(descriptor: int, operation: int) -> None:
            monkeypatch.undo()
            writing.close()
            fcntl.flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        assert find_leftovers(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_files_are_written_and_leftovers_stay_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    leftover = tmp_path / f".b.txt.0{TEMPORARY_SUFFIX}"
    leftover.write_text("half")
    with replace_atomically(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
        assert remove_leftovers(tmp_path) == find_leftovers(tmp_path) == []
    assert (tmp_path / "a.txt").read_text() == "whole"
    assert leftover.exists()


@pytest.mark.parametrize("content", [None, b"", b'{"a": [1', b"PK\x03\x04 cut short", b"\xff\xfe"])
def test_a_file_that_is_missing_or_damaged_is_named_with_the_remedy(tmp_path: Path, content: bytes | None) -> None:
    for read, name in ((read_json, "a.json"), (read_npz, "a.npz")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} must be a whole .*; make it again$"):
            read(tmp_path / name, remedy="make it again")


def test_whole_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_text_atomic(tmp_path / "a.json", '{"a": [1, null]}')
    write_npz_atomic(tmp_path / "a.npz", {"x": np.arange(3)})
    assert read_json(tmp_path / "a.json", remedy="") == {"a": [1, None]}
    assert read_npz(tmp_path / "a.npz", remedy="")["x"].tolist() == [0, 1, 2]

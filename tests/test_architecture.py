"""The layering of ARCHITECTURE.md, read off the source with `ast`: no room imports what it may not know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ergoflow"
ROOMS: dict[str, set[str]] = {
    "numerics": set(),
    "ops": {"numerics"},
    "solvers": {"numerics", "ops"},
    "models": {"numerics", "ops"},
    "metrics": {"numerics"},
    "data": set(),
    "training": {"numerics", "data", "metrics", "models"},
    "report": set(),
    "config": {"solvers", "models", "training"},
    "recipes": {"config", "solvers", "models", "training"},
    "pipeline": {
        "numerics",
        "ops",
        "solvers",
        "models",
        "metrics",
        "data",
        "training",
        "report",
        "config",
        "recipes",
    },
    "cli": {"pipeline", "recipes", "config"},
}
# The package's own face: `ergoflow.__version__` and `ergoflow.load` (imported when called).
FREE = {"__init__", "__main__"}


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    """Rooms of the package that a source text imports, wherever in the file the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.split(".")[0] == "ergoflow"]
    return {p[1] for p in parts if len(p) > 1} - {"__version__", "load"}


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    if room in FREE:
        return
    allowed = ROOMS[room] | {room}
    assert imported_rooms(path.read_text()) <= allowed


def test_a_forbidden_import_is_seen() -> None:
    assert imported_rooms("def f():\n    from ergoflow.models.a3m import A3M\n") == {"models"}
    assert imported_rooms("import ergoflow.solvers.kolmogorov as k") == {"solvers"}
    assert imported_rooms("from ergoflow import pipeline") == {"pipeline"}


def test_triton_is_imported_only_by_kernels() -> None:
    guilty = [p for p in source_files() if "import triton" in p.read_text() and not p.name.endswith("_triton.py")]
    assert guilty == []


def test_every_room_is_in_the_table() -> None:
    assert {room_of(p) for p in source_files()} - FREE <= set(ROOMS)


def test_source_files_begin_with_a_docstring() -> None:
    assert [p for p in source_files() if ast.get_docstring(ast.parse(p.read_text())) is None] == []

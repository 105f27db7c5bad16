"""How names of runs are cut to fit legends, panels and lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

LEGEND_NAME_LENGTH = 30


def shared_prefix(names: Sequence[str]) -> str:
    """What all names begin with up to a dash: "kf128-" of kf128-a3m and kf128-a3m-free.

    Nothing for fewer than two names, and never a whole name.
    """
    if len(set(names)) < 2:
        return ""
    first, last = min(names), max(names)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return first[: first.rfind("-", 0, shared) + 1]


def short_names(names: Sequence[str]) -> list[str]:
    """The names without what all begin with."""
    start = len(shared_prefix(names))
    return [name[start:] for name in names]


def shorten(name: str) -> str:
    """The name, cut in the middle when a legend could not hold it; never read as mathematics."""
    name = " ".join(name.split()).lstrip("_") or "unnamed"
    if len(name) > LEGEND_NAME_LENGTH:
        half = LEGEND_NAME_LENGTH // 2
        name = f"{name[:half]}…{name[-half + 1 :]}"
    return name.replace("$", r"\$")

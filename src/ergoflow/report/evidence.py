"""What a folder of results holds, as the document about the paper sees it: cells, costs, Lorenz-63, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ergoflow.report.names import shared_prefix
from ergoflow.report.runs import RunGroup

#: Between task and row of a recipe's name; kf128-coarse-a3m begins with kf128-, but is a row of another task.
OTHER_TASKS = ("coarse-", "transient-")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything the document may say something about.

    `groups` are the cells by recipe, `long` those of `results/long`, for which there are the `shipped` models of whole
    states. `costs` maps a file of `results/cost` to what `bench models` wrote, `lorenz` is
    `results/lorenz/lorenz63.json` (None: not made yet), `experiments` maps the name of a file of `results/experiments`
    to what it holds, `pictures` maps the slug of a drawn figure to its entry in `results/figures/figures.json`, `stale`
    names those whose cells have changed since. `place` is the results folder as seen from the document.
    """

    groups: Sequence[RunGroup] = ()
    long: Sequence[RunGroup] = ()
    shipped: Sequence[str] = ()
    costs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lorenz: Mapping[str, Any] | None = None
    experiments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pictures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stale: Sequence[str] = ()
    place: str = "results"

    def rows(self, task: str) -> dict[str, RunGroup]:
        """The groups of a task by what follows it in their names."""
        found = {g.name.removeprefix(f"{task}-"): g for g in self.groups if g.name.startswith(f"{task}-")}
        return {row: group for row, group in found.items() if not row.startswith(OTHER_TASKS)}

    def fullest_task(self, tasks: Sequence[str]) -> str | None:
        """The task with the most rows, of several with as many the first; None where none has any."""
        fullest = max(tasks, key=lambda task: len(self.rows(task)))
        return fullest if self.rows(fullest) else None

    def link(self, file: str, text: str = "") -> str:
        """A Markdown link to a file of the results."""
        return f"[{text or f'`results/{file}`'}]({self.place}/{file})"

    def link_cells(self, files: Sequence[str]) -> str:
        """Links to cells, each named by what tells it from the others, after the folder pattern they share."""
        names = [file.partition("/")[0] for file in files]
        start = shared_prefix(names)
        if not start:
            return ", ".join(self.link(file) for file in files)
        links = []
        for file, name in zip(files, names, strict=True):
            seed = file.removeprefix(f"{name}/").removesuffix(".json")
            text = name.removeprefix(start) + (f" {seed}" if names.count(name) > 1 else "")
            links.append(self.link(file, text))
        return f"`results/{start}<row>`: {', '.join(links)}"


def cell_file(name: str, seed: int) -> str:
    """The file of a cell below the results folder."""
    return f"{name}/seed{seed}.json"

"""`ergoflow report --document`: what the results say about the paper, written into marked blocks of Markdown files.

A block stands between two lines, and only what is between them is ever changed:

    <!-- begin NAME: written by ergoflow report --document -->
    <!-- end NAME -->

A document holds any blocks of `BLOCKS` in any order; what is around them is the author's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from ergoflow.data.files import write_text_atomic
from ergoflow.pipeline.cells import list_cells, read_cell
from ergoflow.pipeline.cost import read_costs
from ergoflow.pipeline.long import long_folder, long_models
from ergoflow.pipeline.lorenz import lorenz_path
from ergoflow.pipeline.pictures import read_index, stale_figures
from ergoflow.report.claims import claims_block
from ergoflow.report.costs import cost_block, lorenz_block
from ergoflow.report.evidence import Evidence
from ergoflow.report.experiments import experiment_block
from ergoflow.report.long import long_block
from ergoflow.report.paper_figures import figures_block, headline_picture
from ergoflow.report.reproduction import COMPARISONS, comparison, headline_block, table_block
from ergoflow.report.rivals import rivals_block
from ergoflow.report.runs import group_runs
from ergoflow.report.standing import standing_block

MARK = re.compile(r"<!-- begin ([\w-]+): [^\n]*?-->\n(.*?)<!-- end \1 -->", re.DOTALL)


def _table(name: str) -> Callable[[Evidence], str]:
    return lambda evidence: table_block(comparison(name), evidence)


def _experiment(name: str) -> Callable[[Evidence], str]:
    return lambda evidence: experiment_block(name, evidence)


def _headline(evidence: Evidence) -> str:
    return "\n\n".join(part for part in (headline_block(evidence), headline_picture(evidence)) if part)


# Files of results/experiments whose rows are one recipe with one thing changed at a time.
EXPERIMENTS = ("kf128-coarse-muon", "kf64-changed", "kf64-attention", "tcf32-held")
#: About the paper: what a new document holds.
PAPER_BLOCKS: dict[str, Callable[[Evidence], str]] = {
    "claims": claims_block,
    **{c.name: _table(c.name) for c in COMPARISONS},
    "cost": cost_block,
    "lorenz": lorenz_block,
    "long": long_block,
    "figures": figures_block,
}
BLOCKS = PAPER_BLOCKS | {
    "headline": _headline,
    "standing": standing_block,
    "rivals": rivals_block,
    **{f"experiment-{name}": _experiment(name) for name in EXPERIMENTS},
}


def gather(results: Path, *, place: str = "results") -> Evidence:
    """Everything a results folder holds; `place` is how a document reaches it."""
    if not results.is_dir():
        raise ValueError(f"a folder of results was expected at {results}, but there is none; run `ergoflow reproduce`")
    cells, long = ([read_cell(path) for path in list_cells(folder)] for folder in (results, long_folder(results)))
    lorenz, experiments = lorenz_path(results), results / "experiments"
    evidence = Evidence(
        groups=group_runs(cells) if cells else (),
        long=group_runs(long) if long else (),
        shipped=tuple(long_models()),
        costs=read_costs(results),
        lorenz=json.loads(lorenz.read_text()) if lorenz.exists() else None,
        experiments={
            name: json.loads(path.read_text())
            for name in EXPERIMENTS
            if (path := experiments / f"{name}.json").exists()
        },
        pictures=read_index(results),
        place=place,
    )
    return dataclasses.replace(evidence, stale=stale_figures(evidence, results))


def document(results: Path, path: Path) -> None:
    """Write every marked block of a Markdown file anew; a file that is not there is made with all of them."""
    place = Path(os.path.relpath(results, path.parent)).as_posix()
    write_text_atomic(path, filled(_text(path), gather(results, place=place), where=str(path)))


def filled(text: str, evidence: Evidence, *, where: str) -> str:
    """A document with its blocks written from the evidence; `where` names it in errors."""
    names = [match[1] for match in MARK.finditer(text)]
    unknown = sorted(set(names) - set(BLOCKS))
    if not names or unknown:
        found = f"the unknown {', '.join(unknown)}" if unknown else "no pair of marks"
        raise ValueError(
            f"{where} must hold blocks such as {mark('claims')!r} out of {', '.join(BLOCKS)}, got {found}; correct it"
        )

    def block(match: re.Match[str]) -> str:
        begin = match[0].split("\n", 1)[0]
        return f"{begin}\n\n{BLOCKS[match[1]](evidence)}\n\n<!-- end {match[1]} -->"

    return MARK.sub(block, text)


def mark(name: str) -> str:
    """The two lines of an empty block."""
    return f"<!-- begin {name}: written by ergoflow report --document -->\n<!-- end {name} -->"


def _text(path: Path) -> str:
    if path.exists():
        return path.read_text()
    titles = {c.name: c.title for c in COMPARISONS}
    titles |= {
        "claims": "Claims",
        "cost": "Cost",
        "lorenz": "Lorenz-63",
        "long": "Ten thousand steps",
        "figures": "Figures",
    }
    return "# Reproduction\n" + "".join(f"\n## {title}\n\n{mark(name)}\n" for name, title in titles.items())

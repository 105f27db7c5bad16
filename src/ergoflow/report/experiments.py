"""One recipe with one thing changed at a time, as Markdown: what `tools/ablate.py` wrote into `results/experiments`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ergoflow.report.digits import in_digits
from ergoflow.report.evidence import Evidence

# What a row may hold besides errors; of a list there is one column per field.
STATISTICS = {"mean off by": "mean profile", "variance off by": "variances", "spectrum off by": "spectrum"}
IN_RANGE = "in range after "


def experiment_block(name: str, evidence: Evidence) -> str:
    """A table of an experiment: variants in the order of the file, each the mean over its seeds."""
    found = evidence.experiments.get(name)
    if found is None:
        return f"Not run yet: `results/experiments/{name}.json` is made by `tools/ablate.py`."
    rows = _by_variant(found["rows"])
    leads = list(dict.fromkeys(lead for row in found["rows"] for lead in row["valid"]))
    ranges = list(dict.fromkeys(key for row in found["rows"] for key in row if key.startswith(IN_RANGE)))
    statistics = [key for key in STATISTICS if any(key in row for row in found["rows"])]
    head = ["variant", "parameters", "samples", *(f"τ = {lead}" for lead in leads)]
    head += [f"{key} steps" for key in ranges] + [f"{STATISTICS[key]}, off by" for key in statistics]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for variant, seeds in rows.items():
        cells = [variant, f"{seeds[0]['parameters']:,}", f"{seeds[0]['samples']:,}"]
        cells += [_mean([row["valid"].get(lead) for row in seeds]) for lead in leads]
        cells += [_percent([row.get(key) for row in seeds]) for key in ranges]
        cells += [_means([row.get(key) for row in seeds]) for key in statistics]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _footnote(name, found, rows, evidence)])


def _footnote(name: str, found: Mapping[str, Any], rows: Mapping[str, Sequence[Any]], evidence: Evidence) -> str:
    counts = sorted({len(seeds) for seeds in rows.values()})
    seeds = "one seed" if counts == [1] else f"means over {' or '.join(map(str, counts))} seeds"
    source = f"{found['hardware']['device']}, commit {found['commit']}"
    return f"Relative L2 on the validation split, {seeds}; {source}, {evidence.link(f'experiments/{name}.json')}."


def _by_variant(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    variants: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        variants.setdefault(row["variant"], []).append(row)
    for name, seeds in variants.items():
        if len({(row["settings"], row["samples"]) for row in seeds}) > 1:
            raise ValueError(f"the rows of {name!r} must differ in their seeds alone; give other variants other names")
    return variants


def _known(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float | None]) -> str:
    known = _known(values)
    return in_digits(sum(known) / len(known)) if known else "–"


def _percent(values: Sequence[float | None]) -> str:
    known = _known(values)
    return f"{sum(known) / len(known):.0%}" if known else "–"


def _means(values: Sequence[Sequence[float] | None]) -> str:
    fields = zip(*_known(values), strict=True)
    return ", ".join(in_digits(sum(seeds) / len(seeds), 2) for seeds in fields) or "–"

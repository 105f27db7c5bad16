"""Ten thousand steps of the shipped models as Markdown, and the rule that says whether they last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ergoflow.report.evidence import Evidence, cell_file
from ergoflow.report.rules import Verdict, as_text
from ergoflow.report.runs import RunGroup, finite_or_none, share_in_range, survival_text

COLUMNS = {
    "me_ape": "ME-APE",
    "me_lrw": "ME-LRw",
    "delta_lambda": "Δλ",
    "energy_drift": "energy drift",
    "enstrophy_drift": "enstrophy drift",
    "tail_error": "tails",
    "pdf_w1": "point PDF",
    "lambda1_error": "λ₁",
}
# A statistic lasts within so many times what two halves of the truth differ by, the exponent within so much of its own.
FLOORS = 1.5
WITHIN_FLOOR = ("me_ape", "me_lrw")
EXPONENT_ERROR = 0.1
LIMITED = COLUMNS | {"lambda1_error": "error of λ₁"}
ENDING = "-long"


def long_block(evidence: Evidence) -> str:
    """One row per shipped model: each error with its floor in brackets; or the command that measures it."""
    if not evidence.long:
        return "Not run yet: `ergoflow reproduce long` rolls the shipped models out."
    head = ["model", "steps", "survived", *COLUMNS.values()]
    lines = [
        "Errors of the last frames, as many as the truth has; in brackets truth against truth.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
    ]
    made = set()
    for group in evidence.long:
        scores = group.first.scores
        link = evidence.link(f"long/{cell_file(group.name, group.first.seed)}", _name(group))
        cells = [link, f"{scores['rollout_steps']:,}", survival_text(group.runs)]
        lines.append(f"| {' | '.join([*cells, *(_with_floor(scores['metrics'].get(key)) for key in COLUMNS)])} |")
        made.add(f"{scores['hardware']['device']}, commit {scores['commit']}")
    missing = _missing(evidence)
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, "", f"The shipped weights on {'; '.join(sorted(made))}."])


def lasts(evidence: Evidence) -> Verdict:
    """A rule: shipped models survive in the truth's range, spectra within 1.5 floors, largest exponents within 10 %."""
    if not evidence.long or _missing(evidence):
        return Verdict("not run yet", ", ".join(_missing(evidence)) or "`ergoflow reproduce long`")
    faults, spectra, exponents = [], [], []
    for group in evidence.long:
        scores = group.first.scores
        metrics, share = scores["metrics"], min(scores["survival"]["fraction"], share_in_range(scores))
        floors = {key: metrics[key]["floor"]["value"] for key in WITHIN_FLOOR}
        limits = {key: FLOORS * floor for key, floor in floors.items()} | {"lambda1_error": EXPONENT_ERROR}
        faults += [f"{_name(group)}: {share:.0%} survive in range"] if share < 1 else []
        values = {key: finite_or_none(metrics[key]["rows"]["model"]["value"]) for key in limits}
        for key, value in values.items():
            if value is None or value > limits[key]:
                faults.append(f"{_name(group)}: {LIMITED[key]} {as_text(value)}, at most {limits[key]:.3g} allowed")
            elif key in floors:
                spectra.append(value / floors[key])
            else:
                exponents.append(value)
    if faults:
        return Verdict("not reproduced", "; ".join(faults))
    worst = f"spectra within {max(spectra):.2g} floors, λ₁ within {max(exponents):.1%}"
    return Verdict("reproduced", f"{worst}: {', '.join(_name(group) for group in evidence.long)}")


def _missing(evidence: Evidence) -> list[str]:
    known = {_name(group) for group in evidence.long}
    return [name for name in evidence.shipped if name not in known]


def _name(group: RunGroup) -> str:
    return group.name.removesuffix(ENDING)


def _with_floor(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return "–"
    floor = "" if metric["floor"] is None else f" ({as_text(finite_or_none(metric['floor']['value']))})"
    return f"{as_text(finite_or_none(metric['rows']['model']['value']))}{floor}"

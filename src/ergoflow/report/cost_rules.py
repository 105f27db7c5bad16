"""Rules that decide the paper's claims about cost, and the exponent of Lorenz-63."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ergoflow.report.evidence import Evidence
from ergoflow.report.published import COST_BY_MODEL, COST_IN_REBUTTAL, REBUTTAL_NAME
from ergoflow.report.reproduction import BASELINES
from ergoflow.report.rules import Verdict, decided

#: Work of factorised attention grows like N·ΣS, at most N^1.5 in the number N of points of a plane; full attention N².
FACTORISED_GROWTH = 1.5
#: A learned exponent may be off by this share.
LEARNED_WITHIN = 0.05
LORENZ_FILE = "lorenz/lorenz63.json"
#: Names of our models in the printed cost table.
COST_NAMES = {**BASELINES, "a3m": "Ours"}


def parameters_as_printed(evidence: Evidence) -> Verdict:
    """Whether the five models of the cost table, and the rebuttal's, have the printed numbers of parameters."""
    printed = {name: COST_BY_MODEL.rows[label][0] for name, label in COST_NAMES.items()}
    printed["performer"] = COST_IN_REBUTTAL.rows[REBUTTAL_NAME][0]
    # A model with a code for each point is of one size on one grid: what counts is the row that stands beside a number.
    counted = {row["model"]: row["parameters"] for row in _cost_rows(evidence) if "printed parameters" in row}
    missing = [name for name in printed if name not in counted]
    if missing:
        return Verdict("not run yet", f"no cost of {', '.join(missing)}")
    other = [f"{name} {counted[name]:,} ({size:,})" for name, size in printed.items() if counted[name] != size]
    if other:
        return Verdict("not reproduced", f"ours (printed): {', '.join(other)}")
    return Verdict("reproduced", f"all {len(printed)} to the digit, {_cost_files(evidence)}")


def attention_is_heavier(evidence: Evidence) -> Verdict:
    """Whether both attention models need more multiply-adds on 256² than every neural operator."""
    work = {row["model"]: row["G mult-adds"] for row in _cost_rows(evidence, grid="256×256")}
    missing = [name for name in COST_NAMES if name not in work]
    if missing:
        return Verdict("not run yet", f"no cost of {', '.join(missing)} on 256×256")
    good = min(work["a3m"], work["factformer"]) > max(work["mno"], work["uno"], work["mwt"])
    shown = ", ".join(f"{name} {work[name]:.3g}" for name in COST_NAMES)
    return decided(good, f"G multiply-adds on 256²: {shown}, {_cost_files(evidence)}")


def cost_grows_slowly(evidence: Evidence) -> Verdict:
    """Whether the work of a3m grows with the number of points by a power below 1.5, and its memory by one of at most 1.

    The power between the smallest and the largest grid: ln(cost ratio)/ln(ratio of points).
    """
    rows = {row["grid"]: row for row in _cost_rows(evidence) if row["model"] == "a3m" and row["precision"] == "fp32"}
    sides = sorted((int(grid.split("×")[0]), grid) for grid in rows)
    if len(sides) < 2:
        return Verdict("not run yet", "no cost of a3m on two grids")
    (small, first), (large, last) = sides[0], sides[-1]
    points = 2 * math.log(large / small)
    work, memory = (
        math.log(rows[last][key] / rows[first][key]) / points if rows[first].get(key) else math.nan
        for key in ("G mult-adds", "kept MB")
    )
    good = work < FACTORISED_GROWTH and memory <= 1
    return decided(
        good,
        f"from {first} to {last} the work grows like N^{work:.2f}, the memory like N^{memory:.2f} (full attention: N²)"
        f", {_cost_files(evidence)}",
    )


def lorenz_exponent(evidence: Evidence) -> Verdict:
    """Whether the 95 % interval of the solver's λ₁ holds the quoted value."""
    if evidence.lorenz is None:
        return Verdict("not run yet", "`ergoflow reproduce lorenz`")
    truth, reference = evidence.lorenz["truth"], evidence.lorenz["reference"]
    value, low, high = (truth[key][0] for key in ("exponents", "low", "high"))
    if value is None:
        return Verdict("not reproduced", "an orbit of the solver left the finite numbers")
    reason = f"λ₁ = {value:.4f} [{low:.4f}, {high:.4f}], {evidence.link(LORENZ_FILE)}"
    return decided(low <= reference <= high, reason)


def learned_exponent(evidence: Evidence) -> Verdict:
    """Whether the learned map's λ₁ is within 5 % of the solver's."""
    if evidence.lorenz is None:
        return Verdict("not run yet", "`ergoflow reproduce lorenz`")
    model, truth = evidence.lorenz["model"], evidence.lorenz["truth"]["exponents"][0]
    if model["exponents"][0] is None:
        return Verdict("not reproduced", "an orbit of the learned map left the finite numbers")
    share = model["exponents"][0] / truth - 1
    reason = (
        f"λ₁ = {model['exponents'][0]:.4f}, {share:+.1%}; but its exponents sum to {model['sum']:.2f}, not "
        f"{evidence.lorenz['divergence']:.2f}, {evidence.link(LORENZ_FILE)}"
    )
    return decided(abs(share) <= LEARNED_WITHIN, reason)


def _cost_rows(evidence: Evidence, grid: str | None = None) -> list[Mapping[str, Any]]:
    """Rows of all cost files (counts do not depend on the hardware), of one grid if asked."""
    rows = [row for name in sorted(evidence.costs) for row in evidence.costs[name]["rows"]]
    return [row for row in rows if grid is None or row["grid"] == grid]


def _cost_files(evidence: Evidence) -> str:
    files = ", ".join(evidence.link(f"cost/{name}", f"`{name}`") for name in sorted(evidence.costs))
    return f"from {files} in `results/cost`"

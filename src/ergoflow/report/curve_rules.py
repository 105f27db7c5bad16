"""Rules that decide what the paper says of its pictures: correlations, kinetic energy, spectra, attention, operator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ergoflow.report.evidence import Evidence
from ergoflow.report.reproduction import BASELINES, comparison
from ergoflow.report.rules import Verdict, against_all, as_text, decided, is_lower, needed
from ergoflow.report.runs import RunGroup

#: Share of the rows at each wall that count as the boundary in Figure 3.
BOUNDARY = 1 / 8
#: An operator counts as orthogonal when no singular value is further than this from one.
ORTHOGONAL_WITHIN = 0.05


def decays(table: str, worse: Sequence[str]) -> Callable[[Evidence], Verdict]:
    """A rule: the time correlation of a3m never recovers by more than truth's halves differ; that of `worse` does.

    The recovery is max over t of C(t) − min over s ≤ t of C(s).
    """

    def judge(found: Mapping[str, RunGroup]) -> Verdict:
        curves = {row: group.curve("autocorrelation/model") for row, group in found.items()}
        first = found["a3m"].first
        truth, low, high = (first.curve(f"autocorrelation{end}/truth") for end in ("", "_low", "_high"))
        lost = [row for row, curve in curves.items() if curve is None]
        if truth is None or low is None or high is None or lost:
            return Verdict("not reproduced", f"no correlation of a roll-out that failed: {', '.join(lost) or 'truth'}")
        allowed = max(_recovery(truth), float((high - low).max()))
        rises = {row: _recovery(curve) for row, curve in curves.items() if curve is not None}
        good = rises["a3m"] <= allowed and all(rises[row] > allowed for row in worse if row in rises)
        shown = ", ".join(f"{row} {rise:.2g}" for row, rise in rises.items())
        return decided(good, f"recovery {shown}; truth's own {allowed:.2g}")

    return lambda evidence: against_all(evidence, table, "a3m", worse, judge)


def boundary_energy(table: str) -> Callable[[Evidence], Verdict]:
    """A rule: near the walls the turbulent kinetic energy of a3m is closer to the truth than that of every baseline.

    mean |TKEp − TKEt| / mean TKEt over the outer eighth of the rows at each wall.
    """

    def judge(found: Mapping[str, RunGroup]) -> Verdict:
        errors = {row: _boundary_error(group) for row, group in found.items()}
        good = all(is_lower(errors["a3m"], error) for row, error in errors.items() if row != "a3m")
        shown = ", ".join(f"{row} {as_text(error)}" for row, error in errors.items())
        return decided(good, f"error of the TKE near the walls: {shown}")

    return lambda evidence: against_all(evidence, table, "a3m", tuple(BASELINES), judge)


def spectral_split(table: str, small: Sequence[str], large: Sequence[str]) -> Callable[[Evidence], Verdict]:
    """A rule: each of `large` σ has the better high shells, each of `small` σ the better low ones.

    Shells 1 … N/3 are halved; an error is the mean of |ln(Ep/Et)| over its half.
    """

    def rule(evidence: Evidence) -> Verdict:
        found = needed(evidence, table, (*small, *large))
        if isinstance(found, Verdict):
            return found
        errors = {row: _spectral_errors(group) for row, group in found.items()}
        lost = [row for row, error in errors.items() if error is None]
        if lost:
            return Verdict("not reproduced", f"no spectrum of a roll-out that failed: {', '.join(lost)}")
        lows, highs = ({row: e[half] for row, e in errors.items() if e is not None} for half in (0, 1))
        high = max(highs[row] for row in large) < min(highs[row] for row in small)
        low = max(lows[row] for row in small) < min(lows[row] for row in large)
        labels = comparison(table).rows
        shown = ", ".join(f"{labels[row]}: {lows[row]:.2g}/{highs[row]:.2g}" for row in (*small, *large))
        what = {(True, True): "both hold", (True, False): "high shells only", (False, True): "low shells only"}
        return decided(
            high and low,
            f"{what.get((high, low), 'neither holds')}; error of low/high shells: {shown}",
        )

    return rule


def roughens(table: str, rows: Sequence[str]) -> Callable[[Evidence], Verdict]:
    """A rule: attention maps get rougher with every step of σ.

    Roughness: mean squared difference of neighbours over twice the variance, mean over heads and axes of the first
    block; 0 is smooth, 1 is white noise.
    """

    def rule(evidence: Evidence) -> Verdict:
        found = needed(evidence, table, rows)
        if isinstance(found, Verdict):
            return found
        values = [_roughness(found[row]) for row in rows]
        if any(math.isnan(value) for value in values):
            return Verdict("not run yet", "a cell holds no attention maps")
        good = all(a < b for a, b in itertools.pairwise(values))
        labels = comparison(table).rows
        shown = ", ".join(f"{labels[row]}: {value:.2g}" for row, value in zip(rows, values, strict=True))
        return decided(good, f"roughness: {shown}")

    return rule


def fits(table: str) -> Callable[[Evidence], Verdict]:
    """A rule: σ = 1 underfits (trains and validates worse than σ = 8), σ = 32 overfits (only trains better)."""

    def rule(evidence: Evidence) -> Verdict:
        rows = ("a3m-sigma1", "a3m", "a3m-sigma32")
        found = needed(evidence, table, rows)
        if isinstance(found, Verdict):
            return found
        errors = {row: _last_errors(group.first.log) for row, group in found.items()}
        if any(error is None for error in errors.values()):
            return Verdict("not testable", "a learning curve holds no validation")
        (t1, v1), (t8, v8), (t32, v32) = (error for row in rows if (error := errors[row]) is not None)
        good = t1 > t8 and v1 > v8 and t32 < t8 and v32 > v8
        shown = f"σ = 1: {t1:.3g}/{v1:.3g}, σ = 8: {t8:.3g}/{v8:.3g}, σ = 32: {t32:.3g}/{v32:.3g}"
        return decided(good, f"one-step error in training/validation: {shown}")

    return rule


def orthogonal(table: str) -> Callable[[Evidence], Verdict]:
    """A rule: G trained with the unitary term has singular values within 5 % of one and determinant +1."""

    def rule(evidence: Evidence) -> Verdict:
        found = needed(evidence, table, ("a3m",))
        if isinstance(found, Verdict):
            return found
        run = found["a3m"].first
        values, eigenvalues = run.curve("operator/singular_values"), run.curve("operator/eigenvalues")
        if values is None or eigenvalues is None:
            return Verdict("not run yet", "the cell holds no operator")
        # Complex eigenvalues come in pairs: the sign of the determinant is that of the real negative ones.
        sign = float(np.sign(np.prod(np.sign(eigenvalues[np.abs(eigenvalues.imag) == 0].real))))
        worst = float(np.abs(values - 1).max())
        good = worst <= ORTHOGONAL_WITHIN and sign > 0
        reason = f"singular values {values.min():.3g} to {values.max():.3g}, sign of the determinant {sign:+.0f}"
        return decided(good, reason)

    return rule


def _recovery(curve: np.ndarray) -> float:
    return float((curve - np.minimum.accumulate(curve)).max())


def _boundary_error(group: RunGroup) -> float | None:
    truth, model = group.curve("tke/truth"), group.curve("tke/model")
    if truth is None or model is None:
        return None
    rows = max(1, round(BOUNDARY * len(truth)))
    edge = np.r_[0:rows, len(truth) - rows : len(truth)]
    return float(np.abs(model - truth)[edge].mean() / truth[edge].mean())


def _spectral_errors(group: RunGroup) -> tuple[float, float] | None:
    truth, model = group.curve("spectrum/truth"), group.curve("spectrum/model")
    if truth is None or model is None:
        return None
    # Shells 0 … N/2 are stored; 1 … N/3 are judged, as by ME-APE.
    last = 2 * (len(truth) - 1) // 3
    errors = np.abs(np.log(model[1 : last + 1] / truth[1 : last + 1]))
    return float(errors[: last // 2].mean()), float(errors[last // 2 :].mean())


def _roughness(group: RunGroup) -> float:
    kernels = [group.first.curve(name) for name in group.first.curves if name.startswith("attention/")]
    values = [
        ((np.diff(kernel, axis=-1) ** 2).mean(axis=(-2, -1)) / (2 * kernel.var(axis=(-2, -1)))).mean()
        for kernel in kernels
        if kernel is not None
    ]
    return float(np.mean(values)) if values else math.nan


def _last_errors(log: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """One-step errors of the last record that has both: (training, validation)."""
    for record in reversed(log):
        valid, train = record.get("valid") or {}, record.get("parts") or {}
        if "relative_l2@1" in valid and "relative_l2" in train:
            return float(train["relative_l2"]), float(valid["relative_l2@1"])
    return None

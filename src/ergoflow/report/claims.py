"""Every claim of the paper that has a number or a picture behind it, with the rule that decides it from the results.

    reproduced       the rule holds in our results;
    not reproduced   it does not: the reason says where;
    not testable     no result of ours could decide it, and why;
    not run yet      a cell that the rule needs is missing.

The rules are in `rules` (scores), `curve_rules` (pictures) and `cost_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from ergoflow.report.cost_rules import (
    attention_is_heavier,
    cost_grows_slowly,
    learned_exponent,
    lorenz_exponent,
    parameters_as_printed,
)
from ergoflow.report.curve_rules import boundary_energy, decays, fits, orthogonal, roughens, spectral_split
from ergoflow.report.evidence import Evidence
from ergoflow.report.long import lasts
from ergoflow.report.published import TABLE_1, TABLE_2
from ergoflow.report.reproduction import BASELINES
from ergoflow.report.rules import (
    SHORT_TERM,
    Verdict,
    Word,
    advantage,
    at_floor,
    beats_persistence,
    both,
    lower,
    settled,
    survives,
)

# The source of claims that are not the paper's, and what is said of them.
UNPRINTED = "not in print"
MET = {"reproduced": "met", "not reproduced": "not met"}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim: where it stands in the paper, what it says, and the rule that decides it."""

    source: str
    text: str
    rule: Callable[[Evidence], Verdict]


def claims_block(evidence: Evidence) -> str:
    """The table of claims with a verdict and a reason each, and the count of each verdict above it."""
    verdicts = [claim.rule(evidence) for claim in CLAIMS]
    words = [_word(claim, verdict) for claim, verdict in zip(CLAIMS, verdicts, strict=True)]
    printed = [word for claim, word in zip(CLAIMS, words, strict=True) if claim.source != UNPRINTED]
    added = [word for claim, word in zip(CLAIMS, words, strict=True) if claim.source == UNPRINTED]
    lines = [
        f"{len(printed)} claims of the paper: {_counted(printed)}. {len(added)} more, {UNPRINTED}: {_counted(added)}.",
        "",
        "| where | claim | verdict | because |",
        "| --- | --- | --- | --- |",
    ]
    for claim, word, verdict in zip(CLAIMS, words, verdicts, strict=True):
        lines.append(f"| {claim.source} | {claim.text} | **{word}** | {verdict.reason} |")
    return "\n".join(lines)


def _word(claim: Claim, verdict: Verdict) -> str:
    """The verdict; what is not in print cannot be reproduced, but it can be met."""
    return MET.get(verdict.word, verdict.word) if claim.source == UNPRINTED else verdict.word


def _counted(words: Sequence[str]) -> str:
    order = (*get_args(Word), *MET.values())
    return ", ".join(f"{words.count(word)} {word}" for word in order if word in words)


SIGMAS = ("a3m-sigma1", "a3m-sigma4", "a3m", "a3m-sigma16", "a3m-sigma32")
_PERCENT = {table.source: " / ".join(f"{v:g}" for v in table.rows["Advantage (%)"]) for table in (TABLE_1, TABLE_2)}
CLAIMS = (
    Claim(
        source="Table 1",
        text="on KF256 the transformer is better than every baseline in every column",
        rule=lower("table1", "a3m", tuple(BASELINES)),
    ),
    Claim(
        source="Table 2",
        text="on TCF the transformer is better than every baseline in every column",
        rule=lower("table2", "a3m", tuple(BASELINES)),
    ),
    Claim(
        source="Table 1",
        text=f"its advantage over the best baseline on KF256 is {_PERCENT['Table 1']} %",
        rule=advantage("table1"),
    ),
    Claim(
        source="Table 2",
        text=f"its advantage over the best baseline on TCF is {_PERCENT['Table 2']} %",
        rule=advantage("table2"),
    ),
    Claim(
        source="Table 1",
        text="on the data as printed (no spin-up, 0.02 s) it is better than FactFormer in every column",
        rule=lower("table1-transient", "a3m", ("factformer",)),
    ),
    Claim(
        source="abstract",
        text="it generates long roll-outs stably",
        rule=survives(("table1", "table2")),
    ),
    Claim(
        source="abstract, 3.3",
        text="the unitary operator preserves the long-term statistics",
        rule=at_floor(("table1", "table2")),
    ),
    Claim(
        source="Table 3",
        text="mean, max and min pooling is better than mean pooling",
        rule=lower("table3", "a3m-free", ("a3m-base",)),
    ),
    Claim(
        source="4.3",
        text="A3M pooling captures extreme values: smaller error of the tails than with mean pooling",
        rule=lower("table3", "a3m-free", ("a3m-base",), ("tail_error", "tail_error@99.99")),
    ),
    Claim(
        source="Table 3",
        text="the unitary term is better than a free operator",
        rule=lower("table3", "a3m", ("a3m-free",)),
    ),
    Claim(
        source="3.3",
        text="the unitary term constrains G within SO(d): eigenvalues on the unit circle",
        rule=orthogonal("table3"),
    ),
    Claim(
        source="Table 4",
        text="σ = 8 is better than σ = 1 in every column",
        rule=lower("table4", "a3m", ("a3m-sigma1",)),
    ),
    Claim(
        source="4.3",
        text="σ ≥ 8 captures the high frequencies better, σ ≤ 4 the low ones",
        rule=spectral_split("table4", SIGMAS[:2], SIGMAS[2:]),
    ),
    Claim(
        source="Figure 8",
        text="attention maps are smooth for small σ and noisy for σ = 32",
        rule=roughens("table4", SIGMAS),
    ),
    Claim(
        source="4.3",
        text="a small σ underfits, σ = 32 overfits",
        rule=fits("table4"),
    ),
    Claim(
        source="Figure 2",
        text="on TCF its time correlation decreases monotonically, that of MNO and UNO is periodic",
        rule=decays("table2", ("mno", "uno")),
    ),
    Claim(
        source="Figure 3",
        text="on TCF all others have large errors of the TKE at top and bottom, the transformer has not",
        rule=boundary_energy("table2"),
    ),
    Claim(
        source="Figure 6",
        text="on KF256 it has the smallest error of the TKE",
        rule=lower("table1", "a3m", tuple(BASELINES), ("tke_error",)),
    ),
    Claim(
        source="Figures 4, 7",
        text="its short-term errors are the smallest on both flows",
        rule=lambda evidence: both(
            lower("table1", "a3m", tuple(BASELINES), SHORT_TERM)(evidence),
            lower("table2", "a3m", tuple(BASELINES), SHORT_TERM)(evidence),
        ),
    ),
    Claim(
        source="cost tables", text="the printed numbers of parameters, and the rebuttal's", rule=parameters_as_printed
    ),
    Claim(source="cost tables", text="attention is heavier than the neural operators", rule=attention_is_heavier),
    Claim(
        source="3.2, cost tables",
        text="factorised attention makes the cost grow linearly, not quadratically, with the resolution",
        rule=cost_grows_slowly,
    ),
    Claim(
        source="cost tables",
        text="times and peaks of memory on an A100",
        rule=settled("not testable", "no A100 here; ours are in the table of costs, with their hardware"),
    ),
    Claim(
        source="3.3",
        text="the stochastic trace is cheaper than the Frobenius norm: k d² against d³ + 2d²",
        rule=settled(
            "not testable",
            "the paper prints no k; it holds for k < d + 2: with our 64 samples at d = 256 the trace is 4 times "
            "cheaper, and neither term shows beside a forward pass",
        ),
    ),
    Claim(
        source="Eq. 4",
        text="random Fourier features with b ~ N(0, σ²) give the kernel exp(−πσ²r²)",
        rule=settled("not reproduced", "mathematics: it is exp(−2π²σ²r²) (`tests/models/test_positions.py`)"),
    ),
    Claim(
        source="Eq. 9",
        text="the loss in expectation is zero for orthogonal operators only",
        rule=settled("not reproduced", "mathematics: diag(√1.75, ½) scores zero (`tests/training/test_losses.py`)"),
    ),
    Claim(
        source="contributions",
        text="data sets of 185k and 140k states",
        rule=settled(
            "not testable",
            "the authors' files (doi 10.5281/zenodo.14801580, 10.5522/04/29118212.v1) were not looked at; their "
            "appendix counts (150 + 40 + 30) · 500 = 110,000 states of KF256 and (240 + 24 + 24) · 595 = 171,360 "
            "snapshots of TCF",
        ),
    ),
    Claim(
        source="rebuttal",
        text="the largest exponent of Lorenz-63 is 0.906",
        rule=lorenz_exponent,
    ),
    Claim(
        source="rebuttal",
        text="the transformer learns that exponent as 0.825, MNO as 1.16",
        rule=settled("not testable", "neither was trained on it: how fields become three numbers is not told"),
    ),
    Claim(source=UNPRINTED, text="a small perceptron learns that exponent within 5 %", rule=learned_exponent),
    Claim(
        source=UNPRINTED,
        text="an operator that is exactly orthogonal is better than a free one",
        rule=lower("table3", "a3m-exact", ("a3m-free",)),
    ),
    Claim(
        source=UNPRINTED,
        text="the transformer beats persistence at τ = 5 and 25",
        rule=beats_persistence(("table1", "table2")),
    ),
    Claim(
        source=UNPRINTED,
        text="it is better than a ConvNeXt U-Net in every column of Table 1",
        rule=lower("table1", "a3m", ("convnext",)),
    ),
    Claim(
        source=UNPRINTED,
        text="`ergoformer` is better than that U-Net in every column of Table 1",
        rule=lower("table1", "ergoformer", ("convnext",)),
    ),
    Claim(
        source=UNPRINTED,
        text="shipped Kolmogorov models survive 10,000 steps, ME-APE and ME-LRw within 1.5 floors, λ₁ within 10 %",
        rule=lasts,
    ),
)

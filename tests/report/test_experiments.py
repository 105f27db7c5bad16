"""Tables of experiments: means over seeds, in the order of the file."""

from __future__ import annotations

from typing import Any

import pytest

from ergoflow.report.evidence import Evidence
from ergoflow.report.experiments import experiment_block


def row(variant: str, seed: int, errors: dict[str, float], **more: Any) -> dict[str, Any]:
    return {
        "variant": variant,
        "seed": seed,
        "settings": "",
        "parameters": 1234,
        "samples": 800,
        "valid": errors,
    } | more


def evidence(*rows: dict[str, Any]) -> Evidence:
    found = {"rows": rows, "hardware": {"device": "abacus"}, "commit": "c0ffee"}
    return Evidence(experiments={"beads": found}, place="../results")


def test_a_variant_is_the_mean_over_its_seeds_and_order_is_kept() -> None:
    block = experiment_block(
        "beads",
        evidence(row("round", 0, {"1": 0.01, "5": 0.2}), row("flat", 0, {"1": 0.5}), row("round", 1, {"1": 0.03})),
    )
    table = [line for line in block.splitlines() if line.startswith("| ") and "---" not in line]
    assert table[0] == "| variant | parameters | samples | τ = 1 | τ = 5 |"
    assert table[1:] == ["| round | 1,234 | 800 | 0.02 | 0.2 |", "| flat | 1,234 | 800 | 0.5 | – |"]
    assert "means over 1 or 2 seeds; abacus, commit c0ffee" in block
    assert "(../results/experiments/beads.json)" in block


def test_long_roll_outs_have_columns_where_any_variant_was_followed() -> None:
    followed = {"in range after 500": 0.75, "mean off by": [0.1, 0.2], "variance off by": [1.0, 3.0]}
    again = {"in range after 500": 0.25, "mean off by": [0.3, 0.2], "variance off by": [2.0, 4.0]}
    block = experiment_block(
        "beads",
        evidence(row("a", 0, {"1": 1.0}, **followed), row("a", 1, {"1": 1.0}, **again), row("b", 0, {"1": 2.0})),
    )
    table = [line for line in block.splitlines() if line.startswith("| ") and "---" not in line]
    assert table[0].endswith("| in range after 500 steps | mean profile, off by | variances, off by |")
    assert table[1].endswith("| 1 | 50% | 0.2, 0.2 | 1.5, 3.5 |")
    assert table[2].endswith("| 2 | – | – | – |")


def test_rows_of_one_name_with_other_settings_are_not_averaged() -> None:
    with pytest.raises(ValueError, match="differ in their seeds alone"):
        experiment_block("beads", evidence(row("a", 0, {"1": 1.0}), row("a", 1, {"1": 1.0}, settings="model.x=1")))


def test_an_experiment_that_was_not_made_says_so() -> None:
    assert "Not run yet" in experiment_block("marbles", evidence())

"""The bench of the operators: complete rows, and a guard that the fast twins are no slower than their references."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from ergoflow.ops.bench import Sizes, operator_cases, operator_rows

# Channel counts of the demo's model.
DEMO = Sizes(batch=4, grid=(64, 64), dim=32, heads=3, head_dim=8, latent=32, widths=(16, 16), taps=(9, 5), groups=2)
TINY = Sizes(batch=1, grid=(8, 9), dim=4, heads=2, head_dim=4, latent=4, widths=(2, 2), taps=(5, 3), groups=2)
TURNS = 12
OPERATORS = ["pool", "mix", "add and layer norm", "mix, add and layer norm", "kernel", "group norm"]


def test_every_operator_is_timed_with_both_implementations():
    rows = operator_rows(TINY, device=torch.device("cpu"), dtype=torch.float32)
    assert [row["operator"] for row in rows[::2]] == [*OPERATORS, "convolution 5×5", "convolution 3×3"]
    assert [row["impl"] for row in rows] == ["reference", "auto"] * 8
    for row in rows:
        assert row["forward ms"] > 0
        assert row["least MB"] > 0


def test_operations_are_those_of_the_formulas():
    """Projections of max and min along two axes; values, one kernel per axis, merge; a tap per weight."""
    cases = {
        case.name: case.multiply_adds for case in operator_cases(TINY, device=torch.device("cpu"), dtype=torch.float32)
    }
    assert cases["pool"] == 4 * 72 * 16
    assert cases["mix"] == 72 * 8 * (2 * 4 + 8 + 9)
    assert cases["mix, add and layer norm"] == 72 * 16
    # Queries and keys, then cosines and sines of both, each of 2 heads of 8 channels on 8 points.
    assert cases["kernel"] == 2 * 8 * 16 * 4 + 2 * 8 * 8 * 16
    assert cases["convolution 5×5"] == 72 * 2 * 2 * 25


@pytest.mark.slow
def test_fast_operators_beat_their_references_on_a_cpu():
    """Ratios within one run, never times: pooling, the value path and the large convolution of the demo's model.

    The least of several turns counts, reference and fast one after the other: what else the machine does only adds.
    """
    turns = [operator_rows(DEMO, device=torch.device("cpu"), dtype=torch.float32) for _ in range(TURNS)]
    least = {
        (rows[0]["operator"], rows[0]["impl"]): min(row["both ms"] for row in rows) for rows in zip(*turns, strict=True)
    }
    ratios = {name: least[name, "reference"] / least[name, "auto"] for name, _ in least}
    assert ratios["pool"] > 1.5
    assert ratios["convolution 9×9"] > 1.5
    assert ratios["mix"] > 0.8


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")
@pytest.mark.slow
def test_tuning_times_every_kernel_under_every_setting():
    sizes = "batch=1, grid=(8, 9), dim=4, heads=2, head_dim=4, latent=4, widths=(2,), taps=(5,), groups=2"
    code = (
        "import json, torch\nfrom ergoflow.ops import bench\nbench.WARM_UP, bench.REPEATS = 0, 1\n"
        f"rows = bench.tuning_rows(bench.Sizes({sizes}), device=torch.device('cpu'), dtype=torch.float32)\n"
        "print(json.dumps(rows))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    assert len(kernels) == 12
    for kernel in kernels:
        own = [row for row in rows if row["kernel"] == kernel]
        assert [row["in use"] for row in own] == [True] + [False] * (len(own) - 1)
        assert all(row["ms"] > 0 for row in own)

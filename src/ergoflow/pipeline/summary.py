"""Five lines that say how a scored run did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ergoflow.report.runs import has_strayed, share_in_range
from ergoflow.report.tables import GOOD, STRAYED

LINES = {"spectrum, energy": ("me_ape", "me_lrw", "tke_error"), "mixing, density": ("delta_lambda", "pca_kl", "pdf_w1")}


def read_scores(folder: Path) -> dict[str, Any]:
    """The scores of a run folder."""
    scores: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    return scores


def print_summary(folder: Path, console: Console) -> None:
    """Short-term error, survival and long-term statistics beside persistence and the floor."""
    for line in _lines(read_scores(folder)):
        console.print(line, highlight=False, soft_wrap=True)


def _lines(scores: dict[str, Any]) -> list[str]:
    metrics, survival = scores["metrics"], scores["survival"]
    errors = [
        f"τ={key.removeprefix('relative_l2@')}: {_number(metric['rows']['model'])} "
        f"(persistence {_number(metric['rows']['persistence'])})"
        for key, metric in metrics.items()
        if key.startswith("relative_l2@") and metric["headline"]
    ]
    inside, strayed = share_in_range(scores), has_strayed([scores])
    statistics = [
        f"  {title:<17}" + ", ".join(_beside_floor(metrics[key], strayed=strayed) for key in keys if key in metrics)
        for title, keys in LINES.items()
    ]
    left = f", {inside:.0%} with energy and enstrophy in range" if inside < survival["fraction"] else ""
    return [
        f"[bold]{scores['name']}[/bold], seed {scores['seed']}: {scores['parameters']:,} parameters, "
        f"{scores['num_trajectories']} test trajectories",
        f"  {'relative L2':<17}" + ", ".join(errors),
        f"  {'survival':<17}{survival['fraction']:.0%} of the roll-outs finish {survival['steps']} steps{left}",
        *statistics,
        *([f"  {'note':<17}{scores['remark']}"] if scores.get("remark") else []),
    ]


def _beside_floor(metric: dict[str, Any], *, strayed: bool) -> str:
    """A statistic with its floor and verdict: `strayed` in place of a good one where most roll-outs left the flow."""
    model, floor = metric["rows"]["model"], metric["floor"]
    verdict = STRAYED if strayed and model["verdict"] in GOOD else model["verdict"]
    shown = "undefined" if floor["value"] is None else _number(floor)
    return f"{metric['label']} {_number(model)} (floor {shown}: {verdict})"


def _number(cell: dict[str, Any]) -> str:
    return "failed" if cell["value"] is None else f"{cell['value']:.3g}"

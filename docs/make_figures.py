"""Draw the figures of the documentation from `results/`: `python docs/make_figures.py`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ergoflow.metrics import dns_profiles
from ergoflow.report.figures import Curve, draw_walls

ROOT = Path(__file__).parent.parent
PANELS = {"u′⁺": "u_rms", "v′⁺": "v_rms", "w′⁺": "w_rms", "−uv⁺": "uv"}


def channel() -> None:
    """docs/channel.png: the lattice Boltzmann channel against direct numerical simulation."""
    data = json.loads((ROOT / "results" / "h200" / "channel-dns.json").read_text())
    sources = {"dns": {name: np.array(values) for name, values in dns_profiles().items()}}
    for run in data["runs"]:
        config = run["config"]
        name = f"{config['box'][1]} cells, {config['storage']}"
        sources[name] = {key: np.array(value) for key, value in run["profiles"].items() if isinstance(value, list)}
    mean = {name: Curve(p["y_plus"], p["u_plus"]) for name, p in sources.items()}
    rms = {title: {name: Curve(p["y_plus"], p[key]) for name, p in sources.items()} for title, key in PANELS.items()}
    draw_walls(mean, rms).savefig(ROOT / "docs" / "channel.png", dpi=120, facecolor="white")


if __name__ == "__main__":
    channel()

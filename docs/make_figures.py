"""Draw the figures of the documentation: `python docs/make_figures.py ROOT`.

`docs/channel.png` is made of `results/`, `docs/demo.png` of the two runs that `ergoflow demo --root ROOT` left.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from ergoflow.metrics import dns_profiles
from ergoflow.report.board import draw_field, draw_scale, label_row, new_board
from ergoflow.report.canvas import line_styles
from ergoflow.report.digits import in_digits
from ergoflow.report.figures import Curve, draw_walls
from ergoflow.report.maps import scale_of, upright
from ergoflow.report.saving import to_png

ROOT = Path(__file__).parent.parent
PANELS = {"u′⁺": "u_rms", "v′⁺": "v_rms", "w′⁺": "w_rms", "−uv⁺": "uv"}
# Runs of the demo, and what their rows are called.
DEMO = {"kf64-a3m": "a3m, one minute", "kf64-ergoformer-pretrained": "ergoformer, shipped"}
FRAME_SECONDS = 0.2
DPI = 120


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
    figure = draw_walls(mean, rms, styles=line_styles([name for name in sources if name != "dns"]))
    (ROOT / "docs" / "channel.png").write_bytes(to_png(figure, dpi=DPI))


def demo(root: Path) -> None:
    """docs/demo.png: vorticity of the truth and of both models of the demo over lead time."""
    runs = {label: np.load(root / "runs" / name / "seed0" / "curves.npz") for name, label in DEMO.items()}
    first = next(iter(runs.values()))
    steps, rows = first["snapshots/steps"], {"truth": first["snapshots/truth"]}
    rows |= {label: curves["snapshots/model"] for label, curves in runs.items()}
    colors, low, high = scale_of(rows["truth"])
    shape, last = rows["truth"].shape[-2:], len(steps) - 1
    board = new_board(len(rows), len(steps), width=1.65, shape=shape, labelled=True, title_lines=2, scales=(last,))
    for row, (label, fields) in enumerate(rows.items()):
        for column, step in enumerate(steps):
            title = "" if row else f"step {int(step)}\n{in_digits(step * FRAME_SECONDS)} s"
            image = draw_field(board, row, column, upright(fields[column, 0]), colors, low, high, title=title)
        label_row(board, row, label)
    draw_scale(board, image, 0, rows=(0, len(rows) - 1), label="vorticity (1/s)", extend="both")
    (ROOT / "docs" / "demo.png").write_bytes(to_png(board.figure, dpi=DPI))


if __name__ == "__main__":
    channel()
    demo(Path(sys.argv[1]))

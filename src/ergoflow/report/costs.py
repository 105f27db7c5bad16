"""What models cost, ours beside the paper's two cost tables, and Lorenz-63, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ergoflow.report.digits import in_digits
from ergoflow.report.evidence import Evidence
from ergoflow.report.published import COST_BY_GRID, COST_BY_MODEL

#: Columns of `bench models` that are shown, with what heads them.
COLUMNS = {
    "parameters": "parameters",
    "G mult-adds": "G multiply-adds",
    "with FFT": "with FFT",
    "kept MB": "kept MB",
    "forward ms": "forward ms",
    "forward MB": "forward MB",
    "training ms": "training ms",
    "training MB": "training MB",
}
PRINTED_GRID, REBUTTAL_GRID = "256×256", "192×192"
NOTE = (
    "Printed numbers in brackets (A100, one channel, float32, batch 1; those of `performer` are the rebuttal's, for "
    "three on 192²). G multiply-adds count as the paper does; *with FFT* counts complex products as four and adds the "
    "transforms. *Kept MB* is what lives between a forward and a backward pass, the same on every device; *forward* "
    "and *training MB* are the peaks of a GPU's allocator. Milliseconds per sample."
)


def cost_block(evidence: Evidence) -> str:
    """One table per kind of hardware: every model on 256², and a3m on every grid; or the command that measures it."""
    if not evidence.costs:
        return "Not run yet: `ergoflow reproduce cost` measures this machine."
    parts = [NOTE]
    for file, data in sorted(evidence.costs.items()):
        hardware = data["hardware"]
        parts.append(
            f"**{hardware['device']}**, {hardware['cores']} cores, torch {data['versions']['torch']}, commit "
            f"{data['commit']}, {evidence.link(f'cost/{file}')}"
        )
        for printed, key, rows in _split(data["rows"]):
            if rows:
                parts.append(f"{printed}:\n\n" + "\n".join(_table(rows, key)))
        # What follows the semicolon advises the user of the bench.
        refused = [note.split(";")[0] for note in data["notes"] if " has no " in note]
        if refused:
            parts.append("Left out: " + "; ".join(refused) + ".")
        if not data.get("complete", True):
            parts.append("Cut short: `ergoflow reproduce cost` on such a machine measures the models that are missing.")
    return "\n\n".join(parts)


def lorenz_block(evidence: Evidence) -> str:
    """Exponents of Lorenz-63, of the solver and of the learned map, with 95 % intervals."""
    data = evidence.lorenz
    if data is None:
        return "Not run yet: `ergoflow reproduce lorenz` takes a minute on a CPU."
    settings, model, flow = data["settings"], data["model"], data["flow"]
    lines = [
        f"Quoted: λ₁ = {data['reference']}. The exponents of a flow sum to its divergence, −(σ + 1 + β) = "
        f"{data['divergence']:.4f}, and one of them is zero. {settings['groups']} estimates of {settings['states']} "
        f"orbits over {settings['span']:g} time units; intervals are Student's over the estimates and hold no error of "
        f"the time step ({flow['dt']:g}, classic Runge–Kutta). The learned map is a perceptron of "
        f"{model['parameters']:,} parameters with steps of {data['step_seconds']:g}, trained for "
        f"{model['training_seconds']:.0f} s on {data['hardware']['device']}; its one-step error is "
        f"{model['relative_l2@1']:.1e} (persistence {model['persistence@1']:.2f}). "
        f"{evidence.link('lorenz/lorenz63.json')}",
        "",
        "| | λ₁ | λ₂ | λ₃ | sum |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, label in (("truth", "solver"), ("model", "learned map")):
        row = data[name]
        cells = [_exponent(row, k) for k in range(len(row["exponents"]))]
        total = "failed" if row["sum"] is None else f"{row['sum']:.4f}"
        lines.append(f"| {label} | {' | '.join(cells)} | {total} |")
    return "\n".join(lines)


def _exponent(row: Mapping[str, Any], index: int) -> str:
    value, low, high = (row[key][index] for key in ("exponents", "low", "high"))
    return "failed" if value is None else f"{value:.4f} [{low:.4f}, {high:.4f}]"


def _split(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[Mapping[str, Any]]]]:
    """The rows of the table by model (on the printed grid) and of the table by grid (of a3m), in float32 and bf16."""
    largest = [row for row in rows if row["grid"] == PRINTED_GRID]
    largest += [{**row, "model": f"{row['model']}, {REBUTTAL_GRID}"} for row in rows if row["grid"] == REBUTTAL_GRID]
    ours = [row for row in rows if row["model"] == "a3m"]
    return [(f"{COST_BY_MODEL.source}, 256²", "model", largest), (f"{COST_BY_GRID.source}, a3m", "grid", ours)]


def _table(rows: Sequence[Mapping[str, Any]], first: str) -> list[str]:
    precise = len({row["precision"] for row in rows}) > 1
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    head = [first, *(["precision"] if precise else []), *(COLUMNS[key] for key in shown)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [_cell(row.get(key), row.get(f"printed {key}")) for key in shown]
        lines.append(f"| {' | '.join([row[first], *([row['precision']] if precise else []), *cells])} |")
    return lines


def _cell(value: Any, printed: Any) -> str:
    text = "–" if value is None else value if isinstance(value, str) else _number(value)
    return text if printed is None else f"{text} ({_number(printed)})"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else in_digits(value)

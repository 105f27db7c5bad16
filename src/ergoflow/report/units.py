"""What the first field of a run is called, and the units of field, energy, enstrophy and time where they are known."""

from __future__ import annotations

from dataclasses import dataclass

from ergoflow.report.digits import in_digits
from ergoflow.report.runs import RunView, task_of


@dataclass(frozen=True, kw_only=True)
class Units:
    """The first field with its unit, the units of ½⟨|u|²⟩ and ½⟨ω²⟩, "" for unknown ones, and that of time."""

    field: str
    energy: str = ""
    enstrophy: str = ""
    time: str = "s"


#: By the kind of data.
KNOWN = {
    "kolmogorov": Units(field="vorticity (1/s)", energy="length²/s²", enstrophy="1/s²"),
    "channel": Units(field="u⁺", energy="u_τ²", enstrophy="u_τ²/δ²", time="δ/u_τ"),
}


def units_of(run: RunView) -> Units:
    """The units of a run's data; of data of one's own only the name of the field is known, if the scores tell it."""
    kind = run.recipe.get("dataset", {}).get("kind")
    return KNOWN.get(kind) or Units(field=run.scores.get("fields", ("field",))[0])


def time_unit(kind: str | None) -> str:
    """The unit of time of a kind of data."""
    return KNOWN[kind].time if kind in KNOWN else "s"


def step_of(run: RunView, *, digits: int = 3) -> str:
    """How long a step is, with its unit."""
    return f"{in_digits(task_of(run)[1], digits)} {units_of(run).time}"


def with_unit(name: str, unit: str) -> str:
    """A label with its unit in brackets, if there is one."""
    return f"{name} ({unit})" if unit else name

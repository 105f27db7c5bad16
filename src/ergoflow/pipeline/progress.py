"""One progress bar for every verb: what, how far, how fast, how long still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

# Columns of the bar itself, in a terminal of so many columns or more, and in a narrower one.
WIDE, BAR_WIDE, BAR_NARROW = 120, 28, 8


class Advance(Protocol):
    """Moves the bar by `amount` and may replace the note at its end; `before` was done in an earlier call."""

    def __call__(self, amount: float = 1, *, note: str = "", before: int = 0) -> None:
        """Move the bar."""


class _Rate(ProgressColumn):
    """Work done per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = task.fields["unit"]
        return Text("" if speed is None else f"{speed:,.{0 if speed >= 100 else 1}f} {unit}/s", style="cyan")


@contextmanager
def bar(console: Console, title: str, total: float, unit: str) -> Iterator[Advance]:
    """A progress bar of `total` units; off a terminal, one line at the end says what was done and how fast."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=BAR_WIDE if console.width >= WIDE else BAR_NARROW),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        # It gets the room that the others leave, and is cut where that ends.
        TextColumn("{task.fields[note]}", style="dim", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, expand=True) as progress:
        task = progress.add_task(title, total=total, unit=unit, note="")
        earlier = 0

        def advance(amount: float = 1, *, note: str = "", before: int = 0) -> None:
            nonlocal earlier
            if before:
                earlier = before
                progress.reset(task, completed=before)
            progress.update(task, advance=amount, note=note or progress.tasks[0].fields["note"])

        yield advance
        row = progress.tasks[0]
    if not console.is_terminal:
        elapsed = row.elapsed or 0.0
        done = row.completed - earlier
        rate = done / elapsed if elapsed else 0.0
        console.print(
            f"{title}: {done:,.0f} {unit} in {elapsed:.1f} s ({rate:,.1f} {unit}/s)",
            highlight=False,
            soft_wrap=True,
        )

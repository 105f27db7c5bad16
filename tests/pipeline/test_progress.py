"""A progress bar says how far, how fast and how long still, however narrow the terminal and long the note."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ergoflow.pipeline import progress


@pytest.mark.parametrize("width", [80, 180])
def test_count_rate_and_time_left_are_whole_and_the_note_is_cut_in_their_place(width: int) -> None:
    clock = iter(range(10_000))
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system=None, get_time=lambda: next(clock))
    note = "loss 0.0318, valid relative_l2@1 0.0257, valid relative_l2@5 0.0931"
    with progress.bar(console, "train kf128-coarse-ergoformer", 16_000, "samples") as advance:
        for _ in range(3):
            advance(1600, note=note)
    last = [line for line in output.getvalue().replace("\r", "\n").splitlines() if "4800/16000" in line][-1]
    assert "samples/s" in last
    assert ":" in last.split("samples/s")[1]
    assert (note in last) == (width == 180)


def test_a_resumed_count_goes_on_and_its_rate_is_that_of_this_call() -> None:
    """1600 of 16,000 units were done before; 1600 more take 100 s by the clock."""
    now = [0.0]
    output = io.StringIO()
    console = Console(file=output, width=180, force_terminal=True, color_system=None, get_time=lambda: now[0])
    with progress.bar(console, "train", 16_000, "samples") as advance:
        now[0] = 50.0  # what is read before the first step is not its time
        advance(0, before=1600)
        for _ in range(10):
            now[0] += 10.0
            advance(160)
    last = [line for line in output.getvalue().replace("\r", "\n").splitlines() if "3200/16000" in line][-1]
    assert "16.0 samples/s" in last


def test_off_a_terminal_one_line_says_what_was_done() -> None:
    output = io.StringIO()
    with progress.bar(Console(file=output, width=40), "read", 10, "frames") as advance:
        advance(10)
    assert output.getvalue().startswith("read: 10 frames in ")
    assert output.getvalue().count("\n") == 1

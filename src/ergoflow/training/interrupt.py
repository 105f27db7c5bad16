"""Stop requests: SIGTERM and Ctrl-C become a flag that the training loop reads between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """The name of the signal that asked to stop; empty while none has."""

    def __init__(self) -> None:
        self.reason = ""


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """A flag that SIGTERM or SIGINT raises inside the block; after it the previous handlers are back.

    They are back after the first signal already, so an impatient second Ctrl-C ends the program at once.
    Outside the main thread Python allows no handlers, and the flag is never raised.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        request.reason = signal.Signals(number).name
        _set_handlers(previous)

    for number in STOP_SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        _set_handlers(previous)


def _set_handlers(handlers: Mapping[signal.Signals, object]) -> None:
    for number, handler in handlers.items():
        # None: the handler was not installed from Python and cannot be put back.
        if handler is not None:
            signal.signal(number, handler)  # type: ignore[arg-type]

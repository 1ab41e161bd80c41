"""A signal that requests the end of a run: all ranks first finish the step and save it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gopt.errors import StoppedError
from gopt.system.signals import INTERRUPT, STOPS, handle_signals

_USUAL = (signal.SIG_DFL, signal.default_int_handler)


class StopSignal:
    """The received signal, or 0; each rank reads the signal once per step."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        return self.number


@contextmanager
def listen_for_stop(wanted: bool, tell: Callable[[str], None]) -> Iterator[StopSignal]:
    """Listen for SIGINT, SIGTERM and SIGHUP while the block runs, if ``wanted``; ignored signals, as under nohup, stay
    so.

    ``tell`` gets a line at the first signal, inside the signal handler; the second signal raises StoppedError."""
    stop = StopSignal()

    def record(number: int, _: FrameType | None) -> None:
        if stop.number:
            raise StoppedError(number)
        stop.number = number
        tell(f"{signal.Signals(number).name}: the run ends when this step is done and kept; again ends it at once")

    with handle_signals(record, INTERRUPT + STOPS if wanted else (), lambda old: old in _USUAL):
        yield stop

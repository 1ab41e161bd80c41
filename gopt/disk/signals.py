"""Interrupts: kept out of steps that belong together, and turned into a refusal that cleans up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from gopt.errors import StoppedError

INTERRUPT = (signal.SIGINT,)
STOPS = (signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handle_signals(
    handler: Handler, numbers: Sequence[signal.Signals], wanted: Callable[[object], bool]
) -> Iterator[None]:
    """Another handler for those of some signals whose present one is ``wanted``; only the main thread can set one."""
    mine = threading.current_thread() is threading.main_thread()
    before = {number: old for number in numbers if mine and wanted(old := signal.getsignal(number))}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def defer_signals() -> Iterator[None]:
    """What would raise in the midst of the block, such as Ctrl-C, raises at its end."""
    came: list[int] = []
    try:
        with handle_signals(lambda number, _: came.append(number), INTERRUPT + STOPS, callable):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Signals that would end the process without a word raise StoppedError; ignored ones, as under nohup, stay so."""

    def stop(number: int, _: FrameType | None) -> None:
        raise StoppedError(number)

    with handle_signals(stop, STOPS, lambda old: old == signal.SIG_DFL):
        yield

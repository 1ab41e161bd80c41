"""Interrupts: deferred while steps that belong together run, and turned into errors so that drafts are removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from gopt.errors import StoppedError

INTERRUPT = (signal.SIGINT,)
STOPS = (signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handle_signals(
    handler: Handler, numbers: Sequence[signal.Signals], wanted: Callable[[object], bool]
) -> Iterator[None]:
    """Replace the handlers of those signals whose current handler is ``wanted``; only the main thread can set one."""
    mine = threading.current_thread() is threading.main_thread()
    before = {number: old for number in numbers if mine and wanted(old := signal.getsignal(number))}
    with ExitStack() as restored:  # each, also where a signal comes meanwhile and its handler raises
        for number, old in before.items():
            restored.callback(signal.signal, number, old)
            signal.signal(number, handler)
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signals that would raise inside the block, such as Ctrl-C, to its end."""
    came: list[int] = []
    try:
        with handle_signals(lambda number, _: came.append(number), INTERRUPT + STOPS, callable):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Signals that would end the process raise StoppedError; ignored ones, as under nohup, stay ignored.

    One that came where Python drops what is raised, as in a destructor, is raised at the end of the block.
    """
    came: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise StoppedError(number)

    with handle_signals(stop, STOPS, lambda old: old == signal.SIG_DFL):
        yield
    if came:
        raise StoppedError(came[0])

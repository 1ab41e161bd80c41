"""Interrupts: deferred during steps that belong together, and turned into errors so that drafts are removed."""

from __future__ import annotations

import os
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
    """Replace the handlers of those signals whose current handler is ``wanted``; only the main thread can set a
    handler."""
    mine = threading.current_thread() is threading.main_thread()
    before = {number: old for number in numbers if mine and wanted(old := signal.getsignal(number))}
    with ExitStack() as restored:  # each, also where a signal comes meanwhile and its handler raises
        for number, old in before.items():
            restored.callback(signal.signal, number, old)
            signal.signal(number, handler)
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signals that would raise inside the block, such as Ctrl-C, to the end of the block."""
    came: list[int] = []
    try:
        with handle_signals(lambda number, _: came.append(number), INTERRUPT + STOPS, callable):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def raise_on_signals() -> Iterator[Callable[[], None]]:
    """Signals that would end the process raise StoppedError; ignored signals, as under nohup, stay ignored.

    A signal inside a destructor, where Python drops errors, is raised at the end of the block, and by the yielded
    function: long work calls this function between its parts."""
    came: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise StoppedError(number)

    def check() -> None:
        if came:
            raise StoppedError(came[0])

    with handle_signals(stop, STOPS, lambda old: old == signal.SIG_DFL):
        yield check
    check()


@contextmanager
def wakened_by_signals() -> Iterator[int]:
    """A descriptor that is readable as soon as any signal has come, to this thread or another.

    A wait that begins just behind the last look for signals, or in a thread that the system did not choose, is not
    interrupted by signals: a wait for something together with this descriptor misses no signal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    mine = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if mine else -1
    try:
        yield reader
    finally:
        if mine:
            signal.set_wakeup_fd(before)
        os.close(writer)
        os.close(reader)

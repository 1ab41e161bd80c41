"""Progress: a bar on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import perf_counter

from rich.console import Console

from gopt.system.progress import ProgressCallback, no_progress

from .terminal import print_note
from .verbosity import Verbosity, verbosity

EVERY = 10.0
"""Seconds of a phase before its first plain line, and between two."""
TICK = 1.0
"""Seconds between two looks at the clock."""


@contextmanager
def progress() -> Iterator[ProgressCallback]:
    """Show phases with counts and the time left on stderr: as a bar on a terminal, elsewhere as a plain line for what
    takes long.

    With ``--verbose`` a line for each finished phase, with its seconds; nothing with ``--quiet``.
    """
    errors = Console(file=sys.stderr)
    if verbosity() is Verbosity.VERBOSE:
        with timed_phases() as advance:
            yield advance
    elif verbosity() is Verbosity.QUIET:
        yield no_progress
    elif not errors.is_terminal:
        with _plain() as advance:
            yield advance
    else:
        from .render_bar import bar

        with bar(errors) as advance:
            yield advance


@contextmanager
def _plain() -> Iterator[ProgressCallback]:
    """Plain lines from a thread: a phase without a count makes no calls before its end."""
    lines, ended = PlainLines(), Event()

    def watch() -> None:
        with suppress(OSError):  # stderr takes nothing
            while not ended.wait(TICK):
                lines.say()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lines.advance
    finally:
        ended.set()
        thread.join(TICK)


@contextmanager
def timed_phases() -> Iterator[ProgressCallback]:
    """A note with the seconds of each phase as it ends."""
    phases: list[tuple[str, float]] = []

    def end() -> None:
        if phases:
            text, start = phases.pop()
            print_note(f"{text}: {perf_counter() - start:.3f} s")

    def advance(phase: str, done: int = 0, total: int = 0, /) -> None:
        if not phases or phases[0][0] != phase:
            end()
            phases.append((phase, perf_counter()))

    try:
        yield advance
    finally:
        end()


class PlainLines:
    """A note for each long phase: where it is and the time left, if counted and if there is news."""

    def __init__(self) -> None:
        self._now = self._shown = ("", 0, 0)
        self._begin = self._said = 0.0

    def advance(self, phase: str, done: int = 0, total: int = 0, /) -> None:
        """Take in where the phase is."""
        if phase != self._now[0]:
            self._begin = self._said = perf_counter()
        self._now = phase, done, total

    def say(self) -> None:
        """Say where the phase is, when it is time to."""
        seconds, (phase, done, total) = perf_counter(), self._now
        if seconds - self._said < EVERY or self._now == self._shown:
            return
        self._said, self._shown = seconds, (phase, done, total)
        left = f": {done} of {total}, {time_left(seconds - self._begin, done, total)}" if 0 < done < total else ""
        print_note(f"{phase}{left}")


def time_left(seconds: float, done: int, total: int) -> str:
    """The estimated time for the rest of the work, as ``about 40 s left``: ``done`` of ``total`` took ``seconds``."""
    remaining = seconds / done * (total - done)
    return f"about {remaining / 60:.0f} min left" if remaining >= 120 else f"about {max(remaining, 1):.0f} s left"

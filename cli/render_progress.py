"""Progress of countable work: a bar on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console

from gopt.system.progress import ProgressCallback

from .terminal import print_note
from .verbosity import Verbosity, verbosity

FIRST, EVERY = 2.0, 10.0
"""Seconds of a phase before its first plain line, and between two."""


@contextmanager
def progress() -> Iterator[ProgressCallback]:
    """Show phases with counts and the time left on stderr, if a terminal.

    With ``--verbose`` a line for each finished phase, with its seconds; nothing with ``--quiet``.
    """
    with _shown(lambda phase, done=0, total=0, /: None) as advance:
        yield advance


@contextmanager
def counted_progress() -> Iterator[ProgressCallback]:
    """As ``progress``, and a plain line now and then where stderr is not a terminal: for what takes minutes."""
    with _shown(PlainLines().advance) as advance:
        yield advance


@contextmanager
def _shown(elsewhere: ProgressCallback) -> Iterator[ProgressCallback]:
    """A bar; ``elsewhere``: what is called where stderr is not a terminal."""
    errors = Console(file=sys.stderr)
    if verbosity() is Verbosity.VERBOSE:
        with timed_phases() as advance:
            yield advance
    elif verbosity() is Verbosity.QUIET:
        yield lambda phase, done=0, total=0, /: None
    elif not errors.is_terminal:
        yield elsewhere
    else:
        from .render_bar import bar

        with bar(errors) as advance:
            yield advance


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
    """A note for each long phase, with count and the time left."""

    def __init__(self) -> None:
        self._phase = ""
        self._begin = self._said = 0.0

    def advance(self, phase: str, done: int = 0, total: int = 0, /) -> None:
        """Take in where the phase is; say so when it is time to."""
        now = perf_counter()
        if phase != self._phase:
            self._phase, self._begin, self._said = phase, now, now - EVERY + FIRST
        if now - self._said < EVERY or not done or done == total:
            return
        self._said = now
        print_note(f"{phase}: {done} of {total}, {time_left(now - self._begin, done, total)}")


def time_left(seconds: float, done: int, total: int) -> str:
    """The estimated time for the rest of work of which ``done`` of ``total`` took ``seconds``: ``about 40 s left``."""
    remaining = seconds / done * (total - done)
    return f"about {remaining / 60:.0f} min left" if remaining >= 120 else f"about {max(remaining, 1):.0f} s left"

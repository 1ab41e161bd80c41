"""The progress of a verb: the phase, and a count if known."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class ProgressCallback(Protocol):
    """Called with a phase, and with ``done`` of ``total`` in a counted phase (0 of 0: uncounted)."""

    def __call__(self, phase: str, done: int = 0, total: int = 0, /) -> None: ...


def no_progress(phase: str, done: int = 0, total: int = 0, /) -> None:
    """A ProgressCallback that does nothing."""

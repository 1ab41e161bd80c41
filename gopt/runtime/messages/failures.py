"""Errors of waits that cannot end, with the waiting endpoint, the awaited endpoints and the awaited message."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gopt.errors import GoptError, RunError
from gopt.runtime.engines.launcher_folder import is_stopped, launcher_folder
from gopt.runtime.engines.rank_status import read
from gopt.runtime.messages.roster import Roster


@dataclass(frozen=True, slots=True)
class Awaited:
    """``sources``: the awaited endpoints. ``what``: the awaited action, such as ``send VALUES of key 3 in round 7``."""

    sources: tuple[int, ...]
    what: str


class LateError(RunError):
    """A wait took longer than the deadline."""

    def __init__(self, message: str, awaited: Awaited) -> None:
        super().__init__(message)
        self.awaited = awaited


class LostError(RunError):
    """An endpoint is lost: the thread or process has ended, or sends no sign of life."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """A failure that ends all endpoints; ``source`` is the number of the reporting endpoint."""

    source: int
    text: str
    exit_code: int

    @classmethod
    def of(cls, source: int, error: BaseException) -> PeerFailure:
        text = error.message if isinstance(error, GoptError) else f"{type(error).__name__}: {error}"
        return cls(source, text, getattr(error, "exit_code", 70))


def late(roster: Roster, number: int, awaited: Awaited, seconds: float) -> LateError:
    """The error of a wait that took too long; for a stopped process, the error names the process's endpoints."""
    halted = _stopped(roster)
    sources = tuple(source for source in awaited.sources if source in halted) or awaited.sources
    text = f"after {seconds:g} s, {_waits(roster, number, replace(awaited, sources=sources))}"
    return LateError(text + (f"; the process of {roster.describe_all(halted)} is stopped" if halted else ""), awaited)


def _stopped(roster: Roster) -> tuple[int, ...]:
    """Endpoints of processes stopped by a signal or a debugger, as far as a launcher's folder shows."""
    folder = launcher_folder()
    statuses = () if folder is None else read(folder)
    return tuple(number for status in statuses if is_stopped(status.process) for number in roster.local(status.rank))


def stuck(roster: Roster, number: int, awaited: Awaited) -> LateError:
    return LateError(f"no role can go on: {_waits(roster, number, awaited)}", awaited)


def lost(roster: Roster, number: int, gone: int, why: str, awaited: Awaited) -> LostError:
    text = f"{roster.describe(gone)} is lost: {why}; {_waits(roster, number, awaited, 'waited')}"
    return LostError(text, gone)


def stopped(roster: Roster, number: int, failure: PeerFailure, awaited: Awaited | None) -> RunError:
    where = f"; {_waits(roster, number, awaited, 'waited')}" if awaited is not None and awaited.sources else ""
    return RunError(f"stopped, because {roster.describe(failure.source)} failed: {failure.text}{where}")


def _waits(roster: Roster, number: int, awaited: Awaited, word: str = "still waits") -> str:
    return f"{roster.describe(number)} {word} for {roster.describe_all(awaited.sources)} to {awaited.what}"

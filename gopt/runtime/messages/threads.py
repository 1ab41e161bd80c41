"""Endpoints as threads of one process: for tests, for replays, and for jobs on one machine without MPI."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from gopt.errors import GoptError, InputError, OptionError
from gopt.runtime.engines.threads import check_threads, run_daemons
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.failures import Awaited, PeerFailure
from gopt.runtime.messages.hub import Hub, Ready
from gopt.runtime.messages.order import Order, Serial
from gopt.runtime.messages.roster import Roster, Settings

T = TypeVar("T")


class ThreadHub(Hub):
    """All endpoints of a job in this process. Arrays are copied when the receiver takes them in, unless given away by
    the sender.

    With a ``Serial`` order endpoints run one at a time, and time is virtual: where all wait and none can continue, the
    wait with the earliest end is over at once."""

    def __init__(self, roster: Roster, settings: Settings | None = None, order: Order | None = None) -> None:
        super().__init__(roster, settings or Settings(), range(roster.size), order)
        self._serial = order if isinstance(order, Serial) else None
        self._clock = 0.0
        self._waits: dict[int, tuple[Ready, float]] = {}
        """Of a serial run: who waits for what, and until when."""
        self._running: int | None = None
        self._over: set[int] = set()
        """Endpoints whose virtual time is over."""
        self._ended: set[int] = set()

    def endpoint(self, number: int) -> Endpoint:
        return Endpoint(self, number)

    def start(self, number: int) -> None:
        """Called by an endpoint's thread before all else: a serial run begins when all threads have called this
        method."""
        if self._serial is not None:
            self.wait(number, lambda: True, None, lambda: Awaited((), "start"))

    def end(self, number: int) -> None:
        """Called by an endpoint's thread last."""
        with self.changed:
            self._ended.add(number)
            if self._running == number:
                self._running = None
            self._schedule()

    def _dispatch(self, to: int) -> None:
        self._hand_over(to)

    def _room(self, number: int) -> None:
        self._hand_over(number)

    def _tell(self, to: int, item: dict[str, Any]) -> None:
        self._given(to, json.loads(json.dumps(item)))

    # --- serial runs ---

    def _now(self) -> float:
        return self._clock if self._serial is not None else super()._now()

    def _blocked(self, number: int, ready: Ready, until: float) -> None:
        if self._serial is not None:
            self._waits[number] = ready, until
            if self._running == number:
                self._running = None
            self._schedule()

    def _unblocked(self, number: int) -> None:
        self._waits.pop(number, None)
        self._over.discard(number)

    def _may_go(self, number: int) -> bool:
        return self._serial is None or self._running == number

    def _expired(self, number: int, until: float) -> bool:
        return number in self._over if self._serial is not None else super()._expired(number, until)

    def _schedule(self) -> None:
        """Lock held: let one endpoint continue, once all wait."""
        if self._serial is None or self._running is not None or len(self._waits) + len(self._ended) < self.roster.size:
            return
        able = [number for number, (ready, _) in self._waits.items() if ready()]
        if able:
            self._running = self._serial.pick(able)
        elif self._waits:
            self._clock, self._running = min((until, number) for number, (_, until) in self._waits.items())
            self._over.add(self._running)
        self.changed.notify_all()


def run_threads(
    hub: ThreadHub, work: Callable[[Endpoint], T], may_end: Callable[[int], bool] = lambda _: False
) -> list[T | None]:
    """Run each endpoint's work in a thread; returns the results.

    Raises the first failure, with the endpoint's name. A failing endpoint in ``may_end`` is lost, and returns None,
    unless the endpoint refuses a file: all have the same files."""
    check_threads(hub.roster.size, "trainers and servers")
    results: list[T | None] = [None] * hub.roster.size
    failures: list[tuple[int, BaseException]] = []

    def live(number: int) -> None:
        try:
            hub.start(number)
            results[number] = work(hub.endpoint(number))
        except BaseException as error:
            if may_end(number) and not isinstance(error, InputError):
                hub.lose(number, PeerFailure.of(number, error).text)
            else:
                failures.append((number, error))
                hub.fail(number, error)
        finally:
            hub.end(number)

    run_daemons(live, hub.roster.names, lambda error: hub.fail(0, error), failures)
    if failures:
        raise _named(hub.roster, *failures[0])
    return results


def _named(roster: Roster, number: int, error: BaseException) -> BaseException:
    """The error with the name of the endpoint. Errors of options and files are unnamed."""
    if isinstance(error, InputError | OptionError):
        return error
    name = roster.names[number]
    if isinstance(error, GoptError) and type(error).__init__ is GoptError.__init__:
        named = type(error)(f"{name}: {error.message}", *error.hints)
        named.__cause__ = error
        return named
    error.add_note(f"in {name}")
    return error

"""Work beside the rest: ``begin`` starts it in a forked process, ``result`` waits for what it returns or raises.

A child computes from the memory that it shares with its parent, and returns. It writes no file and prints nothing: the
parent alone writes, so that what ``gopt.disk`` promises rests on one process. It dies with its parent.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gopt.disk.signals import INTERRUPT, STOPS, defer_signals, raise_on_signals
from gopt.errors import OptionError, RunError
from gopt.option_types import is_whole

T = TypeVar("T")

LEAST_NODES = 5_000
"""Nodes of a graph from which on the default forks: below, the work takes about as long as the fork."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""


@dataclass(slots=True)
class _Room:
    """How many children there may be at once, and for graphs of how many nodes."""

    most: int
    least_nodes: int
    children: list[_Child] = field(default_factory=list)

    def free(self) -> bool:
        return sum(not child.ended() for child in self.children) < self.most


_room: ContextVar[_Room | None] = ContextVar("_room", default=None)


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def processes(jobs: int | None) -> Iterator[None]:
    """Let ``begin`` fork in this block, so that at most ``jobs`` processes work at once, this one included.

    SIGTERM and SIGHUP raise StoppedError in the block.

    None: as many as there are usable cores, and only for graphs of at least ``LEAST_NODES`` nodes. At the end, children
    whose results were not read are killed. Outside of such a block nothing is forked.
    """
    if jobs is not None and (not is_whole(jobs) or jobs < 1):
        raise OptionError(f"jobs={jobs!r}", "give the number of processes that may work at once, at least 1")
    room = _Room(usable_cores() - 1, LEAST_NODES) if jobs is None else _Room(jobs - 1, 0)
    before = _room.set(room)
    try:
        with raise_on_signals():  # or a signal would end this process with its children's work, and say nothing
            yield
    finally:
        _room.reset(before)
        for child in room.children:
            child.drop()


class Task(Generic[T]):
    """Work that was begun, or that runs when its result is first asked for."""

    def __init__(self, work: Callable[[], T], child: _Child | None) -> None:
        self._work: Callable[[], T] | None = work
        self._child = child
        self._found: list[T] = []

    @property
    def begun(self) -> bool:
        """Whether a process works on it."""
        return self._child is not None

    def result(self) -> T:
        """Return the work's result; raises the work's error, and RunError where its process was killed."""
        if not self._found:
            assert self._work is not None
            child, self._child = self._child, None
            self._found.append(self._work() if child is None or child.dropped else child.result())
            self._work = None
        return self._found[0]


def begin(work: Callable[[], T], nodes: int) -> Task[T]:
    """Begin work on a graph of ``nodes`` nodes in a process of its own, where ``processes`` has room for one.

    ``work`` returns what can be pickled, changes nothing that is read afterwards, and writes no file. Where the system
    gives no process or no file in memory, the work waits and runs here, with the same result.
    """
    room = _room.get()
    if room is None or nodes < room.least_nodes or not room.free():
        return Task(work, None)
    with defer_signals():
        child = _Child.fork(work)
        if child is not None:
            room.children.append(child)
    return Task(work, child)


class _Child:
    """A forked process; its answer goes into a file in memory, so that it need not wait for its parent."""

    def __init__(self, number: int, answer: int) -> None:
        self._number, self._answer = number, answer
        self._status: int | None = None
        self.dropped = False
        """Whether its answer is no longer wanted."""

    @classmethod
    def fork(cls, work: Callable[[], Any]) -> _Child | None:
        """A child that works; None where the system has none to give (limits, or no ``fork`` and ``memfd_create``)."""
        if not hasattr(os, "fork") or not hasattr(os, "memfd_create"):
            return None
        parent = os.getpid()
        try:
            answer = os.memfd_create("gopt", os.MFD_CLOEXEC)
        except OSError:
            return None
        # One that is sent to the child at once stays pending until it has the system's handlers: ours would lose it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT + STOPS)
        try:
            number = os.fork()
        except OSError:
            os.close(answer)
            return None
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not number:
            code = 1
            try:
                _calm(parent)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                with os.fdopen(answer, "wb") as file:
                    pickle.dump(_answer(work), file, pickle.HIGHEST_PROTOCOL)
                code = 0
            finally:
                os._exit(code)
        return cls(number, answer)

    def ended(self) -> bool:
        """Return whether it computes no more."""
        if self._status is None:
            self._wait(os.WNOHANG)
        return self._status is not None

    def result(self) -> Any:
        """Return the work's result; raises the work's error, or RunError. Called once."""
        if self._status is None:
            self._wait()
        self.dropped = True
        with os.fdopen(self._answer, "rb") as file:
            code = os.waitstatus_to_exitcode(self._status or 0)
            if code < 0:
                raise RunError(
                    f"a process that computes beside this one was killed by {signal.Signals(-code).name}",
                    "where memory is short, --jobs 1 takes the least",
                )
            file.seek(0)
            try:
                done, found = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # it failed, or was killed and its status is not known
                raise RunError(
                    "a process that computes beside this one ended without an answer", "run it again with --jobs 1"
                ) from None
        if not done:
            raise found
        return found

    def drop(self) -> None:
        """End it where it still computes."""
        if self.dropped:
            return
        self.dropped = True
        if not self.ended():
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)
            self._wait()
        os.close(self._answer)

    def _wait(self, flags: int = 0) -> None:
        """Take its status where it has ended; 0 where SIGCHLD is ignored, and the system has thrown it away."""
        try:
            number, status = os.waitpid(self._number, flags)
        except ChildProcessError:
            number, status = self._number, 0
        self._status = status if number else None


def _calm(parent: int) -> None:
    """Drop what a child must not share with its parent: handlers, further children, walks over all objects."""
    for number in INTERRUPT + STOPS:
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # a collection would touch, and so copy, every page
    _room.set(None)
    with suppress(ImportError, AttributeError, OSError):
        import ctypes

        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer(work: Callable[[], Any]) -> tuple[bool, Any]:
    """Return whether the work is done, and its result or error."""
    try:
        return True, work()
    except Exception as error:
        error.add_note(f"in a child:\n{''.join(traceback.format_exception(error))}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error whose constructor takes other arguments
            return False, RuntimeError(f"{type(error).__name__}: {error}")
        return False, error

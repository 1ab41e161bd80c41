"""Work beside the rest: ``begin`` starts work in a forked process, ``result`` waits for the returned value or error.

A child computes from memory shared with the parent, and returns. The child writes no file and prints nothing: the
parent alone writes, so that the promises of ``gopt.system`` rest on one process. The child dies with the parent."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gopt.errors import OptionError, RunError
from gopt.options.types import is_whole
from gopt.system.signals import INTERRUPT, STOPS, defer_signals, raise_on_signals

T = TypeVar("T")

LEAST_NODES = 5_000
"""Nodes of a graph from which on the default forks: below, the work takes about as long as the fork."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""
_SIZE = struct.Struct("=Q")


@dataclass(slots=True)
class _ProcessPool:
    """The most children at once, and the least graph in nodes; and the waiting tasks."""

    most: int
    least_nodes: int
    own_process: bool
    children: list[_Child] = field(default_factory=list)
    waiting: list[Sequence[Task[Any]]] = field(default_factory=list)

    def start_waiting(self) -> None:
        """Begin waiting tasks, as far as the pool allows; none while other threads run."""
        if not (self.own_process or threading.active_count() == 1):
            return  # a child has no threads but its own, and would wait for ever for a lock that another held
        while self.waiting and sum(not child.ended() for child in self.children) < self.most:
            if tasks := [task for task in self.waiting.pop(0) if task.open]:
                with defer_signals():
                    child = _Child.fork([task.work for task in tasks])
                    if child is not None:
                        self.children.append(child)
                        for position, task in enumerate(tasks):
                            task.hand_over(child, position)


_pool: ContextVar[_ProcessPool | None] = ContextVar("_pool", default=None)


def usable_cores() -> int:
    """The cores for this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def processes(jobs: int | None, *, own_process: bool = False) -> Iterator[None]:
    """Let ``begin`` fork in this block, so that at most ``jobs`` processes work at once, with this process.

    SIGTERM and SIGHUP raise StoppedError in the block. ``own_process``: this process is gopt's alone, and its threads
    hold no lock needed by the work; elsewhere nothing is forked while other threads run.

    None: as many children as usable cores, if several, and only for graphs of at least ``LEAST_NODES`` nodes: one may
    end as the next begins. At the end, children with unread results are killed. Outside of such a block nothing is
    forked."""
    if jobs is not None and (not is_whole(jobs) or jobs < 1):
        raise OptionError(f"jobs={jobs!r}", "give the number of processes that may work at once, at least 1")
    cores = usable_cores()
    most, least = (cores if cores > 1 else 0, LEAST_NODES) if jobs is None else (jobs - 1, 0)
    pool = _ProcessPool(most, least, own_process)
    before = _pool.set(pool)
    try:
        with raise_on_signals():  # or a signal would end this process with its children's work, and say nothing
            yield
    finally:
        _pool.reset(before)
        pool.waiting.clear()
        for child in pool.children:
            child.drop()


class Task(Generic[T]):
    """Work already begun, or run at the first request of the result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self._child: _Child | None = None
        self._place = 0
        """Its place in the order of what the child works on."""
        self._found: list[T] = []
        self.open = True
        """Whether neither a process works on it, nor its result was asked for."""

    @property
    def begun(self) -> bool:
        """Whether a process works on the task."""
        return self._child is not None

    def hand_over(self, child: _Child, position: int) -> None:
        """Let a child work on the task."""
        self._child, self._place, self.open = child, position, False

    def result(self) -> T:
        """Return the work's result; raises the work's error, and RunError for a killed process."""
        if not self._found:
            self.open = False
            child, self._child = self._child, None
            self._found.append(self.work() if child is None or child.dropped else child.result(self._place))
            self.work = _released
            proceed()
        return self._found[0]


def _released() -> Any:
    """In place of finished work, and of its references."""
    raise AssertionError


def begin(work: Callable[[], T], nodes: int) -> Task[T]:
    """Begin work on a graph of ``nodes`` nodes in a separate process, now or as soon as ``processes`` allows.

    ``work`` returns a picklable value, changes nothing read afterwards, and writes no file. Without a process or a file
    in memory, and for an earlier request of the result, the work runs here, with the same result."""
    return begin_all([work], nodes)[0]


def begin_all(works: Iterable[Callable[[], T]], nodes: int) -> list[Task[T]]:
    """The same for several works, one after the other in one process: each result is available once computed."""
    tasks = [Task(work) for work in works]
    pool = _pool.get()
    if pool is not None and pool.most and nodes >= pool.least_nodes:
        pool.waiting.append(tasks)
        pool.start_waiting()
    return tasks


def proceed() -> None:
    """Begin waiting work, where a child has ended meanwhile."""
    pool = _pool.get()
    if pool is not None and pool.waiting:
        pool.start_waiting()


@contextmanager
def held() -> Iterator[None]:
    """Begin nothing in this block, in which a child would share a lock of this process: waiting work runs here."""
    pool = _pool.get()
    if pool is None:
        yield
        return
    most, pool.most = pool.most, 0
    try:
        yield
    finally:
        pool.most = most


class _Child:
    """A forked process. Answers go into a file in memory, so that the child need not wait for the parent; behind each,
    the child tells the answer's size."""

    def __init__(self, number: int, answers: int, sizes: int, works: int) -> None:
        self._number, self._answers, self._told = number, answers, sizes
        self._sizes: list[int] = []
        self._wanted = works
        """Answers that were not read."""
        self._status: int | None = None
        self.dropped = False
        """Whether its answers are no longer wanted."""

    @classmethod
    def fork(cls, works: Sequence[Callable[[], Any]]) -> _Child | None:
        """A working child; None without a process (limits, or no ``fork`` and ``memfd_create``)."""
        if not hasattr(os, "fork") or not hasattr(os, "memfd_create"):
            return None
        parent = os.getpid()
        with ExitStack() as opened:
            try:
                answers = os.memfd_create("gopt", os.MFD_CLOEXEC)
                opened.callback(os.close, answers)
                sizes, tell = os.pipe()
                opened.callback(os.close, sizes)
                opened.callback(os.close, tell)
                # One that is sent to the child at once stays pending until it has the system's handlers: ours would
                # lose it.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT + STOPS)
                try:
                    number = os.fork()
                finally:
                    if os.getpid() == parent:
                        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            except OSError:
                return None
            if not number:
                code = 1
                try:
                    _reset_child(parent)
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                    _answer_all(works, answers, tell)
                    code = 0
                finally:
                    os._exit(code)
            opened.pop_all()
        os.close(tell)
        return cls(number, answers, sizes, len(works))

    def ended(self) -> bool:
        """Return whether the child computes no more."""
        if self._status is None:
            self._wait(os.WNOHANG)
        return self._status is not None

    def result(self, position: int) -> Any:
        """Return the result of the work at a place; raises the work's error, or RunError. Called once for each."""
        while len(self._sizes) <= position:
            size = os.read(self._told, _SIZE.size)
            if not size:
                raise self._death()
            self._sizes += _SIZE.unpack(size)
        start = sum(self._sizes[:position])
        done, result = pickle.loads(_read(self._answers, start, self._sizes[position]))
        self._wanted -= 1
        if not self._wanted:
            self._wait()
            self._close()
        if not done:
            raise result
        return result

    def _death(self) -> RunError:
        """The child ended without an answer."""
        if self._status is None:
            self._wait()
        self._close()
        code = os.waitstatus_to_exitcode(self._status or 0)
        if code < 0:
            return RunError(
                f"a process that computes beside this one was killed by {signal.Signals(-code).name}",
                "where memory is short, --jobs 1 takes the least",
            )
        # it failed, or was killed and its status is not known
        return RunError("a process that computes beside this one ended without an answer", "run it again with --jobs 1")

    def _close(self) -> None:
        self.dropped = True
        os.close(self._answers)
        os.close(self._told)

    def drop(self) -> None:
        """End the child if still computing."""
        if self.dropped:
            return
        if not self.ended():
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)
            self._wait()
        self._close()

    def _wait(self, flags: int = 0) -> None:
        """Take the status of an ended child; 0 if SIGCHLD is ignored, and the system has dropped the status."""
        try:
            number, status = os.waitpid(self._number, flags)
        except ChildProcessError:
            number, status = self._number, 0
        self._status = status if number else None


def _reset_child(parent: int) -> None:
    """Drop a child's shares of the parent: handlers, further children, walks over all objects."""
    for number in INTERRUPT + STOPS:
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # a collection would touch, and so copy, every page
    _pool.set(None)
    die_with_parent(parent)


def die_with_parent(parent: int) -> None:
    """Let the system kill this process as soon as the parent, number ``parent``, dies; ends at once if the parent is
    dead."""
    _sent_when_the_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def dying_with_parent() -> Iterator[None]:
    """Let the system kill this process if the parent dies meanwhile: for work without a running Python thread."""
    die_with_parent(os.getppid())
    try:
        yield
    finally:
        _sent_when_the_parent_dies(0)


def _sent_when_the_parent_dies(number: int) -> None:
    with suppress(ImportError, AttributeError, OSError):
        import ctypes

        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, number)


def _answer(work: Callable[[], Any]) -> tuple[bool, Any]:
    """Return whether the work is done, and the result or error."""
    try:
        return True, work()
    except Exception as error:
        error.add_note(f"in a child:\n{''.join(traceback.format_exception(error))}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error whose constructor takes other arguments
            return False, RuntimeError(f"{type(error).__name__}: {error}")
        return False, error


def _answer_all(works: Iterable[Callable[[], Any]], answers: int, tell: int) -> None:
    """Put the answers into a file in order, and tell the size of each."""
    with os.fdopen(answers, "wb") as file, os.fdopen(tell, "wb", buffering=0) as sizes:
        for work in works:
            answer = pickle.dumps(_answer(work), pickle.HIGHEST_PROTOCOL)
            file.write(answer)
            file.flush()
            sizes.write(_SIZE.pack(len(answer)))


def _read(file: int, start: int, size: int) -> bytes:
    """Bytes of a file that another process extends."""
    parts = []
    while size:
        parts.append(os.pread(file, size, start))
        start, size = start + len(parts[-1]), size - len(parts[-1])
    return b"".join(parts)

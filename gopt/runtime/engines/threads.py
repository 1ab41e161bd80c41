"""Ranks as threads of one process: the engine of ``gopt verify``, and of ``gopt run`` without MPI.

Calls are compared before they run: a disagreement of ranks raises an error instead of a deadlock or wrong values."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from gopt import limits
from gopt.collectives.node import CallSignature, call_signature
from gopt.collectives.table import COLLECTIVES
from gopt.errors import GoptError, InvariantError, RunError
from gopt.ir.graph import Node
from gopt.records.mesh import Mesh
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.host_value import array_dtype
from gopt.runtime.session import Array
from gopt.text.sanitize import listed

DEADLINE = 120.0
"""Seconds for which a rank waits for the others at one call."""
GRACE = 2.0
"""Seconds that threads have to end when one of them has failed."""


class Runnable(Protocol):
    """A program of a rank: an Executor, or an object with the same ``run``."""

    def run(self, feeds: dict[str, Array], call: CollectiveCallback, /) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    """One rank's side of a call."""

    rank: int
    index: int
    node: Node
    inputs: list[Array]
    signature: CallSignature

    def __str__(self) -> str:
        return f"rank {self.rank} makes {self.call}"

    @property
    def call(self) -> str:
        return f"call {self.index}, {self.signature}"


@dataclass(slots=True)
class _Rendezvous:
    """The n-th call of one group: the arrived members, and the results."""

    members: tuple[int, ...]
    entries: dict[int, _Entry] = field(default_factory=dict)
    results: dict[int, list[Array]] | None = None

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.entries]


Mail: TypeAlias = dict[tuple[str, int, int, int], deque[_Entry]]


@dataclass(frozen=True, slots=True)
class _Wait:
    entry: _Entry
    ready: Callable[[], bool]
    missing: Callable[[], list[int]]


class ThreadGroup:
    """Rendezvous of ranks as threads of one process, for one step.

    Members of a group meet at the group's n-th call; the last to arrive runs the reference implementation for all. A
    Send is buffered, a Recv waits. The first failure, of a rank or of a call, ends the wait of every rank."""

    def __init__(self, mesh: Mesh, deadline: float = DEADLINE, mail: Mail | None = None) -> None:
        self.mesh = mesh
        self.deadline = deadline
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self._changed = threading.Condition()
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self._calls: dict[tuple[str, int], int] = {}
        """(group, rank) -> how many calls of that group the rank has made."""
        self._rendezvous: dict[tuple[str, tuple[int, ...], int], _Rendezvous] = {}
        self._mail: Mail = {} if mail is None else mail
        """(group, sender, receiver, tag) -> what was sent and not yet received."""
        self._waiting: dict[int, _Wait] = {}
        self._finished: set[int] = set()

    def call(self, rank: int, index: int, node: Node, inputs: list[Array]) -> list[Array]:
        """Make a rank's next collective call, the ``index``-th of the file; returns the outputs.

        The list is empty where the outputs are undefined on the rank (Reduce off the root). Raises RunError on all
        members when calls differ; on all ranks after a failure of a rank or when no rank can continue; and when a
        member has not arrived by the deadline."""
        signature = call_signature(node.op_type, node.attributes, [(array_dtype(a), a.shape) for a in inputs])
        entry = _Entry(rank, index, node, inputs, signature)
        if node.op_type == "Send":
            self._send(entry)
            return []
        return self._receive(entry) if node.op_type == "Recv" else self._join_call(entry)

    def abort(self, rank: int, error: BaseException) -> None:
        """Report a rank's failure: all others raise in the current call or at the next."""
        with self._changed:
            self._fail(error, rank)

    def finish(self, rank: int) -> None:
        """Report that a rank makes no more calls: waiting ranks fail at once instead of at the deadline."""
        with self._changed:
            self._finished.add(rank)
            self._check_stuck()

    # Below, "held" says that the caller holds the lock.

    def _join_call(self, entry: _Entry) -> list[Array]:
        rank, group = entry.rank, entry.signature.group
        members = self._group(group, rank)
        with self._changed:
            self._raise_failure()
            index = self._calls.get((group, rank), 0)
            self._calls[group, rank] = index + 1
            key = (group, members, index)
            rendezvous = self._rendezvous.setdefault(key, _Rendezvous(members))
            self._compare(rendezvous, entry)
            rendezvous.entries[rank] = entry
            last = not rendezvous.missing
            if last:
                del self._rendezvous[key]
            else:
                self._wait(_Wait(entry, lambda: rendezvous.results is not None, lambda: rendezvous.missing))
        if last:
            self._complete(rendezvous, rank)
        assert rendezvous.results is not None
        return rendezvous.results[rank]

    def _complete(self, rendezvous: _Rendezvous, rank: int) -> None:
        """Run a call for all members, without the lock, so that other groups continue."""
        try:
            results = _execute([rendezvous.entries[member] for member in rendezvous.members])
        except Exception as error:
            self.abort(rank, error)
            raise
        with self._changed:
            rendezvous.results = dict(zip(rendezvous.members, results, strict=True))
            self._changed.notify_all()

    def _send(self, entry: _Entry) -> None:
        with self._changed:
            self._raise_failure()
            # The sender goes on, and may write where this lies before the receiver comes.
            copies = replace(entry, inputs=[array.copy() for array in entry.inputs])
            self._mail.setdefault(self._channel(entry, entry.rank, self._peer(entry)), deque()).append(copies)
            self._changed.notify_all()

    def _receive(self, entry: _Entry) -> list[Array]:
        peer = self._peer(entry)
        with self._changed:
            self._raise_failure()
            box = self._mail.setdefault(self._channel(entry, peer, entry.rank), deque())
            self._wait(_Wait(entry, lambda: bool(box), lambda: [peer]))
            sent = box.popleft()
            if sent.signature._replace(op="Recv") != entry.signature:
                self._disagree(sent, entry)
        ends = sorted((sent, entry), key=lambda end: end.rank)
        return _execute(ends)[ends.index(entry)]

    def _channel(self, entry: _Entry, sender: int, receiver: int) -> tuple[str, int, int, int]:
        return entry.signature.group, sender, receiver, entry.node.attributes["tag"]

    def _peer(self, entry: _Entry) -> int:
        peer: int = entry.node.attributes["peer"]
        if peer == entry.rank or peer not in self._group(entry.signature.group, entry.rank):
            raise RunError(f"{entry}, but rank {peer} is not a member of that group")
        return peer

    def _group(self, group: str, rank: int) -> tuple[int, ...]:
        key = group, rank
        if key not in self._members:
            self._members[key] = self.mesh.members(group, rank)
        return self._members[key]

    def _compare(self, rendezvous: _Rendezvous, entry: _Entry) -> None:
        """Lock held: raise RunError where a call differs from the calls of earlier members."""
        for arrived in rendezvous.entries.values():
            if arrived.signature != entry.signature:
                self._disagree(arrived, entry)

    def _disagree(self, one: _Entry, arrived: _Entry) -> None:
        lower, second = sorted((one, arrived), key=lambda entry: entry.rank)
        error = RunError(
            f"calls of group {arrived.signature.group} do not match: {lower}; {second}",
            "all members of a group must make the same calls in the same order",
        )
        self._fail(error)
        raise error

    def _wait(self, wait: _Wait) -> None:
        """Lock held: wait until the condition holds. Raises RunError when the condition cannot hold, or takes too
        long."""
        rank = wait.entry.rank
        self._waiting[rank] = wait
        self._check_stuck()
        ended = False
        while not ended:
            ended = self._changed.wait_for(lambda: self.failure is not None or wait.ready(), self.deadline)
            late = wait.missing()
            if not ended and late:  # else all have come, and the call itself takes long
                what = f"{named_ranks(late)} at {wait.entry.call}"
                cause = self._causes(late)
                behind = f"; {named_ranks(cause)} did not reach it" if set(cause) - set(late) else ""
                text = f"after {self.deadline:g} s, rank {rank} still waits for {what}{behind}"
                self._fail(RunError(text, "raise --deadline if a rank is only slow"))
                break
        del self._waiting[rank]
        if not wait.ready():
            self._raise_failure()

    def _causes(self, late: Sequence[int]) -> list[int]:
        """Lock held: return the ranks on which all others wait, directly or indirectly. A rank that waits itself is no
        cause."""
        visited: set[int] = set()
        pending = list(late)
        while pending:
            rank = pending.pop()
            if rank not in visited:
                visited.add(rank)
                pending += self._waiting[rank].missing() if rank in self._waiting else ()
        return sorted(rank for rank in visited if rank not in self._waiting)

    def _check_stuck(self) -> None:
        """Lock held: fail at once when every rank waits or has finished, so that no rank can arrive."""
        stuck = self._waiting.keys() | self._finished
        waits = list(self._waiting.values())
        if self.failure or not waits or len(stuck) < self.mesh.ranks or any(wait.ready() for wait in waits):
            return
        wait = min(waits, key=lambda wait: wait.entry.rank)
        missing = wait.missing()
        where = [
            f"rank {rank} waits at {self._waiting[rank].entry.call}" if rank in self._waiting
            else f"rank {rank} has finished"
            for rank in missing
        ]  # fmt: skip
        entry = wait.entry
        self._fail(
            RunError(
                f"no rank can go on: rank {entry.rank} waits for {named_ranks(missing)} at {entry.call}; "
                + "; ".join(where),
                "all members of a group must make the same calls in the same order",
            )
        )

    def _fail(self, error: BaseException, rank: int | None = None) -> None:
        """Lock held: record the first failure."""
        if self.failure is None:
            self.failure, self.failed_rank = error, rank
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        """Lock held: raise the failure of another rank."""
        if self.failure is None:
            return
        message = self.failure.message if isinstance(self.failure, GoptError) else repr(self.failure)
        if self.failed_rank is not None:
            message = f"stopped, because rank {self.failed_rank} failed: {message}"
        hints = self.failure.hints if isinstance(self.failure, GoptError) else ()
        raise RunError(message, *hints) from self.failure


def _execute(entries: Sequence[_Entry]) -> list[list[Array]]:
    """The reference's results for every entry; an empty list for a member with undefined outputs."""
    leader = entries[0]
    record = COLLECTIVES[leader.node.op_type]
    results = record.execute(leader.node.attributes, [entry.inputs for entry in entries], leader.signature.dtype)
    return [result or [] for result in results]


def named_ranks(ranks: Sequence[int]) -> str:
    """Names of ranks, such as ``ranks 0, 2``; long lists are shortened."""
    shown = listed([*map(str, ranks)], 8)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" if ranks else ""


def _named(error: BaseException, rank: int | None) -> BaseException:
    """The error with the number of the failed rank, if a rank failed."""
    if rank is None:
        return error
    if isinstance(error, GoptError):
        named = type(error)(f"rank {rank}: {error.message}", *error.hints)
        named.__cause__ = error
        return named
    error.add_note(f"on rank {rank}")
    return error


def run_ranks(
    programs: Sequence[Runnable], feeds: Sequence[dict[str, Array]], mesh: Mesh, deadline: float = DEADLINE,
    mail: Mail | None = None,
) -> list[dict[str, Array]]:  # fmt: skip
    """Run one step of every rank, each in a thread; returns every rank's outputs. ``mail``: sent by earlier programs.

    Raises the first failure, with the number of the failed rank, and not the errors of ranks stopped by it."""
    if not len(programs) == len(feeds) == mesh.ranks:
        raise InvariantError(f"{len(programs)} programs and {len(feeds)} feeds for the {mesh.ranks} ranks of {mesh}")
    group = ThreadGroup(mesh, deadline, mail)
    results: list[dict[str, Array]] = [{} for _ in programs]

    def step(rank: int) -> None:
        try:
            results[rank] = programs[rank].run(feeds[rank], lambda *call: group.call(rank, *call))
            group.finish(rank)
        except BaseException as error:
            group.abort(rank, error)

    run_daemons(step, [f"rank {rank}" for rank in range(mesh.ranks)], lambda error: group.abort(-1, error))
    if group.failure is not None:
        raise _named(group.failure, group.failed_rank)
    return results


def run_daemons(
    work: Callable[[int], None], names: Sequence[str], stop: Callable[[BaseException], None], failures: Sized = ()
) -> None:
    """Run ``work`` in a daemon thread for the number of each name, and wait for all. After a failure, threads that do
    not end within GRACE are left. ``stop``: called at an interrupt, with its error."""
    threads = [threading.Thread(target=work, args=(n,), name=name, daemon=True) for n, name in enumerate(names)]
    for thread in threads:
        thread.start()
    until = math.inf
    try:
        while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() <= until:
            alive[0].join(0.1)
            if len(failures) and until == math.inf:
                until = time.monotonic() + GRACE
    except BaseException as error:
        stop(error)
        raise


def check_threads(count: int, what: str, hint: str = "") -> None:
    """Raise RunError for more ranks, or trainers and servers, than one process runs as threads; ``hint``: the
    alternative, by default processes."""
    if count > limits.THREADS:
        raise RunError(
            f"{count} {what} are too many threads for one process, which runs at most {limits.THREADS} (THREADS)",
            hint or f"start them as processes: mpiexec -n {count} gopt run …",
            limits.hint("THREADS", count),
        )

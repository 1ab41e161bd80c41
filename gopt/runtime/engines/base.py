"""The interface of an engine (a rank's collectives and its control plane), and the engine of ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from gopt.errors import GoptError, RunError
from gopt.ir.graph import Node
from gopt.records.mesh import Mesh
from gopt.runtime.engines.threads import ThreadGroup, check_threads, named_ranks, run_daemons
from gopt.runtime.session import Array
from gopt.runtime.shared_memory import NOT_SHARED, CallBuffer, GatherRequest, Key, SendRequest, SharedMemory

T = TypeVar("T")


class Engine(Protocol):
    """One rank's side of the transport. All members of a group make the same calls in the same order."""

    rank: int
    overlaps: bool
    """Whether calls may overlap computation: a call that spins needs a processor of its own."""

    def prepare(self, groups: Sequence[str]) -> None:
        """Prepare calls over these groups. Every rank passes the same list."""

    def share(self, sends: Mapping[Key, SendRequest], gathers: Mapping[Key, GatherRequest]) -> SharedMemory:
        """Allocate buffers in memory shared by ranks; each request is granted to all members of its group or to no
        member.

        All ranks call this method together, after the comparison of their plans and before compilation. Every rank
        writes its shard into the buffers of gathers; no step runs before all ranks have written."""

    def call(self, index: int, node: Node, inputs: list[Array], buffer: CallBuffer | None = None) -> list[Array]:
        """Make one collective, and return the outputs; the list is empty for outputs undefined on this rank.

        ``buffer``: memory for the call to write. For a reduction the buffer holds the inputs, for a gather the result.
        Raises RunError."""

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks in rank order. Items are small objects, not tensors."""

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this rank cannot continue."""


class _Exchanges(Protocol):
    rank: int

    def gather(self, item: Any) -> list[Any]: ...


def _attempt(work: Callable[[], T]) -> T | GoptError:
    try:
        return work()
    except GoptError as error:
        return error


def raise_on_one_rank(engine: _Exchanges, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank together. If work fails on some ranks, the first of these raises the error, and the
    other ranks wait until this rank ends the job."""
    result = _attempt(work)
    refused = [rank for rank, failed in enumerate(engine.gather(isinstance(result, GoptError))) if failed]
    if refused and refused[0] != engine.rank:
        engine.gather(None)
        raise RunError(f"stopped, because rank {refused[0]} cannot run")
    if isinstance(result, GoptError):
        raise result
    return result


def exit_together(exchange: Callable[[int], list[int]], rank: int, work: Callable[[], T]) -> T:
    """Run ``work`` on all ranks of a launcher. If work fails on some ranks, the first of these raises the error, and
    the others exit with the same code and no message. ``exchange``: returns the numbers given by all ranks."""
    result = _attempt(work)
    codes = exchange(result.exit_code if isinstance(result, GoptError) else 0)
    failed = next((number for number, code in enumerate(codes) if code), None)
    if failed is not None and failed != rank:
        raise SystemExit(codes[failed])
    if isinstance(result, GoptError):
        raise result
    return result


class ThreadEngine:
    """A rank as a thread of this process."""

    overlaps = True

    def __init__(self, rank: int, group: ThreadGroup, store: InProcessStore) -> None:
        self.rank, self.group, self.store = rank, group, store

    def prepare(self, groups: Sequence[str]) -> None:
        return None

    def share(self, sends: Mapping[Key, SendRequest], gathers: Mapping[Key, GatherRequest]) -> SharedMemory:
        return NOT_SHARED

    def call(self, index: int, node: Node, inputs: list[Array], buffer: CallBuffer | None = None) -> list[Array]:
        return self.group.call(self.rank, index, node, inputs)

    def gather(self, item: Any) -> list[Any]:
        return self.store.gather(self.rank, item)

    def fail(self, error: BaseException) -> None:
        self.group.abort(self.rank, error)
        self.store.end()


class InProcessStore:
    """The control plane of ranks as threads: each rank stores an object and reads the objects of all ranks."""

    def __init__(self, ranks: int, deadline: float) -> None:
        self.barrier = threading.Barrier(ranks, timeout=deadline)
        self.deadline = deadline
        self._words: list[Any] = [None] * ranks
        self._came = [0] * ranks
        """Number of arrivals of each rank."""
        self._ended = False

    def end(self) -> None:
        """Release all waiting ranks after a failure."""
        self._ended = True
        self.barrier.abort()

    def gather(self, rank: int, item: Any) -> list[Any]:
        if len(self._words) == 1:
            return [item]
        self._words[rank] = item
        self._came[rank] += 1
        mine = self._came[rank]
        try:
            self.barrier.wait()
            words = list(self._words)
            self.barrier.wait()
        except threading.BrokenBarrierError:
            late = [rank for rank, count in enumerate(self._came) if count < mine]
            if self._ended or not late:
                raise RunError("stopped, because another rank did not reach a call") from None
            text = f"after {self.deadline:g} s, rank {rank} still waits for {named_ranks(late)} at the ranks' agreement"
            raise RunError(text) from None
        return words


def run_threads(mesh: Mesh, deadline: float, work: Callable[[Engine], Any]) -> list[Any]:
    """Run each rank's work in a thread of this process; raises the first failure, with the rank's number."""
    check_threads(mesh.ranks, "ranks")
    group, store = ThreadGroup(mesh, deadline), InProcessStore(mesh.ranks, deadline)
    results: list[Any] = [None] * mesh.ranks
    failures: list[BaseException] = []

    def live(rank: int) -> None:
        engine = ThreadEngine(rank, group, store)
        try:
            results[rank] = work(engine)
            group.finish(rank)
        except BaseException as error:
            failures.append(error)
            engine.fail(error)

    def stop(error: BaseException) -> None:
        group.abort(-1, error)
        store.end()

    run_daemons(live, [f"rank {rank}" for rank in range(mesh.ranks)], stop, failures)
    if failures:
        raise failures[0]
    return results


def run_one_rank(engine: Engine) -> Callable[[Sequence[Any], Sequence[Any], Mesh], list[Any]]:
    """Return a function for a process that is one rank: the function runs this rank's program, and gathers the results
    of all ranks."""

    def run(programs: Sequence[Any], feeds: Sequence[Any], mesh: Mesh) -> list[Any]:
        outputs = programs[engine.rank].run(feeds[engine.rank], engine.call)
        return engine.gather({name: np.array(value) for name, value in outputs.items()})

    return run


class CollectiveRunner(Protocol):
    """Makes a rank's calls during a step.

    ``position`` is called with the number of each call at the start, ``mark`` with the name and the times of start and
    end."""

    def __init__(
        self, engine: Any, position: Callable[[int], None], mark: Callable[[str, float, float], None]
    ) -> None: ...

    def __call__(self, index: int, node: Node, inputs: list[Any], buffer: Any = None) -> Any: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class AsyncCollectives:
    """Makes a rank's calls on a separate thread, in file order, while the main thread computes.

    A call starts when all inputs are available. Without overlap, the main thread waits for each call."""

    engine: Engine
    position: Callable[[int], None]
    mark: Callable[[str, float, float], None]
    """Called after every call with its name, and when it began and ended."""
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "calls"))

    def __call__(
        self, index: int, node: Node, inputs: list[Array], buffer: CallBuffer | None = None
    ) -> list[Array] | Future[list[Array]]:
        if self.engine.overlaps:
            return self._pool.submit(self._make, index, node, inputs, buffer)
        return self._make(index, node, inputs, buffer)

    def _make(self, index: int, node: Node, inputs: list[Array], buffer: CallBuffer | None) -> list[Array]:
        self.position(index)
        begin = time.perf_counter()
        results = self.engine.call(index, node, inputs, buffer)
        self.mark(f"{node.op_type} {index} over {node.attributes['group']}", begin, time.perf_counter())
        return results

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

"""Ranks as threads of one process: they meet at every call, compare what they ask for, and share the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.collectives.node import call_signature
from gopt.collectives.table import COLLECTIVES
from gopt.errors import GoptError, RunError
from gopt.graph.model import Node
from gopt.mesh import Mesh
from gopt.runtime.session import Program, Values

DEADLINE = 120.0
"""Seconds a rank waits for the others at one call."""
Change = Callable[[int, Node, list[np.ndarray]], list[np.ndarray]]


@dataclass(slots=True)
class _Meeting:
    """One call of one group: who has come with what, and the results."""

    members: tuple[int, ...]
    arrived: dict[int, tuple[Any, Node, list[np.ndarray]]] = field(default_factory=dict)
    results: dict[int, list[np.ndarray]] | None = None


class ThreadGroup:
    """The rendezvous of all ranks of a mesh."""

    def __init__(self, mesh: Mesh, deadline: float = DEADLINE) -> None:
        self.mesh, self.deadline = mesh, deadline
        self._turn = threading.Condition()
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._count: dict[tuple[int, tuple[int, ...]], int] = {}
        self._failure: GoptError | None = None

    def abort(self, error: GoptError) -> None:
        """Let every waiting rank fail with the first error."""
        with self._turn:
            self._failure = self._failure or error
            self._turn.notify_all()

    def call(self, rank: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Perform a call together with the other members of its group.

        Raises RunError when a member asks for something else, fails, or does not come before the deadline.
        """
        members = self.mesh.members(str(node.attributes["group"]), rank)
        types = [(array.dtype.name, array.shape) for array in inputs]
        signature = call_signature(node.op_type, node.attributes, types)
        with self._turn:
            number = self._count.get((rank, members), 0)
            self._count[rank, members] = number + 1
            key = (members, number)
            meeting = self._meetings.setdefault(key, _Meeting(members))
            meeting.arrived[rank] = (signature, node, inputs)
            if len(meeting.arrived) == len(members):
                self._settle(meeting, number)
                self._turn.notify_all()
            elif not self._turn.wait_for(lambda: meeting.results is not None or self._failure, self.deadline):
                late = [str(other) for other in members if other not in meeting.arrived]
                self._failure = RunError(
                    f"rank {rank} waited {self.deadline:g} s at call {number} ({node.op_type}) for rank {', '.join(late)}"
                )
                self._turn.notify_all()
            if meeting.results is None:
                assert self._failure is not None
                raise self._failure
            return meeting.results[rank]

    def _settle(self, meeting: _Meeting, number: int) -> None:
        """Compare the members' calls and compute the result; the last to arrive does it."""
        first = meeting.members[0]
        wanted, node, _ = meeting.arrived[first]
        for rank in meeting.members[1:]:
            theirs = meeting.arrived[rank][0]
            if theirs != wanted:
                self._failure = RunError(
                    f"call {number} differs: rank {first} asks for {wanted}, rank {rank} for {theirs}"
                )
                return
        contributions = [meeting.arrived[rank][2] for rank in meeting.members]
        dtype = next((array.dtype.name for each in contributions for array in each), "float32")
        try:
            results = COLLECTIVES[node.op_type].execute(node.attributes, contributions, dtype)
        except GoptError as error:
            self._failure = error
            return
        meeting.results = {rank: result or [] for rank, result in zip(meeting.members, results)}


def run_ranks(
    programs: Sequence[Program],
    feeds: Sequence[Values],
    mesh: Mesh,
    *,
    change: Change | None = None,
    deadline: float = DEADLINE,
) -> list[Values]:
    """One step of every rank, each in its thread; ``change(rank, node, inputs)`` may replace what a call is given.

    Raises the first rank's error when one fails.
    """
    group = ThreadGroup(mesh, deadline)
    outputs: list[Values] = [{} for _ in programs]
    failures: list[GoptError] = []

    def work(rank: int) -> None:
        def call(index: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
            return group.call(rank, node, change(rank, node, inputs) if change else inputs)

        try:
            outputs[rank] = programs[rank].run(feeds[rank], call)
        except GoptError as error:
            failures.append(error)
            group.abort(RunError(f"rank {rank} failed: {error.message}"))
        except Exception as error:
            failures.append(RunError(f"rank {rank} failed: {type(error).__name__}: {error}"))
            group.abort(failures[-1])

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return outputs

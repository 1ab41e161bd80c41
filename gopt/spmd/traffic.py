"""The calls of a step: their kind, their bytes, what they overlap with, and the memory of gathers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from gopt.collectives.layout import parse_shapes, total_elements
from gopt.ir.graph import COMM, Node
from gopt.ir.node_kinds import heavy
from gopt.ir.types import nbytes
from gopt.records.pass_facts import Figure, Share, TrafficKind
from gopt.records.placements import Sharding
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import parts_so_far

GATHERS = frozenset({"AllGather", "Broadcast"})
"""Calls that hand a member's elements to all others."""


class CallContent(str, Enum):
    """Content of a call."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call at its position in the order.

    Positions count the graph's nodes in order; ``len(nodes)`` is the end of the step.

    ``ready``: position of the last source node or call that its inputs depend on; -1: available from the start.
    ``first``: the first node that computes with a result; calls that forward it do not count. ``last``: the last
    reader.
    """

    node: Node
    carries: CallContent
    place: int
    ready: int
    first: int
    last: int
    payload: float
    """Bytes that the group moves together, the mean over groups where shards differ: B of the cost formulas."""
    sent: float
    """Bytes a rank sends, the mean over all ranks (contract section 4)."""
    hidden: bool
    """True if a heavy operator is between the call and ``first``: independent work that can overlap the call."""
    before_use: bool
    """Whether it gathers what a rank holds from the start, for nodes of this very step: it may be issued ahead."""
    beside: float
    """The part of a call of gradients that is statistics or scalars, which a fused call may carry as well."""

    def sent_as(self, kind: CallContent) -> float:
        """Bytes sent of one kind."""
        share = 1 - self.beside if kind is self.carries else self.beside if kind is CallContent.OTHER else 0.0
        return self.sent * share


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares of bytes sent that have independent heavy work to hide behind, and the peak of gathered bytes."""

    hidden_share: Share
    """This share of all bytes sent, 0 to 1, has independent heavy computation to hide behind."""
    by_kind: dict[TrafficKind, Share]
    """The table gives the same share by what is sent; a kind of which nothing is sent is absent."""
    peak_gathered_bytes: Figure
    """Values that are gathered before their use have at most this many bytes at once."""


def find_calls(program: SpmdProgram, parts: Mapping[str, Sharding] | None = None) -> list[CollectiveCall]:
    """Every call of the step's graph in order. Two sweeps; linear.

    ``parts``: values of which ranks hold parts, where they are known.
    """
    nodes = program.graph.nodes
    ready = ready_at(nodes)
    first, last = uses_of_results(nodes)
    work = [0, *accumulate(int(heavy(node)) for node in nodes)]
    end, known = len(nodes), _Kinds(program)
    if parts is None:
        parts = program.sharded or parts_so_far(program)
    found = []
    for place, node in enumerate(nodes):
        if node.domain != COMM:
            continue
        starts = min((first.get(name, end) for name in node.outputs), default=end)
        ends = max((last.get(name, place) for name in node.outputs), default=place)
        payload = _payload(program, node, parts)
        found.append(
            CollectiveCall(
                node, known.of(node), place, ready[place], starts,
                ends,
                payload, _sent(program, node, payload), work[starts] > work[place + 1],
                known.of(node) is CallContent.PARAMETERS and ready[place] < 0 and starts <= ends,
                known.beside(node),
            )
        )  # fmt: skip
    return found


def calls_of(program: SpmdProgram) -> list[CollectiveCall]:
    """Every call of the step's graph in order; they are found once for one list of nodes."""
    return program.once("calls", lambda: find_calls(program))


def measure(calls: Sequence[CollectiveCall]) -> Overlap:
    """Return how many calls can overlap with computation, and the peak of live gathered bytes."""
    shares = {}
    for kind in CallContent:
        sent = [(call.sent_as(kind), call.hidden) for call in calls]
        if sum(each for each, _ in sent):
            shares[kind.value] = _share(sent)
    return Overlap(_share([(call.sent, call.hidden) for call in calls]), shares, peak_gathered(calls))


def peak_gathered(calls: Sequence[CollectiveCall]) -> int:
    """Largest sum of the results of gathers before use, each from its issue to its last reader, in bytes."""
    events = []
    for call in calls:
        if call.before_use:
            events += [(call.place, 1, call.payload), (call.last, 2, -call.payload)]
    now = peak = 0.0
    for _, _, change in sorted(events, key=lambda event: event[:2]):
        now += change
        peak = max(peak, now)
    return round(peak)


def ready_at(nodes: Sequence[Node]) -> dict[int, int]:
    """Return, for the position of each call, that of the last immovable node that it waits for.

    Source nodes and calls are immovable; nodes that passes add between them (casts, joins) move along.
    """
    made: dict[str, int] = {}
    result = {}
    for place, node in enumerate(nodes):
        at, call = place, node.domain == COMM
        if call or node.made_by:
            waits = max([made.get(name, -1) for name in node.reads], default=-1)
            if call:
                result[place] = waits
            else:
                at = waits
        for name in node.outputs:
            made[name] = at
    return result


def uses_of_results(nodes: Sequence[Node]) -> tuple[dict[str, int], dict[str, int]]:
    """Result of a call -> the first node that computes with it, seen through calls; result -> its last reader."""
    results = {name for node in nodes if node.domain == COMM for name in node.outputs}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    end = len(nodes)
    for place in range(end - 1, -1, -1):
        node = nodes[place]
        if results.isdisjoint(node.reads):
            continue
        # A call that reads another's result waits on the link, not on the processor.
        at = min((first.get(name, end) for name in node.outputs), default=end) if node.domain == COMM else place
        for name in results.intersection(node.reads):
            first[name] = min(at, first.get(name, end))
            last.setdefault(name, place)
    return first, last


class _Kinds:
    """Tells what a call carries, by data flow."""

    def __init__(self, program: SpmdProgram) -> None:
        self.types = program.graph.types
        self.gradients = set(program.training.gradients.values())
        self.statistics = program.training.new_statistics

    def of(self, node: Node) -> CallContent:
        if node.op_type in GATHERS:
            own = node.made_by == "statistics" or all(name in self.statistics for name in node.outputs)
            return CallContent.OTHER if own else CallContent.PARAMETERS
        if any(name in self.gradients for name in node.inputs):
            return CallContent.GRADIENTS
        return CallContent.OTHER if all(map(self._small, node.outputs)) else CallContent.GRADIENTS

    def beside(self, node: Node) -> float:
        """Return the fraction, by bytes, of a gradient call that is not gradients."""
        small = [self._small(name) for name in node.outputs]
        if self.of(node) is not CallContent.GRADIENTS or len(node.inputs) != len(small) or not any(small):
            return 0.0
        sizes = [self.types[name].nbytes for name in node.outputs]
        return sum(size for size, each in zip(sizes, small) if each) / max(sum(sizes), 1)

    def _small(self, name: str) -> bool:
        return name in self.statistics or self._one(name)

    def _one(self, name: str) -> bool:
        return name in self.types and self.types[name].elements == 1


def _payload(program: SpmdProgram, node: Node, parts: Mapping[str, Sharding]) -> float:
    """Bytes of the tensors a call moves: of values that ranks have in ``parts``, the mean over the ranks."""
    types = program.graph.types
    if "shapes" in node.attributes:
        dtype = types[node.outputs[0]].dtype
        return nbytes(dtype, total_elements(parse_shapes(node.attributes["shapes"])))
    total = 0.0
    for name in node.outputs if node.op_type == "AllGather" else node.inputs:
        shared_by = math.prod(map(program.mesh.size, parts[name].sharding_axes)) if name in parts else 1
        total += types[name].nbytes / shared_by if name in types else 0
    return total


def _sent(program: SpmdProgram, node: Node, payload: float) -> float:
    """The mean over the group's members of a bandwidth-optimal ring: (n-1)/n·B a round, two for an all-reduce."""
    size = program.mesh.size(str(node.attributes["group"]))
    return (2 if node.op_type == "AllReduce" else 1) * (size - 1) / size * payload


def _share(sent: Sequence[tuple[float, bool]]) -> float:
    total = sum(each for each, _ in sent)
    return round(sum(each for each, hidden in sent if hidden) / total, 6) if total else 0.0

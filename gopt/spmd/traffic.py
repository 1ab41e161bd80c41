"""The calls of a step: kinds, bytes, overlap, and the memory of gathers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from gopt.analysis.isomorphism import signature
from gopt.collectives.layout import parse_shapes, total_elements
from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, Node
from gopt.ir.node_kinds import heavy
from gopt.ir.types import nbytes
from gopt.records.mesh import PIPELINE
from gopt.records.pass_facts import Figure, Share, TrafficKind
from gopt.records.placements import OnMember, Sharding
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers
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
    """A call at the position in the order.

    Positions count the graph's nodes in order; ``len(nodes)`` is the end of the step.

    ``ready``: position of the last source node or call needed for the inputs; -1: available from the start. ``first``:
    the first node computing with a result; forwarding calls do not count. ``last``: the last reader.
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
        """Return the bytes sent of a kind."""
        share = 1 - self.beside if kind is self.carries else self.beside if kind is CallContent.OTHER else 0.0
        return self.sent * share


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares of bytes sent that have independent heavy work to hide behind, and the peak of gathered bytes."""

    hidden_share: Share
    """This share of all bytes sent, 0 to 1, has independent heavy computation to hide behind."""
    by_kind: dict[TrafficKind, Share]
    """The table gives the same share by what is sent; a kind that is not sent is absent."""
    peak_gathered_bytes: Figure
    """Values that are gathered before their use have at most this many bytes at once."""


def find_calls(program: SpmdProgram, parts: Mapping[str, Sharding] | None = None) -> list[CollectiveCall]:
    """Every call of the step's graph in order. Two sweeps; linear.

    ``parts``: the known values held in parts.
    """
    nodes = program.graph.nodes
    ready = ready_at(nodes)
    starts_at, last = uses_of_results(nodes)
    work = [0, *accumulate(int(heavy(node)) for node in nodes)]
    end, kinds = len(nodes), _Kinds(program)
    if parts is None:
        parts = program.sharded or parts_so_far(program)
    calls = []
    for index, node in enumerate(nodes):
        if node.domain != COMM:
            continue
        starts = min((starts_at.get(name, end) for name in node.outputs), default=end)
        ends = max((last.get(name, index) for name in node.outputs), default=index)
        payload = _payload(program, node, parts)
        calls.append(
            CollectiveCall(
                node, kinds.of(node), index, ready[index], starts,
                ends,
                payload, _sent(program, node, payload), work[starts] > work[index + 1],
                kinds.of(node) is CallContent.PARAMETERS and ready[index] < 0 and starts <= ends,
                kinds.beside(node),
            )
        )  # fmt: skip
    return calls


def calls_of(program: SpmdProgram) -> list[CollectiveCall]:
    """Return every call of the step's graph in order, cached for the list of nodes."""
    return program.once("calls", lambda: find_calls(program))


def made_again(nodes: Sequence[Node]) -> frozenset[int]:
    """The ids of calls of values that earlier calls of the kind sent, too: their results are made anew for later
    readers, and meanwhile no copy lives."""
    sent: set[tuple[Hashable, str]] = set()
    again = []
    for node in nodes:
        if node.domain == COMM and node.inputs:
            kind = signature(node)
            values = {(kind, name) for name in node.inputs}
            if values <= sent:
                again.append(id(node))
            sent |= values
    return frozenset(again)


def measure(calls: Sequence[CollectiveCall]) -> Overlap:
    """Return how many calls can overlap with computation, and the peak of live gathered bytes."""
    shares = {}
    for kind in CallContent:
        sent = [(call.sent_as(kind), call.hidden) for call in calls]
        if sum(amount for amount, _ in sent):
            shares[kind.value] = _share(sent)
    return Overlap(_share([(call.sent, call.hidden) for call in calls]), shares, peak_gathered(calls))


def peak_gathered(calls: Sequence[CollectiveCall]) -> int:
    """Largest sum of the results of gathers before use, each from issue to last reader, in bytes."""
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
    """Return position of a call -> position of the last immovable node it waits for.

    Source nodes and calls are immovable; nodes that passes add between them (casts, joins) move along.
    """
    made_at: dict[str, int] = {}
    result = {}
    for index, node in enumerate(nodes):
        at, call = index, node.domain == COMM
        if call or node.made_by:
            waits = max([made_at.get(name, -1) for name in node.reads], default=-1)
            if call:
                result[index] = waits
            else:
                at = waits
        for name in node.outputs:
            made_at[name] = at
    return result


def uses_of_results(nodes: Sequence[Node]) -> tuple[dict[str, int], dict[str, int]]:
    """Return result of a call -> the first node computing with the result, seen through calls; result -> the last
    reader."""
    results = {name for node in nodes if node.domain == COMM for name in node.outputs}
    starts_at: dict[str, int] = {}
    last: dict[str, int] = {}
    end = len(nodes)
    for index in range(end - 1, -1, -1):
        node = nodes[index]
        if results.isdisjoint(node.reads):
            continue
        # A call that reads another's result waits on the link, not on the processor.
        at = min((starts_at.get(name, end) for name in node.outputs), default=end) if node.domain == COMM else index
        for name in results.intersection(node.reads):
            starts_at[name] = min(at, starts_at.get(name, end))
            last.setdefault(name, index)
    return starts_at, last


class _Kinds:
    """Determines the content of a call by data flow."""

    def __init__(self, program: SpmdProgram) -> None:
        self.types = program.graph.types
        self.gradients = set(program.training.gradients.values())
        self.statistics = program.training.new_statistics

    def of(self, node: Node) -> CallContent:
        if node.op_type in GATHERS:
            statistic = node.made_by == "statistics" or all(name in self.statistics for name in node.outputs)
            return CallContent.OTHER if statistic else CallContent.PARAMETERS
        if any(name in self.gradients for name in node.inputs):
            return CallContent.GRADIENTS
        return CallContent.OTHER if all(map(self._small, node.outputs)) else CallContent.GRADIENTS

    def beside(self, node: Node) -> float:
        """Return the fraction of a gradient call's bytes that are no gradients."""
        small = [self._small(name) for name in node.outputs]
        if self.of(node) is not CallContent.GRADIENTS or len(node.inputs) != len(small) or not any(small):
            return 0.0
        sizes = [self.types[name].nbytes for name in node.outputs]
        return sum(size for size, is_small in zip(sizes, small) if is_small) / max(sum(sizes), 1)

    def _small(self, name: str) -> bool:
        return name in self.statistics or self._one(name)

    def _one(self, name: str) -> bool:
        return name in self.types and self.types[name].elements == 1


def _payload(program: SpmdProgram, node: Node, parts: Mapping[str, Sharding]) -> float:
    """Bytes of the tensors moved by a call; of values in ``parts``, the mean over the ranks."""
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
    """The mean over the group's members of a bandwidth-optimal ring: (n-1)/n·B a round."""
    size = program.mesh.size(str(node.attributes["group"]))
    if program.stages is not None and isinstance(node.sharding.on(PIPELINE), OnMember):
        payload /= program.mesh.size(PIPELINE)  # the ranks of the other stages send nothing
    return COLLECTIVES[node.op_type].rounds * (size - 1) / size * payload


def transferred(program: SpmdProgram, times: Mapping[str, int]) -> float:
    """Bytes of values that a rank sends to other stages of a pipeline, the mean over all ranks; ``times``: runs of a
    node in a step, by first output."""
    if program.stages is None:
        return 0.0
    members, total, parts = program.mesh.size(PIPELINE), 0.0, program.sharded or parts_so_far(program)
    for node in program.graph.nodes:
        if transfers(node):
            targets = 1 if node.attributes["target"] >= 0 else members - 1
            for name in node.inputs:
                sharding = parts.get(name)
                shared_by = math.prod(map(program.mesh.size, sharding.sharding_axes)) if sharding is not None else 1
                nbytes = program.graph.types[name].nbytes / shared_by
                total += targets * nbytes * times.get(node.outputs[0], 1) / members
    return total


def _share(sent: Sequence[tuple[float, bool]]) -> float:
    total = sum(amount for amount, _ in sent)
    return round(sum(amount for amount, hidden in sent if hidden) / total, 6) if total else 0.0

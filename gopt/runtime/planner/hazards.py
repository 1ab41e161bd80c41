"""Orders reads and writes of a buffer shared by ranks, by the order of their files.

A rank may overwrite its shard once a collective orders the write after all reads: between the last read, on every rank,
and the write stands a call that no rank leaves before all have entered."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.runtime.partition import CallStep, ProgramStep
from gopt.runtime.planner.assignment import BufferAssignment
from gopt.runtime.shared_memory import GatherRequest


@dataclass(frozen=True, slots=True)
class OrderedGather:
    """A gather with a buffer for sharing. ``step`` writes this rank's shard; before, the step waits for ``waits_for``,
    the result of a call, unless None."""

    request: GatherRequest
    step: int
    waits_for: str | None


def find_hazards(
    buffers: BufferAssignment, steps: Sequence[ProgramStep], aliases: Mapping[int, Mapping[str, str]]
) -> dict[int, OrderedGather]:
    """The gathers with buffers for sharing, by index: a call orders this rank's reads and writes. Linear time.

    ``aliases``: number of a step -> result -> the overwritten operand."""
    shared = {number: gather for number, gather in buffers.gathers.items() if gather.member is not None}
    if not shared:
        return {}
    positions = {step.index: position for position, step in enumerate(steps) if isinstance(step, CallStep)}
    members = {str(gather.call.attributes["group"]): gather.member or 0 for gather in shared.values()}
    happens_before = HappensBefore(steps, buffers.graph, members)
    remote: dict[int, list[str]] = {}
    """Number of a gather -> values of its buffer that other ranks write, wholly or in part."""
    for name, extent in buffers.slices.items():
        if extent.call in shared and not shared[extent.call].owns(extent):
            remote.setdefault(extent.call, []).append(name)
    writers = {output: step for step, rows in aliases.items() for output in rows}
    written = {row: step for step, rows in aliases.items() for row in rows.values()}
    gathers: dict[int, OrderedGather] = {}
    for number, gather in shared.items():
        sent, group = gather.call.inputs[0], str(gather.call.attributes["group"])
        # What is not written in place is copied by the gather at the latest; but a state that is a shard, and is not
        # written in place, would have to be copied in every step.
        writer = written.get(sent) if sent in buffers.local_shards else writers.get(sent, positions[number])
        if writer is None:
            continue
        reads = happens_before.first_call_after(group, happens_before.last(remote.get(number, [])))
        writes, waits_for = happens_before.last_barrier_before(group, writer), None
        if writes < reads:
            call, writes = happens_before.first(group, reads, writer)
            if call is None:
                continue
            waits_for = call.outputs[0]
        calls = tuple(happens_before.first_call_after(group, positions[call]) - 1 for call in gather.calls)
        request = GatherRequest(gather.call, gather.count, gather.dtype, calls, reads, writes)
        gathers[number] = OrderedGather(request, writer, waits_for)
    return gathers


class HappensBefore:
    """The steps at which a rank reads values, and the calls entered by all ranks by then. Built in linear time."""

    def __init__(self, steps: Sequence[ProgramStep], graph: Graph, members: Mapping[str, int]) -> None:
        """``steps`` of ``graph``; ``members``: group -> this rank's position in the group, for the groups that
        matter."""
        self._last: dict[str, int] = {}
        """Value -> the number of the last step that reads it."""
        self._at: dict[str, list[int]] = {group: [] for group in members}
        """Group -> the numbers of the steps that are its calls."""
        self._barriers: dict[str, list[tuple[CallStep, int]]] = {group: [] for group in members}
        """Group -> calls that no rank leaves before all have entered, with their numbers among the group's calls."""
        self._ended: list[int] = []
        """For every step, the last call of the file that is known to have ended when the step begins: calls are made
        one after the other."""
        steps_of: dict[str, int] = {}
        types = graph.inputs | graph.types
        ended = -1
        for position, step in enumerate(steps):
            ended = max([ended, *(steps_of[name] for name in step.inputs if name in steps_of)])
            self._ended.append(step.index - 1 if isinstance(step, CallStep) else ended)
            self._last.update(dict.fromkeys(step.inputs, position))
            if isinstance(step, CallStep):
                steps_of.update(dict.fromkeys(step.outputs, step.index))
                group = str(step.node.attributes["group"])
                if group in members:
                    if step.outputs and _is_barrier(step, members[group], types):
                        self._barriers[group].append((step, len(self._at[group])))
                    self._at[group].append(position)

    def last(self, names: Iterable[str]) -> int:
        """The number of the last step to read one of these values, or -1."""
        return max((self._last.get(name, -1) for name in names), default=-1)

    def first_call_after(self, group: str, step: int) -> int:
        """The index, among the calls of a group, of the first call after a step."""
        return bisect_right(self._at[group], step)

    def last_barrier_before(self, group: str, step: int) -> int:
        """The index, among the calls of a group, of the last call entered by all ranks before a step, or -1."""
        barriers = self._barriers[group]
        count = bisect_right(barriers, self._ended[step], key=lambda entry: entry[0].index)
        return barriers[count - 1][1] if count else -1

    def first(self, group: str, least: int, step: int) -> tuple[CallStep | None, int]:
        """The first call of a group, from the index ``least`` on, entered by all ranks when a step has waited for the
        call. None and -1 without such a call before the step."""
        barriers = self._barriers[group]
        index = bisect_left(barriers, least, key=lambda entry: entry[1])
        exists = index < len(barriers) and self._at[group][barriers[index][1]] < step
        return barriers[index] if exists else (None, -1)


def _is_barrier(call: CallStep, member: int, types: Mapping[str, TensorType]) -> bool:
    """Return whether no rank has its result before all have entered the call: a reduction with a result that is not
    empty."""
    cuts = call.node.attributes.get("cuts")
    if call.node.op_type == "ReduceScatter" and cuts is not None:
        return bool(cuts[member + 1] > cuts[member])
    inputs = [types[name] for name in call.inputs if name in types]
    return call.node.op_type == "AllReduce" and any(type.static and type.elements for type in inputs)

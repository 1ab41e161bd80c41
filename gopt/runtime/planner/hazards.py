"""When ranks read and write what they have in common, by the order of their files.

A rank may write its part of the next values when nobody reads the last ones any more: between all reads, on every rank,
and all writes stands a call that no rank leaves before all have come to it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.runtime.allocator import SharedBuffer
from gopt.runtime.partition import Call, ProgramStep
from gopt.runtime.planner.buffer_assignment import BufferAssignment


def find_hazards(
    buffers: BufferAssignment, steps: Sequence[ProgramStep], aliases: Mapping[int, Mapping[str, str]]
) -> tuple[dict[int, SharedBuffer], dict[int, list[str]]]:
    """Number of a gather -> its common room, with when this rank reads and writes it, where a call stands between;
    number of a step -> results of calls on which it waits for that, though it reads none. ``over``: number of a step ->
    result -> the row that it is written over. Linear.
    """
    if not buffers.common:
        return {}, {}
    calls = {step.index: (place, step.node) for place, step in enumerate(steps) if isinstance(step, Call)}
    groups = {number: str(calls[number][1].attributes["group"]) for number in buffers.common}
    happens_before = HappensBefore(
        steps, buffers.graph, {groups[number]: common.member for number, common in buffers.common.items()}
    )
    theirs: dict[int, list[str]] = {}
    """Number of a gather -> values that lie in its room, not wholly in this rank's own part: others write there."""
    for name, slice_ in buffers.slices.items():
        if slice_.call in buffers.common and not buffers.common[slice_.call].owns(slice_.start, slice_.stop):
            theirs.setdefault(slice_.call, []).append(name)
    made = {output: place for place, rows in aliases.items() for output in rows}
    written = {row: place for place, rows in aliases.items() for row in rows.values()}
    found: dict[int, SharedBuffer] = {}
    late: dict[int, list[str]] = {}
    for number, common in buffers.common.items():
        place, node = calls[number]
        given, group = node.inputs[0], groups[number]
        # What is made anew comes at the latest with the gather; but a shard that is a state and is not written where it
        # lies would have to be brought there.
        writer = written.get(given) if given in buffers.local_shards else made.get(given, place)
        if writer is None:
            continue
        reads = happens_before.first_call_after(group, happens_before.last(theirs.get(number, [])))
        writes = happens_before.last_barrier_before(group, writer)
        if writes < reads:
            call, writes = happens_before.first(group, reads, writer)
            if call is None:
                continue
            late.setdefault(writer, []).append(call.outputs[0])
        # Of the group's calls, as all members know them.
        gathers = tuple(happens_before.first_call_after(group, calls[each][0]) - 1 for each in common.calls)
        found[number] = replace(common, reads=reads, writes=writes, calls=gathers)
    return found, late


class HappensBefore:
    """When a rank's steps read, and which calls all ranks have come to by then. Linear to make."""

    def __init__(self, steps: Sequence[ProgramStep], graph: Graph, members: Mapping[str, int]) -> None:
        """``graph``: of the steps. ``members``: group -> the rank's place among them, of the groups that matter."""
        self._last: dict[str, int] = {}
        """Value -> the number of the last step that reads it."""
        self._at: dict[str, list[int]] = {group: [] for group in members}
        """Group -> the numbers of the steps that are its calls."""
        self._barriers: dict[str, list[tuple[Call, int]]] = {group: [] for group in members}
        """Group -> calls that no rank leaves before all have come, with their numbers among those of the group."""
        self._ended: list[int] = []
        """For every step, the last call of the file that is known to have ended when the step begins: calls are made
        one after the other."""
        made: dict[str, int] = {}
        types = graph.inputs | graph.types
        ended = -1
        for place, step in enumerate(steps):
            ended = max([ended, *(made[name] for name in step.inputs if name in made)])
            self._ended.append(step.index - 1 if isinstance(step, Call) else ended)
            self._last.update(dict.fromkeys(step.inputs, place))
            if isinstance(step, Call):
                made.update(dict.fromkeys(step.outputs, step.index))
                group = str(step.node.attributes["group"])
                if group in members:
                    if step.outputs and _is_barrier(step, members[group], types):
                        self._barriers[group].append((step, len(self._at[group])))
                    self._at[group].append(place)

    def last(self, names: Iterable[str]) -> int:
        """The number of the last step that reads one of these values, or -1."""
        return max((self._last.get(name, -1) for name in names), default=-1)

    def first_call_after(self, group: str, step: int) -> int:
        """The number, among the calls of a group, of the first that is made behind a step."""
        return bisect_right(self._at[group], step)

    def last_barrier_before(self, group: str, step: int) -> int:
        """The number, among the calls of a group, of the last that all ranks have come to before a step, or -1."""
        met = self._barriers[group]
        found = bisect_right(met, self._ended[step], key=lambda each: each[0].index)
        return met[found - 1][1] if found else -1

    def first(self, group: str, least: int, step: int) -> tuple[Call | None, int]:
        """The first call of a group, from its number ``least`` on, that all ranks have come to when a step has waited
        for it; None and -1 where there is none in front of the step."""
        met = self._barriers[group]
        found = bisect_left(met, least, key=lambda each: each[1])
        here = found < len(met) and self._at[group][met[found][1]] < step
        return met[found] if here else (None, -1)


def _is_barrier(call: Call, member: int, types: Mapping[str, TensorType]) -> bool:
    """Whether nobody has its result before all have given their part: of a reduction, where a rank's result is not
    empty."""
    cuts = call.node.attributes.get("cuts")
    if call.node.op_type == "ReduceScatter" and cuts is not None:
        return bool(cuts[member + 1] > cuts[member])
    given = [types[name] for name in call.inputs if name in types]
    return call.node.op_type == "AllReduce" and any(type.static and type.elements for type in given)

"""Where values lie so that calls need no copies: what one sends together, and the states that one delivers together.

States that one gather delivers lie one behind the other in its room, from the first step on. A rank's own shard of
them is then a piece of that room: the update reads it there, and writes it there, and the gather fills in the rest.
All of it is decided before the first step, from the order of the file: what stands in front of a call has run when the
call is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType, known, numpy_dtype
from gopt.runtime.allocator import NO_ALLOCATOR, Allocator, SharedBuffer
from gopt.runtime.memory import aligned, unpack_views
from gopt.runtime.proto import is_constant
from gopt.runtime.session import Array

_REDUCES = frozenset({"AllReduce", "Reduce", "ReduceScatter"})
_UNSUPPORTED = frozenset({"bfloat16", "bool", "string"})
"""Types that NumPy does not hold, or that travel as others."""


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Elements ``start`` to ``stop`` of the room of a gather, ``call`` by its number in the file."""

    call: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BufferAssignment:
    """``graph``: without the nodes that only cut pieces of states; what those made is fed."""

    graph: Graph
    send_views: dict[str, Array] = field(default_factory=dict)
    """Value that a call reads -> its place in the call's buffer."""
    donatable: frozenset[int] = frozenset()
    """Numbers of the calls that may write over what they read: nobody reads it after them."""
    engine_buffers: dict[int, Array] = field(default_factory=dict)
    """Number of a call among those -> its buffer, flat, where that is memory lent for it."""
    gather_buffers: dict[int, Array] = field(default_factory=dict)
    """Number of a gather -> its room, flat."""
    common: dict[int, SharedBuffer] = field(default_factory=dict)
    """Number of a gather, the first for its room -> the room, where all ranks of a host may have it in common."""
    local_shards: dict[str, int] = field(default_factory=dict)
    """State that lies in such a room as this rank's own part -> the number of that gather."""
    states: dict[str, Array] = field(default_factory=dict)
    """State -> its place in such a room."""
    gathered_views: dict[str, Array] = field(default_factory=dict)
    """What a gather makes -> the same place."""
    slices: dict[str, BufferSlice] = field(default_factory=dict)
    """Value -> where it lies, of states and what was cut of them."""
    buffer_values: dict[int, list[str]] = field(default_factory=dict)
    """Number of a gather -> the values of which pieces lie in its room."""
    own: dict[str, frozenset[BufferSlice]] = field(default_factory=dict)
    """What a gather sends -> pieces of its room, one of which is the rank's own."""

    def views(self) -> dict[str, Array]:
        """States, what was cut of them and what becomes of them -> where it lies."""
        types = self.graph.types
        views = {
            name: self.gather_buffers[slice_.call][slice_.start : slice_.stop].reshape(types[name].dims)
            for name, slice_ in self.slices.items() if name not in self.states
        }  # fmt: skip
        return {**views, **self.states, **self.gathered_views}

    def without(self, local_shards: Container[str]) -> BufferAssignment:
        """The same, but for these shards, which lie elsewhere."""
        calls = {call for name, call in self.local_shards.items() if name in local_shards}
        gone = {id(buffer) for call in calls for buffer in (self.common[call].memory, self.common[call].alias)}
        there = {name for name, slice_ in self.slices.items() if slice_.call in calls}
        return replace(
            self,
            gather_buffers={call: buffer for call, buffer in self.gather_buffers.items() if id(buffer) not in gone},
            common={call: buffer for call, buffer in self.common.items() if call not in calls},
            local_shards={name: call for name, call in self.local_shards.items() if call not in calls},
            states={name: place for name, place in self.states.items() if name not in there},
            gathered_views={name: place for name, place in self.gathered_views.items() if name not in there},
            slices={name: slice_ for name, slice_ in self.slices.items() if name not in there},
            buffer_values={call: names for call, names in self.buffer_values.items() if call not in calls},
        )

    def aliases_of(self, names: Iterable[str]) -> frozenset[str]:
        """These values and all others that lie in their rooms: whose memory may change where that of ``names`` does."""
        given = frozenset(names)
        calls = {self.slices[name].call for name in given if name in self.slices}
        return given.union(*(self.buffer_values[call] for call in calls))

    def input_alias(self, name: str, rows: Sequence[str], place: int, last: Mapping[str, int]) -> str | None:
        """The row over which a step may write what a gather sends: the rank's own piece, when that is its last reader
        and all else in that room has been read. ``last``: value -> number of the last step that reads it."""
        own = self.own.get(name, frozenset())
        row = next((row for row in rows if self.slices.get(row) in own), None)
        if row is None:
            return None
        others = (each for each in self.buffer_values[self.slices[row].call] if each != row)
        free = last[row] == place and all(last.get(each, -1) < place for each in others)
        return row if free else None


def assign_buffers(graph: Graph, replaces: Mapping[str, str], allocator: Allocator = NO_ALLOCATOR) -> BufferAssignment:
    """Rooms for a rank's graph; ``replaces``: output -> the state that it is at the next step. Linear."""
    at = [place for place, node in enumerate(graph.nodes) if node.domain == COMM]
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.reads, place))
    states = {number: _gathered_states(graph.nodes[place], graph, replaces) for number, place in enumerate(at)}
    slices = _state_slices(graph, states)
    # A gather writes its room: whoever reads an old value must stand in front of it.
    late = {slice_.call for name, slice_ in slices.items() if last.get(name, -1) > at[slice_.call]}
    slices = {name: slice_ for name, slice_ in slices.items() if slice_.call not in late}
    cut = {name for name in slices if name not in graph.inputs}
    nodes = [node for node in graph.nodes if cut.isdisjoint(node.outputs)]
    read = {name for node in nodes for name in node.reads}
    rest = replace(graph, nodes=nodes, inputs=graph.inputs | {name: graph.types[name] for name in cut & read})
    # What a gather sends or makes may lie where states do: ranks that average parameters must not write there.
    gathers = [graph.nodes[place] for place in at if graph.nodes[place].op_type == "AllGather"]
    lasts = cut.union(*((*node.inputs, *node.outputs) for node in gathers))
    donatable = frozenset(number for number, place in enumerate(at) if _is_donatable(place, graph, last, lasts))
    send_views, engine_buffers = _assign_send_buffers(rest, donatable, allocator)
    buffers = BufferAssignment(
        rest,
        send_views=send_views,
        donatable=donatable,
        engine_buffers=engine_buffers,
        slices={name: slice_ for name, slice_ in slices.items() if name in graph.inputs or name in read},
    )
    for number, names in states.items():
        if names and number not in late:
            node = graph.nodes[at[number]]
            types = [graph.inputs[name] for name in names]
            count, dtype = sum(type.elements for type in types), numpy_dtype(types[0].dtype)
            common = allocator.allocate_shared(node, count, dtype)
            if common is not None:
                buffers.common[number] = replace(common, calls=(number,))
            flat = aligned([count], dtype) if common is None else common.memory
            views = unpack_views(flat, [type.dims for type in types])
            buffers.gather_buffers[number] = flat
            buffers.states.update(zip(names, views))
            buffers.gathered_views.update(zip(node.outputs, views))
            if node.inputs[0] not in graph.outputs:
                buffers.own[node.inputs[0]] = frozenset(
                    BufferSlice(number, *cut) for cut in pairwise(node.attributes["cuts"])
                )
    _assign_shared_gathers(buffers, replaces, at, last, allocator)
    for name, slice_ in buffers.slices.items():
        buffers.buffer_values.setdefault(slice_.call, []).append(name)
    return buffers


def _assign_shared_gathers(
    buffers: BufferAssignment,
    replaces: Mapping[str, str],
    at: Sequence[int],
    last: Mapping[str, int],
    allocator: Allocator,
) -> None:
    """Rooms for what is gathered of states that are shards: where all ranks have one in common, the shards themselves
    lie in it, and nothing has to be gathered."""
    graph = buffers.graph
    calls: dict[str, list[int]] = {}
    nodes = [node for node in graph.nodes if node.domain == COMM]
    for number, node in enumerate(nodes):
        if node.op_type == "AllGather" and "cuts" in node.attributes:
            calls.setdefault(node.inputs[0], []).append(number)
    for name in (replaces[made] for made in graph.outputs if made in replaces):
        numbers = calls.get(name, [])
        first = nodes[numbers[0]] if numbers else None
        if (
            first is None
            or name in buffers.slices
            or name not in graph.inputs
            or not _are_identical(nodes, numbers, graph)
        ):
            continue
        # What the next one fills again is not read any more.
        ends = [max((last.get(made, -1) for made in nodes[number].outputs), default=-1) for number in numbers]
        if any(end > at[following] for end, following in zip(ends, numbers[1:])):
            continue
        types = [graph.types[made] for made in first.outputs]
        common = allocator.allocate_shared(first, sum(type.elements for type in types), numpy_dtype(types[0].dtype))
        if common is None or common.local_shard.size != graph.inputs[name].elements:
            continue
        buffers.common[numbers[0]] = replace(common, calls=tuple(numbers))
        buffers.local_shards[name] = numbers[0]
        start = common.cuts[common.member]
        buffers.slices[name] = BufferSlice(numbers[0], start, start + common.local_shard.size)
        buffers.states[name] = common.local_shard.reshape(graph.inputs[name].dims)
        for number in numbers:
            buffers.gather_buffers[number] = common.memory if number == numbers[0] else common.alias
            stop = 0
            for made, place in zip(nodes[number].outputs, unpack_views(common.memory, [type.dims for type in types])):
                start, stop = stop, stop + place.size
                buffers.slices[made] = BufferSlice(numbers[0], start, stop)
                buffers.gathered_views[made] = place


def _are_identical(nodes: Sequence[Node], numbers: Sequence[int], graph: Graph) -> bool:
    """Whether these gathers make the same, of types that NumPy holds, and for nobody but the step."""
    first = nodes[numbers[0]]
    types = [[graph.types.get(made) for made in nodes[number].outputs] for number in numbers]
    plain = all(_is_plain(type) for each in types for type in each)
    alike = all(nodes[number].attributes == first.attributes for number in numbers)
    made = {name for number in numbers for name in nodes[number].outputs}
    return plain and alike and all(each == types[0] for each in types) and graph.outputs.keys().isdisjoint(made)


def _is_plain(type: TensorType | None) -> bool:
    """Whether NumPy holds it, and its size is known."""
    return type is not None and type.static and known(type.dtype) and type.dtype not in _UNSUPPORTED


def _gathered_states(node: Node, graph: Graph, replaces: Mapping[str, str]) -> list[str]:
    """The states that a call makes for the next step, where it makes nothing else; none for other calls."""
    states = [replaces.get(name, "") for name in node.outputs]
    if node.op_type != "AllGather" or "cuts" not in node.attributes or not all(name in graph.inputs for name in states):
        return []
    types = [graph.inputs[name] for name in states]
    same = all(graph.types.get(made) == type and _is_plain(type) for made, type in zip(node.outputs, types))
    one = len({type.dtype for type in types}) == 1
    return states if same and one and graph.outputs.keys().isdisjoint(states) else []


def _state_slices(graph: Graph, states: Mapping[int, Sequence[str]]) -> dict[str, BufferSlice]:
    """States and what is cut of them: where each lies in the room of its call."""
    slices: dict[str, BufferSlice] = {}
    for call, names in states.items():
        start = 0
        for name in names:
            slices[name] = BufferSlice(call, start, start + graph.inputs[name].elements)
            start = slices[name].stop
    if slices:
        for node in graph.nodes:
            made = node.outputs[0] if len(node.outputs) == 1 else ""
            type = graph.types.get(made)
            if node.inputs and node.inputs[0] in slices and type is not None and type.static:
                slice_ = _slice_of(node, slices, graph)
                fits = slice_ is not None and slice_.stop - slice_.start == type.elements
                if slice_ is not None and fits and made not in graph.outputs:  # else the node itself says what is wrong
                    slices[made] = slice_
    return slices


def _slice_of(node: Node, slices: Mapping[str, BufferSlice], graph: Graph) -> BufferSlice | None:
    given = slices[node.inputs[0]]
    if node.is_a("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"):
        return given
    if node.is_a("Concat") and all(name in slices for name in node.inputs):
        parts = [slices[name] for name in node.inputs]
        follow = all(a.call == b.call and a.stop == b.start for a, b in pairwise(parts))
        return BufferSlice(given.call, given.start, parts[-1].stop) if follow and node.attributes["axis"] == 0 else None
    shape = (graph.inputs.get(node.inputs[0]) or graph.types[node.inputs[0]]).shape
    if node.is_a("Slice") and shape is not None and len(shape) == 1 and len(node.inputs) >= 3:
        if not all(is_constant(graph, name) for name in node.inputs[1:] if name):
            return None
        bounds = [graph.initializers[name].numpy().reshape(-1).tolist() if name else [] for name in node.inputs[1:]]
        start, stop, *more = (each[0] if each else None for each in bounds)
        if more[1:] in ([], [None], [1]):
            start, stop, _ = slice(start, stop).indices(given.stop - given.start)
            return BufferSlice(given.call, given.start + start, given.start + max(start, stop))
    return None


def packed_inputs(graph: Graph) -> list[tuple[tuple[str, ...], list[TensorType]]]:
    """What calls send together and could lie in one buffer, with the types. Inputs and constants lie elsewhere, and so
    does what two calls send."""
    return [(tuple(call.inputs), types) for _, call, types in _packable_calls(graph) if _can_pack(types)]


def _can_pack(types: Sequence[TensorType]) -> bool:
    return len(types) > 1 and all(type.dtype not in _UNSUPPORTED for type in types)


def _packable_calls(graph: Graph) -> Iterator[tuple[int, Node, list[TensorType]]]:
    """Calls whose inputs could lie in one buffer, with their numbers and the types."""
    calls = [node for node in graph.nodes if node.domain == COMM]
    made = {name for node in graph.nodes if node.domain != COMM for name in node.outputs} - set(graph.outputs)
    send_views = Counter(name for call in calls for name in call.inputs)
    for number, call in enumerate(calls):
        types = [type for name in call.inputs if (type := graph.types.get(name)) is not None and type.static]
        free = all(name in made and send_views[name] == 1 for name in call.inputs)
        if not types or len(types) < len(call.inputs) or not free:
            continue
        if all(known(type.dtype) and type.dtype not in ("bool", "string") for type in types):
            yield number, call, types


def _assign_send_buffers(
    graph: Graph, donatable: frozenset[int], allocator: Allocator
) -> tuple[dict[str, Array], dict[int, Array]]:
    """Places of what calls send, and the buffers that were lent: else a single tensor needs no place of its own."""
    send_views: dict[str, Array] = {}
    engine_buffers: dict[int, Array] = {}
    for number, call, types in _packable_calls(graph):
        count, dtype = sum(type.elements for type in types), numpy_dtype(types[0].dtype)
        flat = allocator.allocate(call, count, dtype) if number in donatable else None
        if flat is not None:
            engine_buffers[number] = flat
        elif _can_pack(types):
            flat = aligned([count], dtype)
        if flat is not None:
            send_views.update(zip(call.inputs, unpack_views(flat, [type.dims for type in types])))
    return send_views, engine_buffers


def _is_donatable(place: int, graph: Graph, last: Mapping[str, int], lasts: set[str]) -> bool:
    node = graph.nodes[place]
    if node.op_type not in _REDUCES or len(set(node.inputs)) < len(node.inputs):
        return False
    if not graph.outputs.keys().isdisjoint(node.outputs):
        return False  # a state lives on in the next step, which writes what it sends to the same place
    return all(
        last[name] == place and name not in graph.outputs and name not in graph.inputs and name not in lasts
        and name not in graph.initializers for name in node.inputs
    )  # fmt: skip

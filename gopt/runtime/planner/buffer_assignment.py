"""Assigns values to buffers, so that calls need no copies: the data sent by one call, and the states made by one
gather.

States made by one gather for the next step are adjacent in the gather's buffer from the first step on. A rank's own
shard is a slice of the buffer: the update reads and writes the slice, and the gather fills the rest. All assignments
are made before memory is allocated, from the order of the file: everything before a call has run at the call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType, known, numpy_dtype
from gopt.operators.kinds import VIEWS
from gopt.runtime.planner.assignment import BufferAssignment, BufferSlice, GatherBuffer, MemberIndex, SendBuffer
from gopt.runtime.proto import is_constant

_REDUCES = frozenset({"AllReduce", "Reduce", "ReduceScatter"})
_UNSUPPORTED = frozenset({"bfloat16", "bool", "string"})
"""Types that NumPy does not hold, or that a call sends as another type."""


def assign_buffers(graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None = None) -> BufferAssignment:
    """The buffers of a rank's graph; ``replaces``: output -> the state at the next step. Linear.

    ``member``: None where ranks share no memory.
    """
    at = [position for position, node in enumerate(graph.nodes) if node.domain == COMM]
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.reads, place))
    states = {number: _gathered_states(graph.nodes[position], graph, replaces) for number, position in enumerate(at)}
    slices = _state_slices(graph, states)
    # A gather writes its buffer: readers of the old values must run before it.
    late = {extent.call for name, extent in slices.items() if last.get(name, -1) > at[extent.call]}
    slices = {name: extent for name, extent in slices.items() if extent.call not in late}
    removed = {name for name in slices if name not in graph.inputs}
    nodes = [node for node in graph.nodes if removed.isdisjoint(node.outputs)]
    read = {name for node in nodes for name in node.reads}
    rest = replace(graph, nodes=nodes, inputs=graph.inputs | {name: graph.types[name] for name in removed & read})
    # What a gather sends or makes may lie where states do: ranks that average parameters must not write there.
    gathers = [graph.nodes[position] for position in at if graph.nodes[position].op_type == "AllGather"]
    lasts = removed.union(*((*node.inputs, *node.outputs) for node in gathers))
    donatable = frozenset(number for number, position in enumerate(at) if _is_donatable(position, graph, last, lasts))
    buffers = BufferAssignment(
        rest,
        sends=_send_buffers(rest, donatable),
        donatable=donatable,
        slices={name: extent for name, extent in slices.items() if name in graph.inputs or name in read},
    )
    for number, names in states.items():
        if names and number not in late:
            _add_state_gather(buffers, number, graph.nodes[at[number]], names, member)
    if member is not None:
        _add_shard_gathers(buffers, replaces, at, last, member)
    for name, extent in buffers.slices.items():
        buffers.buffer_values.setdefault(extent.call, []).append(name)
    return buffers


def _add_state_gather(
    buffers: BufferAssignment, number: int, node: Node, names: Sequence[str], member: MemberIndex | None
) -> None:
    """Add the buffer of a gather of states for the next step."""
    graph = buffers.graph
    types = [graph.inputs[name] for name in names]
    slices = _consecutive(number, types)
    buffers.gathers[number] = GatherBuffer(
        node, (number,), slices[-1][0].stop, numpy_dtype(types[0].dtype),
        dict(zip(names, slices)), dict(zip(node.outputs, slices)), _member(node, member),
    )  # fmt: skip
    if node.inputs[0] not in graph.outputs:
        cuts = node.attributes["cuts"]
        buffers.own_slices[node.inputs[0]] = frozenset(BufferSlice(number, *pair) for pair in pairwise(cuts))


def _add_shard_gathers(
    buffers: BufferAssignment, replaces: Mapping[str, str], at: Sequence[int], last: Mapping[str, int],
    member: MemberIndex,
) -> None:  # fmt: skip
    """Add buffers of values gathered from sharded states.

    These buffers pay only if all members share one buffer: the shards then lie there, and nothing has to be
    gathered."""
    graph = buffers.graph
    calls: dict[str, list[int]] = {}
    nodes = [node for node in graph.nodes if node.domain == COMM]
    for number, node in enumerate(nodes):
        if node.op_type == "AllGather" and "cuts" in node.attributes:
            calls.setdefault(node.inputs[0], []).append(number)
    for name in (replaces[output] for output in graph.outputs if output in replaces):
        numbers = calls.get(name, [])
        free = name not in buffers.slices and name in graph.inputs
        if numbers and free and _are_identical(nodes, numbers, graph) and _in_turn(nodes, numbers, at, last):
            _add_shard_gather(buffers, name, nodes, numbers, member)


def _in_turn(nodes: Sequence[Node], numbers: Sequence[int], at: Sequence[int], last: Mapping[str, int]) -> bool:
    """Return whether the result of each gather has been read when the next gather fills the buffer."""
    ends = [max((last.get(output, -1) for output in nodes[number].outputs), default=-1) for number in numbers]
    return all(end <= at[following] for end, following in zip(ends, numbers[1:]))


def _add_shard_gather(
    buffers: BufferAssignment, name: str, nodes: Sequence[Node], numbers: Sequence[int], member: MemberIndex
) -> None:
    graph, leader = buffers.graph, nodes[numbers[0]]
    types = [graph.types[output] for output in leader.outputs]
    cuts, position = leader.attributes["cuts"], _member(leader, member)
    assert position is not None
    shard, shape = BufferSlice(numbers[0], cuts[position], cuts[position + 1]), graph.inputs[name].dims
    if shard.stop - shard.start != graph.inputs[name].elements:
        return
    slices = _consecutive(numbers[0], types)
    outputs = {output: extent for number in numbers for output, extent in zip(nodes[number].outputs, slices)}
    buffers.gathers[numbers[0]] = GatherBuffer(
        leader, tuple(numbers), slices[-1][0].stop, numpy_dtype(types[0].dtype), {name: (shard, shape)}, outputs,
        position,
    )  # fmt: skip
    buffers.local_shards[name] = numbers[0]
    buffers.slices[name] = shard
    buffers.slices.update((output, extent) for output, (extent, _) in outputs.items())


def _member(node: Node, member: MemberIndex | None) -> int | None:
    return None if member is None else member(str(node.attributes["group"]))


def _consecutive(call: int, types: Sequence[TensorType]) -> list[tuple[BufferSlice, tuple[int, ...]]]:
    """Elements and shapes of adjacent tensors from the beginning of a buffer."""
    slices, start = [], 0
    for type in types:
        slices.append((BufferSlice(call, start, start + type.elements), type.dims))
        start += type.elements
    return slices


def _are_identical(nodes: Sequence[Node], numbers: Sequence[int], graph: Graph) -> bool:
    """Return whether these gathers have the same result, in types of NumPy, read by the step alone."""
    leader = nodes[numbers[0]]
    types = [[graph.types.get(output) for output in nodes[number].outputs] for number in numbers]
    plain = all(_is_plain(type) for row in types for type in row)
    alike = all(nodes[number].attributes == leader.attributes for number in numbers)
    results = {name for number in numbers for name in nodes[number].outputs}
    return plain and alike and all(row == types[0] for row in types) and graph.outputs.keys().isdisjoint(results)


def _is_plain(type: TensorType | None) -> bool:
    """Return whether NumPy has the type, and the size is known."""
    return type is not None and type.static and known(type.dtype) and type.dtype not in _UNSUPPORTED


def _gathered_states(node: Node, graph: Graph, replaces: Mapping[str, str]) -> list[str]:
    """The states that a call makes for the next step; empty if the call makes another value too."""
    states = [replaces.get(name, "") for name in node.outputs]
    if node.op_type != "AllGather" or "cuts" not in node.attributes or not all(name in graph.inputs for name in states):
        return []
    types = [graph.inputs[name] for name in states]
    fits = all(graph.types.get(output) == type and _is_plain(type) for output, type in zip(node.outputs, types))
    one = len({type.dtype for type in types}) == 1
    return states if fits and one and graph.outputs.keys().isdisjoint(states) else []


def _state_slices(graph: Graph, states: Mapping[int, Sequence[str]]) -> dict[str, BufferSlice]:
    """States and slices of states, with their offsets in the gather's buffer."""
    slices: dict[str, BufferSlice] = {}
    for call, names in states.items():
        start = 0
        for name in names:
            slices[name] = BufferSlice(call, start, start + graph.inputs[name].elements)
            start = slices[name].stop
    if slices:
        for node in graph.nodes:
            output = node.outputs[0] if len(node.outputs) == 1 else ""
            type = graph.types.get(output)
            if node.inputs and node.inputs[0] in slices and type is not None and type.static:
                extent = _slice_of(node, slices, graph)
                fits = extent is not None and extent.stop - extent.start == type.elements
                if extent is not None and fits and output not in graph.outputs:  # else it fails when it runs
                    slices[output] = extent
    return slices


def _slice_of(node: Node, slices: Mapping[str, BufferSlice], graph: Graph) -> BufferSlice | None:
    whole = slices[node.inputs[0]]
    if node.is_in(VIEWS):
        return whole
    if node.is_a("Concat") and all(name in slices for name in node.inputs):
        parts = [slices[name] for name in node.inputs]
        follow = all(a.call == b.call and a.stop == b.start for a, b in pairwise(parts))
        return BufferSlice(whole.call, whole.start, parts[-1].stop) if follow and node.attributes["axis"] == 0 else None
    shape = (graph.inputs.get(node.inputs[0]) or graph.types[node.inputs[0]]).shape
    if node.is_a("Slice") and shape is not None and len(shape) == 1 and len(node.inputs) >= 3:
        if not all(is_constant(graph, name) for name in node.inputs[1:] if name):
            return None
        bounds = [graph.initializers[name].numpy().reshape(-1).tolist() if name else [] for name in node.inputs[1:]]
        start, stop, *more = (bound[0] if bound else None for bound in bounds)
        if more[1:] in ([], [None], [1]):
            start, stop, _ = slice(start, stop).indices(whole.stop - whole.start)
            return BufferSlice(whole.call, whole.start + start, whole.start + max(start, stop))
    return None


def packed_inputs(graph: Graph) -> list[tuple[tuple[str, ...], list[TensorType]]]:
    """Values that calls send together and that could lie in one buffer, with types.

    Inputs and constants have memory already, and a value sent by two calls cannot lie in two buffers."""
    return [(tuple(call.inputs), types) for _, call, types in _packable_calls(graph) if _can_pack(types)]


def _can_pack(types: Sequence[TensorType]) -> bool:
    return len(types) > 1 and all(type.dtype not in _UNSUPPORTED for type in types)


def _packable_calls(graph: Graph) -> Iterator[tuple[int, Node, list[TensorType]]]:
    """Calls with inputs that could lie in one buffer, with indices and types."""
    calls = [node for node in graph.nodes if node.domain == COMM]
    results = {name for node in graph.nodes if node.domain != COMM for name in node.outputs} - set(graph.outputs)
    senders = Counter(name for call in calls for name in call.inputs)
    for number, call in enumerate(calls):
        types = [type for name in call.inputs if (type := graph.types.get(name)) is not None and type.static]
        free = all(name in results and senders[name] == 1 for name in call.inputs)
        if not types or len(types) < len(call.inputs) or not free:
            continue
        if all(known(type.dtype) and type.dtype not in ("bool", "string") for type in types):
            yield number, call, types


def _send_buffers(graph: Graph, donatable: frozenset[int]) -> dict[int, SendBuffer]:
    """Buffers of data sent by calls. A single tensor needs a buffer only for sharing."""
    return {
        number: SendBuffer(
            call, tuple(call.inputs), tuple(type.dims for type in types), sum(type.elements for type in types),
            numpy_dtype(types[0].dtype), _can_pack(types),
        )
        for number, call, types in _packable_calls(graph) if _can_pack(types) or number in donatable
    }  # fmt: skip


def _is_donatable(position: int, graph: Graph, last: Mapping[str, int], lasts: set[str]) -> bool:
    node = graph.nodes[position]
    if node.op_type not in _REDUCES or len(set(node.inputs)) < len(node.inputs):
        return False
    if not graph.outputs.keys().isdisjoint(node.outputs):
        return False  # a state lives on in the next step, which writes what it sends to the same place
    return all(
        last[name] == position and name not in graph.outputs and name not in graph.inputs and name not in lasts
        and name not in graph.initializers for name in node.inputs
    )  # fmt: skip

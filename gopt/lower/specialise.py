"""From the rank-independent graph to one rank's: keep what the rank runs, resolve its elements. One file, no pass.

Nodes without placement are the same object on every rank, so that writing them costs their bytes once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from onnx import FunctionProto

from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.types import TensorType, numpy_dtype
from gopt.lower.phases import Phase
from gopt.opaque.function_export import with_functions
from gopt.opaque.refold import REFOLD, RefoldedCall
from gopt.opaque.table_body import opset
from gopt.program import ShardedState, SpmdProgram
from gopt.sharding.layouts import identity
from gopt.sharding.placements import REPLICATED, FlatShard


@dataclass(frozen=True, slots=True)
class ShardRange:
    """An element range of one source tensor."""

    tensor: str
    start: int
    stop: int

    def to_json(self) -> dict[str, object]:
        return {"tensor": self.tensor, "start": self.start, "stop": self.stop}


@dataclass(frozen=True, slots=True)
class RankState:
    """A state as one rank holds it: its pieces, flattened, one after the other."""

    input: str
    output: str
    type: TensorType
    pieces: tuple[ShardRange, ...]
    local: bool = False
    copy: bool = False

    @property
    def stored(self) -> str:
        """The name under which its values are stored: its own for a copy, else its first piece's tensor."""
        return self.input if self.copy else self.pieces[0].tensor

    def to_json(self) -> dict[str, object]:
        record: dict[str, object] = {
            "input": self.input, "output": self.output, "pieces": [piece.to_json() for piece in self.pieces],
        }  # fmt: skip
        flags = {"local": self.local, "copy": self.copy}
        return record | {name: True for name, held in flags.items() if held}


@dataclass(frozen=True, slots=True)
class RankAccumulator:
    """An accumulator as one rank holds it: zero before the first micro-step."""

    input: str
    output: str
    type: TensorType

    def to_json(self) -> dict[str, object]:
        return {"input": self.input, "output": self.output, "dtype": self.type.dtype, "shape": list(self.type.dims)}


@dataclass(slots=True)
class RankGraph:
    """One phase of one rank's step. ``states`` are all that the rank has of its own, beside those that all ranks have;
    ``sums`` its accumulators. A phase reads and writes those that its graph has as inputs and outputs."""

    rank: int
    phase: Phase
    nodes: list[Node]
    states: list[RankState]
    accumulators: list[RankAccumulator] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    functions: list[FunctionProto] = field(default_factory=list)
    """Bodies of the opaque operators among the nodes."""

    def __repr__(self) -> str:
        return (
            f"<RankGraph of rank {self.rank}, {self.phase.name}: {len(self.nodes)} nodes, {len(self.own)} own states>"
        )

    @property
    def own(self) -> list[RankState | RankAccumulator]:
        """All that the rank carries from file to file beside what all ranks have."""
        return [*self.states, *self.accumulators]


def common_states(program: SpmdProgram) -> list[RankState]:
    """The states every rank holds whole, in the source's order."""
    return [_state(program, state, 0) for state in program.states if not state.sharded]


def specialise(program: SpmdProgram, phase: Phase, rank: int) -> RankGraph:
    """The graph of one rank of the mesh in one phase."""
    return _Specialiser(program, phase, rank).run()


def _state(program: SpmdProgram, state: ShardedState, member: int) -> RankState:
    types = program.training.graph.types
    if not isinstance(state.place, FlatShard):
        part = state.slices[0]
        piece = ShardRange(part.tensor, 0, part.elements)
        type = TensorType(state.dtype, types[part.tensor].shape)
        return RankState(state.input, state.output, type, (piece,), state.local, state.copy)
    start, stop = state.place.part(member)
    pieces = tuple(
        ShardRange(part.tensor, max(start - part.offset, 0), min(stop - part.offset, part.elements))
        for part in state.slices
        if max(start, part.offset) < min(stop, part.offset + part.elements)
    )
    return RankState(state.input, state.output, TensorType(state.dtype, (stop - start,)), pieces)


class _Specialiser:
    def __init__(self, program: SpmdProgram, phase: Phase, rank: int) -> None:
        self.program = program
        self.member = program.mesh.index(program.group, rank) if program.sharding else 0
        self.out = RankGraph(rank, phase, [], [])
        self.alias: dict[str, str] = {}
        self.present: set[str] = set()
        self.bodies: dict[int, FunctionProto] = {}

    def run(self) -> RankGraph:
        for state in self.program.states:
            if state.sharded and state.place.covers(self.member):
                self.out.states.append(_state(self.program, state, self.member))
                self.present.add(state.input)
        for held in self.program.accumulators:
            if held.place.covers(self.member):
                type = held.type(self.member)
                self.out.accumulators.append(RankAccumulator(held.input, held.output, type))
                self.out.types[held.input] = type
        for node in self.out.phase.graph.nodes:
            if node.domain == SPMD and node.op_type == REFOLD:
                self._keep(node)
            elif node.domain == SPMD:
                if node.place.covers(self.member):
                    self.out.nodes.extend(LOWERED[node.op_type](self, node))
                    self.present.update(node.outputs)
            elif node.place == REPLICATED:
                self.out.nodes.append(self._call(node) if node.op_type == "Broadcast" else node)
                self._length(node)
            elif node.place.covers(self.member):
                self.out.nodes.append(self._placed(node))
                self.present.update(node.outputs)
        if self.bodies:
            self.out.nodes, self.out.functions = with_functions(
                ((node, self.bodies.get(id(node))) for node in self.out.nodes), self.program.graph.header
            )
        return self.out

    def _call(self, node: Node) -> Node:
        """A call as the rank issues it: only the root gives a Broadcast its inputs."""
        if node.domain != COMM or not node.inputs:
            return node
        place = self.program.mesh.index(str(node.attributes["group"]), self.out.rank)
        if place == node.attributes["root"]:
            return node
        return Node(
            node.op_type, [], node.outputs, domain=COMM, name=node.name, attributes=node.attributes,
            made_by=node.made_by,
        )  # fmt: skip

    def _keep(self, node: Node) -> None:
        """An opaque operator over what the rank has of its weights."""
        kept = node.origin
        assert isinstance(kept, RefoldedCall)
        graph = self.program.graph
        nodes, function, made = kept.on(self.member, graph.types, opset(graph), node.made_by)
        for each in nodes:
            each.inputs = [self.alias.get(name, name) for name in each.inputs]
        if function is not None:
            self.bodies.update((id(each), function) for each in nodes if each.domain)
        self.out.nodes.extend(nodes)
        self.present.update(made)

    def _length(self, node: Node) -> None:
        """Note types that are the rank's own: of parts of buckets, and of what passes make of them."""
        if node.domain == COMM and node.op_type == "ReduceScatter" and "cuts" in node.attributes:
            cuts = node.attributes["cuts"]
            dtype = self.program.graph.types[node.outputs[0]].dtype
            self.out.types[node.outputs[0]] = TensorType(dtype, (cuts[self.member + 1] - cuts[self.member],))
        elif node.made_by and node.inputs and node.inputs[0] in self.out.types:
            for place, name in enumerate(node.outputs):
                whole = self.out.phase.graph.types[name]
                length = self.out.types.get(node.inputs[min(place, len(node.inputs) - 1)])
                if whole.shape == (None,) and length is not None:
                    self.out.types[name] = TensorType(whole.dtype, length.shape)

    def _placed(self, node: Node) -> Node:
        if not any(name in self.alias for name in node.inputs):
            return node
        inputs = [self.alias.get(name, name) for name in node.inputs]
        return Node(
            node.op_type, inputs, node.outputs, domain=node.domain, name=node.name, attributes=node.attributes,
            made_by=node.made_by,
        )  # fmt: skip

    def _make(self, like: Node, op_type: str, inputs: list[str], output: str, **attributes: object) -> Node:
        return Node(op_type, inputs, [output], attributes=attributes, made_by=like.made_by)

    def _constant(self, name: str, value: np.ndarray) -> str:
        self.out.constants[name] = value
        return name

    def _local_slice(self, node: Node) -> Iterator[Node]:
        span = node.place
        assert isinstance(span, FlatShard)
        start, stop = span.part(self.member)
        starts, sizes = node.attributes["starts"], node.attributes["sizes"]
        first = bisect_right(starts, start) - 1
        names: list[str] = []
        output = node.outputs[0]
        flat = self._constant("gopt.shard.scalars.flat", np.array([-1], np.int64))
        last = bisect_right(starts, stop - 1)
        for place in range(first, last):
            low, high = max(start - starts[place], 0), min(stop - starts[place], sizes[place])
            name = output if last - first == 1 else f"{output}.{len(names)}"
            cut = (low, high) != (0, sizes[place])
            whole = f"{name}.whole" if cut else name
            yield self._make(node, "Reshape", [node.inputs[place], flat], whole)
            if cut:
                bounds = [
                    self._constant(f"{name}.{role}", np.array([at], np.int64))
                    for role, at in (("start", low), ("stop", high))
                ]
                yield self._make(node, "Slice", [whole, *bounds], name)
            names.append(name)
        if len(names) > 1:
            yield self._make(node, "Concat", names, output, axis=0)

    def _shard_slice(self, node: Node) -> Iterator[Node]:
        span = node.place
        assert isinstance(span, FlatShard)
        start, stop = span.part(self.member)
        base, end = span.cuts[self.member], span.cuts[self.member + 1]
        output = node.outputs[0]
        if (start, stop) == (base, end):
            self.alias[output] = node.inputs[0]
            return
        bounds = [
            self._constant(f"{output}.{role}", np.array([at - base], np.int64))
            for role, at in (("start", start), ("stop", stop))
        ]
        yield self._make(node, "Slice", [node.inputs[0], *bounds], output)

    def _local_concat(self, node: Node) -> Iterator[Node]:
        here = [name for name in node.inputs if name in self.present]
        output = node.outputs[0]
        if not here:
            dtype = self.program.graph.types[output].dtype
            self.out.types[output] = TensorType(dtype, (0,))
            self._constant(output, np.zeros(0, numpy_dtype(dtype)))
        elif len(here) == 1:
            yield self._make(node, "Identity", here, output)
        else:
            yield self._make(node, "Concat", here, output, axis=0)

    def _select(self, node: Node) -> Iterator[Node]:
        source, output = node.inputs[0], node.outputs[0]
        if source in self.present:
            yield self._make(node, "Identity", [source], output)
        else:
            dtype = self.program.graph.types[source].dtype
            none = identity(node.attributes["reduce"], dtype)
            self._constant(output, np.array(none, numpy_dtype(dtype)))


LOWERED: dict[str, Callable[[_Specialiser, Node], Iterable[Node]]] = {
    "LocalSlice": _Specialiser._local_slice,
    "ShardSlice": _Specialiser._shard_slice,
    "LocalConcat": _Specialiser._local_concat,
    "Select": _Specialiser._select,
}
"""How each layout operator is written on a rank that has it."""

"""Expand opaque optimizer nodes into standard operators, so that later stages see plain updates.

An operator of the table, or a model function updating a state, is replaced by the body, weight by weight; every new
node remembers the origin. The file's nodes stay in ``Graph.file_nodes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx
from onnx import FunctionProto, ModelProto

from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.inference import infer_types
from gopt.ir.opaque.additions import part_additions
from gopt.ir.opaque.body_builder import SHARED
from gopt.ir.opaque.branches import open_branches
from gopt.ir.opaque.inline import inline_call, written_node
from gopt.ir.opaque.operator_schema import Arrangement, OperatorSchema, SlotValues
from gopt.ir.opaque.origin import OpaqueCall, Origin
from gopt.ir.opaque.selection import select_opaque_nodes
from gopt.ir.opaque.sequences import look_through_sequences
from gopt.ir.opaque.table import OPERATORS
from gopt.ir.opaque.table_body import same_body, table_body
from gopt.ir.opset import opset_of
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType, known

PREFIX = "gopt.update"
DEPTH = 100
_SMALL = 1024
"""Bytes up to which a constant takes part in inferring types."""
Key = tuple[str, str, str]


def expand(graph: Graph, prefix: str = PREFIX) -> Graph:
    """The graph with the opaque updates expanded, and added counts apart; the same graph without any.

    Values inside a body are named ``<prefix>.<number of the node>.…``. Raises InputError for a node with lists unlike
    the operator's, UnsupportedError for a sequence or type that cannot be followed.
    """
    graph = part_additions(open_branches(graph, prefix), prefix)
    chosen = select_opaque_nodes(graph)
    if not chosen:
        return graph
    work = _Expansion(graph, prefix)
    work.first(chosen)
    for _ in range(DEPTH):
        work.read_sequences()
        work.infer()
        if not work.deeper():
            break
    else:
        raise InputError(
            "functions of the model call one another in a cycle",
            "export the model without functions that call themselves",
        )
    result = work.finish()
    types = ((node, result.types.get(name)) for node in result.nodes for name in node.outputs if name)
    if any(type is None or (isinstance(node.origin, Origin) and not type.static) for node, type in types):
        infer_types(result)
    return result


class _Expansion:
    """The expansion of a graph: nodes, level by level of calls."""

    def __init__(self, graph: Graph, prefix: str) -> None:
        self.graph, self.prefix = graph, prefix
        self.types = dict(graph.types)
        self.nodes = list(graph.nodes)
        self.functions: dict[Key, FunctionProto] = {
            (function.domain, function.name, function.overload): function for function in graph.header.functions
        }
        self.calls: list[OpaqueCall] = []
        self.count = 0
        self.producers = graph.producers()

    # --- bodies ---------------------------------------------------------------------------------------------------

    def first(self, chosen: set[int]) -> None:
        """Replace the nodes to be expanded."""
        nodes: list[Node] = []
        for node in self.nodes:
            nodes.extend(self._open(node) if id(node) in chosen else [node])
        self.nodes = nodes

    def deeper(self) -> bool:
        """Expand the calls inside bodies; returns whether there were any."""
        nodes: list[Node] = []
        opened = False
        for node in self.nodes:
            origin = node.origin
            if isinstance(origin, Origin) and (self._key(node) in self.functions or self._operator(node)):
                opened = True
                nodes.extend(self._inner(node, origin))
            else:
                nodes.append(node)
        self.nodes = nodes
        return opened

    def _key(self, node: Node) -> Key:
        return (node.domain, node.op_type, proto.overload if (proto := node.proto) is not None else "")

    def _operator(self, node: Node) -> OperatorSchema | None:
        return OPERATORS.get((node.domain, node.op_type))

    def _open(self, node: Node) -> list[Node]:
        function, tags, values, operator = self._body(node)
        call = OpaqueCall(len(self.calls), node, operator, values, dict(node.attributes))
        self.calls.append(call)
        return self._written(node, function, tags, call)

    def _inner(self, node: Node, origin: Origin) -> list[Node]:
        function, tags, _, _ = self._body(node)
        return self._written(node, function, [origin.weight for _ in tags], origin.call)

    def _written(self, node: Node, function: FunctionProto, tags: Sequence[int], call: OpaqueCall) -> list[Node]:
        prefix = f"{self.prefix}.{self.count}"
        self.count += 1
        protos = inline_call(function, node.to_proto(), prefix)
        weights = [*tags, *[SHARED] * (len(protos) - len(tags))]
        return [written_node(proto, Origin(call, weight, 0)) for proto, weight in zip(protos, weights)]

    def _body(self, node: Node) -> tuple[FunctionProto, list[int], SlotValues, OperatorSchema | None]:
        """A node's body, the weights of the nodes, the values in the slots, and the record in the table."""
        written = self.functions.get(self._key(node))
        operator = self._operator(node)
        if operator is not None:
            values = self._given(operator, node)
            function, tags = table_body(operator, node, values, self.types, opset_of(self.graph.header))
            if written is None or same_body(written, function):
                return function, tags, values, operator
        assert written is not None
        values = SlotValues(
            {}, [{f: a for f, a in zip(written.input, node.inputs) if a}],
            {}, [{f: a for f, a in zip(written.output, node.outputs) if a}],
        )  # fmt: skip
        return written, [0] * len(written.node), values, None

    def _given(self, operator: OperatorSchema, node: Node) -> SlotValues:
        values = operator.read(node.label, node.inputs, node.outputs)
        if operator.arrangement is not Arrangement.SEQUENCE:
            return values
        members = {slot: self._members(node, slot, name) for slot, name in values.weights[0].items()}
        counts = {slot: len(names) for slot, names in members.items()}
        if len(set(counts.values())) != 1 or not all(counts.values()):
            raise InputError(
                f"the sequences of {node.op_type} {node.label!r} differ in length, or are empty: {counts}",
                "give every sequence one tensor for each weight",
            )
        count = next(iter(counts.values()))
        prefix = f"{self.prefix}.{self.count}"
        values.weights = [{slot: names[index] for slot, names in members.items()} for index in range(count)]
        values.updated = [{slot: f"{prefix}.{slot}_{index}" for slot in values.updated[0]} for index in range(count)]
        return values

    def _members(self, node: Node, slot: str, name: str) -> list[str]:
        producer = self.producers.get(name)
        if producer is None or not producer.is_a("SequenceConstruct"):
            raise UnsupportedError(
                f"sequence {name!r}, the {slot} of {node.op_type} {node.label!r}, is not put together by "
                "SequenceConstruct",
                "list its tensors with one SequenceConstruct",
            )
        return producer.inputs

    # --- sequences and types --------------------------------------------------------------------------------------

    def read_sequences(self) -> None:
        """Let readers of a sequence's members read the members directly, and remove unused nodes."""
        producers = {name: node for node in self.nodes for name in node.outputs if name}
        sequences = look_through_sequences(self.nodes, producers, self.graph.initializers)
        new: dict[str, str] = {}
        nodes = []
        for node in self.nodes:
            value = sequences.get(node.first_output, "")
            if not value or (node.origin is None and producers.get(value, node).origin is None):
                nodes.append(node)
            elif node.origin is not None:
                new[node.outputs[0]] = value
            elif value.startswith(f"{self.prefix}.") and value not in new:
                new[value] = node.outputs[0]
            else:
                copy = onnx.helper.make_node("Identity", [value], node.outputs, name=node.name)
                nodes.append(written_node(copy))
        self.nodes = nodes
        if new:
            self._rename(new)
        self._sweep()
        self._check_sequences()

    def _rename(self, new: Mapping[str, str]) -> None:
        def name(old: str) -> str:
            while old in new:
                old = new[old]
            return old

        for node in self.nodes:
            if any(name in new for name in (*node.inputs, *node.outputs)):
                node.inputs, node.outputs = (
                    [name(value) for value in node.inputs],
                    [name(value) for value in node.outputs],
                )
                if node.encoded is not None:
                    node.proto = node.to_proto()
        for call in self.calls:
            for table in (
                call.slot_values.scalars,
                call.slot_values.results,
                *call.slot_values.weights,
                *call.slot_values.updated,
            ):
                table.update({slot: name(value) for slot, value in table.items()})

    def _sweep(self) -> None:
        """Remove unread nodes of bodies, and unread SequenceConstructs."""
        needed, nodes = set(self.graph.outputs), []
        for node in reversed(self.nodes):
            loose = node.origin is not None or node.is_a("SequenceConstruct")
            if not loose or any(name in needed for name in node.outputs):
                nodes.append(node)
                needed.update(node.reads)
        self.nodes = nodes[::-1]

    def _check_sequences(self) -> None:
        calls = {
            name: node.origin.call
            for node in self.nodes
            if isinstance(node.origin, Origin) and node.is_a("SequenceConstruct")
            for name in node.outputs
        }
        for node in self.nodes:
            for name in node.reads if calls else ():
                if name in calls and not isinstance(node.origin, Origin):
                    raise UnsupportedError(
                        f"sequence {name!r} that {calls[name].label!r} makes is read by {node.op_type} {node.label!r}",
                        "read its tensors by SequenceAt with constant places",
                    )

    def infer(self) -> None:
        """Types of the values of bodies."""
        nodes = [node for node in self.nodes if isinstance(node.origin, Origin)]
        results = {name for node in nodes for name in node.outputs}
        reads = dict.fromkeys(name for node in nodes for name in node.reads if name not in results)
        model = ModelProto(ir_version=max(self.graph.header.ir_version, 10))
        model.opset_import.extend(opset for opset in self.graph.header.opset_import if opset.domain != COMM)
        model.functions.extend(self.graph.header.functions)
        body = model.graph
        body.name = "bodies"
        for name in reads:
            stored = self.graph.initializers.get(name)
            if stored is not None and name not in self.graph.inputs and stored.proto and stored.nbytes <= _SMALL:
                body.initializer.append(stored.proto)
            else:
                body.input.append(value_info(name, self.types.get(name) or TensorType("undefined", None)))
        body.node.extend(node.to_proto() for node in nodes)
        try:
            result = onnx.shape_inference.infer_shapes(model, data_prop=True, strict_mode=False)
        except MemoryError:
            raise
        except Exception:  # its exceptions have no common base; code that needs a type reports it
            return
        for info in result.graph.value_info:
            type = read_type(info.type)
            if known(type.dtype) and not self.types.get(info.name, TensorType("undefined", None)).static:
                self.types[info.name] = type

    def finish(self) -> Graph:
        last_places: dict[int, int] = {}
        for node in self.nodes:
            if isinstance(node.origin, Origin):
                index = last_places[node.origin.call.number] = last_places.get(node.origin.call.number, -1) + 1
                node.origin = replace(node.origin, place=index)
        outputs = {
            name: type if known(type.dtype) else self.types.get(name, type) for name, type in self.graph.outputs.items()
        }
        return replace(
            self.graph,
            nodes=self.nodes,
            types=self.types,
            outputs=outputs,
            file_nodes=self.graph.file_nodes or self.graph.nodes,
        )

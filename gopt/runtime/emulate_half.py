"""Emulates float16 and bfloat16 on a processor without them: every operator computes in float32 and rounds once.

ONNX Runtime's CPU has few kernels for float16 and fewer for bfloat16. ONNX Runtime runs float16 in float32 and leaves
out the rounding between adjacent operators: 2048 + 1 - 2048 is then 1, unless the graph is split in between. With
explicit casts around every operator, results do not depend on the places of splits or on adjacent operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.scopes import bodies
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import LOW_PRECISION, TensorType, dtype_code, dtype_name, known
from gopt.operators.kinds import GATHERS, MOVES, PARTS, SEQUENCES
from gopt.runtime.proto import as_node, build_model

_MOVES = SEQUENCES | MOVES | GATHERS | PARTS | {"Cast", "Concat", "Constant", "Shape"}  # fmt: skip
"""Operators that round nothing and have kernels for both halves at every version from 13 on (tried one by one). In ONNX
sequences and optionals hold float16 alone.

An operator that merely moves but lacks a float16 kernel must not stand here: the runtime would widen it and drop the
rounding beside it. A cast rounds by itself.
"""
TYPE_ATTRIBUTES = frozenset({"dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})
"""Attributes that hold an element type: of an output, or in which an operator computes."""
_HALF_CODES = frozenset(dtype_code(name) for name in LOW_PRECISION)
_FLOAT = TensorProto.FLOAT


def emulate_half(graph: Graph) -> Graph:
    """Return the graph with every operator on float16 or bfloat16 values wrapped in casts to and from float32.

    Inputs, outputs and collectives keep their types. A graph without such values is returned unchanged, and a second
    call changes nothing. The graph has no functions (``inlined``). Raises UnsupportedError, with the value, where
    a type is needed and unknown.
    """
    if not _has_halves(graph):
        return graph
    lowering = _HalfEmulation(graph.types, graph.header, "gopt.lower", count(1))
    for node in graph.nodes:
        lowering.add(node)
    return replace(graph, nodes=lowering.nodes, types=lowering.types)


class _HalfEmulation:
    """Lowers the nodes of one body, in order; collects the new nodes and the types of the results."""

    def __init__(self, types: Mapping[str, TensorType], header: ModelProto, prefix: str, scopes: Iterator[int]) -> None:
        self.types = dict(types)
        self.nodes: list[Node] = []
        self._header = header
        self._prefix = prefix
        self._scopes = scopes
        """Numbers for the bodies of control flow: a name may not occur both inside and outside of one."""
        self._wide: dict[str, str] = {}

    def add(self, node: Node) -> None:
        if node.domain == COMM or node.is_in(_MOVES) or not self._meets_half(node):
            self.nodes.append(node)
        elif node.is_a("CastLike"):
            self._cast(node.inputs[0], node.outputs[0], self._dtype(node.inputs[1], node))
        elif node.proto is not None and bodies(node.proto):
            self._descend(node)
        else:
            self._wrap(node)

    def _meets_half(self, node: Node) -> bool:
        if _names_half(node):
            return True
        # A result of operands that are not half precision is not either, unless an attribute says so.
        read = {self._dtype(name, node) for name in node.reads}  # all of them, so that no unknown one hides
        return not LOW_PRECISION.isdisjoint(read)

    def _dtype(self, name: str, node: Node) -> str:
        type = self.types.get(name)
        if type is None or not known(type.dtype):
            raise UnsupportedError(
                f"the type of value {name!r} is unknown, and {node.op_type} {node.label!r} may compute in a half",
                "declare it in the file (value_info), for instance with onnx.shape_inference",
            )
        return type.dtype

    def _wrap(self, node: Node) -> None:
        """Cast the operands to float32, compute, and round the results once."""
        proto = NodeProto()
        proto.CopyFrom(node.to_proto())
        for attribute in proto.attribute:
            _widen_attribute(attribute)
        rounded = {name: self._dtype(name, node) for name in node.outputs if name}
        rounded = {name: dtype for name, dtype in rounded.items() if dtype in LOW_PRECISION}
        raw = {name: f"{self._prefix}.raw.{name}" for name in rounded}
        inputs = [self._widened(name, node) if name else "" for name in node.inputs]
        del proto.input[:], proto.output[:]
        proto.input.extend(inputs)
        proto.output.extend(raw.get(name, name) for name in node.outputs)
        self.nodes.append(as_node(proto))
        for name, wide in raw.items():
            self.types[wide] = TensorType("float32", self.types[name].shape)
            self._cast(wide, name, rounded[name])

    def _widened(self, name: str, node: Node) -> str:
        """Return the name of the float32 copy of a half-precision value, made once; any other value keeps the name."""
        if self._dtype(name, node) not in LOW_PRECISION:
            return name
        if name not in self._wide:
            self._wide[name] = wide = f"{self._prefix}.wide.{name}"
            self.types[wide] = TensorType("float32", self.types[name].shape)
            self._cast(name, wide, "float32")
        return self._wide[name]

    def _cast(self, source: str, target: str, dtype: str) -> None:
        self.nodes.append(Node("Cast", [source], [target], attributes={"to": dtype_code(dtype)}))

    def _descend(self, node: Node) -> None:
        """Lower the bodies of a control-flow node in place."""
        proto = self._inferred(node)
        for body in bodies(proto):
            types = self.types | _declared(body)
            inner = _HalfEmulation(types, self._header, f"gopt.lower.{next(self._scopes)}", self._scopes)
            for item in body.node:
                inner.add(as_node(item))
            lowered = [item.to_proto() for item in inner.nodes]
            del body.node[:], body.value_info[:]
            body.node.extend(lowered)
            # What was found out stays, so that lowering again finds the same.
            results = {name: None for item in inner.nodes for name in item.outputs if name in inner.types}
            body.value_info.extend(value_info(name, inner.types[name]) for name in results)
        self.nodes.append(as_node(proto))

    def _inferred(self, node: Node) -> NodeProto:
        """A copy of a control-flow node with types for the values in the bodies."""
        inputs = {name: self.types[name] for name in dict.fromkeys(node.reads) if name in self.types}
        outputs = {name: self.types.get(name, TensorType("undefined", None)) for name in node.outputs if name}
        model = onnx.shape_inference.infer_shapes(build_model(self._header, [node], inputs, outputs))
        inferred: NodeProto = model.graph.node[0]
        return inferred


def _declared(body: GraphProto) -> dict[str, TensorType]:
    infos = (*body.input, *body.value_info, *body.output)
    types = {info.name: read_type(info.type) for info in infos}
    types.update(
        (constant.name, TensorType(dtype_name(constant.data_type), tuple(constant.dims)))
        for constant in body.initializer
    )
    return types


def _widen_attribute(attribute: AttributeProto) -> None:
    if attribute.name in TYPE_ATTRIBUTES and attribute.i in _HALF_CODES:
        attribute.i = _FLOAT
    elif attribute.type == AttributeProto.TENSOR and attribute.t.data_type in _HALF_CODES:
        wide = onnx.numpy_helper.to_array(attribute.t).astype("float32")
        attribute.t.CopyFrom(onnx.numpy_helper.from_array(wide, attribute.t.name))


# --- where halves are -----------------------------------------------------------------------------------------------


def _has_halves(graph: Graph) -> bool:
    if any(type.dtype in LOW_PRECISION for type in (*graph.types.values(), *graph.inputs.values())):
        return True
    # Where inference failed, only a cast to float16 or bfloat16 shows such a value.
    return any(map(_names_half, graph.nodes))


def _names_half(node: Node) -> bool:
    """Return whether an attribute of the node, or of a node in the bodies, names a half."""
    if node.proto is not None:
        return bool(node.proto.attribute) and _mentions_half(node.proto)
    return any(map(_attribute_names_half, node.to_proto().attribute)) if node.attributes else False


def _mentions_half(proto: NodeProto) -> bool:
    if any(map(_attribute_names_half, proto.attribute)):
        return True
    return any(_mentions_half(item) for body in bodies(proto) for item in body.node)


def _attribute_names_half(attribute: AttributeProto) -> bool:
    if attribute.type == AttributeProto.INT:
        return attribute.i in _HALF_CODES and (attribute.name == "to" or attribute.name in TYPE_ATTRIBUTES)
    return attribute.type == AttributeProto.TENSOR and attribute.t.data_type in _HALF_CODES

"""The check and the types of a long graph, some hundred nodes at a time, and no more than differ.

onnx parses the model into new messages, and returns a copy with all types: for a million nodes, that is more memory
than everything else. The parts of a graph need not be in memory together while every type at a border is known: a chunk
is a model with the results of earlier chunks as inputs. A node equal to an earlier node, on values of the same types,
makes values of the same types: onnx is not asked again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import deepcopy

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, ValueInfoProto

from gopt import limits
from gopt.ir.constant_folding import as_constant, for_inference
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_io import TypeDecoder
from gopt.ir.onnx_checker import accepts, without_nodes
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import FLOATS, TensorType, known
from gopt.ir.wire_format import field

WHOLE_NODES = 20_000
"""A graph of at most as many nodes is checked as a whole."""
CHUNK_NODES, FEW_NODES = 128, 16
"""Nodes of a chunk, and of a chunk beside known nodes."""
_READ_ELEMENTS = 64
"""Elements up to which a stored tensor may be a shape, axes, or sizes, which inference reads."""


class KnownTypes:
    """The types of results, by all input of inference, in graphs of the same version of operators."""

    def __init__(self) -> None:
        self.results: dict[Hashable, list[TensorType | None]] = {}
        self._types: dict[TensorType, TensorType] = {}

    @property
    def chunk(self) -> int:
        """The nodes of a chunk of the next graph: beside earlier graphs, most nodes have known types."""
        return FEW_NODES if self.results else CHUNK_NODES

    def shared(self, kind: TensorType) -> TensorType:
        """One object for a type, in all graphs: keys have its id."""
        return self._types.setdefault(kind, kind)


class ModelHeader:
    """The parts of a model, besides its nodes, that chunks need; copied, so that the model itself can be freed."""

    def __init__(self, model: ModelProto, known_types: KnownTypes) -> None:
        self.known_types = known_types
        head = ModelProto(ir_version=model.ir_version)
        head.opset_import.extend(model.opset_import)
        self.head: bytes = head.SerializeToString()
        self.name: str = model.graph.name
        self.without_nodes: bytes = without_nodes(model).SerializeToString()
        copy = GraphProto()
        copy.value_info.extend(model.graph.value_info)
        copy.output.extend(model.graph.output)
        self.declared = {info.name: info for info in copy.value_info}
        self.outputs = {info.name: info for info in copy.output}
        self.consistent = len(self.declared) == len(copy.value_info)
        """True if no value is declared twice; of two conflicting types, the order in the file would decide."""


def header_for_chunks(
    model: ModelProto, nodes: Sequence[Node], known_types: KnownTypes | None, *, flat: bool
) -> ModelHeader | None:  # fmt: skip
    """Return the header of a model treatable in chunks; ``flat``: no node has a body; ``known_types``: of earlier
    graphs.

    None for a short graph beside no others, and with bodies or functions, where names may mean different things in
    different chunks."""
    if (known_types is None and len(nodes) <= WHOLE_NODES) or not flat or model.functions:
        return None
    header = ModelHeader(model, known_types or KnownTypes())
    return header if header.consistent else None


def types_by_chunk(
    graph: Graph, header: ModelHeader, constants: Mapping[str, TensorType], folded: Mapping[str, np.ndarray]
) -> dict[str, TensorType] | None:
    """The type of every node's outputs; ``constants`` are spared, and ``folded`` are known by value.

    None if onnx refuses a chunk, or leaves a type open: then the whole graph must be inferred, for the message and for
    the open types.
    """
    if not accepts(header.without_nodes, full=True):
        return None
    nodes = graph.nodes
    if constants:
        nodes = [node for node in nodes if constants.keys().isdisjoint(node.outputs)]
    stored = {
        node.outputs[0]: node
        for node in nodes
        if node.op_type == "Constant" and len(node.outputs) == 1 and node.encoded
    }
    types_so_far = _SeenTypes(graph, header, constants, stored, folded)
    chunks = _Chunks(graph, header, types_so_far.types, constants, stored)
    decode = TypeDecoder(lambda info: read_type(info.type))
    size = header.known_types.chunk
    start = types_so_far.skip(nodes, 0)
    while start < len(nodes):
        chunk = nodes[start : start + size]
        inferred = chunks.infer(chunk, folded, decode)
        if inferred is None:
            return None
        for node in chunk:
            types_so_far.add(node, inferred)
        start = types_so_far.skip(nodes, start + len(chunk))
    return types_so_far.types


class _SeenTypes:
    """The types made by nodes, by all properties read by inference. ``types``: of every value made by a node."""

    def __init__(
        self,
        graph: Graph,
        header: ModelHeader,
        constants: Mapping[str, TensorType],
        stored: Mapping[str, Node],
        folded: Mapping[str, np.ndarray],
    ) -> None:
        self.types: dict[str, TensorType] = {}
        self._known_types, self._made = header.known_types, header.known_types.results
        self._operands: dict[str, Hashable] = {"": ""}
        """Key of each value as inference sees it: its type, or its content if that may be a shape.

        Declared and inferred types are few shared objects, so the key is the object's id.
        """
        shared = self._known_types.shared
        self._operands.update((name, id(shared(kind))) for name, kind in {**graph.inputs, **constants}.items())
        for name, tensor in graph.initializers.items():
            self._operands[name] = (self._operands.get(name), _content(tensor))
        self._operands.update((name, ("Constant", node.attribute_bytes())) for name, node in stored.items())
        self._operands.update((name, _array(value)) for name, value in folded.items())
        self._said: dict[str, Hashable] = {"": ""}
        """Declarations in the file of values that nodes compute; inference compares its results with them."""
        for table in (header.declared, header.outputs):
            for name, info in table.items():
                self._said[name] = (self._said.get(name), table is header.outputs, info.type.SerializeToString())
        self._said.update((name, (self._said.get(name), _array(value))) for name, value in folded.items())
        self._operand, self._declaration = self._operands.__getitem__, self._said.get

    def skip(self, nodes: Sequence[Node], start: int) -> int:
        """Return the place, from ``start`` on, of the first node with unknown types; note the types of the nodes in
        front."""
        kinds_of, key, types, operands = self._made, self._key, self.types, self._operands
        for index in range(start, len(nodes)):
            node = nodes[index]
            try:
                kinds = kinds_of[key(node)]
            except KeyError:
                return index
            for name, kind in zip(node.outputs, kinds):
                if kind is not None:
                    types[name] = kind
                    if name not in operands:
                        operands[name] = id(kind)
        return len(nodes)

    def add(self, node: Node, inferred: Mapping[str, TensorType]) -> None:
        """Record the inferred output types of a node."""
        kinds = (inferred.get(name) for name in node.outputs)
        self._made[self._key(node)] = [None if kind is None else self._known_types.shared(kind) for kind in kinds]
        self.skip([node], 0)

    def _key(self, node: Node) -> Hashable:
        """Return all properties read by inference; raises KeyError for an operand without a type yet."""
        operands = tuple(map(self._operand, node.inputs))
        return (node.op_type, node.domain, node.attribute_bytes(), operands, *map(self._declaration, node.outputs))


def _content(tensor: Tensor) -> Hashable:
    """Return a key of a stored tensor as inference sees it: the content of a small tensor or of whole numbers, the type
    of others."""
    long = tensor.type.elements > _READ_ELEMENTS
    if tensor.proto is None or tensor.nbytes > limits.CHECKED_BYTES or (long and tensor.type.dtype in FLOATS):
        return tensor.type
    values = _values(tensor.proto)
    return tensor.type, hashlib.sha256(values).digest() if long else values


def _values(proto: onnx.TensorProto) -> bytes:
    """A tensor without the name."""
    copy = deepcopy(proto)
    copy.ClearField("name")
    data: bytes = copy.SerializeToString(deterministic=True)
    return data


def _array(value: np.ndarray) -> Hashable:
    return (value.dtype.name, value.shape, value.tobytes())


class _Chunks:
    """Makes models of chunks. ``types``: of results of earlier chunks; ``stored``: Constant nodes by output."""

    def __init__(
        self,
        graph: Graph,
        header: ModelHeader,
        types: Mapping[str, TensorType],
        constants: Mapping[str, TensorType],
        stored: Mapping[str, Node],
    ) -> None:
        self.graph, self.header, self.types, self.constants, self.stored = graph, header, types, constants, stored

    def infer(
        self, nodes: Sequence[Node], folded: Mapping[str, np.ndarray], decode: TypeDecoder
    ) -> dict[str, TensorType] | None:
        """Return the types of the nodes' results; None if onnx refuses the nodes, or a type is not static."""
        results = {name: None for node in nodes for name in node.outputs if name}
        reads = {name: None for node in nodes for name in node.inputs if name and name not in results}
        data = self._model(nodes, results, reads, {})
        if not accepts(data, full=False):
            return None
        try:
            graph = onnx.shape_inference.infer_shapes(data, check_type=True, strict_mode=True).graph
            if not folded.keys().isdisjoint(results) or not folded.keys().isdisjoint(reads):
                graph = onnx.shape_inference.infer_shapes(self._model(nodes, results, reads, folded)).graph
        except MemoryError:
            raise
        except Exception:  # onnx's exceptions have no common base
            return None
        inferred = {info.name: info for info in (*graph.value_info, *graph.output)}
        types: dict[str, TensorType] = {}
        for name in results:
            kind = decode(inferred[name]) if name in inferred else None
            if kind is None or not kind.static or not known(kind.dtype) or any(size < 0 for size in kind.dims):
                return None
            types[name] = kind
        return types

    def _model(
        self, nodes: Iterable[Node], results: Mapping[str, None], reads: Iterable[str], folded: Mapping[str, np.ndarray]
    ) -> bytes:
        """Serialize a chunk as a model; the values of ``folded`` become constants in it."""
        body = GraphProto(name=self.header.name or "graph")
        encoded: list[bytes] = []
        for name in reads:
            if name in folded:
                encoded.append(as_constant(name, folded[name]).SerializeToString())
            elif name in self.stored:
                encoded.append(self.stored[name].encoded or b"")
            else:
                self._border(body, name)
        encoded += (for_inference(node, folded) for node in nodes)
        ends = results.keys() | {tensor.name for tensor in body.initializer}
        body.value_info.extend(_of(self.header.declared, ends))
        body.output.extend(_of(self.header.outputs, ends))
        parts = [field(1, node_bytes) for node_bytes in encoded]
        return self.header.head + field(7, b"".join(parts) + body.SerializeToString())

    def _border(self, body: GraphProto, name: str) -> None:
        """Add an outer value read by the chunk: small stored values as constants, others as inputs."""
        graph = self.graph
        tensor, kind = graph.initializers.get(name), graph.inputs.get(name) or self.constants.get(name)
        small = tensor is not None and tensor.type.dtype != "string" and tensor.nbytes <= limits.CHECKED_BYTES
        if tensor is not None and tensor.proto is not None and small:
            body.initializer.append(tensor.proto)
            if kind is None:
                return
        body.input.append(value_info(name, kind or (self.types[name] if tensor is None else tensor.type)))


def _of(table: Mapping[str, ValueInfoProto], names: Iterable[str]) -> list[ValueInfoProto]:
    """The entries of some names, in one order."""
    return [table[name] for name in sorted(names) if name in table]

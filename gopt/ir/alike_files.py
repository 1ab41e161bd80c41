"""Loads files that begin alike, as rank files do: the nodes and types that they have in common are read once.

A rank's file has the nodes of all ranks in front, and behind them nodes on parts that only this rank has."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import GraphProto, ModelProto, NodeProto

from gopt.ir.chunked_inference import KnownTypes
from gopt.ir.external_data import DataFolder, naming
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import walk
from gopt.ir.graph_io import declared, decoded, read_initializers, read_inputs
from gopt.ir.load import checked_graph, header_of, load, load_first, uncounted_bytes
from gopt.ir.model_file import ModelFile, refill
from gopt.ir.node_kinds import record_of
from gopt.ir.symbol_table import SymbolTable
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import value_info
from gopt.ir.types import FLOATS, TensorType
from gopt.ir.wire_format import GRAPH, NODE, check_parts, split_fields
from gopt.operators.kinds import CASTS, UNMOVED
from gopt.system.garbage import gc_paused

_INITIALIZER = 0x2A
"""Tag of a stored value in a graph."""
_MOST = 16
"""Files that a file is compared with."""
_STEP = 251
"""Distance of the bytes of a graph by which a file with the same graph is looked for."""


@dataclass(slots=True)
class _Bytes:
    """The bytes of a file by part: the model without the graph, the graph's nodes with the end of each, stored values,
    and other fields of the graph."""

    header: bytes
    nodes: bytes
    ends: list[int]
    values: bytes
    rest: bytes

    @classmethod
    def of(cls, header: bytes, data: bytes, like: _Bytes | None) -> _Bytes | None:
        """The parts of a graph, with nodes in front possibly shared with another file; None for nodes behind other
        fields."""
        count = like.common(data) if like is not None else 0
        ends = like.ends[:count] if like is not None else []
        inner = split_fields(data, ends[-1] if ends else 0, len(data))
        count = sum(field[0] == NODE for field in inner)
        if not count + len(ends) or any(field[0] != NODE for field in inner[:count]):
            return None
        values = b"".join([data[start:stop] for tag, start, _, stop in inner[count:] if tag == _INITIALIZER])
        rest = b"".join([data[start:stop] for tag, start, _, stop in inner[count:] if tag != _INITIALIZER])
        ends = [*ends, *(stop for _, _, _, stop in inner[:count])]
        return cls(header, data[: ends[-1]], ends, values, rest)

    def common(self, nodes: bytes) -> int:
        """The number of nodes in front that other bytes begin with."""
        low, high = 0, min(len(self.nodes), len(nodes))
        if self.nodes[:high] == nodes[:high]:
            low = high
        while low < high:
            middle = (low + high + 1) // 2
            if self.nodes[low:middle] == nodes[low:middle]:
                low = middle
            else:
                high = middle - 1
        return bisect_right(self.ends, low)


class _LoadedFile:
    """A loaded file."""

    def __init__(self, parts: _Bytes, graph: Graph, types: KnownTypes) -> None:
        self.parts, self.graph = parts, graph
        self.result_types = types
        """The types of results behind the front in further files."""
        self._names: dict[int, tuple[dict[str, TensorType | None], set[str]]] = {}

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        """The readers of each value."""
        return self.graph.users()

    @cached_property
    def made(self) -> dict[str, int]:
        """The position of the node that makes each value."""
        return {name: position for position, node in enumerate(self.graph.nodes) for name in node.outputs if name}

    def fed(self, name: str) -> bool:
        """Return whether a value is elementwise of an input without a number."""
        unknown = self.graph.inputs.keys() - self.graph.initializers.keys()
        return any(value in unknown for value in walk([name], self._elementwise))

    def _elementwise(self, name: str) -> Sequence[str]:
        """The operands with the same elements, of a value."""
        node = self.graph.nodes[self.made[name]] if name in self.made else None
        if node is None or not (record_of(node).elementwise or node.is_in(UNMOVED)):
            return ()
        return node.inputs[:1] if node.is_in(UNMOVED) else node.inputs

    def names(self, count: int) -> tuple[dict[str, TensorType | None], set[str]]:
        """The results of the first nodes, with types, and the operands from elsewhere."""
        if count not in self._names:
            front, types = self.graph.nodes[:count], self.graph.types
            produced = {name: types.get(name) for node in front for name in node.outputs if name}
            read = {name for node in front for name in node.reads if name}
            self._names[count] = produced, read.difference(produced)
        return self._names[count]


class AlikeFiles:
    """A loader of gopt's own files. Graphs of files that are alike share nodes and types: neither may be edited."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[bytes, bytes], list[_LoadedFile]] = {}
        """By nodes and fields of the graph, for several stored values."""
        self._bodies: dict[tuple[int, bytes], list[_Twin]] = {}
        """By length and some bytes of the graph, to compare all bytes: replicas differ in the metadata alone."""
        self._leaders: list[_LoadedFile] = []
        """Files that began unlike all before, the last one first."""

    def load(self, path: str) -> Graph:
        """The graph in a file. Raises the errors of ``gopt.ir.load.load``."""
        with naming(path):
            data = uncounted_bytes(path)
            header, body = _split(data)
            twin = self._twin(body)
            check_parts(data if twin is None else header)
        try:
            return self._beside(path, header, body, twin)
        except DecodeError:
            return load(path, own=True)  # says what is wrong

    def _beside(self, path: str, header: bytes, body: bytes, twin: _Twin | None) -> Graph:
        """The graph in a file, beside earlier files. Raises DecodeError for damaged bytes."""
        if twin is not None and os.path.dirname(path) == twin.folder:
            model = ModelProto.FromString(header)
            if _without_metadata(model) == _without_metadata(twin.graph.header):
                with naming(path):
                    return _with_header(model, twin.graph)
        graph = self._load(path, _Bytes.of(header, body, self._leaders[0].parts if self._leaders else None))
        if body:
            twins = self._bodies.setdefault(_some_of(body), [])
            twins[:] = [_Twin(os.path.dirname(path), body, graph), *(old for old in twins if old.body != body)]
        return graph

    def _twin(self, body: bytes) -> _Twin | None:
        """An earlier file with the same bytes of the graph."""
        return next((twin for twin in self._bodies.get(_some_of(body), ()) if twin.body == body), None)

    def _load(self, path: str, parts: _Bytes | None) -> Graph:
        if parts is None:
            return load(path, own=True)
        file, equal = _RankFile(path, parts), self._loaded.setdefault((parts.nodes, parts.rest), [])
        for like in equal:
            graph = _alike(file, like, len(parts.ends))
            if graph is not None:
                return graph
        graph = None
        for number, like in enumerate(self._leaders):
            count = like.parts.common(parts.nodes)
            graph = _alike(file, like, count)
            if graph is not None:
                self._leaders.insert(0, self._leaders.pop(number))
                break
        if graph is None:
            types = KnownTypes()
            graph = load_first(path, types)
            if len(parts.ends) == len(graph.nodes):
                self._leaders = [_LoadedFile(parts, graph, types), *self._leaders[: _MOST - 1]]
        if len(parts.ends) == len(graph.nodes):
            equal.insert(0, _LoadedFile(parts, graph, KnownTypes()))
            del equal[_MOST:]
        return graph


@dataclass(frozen=True, slots=True)
class _Twin:
    """A graph, the bytes, and the folder of the file, beside the values."""

    folder: str
    body: bytes
    graph: Graph


def _some_of(body: bytes) -> tuple[int, bytes]:
    """The length and some bytes of a graph: hashing all bytes takes longer than comparing two files."""
    return len(body), body[::_STEP]


def _split(data: bytes) -> tuple[bytes, bytes]:
    """A file without the graph, and the graph; no graph unless it is a single field."""
    fields = split_fields(data, 0, len(data))
    bodies = [data[at:end] for tag, _, at, end in fields if tag == GRAPH]
    header = b"".join([data[start:stop] for tag, start, _, stop in fields if tag != GRAPH])
    return header, bodies[0] if len(bodies) == 1 else b""


def _with_header(model: ModelProto, graph: Graph) -> Graph:
    """A graph under the header of another file."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    return replace(graph, header=header_of(model), metadata=metadata)


def shared_parts(graph: Graph) -> tuple[int, int, int]:
    """The nodes, types and stored values of a graph, by identity: ``AlikeFiles`` loads equal ones once."""
    return id(graph.nodes), id(graph.types), id(graph.initializers)


class _RankFile:
    """A file to be read beside others: parts are read once."""

    def __init__(self, path: str, parts: _Bytes) -> None:
        self.path, self.parts = path, parts
        self.model = ModelProto.FromString(parts.header)
        self._border: tuple[dict[str, TensorType], dict[str, Tensor]] | None = None

    @cached_property
    def rest(self) -> GraphProto:
        """The fields of the graph beside nodes and stored values."""
        fields: GraphProto = GraphProto.FromString(self.parts.rest)
        return fields

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The declared types of values inside."""
        return dict(decoded(self.rest.value_info, lambda info: declared(info, f"value {info.name!r}")))

    def border(self, like: _LoadedFile) -> tuple[dict[str, TensorType], dict[str, Tensor]]:
        """Inputs and stored values; inputs of a file with equal fields are not read again."""
        if self._border is None:
            symbols, equal = SymbolTable(None), self.parts.rest == like.parts.rest
            inputs = dict(like.graph.inputs) if equal else read_inputs(self.rest, symbols)
            values = GraphProto.FromString(self.parts.values)
            self._border = inputs, read_initializers(values, inputs, symbols, DataFolder(self.path))
        return self._border


def _alike(file: _RankFile, like: _LoadedFile, count: int) -> Graph | None:
    """The graph of a file with the first ``count`` nodes of a loaded one; None where their types might differ."""
    graph, parts, model = like.graph, file.parts, file.model
    equal = parts.rest == like.parts.rest
    with naming(file.path), gc_paused():
        if _without_metadata(model) != _without_metadata(graph.header):
            return None
        inputs, stored = file.border(like)
        types = {} if equal else file.types
    apart = [like.made[name] for name, type in types.items() if name in like.made and graph.types.get(name) != type]
    alike, count = count, min([count, *apart])  # a call may have a result of another size on each rank
    if 2 * count < len(parts.ends):
        return None
    before = {name: tensor.type for name, tensor in stored.items()} | inputs
    if not _same_front(like, count, before, stored):
        return None
    result = replace(_with_header(model, graph), inputs=inputs, initializers=stored)
    if equal and count == len(graph.nodes) == len(parts.ends):
        return result if inputs == graph.inputs and stored.keys() == graph.initializers.keys() else None
    rest = GraphProto.FromString(parts.nodes[like.parts.ends[count - 1] :] + parts.rest + parts.values)
    produced, _ = like.names(count)
    front = {name: type for name, type in produced.items() if type is not None}
    tail = _tail(file.path, model, rest, produced, like.result_types) if rest.node else None
    if tail is None:
        return None
    result.nodes, result.outputs = [*graph.nodes[:alike], *tail.nodes[alike - count :]], tail.outputs
    result.types = front | before | tail.types
    return result


def _same_front(like: _LoadedFile, count: int, before: Mapping[str, TensorType], stored: dict[str, Tensor]) -> bool:
    """Return whether a file's front nodes have the types of a loaded file; equal stored values are shared."""
    graph = like.graph
    _, read = like.names(count)
    for name in read:
        type, due = before.get(name), graph.types.get(name)
        if type is None or (type is not due and type != due):
            return False
    front = set(map(id, graph.nodes[:count]))
    for name, tensor in stored.items():
        other = graph.initializers.get(name)
        if other is None:
            continue
        if other.type == tensor.type and _equal(tensor, other):
            stored[name] = other
        elif name in read and name not in graph.inputs:
            readers = [node for node in like.readers.get(name, ()) if id(node) in front]
            if not all(_keeps_type(like, node, stored) for node in readers):
                return False
    return True


def _tail(
    path: str, model: ModelProto, rest: GraphProto, produced: Mapping[str, TensorType | None], known_types: KnownTypes
) -> Graph | None:  # fmt: skip
    """The graph of the nodes behind the front, with values of the front as inputs, and without unread inputs and stored
    values; None where a shape may follow from a number in the front. ``rest``: the file without the
    front."""
    readers: dict[str, list[NodeProto]] = {}
    for node in rest.node:
        for name in node.input:
            if name in produced:
                readers.setdefault(name, []).append(node)
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            return None  # a body may read any value
    file = ModelProto()
    file.CopyFrom(model)
    file.graph.CopyFrom(rest)
    file.graph.name = rest.name or "graph"
    for name, nodes in readers.items():
        type = produced[name]
        if type is None or not type.static:
            return None
        if type.dtype not in FLOATS and not all(node.op_type in CASTS for node in nodes):
            return None
        file.graph.input.append(value_info(name, type))
    read = {name for node in rest.node for name in node.input}.union(info.name for info in rest.output)
    refill(file.graph.input, [info for info in file.graph.input if info.name in read])
    refill(file.graph.initializer, [tensor for tensor in rest.initializer if tensor.name in read])
    refill(file.graph.value_info, [info for info in rest.value_info if info.name not in produced])
    refill(file.graph.output, [info for info in rest.output if info.name not in produced])
    with naming(path), gc_paused():
        tail = checked_graph(ModelFile(file.SerializeToString(deterministic=True), known_types), path, own=True)
    border = dict(decoded(rest.output, lambda info: declared(info, f"output {info.name!r}")))
    tail.outputs = {name: tail.outputs.get(name, type) for name, type in border.items()}
    return tail


def _without_metadata(header: ModelProto) -> bytes:
    model = ModelProto()
    model.CopyFrom(header)
    del model.metadata_props[:]
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.proto is None or other.proto is None:
        return (tensor.path, tensor.offset) == (other.path, other.offset) and tensor.path != ""
    return bool(tensor.proto == other.proto)


def _keeps_type(like: _LoadedFile, node: Node, new: Mapping[str, Tensor]) -> bool:
    """Return whether a node's result keeps the type for new stored values, and no shape follows from it: elementwise of
    an input without a number, or a Slice of as many elements of float values."""
    if record_of(node).elementwise and like.fed(node.outputs[0]):
        return True
    graph = like.graph
    source, result = graph.types.get(node.inputs[0]), graph.types.get(node.outputs[0])
    if not node.is_a("Slice") or source is None or result is None or not (source.static and result.static):
        return False
    if result.dtype not in FLOATS or not all(name in new for name in node.inputs[1:]):
        return False
    starts, stops, *rest = [new[name].numpy().reshape(-1) for name in node.inputs[1:]]
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    lengths = {int(axis): len(range(source.dims[int(axis)])[int(a) : int(b) : int(step)])
               for a, b, axis, step in zip(starts, stops, axes, steps)}  # fmt: skip
    return all(result.dims[axis] == length for axis, length in lengths.items())

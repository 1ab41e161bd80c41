"""Loads files that are alike but for stored values and metadata, as rank files are: nodes and types are read once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx import GraphProto, ModelProto

from gopt.ir.external_data import DataFolder, naming
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_io import read_initializers
from gopt.ir.load import header_of, load
from gopt.ir.symbol_table import SymbolTable
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS
from gopt.ir.wire_format import split_fields
from gopt.system.garbage import gc_paused

_GRAPH, _NODE, _INITIALIZER = 0x3A, 0x0A, 0x2A
"""Tags of the graph in a model, and of nodes and stored values in a graph."""
_MOST = 64
"""Graphs that a file is compared with."""


@dataclass(slots=True)
class _ModelParts:
    """The bytes of a file: the model without the graph, and the graph's nodes, stored values, and other fields."""

    header: bytes
    nodes: bytes
    values: bytes
    rest: bytes


@dataclass(slots=True)
class _LoadedFile:
    parts: _ModelParts
    graph: Graph
    users: dict[str, list[Node]]


class AlikeFiles:
    """A loader of gopt's own files. Graphs of files that are alike share nodes and types: neither may be edited."""

    def __init__(self) -> None:
        self._loaded: list[_LoadedFile] = []

    def load(self, path: str) -> Graph:
        """The graph in a file. Raises the errors of ``gopt.ir.load.load``."""
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except OSError:
            return load(path, own=True)  # says what is wrong
        for number, like in enumerate(self._loaded):
            parts = _parts(data, like.parts.nodes)
            graph = None if parts is None else _alike(path, parts, like)
            if graph is not None:
                self._loaded.insert(0, self._loaded.pop(number))
                return graph
        graph = load(path, own=True)
        parts = _parts(data)
        if parts is not None:
            self._loaded = [_LoadedFile(parts, graph, graph.users()), *self._loaded[: _MOST - 1]]
        return graph


def _parts(data: bytes, nodes: bytes | None = None) -> _ModelParts | None:
    """The parts of a file; None for a file in another order of fields, and for other nodes than ``nodes``, if given."""
    fields = split_fields(data, 0, len(data))
    graphs = [(at, end) for tag, _, at, end in fields if tag == _GRAPH]
    if len(graphs) != 1:
        return None
    ((at, end),) = graphs
    begun = at
    if nodes is not None:
        if not data.startswith(nodes, at) or data[at + len(nodes) : at + len(nodes) + 1] == bytes((_NODE,)):
            return None
        at += len(nodes)
    within = split_fields(data, at, end)
    while nodes is None and within and within[0][0] == _NODE:
        at = within.pop(0)[3]
    if any(tag == _NODE for tag, _, _, _ in within):
        return None
    header = b"".join([data[start:stop] for tag, start, _, stop in fields if tag != _GRAPH])
    values = b"".join([data[start:stop] for tag, start, _, stop in within if tag == _INITIALIZER])
    rest = b"".join([data[start:stop] for tag, start, _, stop in within if tag != _INITIALIZER])
    return _ModelParts(header, data[begun:at] if nodes is None else nodes, values, rest)


def _alike(path: str, parts: _ModelParts, like: _LoadedFile) -> Graph | None:
    """The graph of a file like a loaded one; None where types might differ."""
    graph = like.graph
    if parts.rest != like.parts.rest:
        return None
    with naming(path), gc_paused():
        model = ModelProto.FromString(parts.header)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        header = header_of(model)
        if _without_metadata(header) != _without_metadata(graph.header):
            return None
        inputs = dict(graph.inputs)
        body = GraphProto.FromString(parts.values)
        initializers = read_initializers(body, inputs, SymbolTable(None), DataFolder(path))
    if inputs != graph.inputs or list(initializers) != list(graph.initializers):
        return None
    for name, tensor in initializers.items():
        before = graph.initializers[name]
        if tensor.type != before.type:
            return None
        if _equal(tensor, before):
            initializers[name] = before
        elif name not in inputs and not all(_keeps_type(like, node, initializers) for node in like.users.get(name, ())):
            return None
    return replace(graph, inputs=inputs, initializers=initializers, header=header, metadata=metadata)


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


def _keeps_type(like: _LoadedFile, node: Node, new: dict[str, Tensor]) -> bool:
    """Return whether a node's result keeps the type for new stored values: a Slice of as many elements of float values,
    which no shape follows from."""
    types = like.graph.types
    source, result = types.get(node.inputs[0]), types.get(node.outputs[0])
    if not node.is_a("Slice") or source is None or result is None or not (source.static and result.static):
        return False
    if result.dtype not in FLOATS:
        return False
    if not all(name in new for name in node.inputs[1:]):
        return False
    starts, stops, *rest = [new[name].numpy().reshape(-1) for name in node.inputs[1:]]
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    lengths = {int(axis): len(range(source.dims[int(axis)])[int(a) : int(b) : int(step)])
               for a, b, axis, step in zip(starts, stops, axes, steps)}  # fmt: skip
    return all(result.dims[axis] == length for axis, length in lengths.items())

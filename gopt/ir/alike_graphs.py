"""The graph of a file beside a loaded file with the same nodes: what follows from these is not read again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnx import GraphProto, ModelProto, NodeProto

from gopt.ir.chunked_inference import KnownTypes
from gopt.ir.external_data import DataFolder, naming
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import walk
from gopt.ir.graph_io import declared, decoded, read_initializers, read_inputs
from gopt.ir.load import checked_graph, header_of
from gopt.ir.model_file import ModelFile
from gopt.ir.node_kinds import record_of
from gopt.ir.symbol_table import SymbolTable
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import value_info
from gopt.ir.types import FLOATS, TensorType, known
from gopt.ir.wire_format import NODE, split_fields
from gopt.operators.kinds import CASTS, UNMOVED
from gopt.system.garbage import gc_paused

_INITIALIZER = 0x2A
"""Tag of a stored value in a graph."""


@dataclass(slots=True)
class FileBytes:
    """The bytes of a file by part: the model without the graph, the graph's nodes with the end of each, stored values,
    and other fields of the graph.

    ``like``: another file, and the number of common nodes in front."""

    header: bytes
    nodes: bytes
    ends: list[int]
    values: bytes
    rest: bytes
    like: tuple[FileBytes, int] | None

    @classmethod
    def of(cls, header: bytes, data: bytes, like: tuple[FileBytes, int] | None) -> FileBytes | None:
        """The parts of a graph; None for nodes behind other fields."""
        ends = like[0].ends[: like[1]] if like is not None else []
        inner = split_fields(data, ends[-1] if ends else 0, len(data))
        count = sum(field[0] == NODE for field in inner)
        if not count + len(ends) or any(field[0] != NODE for field in inner[:count]):
            return None
        values = b"".join([data[start:stop] for tag, start, _, stop in inner[count:] if tag == _INITIALIZER])
        rest = b"".join([data[start:stop] for tag, start, _, stop in inner[count:] if tag != _INITIALIZER])
        ends = [*ends, *(stop for _, _, _, stop in inner[:count])]
        return cls(header, data[: ends[-1]], ends, values, rest, like)

    def behind(self, count: int) -> list[bytes]:
        """The nodes behind the first ones."""
        starts = [0, *self.ends]
        return [self.nodes[start:end] for start, end in zip(starts[count:], self.ends[count:])]

    def shared_with(self, other: FileBytes) -> int:
        """The number of nodes in front that another file begins with."""
        return self.like[1] if self.like is not None and self.like[0] is other else other.common(self.nodes)

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


class LoadedFile:
    """A loaded file; ``result_types``: of further nodes in other files."""

    def __init__(self, file: RankFile, graph: Graph, types: KnownTypes) -> None:
        self.file, self.parts, self.graph, self.result_types = file, file.parts, graph, types
        self._fronts: dict[int, _Front] = {}

    def front(self, count: int) -> _Front:
        """The first nodes, and where further nodes are."""
        if count not in self._fronts:
            types, makers, readers = self.graph.types, self.makers, self.readers
            read = {name for name, positions in readers.items() if name and name not in makers and positions[0] < count}
            behind = {node: position for position, node in enumerate(self.parts.behind(count), count)}
            front = {name for name, position in makers.items() if position < count}
            known_types = {name: types[name] for name in front if name in types}
            self._fronts[count] = _Front(front, known_types, read, behind)
        return self._fronts[count]

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The positions of the nodes that read each value."""
        readers: dict[str, list[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            for name in node.reads:
                readers.setdefault(name, []).append(position)
        return readers

    @cached_property
    def makers(self) -> dict[str, int]:
        """The position of the node that makes each value."""
        return {name: position for position, node in enumerate(self.graph.nodes) for name in node.outputs if name}

    def fed(self, name: str) -> bool:
        """Return whether a value is elementwise of an input without a number."""
        unknown = self.graph.inputs.keys() - self.graph.initializers.keys()
        return any(value in unknown for value in walk([name], self._elementwise))

    def _elementwise(self, name: str) -> Sequence[str]:
        """The operands with the same elements, of a value."""
        node = self.graph.nodes[self.makers[name]] if name in self.makers else None
        if node is None or not (record_of(node).elementwise or node.is_in(UNMOVED)):
            return ()
        return node.inputs[:1] if node.is_in(UNMOVED) else node.inputs


@dataclass(slots=True)
class _Front:
    """Nodes in front: results, with known types, and operands without a node; the positions of nodes ``behind``."""

    results: set[str]
    types: dict[str, TensorType]
    read: set[str]
    behind: dict[bytes, int]


class RankFile:
    """A file to be read beside others: parts are read once."""

    def __init__(self, path: str, parts: FileBytes) -> None:
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

    @cached_property
    def values(self) -> GraphProto:
        """The stored values."""
        fields: GraphProto = GraphProto.FromString(self.parts.values)
        return fields

    @cached_property
    def outputs(self) -> dict[str, TensorType]:
        """The declared types of outputs."""
        return dict(decoded(self.rest.output, lambda info: declared(info, f"output {info.name!r}")))

    def border(self, like: LoadedFile) -> tuple[dict[str, TensorType], dict[str, Tensor]]:
        """Inputs and stored values; inputs of a file with equal fields are not read again."""
        if self._border is None:
            symbols, equal = SymbolTable(None), self.parts.rest == like.parts.rest
            inputs = dict(like.graph.inputs) if equal else read_inputs(self.rest, symbols)
            self._border = inputs, read_initializers(self.values, inputs, symbols, DataFolder(self.path))
        return self._border


def graph_beside(file: RankFile, like: LoadedFile, count: int) -> Graph | None:
    """The graph of a file with the first ``count`` nodes of a loaded one; None where the file must be read alone."""
    with naming(file.path), gc_paused():
        if without_metadata(file.model) != without_metadata(like.graph.header):
            return None
        inputs, stored = file.border(like)
        return _Beside(file, like, count, inputs, stored).graph()


class _Beside:
    """A file beside a loaded file. The first ``count`` nodes are the same; nodes ``behind`` may be in the loaded file
    as well: at ``positions``, or else at -1."""

    def __init__(
        self, file: RankFile, like: LoadedFile, count: int, inputs: dict[str, TensorType], stored: dict[str, Tensor]
    ) -> None:
        self.file, self.like, self.count, self.inputs, self.stored = file, like, count, inputs, stored
        self.nodes, self.front, self.behind = like.graph.nodes, like.front(count), file.parts.behind(count)
        self.positions = [self.front.behind.get(node, -1) for node in self.behind]
        self.further = {position for position in self.positions if position >= 0}
        self.before = {name: tensor.type for name, tensor in stored.items()} | inputs
        self.equal = file.parts.rest == like.parts.rest
        self.border = like.file if self.equal else file

    def graph(self) -> Graph | None:
        """The graph of the file; None where a type may follow from numbers, and for most nodes of other types."""
        graph, makers, readers = self.like.graph, self.like.makers, self.like.readers
        read = {name for position in self.further for name in self.nodes[position].reads if name}
        anew = {name for name in read if self.count <= makers.get(name, -1) and makers[name] not in self.further}
        apart = self._apart(read - makers.keys() | self.front.read, anew)
        if apart is None or 2 * (self.count + len(self.further) - len(apart)) < len(self.file.parts.ends):
            return None
        result = replace(with_header(self.file.model, graph), inputs=self.inputs, initializers=self.stored)
        if self.equal and not apart and not self.behind and self.count == len(self.nodes):
            return result if self.inputs == graph.inputs and self.stored.keys() == graph.initializers.keys() else None
        while True:
            front = self._types_in_front(apart)
            again = self._read_again(apart, front)
            if again is None:
                return None
            nodes, types = again
            unlike = (name for name in anew if types.get(name) != graph.types.get(name))
            more = self._followers(position for name in unlike for position in readers[name]) - apart
            if not more:
                break
            apart |= more
        result.types = {**self.border.types, **front, **self.before, **types}
        result.outputs = {
            name: type if known(type.dtype) else types.get(name, type) for name, type in self.border.outputs.items()
        }
        joined = self._joined(nodes, apart, result.outputs)
        return None if joined is None else replace(result, nodes=joined)

    def _apart(self, read: set[str], anew: set[str]) -> set[int] | None:
        """The positions of nodes that may have results of other types than in the loaded file; None where an operand is
        missing. Equal stored values are shared. ``read``: by nodes in both files, and made ``anew`` by others.

        A call may have a result of another size on each rank, and nodes behind the call follow."""
        graph, readers, makers, stored = self.like.graph, self.like.readers, self.like.makers, self.stored
        types = self.before if self.equal else {**self.file.types, **self.file.outputs, **self.before}
        if not types.keys() >= read or not self.front.types.keys().isdisjoint(self.before):
            return None
        pairs = ((name, types[name], graph.types.get(name)) for name in read | (types.keys() & makers.keys()))
        unlike = [name for name, type, due in pairs if type is not due and type != due]
        unlike += [name for name in anew if not (self.equal and _no_shape(graph.types.get(name)))]
        begun = {position for name in unlike for position in (*readers.get(name, ()), makers.get(name, -1))}
        for name, tensor in stored.items():
            other = graph.initializers.get(name)
            if other is not None and other.type == tensor.type and _equal(tensor, other):
                stored[name] = other
            elif other is not None and name in read and name not in graph.inputs:
                begun.update(
                    position for position in readers[name] if not _keeps_type(self.like, self.nodes[position], stored)
                )
        return self._followers(begun)

    def _followers(self, begun: Iterable[int]) -> set[int]:
        """Nodes in both files, and all nodes behind."""

        def shared(positions: Iterable[int]) -> Iterator[int]:
            return (position for position in positions if 0 <= position < self.count or position in self.further)

        def behind(position: int) -> Iterator[int]:
            return shared(at for name in self.nodes[position].outputs for at in self.like.readers.get(name, ()))

        return {*walk(shared(begun), behind)}

    def _types_in_front(self, apart: set[int]) -> dict[str, TensorType]:
        """The types of further results."""
        front, types = dict(self.front.types), self.like.graph.types
        names = (name for position in self.further for name in self.nodes[position].outputs)
        front.update((name, types[name]) for name in names if name in types)
        for name in (name for position in apart for name in self.nodes[position].outputs):
            front.pop(name, None)
        return front

    def _read_again(
        self, apart: set[int], front: Mapping[str, TensorType]
    ) -> tuple[list[Node], dict[str, TensorType]] | None:
        """The nodes apart, and further nodes of this file alone, with the types of results; None where a type is
        unknown, or a shape may follow from a number in the front."""
        parts, ends = self.file.parts, [0, *self.like.parts.ends]
        again = [
            parts.nodes[ends[position] : ends[position + 1]] for position in sorted(apart) if position < self.count
        ]
        again += [node for node, position in zip(self.behind, self.positions) if position < 0 or position in apart]
        if not again:
            return [], {}
        model = ModelProto()
        model.CopyFrom(self.file.model)
        body = model.graph
        body.MergeFromString(b"".join(again))
        body.name = "graph"
        readers: dict[str, list[NodeProto]] = {}
        for node in body.node:
            for name in filter(None, node.input):
                readers.setdefault(name, []).append(node)
            if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
                return None  # a body may read any value
        results = {name for node in body.node for name in node.output}
        for name in (name for name in readers if name not in results):
            type = self.inputs.get(name) or front.get(name)
            if type is not None:
                body.input.append(value_info(name, type))
            casts = all(node.op_type in CASTS for node in readers[name])
            if name not in self.before and not _no_shape(type, number=not casts):
                return None
        body.initializer.extend(tensor for tensor in self.file.values.initializer if tensor.name in readers)
        body.value_info.extend(value_info(name, type) for name, type in self.border.types.items() if name in results)
        body.output.extend(value_info(name, type) for name, type in self.border.outputs.items() if name in results)
        data: bytes = model.SerializeToString(deterministic=True)
        graph = checked_graph(ModelFile(data, self.like.result_types), self.file.path, own=True)
        return graph.nodes, graph.types

    def _joined(self, again: Sequence[Node], apart: set[int], outputs: Iterable[str]) -> list[Node] | None:
        """The nodes of the file, with nodes read ``again``; None for a value made twice, or read before."""
        nodes, done = self.nodes[: self.count], {*self.before, *self.front.results}
        further = iter(again[sum(position < self.count for position in apart) :])
        for position in self.positions:
            node = next(further) if position < 0 or position in apart else self.nodes[position]
            results = [name for name in node.outputs if name]
            if not done.issuperset(filter(None, node.reads)) or not done.isdisjoint(results):
                return None
            done.update(results)
            nodes.append(self.nodes[position] if position >= 0 else node)
        return nodes if done.issuperset(outputs) else None


def with_header(model: ModelProto, graph: Graph) -> Graph:
    """A graph under the header of another file."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    return replace(graph, header=header_of(model), metadata=metadata)


def without_metadata(header: ModelProto) -> bytes:
    model = ModelProto()
    model.CopyFrom(header)
    del model.metadata_props[:]
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.proto is None or other.proto is None:
        return (tensor.path, tensor.offset) == (other.path, other.offset) and tensor.path != ""
    return bool(tensor.proto == other.proto)


def _keeps_type(like: LoadedFile, node: Node, new: Mapping[str, Tensor]) -> bool:
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
    rank, axes = len(source.dims), rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    if 0 in steps or not all(-rank <= axis < rank for axis in axes):
        return False  # alone, the file is refused
    lengths = {int(axis) % rank: len(range(source.dims[int(axis)])[int(a) : int(b) : int(step)])
               for a, b, axis, step in zip(starts, stops, axes, steps)}  # fmt: skip
    return len(lengths) == len(starts) and all(result.dims[axis] == length for axis, length in lengths.items())


def _no_shape(type: TensorType | None, *, number: bool = True) -> bool:
    """Return whether no shape follows from a ``number`` in a value of known size."""
    return type is not None and type.static and (type.dtype in FLOATS or not number)

"""Graphs as model files, and the source without the values of the states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto

from gopt.analysis.reshapes import MOVED
from gopt.analysis.training import TrainingGraph
from gopt.artifact.annotations import annotated
from gopt.artifact.states_file import STATES_FILE, StatesFile
from gopt.ir.graph import Graph, Node
from gopt.ir.opaque.function_export import prepare, source_nodes
from gopt.ir.symbol_table import RESERVED
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import encoded_values, value_info
from gopt.ir.types import TensorType, dtype_code
from gopt.ir.wire_format import field, head
from gopt.operators.kinds import CONTROL_FLOW
from gopt.spmd.program import SpmdProgram

SOURCE_FILE = "source.onnx"
FILE_NODES = "serialized nodes"
"""The question of ``TrainingGraph.once``."""
_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER


def external_tensor(name: str, type: TensorType, offset: int, location: str = STATES_FILE) -> TensorProto:
    """Return a tensor with external data: the bytes are in a file beside the model."""
    tensor = TensorProto(name=name, data_type=dtype_code(type.dtype), dims=type.dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(type.nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def named_tensor(name: str, tensor: Tensor) -> TensorProto:
    """A constant inside the graph, under the name."""
    if tensor.proto is not None and not tensor.external:
        proto = deepcopy(tensor.proto)
    else:
        proto = onnx.numpy_helper.from_array(np.ascontiguousarray(tensor.numpy()).reshape(tensor.type.dims))
    proto.name = name
    return proto


def source_model(program: SpmdProgram, values: StatesFile, roles: str, *, annotate: bool = False) -> list[bytes]:
    """The source graph without state values, in pieces: the start of merge, reshard and verify.

    Roles travel as metadata. ``annotate``: with sharding specs of states held in parts.
    """
    metadata = {"gopt.format": "gopt-source/1", "gopt.roles": roles}
    whole = without_values(program.source)
    if annotate:
        return _pieces(whole, values.offset, STATES_FILE, metadata, program)
    return _pieces(whole, values.offset, STATES_FILE, metadata, encoded=file_nodes(program.source))


def file_nodes(training: TrainingGraph) -> bytes:
    """The nodes of a source as in the file, serialized."""
    return training.once(FILE_NODES, lambda: _encoded(source_nodes(training.graph)[0]))


def _encoded(nodes: Iterable[Node]) -> bytes:
    """Nodes as fields of a graph."""
    return b"".join([field(1, node.to_bytes()) for node in nodes])


def without_values(training: TrainingGraph) -> Graph:
    """The graph of a step without values of states; every state is an input."""
    source: Graph = training.graph
    states = {state.tensor for state in training.states}
    inputs = {**source.inputs, **{name: source.types[name] for name in sorted(states) if name not in source.inputs}}
    names = {
        name for name in source.initializers if name.startswith(f"{RESERVED}{MOVED}.")
    }  # the file does not have them
    initializers = {name: tensor for name, tensor in source.initializers.items() if name not in states | names}
    return replace(source, inputs=inputs, initializers=initializers)


def model_bytes(graph: Graph, offsets: Mapping[str, int], location: str, metadata: Mapping[str, str]) -> bytes:
    """Serialize a graph as a model file.

    Initializers with an entry in ``offsets`` refer to the file ``location``; all others are stored inside.
    """
    return b"".join(_pieces(graph, offsets, location, metadata))


def _pieces(
    graph: Graph, offsets: Mapping[str, int], location: str, metadata: Mapping[str, str],
    layout: SpmdProgram | None = None, encoded: bytes | None = None,
) -> list[bytes]:  # fmt: skip
    """Return the same in pieces. ``layout``: the program whose shardings are written as specs; None: only the graph's
    own specs. ``encoded``: the serialized nodes, if known."""
    body = onnx.GraphProto(name=graph.name)
    borders = encoded_values(11, graph.inputs) + encoded_values(12, graph.outputs)
    for name, tensor in graph.initializers.items():
        at = offsets.get(name)
        body.initializer.append(
            named_tensor(name, tensor) if at is None else external_tensor(name, tensor.type, at, location)
        )
    nodes, functions = source_nodes(graph)
    header = graph.header
    if layout is not None:
        header, nodes = annotated(graph, nodes, layout)
    types = graph.file_types if graph.file_nodes is not None else {}
    results = onnx.GraphProto(value_info=declared_results(nodes, lambda name: types.get(name) or graph.type_of(name)))
    model = deepcopy(header)
    prepare(model, functions)
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    # A message is the sum of its fields, in the order of their numbers: nodes are bytes already.
    whole = [_encoded(nodes) if encoded is None else encoded, body.SerializeToString(deterministic=True), borders]
    whole.append(results.SerializeToString(deterministic=True))
    before, behind = (_fields(model, numbers) for numbers in (range(1, _GRAPH), range(_GRAPH + 1, 1 << 29)))
    return [before, head(_GRAPH, sum(map(len, whole))), *whole, behind]


def declared_results(nodes: Sequence[Node], type_of: Callable[[str], TensorType]) -> Iterator[ValueInfoProto]:
    """The types of results perhaps unknown to a reader, as far as static."""
    bodies = any(node.op_type in CONTROL_FLOW and node.is_in(CONTROL_FLOW) for node in nodes)
    for node in nodes if bodies else [node for node in nodes if node.domain]:
        if bodies or node.domain != "ai.onnx":  # behind bodies inference may know none
            yield from (value_info(name, type) for name in node.outputs if (type := type_of(name)).static)


def _fields(model: onnx.ModelProto, numbers: range) -> bytes:
    """The fields of some numbers, serialized."""
    part = deepcopy(model)
    for entry, _ in model.ListFields():
        if entry.number not in numbers:
            part.ClearField(entry.name)
    data: bytes = part.SerializeToString(deterministic=True)
    return data

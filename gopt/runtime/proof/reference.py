"""The reference that verify compares with: the source cut at its gradients, independent of every rewrite.

``local`` computes loss, gradients and statistics of one batch; ``update`` turns averaged gradients into new states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import onnx

from gopt.analysis.training import Kind, Phase, Training
from gopt.collectives.table import COLLECTIVES
from gopt.errors import UnsupportedError
from gopt.graph.model import COMM, Graph, Node, Tensor, clone, make_attribute
from gopt.graph.types import HALVES, TensorType, dtype_code
from gopt.mesh import DATA_AXES, Mesh


def local_graph(training: Training, weight: str = "") -> Graph:
    """Everything up to the gradients: outputs loss, gradients and new statistics of one rank's batch, and its
    ``weight`` (``--loss-reduction``)."""
    statistics = [state.updated for state in training.states if state.kind is Kind.STATISTIC]
    wanted = [training.loss, *dict.fromkeys(training.gradients.values()), *statistics]
    wanted += [*training.shared.values(), *([weight] if weight else [])]
    return _cut(training.graph, training.graph.nodes, dict.fromkeys(wanted), ())


def update_graph(training: Training) -> Graph:
    """The source's own update: inputs are gradients, states and hyper-parameters; outputs all other new states."""
    wanted = [state.updated for state in training.states if state.kind is not Kind.STATISTIC]
    stops = {*training.gradients.values(), *training.shared}
    nodes = [
        node for node, phase in zip(training.graph.nodes, training.phases)
        if phase is Phase.UPDATE or not stops.intersection(node.outputs)
    ]  # fmt: skip
    return _cut(training.graph, nodes, dict.fromkeys(wanted), stops)


PROBE = "Probe"
"""A call that a rank answers itself: where ``verify`` can reach a local gradient that no real call takes."""


def probed(graph: Graph, gradients: set[str]) -> Graph:
    """A rank's graph with a probe in front of every node of a pass that reads a local gradient and is no call."""
    readers = [
        node for node in graph.nodes if node.made_by and node.domain != COMM and gradients.intersection(node.inputs)
    ]
    if not readers:
        return graph
    probed = {name for node in readers for name in node.inputs if name in gradients}
    within = {id(node) for node in readers}
    nodes: list[Node] = []
    types = dict(graph.types)
    for node in graph.nodes:
        if id(node) in within:
            node = clone(node)
            node.inputs = [f"{name}.probed" if name in probed else name for name in node.inputs]
        nodes.append(node)
        for name in probed.intersection(node.outputs):
            types[f"{name}.probed"] = types[name]
            nodes.append(Node(PROBE, [name], [f"{name}.probed"], domain=COMM))
    return replace(graph, nodes=nodes, types=types)


def _cut(graph: Graph, nodes: Iterable[Node], wanted: Iterable[str], stops: Iterable[str]) -> Graph:
    """The part of a graph that computes ``wanted``, with ``stops`` turned into inputs."""
    stops = set(stops)
    wanted = list(wanted)
    needed = set(wanted)
    kept: list[Node] = []
    for node in reversed(list(nodes)):
        if any(name in needed and name not in stops for name in node.outputs):
            kept.append(clone(node))
            needed.update(node.reads)
    kept.reverse()
    inputs = {name: type for name, type in graph.inputs.items() if name in needed}
    inputs |= {name: graph.types[name] for name in sorted(stops) if name in needed}
    return Graph(
        graph.name, kept, inputs, {name: graph.types[name] for name in wanted},
        {name: tensor for name, tensor in graph.initializers.items() if name in needed},
        dict(graph.types), graph.header, {},
    )  # fmt: skip


def widened(graph: Graph, dtype: str) -> Graph:
    """The same graph with every floating type replaced by ``dtype`` (float32 or float64): for finite differences."""
    wide = graph.copy()
    for table in (wide.inputs, wide.outputs, wide.types):
        for name, type in table.items():
            if type.dtype in ("float32", *HALVES):
                table[name] = TensorType(dtype, type.shape)
    for name, tensor in graph.initializers.items():
        if tensor.type.dtype in ("float32", *HALVES):
            value = np.asarray(tensor.numpy()).astype(dtype)
            wide.initializers[name] = Tensor(TensorType(dtype, tensor.type.shape), array=value)
    wide.nodes = [_widened(node, dtype) for node in wide.nodes]
    return wide


_FLOAT_CODES = {dtype_code(name) for name in ("float32", "float16", "bfloat16")}


def _widened(node: Node, dtype: str) -> Node:
    if node.proto is None or not node.proto.attribute:
        return node
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    changed = False
    for attribute in proto.attribute:
        if attribute.name in ("to", "dtype", "stash_type") and attribute.i in _FLOAT_CODES:
            attribute.i = dtype_code(dtype)
            changed = True
        elif attribute.HasField("t") and attribute.t.data_type in _FLOAT_CODES:
            value = np.asarray(onnx.numpy_helper.to_array(attribute.t)).astype(dtype)
            attribute.t.CopyFrom(onnx.numpy_helper.from_array(value))
            changed = True
        elif node.is_a("Constant") and attribute.name in ("value_float", "value_floats"):
            value = np.array(attribute.f if attribute.name == "value_float" else list(attribute.floats), dtype)
            attribute.CopyFrom(make_attribute("value", onnx.numpy_helper.from_array(value)))
            changed = True
    if not changed:
        return node
    copy = clone(node)
    copy.proto = proto
    copy._attributes = None
    return copy


def equal_members(mesh: Mesh) -> Callable[[int, Node, list[np.ndarray]], list[np.ndarray]]:
    """What a collective gives when all members of its group hold equal values, as they do along no data axis.

    The returned function raises UnsupportedError for a call that gives each member something else, and for one over
    axes that see different data.
    """

    def call(index: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
        group = str(node.attributes["group"])
        if any(axis in DATA_AXES and mesh.size(axis) > 1 for axis in mesh.split(group)):
            return no_call(index, node, inputs)
        if node.op_type not in ("AllReduce", "Reduce", "Broadcast", "AllGather"):
            raise UnsupportedError(
                f"{node.op_type} {node.label!r} over {group} gives each member another part: one rank cannot "
                "stand for all"
            )
        if node.op_type == "Broadcast":
            return [array.copy() for array in inputs]
        size = mesh.size(group)
        dtype = str(inputs[0].dtype)
        results = COLLECTIVES[node.op_type].execute(node.attributes, [inputs] * size, dtype)
        root = int(node.attributes.get("root", 0))
        return results[root] or []

    return call


def no_call(index: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What a graph of one rank alone answers to a collective over axes that see different data."""
    raise UnsupportedError(f"the source holds the collective {node.op_type}: it is sharded already")

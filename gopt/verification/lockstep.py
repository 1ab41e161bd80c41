"""The local part of the source on all data ranks at once, for values reduced by ranks on the way (statistics).

The manifest lists these values: the list is shared with the ranks, and nothing of their rewritten graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from gopt.analysis.statistic_points import Ring, RowQueue, StatisticPoint, StatisticReduction, path_nodes
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.errors import InputError
from gopt.ir.graph import COMM, Graph, Node, clone
from gopt.ir.types import TensorType, numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.engines.threads import run_ranks
from gopt.verification.compare import Values
from gopt.verification.source_members import Program

VERIFIER_CALL = "verify"
"""``made_by`` of the calls that are put in: all others the source has itself."""


def with_shared_means(graph: Graph, shared: SynchronisedValues) -> Graph:
    """The graph with every shared value replaced by its mean over the group ``shard`` for all readers."""
    points, constants = set(shared.points), {correction.output: correction for correction in shared.corrected}
    lost = (points | constants.keys()) - {name for node in graph.nodes for name in node.outputs}
    if lost:
        raise InputError(
            f"the manifest says that ranks share {sorted(lost)[0]!r}, which the source does not have",
            "verify the folder with the step that it was made from",
        )
    types = graph.types | {f"{name}.mean": graph.types[name] for name in points}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = clone(old)
        node.inputs = [f"{name}.mean" if name in points else name for name in node.inputs]
        fixed = next((constants[name] for name in node.outputs if name in constants), None)
        if fixed is not None:
            type, name = types[fixed.constant], f"{fixed.output}.constant"
            value = onnx.numpy_helper.from_array(np.full(type.dims, fixed.value, numpy_dtype(type.dtype)))
            nodes.append(Node("Constant", [], [name], attributes={"value": value}))
            types[name] = type
            node.inputs = [name if operand == fixed.constant else operand for operand in node.inputs]
        nodes.append(node)
        for name in points.intersection(node.outputs):
            attributes = {"group": "shard", "reduce": "mean"}
            nodes.append(
                Node("AllReduce", [name], [f"{name}.mean"], domain=COMM, attributes=attributes, made_by=VERIFIER_CALL)
            )
    return replace(graph, nodes=nodes, types=types)


def with_reduced_statistics(
    graph: Graph, reductions: Iterable[StatisticReduction], updated: Mapping[str, str], ranks: int
) -> Graph:
    """The graph with new statistics made of values reduced by the group ``shard``; all else reads a rank's own values.

    ``updated``: statistic -> the new value, an output. ``ranks``: how many rows are gathered of."""
    producers, old = graph.producers(), list(graph.nodes)
    nodes, types = [clone(node) for node in old], dict(graph.types)
    local_names: dict[str, str] = {}
    for reduction in reductions if producers else ():
        for point in reduction.points:
            name = f"{point.value}.{point.reduce}"
            _check(graph, point.value, point.axis if point.reduce == "gather" else 0)
            if name not in types:
                nodes += _met(types, point, name, ranks)
        new, renamed = updated[reduction.tensor], {p.value: f"{p.value}.{p.reduce}" for p in reduction.points}
        if reduction.queue is not None:
            _check(graph, reduction.queue.old, reduction.queue.axis)
            joined = f"{reduction.tensor}.joined"
            nodes += _joined(types, reduction.queue, [renamed[p.value] for p in reduction.points], joined)
            renamed = {reduction.queue.value: joined}
        for node in path_nodes(old, producers, list(renamed), new):
            read = [renamed.get(name, name) for name in node.inputs]
            renamed |= {name: f"{name}.of.{reduction.tensor}" for name in node.outputs if name}
            copy = Node(
                node.op_type, read, [renamed.get(name, name) for name in node.outputs], domain=node.domain,
                attributes=dict(node.attributes),
            )  # fmt: skip  # without a name: a model has each once
            copy.captures = node.captures
            types |= {renamed[name]: graph.types[name] for name in node.outputs if name}
            nodes.append(copy)
        local_names[new] = renamed[new]
    renames = {name: f"{name}.local" for name in local_names}
    for node in nodes:
        node.inputs = [renames.get(name, name) for name in node.inputs]
        node.outputs = [renames.get(name, name) for name in node.outputs]
    nodes += [Node("Identity", [renames.get(value, value)], [name]) for name, value in local_names.items()]
    return replace(graph, nodes=nodes, types=types | {renames[name]: types[name] for name in local_names})


def _check(graph: Graph, value: str, axis: int) -> None:
    """Raise InputError for a value, or a dimension of rows, unknown to the source."""
    type = graph.types.get(value)
    if type is None or (axis and axis >= len(type.shape or ())):
        raise InputError(
            f"the manifest says that ranks reduce {value!r}, which the source does not have so",
            "verify the folder with the step that it was made from",
        )


def _met(types: dict[str, TensorType], point: StatisticPoint, name: str, ranks: int) -> list[Node]:
    """The call from a value of every rank to ``name``; places of a ring are known without a call."""
    type = types[point.value]
    if point.ring is not None:
        return _places(types, point, point.ring, name, ranks)
    attributes: dict[str, Any] = {"group": "shard", "reduce": point.reduce}
    types[name], op_type = type, "AllReduce"
    if point.reduce == "gather":
        sizes = [type.dims[point.axis]] * ranks
        types[name], op_type = _sized(type, point.axis, sum(sizes)), "AllGather"
        attributes = {"group": "shard", "axis": point.axis, "sizes": sizes}
    return [Node(op_type, [point.value], [name], domain=COMM, attributes=attributes, made_by=VERIFIER_CALL)]


def _places(types: dict[str, TensorType], point: StatisticPoint, ring: Ring, name: str, ranks: int) -> list[Node]:
    """The places of the rows of all ranks, one rank behind the other."""
    type, axis, ahead = types[point.value], point.axis, f"{name}.ahead"
    dims = type.dims
    lengths = [ranks if dim == axis else 1 for dim in range(len(dims) + 1)]
    steps = (np.arange(ranks) * ring.step).reshape(lengths).astype(numpy_dtype(type.dtype))
    wide = types[name] = types[ahead] = _sized(type, axis, dims[axis] * ranks)
    types[f"{name}.row"] = TensorType(type.dtype, (*dims[:axis], 1, *dims[axis:]))
    types[f"{name}.moved"] = TensorType(type.dtype, (*dims[:axis], ranks, *dims[axis:]))
    return [
        _constant(types, f"{name}.one", np.array(types[f"{name}.row"].dims)),
        Node("Reshape", [point.value, f"{name}.one"], [f"{name}.row"]),
        _constant(types, f"{name}.steps", steps),
        Node("Add", [f"{name}.row", f"{name}.steps"], [f"{name}.moved"]),
        _constant(types, f"{name}.shape", np.array(wide.dims)),
        Node("Reshape", [f"{name}.moved", f"{name}.shape"], [ahead]),
        _constant(types, f"{name}.rows", np.array(ring.rows, numpy_dtype(type.dtype))),
        Node("Mod", [ahead, f"{name}.rows"], [name]) if ring.wraps else Node("Identity", [ahead], [name]),
    ]


def _joined(types: dict[str, TensorType], queue: RowQueue, rows: list[str], name: str) -> list[Node]:
    """A queue of all rows with the old rows, cut off at the oldest end."""
    type, axis, size = types[queue.old], queue.axis, sum(types[row].dims[queue.axis] for row in (*rows, queue.old))
    long, room = f"{name}.long", type.dims[axis]
    types |= {name: type, long: _sized(type, axis, size)}
    start = 0 if queue.front else size - room
    ends = [f"{name}.start", f"{name}.stop", f"{name}.axis"]
    nodes = [_constant(types, end, np.array([number])) for end, number in zip(ends, (start, start + room, axis))]
    order = [*rows, queue.old] if queue.front else [queue.old, *rows]
    return [*nodes, Node("Concat", order, [long], attributes={"axis": axis}), Node("Slice", [long, *ends], [name])]


def _sized(type: TensorType, axis: int, size: int) -> TensorType:
    return TensorType(type.dtype, (*type.dims[:axis], size, *type.dims[axis + 1 :]))


def _constant(types: dict[str, TensorType], name: str, value: np.ndarray) -> Node:
    types[name] = TensorType(str(value.dtype), value.shape)
    return Node("Constant", [], [name], attributes={"value": onnx.numpy_helper.from_array(value)})


@dataclass(frozen=True, slots=True)
class _ReferenceRank:
    """A rank of the reference: calls of the source are answered as for one rank, the verifier's by all."""

    program: Program
    callback: CollectiveCallback

    def run(self, feeds: Values, call: CollectiveCallback) -> Values:
        def answer(index: int, node: Node, inputs: list[np.ndarray]) -> Any:
            return (call if node.made_by == VERIFIER_CALL else self.callback)(index, node, inputs)

        return self.program.run(feeds, answer)


def run_in_lockstep(program: Program, feeds: Sequence[Values], callback: CollectiveCallback) -> list[Values]:
    """Run the program for every data rank with the rank's feeds; returns the results of each."""
    mesh = Mesh((("shard", len(feeds)),))
    return run_ranks([_ReferenceRank(program, callback) for _ in feeds], list(feeds), mesh)

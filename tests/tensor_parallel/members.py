"""All members of an axis in one process: each node run for every member, calls by the reference of collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import placement_numbers
from node_models import model_of, once
from onnx import helper
from placement_numbers import cut, terms_of, type_of

from gopt.analysis.training import TrainingGraph
from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.tensor import Tensor
from gopt.lower.layout_operators import LOWERED, LoweringContext
from gopt.records.placements import PARTS, REPLICATED, Partial, Placement, Shard, Sharding, WindowTerms
from gopt.tensor_parallel.localise import localise
from gopt.tensor_parallel.propagate import propagate
from gopt.tensor_parallel.propagated import Propagated

AXIS = "tp"
Array = np.ndarray


def graph_of(nodes: Sequence[Node], values: Mapping[str, Array], opset: int) -> Graph:
    """A graph in logical types, with all values that are known."""
    header = helper.make_model(helper.make_graph([], "some", [], []))
    header.opset_import[0].version = opset
    return Graph("some", list(nodes), {}, {}, {}, {name: type_of(each) for name, each in values.items()}, header)


def run(nodes: Sequence[Node], values: Mapping[str, Array], outputs: Sequence[str], opset: int) -> list[Array]:
    """What standard nodes make of values."""
    read = {name for node in nodes for name in node.inputs}
    known = {name: each for name, each in values.items() if name in read}
    model = model_of((node.to_proto() for node in nodes), known, outputs, opset=opset)
    return [np.asarray(each) for each in once(model.SerializeToString(deterministic=True)).run(None, known)]


def swept(node: Node, values: Mapping[str, Array], seeds: Mapping[str, Placement], opset: int = 20) -> Propagated:
    """One node propagated, from placements of what it reads."""
    members = next(len(each.sizes) for each in seeds.values() if isinstance(each, Shard))
    outputs = [name for name in node.outputs if name]
    known = dict(values) | dict(zip(outputs, run([node], values, outputs, opset)))
    graph = graph_of([node], known, opset)
    if node.op_type.startswith("Reduce"):  # axes are constants
        graph.initializers.update({name: Tensor(type_of(values[name]), array=values[name]) for name in node.inputs[1:]})
    return propagate(bare(graph), graph, AXIS, members, seeds)


def bare(graph: Graph, batch: Sequence[str] = ()) -> TrainingGraph:
    """A graph that trains nothing, for what needs a step."""
    return TrainingGraph(graph, (), [], {}, list(batch), [], [], [])


def simulated(
    graph: Graph, placements: Mapping[str, Placement], values: Mapping[str, Array], members: int,
    parts: Mapping[str, list[Array]] | None = None,
) -> dict[str, list[Array]]:  # fmt: skip
    """Value -> what each member has of it; ``parts``: of values that are not taken apart here."""
    shardings = {name: Sharding.along(AXIS, each) for name, each in placements.items() if isinstance(each, PARTS)}
    locals_ = [graph.copy() for _ in range(members)]
    for member, each in enumerate(locals_):
        localise(each, shardings, {AXIS: member})
    held = {name: taken(each, placements.get(name, REPLICATED), members) for name, each in values.items()}
    held |= dict(parts or {})
    opset = graph.header.opset_import[0].version
    for place, node in enumerate(graph.nodes):
        nodes = [each.nodes[place] for each in locals_]
        if node.domain == COMM:
            given = [[held[name][member] for name in node.inputs] for member in range(members)]
            dtype = graph.types[node.outputs[0]].dtype
            results = COLLECTIVES[node.op_type].execute(nodes[0].attributes, given, dtype)
            made = [each or [] for each in results]
        else:
            made = [
                _one(local, nodes[member], {name: each[member] for name, each in held.items()}, member, opset)
                for member, local in enumerate(locals_)
            ]
        for at, name in enumerate(node.outputs):
            if name:
                held[name] = [each[at] for each in made]
                for each, local in zip(held[name], locals_):
                    assert each.shape == local.types[name].dims, f"{name}: {each.shape}, not {local.types[name].dims}"
    return held


def _one(local: Graph, node: Node, held: Mapping[str, Array], member: int, opset: int) -> list[Array]:
    values = {**{name: each.numpy() for name, each in local.initializers.items()}, **held}
    nodes: Sequence[Node] = [node]
    if node.domain == SPMD:
        lowered = LOWERED[node.op_type](node, LoweringContext({AXIS: member}, frozenset(values), local.types))
        nodes, values = lowered.nodes(), {**values, **lowered.constants}
        if not nodes:
            return [values[lowered.alias]]
    return run(nodes, values, [name for name in node.outputs if name], opset)


def taken(whole: Array, placement: Placement, members: int) -> list[Array]:
    """What members have of a value; terms of a sum are drawn."""
    if isinstance(placement, Partial):
        generator = np.random.default_rng(0)
        terms = [generator.integers(-4, 4, whole.shape).astype(whole.dtype) for _ in range(members - 1)]
        return [*terms, whole - sum(terms)]
    if isinstance(placement, WindowTerms):
        return terms_of(whole, placement, np.random.default_rng(0))
    return [cut(whole, placement, member) for member in range(members)]


def joined(parts: Sequence[Array], placement: Placement) -> Array:
    """The whole value, as the first member has it."""
    return next(placement_numbers.joined(parts, placement))

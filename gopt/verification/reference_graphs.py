"""The reference of verify: the source cut at its gradients, independent of every rewrite.

``local`` computes loss, gradients and statistics of one batch; ``update`` turns averaged gradients into new states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.collectives.messages import MESSAGES
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node, clone
from gopt.ir.graph_index import GraphIndex, ancestors


def local_graph(
    training: TrainingGraph, weight: str = "", more: Iterable[str] = (), stops: Iterable[str] = ()
) -> Graph:  # fmt: skip
    """Everything up to the gradients: outputs loss, gradients and new statistics of one rank's batch, the ``weight``
    (``--loss-reduction``), and ``more``; ``stops`` are inputs."""
    states = [state for state in training.states if state.kind is StateKind.STATISTIC]
    statistics = [training.chosen.get(state.tensor, state.updated) for state in states]
    wanted = [*training.losses, *dict.fromkeys(training.gradients.values()), *statistics]
    wanted += [*training.shared.values(), *([weight] if weight else []), *more]
    return subgraph(training.graph, training.graph.nodes, dict.fromkeys(wanted), stops)


def update_graph(training: TrainingGraph, condition_outputs: Iterable[str] = ()) -> Graph:
    """The source's own update: inputs are gradients, states and hyper-parameters; outputs all other new states.

    ``condition_outputs``: further outputs of the update."""
    wanted = [
        state.updated for state in training.states
        if state.kind is not StateKind.STATISTIC or state.tensor in training.chosen
    ]  # fmt: skip
    wanted += condition_outputs
    stops = combined(training)
    nodes = [
        node for node in training.graph.nodes
        if node.phase is Phase.UPDATE or stops.isdisjoint(node.outputs)
    ]  # fmt: skip
    return subgraph(training.graph, nodes, dict.fromkeys(wanted), stops)


def metric_graph(training: TrainingGraph) -> Graph | None:
    """The metrics that the update makes; inputs are, beside the update's inputs, the values of forward and backward
    that these metrics read. None without any."""
    forward = {*training.forward_metrics}
    wanted = [name for name in training.metrics if name not in forward]
    nodes = [node for node in training.graph.nodes if node.phase is Phase.UPDATE]
    before = (name for node in training.graph.nodes if node.phase is not Phase.UPDATE for name in node.outputs if name)
    return subgraph(training.graph, nodes, wanted, {*before, *combined(training)}) if wanted else None


def combined(training: TrainingGraph) -> set[str]:
    """The values that the update has from all batches."""
    return {*training.gradients.values(), *training.shared, *training.chosen.values()}


PROBE = "Probe"
"""A call that a rank answers itself: where ``verify`` can reach a local gradient that no real call takes."""


def probed(graph: Graph, gradients: set[str], data: Collection[str], terms: Mapping[str, str] = {}) -> Graph:
    """A rank's graph with a probe in front of every node of a pass that reads a local gradient for the update and is
    not a call, and behind every maker of ``terms``. The backward reads the gradient unchanged.

    ``data``: the axes of ranks with other samples; ``terms``: of gradients in parts on all ranks, with the gradient.
    Local gradients made by the rank itself, as in the source, are outputs as well."""
    local = {name for node in graph.nodes if _local(node, data) for name in node.outputs}
    shown = {name: graph.types[name] for name in sorted(gradients & local) if name in graph.types}
    graph = replace(graph, outputs={**shown, **graph.outputs})
    users = [
        node for node in graph.nodes
        if node.made_by and (node.domain != COMM or node.op_type in MESSAGES) and gradients.intersection(node.inputs)
    ]  # fmt: skip
    if users:
        backward, _ = ancestors(GraphIndex(graph), shown)
        users = [node for node in users if id(node) not in backward]
    apart = local.intersection(terms)
    if not users and not apart:
        return graph
    probed = {name for node in users for name in node.inputs if name in gradients}
    within = {id(node) for node in users}
    types = dict(graph.types) | {f"{name}.probed": graph.types[name] for name in probed}
    types |= {f"{name}.made": graph.types[name] for name in apart if name in graph.types}
    fed = probed.intersection(graph.inputs)  # gradients that an earlier file of a micro-batch left
    nodes = [_probe(name, name, f"{name}.probed") for name in sorted(fed)]
    for node in graph.nodes:
        produced, reads = apart.intersection(node.outputs), id(node) in within
        if produced or reads:
            node = clone(node)
            if reads:
                node.inputs = [f"{name}.probed" if name in probed else name for name in node.inputs]
            node.outputs = [f"{name}.made" if name in produced else name for name in node.outputs]
        nodes.append(node)
        nodes += [_probe(name, name, f"{name}.probed") for name in probed.intersection(node.outputs)]
        nodes += [_probe(terms[name], f"{name}.made", name) for name in sorted(produced)]
    return replace(graph, nodes=nodes, types=types)


def _probe(gradient: str, value: str, result: str) -> Node:
    """A probe of a value, named by the gradient."""
    return Node(PROBE, [value], [result], name=gradient, domain=COMM)


def _local(node: Node, data: Collection[str]) -> bool:
    """Return whether a node's results are local to ranks with different data, as in the source.

    This includes completion along axes that split the computation, in a separate or packed call."""
    if node.domain != COMM:
        return node.made_by in ("", "tensor-parallel")
    if node.op_type in MESSAGES:
        return False
    return bool(node.made_by) and not set(str(node.attributes["group"]).split("+")).intersection(data)


def subgraph(graph: Graph, nodes: Iterable[Node], wanted: Iterable[str], stops: Iterable[str]) -> Graph:
    """The part of a graph before ``wanted``, with ``stops`` turned into inputs; the nodes are the graph's own."""
    stops, wanted = set(stops), list(wanted)
    needed, selected = set(wanted), list[Node]()
    for node in reversed(list(nodes)):
        if not needed.intersection(node.outputs) <= stops:
            selected.append(node)
            needed.update(node.reads)
    selected.reverse()
    inputs = {name: type for name, type in graph.inputs.items() if name in needed}
    inputs |= {name: graph.types[name] for name in sorted(stops) if name in needed}
    return Graph(
        graph.name, selected, inputs, {name: graph.types[name] for name in wanted},
        {name: tensor for name, tensor in graph.initializers.items() if name in needed},
        dict(graph.types), graph.header, {},
    )  # fmt: skip


def refuse_call(index: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Raise for a collective over axes with different data: a graph of one rank cannot run the call."""
    raise UnsupportedError(
        f"the source holds the collective {node.op_type}: it is sharded already",
        "verify the step that was sharded, not a rank",
    )

"""A step as one role sees it: only the role's nodes, states and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gopt.analysis.training import TrainingGraph
from gopt.collectives.messages import ROUND_INPUT
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType

ROUND = ROUND_INPUT
DONE = "gopt.done"
"""Output of a trainer's file: the round's number after all its messages."""
ROUND_TYPE = TensorType("int64", ())


def role_view(
    training: TrainingGraph,
    nodes: Sequence[Node],
    states: Iterable[str],
    outputs: Iterable[str],
    losses: tuple[str, ...],
) -> TrainingGraph:
    """Return the step of a role: some nodes of the source and some of the states. ``outputs``: its metrics; ``losses``:
    none of a server. Nodes are the source's own: copy them before a rewrite."""
    graph, names = training.graph, set(states)
    carried = [state for state in training.states if state.tensor in names]
    read = {name for node in nodes for name in node.reads}
    shown = [*losses, *outputs]
    all_states = {state.tensor for state in training.states}
    batch = [name for name in training.batch if name in read or (losses and name in graph.inputs)]
    hyper = [name for name in training.hyper if name in read]
    fed = {*batch, *hyper, *names}
    frozen = {name for name in graph.inputs if name in read and name in graph.initializers and name not in all_states}
    inputs = {name: type for name, type in graph.inputs.items() if name in fed or name in frozen}
    ends = {state.updated: graph.types[state.updated] for state in carried}
    results = {name: graph.types[name] for name in shown} | ends
    initializers = {
        name: tensor for name, tensor in graph.initializers.items()
        if name in names or (name in read and name not in all_states) or name in results
    }  # fmt: skip
    view = Graph(
        graph.name, list(nodes), {ROUND: ROUND_TYPE, **inputs}, dict(_in_order(graph, results)), initializers,
        {**graph.types, ROUND: ROUND_TYPE}, graph.header, dict(graph.metadata),
    )  # fmt: skip
    ids = {id(node) for node in nodes}
    return replace(
        training, graph=view, losses=losses, states=carried, batch=batch, hyper=[*hyper, ROUND],
        metrics=[name for name in shown if name not in losses], random=[n for n in training.random if id(n) in ids],
        looked_through=[], notes=[], shared={},
    )  # fmt: skip


def _in_order(graph: Graph, outputs: dict[str, TensorType]) -> list[tuple[str, TensorType]]:
    """Return outputs in the source's order."""
    ordered = [(name, outputs[name]) for name in graph.outputs if name in outputs]
    return ordered + [(name, type) for name, type in outputs.items() if name not in graph.outputs]

"""Scalars of the forward that the update reads as means over the ranks, such as a loss that drives a learning rate.

The user names the scalars (``--shared VALUE``). While roles are recovered, such a value is replaced by a
batch-independent constant. Afterwards an Identity named ``VALUE.over_ranks`` produces it, which ``shard`` replaces by a
call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import Graph, Node, clone
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.operators.kinds import RELAYS

SUFFIX = ".over_ranks"
STAND_IN = 0.7310585786300049
"""Value that replaces a shared value while roles are recovered; it is neutral for no operator."""


def recover_shared(graph: Graph, values: Sequence[str], recover: Callable[[Graph], TrainingGraph]) -> TrainingGraph:
    """The roles of a step whose update reads ``values`` as means over the ranks; ``recover`` finds the roles.

    Raises OptionError for a value that is no floating scalar of the step, or that nothing reads; UnsupportedError where
    forward or backward read the value."""
    apart = _apart(graph, values)
    names = {f"{name}{SUFFIX}": name for name in values}
    initializers = {
        new: Tensor(graph.types[old], array=np.full((), STAND_IN, numpy_dtype(graph.types[old].dtype)))
        for new, old in names.items()
    }
    view = replace(
        apart, nodes=[node for node in apart.nodes if names.keys().isdisjoint(node.outputs)],
        initializers={**apart.initializers, **initializers},
    )  # fmt: skip
    training = recover(view)
    for node in training.graph.nodes:
        name = next((names[name] for name in node.reads if name in names), None)
        if name is not None and node.phase not in (None, Phase.UPDATE):
            raise UnsupportedError(
                f"--shared {name}: the {node.phase.value} reads it too, at {node.label!r}",
                "the update alone may read it, as a mean over the ranks",
            )
    _check_reach(training, names)
    return _restored(training, names)


def _apart(graph: Graph, values: Sequence[str]) -> Graph:
    """The graph in which readers of each value read an Identity of the value; unchanged where all do already."""
    producers = graph.producers()
    fresh = [name for name in values if f"{name}{SUFFIX}" not in producers]
    for name in values:
        type = graph.type_of(name)
        if name not in producers or type.dtype not in FLOATS or type.shape != ():
            why = f"it is {type}" if name in producers else "no node makes it"
            raise OptionError(f"--shared {name}: {why}", "name a floating scalar of the step, such as its loss")
        if not any(name in node.reads for node in graph.nodes):
            raise OptionError(f"--shared {name}: nothing reads it", "leave it out")
    new = {name: f"{name}{SUFFIX}" for name in fresh}
    shown = _shown(graph, new)
    new |= {node.outputs[0]: new[node.inputs[0]] for node in shown if node.is_a("Identity")}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = old
        if any(name in new for name in old.inputs) and old not in shown:
            node = clone(old)
            node.inputs = [new.get(name, name) for name in old.inputs]
        if any(name in new for name in old.captures):
            read = next(name for name in old.captures if name in new)
            raise UnsupportedError(
                f"--shared {read}: the body of {old.label!r} reads the value",
                "inline the body, or pass the value in as an input of the node",
            )
        nodes.append(node)
        nodes += [Node("Identity", [name], [new[name]]) for name in old.outputs if name in fresh]
    types = graph.types | {new[name]: graph.types[name] for name in fresh}
    return replace(graph, nodes=nodes, types=types)


def _shown(graph: Graph, values: Mapping[str, str]) -> list[Node]:
    """The nodes by which a value becomes an output, in another type or layout: what is shown is the rank's own."""
    read = {name for node in graph.nodes for name in node.reads}
    return [
        node for node in graph.nodes
        if node.is_in(RELAYS) and node.inputs[0] in values and node.outputs[0] in graph.outputs
        and (node.is_a("Identity") or node.outputs[0] not in read)
    ]  # fmt: skip


def _check_reach(training: TrainingGraph, names: dict[str, str]) -> None:
    """A shared value must be the forward's: behind a gradient there is nothing to average."""
    index = GraphIndex(training.graph)
    for name in names.values():
        behind = ancestors(index, [name])[1]
        gradient = next((gradient for gradient in training.gradients.values() if gradient in behind), None)
        if gradient is not None:
            raise OptionError(
                f"--shared {name}: it follows the gradient {gradient!r}, which is a mean already", "leave it out"
            )
        moved = next((s.tensor for s in training.states if s.tensor in behind and s.kind is StateKind.STATISTIC), None)
        if moved is not None:
            raise OptionError(f"--shared {name}: it depends on the statistic {moved!r}", "name a value of the forward")


def _restored(training: TrainingGraph, names: dict[str, str]) -> TrainingGraph:
    """The roles with the Identities in place of the constants."""
    graph = training.graph
    olds = {old: new for new, old in names.items()}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(node)
        for name in node.outputs:
            if name in olds:
                nodes.append(Node("Identity", [name], [olds[name]]))
                nodes[-1].phase = Phase.UPDATE
    initializers = {name: tensor for name, tensor in graph.initializers.items() if name not in names}
    graph = replace(graph, nodes=nodes, initializers=initializers)
    return replace(training, graph=graph, shared=names)

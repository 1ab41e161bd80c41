"""The forward of a training step as a separate model for evaluation: parameters and statistics are constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.documents.torch_record import TorchRecord
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import GraphIndex, ancestors, descendants
from gopt.offline.inference.batch_norm import evaluated
from gopt.offline.inference.dropout import as_identities, uniform_draws
from gopt.offline.inference.forward_subgraph import ForwardSubgraph
from gopt.operators.kinds import HEAVY
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class InferenceForward:
    """A model of the forward alone. ``dropped``: inputs and random values read by dropout alone; ``running``: batch
    values replaced by running statistics, and BatchNorm nodes; ``changed``: values unlike the values of training for
    one of these reasons."""

    graph: Graph
    dropped: tuple[str, ...]
    running: tuple[str, ...]
    changed: frozenset[str]


def forward_only(training: TrainingGraph, outputs: Sequence[str], *, called: bool = False) -> InferenceForward:
    """The model of ``outputs``, or by default the step's outputs beside the loss.

    BatchNorm reads running statistics, and dropout passes values on. ``called``: where the loss function of an exported
    step calls the module with values computed from random numbers, the model has the call's arguments as inputs. Raises
    OptionError for an output that is no value of the forward, UnsupportedError for unknown uses of random numbers and
    batch statistics, InputError for a state without a value."""
    graph = training.graph
    record = TorchRecord.of(graph.metadata, "the step")
    returned = () if record is None else record.outputs
    chosen = _chosen(training, outputs, returned)
    whole = record is not None and called and set(chosen) <= set(returned)
    module_inputs = dict(record.inputs or {}) if record is not None and whole else {}
    drawn = [*training.draws, *(name for node in training.random for name in node.outputs if name)]
    if descendants(GraphIndex(graph), drawn).union(drawn).isdisjoint(module_inputs.values()):
        module_inputs = {}
    graph = _given(graph, module_inputs) if module_inputs else graph
    subgraph = ForwardSubgraph.of(
        graph.twin(), chosen, [*training.batch, *drawn, *module_inputs, *module_inputs.values()]
    )
    draws = uniform_draws(subgraph, training.batch)
    identities = list(as_identities(subgraph, draws))
    statistics = [
        (state.tensor, state.updated) for state in training.states if state.kind is StateKind.STATISTIC
    ]  # fmt: skip
    running = evaluated(subgraph, statistics)
    replaced = {node.outputs[0]: node for node in (*identities, *running)}
    forward = pruned(_with(subgraph.graph, replaced), chosen)
    computed = {name for node in forward.nodes for name in node.outputs}
    _check_random(training, forward)
    _check_values(training, forward)
    read = {name for node in forward.nodes for name in node.reads}
    dropped = tuple(name for name in draws if name in subgraph.values and name not in read)
    changed = descendants(GraphIndex(forward), computed & replaced.keys())
    ran = tuple(node.outputs[0] for node in running if node.outputs[0] in computed)
    return InferenceForward(forward, dropped, ran, frozenset(changed))


def _given(graph: Graph, values: Mapping[str, str]) -> Graph:
    """A twin of the graph with some values fed, not computed. ``values``: the input's name -> value; a name of another
    value stays with that value."""
    twin, cut = graph.twin(), set(values.values())
    twin.nodes = [node for node in twin.nodes if cut.isdisjoint(node.outputs)]
    twin.inputs = {name: type for name, type in twin.inputs.items() if name not in cut}
    for name, value in values.items():
        input_name = name if name not in graph.types else value
        twin.inputs[input_name] = twin.types[input_name] = graph.type_of(value)
        if input_name != value:
            twin.nodes.insert(0, Node("Identity", [input_name], [value]))
    return twin


def _chosen(training: TrainingGraph, outputs: Sequence[str], returned: Sequence[str]) -> list[str]:
    """The values to compute; ``returned``: the known result of the module. Raises OptionError."""
    graph = training.graph
    late = descendants(GraphIndex(graph), training.gradients.values())
    metrics = [name for name in training.metrics if name not in late] or [
        name for name in returned if name in graph.types
    ]
    if not outputs and not metrics:
        needed, _ = ancestors(GraphIndex(graph), training.losses)
        heavy = [node for node in graph.nodes if id(node) in needed and node.op_type in HEAVY]
        near = f"the last product of the forward is {show(heavy[-1].outputs[0])}" if heavy else ""
        raise OptionError(
            "the step has no output beside its loss and states",
            "export it with gopt export --outputs, or name values of the forward with --output VALUE",
            *filter(None, [near]),
        )  # fmt: skip
    computed = {name for node in graph.nodes for name in node.outputs if name}
    for name in outputs:
        if name not in computed:
            hint = did_you_mean(name, computed) or "gopt inspect MODEL --text lists all values"
            raise OptionError(f"the step computes no value {show(name)}", hint)
        if name in late:
            raise OptionError(f"{show(name)} is computed from gradients", "name a value of the forward")
        if graph.type_of(name).shape is None:
            raise UnsupportedError(f"the type of {show(name)} is not known", "name another value of the forward")
    return list(dict.fromkeys(outputs or metrics))


def _with(graph: Graph, makers: dict[str, Node]) -> Graph:
    """The graph with other makers of some values; the old makers go."""
    replaced = {name for node in makers.values() for name in node.outputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        names = [name for name in node.outputs if name in replaced]
        nodes.extend(makers[name] for name in names) if names else nodes.append(node)
    graph.nodes = nodes
    return graph


def pruned(graph: Graph, outputs: Sequence[str]) -> Graph:
    """Only the nodes needed by the outputs; states are constants. The header loses all entries about the training
    step."""
    index = GraphIndex(graph)
    needed, values = ancestors(index, outputs)
    header = onnx.ModelProto()
    header.CopyFrom(graph.header)
    del header.metadata_props[:]
    return replace(
        graph,
        nodes=[node for node in graph.nodes if id(node) in needed],
        inputs={name: type for name, type in graph.inputs.items() if name in values and name not in graph.initializers},
        outputs={name: graph.type_of(name) for name in outputs},
        initializers={name: tensor for name, tensor in graph.initializers.items() if name in values},
        types={name: type for name, type in graph.types.items() if name in values},
        header=header,
        metadata={},
        file_nodes=None,
    )


def _check_random(training: TrainingGraph, graph: Graph) -> None:
    random = {name for node in training.random for name in node.outputs if name}
    for node in graph.nodes:
        if not random.isdisjoint(node.outputs) and not node.is_a("Identity"):
            raise UnsupportedError(
                f"the forward draws random numbers by {node.label}, and not for a dropout",
                "name a value that does not need them with --output, or export the module in evaluation mode",
            )


def _check_values(training: TrainingGraph, graph: Graph) -> None:
    states = training.state_of()
    lost = next((name for name in graph.inputs if name in states), None)
    if lost is not None:
        raise InputError(f"{show(lost)} has no value", "gopt load-state gives a step values, --state a run")

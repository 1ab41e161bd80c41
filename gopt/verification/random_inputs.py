"""Random nodes as fed inputs: their numbers are drawn once for the source and the ranks alike.

A generator becomes an input. A dropout, a Bernoulli and a Multinomial become the same function of an input of uniform
numbers. A node with a seed draws the same on every rank; any other draws per rank and micro-step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from gopt.analysis.training import TrainingGraph
from gopt.documents.draws import Distribution, Draw
from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import record_of
from gopt.ir.opset import opset_of
from gopt.ir.scopes import bodies
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, dtype_code
from gopt.operators.kinds import NORMAL, RANDOM, UNIFORM
from gopt.runtime.proto import as_node
from gopt.runtime.training.draws import drawn
from gopt.verification.compare import Values

LEAST_OPSET = 13
"""From here on the operators that are written have one form."""


@dataclass(frozen=True, slots=True)
class RandomInput:
    """An input in place of a random node. ``shared``: the node has a seed, so that every rank draws the same."""

    type: TensorType
    draw: Draw
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RandomInputs:
    """The inputs in place of random nodes, by name."""

    fed: Mapping[str, RandomInput] = field(default_factory=dict)

    def draw(self, seed: int, number: int, part: int) -> Values:
        """Draw the inputs of a data rank in a micro-step, counted over all steps."""
        return {
            name: drawn(
                fed.draw, fed.type,
                np.random.default_rng([seed, 11, index, number, 0 if fed.shared else part + 1]),
            )
            for index, (name, fed) in enumerate(self.fed.items())
        }  # fmt: skip


def find_random(graph: Graph) -> RandomInputs:
    """The inputs for the random nodes of a source; raises UnsupportedError for a node that cannot be fed."""
    fed: dict[str, RandomInput] = {}
    for node in graph.nodes:
        hidden = next(_inside(node), None)
        if hidden is not None:
            raise _refusal(node, f"holds the random node {hidden!r} in its body")
        if node.is_in(RANDOM):
            fed[_name(node)] = _fed(node, graph)
    return RandomInputs(fed)


def _inside(node: Node) -> Iterator[str]:
    """Random nodes in the bodies of a control-flow node."""
    for body in bodies(node.proto) if node.proto is not None else ():
        for proto in body.node:
            inner = as_node(proto)
            if inner.is_in(RANDOM):
                yield inner.label
            yield from _inside(inner)


def _refusal(node: Node, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.op_type} {node.label!r} {why}: its draws cannot be fed, so nothing can be compared",
        "make the random numbers an input of the step",
    )


def _name(node: Node) -> str:
    return f"{next(name for name in node.outputs if name)}.drawn"


def _fed(node: Node, graph: Graph) -> RandomInput:
    types, attributes = graph.types, node.attributes
    declared = types.get(node.outputs[0]) or types.get(node.inputs[0] if node.inputs else "")
    if declared is None or not declared.static:
        raise _refusal(node, "has a result of unknown shape")
    shared = "seed" in attributes
    wide = TensorType("float32", declared.dims)
    if node.is_in(UNIFORM):
        low, high = float(attributes.get("low", 0.0)), float(attributes.get("high", 1.0))
        return RandomInput(declared, Draw(Distribution.UNIFORM, low=low, high=high), shared)
    if node.is_in(NORMAL):
        mean, deviation = float(attributes.get("mean", 0.0)), float(attributes.get("scale", 1.0))
        return RandomInput(declared, Draw(Distribution.NORMAL, mean=mean, std=deviation), shared)
    if opset_of(graph.header) < LEAST_OPSET:
        raise _refusal(node, f"is of opset {opset_of(graph.header)}, and gopt feeds it from {LEAST_OPSET} on")
    return RandomInput(wide, Draw(Distribution.UNIFORM), shared)


def feed_training(training: TrainingGraph, random_inputs: RandomInputs) -> TrainingGraph:
    """The same step with its random numbers as inputs of the batch."""
    if not random_inputs.fed:
        return training
    writer = _Writer(training.graph.types)
    nodes = []
    for node in training.graph.nodes:
        for new in writer.nodes(node):
            nodes.append(new)
            new.phase = node.phase
    graph = _with_inputs(training.graph, nodes, writer, random_inputs)
    return replace(training, graph=graph, batch=[*training.batch, *random_inputs.fed], random=[])


def feed_graph(graph: Graph, random_inputs: RandomInputs, types: Mapping[str, TensorType]) -> Graph:
    """A rank's graph with its random numbers as inputs; ``types``: of the source."""
    writer = _Writer({**types, **graph.types})
    if not any(node.is_in(RANDOM) and _name(node) in random_inputs.fed for node in graph.nodes):
        return graph
    return _with_inputs(graph, [new for node in graph.nodes for new in writer.nodes(node)], writer, random_inputs)


def _with_inputs(graph: Graph, nodes: list[Node], writer: _Writer, random_inputs: RandomInputs) -> Graph:
    used = {name for node in nodes for name in node.reads}
    inputs = {name: fed.type for name, fed in random_inputs.fed.items() if name in used}
    return replace(
        graph, nodes=nodes, inputs={**graph.inputs, **inputs}, types={**graph.types, **inputs, **writer.made},
        initializers={**graph.initializers, **writer.constants},
    )  # fmt: skip


class _Writer:
    """Emits the replacement of a random node; ``constants`` and ``made`` (types) collect new names."""

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self.types = types
        self.constants: dict[str, Tensor] = {}
        self.made: dict[str, TensorType] = {}
        self._nodes: list[Node] = []
        self._base = ""

    def nodes(self, node: Node) -> list[Node]:
        if not node.is_in(RANDOM):
            return [node]
        self._nodes, self._base = [], _name(node)
        if record_of(node).switch is not None:
            self._dropout(node)
        elif node.is_a("Bernoulli"):
            odds = self._op("Cast", [node.inputs[0]], to=1)
            self._op("Cast", [self._op("Less", [self._base, odds])], node.outputs[0], to=self._code(node.outputs[0]))
        elif node.is_a("Multinomial"):
            self._multinomial(node)
        else:
            self._op("Identity", [self._base], node.outputs[0])
        return self._nodes

    def _dropout(self, node: Node) -> None:
        data, ratio, active = [*node.inputs, "", ""][:3]
        wide = self._op("Cast", [ratio], to=1) if ratio else self._const("ratio", np.float32(0.5))
        mask = self._op("GreaterOrEqual", [self._base, wide])
        if active:
            mask = self._op("Or", [mask, self._op("Not", [active])])
        code = self._code(data)
        share = self._op("Cast", [self._op("Sub", [self._const("one", np.float32(1)), wide])], to=code)
        zero = self._op("Cast", [self._const("zero", np.float32(0))], to=code)
        scaled = self._op("Where", [mask, self._op("Div", [data, share]), zero])
        if node.outputs[0]:
            whole = self._op("Where", [active, scaled, data]) if active else self._op("Identity", [data])
            self._op("Identity", [whole], node.outputs[0])
        if len(node.outputs) > 1 and node.outputs[1]:
            visible = mask if active else self._op("Or", [mask, self._op("Not", [mask])])
            self._op("Identity", [visible], node.outputs[1])

    def _multinomial(self, node: Node) -> None:
        """As many classes lie below a uniform number as have a smaller cumulated share of the probability."""
        odds = self._op("Softmax", [self._op("Cast", [node.inputs[0]], to=1)], axis=-1)
        below = self._op("CumSum", [odds, self._const("axis", np.int64(1))])
        below = self._op("Unsqueeze", [below, self._const("rows", np.array([1]))])
        drawn = self._op("Unsqueeze", [self._base, self._const("columns", np.array([2]))])
        passed = self._op("Cast", [self._op("LessOrEqual", [below, drawn])], to=dtype_code("int64"))
        count = self._op("ReduceSum", [passed, self._const("columns", np.array([2]))], keepdims=0)
        last = self.types[node.inputs[0]].dims[-1] - 1
        count = self._op("Min", [count, self._const("last", np.int64(last))])
        self._op("Cast", [count], node.outputs[0], to=self._code(node.outputs[0]))

    def _code(self, name: str) -> int:
        return dtype_code(self.types[name].dtype)

    def _const(self, role: str, value: Any) -> str:
        name, array = f"{self._base}.{role}", np.asarray(value)
        type = TensorType(str(array.dtype), array.shape)
        self.constants[name], self.made[name] = Tensor(type, array=array), type
        return name

    def _op(self, op_type: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        """Add a node. The node has a separate message, as a loaded node has."""
        output = output or f"{self._base}.{len(self._nodes)}"
        self._nodes.append(as_node(onnx.helper.make_node(op_type, inputs, [output], **attributes)))
        return output

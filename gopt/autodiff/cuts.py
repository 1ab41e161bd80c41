"""Operators differentiated by rules of gopt: onnx-ad sees the model without these operators.

The result of a cut operator is an input of onnx-ad's model, and the operands are outputs with own seeds. So onnx-ad
makes the derivative by the result, a rule makes the derivatives by the operands, and those are the seeds for the nodes
in front. Only onnx-ad's public function is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, helper

from gopt.autodiff.convolutions import differentiate_convolution
from gopt.autodiff.operators import ForwardOperator, between
from gopt.autodiff.pools import ADDS, differentiate_max_pool
from gopt.ir.graph import Node
from gopt.ir.model_file import refill
from gopt.ir.nodes import reads
from gopt.ir.opset import opset_of
from gopt.ir.tape import ProtoTape
from gopt.ir.topological_order import topological_sort
from gopt.ir.type_proto import value_info
from gopt.ir.types import TensorType
from gopt.operators.kinds import CONVOLUTIONS, RECURRENT

Rule = Callable[[ForwardOperator, ProtoTape, str, set[int]], dict[int, str]]
"""(operator, emitter, derivative by the result, wanted operands) -> derivative by each wanted operand."""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(sorted(CONVOLUTIONS), differentiate_convolution), "MaxPool": differentiate_max_pool,
}  # fmt: skip
"""By operator. onnx-ad has no derivative by the weight of a convolution in groups or of a transposed one, none with
automatic pads, and one by the input that runtimes read otherwise where windows leave a remainder. Its derivative of a
maximum joins all samples in one row of places."""
ASIDE = RECURRENT
"""Operators that onnx-ad writes out, or refuses, where nothing goes through them too."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut operator. ``outputs``: differentiated operand -> the output in its place; empty for an operator without
    derivatives."""

    operator: ForwardOperator
    outputs: Mapping[int, str]

    @property
    def results(self) -> list[str]:
        return [name for name in self.operator.node.output if name]

    @property
    def result(self) -> str:
        return self.results[0]


def find_cuts(
    model: ModelProto, scalar: str, inputs: Collection[str], types: Mapping[str, TensorType], prefix: str
) -> list[Cut]:
    """Return the operators to cut out: operators of RULES between ``inputs`` and ``scalar``, and of ASIDE elsewhere.

    ``prefix``: of the names of outputs.
    """
    standard = [node for node in model.graph.node if node.domain in ("", "ai.onnx")]
    rules = {*RULES} if opset_of(model) >= ADDS else {*RULES} - {"MaxPool"}
    candidates = [node for node in standard if node.op_type in rules or node.op_type in ASIDE]
    if not candidates:
        return []
    behind, ahead = between(model, inputs, scalar, types)
    cuts: list[Cut] = []
    for node in candidates:
        wanted = [index for index, name in enumerate(node.input) if name in behind]
        is_between, operator = bool(wanted) and not ahead.isdisjoint(node.output), ForwardOperator.of(node, types)
        if node.op_type in rules and is_between:
            cuts.append(Cut(operator, {index: f"{prefix}{len(cuts)}.{index}" for index in wanted}))
        elif node.op_type in ASIDE and not is_between and all(name in types for name in node.output if name):
            cuts.append(Cut(operator, {}))
    return cuts


def without(model: ModelProto, cuts: Sequence[Cut]) -> ModelProto:
    """Return the model without the cut operators: the results are inputs, the operands also outputs."""
    if not cuts:
        return model
    apart = deepcopy(model)
    graph, results = apart.graph, {name for cut in cuts for name in cut.results}
    refill(graph.node, [node for node in graph.node if results.isdisjoint(node.output)])
    for cut in cuts:
        node, types = cut.operator.node, cut.operator.types
        graph.input.extend(value_info(name, types[name]) for name in cut.results)
        for index, output in cut.outputs.items():
            graph.node.append(helper.make_node("Identity", [node.input[index]], [output]))
            graph.output.append(value_info(output, types[node.input[index]]))
    return apart


def join(model: ModelProto, cuts: Sequence[Cut], prefix: str) -> list[str]:
    """Put the operators back, with derivatives, after onnx-ad; returns the new seeds. ``prefix``: of derivatives."""
    if not cuts:
        return []
    graph, seeds, nodes = model.graph, [], []
    inputs = {name for cut in cuts for name in cut.results}
    stand_ins = {name for cut in cuts for name in (f"{prefix}{cut.result}", *cut.outputs.values())}
    for cut in cuts:
        operator, outputs = cut.operator, cut.outputs
        if not outputs:
            nodes.append(operator.node)
            continue
        emit = ProtoTape(f"{prefix}{cut.result}.rule", opset_of(model))
        adjoint = emit.reshape(f"{prefix}{cut.result}", operator.shape(cut.result))
        for index, output in RULES[operator.node.op_type](operator, emit, adjoint, set(outputs)).items():
            seed = f"{prefix}{outputs[index]}"
            emit.reshape(output, [*operator.shape(operator.node.input[index]), 1], output=seed)
            seeds.append(seed)
        nodes += [operator.node, *emit.nodes]
    for border, gone in ((graph.input, inputs.union(seeds)), (graph.output, stand_ins)):
        refill(border, [value for value in border if value.name not in gone])
    ordered = _sorted([*graph.node, *nodes])
    refill(graph.node, ordered)
    return seeds


def _sorted(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    plain = [Node(str(index), sorted(reads(node)), node.output) for index, node in enumerate(nodes)]
    return [nodes[int(node.op_type)] for node in topological_sort(plain, range(len(nodes)))]

"""Losses over sharded classes: each member scores its own classes and picks those that labels name.

No member holds all classes. Members exchange three numbers for each sample: the largest score, the sum of exponentials,
and the score of the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gopt.ir.graph import Node
from gopt.ir.node_kinds import record_of
from gopt.ir.types import LOW_PRECISION, TensorType, dtype_code
from gopt.operators.operator import Slope
from gopt.spmd.links import OperatorUse
from gopt.tensor_parallel.builder import ExpansionBuilder


def normalised(build: ExpansionBuilder, value: str, axes: Sequence[int], root: str, *, logs: bool, out: str) -> str:
    """Write softmax over some dimensions, or the logarithm; return ``out``."""
    type = build.graph.types[value]
    largest = build.reduction("ReduceMax", value, axes, f"{root}.max")
    moved = build.add("Sub", [value, largest], f"{root}.moved", type)
    powers = build.add("Exp", [moved], f"{root}.exp", type)
    total = build.reduction("ReduceSum", powers, axes, f"{root}.sum")
    if not logs:
        return build.add("Div", [powers, total], out, type)
    shift = build.add("Log", [total], f"{root}.log", build.graph.types[total])
    return build.add("Sub", [moved, shift], out, type)


def loss(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write -log p(label), weighted and reduced: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss."""
    _Loss(build, node, f"gopt.tensor-parallel.{node.outputs[0]}").write()


@dataclass(slots=True)
class _Loss:
    build: ExpansionBuilder
    node: Node
    root: str

    def write(self) -> None:
        build, out = self.build, self.node.outputs[0]
        logs = self._logs()
        labels, ignored = self._labels()
        losses = self._picked(logs, labels)
        weights = self._weights(labels, build.graph.types[losses], ignored)
        if weights:
            losses = self._add("Mul", [losses, weights], "weighted", build.graph.types[losses])
        if ignored:  # no number of theirs may matter, infinity neither
            none = build.number(0, build.graph.types[losses].dtype)
            losses = self._add("Where", [ignored, none, losses], "counted", build.graph.types[losses])
        reduced = self._reduced(losses, weights)
        type = build.graph.types[out]
        if build.graph.types[reduced].dtype == type.dtype:
            build.add("Identity", [reduced], out, type)
        else:
            build.add("Cast", [reduced], out, type, to=dtype_code(type.dtype))

    def _add(self, op_type: str, inputs: Sequence[str], role: str, type: TensorType, **attributes: Any) -> str:
        return self.build.add(op_type, inputs, f"{self.root}.{role}", type, **attributes)

    def _wide(self, value: str, role: str) -> str:
        type = self.build.graph.types[value]
        if type.dtype not in LOW_PRECISION:
            return value
        return self._add("Cast", [value], role, TensorType("float32", type.shape), to=dtype_code("float32"))

    def _logs(self) -> str:
        """Return logarithms of probabilities, also a result if named by the node."""
        value = self._wide(self.node.inputs[0], "wide")
        if record_of(self.node).slope(0) is Slope.LINEAR:
            return value
        output = self.node.outputs[1] if len(self.node.outputs) > 1 else ""
        type = self.build.graph.types[self.node.inputs[0]]
        narrow = type.dtype in LOW_PRECISION
        out = output if output and not narrow else f"{self.root}.logs"
        logs = normalised(self.build, value, [1], self.root, logs=True, out=out)
        if output and narrow:
            self.build.add("Cast", [logs], output, type, to=dtype_code(type.dtype))
        return logs

    def _labels(self) -> tuple[str, str]:
        """Return labels with class 0 for ignored ones, and a mask of ignored labels, '' without such."""
        labels = self.node.inputs[1]
        type = self.build.graph.types[labels]
        if "ignore_index" not in self.node.attributes:
            return labels, ""
        number = self.build.number(int(self.node.attributes["ignore_index"]), type.dtype)
        ignored = self._add("Equal", [labels, number], "ignored", TensorType("bool", type.shape))
        zero = self.build.number(0, type.dtype)
        return self._add("Where", [ignored, zero, labels], "labels", type), ignored

    def _picked(self, logs: str, labels: str) -> str:
        """Return -log p of each label."""
        scores, type = self.build.graph.types[logs], self.build.graph.types[labels]
        one = (type.dims[0], 1, *type.dims[1:])
        at = self._add("Reshape", [labels, self.build.ints(one)], "at", TensorType(type.dtype, one))
        picked = self._add("GatherElements", [logs, at], "picked", TensorType(scores.dtype, one), axis=1)
        plain = TensorType(scores.dtype, type.shape)
        flat = self._add("Reshape", [picked, self.build.ints(type.dims)], "flat", plain)
        return self._add("Neg", [flat], "losses", plain)

    def _weights(self, labels: str, type: TensorType, ignored: str) -> str:
        """Return the weight of each label, 0 for an ignored label; '' if each counts once."""
        factor = self.node.inputs[2] if len(self.node.inputs) > 2 else ""
        if not factor and not ignored:
            return ""
        zero, one = (self.build.number(value, type.dtype) for value in (0, 1))
        weights = one
        if factor:
            wide = self._wide(factor, "class_weights")
            weights = self._add("Gather", [wide, labels], "weights", type, axis=0)
        return self._add("Where", [ignored, zero, weights], "counts", type) if ignored else weights

    def _reduced(self, losses: str, weights: str) -> str:
        how = self.node.attributes.get("reduction", "mean")
        if how == "none":
            return losses
        type = self.build.graph.types[losses]
        axes, scalar = range(len(type.dims)), TensorType(type.dtype, ())
        total = self.build.reduction("ReduceSum", losses, axes, f"{self.root}.total", keepdims=0)
        if how == "sum":
            return total
        count = self.build.number(type.elements, type.dtype)
        if weights:
            count = self.build.reduction("ReduceSum", weights, axes, f"{self.root}.weight", keepdims=0)
        return self._add("Div", [total, count], "mean", scalar)

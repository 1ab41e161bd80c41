"""Takes the axis of seed directions out of a backward.

onnx-ad carries the axis through the whole backward. Here the axis has length 1: a value of shape [16, 1, 10] is a value
of shape [16, 10]. A rule for each operator gives the axis of the result, and the operator without the axis. Operators
without a rule get operands with the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.autodiff.values import Values
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType

Rules = Mapping[str, Callable[["Remover", Node], bool]]


@dataclass(frozen=True, slots=True)
class SqueezedValue:
    """A value without the axis: the name, and the former position of the axis."""

    name: str
    axis: int


class Remover:
    """Rewrites a graph in place. ``seeds``: values whose last dimension is the axis, at which it comes in; ``ends``:
    values that have it no more.

    ``rules``: by operator; a rule adds what takes a node's place, or returns False.
    """

    def __init__(self, graph: Graph, seeds: Collection[str], ends: Collection[str], rules: Rules) -> None:
        self.graph, self.values, self.rules = graph, Values(graph), rules
        self.nodes: list[Node] = []
        self.squeezed: dict[str, SqueezedValue] = {}
        """Values that have the axis -> the same without it."""
        self.whole: set[str] = set(graph.inputs) | set(graph.initializers)
        """Values with the axis that stand in the graph again."""
        self.seeds, self.ends = seeds, ends

    def run(self) -> None:
        for seed in self.seeds:
            array = self.values.array(seed)
            if array is not None:
                self.squeezed[seed] = SqueezedValue(self.values.constant(array.reshape(())), 0)
        for node in self.graph.nodes:
            if node.outputs[0] in self.seeds:  # a Reshape of a value without the axis
                self.squeezed[node.outputs[0]] = SqueezedValue(
                    node.inputs[0], len(self.shape(node.outputs[0]) or (1,)) - 1
                )
            elif self._ended(node) or self._rewritten(node):
                continue
            for name in node.reads:
                self.restore(name)
            self.add(node)
        for name in self.graph.outputs:
            self.restore(name)
        self.graph.nodes = self.nodes

    def _ended(self, node: Node) -> bool:
        """Return whether a node removes the axis for good: later dimensions of length 1 belong to the value."""
        name = node.outputs[0]
        squeezed, shape = self.squeezed.get(node.inputs[0]) if node.inputs else None, self.shape(name)
        return (
            name in self.ends and squeezed is not None and shape is not None and self.plain(node, squeezed.name, shape)
        )

    def _rewritten(self, node: Node) -> bool:
        if node.captures or len(node.outputs) != 1 or not any(name in self.squeezed for name in node.inputs):
            return False
        rule = self.rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        return rule is not None and self.shape(node.outputs[0]) is not None and rule(self, node)

    # --- what rules use ---------------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.values.shape(name)

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.whole.update(node.outputs)
        self.values.produce(node)

    def restore(self, name: str) -> None:
        """Give a value the axis back."""
        squeezed = self.squeezed.get(name)
        if squeezed is not None and name not in self.whole:
            self.add(Node("Reshape", [squeezed.name, self.ints(self.shape(name) or ())], [name]))

    def without(self, name: str, axis: int) -> str | None:
        """Return a value without a dimension of length 1, counted from the left; None for longer dimensions."""
        shape = self.shape(name)
        if shape is None or not 0 <= axis < len(shape) or shape[axis] != 1:
            return None
        squeezed = self.squeezed.get(name)
        if squeezed is not None and squeezed.axis == axis:
            return squeezed.name
        self.restore(name)
        shorter = shape[:axis] + shape[axis + 1 :]
        array = self.values.array(name)
        if array is not None and array.size <= 1024:
            return self.values.constant(array.reshape(shorter))
        squeezed_name, target = self._typed(f"{name}.squeezed", name, shorter), self.ints(shorter)
        maker = self.values.producers.get(name)
        if maker is not None and maker.is_a("ConstantOfShape"):
            self.add(Node("ConstantOfShape", [target], [squeezed_name], attributes=maker.attributes))
        else:
            self.add(Node("Reshape", [name, target], [squeezed_name]))
        return squeezed_name

    def put(
        self,
        node: Node,
        inputs: Sequence[str],
        axis: int,
        attributes: Mapping[str, object] | None = None,
        op_type: str = "",
    ) -> bool:
        """Add the node, or another operator instead, without the axis, dimension ``axis`` of the result."""
        name = node.outputs[0]
        shape = self.shape(name)
        assert shape is not None and shape[axis] == 1, (node, shape, axis)
        squeezed = self._typed(name, name, shape[:axis] + shape[axis + 1 :])
        copied = dict(node.attributes if attributes is None else attributes)
        self.add(Node(op_type or node.op_type, inputs, [squeezed], name=node.name, attributes=copied))
        self.squeezed[name] = SqueezedValue(squeezed, axis)
        return True

    def shaped(self, node: Node, squeezed: str, axis: int, out: tuple[int, ...], op_type: str = "") -> bool:
        """Add the node, with a shape for its last operand, for a result shaped ``out`` with the axis; nothing where the
        value has the shape already."""
        shorter = out[:axis] + out[axis + 1 :]
        if self.shape(squeezed) == shorter:
            return self.same(node, squeezed, axis)
        return self.put(node, [squeezed, self.ints(shorter)], axis, {}, op_type)

    def same(self, node: Node, squeezed: str, axis: int) -> bool:
        """The node does nothing but to move the axis."""
        self.squeezed[node.outputs[0]] = SqueezedValue(squeezed, axis)
        return True

    def plain(self, node: Node, squeezed: str, target: Sequence[int]) -> bool:
        """End the axis: the node's result is a Reshape of the value without the axis."""
        self.add(Node("Reshape", [squeezed, self.ints(target)], node.outputs, name=node.name))
        return True

    def ints(self, values: Sequence[int]) -> str:
        return self.values.constant(np.array(list(values), np.int64))

    def _typed(self, stem: str, like: str, shape: tuple[int, ...]) -> str:
        name = self.values.fresh(stem)
        self.graph.types[name] = TensorType(self.graph.types[like].dtype, shape)
        return name

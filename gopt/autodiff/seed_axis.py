"""Takes the axis of seed directions out of a backward.

onnx-ad carries that axis through everything that it writes. It has one element here, so a value of shape [16, 1, 10] is
one of shape [16, 10]. A rule for each operator says where the axis is in its result, and how the operator reads without
it. What has no rule gets the axis back in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.autodiff.values import Values
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Bare:
    """A value without the axis: its name, and where the axis was."""

    name: str
    axis: int


def remove_seed_axis(graph: Graph, seed: str) -> None:
    """Rewrite a graph in place. ``seed``: the constant [1] from which the axis comes."""
    _Remover(graph, seed).run()


class _Remover:
    def __init__(self, graph: Graph, seed: str) -> None:
        self.graph, self.values = graph, Values(graph)
        self.nodes: list[Node] = []
        self.bare: dict[str, Bare] = {}
        """Values that have the axis -> the same without it."""
        self.whole: set[str] = set(graph.inputs) | set(graph.initializers)
        """Values with the axis that stand in the graph again."""
        self.seed = seed

    def run(self) -> None:
        array = self.values.array(self.seed)
        if array is not None:
            self.bare[self.seed] = Bare(self.values.constant(array.reshape(())), 0)
        for node in self.graph.nodes:
            if node.outputs[0] == self.seed:  # a Reshape of a scalar
                self.bare[self.seed] = Bare(node.inputs[0], 0)
            elif self._rewritten(node):
                continue
            for name in node.reads:
                self.restore(name)
            self.add(node)
        for name in self.graph.outputs:
            self.restore(name)
        self.graph.nodes = self.nodes

    def _rewritten(self, node: Node) -> bool:
        if node.captures or len(node.outputs) != 1 or not any(name in self.bare for name in node.inputs):
            return False
        rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        return rule is not None and self.shape(node.outputs[0]) is not None and rule(self, node)

    # --- what rules use ---------------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.values.shape(name)

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.whole.update(node.outputs)
        self.values.produce(node)

    def restore(self, name: str) -> None:
        """Give a value its axis back."""
        bare = self.bare.get(name)
        if bare is not None and name not in self.whole:
            self.add(Node("Reshape", [bare.name, self.ints(self.shape(name) or ())], [name]))

    def without(self, name: str, axis: int) -> str | None:
        """A value without a dimension of one element, counted from the left; None where it has more."""
        shape = self.shape(name)
        if shape is None or not 0 <= axis < len(shape) or shape[axis] != 1:
            return None
        bare = self.bare.get(name)
        if bare is not None and bare.axis == axis:
            return bare.name
        self.restore(name)
        left = shape[:axis] + shape[axis + 1 :]
        array = self.values.array(name)
        if array is not None and array.size <= 1024:
            return self.values.constant(array.reshape(left))
        made, target = self._typed(f"{name}.bare", name, left), self.ints(left)
        maker = self.values.producers.get(name)
        if maker is not None and maker.is_a("ConstantOfShape"):
            self.add(Node("ConstantOfShape", [target], [made], attributes=maker.attributes))
        else:
            self.add(Node("Reshape", [name, target], [made]))
        return made

    def put(
        self,
        node: Node,
        inputs: Sequence[str],
        axis: int,
        attributes: Mapping[str, object] | None = None,
        op_type: str = "",
    ) -> bool:
        """The node, or another operator in its place, without the axis, which is dimension ``axis`` of its result."""
        name = node.outputs[0]
        shape = self.shape(name)
        assert shape is not None and shape[axis] == 1, (node, shape, axis)
        made = self._typed(name, name, shape[:axis] + shape[axis + 1 :])
        given = dict(node.attributes if attributes is None else attributes)
        self.add(Node(op_type or node.op_type, inputs, [made], name=node.name, attributes=given))
        self.bare[name] = Bare(made, axis)
        return True

    def same(self, node: Node, bare: str, axis: int) -> bool:
        """The node does nothing but to move the axis."""
        self.bare[node.outputs[0]] = Bare(bare, axis)
        return True

    def plain(self, node: Node, bare: str, target: Sequence[int]) -> bool:
        """The node's result has no such axis any more: a Reshape of the value without it."""
        self.add(Node("Reshape", [bare, self.ints(target)], node.outputs, name=node.name))
        return True

    def ints(self, values: Sequence[int]) -> str:
        return self.values.constant(np.array(list(values), np.int64))

    def _typed(self, stem: str, like: str, shape: tuple[int, ...]) -> str:
        name = self.values.fresh(stem)
        self.graph.types[name] = TensorType(self.graph.types[like].dtype, shape)
        return name


def _elementwise(remover: _Remover, node: Node) -> bool:
    """Operands are aligned on the right: the axis must be at one place of all that reach it."""
    out = remover.shape(node.outputs[0])
    assert out is not None
    places = set()
    for name in node.inputs:
        bare, shape = remover.bare.get(name), remover.shape(name) if name else ()
        if shape is None:
            return False
        if bare is not None:
            places.add(len(shape) - bare.axis)
    if len(places) != 1:
        return False
    place = places.pop()
    axis = len(out) - place
    if out[axis] != 1:
        return False
    return _aligned(remover, node, place, axis)


def _aligned(remover: _Remover, node: Node, place: int, axis: int) -> bool:
    inputs = []
    for name in node.inputs:
        shape = remover.shape(name) if name else ()
        assert shape is not None
        if not name or len(shape) < place:
            inputs.append(name)
            continue
        bare = remover.without(name, len(shape) - place)
        if bare is None:
            return False
        inputs.append(bare)
    return remover.put(node, inputs, axis)


def _matmul(remover: _Remover, node: Node) -> bool:
    """The axis is one of the batch: both factors have it, or the other has fewer dimensions."""
    places = set()
    for name in node.inputs:
        bare, shape = remover.bare.get(name), remover.shape(name)
        if shape is None or len(shape) < 2:
            return False
        if bare is not None:
            places.add(len(shape) - bare.axis)
    if len(places) != 1 or min(places) <= 2:
        return False
    place = places.pop()
    out = remover.shape(node.outputs[0])
    assert out is not None
    return out[len(out) - place] == 1 and _aligned(remover, node, place, len(out) - place)


def _expand(remover: _Remover, node: Node) -> bool:
    name, out = node.inputs[0], remover.shape(node.outputs[0])
    bare, shape = remover.bare.get(name), remover.shape(name)
    if bare is None or shape is None or out is None:
        return False
    axis = len(out) - (len(shape) - bare.axis)
    if out[axis] != 1:
        return False
    left = out[:axis] + out[axis + 1 :]
    if remover.shape(bare.name) == left:
        return remover.same(node, bare.name, axis)
    return remover.put(node, [bare.name, remover.ints(left)], axis)


def _regroup(remover: _Remover, node: Node) -> bool:
    """Reshape, Squeeze, Unsqueeze: any dimension of one element may be taken for the axis; the last one mostly is."""
    bare, out = remover.bare.get(node.inputs[0]), remover.shape(node.outputs[0])
    if bare is None or out is None:
        return False
    ones = [axis for axis, size in enumerate(out) if size == 1]
    if not ones:
        return remover.plain(node, bare.name, out)
    axis = len(out) - 1 if out[-1] == 1 else ones[0]
    left = out[:axis] + out[axis + 1 :]
    if remover.shape(bare.name) == left:
        return remover.same(node, bare.name, axis)
    return remover.put(node, [bare.name, remover.ints(left)], axis, {}, "Reshape")


def _transpose(remover: _Remover, node: Node) -> bool:
    bare, shape = remover.bare[node.inputs[0]], remover.shape(node.inputs[0])
    assert shape is not None
    permutation = list(node.attributes.get("perm") or range(len(shape))[::-1])
    axis = permutation.index(bare.axis)
    left = [each - (each > bare.axis) for each in permutation if each != bare.axis]
    if left == sorted(left):
        return remover.same(node, bare.name, axis)
    return remover.put(node, [bare.name], axis, {"perm": left})


def _reduce(remover: _Remover, node: Node) -> bool:
    bare, shape = remover.bare.get(node.inputs[0]), remover.shape(node.inputs[0])
    if bare is None or shape is None or len(node.inputs) < 2 or not node.inputs[1]:
        return False
    axes = remover.values.integers(node.inputs[1])
    if not axes:
        return False
    axes = [axis % len(shape) for axis in axes]
    keeps = node.attributes.get("keepdims", 1)
    if bare.axis in axes and not keeps:
        return False
    axis = bare.axis if keeps else bare.axis - sum(each < bare.axis for each in axes)
    left = [each - (each > bare.axis) for each in axes if each != bare.axis]
    if not left:
        return remover.same(node, bare.name, axis)
    return remover.put(node, [bare.name, remover.ints(left)], axis)


def _concat(remover: _Remover, node: Node) -> bool:
    out = remover.shape(node.outputs[0])
    first = next(remover.bare[name] for name in node.inputs if name in remover.bare)
    assert out is not None
    along = int(node.attributes["axis"]) % len(out)
    if along == first.axis:
        return False
    inputs = [remover.without(name, first.axis) for name in node.inputs]
    if any(each is None for each in inputs):
        return False
    attributes = {"axis": along - (along > first.axis)}
    return remover.put(node, [each for each in inputs if each is not None], first.axis, attributes)


def _slice(remover: _Remover, node: Node) -> bool:
    bare, shape = remover.bare.get(node.inputs[0]), remover.shape(node.inputs[0])
    if bare is None or shape is None or len(node.inputs) < 4 or not node.inputs[3]:
        return False
    axes = remover.values.integers(node.inputs[3])
    if axes is None or bare.axis in (axes := [axis % len(shape) for axis in axes]):
        return False
    left = remover.ints([axis - (axis > bare.axis) for axis in axes])
    return remover.put(node, [bare.name, *node.inputs[1:3], left, *node.inputs[4:]], bare.axis)


def _pad(remover: _Remover, node: Node) -> bool:
    bare, shape = remover.bare.get(node.inputs[0]), remover.shape(node.inputs[0])
    pads = remover.values.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if bare is None or shape is None or pads is None or len(node.inputs) > 3 or len(pads) != 2 * len(shape):
        return False
    rank = len(shape)
    if pads[bare.axis] or pads[rank + bare.axis]:
        return False
    left = [each for place, each in enumerate(pads) if place % rank != bare.axis]
    return remover.put(node, [bare.name, remover.ints(left), *node.inputs[2:]], bare.axis)


def _gather(remover: _Remover, node: Node) -> bool:
    bare, shape, at = remover.bare.get(node.inputs[0]), remover.shape(node.inputs[0]), remover.shape(node.inputs[1])
    if bare is None or shape is None or at is None or node.inputs[1] in remover.bare:
        return False
    along = int(node.attributes.get("axis", 0)) % len(shape)
    if along == bare.axis:
        return False
    axis = bare.axis + (len(at) - 1 if bare.axis > along else 0)
    attributes = {"axis": along - (along > bare.axis)}
    return remover.put(node, [bare.name, node.inputs[1]], axis, attributes)


def _elements(remover: _Remover, node: Node) -> bool:
    """GatherElements, ScatterElements: operands of one rank."""
    first = next(remover.bare[name] for name in node.inputs if name in remover.bare)
    out = remover.shape(node.outputs[0])
    assert out is not None
    along = int(node.attributes.get("axis", 0)) % len(out)
    if along == first.axis:
        return False
    inputs = [remover.without(name, first.axis) for name in node.inputs]
    if any(each is None for each in inputs):
        return False
    attributes = {**node.attributes, "axis": along - (along > first.axis)}
    return remover.put(node, [each for each in inputs if each is not None], first.axis, attributes)


def _scatter_nd(remover: _Remover, node: Node) -> bool:
    """The axis is behind the dimensions that the indices name."""
    data, indices, updates = node.inputs
    shape, at = remover.shape(data), remover.shape(indices)
    bare = remover.bare.get(updates)
    if shape is None or at is None or bare is None or indices in remover.bare:
        return False
    axis = bare.axis - (len(at) - 1) + at[-1]
    if axis < at[-1] or (data in remover.bare and remover.bare[data].axis != axis):
        return False
    target = remover.without(data, axis)
    if target is None:
        return False
    return remover.put(node, [target, indices, bare.name], axis)


_RULES: dict[str, Callable[[_Remover, Node], bool]] = {
    **dict.fromkeys(
        ("Add", "Sub", "Mul", "Div", "Sum", "Neg", "Cast", "Where", "Pow", "Max", "Min", "Identity", "Abs", "Sign",
         "Exp", "Log", "Sqrt", "Reciprocal", "Tanh", "Sigmoid", "Relu", "Equal", "Greater", "Less", "GreaterOrEqual",
         "LessOrEqual", "And", "Or", "Not"),
        _elementwise,
    ),
    "MatMul": _matmul,
    "Expand": _expand,
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), _regroup),
    "Transpose": _transpose,
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax"), _reduce),
    "Concat": _concat,
    "Slice": _slice,
    "Pad": _pad,
    "Gather": _gather,
    **dict.fromkeys(("GatherElements", "ScatterElements"), _elements),
    "ScatterND": _scatter_nd,
}  # fmt: skip

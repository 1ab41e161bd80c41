"""A rule for each operator that a backward is made of: where the axis of seed directions is in its result."""

from __future__ import annotations

from collections.abc import Collection

from gopt.autodiff.seed_axis import Remover, Rules
from gopt.ir.graph import Graph, Node


def remove_seed_axis(graph: Graph, seeds: Collection[str], ends: Collection[str]) -> None:
    """Rewrite a graph in place. ``seeds``: values whose last dimension is the axis, at which it comes in; ``ends``:
    values that have it no more."""
    Remover(graph, seeds, ends, RULES).run()


def _elementwise(remover: Remover, node: Node) -> bool:
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


def _aligned(remover: Remover, node: Node, place: int, axis: int) -> bool:
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


def _matmul(remover: Remover, node: Node) -> bool:
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


def _expand(remover: Remover, node: Node) -> bool:
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


def _regroup(remover: Remover, node: Node) -> bool:
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


def _transpose(remover: Remover, node: Node) -> bool:
    bare, shape = remover.bare[node.inputs[0]], remover.shape(node.inputs[0])
    assert shape is not None
    permutation = list(node.attributes.get("perm") or range(len(shape))[::-1])
    axis = permutation.index(bare.axis)
    left = [each - (each > bare.axis) for each in permutation if each != bare.axis]
    if left == sorted(left):
        return remover.same(node, bare.name, axis)
    return remover.put(node, [bare.name], axis, {"perm": left})


def _reduce(remover: Remover, node: Node) -> bool:
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


def _concat(remover: Remover, node: Node) -> bool:
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


def _slice(remover: Remover, node: Node) -> bool:
    bare, shape = remover.bare.get(node.inputs[0]), remover.shape(node.inputs[0])
    if bare is None or shape is None or len(node.inputs) < 4 or not node.inputs[3]:
        return False
    axes = remover.values.integers(node.inputs[3])
    if axes is None or bare.axis in (axes := [axis % len(shape) for axis in axes]):
        return False
    left = remover.ints([axis - (axis > bare.axis) for axis in axes])
    return remover.put(node, [bare.name, *node.inputs[1:3], left, *node.inputs[4:]], bare.axis)


def _pad(remover: Remover, node: Node) -> bool:
    bare, shape = remover.bare.get(node.inputs[0]), remover.shape(node.inputs[0])
    pads = remover.values.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if bare is None or shape is None or pads is None or len(node.inputs) > 3 or len(pads) != 2 * len(shape):
        return False
    rank = len(shape)
    if pads[bare.axis] or pads[rank + bare.axis]:
        return False
    left = [each for place, each in enumerate(pads) if place % rank != bare.axis]
    return remover.put(node, [bare.name, remover.ints(left), *node.inputs[2:]], bare.axis)


def _gather(remover: Remover, node: Node) -> bool:
    bare, shape, at = remover.bare.get(node.inputs[0]), remover.shape(node.inputs[0]), remover.shape(node.inputs[1])
    if bare is None or shape is None or at is None or node.inputs[1] in remover.bare:
        return False
    along = int(node.attributes.get("axis", 0)) % len(shape)
    if along == bare.axis:
        return False
    axis = bare.axis + (len(at) - 1 if bare.axis > along else 0)
    attributes = {"axis": along - (along > bare.axis)}
    return remover.put(node, [bare.name, node.inputs[1]], axis, attributes)


def _elements(remover: Remover, node: Node) -> bool:
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


def _scatter_nd(remover: Remover, node: Node) -> bool:
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


RULES: Rules = {
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

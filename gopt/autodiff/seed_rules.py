"""A rule for each operator that a backward is made of: where the axis of seed directions is in its result."""

from __future__ import annotations

from collections.abc import Collection

from gopt.autodiff.seed_axis import Remover, Rules
from gopt.ir.graph import Graph, Node
from gopt.operators.kinds import ELEMENTWISE, EXTREME_REDUCTIONS, MEANS, RESHAPES


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
        squeezed, shape = remover.squeezed.get(name), remover.shape(name) if name else ()
        if shape is None:
            return False
        if squeezed is not None:
            places.add(len(shape) - squeezed.axis)
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
        squeezed = remover.without(name, len(shape) - place)
        if squeezed is None:
            return False
        inputs.append(squeezed)
    return remover.put(node, inputs, axis)


def _matmul(remover: Remover, node: Node) -> bool:
    """The axis is one of the batch: both factors have it, or the other has fewer dimensions."""
    places = set()
    for name in node.inputs:
        squeezed, shape = remover.squeezed.get(name), remover.shape(name)
        if shape is None or len(shape) < 2:
            return False
        if squeezed is not None:
            places.add(len(shape) - squeezed.axis)
    if len(places) != 1 or min(places) <= 2:
        return False
    place = places.pop()
    out = remover.shape(node.outputs[0])
    assert out is not None
    return out[len(out) - place] == 1 and _aligned(remover, node, place, len(out) - place)


def _expand(remover: Remover, node: Node) -> bool:
    name, out = node.inputs[0], remover.shape(node.outputs[0])
    squeezed, shape = remover.squeezed.get(name), remover.shape(name)
    if squeezed is None or shape is None or out is None:
        return False
    axis = len(out) - (len(shape) - squeezed.axis)
    if out[axis] != 1:
        return False
    left = out[:axis] + out[axis + 1 :]
    if remover.shape(squeezed.name) == left:
        return remover.same(node, squeezed.name, axis)
    return remover.put(node, [squeezed.name, remover.ints(left)], axis)


def _regroup(remover: Remover, node: Node) -> bool:
    """Reshape, Squeeze, Unsqueeze: any dimension of one element may be taken for the axis; the last one mostly is."""
    squeezed, out = remover.squeezed.get(node.inputs[0]), remover.shape(node.outputs[0])
    if squeezed is None or out is None:
        return False
    ones = [axis for axis, size in enumerate(out) if size == 1]
    if not ones:
        return remover.plain(node, squeezed.name, out)
    axis = len(out) - 1 if out[-1] == 1 else ones[0]
    left = out[:axis] + out[axis + 1 :]
    if remover.shape(squeezed.name) == left:
        return remover.same(node, squeezed.name, axis)
    return remover.put(node, [squeezed.name, remover.ints(left)], axis, {}, "Reshape")


def _transpose(remover: Remover, node: Node) -> bool:
    squeezed, shape = remover.squeezed[node.inputs[0]], remover.shape(node.inputs[0])
    assert shape is not None
    permutation = list(node.attributes.get("perm") or range(len(shape))[::-1])
    axis = permutation.index(squeezed.axis)
    left = [each - (each > squeezed.axis) for each in permutation if each != squeezed.axis]
    if left == sorted(left):
        return remover.same(node, squeezed.name, axis)
    return remover.put(node, [squeezed.name], axis, {"perm": left})


def _reduce(remover: Remover, node: Node) -> bool:
    squeezed, shape = remover.squeezed.get(node.inputs[0]), remover.shape(node.inputs[0])
    if squeezed is None or shape is None or len(node.inputs) < 2 or not node.inputs[1]:
        return False
    axes = remover.values.integers(node.inputs[1])
    if not axes:
        return False
    axes = [axis % len(shape) for axis in axes]
    keeps = node.attributes.get("keepdims", 1)
    if squeezed.axis in axes and not keeps:
        return False
    axis = squeezed.axis if keeps else squeezed.axis - sum(each < squeezed.axis for each in axes)
    left = [each - (each > squeezed.axis) for each in axes if each != squeezed.axis]
    if not left:
        return remover.same(node, squeezed.name, axis)
    return remover.put(node, [squeezed.name, remover.ints(left)], axis)


def _concat(remover: Remover, node: Node) -> bool:
    out = remover.shape(node.outputs[0])
    first = next(remover.squeezed[name] for name in node.inputs if name in remover.squeezed)
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
    squeezed, shape = remover.squeezed.get(node.inputs[0]), remover.shape(node.inputs[0])
    if squeezed is None or shape is None or len(node.inputs) < 4 or not node.inputs[3]:
        return False
    axes = remover.values.integers(node.inputs[3])
    if axes is None or squeezed.axis in (axes := [axis % len(shape) for axis in axes]):
        return False
    left = remover.ints([axis - (axis > squeezed.axis) for axis in axes])
    return remover.put(node, [squeezed.name, *node.inputs[1:3], left, *node.inputs[4:]], squeezed.axis)


def _pad(remover: Remover, node: Node) -> bool:
    squeezed, shape = remover.squeezed.get(node.inputs[0]), remover.shape(node.inputs[0])
    pads = remover.values.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if squeezed is None or shape is None or pads is None or len(node.inputs) > 3 or len(pads) != 2 * len(shape):
        return False
    rank = len(shape)
    if pads[squeezed.axis] or pads[rank + squeezed.axis]:
        return False
    left = [each for place, each in enumerate(pads) if place % rank != squeezed.axis]
    return remover.put(node, [squeezed.name, remover.ints(left), *node.inputs[2:]], squeezed.axis)


def _gather(remover: Remover, node: Node) -> bool:
    squeezed, shape, at = (
        remover.squeezed.get(node.inputs[0]),
        remover.shape(node.inputs[0]),
        remover.shape(node.inputs[1]),
    )
    if squeezed is None or shape is None or at is None or node.inputs[1] in remover.squeezed:
        return False
    along = int(node.attributes.get("axis", 0)) % len(shape)
    if along == squeezed.axis:
        return False
    axis = squeezed.axis + (len(at) - 1 if squeezed.axis > along else 0)
    attributes = {"axis": along - (along > squeezed.axis)}
    return remover.put(node, [squeezed.name, node.inputs[1]], axis, attributes)


def _elements(remover: Remover, node: Node) -> bool:
    """GatherElements, ScatterElements: operands of one rank."""
    first = next(remover.squeezed[name] for name in node.inputs if name in remover.squeezed)
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
    squeezed = remover.squeezed.get(updates)
    if shape is None or at is None or squeezed is None or indices in remover.squeezed:
        return False
    axis = squeezed.axis - (len(at) - 1) + at[-1]
    if axis < at[-1] or (data in remover.squeezed and remover.squeezed[data].axis != axis):
        return False
    target = remover.without(data, axis)
    if target is None:
        return False
    return remover.put(node, [target, indices, squeezed.name], axis)


RULES: Rules = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "MatMul": _matmul,
    "Expand": _expand,
    **dict.fromkeys(RESHAPES, _regroup),
    "Transpose": _transpose,
    **dict.fromkeys(MEANS | EXTREME_REDUCTIONS, _reduce),
    "Concat": _concat,
    "Slice": _slice,
    "Pad": _pad,
    "Gather": _gather,
    **dict.fromkeys(("GatherElements", "ScatterElements"), _elements),
    "ScatterND": _scatter_nd,
}  # fmt: skip

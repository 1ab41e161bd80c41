"""A rule for each operator of a backward: the position of the axis of seed directions in the result."""

from __future__ import annotations

from collections.abc import Collection

from gopt.autodiff.seed_axis import Remover, Rules
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import order_of
from gopt.operators.kinds import ELEMENTWISE, EXTREME_REDUCTIONS, MEANS, RESHAPES


def remove_seed_axis(graph: Graph, seeds: Collection[str], ends: Collection[str]) -> None:
    """Rewrite a graph in place. ``seeds``: values with the axis as last dimension, where the axis enters; ``ends``:
    values without the axis."""
    Remover(graph, seeds, ends, RULES).run()


def _elementwise(remover: Remover, node: Node) -> bool:
    """Operands are aligned on the right: the axis must be at the same place of all operands with the axis."""
    out = remover.shape(node.outputs[0])
    assert out is not None
    from_end = set()
    for name in node.inputs:
        squeezed, shape = remover.squeezed.get(name), remover.shape(name) if name else ()
        if shape is None:
            return False
        if squeezed is not None:
            from_end.add(len(shape) - squeezed.axis)
    if len(from_end) != 1:
        return False
    distance = from_end.pop()
    axis = len(out) - distance
    if out[axis] != 1:
        return False
    return _aligned(remover, node, distance, axis)


def _aligned(remover: Remover, node: Node, distance: int, axis: int) -> bool:
    inputs = []
    for name in node.inputs:
        shape = remover.shape(name) if name else ()
        assert shape is not None
        if not name or len(shape) < distance:
            inputs.append(name)
            continue
        squeezed = remover.without(name, len(shape) - distance)
        if squeezed is None:
            return False
        inputs.append(squeezed)
    return remover.put(node, inputs, axis)


def _matmul(remover: Remover, node: Node) -> bool:
    """The axis is a batch dimension: both factors have the axis, or the other has fewer dimensions."""
    from_end = set()
    for name in node.inputs:
        squeezed, shape = remover.squeezed.get(name), remover.shape(name)
        if shape is None or len(shape) < 2:
            return False
        if squeezed is not None:
            from_end.add(len(shape) - squeezed.axis)
    if len(from_end) != 1 or min(from_end) <= 2:
        return False
    distance = from_end.pop()
    out = remover.shape(node.outputs[0])
    assert out is not None
    return out[len(out) - distance] == 1 and _aligned(remover, node, distance, len(out) - distance)


def _expand(remover: Remover, node: Node) -> bool:
    name, out = node.inputs[0], remover.shape(node.outputs[0])
    squeezed, shape = remover.squeezed.get(name), remover.shape(name)
    if squeezed is None or shape is None or out is None:
        return False
    axis = len(out) - (len(shape) - squeezed.axis)
    if out[axis] != 1:
        return False
    return remover.shaped(node, squeezed.name, axis, out)


def _regroup(remover: Remover, node: Node) -> bool:
    """Reshape, Squeeze, Unsqueeze: any dimension of length 1 may be the axis; mostly the last."""
    squeezed, out = remover.squeezed.get(node.inputs[0]), remover.shape(node.outputs[0])
    if squeezed is None or out is None:
        return False
    ones = [axis for axis, size in enumerate(out) if size == 1]
    if not ones:
        return remover.plain(node, squeezed.name, out)
    return remover.shaped(node, squeezed.name, len(out) - 1 if out[-1] == 1 else ones[0], out, "Reshape")


def _transpose(remover: Remover, node: Node) -> bool:
    squeezed, shape = remover.squeezed[node.inputs[0]], remover.shape(node.inputs[0])
    assert shape is not None
    permutation = order_of(node, len(shape)) or ()
    axis = permutation.index(squeezed.axis)
    order = [axis - (axis > squeezed.axis) for axis in permutation if axis != squeezed.axis]
    if order == sorted(order):
        return remover.same(node, squeezed.name, axis)
    return remover.put(node, [squeezed.name], axis, {"perm": order})


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
    axis = squeezed.axis if keeps else squeezed.axis - sum(axis < squeezed.axis for axis in axes)
    kept_axes = [axis - (axis > squeezed.axis) for axis in axes if axis != squeezed.axis]
    if not kept_axes:
        return remover.same(node, squeezed.name, axis)
    return remover.put(node, [squeezed.name, remover.ints(kept_axes)], axis)


def _slice(remover: Remover, node: Node) -> bool:
    squeezed, shape = remover.squeezed.get(node.inputs[0]), remover.shape(node.inputs[0])
    if squeezed is None or shape is None or len(node.inputs) < 4 or not node.inputs[3]:
        return False
    axes = remover.values.integers(node.inputs[3])
    if axes is None or squeezed.axis in (axes := [axis % len(shape) for axis in axes]):
        return False
    shifted = remover.ints([axis - (axis > squeezed.axis) for axis in axes])
    return remover.put(node, [squeezed.name, *node.inputs[1:3], shifted, *node.inputs[4:]], squeezed.axis)


def _pad(remover: Remover, node: Node) -> bool:
    squeezed, shape = remover.squeezed.get(node.inputs[0]), remover.shape(node.inputs[0])
    pads = remover.values.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if squeezed is None or shape is None or pads is None or len(node.inputs) > 3 or len(pads) != 2 * len(shape):
        return False
    rank = len(shape)
    if pads[squeezed.axis] or pads[rank + squeezed.axis]:
        return False
    rest = [pad for index, pad in enumerate(pads) if index % rank != squeezed.axis]
    return remover.put(node, [squeezed.name, remover.ints(rest), *node.inputs[2:]], squeezed.axis)


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
    """Concat, GatherElements, ScatterElements: operands of the same rank."""
    value = next(remover.squeezed[name] for name in node.inputs if name in remover.squeezed)
    out = remover.shape(node.outputs[0])
    assert out is not None
    along = int(node.attributes.get("axis", 0)) % len(out)
    if along == value.axis:
        return False
    inputs = [remover.without(name, value.axis) for name in node.inputs]
    if any(name is None for name in inputs):
        return False
    attributes = {**node.attributes, "axis": along - (along > value.axis)}
    return remover.put(node, [name for name in inputs if name is not None], value.axis, attributes)


def _scatter_nd(remover: Remover, node: Node) -> bool:
    """The axis is behind the indexed dimensions."""
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
    "Concat": _elements,
    "Slice": _slice,
    "Pad": _pad,
    "Gather": _gather,
    **dict.fromkeys(("GatherElements", "ScatterElements"), _elements),
    "ScatterND": _scatter_nd,
}  # fmt: skip

"""Layout operators: the sample dimension of their results."""

from __future__ import annotations

from math import prod

from gopt.analysis.coupling.context import CouplingContext, Shape, axis_of
from gopt.analysis.coupling.marks import DRAWN, Mark, Marks, Relation, Untraceable, changed
from gopt.analysis.coupling.pointwise import by_place
from gopt.ir.graph import Node


def reshape(context: CouplingContext, node: Node) -> Marks:
    """Reshape, Flatten and the like: elements keep their order, so the samples keep their stride."""
    mark = context.marks[node.inputs[0]]
    if mark.kind is Relation.DRAWN:
        return [DRAWN]
    return [restrided(context, mark, context.shape(node.inputs[0]), context.shape(node.outputs[0]))]


def restrided(context: CouplingContext, mark: Mark, before: Shape, after: Shape) -> Mark:
    """The mark of a value of shape ``before`` when it gets the shape ``after``."""
    sizes = [size for size in (*before, *after) if not isinstance(size, int)]
    if sizes or not context.batch:
        same = before[: mark.axis + 1] == after[: mark.axis + 1] and (mark.outer, mark.inner) == (1, 1)
        if same and None not in before[: mark.axis + 1]:
            return mark
        found = _only_open(before, after, mark)
        if found is None:
            raise Untraceable("a Reshape of dimensions that are not numbers")
        return found
    stride = mark.inner * prod(before[mark.axis + 1 :])  # type: ignore[arg-type]
    span = stride * context.batch
    fits = []
    for axis, size in enumerate(after):
        own = prod(after[axis + 1 :])  # type: ignore[arg-type]
        if stride % max(own, 1) == 0 and (own * size) % max(span, 1) == 0:  # type: ignore[operator]
            fits.append(changed(mark, axis=axis, outer=own * size // span, inner=stride // own))  # type: ignore[operator]
    whole = [each for each in fits if (each.outer, each.inner) == (1, 1)]
    if context.batch == 1:
        kept = [each for each in whole if each.axis == mark.axis and before[: mark.axis + 1] == after[: mark.axis + 1]]
        fits = kept or whole or fits
        if len(fits) > 1:
            raise Untraceable("a batch of one sample: a Reshape does not tell which dimension takes it in")
    if not fits or 0 in (span, *before):
        raise Untraceable("a Reshape divides the dimension of samples")
    return whole[0] if whole and context.batch > 1 else fits[0]


def _only_open(before: Shape, after: Shape, mark: Mark) -> Mark | None:
    """The mark after a Reshape, if the dimension of samples is the only one that is no number, before and after: it
    takes in neighbouring dimensions, or gives them back."""
    open_ = [place for place, size in enumerate(after) if not isinstance(size, int)]
    was = [place for place, size in enumerate(before) if not isinstance(size, int)]
    if was != [mark.axis] or len(open_) != 1:
        return None
    sizes = [(part[:place], part[place + 1 :]) for part, place in ((before, mark.axis), (after, open_[0]))]
    (front, behind), (front_after, behind_after) = ([prod(part) for part in parts] for parts in sizes)  # type: ignore[arg-type]
    outer, inner = mark.outer * front, mark.inner * behind
    if not (front_after and behind_after and outer and inner) or outer % front_after or inner % behind_after:
        return None
    return changed(mark, axis=open_[0], outer=outer // front_after, inner=inner // behind_after)


def squeeze(context: CouplingContext, node: Node) -> Marks:
    mark, shape = context.marks[node.inputs[0]], context.shape(node.inputs[0])
    if mark.kind is Relation.DRAWN:
        return [DRAWN]
    axes = context.axes(node, len(shape))
    if axes is None:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    if mark.axis in axes:
        raise Untraceable("a batch of one sample: its dimension is squeezed away")
    return [changed(mark, axis=mark.axis - sum(each < mark.axis for each in axes))]


def unsqueeze(context: CouplingContext, node: Node) -> Marks:
    mark = context.marks[node.inputs[0]]
    if mark.kind is Relation.DRAWN:
        return [DRAWN]
    axes = context.axes(node, context.rank(node.outputs[0])) or []
    place = mark.axis
    for axis in axes:
        place += axis <= place
    return [changed(mark, axis=place)]


def expand(context: CouplingContext, node: Node) -> Marks:
    """Expand: new dimensions come in front, and a dimension of one sample may not grow."""
    name = node.inputs[0]
    mark, shape, after = context.marks[name], context.shape(name), context.shape(node.outputs[0])
    if mark.kind is Relation.DRAWN:
        raise Untraceable("random numbers are shared along a new dimension")
    axis = mark.axis + len(after) - len(shape)
    if shape[mark.axis] != after[axis]:
        raise Untraceable("a batch of one sample is broadcast")
    return [changed(mark, axis=axis)]


def tile(context: CouplingContext, node: Node) -> Marks:
    mark, times = context.samples(node.inputs[0]), context.ints(node.inputs[1])
    if mark is None or times is None:
        raise Untraceable("repeats are computed")
    return [changed(mark, outer=mark.outer * times[mark.axis])]


def concat(context: CouplingContext, node: Node) -> Marks:
    """Concat along another dimension, or of several batches along the samples' dimension."""
    rank = context.rank(node.outputs[0])
    axis = axis_of(node, rank, 0)
    marks = [context.samples(name) for name in node.inputs]
    known = [mark for mark in marks if mark is not None]
    first = known[0]
    if any(mark.axis != first.axis for mark in known):
        raise Untraceable("a Concat of values whose samples lie along different dimensions")
    mixed = any(mark.mixed for mark in known)
    if axis != first.axis:
        if any((mark.outer, mark.inner) != (first.outer, first.inner) for mark in known):
            raise Untraceable("a Concat of values that count their samples differently")
        for name, mark in zip(node.inputs, marks):
            if mark is None and not context.alike(name, first.axis, first):
                by_place(context, node, f"{name!r} has a value of its own for every place of the batch")
        return [changed(first, mixed=mixed, factor=1.0)]
    if len(known) < len(marks) or any(mark.inner != first.inner for mark in known):
        raise Untraceable("samples are joined with rows that are not samples")
    return [changed(first, outer=sum(mark.outer for mark in known), mixed=mixed, factor=1.0)]


def split(context: CouplingContext, node: Node) -> Marks:
    """Split along another dimension, or between whole batches."""
    mark, shape = context.samples(node.inputs[0]), context.shape(node.inputs[0])
    if mark is None:
        return [DRAWN for _ in node.outputs]
    if axis_of(node, len(shape), 0) != mark.axis:
        return [mark for _ in node.outputs]
    sizes = [context.shape(name)[mark.axis] for name in node.outputs]
    each = context.batch * mark.inner
    if mark.outer == 1 or not each or any(not isinstance(size, int) or size % each for size in sizes):
        by_place(context, node, "the batch is split")
        return [changed(mark, mixed=True) for _ in node.outputs]
    return [changed(mark, outer=size // each) for size in sizes if isinstance(size, int)]


def slices(context: CouplingContext, node: Node) -> Marks:
    """Slice: along the samples' dimension nothing may be left out."""
    name = node.inputs[0]
    mark, shape = context.marks[name], context.shape(name)
    if mark.kind is Relation.DRAWN:
        return [DRAWN]
    after = context.shape(node.outputs[0])
    steps = context.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] else [1]
    axes = context.axes(node, len(shape), 3)
    if axes is not None and mark.axis not in axes:
        return [mark]
    if steps is None or (shape[mark.axis] == after[mark.axis] and any(step < 0 for step in steps)):
        raise Untraceable("a Slice may reverse the order of samples")
    if shape[mark.axis] == after[mark.axis] and shape[mark.axis] is not None:
        return [mark]
    each, starts = context.batch * mark.inner, context.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    size = after[mark.axis]
    if mark.outer > 1 and each and starts is not None and isinstance(size, int) and size % each == 0:
        start = starts[axes.index(mark.axis) if axes is not None else mark.axis]
        if start % each == 0 and steps == [1] * len(steps):
            return [changed(mark, outer=size // each)]
    by_place(context, node, "a part of the batch is sliced out")
    return [changed(mark, mixed=True)]

"""Gathers and scatters: rows looked up for each sample, or samples chosen by index."""

from __future__ import annotations

import numpy as np

from gopt.analysis.coupling.context import CouplingContext, axis_of
from gopt.analysis.coupling.contract import summed
from gopt.analysis.coupling.marks import Mark, Marks, Relation, Untraceable, changed
from gopt.analysis.coupling.pointwise import aligned, by_place, in_batch
from gopt.ir.graph import Node
from gopt.operators.kinds import SCATTERS

_PLACED = {"add": Relation.SUM, "max": Relation.MAX, "min": Relation.MIN}


def gather(context: CouplingContext, node: Node) -> Marks:
    """Gather: an embedding looked up by samples, or a part of every sample."""
    data, indices = node.inputs
    rank, axis = context.rank(data), axis_of(node, context.rank(data), 0)
    mark, by = context.samples(data), context.samples(indices)
    if mark is None:
        if by is None:
            raise Untraceable("random numbers are looked up")
        return [changed(by, axis=axis + by.axis, factor=1.0)]
    moved = mark.axis + (context.rank(indices) - 1 if axis < mark.axis else 0)
    if axis == mark.axis:
        if by is not None:
            in_batch(context, node)
            return [changed(by, axis=axis + by.axis, mixed=True)]
        by_place(context, node, "some samples are picked")
        return [changed(mark, axis=mark.axis if context.rank(node.outputs[0]) == rank else 0, mixed=True)]
    if by is not None:
        in_batch(context, node)
        return [changed(mark, axis=moved, mixed=True)]
    return [changed(mark, axis=moved)]


def gather_elements(context: CouplingContext, node: Node) -> Marks:
    """GatherElements, ScatterElements: all operands hold the samples along one other dimension; or samples are added to
    places that they name."""
    names = [name for name in node.inputs if name]
    rank = context.rank(node.outputs[0])
    by = context.samples(names[1])
    placed = node.is_in(SCATTERS) and names[0] not in context.marks
    if placed and by is not None and axis_of(node, rank, 0) == by.axis:
        return [_placed(context, node, by)]
    mark = aligned(context, node, names, rank)
    if mark.kind is not Relation.SAMPLES:
        raise Untraceable("random numbers are looked up")
    if axis_of(node, rank, 0) == mark.axis:
        raise Untraceable("samples are looked up by their place")
    return [changed(mark, factor=1.0)]


def gather_nd(context: CouplingContext, node: Node) -> Marks:
    """GatherND: rows looked up by samples; of samples, by batch dimensions alone; or a part of every sample."""
    data, indices = node.inputs
    mark, by = context.samples(data), context.samples(indices)
    batch_dims, named = int(node.attributes.get("batch_dims", 0)), context.shape(indices)[-1]
    if mark is not None and indices not in context.marks and isinstance(named, int) and mark.axis >= batch_dims + named:
        return [changed(mark, axis=mark.axis - batch_dims - named + context.rank(indices) - 1)]
    if mark is not None and not batch_dims and isinstance(named, int) and mark.axis < named:
        axis = _own_places(context, node, mark.axis)
        if axis is not None:
            return [changed(mark, axis=axis)]
    if by is not None and by.axis < context.rank(indices) - 1 and (mark is None or mark.axis == by.axis < batch_dims):
        if mark is not None and (mark.outer, mark.inner) != (by.outer, by.inner):
            raise Untraceable("data and indices count their samples differently")
        if mark is None and by.axis < batch_dims and not context.alike(data, by.axis, by):
            by_place(context, node, f"{data!r} has a value of its own for every place of the batch")
        return [changed(by, factor=1.0)]
    raise Untraceable("samples are looked up by their place")


def _own_places(context: CouplingContext, node: Node, column: int) -> int | None:
    """The dimension of a GatherND's constant indices along which a column counts all rows, 0, 1, …, so that each sample
    reads its row."""
    data, indices = node.inputs
    value, rows = context.index.constants.value(indices), context.shape(data)[column]
    rows_read = value[..., column] if value is not None else np.zeros(())
    for axis in (axis for axis, size in enumerate(rows_read.shape) if size == rows != 1):
        counts = np.arange(rows_read.shape[axis]).reshape([-1 if at == axis else 1 for at in range(rows_read.ndim)])
        if np.array_equal(rows_read, np.broadcast_to(counts, rows_read.shape)):
            return axis
    return None


def scatter_nd(context: CouplingContext, node: Node) -> Marks:
    """ScatterND: into places that are the same for every sample; or a sum over the batch, where it adds to zeros."""
    data, indices, updates = node.inputs
    by, given, into = context.samples(indices), context.samples(updates), context.samples(data)
    if by is None and indices not in context.marks:
        return [_written(context, node, given, into)]
    if data in context.marks or by is None or by.axis >= context.rank(indices) - 1:
        raise Untraceable("samples are written to places of their own")
    return [_placed(context, node, by)]


def _placed(context: CouplingContext, node: Node, by: Mark) -> Mark:
    """The mark of what samples are added to, or bound, at places that each of them names."""
    data, _, updates = node.inputs
    given, how = context.samples(updates), node.attributes.get("reduction", "none")
    if given is None and (updates in context.marks or not context.alike(updates, by.axis, by)):
        raise Untraceable("samples are written to places of their own")
    own = given or changed(by, factor=context.index.constants.uniform(updates) or 0.0)
    if how not in _PLACED or (own.axis, own.outer, own.inner) != (by.axis, by.outer, by.inner):
        raise Untraceable("samples may write over each other")
    if how != "add":
        origin = node.outputs[0]
        context.origins[origin] = node
        return Mark(_PLACED[how], origin=origin, mixed=own.mixed or by.mixed)
    if not context.index.constants.zero(data):
        raise Untraceable("samples are added to a value that no batch enters")
    return summed(context, node, changed(own, mixed=own.mixed or by.mixed), (own.outer, own.inner))


def _written(context: CouplingContext, node: Node, given: Mark | None, into: Mark | None) -> Mark:
    """Return the mark of scattered samples. The sample dimension must follow the indexed ones, so that samples stay
    apart.
    """
    data, indices, updates = node.inputs
    front, named = context.rank(indices) - 1, context.shape(indices)[-1]
    drawn = [name for name, own in ((updates, given), (data, into)) if own is None and name in context.marks]
    if drawn or not isinstance(named, int):
        raise Untraceable("random numbers are written")
    marks = [into] if into is not None else []
    if given is not None:
        marks.append(changed(given, axis=given.axis - front + named))
    mark = marks[0]
    if mark.axis < named or any((m.axis, m.outer, m.inner) != (mark.axis, mark.outer, mark.inner) for m in marks):
        raise Untraceable("samples are written by their place")
    for name, own, axis in ((data, into, mark.axis), (updates, given, mark.axis + front - named)):
        if own is None and not context.alike(name, axis, mark):
            by_place(context, node, f"{name!r} has a value of its own for every place of the batch")
    return changed(mark, factor=1.0, mixed=any(m.mixed for m in marks))

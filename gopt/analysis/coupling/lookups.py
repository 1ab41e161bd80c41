"""Gathers and scatters: rows looked up for each sample, or samples picked by their place."""

from __future__ import annotations

from dataclasses import replace

import onnx

from gopt.analysis.coupling.contract import summed
from gopt.analysis.coupling.marks import Kind, Lost, Mark, Marks
from gopt.analysis.coupling.pointwise import aligned, by_place, in_batch
from gopt.analysis.coupling.sight import Sight, axis_of
from gopt.graph.model import Node


def gather(sight: Sight, node: Node) -> Marks:
    """Gather: an embedding looked up by samples, or a part of every sample."""
    data, indices = node.inputs
    rank, axis = sight.rank(data), axis_of(node, sight.rank(data), 0)
    mark, by = sight.samples(data), sight.samples(indices)
    if mark is None:
        if by is None:
            raise Lost("random numbers are looked up")
        return [replace(by, axis=axis + by.axis, factor=1.0)]
    moved = mark.axis + (sight.rank(indices) - 1 if axis < mark.axis else 0)
    if axis == mark.axis:
        if by is not None:
            in_batch(sight, node)
            return [replace(by, axis=axis + by.axis, mixed=True)]
        by_place(sight, node, "some samples are picked")
        return [replace(mark, axis=mark.axis if sight.rank(node.outputs[0]) == rank else 0, mixed=True)]
    if by is not None:
        in_batch(sight, node)
        return [replace(mark, axis=moved, mixed=True)]
    return [replace(mark, axis=moved)]


def gather_elements(sight: Sight, node: Node) -> Marks:
    """GatherElements, ScatterElements: all operands hold the samples along one other dimension."""
    names = [name for name in node.inputs if name]
    rank = sight.rank(node.outputs[0])
    mark = aligned(sight, node, names, rank)
    if mark.kind is not Kind.SAMPLES:
        raise Lost("random numbers are looked up")
    if axis_of(node, rank, 0) == mark.axis:
        raise Lost("samples are looked up by their place")
    return [replace(mark, factor=1.0)]


def gather_nd(sight: Sight, node: Node) -> Marks:
    """GatherND: rows looked up by samples; of samples, by batch dimensions alone."""
    data, indices = node.inputs
    mark, by = sight.samples(data), sight.samples(indices)
    batch_dims = int(node.attributes.get("batch_dims", 0))
    if by is not None and by.axis < sight.rank(indices) - 1 and (mark is None or mark.axis == by.axis < batch_dims):
        if mark is not None and (mark.outer, mark.inner) != (by.outer, by.inner):
            raise Lost("data and indices count their samples differently")
        if mark is None and by.axis < batch_dims and not sight.alike(data, by.axis, by):
            by_place(sight, node, f"{data!r} has a value of its own for every place of the batch")
        return [replace(by, factor=1.0)]
    raise Lost("samples are looked up by their place")


def scatter_nd(sight: Sight, node: Node) -> Marks:
    """ScatterND: into places that are the same for every sample; or a sum over the batch, where it adds to zeros."""
    data, indices, updates = node.inputs
    by, given, into = sight.samples(indices), sight.samples(updates), sight.samples(data)
    if by is None and indices not in sight.marks:
        return [_written(sight, node, given, into)]
    front = by is not None and given is not None and by.axis == given.axis < sight.rank(indices) - 1
    if data in sight.marks or by is None or given is None or not front:
        raise Lost("samples are written to places of their own")
    if node.attributes.get("reduction", "none") != "add" or (by.outer, by.inner) != (given.outer, given.inner):
        raise Lost("samples may write over each other")
    if not _zero(sight, data):
        raise Lost("samples are added to a value that no batch enters")
    return [summed(sight, node, replace(given, mixed=given.mixed or by.mixed), (given.outer, given.inner))]


def _written(sight: Sight, node: Node, given: Mark | None, into: Mark | None) -> Mark:
    """Samples written behind the dimensions that the indices name, so that each keeps its own."""
    data, indices, updates = node.inputs
    front, named = sight.rank(indices) - 1, sight.shape(indices)[-1]
    drawn = [name for name, own in ((updates, given), (data, into)) if own is None and name in sight.marks]
    if drawn or not isinstance(named, int):
        raise Lost("random numbers are written")
    marks = [into] if into is not None else []
    if given is not None:
        marks.append(replace(given, axis=given.axis - front + named))
    mark = marks[0]
    if mark.axis < named or any((m.axis, m.outer, m.inner) != (mark.axis, mark.outer, mark.inner) for m in marks):
        raise Lost("samples are written by their place")
    for name, own, axis in ((data, into, mark.axis), (updates, given, mark.axis + front - named)):
        if own is None and not sight.alike(name, axis, mark):
            by_place(sight, node, f"{name!r} has a value of its own for every place of the batch")
    return replace(mark, factor=1.0, mixed=any(m.mixed for m in marks))


def _zero(sight: Sight, name: str) -> bool:
    """Whether a value is known to be zeros."""
    value, maker = sight.constant(name), sight.index.producer.get(name)
    if maker is not None and maker.is_a("ConstantOfShape"):
        fill = maker.attributes.get("value")
        return fill is None or not onnx.numpy_helper.to_array(fill).any()
    return value is not None and not value.any()


def one_hot(sight: Sight, node: Node) -> Marks:
    mark = sight.samples(node.inputs[0])
    if mark is None:
        raise Lost("its depth or values depend on the batch")
    rank = sight.rank(node.outputs[0])
    axis = axis_of(node, rank, -1)
    return [replace(mark, axis=mark.axis + (axis <= mark.axis), factor=1.0)]

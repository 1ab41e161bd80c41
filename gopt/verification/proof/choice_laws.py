"""Laws of choices: rows to gather, to add to or to mask in a part of a dimension; counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from gopt.ir.graph import Node
from gopt.operators.kinds import GATHERS
from gopt.verification.proof.attributes import frozen
from gopt.verification.proof.constants import Arrays
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import CHOICE, LINEAR, TAKE, VIEW, Shape, broadcast, elements
from gopt.verification.proof.masks import LARGEST_DIMENSION
from gopt.verification.proof.movements import LOOKUP
from gopt.verification.proof.selections import Selection, along, joined, length, nth, replaced, sizes_of
from gopt.verification.proof.zeros import are_zero

if TYPE_CHECKING:
    from gopt.verification.proof.operators import NodeReader

EQUAL = "Equal"
ELEMENTS = "GatherElements"
ROWS = GATHERS - {"GatherND"}
"""Lookups along an axis."""


def where(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """The rank's choices along a dimension, and zeros for the rest; or a count."""
    flag, value, otherwise = operands
    numbers = {reader.expressions.uniform(value), reader.expressions.uniform(otherwise)}
    alike = value == otherwise or (len(numbers) == 1 and None not in numbers)
    if alike and reader.floating(node) and broadcast(map(reader.expressions.shape, operands)) == shape:
        return reader.expressions.expanded(value, shape)  # the file may say another shape
    decided = reader.table.single(flag) if shape is not None else None
    if decided is not None and reader.expressions.box(flag) is not None:  # of a mask with both flags, maybe
        (part,) = reader.plain(node, operands, operands, [shape])
        if reader.expressions.in_source(part):
            return part
    if decided is not None:
        chosen = value if decided else otherwise
        array = reader.table.array(chosen)
        if array is not None and not array.any():
            return reader.expressions.constant(0, shape)
        if reader.expressions.shape(chosen) == shape or reader.expressions.uniform(chosen) is not None:
            return reader.expressions.linear({chosen: 1}, shape) if reader.floating(node) else chosen
    if reader.expressions.uniform(otherwise) == 0:
        rows = _chosen_rows(reader, flag, value, shape)
        rows = _rows_at_places(reader, flag, value, shape) if rows is None else rows
        if rows is not None:
            return rows
    counted = _counted(reader, operands, shape)
    return _part_of_choice(reader, node, operands, shape) if counted is None else counted


def _part_of_choice(reader: NodeReader, node: Node, operands: Sequence[int], shape: Shape) -> int | None:
    """A part of a choice of the source, where an operand is zero, or a whole value, in this part alone."""
    expressions = reader.expressions
    fits = shape is not None and broadcast(map(expressions.shape, operands)) == shape  # the file may say another
    for lead in operands if fits and expressions.sealed and reader.floating(node) else ():
        for whole, selection in expressions.surroundings(lead):
            for choice in expressions.readers(node.op_type, whole):
                sizes = cast(tuple[int, ...], expressions.shape(choice))
                if expressions.shape(whole) != sizes or sizes_of(selection, sizes) != shape:
                    continue
                rows = zip(operands, expressions.all[choice].operands)
                if all(_is_part(expressions, operand, of, selection) for operand, of in rows):
                    return expressions.take(choice, selection)
    return None


def _is_part(expressions: Expressions, number: int, whole: int, selection: Selection) -> bool:
    """Return whether a value is the part of a whole value; a dimension of length 1 has no part."""
    sizes = expressions.shape(whole) or ()
    chosen = tuple(None if size == 1 else runs for size, runs in zip(sizes, selection[len(selection) - len(sizes) :]))
    if expressions.uniform(number) == 0 and are_zero(expressions, whole, chosen):
        return True
    return expressions.alike(expressions.take(whole, chosen), number)


def _chosen_rows(reader: NodeReader, flag: int, value: int, shape: Shape) -> int | None:
    """The terms of a Gather of whole data in the rank's part."""
    expressions, masks = reader.expressions, reader.table.masks
    root = expressions.root(value)
    gathered = expressions.all[root]
    if gathered.op not in ROWS or root not in reader.table.origins:
        return None
    data, position = gathered.operands
    box = expressions.box(data)
    graph, node, _ = reader.table.origins[root]
    if box is None or elements(gathered.shape) is None:
        return None
    whole, selection = box
    sizes = expressions.shape(whole) or ()
    axis = node.attributes.get("axis", 0) % len(sizes)
    chosen = masks.chosen(flag, position, int(sizes[axis] or 0))
    if chosen is None or chosen[1] != selection[axis]:
        return None
    index, runs = expressions.view(chosen[0], expressions.shape(position)), chosen[1]
    behind = 0 if gathered.op == ELEMENTS else len(sizes) - axis - 1
    aligned = (*(expressions.shape(index) or ()), *[1] * behind)
    if expressions.shape(flag) != (
        expressions.shape(value) if elements(aligned) == elements(gathered.shape) else aligned
    ):
        return None
    rest = replaced(selection, axis)
    reader = reader.of_graph(graph)
    (number,) = reader.results(node, [expressions.take(whole, rest), index], [gathered.shape])
    try:
        part = expressions.parted(number, reader.core(number), (axis, None), int(sizes[axis] or 0), runs)
    except ValueError:  # the rows are no single Gather
        return None
    return expressions.view(part, shape)


def _rows_at_places(reader: NodeReader, flag: int, value: int, shape: Shape) -> int | None:
    """Some rows of the source's lookup at constant positions: flags follow one dimension of the positions."""
    expressions, array, flags = reader.expressions, reader.table.array, reader.table.array(flag)
    op, attributes, operands, rows = expressions.all[value]
    if op != LOOKUP or rows != shape or flags is None or shape is None or broadcast((flags.shape, shape)) != shape:
        return None
    local, axis = array(operands[1]), dict(attributes[0]).get("axis", 0) % len(expressions.shape(operands[0]) or ())  # type: ignore[index]
    varying = [dim for dim in range(flags.ndim) if (flags != flags.take([0], dim)).any()]
    if local is None or len(varying) != 1:
        return None
    chosen = np.flatnonzero(np.moveaxis(flags, varying[0], 0).reshape(flags.shape[varying[0]], -1)[:, 0])
    at = len(shape) - flags.ndim + varying[0] - axis
    if not 0 <= at < local.ndim or local.shape[at] != flags.shape[varying[0]]:
        return None
    for whole in expressions.readers(op, operands[0]):
        index = array(expressions.all[whole].operands[1])
        if index is None or expressions.all[whole][1::2] != (attributes, shape) or index.shape != local.shape:
            continue
        if (index.take(chosen, at) == local.take(chosen, at)).all():
            runs = joined((int(place), int(place) + 1) for place in chosen)
            return expressions.parted(whole, whole, (None, at), local.shape[at], runs)
    return None


def _counted(reader: NodeReader, operands: Sequence[int], shape: Shape) -> int | None:
    """A count kept from zero, with 1 in place of zero; a multiple of a count, with 0 where the count is zero."""
    expressions = reader.expressions
    flag, constant, otherwise = operands
    op, _, compared, _ = expressions.all[expressions.root(flag)]
    value = expressions.uniform(constant)
    if op != EQUAL or value not in (0, 1):
        return None
    counts = [operand for operand in compared if expressions.uniform(operand) != 0]
    if len(counts) != 1 or expressions.elements(counts[0]) != 1 or expressions.shape(otherwise) != shape:
        return None
    if expressions.bare(counts[0]) not in expressions.counts:
        return None
    if value == 1:
        return expressions.counted(otherwise) if expressions.root(otherwise) == expressions.root(counts[0]) else None
    count = expressions.root(counts[0])
    return _by_weight(expressions, otherwise, count) if expressions.has_factor(otherwise, count) else None


def _by_weight(expressions: Expressions, number: int, count: int) -> int:
    """A multiple of a count, with the weight in place of the count."""

    def of(root: int) -> int:
        op, attributes, operands, shape = expressions.all[root]
        if op == TAKE:
            return expressions.take(of(operands[0]), cast(Selection, attributes))
        if op == VIEW:
            return expressions.view(of(operands[0]), shape)
        if op == LINEAR:
            return expressions.linear({of(atom): factor for atom, factor in expressions.terms(root)}, shape)
        powers = dict(expressions.factors(root))
        powers[count] -= 1
        pairs = [*((factor, power) for factor, power in powers.items() if power), (expressions.weight(count), 1)]
        return expressions.product(*zip(*pairs))

    ranges = ((of(root), start, stop) for root, start, stop in expressions.apart(number))
    return expressions.view(expressions.flat(ranges), expressions.shape(number))


def gather(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """Constant places of a part, as places of the whole value; places from the end, as places from the start."""
    sizes = reader.expressions.shape(operands[0]) or ()
    axis = node.attributes.get("axis", 0)
    if axis < 0 and sizes:
        counted = Node(
            node.op_type, node.inputs, node.outputs, attributes={**node.attributes, "axis": axis + len(sizes)}
        )
        (number,) = reader.results(counted, operands, [shape])
        return number
    size = sizes[axis] if sizes else None
    if arrays[1] is not None and arrays[1].size == 1 and isinstance(size, int) and 0 <= int(arrays[1].item()) < size:
        at = int(arrays[1].item())
        part = reader.expressions.take(operands[0], along(axis, ((at, at + 1),), len(sizes)))
        return reader.expressions.view(part, (*sizes[:axis], *arrays[1].shape, *sizes[axis + 1 :]))
    if arrays[1] is not None and isinstance(size, int) and -size <= arrays[1].min(initial=0) < 0:
        index = reader.expressions.from_array(
            np.where(arrays[1] < 0, arrays[1] + size, arrays[1]).astype(arrays[1].dtype)
        )
        (number,) = reader.results(node, [operands[0], index], [shape])
        return number
    expressions, box = reader.expressions, reader.expressions.box(operands[0])
    if arrays[1] is None or expressions.readers(node.op_type, operands[0]):
        return None
    around = expressions.surroundings(operands[0])
    read = (row for row in (box, *around) if row is not None and expressions.readers(node.op_type, row[0]))
    box, indices = next(read, box), arrays[1]
    if box is None:
        return None
    whole, selection = box
    axis = node.attributes.get("axis", 0) % len(selection)
    runs = selection[axis]
    if runs is None:
        return None
    size = length(runs, 0)
    if not size or (indices >= size).any() or (indices < -size).any():
        return None
    rest = replaced(selection, axis)
    index = reader.expressions.from_array(nth(runs, indices))
    (number,) = reader.results(node, [reader.expressions.take(whole, rest), index], [shape])
    return number


def scatter(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """The rank's part of a sum of whole data and updates, where updates of other positions are zeros."""
    expressions = reader.expressions
    data, position, updates = operands
    if shape is not None and expressions.shape(data) != shape:  # the file may say another
        return None
    written = _written(reader, node, operands, arrays, shape)
    written = _added_at_places(reader, node, operands, arrays, shape) if written is None else written
    written = _between_zeros(reader, node, operands, arrays, shape) if written is None else written
    if written is not None:
        return written
    flag, added, otherwise = (*expressions.all[expressions.root(updates)].operands, 0, 0, 0)[:3]
    masked = expressions.all[expressions.root(updates)].op == CHOICE and expressions.uniform(otherwise) == 0
    if not masked or node.attributes.get("reduction") != "add" or elements(shape) is None or not expressions.sealed:
        return None
    rank, box = len(shape or ()), expressions.box(data)
    axis = node.attributes.get("axis", 0) % rank
    for size in [expressions.shape(box[0])[axis]] if box else expressions.lengths(node.op_type, axis):  # type: ignore[index]
        chosen = reader.table.masks.chosen(flag, position, size)
        if chosen is None or not _flags_rows(reader, node, flag, updates, position):
            continue
        runs = chosen[1]
        whole = expressions.resized(data, axis, size, runs) if box is None else None
        if box is not None and box[1][axis] == runs:
            whole = expressions.take(box[0], replaced(box[1], axis))
        if whole is None or length(runs, size) != (shape or ())[axis]:
            continue
        index = expressions.view(chosen[0], expressions.shape(position))
        sizes = expressions.shape(whole)
        terms = expressions.spread(added, expressions.shape(updates))
        (number,) = reader.results(node, [whole, index, terms], [sizes])
        return expressions.take(number, along(axis, runs, rank))
    return None


def _written(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """Rows written in order, or added to zeros: rows of the data, the rows, rows of the data; a row that is written
    several times is the operator's."""
    (data, _, updates), how = operands, node.attributes.get("reduction", "none")
    if reader.expressions.uniform(updates) == 0 and how == "add":
        return data
    plain = (how == "none" or reader.expressions.uniform(data) == 0) and elements(shape) is not None and shape
    if "Elements" in node.op_type or not plain or arrays[1] is None or arrays[1].shape[-1] != 1:
        return None
    indices, size, rest = arrays[1].reshape(-1), int(shape[0] or 0), shape[1:]  # type: ignore[index]
    if reader.expressions.shape(updates) != (*arrays[1].shape[:-1], *rest):  # runtimes refuse such a node
        return None
    flags = np.ones(indices.size, bool)
    masked = reader.expressions.all[reader.expressions.root(updates)]
    if masked.op == CHOICE and reader.expressions.uniform(masked.operands[2]) == 0:
        flag = reader.table.array(masked.operands[0])
        if flag is None or how != "add" or not _flags_rows(reader, node, masked.operands[0], updates, operands[1]):
            return None
        flags = flag.reshape(-1)
        updates = reader.expressions.spread(masked.operands[1], reader.expressions.shape(updates))
    if size > LARGEST_DIMENSION:
        return None
    rows = np.full(size, -2)  # no row is the one before the first
    if how not in ("none", "add"):
        return None
    if ((indices < 0) | (indices >= size))[flags].any():
        return None
    again = np.flatnonzero(np.bincount(indices[flags], minlength=size) > 1)
    if again.size and how == "add":
        return None
    rows[indices[flags]] = np.flatnonzero(flags)
    rows[again] = indices.size + 1 + again
    ends = [0, *(np.flatnonzero((np.diff(rows) != 1) & ((rows[1:] >= 0) | (rows[:-1] >= 0))) + 1).tolist(), size]
    updates, parts = reader.expressions.view(updates, (indices.size, *rest)), []
    (written,) = reader.plain(node, operands, operands, [shape]) if again.size else (data,)
    for start, stop in pairwise(ends):
        begin = int(rows[start])
        of, at = (data, start) if begin < 0 else (updates, begin) if begin < indices.size else (written, start)
        parts.append(reader.expressions.take(of, along(0, ((at, at + stop - start),), len(rest) + 1)))
    return reader.expressions.concatenated(parts, 0)


def _added_at_places(
    reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape
) -> int | None:
    """Neighbouring rows of the source's sum of rows at constant positions; all further rows are zeros."""
    expressions, local, updates = reader.expressions, arrays[1], operands[2]
    form, sizes = expressions.all[expressions.root(updates)], expressions.shape(updates)
    if node.attributes.get("reduction") != "add" or "Elements" in node.op_type or local is None or not shape:
        return None
    flags = np.ones(local.size, bool)
    if form.op == CHOICE and expressions.uniform(form.operands[2]) == 0:
        flag = reader.table.array(form.operands[0])
        if flag is None or not _flags_rows(reader, node, form.operands[0], updates, operands[1]):
            return None
        flags, updates = flag.reshape(-1), expressions.spread(form.operands[1], sizes)
    if local.shape[-1] != 1 or not flags.any() or expressions.uniform(operands[0]) != 0:
        return None
    for whole in expressions.readers(node.op_type, updates):
        data, position, _ = expressions.all[whole].operands
        index = reader.table.array(position)
        alike = expressions.all[whole].attributes == (frozen(node), 0) and expressions.uniform(data) == 0
        if index is None or not alike or index.shape != local.shape or (index < 0).any():
            continue
        starts, size = np.unique((index - local).reshape(-1)[flags]), int((expressions.shape(whole) or ())[0] or 0)
        start, stop = int(starts[0]), int(starts[0]) + int(shape[0] or 0)
        inside = ((start <= index) & (index < stop)).reshape(-1)
        if len(starts) == 1 and (inside == flags).all():
            low, high = max(start, 0), min(stop, size)
            part = expressions.take(whole, along(0, ((low, high),), len(shape)))
            return _beside_zeros(reader, low - start, part, stop - high)
    return None


def _between_zeros(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """Rows added to zeros at constant positions: a range of rows between zeros."""
    expressions, index = reader.expressions, arrays[1]
    adds = node.attributes.get("reduction") == "add" and "Elements" not in node.op_type
    if not adds or expressions.uniform(operands[0]) != 0 or index is None or not index.size or not elements(shape):
        return None
    size, rest = int((shape or ())[0] or 0), (shape or ())[1:]
    low, high = int(index.min()), int(index.max()) + 1
    if index.shape[-1] != 1 or not 0 <= low < high <= size or high - low == size:
        return None
    rows = high - low, *rest
    inner = [expressions.constant(0, rows), reader.expressions.from_array(index - low), operands[2]]
    (number,) = reader.results(node, inner, [rows])
    return _beside_zeros(reader, low, number, size - high)


def _beside_zeros(reader: NodeReader, front: int, number: int, behind: int) -> int:
    """A value with rows of zeros in front and behind."""
    rest = (reader.expressions.shape(number) or ())[1:]
    zeros = [reader.expressions.constant(0, (count, *rest)) for count in (front, behind)]
    return reader.expressions.concatenated([zeros[0], number, zeros[1]], 0)


def _flags_rows(reader: NodeReader, node: Node, flag: int, updates: int, position: int) -> bool:
    """Return whether a mask of updates has a flag for each row of a ScatterND, or for each element."""
    expressions = reader.expressions
    flags, indices = expressions.shape(flag) or (), expressions.shape(position) or ()
    masked = expressions.shape(expressions.root(updates)) or ()
    if "Elements" in node.op_type:
        return flags == masked and elements(flags) == elements(indices)
    after = expressions.shape(updates) or ()
    if indices[-1:] == (1,) and elements(after) == elements(indices):  # rows of a single element
        return elements(flags) == elements(masked) == elements(after)
    if elements(indices) == 1 == elements(flags):  # a single row
        return elements(masked) == elements(after)
    return indices[-1:] == (1,) and masked == after and flags == (*indices[:-1], *[1] * (len(after) - len(indices) + 1))

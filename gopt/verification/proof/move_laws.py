"""Laws of operators that move elements, cast them, or make values of a shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from gopt.ir.constant_folding import as_folded, constant_array
from gopt.ir.graph import COMM, Node
from gopt.ir.types import FLOATS, dtype_name, numpy_dtype
from gopt.operators.kinds import CASTS, SUMS
from gopt.verification.proof.boxes import Box
from gopt.verification.proof.constants import Arrays
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.flags import any_set
from gopt.verification.proof.forms import PARTED, PERMUTED, Shape, broadcast, elements
from gopt.verification.proof.movements import PADDED
from gopt.verification.proof.ranges import applied
from gopt.verification.proof.selections import Runs, along
from gopt.verification.proof.stored_values import simplest

if TYPE_CHECKING:
    from gopt.verification.proof.operators import NodeReader

REPEATED = 64
"""How many times a dimension is repeated, at most, to be read as a selection."""
EXACT = {
    "bfloat16": frozenset({"float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
}  # fmt: skip
"""Type -> types with all values of the type: a cast to them rounds nothing."""


def constant(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    value = constant_array(node.attributes)
    return None if value is None else reader.expressions.from_array(value)


def cast(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    source, to = reader.graph.type_of(node.inputs[0]).dtype, reader.type_of(node).dtype
    if "to" in node.attributes:
        to = dtype_name(node.attributes["to"])
    if "undefined" in (source, to) and node.is_in(CASTS):
        return None
    if source == to and not node.is_in(CASTS):
        return operands[0]
    if to in EXACT.get(source, ()):
        reader.widened[node.outputs[0]] = reader.widened.get(node.inputs[0], source)
    if reader.widened.get(node.inputs[0]) == to:
        return operands[0]
    if any(law(reader, node, operands[0], to) for law in (_rounded_sum, _written_out, _rounded_gradient)):
        reader.table.roundings[node.label] += 1
        return operands[0]
    return as_type(reader.expressions, operands[0], source, to)


def _rounded_sum(reader: NodeReader, node: Node, number: int, to: str) -> bool:
    """Return whether a cast rounds a rank's sum of widened halves to a half of the source."""
    expressions, box = reader.expressions, reader.expressions.box(number)
    whole = number if box is None else box[0]
    if expressions.all[whole].op == PARTED:
        (total,) = expressions.all[whole].operands
        box = expressions.box(total if box is None else expressions.take(total, box[1]))
        whole = total if box is None else box[0]
    if not expressions.sealed or (expressions.root(whole), to) not in reader.table.halves:
        return False
    adder = reader.producers.get(node.inputs[0])
    return adder is not None and adder.is_in(SUMS) and all(reader.widened.get(name) == to for name in adder.inputs)


def _written_out(reader: NodeReader, node: Node, number: int, to: str) -> bool:
    """Return whether a cast rounds what a rank computes of the widened operands of an operator, for the operator's half
    in the source."""
    whole, _ = reader.expressions.box(number) or (number, ())
    read = reader.table.halves.get((reader.expressions.root(whole), to)) if reader.expressions.sealed else None
    names, visited = [node.inputs[0]], set[str]()
    while names and read is not None:
        name = names.pop()
        made, value = reader.producers.get(name), reader.values.get(name)
        if name in visited or (value is not None and reader.table.is_constant(value)):
            continue
        visited.add(name)
        if reader.widened.get(name) == to and value is not None:
            operand, _ = reader.expressions.box(value) or (value, ())
            if reader.expressions.root(operand) not in read:
                return False
        elif made is None or made.is_in(CASTS) or made.captures:
            return False
        else:
            packed = made.domain == COMM and len(made.inputs) == len(made.outputs)
            names += [made.inputs[made.outputs.index(name)]] if packed else made.reads
    return read is not None


def _rounded_gradient(reader: NodeReader, node: Node, number: int, to: str) -> bool:
    """Return whether a cast rounds a rank's gradient of all batches to the gradient's type, the weight of a batch to
    that type, or, directly in front of calls, a gradient of some batches to the type in which gradients travel."""
    expressions, table = reader.expressions, reader.table
    rounded, sent = table.rounded.get(to, set()), table.sent.get(to, set())
    if not expressions.sealed or not rounded | sent:
        return False
    before_calls = all(user.domain == COMM for user in reader.users.get(node.outputs[0], ()))
    for root, _, _ in expressions.apart(number):
        bare = expressions.bare(root)
        whole, _ = expressions.box(bare) or (bare, ())
        values = {bare, expressions.undivided(bare), expressions.undivided(whole)}
        if expressions.uniform(root) != 0 and values.isdisjoint(rounded | sent if before_calls else rounded):
            return False
    return True


def reshape(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    before = reader.expressions.shape(operands[0])
    if elements(shape) is None or elements(before) is None or any(array is None for array in arrays[1:]):
        return None
    result = as_folded(node, [np.broadcast_to(np.False_, before), *arrays[1:]])  # type: ignore[arg-type]
    fits = result is not None and result.shape == shape  # the file may say another
    return reader.expressions.view(operands[0], shape) if fits else None


def expand(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    number = operands[0]
    if arrays[1] is not None:
        shape = broadcast((tuple(arrays[1].tolist()), reader.expressions.shape(number)))
    fits = shape is not None and broadcast((shape, reader.expressions.shape(number))) == shape
    if shape is None or not fits:
        return None

    def spread(value: int, sizes: Shape) -> int:
        """A value in a larger shape."""
        if reader.floating(node):
            return reader.expressions.linear({value: 1}, sizes)
        fitting = reader.expressions.shape(value) == sizes
        return value if fitting else reader.expressions.apply(node.op_type, None, [value], sizes)

    return reader.expressions.expanded(number, shape, spread)


def transpose(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """Two transposes are a single transpose; a transpose of dimensions of length 1 alone is a view."""
    if shape is None:
        return None
    perm = tuple(node.attributes.get("perm") or reversed(range(len(shape))))
    return permuted(reader, operands[0], perm)


def permuted(reader: NodeReader, number: int, perm: tuple[int, ...]) -> int:
    box = reader.expressions.box(number)
    if box is not None:
        parts = (
            reader.expressions.take(permuted(reader, whole, perm), tuple(selection[dim] for dim in perm))
            for whole, selection in _permuted_around(reader.expressions, number, box, perm)
        )
        first = next(parts)
        return next(filter(reader.expressions.in_source, chain((first,), parts)), first)
    expression = reader.expressions.all[number]
    if expression.op == PERMUTED and isinstance(expression.attributes, tuple):
        perm = tuple(expression.attributes[dim] for dim in perm)
        number = expression.operands[0]
    sizes = reader.expressions.shape(number) or ()
    shape = tuple(sizes[dim] for dim in perm)
    if _in_order(sizes, perm):
        return reader.expressions.view(number, shape)
    value = reader.expressions.uniform(number)
    if value is not None:
        return reader.expressions.constant(value, shape)
    return reader.expressions.apply(PERMUTED, perm, [number], shape)


def _in_order(sizes: Sequence[object], perm: Sequence[int]) -> bool:
    """Return whether the dimensions longer than 1 stay in order."""
    moved = [dim for dim in perm if sizes[dim] != 1]
    return moved == sorted(moved)


def _permuted_around(expressions: Expressions, number: int, box: Box, perm: tuple[int, ...]) -> Iterator[Box]:
    """The values around a part that the source transposes so; the box; the values with the same elements behind."""
    around = expressions.surroundings(number)
    for whole, selection in around:
        if any(expressions.all[reader].attributes == perm for reader in expressions.readers(PERMUTED, whole)):
            yield whole, selection
    yield box
    yield from (row for row in around if _in_order(expressions.shape(row[0]) or (), perm))


def taken(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """Ranges of dimensions, in steps of 1."""
    before = reader.expressions.shape(operands[0])
    if elements(before) is None or before is None:
        return None
    bounds = [None if array is None else array.reshape(-1).tolist() for array in arrays[1:]]
    if len(arrays) < 3:
        bounds = [node.attributes.get(name) for name in ("starts", "ends", "axes")]
    starts, ends, axes, steps = (*bounds, None, None)[:4]
    if starts is None or ends is None or None in bounds[: len(arrays) - 1] or any(step != 1 for step in steps or ()):
        return None
    selection: list[Runs | None] = [None] * len(before)
    for axis, start, stop in zip(axes or range(len(starts)), starts, ends):
        low, high, _ = slice(start, stop).indices(before[axis])
        selection[axis] = ((low, max(low, high)),) if low < high else ()
    return reader.expressions.take(operands[0], tuple(selection))


def split(reader: NodeReader, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
    """Neighbouring ranges of a dimension."""
    before = reader.expressions.shape(operands[0])
    if elements(before) is None or before is None or any(elements(shape) is None for shape in shapes):
        return None
    axis, start, results = node.attributes.get("axis", 0) % len(before), 0, []
    named = reader.table.array(operands[1]) if len(operands) > 1 else node.attributes.get("split")
    lengths = [(shape or ())[axis] for shape in shapes]
    if len(operands) > 1 and named is None:
        return None
    if lengths != (list(named) if named is not None else [lengths[0]] * (len(lengths) - 1) + lengths[-1:]):
        return None
    for shape in shapes:
        stop = start + (shape or ())[axis]
        results.append(reader.expressions.take(operands[0], along(axis, ((start, stop),), len(before))))
        start = stop
    return results if start == before[axis] else None


def concat(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    rank = len(reader.expressions.shape(operands[0]) or ())
    sized = shape is not None or (rank == 1 and all(map(reader.expressions.elements, operands)))
    return reader.expressions.concatenated(operands, node.attributes["axis"] % rank) if sized and rank else None


def tile(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """The elements of each dimension several times; a dimension of length 1 is spread."""
    expressions, value = reader.expressions, operands[0]
    before, times = expressions.shape(value), [] if arrays[1] is None else [int(count) for count in arrays[1]]
    if before is None or elements(before) is None or len(times) != len(before):
        return None
    sizes = [(size, count) for size, count in zip(before, times) if isinstance(size, int)]
    if reader.floating(node):
        value = expressions.expanded(value, tuple(count if size == 1 else size for size, count in sizes))
        sizes = [(count, 1) if size == 1 else (size, count) for size, count in sizes]
    if any(not 0 < count <= REPEATED for _, count in sizes):
        return None
    return expressions.take(value, tuple(None if count == 1 else ((0, size),) * count for size, count in sizes))


def pad(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """A number in front of and behind a value of one dimension, or a value with this very number everywhere; nothing
    beside a part of a padded value."""
    expressions, mode = reader.expressions, node.attributes.get("mode", "constant")
    value = expressions.uniform(operands[2]) if len(operands) > 2 else 0
    if mode not in ("constant", b"constant") or len(operands) not in (2, 3) or arrays[1] is None or value is None:
        return None
    if shape is not None and expressions.uniform(operands[0]) == value and reader.floating(node):
        return expressions.constant(value, shape)
    if not arrays[1].any() and expressions.all[reader.core(operands[0])].op == PADDED:
        return operands[0]  # with borders
    if len(expressions.shape(operands[0]) or ()) != 1 or not reader.floating(node) or (arrays[1] < 0).any():
        return None
    front, behind = (expressions.pieces(expressions.constant(value, (int(count),))) for count in arrays[1])
    return expressions.flat([*front, *expressions.pieces(operands[0]), *behind])


def unpadded(reader: NodeReader, node: Node, operands: Sequence[int]) -> list[int] | None:
    """The operand of a Pad with zero amounts, for a Pad without a law of windows."""
    amounts = reader.table.array(operands[1]) if node.op_type == PADDED and len(operands) > 1 else None
    return None if amounts is None or amounts.any() else [operands[0]]


def fill(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    if arrays[0] is None:
        return None
    sizes = tuple(int(size) for size in arrays[0].reshape(-1))
    value = constant_array(node.attributes)
    return reader.table.filled(np.zeros(1, np.float32) if value is None else value, sizes)


def as_type(expressions: Expressions, number: int, source: str, to: str) -> int:
    """An expression in another type: a cast to a wider type changes nothing, any other cast rounds."""
    if to == source or to in EXACT.get(source, ()):
        return number
    if to == "bool" and expressions.elements(number) == 1 and (flag := any_set(expressions, number)) is not None:
        return expressions.view(flag, expressions.shape(number))
    if not (to in FLOATS and source in FLOATS):
        return applied(expressions, "cast", (source, to), [number])
    value = expressions.uniform(number)
    if value is not None:
        with np.errstate(all="ignore"):
            rounded = np.asarray(float(value)).astype(numpy_dtype(to)).reshape(1)
        if np.isfinite(np.float64(rounded[0])):
            return expressions.constant(simplest(rounded[0]), expressions.shape(number))
    if expressions.all[expressions.root(number)][:2] == ("round", to):
        return number
    return applied(expressions, "round", to, [number])

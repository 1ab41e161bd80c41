"""From a node to the expressions of the results: by the record of the operator, in the forms with laws."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gopt.ir.constant_folding import as_folded, constant_array, measured
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.types import FLOATS, TensorType, dtype_name, numpy_dtype
from gopt.operators.kinds import CASTS, COMBINERS, COPIES, NORM_REDUCTIONS, RESHAPES, SIZES
from gopt.operators.operator import Operator, Slope
from gopt.verification.proof.constants import SMALL, ConstantTable, simplest
from gopt.verification.proof.expressions import EXTREMES, Expressions, Shape, broadcast, elements

EXACT = {
    "bfloat16": frozenset({"float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
}  # fmt: skip
"""Type -> types with all values of the type: a cast to them rounds nothing."""
_JOINED = {op: EXTREMES[how] for how, ops in COMBINERS.items() if how in EXTREMES for op in ops}
"""Operator of two extremes -> the form of the result."""
Arrays = Sequence[Any]
"""The values of operands that are constants; None for all others."""


class NodeReader:
    """Reads the nodes of a graph into ``expressions``; ``drawn``: the axes along which members draw apart."""

    def __init__(self, expressions: Expressions, graph: Graph, drawn: frozenset[str], table: ConstantTable) -> None:
        self.expressions, self.graph, self.drawn, self.table = expressions, graph, drawn, table
        self._widened: dict[str, str] = {}
        """Value behind a cast to a wider type -> the type before: the cast back rounds nothing."""

    def results(self, node: Node, operands: Sequence[int | None]) -> list[int]:
        """The expressions of all results; ``operands``: None for an absent operand."""
        present = [operand for operand in operands if operand is not None]
        front = len(present) == len(operands) or None not in operands[: len(present)]
        if front and node.domain in ("", "ai.onnx") and len(node.outputs) == 1 and not node.captures:
            number = self._lawful(node, present)
            if number is not None:
                return [number]
        if draws(node):
            present.append(self.expressions.leaf("draw", node.outputs[0], (), self.drawn))
        return self._plain(node, operands, present)

    def _lawful(self, node: Node, operands: Sequence[int]) -> int | None:
        """The result of an operator with a law; None for any other node."""
        if node.is_in(SIZES):
            return self._measured(node, operands[0])
        arrays = [self.table.arrays.get(operand) for operand in operands]
        if operands and all(array is not None for array in arrays):
            folded = self._folded(node, arrays)
            if folded is not None:
                return self.table.number(folded)
        record = record_of(node)
        decided = (*((record.shape,) if record.shape is not None else ()), *record.lengths)
        if any(index < len(arrays) and arrays[index] is None for index in decided):
            return None
        if record.signs and self._floating(node):
            return self._sum(record, operands)
        if record.exponents and self._floating(node):
            return self._product(record, operands)
        if record.pieces:
            return self._reduced(node, record, operands, arrays)
        rule = _RULES.get(node.op_type)
        return None if rule is None else rule(self, node, operands, arrays)

    def _plain(self, node: Node, operands: Sequence[int | None], present: Sequence[int]) -> list[int]:
        """An operator without a law, applied to the operands."""
        expressions, attributes = self.expressions, frozen(node)
        absent = tuple(index for index, operand in enumerate(operands) if operand is None)
        key: Hashable = (attributes, absent) if absent else attributes
        op = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        if len(node.outputs) == 1 and record_of(node).elementwise and not draws(node):

            def make(values: Sequence[int]) -> int:
                number = expressions.apply(op, key, values, broadcast(expressions.shape(value) for value in values))
                self.table.origins.setdefault(number, (self.graph, node, 0))
                return number

            return [expressions.elementwise(make, present)]
        results = []
        for index, name in enumerate(node.outputs):
            shape = self.graph.type_of(name).shape if name else None
            results.append(expressions.apply(op, (key, index), present, shape))
            self.table.origins.setdefault(results[-1], (self.graph, node, index))
        return results

    def _folded(self, node: Node, arrays: Arrays) -> np.ndarray | None:
        if node.is_in(CASTS):
            return np.asarray(arrays[0].astype(numpy_dtype(self._type(node).dtype)))
        if not all(array.dtype.kind in "iub" for array in arrays):
            return None
        folded = as_folded(node, arrays)
        return folded if folded is not None and folded.size <= SMALL else None

    def _measured(self, node: Node, operand: int) -> int | None:
        shape = self.expressions.shape(operand)
        if elements(shape) is None:
            return None
        sizes = measured(node, tuple(shape or ()))  # type: ignore[arg-type]
        return None if sizes is None else self.table.number(sizes)

    def _type(self, node: Node) -> TensorType:
        return self.graph.type_of(node.outputs[0])

    def _static(self, node: Node) -> Shape:
        shape = self._type(node).shape
        return shape if elements(shape) is not None else None

    def _floating(self, node: Node) -> bool:
        return self._type(node).dtype in FLOATS

    # --- by the facts of the record ---

    def _sum(self, record: Operator, operands: Sequence[int]) -> int:
        signs = [record.signs[min(index, len(record.signs) - 1)] for index, _ in enumerate(operands)]
        return self.expressions.elementwise(lambda values: self.expressions.added(values, signs), operands)

    def _product(self, record: Operator, operands: Sequence[int]) -> int:
        return self.expressions.elementwise(lambda values: self.expressions.product(values, record.exponents), operands)

    def _reduced(self, node: Node, record: Operator, operands: Sequence[int], arrays: Arrays) -> int | None:
        """A reduction over all elements."""
        expressions, number, after = self.expressions, operands[0], self._static(node)
        count = expressions.elements(number)
        extreme = EXTREMES.get(record.pieces or "")
        if len(arrays) > 1 and arrays[1] is None:
            return None
        if after is None or elements(after) != 1 or not count or not (extreme or self._floating(node)):
            return None
        if node.attributes.get("noop_with_empty_axes", 0) and count != 1:
            axes = node.attributes.get("axes") or (arrays[1] if len(arrays) > 1 else ())
            if axes is None or not len(axes):
                return None
        if extreme:
            return expressions.extreme(extreme, [number], after)
        if node.is_in(NORM_REDUCTIONS):
            if record.slope(0) is Slope.BENT:
                number = applied(expressions, "Abs", (), [number])
            else:
                number = expressions.elementwise(lambda values: expressions.product(values, (2,)), [number])
        total = expressions.total(number, after)
        if record.pieces == "mean":
            return expressions.scaled(total, Fraction(1, count))
        return applied(expressions, "Sqrt", (), [total]) if record.pieces == "l2" else total

    # --- by the operator ---

    def constant(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        value = constant_array(node.attributes)
        return None if value is None else self.table.number(value)

    def cast(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        source, to = self.graph.type_of(node.inputs[0]).dtype, self._type(node).dtype
        if "to" in node.attributes:
            to = dtype_name(node.attributes["to"])
        if "undefined" in (source, to) and node.is_in(CASTS):
            return None
        if to in EXACT.get(source, ()):
            self._widened[node.outputs[0]] = self._widened.get(node.inputs[0], source)
        if self._widened.get(node.inputs[0]) == to:
            return operands[0]
        return as_type(self.expressions, operands[0], source, to)

    def reshape(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        shape, decided = self._static(node), all(array is not None for array in arrays[1:])
        if shape is None or not decided or elements(shape) != self.expressions.elements(operands[0]):
            return None
        return self.expressions.view(operands[0], shape)

    def expand(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        shape = self._static(node)
        fits = shape is not None and broadcast((shape, self.expressions.shape(operands[0]))) == shape
        if not fits or not self._floating(node):
            return None
        return self.expressions.linear({operands[0]: Fraction(1)}, shape)

    def transpose(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        """Two transposes are a single transpose; a transpose of dimensions of length 1 alone is a view."""
        shape = self._static(node)
        if shape is None:
            return None
        number = operands[0]
        perm = tuple(node.attributes.get("perm") or reversed(range(len(shape))))
        expression = self.expressions.all[number]
        if expression.op == "permuted" and isinstance(expression.attributes, tuple):
            perm = tuple(expression.attributes[dim] for dim in perm)
            number = expression.operands[0]
        sizes = self.expressions.shape(number) or ()
        moved = [dim for dim in perm if sizes[dim] != 1]
        if moved == sorted(moved):
            return self.expressions.view(number, shape)
        value = self.expressions.uniform(number)
        if value is not None:
            return self.expressions.constant(value, shape)
        return self.expressions.apply("permuted", perm, [number], shape)

    def slice(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        """A range of rows, which are elements in a row."""
        bounds = list(arrays[1:])
        if len(arrays) < 3:
            bounds = [np.array(node.attributes.get(name, ())) for name in ("starts", "ends", "axes")]
        if any(bound is None or bound.size > 1 for bound in bounds) or any(bound.size != 1 for bound in bounds[:2]):
            return None
        axis = int(bounds[2].item()) if len(bounds) > 2 and bounds[2].size else 0
        rows, size = self._rows(operands[0], axis)
        if rows is None or (len(bounds) > 3 and int(bounds[3].item()) != 1):
            return None
        start, stop, _ = slice(int(bounds[0].item()), int(bounds[1].item())).indices(rows)
        stop = max(start, stop)
        part = self.expressions.flat(self.expressions.cut(operands[0], start * size, stop * size))
        shape = list(self.expressions.shape(operands[0]) or ())
        shape[axis] = stop - start
        return self.expressions.view(part, tuple(shape))

    def _rows(self, number: int, axis: int) -> tuple[int | None, int]:
        """The length of the first axis beside axes of length 1, and the elements of a row; None for an inner axis."""
        shape = self.expressions.shape(number)
        if not shape or elements(shape) is None or elements(shape[: axis % len(shape)]) != 1:
            return None, 0
        length, size = shape[axis], elements(shape[axis % len(shape) + 1 :])
        return (length, size or 0) if isinstance(length, int) else (None, 0)

    def concat(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        axis, shapes = node.attributes["axis"], [self.expressions.shape(operand) or () for operand in operands]
        rows = [self._rows(operand, axis)[0] for operand in operands]
        if None in rows:
            return None
        pieces = (piece for operand in operands for piece in self.expressions.pieces(operand))
        shape = list(shapes[0])
        shape[axis] = sum(row or 0 for row in rows)
        return self.expressions.view(self.expressions.flat(pieces), tuple(shape))

    def extreme(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        """The largest or smallest of numbers, or of flags."""
        for operand in operands:
            if self.expressions.elements(operand) != 1 or self.expressions.ranged(operand):
                return None
        return self.expressions.extreme(_JOINED[node.op_type], operands, self._static(node))

    def where(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        """A count kept from zero, with 1 in place of zero; a multiple of a count, with 0 where the count is zero."""
        expressions = self.expressions
        flag, constant, otherwise = operands
        op, _, compared, _ = expressions.all[expressions.root(flag)]
        value = expressions.uniform(constant)
        if op != _EQUAL or value not in (0, 1):
            return None
        counts = [operand for operand in compared if expressions.uniform(operand) != 0]
        if (
            len(counts) != 1
            or expressions.elements(counts[0]) != 1
            or expressions.shape(otherwise) != self._static(node)
        ):
            return None
        if not expressions.is_count(counts[0]):
            return None
        if value == 1:
            return (
                expressions.counted(otherwise) if expressions.root(otherwise) == expressions.root(counts[0]) else None
            )
        return otherwise if expressions.has_factor(otherwise, expressions.root(counts[0])) else None

    def fill(self, node: Node, operands: Sequence[int], arrays: Arrays) -> int | None:
        if arrays[0] is None:
            return None
        shape = tuple(int(size) for size in arrays[0].reshape(-1))
        value = constant_array(node.attributes)
        return self.table.filled(np.zeros(1, np.float32) if value is None else value, shape)


_EQUAL = "Equal"
_RULES: Mapping[str, Callable[[NodeReader, Node, Sequence[int], Arrays], int | None]] = {
    **dict.fromkeys(COPIES, NodeReader.cast),
    **dict.fromkeys(RESHAPES, NodeReader.reshape),
    **dict.fromkeys(_JOINED, NodeReader.extreme),
    "Constant": NodeReader.constant,
    "Expand": NodeReader.expand,
    "Transpose": NodeReader.transpose,
    "Slice": NodeReader.slice,
    "Concat": NodeReader.concat,
    "Where": NodeReader.where,
    "ConstantOfShape": NodeReader.fill,
}


def applied(expressions: Expressions, op: str, attributes: Hashable, operands: Sequence[int]) -> int:
    """An elementwise operator without laws."""

    def make(values: Sequence[int]) -> int:
        shape = broadcast(expressions.shape(value) for value in values)
        return expressions.apply(op, attributes, values, shape)

    return expressions.elementwise(make, operands)


def as_type(expressions: Expressions, number: int, source: str, to: str) -> int:
    """An expression in another type: a cast to a wider type changes nothing, any other cast rounds."""
    if to == source or to in EXACT.get(source, ()):
        return number
    if to == "bool" and expressions.elements(number) == 1 and (flag := expressions.any_set(number)) is not None:
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


def frozen(node: Node) -> Hashable:
    """The attributes of a node, for comparing."""
    return tuple(sorted((name, _frozen(value)) for name, value in node.attributes.items()))


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    hashable: Hashable = value.SerializeToString(deterministic=True) if hasattr(value, "SerializeToString") else value
    return hashable

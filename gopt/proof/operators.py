"""From a node to the expressions of its results: what the operator's record says, in the forms that have laws."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gopt.ir.constant_folding import as_folded, constant_array, measured
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS, TensorType, dtype_name, numpy_dtype
from gopt.operators.kinds import CASTS, RESHAPES, SIZES
from gopt.proof.expressions import (
    HIGHEST,
    LARGEST,
    LOWEST,
    SMALLEST,
    Expression,
    Expressions,
    Shape,
    broadcast,
    elements,
)

SMALL = 1 << 12
"""Elements up to which a constant is kept to be read as a shape, as axes or as places."""
EXACT = {
    "bfloat16": frozenset({"float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
}  # fmt: skip
"""Type -> types that have each of its values: a cast to them rounds nothing."""
PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Type -> bits of its numbers."""
SHORT = 5
"""Digits of a decimal fraction that a constant is taken for."""
_SUMMED = {"Add": (1, 1), "Sub": (1, -1), "Neg": (-1,), "Identity": (1,)}
_MULTIPLIED = {"Mul": (1, 1), "Div": (1, -1), "Reciprocal": (-1,)}
_SYMMETRIC = frozenset({"Max", "Min", "And", "Or", "Xor", "Equal", "Add", "Mul", "Sum"})
"""Operators whose operands may change places."""
_EXTREMES = {
    "ReduceMax": LARGEST, "ReduceMin": SMALLEST, "Max": LARGEST, "Min": SMALLEST, "Or": LARGEST, "And": SMALLEST,
}  # fmt: skip
_MOST = 64
"""The largest exponent that is written out as a power of a product."""


class Reader:
    """Reads the nodes of one graph into ``expressions``; ``own``: the axes along which batches and draws vary."""

    def __init__(self, expressions: Expressions, graph: Graph, own: frozenset[str], constants: Constants) -> None:
        self.expressions, self.graph, self.own, self.constants = expressions, graph, own, constants

    def results(self, node: Node, operands: Sequence[int | None]) -> list[int]:
        """The expressions of all results; ``operands``: None where an operand is absent."""
        given = [operand for operand in operands if operand is not None]
        if len(given) == len(operands) or node.is_in(RESHAPES):
            number = self._known(node, given)
            if number is not None:
                return [number]
        if draws(node):
            given.append(self.expressions.leaf("draw", node.outputs[0], (), self.own))
        return self._plain(node, operands, given)

    def _known(self, node: Node, operands: Sequence[int]) -> int | None:
        """The first result of a node whose operator has a law; None for others, and for nodes of several results."""
        if node.domain not in ("", "ai.onnx") or node.captures:
            return None
        if node.op_type in ("Split",):
            return None
        arrays = [self.constants.arrays.get(operand) for operand in operands]
        if node.op_type == "Constant":
            value = constant_array(node.attributes)
            return None if value is None else self.constants.of(value)
        if node.op_type in SIZES:
            return self._measured(node, operands[0])
        if (
            operands
            and all(array is not None for array in arrays)
            and (folded := self._folded(node, arrays)) is not None
        ):
            return self.constants.of(folded)
        rule = _RULES.get(node.op_type)
        return None if rule is None else rule(self, node, operands, arrays)

    def _plain(self, node: Node, operands: Sequence[int | None], given: Sequence[int]) -> list[int]:
        """An operator without a law, applied to its operands."""
        expressions = self.expressions
        if node.captures:
            raise KeyError(node.captures)
        attributes = frozen(node)
        absent = tuple(index for index, operand in enumerate(operands) if operand is None)
        key: Hashable = (attributes, absent) if absent else attributes
        op = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        if len(node.outputs) == 1 and record_of(node).elementwise and not draws(node):
            symmetric = op in _SYMMETRIC

            def make(values: Sequence[int]) -> int:
                shape = broadcast(expressions.shape(value) for value in values)
                number = expressions.apply(op, key, sorted(values) if symmetric else values, shape)
                self.constants.origins.setdefault(number, (self.graph, node, 0))
                return number

            return [expressions.elementwise(make, given)]
        results = []
        for place, name in enumerate(node.outputs):
            shape = self.graph.type_of(name).shape if name else None
            results.append(expressions.apply(op, (key, place), given, shape))
            self.constants.origins.setdefault(results[-1], (self.graph, node, place))
        return results

    # --- constants ---

    def _folded(self, node: Node, arrays: Sequence[Any]) -> np.ndarray | None:
        if node.op_type in CASTS:
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
        return None if sizes is None else self.constants.of(sizes)

    def _type(self, node: Node) -> TensorType:
        return self.graph.type_of(node.outputs[0])

    def _floating(self, node: Node) -> bool:
        return self._type(node).dtype in FLOATS

    # --- arithmetic ---

    def sum(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        if node.op_type == "Identity":
            return operands[0]
        if not self._floating(node):
            return None
        signs = _SUMMED.get(node.op_type, (1,) * len(operands))
        return self.expressions.elementwise(lambda values: self.expressions.added(values, signs), operands)

    def mean(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        total = self.sum(node, operands, arrays)
        return None if total is None else self.expressions.scaled(total, Fraction(1, len(operands)))

    def product(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        if not self._floating(node):
            return None
        exponents = _MULTIPLIED[node.op_type]
        return self.expressions.elementwise(lambda values: self.expressions.product(values, exponents), operands)

    def power(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        exponent = self.expressions.uniform(operands[1])
        if exponent is None or not self._floating(node):
            return None
        if exponent == Fraction(1, 2):
            return applied(self.expressions, "Sqrt", (), operands[:1])
        if exponent.denominator == 1 and 0 < abs(exponent) <= _MOST:
            powers = (int(exponent),)
            return self.expressions.elementwise(lambda values: self.expressions.product(values, powers), operands[:1])
        return None

    def cast(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        """A cast to a type that has all values changes nothing; another one rounds."""
        to, source = self._type(node).dtype, self.graph.type_of(node.inputs[0]).dtype
        if node.op_type == "Cast":
            to = dtype_name(node.attributes["to"])
        return self.as_type(operands[0], source, to)

    def as_type(self, number: int, source: str, to: str) -> int:
        return as_type(self.expressions, number, source, to)

    def root(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        return applied(self.expressions, "Sqrt", (), operands)

    # --- views and parts ---

    def reshape(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        shape = self._static(node)
        if shape is None or elements(shape) != self.expressions.elements(operands[0]):
            return None
        return self.expressions.view(operands[0], shape)

    def _static(self, node: Node) -> Shape:
        shape = self._type(node).shape
        return shape if elements(shape) is not None else None

    def expand(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        shape = self._static(node)
        if (
            shape is None
            or not self._floating(node)
            or broadcast((shape, self.expressions.shape(operands[0]))) != shape
        ):
            return None
        return self.expressions.linear({operands[0]: Fraction(1)}, shape)

    def transpose(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        """Two transposes are one; a transpose that moves only dimensions of one element is a view."""
        shape = self._static(node)
        if shape is None:
            return None
        number = operands[0]
        perm = tuple(node.attributes.get("perm") or reversed(range(len(shape))))
        expression = self.expressions.all[number]
        if expression.op == "Transpose" and isinstance(expression.attributes, tuple):
            perm = tuple(expression.attributes[dim] for dim in perm)
            number = expression.operands[0]
        sizes = self.expressions.shape(number) or ()
        moved = [dim for dim in perm if sizes[dim] != 1]
        if moved == sorted(moved):
            return self.expressions.view(number, shape)
        value = self.expressions.uniform(number)
        if value is not None:
            return self.expressions.constant(value, shape)
        return self.expressions.apply("Transpose", perm, [number], shape)

    def slice(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        """A range of a value of one dimension."""
        length = self._length(operands[0])
        bounds = (
            arrays[1:] if len(arrays) > 2 else [np.array(node.attributes.get(name, ())) for name in ("starts", "ends")]
        )
        if length is None or any(bound is None or bound.size != 1 for bound in bounds):
            return None
        if len(bounds) > 3 and int(bounds[3].item()) != 1:
            return None
        start, stop, _ = slice(int(bounds[0].item()), int(bounds[1].item())).indices(length)
        return self.expressions.flat(self.expressions.cut(operands[0], start, max(start, stop)))

    def _length(self, number: int) -> int | None:
        """The length of a value of one dimension; None for others."""
        shape = self.expressions.shape(number)
        return shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None

    def concat(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        if any(self._length(operand) is None for operand in operands):
            return None
        return self.expressions.flat(piece for operand in operands for piece in self.expressions.pieces(operand))

    # --- reductions and fills ---

    def reduce(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        """A reduction over all elements."""
        expressions, number = self.expressions, operands[0]
        before, after = expressions.shape(number), self._static(node)
        extreme = _EXTREMES.get(node.op_type)
        if after is None or elements(before) is None or elements(after) != 1 or not (extreme or self._floating(node)):
            return None
        count = elements(before) or 0
        if node.attributes.get("noop_with_empty_axes", 0) and count != 1:
            axes = node.attributes.get("axes") or (arrays[1] if len(arrays) > 1 else ())
            if axes is None or not len(axes):
                return None
        if extreme:
            return expressions.extreme(extreme, [number], after)
        op = node.op_type
        if op in ("ReduceL2", "ReduceSumSquare"):
            number = expressions.elementwise(lambda values: expressions.product(values, (2,)), [number])
        total = expressions.total(number, after)
        if op == "ReduceMean":
            return expressions.scaled(total, Fraction(1, count)) if count else None
        return applied(self.expressions, "Sqrt", (), [total]) if op == "ReduceL2" else total

    def extreme(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        """The largest or smallest of numbers, or of flags."""
        if any(self.expressions.elements(each) != 1 or self.expressions.ranged(each) for each in operands):
            return None
        return self.expressions.extreme(_EXTREMES[node.op_type], operands, self._static(node))

    def invert(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        def make(values: Sequence[int]) -> int:
            op, _, inner, _ = self.expressions.all[values[0]]
            return (
                inner[0]
                if op == "Not"
                else self.expressions.apply("Not", (), values, self.expressions.shape(values[0]))
            )

        return self.expressions.elementwise(make, operands)

    def where(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        """A count that is kept from zero, 1 where it equals zero; and a multiple of a count, 0 where it equals zero."""
        expressions = self.expressions
        flag, constant, other = operands
        op, _, compared, _ = expressions.all[expressions.root(flag)]
        value = expressions.uniform(constant)
        if op != "Equal" or value not in (0, 1):
            return None
        counts = [each for each in compared if expressions.uniform(each) != 0]
        if len(counts) != 1 or expressions.elements(counts[0]) != 1 or expressions.shape(other) != self._static(node):
            return None
        if value == 1:
            return expressions.counted(other) if expressions.root(other) == expressions.root(counts[0]) else None
        return other if expressions.has_factor(other, expressions.root(counts[0])) else None

    def fill(self, node: Node, operands: Sequence[int], arrays: Sequence[Any]) -> int | None:
        if arrays[0] is None:
            return None
        shape = tuple(int(size) for size in arrays[0].reshape(-1))
        value = constant_array(node.attributes)
        return self.constants.filled(np.zeros(1, np.float32) if value is None else value, shape)


def applied(expressions: Expressions, op: str, attributes: Hashable, operands: Sequence[int]) -> int:
    """An elementwise operator without laws."""

    def make(values: Sequence[int]) -> int:
        shape = broadcast(expressions.shape(value) for value in values)
        return expressions.apply(op, attributes, values, shape)

    return expressions.elementwise(make, operands)


def as_type(expressions: Expressions, number: int, source: str, to: str) -> int:
    """An expression in another type: a cast to a type that has all values changes nothing, another one rounds."""
    if to == source or to in EXACT.get(source, ()):
        return number
    if to == "bool" and expressions.elements(number) == 1 and (flag := expressions.any_set(number)) is not None:
        return expressions.view(flag, expressions.shape(number))
    if not (to in FLOATS and source in FLOATS):
        return applied(expressions, "Cast", (source, "float32" if to == "float64" else to), [number])
    if expressions.uniform(number) is not None or expressions.all[expressions.root(number)][:2] == ("round", to):
        return number
    return applied(expressions, "round", to, [number])


_RULES: Mapping[str, Callable[[Reader, Node, Sequence[int], Sequence[Any]], int | None]] = {
    **dict.fromkeys(("Add", "Sub", "Sum", "Neg", "Identity"), Reader.sum),
    **dict.fromkeys(_MULTIPLIED, Reader.product),
    **dict.fromkeys(CASTS, Reader.cast),
    **dict.fromkeys(RESHAPES, Reader.reshape),
    **dict.fromkeys(
        ("ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare", "ReduceMax", "ReduceMin"), Reader.reduce
    ),
    **dict.fromkeys(("Max", "Min", "Or", "And"), Reader.extreme),
    "Not": Reader.invert,
    "Where": Reader.where,
    "Mean": Reader.mean,
    "Pow": Reader.power,
    "Sqrt": Reader.root,
    "Expand": Reader.expand,
    "Transpose": Reader.transpose,
    "Slice": Reader.slice,
    "Concat": Reader.concat,
    "ConstantOfShape": Reader.fill,
}


class Constants:
    """The constants of all graphs of a proof: one number for one value."""

    def __init__(self, expressions: Expressions) -> None:
        self.expressions = expressions
        self.arrays: dict[int, np.ndarray] = {}
        """Whole numbers and flags of at most ``SMALL`` elements, by the number of the expression."""
        self.values: dict[Expression, np.ndarray] = {}
        """All constants that are not one number in each element."""
        self.origins: dict[int, tuple[Graph, Node, int]] = {}
        """Operators without laws: a node that was read so, and the place of the result."""
        self._stored: dict[tuple[str, int, TensorType], int] = {}

    def stored(self, tensor: Tensor) -> int:
        """The expression of a stored value; one in a file is read once."""
        if not tensor.path:
            return self.of(np.asarray(tensor.numpy()))
        key = tensor.path, tensor.offset, tensor.type
        if key not in self._stored:
            self._stored[key] = self.of(np.asarray(tensor.numpy()))
        return self._stored[key]

    def of(self, array: np.ndarray) -> int:
        """The expression of a value."""
        if array.dtype.name in FLOATS and not array.size:
            return self.expressions.linear({}, array.shape)
        if array.dtype.name in FLOATS:
            flat = array.reshape(-1)
            if flat[0] == flat[-1] and bool((flat == flat[0]).all()) and np.isfinite(np.float64(flat[0])):
                return self.expressions.constant(simplest(flat[0]), array.shape)
        if array.size == 1 and array.dtype.kind in "if" and (bound := _bound(array)):
            return self.expressions.leaf(bound, array.dtype.name, array.shape)
        data = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        name = array.dtype.name, data if len(data) <= 64 else hashlib.sha256(data).digest()
        number = self.expressions.leaf("constant", name, array.shape)
        self.values.setdefault(self.expressions.all[number], array)
        if array.size <= SMALL and array.dtype.kind in "iub":
            self.arrays[number] = array
        return number

    def filled(self, value: np.ndarray, shape: tuple[int, ...]) -> int:
        """A value of one element in every element of a shape."""
        if value.dtype.name in FLOATS and np.isfinite(np.float64(value.reshape(-1)[0])):
            return self.expressions.constant(simplest(value.reshape(-1)[0]), shape)
        if (elements(shape) or 0) <= SMALL:
            return self.of(np.broadcast_to(value.reshape(()), shape))
        return self.expressions.leaf("filled", (value.dtype.name, value.tobytes()), shape)


def _bound(array: np.ndarray) -> str:
    """The leaf that a number is which bounds its type; '' for others."""
    low, high = (-np.inf, np.inf) if array.dtype.kind == "f" else (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
    value = array.reshape(-1)[0]
    return LOWEST if value == low else HIGHEST if value == high else ""


def simplest(value: Any) -> Fraction:
    """The short decimal, or the fraction of the smallest denominator, that rounds to a floating value.

    A constant of a step stands for it: 0.1 in float32 is 1/10, so that 1 - 0.9 and 0.1 are one number."""
    number = np.asarray(value)
    exact = Fraction(float(value))
    decimal = Fraction(str(value)) if number.dtype.name in PRECISION else exact
    if exact.denominator == 1 or len(str(decimal.numerator)) + len(str(decimal.denominator).rstrip("0")) <= SHORT:
        return decimal
    _, exponent = np.frexp(float(value))
    half = Fraction(2) ** (int(exponent) - PRECISION.get(number.dtype.name, 53) - 1)
    found = _between(abs(exact) - half, abs(exact) + half)
    return found if exact > 0 else -found


def _between(low: Fraction, high: Fraction) -> Fraction:
    """The fraction of the smallest denominator in a range above zero, by continued fractions."""
    whole = low.numerator // low.denominator
    if whole == low:
        return Fraction(whole)
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / _between(1 / (high - whole), 1 / (low - whole))


def frozen(node: Node) -> Hashable:
    """The attributes of a node, for comparing."""
    return tuple(sorted((name, _frozen(value)) for name, value in node.attributes.items()))


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    frozen: Hashable = value.SerializeToString(deterministic=True) if hasattr(value, "SerializeToString") else value
    return frozen

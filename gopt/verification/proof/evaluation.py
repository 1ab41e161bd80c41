"""Evaluates expressions on numbers, for each member: counter-examples, and a check of the laws.

Floats are computed in float64: only the rounding of the step is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import numpy as np

from gopt.errors import GoptError
from gopt.ir.graph import Graph, Node
from gopt.ir.types import FLOATS, TensorType, numpy_dtype
from gopt.operators.table import operator
from gopt.runtime.reference_eval import evaluate
from gopt.verification.proof.constants import taken
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import (
    ADDED,
    CONCAT,
    COUNTED,
    DIGITS,
    EXTREME_PART,
    FLAT,
    HIGHEST,
    INVERSE,
    ITERATED,
    LARGEST,
    LINEAR,
    LOOKED_UP,
    LOWEST,
    PARTED,
    PRODUCT,
    REDUCED,
    SMALLEST,
    SUM,
    TAKE,
    TOTAL,
    VIEW,
    WEIGHT,
    Expression,
    Part,
    elements,
)
from gopt.verification.proof.movements import LOOKUP
from gopt.verification.proof.selections import Runs, positions
from gopt.verification.proof.window_laws import WINDOWED

Member = Mapping[str, int]
Leaf = Callable[[Expression, Member], np.ndarray | None]
"""The value of a leaf on a member; None for one that has no value."""
At = tuple[tuple[str, int], ...]
"""The indices of a member along the axes of an expression."""
Cut = tuple[tuple[int, tuple[Part, ...]], ...]
"""Sums and extremes in an expression that have only some of their terms."""
Key = tuple[int, At, Cut]
"""An expression, where it is evaluated, and what is cut in it."""
Origin = tuple[Graph, Node, int]
"""A node that an expression without laws was read from, and the index of the result."""
PARTIAL = (PARTED, EXTREME_PART)
SPREAD = "Expand"
MOST = 2_000_000
"""Elements of all expressions together up to which they are evaluated."""


class Unevaluable(Exception):
    """An expression without a value: random, too large, or without a kernel."""


@dataclass(slots=True)
class ExpressionValues:
    """Values of expressions: ``leaf`` gives values of leaves, ``origins`` the nodes of operators without laws."""

    expressions: Expressions
    leaf: Leaf
    origins: Mapping[int, Origin]
    arrays: dict[Key, np.ndarray] = field(default_factory=dict)
    """The values so far."""
    _cores: dict[int, frozenset[int]] = field(default_factory=dict)
    """Expression -> the sums in it that some expression has a part of."""

    def values(self, numbers: Sequence[int], coordinates: Member) -> list[np.ndarray]:
        """The values of expressions on a member. Raises Unevaluable."""
        needed: set[Key] = set()
        keys = [self._key(number, coordinates, {}) for number in numbers]
        stack, total = list(keys), 0
        while stack:
            key = stack.pop()
            if key in needed or key in self.arrays:
                continue
            needed.add(key)
            total += elements(self.expressions.shape(key[0])) or 0
            if total > MOST:
                raise Unevaluable("large")
            stack += self._operands(*key)
        for key in sorted(needed, key=lambda key: key[0]):
            self.arrays[key] = self._value(key, [self.arrays[operand] for operand in self._operands(*key)])
        return [self.arrays[key] for key in keys]

    def _key(self, number: int, coordinates: Member, cut: Mapping[int, tuple[Part, ...]]) -> Key:
        at = tuple((axis, coordinates.get(axis, 0)) for axis in sorted(self.expressions.varies[number]))
        inside = cut.keys() & self._cut(number) if cut else ()
        return number, at, tuple((core, cut[core]) for core in sorted(inside))

    def _cut(self, number: int) -> frozenset[int]:
        """The sums in an expression that some expression has a part of."""
        if not self._cores:
            every = self.expressions.all
            cores = {expression.attributes[0] for expression in every if expression.op in PARTIAL}  # type: ignore[index]
            for at, expression in enumerate(every):
                inside = frozenset().union(*(self._cores[operand] for operand in expression.operands))
                self._cores[at] = inside | {at} if at in cores else inside
        return self._cores[number]

    def _operands(self, number: int, at: At, cut: Cut) -> list[Key]:
        """The operands of an expression, each with the members to read."""
        op, attributes, operands, _ = self.expressions.all[number]
        all_coordinates = [dict(at)]
        operands = operands[2:] if op == ITERATED else operands
        parts = dict(cut)
        if op in PARTIAL:
            core, indices = cast(tuple[int, tuple[Part, ...]], attributes[:2])  # type: ignore[index]
            parts[core] = indices
        if op in (REDUCED, "gathered"):
            axes = sorted(attributes[1]) if op == REDUCED else attributes[0]  # type: ignore[index]
            for axis in axes:
                all_coordinates = [
                    coordinates | {axis: index}
                    for coordinates in all_coordinates
                    for index in range(self.expressions.extents[axis])
                ]
        elif op == "on member":
            all_coordinates = [dict(at) | dict(attributes)]  # type: ignore[call-overload]
        return [self._key(operand, coordinates, parts) for coordinates in all_coordinates for operand in operands]

    def _value(self, key: Key, values: list[np.ndarray]) -> np.ndarray:
        number, coordinates, cut = key[0], dict(key[1]), dict(key[2])
        expression = self.expressions.all[number]
        op, attributes, _, shape = expression
        if op == "one":
            return np.ones(())
        if op == ITERATED:
            return self._iterated(number, coordinates, values[0])
        if op in PARTIAL:
            return values[0]
        rows: list[tuple[int, Runs]] = []
        """The dimensions of the result with some rows that are looked up, and zeros."""
        for label, size, runs in cut.get(number, ()):
            pairs = list(zip(values, label))  # type: ignore[call-overload]
            if any(dim is not None and array.shape[dim] != size for array, dim in pairs):
                raise Unevaluable(op)
            if op == LOOKUP and label[0] is None:  # type: ignore[index]
                axis = dict(attributes[0]).get("axis", 0) % values[0].ndim  # type: ignore[index]
                rows.append((axis + label[1], runs))  # type: ignore[index]
                continue
            zeros = op.startswith("Gather") or (op in WINDOWED and None in label)  # type: ignore[operator]
            values = [array if dim is None else _kept(array, dim, runs, zeros=zeros) for array, dim in pairs]
        rule = _KERNELS.get(op)
        record = operator(op)
        try:
            with np.errstate(all="ignore"):
                if rule is not None:
                    result = rule(attributes, values)
                elif number in self.origins:
                    result = computed(*self.origins[number], values)
                elif record.kernel is not None:
                    result = record.kernel({}, values)
                else:
                    result = self.leaf(expression, coordinates)
        except (GoptError, TypeError, ValueError, KeyError, IndexError) as error:
            raise Unevaluable(f"{op}: {error}") from None
        if result is None:
            raise Unevaluable(op)
        if elements(shape) is None:
            return np.asarray(result)
        sizes = tuple(map(int, shape or ()))  # type: ignore[arg-type]
        array = np.asarray(result)
        if array.size == elements(shape):
            array = array.reshape(sizes)
            for dim, runs in rows:
                array = _kept(array, dim, runs, zeros=True)
            return array
        try:
            return np.broadcast_to(array, sizes)
        except ValueError as error:
            raise Unevaluable(f"{op}: {error}") from None

    def _iterated(self, number: int, coordinates: Member, value: np.ndarray) -> np.ndarray:
        """A value after all micro-steps."""
        _, axis, (after, start, _), _ = self.expressions.all[number]
        begun, moving = self.expressions.all[start], {start}
        for at, expression in enumerate(self.expressions.all):
            if not moving.isdisjoint(expression.operands):
                moving.add(at)
        for index in range(self.expressions.extents[str(axis)]):

            def leaf(expression: Expression, at: Member, value: np.ndarray = value) -> np.ndarray | None:
                return value if expression == begun else self.leaf(expression, at)

            fixed = {key: array for key, array in self.arrays.items() if key[0] not in moving}
            inner = ExpressionValues(self.expressions, leaf, self.origins, fixed, self._cores)
            (value,) = inner.values([after], {**coordinates, str(axis): index})
            self.arrays.update((key, array) for key, array in inner.arrays.items() if key[0] not in moving)
        return value


def _kept(array: np.ndarray, dim: int, runs: Runs, *, zeros: bool) -> np.ndarray:
    """Some positions of a dimension, alone or with zeros at the others."""
    if not zeros:
        return np.take(array, positions(runs), dim)
    mask = np.zeros(array.shape[dim], bool)
    mask[positions(runs)] = True
    shape = [1] * array.ndim
    shape[dim] = -1
    return np.where(mask.reshape(shape), array, 0)


def computed(graph: Graph, node: Node, index: int, values: Sequence[np.ndarray]) -> np.ndarray:
    """A node, by the reference evaluator in float64."""
    names = [name for name in (*node.inputs, *node.captures) if name]
    if len(names) != len(values):
        raise Unevaluable(node.op_type)
    feeds = dict(zip(names, values))
    for name in names:
        dtype = graph.type_of(name).dtype
        if dtype not in FLOATS:
            feeds[name] = feeds[name].astype(numpy_dtype(dtype))
    inputs = {name: TensorType(dtype_of(feeds[name]), feeds[name].shape) for name in names}
    output = node.outputs[index]
    old = graph.type_of(output)
    outputs = {output: replace(old, dtype="float64") if old.dtype in FLOATS else old}
    one = Graph("one", [node], inputs, outputs, {}, dict(inputs | outputs), graph.header, {})
    return evaluate(one, feeds)[output]


def dtype_of(array: np.ndarray) -> str:
    return "bool" if array.dtype == bool else array.dtype.name


def _linear(factors: Any, values: Sequence[np.ndarray]) -> Any:
    return sum((float(factor) * value for factor, value in zip(factors, values)), np.zeros(()))


def _product(powers: Any, values: Sequence[np.ndarray]) -> Any:
    result = np.ones(())
    for power, value in zip(powers, values):
        result = result * np.asarray(value, np.float64) ** float(power)
    return result


def _spread(_: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    """A value repeated; a shape that is computed says how often, where sizes are open."""
    value, *sizes = values
    return np.broadcast_to(value, np.broadcast_shapes(value.shape, *(tuple(size.astype(int)) for size in sizes)))


def _cut(spans: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    parts = [value.reshape(-1)[start:stop] for (start, stop), value in zip(spans, values)]
    return np.concatenate(parts)


def _extreme(choose: Callable[..., Any]) -> Callable[[Any, Sequence[np.ndarray]], Any]:
    def kernel(spans: Any, values: Sequence[np.ndarray]) -> Any:
        if spans == "members":
            return choose(np.stack(values), axis=0)
        parts = [
            value.reshape(-1)[start:stop]
            for ranges, value in zip(spans, values)
            for start, stop in ranges or ((0, value.size),)
        ]
        return choose(np.concatenate(parts))

    return kernel


def _total(spans: Any, values: Sequence[np.ndarray]) -> Any:
    flat = values[0].reshape(-1)
    return sum(flat[start:stop].sum() for start, stop in spans or ((0, flat.size),))


def _reduced(attributes: Any, values: Sequence[np.ndarray]) -> Any:
    how: Mapping[str, Callable[..., Any]] = {"sum": np.sum, LARGEST: np.max, SMALLEST: np.min}
    return how[attributes[0]](np.stack(values), axis=0)


def _rounded(dtype: Any, values: Sequence[np.ndarray]) -> Any:
    return values[0].astype(numpy_dtype(dtype)).astype(np.float64)


def _cast(types: Any, values: Sequence[np.ndarray]) -> Any:
    return values[0].astype(np.float64 if types[1] in FLOATS else numpy_dtype(types[1]))


def _looked_up(width: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(values[0].reshape(-1, width)[values[1].reshape(-1)])


def _added(shape: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    numbers, rows = values[0].reshape(-1), values[1]
    total = np.zeros((shape[0], prod(shape[1:])))
    np.add.at(total, numbers, rows.reshape(len(numbers), -1))
    return total


def _digits(attributes: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    outer, rest = np.divmod(values[0], attributes[0])
    return np.asarray(outer * attributes[1] + rest * attributes[2] + attributes[3])


_KERNELS: Mapping[str, Callable[[Any, list[np.ndarray]], Any]] = {
    LINEAR: _linear,
    PRODUCT: _product,
    VIEW: lambda shape, values: values[0],
    FLAT: _cut,
    TOTAL: _total,
    LARGEST: _extreme(np.max),
    SMALLEST: _extreme(np.min),
    REDUCED: _reduced,
    INVERSE: lambda _, values: 1 / np.asarray(values[0], np.float64),
    "times zero": _product,
    COUNTED: lambda _, values: np.where(values[0] == 0, 1, values[0]),
    WEIGHT: lambda _, values: values[0],
    LOWEST: lambda dtype, _: np.float64(-np.inf) if dtype in FLOATS else np.asarray(np.iinfo(dtype).min, dtype),
    HIGHEST: lambda dtype, _: np.float64(np.inf) if dtype in FLOATS else np.asarray(np.iinfo(dtype).max, dtype),
    "round": _rounded,
    "cast": _cast,
    "permuted": lambda perm, values: np.transpose(values[0], perm),
    "on member": lambda _, values: values[0],
    "gathered": lambda attributes, values: np.concatenate(values, attributes[1]),
    SUM: lambda axes, values: np.sum(values[0], axes, keepdims=True),
    SPREAD: _spread,
    CONCAT: lambda axis, values: np.concatenate(values, axis),
    TAKE: lambda selection, values: taken(values[0], selection),
    LOOKED_UP: _looked_up,
    ADDED: _added,
    DIGITS: _digits,
}

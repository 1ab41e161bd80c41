"""Expressions in real arithmetic, numbered by hash-consing: values that are equal by laws have the same number.

An expression is the value on a member; *varies* are the mesh axes along which members have different values."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

from gopt.ir.graph_index import walk
from gopt.ir.types import FLOATS
from gopt.operators.operator import Slope
from gopt.operators.table import names
from gopt.verification.proof.forms import (
    ADDED,
    CONCAT,
    COUNTED,
    EXTREME_PART,
    FLAT,
    INITIAL,
    INVERSE,
    ITERATED,
    LARGEST,
    LINEAR,
    LOOKED_UP,
    ONE,
    PARTED,
    PERMUTED,
    PRODUCT,
    REDUCED,
    SMALLEST,
    STATE,
    SUM,
    TAKE,
    TOTAL,
    VIEW,
    WEIGHT,
    Expression,
    Shape,
    elements,
)

Step: TypeAlias = tuple[int, list[int], bool]
"""An expression, the positions of the operands of one like it among values, and whether these ascend."""
NOWHERE: frozenset[str] = frozenset()
_FINITE = frozenset({
    "one", STATE, INITIAL, "batch", "input", "sum so far", "draw", LINEAR, PRODUCT, VIEW, FLAT, TAKE, TOTAL, REDUCED,
    LARGEST, SMALLEST, SUM, EXTREME_PART, LOOKED_UP, ADDED, PERMUTED, "round", "cast", "on member", "gathered",
    CONCAT, COUNTED, WEIGHT,
}) | names(lambda record: record.finite or (
    record.slopes and max(record.slopes) < Slope.CURVED and (record.total or not record.elementwise)
))  # fmt: skip
"""Forms and operators whose results are numbers where the operands are: no quotient, root or logarithm. A quotient by a
count that is kept from zero is one, and so is any whole number."""
_APART_FROM_ZERO = names(lambda record: record.finite_above_zero) | {INVERSE}
"""Forms and operators whose results are numbers for numbers above zero, and for counts kept from zero."""
_SAME_ELEMENTS = frozenset({VIEW, FLAT, TAKE})
"""Forms of the elements of a value in a shape or a row."""
FEW = 4
"""Operands up to which an expression is hashed with its attributes."""
SOME_ELEMENTS, MOVED, SOME_TERMS, VANISHED, STORED, ROW_OF_TERMS = 1, 2, 4, 8, 16, 32
"""Traits of terms that laws of sums join: a sum over ranges of elements, a value of micro-steps, part of a sum, 0 times
a term that may be no number, stored values, and a row along an axis with part of a sum."""
_TRAITS = {ITERATED: MOVED, PARTED: SOME_TERMS, "constant": STORED}


class _LongExpression(Expression):
    """An expression of many operands, hashed without their coefficients: fractions are slow to hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(self[2:])


class Numbering:
    """The numbered expressions of a proof; ``extents``: the size of each axis along which values vary."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        self.extents = dict(extents)
        self.all: list[Expression] = []
        self.varies: list[frozenset[str]] = []
        self.finite: list[bool] = []
        """Whether an expression is a number wherever the leaves are: only then a difference of two is zero."""
        self._counts: list[int | None] = []
        """The number of elements of an expression."""
        self._ranged: list[bool] = []
        """Whether an expression has several elements that may differ, or is an element of a flat value."""
        self._direct: list[bool] = []
        """Whether an expression is no other view, part or row of expressions."""
        self._traits: list[int] = []
        self._facts: tuple[list[Any], ...] = (
            self.varies, self.finite, self._counts, self._ranged, self._direct, self._traits,
        )  # fmt: skip
        self._numbers: dict[Expression, int] = {}
        self.read: dict[tuple[Hashable, tuple[int, ...]], list[int]] = {}
        """A node of any file, and its operands -> its results."""
        self.forms: dict[Hashable, int] = {}
        self.signs: dict[int, int] = {}
        """Expression -> the sign by the laws of ``signs``, where asked for."""
        self.groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        """The form of a group of elementwise nodes, and the operands -> the results."""
        self.leaf("one", (), ())

    def _number(
        self, op: str, attributes: Hashable, operands: tuple[int, ...], shape: Shape, of: Sequence[int] = ()
    ) -> int:
        """The number of an expression; ``of``: fewer expressions with the facts of all operands."""
        apart = op in _APART_FROM_ZERO and self._has_number(op, operands[0])  # numbers expressions of its own
        kind = _LongExpression if len(operands) > FEW else Expression
        expression = tuple.__new__(kind, (op, attributes, operands, shape))
        number = self._numbers.setdefault(expression, len(self.all))
        if number == len(self.all):
            of = of or operands
            self.all.append(expression)
            axes = NOWHERE
            for row in map(self.varies.__getitem__, of):
                if row is not axes and row:
                    axes = row if not axes else axes | row
            self.varies.append(axes)
            whole = op == "cast" and attributes[0] not in FLOATS  # type: ignore[index]
            finite = (apart or op in _FINITE) and all(map(self.finite.__getitem__, of))
            count = elements(shape)
            self.finite.append(whole or (finite and not (count and 0 in map(self._counts.__getitem__, operands))))
            self._counts.append(count)
            inner = self.all[operands[0]].op if op == VIEW else op
            single = op == LINEAR and count != 1 and self._are_single(operands)
            self._ranged.append((count != 1 or inner == FLAT) and not (number == ONE or single))
            self._direct.append(op not in _SAME_ELEMENTS)
            some = (op == TOTAL and attributes) or (op == FLAT and count == 1)
            traits = SOME_ELEMENTS if some else _TRAITS.get(op, 0)
            if op == LINEAR or op in _SAME_ELEMENTS:
                traits = reduce(or_, map(self._traits.__getitem__, of), traits)
            elif op == PRODUCT:
                traits = reduce(or_, map(self._traits.__getitem__, of)) & SOME_TERMS
            elif op == CONCAT and any(self._traits[operand] & SOME_TERMS for operand in of):
                traits = ROW_OF_TERMS
            self._traits.append(traits)
        return number

    def _has_number(self, op: str, operand: int) -> bool:
        """Return whether a quotient by a number, or the root or logarithm of a number, is a number."""
        raise NotImplementedError

    def _are_single(self, numbers: Sequence[int]) -> bool:
        """Return whether some values have a single element each."""
        counts = self._counts
        return not numbers or (counts[numbers[0]] == 1 and all(counts[number] == 1 for number in numbers))

    def repeat(self, steps: Iterable[Step], values: list[int]) -> None:
        """Add expressions as earlier ones, of values with the facts of the other operands: equal axes, and of one kind.

        Ends where the operands of a sum or a product have another order."""
        rows, numbers, added = self.all, self._numbers, list[int]()
        for like, positions, ordered in steps:
            operands = tuple([values[position] for position in positions])
            if ordered and list(operands) != sorted(operands):
                break
            op, attributes, _, shape = row = rows[like]
            expression = tuple.__new__(type(row), (op, attributes, operands, shape))
            number = numbers.setdefault(expression, len(rows))
            if number == len(rows):
                rows.append(expression)
                added.append(like)
            values.append(number)
        for facts in self._facts:
            facts += [facts[like] for like in added]

    def leaf(self, kind: str, name: Hashable, shape: Shape, varies: frozenset[str] = NOWHERE) -> int:
        """A value without operands, such as a state at the start of the step."""
        number = self._number(kind, name, (), shape)
        self.varies[number] = varies
        return number

    def apply(self, op: str, attributes: Hashable, operands: Sequence[int], shape: Shape) -> int:
        """An operator without laws."""
        return self._number(op, attributes, tuple(operands), shape)

    def shape(self, number: int) -> Shape:
        return self.all[number].shape

    def elements(self, number: int) -> int | None:
        return self._counts[number]

    def ranged(self, number: int) -> bool:
        """Return whether a value has several elements, or is an element of a flat value."""
        return self._ranged[number]

    def joinable(self, numbers: Iterable[int]) -> bool:
        """Return whether laws of sums may join terms of some expressions."""
        return any(map(self._traits.__getitem__, numbers))

    def depend(self, numbers: Iterable[int], leaves: Collection[int]) -> bool:
        """Return whether some expressions are made of some leaves."""
        lowest = min(leaves, default=0)  # what is made of an expression has a larger number

        def above(number: int) -> Iterator[int]:
            return (operand for operand in self.all[number].operands if operand >= lowest)

        return any(number in leaves for number in walk(numbers, above))

"""Expressions in real arithmetic, numbered by hash-consing: values that are equal by these laws have the same number.

Laws: sums are linear combinations with exact rational coefficients, products have integer exponents, a reduction over
members is linear, elements in row-major order have any shape, and an elementwise operator acts on ranges of
elements. Everything else is an operator applied to numbers. An expression is the value on a member; *varies* are the
mesh axes along which members have different values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache, reduce
from itertools import pairwise
from math import prod
from operator import or_
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from gopt.ir.graph_index import walk
from gopt.ir.types import FLOATS
from gopt.operators.operator import Slope
from gopt.operators.table import names
from gopt.verification.proof.selections import Runs, merged

Shape: TypeAlias = tuple[int | str | None, ...] | None
Step: TypeAlias = tuple[int, list[int], bool]
"""An expression, the positions of the operands of one like it among values, and whether these ascend."""
Piece: TypeAlias = tuple[int, int, int]
"""Number of an expression, and the range of its elements in row-major order."""
Part: TypeAlias = tuple[Hashable, int, Runs]
"""An index of a sum, the number of its positions, and the ranges of positions that are added."""
Factors: TypeAlias = tuple[tuple[int, int], ...]
"""Expressions, and their exponents in a product."""
NOWHERE: frozenset[str] = frozenset()
LINEAR, PRODUCT, VIEW, FLAT, TAKE, TOTAL, PARTED, REDUCED, COUNTED, ITERATED, INVERSE = (
    "linear", "product", "view", "flat", "take", "total", "parted", "reduced", "counted", "iterated", "inverse",
)  # fmt: skip
"""The forms that have laws."""
LARGEST, SMALLEST = "largest", "smallest"
EXTREMES = {"max": LARGEST, "any": LARGEST, "min": SMALLEST, "all": SMALLEST}
"""Kind of partial value -> the form that joins several."""
STATE, INITIAL = "state", "initial state"
"""Leaves: a state, and a state before the first micro-step where micro-steps move the state."""
EXTREME_PART = "extreme of a part"
CONCAT, SUM = "in a row", "sum along"
"""Forms of values in a row along an axis, and of sums along some dimensions."""
PERMUTED = "permuted"
EXP = "Exp"
LOG = "Log"
CHOICE = "Where"
LOWEST, HIGHEST = "lowest", "highest"
"""Leaves that are below, or above, every value of their type."""
LOOKED_UP, ADDED = "rows", "rows added"
"""Rows of a table by number; a table of zeros with rows added to it."""
DIGITS = "digits"
"""Whole numbers taken apart by a step, and put together with another one."""
_FINITE = frozenset({
    "one", STATE, INITIAL, "batch", "input", "sum so far", "draw", LINEAR, PRODUCT, VIEW, FLAT, TAKE, TOTAL, REDUCED,
    LARGEST, SMALLEST, SUM, EXP, EXTREME_PART, LOOKED_UP, ADDED, PERMUTED, "round", "cast", "on member", "gathered",
    CONCAT, COUNTED,
}) | names(lambda record: record.slopes and max(record.slopes) < Slope.CURVED)  # fmt: skip
"""Forms and operators whose results are numbers where the operands are: no quotient, root or logarithm. A quotient by a
count that is kept from zero is one, and so is any whole number."""
_FLAG = Fraction(1, 1 << 20)
"""The least coefficient of a flag in a count: a smaller one may round to zero."""
_PLACED = frozenset({VIEW, FLAT, TAKE})
"""The same elements in another place or shape."""
_FEW = 4
"""Operands up to which an expression is hashed with its attributes."""
_IDENTITY = {LARGEST: LOWEST, SMALLEST: HIGHEST}
_SOME_ELEMENTS, _MOVED, SOME_TERMS, _VANISHED, _STORED = 1, 2, 4, 8, 16
"""Traits of terms that laws of sums join: a sum over ranges of elements, a value of micro-steps, part of a sum, 0 times
a term that may be no number, and stored values."""
_TRAITS = {ITERATED: _MOVED, PARTED: SOME_TERMS, "constant": _STORED}
ONE = 0
"""The number of the constant one."""
Coefficient: TypeAlias = int | Fraction
"""An exact rational: whole ones as integers, which are faster."""


class _Ratio(Fraction):
    """A fraction that is hashed once."""

    __slots__ = ("_hash",)
    _hash: int

    def __new__(cls, *parts: Any) -> _Ratio:
        ratio = super().__new__(cls, *parts)
        ratio._hash = super().__hash__(ratio)
        return ratio

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash

    def __repr__(self) -> str:
        return repr(Fraction(self))


_ratio = cache(_Ratio)


def _once(value: Coefficient) -> Coefficient:
    """One object for equal fractions: expressions are hashed with their coefficients."""
    return value if isinstance(value, int) else _ratio(value.numerator, value.denominator)


class UnknownSize(ValueError):
    """A law needs sizes that are open: it does not apply."""


class Expression(NamedTuple):
    """An operator applied to expressions.

    ``attributes``: of a linear combination and of a product the coefficients and exponents of the operands, of a flat
    value and of a total the ranges of elements, of a reduction the kind and the axes."""

    op: str
    attributes: Hashable
    operands: tuple[int, ...]
    shape: Shape


class _LongExpression(Expression):
    """An expression of many operands, hashed without their coefficients: fractions are slow to hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(self[2:])


def _joined_along(label: Hashable, rows: Mapping[tuple[Part, ...], Coefficient]) -> dict[tuple[Part, ...], Coefficient]:
    """Parts of a sum that differ along one index alone, joined by the coefficient of each position."""
    result: dict[tuple[Part, ...], Coefficient] = {}
    steps: dict[tuple[tuple[Part, ...], int], dict[int, Coefficient]] = {}
    for parts, factor in rows.items():
        matched = [part for part in parts if part[0] == label]
        if not matched:
            result[parts] = result.get(parts, 0) + factor
            continue
        ((_, size, runs),) = matched
        changes = steps.setdefault((tuple(part for part in parts if part[0] != label), size), {})
        for start, stop in runs:
            changes[start] = changes.get(start, 0) + factor
            changes[stop] = changes.get(stop, 0) - factor
    for (rest, size), changes in steps.items():
        for factor, runs in ranges_by_coefficient(changes).items():
            parts = rest if runs == ((0, size),) else tuple(sorted((*rest, (label, size, runs)), key=repr))
            result[parts] = result.get(parts, 0) + factor
    return result


def ranges_by_coefficient(changes: Mapping[int, Coefficient]) -> dict[Coefficient, Runs]:
    """The positions of each coefficient, from the changes of the coefficient; 0 is left out."""
    groups: dict[Coefficient, list[tuple[int, int]]] = {}
    coefficient: Coefficient = 0
    for start, stop in pairwise(sorted(bound for bound, change in changes.items() if change)):
        coefficient += changes[start]
        if coefficient:
            groups.setdefault(coefficient, []).append((start, stop))
    return {factor: tuple(runs) for factor, runs in groups.items()}


@cache
def elements(shape: Shape) -> int | None:
    """The number of elements, or None."""
    if shape is None:
        return None
    count = 1
    for size in shape:
        if not isinstance(size, int):
            return None
        count *= size
    return count


def broadcast(shapes: Iterable[Shape]) -> Shape:
    """The common shape of operands of an elementwise operator, or None. Raises ValueError for unequal lengths."""
    return _broadcast(tuple(shapes))


@cache
def _broadcast(shapes: tuple[Shape, ...]) -> Shape:
    result: tuple[int | str | None, ...] = ()
    for shape in shapes:
        if shape is None:
            return None
        if shape == result or not shape:
            continue
        if not result:
            result = shape
            continue
        long, short = (shape, result) if len(shape) >= len(result) else (result, shape)
        front = len(long) - len(short)
        if any(
            isinstance(a, int) and isinstance(b, int) and a != b and 1 not in (a, b)
            for a, b in zip(long[front:], short)
        ):
            raise ValueError(f"{list(long)} and {list(short)} do not broadcast")
        tail = tuple(b if a == 1 or (isinstance(b, int) and b != 1) else a for a, b in zip(long[front:], short))
        result = (*long[:front], *tail)
    return result


class Elements:
    """The numbered expressions of a proof; ``extents``: the size of each axis along which values vary."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        self.extents = dict(extents)
        self.all: list[Expression] = []
        self.varies: list[frozenset[str]] = []
        self.finite: list[bool] = []
        """Whether an expression is a number wherever the leaves are: only then a difference of two is zero."""
        self.counts: dict[int, frozenset[str]] = {}
        """Sums of a count that is never negative, as of samples or tokens -> the axes of the members in the sum: where
        the sum is zero, all terms are."""
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
        self.arrays: dict[int, np.ndarray] = {}
        """Whole numbers and flags of small constants, by number."""
        self.stored: Callable[[], Callable[[np.ndarray], int] | None] = lambda: None
        """The maker of whole numbers, while there is a table of constants."""
        self.padded: set[int] = set()
        """Rows and constant rows behind one another, and elementwise operators on such."""
        self._numbers: dict[Expression, int] = {}
        self._constants: dict[tuple[Coefficient, Shape], int] = {}
        self._reduced: dict[tuple[str, frozenset[str], int], int] = {}
        self._scales: dict[int, tuple[Coefficient, int]] = {}
        self._results: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        """Sums and products so far: ranks make them again and again."""
        self.read: dict[tuple[Hashable, tuple[int, ...]], list[int]] = {}
        """A node of any file, and its operands -> its results."""
        self.forms: dict[Hashable, int] = {}
        self.groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        """The form of a group of elementwise nodes, and the operands -> the results."""
        self.leaf("one", (), ())

    # --- numbering ---

    def _number(
        self, op: str, attributes: Hashable, operands: tuple[int, ...], shape: Shape, of: Sequence[int] = ()
    ) -> int:
        """The number of an expression; ``of``: fewer expressions with the facts of all operands."""
        never_zero = op == INVERSE and self._never_zero(operands[0])  # numbers expressions of its own
        kind = _LongExpression if len(operands) > _FEW else Expression
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
            finite = (never_zero or op in _FINITE) and all(map(self.finite.__getitem__, of))
            self.finite.append(whole or finite)
            count = elements(shape)
            self._counts.append(count)
            inner = self.all[operands[0]].op if op == VIEW else op
            single = op == LINEAR and count != 1 and self._are_single(operands)
            self._ranged.append((count != 1 or inner == FLAT) and not (number == ONE or single))
            self._direct.append(op not in _PLACED)
            some = (op == TOTAL and attributes) or (op == FLAT and count == 1)
            traits = _SOME_ELEMENTS if some else _TRAITS.get(op, 0)
            if op == LINEAR or op in _PLACED:
                traits = reduce(or_, map(self._traits.__getitem__, of), traits)
            elif op == PRODUCT:
                traits = reduce(or_, map(self._traits.__getitem__, of)) & SOME_TERMS
            self._traits.append(traits)
        return number

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

    def shape(self, number: int) -> Shape:
        return self.all[number].shape

    def elements(self, number: int) -> int | None:
        return self._counts[number]

    def apply(self, op: str, attributes: Hashable, operands: Sequence[int], shape: Shape) -> int:
        """An operator without laws."""
        return self._number(op, attributes, tuple(operands), shape)

    # --- sums ---

    def constant(self, value: Coefficient, shape: Shape = ()) -> int:
        """The value in every element of a shape."""
        key = value, shape
        number = self._constants.get(key)
        if number is None:
            number = self._constants[key] = self.linear({ONE: value}, shape)
        return number

    def uniform(self, number: int) -> Coefficient | None:
        """The number in every element of a constant; None for any other expression."""
        expression = self.all[number]
        if number == ONE:
            return 1
        if expression.op != LINEAR:
            return None
        if not expression.operands:
            return 0
        return expression.attributes[0] if expression.operands == (ONE,) else None  # type: ignore[index]

    def terms(self, number: int) -> Iterator[tuple[int, Coefficient]]:
        """The terms of an expression as a linear combination."""
        expression = self.all[number]
        if expression.op == LINEAR:
            return zip(expression.operands, expression.attributes)  # type: ignore[call-overload,no-any-return]
        return iter(self._viewed_terms(number) if expression.op == VIEW else ((number, 1),))

    def _viewed_terms(self, number: int) -> Sequence[tuple[int, Coefficient]]:
        """The terms of a view: the views of the terms of a sum, where all terms have the size of the sum."""
        (root,), count, shape = self.all[number].operands, self._counts[number], self.shape(number)
        counts = {self._counts[atom] for atom in self.all[root].operands}
        if self.all[root].op != LINEAR or count is None or not counts <= {1, count}:
            return ((number, 1),)
        return [*self._views(self.terms(root), shape).items()]

    def _views(self, terms: Iterable[tuple[int, Coefficient]], shape: Shape) -> dict[int, Coefficient]:
        """Terms in another shape; single elements without a shape."""
        result: dict[int, Coefficient] = {}
        for atom, factor in terms:
            number = self.view(atom, shape if self._counts[atom] != 1 else ()) if atom != ONE else ONE
            result[number] = result.get(number, 0) + factor
        return result

    def joinable(self, numbers: Iterable[int]) -> bool:
        """Return whether laws of sums may join terms of some expressions."""
        return any(map(self._traits.__getitem__, numbers))

    def linear(self, terms: Mapping[int, Coefficient], shape: Shape) -> int:
        """The sum of terms, each broadcast to ``shape``."""
        extended = self._extended(terms, shape) if len(terms) > 1 else None
        if extended is not None:
            return extended
        total: dict[int, Coefficient] = {}
        joined = 0
        for term, factor in terms.items():
            if not factor and self.finite[term]:
                continue
            joined |= self._traits[term] | (0 if factor else _VANISHED)
            if factor == 1 and not total:
                total = dict(self.terms(term))
                continue
            for atom, coefficient in self.terms(term):
                change = factor if coefficient == 1 else coefficient if factor == 1 else coefficient * factor
                if atom in total:
                    change += total[atom]
                    joined |= 0 if change else _VANISHED
                total[atom] = change
        if joined & _SOME_ELEMENTS:
            before, total = total, self._joined_totals(self._single_elements(total))
            joined |= 0 if total is before else SOME_TERMS
        if joined & SOME_TERMS:
            total = self._joined_parts(total)
        if joined & _MOVED:
            total = self._moved_starts(total)
        if joined & _STORED:
            total = self._joined_wholes(total)
        atoms = sorted(total)
        vanished = joined and not all(total.values())
        if vanished:
            rest = [atom for atom in atoms if total[atom]]
            atoms = [atom for atom in atoms if total[atom] or not (self.finite[atom] or self._covered(atom, rest))]
        if len(atoms) == 1 and total[atoms[0]] == 1 and self.shape(atoms[0]) == shape:
            return atoms[0]
        if atoms and self._are_single(atoms):
            if any(self.all[atom].shape for atom in atoms):
                return self.linear(self._views(total.items(), ()), shape)
            if shape and elements(shape) == 1 and atoms != [ONE]:
                return self.view(self.linear(total, ()), shape)
        factors = tuple([_once(total[atom]) for atom in atoms])
        number = self._number(LINEAR, factors, tuple(atoms), shape)
        self._traits[number] |= _VANISHED if vanished else 0
        return number

    def _extended(self, terms: Mapping[int, Coefficient], shape: Shape) -> int | None:
        """A long sum and new terms behind it, as a residual stream has; None for other sums."""
        longest = max(terms, key=lambda term: len(self.all[term].operands))
        op, factors, operands, _ = self.all[longest]
        if op != LINEAR or len(operands) <= _FEW or terms[longest] != 1 or self.joinable(terms):
            return None
        pairs = [(term, factor) for term, factor in terms.items() if term != longest]
        rest = sorted((atom, factor * change) for term, factor in pairs for atom, change in self.terms(term))
        atoms, changes = [atom for atom, _ in rest], [change for _, change in rest]
        if not all(changes) or any(atom >= behind for atom, behind in pairwise([operands[-1], *atoms])):
            return None
        coefficients = (*cast(tuple[Coefficient, ...], factors), *changes)
        return self._number(LINEAR, coefficients, (*operands, *atoms), shape, (longest, *atoms))

    def _covered(self, atom: int, terms: Iterable[int]) -> bool:
        """Return whether a value is a number wherever all terms are; only boxes.py knows such values."""
        return False

    def _joined_wholes(self, terms: dict[int, Coefficient]) -> dict[int, Coefficient]:
        """Terms in which single stored whole numbers are one, absent beside others where zero."""
        stored = {atom: self.arrays[atom] for atom in terms if self._counts[atom] == 1 and atom in self.arrays}
        wholes = {atom: array for atom, array in stored.items() if array.dtype.kind == "i"}
        types = {array.dtype for array in wholes.values()}
        if len(types) != 1 or (len(terms) == 1 and 1 in terms.values()) or (make := self.stored()) is None:
            return terms
        rest = {atom: factor for atom, factor in terms.items() if atom not in wholes}
        total, type = Fraction(sum(int(wholes[atom].item()) * terms[atom] for atom in wholes)), types.pop()
        if total.denominator != 1 or abs(total) >= int(np.iinfo(type).max):
            return terms
        if total or not rest:
            shape = max((array.shape for array in wholes.values()), key=len)
            rest[make(np.full(shape, int(total), type))] = 1
        return rest

    def _moved_starts(self, terms: Mapping[int, Coefficient]) -> dict[int, Coefficient]:
        """Terms in which a state plus the sum of all changes is the state after all micro-steps.

        s + x, where x begins at 0 and each micro-step takes x to a x + b s + r, begins at s and goes to a x + r where
        b = a - 1, if r depends neither on x nor on s."""
        result = dict(terms)
        for atom in [atom for atom in terms if self.all[atom].op == ITERATED and terms[atom] == 1]:
            _, axis, (number, start, initial), shape = self.all[atom]
            step = dict(self.terms(number))
            if self.uniform(initial) != 0 or start not in step:
                continue
            rate = step.pop(start)
            states = (term for term, change in step.items() if change == rate - 1 and result.get(term) == 1)
            state = next((term for term in states if self.all[term].op == INITIAL and self.shape(term) == shape), None)
            moving = None if state is None else self._numbers.get(self.all[state]._replace(op=STATE))
            if state is None or moving is None:
                continue
            del step[state]
            if self.depend(step, {start, state, moving}):
                continue
            del result[atom], result[state]
            whole = self.linear(step | {moving: rate}, shape)
            result[self.iterated(whole, moving, str(axis), state)] = 1
        return result

    def depend(self, numbers: Iterable[int], leaves: Collection[int]) -> bool:
        """Return whether some expressions are made of some leaves."""
        lowest = min(leaves, default=0)  # what is made of an expression has a larger number

        def above(number: int) -> Iterator[int]:
            return (operand for operand in self.all[number].operands if operand >= lowest)

        return any(number in leaves for number in walk(numbers, above))

    def scaled(self, number: int, factor: Coefficient) -> int:
        """The multiple of an expression."""
        if factor == 1:
            return number
        return self.elementwise(lambda values: self.linear({values[0]: factor}, self.shape(values[0])), [number])

    def added(self, operands: Sequence[int], signs: Sequence[int] | None = None) -> int:
        """The sum of operands with ``signs``."""
        key = "sum", tuple(operands), tuple(signs or ())
        result = self._results.get(key)
        if result is None:
            terms: dict[int, Coefficient] = {}
            for operand, sign in zip(operands, signs or [1] * len(operands)):
                terms[operand] = terms.get(operand, 0) + sign
            result = self._results[key] = self.linear(terms, broadcast(map(self.shape, operands)))
        return result

    def sum_of(self, numbers: Sequence[int]) -> int:
        """The sum of values of a common shape; single elements are added as numbers."""
        shape = self.shape(numbers[0])
        if elements(shape) == 1:
            return self.view(self.added([self.view(number, ()) for number in numbers]), shape)
        return self.elementwise(self.added, numbers)

    # --- products ---

    def factors(self, number: int) -> Iterator[tuple[int, int]]:
        """The factors of an expression as a product, with exponents."""
        expression = self.all[number]
        if expression.op == PRODUCT:
            return zip(expression.operands, expression.attributes)  # type: ignore[call-overload,no-any-return]
        return iter(((number, 1),))

    def product(self, operands: Sequence[int], exponents: Sequence[int]) -> int:
        """The product of powers of operands."""
        key = "product", tuple(operands), tuple(exponents)
        result = self._results.get(key)
        if result is None:
            multiple = self._multiple(operands, exponents) if len(operands) == 2 and not self.counts else None
            result = self._results[key] = self._powers(operands, exponents) if multiple is None else multiple
        return result

    def _multiple(self, operands: Sequence[int], exponents: Sequence[int]) -> int | None:
        """The product of a value and a power of a number; None for other products, and for zero."""
        for number, by, power in zip(operands, reversed(operands), reversed(exponents)):
            value = self.uniform(by) if exponents[operands.index(number)] == 1 else None
            if value:
                scale = value**power if power > 0 else Fraction(1) / value**-power
                return self.linear({number: scale}, broadcast(map(self.shape, operands)))
        return None

    def _times_zero(self, operands: Sequence[int], exponents: Sequence[int], shape: Shape) -> int:
        """A product that is zero where all operands are numbers; of single numbers, whatever the shape."""
        values = [self.uniform(operand) for operand in operands]
        single = [
            self.constant(value, ()) if value is not None else self.view(operand, ())
            for operand, value in zip(operands, values) if value is not None or self.elements(operand) == 1
        ]  # fmt: skip
        if len(single) < len(operands) or elements(shape) is None:
            return self._number("times zero", tuple(exponents), tuple(operands), shape)
        return self.linear({self._number("times zero", tuple(exponents), tuple(single), ()): 1}, shape)

    def _powers(self, operands: Sequence[int], exponents: Sequence[int]) -> int:
        factors: dict[int, int] = {}
        coefficient: Coefficient = 1
        shape = broadcast(self.shape(operand) for operand in operands)
        numbers = all(self.finite[operand] and (power > 0 or self._never_zero(operand))
                      for operand, power in zip(operands, exponents))  # fmt: skip
        for operand, exponent in zip(operands, exponents):
            scale, atom = self._scale(operand)
            if not scale and (exponent < 0 or not numbers):
                return self._times_zero(operands, exponents, shape)
            if scale != 1:
                coefficient *= scale**exponent if exponent > 0 else Fraction(1) / scale**-exponent
            for factor, power in self.factors(atom) if atom != ONE else ():
                if exponent < 0 and not self.is_exponential(factor):
                    factor, power = self._number(INVERSE, None, (factor,), self.shape(factor)), -power
                factors[factor] = factors.get(factor, 0) + power * exponent
        self._cancel_counts(factors)
        gone = [factor for factor, power in factors.items() if not power and self.is_exponential(factor)]
        gone = [self.all[self.root(factor)].operands[0] for factor in gone if not self.finite[factor]]
        if not all(self._covered(exponent, factors) for exponent in gone):
            return self._times_zero(operands, exponents, shape)
        powers = sorted((factor, power) for factor, power in factors.items() if power)
        if not coefficient or not powers:
            return self.constant(coefficient, shape)
        if len(powers) == 1 and powers[0][1] == 1:
            return self.linear({powers[0][0]: coefficient}, shape)
        within = broadcast(self.shape(factor) for factor, _ in powers)
        number = self._number(
            PRODUCT, tuple(power for _, power in powers), tuple(factor for factor, _ in powers), within
        )
        return self.linear({number: coefficient}, shape)

    def is_exponential(self, number: int) -> bool:
        """Return whether an expression is an exponential, which is never zero."""
        return self.all[self.root(number)].op == EXP

    def _never_zero(self, number: int) -> bool:
        """Return whether an expression is a number, or a multiple of a count that is kept from zero."""
        return self.all[self.bare(number)].op in ("one", COUNTED)

    def _cancel_counts(self, factors: dict[int, int]) -> None:
        """Cancel a count with the count to divide by, beside a weighted sum: the sum is zero where the count is."""
        for divisor in [factor for factor in factors if self.all[factor].op == INVERSE]:
            counted = self.all[divisor].operands[0]
            if self.all[counted].op != COUNTED:
                continue
            count = self.all[counted].operands[0]
            axes = self.counts.get(self.bare(count), NOWHERE)
            if count in factors and any(self._weighted(factor, axes) for factor in factors if factor != count):
                common = min(factors[divisor], factors[count])
                factors[divisor], factors[count] = factors[divisor] - common, factors[count] - common

    def _weighted(self, number: int, axes: frozenset[str]) -> bool:
        """Return whether an expression is a sum of multiples of a count, of members along ``axes`` alone."""
        op, attributes, operands, _ = self.all[self.root(number)]
        if op == REDUCED:
            return attributes[1] <= axes and self._weighted(operands[0], axes)  # type: ignore[index]
        summed = [self.counts.get(self.bare(factor)) for factor in operands if op == PRODUCT]
        return any(within is not None and within <= axes for within in summed)

    def note_count(self, number: int, axes: Iterable[str]) -> None:
        """Note the sums of a count along any of some axes."""
        self.counts |= {self.bare(total): within for within, total in self.sums(number, axes).items()}

    def undivided(self, number: int) -> int:
        """An expression without the coefficient, and without the counts that divide it."""
        bare = self.bare(number)
        divisors = [factor for factor, _ in self.factors(bare) if self.all[factor].op == INVERSE]
        counts = [factor for factor in divisors if self._never_zero(self.all[factor].operands[0])]
        rest = [pair for pair in self.factors(bare) if pair[0] not in counts]
        return self.bare(self.product(*zip(*rest))) if counts and rest else bare

    def _scale(self, number: int) -> tuple[Coefficient, int]:
        """An expression as a coefficient times an expression; the first coefficient of the latter is 1."""
        if number not in self._scales:
            self._scales[number] = self._scaled(number)
        return self._scales[number]

    def _scaled(self, number: int) -> tuple[Coefficient, int]:
        expression = self.all[number]
        if expression.op == VIEW:
            factor, atom = self._scale(expression.operands[0])
            whole = self._counts[atom] == self._counts[number] is not None
            return (factor, self.view(atom, expression.shape)) if whole else (1, number)
        if expression.op != LINEAR:
            return 1, number
        if not expression.operands:
            return 0, ONE
        leading = next((factor for _, factor in self.terms(number) if factor), 0)
        if not leading or (leading == 1 and len(expression.operands) > 1):
            return 1, number
        if len(expression.operands) == 1:
            return leading, expression.operands[0]
        return leading, self.linear({number: Fraction(1) / leading}, expression.shape)

    def counted(self, number: int) -> int:
        """A count to divide by: 1 where the count is zero.

        A multiple of the count gives the same multiple of the result, because the dividend is zero with the count."""
        scale, atom = self._scale(number)
        return self.scaled(self._number(COUNTED, None, (self.root(atom),), self.shape(number)), scale)

    def has_factor(self, number: int, factor: int) -> bool:
        """Return whether an expression is a multiple of another of one element, in each of the ranges of a flat
        value."""
        roots = [self._whole(root) for root, _, _ in self.apart(number) if self.uniform(root) != 0]
        return all(any(of == factor and power > 0 for of, power in self.factors(root)) for root in roots)

    def _whole(self, number: int) -> int:
        """The whole value of a part, without the coefficient."""
        root = self.root(self._scale(number)[1])
        return self._whole(self.all[root].operands[0]) if self.all[root].op == TAKE else root

    def bare(self, number: int) -> int:
        """An expression without the coefficient, in the shape of the root."""
        inner = self._scale(self.root(number))[1]
        return inner if inner == number else self.bare(inner)

    # --- elements in row-major order ---

    def view(self, number: int, shape: Shape) -> int:
        """The same elements in another shape."""
        expression = self.all[number]
        if expression.shape == shape:
            return number
        if expression.op == VIEW:
            return self.view(expression.operands[0], shape)
        if not self._ranged[number] and self._counts[number] != 1:
            return self.linear(dict(self.terms(number)), shape)
        value = self.uniform(number)
        if value is not None:
            return self.linear({ONE: value}, shape)
        return self._number(VIEW, None, (number,), shape)

    def spread(self, number: int, shape: Shape) -> int:
        """The same elements in another shape, a single one in all elements."""
        more = self._counts[number] == 1 != elements(shape)
        return self.linear({number: 1}, shape) if more else self.view(number, shape)

    def root(self, number: int) -> int:
        """The expression under a view."""
        expression = self.all[number]
        return expression.operands[0] if expression.op == VIEW else number

    def pieces(self, number: int) -> list[Piece]:
        """The ranges in a flat value."""
        root = self.root(number)
        expression = self.all[root]
        if expression.op == FLAT:
            return [(inner, *part) for inner, part in zip(expression.operands, expression.attributes)]  # type: ignore[call-overload]
        return [(root, 0, self.elements(root) or 0)]

    def ranges(self, number: int) -> tuple[tuple[int, int], ...]:
        """The ranges in a flat value; () for any other value."""
        expression = self.all[number]
        return cast(tuple[tuple[int, int], ...], expression[1]) if expression[0] == FLAT else ()

    def side_by_side(self, rows: Sequence[Sequence[int]]) -> bool:
        """Return whether the values of all rows have as many elements, and no two neighbours would be joined."""
        counts = {tuple(map(self._counts.__getitem__, row)) for row in rows}
        apart = all(number != behind for row in rows for number, behind in pairwise(row))
        return apart and len(counts) == 1 and all(self._ranged[number] for row in rows for number in row)

    def pad(self, number: int) -> None:
        """Note rows and constant rows behind one another."""
        self.padded.add(number)
        self._direct[number] = False

    def apart(self, number: int) -> list[Piece]:
        """The ranges in a flat value, with rows and constant rows apart."""
        result: list[Piece] = []
        for root, start, stop in self.pieces(number):
            if root in self.padded:
                whole = self.flat(piece for row in self.all[root].operands for piece in self.pieces(row))
                result += self.apart(self.flat(self.cut(whole, start, stop)))
            else:
                result.append((root, start, stop))
        return result

    def flat(self, pieces: Iterable[Piece]) -> int:
        """Ranges of elements in a row, as a value of rank 1."""
        joined: list[Piece] = []
        for number, start, stop in pieces:
            if start == stop:
                continue
            if not self._ranged[number]:
                value, length = self.narrow(number), stop - start
                if joined and not self._ranged[joined[-1][0]] and self.narrow(joined[-1][0]) == value:
                    length += joined.pop()[2]
                plain = length == 1 and self.uniform(value) is None
                joined.append((self.root(value) if plain else self.linear({value: 1}, (length,)), 0, length))
            elif not self._direct[number] and self.all[number].op in (FLAT, VIEW):
                joined.extend(self.cut(number, start, stop))
            elif joined and joined[-1][0] == number and joined[-1][2] == start:
                joined[-1] = number, joined[-1][1], stop
            else:
                joined.append((number, start, stop))
        if not joined:
            return self.linear({}, (0,))
        if len(joined) == 1:
            ((number, start, stop),) = joined
            if start == 0 and stop == self.elements(number):
                return self.view(number, (stop,))
            return self._number(FLAT, ((start, stop),), (number,), (stop - start,))
        roots, starts, stops = zip(*joined)
        return self._number(FLAT, tuple(zip(starts, stops)), roots, (sum(stops) - sum(starts),))

    def cut(self, number: int, start: int, stop: int) -> list[Piece]:
        """Elements ``start`` to ``stop`` of a value, as pieces."""
        result, position = [], 0
        for root, begin, end in self.pieces(number):
            low, high = max(start, position), min(stop, position + end - begin)
            if low < high:
                result.append((root, begin + low - position, begin + high - position))
            position += end - begin
        return result

    def split(self, number: int, bounds: Sequence[int]) -> list[list[Piece]]:
        """The pieces of a value between each two of ascending ``bounds``, which begin at 0."""
        result: list[list[Piece]] = [[] for _ in pairwise(bounds)]
        index, position = 0, 0
        for root, begin, end in self.pieces(number):
            while begin < end and index < len(result):
                size = min(end - begin, bounds[index + 1] - position)
                if size:
                    result[index].append((root, begin, begin + size))
                begin, position = begin + size, position + size
                index += position == bounds[index + 1]
        return result

    def elementwise(self, make: Callable[[Sequence[int]], int], operands: Sequence[int]) -> int:
        """The result of an elementwise operator; ``make``: applies the operator to operands that broadcast.

        Flat operands are combined range by range, and views of a common shape under the view."""
        if self._aligned(operands):
            return make(operands)
        large = [operand for operand in operands if self.ranged(operand)]
        shape = broadcast(self.shape(operand) for operand in operands)
        count = elements(shape)
        if not large and count == 1:
            return self.view(make([self.narrow(operand) for operand in operands]), shape)
        if not large or count is None or any(self.shape(operand) != shape for operand in large):
            if broadcast(self.shape(operand) for operand in large) == shape:
                operands = [operand if operand in large else self.narrow(operand) for operand in operands]
            return make(operands)
        if any(self.all[operand].op == FLAT for operand in large):
            return self._by_ranges(make, operands, count)
        within = self._common(large, count)
        inner = [self.view(operand, within) if operand in large else self.narrow(operand) for operand in operands]
        return make(inner) if within == shape else self.view(self.elementwise(make, inner), shape)

    def _aligned(self, operands: Iterable[int]) -> bool:
        """Return whether all operands are scalars or of a common shape, and as they are in their expressions."""
        common: Shape = ()
        for operand in operands:
            shape = self.all[operand].shape
            if not self._direct[operand] or (shape and common and shape != common):
                return False
            if shape != ():
                if not self._ranged[operand]:
                    return False
                common = shape
        return True

    def ranged(self, number: int) -> bool:
        """Return whether a value has several elements, or is an element of a flat value."""
        return self._ranged[number]

    def in_common_shape(self, numbers: Sequence[int]) -> Sequence[int]:
        """Values of equal size in the shape of their sum, beside values of one element."""
        large = [number for number in numbers if self._ranged[number]]
        counts = set(map(self._counts.__getitem__, large))
        if len(counts) != 1 or None in counts:
            return numbers
        shape = self._common(large, cast(int, counts.pop()))
        return [self.view(number, shape) if self._ranged[number] else number for number in numbers]

    def _common(self, numbers: Iterable[int], count: int) -> Shape:
        """The shape in which expressions of equal size are combined: of all roots, without dimensions of length 1 where
        only these differ, or flat."""
        shapes = {self.shape(self.root(number)) for number in numbers}
        if len(shapes) > 1:
            shapes = {tuple(size for size in shape or () if size != 1) for shape in shapes}
        return shapes.pop() if len(shapes) == 1 else (count,)

    def narrow(self, number: int) -> int:
        """A scalar for a value with a single element, or with an equal number in all elements."""
        if self._counts[number] != 1:
            return self.linear(self._views(self.terms(number), ()), ())
        value = self.uniform(number)
        return self.view(number, ()) if value is None else self.constant(value)

    def _by_ranges(self, make: Callable[[Sequence[int]], int], operands: Sequence[int], length: int) -> int:
        rows: list[list[Piece] | None] = []
        cuts = {0, length}
        for operand in operands:
            if not self.ranged(operand):
                rows.append(None)
                continue
            pieces = self.apart(operand)
            rows.append(pieces)
            position = 0
            for _, start, stop in pieces:
                position += stop - start
                cuts.add(position)
        bounds = sorted(cuts)
        columns = [None if row is None else self._segments(row, bounds) for row in rows]
        narrow = [self.narrow(operand) if row is None else operand for row, operand in zip(rows, operands)]
        result: list[Piece] = []
        for number, (low, high) in enumerate(pairwise(bounds)):
            parts = [None if column is None else column[number] for column in columns]
            alike = self._alike_parts(parts)
            if alike is not None:
                values = [operand if part is None else part[0] for part, operand in zip(parts, narrow)]
                result.append((self.elementwise(make, values), *alike))
                continue
            ranged = [part for part in parts if part is not None and self._ranged[part[0]]]
            counts = {self.elements(root) or 0 for root, _, _ in ranged}
            aligned = len({part[1:] for part in ranged}) == 1 and len(counts) == 1
            before = min((start for _, start, _ in ranged), default=0)
            start, length = 0, high - low
            shape: Shape = ()
            if aligned:
                (_, start, _), length = ranged[0], counts.pop()
                shape = () if length == 1 else self._common([root for root, _, _ in ranged], length)
            elif ranged:  # the longest ranges that stand side by side
                start, length = before, min((self.elements(root) or 0) - at for root, at, _ in ranged) + before
            values = []
            for part, operand in zip(parts, narrow):
                if part is None or (not self._ranged[part[0]] and (ranged or length == 1)):
                    values.append(operand if part is None else self.narrow(part[0]))
                elif aligned:
                    values.append(self.view(part[0], shape))
                else:
                    values.append(self.flat([(part[0], part[1] - before, part[1] - before + length)]))
            result.append((self.elementwise(make, values) if aligned else make(values), start, start + high - low))
        return self.flat(result)

    def _alike_parts(self, parts: Sequence[Piece | None]) -> tuple[int, int] | None:
        """The range of all parts, of values of one shape with several elements; None for other parts."""
        spans, shapes = set(), set()
        for part in parts:
            if part is not None:
                if not self._ranged[part[0]]:
                    return None
                spans.add(part[1:])
                shapes.add(self.all[part[0]].shape)
        return spans.pop() if len(spans) == len(shapes) == 1 and elements(shapes.pop()) != 1 else None

    @staticmethod
    def _segments(row: Sequence[Piece], bounds: Sequence[int]) -> list[Piece]:
        """The pieces, cut at all bounds."""
        result, position, pieces = [], 0, iter(row)
        root, start, stop = next(pieces)
        for low, high in pairwise(bounds):
            if low - position >= stop - start:
                position += stop - start
                root, start, stop = next(pieces)
            result.append((root, start + low - position, start + high - position))
        return result

    # --- sums of elements ---

    def total(self, number: int, shape: Shape = ()) -> int:
        """The sum of all elements."""
        return self.view(self._total(self.apart(number)), shape)

    def _total(self, pieces: Iterable[Piece]) -> int:
        terms: dict[int, Coefficient] = {}
        for piece in pieces:
            single = self._element(*piece[:2]) if piece[2] - piece[1] == 1 else None
            for atom, factor in self._total_terms(*piece) if single is None else ((single, 1),):
                terms[atom] = terms.get(atom, 0) + factor
        return self.linear(terms, ())

    def _element(self, root: int, at: int) -> int:
        """An element of a value."""
        return self.view(self.flat([(root, at, at + 1)]), ())

    def _total_terms(self, root: int, start: int, stop: int) -> Iterator[tuple[int, Coefficient]]:
        count, size = stop - start, self.elements(root)
        if size == 1:
            yield self.view(root, ()), count
            return
        ranges = () if (start, stop) == (0, size) else ((start, stop),)
        for atom, factor in self.summands(root):
            if self.elements(atom) == 1:
                yield self.view(atom, ()), factor * count
            elif self.all[self.root(atom)].op == FLAT:
                for piece in self.cut(atom, start, stop):
                    yield from ((part, factor * times) for part, times in self._total_terms(*piece))
            else:
                yield self._number(TOTAL, ranges, (self.root(atom),), ()) if ranges else self.whole_total(atom), factor

    def whole_total(self, atom: int) -> int:
        """The sum of all elements of a term: exponentials of a single element stand in front of the sum."""
        pairs = [*self.factors(self.root(atom))]
        front = [pair for pair in pairs if self.elements(pair[0]) == 1 and self.is_exponential(pair[0])]
        if not front:
            return self._number(TOTAL, (), (self.root(atom),), ())
        inner = self.product(*zip(*(pair for pair in pairs if pair not in front)))
        return self.product([self.total(inner), *(factor for factor, _ in front)], [1, *(power for _, power in front)])

    def summands(self, root: int) -> Sequence[tuple[int, Coefficient]]:
        """The terms of a value to be summed: values of a single element, and of as many elements as the value."""
        parts, size = [*self.terms(root)], self.elements(root)
        fit = size is not None and all(self.elements(atom) in (1, size) for atom, _ in parts)
        return parts if fit or all(self.shape(atom) in ((), self.shape(root)) for atom, _ in parts) else [(root, 1)]

    def _single_elements(self, terms: dict[int, Coefficient]) -> dict[int, Coefficient]:
        """Terms in which several elements of an expression are sums over ranges of the expression."""
        rows: dict[int, list[Piece]] = {}
        for atom in terms:
            if self.elements(atom) == 1 and self.all[self.root(atom)].op == FLAT:
                rows.setdefault(self.pieces(atom)[0][0], []).append((atom, *self.pieces(atom)[0][1:]))
        if not rows:
            return terms
        result = dict(terms)
        summed = Counter(self.all[atom].operands[0] for atom in terms if self.all[atom].op == TOTAL)
        """Value -> the sums over ranges, and single elements."""
        parts = {root: [self.root(atom) for atom, _ in self.summands(root)] for root in rows}
        for root, row in rows.items():
            summed.update(parts[root] * len(row))
        for root, row in rows.items():
            for atom, start, stop in row if any(summed[part] > 1 for part in parts[root]) else ():
                factor = result.pop(atom)
                for part, change in self._total_terms(root, start, stop):
                    result[part] = result.get(part, 0) + factor * change
        return result

    def _joined_totals(self, terms: dict[int, Coefficient]) -> dict[int, Coefficient]:
        """Sums over elements of an expression, joined by the coefficient of each element."""
        totals = [row for row in map(self.all.__getitem__, terms) if row.op == TOTAL]
        some = all(row.attributes and row.attributes[-1][1] - row.attributes[0][0] > 1 for row in totals)  # type: ignore[index]
        if some and len({row.operands for row in totals}) == len(totals):
            return terms
        result: dict[int, Coefficient] = {}
        steps: dict[int, dict[int, Coefficient]] = {}
        count: Counter[int] = Counter()
        signs: dict[int, set[bool]] = {}
        for atom, factor in terms.items():
            if self.all[atom].op == TOTAL:
                (root,) = self.all[atom].operands
                count[root] += 1
                signs.setdefault(root, set()).add(factor > 0)
        for atom, factor in terms.items():
            op, spans, operands, _ = self.all[atom]
            joins = op == TOTAL and factor and (count[operands[0]] > 1 or not spans)
            if not joins or (len(signs[operands[0]]) > 1 and not self.finite[operands[0]]):
                result[atom] = factor
                continue
            changes = steps.setdefault(operands[0], {})
            for start, stop in spans or ((0, self.elements(operands[0])),):  # type: ignore[attr-defined]
                changes[start] = changes.get(start, 0) + factor
                changes[stop] = changes.get(stop, 0) - factor
        for root, changes in steps.items():
            for factor, parts in ranges_by_coefficient(changes).items():
                if parts != ((0, self.elements(root)),):
                    result[self._number(TOTAL, parts, (root,), ())] = factor
                    continue
                for whole, change in self._total_terms(root, *parts[0]):
                    result[whole] = result.get(whole, 0) + factor * change
        for atom in [atom for atom in result if self.all[atom].op == TOTAL]:
            spans, (root,) = self.all[atom].attributes, self.all[atom].operands
            if len(spans) == 1 and spans[0][1] - spans[0][0] == 1:  # type: ignore[arg-type,index]
                single = self._element(root, spans[0][0])  # type: ignore[index]
                result[single] = result.pop(atom) + result.get(single, 0)
        return result

    def _joined_parts(self, terms: Mapping[int, Coefficient]) -> dict[int, Coefficient]:
        """Parts of the terms of a sum, also elements and beside factors, joined by the coefficient of each position."""
        result = dict(terms)
        sums: dict[tuple[int, int, Shape, Runs, Factors, Shape], dict[tuple[Part, ...], int]] = {}
        for atom in terms:
            part, beside = self._part_of_sum(self.root(atom))
            within, spans = self._spans(part)
            op, attributes, operands, _ = self.all[within]
            if op == PARTED:
                core, indices = cast(tuple[int, tuple[Part, ...]], attributes)
                shape = self.shape(part if beside else atom)
                sums.setdefault((operands[0], core, shape, spans, beside, self.shape(atom)), {})[indices] = atom
        for (number, core, shape, spans, beside, after), atoms in sums.items():
            if len(atoms) == 1 and all(terms[atom] for atom in atoms.values()):
                continue
            rows = {parts: result.pop(atom) for parts, atom in atoms.items()}
            finite = self.finite[number] and all(self.finite[factor] for factor, _ in beside)
            if len({factor > 0 for factor in rows.values()}) == 1 or finite:
                for label in {label for parts in rows for label, _, _ in parts}:
                    rows = _joined_along(label, rows)
            for parts, factor in rows.items():
                inner = self._number(PARTED, (core, parts), (number,), self.shape(number)) if parts else number
                if not parts and self.all[number].op == TOTAL:
                    inner = self.whole_total(self.all[number].operands[0])
                inner = self.view(self.flat((inner, *span) for span in spans) if spans else inner, shape)
                whole = self.view(self.product(*zip((inner, 1), *beside)), after) if beside else inner
                for atom, change in self.terms(whole) if beside else ((whole, 1),):
                    result[atom] = result.get(atom, 0) + factor * change
        return result

    def _spans(self, number: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The only value in a flat value, and the ranges; any other value under a view, without ranges."""
        root = self.root(number)
        row = self.all[root]
        return (row.operands[0], self.ranges(root)) if row.op == FLAT and len(row.operands) == 1 else (root, ())

    def _part_of_sum(self, number: int) -> tuple[int, Factors]:
        """The only factor with some of the terms of a sum, and the other factors; else the value alone."""
        pairs = tuple(self.factors(number)) if self._traits[number] & SOME_TERMS else ()
        parts = [factor for factor, power in pairs if power == 1 and self.all[self._spans(factor)[0]].op == PARTED]
        return (parts[0], tuple(pair for pair in pairs if pair[0] != parts[0])) if len(parts) == 1 else (number, ())

    # --- extremes of elements ---

    def extreme(self, op: str, numbers: Iterable[int], shape: Shape = ()) -> int:
        """The largest or the smallest of all elements; of flags, whether any is set or all are."""
        return self._extreme(op, (piece for number in numbers for piece in self.pieces(number)), shape)

    def _extreme(self, op: str, pieces: Iterable[Piece], shape: Shape = ()) -> int:
        ranges: dict[int, list[tuple[int, int]]] = {}
        identity = -1
        for root, start, stop in pieces:
            nested = self.all[self.root(root)].op == op
            for within, low, high in self._extreme_parts(op, root) if nested else ((root, start, stop),):
                if self.all[within].op == _IDENTITY[op]:
                    identity = within
                elif low < high:
                    ranges.setdefault(within, []).append((low, high))
        if not ranges and identity >= 0 and self.elements(identity) == 1:
            return self.view(identity, shape)
        parts = []
        for root, spans in sorted(ranges.items()):
            runs = merged(spans)
            parts.append((root, () if runs == ((0, self.elements(root)),) else runs))
        if len(parts) == 1 and self.elements(parts[0][0]) == 1:
            return self.view(parts[0][0], shape)
        number = self._number(op, tuple(spans for _, spans in parts), tuple(root for root, _ in parts), ())
        return self.view(number, shape)

    def _extreme_parts(self, op: str, number: int) -> list[Piece]:
        """The ranges behind an extreme; [] for any other value."""
        expression = self.all[self.root(number)]
        if expression.op != op:
            return []
        return [
            (root, *part)
            for root, spans in zip(expression.operands, expression.attributes)  # type: ignore[call-overload]
            for part in spans or ((0, self.elements(root)),)
        ]

    def any_set(self, number: int) -> int | None:
        """Return whether a count of flags is above zero, as a flag; None for other numbers."""
        flags = self._flags(number)
        return self._extreme(LARGEST, flags) if flags else None

    def _flags(self, number: int) -> list[Piece] | None:
        """The flags behind a count, or behind the largest of flags; None for other numbers."""
        op, attributes, operands, _ = self.all[number]
        inner: list[tuple[int, Callable[[int], int]]] = []
        if op == "constant" and not any(attributes[1]):  # type: ignore[index]
            return []
        if op == "cast" and attributes[0] == "bool":  # type: ignore[index]
            return [(operands[0], 0, self.elements(operands[0]) or 0)]
        if op == VIEW or (op == LINEAR and all(factor > _FLAG for _, factor in self.terms(number))):
            inner = [(operand, lambda flag: flag) for operand in operands]
        elif op == REDUCED and attributes[0] in ("sum", LARGEST):  # type: ignore[index]
            inner = [(operands[0], lambda flag: self.reduced(flag, attributes[1], "max"))]  # type: ignore[index]
        elif op == "on member":
            inner = [(operands[0], lambda flag: self.on_member(flag, dict(attributes)))]  # type: ignore[call-overload]
        elif op in (LARGEST, FLAT):
            pieces = self.pieces(number) if op == FLAT else self._extreme_parts(op, number)
            return self._flags_of_pieces(pieces)
        else:
            return None
        result: list[Piece] = []
        for operand, wrap in inner:
            actual = self._flags(operand)
            if actual is None:
                return None
            result += [(wrap(flag), start, stop) for flag, start, stop in actual]
        return result

    def _flags_of_pieces(self, pieces: Iterable[Piece]) -> list[Piece] | None:
        result: list[Piece] = []
        for root, start, stop in pieces:
            actual = self._flags(root)
            if actual is None or (len(actual) != 1 and (start, stop) != (0, self.elements(root))):
                return None
            result += [(actual[0][0], start, stop)] if self.elements(root) == actual[0][2] else actual
        return result

    # --- members ---

    def size(self, axes: Iterable[str]) -> int:
        """The number of members along axes together."""
        return prod(self.extents[axis] for axis in axes)

    def reduced(self, number: int, axes: Iterable[str], how: str) -> int:
        """The reduction over the members along ``axes``: sum, mean, max or min."""
        axes = frozenset(axis for axis in axes if self.extents[axis] > 1)
        how = EXTREMES.get(how, how)
        key = how, axes, number
        result = self._reduced.get(key)
        if result is None and how == "mean":
            result = self.scaled(self.reduced(number, axes, "sum"), Fraction(1, self.size(axes)))
        elif result is None:
            result = self._reduction(number, axes, how)
        self._reduced[key] = result
        return result

    def _reduction(self, number: int, axes: frozenset[str], how: str) -> int:
        live = axes & self.varies[number]
        if how == "sum" and live != axes:
            return self.scaled(self.reduced(number, live, how), self.size(axes - live))
        if not live:
            return number
        op, attributes, operands, shape = self.all[number]
        if op == VIEW:
            return self.view(self.reduced(operands[0], live, how), shape)
        if op == FLAT:
            return self.flat((self.reduced(root, live, how), low, high) for root, low, high in self.pieces(number))
        if op == how:
            parts = self._extreme_parts(op, number)
            return self._extreme(op, ((self.reduced(root, live, how), low, high) for root, low, high in parts))
        if op == REDUCED and attributes[0] == how:  # type: ignore[index]
            return self._bound(how, live | attributes[1], operands[0])  # type: ignore[index]
        if how == "sum":
            if op == LINEAR:
                terms: dict[int, Coefficient] = {}
                for atom, factor in self.terms(number):
                    inner = self.reduced(atom, live, how)
                    terms[inner] = terms.get(inner, 0) + factor
                return self.linear(terms, shape)
            if op == TOTAL:
                root = self.reduced(operands[0], live, how)
                spans = attributes or ((0, self.elements(root)),)
                return self._total((root, start, stop) for start, stop in spans)  # type: ignore[attr-defined]
            if op == PRODUCT:
                return self._reduced_product(number, live)
            if op == CHOICE and not self.varies[operands[0]] & live:
                chosen = [operands[0], *(self.reduced(operand, live, "mean") for operand in operands[1:])]
                return self.scaled(applied(self, op, attributes, chosen), self.size(live))
        return self._bound(how, live, number)

    def _reduced_product(self, number: int, axes: frozenset[str]) -> int:
        """Factors that are equal on all members stand in front of the sum."""
        _, exponents, operands, shape = self.all[number]
        pairs = list(zip(operands, exponents))  # type: ignore[call-overload]
        varying = [(factor, power) for factor, power in pairs if self.varies[factor] & axes]
        if len(varying) == len(pairs):
            return self._nested_sum(pairs, axes) or self._bound("sum", axes, number)
        common = [(factor, power) for factor, power in pairs if not self.varies[factor] & axes]
        inner = self.reduced(self.product(*zip(*varying)), axes, "sum")
        whole = self.product([inner, *(factor for factor, _ in common)], [1, *(power for _, power in common)])
        return self.linear({whole: 1}, shape)

    def _nested_sum(self, pairs: Sequence[tuple[int, int]], axes: frozenset[str]) -> int | None:
        """A sum of factors times a sum over more members, along which the factors are alike: one sum of products."""
        sums = [(factor, power) for factor, power in pairs if self.all[factor].op == REDUCED and power == 1]
        over = [self.all[factor].attributes for factor, _ in sums]
        if len(sums) != 1 or over[0][0] != "sum":  # type: ignore[index]
            return None
        rest, more = [pair for pair in pairs if pair != sums[0]], over[0][1]  # type: ignore[index]
        if any(self.varies[factor] & more for factor, _ in rest):
            return None
        whole = self.product(*zip((self.all[sums[0][0]].operands[0], 1), *rest))
        return self.reduced(whole, axes | more, "sum")

    def sums(self, number: int, axes: Iterable[str]) -> dict[frozenset[str], int]:
        """A value, and the sums of the values of members along any of some axes."""
        result = {NOWHERE: number}
        for axis in axes:
            result |= {within | {axis}: self.reduced(total, [axis], "sum") for within, total in result.items()}
        return result

    def _bound(self, how: str, axes: frozenset[str], number: int) -> int:
        return self.over_members(REDUCED, (how, axes), number, axes, self.shape(number))

    def over_members(self, op: str, attributes: Hashable, number: int, axes: Iterable[str], shape: Shape) -> int:
        """An operator without laws on the values of all members along ``axes``, with a common result."""
        result = self._number(op, attributes, (number,), shape)
        self.varies[result] = self.varies[number].difference(axes)
        return result

    def iterated(self, number: int, start: int, axis: str, initial: int) -> int:
        """The value after all micro-steps from ``initial``, where a micro-step takes ``start`` to ``number``."""
        result = self.apply(ITERATED, axis, (number, start, initial), self.shape(number))
        self.varies[result] = (self.varies[number] | self.varies[initial]) - {axis}
        return result

    def on_member(self, number: int, coordinates: Mapping[str, int]) -> int:
        """The value of a member, for all members."""
        coordinates = {axis: index for axis, index in coordinates.items() if axis in self.varies[number]}
        if not coordinates:
            return number
        expression = self.all[number]
        if expression.op == FLAT:
            return self.flat((self.on_member(root, coordinates), low, high) for root, low, high in self.pieces(number))
        if expression.op == VIEW:
            return self.view(self.on_member(expression.operands[0], coordinates), expression.shape)
        return self.over_members("on member", tuple(sorted(coordinates.items())), number, coordinates, expression.shape)


def applied(expressions: Elements, op: str, attributes: Hashable, operands: Sequence[int]) -> int:
    """An elementwise operator without laws."""

    def make(values: Sequence[int]) -> int:
        shape = broadcast(expressions.shape(value) for value in values)
        return expressions.apply(op, attributes, values, shape)

    return expressions.elementwise(make, operands)

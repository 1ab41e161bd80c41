"""The words of a proof: forms of expressions, shapes, ranges of elements and exact coefficients.

An expression is an operator or a form, applied to numbers of expressions. Forms have laws: sums are linear combinations
with exact rational coefficients, products have integer exponents, a reduction over members is linear, elements in
row-major order have any shape, and an elementwise operator acts on ranges of elements."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from gopt.verification.proof.selections import Runs

Shape: TypeAlias = tuple[int | str | None, ...] | None
Piece: TypeAlias = tuple[int, int, int]
"""Number of an expression, and the range of its elements in row-major order."""
Part: TypeAlias = tuple[Hashable, int, Runs]
"""An index of a sum, the number of its positions, and the ranges of positions that are added."""
Factors: TypeAlias = tuple[tuple[int, int], ...]
"""Expressions, and their exponents in a product."""
Coefficient: TypeAlias = int | Fraction
"""An exact rational: whole ones as integers, which are faster."""
ONE = 0
"""The number of the constant one."""
LINEAR, PRODUCT, VIEW, FLAT, TAKE, TOTAL, PARTED, REDUCED, COUNTED, WEIGHT, ITERATED, INVERSE = (
    "linear", "product", "view", "flat", "take", "total", "parted", "reduced", "counted", "weight", "iterated",
    "inverse",
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


def hashed_once(value: Coefficient) -> Coefficient:
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

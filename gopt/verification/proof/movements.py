"""The origin of the elements of a value, behind views, parts, transpositions, repeats and rows.

Elements in row-major order are *stretches*: each is a start in an expression, and lengths with strides, the last one
fastest, as the digits of a number. A stride of 0 repeats. Two stretches of one length are equal if and only if their
digits are, without lengths of 1 and with neighbours joined where possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby
from math import gcd, prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

from gopt.verification.proof.forms import CONCAT, FLAT, LINEAR, ONE, PERMUTED, TAKE, VIEW, Coefficient, Shape, elements
from gopt.verification.proof.member_reductions import MemberReductions
from gopt.verification.proof.selections import Runs, Selection, Sizes, along, joined

MOST = 1 << 14
"""Stretches up to which a movement is followed."""
EXPAND = "Expand"
LOOKUP = "Gather"
PADDED = "Pad"
MOVEMENTS = frozenset({FLAT, TAKE, PERMUTED, CONCAT, LINEAR, VIEW, EXPAND, LOOKUP, PADDED})
Digits: TypeAlias = tuple[tuple[int, int], ...]
"""Lengths and strides."""


class Stretch(NamedTuple):
    """Elements of an expression in row-major order."""

    root: int
    start: int
    digits: Digits

    @property
    def size(self) -> int:
        return prod(length for length, _ in self.digits)


Stretches: TypeAlias = tuple[Stretch, ...]


def combined(digits: Iterable[tuple[int, int]]) -> Digits:
    """Digits without lengths of 1, and neighbours as a single digit where possible."""
    result: list[tuple[int, int]] = []
    for length, stride in digits:
        if length != 1 and result and result[-1][1] == length * stride:
            result[-1] = result[-1][0] * length, stride
        elif length != 1:
            result.append((length, stride))
    return tuple(result)


def whole(root: int, count: int) -> Stretches:
    """All elements of an expression."""
    return (Stretch(root, 0, combined([(count, 1)])),)


def _cut(stretch: Stretch, start: int, stop: int) -> Stretches:
    """Elements ``start`` to ``stop`` of a stretch."""
    if (start, stop) == (0, stretch.size):
        return (stretch,)
    (_, stride), *rest = stretch.digits
    inner = prod(size for size, _ in rest)
    low, high = -(-start // inner), stop // inner
    root, at = stretch.root, stretch.start
    if low > high:  # inside a single row
        return _cut(Stretch(root, at + high * stride, tuple(rest)), start - high * inner, stop - high * inner)
    result: Stretches = ()
    if start < low * inner:
        row = Stretch(root, at + (low - 1) * stride, tuple(rest))
        result += _cut(row, start - (low - 1) * inner, inner)
    if low < high:
        result += (Stretch(root, at + low * stride, combined([(high - low, stride), *rest])),)
    if high * inner < stop:
        result += _cut(Stretch(root, at + high * stride, tuple(rest)), 0, stop - high * inner)
    return result


def cuts(stretches: Stretches, ranges: Iterable[tuple[int, int]]) -> Iterator[Stretches]:
    """The elements of each of some ranges."""
    bounds = [0, *accumulate(stretch.size for stretch in stretches)]
    for start, stop in ranges:
        result, at = list[Stretch](), bisect_right(bounds, start) - 1
        while at < len(stretches) and bounds[at] < stop:
            low, high = max(start, bounds[at]), min(stop, bounds[at + 1])
            result += _cut(stretches[at], low - bounds[at], high - bounds[at]) if low < high else ()
            at += 1
        yield tuple(result)


def by_dimension(stretches: Stretches, shape: Sequence[int]) -> list[Digits] | None:
    """The digits of each dimension of a single stretch; None where a dimension ends inside a digit."""
    if len(stretches) != 1:
        return None
    rest, result = list(stretches[0].digits), list[Digits]()
    for size in reversed(shape):
        row: list[tuple[int, int]] = []
        while size > 1:
            length, stride = rest.pop()
            common = gcd(length, size)
            if common not in (length, size):
                return None
            row.insert(0, (common, stride))
            size //= common
            if common < length:
                rest.append((length // common, stride * common))
        result.insert(0, tuple(row))
    return result


def _of(stretch: Stretch, dims: Iterable[Digits]) -> Stretches:
    return (Stretch(stretch.root, stretch.start, combined(digit for dim in dims for digit in dim)),)


def permuted(stretches: Stretches, shape: Sequence[int], perm: Sequence[int]) -> Stretches | None:
    """Dimensions in another order."""
    dims = by_dimension(stretches, shape)
    return None if dims is None else _of(stretches[0], (dims[dim] for dim in perm))


def repeated(stretches: Stretches, before: Sequence[int], after: Sequence[int]) -> Stretches | None:
    """Elements repeated along dimensions of length 1, or in front."""
    dims = by_dimension(stretches, before)
    if dims is None or any(old not in (1, new) for old, new in zip(before, after[len(after) - len(before) :])):
        return None
    front = len(after) - len(before)
    rows = [((size, 0),) for size in after[:front]]
    return _of(stretches[0], [*rows, *(row if old == new else ((new, 0),)
                                       for row, old, new in zip(dims, before, after[front:]))])  # fmt: skip


def selected(stretches: Stretches, shape: Sizes, selection: Selection) -> Stretches | None:
    """Ranges of dimensions."""
    for dim, runs in enumerate(selection):
        if runs is not None:
            rows, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
            parts = _rows(stretches, rows, [(start * inner, stop * inner) for start, stop in runs], shape[dim] * inner)
            if parts is None:
                return None
            stretches, shape = parts, (*shape[:dim], sum(b - a for a, b in runs), *shape[dim + 1 :])
    return stretches


def _rows(stretches: Stretches, rows: int, runs: Runs | list[tuple[int, int]], width: int) -> Stretches | None:
    """Ranges of each of equal rows."""
    dims = by_dimension(stretches, (rows, width))
    if dims is not None and len(runs) == 1:
        (row,) = (Stretch(stretches[0].root, stretches[0].start, dims[1]),)
        inside = _cut(row, *runs[0])
        if len(inside) == 1:
            return (inside[0]._replace(digits=combined([*dims[0], *inside[0].digits])),)
    if rows * len(runs) > MOST:
        return None
    ranges = ((row * width + start, row * width + stop) for row in range(rows) for start, stop in runs)
    return tuple(chain.from_iterable(cuts(stretches, ranges)))


def in_rows(values: Sequence[Stretches], rows: int) -> Stretches | None:
    """Values side by side, each of as many rows."""
    if rows * len(values) > MOST:
        return None
    widths = [sum(stretch.size for stretch in value) // rows for value in values]
    columns = [cuts(value, ((row * width, (row + 1) * width) for row in range(rows)))
               for value, width in zip(values, widths)]  # fmt: skip
    return tuple(part for row in zip(*columns) for value in row for part in value)


def equal(first: Stretches, second: Stretches) -> bool:
    """Return whether stretches have the same elements."""
    rests = [*reversed(first)], [*reversed(second)]
    while all(rests):
        count = min(rest[-1].size for rest in rests)
        for rest in rests:
            if rest[-1].size > count:
                stretch = rest.pop()
                rest += reversed((*_cut(stretch, 0, count), *_cut(stretch, count, stretch.size)))
        if rests[0][-1].size == rests[1][-1].size and rests[0].pop() != rests[1].pop():
            return False
    return not any(rests)


class Movements(MemberReductions):
    """Expressions with the elements of further expressions."""

    def __init__(self, extents: dict[str, int]) -> None:
        super().__init__(extents)
        self.sealed = False
        self.of_ranks = 0
        """The first number behind the source's."""
        self._stretches: dict[int, Stretches] = {}
        self._moved: dict[Hashable, list[int]] = {}
        """The movements of the source, by shape and ends."""
        self.zeros: dict[tuple[int, Selection], bool] = {}
        """Selected elements of expressions -> whether laws say that they are zero."""

    def _sizes(self, number: int) -> Sizes | None:
        shape = self.shape(number)
        return None if elements(shape) is None else shape  # type: ignore[return-value]

    def alike(self, number: int, second: int) -> bool:
        """Return whether two expressions are the same elements of a value, in one shape."""
        if number == second or self.shape(number) != self.shape(second):
            return number == second
        return equal(self.stretches(number), self.stretches(second))

    def of_source(self, number: int) -> int:
        """The expression of the source with the same elements in the same shape; the expression itself without one."""
        if not self.sealed or number < self.of_ranks:
            return number
        if not self._moved:
            for second, (op, *_) in enumerate(self.all[: self.of_ranks]):
                if op in MOVEMENTS and self._followed(second) is not None:
                    self._moved.setdefault(self._ends(second), []).append(second)
        return next((row for row in self._moved.get(self._ends(number), ()) if self.alike(number, row)), number)

    def _ends(self, number: int) -> Hashable:
        """The shape, and the first and the last element."""
        row = self.stretches(number)
        last = sum((length - 1) * stride for length, stride in row[-1].digits)
        return self.shape(number), row[0][:2], (row[-1].root, row[-1].start + last)

    def stretches(self, number: int) -> Stretches:
        """The elements of other values in an expression."""
        if number not in self._stretches:
            followed = self._followed(number)
            if followed is None or sum(row.size for row in followed) != self.elements(number):
                followed = whole(self.root(number), self.elements(number) or 0)
            self._stretches[number] = followed
        return self._stretches[number]

    def _followed(self, number: int) -> Stretches | None:
        """The elements of other values in an expression, for a movement of elements."""
        op, attributes, operands, _ = self.all[number]
        sizes, before = self._sizes(number), self._sizes(operands[0]) if operands else None
        value = self.uniform(number) if op == LINEAR and sizes else None
        if value is not None and sizes and 0 not in sizes:
            return self._repeated(value, prod(sizes))
        if not sizes or before is None or 0 in before or 0 in sizes:
            return None
        inner = self.stretches(operands[0])
        if op == VIEW:
            return inner
        if op == FLAT:
            groups = groupby(self.pieces(number), key=itemgetter(0))
            rows = (cuts(self.stretches(root), (piece[1:] for piece in pieces)) for root, pieces in groups)
            return tuple(part for row in rows for parts in row for part in parts)
        if op == TAKE:
            return selected(inner, before, cast(Selection, attributes))
        if op == PERMUTED:
            return permuted(inner, before, cast(Sizes, attributes))
        if op == CONCAT:
            return in_rows([self.stretches(of) for of in operands], prod(sizes[: cast(int, attributes)]))
        if op == LOOKUP:
            return self._looked_up(number, before)
        if op == PADDED:
            return self._bordered(number)
        if op == EXPAND or (op == LINEAR and attributes == (1,)):
            return repeated(inner, before, sizes)
        return None

    def _repeated(self, value: Coefficient, count: int) -> Stretches:
        """A number again and again."""
        return (Stretch(self.linear({ONE: value}, ()), 0, combined([(count, 0)])),)

    def borders(self, number: int, due: Coefficient | None = None) -> list[tuple[int, int]]:
        """The range of the operand of a Pad in each dimension of the result; [] where unknown, or where another number
        than ``due`` stands beside the operand."""
        _, attributes, (data, pads, *rest), _ = self.all[number]
        amounts, value = self.arrays.get(pads), self.uniform(rest[0]) if rest else 0
        if attributes != ((), 0) or len(rest) > 1 or value is None or due not in (None, value):
            return []
        if amounts is None or (amounts < 0).any():
            return []
        return [(front, front + size) for front, size in zip(amounts.tolist(), self._sizes(data) or ())]

    def members(self, number: int) -> Iterator[tuple[int, int, int]]:
        """The values of a row along an axis, from the start to the stop of each in the row."""
        axis, at = cast(int, self.all[number].attributes), 0
        for operand in self.all[number].operands:
            end = at + (self._sizes(operand) or ())[axis]
            yield operand, at, end
            at = end

    def _bordered(self, number: int) -> Stretches | None:
        """Numbers in front of and behind the elements of dimensions."""
        (data, _, *rest), sizes, ends = self.all[number].operands, list(self._sizes(number) or ()), self.borders(number)
        stretches, value = self.stretches(data), (self.uniform(rest[0]) if rest else 0) or 0
        for dim in reversed(range(len(ends))):
            (front, behind), inner = ends[dim], prod(sizes[dim + 1 :])
            rows = prod(stop - start for start, stop in ends[:dim])
            counts = (front, sizes[dim] - behind)
            borders = [self._repeated(value, rows * count * inner) if count else () for count in counts]
            row = in_rows([part for part in (borders[0], stretches, borders[1]) if part], rows)
            if row is None:
                return None
            stretches = row
        return stretches if ends else None

    def _looked_up(self, number: int, before: Sizes) -> Stretches | None:
        """Rows at constant places."""
        (attributes, _), (data, position), _ = cast(tuple[Any, tuple[int, int], Shape], self.all[number][1:])
        index, axis = self.arrays.get(position), dict(attributes).get("axis", 0) % len(before)
        if index is None or index.size > MOST or (index < 0).any() or (index >= before[axis]).any():
            return None
        runs = joined((at, at + 1) for at in index.reshape(-1).tolist())
        return selected(self.stretches(data), before, along(axis, runs, len(before)))

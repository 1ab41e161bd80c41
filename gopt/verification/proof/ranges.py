"""Ranges of elements in row-major order, in a row as a flat value, and elementwise operators range by range."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import cast

from gopt.verification.proof.forms import (
    COUNTED,
    FLAT,
    TAKE,
    VIEW,
    WEIGHT,
    Coefficient,
    Piece,
    Shape,
    UnknownSize,
    broadcast,
    elements,
)
from gopt.verification.proof.products import Products


class Ranges(Products):
    """Rows of ranges of elements."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        super().__init__(extents)
        self.padded: set[int] = set()
        """Rows and constant rows behind one another, and elementwise operators on such."""

    def flat(self, pieces: Iterable[Piece]) -> int:
        """Ranges of elements in a row, as a value of rank 1."""
        joined: list[Piece] = []
        for number, start, stop in pieces:
            if start == stop:
                continue
            if not self._ranged[number]:
                value, length = self.narrow(number), stop - start
                single = joined and (not self._ranged[joined[-1][0]] or self.elements(joined[-1][0]) == 1)
                if single and self.narrow(joined[-1][0]) == value:
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

    def roots(self, number: int) -> tuple[int, ...]:
        """The values of the ranges in a flat value."""
        root = self.root(number)
        return self.all[root].operands if self.all[root].op == FLAT else (root,)

    def pieces(self, number: int) -> list[Piece]:
        """The ranges in a flat value. Raises UnknownSize."""
        root = self.root(number)
        expression = self.all[root]
        if expression.op == FLAT:
            return [(inner, *part) for inner, part in zip(expression.operands, expression.attributes)]  # type: ignore[call-overload]
        count = self.elements(root)
        count = self.elements(number) if count is None else count  # of a view of a value of unknown size
        if count is None:
            raise UnknownSize("ranges of a value of unknown size")
        return [(root, 0, count)]

    def ranges(self, number: int) -> tuple[tuple[int, int], ...]:
        """The ranges in a flat value; () for any other value."""
        expression = self.all[number]
        return cast(tuple[tuple[int, int], ...], expression[1]) if expression[0] == FLAT else ()

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

    def side_by_side(self, rows: Sequence[Sequence[int]]) -> bool:
        """Return whether the values of all rows have as many elements, and no two neighbours would be joined."""
        counts = {tuple(map(self._counts.__getitem__, row)) for row in rows}
        apart = all(number != behind for row in rows for number, behind in pairwise(row))
        return apart and len(counts) == 1 and all(self._ranged[number] for row in rows for number in row)

    # --- elementwise operators ---

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

    def _by_ranges(self, make: Callable[[Sequence[int]], int], operands: Sequence[int], length: int) -> int:
        rows = [self.apart(operand) if self.ranged(operand) else None for operand in operands]
        ends = (at for row in rows for at in accumulate(stop - start for _, start, stop in row or ()))
        bounds = sorted({0, length, *ends})
        columns = [None if row is None else self._segments(row, bounds) for row in rows]
        narrow = [self.narrow(operand) if row is None else operand for row, operand in zip(rows, operands)]
        result: list[Piece] = []
        for number, (low, high) in enumerate(pairwise(bounds)):
            parts = [None if column is None else column[number] for column in columns]
            result.append(self._on_parts(make, parts, narrow, high - low))
        return self.flat(result)

    def _on_parts(
        self, make: Callable[[Sequence[int]], int], parts: Sequence[Piece | None], operands: Sequence[int], size: int
    ) -> Piece:
        """The result on a range of each operand, as a range of a value; None for an operand with a single element."""
        alike = self._alike_parts(parts)
        if alike is not None:
            values = [operand if part is None else part[0] for part, operand in zip(parts, operands)]
            return self.elementwise(make, values), *alike
        ranged = [part for part in parts if part is not None and self._ranged[part[0]]]
        counts = {self.elements(root) or 0 for root, _, _ in ranged}
        aligned = len({part[1:] for part in ranged}) == 1 and len(counts) == 1
        before = min((start for _, start, _ in ranged), default=0)
        start, length = 0, size
        shape: Shape = ()
        if aligned:
            (_, start, _), length = ranged[0], counts.pop()
            shape = () if length == 1 else self._common([root for root, _, _ in ranged], length)
        elif ranged:  # the longest ranges that stand side by side
            start, length = before, min((self.elements(root) or 0) - at for root, at, _ in ranged) + before
        values = []
        for part, operand in zip(parts, operands):
            if part is None or (not self._ranged[part[0]] and (ranged or length == 1)):
                values.append(operand if part is None else self.narrow(part[0]))
            elif aligned:
                values.append(self.view(part[0], shape))
            else:
                values.append(self.flat([(part[0], part[1] - before, part[1] - before + length)]))
        return self.elementwise(make, values) if aligned else make(values), start, start + size

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

    def scaled(self, number: int, factor: Coefficient) -> int:
        """The multiple of an expression."""
        if factor == 1:
            return number
        return self.elementwise(lambda values: self.linear({values[0]: factor}, self.shape(values[0])), [number])

    def sum_of(self, numbers: Sequence[int]) -> int:
        """The sum of values of a common shape; single elements are added as numbers."""
        shape = self.shape(numbers[0])
        if elements(shape) == 1:
            return self.view(self.added([self.view(number, ()) for number in numbers]), shape)
        return self.elementwise(self.added, numbers)

    def counted(self, number: int) -> int:
        """A count to divide by: 1 where the count is zero.

        A multiple of the count gives the same multiple of the result, because the dividend is zero with the count."""
        scale, atom = self._scale(number)
        return self.scaled(self._number(COUNTED, None, (self.root(atom),), self.shape(number)), scale)

    def weight(self, number: int) -> int:
        """A count as a factor: a product with it is zero where the count is, whatever the other factors are."""
        scale, atom = self._scale(number)
        return self.scaled(self._number(WEIGHT, None, (self.root(atom),), self.shape(number)), scale)

    def has_factor(self, number: int, factor: int) -> bool:
        """Return whether an expression is a multiple of another of one element, in each of the ranges of a flat
        value."""
        roots = [self._whole(root) for root, _, _ in self.apart(number) if self.uniform(root) != 0]
        return all(any(of == factor and power > 0 for of, power in self.factors(root)) for root in roots)

    def _whole(self, number: int) -> int:
        """The whole value of a part, without the coefficient."""
        root = self.root(self._scale(number)[1])
        return self._whole(self.all[root].operands[0]) if self.all[root].op == TAKE else root


def applied(expressions: Ranges, op: str, attributes: Hashable, operands: Sequence[int]) -> int:
    """An elementwise operator without laws."""

    def make(values: Sequence[int]) -> int:
        shape = broadcast(expressions.shape(value) for value in values)
        return expressions.apply(op, attributes, values, shape)

    return expressions.elementwise(make, operands)

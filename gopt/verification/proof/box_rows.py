"""Values in a row along an axis: parts behind one another are a part of the whole values behind one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import eq

from gopt.verification.proof.boxes import Box
from gopt.verification.proof.forms import CONCAT
from gopt.verification.proof.selections import (
    Runs,
    Selection,
    Sizes,
    along,
    joined,
    length,
    replaced,
    shifted,
    sizes_of,
    through,
)
from gopt.verification.proof.surroundings import Surroundings

RANGES = 1 << 18
"""Ranges of elements up to which values in a row are read as ranges: a row of rows doubles them at each node."""


class BoxRows(Surroundings):
    """Rows of whole values and of parts."""

    def concatenated(self, numbers: Sequence[int], axis: int) -> int:
        """Values in a row along an axis."""
        shapes = [self._sizes(number) for number in numbers]
        before = [shape[axis] if shape else None for shape in shapes]
        rest = {shape and (*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        if len(rest) != 1 or None in before:
            return self._number(CONCAT, axis, tuple(numbers), None)
        (rest_shape,) = rest
        numbers = [number for number, size in zip(numbers, before) if size] or numbers[:1]
        if len(numbers) == 1:
            return numbers[0]
        shape = (*(rest_shape or ())[:axis], sum(filter(None, before)), *(rest_shape or ())[axis:])
        mixed = any(len({root for root, _, _ in self.pieces(number)}) > 1 for number in numbers)
        if len(shape) == 1 or (mixed and prod(shape[:axis]) == 1):
            return self._ranges_in_row(numbers, axis, shape)
        values = {self.uniform(number) for number in numbers}
        if len(values) == 1 and None not in values:
            return self.constant(values.pop() or 0, shape)
        again = self._again(numbers, axis, shape[axis])
        if again is not None:
            return again
        if self.sealed and (part := self._part_of_row(numbers, axis)) is not None:
            return part
        result = self._first_joined(numbers, _of_common_wholes([self.raw(number) for number in numbers]), axis)
        if result is not None:
            return result
        result = self._first_joined(numbers, self._boxes_in_row(numbers, axis, shape), axis)
        if self.sealed and (result is None or not self.in_source(result)):
            around = _of_common_wholes([dict(self.surroundings(number)) for number in numbers])
            nearby = self._first_joined(numbers, around, axis)
            result = result if nearby is None else nearby
        if result is None:
            result = self._number(CONCAT, axis, tuple(numbers), shape)
            if values != {None} and prod(shape[:axis]) == 1:
                self.pad(result)
        return self._by_source(result)

    def _again(self, numbers: Sequence[int], axis: int, size: int) -> int | None:
        """Equal elements along a dimension, as one value of this length; None for any other values."""
        ends = [0, *accumulate((self._sizes(number) or ())[axis] for number in numbers)]
        runs = [((start, stop),) for start, stop in pairwise(ends)]
        longest = max(range(len(numbers)), key=lambda at: ends[at + 1] - ends[at])
        whole = self.resized(numbers[longest], axis, size, runs[longest])
        if whole is None:
            return None
        rank = len(self.shape(whole) or ())
        parts = (self.take(whole, along(axis, part, rank)) for part in runs)
        return whole if all(map(eq, parts, numbers)) else None

    def _ranges_in_row(self, numbers: Sequence[int], axis: int, shape: Sizes) -> int:
        """Values behind one another in row-major order."""
        if sum(len(self.pieces(number)) for number in numbers) > RANGES:
            return self._number(CONCAT, axis, tuple(numbers), shape)
        row = self.view(self.flat(piece for number in numbers for piece in self.pieces(number)), shape)
        return row if len(shape) == 1 else self._by_source(row)

    def _first_joined(self, numbers: Sequence[int], choices: Iterable[Sequence[Box | None]], axis: int) -> int | None:
        """The values in a row by boxes of all values, of several choices of boxes."""
        joined_rows = (self._joined_boxes(numbers, boxes, axis) for boxes in choices)
        return next((number for number in joined_rows if number is not None), None)

    def _boxes_in_row(self, numbers: Sequence[int], axis: int, shape: Sizes) -> Iterator[Sequence[Box | None]]:
        """Boxes of values in a row, the likeliest in front."""
        yield [self.box(number) for number in numbers]
        yield from _of_common_wholes([dict(self.boxes(number)) for number in numbers])
        yield from filter(None, (self._boxes_along(numbers, axis, shape, dim) for dim in range(len(shape))))

    def in_rows(self, numbers: Sequence[int], axis: int) -> int:
        """Values behind one another, some with present or past constant rows."""
        number = self.concatenated(numbers, axis)
        if self.all[number].op == CONCAT:
            self.pad(number)
            return number
        base, shape = self._base(number), self._sizes(number) or ()
        of_rank = self.sealed and base is not None and self.root(base[0]) >= self.of_ranks
        if not of_rank or prod(shape[:axis]) != 1:
            return number
        return self.view(self.flat(piece for row in numbers for piece in self.pieces(row)), shape)

    def _by_source(self, number: int) -> int:
        """The expression of the source for a rank's values in a row."""
        base = self._base(number)
        whole = number if base is None else base[0]
        return number if self.root(whole) < self.of_ranks else self.of_source(number)

    def _part_of_row(self, numbers: Sequence[int], axis: int) -> int | None:
        """Equal parts of the values of a row of the source, as this part of the row; None for any other values."""
        if any(self.root(number) < self.of_ranks for number in numbers):
            return None
        rows = [dict(self.surroundings(number)) for number in numbers]
        for lead, selection in rows[0].items() if all(rows) else ():
            for row in self.readers(CONCAT, lead):
                _, along, operands, _ = self.all[row]
                alike = along == axis and len(operands) == len(rows) and selection[axis] is None
                if alike and all(part.get(whole) == selection for whole, part in zip(operands, rows)):
                    return self.take(row, selection)
        return None

    def _boxes_along(self, numbers: Sequence[int], axis: int, shape: Sizes, dim: int) -> list[Box] | None:
        """Boxes of parts in a row along a whole dimension, of a part of a second dimension of a common whole value."""
        bases = [self._base(number) for number in numbers]
        whole = bases[0][0] if bases[0] is not None else 0
        sizes, rest = self._sizes(whole) or (), prod((*shape[:dim], *shape[dim + 1 :]))
        if dim == axis or {base and base[0] for base in bases} != {whole} or not rest or prod(sizes) % rest:
            return None
        after = (*shape[:dim], prod(sizes) // rest, *shape[dim + 1 :])
        boxes = list[Box]()
        for number, base in zip(numbers, bases):
            chosen = through(sizes, base[1], after) if base is not None else None
            if chosen is not None and sizes_of(chosen, after) == self._sizes(number):
                boxes.append((self.view(whole, after), chosen))
        return boxes if len(boxes) == len(numbers) else None

    def _joined_boxes(self, numbers: Sequence[int], boxes: Sequence[Box | None], axis: int) -> int | None:
        """Parts in a row: a part of the common whole value, or of the whole values in a row."""
        rows = [box or (number, (None,) * len(self.shape(number) or ())) for number, box in zip(numbers, boxes)]
        if len({whole for whole, _ in rows}) == 1 and all(boxes):
            ((whole, lead), *_), size = rows, (self._sizes(rows[0][0]) or ())[axis]
            if len({replaced(chosen, axis) for _, chosen in rows}) > 1:
                return None
            runs = joined(run for _, chosen in rows for run in chosen[axis] or ((0, size),))
            return self.take(whole, replaced(lead, axis, runs))
        if not self.sealed:
            return None
        rows = self._wholes_in_row(self._repeats_in_row(rows, axis), axis) or []
        unchanged = [whole for whole, _ in rows] == list(numbers)
        if unchanged or len({replaced(chosen, axis) for _, chosen in rows}) != 1:
            return None
        lengths = [(self._sizes(whole) or ())[axis] for whole, _ in rows]
        offsets = [0, *accumulate(lengths)]
        shifts = zip(rows, lengths, offsets)
        runs = joined(run for (_, chosen), size, at in shifts for run in shifted(chosen[axis], size, at))
        whole = self.concatenated([number for number, _ in rows], axis)
        if self._sizes(whole) is None:  # of values that differ in the other dimensions
            return None
        return self.take(whole, replaced(rows[0][1], axis, runs))

    def _repeats_in_row(self, rows: Sequence[Box], axis: int) -> list[Box]:
        """Values in a row, where a value that does not follow a dimension is a part of a longer one, as the others are
        parts."""
        lead = next((row for row in rows if any(runs is not None for runs in replaced(row[1], axis))), None)
        result: list[Box] = []
        for whole, chosen in rows:
            for dim, runs in enumerate(replaced(lead[1], axis) if lead is not None else ()):
                if runs is not None and chosen[dim] is None and lead is not None and self.uniform(whole) is None:
                    moved = self.resized(whole, dim, (self._sizes(lead[0]) or ())[dim], runs)
                    whole, chosen = (whole, chosen) if moved is None else (moved, replaced(chosen, dim, runs))
            result.append((whole, chosen))
        return result

    def _wholes_in_row(self, rows: Sequence[Box], axis: int) -> list[Box] | None:
        """Values in a row with constants in the size of the others' wholes: along ``axis`` in the sizes that a row of
        the source has."""
        parts = [(whole, chosen) for whole, chosen in rows if self.uniform(whole) is None]
        along = {(self._sizes(whole) or ())[axis]: chosen[axis] for whole, chosen in parts if chosen[axis] is not None}
        model = next(iter(parts), None)
        if len(parts) == len(rows) or model is None:
            return list(rows)
        names = [None if self.uniform(whole) is not None else whole for whole, _ in rows]
        like = self._row_of_source(names, axis) or ([] if along else [whole for whole, _ in rows])
        result: list[Box] = []
        for (whole, chosen), like_whole in zip(rows, like):
            value = self.uniform(whole)
            if value is not None:
                before, size = (self._sizes(whole) or ())[axis], (self._sizes(like_whole) or ())[axis]
                runs = None if before == size else _repeated(along, size)
                if runs is None and before < size:
                    runs = ((0, before),) if result else ((size - before, size),)
                if length(runs, size) != before or value != self.uniform(like_whole):
                    return None
                sizes = [*(self._sizes(model[0]) or ())]
                sizes[axis] = size
                whole, chosen = self.constant(value, tuple(sizes)), replaced(model[1], axis, runs)
            result.append((whole, chosen))
        return result if len(result) == len(rows) else None

    def _row_of_source(self, numbers: Sequence[int | None], axis: int) -> Sequence[int]:
        """The values of a row of the source with given values in order, and any constants between; () if absent."""
        lead = next((number for number in numbers if number is not None), None)
        for row in self.readers(CONCAT, lead) if lead is not None else ():
            _, along, operands, _ = self.all[row]
            alike = along == axis and len(operands) == len(numbers)
            if alike and all(want in (None, operand) for want, operand in zip(numbers, operands)):
                return operands
        return ()


def _repeated(along: Mapping[int, Runs | None], size: int) -> Runs | None:
    """The same ranges in each of several equal parts of a dimension."""
    for part, runs in along.items():
        if size % part == 0:
            return joined(run for at in range(0, size, part) for run in shifted(runs or (), part, at))
    return None


def _of_common_wholes(rows: Sequence[Mapping[int, Selection]]) -> Iterator[list[Box]]:
    """Parts of a common whole value, from the ranges of each value in several whole values."""
    for whole in rows[0]:
        if all(whole in row for row in rows):
            yield [(whole, row[whole]) for row in rows]

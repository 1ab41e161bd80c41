"""Expressions with boxes: ranges of dimensions of a whole value, and some of the terms of a sum.

A rank with a part of a dimension computes an operator on the part. By the laws here the result is the same part of
the operator on whole values, or, where the operator sums over the dimension, some of the terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import cast

from gopt.verification.proof.forms import (
    CONCAT,
    FLAT,
    LINEAR,
    PARTED,
    TAKE,
    VIEW,
    Coefficient,
    Piece,
    Shape,
    UnknownSize,
    elements,
)
from gopt.verification.proof.movements import PADDED, Movements
from gopt.verification.proof.selections import (
    Runs,
    Selection,
    Sizes,
    along,
    inside,
    joined,
    normal,
    replaced,
    shifted,
    sizes_of,
    through,
    unflattened,
    wholes,
    within,
)

Box = tuple[int, Selection]
"""A whole value, and the selected ranges of each dimension."""
CHOICES = 16
"""Values around a part up to which the source's result is looked for."""


class Boxes(Movements):
    """Expressions of whole values and of parts.

    Parts taken by the source itself are whole values; ``known``: root -> their selections."""

    def __init__(self, extents: dict[str, int]) -> None:
        super().__init__(extents)
        self.known: dict[int, list[tuple[Selection, int]]] = {}
        self._shapes: dict[int, dict[Sizes, None]] = {}
        """Root -> the shapes in the source."""
        self._boxes: dict[int, Box | None] = {}
        self._parts_of_rows: dict[int, Box | None] = {}

    def seal(self) -> None:
        """End the reading of the source: all parts so far are whole values."""
        self.sealed, self.of_ranks = True, len(self.all)
        for number, (op, _, operands, shape) in enumerate(list(self.all)):
            if op not in (TAKE, FLAT, VIEW):
                continue
            base = self._base(number) if op in (TAKE, FLAT) else None
            if base is not None:
                part = self.view(number, sizes_of(base[1], self._sizes(base[0]) or ()))
                self.known.setdefault(base[0], []).append((base[1], part))
            elif op == VIEW and elements(shape) is not None:
                self._shapes.setdefault(operands[0], {})[shape] = None  # type: ignore[index]

    def in_source(self, number: int) -> bool:
        """Return whether a value is a part, or some of the terms, of a value of the source."""
        base = self._base(number)
        root = self.root(number if base is None else base[0])
        part, beside = self._part_of_sum(root)
        if self.all[self.root(part)].op == PARTED:
            whole = self.all[self.root(part)].operands[0]
            root = self.root(self.product(*zip((self.view(whole, self.shape(part)), 1), *beside))) if beside else whole
        return root < self.of_ranks

    # --- parts ---

    def take(self, number: int, selection: Selection) -> int:
        """Ranges of the dimensions of a value."""
        before = self._sizes(number)
        if before is None:
            raise UnknownSize("a part of a value of unknown size")
        selection = normal(selection, before)
        if all(runs is None for runs in selection):
            return number
        shape = sizes_of(selection, before)
        value = 0 if 0 in shape else self.uniform(number)
        if value is not None:
            return self.constant(value, shape)
        op, attributes, operands, _ = self.all[number]
        for whole, chosen in self.raw(number).items() if op == VIEW and len(before) > 1 else ():
            return self.take(whole, tuple(map(inside, chosen, selection)))
        if op == VIEW:
            inner = through(before, selection, self._sizes(operands[0]) or ())
            if len(before) == 1 and (inner is None or sum(runs is not None for runs in inner) > 1):  # inside a row
                return self.flat(piece for start, stop in selection[0] or () for piece in self.cut(number, start, stop))
            if inner is not None:
                return self.view(self.take(operands[0], inner), shape)
        if op == TAKE:
            return self.take(operands[0], tuple(map(inside, cast(Selection, attributes), selection)))
        if op == FLAT:
            return self.flat(piece for start, stop in selection[0] or () for piece in self.cut(number, start, stop))
        if op == CONCAT and (value := self._only(number, selection)) is not None:
            return self.constant(value, shape)
        if op == CONCAT and self.sealed and number >= self.of_ranks and (one := self._inside_one(number, selection)):
            return self.take(*one)
        if (
            op == PADDED
            and self.sealed
            and number >= self.of_ranks
            and (box := self._inside_borders(number, selection))
        ):
            return self.take(*box)
        if op == LINEAR:
            free = self._free(number)
            if any(runs is not None and free[dim] for dim, runs in enumerate(selection)):
                sizes = tuple(new if free[dim] else old for dim, (old, new) in enumerate(zip(before, shape)))
                rest = tuple(None if free[dim] else runs for dim, runs in enumerate(selection))
                return self.take(self.linear(dict(self.terms(number)), sizes), rest)
        lead = next((dim for dim, sizes in enumerate(zip(before, shape)) if max(sizes) > 1), 0)
        ranges = selection[lead]
        if ranges is not None:  # rows, of the ranges in the other dimensions
            part = self.take(number, replaced(selection, lead))
            width = prod(shape[lead + 1 :])
            cuts = (self.cut(part, start * width, stop * width) for start, stop in ranges)
            return self.view(self.flat(piece for row in cuts for piece in row), shape)
        return self._number(TAKE, selection, (number,), shape)

    def _only(self, number: int, selection: Selection) -> Coefficient | None:
        """The constant in all selected values of a row."""
        runs = selection[cast(int, self.all[number].attributes)]
        values = {self.uniform(member) for member, low, high in self.members(number)
                  if runs is None or any(start < high and stop > low for start, stop in runs)}  # fmt: skip
        return values.pop() if len(values) == 1 else None

    def _inside_one(self, number: int, selection: Selection) -> Box | None:
        """The value of a row with all selected elements, and the selection inside the value."""
        axis = cast(int, self.all[number].attributes)
        runs = selection[axis] or ()
        for member, low, high in self.members(number) if runs else ():
            if all(low <= start and stop <= high for start, stop in runs):
                return member, replaced(selection, axis, shifted(runs, 0, -low))
        return None

    def _inside_borders(self, number: int, selection: Selection) -> Box | None:
        """The padded value, and the selected elements, where no element of a border is selected."""
        operand, result = self.all[number].operands[0], list[Runs]()
        for (front, behind), runs, size in zip(self.borders(number), selection, self._sizes(number) or ()):
            chosen = runs if runs is not None else ((0, size),)
            if any(start < front or stop > behind for start, stop in chosen):
                return None
            result.append(shifted(chosen, size, -front))
        return (operand, tuple(result)) if result else None

    def _free(self, number: int) -> list[bool]:
        """For each dimension of a sum, whether all terms are constant along the dimension."""
        rank = len(self.shape(number) or ())
        free = [True] * rank
        for atom, _ in self.terms(number):
            shape = self.shape(atom) or ()
            for dim, size in enumerate(shape, rank - len(shape)):
                free[dim] &= size == 1
        return free

    def repeats(self, number: int) -> list[bool]:
        """For each dimension of a value, whether the value is a sum with equal elements along the dimension."""
        shape = self._sizes(number) or ()
        if self.all[number].op != LINEAR or self.uniform(number) is not None:
            return [False] * len(shape)
        return [free and size > 1 for free, size in zip(self._free(number), shape)]

    def once(self, number: int, dim: int) -> int:
        """A single position of a sum with equal elements along a dimension."""
        shape = self._sizes(number) or ()
        return self.linear(dict(self.terms(number)), (*shape[:dim], 1, *shape[dim + 1 :]))

    def expanded(self, number: int, shape: Shape, expand: Callable[[int, Shape], int] | None = None) -> int:
        """A value again and again along dimensions of length 1; a part as the part of the whole value again and
        again. ``expand``: for a value without parts; by default a sum of one term."""
        expand = expand or (lambda value, sizes: self.linear({value: 1}, sizes))
        before, after = self.shape(number) or (), shape or ()
        front = len(after) - len(before)
        for whole, selection in self.boxes(number):
            if not any(runs and old != new for runs, old, new in zip(selection, before, after[front:])):
                pairs = zip(selection, self.shape(whole) or (), after[front:])
                sizes = (*after[:front], *(new if runs is None else size for runs, size, new in pairs))
                return self.take(expand(whole, sizes), (*(None,) * front, *selection))
        return expand(number, shape)

    def selection(self, number: int) -> Selection | None:
        """The taken ranges of an expression."""
        op, attributes, _, _ = self.all[number]
        return cast(Selection, attributes) if op == TAKE else None

    def resized(self, number: int, dim: int, size: int, runs: Runs) -> int | None:
        """A value of another length of a dimension that has the value at ``runs``, for a value that does not follow the
        dimension; None for any other value, and for open lengths."""
        shape = self._sizes(number)
        if runs == ((0, size),):
            return number
        if shape is None:
            return None
        sizes = (*shape[:dim], size, *shape[dim + 1 :])
        value = self.uniform(number)
        if value is not None:
            return self.constant(value, sizes)
        root = self.root(number)
        before = self._sizes(root) or ()
        if self.all[root].op != LINEAR or not shape[dim]:
            return None
        selection = along(dim, runs, len(shape))
        free, result = self._free(root), None
        for at in sorted(range(len(before)), key=lambda at: at != dim):
            if free[at] and before[at] * size % shape[dim] == 0:
                longer = (*before[:at], before[at] * size // shape[dim], *before[at + 1 :])
                whole = self.view(self.linear(dict(self.terms(root)), longer), sizes)
                if self.take(whole, selection) == number:
                    if self.root(whole) < self.of_ranks:
                        return whole
                    result = whole if result is None else result
        return result

    def raw(self, number: int) -> dict[int, Selection]:
        """The expression behind a part, maybe a part taken by the source, in all possible shapes: whole
        value -> the ranges."""
        base = self._base(number)
        return {} if base is None else self._in_shape(*base, number)

    def _base(self, number: int) -> Box | None:
        """The expression and the ranges behind a part, in the shape of the expression."""
        root = self.root(number)
        op, attributes, operands, _ = self.all[root]
        if op == TAKE:
            return operands[0], cast(Selection, attributes)
        if op == FLAT and len(set(operands)) > 1:
            return self._in_row(root)
        if op != FLAT or not (shape := self._sizes(operands[0])):
            return None
        rows = unflattened(joined((start, stop) for _, start, stop in self.pieces(root)), shape)
        if rows is None or sum(runs is not None for runs in rows) != 1:
            return None
        if self.all[operands[0]].op != TAKE:
            return operands[0], rows
        whole, selection = self._base(operands[0]) or (0, ())
        return whole, tuple(map(inside, selection, rows))

    @cached_property
    def _rows(self) -> dict[int, list[int]]:
        """Expression -> the rows of ranges of several expressions in the source, with ranges of the expression."""
        result: dict[int, list[int]] = {}
        for number, (op, _, operands, _) in enumerate(self.all[: self.of_ranks]):
            for operand in set(operands) if op == FLAT and len(operands) > 1 else ():
                result.setdefault(operand, []).append(number)
        return result

    def _in_row(self, number: int) -> Box | None:
        """The row of ranges of the source behind a row of parts of the ranges, and the elements."""
        if not self.sealed or number < self.of_ranks:
            return None
        if number not in self._parts_of_rows:
            pieces = self.pieces(number)
            boxes = (self._elements_in(row, pieces) for row in self._rows.get(pieces[0][0], ())[:CHOICES])
            self._parts_of_rows[number] = next(filter(None, boxes), None)
        return self._parts_of_rows[number]

    def _elements_in(self, row: int, pieces: Sequence[Piece]) -> Box | None:
        """A row of ranges, and where in the row pieces stand, in order."""
        at, runs, ranges = 0, list[tuple[int, int]](), iter(self.pieces(row))
        for root, start, stop in pieces:
            for whole, begin, end in ranges:
                at += end - begin
                if whole == root and begin <= start and stop <= end:
                    runs.append((at - end + start, at - end + stop))
                    break
            else:
                return None
        return row, (joined(runs),)

    # --- boxes ---

    def box(self, number: int) -> Box | None:
        """The whole value and the ranges behind a part; None for a whole value."""
        if not self.sealed or self.all[self.root(number)].op not in (TAKE, FLAT):
            return None
        if number not in self._boxes:
            self._boxes[number] = self._box(number)
        return self._boxes[number]

    def _box(self, number: int) -> Box | None:
        base = self._base(number)
        if base is None:
            return None
        whole, selection = self._smallest(*base, self._sizes(base[0]) or ()) or base
        if all(runs is None for runs in selection):
            return None
        return next(iter(self._in_shape(whole, selection, number).items()), None)

    def boxes(self, number: int) -> Iterator[Box]:
        """The box of a part; of a part with dimensions of length 1 also of the whole value in other shapes, the
        source's in front."""
        box = self.box(number)
        if box is None:
            return
        yield box
        part = self._sizes(number) or ()
        if 1 in part:
            yield from self._reshaped(*box, part)

    def _in_shape(self, whole: int, selection: Selection, number: int) -> dict[int, Selection]:
        """The shapes of a whole value where a part has the shape of an expression: value -> ranges; shapes of the
        source first."""
        shape, part = self._sizes(whole), self._sizes(number)
        if shape is None or part is None:
            return {}
        if sizes_of(selection, shape) == part:
            return {whole: selection}
        result: dict[int, Selection] = {}
        for reshaped, chosen in self._reshaped(whole, selection, part):
            result.setdefault(reshaped, chosen)
        return result

    def _reshaped(self, whole: int, selection: Selection, part: Sizes) -> Iterator[Box]:
        """A whole value in the shapes where a selection has the shape ``part``, the source's shapes in front."""
        yield from self.in_shapes_of_source(whole, selection, part)
        rows = wholes(self._sizes(whole) or (), selection, part)
        yield from ((self.view(whole, sizes), chosen) for sizes, chosen in rows)

    def in_shapes_of_source(self, whole: int, selection: Selection, part: Sizes) -> Iterator[Box]:
        """A whole value in the source's shapes where a selection has the shape ``part``."""
        shape = self._sizes(whole) or ()
        for sizes in self._shapes_of(whole):
            chosen = through(shape, selection, sizes) if sizes != shape and len(sizes) == len(part) else None
            if chosen is not None and sizes_of(chosen, sizes) == part:
                yield self.view(whole, sizes), chosen

    def _shapes_of(self, number: int) -> Iterable[Sizes]:
        """The shapes of a value in the source, also of some terms of a sum there."""
        root = self.root(number)
        if self.all[root].op == PARTED:
            return self._shapes_of(self.all[root].operands[0])
        return self._shapes.get(root, ())

    def _smallest(self, whole: int, selection: Selection, shape: Sizes) -> Box | None:
        """The smallest part taken by the source of a value that contains a selection."""
        boxes = self._containing(whole, selection, shape)
        return min(boxes, key=lambda box: self.elements(box[0]) or 0, default=None)

    def _containing(self, whole: int, selection: Selection, shape: Sizes) -> Iterator[Box]:
        """The source's parts of a value around a selection."""
        for outer, number in self.known.get(whole, ()):
            inner = []
            for dim, size in enumerate(shape):
                part = within(outer[dim], selection[dim], size)
                if part is None:
                    break
                inner.append(part)
            else:
                yield number, normal(inner, self._sizes(number) or ())

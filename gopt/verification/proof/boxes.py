"""Expressions with boxes: ranges of dimensions of a whole value, and some of the terms of a sum.

A rank with a part of a dimension computes an operator on the part. By the laws here the result is the same part of
the operator on whole values, or, where the operator sums over the dimension, some of the terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import cast

from gopt.verification.proof.forms import (
    CONCAT,
    FLAT,
    LINEAR,
    PARTED,
    PRODUCT,
    TAKE,
    VIEW,
    Coefficient,
    Piece,
    UnknownSize,
    elements,
)
from gopt.verification.proof.movements import PADDED, Movements
from gopt.verification.proof.selections import (
    Runs,
    Selection,
    Sizes,
    along,
    flattened,
    inside,
    joined,
    normal,
    replaced,
    sizes_of,
    through,
    unflattened,
    wholes,
    within,
)
from gopt.verification.proof.zeros import are_zero

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
        self._nearby: dict[Box, Sequence[Box]] = {}
        """A part -> equal parts of other values of the source."""

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

    @cached_property
    def _results_of(self) -> dict[str, dict[Sizes, None]]:
        """Operator -> the shapes of the results in the source."""
        result: dict[str, dict[Sizes, None]] = {}
        for op, _, _, shape in self.all[: self.of_ranks]:
            if elements(shape) is not None:
                result.setdefault(op, {})[shape] = None  # type: ignore[index]
        return result

    @cached_property
    def _readers(self) -> dict[tuple[str, int], list[int]]:
        """Operator and operand -> the expressions in the source, but for sums, products and rows."""
        result: dict[tuple[str, int], list[int]] = {}
        for number, (op, _, operands, _) in enumerate(self.all[: self.of_ranks]):
            for operand in dict.fromkeys(operands) if op not in (LINEAR, PRODUCT, FLAT) else ():
                result.setdefault((op, operand), []).append(number)
        return result

    def lengths(self, op: str, dim: int) -> Sequence[int]:
        """The lengths of a dimension in the results of an operator in the source."""
        sizes = self._results_of.get(op, ()) if self.sealed else ()
        return tuple(dict.fromkeys(shape[dim] for shape in sizes if dim < len(shape)))

    def readers(self, op: str, operand: int) -> Sequence[int]:
        """The readers of an expression in the source, of an operator."""
        return self._readers.get((op, operand), ()) if self.sealed else ()

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
        value = self.uniform(number)
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
        if 0 in shape:
            return self.linear({}, shape)
        lead = next((dim for dim, size in enumerate(before) if size > 1), 0)
        ranges = selection[lead]
        if ranges is not None:  # rows, of the ranges in the other dimensions
            part = self.take(number, replaced(selection, lead))
            width = prod(shape[lead + 1 :])
            cuts = (self.cut(part, start * width, stop * width) for start, stop in ranges)
            return self.view(self.flat(piece for row in cuts for piece in row), shape)
        return self._number(TAKE, selection, (number,), shape)

    def _only(self, number: int, selection: Selection) -> Coefficient | None:
        """The constant in all selected values of a row."""
        axis, at, values = cast(int, self.all[number].attributes), 0, set()
        runs = selection[axis]
        for operand in self.all[number].operands:
            size = (self._sizes(operand) or ())[axis]
            if runs is None or any(start < at + size and stop > at for start, stop in runs):
                values.add(self.uniform(operand))
            at += size
        return values.pop() if len(values) == 1 else None

    def _inside_one(self, number: int, selection: Selection) -> Box | None:
        """The value of a row with all selected elements, and the selection inside the value."""
        axis, at = cast(int, self.all[number].attributes), 0
        runs = selection[axis]
        for operand in self.all[number].operands if runs else ():
            size = (self._sizes(operand) or ())[axis]
            if all(at <= start and stop <= at + size for start, stop in runs or ()):
                return operand, replaced(selection, axis, joined((start - at, stop - at) for start, stop in runs or ()))
            at += size
        return None

    def _inside_borders(self, number: int, selection: Selection) -> Box | None:
        """The padded value, and the selected elements, where no element of a border is selected."""
        operand, result = self.all[number].operands[0], list[Runs]()
        for (front, behind), runs, size in zip(self.borders(number), selection, self._sizes(number) or ()):
            chosen = runs if runs is not None else ((0, size),)
            if any(start < front or stop > behind for start, stop in chosen):
                return None
            result.append(joined((start - front, stop - front) for start, stop in chosen))
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
        shape = self._sizes(whole) or ()
        for sizes in self._shapes_of(whole):
            chosen = through(shape, selection, sizes) if sizes != shape and len(sizes) == len(part) else None
            if chosen is not None and sizes_of(chosen, sizes) == part:
                yield self.view(whole, sizes), chosen
        yield from ((self.view(whole, sizes), chosen) for sizes, chosen in wholes(shape, selection, part))

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

    def surroundings(self, number: int) -> Iterator[Box]:
        """The values of the source around a part, in all possible shapes: the value under the part in front, then the
        values around the value, step by step."""
        base, part = self._base(number), self._sizes(number) or ()
        around = self._nearby.get(base, ()) if base is not None else ()
        if base is not None and not around:
            around = [box for box in self._around(base) if any(runs is not None for runs in box[1])]
            self._nearby |= {base: around} if self.sealed else {}
        for box in around:
            yield from self._in_shape(*box, number).items()
        for box in around if 1 in part else ():
            yield from self._reshaped(*box, part)

    def _around(self, base: Box) -> Iterable[Box]:
        """A part, and equal parts of other values of the source: of the source's parts of the value, in any order, of
        the value with borders, of equal sums, and of rows with the part."""
        around, at = [base], 0
        while at < min(len(around), CHOICES):
            whole, selection = around[at]
            around += self._containing(whole, selection, self._sizes(whole) or ())
            around += self._containing_views(whole, selection)
            around += self._padded(whole, selection)
            around += self._equal_sums(whole, selection)
            around += self._rows_around(whole, selection)
            around += self._joined_around(whole, selection)
            around, at = list(dict.fromkeys(around)), at + 1
        return around

    def _containing_views(self, whole: int, selection: Selection) -> Iterator[Box]:
        """The source's parts of a value in other shapes around a selection."""
        before = self._sizes(whole) or ()
        for sizes in self._shapes_of(whole):
            view = self.view(whole, sizes)
            chosen = through(before, selection, sizes) if view in self.known else None
            yield from self._containing(view, chosen, sizes) if chosen is not None else ()

    def _padded(self, whole: int, selection: Selection) -> Iterator[Box]:
        """The source's values with borders around a value."""
        for number in self.readers(PADDED, whole):
            ends, sizes = self.borders(number), self._sizes(whole) or ()
            chosen = [joined((start + front, stop + front) for start, stop in runs or ((0, size),))
                      for runs, size, (front, _) in zip(selection, sizes, ends)]  # fmt: skip
            if ends and self.all[number].operands[0] == whole:
                yield number, normal(chosen, self._sizes(number) or ())

    def _joined_around(self, whole: int, selection: Selection) -> Iterator[Box]:
        """The source's values in a row along an axis with a value."""
        for row in self.readers(CONCAT, whole):
            axis, at = cast(int, self.all[row].attributes), 0
            for operand in self.all[row].operands if self._sizes(row) else ():
                size = (self._sizes(operand) or ())[axis]
                if operand == whole:
                    runs = joined((start + at, stop + at) for start, stop in selection[axis] or ((0, size),))
                    yield row, replaced(selection, axis, runs)
                at += size

    def _rows_around(self, whole: int, selection: Selection) -> Iterator[Box]:
        """The source's rows of ranges that have a part of a value, in order."""
        rows = self._rows.get(self.root(whole), ())[:CHOICES] if self.sealed else ()
        runs = flattened(selection, self._sizes(whole) or ()) if rows else None
        pieces = [(self.root(whole), start, stop) for start, stop in runs or ()]
        yield from filter(None, (self._elements_in(row, pieces) for row in rows if pieces))

    @cached_property
    def pads(self) -> bool:
        """Whether the source pads a value."""
        return any(op == PADDED for op, *_ in self.all[: self.of_ranks])

    @cached_property
    def _sums_of(self) -> dict[int, list[int]]:
        """Root of a term -> the sums in the source."""
        result: dict[int, list[int]] = {}
        for number, (op, _, operands, _) in enumerate(self.all[: self.of_ranks]):
            for root in map(self.root, operands) if op == LINEAR else ():
                result.setdefault(root, []).append(number)
        return result

    def _equal_sums(self, whole: int, selection: Selection) -> Iterator[Box]:
        """The source's sums of the terms of a value and of terms that are zero where selected."""
        terms, shape = dict(self.terms(whole)) if self.sealed and self.pads else {}, self.shape(whole)
        rows = (self._sums_of.get(self.root(atom), ()) for atom in terms)
        row = min(filter(None, rows), key=len, default=())
        for number in [*row[:1], *row[:0:-1]][:CHOICES]:  # terms are added one by one, and the last sum is read
            if number == self.root(whole) or self.elements(number) != self.elements(whole):
                continue
            summed = self.view(number, shape)
            more = dict(self.terms(summed))
            fits = terms.items() <= more.items()
            rest = more.keys() - terms.keys() if fits else ()  # the selection is of this shape
            if fits and all(self.shape(atom) == shape and are_zero(self, atom, selection) for atom in rest):
                yield summed, selection

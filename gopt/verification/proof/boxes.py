"""Expressions with boxes: ranges of dimensions of a whole value, and some of the terms of a sum.

A rank with a part of a dimension computes an operator on the part. By the laws here the result is the same part of
the operator on whole values, or, where the operator sums over the dimension, some of the terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice
from math import prod
from typing import cast

from gopt.verification.proof.expressions import (
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
    broadcast,
    elements,
)
from gopt.verification.proof.movements import Movements
from gopt.verification.proof.selections import (
    Runs,
    Selection,
    Sizes,
    along,
    flattened,
    inside,
    joined,
    length,
    normal,
    replaced,
    sizes_of,
    through,
    unflattened,
    wholes,
    within,
)

Box = tuple[int, Selection]
"""A whole value, and the selected ranges of each dimension."""
RANGES = 1 << 18
"""Ranges of elements up to which values in a row are read as ranges: a row of rows doubles them at each node."""
CHOICES = 16
"""Values around a part up to which the source's result is looked for."""


def _repeated(along: Mapping[int, Runs | None], size: int) -> Runs | None:
    """The same ranges in each of several equal parts of a dimension."""
    for part, runs in along.items():
        if size % part == 0:
            return joined((start + at, stop + at) for at in range(0, size, part) for start, stop in runs or ())
    return None


class Boxes(Movements):
    """Expressions of whole values and of parts.

    Parts taken by the source itself are whole values; ``known``: root -> their selections."""

    def __init__(self, extents: dict[str, int]) -> None:
        super().__init__(extents)
        self.known: dict[int, list[tuple[Selection, int]]] = {}
        self._shapes: dict[int, dict[Sizes, None]] = {}
        """Root -> the shapes in the source."""
        self._boxes: dict[int, Box | None] = {}
        self._multiples: dict[tuple[int, Coefficient], int] = {}
        self._parts_of_rows: dict[int, Box | None] = {}
        self._widened = set[tuple[int, ...]]()
        """Operands that are looked for around at present: a value repeated is around its part, and made of it."""

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

    def in_source(self, number: int) -> bool:
        """Return whether a value is a part, or some of the terms, of a value of the source."""
        base = self._base(number)
        root = self.root(number if base is None else base[0])
        part, beside = self._part_of_sum(root)
        if self.all[self.root(part)].op == PARTED:
            whole = self.all[self.root(part)].operands[0]
            root = self.root(self.product(*zip((self.view(whole, self.shape(part)), 1), *beside))) if beside else whole
        return root < self.of_ranks

    # --- boxes ---

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

    def selection(self, number: int) -> Selection | None:
        """The taken ranges of an expression."""
        op, attributes, _, _ = self.all[number]
        return cast(Selection, attributes) if op == TAKE else None

    def _free(self, number: int) -> list[bool]:
        """For each dimension of a sum, whether all terms are constant along the dimension."""
        rank = len(self.shape(number) or ())
        free = [True] * rank
        for atom, _ in self.terms(number):
            shape = self.shape(atom) or ()
            for dim, size in enumerate(shape, rank - len(shape)):
                free[dim] &= size == 1
        return free

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

    def _shapes_of(self, number: int) -> Iterable[Sizes]:
        """The shapes of a value in the source, also of some terms of a sum there."""
        root = self.root(number)
        if self.all[root].op == PARTED:
            return self._shapes_of(self.all[root].operands[0])
        return self._shapes.get(root, ())

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

    def _reshaped(self, whole: int, selection: Selection, part: Sizes) -> Iterator[Box]:
        """A whole value in the shapes where a selection has the shape ``part``, the source's shapes in front."""
        shape = self._sizes(whole) or ()
        for sizes in self._shapes_of(whole):
            chosen = through(shape, selection, sizes) if sizes != shape and len(sizes) == len(part) else None
            if chosen is not None and sizes_of(chosen, sizes) == part:
                yield self.view(whole, sizes), chosen
        yield from ((self.view(whole, sizes), chosen) for sizes, chosen in wholes(shape, selection, part))

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
        """All values of the source around a part, in all possible shapes: the value under the part in front, then the
        source's parts of the value, in any order."""
        base, part = self._base(number), self._sizes(number) or ()
        if base is None:
            return
        whole, selection = base
        for surrounding, inner in (base, *self._containing(whole, selection, self._sizes(whole) or ())):
            if any(runs is not None for runs in inner):
                yield from self._in_shape(surrounding, inner, number).items()
                yield from self._reshaped(surrounding, inner, part) if 1 in part else ()

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

    def elementwise(self, make: Callable[[Sequence[int]], int], operands: Sequence[int]) -> int:
        if self._aligned(operands):
            return make(operands)
        padded = next((operand for operand in operands if operand in self.padded), None)
        if padded is not None:
            shapes = {self.shape(operand) for operand in operands if self.ranged(operand)}
            if shapes == {broadcast(self.shape(operand) for operand in operands)}:
                return self._by_rows(make, operands, padded)
        parts = [operand for operand in dict.fromkeys(operands) if self.all[self.root(operand)].op in (TAKE, FLAT)]
        if not parts:
            return super().elementwise(make, operands)
        result = self._elementwise_parts(make, operands, parts)
        key = tuple(operands)
        if self.sealed and key not in self._widened and not self.in_source(result):
            self._widened.add(key)
            of_source = self._elementwise_of_source(make, operands)
            self._widened.discard(key)
            result = result if of_source is None else of_source
        return result

    def _elementwise_parts(
        self, make: Callable[[Sequence[int]], int], operands: Sequence[int], parts: Sequence[int]
    ) -> int:
        """The result of an elementwise operator, where some operands are parts."""
        if self.sealed:
            result = self._elementwise_boxes(make, operands)
            if result is not None:
                return result
        shape = broadcast(self.shape(operand) for operand in operands)
        ranged = {operand for operand in operands if self.ranged(operand)}
        if (
            len({*ranged, *parts}) == 1
            and self.all[root := self.root(parts[0])].op == TAKE
            and self.shape(parts[0]) == shape
        ):
            (whole,), selection = self.all[root].operands, cast(Selection, self.all[root].attributes)
            values = [whole if operand == parts[0] else self.narrow(operand) for operand in operands]
            return self.view(self.take(self.elementwise(make, values), selection), shape)
        return super().elementwise(make, operands)

    def scaled(self, number: int, factor: Coefficient) -> int:
        if not self.sealed:
            return super().scaled(number, factor)
        key = number, factor
        if key not in self._multiples:
            self._multiples[key] = self._multiple_of_ranges(number, factor) or super().scaled(number, factor)
        return self._multiples[key]

    def _multiple_of_ranges(self, number: int, factor: Coefficient) -> int | None:
        """The multiple of ranges of values, by the multiples of the values; None for other ranges and values."""
        op, _, operands, _ = self.all[number]
        single = (self.elements(root) == 1 or not self.ranged(root) or root in self.padded for root in operands)
        if op != FLAT or any(single) or self._differ(self.pieces(number)):
            return None
        return self.flat((self.scaled(root, factor), start, stop) for root, start, stop in self.pieces(number))

    def _by_ranges(self, make: Callable[[Sequence[int]], int], operands: Sequence[int], length: int) -> int:
        rows = {operand: self.pieces(operand) for operand in operands if self.ranged(operand)}
        if self._differ(piece for pieces in rows.values() for piece in pieces):
            bounds = sorted({0, *(at for pieces in rows.values() for at in accumulate(b - a for _, a, b in pieces))})
            columns = {operand: self._segments(pieces, bounds) for operand, pieces in rows.items()}
            differ = list(map(self._differ, zip(*columns.values())))
            flat = {operand: self.flat(part for piece, apart in zip(column, differ)
                                       for part in (self._in_whole(piece) if apart else (piece,)))
                    for operand, column in columns.items()}  # fmt: skip
            operands = [flat.get(operand, operand) for operand in operands]
        return super()._by_ranges(make, operands, length)

    def _differ(self, pieces: Iterable[Piece]) -> bool:
        """Return whether some pieces are of parts of dimensions, and some of whole values or of parts in the source."""
        return len({self._of_dims(root) for root, _, _ in pieces if self.uniform(root) is None}) > 1

    def _of_dims(self, root: int) -> bool:
        return root >= self.of_ranks and self.all[root].op == TAKE

    def _in_whole(self, piece: Piece) -> list[Piece]:
        """The ranges of the whole value for a piece of a part of dimensions."""
        root, start, stop = piece
        _, selection, operands, _ = self.all[root]
        sizes = self._sizes(operands[0]) if self._of_dims(root) else None
        runs = flattened(cast(Selection, selection), sizes) if sizes else None
        if runs is None:
            return [piece]
        return [(operands[0], low, high) for low, high in inside(runs, ((start, stop),)) or ()]

    def _by_rows(self, make: Callable[[Sequence[int]], int], operands: Sequence[int], padded: int) -> int:
        """An elementwise operator on rows and constant rows behind one another."""
        _, axis, rows, _ = self.all[padded]
        at, results = 0, []
        for row in rows:
            sizes = self._sizes(row) or ()
            selection = along(cast(int, axis), ((at, at + sizes[cast(int, axis)]),), len(sizes))
            values = [
                self.view(self.flat(self.apart(self.take(operand, selection))), sizes)
                if self.ranged(operand) else self.narrow(operand)
                for operand in operands
            ]  # fmt: skip
            results.append(self.elementwise(make, values))
            at += sizes[cast(int, axis)]
        return self.in_rows(results, cast(int, axis))

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

    def _elementwise_boxes(self, make: Callable[[Sequence[int]], int], operands: Sequence[int]) -> int | None:
        """The part of the result on whole operands."""
        shape = broadcast(self.shape(operand) for operand in operands)
        if elements(shape) is None or not shape or (len(shape) == 1 and not self._mixed(operands)):
            return None
        single = any(self.elements(operand) == 1 and self.box(operand) is not None for operand in operands)
        fitting = next(iter(self._of_one_dimension(operands, shape)), None) if single else None
        fitting = fitting or self._fitting(operands, shape)
        result = None if fitting is None else self._of_wholes(make, operands, *fitting, shape)
        if result is None:  # what the source takes is a whole value as well
            rows = [iter(()) if self.root(operand) < self.of_ranks else self.boxes(operand) for operand in operands]
            fitting = self._fitting_of(rows, shape)
            result = None if fitting is None else self._of_wholes(make, operands, *fitting, shape)
        return result

    def _elementwise_of_source(self, make: Callable[[Sequence[int]], int], operands: Sequence[int]) -> int | None:
        """The result as a part of a value of the source, where operands are equal parts of values around; None for any
        further result."""
        shape = broadcast(self.shape(operand) for operand in operands)
        if elements(shape) is None or not shape or len(shape) == 1:
            return None
        rows = [list(islice(self.surroundings(operand), CHOICES)) for operand in operands]
        for lead in next(filter(None, rows), ()):
            chosen = self._ranges_of(lead, len(shape))
            alike = [[box for box in row if self._ranges_of(box, len(shape)) == chosen] for row in rows]
            fits = all(length(runs, size) == shape[dim] for dim, (size, runs) in chosen.items())
            if fits and all(fitting or not row for fitting, row in zip(alike, rows)):
                boxes = [next(iter(fitting), None) for fitting in alike]
                result = self._of_wholes(make, operands, boxes, chosen, shape)
                if result is not None and self.in_source(result):
                    return result
        return None

    def _ranges_of(self, box: Box, rank: int) -> dict[int, tuple[int, Runs]]:
        """Dimension -> the size and the ranges of a box, in a value of more dimensions in front."""
        sizes = self._sizes(box[0]) or ()
        pairs = enumerate(zip(sizes, box[1]), rank - len(sizes))
        return {dim: (size, runs) for dim, (size, runs) in pairs if runs is not None}

    def _of_wholes(
        self, make: Callable[[Sequence[int]], int], operands: Sequence[int], boxes: Sequence[Box | None],
        chosen: Mapping[int, tuple[int, Runs]], shape: Sequence[object],
    ) -> int | None:  # fmt: skip
        """The part of the result on the whole values of boxes."""
        if not chosen:
            return None
        boxes = [box or self._same_part(operand, chosen, len(shape)) for operand, box in zip(operands, boxes)]
        longer, selection = list(shape), list[Runs | None]([None] * len(shape))
        for dim, (size, runs) in chosen.items():
            longer[dim], selection[dim] = size, runs
        values = self._whole_operands(operands, boxes, chosen, len(shape), spread=False)
        result = None if values is None else self.elementwise(make, values)
        if result is not None and self.root(result) >= self.of_ranks and any(shape[dim] == 1 for dim in chosen):
            spread = self._whole_operands(operands, boxes, chosen, len(shape), spread=True)
            longest = None if spread in (None, values) else self.elementwise(make, spread or ())
            result = longest if longest is not None and self.root(longest) < self.of_ranks else result
        if result is None or self.shape(result) != tuple(longer):
            return None
        return self.take(result, tuple(selection))

    def _fitting(
        self, operands: Sequence[int], shape: Sequence[object], only: frozenset[int] | None = None
    ) -> tuple[list[Box | None], dict[int, tuple[int, Runs]]] | None:  # fmt: skip
        """A box of each part, and the common ranges along each dimension; None for other parts. ``only``: the
        dimensions of the ranges in each box."""
        return self._fitting_of(map(self.boxes, operands), shape, only)

    def _fitting_of(
        self, rows: Iterable[Iterator[Box]], shape: Sequence[object], only: frozenset[int] | None = None
    ) -> tuple[list[Box | None], dict[int, tuple[int, Runs]]] | None:  # fmt: skip
        boxes: list[Box | None] = []
        chosen: dict[int, tuple[int, Runs]] = {}
        for row in rows:
            box = None
            for box in row:
                parts = self._ranges_of(box, len(shape))
                if only in (None, parts.keys()) and all(
                    length(part[1], part[0]) == shape[dim] and chosen.get(dim, part) == part
                    for dim, part in parts.items()
                ):
                    chosen |= parts
                    break
            else:
                if box is not None:
                    return None
            boxes.append(box)
        return boxes, chosen

    def _of_one_dimension(
        self, operands: Sequence[int], shape: Sequence[object]
    ) -> Iterator[tuple[list[Box | None], dict[int, tuple[int, Runs]]]]:
        """Boxes with ranges of a common dimension: a single element of a value is a range of any dimension."""
        for dim in range(len(shape)):
            fitting = self._fitting(operands, shape, frozenset({dim}))
            if fitting is not None:
                yield fitting

    def _same_part(self, number: int, chosen: Mapping[int, tuple[int, Runs]], rank: int) -> Box | None:
        """The whole value behind a part that the source takes too, where other operands are these very ranges."""
        op, selection, operands, _ = self.all[number]
        sizes = self._sizes(operands[0]) if op == TAKE else None
        if sizes is None:
            return None
        runs = cast(Selection, selection)
        pairs = enumerate(zip(sizes, runs), rank - len(sizes))
        return (operands[0], runs) if {dim: part for dim, part in pairs if part[1] is not None} == chosen else None

    def _whole_operands(
        self, operands: Sequence[int], boxes: Sequence[Box | None], chosen: Mapping[int, tuple[int, Runs]], rank: int,
        *, spread: bool,
    ) -> list[int] | None:  # fmt: skip
        """The operands of an operator on whole values; ``spread``: an operand of length 1 may be a part of a longer
        dimension."""
        values = []
        for operand, box in zip(operands, boxes):
            whole = operand if box is None else box[0]
            front = rank - len(self.shape(whole) or ())
            for dim, (size, runs) in chosen.items():
                at = dim - front
                if at < 0 or (box is not None and box[1][at] is not None):
                    continue
                single = (self.shape(whole) or ())[at] == 1
                moved = None if single and not spread else self.resized(whole, at, size, runs)
                if moved is None and not single:
                    return None
                whole = whole if moved is None else moved
            values.append(whole)
        return values

    def _mixed(self, operands: Sequence[int]) -> bool:
        """Return whether flat operands have elements of different ranges, or of values of different sizes."""
        roots = [self.root(operand) for operand in operands]
        if any(self.all[root].op == TAKE for root in roots):
            return True
        flat = [self.all[root] for root in roots if self.all[root].op == FLAT]
        return len({(row.attributes, *map(self.elements, row.operands)) for row in flat}) > 1

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
        values = {self.uniform(number) for number in numbers}
        shape = (*(rest_shape or ())[:axis], sum(filter(None, before)), *(rest_shape or ())[axis:])
        mixed = any(len({root for root, _, _ in self.pieces(number)}) > 1 for number in numbers)
        if len(shape) == 1 or (mixed and prod(shape[:axis]) == 1):
            if sum(len(self.pieces(number)) for number in numbers) > RANGES:
                return self._number(CONCAT, axis, tuple(numbers), shape)
            row = self.flat(piece for number in numbers for piece in self.pieces(number))
            row = self.view(row, shape)
            return row if len(shape) == 1 else self._by_source(row)
        if len(values) == 1 and None not in values:
            return self.constant(values.pop() or 0, shape)
        if self.sealed and (part := self._part_of_row(numbers, axis)) is not None:
            return part
        choices = [self.raw(number) for number in numbers]
        for whole in choices[0]:
            if all(whole in row for row in choices):
                result = self._joined_boxes(numbers, [(whole, row[whole]) for row in choices], axis)
                if result is not None:
                    return result
        result = self._joined_boxes(numbers, [self.box(number) for number in numbers], axis)
        rows = [dict(self.boxes(number)) for number in numbers] if result is None else []
        for whole in rows[0] if rows else ():
            if result is None and all(whole in row for row in rows):
                result = self._joined_boxes(numbers, [(whole, row[whole]) for row in rows], axis)
        for dim in range(len(shape)) if result is None else ():
            result = self._joined_along(numbers, axis, shape, dim) if result is None else result
        if result is None:
            result = self._number(CONCAT, axis, tuple(numbers), shape)
            if values != {None} and prod(shape[:axis]) == 1:
                self.pad(result)
        return self._by_source(result)

    def _part_of_row(self, numbers: Sequence[int], axis: int) -> int | None:
        """Equal parts of the values of a row of the source, as this part of the row; None for any other values."""
        if any(self.root(number) < self.of_ranks for number in numbers):
            return None
        rows = [dict(islice(self.surroundings(number), CHOICES)) for number in numbers]
        for lead, selection in rows[0].items() if all(rows) else ():
            for row in self.readers(CONCAT, lead):
                _, along, operands, _ = self.all[row]
                alike = along == axis and len(operands) == len(rows) and selection[axis] is None
                if alike and all(part.get(whole) == selection for whole, part in zip(operands, rows)):
                    return self.take(row, selection)
        return None

    def _by_source(self, number: int) -> int:
        """The expression of the source for a rank's values in a row."""
        base = self._base(number)
        whole = number if base is None else base[0]
        return number if self.root(whole) < self.of_ranks else self.of_source(number)

    def _joined_along(self, numbers: Sequence[int], axis: int, shape: Sizes, dim: int) -> int | None:
        """Parts in a row along a whole dimension, of a part of a second dimension of a common whole value."""
        bases = [self._base(number) for number in numbers]
        whole = bases[0][0] if bases[0] is not None else 0
        sizes, rest = self._sizes(whole) or (), prod((*shape[:dim], *shape[dim + 1 :]))
        if dim == axis or {base and base[0] for base in bases} != {whole} or not rest or prod(sizes) % rest:
            return None
        after = (*shape[:dim], prod(sizes) // rest, *shape[dim + 1 :])
        rows: list[Box | None] = []
        for number, base in zip(numbers, bases):
            chosen = through(sizes, base[1], after) if base is not None else None
            fits = chosen is not None and sizes_of(chosen, after) == self._sizes(number)
            rows.append((self.view(whole, after), chosen) if chosen is not None and fits else None)
        return self._joined_boxes(numbers, rows, axis) if all(rows) else None

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
        runs = joined(
            (start + at, stop + at)
            for (_, chosen), size, at in zip(rows, lengths, offsets) for start, stop in chosen[axis] or ((0, size),)
        )  # fmt: skip
        whole = self.concatenated([number for number, _ in rows], axis)
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

    def raw(self, number: int) -> dict[int, Selection]:
        """The expression behind a part, maybe a part taken by the source, in all possible shapes: whole
        value -> the ranges."""
        base = self._base(number)
        return {} if base is None else self._in_shape(*base, number)

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

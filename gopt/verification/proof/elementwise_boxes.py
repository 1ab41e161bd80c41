"""Elementwise operators on parts: the same part of the result on whole values.

Operands may be parts of different shapes, ranges of elements in a row, or values in a row with constant rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, product
from typing import cast

from gopt.verification.proof.box_rows import BoxRows
from gopt.verification.proof.boxes import CHOICES, Box
from gopt.verification.proof.forms import FLAT, TAKE, Coefficient, Piece, broadcast, elements
from gopt.verification.proof.selections import Runs, Selection, along, flattened, inside, length, replaced


class ElementwiseBoxes(BoxRows):
    """Elementwise operators on whole values and on parts."""

    def __init__(self, extents: dict[str, int]) -> None:
        super().__init__(extents)
        self._multiples: dict[tuple[int, Coefficient], int] = {}
        self._widened = set[tuple[int, ...]]()
        """Operands between whose surroundings a result is looked for now: a repeated value is around its part, and the
        part is around the value."""

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
        rows = [self.surroundings(operand) for operand in operands]
        tried: list[dict[int, tuple[int, Runs]]] = []
        for lead in next(filter(None, rows), ()):
            chosen = self._ranges_of(lead, len(shape))
            if chosen in tried or any(length(runs, size) != shape[dim] for dim, (size, runs) in chosen.items()):
                continue
            tried.append(chosen)
            alike = [[box for box in row if self._ranges_of(box, len(shape)) == chosen] for row in rows]
            choices = (
                fitting if row else (None, *self._sums_around(operand, chosen, len(shape)))
                for operand, fitting, row in zip(operands, alike, rows)
            )
            for boxes in islice(product(*choices), CHOICES):
                result = self._of_wholes(make, operands, boxes, chosen, shape)
                if result is not None and self.in_source(result):
                    return result
        return None

    def _sums_around(self, number: int, chosen: Mapping[int, tuple[int, Runs]], rank: int) -> Iterator[Box]:
        """The source's sums of the terms of a value, equal along the chosen dimensions, and of terms with the value
        zero where chosen."""
        sizes, whole = self._sizes(number) or (), number
        front, selection = rank - len(sizes), cast(Selection, (None,) * len(sizes))
        for dim, (size, runs) in chosen.items() if self.pads and min(chosen, default=0) >= front else ():
            longer = self.resized(whole, dim - front, size, runs)
            if longer is None:
                return
            whole, selection = longer, replaced(selection, dim - front, runs)
        if whole != number:
            yield from self._equal_sums(whole, selection)

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

    def _same_part(self, number: int, chosen: Mapping[int, tuple[int, Runs]], rank: int) -> Box | None:
        """The whole value behind a part that the source takes too, where other operands are these very ranges."""
        op, selection, operands, _ = self.all[number]
        sizes = self._sizes(operands[0]) if op == TAKE else None
        if sizes is None:
            return None
        runs = cast(Selection, selection)
        pairs = enumerate(zip(sizes, runs), rank - len(sizes))
        return (operands[0], runs) if {dim: part for dim, part in pairs if part[1] is not None} == chosen else None

    def _mixed(self, operands: Sequence[int]) -> bool:
        """Return whether flat operands have elements of different ranges, or of values of different sizes."""
        roots = [self.root(operand) for operand in operands]
        if any(self.all[root].op == TAKE for root in roots):
            return True
        flat = [self.all[root] for root in roots if self.all[root].op == FLAT]
        return len({(row.attributes, *map(self.elements, row.operands)) for row in flat}) > 1

    def _of_one_dimension(
        self, operands: Sequence[int], shape: Sequence[object]
    ) -> Iterator[tuple[list[Box | None], dict[int, tuple[int, Runs]]]]:
        """Boxes with ranges of a common dimension: a single element of a value is a range of any dimension."""
        for dim in range(len(shape)):
            fitting = self._fitting(operands, shape, frozenset({dim}))
            if fitting is not None:
                yield fitting

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

    def _ranges_of(self, box: Box, rank: int) -> dict[int, tuple[int, Runs]]:
        """Dimension -> the size and the ranges of a box, in a value of more dimensions in front."""
        sizes = self._sizes(box[0]) or ()
        pairs = enumerate(zip(sizes, box[1]), rank - len(sizes))
        return {dim: (size, runs) for dim, (size, runs) in pairs if runs is not None}

    # --- rows and ranges ---

    def _by_rows(self, make: Callable[[Sequence[int]], int], operands: Sequence[int], padded: int) -> int:
        """An elementwise operator on rows and constant rows behind one another."""
        axis, results = cast(int, self.all[padded].attributes), []
        for row, start, stop in self.members(padded):
            sizes = self._sizes(row) or ()
            selection = along(axis, ((start, stop),), len(sizes))
            values = [
                self.view(self.flat(self.apart(self.take(operand, selection))), sizes)
                if self.ranged(operand) else self.narrow(operand)
                for operand in operands
            ]  # fmt: skip
            results.append(self.elementwise(make, values))
        return self.in_rows(results, axis)

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

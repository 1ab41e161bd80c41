"""Values of the source around a part: equal parts of other values, in other shapes, with borders, in sums and rows.

A rank has the part of one value; the source may have read the part of another one with the same elements there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import cast

from gopt.verification.proof.boxes import CHOICES, Box, Boxes
from gopt.verification.proof.forms import CONCAT, FLAT, LINEAR, PRODUCT, elements
from gopt.verification.proof.movements import PADDED
from gopt.verification.proof.selections import Selection, Sizes, flattened, normal, replaced, shifted, through
from gopt.verification.proof.zeros import are_zero


class Surroundings(Boxes):
    """Expressions with the readers of each in the source, and the values around parts."""

    def __init__(self, extents: dict[str, int]) -> None:
        super().__init__(extents)
        self._nearby: dict[Box, Sequence[Box]] = {}
        """A part -> equal parts of other values of the source."""

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

    def surroundings(self, number: int) -> Sequence[Box]:
        """The values of the source around a part, in all possible shapes: the value under the part in front, then the
        values around the value, step by step."""
        return list(dict.fromkeys(islice(self._all_around(number), CHOICES)))

    def _all_around(self, number: int) -> Iterator[Box]:
        base, part = self._base(number), self._sizes(number) or ()
        around = self._nearby.get(base, ()) if base is not None else ()
        if base is not None and not around:
            around = [box for box in self._around(base) if any(runs is not None for runs in box[1])]
            self._nearby |= {base: around} if self.sealed else {}
        for box in around:
            yield from self._in_shape(*box, number).items()
        for box in around:
            yield from self.in_shapes_of_source(*box, part)
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
            chosen = [shifted(runs, size, front) for runs, size, (front, _) in zip(selection, sizes, ends)]
            if ends and self.all[number].operands[0] == whole:
                yield number, normal(chosen, self._sizes(number) or ())

    def _joined_around(self, whole: int, selection: Selection) -> Iterator[Box]:
        """The source's values in a row along an axis with a value."""
        for row in self.readers(CONCAT, whole):
            axis = cast(int, self.all[row].attributes)
            for operand, at, end in self.members(row) if self._sizes(row) else ():
                if operand == whole:
                    yield row, replaced(selection, axis, shifted(selection[axis], end - at, at))

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

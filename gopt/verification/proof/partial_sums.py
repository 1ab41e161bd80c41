"""Expressions with some of the terms of a sum, and with extremes of some positions.

Where an operator sums over a dimension, a rank with a part of the dimension has some of the terms: the operator on
whole operands with the terms at some positions alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import TypeAlias, cast

from gopt.verification.proof.boxes import CHOICES
from gopt.verification.proof.elementwise_boxes import ElementwiseBoxes
from gopt.verification.proof.forms import (
    CONCAT,
    EXTREME_PART,
    FLAT,
    LINEAR,
    PARTED,
    PRODUCT,
    SUM,
    TAKE,
    TOTAL,
    VIEW,
    Coefficient,
    Factors,
    Part,
    Piece,
    Shape,
    UnknownSize,
    elements,
)
from gopt.verification.proof.numbering import SOME_TERMS
from gopt.verification.proof.selections import (
    Runs,
    Selection,
    Sizes,
    along,
    inside,
    length,
    merged,
    normal,
    positions,
    replaced,
    sizes_of,
    through,
)
from gopt.verification.proof.zeros import MATRICES, are_matrices, are_zero

Addend: TypeAlias = tuple[Coefficient, int, int, tuple[Part, ...]]
"""A coefficient, an expression, the sum in the expression, and the present terms."""
SumOfTerm: TypeAlias = tuple[int, int | None, Factors]
"""An expression, the sum in the expression, and factors beside."""


def _united(selections: Sequence[Selection], shape: Sizes) -> list[Selection]:
    """Selections of the same elements in total, joined where two differ in a single dimension."""
    result = list(dict.fromkeys(selections))
    for dim, size in enumerate(shape):
        rows: dict[Selection, set[tuple[int, int]]] = {}
        for selection in result:
            rows.setdefault(replaced(selection, dim), set()).update(selection[dim] or ((0, size),))
        result = [replaced(rest, dim, merged(runs)) for rest, runs in rows.items()]
    return [normal(selection, shape) for selection in result]


def _others(runs: Runs, size: int) -> Runs:
    """The positions of a dimension beside ranges."""
    bounds = [0, *(bound for run in runs for bound in run), size]
    return tuple((start, stop) for start, stop in zip(bounds[::2], bounds[1::2]) if start < stop)


class PartialSums(ElementwiseBoxes):
    """Sums of some of the terms on ranks."""

    def __init__(self, extents: dict[str, int]) -> None:
        super().__init__(extents)
        self._takes: dict[tuple[int, Selection], int] = {}
        self._sums: dict[tuple[int, tuple[int, ...], bool], SumOfTerm] = {}
        self._padded_terms: dict[tuple[int, Hashable, Runs], bool] = {}
        self.reaches: dict[int, Callable[[Hashable, Selection], Runs | None]] = {}
        """Sum -> the positions of an index with a term in selected elements; None for an index without such a rule."""

    def take(self, number: int, selection: Selection) -> int:
        if not self.sealed or self._traits[number]:  # with rules that come to be known
            return self._taken(number, selection)
        key = number, selection
        part = self._takes.get(key)
        if part is None:
            part = self._takes[key] = self._taken(number, selection)
        return part

    def _taken(self, number: int, selection: Selection) -> int:
        op, attributes, operands, _ = self.all[number]
        if op == PARTED and operands[0] in self.reaches and operands[0] == attributes[0]:  # type: ignore[index]
            return self._reached(operands[0], attributes[1], selection)  # type: ignore[index]
        return super().take(number, selection)

    def concatenated(self, numbers: Sequence[int], axis: int) -> int:
        plain, result = super().concatenated, None
        for row in (
            islice(self._with_zeros_of_wholes(numbers, axis), CHOICES) if self.sealed and len(numbers) > 1 else ()
        ):
            joined_row = plain(row, axis)
            if self.in_source(joined_row):
                return joined_row
            result = joined_row if result is None else result
        return plain(numbers, axis) if result is None else result

    def _with_zeros_of_wholes(self, numbers: Sequence[int], axis: int) -> Iterator[Sequence[int]]:
        """Values in a row, where zeros are the elements of a whole value around a part in the row, the likeliest whole
        value first."""
        row = [part for number in numbers for part in self._in_row_along(number, axis)]
        if all(self.uniform(number) != 0 for number in row):
            return
        raw = [(at, *box) for at, number in enumerate(row) for box in self.raw(number).items() if axis < len(box[1])]

        def order(part: tuple[int, int, Selection]) -> tuple[bool, bool]:
            """Sums with rules in front, then parts of the dimension."""
            return self._core(part[1]) not in self.reaches, part[2][axis] is None

        around = ((at, *box) for at, number in enumerate(row) for box in self.surroundings(number))
        visited = set[tuple[int, ...]]()
        for at, whole, selection in chain(sorted(raw, key=order), around):
            numbers = tuple(self._with_zeros(row, axis, at, whole, selection) if axis < len(selection) else row)
            if numbers not in visited:
                visited.add(numbers)
                yield numbers

    def _in_row_along(self, number: int, axis: int) -> Sequence[int]:
        """The values of a rank's row."""
        op, along_axis, operands, _ = self.all[number]
        return operands if op == CONCAT and along_axis == axis and number >= self.of_ranks else [number]

    def _with_zeros(self, numbers: Sequence[int], axis: int, lead: int, whole: int, selection: Selection) -> list[int]:
        """Values in a row, where zeros are the elements of a whole value beside the part ``lead`` of the whole."""
        sizes = self._sizes(whole) or ()
        lengths = [(self._sizes(number) or ())[axis] for number in numbers]
        front = selection[axis] or ((0, sizes[axis]),)
        at = front[0][0] - sum(lengths[:lead])
        row = []
        for number, count in zip(numbers, lengths):
            chosen = replaced(selection, axis, ((at, at + count),))
            inside = self.uniform(number) == 0 and 0 <= at < at + count <= sizes[axis]
            absent = inside and self._vanish(whole, axis, selection, chosen, self._sizes(number) or ())
            row.append(super().take(whole, normal(chosen, sizes)) if absent else number)
            at += count
        return row

    def _core(self, number: int) -> int:
        """A sum, for some of the terms of the sum."""
        op, attributes, operands, _ = self.all[number]
        return operands[0] if op == PARTED and operands[0] == attributes[0] else number  # type: ignore[index]

    def _vanish(self, whole: int, axis: int, beside: Selection, selection: Selection, shape: Sizes) -> bool:
        """Return whether selected elements of a value are zero."""
        if self._core(whole) in self.reaches:
            return self._unreached(whole, axis, beside, selection, shape)
        sizes = self._sizes(whole) or ()
        return sizes_of(selection, sizes) == shape and are_zero(self, whole, normal(selection, sizes))

    def _unreached(self, whole: int, axis: int, beside: Selection, selection: Selection, shape: Sizes) -> bool:
        """Return whether selected elements of a sum have no term, and are in the source's part with those beside."""
        core, sizes = self._core(whole), self._sizes(whole) or ()
        near, far = (self._smallest(core, normal(chosen, sizes), sizes) for chosen in (beside, selection))
        if sizes_of(selection, sizes) != shape or (near and near[0]) != (far and far[0]):
            return False
        return self.reaches[core]((axis, None), selection) == ()

    def _reached(self, core: int, parts: Sequence[Part], selection: Selection) -> int:
        """Selected elements of a sum with some terms: zeros without a term in the selection, whole values with all
        terms of the selection."""
        number = core
        for label, size, runs in parts:
            reaching = self.reaches[core](label, selection)
            present = set(positions(runs))
            if reaching is not None and present.isdisjoint(positions(reaching)):
                return self.linear({}, sizes_of(selection, self._sizes(core) or ()))
            if reaching is None or not present.issuperset(positions(reaching)):
                number = self.parted(number, core, label, size, runs)
        return super().take(number, selection)

    def parted_extreme(self, op: str, number: int, core: int, part: Part) -> int:
        """The extreme of some positions, for the extreme of all positions along an index."""
        _, size, runs = part
        if runs == ((0, size),):
            return number
        parts: tuple[Part, ...] = (part,)
        form, attributes, operands, shape = self.all[number]
        if form == EXTREME_PART and attributes[2] == op:  # type: ignore[index]
            core, parts = attributes[0], tuple(sorted((*attributes[1], part), key=repr))  # type: ignore[index]
            (number,) = operands
        return self._number(EXTREME_PART, (core, parts, op), (number,), shape)

    def joined_extremes(self, kind: str, numbers: Iterable[int]) -> int | None:
        """The extreme of extremes of some positions; None unless the positions together are a box."""
        rows = [(self.view(number, self.shape(self.root(number))), self.shape(number)) for number in numbers]
        boxes: list[dict[object, Runs]] = []
        sizes: dict[object, int] = {}
        origins = set()
        for number, shape in rows:
            op, attributes, operands, _ = self.all[number]
            if op != EXTREME_PART or attributes[2] != kind:  # type: ignore[index]
                return None
            core, parts, _ = cast(tuple[int, tuple[Part, ...], str], attributes)
            origins.add((operands[0], shape, core))
            boxes.append({label: runs for label, _, runs in parts})
            sizes |= {label: size for label, size, _ in parts}
        united = _united([tuple(map(box.get, sizes)) for box in boxes], tuple(sizes.values()))
        if len(origins) != 1 or len(united) != 1:
            return None
        ((whole, shape, core),) = origins
        for (label, size), runs in zip(sizes.items(), united[0]):
            whole = whole if runs is None else self.parted_extreme(kind, whole, core, (label, size, runs))
        return self.view(whole, shape)

    def extreme_of_pieces(self, op: str, pieces: Iterable[Piece], shape: Shape = ()) -> int:
        rows: list[Piece] = []
        boxes: dict[int, list[Selection]] = {}
        for root, start, stop in pieces:
            for within_part, low, high in self.extreme_parts(op, root) or [(root, start, stop)]:
                expression = self.all[within_part]
                if expression.op == TAKE and (low, high) == (0, self.elements(within_part)):
                    boxes.setdefault(expression.operands[0], []).append(cast(Selection, expression.attributes))
                else:
                    rows.append((within_part, low, high))
        for whole, selections in boxes.items():
            for selection in _united(selections, self._sizes(whole) or ()):
                rows += self.pieces(self.take(whole, selection))
        return super().extreme_of_pieces(op, rows, shape)

    def addends(self, number: int) -> list[Addend] | None:
        """Sums with some of the terms in an expression: coefficient, whole expression, sum, terms; None for any other
        term."""
        if not self._traits[number] & SOME_TERMS:
            return None
        op, attributes, operands, shape = self.all[number]
        if op == PARTED:
            core, parts = cast(tuple[int, tuple[Part, ...]], attributes)
            return [(1, operands[0], core, parts)]
        rows: list[Addend] = []
        for atom, factor in self.terms(number) if op == LINEAR else [(operand, 1) for operand in operands[:1]]:
            single = op in (LINEAR, VIEW, TAKE) or (op == FLAT and len(set(operands)) == 1)
            inner = self.addends(atom) if single else None
            if inner is None or (op == LINEAR and self.shape(atom) != shape):
                return None
            rows += [(factor * change, whole, core, parts) for change, whole, core, parts in inner]
        if op == VIEW:
            return [(factor, self.view(whole, shape), core, parts) for factor, whole, core, parts in rows]
        if op == FLAT:
            spans = cast(Runs, attributes)
            return [
                (factor, self.flat(piece for span in spans for piece in self.cut(whole, *span)), core, parts)
                for factor, whole, core, parts in rows
            ]
        if op == TAKE:
            selection = cast(Selection, attributes)
            return [(factor, self.take(whole, selection), core, parts) for factor, whole, core, parts in rows]
        return rows or None

    def parted(self, number: int, core: int, label: object, size: int, runs: Runs) -> int:
        """An expression with only some of the terms of the sum ``core``: positions ``runs`` of ``size``.

        The expression must be linear in the core. Raises ValueError for a term without the core."""
        shape = self.shape(number)
        if runs == ((0, size),):
            return number
        if not runs or self._are_padded(core, label, size, runs):
            return self.linear({}, shape)
        if merged(runs) == runs and self._are_padded(core, label, size, _others(runs, size)):  # each position once
            return number
        op, attributes, operands, _ = self.all[number]
        if op == VIEW:
            return self.view(self.parted(operands[0], core, label, size, runs), shape)
        if op == TAKE:
            return self.take(self.parted(operands[0], core, label, size, runs), attributes)  # type: ignore[arg-type]
        if op == FLAT:
            return self.flat(
                (self.parted(root, core, label, size, runs), start, stop) for root, start, stop in self.pieces(number)
            )
        if op == LINEAR:
            return self.linear(
                {self.parted(atom, core, label, size, runs): factor for atom, factor in self.terms(number)}, shape
            )
        labels: tuple[object, ...] = ()
        if op == PARTED and attributes[0] == core:  # type: ignore[index]
            labels, number = attributes[1], operands[0]  # type: ignore[index]
        elif not self.depend([number], {core}):
            raise ValueError("a term without the sum")
        for before in [part for part in labels if part[0] == label]:  # type: ignore[index]
            _, outer, chosen = cast(Part, before)
            if length(chosen, outer) != size:
                raise ValueError("some of other terms than there are")
            labels, size, runs = tuple(part for part in labels if part != before), outer, inside(chosen, runs) or ()
        key = tuple(sorted((*labels, (label, size, runs)), key=repr))
        return self._number(PARTED, (core, key), (number,), shape)

    def _are_padded(self, core: int, label: object, size: int, runs: Runs) -> bool:
        """Return whether the terms of a sum at positions of an index are products of numbers and of zeros of a Pad."""
        if not self.sealed or not self.pads or not isinstance(label, tuple):
            return False
        key = core, label, runs
        if key not in self._padded_terms:
            pairs = self._summed_dims(core, label)
            open = [operand for operand, _ in pairs if not self.finite[operand]]
            shapes = [self._sizes(operand) or () for operand, _ in pairs]
            self._padded_terms[key] = any(
                -len(shape) <= dim and shape[dim] == size and open in ([], [operand])
                and are_zero(self, operand, along(dim % len(shape), runs, len(shape)))
                for (operand, dim), shape in zip(pairs, shapes)
            )  # fmt: skip
        return self._padded_terms[key]

    def _summed_dims(self, core: int, label: tuple[object, ...]) -> list[tuple[int, int]]:
        """The operands of a sum with an index of the sum, and the dimension in each, from behind; [] where unknown."""
        op, attributes, operands, _ = self.all[core]
        if op == MATRICES and are_matrices(self, operands):
            return list(zip(operands, (-1, -2)))
        (dim,) = label if len(label) == 1 else (None,)
        if not isinstance(dim, int) or dim >= 0:
            return []
        everywhere, along_axes = op == TOTAL and not attributes, op == SUM and dim in cast(tuple[int, ...], attributes)
        return [(operands[0], dim)] if everywhere or along_axes else []

    # --- what passes through boxes and partial sums ---

    def _total_terms(self, root: int, start: int, stop: int) -> Iterator[tuple[int, Coefficient]]:
        op, selection, operands, shape = self.all[root]
        if op != TAKE or (start, stop) != (0, elements(shape)):
            for number, factor in super()._total_terms(root, start, stop):
                form, ranges, summed, _ = self.all[number]
                if form != TOTAL or ranges or self.all[summed[0]].op != TAKE:
                    yield number, factor
                    continue
                for part, change in self._total_terms(summed[0], 0, self.elements(summed[0]) or 0):
                    yield part, factor * change
            return
        sizes, summands = self._sizes(operands[0]) or (), self.summands(operands[0])
        shapes = {atom: self._sizes(self.root(atom)) or () for atom, _ in summands if self.elements(atom) != 1}
        rows = {atom: through(sizes, cast(Selection, selection), shape) for atom, shape in shapes.items()}
        if None in rows.values():  # positions would be counted in another shape
            yield from super()._total_terms(root, start, stop)
            return
        for atom, factor in summands:
            if atom not in rows:
                yield self.view(atom, ()), factor * stop
                continue
            number = core = self._number(TOTAL, (), (self.root(atom),), ())
            size = shapes[atom]
            for dim, runs in enumerate(rows[atom] or ()):
                if runs is not None:
                    number = self.parted(number, core, (dim - len(size),), size[dim], runs)
            yield number, factor

    def summed(self, number: int, axes: Collection[int]) -> int:
        """The sum along dimensions, of length 1 afterwards. Raises UnknownSize."""
        sizes = self._sizes(number)
        if sizes is None:
            raise UnknownSize("a sum of unknown size")
        if len(set(axes)) == len(sizes):
            return self._sum_of_all(number, (1,) * len(sizes))
        rows = self._rows_in_front(number, axes, sizes)
        if rows:
            return self.elementwise(self.added, [self.summed(row, axes) for row in rows])
        nearby = self.box(number) or (number, (None,) * len(sizes))
        nearest = self._sum_of_part(number, *nearby, axes, sizes)
        moved = all(sizes[axis] == 1 for axis in axes)
        if not self.sealed or (self.in_source(nearest) and not moved):
            return nearest
        boxes = dict.fromkeys((nearby, *self.surroundings(number)))
        result = next(filter(self.in_source, (self._sum_of_part(number, *box, axes, sizes) for box in boxes)), None)
        if (result is None or moved) and self.pads and any(are_zero(self, *box) for box in boxes):
            return self.linear({}, self.shape(nearest))
        return nearest if result is None else result

    def _rows_in_front(self, number: int, axes: Collection[int], sizes: Sizes) -> list[int]:
        """The ranges of several values with all elements of a value, in rows along the first dimension longer than 1,
        if this is one of the summed ones; [] for any other value."""
        axis = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
        pieces, width = self.pieces(number), prod(sizes[axis + 1 :])
        if axis not in axes or len({root for root, _, _ in pieces}) < 2:
            return []
        lengths = [divmod(stop - start, width) for _, start, stop in pieces]
        if any(rest for _, rest in lengths):
            return []
        shapes = ((*sizes[:axis], rows, *sizes[axis + 1 :]) for rows, _ in lengths)
        return [self.view(self.flat([piece]), shape) for piece, shape in zip(pieces, shapes)]

    def _sum_of_all(self, number: int, shape: Sizes) -> int:
        """The sum of all elements of a part, as of a value of the source around the part if there."""
        result = self.total(number, shape)
        if not self.sealed or not self.raw(number) or self.in_source(result):
            return result
        # A part of thousands of ranges costs as many steps each time.
        boxes = (box for box in self.surroundings(number) if all(len(runs or ()) <= CHOICES for runs in box[1]))
        results = (self.total(self.take(*box), shape) for box in boxes)
        return next(filter(self.in_source, results), result)

    def _sum_of_part(self, number: int, whole: int, selection: Selection, axes: Collection[int], sizes: Sizes) -> int:
        """The sum of a part of a whole value."""
        shape = self._sizes(whole) or ()
        after, local = (tuple(1 if dim in axes else size for dim, size in enumerate(row)) for row in (shape, sizes))
        if elements(after) == 1 == elements(local):  # a part may have rows of the whole again and again
            return self.total(number, (1,) * len(sizes))
        factor, atom = self._scale(whole)
        inner = self.shape(atom) or ()
        front = len(shape) - len(inner)
        inner_axes = [dim for dim in axes if dim >= front and inner[dim - front] != 1]
        for dim in axes:
            factor *= 1 if dim in inner_axes else length(selection[dim], shape[dim])
        row = self._summed(atom, tuple(dim - front for dim in inner_axes)) if inner_axes else (atom, atom, ())
        result, core, beside = row
        for dim in inner_axes:
            runs = selection[dim]
            if runs is not None and core is None:  # a sum of several sums
                return self._number(SUM, tuple(dim - len(sizes) for dim in sorted(axes)), (number,), local)
            if runs is not None and core is not None:
                result = self.parted(result, core, (dim - len(shape),), shape[dim], runs)
        result = self.product(*zip((result, 1), *beside)) if beside else result
        rest = tuple(None if dim in axes else runs for dim, runs in enumerate(selection))
        return self.take(self.linear({result: factor}, after), rest)

    def _summed(self, atom: int, axes: tuple[int, ...]) -> SumOfTerm:
        """The sum of a term, factors constant along the dimensions in front; the sum alone, if a single one; the
        factors beside, where made of the sum.

        Sums of a residual stream have the same terms again and again."""
        key = atom, axes, self.sealed
        if key not in self._sums:
            self._sums[key] = self._sum_of_term(atom, axes)
        return self._sums[key]

    def _sum_of_term(self, atom: int, axes: tuple[int, ...]) -> SumOfTerm:
        op, _, _, shape = self.all[atom]
        rank = len(shape or ())
        if op == PRODUCT:
            front, rest = list[tuple[int, int]](), list[tuple[int, int]]()
            for factor, power in self.factors(atom):
                apart = all(self._length(factor, dim - rank) == 1 for dim in axes)
                (front if apart else rest).append((factor, power))
            if front:
                whole = self.product(*zip(*rest))
                short = rank - len(self.shape(whole) or ())
                inner = self.summed(whole, [dim - short for dim in axes])
                core = self._with_positions(self.root(inner), self.shape(whole))
                if core is not None and self.depend([factor for factor, _ in front], {core}):
                    return inner, core, tuple(front)
                return self.product(*zip((inner, 1), *front)), core, ()
        after = tuple(1 if dim in axes else size for dim, size in enumerate(shape or ()))
        if elements(after) == 1 and self.root(atom) == atom:
            result = self.total(atom, after)
            return result, self._with_positions(self.root(result), shape), ()
        result = self._number(SUM, tuple(dim - rank for dim in axes), (atom,), after)
        return result, result, ()

    def _with_positions(self, number: int, shape: Shape) -> int | None:
        """A sum with positions of terms along dimensions of a shape; None for a sum over ranges, or over a value of
        another shape."""
        op, ranges, operands, _ = self.all[number]
        fits = op == SUM or (op == TOTAL and not ranges and self.shape(operands[0]) == shape)
        return number if fits else None

    def _length(self, number: int, dim: int) -> int | str | None:
        """The length of a dimension counted from behind."""
        shape = self.shape(number) or ()
        return shape[dim] if -dim <= len(shape) else 1

    def _reduction(self, number: int, axes: frozenset[str], how: str) -> int:
        op, attributes, operands, _ = self.all[number]
        live = axes & self.varies[number]
        if live and live == axes and number in self.padded:
            return self.in_rows([self.reduced(row, live, how) for row in operands], cast(int, attributes))
        if live and live == axes and op == TAKE:
            return self.take(self.reduced(operands[0], live, how), cast(Selection, attributes))
        if live and live == axes and op == PARTED and how == "sum":
            core, parts = cast(tuple[int, tuple[Part, ...]], attributes)
            result = self.reduced(operands[0], live, how)
            if self.depend([result], {core}):
                for label, size, runs in parts:
                    result = self.parted(result, core, label, size, runs)
                return result
        return super()._reduction(number, axes, how)

    def on_member(self, number: int, coordinates: Mapping[str, int]) -> int:
        op, attributes, operands, _ = self.all[number]
        if op == TAKE and not self.varies[number].isdisjoint(coordinates):
            return self.take(self.on_member(operands[0], coordinates), cast(Selection, attributes))
        return super().on_member(number, coordinates)

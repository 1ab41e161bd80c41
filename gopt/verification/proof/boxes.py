"""Expressions with boxes: ranges of dimensions of a whole value, and some of the terms of a sum.

A rank that has a part of a dimension computes an operator on the part. By the laws here its result is the same part of
the operator on whole values, or, where the operator sums over the dimension, some of the terms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import cast

from gopt.verification.proof.expressions import (
    CONCAT,
    EXP,
    EXTREME_PART,
    FLAT,
    INVERSE,
    LARGEST,
    LINEAR,
    LOG,
    ONE,
    PARTED,
    PRODUCT,
    SUM,
    TAKE,
    TOTAL,
    VIEW,
    Coefficient,
    Elements,
    Part,
    Piece,
    Shape,
    broadcast,
    elements,
)
from gopt.verification.proof.selections import (
    Runs,
    Selection,
    Sizes,
    flattened,
    inside,
    joined,
    length,
    normal,
    sizes_of,
    through,
    unflattened,
    wholes,
    within,
)

Box = tuple[int, Selection]
"""A whole value, and the selected ranges of each dimension."""


def _beside(selection: Selection, axis: int) -> Selection:
    return (*selection[:axis], *selection[axis + 1 :])


def _united(selections: Sequence[Selection], shape: Sizes) -> list[Selection]:
    """Selections that together select what the given ones do: such as differ in one dimension are joined."""
    result = list(dict.fromkeys(selections))
    for dim, size in enumerate(shape):
        rows: dict[Selection, set[tuple[int, int]]] = {}
        for selection in result:
            rows.setdefault((*selection[:dim], None, *selection[dim + 1 :]), set()).update(
                selection[dim] or ((0, size),)
            )
        result = [(*rest[:dim], _merged(runs), *rest[dim + 1 :]) for rest, runs in rows.items()]
    return [normal(selection, shape) for selection in result]


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The positions in any of some ranges, in order."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return tuple(result)


def _repeated(along: Mapping[int, Runs | None], size: int) -> Runs | None:
    """The same ranges in each of several equal parts of a dimension; None if there are none."""
    for part, runs in along.items():
        if size % part == 0:
            return joined((start + at, stop + at) for at in range(0, size, part) for start, stop in runs or ())
    return None


class Expressions(Elements):
    """Expressions of whole values and of parts.

    Parts that the source itself takes are whole values; ``known``: root -> their selections."""

    def __init__(self, extents: dict[str, int]) -> None:
        super().__init__(extents)
        self.known: dict[int, list[tuple[Selection, int]]] = {}
        self._shapes: dict[int, dict[Sizes, None]] = {}
        """Root -> the shapes in which the source has it."""
        self._boxes: dict[int, Box | None] = {}
        self.sealed = False
        self.of_ranks = 0
        """The first number behind the source's."""
        self._by_operator: dict[str, list[int]] = {}
        self._readers: dict[tuple[str, int], list[int]] = {}

    def seal(self) -> None:
        """End the reading of the source: all parts so far are whole values."""
        self.sealed, self.of_ranks = True, len(self.all)
        for number, (op, attributes, operands, shape) in enumerate(list(self.all)):
            self._by_operator.setdefault(op, []).append(number)
            for operand in dict.fromkeys(operands):
                self._readers.setdefault((op, operand), []).append(number)
            if op == TAKE:
                self.known.setdefault(operands[0], []).append((attributes, number))  # type: ignore[arg-type]
            elif op == FLAT and len(set(operands)) == 1:
                selection = self._rows(number)
                if selection is not None:
                    sizes = sizes_of(selection, self._sizes(operands[0]) or ())
                    self.known.setdefault(operands[0], []).append((selection, self.view(number, sizes)))
            elif op == VIEW and elements(shape) is not None:
                self._shapes.setdefault(operands[0], {})[shape] = None  # type: ignore[index]

    def of_source(self, op: str) -> Sequence[int]:
        """The expressions of an operator in the source."""
        return self._by_operator.get(op, ())

    def readers(self, op: str, operand: int) -> Sequence[int]:
        """The expressions of an operator in the source that read an expression."""
        return self._readers.get((op, operand), ())

    def _sizes(self, number: int) -> Sizes | None:
        shape = self.shape(number)
        return None if elements(shape) is None else shape  # type: ignore[return-value]

    def _rows(self, number: int) -> Selection | None:
        """The selection behind a flat value with elements of a single expression."""
        pieces = self.pieces(number)
        shape = self._sizes(pieces[0][0])
        if not shape or len({root for root, _, _ in pieces}) > 1:
            return None
        return unflattened(joined((start, stop) for _, start, stop in pieces), shape)

    # --- boxes ---

    def take(self, number: int, selection: Selection) -> int:
        """Ranges of the dimensions of a value."""
        before = self._sizes(number)
        if before is None:
            raise ValueError("a part of a value of unknown size")
        selection = normal(selection, before)
        if all(runs is None for runs in selection):
            return number
        shape = sizes_of(selection, before)
        value = self.uniform(number)
        if value is not None:
            return self.constant(value, shape)
        op, attributes, operands, _ = self.all[number]
        if op == VIEW:
            inner = through(before, selection, self._sizes(operands[0]) or ())
            if inner is not None:
                return self.view(self.take(operands[0], inner), shape)
        if op == TAKE:
            return self.take(operands[0], tuple(map(inside, attributes, selection)))  # type: ignore[arg-type]
        if op == FLAT:
            return self.flat(piece for start, stop in selection[0] or () for piece in self.cut(number, start, stop))
        if op == CONCAT and (value := self._only(number, selection)) is not None:
            return self.constant(value, shape)
        if op == LINEAR:
            free = self._free(number)
            if any(runs is not None and free[dim] for dim, runs in enumerate(selection)):
                sizes = tuple(new if free[dim] else old for dim, (old, new) in enumerate(zip(before, shape)))
                rest = tuple(None if free[dim] else runs for dim, runs in enumerate(selection))
                return self.take(self.linear(dict(self.terms(number)), sizes), rest)
        if 0 in shape:
            return self.linear({}, shape)
        last = max(dim for dim, runs in enumerate(selection) if runs is not None)
        if set(shape[:last]) <= {1}:
            ranges = flattened(selection, before) or ()
            return self.view(self.flat((number, start, stop) for start, stop in ranges), shape)
        return self._number(TAKE, selection, (number,), shape)

    def _only(self, number: int, selection: Selection) -> Coefficient | None:
        """The constant that all selected values of a row are; None for anything else."""
        _, axis, operands, _ = self.all[number]
        runs, at, values = selection[int(cast(int, axis))], 0, set()
        for operand in operands:
            size = (self._sizes(operand) or ())[int(cast(int, axis))]
            if runs is None or any(start < at + size and stop > at for start, stop in runs):
                values.add(self.uniform(operand))
            at += size
        return values.pop() if len(values) == 1 else None

    def selection(self, number: int) -> Selection | None:
        """The ranges of an expression that are taken; None for any other form."""
        op, attributes, _, _ = self.all[number]
        return cast(Selection, attributes) if op == TAKE else None

    def _free(self, number: int) -> list[bool]:
        """For each dimension of a sum, whether no term follows it."""
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
        root = self.root(number)
        expression = self.all[root]
        if expression.op == TAKE:
            whole, selection = expression.operands[0], cast(Selection, expression.attributes)
        elif (rows := self._rows(root)) is not None:
            whole, selection = self.pieces(root)[0][0], rows
        else:
            return None
        whole, selection = self._smallest(whole, selection, self._sizes(whole) or ()) or (whole, selection)
        if all(runs is None for runs in selection):
            return None
        return next(iter(self._in_shape(whole, selection, number).items()), None)

    def _smallest(self, whole: int, selection: Selection, shape: Sizes) -> Box | None:
        """The smallest part that the source takes of a value and that has a selection."""
        best: Box | None = None
        for outer, number in self.known.get(whole, ()):
            inner = []
            for dim, size in enumerate(shape):
                part = within(outer[dim], selection[dim], size)
                if part is None:
                    break
                inner.append(part)
            else:
                if best is None or (self.elements(number) or 0) < (self.elements(best[0]) or 0):
                    best = number, normal(inner, self._sizes(number) or ())
        return best

    def resized(self, number: int, dim: int, size: int, runs: Runs) -> int | None:
        """A value of another length of a dimension that has the value at ``runs``, for a value that does not follow the
        dimension; None for any other value."""
        shape = self._sizes(number) or ()
        if shape[dim] == size:
            return number
        sizes = (*shape[:dim], size, *shape[dim + 1 :])
        value = self.uniform(number)
        if value is not None:
            return self.constant(value, sizes)
        root = self.root(number)
        before = self._sizes(root) or ()
        if self.all[root].op != LINEAR or size % max(shape[dim], 1):
            return None
        selection = tuple(runs if at == dim else None for at in range(len(shape)))
        for at, free in enumerate(self._free(root)):
            if free:
                longer = (*before[:at], before[at] * size // shape[dim], *before[at + 1 :])
                whole = self.view(self.linear(dict(self.terms(root)), longer), sizes)
                if self.take(whole, selection) == number:
                    return whole
        return None

    def elementwise(self, make: Callable[[Sequence[int]], int], operands: Sequence[int]) -> int:
        parts = [operand for operand in dict.fromkeys(operands) if self.all[self.root(operand)].op in (TAKE, FLAT)]
        if not parts:
            return super().elementwise(make, operands)
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
            values = [whole if operand == parts[0] else self._narrow(operand) for operand in operands]
            return self.view(self.take(self.elementwise(make, values), selection), shape)
        return super().elementwise(make, operands)

    def _elementwise_boxes(self, make: Callable[[Sequence[int]], int], operands: Sequence[int]) -> int | None:
        """The part of the result on whole operands; None unless all operands have the same part."""
        shape = broadcast(self.shape(operand) for operand in operands)
        if elements(shape) is None or not shape or (len(shape) == 1 and not self._mixed(operands)):
            return None
        boxes = [self.box(operand) for operand in operands]
        chosen: dict[int, tuple[int, Runs]] = {}
        for box in boxes:
            if box is None:
                continue
            sizes = self._sizes(box[0]) or ()
            for dim, (size, runs) in enumerate(zip(sizes, box[1]), len(shape) - len(sizes)):
                if runs is not None and chosen.setdefault(dim, (size, runs)) != (size, runs):
                    return None
        if not chosen:
            return None
        values = []
        for operand, box in zip(operands, boxes):
            whole = operand if box is None else box[0]
            front = len(shape) - len(self.shape(whole) or ())
            for dim, (size, runs) in chosen.items():
                at = dim - front
                if at < 0 or (box is not None and box[1][at] is not None) or (self.shape(whole) or ())[at] == 1:
                    continue
                moved = self.resized(whole, at, size, runs)
                if moved is None:
                    return None
                whole = moved
            values.append(whole)
        sizes = list(shape)
        selection: list[Runs | None] = [None] * len(shape)
        for dim, (size, runs) in chosen.items():
            sizes[dim], selection[dim] = size, runs
        result = self.elementwise(make, values)
        if self.shape(result) != tuple(sizes):
            return None
        return self.take(result, tuple(selection))

    def _mixed(self, operands: Sequence[int]) -> bool:
        """Return whether flat operands have elements of different ranges."""
        roots = [self.root(operand) for operand in operands]
        if any(self.all[root].op == TAKE for root in roots):
            return True
        return len({self.all[root].attributes for root in roots if self.all[root].op == FLAT}) > 1

    def concatenated(self, numbers: Sequence[int], axis: int) -> int:
        """Values in a row along an axis."""
        shapes = [self._sizes(number) for number in numbers]
        before = [shape[axis] if shape else None for shape in shapes]
        rest = {shape and (*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        if len(rest) != 1 or None in before:
            return self._number(CONCAT, axis, tuple(numbers), None)
        (others,) = rest
        numbers = [number for number, size in zip(numbers, before) if size] or numbers[:1]
        if len(numbers) == 1:
            return numbers[0]
        values = {self.uniform(number) for number in numbers}
        shape = (*(others or ())[:axis], sum(filter(None, before)), *(others or ())[axis:])
        if len(values) == 1 and None not in values:
            return self.constant(values.pop() or 0, shape)
        choices = [self._raw(number) for number in numbers]
        for whole in choices[0]:
            if all(whole in row for row in choices):
                result = self._joined_boxes(numbers, [(whole, row[whole]) for row in choices], axis)
                if result is not None:
                    return result
        result = self._joined_boxes(numbers, [self.box(number) for number in numbers], axis)
        return result if result is not None else self._number(CONCAT, axis, tuple(numbers), shape)

    def _joined_boxes(self, numbers: Sequence[int], boxes: Sequence[Box | None], axis: int) -> int | None:
        """Parts in a row: a part of their common whole value, or of their whole values in a row."""
        rows = [box or (number, (None,) * len(self.shape(number) or ())) for number, box in zip(numbers, boxes)]
        if len({whole for whole, _ in rows}) == 1 and all(boxes):
            ((whole, first), *_), size = rows, (self._sizes(rows[0][0]) or ())[axis]
            if len({_beside(chosen, axis) for _, chosen in rows}) > 1:
                return None
            runs = joined(run for _, chosen in rows for run in chosen[axis] or ((0, size),))
            return self.take(whole, (*first[:axis], runs, *first[axis + 1 :]))
        if not self.sealed:
            return None
        rows = self._wholes_in_row(rows, axis) or []
        unchanged = [whole for whole, _ in rows] == list(numbers)
        if unchanged or len({_beside(chosen, axis) for _, chosen in rows}) != 1:
            return None
        lengths = [(self._sizes(whole) or ())[axis] for whole, _ in rows]
        offsets = [0, *accumulate(lengths)]
        runs = joined(
            (start + at, stop + at)
            for (_, chosen), size, at in zip(rows, lengths, offsets) for start, stop in chosen[axis] or ((0, size),)
        )  # fmt: skip
        whole = self.concatenated([number for number, _ in rows], axis)
        return self.take(whole, (*rows[0][1][:axis], runs, *rows[0][1][axis + 1 :]))

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
        for (whole, chosen), other in zip(rows, like):
            value = self.uniform(whole)
            if value is not None:
                before, size = (self._sizes(whole) or ())[axis], (self._sizes(other) or ())[axis]
                runs = None if before == size else _repeated(along, size)
                if runs is None and before < size:
                    runs = ((0, before),) if result else ((size - before, size),)
                if length(runs, size) != before or value != self.uniform(other):
                    return None
                sizes = [*(self._sizes(model[0]) or ())]
                sizes[axis] = size
                whole, chosen = self.constant(value, tuple(sizes)), (*model[1][:axis], runs, *model[1][axis + 1 :])
            result.append((whole, chosen))
        return result if len(result) == len(rows) else None

    def _row_of_source(self, numbers: Sequence[int | None], axis: int) -> Sequence[int]:
        """The values in a row of the source that has these values, with any constants between them; () for none."""
        first = next((number for number in numbers if number is not None), None)
        for row in self.readers(CONCAT, first) if first is not None else ():
            _, along, operands, _ = self.all[row]
            same = along == axis and len(operands) == len(numbers)
            if same and all(want in (None, operand) for want, operand in zip(numbers, operands)):
                return operands
        return ()

    def _raw(self, number: int) -> dict[int, Selection]:
        """The expression behind a part, which may be a part that the source takes, in shapes that it may have: whole
        value -> the ranges."""
        root = self.root(number)
        expression = self.all[root]
        if expression.op == TAKE:
            return self._in_shape(expression.operands[0], cast(Selection, expression.attributes), number)
        if expression.op == FLAT and (rows := self._rows(root)) is not None:
            return self._in_shape(self.pieces(root)[0][0], rows, number)
        return {}

    def _in_shape(self, whole: int, selection: Selection, number: int) -> dict[int, Selection]:
        """The shapes of a whole value in which a part has the shape of an expression: the value, and the ranges; shapes
        that the source has first."""
        shape, part = self._sizes(whole), self._sizes(number)
        if shape is None or part is None:
            return {}
        if sizes_of(selection, shape) == part:
            return {whole: selection}
        result: dict[int, Selection] = {}
        for sizes in self._shapes.get(self.root(whole), ()):
            chosen = through(shape, selection, sizes) if len(sizes) == len(part) else None
            if chosen is not None and sizes_of(chosen, sizes) == part:
                result[self.view(whole, sizes)] = chosen
        for sizes, chosen in wholes(shape, selection, part):
            result.setdefault(self.view(whole, sizes), chosen)
        return result

    # --- what passes through boxes and partial sums ---

    def _total_terms(self, root: int, start: int, stop: int) -> Iterator[tuple[int, Coefficient]]:
        op, selection, operands, shape = self.all[root]
        if op != TAKE or (start, stop) != (0, elements(shape)):
            yield from super()._total_terms(root, start, stop)
            return
        sizes = self._sizes(operands[0]) or ()
        count = elements(sizes) or 1
        for atom, factor in super()._total_terms(operands[0], 0, count):
            if atom == ONE:
                yield ONE, factor * Fraction(stop, count)
                continue
            number = atom
            for dim, runs in enumerate(cast(Selection, selection)):
                if runs is not None:
                    number = self.parted(number, atom, (dim - len(sizes),), sizes[dim], runs)
            yield number, factor

    def summed(self, number: int, axes: Collection[int]) -> int:
        """The sum along dimensions, which have length 1 afterwards. Raises ValueError for an unknown size."""
        sizes = self._sizes(number)
        if sizes is None:
            raise ValueError("a sum of unknown size")
        whole, selection = self.box(number) or (number, (None,) * len(sizes))
        shape = self._sizes(whole) or ()
        after = tuple(1 if dim in axes else size for dim, size in enumerate(shape))
        if elements(after) == 1:
            return self.total(number, (1,) * len(sizes))
        terms: dict[int, Coefficient] = {}
        for atom, factor in self.terms(whole):
            sizes = self.shape(atom) or ()
            front = len(shape) - len(sizes)
            own = [dim for dim in axes if dim >= front and sizes[dim - front] != 1]
            for dim in axes:
                factor *= 1 if dim in own else length(selection[dim], shape[dim])
            result = self._summed(atom, [dim - front for dim in own]) if own else atom
            core = self._core_sum(result)
            for dim in own:
                runs = selection[dim]
                if runs is not None:
                    result = self.parted(result, core, (dim - len(shape),), shape[dim], runs)
            terms[result] = terms.get(result, 0) + factor
        rest = tuple(None if dim in axes else runs for dim, runs in enumerate(selection))
        return self.take(self.linear(terms, after), rest)

    def _summed(self, atom: int, axes: Sequence[int]) -> int:
        """The sum of a term: factors that do not follow the dimensions stand in front."""
        op, exponents, operands, shape = self.all[atom]
        rank = len(shape or ())
        if op == PRODUCT:
            powers = cast(tuple[int, ...], exponents)
            apart = [all(self._length(factor, dim - rank) == 1 for dim in axes) for factor in operands]
            if any(apart):
                front = [(factor, power) for factor, power, out in zip(operands, powers, apart) if out]
                rest = [(factor, power) for factor, power, out in zip(operands, powers, apart) if not out]
                inner = self.product(*zip(*rest))
                short = rank - len(self.shape(inner) or ())
                inner = self.summed(inner, [dim - short for dim in axes])
                return self.product([inner, *(factor for factor, _ in front)], [1, *(power for _, power in front)])
        after = tuple(1 if dim in axes else size for dim, size in enumerate(shape or ()))
        if elements(after) == 1:
            return self.total(atom, after)
        return self._number(SUM, tuple(dim - rank for dim in axes), (atom,), after)

    def _length(self, number: int, dim: int) -> int | str | None:
        """The length of a dimension counted from behind."""
        shape = self.shape(number) or ()
        return shape[dim] if -dim <= len(shape) else 1

    def _core_sum(self, number: int) -> int:
        """The sum in a product with a sum."""
        op, _, operands, _ = self.all[number]
        if op in (VIEW, LINEAR) and len(operands) == 1:
            return self._core_sum(operands[0])
        sums = [operand for operand in operands if self.all[operand].op in (SUM, TOTAL)] if op == PRODUCT else []
        return sums[-1] if len(sums) == 1 else number

    def _reduction(self, number: int, axes: frozenset[str], how: str) -> int:
        op, attributes, operands, _ = self.all[number]
        live = axes & self.varies[number]
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

    # --- exponentials and logarithms ---

    def exp(self, number: int) -> int:
        """The exponential of a sum: a product of exponentials."""
        return self.elementwise(self._exp, [number])

    def _exp(self, values: Sequence[int]) -> int:
        (number,) = values
        terms, shape = list(self.terms(number)), self.shape(number)
        if not terms or not all(isinstance(factor, int) or factor.denominator == 1 for _, factor in terms):
            return self._number(EXP, (), (number,), shape)
        if len(terms) == 1 and terms[0][1] == 1 and self.shape(terms[0][0]) == shape:
            return self._number(EXP, (), (number,), shape)
        factors = [self.exp(atom) for atom, _ in terms]
        return self.linear({self.product(factors, [int(factor) for _, factor in terms]): 1}, shape)

    def log(self, number: int) -> int:
        """The logarithm of a product with exponentials: a sum."""
        return self.elementwise(self._log, [number])

    def _log(self, values: Sequence[int]) -> int:
        op, exponents, operands, shape = self.all[values[0]]
        pairs = list(zip(operands, cast(tuple[int, ...], exponents))) if op == PRODUCT else []
        terms: dict[int, Coefficient] = {
            self._exponent(factor): power for factor, power in pairs if self.is_exponential(factor)
        }
        if not terms:
            return self._number(LOG, (), tuple(values), shape)
        rest = [(factor, power) for factor, power in pairs if not self.is_exponential(factor)]
        if rest:
            inner = self.product(*zip(*rest))
            terms[self._number(LOG, (), (inner,), self.shape(inner))] = 1
        return self.linear(terms, shape)

    def _exponent(self, number: int) -> int:
        return self.view(self.all[self.root(number)].operands[0], self.shape(number))

    def _covered(self, atom: int, terms: Iterable[int]) -> bool:
        """Return whether a value is the largest of a row, beside the logarithm of, or a quotient by, a sum of the
        exponentials of the row: where one is no number, the other is none."""
        row = self._largest_of(atom)
        if row is None:
            return False
        sums = [term for term in terms if self.all[term].op in (LOG, INVERSE)]
        factors = {root for root, _, _ in self.pieces(self.exp(row))}
        return bool(sums) and self.depend(sums, factors)

    def _largest_of(self, number: int) -> int | None:
        """The value whose largest elements a value has; None for any other value."""
        op, attributes, operands, _ = self.all[number]
        if op == "ReduceMax":
            return next(iter(self._raw(operands[0])), operands[0])
        if op in (VIEW, TAKE) or (op == LARGEST and attributes == "members"):
            rows = {self._largest_of(operand) for operand in operands}
            return rows.pop() if len(rows) == 1 else None
        return None

    # --- some of the terms of a sum ---

    def parted_extreme(self, number: int, core: int, label: object, size: int, runs: Runs) -> int:
        """The largest or smallest of some positions, where an expression is that of all positions."""
        if runs == ((0, size),):
            return number
        return self._number(EXTREME_PART, (core, ((label, size, runs),)), (number,), self.shape(number))

    def joined_extremes(self, numbers: Iterable[int]) -> int | None:
        """The extreme of extremes of some positions; None unless they are of one expression, and of all positions."""
        rows = [(self.view(number, self.shape(self.root(number))), self.shape(number)) for number in numbers]
        ranges: list[tuple[int, int]] = []
        found = set()
        for number, shape in rows:
            op, attributes, operands, _ = self.all[number]
            if op != EXTREME_PART:
                return None
            core, ((label, size, runs),) = cast(tuple[int, tuple[Part]], attributes)
            found.add((operands[0], shape, core, label, size))
            ranges += runs
        covered = 0
        for start, stop in sorted(ranges):
            covered = max(covered, stop) if start <= covered else covered
        if len(found) != 1:
            return None
        ((whole, shape, _, _, size),) = found
        return self.view(whole, shape) if covered == size else None

    def _extreme(self, op: str, pieces: Iterable[Piece], shape: Shape = ()) -> int:
        rows: list[Piece] = []
        boxes: dict[int, list[Selection]] = {}
        for root, start, stop in pieces:
            for within_part, low, high in self._extreme_parts(op, root) or [(root, start, stop)]:
                expression = self.all[within_part]
                if expression.op == TAKE and (low, high) == (0, self.elements(within_part)):
                    boxes.setdefault(expression.operands[0], []).append(cast(Selection, expression.attributes))
                else:
                    rows.append((within_part, low, high))
        for whole, selections in boxes.items():
            for selection in _united(selections, self._sizes(whole) or ()):
                rows += self.pieces(self.take(whole, selection))
        return super()._extreme(op, rows, shape)

    def addends(self, number: int) -> list[tuple[Coefficient, int, int, tuple[Part, ...]]] | None:
        """Sums of which an expression has some of the terms: coefficient, whole expression, sum, terms; None if it is
        anything else."""
        op, attributes, operands, shape = self.all[number]
        if op == PARTED:
            return [(1, operands[0], *cast(tuple[int, tuple[Part, ...]], attributes))]
        if op == LINEAR and operands:
            rows = []
            for atom, factor in self.terms(number):
                inner = self.addends(atom)
                if inner is None or self.shape(atom) != shape:
                    return None
                rows += [(factor * change, *rest) for change, *rest in inner]
            return rows
        if op in (VIEW, TAKE):
            inner = self.addends(operands[0])
            if inner is None:
                return None
            move = (
                (lambda whole: self.view(whole, shape))
                if op == VIEW
                else (lambda whole: self.take(whole, cast(Selection, attributes)))
            )
            return [(factor, move(whole), core, parts) for factor, whole, core, parts in inner]
        return None

    def parted(self, number: int, core: int, label: object, size: int, runs: Runs) -> int:
        """An expression in which ``core`` has only some of the terms that it sums: positions ``runs`` of ``size``.

        The expression must be linear in the core. Raises ValueError for a term without it."""
        shape = self.shape(number)
        if runs == ((0, size),):
            return number
        if not runs:
            return self.linear({}, shape)
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
        key = tuple(sorted((*labels, (label, size, runs)), key=repr))
        return self._number(PARTED, (core, key), (number,), shape)

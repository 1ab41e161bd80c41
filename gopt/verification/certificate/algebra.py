"""Equal values, by sums of products of elements.

An expression is read as *stretches*: ranges of elements in row-major order, in each of which an element is a sum of
products of elements of other expressions, at places that are counted by strides. Values are equal if the sums are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, NamedTuple, TypeAlias

Loops: TypeAlias = tuple[tuple[int, int], ...]
"""Lengths and strides of nested loops, the outermost first; () is a single place."""
Factor: TypeAlias = tuple[str, Any, Any]
"""A kind, data, and the terms inside: "at" an expression, offset and loops; "sum" over inner positions, of each place
or of all alike; "over" members along axes; "on" a member; "group" of terms; "inverse"."""
Factors: TypeAlias = tuple[tuple[Factor, int], ...]
Terms: TypeAlias = tuple[tuple[Factors, Fraction], ...]
"""Products of powers, with coefficients, sorted."""
Stretches: TypeAlias = list[tuple[int, Terms]]
"""Numbers of elements, and the sum in each."""
EXP = "Exp"
EXPANDED = "Expand"
FEW = 8
"""Elements up to which a sum of elements is written out."""
MOST = 1 << 14
"""Stretches up to which a value is read."""


class WrongLine(Exception):
    """A line that does not follow; ``lemma``: the name of a law that the checker does not have."""

    def __init__(self, actual: str, due: str = "", lemma: str = "") -> None:
        super().__init__(actual)
        self.actual, self.due, self.lemma = actual, due, lemma


class _Carry(Exception):
    """Steps of a loop leave a row: the loop, and the first step in another row."""


class ExpressionLine(NamedTuple):
    """An expression of the certificate."""

    op: str
    attributes: Any
    operands: tuple[int, ...]
    shape: tuple[Any, ...] | None


def one(*factors: tuple[Factor, int], times: Fraction | int = 1) -> Terms:
    """A single product."""
    return ((tuple(sorted(factors)), Fraction(times)),)


def rebuilt(terms: Terms, change: Callable[[Factor], Factor]) -> Terms:
    """Terms with other factors."""
    return tuple(sorted((tuple(sorted((change(atom), power) for atom, power in factors)), coefficient)
                        for factors, coefficient in terms))  # fmt: skip


def leaves(terms: Terms) -> Iterator[tuple[int, int, Loops]]:
    """All elements in terms."""
    for factors, _ in terms:
        for (kind, data, inner), _ in factors:
            if kind == "at":
                yield data
            else:
                yield from leaves(inner)


def merged(loops: Iterable[tuple[int, int]]) -> Loops:
    """Nested loops as few loops; () where no step moves."""
    result: list[tuple[int, int]] = []
    for loop in loops:
        result += [loop] if loop[0] != 1 else []
        while len(result) > 1 and result[-2][1] == result[-1][0] * result[-1][1]:
            (outer, _), (inner, step) = result[-2:]
            result[-2:] = [(outer * inner, step)]
    return tuple(result) if any(stride for _, stride in result) else ()


def composed(at: int, outer: Loops, offset: int, inner: Loops) -> tuple[int, Loops]:
    """The places ``inner`` at the positions of loops ``outer`` from ``at`` on. Raises _Carry."""
    if len(inner) < 2:
        stride = inner[0][1] if inner else 0
        return offset + at * stride, merged((size, step * stride) for size, step in outer)
    weights = [prod(size for size, _ in inner[dim + 1 :]) for dim in range(len(inner))]
    used = [at // weight % size for weight, (size, _) in zip(weights, inner)]
    offset += sum(index * stride for index, (_, stride) in zip(used, inner))
    result: list[tuple[int, int]] = []
    for loop, (size, step) in reversed(list(enumerate(outer))):
        while size > 1 and step:
            dim = next(dim for dim, weight in enumerate(weights) if weight <= step)
            stride, rest = divmod(step, weights[dim])
            room, row = inner[dim][0] - used[dim], max(inner[dim][0] // stride, 1)
            if rest:
                raise _Carry(loop, 1)
            if (size - 1) * stride < room:
                used[dim] += (size - 1) * stride
                result.append((size, stride * inner[dim][1]))
                break
            if used[dim] >= stride or inner[dim][0] % stride or size % row or not dim:
                raise _Carry(loop, -(-room // stride) if used[dim] >= stride or size < row else size // row * row)
            used[dim] += (row - 1) * stride
            result.append((row, stride * inner[dim][1]))
            size, step = size // row, step * row
        else:
            result.append((size, 0))
    return offset, merged(reversed(result))


def moved(terms: Terms, move: Callable[[int, Loops, int], tuple[int, Loops]], within: int = 1) -> Terms:
    """Terms with other places; ``within``: inner positions of the sums around."""

    def of(atom: Factor) -> Factor:
        kind, data, inner = atom
        if kind == "at":
            return kind, (data[0], *move(data[1], data[2], within)), inner
        if kind == "sum":
            return (kind, data, moved(inner, move, within * (data[2] - data[1]))) if data[0] else atom
        return kind, data, moved(inner, move, within)

    return rebuilt(terms, of)


def at_places(terms: Terms, at: int, loops: Loops) -> Terms:
    """Terms at the positions of loops. Raises _Carry."""

    def move(offset: int, inner: Loops, within: int) -> tuple[int, Loops]:
        outer = tuple((size, step * within) for size, step in loops)
        return composed(at * within, (*outer, (within, 1)) if within > 1 else outer, offset, inner)

    return moved(terms, move)


def _parted(loops: Loops, count: int) -> tuple[Loops, Loops]:
    """Loops around the innermost ``count`` positions, and the loops of these. Raises ValueError."""
    outer, inner = list(loops), list[tuple[int, int]]()
    while count > 1:
        size, stride = outer.pop()
        if size > count:
            if size % count:
                raise ValueError
            outer.append((size // count, stride * count))
            size = count
        inner.insert(0, (size, stride))
        count //= size
    return tuple(outer), tuple(inner)


def _outside(loops: Loops, count: int, within: int) -> Loops:
    """Loops without the innermost ``count`` positions around ``within``, where no element moves. Raises ValueError."""
    if not loops:
        return ()
    around, inner = _parted(loops, within)
    outer, middle = _parted(around, count)
    if any(stride for _, stride in middle):
        raise ValueError
    return merged([*outer, *inner])


def _anchored(terms: Terms) -> tuple[int, Terms]:
    """The first position in a row of elements, and the body of the sum, alike for all ranges of elements."""
    rows: list[tuple[int, int]] = []

    def read(offset: int, loops: Loops, within: int) -> tuple[int, Loops]:
        outer, _ = _parted(loops, within) if loops else ((), ())
        outer = merged(outer)
        if len(outer) > 1:
            raise ValueError
        rows.extend((offset, stride) for _, stride in outer)
        return offset, loops

    def shifted(offset: int, loops: Loops, within: int) -> tuple[int, Loops]:
        outer, inner = _parted(loops, within) if loops else ((), ())
        step = sum(stride for _, stride in merged(outer))
        return offset - start * step, ((0, step), *inner)

    try:
        moved(terms, read)
    except ValueError:
        return 0, terms
    start = next((offset // stride for offset, stride in rows if stride > 0), 0)
    return start, moved(terms, shifted)


def unmerged(terms: Terms) -> bool:
    """Return whether terms have a sum of elements in several loops, whose ranges are not joined."""
    return any(
        (kind == "sum" and not data[0] and not _movable(inner)) or (kind != "at" and unmerged(inner))
        for factors, _ in terms for (kind, data, inner), _ in factors
    )  # fmt: skip


def _movable(terms: Terms) -> bool:
    return all(loops[:1] and loops[0][0] == 0 for _, _, loops in leaves(terms))


def _element(rest: Factors, terms: Terms, at: int) -> Factors:
    """The factors of a single element of a sum."""
    if not _movable(terms):
        return ((("none", (), ()), 0),)
    ((factors, _),) = moved(terms, lambda offset, loops, _: (offset + at * loops[0][1], merged(loops[1:])))
    return tuple(sorted((*rest, *factors)))


class Algebra:
    """The expressions of a certificate by number, and their stretches. ``extents``: the size of each axis."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        self.extents, self.forms = extents, list[ExpressionLine]()
        self.varies, self.finite = list[frozenset[str]](), list[bool]()
        self._stretches: dict[int, Stretches] = {}
        self._spread: dict[tuple[int, tuple[int, ...]], Stretches] = {}

    def sized(self, number: int) -> bool:
        """Return whether the shape of an expression is known."""
        shape = self.forms[number].shape
        return shape is not None and all(size.__class__ is int for size in shape)

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of an expression. Raises WrongLine for an unknown one."""
        if not self.sized(number):
            raise WrongLine("an open shape", lemma="open shape")
        return self.forms[number].shape or ()

    # --- sums of products ---

    def added(self, rows: Iterable[tuple[Terms, Fraction | int]]) -> Terms:
        """The sum of multiples; sums of ranges of elements are joined by the coefficient of each element."""
        total: dict[Factors, Fraction] = {}
        for terms, factor in rows:
            for factors, coefficient in terms:
                total[factors] = total.get(factors, Fraction(0)) + coefficient * factor
        groups: dict[tuple[Factors, Terms], dict[int, Fraction]] = {}
        for factors in list(total):
            sums = [atom for atom, power in factors if atom[0] == "sum" and not atom[1][0] and power == 1]
            if len(sums) == 1 and total[factors]:
                rest, ((_, (_, start, stop), inner),) = tuple(pair for pair in factors if pair[0] != sums[0]), sums
                changes, coefficient = groups.setdefault((rest, inner), {}), total.pop(factors)
                changes[start] = changes.get(start, Fraction(0)) + coefficient
                changes[stop] = changes.get(stop, Fraction(0)) - coefficient
        for (rest, inner), changes in groups.items():
            level = Fraction(0)
            for start, stop in pairwise(sorted(bound for bound, change in changes.items() if change)):
                level += changes[start]
                while level and total.get(element := _element(rest, inner, start - 1)) == level:
                    start -= 1
                    del total[element]
                while level and total.get(element := _element(rest, inner, stop)) == level:
                    stop += 1
                    del total[element]
                few = range(start, stop) if stop - start <= FEW and _movable(inner) else ()
                for at in few:
                    total[_element(rest, inner, at)] = total.get(_element(rest, inner, at), Fraction(0)) + level
                if level and not few:
                    total[one(*rest, (("sum", (False, start, stop), inner), 1))[0][0]] = level
        return tuple(sorted(term for term in total.items() if term[1] or not self._is_finite(term[0])))

    def _is_finite(self, factors: Factors) -> bool:
        return all(
            atom[0] != "inverse" and (self.finite[atom[1][0]] if atom[0] == "at" else all(
                self._is_finite(inner) for inner, _ in atom[2])) for atom, _ in factors
        )  # fmt: skip

    def multiplied(self, rows: Iterable[tuple[Terms, int]]) -> Terms:
        """The product of powers; a sum of several terms is a factor."""
        total: dict[Factor, int] = {}
        scale, rows = Fraction(1), list(rows)
        finite = all(exponent > 0 and self._is_finite(factors) for terms, exponent in rows for factors, _ in terms)
        if finite and any(not terms for terms, _ in rows):
            return ()
        for terms, exponent in rows:
            if not any(coefficient for _, coefficient in terms):
                raise WrongLine("a product with zero", lemma="product with zero")
            ((factors, leading), *rest) = terms
            if rest:
                factors = ((("group", (), tuple((inner, value / leading) for inner, value in terms)), 1),)
            scale *= leading**exponent
            for atom, power in factors:
                if exponent < 0 and not (atom[0] == "at" and self.forms[atom[1][0]].op == EXP):  # never zero
                    atom, power = ("inverse", (), one((atom, 1))), -power
                total[atom] = total.get(atom, 0) + power * exponent
        if any(not power and not self._is_finite(((atom, 1),)) for atom, power in total.items()):
            raise WrongLine("a factor that cancels and may be no number", lemma="exponentials")
        pairs = [pair for pair in total.items() if pair[1]]
        if len(pairs) == 1 and pairs[0][0][0] == "group" and pairs[0][1] == 1:
            return self.added([(pairs[0][0][2], scale)])
        return one(*pairs, times=scale)

    def summed(self, terms: Terms, count: int, free: bool) -> Terms:
        """The sum over the innermost ``count`` positions; ``free``: other positions are around."""
        rows = []
        for factors, coefficient in terms:
            inner, outer = list[tuple[Factor, int]](), list[tuple[Factor, int]]()
            for pair in factors:
                try:
                    outer += moved(one(pair), lambda at, loops, within: (at, _outside(loops, count, within)))[0][0]
                except ValueError:
                    inner.append(pair)
            if not inner:
                rows.append((one(*outer, times=coefficient * count), 1))
                continue
            if len(inner) == 1 and inner[0][0][0] == "group" and inner[0][1] == 1:
                within = self.summed(inner[0][0][2], count, free)
                rows.append((self.multiplied([(one(*outer, times=coefficient), 1), (within, 1)]), 1))
                continue
            start, body = (0, one(*inner)) if free else _anchored(one(*inner))
            rows.append((one((("sum", (free, start, start + count), body), 1), *outer, times=coefficient), 1))
        return self.added(rows)

    def axes_of(self, terms: Terms) -> frozenset[str]:
        """The axes along which terms vary."""
        axes: set[str] = set()
        for factors, _ in terms:
            for (kind, data, inner), _ in factors:
                if kind == "at":
                    axes |= self.varies[data[0]]
                else:
                    less = data if kind == "over" else [axis for axis, _ in data] if kind == "on" else ()
                    axes |= self.axes_of(inner).difference(less)
        return frozenset(axes)

    def over(self, terms: Terms, axes: Iterable[str]) -> Terms:
        """The sum over the members along axes; factors that do not vary stand in front."""
        rows = []
        for factors, coefficient in terms:
            live = self.axes_of(((factors, Fraction(1)),)).intersection(axes)
            scale = prod(self.extents[axis] for axis in set(axes) - live)
            varying = [pair for pair in factors if self.axes_of(one(pair)) & live]
            rest = [pair for pair in factors if pair not in varying]
            if varying:
                ((kind, data, inner), power), *more = varying
                if not more and power == 1 and kind == "group":
                    terms = one(*rest, times=coefficient * scale)
                    rows.append((self.multiplied([(terms, 1), (self.over(inner, live), 1)]), 1))
                    continue
                bound: Factor = ("over", tuple(sorted(live)), one(*varying))
                if not more and power == 1 and kind == "sum":
                    bound = kind, data, self.over(inner, live)
                elif not more and power == 1 and kind == "over":
                    bound = kind, tuple(sorted(live.union(data))), inner
                rest.append((bound, 1))
            rows.append((one(*rest, times=coefficient * scale), 1))
        return self.added(rows)

    def on_member(self, terms: Terms, coordinates: Iterable[tuple[str, int]]) -> Terms:
        """Terms on one member."""

        def of(atom: Factor) -> Factor:
            kind, data, inner = atom
            axes = self.axes_of(one((atom, 1)))
            live = tuple(sorted((axis, at) for axis, at in coordinates if axis in axes))
            if not live:
                return atom
            if kind in ("at", "over"):
                return "on", live, one((atom, 1))
            return (kind, tuple(sorted((*live, *data))), inner) if kind == "on" else (kind, data, rebuilt(inner, of))

        return self.added([(rebuilt(terms, of), 1)])

    # --- stretches ---

    def places(self, stretches: Stretches, at: int, loops: Loops) -> Stretches:
        """The elements at the positions of loops."""
        result: Stretches = []
        stack = [(at, loops)]
        bounds = [0, *accumulate(length for length, _ in stretches)]
        while stack:
            at, loops = stack.pop()
            last = at + sum((size - 1) * step for size, step in loops)
            if not prod(size for size, _ in loops):
                continue
            begin = next((index for index, bound in enumerate(bounds[1:]) if at < bound), -1)
            if begin < 0 or at < 0:
                raise WrongLine(f"element {at}", f"{bounds[-1]} elements")
            loop, step = next((pair for pair in enumerate(loops) if pair[1][0] > 1 and pair[1][1]), (0, (1, 1)))[0], 1
            try:
                if last < bounds[begin + 1]:
                    result.append(
                        (prod(size for size, _ in loops), at_places(stretches[begin][1], at - bounds[begin], loops))
                    )
                    continue
                step = -(-(bounds[begin + 1] - at) // loops[loop][1])
            except _Carry as carry:
                loop, step = carry.args
            if loop >= len(loops) or len(result) + len(stack) > MOST:
                raise WrongLine("too many ranges", lemma="many ranges")
            (size, stride), *rest = loops
            if loop or step >= size:
                stack += [(index * stride + at, tuple(rest)) for index in reversed(range(size))]
            else:
                stack += [(at + step * stride, ((size - step, stride), *rest)), (at, ((step, stride), *rest))]
        return result

    def row(self, stretches: Stretches, start: int, stop: int) -> Stretches:
        """Neighbouring elements."""
        return self.places(stretches, start, ((stop - start, 1),))

    def aligned(self, rows: Sequence[Stretches]) -> Iterator[tuple[int, tuple[Terms, ...]]]:
        """ValueChecker of a size, side by side: lengths and terms."""
        if len({sum(length for length, _ in row) for row in rows}) > 1:
            raise WrongLine("values of several sizes", "of a single size")
        ends: list[int] = []
        while any(len(row) != len(ends) for row in rows):
            ends = sorted({end for row in rows for end in accumulate(length for length, _ in row)})
            rows = [row if len(row) == len(ends) else self._cut(row, ends) for row in rows]
        return ((row[0][0], tuple(terms for _, terms in row)) for row in zip(*rows))

    def _cut(self, value: Stretches, ends: Sequence[int]) -> Stretches:
        return [part for start, stop in pairwise([0, *ends]) for part in self.row(value, start, stop)]

    def alike(self, value: Stretches, due: Stretches) -> bool:
        """Return whether two values are equal."""
        if sum(length for length, _ in value) != sum(length for length, _ in due):
            return False
        return value == due or all(pair[0] == pair[1] for _, pair in self.aligned([value, due]))

    def same(self, number: int, due: int) -> bool:
        """Return whether two expressions are equal."""
        return number == due or (
            self.shape(number) == self.shape(due) and self.alike(self.stretches(number), self.stretches(due))
        )

    def spread(self, number: int, shape: tuple[int, ...]) -> Stretches:
        """An expression broadcast to a shape."""
        key = number, shape
        if key not in self._spread:
            self._spread[key] = self._broadcast(self.stretches(number), self.shape(number), shape)
        return self._spread[key]

    def _broadcast(self, value: Stretches, before: tuple[int, ...], shape: tuple[int, ...]) -> Stretches:
        sizes = (*[1] * (len(shape) - len(before)), *before)
        fits = len(sizes) == len(shape) and all(size in (1, whole) for size, whole in zip(sizes, shape))
        if not fits and prod(before) != 1:
            raise WrongLine(f"{list(before)} does not broadcast to {list(shape)}")
        if prod(before) == 1:
            return [(prod(shape), terms) for _, terms in value]
        steps = [prod(sizes[dim + 1 :]) if size != 1 else 0 for dim, size in enumerate(sizes)]
        return value if prod(before) == prod(shape) else self.places(value, 0, tuple(zip(shape, steps)))

    def pointwise(self, shape: tuple[int, ...], numbers: Sequence[int], make: Callable[..., Terms]) -> Stretches:
        """An elementwise function of expressions."""
        if not prod(shape):
            return []
        rows = [self.spread(number, shape) for number in numbers] or [[(prod(shape), one())]]
        return [(length, make(terms if numbers else ())) for length, terms in self.aligned(rows)]

    def taken(self, number: int, selection: Sequence[Any]) -> Stretches:
        """Ranges of dimensions."""
        shape, steps = (
            self.shape(number),
            [prod(self.shape(number)[dim + 1 :]) for dim in range(len(self.shape(number)))],
        )
        choices = [((0, size),) if runs is None else tuple(runs) for size, runs in zip(shape, selection)]
        lead = max((dim for dim, runs in enumerate(choices) if len(runs) > 1), default=0)
        before = [[(at, 1) for low, high in runs for at in range(low, high)] for runs in choices[:lead]]
        rows = [[(low, high - low) for low, high in runs] for runs in choices[lead:]]
        result: Stretches = []
        for block in product(*before, *rows):
            at = sum(low * step for (low, _), step in zip(block, steps))
            loops = tuple((size, step) for (_, size), step in zip(block, steps))
            result += self.places(self.stretches(number), at, loops)
        return result

    def stretches(self, number: int) -> Stretches:
        """The elements of an expression in row-major order."""
        if number not in self._stretches:
            self._stretches[number] = self._read(number) if prod(self.shape(number)) else []
        return self._stretches[number]

    def _read(self, number: int) -> Stretches:
        op, attributes, operands, _ = self.forms[number]
        shape = self.shape(number)
        if op == "one":
            return [(1, one())]
        if op == "linear":
            return self.pointwise(shape, operands, lambda rows: self.added(zip(rows, attributes)))
        if op == "product":
            return self.pointwise(shape, operands, lambda rows: self.multiplied(zip(rows, attributes)))
        if op == "inverse":
            return self.pointwise(shape, operands, lambda rows: self.multiplied([(rows[0], -1)]))
        if op == "view":
            return self.stretches(operands[0])
        if op == "flat":
            return [
                part for operand, ends in zip(operands, attributes) for part in self.row(self.stretches(operand), *ends)
            ]
        if op == "take":
            return self.taken(operands[0], attributes)
        if op == "permuted":
            return self.permuted(operands[0], attributes)
        if op == "total":
            value = self.stretches(operands[0])
            parts = [
                part for ends in attributes or [(0, prod(self.shape(operands[0])))] for part in self.row(value, *ends)
            ]
            return [(1, self.added((self.summed(terms, length, False), 1) for length, terms in parts))]
        if op == "sum along":
            return self.along(self.stretches(operands[0]), self.shape(operands[0]), attributes)
        if op == "reduced" and attributes[0] == "sum":
            return [(length, self.over(terms, attributes[1])) for length, terms in self.stretches(operands[0])]
        if op == "on member":
            return [(length, self.on_member(terms, attributes)) for length, terms in self.stretches(operands[0])]
        if op == EXPANDED and attributes is None:
            return self.spread(operands[0], shape)
        if op == "in a row" and prod(shape[:attributes]) == 1:
            return [part for operand in operands for part in self.stretches(operand)]
        return [(prod(shape), one((("at", (number, 0, merged([(prod(shape), 1)])), ()), 1)))]

    def permuted(self, number: int, order: Sequence[int]) -> Stretches:
        """The dimensions in another order."""
        shape = self.shape(number)
        return self.places(self.stretches(number), 0, tuple((shape[dim], prod(shape[dim + 1 :])) for dim in order))

    def along(self, value: Stretches, shape: tuple[int, ...], axes: Iterable[int]) -> Stretches:
        """The sum along dimensions."""
        inner = sorted({axis % len(shape) for axis in axes})
        outer = [dim for dim in range(len(shape)) if dim not in inner]
        count = prod(shape[dim] for dim in inner)
        if prod(shape) == count:
            return [(1, self.added((self.summed(terms, length, False), 1) for length, terms in value))]
        value = self.places(value, 0, tuple((shape[dim], prod(shape[dim + 1 :])) for dim in (*outer, *inner)))
        if any(length % count for length, _ in value):
            raise WrongLine("a sum of several ranges", lemma="sum of ranges")
        return [(length // count, self.summed(terms, count, True)) for length, terms in value]

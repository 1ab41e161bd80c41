"""The laws of expressions by numbers: what is drawn is computed by NumPy for each member, and by the canonical form."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from products import part

from gopt.verification.proof.constants import taken
from gopt.verification.proof.evaluation import ExpressionValues
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.flags import any_set
from gopt.verification.proof.forms import CHOICE, INVERSE, LARGEST, ONE, SMALLEST, broadcast
from gopt.verification.proof.ranges import applied
from gopt.verification.proof.selections import joined
from gopt.verification.proof.stored_values import simplest

EXTENTS = {"dp": 2, "shard": 3}
PLACES = [dict(zip(EXTENTS, index)) for index in product(*(range(size) for size in EXTENTS.values()))]
SHAPES = [(), (1,), (4,), (6,), (2, 3), (3, 2), (2, 1), (12,), (2, 6)]


class Drawn:
    """A pool of values: the number of each, and what each member has by NumPy."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.expressions = Expressions(EXTENTS)
        self.leaves: dict[object, list[np.ndarray]] = {}
        self.pool: list[tuple[int, list[np.ndarray]]] = []
        for index in range(6):
            varies = frozenset(axis for axis in EXTENTS if self.random.random() < 0.5)
            shape = self.random.choice(SHAPES)
            by_index = {}
            values = []
            for place in PLACES:
                key = tuple(place[axis] for axis in sorted(varies))
                by_index.setdefault(key, self.numbers.uniform(0.5, 2, shape))
                values.append(by_index[key])
            self.leaves[f"x{index}"] = values
            self.add(self.expressions.leaf("batch", f"x{index}", shape, varies), values)
        for value in (0, 1, Fraction(-3, 2)):
            shape = self.random.choice(SHAPES)
            self.add(self.expressions.constant(Fraction(value), shape), [np.full(shape, float(value))] * len(PLACES))

    def add(self, number: int, values: list[np.ndarray]) -> None:
        assert self.expressions.shape(number) == values[0].shape, self.expressions.all[number]
        self.pool.append((number, values))

    def alike(self, count: int) -> list[tuple[int, list[np.ndarray]]] | None:
        """Values that broadcast."""
        chosen = [self.random.choice(self.pool) for _ in range(count)]
        try:
            np.broadcast_shapes(*(values[0].shape for _, values in chosen))
        except ValueError:
            return None
        return chosen

    def step(self) -> None:
        getattr(self, self.random.choice(STEPS))()

    def sum(self) -> None:
        if chosen := self.alike(self.random.choice([1, 2, 3])):
            signs = [self.random.choice([1, -1]) for _ in chosen]
            number = self.expressions.elementwise(
                lambda items: self.expressions.added(items, signs), [n for n, _ in chosen]
            )
            self.add(number, [sum(s * v for s, v in zip(signs, row)) for row in zip(*(v for _, v in chosen))])

    def product(self) -> None:
        chosen = self.alike(2)
        if chosen and all((np.abs(value) > 1e-3).all() for value in chosen[1][1]):
            powers = [self.random.choice([1, 2]), self.random.choice([1, -1])]
            number = self.expressions.elementwise(
                lambda items: self.expressions.product(items, powers), [n for n, _ in chosen]
            )
            self.add(number, [a ** powers[0] * b ** float(powers[1]) for a, b in zip(chosen[0][1], chosen[1][1])])

    def scale(self) -> None:
        number, values = self.random.choice(self.pool)
        self.add(self.expressions.scaled(number, Fraction(2, 3)), [value * 2 / 3 for value in values])

    def bend(self) -> None:
        """An operator without laws."""
        number, values = self.random.choice(self.pool)

        def make(items):
            return self.expressions.apply(
                "Sqrt", (), [self.expressions.product(items, [2])], self.expressions.shape(items[0])
            )

        self.add(self.expressions.elementwise(make, [number]), [np.abs(value) for value in values])

    def view(self) -> None:
        number, values = self.random.choice(self.pool)
        shapes = [shape for shape in SHAPES if np.prod(shape) == values[0].size]
        shape = self.random.choice([*shapes, (values[0].size,)])
        self.add(self.expressions.view(number, shape), [value.reshape(shape) for value in values])

    def cut(self) -> None:
        number, values = self.random.choice(self.pool)
        size = values[0].size
        start, stop = sorted(self.random.sample(range(size + 1), 2)) if size else (0, 0)
        flat = self.expressions.flat(self.expressions.cut(number, start, stop))
        self.add(flat, [value.reshape(-1)[start:stop] for value in values])

    def join(self) -> None:
        chosen = [self.random.choice(self.pool) for _ in range(2)]
        if sum(values[0].size for _, values in chosen) > 24:
            return
        flat = self.expressions.flat(piece for number, _ in chosen for piece in self.expressions.pieces(number))
        self.add(flat, [np.concatenate([v.reshape(-1) for v in row]) for row in zip(*(v for _, v in chosen))])

    def again(self) -> None:
        """Two halves of one value, joined: the value."""
        number, values = self.random.choice(self.pool)
        if not values[0].size:
            return
        at = self.random.randrange(values[0].size + 1)
        halves = [*self.expressions.cut(number, 0, at), *self.expressions.cut(number, at, values[0].size)]
        assert self.expressions.split(number, [0, at, at, values[0].size]) == [
            self.expressions.cut(number, 0, at), [], self.expressions.cut(number, at, values[0].size)
        ]  # fmt: skip
        joined = self.expressions.view(self.expressions.flat(halves), values[0].shape)
        assert joined == number
        total = self.expressions.added(
            [self.expressions.total(self.expressions.flat(self.expressions.cut(number, *span)))
             for span in ((0, at), (at, values[0].size))])  # fmt: skip
        finite = all(self.expressions.finite[root] for root, _, _ in self.expressions.pieces(number))
        assert total == self.expressions.total(number) or not finite

    def seal(self) -> None:
        """From here on, parts are parts of whole values."""
        if not self.expressions.sealed and len(self.pool) > 20:
            self.expressions.seal()

    def runs(self, size: int) -> tuple[tuple[int, int], ...]:
        ends = sorted(self.random.sample(range(size + 1), min(size + 1, self.random.choice([2, 4])) // 2 * 2))
        return joined(zip(ends[::2], ends[1::2]))

    def take(self) -> None:
        number, values = self.random.choice(self.pool)
        chosen = tuple(self.runs(size) if self.random.random() < 0.5 else None for size in values[0].shape)
        self.add(self.expressions.take(number, chosen), [taken(value, chosen) for value in values])

    def shares(self) -> None:
        """Parts that members compute with, and what they give together: the same elements and sums."""
        chosen = self.alike(2)
        if chosen is None or chosen[0][1][0].shape != chosen[1][1][0].shape or not chosen[0][1][0].ndim:
            return
        expressions, (x, y) = self.expressions, (number for number, _ in chosen)
        shape = chosen[0][1][0].shape
        dim = self.random.randrange(len(shape))
        at = self.random.randrange(shape[dim] + 1)
        sides = [tuple(runs if axis == dim else None for axis in range(len(shape)))
                 for runs in (joined([(0, at)]), joined([(at, shape[dim])]))]  # fmt: skip
        parts = [expressions.elementwise(expressions.added, [expressions.take(x, side), expressions.take(y, side)])
                 for side in sides]  # fmt: skip
        sums = [a + b for a, b in zip(chosen[0][1], chosen[1][1])]
        self.add(expressions.concatenated(parts, dim), sums)
        totals = [expressions.summed(part, (dim,)) for part in parts if expressions.elements(part)]
        if totals:
            whole = expressions.elementwise(expressions.added, totals)
            self.add(whole, [value.sum(dim, keepdims=True) for value in sums])
            self.add(totals[0], [taken(value, sides[0] if at else sides[1]).sum(dim, keepdims=True) for value in sums])

    def fractions(self) -> None:
        """Parts of sums along a dimension of a value that is divided by, or multiplied with, its own sum."""
        number, values = self.random.choice(self.pool)
        shape, e = values[0].shape, self.expressions
        if not shape or not 0 < values[0].size < 13 or any((np.abs(value) < 1e-3).any() for value in values):
            return
        dim, power = self.random.randrange(len(shape)), self.random.choice([-1, 1])
        sums = [value.sum(dim, keepdims=True) for value in values]
        if any((np.abs(value) < 1e-3).any() for value in sums):
            return
        scale = e.elementwise(lambda pair: e.product(pair, (1, power)), [number, e.summed(number, (dim,))])
        rows = [value * total ** float(power) for value, total in zip(values, sums)]
        at = self.random.randrange(shape[dim] + 1)
        sides = [tuple(runs if axis == dim else None for axis in range(len(shape)))
                 for runs in (joined([(0, at)]), joined([(at, shape[dim])]))]  # fmt: skip
        parts = [e.summed(e.take(scale, side), (dim,)) for side in sides]
        for own, side in zip(parts, sides):
            self.add(own, [taken(row, side).sum(dim, keepdims=True) for row in rows])
        self.add(e.elementwise(e.added, parts), [row.sum(dim, keepdims=True) for row in rows])
        at = self.random.randrange(rows[0].sum(dim).size)
        elements = [e.view(e.flat(e.cut(part, at, at + 1)), (1, 1)) for part in parts]
        self.add(e.sum_of(elements), [row.sum(dim).reshape(-1)[at].reshape(1, 1) for row in rows])

    def choose(self) -> None:
        """A choice by flags, reduced over members."""
        if (chosen := self.alike(2)) is None:
            return
        varies = frozenset(axis for axis in EXTENTS if self.random.random() < 0.3)
        axes = [axis for axis in EXTENTS if self.random.random() < 0.7]
        name, shape = f"flag{len(self.pool)}", self.random.choice([(), *(values[0].shape for _, values in chosen)])
        by_index: dict[tuple[int, ...], np.ndarray] = {}
        flags = [by_index.setdefault(tuple(place[axis] for axis in sorted(varies)), self.numbers.random(shape) < 0.5)
                 for place in PLACES]  # fmt: skip
        self.leaves[name] = flags
        flag = self.expressions.leaf("batch", name, shape, varies)
        number = applied(self.expressions, CHOICE, (), [flag, *(number for number, _ in chosen)])
        values = [np.where(row, *pair) for row, *pair in zip(flags, *(values for _, values in chosen))]
        self.add(number, values)
        self.over_members(number, values, axes)

    def concatenate(self) -> None:
        chosen = [self.random.choice(self.pool) for _ in range(2)]
        shapes = [values[0].shape for _, values in chosen]
        dim = self.random.randrange(max(len(shapes[0]), 1))
        alike = len(shapes[0]) == len(shapes[1]) > 0 and all(
            a == b for axis, (a, b) in enumerate(zip(*shapes)) if axis != dim
        )
        if alike and sum(values[0].size for _, values in chosen) < 36:
            rows = zip(*(values for _, values in chosen))
            number = self.expressions.concatenated([number for number, _ in chosen], dim)
            self.add(number, [np.concatenate(row, dim) for row in rows])

    def pad(self) -> None:
        """A value and constant rows behind it, added to another value: a gradient of the first rows of a table."""
        number, values = self.random.choice(self.pool)
        if values[0].ndim == 0 or not 0 < values[0].size < 13:
            return
        e, rest, count = self.expressions, values[0].shape[1:], self.random.choice([1, 2])
        filled = self.random.choice([0, 2])
        padded = e.concatenated([number, e.constant(filled, (count, *rest))], 0)
        sums = [np.concatenate([value, np.full((count, *rest), float(filled))]) for value in values]
        self.add(padded, sums)
        name, other = f"pad{len(self.pool)}", self.numbers.uniform(0.5, 2, sums[0].shape)
        self.leaves[name] = [other] * len(PLACES)
        table = e.leaf("state", name, other.shape)
        whole = e.elementwise(e.added, [table, padded])
        self.add(table, self.leaves[name])
        self.add(whole, [other + value for value in sums])

    def sum_along(self) -> None:
        number, values = self.random.choice(self.pool)
        axes = [axis for axis in range(values[0].ndim) if self.random.random() < 0.6]
        self.add(self.expressions.summed(number, axes), [value.sum(tuple(axes), keepdims=True) for value in values])

    def exponential(self) -> None:
        number, values = self.random.choice(self.pool)
        if all((np.abs(value) < 5).all() for value in values):
            self.add(self.expressions.exp(number), [np.exp(value) for value in values])

    def logarithm(self) -> None:
        number, values = self.random.choice(self.pool)
        if all((value > 1e-3).all() for value in values):
            self.add(self.expressions.log(number), [np.log(value) for value in values])

    def total(self) -> None:
        number, values = self.random.choice(self.pool)
        self.add(self.expressions.total(number), [value.sum() for value in values])

    def extreme(self) -> None:
        number, values = self.random.choice(self.pool)
        if values[0].size:
            op, how = self.random.choice([(LARGEST, np.max), (SMALLEST, np.min)])
            self.add(self.expressions.extreme(op, [number]), [np.asarray(how(value)) for value in values])

    def spread(self) -> None:
        """A value of one element in all elements of a larger shape."""
        number, values = self.random.choice(self.pool)
        if values[0].size != 1 or self.expressions.ranged(number):
            return
        shape = self.random.choice([(3,), (4,), (2, 3), (2, 6)])
        self.add(self.expressions.linear({number: 1}, shape), [np.full(shape, value.item()) for value in values])

    def expand(self) -> None:
        """A value again and again along dimensions of length 1, maybe along one in front, and parts of it in a row."""
        number, values = self.random.choice(self.pool)
        sizes = tuple(self.random.choice([1, 3]) if size == 1 else size for size in values[0].shape)
        sizes = (*[2] * (self.random.random() < 0.3), *sizes)
        if not sizes or not 0 < np.prod(sizes) < 36:
            return
        e, whole = self.expressions, self.expressions.expanded(number, sizes)
        rows = [np.broadcast_to(value, sizes) for value in values]
        self.add(whole, rows)
        dim = self.random.randrange(len(sizes))
        at = self.random.randrange(sizes[dim] + 1)
        sides = [tuple(runs if axis == dim else None for axis in range(len(sizes)))
                 for runs in (joined([(0, at)]), joined([(at, sizes[dim])]))]  # fmt: skip
        parts = [e.take(whole, side) for side in sides]
        for part_of, side in zip(parts, sides):
            self.add(part_of, [taken(row, side) for row in rows])
        self.add(e.concatenated(parts, dim), rows)
        self.add(e.elementwise(e.added, [e.total(part_of) for part_of in parts]), [row.sum() for row in rows])

    def over_members(self, number: int = -1, values: Sequence[np.ndarray] = (), axes: Sequence[str] = ()) -> None:
        if number < 0:
            number, values = self.random.choice(self.pool)
            axes = [axis for axis in EXTENTS if self.random.random() < 0.6]
        how = self.random.choice(["sum", "mean", "max", "min"])
        by = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[how]
        groups = [[v for v, other in zip(values, PLACES) if all(other[a] == place[a] for a in EXTENTS if a not in axes)]
                  for place in PLACES]  # fmt: skip
        self.add(
            self.expressions.reduced(number, axes, how), [np.asarray(by(np.stack(group), axis=0)) for group in groups]
        )

    def of_member(self) -> None:
        number, values = self.random.choice(self.pool)
        axis = self.random.choice(list(EXTENTS))
        index = self.random.randrange(EXTENTS[axis])
        result = [values[PLACES.index(place | {axis: index})] for place in PLACES]
        self.add(self.expressions.on_member(number, {axis: index}), result)


def parted(expressions: Expressions, whole: int, core: int, parts: tuple[tuple[object, int, object], ...]) -> int:
    """Some of the terms of a sum."""
    for row in parts:
        whole = expressions.parted(whole, core, *row)
    return whole


STEPS = [
    "sum", "sum", "product", "product", "scale", "bend", "view", "cut", "join", "again", "total", "extreme",
    "over_members", "over_members", "of_member", "take", "take", "shares", "concatenate", "sum_along", "exponential",
    "logarithm", "seal", "pad", "spread", "fractions", "choose", "expand",
]  # fmt: skip


@pytest.mark.parametrize("seed", part(range(600), 60))
def test_laws_hold_by_numbers_on_every_member(seed):
    drawn = Drawn(seed)
    for _ in range(60):
        drawn.step()
    expressions = drawn.expressions
    same = []
    for number, values in drawn.pool[:]:
        for whole, selection in expressions.boxes(number):
            same.append((whole, selection, values))
        if addends := expressions.addends(number):
            parts = [expressions.scaled(parted(expressions, *row), factor) for factor, *row in addends]
            drawn.add(expressions.elementwise(expressions.added, parts), values)
    for (one, values), (second, others) in combinations(drawn.pool, 2):
        assert not expressions.alike(one, second) or all(map(np.allclose, values, others))
    for which, place in enumerate(PLACES):

        def leaf(expression, at, which=which):
            return drawn.leaves[expression.attributes][PLACES.index({**dict.fromkeys(EXTENTS, 0), **at})]

        found = ExpressionValues(expressions, leaf, {}).values([number for number, _ in drawn.pool], place)
        for (number, values), value in zip(drawn.pool, found):
            due = values[which]
            near = 1e-9 * max(1, np.abs(due).max(initial=0))
            np.testing.assert_allclose(value, due, rtol=1e-9, atol=near, err_msg=str(expressions.all[number]))
        evaluated = ExpressionValues(expressions, leaf, {}).values([whole for whole, _, _ in same], place)
        for (_, selection, values), value in zip(same, evaluated):
            np.testing.assert_allclose(taken(value, selection), values[which], rtol=1e-9, atol=1e-9)


def test_equal_values_have_one_number():
    e = Expressions(EXTENTS)
    x, y = (e.leaf("batch", name, (2, 3), frozenset({"dp"})) for name in "xy")
    s = e.leaf("input", "s", ())
    assert e.added([x, y]) == e.added([y, x])
    assert e.added([e.added([x, y]), x], [1, -1]) == y
    assert e.product([x, s], [1, 1]) == e.product([s, x], [1, 1])
    assert e.reduced(e.product([x, s], [1, 1]), ["dp"], "sum") == e.product([e.reduced(x, ["dp"], "sum"), s], [1, 1])
    assert e.reduced(e.reduced(x, ["dp"], "mean"), ["shard"], "mean") == e.reduced(x, ["dp", "shard"], "mean")
    assert e.reduced(x, ["shard"], "sum") == e.scaled(x, Fraction(3))
    assert e.view(e.view(x, (6,)), (2, 3)) == x
    assert e.flat([*e.cut(x, 0, 2), *e.cut(x, 2, 6)]) == e.view(x, (6,))


@pytest.mark.parametrize("op", ["sum", "product"])
def test_rows_of_a_table_beside_constant_rows_are_those_of_the_table_beside_the_constant(op):
    e = Expressions(EXTENTS)
    table, gradient = e.leaf("state", "t", (5, 2)), e.leaf("batch", "g", (3, 2), frozenset({"dp"}))
    make = e.added if op == "sum" else lambda values: e.product(values, [1] * len(values))
    padded = e.reduced(e.concatenated([gradient, e.constant(2, (2, 2))], 0), ["dp"], "sum")
    whole = e.elementwise(make, [e.elementwise(make, [table, padded]), table])
    e.seal()
    for first, last in ((0, 3), (1, 2), (2, 5), (3, 5)):
        part = e.take(table, ((((first, last),), None)))
        behind = max(last - 3, 0)
        own = e.reduced(e.take(gradient, ((((first, last - behind),), None))), ["dp"], "sum")
        own = e.concatenated([own, *([e.constant(4, (behind, 2))] if behind else [])], 0)
        if first == 3:
            own = e.constant(4)
        actual = e.elementwise(make, [e.elementwise(make, [part, own]), part])
        assert e.flat(e.apart(actual)) == e.flat(e.apart(e.take(whole, ((((first, last),), None)))))
    columns = e.take(whole, (None, ((0, 1),)))
    part, own = (e.take(number, (None, ((0, 1),))) for number in (table, padded))
    assert e.elementwise(make, [e.elementwise(make, [part, own]), part]) == columns


@pytest.mark.parametrize(
    "pair", ["a missing member", "another coefficient", "another range", "another order", "a member"]
)
def test_unequal_values_have_two_numbers(pair):
    e = Expressions(EXTENTS)
    x, y = (e.leaf("batch", name, (6,), frozenset({"dp", "shard"})) for name in "xy")
    one, other = {
        "a missing member": (e.reduced(x, ["dp"], "mean"), e.reduced(x, ["dp", "shard"], "mean")),
        "another coefficient": (e.reduced(x, ["dp"], "mean"), e.reduced(x, ["dp"], "sum")),
        "another range": (e.flat([(x, 0, 3)]), e.flat([(x, 3, 6)])),
        "another order": (e.flat([(x, 0, 6), (y, 0, 6)]), e.flat([(y, 0, 6), (x, 0, 6)])),
        "a member": (e.on_member(x, {"dp": 0}), e.on_member(x, {"dp": 1})),
    }[pair]
    assert one != other


def test_a_count_to_divide_by_is_its_multiple_and_cancels_the_count_of_a_weighted_sum_alone():
    e = Expressions(EXTENTS)
    count, x = e.leaf("batch", "n", (), frozenset({"dp"})), e.leaf("batch", "x", (4,), frozenset({"dp"}))
    e.note_count(count, ["dp"])
    whole = e.reduced(count, ["dp"], "sum")
    weighted = e.reduced(e.product([x, count], [1, 1]), ["dp"], "sum")
    assert e.counted(e.scaled(whole, Fraction(1, 4))) == e.scaled(e.counted(whole), Fraction(1, 4))
    assert e.product([weighted, whole, e.counted(whole)], [1, 1, -1]) == weighted
    assert e.product([x, whole, e.counted(whole)], [1, 1, -1]) != x, "it is not zero where the count is"
    assert e.product([weighted, count, e.counted(count)], [1, 1, -1]) != weighted, "others' terms are not"
    zero = e.constant(0, (4,))
    assert e.product([zero, e.counted(whole)], [1, -1]) == zero != e.product([zero, whole], [1, -1])


def test_a_count_of_elements_is_noted_with_its_sums():
    """The sum over members of a sum of all elements is of the reduced elements."""
    e = Expressions(EXTENTS)
    mask, x = (e.leaf("batch", name, (4,), frozenset({"dp"})) for name in "mx")
    count = e.total(mask)
    e.note_count(count, ["dp", "shard"])
    weighted, whole = e.reduced(e.product([x, count], [1, 1]), ["dp"], "sum"), e.reduced(count, ["dp", "shard"], "sum")
    assert e.product([weighted, whole, e.counted(whole)], [1, 1, -1]) == weighted
    rows = e.in_rows([e.product([x, count], [1, 1]), e.constant(0, (2,))], 0)
    assert e.has_factor(rows, count) and not e.has_factor(e.in_rows([rows, x], 0), count)
    part = ((0, 2),)
    assert e.has_factor(e.scaled(e.take(e.product([x, count], [1, 1]), (part,)), 2), count)
    assert not e.has_factor(e.take(e.product([x, count], [1, -1]), (part,)), count)


def test_flags_of_parts_are_the_flags_of_the_whole():
    """Counts of flags of each part, summed with zeros and joined, are above zero where any flag of the whole is set."""
    e = Expressions(EXTENTS)
    flags = e.apply("Not", (), [e.leaf("batch", "f", (4, 6), frozenset())], (4, 6))
    counts = e.apply("cast", ("bool", "int64"), [flags], (4, 6))
    halves = [e.take(counts, (None, ends)) for ends in (((0, 3),), ((3, 6),))]
    largest = [e.extreme("largest", [half]) for half in halves]
    whole = e.extreme("largest", [flags])
    assert any_set(e, e.extreme("largest", largest)) == whole
    assert any_set(e, e.extreme("largest", largest[:1])) not in (whole, None)
    assert any_set(e, e.extreme("largest", [largest[0], largest[0]])) != whole


def test_a_sum_of_a_factor_times_a_sum_is_one_sum_where_the_factor_is_alike():
    e = Expressions({"dp": 2, "shard": 3})
    x = e.leaf("batch", "x", (), frozenset({"dp", "shard"}))
    alike, apart = (e.leaf("batch", name, (), frozenset({name})) for name in ("dp", "shard"))
    inner, both = e.reduced(x, ["shard"], "sum"), e.reduced(e.product([x, alike], [1, 1]), ["dp", "shard"], "sum")
    assert e.reduced(e.product([inner, alike], [1, 1]), ["dp"], "sum") == both
    moved = e.reduced(e.product([inner, apart, alike], [1, 1, 1]), ["dp", "shard"], "sum")
    assert moved != e.reduced(e.product([x, apart, alike], [1, 1, 1]), ["dp", "shard"], "sum")


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("power", [-1, 1])
def test_parts_of_a_sum_beside_factors_that_are_made_of_the_sum_are_the_sum(power, positive):
    """The sum of a softmax: all terms are divided by the sum of all, and ranks add up their own."""
    e = Expressions({})
    x, y = e.leaf("state", "x", (4, 6)), e.leaf("state", "y", (4, 1))
    x = e.exp(x) if positive else x
    shares = e.product([x, e.summed(x, (1,)), y], [1, power, 1])
    whole = e.summed(shares, (1,))
    e.seal()

    def some(*ends):
        parts = [e.summed(e.take(shares, (None, (end,))), (1,)) for end in ends]
        return e.elementwise(e.added, parts)

    assert some((0, 2), (2, 6)) == some((0, 2), (2, 3), (3, 6)) == whole
    assert some((0, 2), (3, 6)) != whole != some((0, 2), (2, 6), (2, 6))
    assert e.elementwise(e.added, [some((0, 4)), some((2, 6))]) != whole
    rest = e.elementwise(lambda pair: e.added(pair, (1, -1)), [some((0, 4)), some((2, 4))])
    assert (rest == some((0, 2))) == (power == 1 or positive), "0 / 0 does not vanish"
    own = e.product([e.summed(e.take(x, (None, ((0, 2),))), (1,)), e.summed(x, (1,)), y], [1, power, 1])
    assert own == some((0, 2))
    other = e.product([e.summed(e.take(x, (None, ((0, 2),))), (1,)), e.summed(e.take(x, (None, ((0, 2),))), (1,)), y],
                      [1, power, 1])  # fmt: skip
    assert e.elementwise(e.added, [other, some((2, 6))]) != whole


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_choice_that_all_members_make_alike_is_the_choice_of_sums(how):
    e = Expressions({"dp": 2})
    x, r = e.leaf("batch", "x", (4,), frozenset({"dp"})), e.leaf("state", "r", (4,))
    alike, apart = e.leaf("state", "c", ()), e.leaf("batch", "c", (), frozenset({"dp"}))

    def choice(flag, *values):
        return applied(e, CHOICE, (), [flag, *values])

    times, mean = 2 if how == "sum" else 1, e.reduced(x, ["dp"], "mean")
    assert e.reduced(choice(alike, x, r), ["dp"], how) == e.scaled(choice(alike, mean, r), times)
    assert e.reduced(choice(apart, x, r), ["dp"], how) != e.scaled(choice(apart, mean, r), times)
    assert e.reduced(choice(alike, r, x), ["dp"], how) != e.scaled(choice(alike, mean, r), times)
    assert e.reduced(choice(alike, x, r), ["dp"], "max") != choice(alike, mean, r)


def test_equal_parts_of_values_of_other_sizes_stand_in_a_row():
    """The whole values have no row."""
    e = Expressions({})
    wholes = e.leaf("batch", "x", (4, 6)), e.leaf("batch", "y", (4, 5))
    e.seal()
    parts = [e.take(whole, (None, ((0, 2),))) for whole in wholes]
    assert e.shape(e.concatenated(parts, 0)) == (8, 2)


def test_a_sum_of_one_value_in_the_shape_of_the_value_is_the_value():
    """It was the sum of the views of the terms."""
    e = Expressions({})
    a, b = e.leaf("batch", "a", (4, 6)), e.leaf("batch", "b", (4, 6))
    value = e.view(e.added([a, b]), (2, 2, 6))
    assert e.linear({value: 1}, (2, 2, 6)) == value


def test_the_sum_of_all_elements_counts_each_term_as_often_as_it_is_repeated():
    """A repeated value beside a multiple of its own sum was counted by one of the two alone."""
    e = Expressions({})
    x, y = e.leaf("batch", "x", (2, 1)), e.leaf("batch", "y", (6,))
    whole = e.linear({x: 1, e.total(x): -3, y: -1}, (2, 6))
    assert e.total(whole) == e.linear({e.total(x): 6 - 3 * 12, e.total(y): -2}, ())


def test_a_part_of_a_row_that_stands_twice_has_both():
    """It had one, under the shape of two."""
    e = Expressions({})
    x = e.leaf("batch", "x", (1, 3))
    twice = e.take(x, (((0, 1), (0, 1)), None))
    column = e.take(twice, (None, ((1, 2),)))
    assert e.shape(column) == (2, 1) and sum(stop - start for _, start, stop in e.pieces(column)) == 2


def test_stored_whole_numbers_are_added_up_in_sums():
    e = Expressions({"dp": 3})
    x = e.apply("cast", ("bool", "int64"), [e.leaf("batch", "x", (), frozenset({"dp"}))], ())
    zero, two, five, ten = (e.from_array(np.array(value)) for value in (0, 2, 5, 10))
    assert e.reduced(five, ["dp"], "sum") == e.from_array(np.array(15)) != e.reduced(ten, ["dp"], "sum")
    assert (
        e.added([five, five]) == ten
        and e.added([two, two, ten], (1, -1, 1)) == ten
        and e.added([ten, ten], (1, -1)) == zero
    )
    assert e.added([x, zero, zero]) == x == e.added([x, five, five, ten], (1, 1, 1, -1)) != e.added([x, five])
    assert e.added([x, five, five]) == e.added([x, ten])
    short, wide = e.from_array(np.array(5, np.int32)), e.from_array(np.array([5]))
    assert e.added([short, five]) not in (ten, e.added([short, short])) and e.added([wide, five]) == e.view(ten, (1,))
    assert e.scaled(five, Fraction(1, 2)) not in (two, five) and e.scaled(ten, Fraction(1, 2)) == five
    most = e.from_array(np.array(1 << 62))
    assert e.added([most, most]) == e.scaled(most, 2), "no number of the type"


def test_what_may_be_no_number_does_not_vanish():
    e = Expressions({})
    x, y = e.leaf("state", "x", (4,)), e.leaf("state", "y", (4,))
    inverse = e.product([x], [-1])
    assert e.product([x, x, x], [1, 1, -1]) != x and e.product([x, x], [1, -1]) != e.constant(1, (4,))
    assert e.added([y, inverse, inverse], [1, 1, -1]) != y and e.added([y, x, x], [1, 1, -1]) == y
    zero = e.constant(0, (4,))
    assert e.product([zero, inverse], [1, 1]) != zero and e.product([zero, x], [1, 1]) == zero
    logarithm = e.apply("Log", (), [x], (4,))
    assert e.added([logarithm, logarithm], [1, -1]) != zero


@pytest.mark.parametrize(
    ("value", "due"),
    [
        (np.float32(0.1), Fraction(1, 10)), (np.float32(1e-8), Fraction(1, 10**8)), (np.float32(1 / 3), Fraction(1, 3)),
        (np.float16(0.999), Fraction(float(np.float16(0.999)))), (np.float64(0.25), Fraction(1, 4)),
        (np.float32(65504), 65504), (np.float32(-0.9), Fraction(-9, 10)),
    ],
)  # fmt: skip
def test_a_constant_is_the_decimal_or_fraction_that_it_stands_for(value, due):
    assert simplest(value) == due


def test_a_state_plus_the_sum_of_its_changes_is_the_state_behind_all_micro_steps():
    e = Expressions({"micro": 3})
    state, so_far = e.leaf("initial state", "s", (2,)), e.leaf("sum so far", "s", (2,))
    moving = e.leaf("state", "s", (2,), frozenset({"micro"}))
    term = e.leaf("batch", "r", (2,), frozenset({"micro"}))
    zero, rate = e.linear({}, (2,)), Fraction(9, 10)
    changes = e.iterated(e.linear({so_far: rate, state: rate - 1, term: Fraction(1)}, (2,)), so_far, "micro", zero)
    whole = e.added([state, changes])
    assert whole == e.iterated(e.linear({moving: rate, term: Fraction(1)}, (2,)), moving, "micro", state)
    bent = e.apply("Sqrt", (), [state], (2,))
    changes_with_s = e.iterated(
        e.linear({so_far: rate, state: rate - 1, bent: Fraction(1)}, (2,)), so_far, "micro", zero
    )
    assert state in e.all[e.added([state, changes_with_s])].operands, "what else depends on the state is no term"
    wrong = e.iterated(e.linear({so_far: rate, state: rate, term: Fraction(1)}, (2,)), so_far, "micro", zero)

    def leaf(expression, at):
        return np.array([1.0, 2.0]) * (1 + at.get("micro", 0)) * (3 if expression.op == "initial state" else 1)

    moved = np.array([3.0, 6.0])
    for index in range(3):
        moved = 0.9 * moved + np.array([1.0, 2.0]) * (1 + index)
    values = ExpressionValues(e, leaf, {}).values([whole, e.added([state, wrong]), changes], {})
    np.testing.assert_allclose(values[0], moved)
    np.testing.assert_allclose(values[2], moved - [3.0, 6.0])
    assert not np.allclose(values[1], moved)


def test_a_broadcast_is_of_the_longest_shape():
    assert broadcast([(2, 1), (3,)]) == (2, 3) and broadcast([(), ("N", 4), (1, 4)]) == ("N", 4)
    assert broadcast([(2,), None]) is None
    assert broadcast([("N", 4), (6, 4)]) == (6, 4) == broadcast([(6, 4), ("N", 1)])
    assert Expressions({}).uniform(ONE) == 1


def test_an_inverse_has_facts_of_its_own_although_it_numbers_its_operand_without_the_coefficient():
    """The bare operand once took the place of the inverse in the lists of facts, or raised IndexError there."""
    expressions = Expressions(EXTENTS)
    flags = [expressions.apply("cast", ("int64",), [expressions.leaf("batch", name, ())], ()) for name in "xy"]
    below = expressions.linear(dict(zip(flags, (2, 3))), ())
    inverse = expressions._number(INVERSE, None, (below,), ())
    bare = expressions.bare(below)
    assert inverse != bare != below and [expressions.finite[each] for each in (below, bare, inverse)] == [
        True,
        True,
        False,
    ]


def multiplied(e, *operands):
    return e.elementwise(lambda values: e.product(values, [1] * len(values)), operands)


def test_parts_of_a_row_of_ranges_are_a_part_of_the_row():
    """A state of two samples, read token by token: each sample has ranges of a product of its own."""
    e = Expressions({})
    one, two, other = (e.leaf("state", name, (32,)) for name in "pqr")
    row = e.view(e.flat([(one, 0, 16), (two, 16, 32)]), (2, 16))
    later = e.leaf("state", "later", (2, 16))
    whole = multiplied(e, row, later)
    e.seal()

    def halves(first, second, size=8):
        return e.view(e.flat([(one, *first), (two, *second)]), (2, size))

    left, right = halves((0, 8), (16, 24)), halves((8, 16), (24, 32))
    assert e.box(left) == (row, (None, ((0, 8),))) and e.box(right) == (row, (None, ((8, 16),)))
    assert e.concatenated([left, right], 1) == row
    product = multiplied(e, left, e.take(later, (None, ((0, 8),))))
    assert product == e.take(whole, (None, ((0, 8),)))
    assert e.box(halves((0, 8), (17, 25))) is None  # of other features in each sample
    assert e.box(e.view(e.flat([(two, 16, 24), (one, 0, 8)]), (2, 8))) is None  # samples in another order
    assert e.box(e.view(e.flat([(one, 0, 8), (other, 16, 24)]), (2, 8))) is None


def test_what_the_source_takes_is_a_whole_value_beside_parts():
    """Angles of positions, each twice, times heads in parts."""
    e = Expressions({})
    table, heads = e.leaf("state", "t", (8, 4)), e.leaf("state", "x", (2, 4, 8, 4))
    angles = e.view(e.take(table, (None, ((0, 1), (0, 2), (1, 2)))), (1, 1, 8, 4))
    whole = multiplied(e, heads, angles)
    e.seal()
    some = (None, ((0, 2),), None, None)
    assert multiplied(e, e.take(heads, some), angles) == e.take(whole, some)
    others = e.view(e.take(table, (None, ((0, 1), (0, 1), (1, 3)))), (1, 1, 8, 4))
    assert e.root(multiplied(e, e.take(heads, some), others)) != e.root(e.take(whole, some))


def test_parts_of_repeated_values_in_a_row_are_a_part_of_the_row():
    """Half of the heads after the other half, both repeated: the halves are parts of one value."""
    e = Expressions({})
    values = e.leaf("state", "v", (2, 4, 4, 2))
    twice = [e.take(values, (None, (half, half), None, None)) for half in ((0, 2), (2, 4))]
    whole = e.concatenated(twice, 3)
    e.seal()
    for tokens in ((0, 2), (2, 4), (1, 3)):
        parts = [e.take(values, (None, (half, half), (tokens,), None)) for half in ((0, 2), (2, 4))]
        assert e.concatenated(parts, 3) == e.take(whole, (None, None, (tokens,), None))
        assert e.concatenated(parts[::-1], 3) != e.take(whole, (None, None, (tokens,), None))

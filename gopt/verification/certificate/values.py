"""Rules for values: constants, elementwise operators, casts, extremes, values in a row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from gopt.ir.graph import Graph
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.operators.operator import Slope
from gopt.operators.table import names, operator
from gopt.verification.certificate.algebra import (
    Algebra,
    Loops,
    Stretches,
    Terms,
    WrongLine,
    leaves,
    moved,
    one,
    unmerged,
)

EXTREMES = {"max": "largest", "any": "largest", "min": "smallest", "all": "smallest"}
WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
FINITE = names(lambda record: record.slopes and max(record.slopes) < Slope.CURVED) | {
    "one", "state", "initial state", "batch", "input", "sum so far", "draw", "linear", "product", "view", "flat",
    "take", "total", "reduced", "largest", "smallest", "sum along", "Exp", "permuted", "round", "cast", "on member",
    "gathered", "in a row", "extreme of a part",
}  # fmt: skip
"""Forms and operators whose results are numbers where the operands are."""


def simplest(value: Any) -> Fraction:
    """The short decimal, or the fraction of the smallest denominator, that rounds to a floating value."""
    exact, name = Fraction(float(value)), np.asarray(value).dtype.name
    if name not in ("float32", "float64"):
        return exact
    decimal = Fraction(str(value))
    if exact.denominator == 1 or len(str(decimal.numerator)) + len(str(decimal.denominator).rstrip("0")) <= 5:
        return decimal
    half = Fraction(2) ** (int(np.frexp(float(value))[1]) - {"float32": 24, "float64": 53}[name] - 1)

    def between(low: Fraction, high: Fraction) -> Fraction:
        whole = -(-low.numerator // low.denominator)
        return (
            Fraction(whole) if whole <= high else whole - 1 + 1 / between(1 / (high - whole + 1), 1 / (low - whole + 1))
        )

    return between(abs(exact) - half, abs(exact) + half) * (1 if exact > 0 else -1)


def uniform(size: int, value: Fraction) -> Stretches:
    """A number in all elements."""
    return [(size, one(times=value) if value else ())] if size else []


@dataclass
class CheckedProgram:
    """A graph, the expression and the rule of each value; ``widened``: value behind a cast to a wider type -> the type
    before."""

    head: Mapping[str, Any]
    graph: Graph
    values: dict[str, int] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    widened: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    at: int = 0

    def floating(self, name: str) -> bool:
        return self.graph.type_of(name).dtype in FLOATS


def _first(start: int) -> Callable[[int, Loops, int], tuple[int, Loops]]:
    """To the places of the first element, whatever the number of elements."""
    return lambda at, loops, _: (
        at - start * sum(stride for _, stride in loops),
        tuple((0, stride) for _, stride in loops),
    )


class ValueChecker(Algebra):
    """The values of expressions."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        super().__init__(extents)
        self.arrays: dict[int, np.ndarray] = {}
        """Whole numbers and flags that a line has as constants."""
        self._checked: set[Any] = set()

    def formed(self, number: int, varies: bool) -> None:
        """Raise WrongLine for an expression of another form than the table has once."""
        op, attributes, operands, shape = self.forms[number]
        if varies and op not in ("state", "initial state", "batch", "draw", "moved state"):
            raise WrongLine(f"{op} varies", "a value that all members have")
        if op == "linear" and len(attributes) != len(operands):
            raise WrongLine(f"{len(attributes)} coefficients", f"{len(operands)} coefficients")
        if not operands or not all(self.sized(of) for of in (number, *operands)):
            return
        inner, due = self.shape(operands[0]), shape
        root = self.forms[operands[0]].op not in ("view", "flat")
        one_each = ("linear", "product", "flat", "largest", "smallest")
        single = (
            "inverse", "view", "take", "permuted", "total", "sum along", "reduced", "on member", "gathered", "counted",
            "round", "cast",
        )  # fmt: skip
        count = len(attributes) if op in one_each else 3 if op == "iterated" else 1 if op in single else len(operands)
        fits = len(operands) == count
        if op in ("linear", "product"):
            shapes = [self.shape(of) for of in (*operands, *([number] if op == "linear" else []))]
            due = tuple(np.broadcast_shapes(*shapes))
            fits, root = fits and list(operands) == sorted(set(operands)), True
            if op == "product":  # a coefficient stands in front
                sums = [self.forms[of].attributes for of in operands if self.forms[of].op == "linear"]
                fits = fits and all(attributes) and all(next(filter(None, row), 1) == 1 for row in sums)
        elif op == "view":
            fits, root = (
                fits and attributes is None and prod(inner) == prod(shape or ()) and inner != shape,
                self.forms[operands[0]].op != "view",
            )
        elif op == "flat":
            ends = [(of, *ends) for of, ends in zip(operands, attributes)]
            fits, due = (
                fits and all(0 <= low < high <= prod(self.shape(of)) for of, low, high in ends),
                (sum(high - low for _, low, high in ends),),
            )
            fits = fits and all(one[0] != two[0] or one[2] != two[1] for one, two in pairwise(ends))
            root = all(self.forms[of].op not in ("view", "flat") for of in operands)
        elif op == "take":
            fits = fits and len(attributes) == len(inner)
            due = tuple(
                size if runs is None else sum(high - low for low, high in runs) for size, runs in zip(inner, attributes)
            )
        elif op == "permuted":
            fits, root = fits and sorted(attributes) == list(range(len(inner))), True
            due = tuple(inner[dim] for dim in attributes)
        elif op in ("total", "largest", "smallest"):
            root, due = op != "total" or root, ()
            rows = attributes if op != "total" else [attributes]
            fits = (
                fits
                and all(0 <= low < high for row in rows for low, high in row)
                and all(one[1] < two[0] for row in rows for one, two in pairwise(row))
                and list(operands) == sorted(set(operands))
            )
        elif op == "sum along":
            axes, root = [axis + len(inner) for axis in attributes], True
            fits, due = (
                fits and axes == sorted(set(axes)),
                tuple(1 if dim in axes else size for dim, size in enumerate(inner)),
            )
        elif op in ("reduced", "on member", "iterated", "inverse", "counted"):
            due, root = inner, True
            fits = fits and (attributes is None) == (op in ("inverse", "counted"))
            fits = fits and (op != "reduced" or len(attributes) == 2)
        elif operator(op).elementwise or op in ("round", "cast"):
            due, root = tuple(np.broadcast_shapes(*(self.shape(of) for of in operands))), True
        else:
            fits, root = (
                not operator(op).name or attributes is None or len(attributes) == 2,
                True,
            )  # also the place of the result
        if not fits or due != shape or not root:
            raise WrongLine(str(self.forms[number]), f"{op} in normal form, shape {due}")

    def array(self, number: int) -> np.ndarray | None:
        """The whole numbers in a constant, or in a part of a constant."""
        op, attributes, operands, shape = self.forms[number]
        if number not in self.arrays and op in ("view", "take") and (inner := self.array(operands[0])) is not None:
            for dim, runs in enumerate(attributes if op == "take" else ()):
                rows = None if runs is None else [at for start, stop in runs for at in range(start, stop)]
                inner = inner if rows is None else np.take(inner, rows, dim)
            return inner.reshape(shape)
        return self.arrays.get(number)

    def known(self, number: int) -> np.ndarray:
        """The whole numbers in a constant. Raises WrongLine for any other expression."""
        array = self.array(number)
        if array is None:
            raise WrongLine("a shape that is no constant", lemma="open shape")
        return array

    def due(self, number: int, value: Stretches, what: str) -> None:
        """Raise WrongLine unless an expression has a value."""
        if not self.alike(self.stretches(number), value):
            if all(any(unmerged(terms) for _, terms in side) for side in (self.stretches(number), value)):
                raise WrongLine("", "", "sum of ranges")
            raise WrongLine(str(self.forms[number]), what)

    def constant(self, number: int, array: np.ndarray) -> None:
        """Raise WrongLine unless an expression is a constant."""
        op, _, operands, shape = self.forms[number]
        kind, flat = array.dtype.kind, array.reshape(-1)
        if shape != array.shape:
            raise WrongLine(f"a constant of shape {shape}", f"shape {array.shape}")
        if array.dtype.name in FLOATS and (not array.size or ((flat == flat[0]).all() and np.isfinite(float(flat[0])))):
            self.due(number, uniform(array.size, simplest(flat[0]) if array.size else Fraction(0)), "the stored number")
            return
        data = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        value: Any = (array.dtype.name, data if len(data) <= 64 else hashlib.sha256(data).digest())
        if array.size == 1 and kind in "if":
            limits = (-np.inf, np.inf) if kind == "f" else (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
            bound = {limits[0]: "lowest", limits[1]: "highest"}.get(flat[0])
            op, value = (bound, array.dtype.name) if bound else ("constant", value)
        elif array.size and (flat == flat[0]).all() and self.forms[number].op == "filled":
            op, value = "filled", (array.dtype.name, flat[:1].tobytes())
        else:
            op = "constant"
        if operands or self.forms[number][:2] != (op, value):
            raise WrongLine(str(self.forms[number]), f"the stored {array.dtype.name} values")
        if kind in "iub":
            self.arrays[number] = array

    def element(self, terms: Terms) -> tuple[int, int, Loops] | None:
        """The element of an expression that terms are; None for any other sum."""
        if len(terms) != 1 or terms[0][1] != 1 or len(terms[0][0]) != 1:
            return None
        (((kind, data, _), power),) = terms[0][0]
        return data if kind == "at" and power == 1 else None

    def applied(self, number: int, op: str, fits: Callable[[Any], bool], rows: Sequence[Stretches]) -> None:
        """Raise WrongLine unless an expression is an elementwise operator on values."""
        for length, (terms, *operands) in self.aligned([self.stretches(number), *rows]):
            element = self.element(terms)
            if element is None:
                raise WrongLine(str(self.forms[number]), op)
            of, at, loops = element
            form = self.forms[of]
            if form.op != op or not fits(form.attributes) or len(form.operands) != len(rows):
                raise WrongLine(str(form), op)
            for operand, due in zip(form.operands, operands):
                value = self.places(self.spread(operand, self.shape(of)), at, loops or ((length, 0),))
                if not self.alike(value, [(length, due)]):
                    raise WrongLine(f"{op} of {self.forms[operand]}", "the operand of the node")

    def cast(self, number: int, value: Stretches, source: str, to: str, widened: str = "") -> None:
        """Raise WrongLine unless an expression is a value in another type."""
        if to in (source, widened) or to in WIDER.get(source, ()):
            return self.due(number, value, "the same elements")
        constant = value[0][1] if len(value) == 1 else None
        rounds = source in FLOATS and to in FLOATS
        if rounds and constant is not None and all(not factors for factors, _ in constant):
            with np.errstate(all="ignore"):
                exact = np.float64(sum(coefficient for _, coefficient in constant))
                return self.due(
                    number, uniform(value[0][0], simplest(np.asarray(exact).astype(numpy_dtype(to))[()])), "rounded"
                )
        if rounds and self.alike(self.stretches(number), value):  # what is rounded stays
            roots = [self.element(terms) for _, terms in value]
            if all(of is not None and self.forms[of[0]][:2] == ("round", to) for of in roots):
                return None
        op, due = ("round", to) if rounds else ("cast", (source, to))
        if to == "bool" and self.forms[number].op in ("largest", "view"):
            raise WrongLine(str(self.forms[number]), "flags", "any flag")
        return self.applied(number, op, lambda attributes: attributes == due, [value])

    def extremes(
        self, value: Stretches, form: str, axes: frozenset[str] = frozenset()
    ) -> dict[Any, set[tuple[int, int]]]:
        """The elements behind the largest or the smallest of all: terms and axes of members -> ranges."""
        result: dict[Any, set[tuple[int, int]]] = {}
        for length, terms in value:
            elements = list(leaves(terms))
            single = len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1 and terms[0][0][0][0][0] == "at"
            of, at, loops = elements[0] if elements else (0, 0, ())
            inner = self.forms[of]
            whole = (
                single
                and terms[0][0][0][1] == 1
                and (prod(inner.shape or ()) == 1 or (at == 0 and loops == ((length, 1),)))
            )
            if whole and inner.op == form and isinstance(inner.attributes, tuple):
                parts = [
                    self.extremes(self.row(self.stretches(root), *ends), form, axes)
                    for root, spans in zip(inner.operands, inner.attributes)
                    for ends in spans or ((0, prod(self.shape(root))),)
                ]
            elif whole and inner.op == "reduced" and inner.attributes[0] == form and length == prod(inner.shape or ()):
                parts = [self.extremes(self.stretches(inner.operands[0]), form, axes | inner.attributes[1])]
            else:
                step = loops[0][1] if len(loops) == 1 and all(len(of[2]) < 2 for of in elements) else 0
                start = at // step if step > 0 else 0
                body = moved(terms, _first(start)) if step > 0 else terms
                live = axes & self.axes_of(terms)
                parts = (
                    []
                    if inner.op == {"largest": "lowest", "smallest": "highest"}[form] and single
                    else [{(body, live): {(start, start + length)}}]
                )
            for part in parts:
                for key, ranges in part.items():
                    result.setdefault(key, set()).update(ranges)
        for key, ranges in result.items():
            joined: list[tuple[int, int]] = []
            for start, stop in sorted(ranges):
                if joined and start <= joined[-1][1]:
                    joined[-1] = joined[-1][0], max(stop, joined[-1][1])
                else:
                    joined.append((start, stop))
            result[key] = set(joined)
        return result

    def extreme(self, number: int, values: Sequence[Stretches], form: str, axes: frozenset[str] = frozenset()) -> None:
        """Raise WrongLine unless a single element is the largest or the smallest of values."""
        due = self.extremes([part for value in values for part in value], form, axes)
        if prod(self.shape(number)) != 1 or self.extremes(self.stretches(number), form) != due:
            raise WrongLine(str(self.forms[number]), f"the {form} of all elements")

    def parts(self, number: int, value: Sequence[Stretches], sizes: Sequence[int], axis: int) -> None:
        """Raise WrongLine unless an expression is values in a row along an axis."""
        shape, start = self.shape(number), 0
        if sum(sizes) != shape[axis]:
            raise WrongLine(f"a row of {shape[axis]}", f"of {list(sizes)}")
        for part, size in zip(value, sizes):
            selection = [((start, start + size),) if dim == axis else None for dim in range(len(shape))]
            if size and not self.alike(self.taken(number, selection), part):
                raise WrongLine(str(self.forms[number]), f"the part {start} to {start + size} of dimension {axis}")
            start += size

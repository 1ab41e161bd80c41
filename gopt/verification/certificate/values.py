"""Values of expressions at a random point: a number of a prime field in each element, on each member.

Sums, products, quotients and movements of elements are computed; any further operator is a hash of the elements behind
a result. Expressions equal for all inputs are equal; others differ, but for 2^-30: the digest of files is the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache, reduce
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx

from gopt.ir.types import TensorType, numpy_dtype
from gopt.operators.dims.elements import axes_of, softmax_axes
from gopt.operators.dims.link import OperatorUse
from gopt.operators.kinds import COMBINERS, GATHERS, LAYOUT, PRODUCTS, RESHAPES, SCATTERS, SMOOTH_MAXIMA
from gopt.operators.operator import Indices, Slope
from gopt.operators.table import OPERATORS, names, operator
from gopt.runtime.capacity import check_elements
from gopt.verification.certificate.field import Array, PrimeField

EXP = "Exp"
LOG = "Log"
SOFTMAX = "Softmax"
EXTREMES = {"max": "largest", "any": "largest", "min": "smallest", "all": "smallest"}
JOINED = {op: EXTREMES[how] for how, ops in COMBINERS.items() if how in EXTREMES for op in ops} | {
    name: EXTREMES[str(record.pieces)] for name, record in OPERATORS.items() if record.pieces in EXTREMES
}
"""Operators that take the largest or the smallest, and the forms."""
IDENTITY = {"largest": "lowest", "smallest": "highest"}
MOVES = LAYOUT | RESHAPES | GATHERS | names(lambda record: record.joins)
WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
NUMBERS = names(lambda record: record.slopes and max(record.slopes) < Slope.CURVED) | {
    "one", "state", "initial state", "batch", "input", "sum so far", "draw", "linear", "product", "view", "flat",
    "take", "total", "reduced", "largest", "smallest", "sum along", EXP, "permuted", "round", "cast", "on member",
    "gathered", "in a row", "extreme of a part", "parted", "rows", "rows added", "counted", "weight", "times zero",
}  # fmt: skip
"""Forms and operators whose results are numbers where the operands are."""
Cut = tuple[tuple[int, Any], ...]
"""Sums with some of their terms: expression, and the ranges of positions of indices; None: another value of a leaf."""
PADDED = "Pad"
CARRIED = ("view", "flat", "take", "permuted", "on member", "Expand")
"""Forms that move elements; an Expand without attributes repeats them."""
SINGLE = frozenset(CARRIED) - {"flat"} | {
    "inverse", "total", "sum along", "reduced", "gathered", "counted", "weight", "digits", "round", "cast", "parted",
    "extreme of a part",
}  # fmt: skip
"""Forms of one operand."""
VARYING = frozenset({"state", "initial state", "batch", "draw", "moved state", "a value of micro-steps"})
"""Leaves that members may have different values of."""


class WrongLine(Exception):
    """A line without a reason; ``lemma``: the name of a law missing in the checker."""

    def __init__(self, actual: str, due: str = "", lemma: str = "") -> None:
        super().__init__(actual)
        self.actual, self.due, self.lemma = actual, due, lemma


class ExpressionLine(NamedTuple):
    """An expression of the certificate."""

    op: str
    attributes: Any
    operands: tuple[int, ...]
    shape: tuple[Any, ...] | None


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


def picked(array: Array, ranges: Sequence[tuple[int, int]], axis: int) -> Array:
    """Ranges of a dimension. Raises IndexError for a range outside, however long."""
    if any(not 0 <= start <= stop <= array.shape[axis] for start, stop in ranges):
        raise IndexError(f"{ranges} of {array.shape[axis]}")
    return np.take(array, [at for start, stop in ranges for at in range(start, stop)], axis)


def box(value: Array, selection: Sequence[Any]) -> Array:
    """Ranges of the last dimensions."""
    for dim, ranges in enumerate(selection, value.ndim - len(selection)):
        value = value if ranges is None else picked(value, ranges, dim)
    return value


def joined(values: Sequence[Array], axis: int) -> Array:
    """Arrays in a row, other dimensions repeated to the longest."""
    axis %= values[0].ndim
    sizes = np.broadcast_shapes(*((*value.shape[:axis], 1, *value.shape[axis + 1 :]) for value in values))
    return np.concatenate(
        [np.broadcast_to(value, (*sizes[:axis], value.shape[axis], *sizes[axis + 1 :])) for value in values], axis
    )


def among(value: Array, dims: Sequence[int]) -> Array:
    """The elements along dimensions, in the first dimension."""
    for dim in dims:
        value = np.moveaxis(value, dim, 1)
        value = np.expand_dims(value.reshape(-1, *value.shape[2:]), dim)
    return value


def moved(arrays: Sequence[Array], lead: int, make: Callable[[list[Array]], Array]) -> Array:
    """The elements of arrays at other places; ``make``: from the places of elements behind the ``lead`` first
    dimensions to the elements of the result."""
    sizes, rows = [array.shape[lead:] for array in arrays], [array.reshape(*array.shape[:lead], -1) for array in arrays]
    ends = pairwise(accumulate(map(prod, sizes), initial=0))
    positions = [np.arange(*pair).reshape(size) for pair, size in zip(ends, sizes)]
    return np.take(joined(rows, -1), make(positions), -1)


def wide(array: Array, lead: int, rank: int) -> Array:
    """An array with dimensions of length 1 behind the ``lead`` first ones, for ``rank`` dimensions behind these."""
    return array.reshape(*array.shape[:lead], *[1] * (rank - array.ndim + lead), *array.shape[lead:])


def laid(value: Array, lead: int, dims: Sequence[int | None]) -> tuple[Array, list[int]]:
    """An array by some dimensions, of length 1 for None, and the rest in one; and the sizes in the rest."""
    rest = [dim for dim in range(value.ndim - lead) if dim not in dims]
    order = [lead + dim for dim in (*(dim for dim in dims if dim is not None), *rest)]
    sizes = [1 if dim is None else value.shape[lead + dim] for dim in dims]
    inner = [value.shape[lead + dim] for dim in rest]
    return np.transpose(value, (*range(lead), *order)).reshape(*value.shape[:lead], *sizes, prod(inner)), inner


def full(op: str, attributes: Mapping[str, Any], opset: int) -> dict[str, Any]:
    """Attributes for comparing, defaults filled in."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(plain, value))
        value = value.SerializeToString(deterministic=True) if hasattr(value, "SerializeToString") else value
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    return {name: plain(value) for name, value in {**_usual(op, opset), **attributes}.items()}


@cache
def _usual(op: str, opset: int) -> dict[str, Any]:
    if "." in op:
        return {}
    if not onnx.defs.has(op):
        raise WrongLine(f"form {op}", "a form, or an operator")
    schema = onnx.defs.get_schema(op, opset)
    return {
        name: onnx.helper.get_attribute_value(attribute.default_value)
        for name, attribute in schema.attributes.items() if attribute.default_value.name
    }  # fmt: skip


class PointValues(PrimeField):
    """The expressions of a certificate by number, and their values: dimensions for the axes of members, of length 1
    where members agree, in front of the dimensions of the shape. ``extents``: the size of each axis."""

    def __init__(self, extents: Mapping[str, int], seed: str) -> None:
        super().__init__(seed)
        self.extents, self.axes, self.lead = extents, list(extents), len(extents)
        self.forms, self.varies, self.opset = list[ExpressionLine](), list[frozenset[str]](), 0
        self.arrays: dict[int | None, np.ndarray] = {}
        """Whole numbers and flags of constants."""
        self.exact = {int(self.element(1)): Fraction(1)}
        """Numbers of the field that are constants."""
        self.images: dict[str, Array] = {}
        """Type -> numbers that are rounded to it."""
        self.begun, self.counted, self.leaves, self.risks = list[bool](), list[bool](), list[int](), list[int]()
        self._apart: dict[int, frozenset[str]] = {}
        self._values: dict[tuple[int, Cut], Array] = {}
        self._inside: dict[int, set[int]] = {}

    # --- expressions ---

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of an expression. Raises WrongLine for an unknown one."""
        shape = self.forms[number].shape
        if shape is None or any(size.__class__ is not int for size in shape):
            raise WrongLine("an open shape", lemma="open shape")
        return shape

    def value(self, number: int, cut: Cut = ()) -> Array:
        """The value of an expression. Raises WrongLine for another shape than the form's."""
        cut = tuple(pair for pair in cut if number in self.inside(pair[0])) if cut else ()
        if (number, cut) not in self._values:
            self.fits(number)
            shape, value = self.shape(number), self._read(number, cut)
            if value.shape[self.lead :] != shape:
                raise WrongLine(f"{self.forms[number]}", f"shape {list(value.shape[self.lead :])}")
            self._values[number, cut] = value
        return self._values[number, cut]

    def members(self, number: int) -> frozenset[str]:
        """The axes along which leaves of an expression differ."""
        if number not in self._apart:
            self._apart[number] = self.varies[number].union(*map(self.members, self.forms[number].operands))
        return self._apart[number]

    def fits(self, number: int) -> None:
        """Raise MemoryError for an expression with more elements than memory is free for."""
        check_elements(self.shape(number), prod(self.extents[axis] for axis in self.members(number)))

    def formed(self, number: int) -> None:
        """Raise WrongLine for an expression in no normal form, such as operands in another order."""
        op, attributes, operands, shape = self.forms[number]
        single = op in SINGLE and all(size.__class__ is int for size in shape or ())  # an open shape has no value
        fits = len(operands) == 1 if single else bool(operands) or op not in ("flat", "iterated")
        if op in ("linear", "product", "flat", *IDENTITY) and attributes != "members":
            ordered = op == "flat" or list(operands) == sorted(set(operands))
            fits = fits and ordered and len(attributes) == len(operands)
        inner = {self.forms[of].op for of in operands}
        if op in ("view", "inverse", "counted", "weight"):
            fits = fits and attributes is None and (op != "view" or "view" not in inner)
        if op in ("flat", "take", "total"):
            fits = fits and inner.isdisjoint(("flat",) if op == "take" else ("view", "flat"))
        if op == "take":
            fits = fits and len(attributes) == len(self.forms[operands[0]].shape or ())
        if op == "product":  # a coefficient stands in front
            sums = [self.forms[of].attributes for of in operands if self.forms[of].op == "linear"]
            fits = fits and all(attributes) and all(next(filter(None, row), 1) == 1 for row in sums)
        if op in ("parted", "extreme of a part"):
            fits = fits and len(attributes) == (2 if op == "parted" else 3)
        if op == "reduced":
            fits = fits and attributes[0] in ("sum", *IDENTITY) and len(attributes) == 2
        varies = self.varies[number]
        if not fits or (varies and (op not in VARYING or not varies <= self.extents.keys())):
            raise WrongLine(str(self.forms[number]), f"{op} in normal form")

    def inside(self, core: int) -> set[int]:
        """The expressions made of an expression."""
        if core not in self._inside:
            self._inside[core] = result = {core}
            result.update(at for at, form in enumerate(self.forms[core:], core) if not result.isdisjoint(form.operands))
        return self._inside[core]

    def _read(self, at: int, cut: Cut) -> Array:
        op, attributes, operands, _ = self.forms[at]
        shape, lead = self.shape(at), self.lead
        if op in ("parted", "extreme of a part"):
            return self.value(operands[0], (*cut, tuple(attributes[:2])))
        if (form := self._extreme(at)) and operator(op).name == "":
            return self.distinct(form, self.spread(at, form, cut))
        if op == "constant" and attributes[0] in ("int32", "int64") and prod(shape) == 1:
            number = self.element(int(np.frombuffer(attributes[1], attributes[0])[0]))
            return np.full([1] * lead + [*shape], number)
        if not operands and op not in ("one", "linear"):
            front = [size if axis in self.varies[at] else 1 for axis, size in self.extents.items()]
            return self.drawn((*front, *shape), op, attributes, (at, None) in cut)
        terms = dict(cut).get(at, ())
        if (operator(op).name and attributes is not None) or op not in FORMS:
            slot, absent = 0, tuple[int, ...]()
            if not operator(op).elementwise:
                attributes, slot = attributes
            if operator(op).name and not 0 <= slot < onnx.defs.get_schema(op).max_output:
                raise WrongLine(f"result {slot} of {op}")
            if len(attributes) == 2 and attributes[1] and all(of.__class__ is int for of in attributes[1]):
                attributes, absent = attributes
            row: list[int | None] = list(operands)
            for index in absent:
                row.insert(index, None)
            return self.result(op, dict(attributes), slot, row, shape, cut, terms)
        values = self._some(op, [self.value(of, cut) for of in operands], terms, lead)
        if op in CARRIED:
            return self._carried(at, values, lead)
        if op in ("linear", "product", "times zero"):
            rows = [wide(value, lead, len(shape)) for value in values]
            if op == "linear" and operands in ((), (0,)):
                self.exact[int(self.element(sum(attributes)))] = Fraction(sum(attributes))
            if op == "linear":
                rows = [self.times(row, self.element(factor)) for row, factor in zip(rows, attributes)]
                return self.filled(reduce(self.plus, rows, np.zeros([1] * (lead + len(shape)), np.uint64)), shape)
            return reduce(self.times, map(self.power, rows, attributes))
        return np.asarray(FORMS[op](self, attributes, values, shape))

    def _some(self, op: str, values: list[Array], terms: Sequence[Any], lead: int) -> list[Array]:
        """Operands with some positions of indices of a sum or an extreme alone."""
        if terms and op not in ("sum along", "total", *PRODUCTS, *JOINED) and not operator(op).sums:
            raise WrongLine("", "", f"parts of {op}")
        for index, size, ranges in terms:
            for slot, dim in enumerate(index):
                if dim is not None:
                    at = dim + (lead if dim >= 0 else values[slot].ndim)
                    if values[slot].shape[at] != size:
                        raise WrongLine(f"some of {size} terms", f"of {values[slot].shape[at]}")
                    values[slot] = picked(values[slot], ranges, at)
        return values

    def _carried(self, at: int, values: Sequence[Array], lead: int) -> Array:
        """A movement of elements, behind the ``lead`` first dimensions."""
        op, attributes, _, shape = self.forms[at]
        value, sizes = values[0], shape or ()
        front = value.shape[:lead]
        if op == "view":
            return value.reshape((*front, *sizes))
        if op == "flat":
            return joined([picked(value.reshape(*value.shape[:lead], -1), [ends], -1)
                           for value, ends in zip(values, attributes)], -1)  # fmt: skip
        if op == "take":
            return box(value, attributes)
        if op == "permuted":
            return np.transpose(value, (*range(lead), *(lead + dim for dim in attributes)))
        if op == "on member":
            return self.on(value, attributes, lead - self.lead)
        return np.broadcast_to(wide(value, lead, len(sizes)), (*front, *sizes))

    def moves(self, at: int) -> bool:
        """Return whether an expression moves elements."""
        return self.forms[at].op in CARRIED and not (operator(self.forms[at].op).name and self.forms[at].attributes)

    def filled(self, value: Array, shape: Sequence[int]) -> Array:
        """A value repeated to a shape."""
        return np.broadcast_to(wide(value, self.lead, len(shape)), (*value.shape[: self.lead], *shape))

    # --- members ---

    def over(self, value: Array, axes: Iterable[str]) -> Array:
        """The sum over the members along axes."""
        for axis in axes:
            at = self.axes.index(axis)
            alike = value.shape[at] == 1
            value = self.times(value, self.element(self.extents[axis])) if alike else self.total(value, at, keep=True)
        return value

    def on(self, value: Array, coordinates: Iterable[tuple[str, int]], lead: int = 0) -> Array:
        """The value of one member; ``lead``: dimensions in front of the axes of members."""
        for axis, index in coordinates:
            at = lead + self.axes.index(axis)
            value = value if value.shape[at] == 1 else np.take(value, [index], at)
        return value

    def summed(self, ranges: Any, values: Sequence[Array], shape: Any) -> Array:
        flat = values[0].reshape(*values[0].shape[: self.lead], -1)
        return self.total(picked(flat, ranges or [(0, flat.shape[-1])], -1), -1)

    def gathered(self, attributes: Any, values: Sequence[Array], shape: Any) -> Array:
        axes, axis = attributes
        members = product(*(range(self.extents[axis]) for axis in axes))
        return joined([self.on(values[0], zip(axes, member)) for member in members], self.lead + axis)

    def iterated(self, axis: str, values: Sequence[Array], shape: Any) -> Array:
        """The value after all micro-steps: the value after a step, the value before, and the initial value."""
        at, flat = self.axes.index(axis), [value.reshape(*value.shape[: self.lead], -1) for value in values]
        rows = [np.expand_dims(np.moveaxis(value, at, -1), at) for value in flat]
        value = self.opaque(("iterated", axis), rows, (), (flat[0].shape[-1],))
        return value.reshape(*value.shape[: self.lead], *shape)

    # --- extremes ---

    def _extreme(self, at: int) -> str:
        """The form of an expression for the largest or the smallest of elements; '' for any other."""
        op, attributes, _, _ = self.forms[at]
        if op in ("reduced", "extreme of a part"):
            op = attributes[0 if op == "reduced" else -1]
        return JOINED.get(op, op if op in IDENTITY else "")

    def spread(self, at: int, form: str, cut: Cut = ()) -> Array:
        """The elements behind the largest or the smallest of an expression, in the first dimension."""
        op, attributes, operands, shape = self.forms[at]
        if op == IDENTITY[form]:
            return np.zeros((0, *[1] * self.lead, *self.shape(at)), np.uint64)
        if self.moves(at):
            rows = [self.spread(of, form, cut) for of in operands]
            most = max(map(len, rows))
            if all(map(len, rows)):
                return self._carried(at, [row[np.minimum(range(most), len(row) - 1)] for row in rows], self.lead + 1)
        if self._extreme(at) != form:
            return self.value(at, cut)[None]
        if op == "extreme of a part":
            return self.spread(operands[0], form, (*cut, tuple(attributes[:2])))
        if operator(op).pieces:
            attributes = dict(attributes[0])
        return self.elements(op, attributes, operands, shape or (), form, cut, dict(cut).get(at, ()))

    def elements(
        self, op: str, attributes: Any, operands: Sequence[int], shape: Sequence[int], form: str, cut: Cut = (),
        terms: Sequence[Any] = (),
    ) -> Array:  # fmt: skip
        """The elements behind the largest or the smallest of an operator, in the first dimension."""
        lead, reduces = self.lead + 1, bool(operator(op).pieces)
        rows = [self.spread(of, form, cut) for of in (operands[:1] if reduces else operands)]
        rows = self._some(op, rows, terms, lead)
        if op == "reduced":
            return among(rows[0], [1 + self.axes.index(axis) for axis in attributes[1]])
        if reduces:
            value = among(rows[0], [lead + at for at in axes_of(self.use(op, attributes, operands, shape)) or ()])
            return value.reshape(*value.shape[:lead], *shape)
        if op in IDENTITY and attributes != "members":
            flat = [row.reshape(*row.shape[:lead], -1) for row in rows]
            flat = [picked(row, ends, -1) if ends else row for row, ends in zip(flat, attributes)]
            return joined([among(row, [lead])[..., 0] for row in flat], 0)
        return joined([np.broadcast_to(wide(row, lead, len(shape)), (*row.shape[:lead], *shape)) for row in rows], 0)

    def distinct(self, form: str, elements: Array) -> Array:
        """The largest or the smallest of elements: a hash of the set."""
        elements = np.sort(elements, 0)
        fresh = np.ones(elements.shape, bool)
        fresh[1:] = elements[1:] != elements[:-1]
        result = self.total(np.where(fresh, self.hashed(form, elements), np.uint64(0)), 0)
        return np.where(fresh.sum(0) == 1, elements[0], result) if len(elements) else result

    # --- operators ---

    def array(self, number: int | None) -> np.ndarray | None:
        """The whole numbers in a constant, or in a part of a constant."""
        if number is None or number in self.arrays or self.forms[number].op not in CARRIED[:4]:
            return self.arrays.get(number)
        parts = [part for operand in self.forms[number].operands if (part := self.array(operand)) is not None]
        return self._carried(number, parts, 0) if len(parts) == len(self.forms[number].operands) else None

    def use(self, op: str, attributes: Mapping[str, Any], operands: Sequence[int | None], shape: Sequence[int],
            slot: int = 0) -> OperatorUse:  # fmt: skip
        """An operator on expressions, for the rules of its record."""
        types = [None if of is None else TensorType("float32", self.shape(of)) for of in operands]
        results = (*[None] * slot, TensorType("float32", tuple(shape)))
        return OperatorUse(op, attributes, tuple(types), results, lambda at: self.array(operands[at]), self.opset)

    def result(
        self, op: str, attributes: Mapping[str, Any], slot: int, operands: Sequence[int | None],
        shape: Sequence[int], cut: Cut = (), terms: Sequence[Any] = (),
    ) -> Array:  # fmt: skip
        """The value of an operator on expressions."""
        record, present = operator(op), [of for of in operands if of is not None]
        attributes = full(op, attributes, self.opset)
        if op in JOINED:
            elements = self.elements(op, attributes, present, shape, JOINED[op], cut, terms)
            return self.distinct(JOINED[op], elements) if len(elements) else self.value(present[0], cut)
        if op in FUNCTIONS:
            return FUNCTIONS[op](self, present[0], cut, self.use(op, attributes, present, shape))
        values = self._some(op, [self.value(of, cut) for of in present], terms, self.lead)
        arrays = [self.array(of) for of in operands]
        if op in MOVES and (kernel := record.kernel) is not None:
            data = len(values) if record.joins else 1
            rest = arrays[data:]
            if all(array is not None for array in rest):
                return moved(values[:data], self.lead, lambda of: np.asarray(kernel(attributes, [*of, *rest])))
        pads = arrays[1] if op == PADDED and attributes["mode"] == "constant" and 1 < len(arrays) < 4 else None
        if pads is not None and (pads >= 0).all():
            beside, ends = [*values[2:], np.zeros([1] * self.lead, np.uint64)][0], [*zip(*pads.reshape(2, -1))]
            return moved([values[0], beside], self.lead, lambda of: np.pad(of[0], ends, constant_values=of[1].item()))
        if op in SCATTERS and (value := self._scattered(record.indices, attributes, values, arrays[1])) is not None:
            return value
        if record.sums:
            return self.reduced(values[0], self.use(op, attributes, present, shape), shape)
        if record.elementwise and record.choosers:  # a term for each outcome
            flag, *pair = (wide(value, self.lead, len(shape)) for value in values)
            rows = map(self.times, (flag, self.hashed("otherwise", flag)), pair)
            return self.filled(self.plus(*rows) if arrays[0] is None else np.where(arrays[0], *pair), shape)
        if op in PRODUCTS and (value := self._product(op, attributes, present, values, shape)) is not None:
            return value
        key = self.key(op, attributes, operands, slot)
        if record.elementwise:
            return self.filled(self.elementwise(key, values), shape)
        return self.opaque(key, values, self._indices(op, attributes, operands, shape, slot), shape)

    def _scattered(self, kind: Any, attributes: Mapping[str, Any], values: Sequence[Array], index: Any) -> Array | None:
        """Elements added, or written once, at constant places; None for others."""
        lead, how, shape = self.lead, attributes.get("reduction", "none"), values[0].shape[self.lead :]
        if index is None or how not in ("add", "none"):
            return None
        cells, tuples = np.arange(prod(shape)).reshape(shape), tuple(np.moveaxis(index, -1, 0))
        at = cells[tuples] if kind is Indices.TUPLE else np.take_along_axis(cells, index, attributes["axis"])
        flat, at = joined([value.reshape(*value.shape[:lead], -1) for value in values[::2]], -1), at.reshape(-1)
        result, rows = np.array(flat[..., : cells.size]), flat[..., cells.size :]
        if how == "none" and np.unique(at).size != at.size:
            return None  # in any order
        result[..., at] *= np.uint64(how == "add")
        while at.size:
            once, spots = np.unique(at, return_index=True)
            result[..., once] = self.plus(result[..., once], rows[..., spots])
            at, rows = np.delete(at, spots), np.delete(rows, spots, -1)
        return result.reshape(*result.shape[:lead], *shape)

    def reduced(self, value: Array, use: OperatorUse, shape: Sequence[int]) -> Array:
        """The sum along the dimensions of a reduction."""
        axes = axes_of(use)
        if axes is None:
            raise WrongLine("open axes", lemma="open shape")
        value = self.total(value, tuple(self.lead + axis for axis in axes), keep=True)
        return value.reshape(*value.shape[: self.lead], *shape)

    def key(self, op: str, attributes: Mapping[str, Any], operands: Sequence[Any] = (0,), slot: int = 0) -> Any:
        """The name of a function without laws."""
        return op, sorted(full(op, attributes, self.opset).items()), [of is None for of in operands], slot

    def elementwise(self, key: Any, values: Sequence[Array]) -> Array:
        """A function without laws of the elements at a place."""
        rank = max(value.ndim for value in values) - self.lead
        return self.hashed(key, *np.broadcast_arrays(*(wide(value, self.lead, rank) for value in values)))

    def _indices(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[int | None], shape: Sequence[int], slot: int
    ) -> list[tuple[tuple[Any, ...], int]]:
        """The indices of elements that depend on operands' at the place alone: dimensions of operands and result."""
        dims = operator(op).dims
        if dims is None:
            return []
        present = [at for at, of in enumerate(operands) if of is not None]
        rows: list[tuple[tuple[Any, ...], Any]] = [
            (tuple(factor.operands[at] for at in present), factor.results[slot])
            for factor in dims(self.use(op, attributes, operands, shape, slot))
            if not factor.reduce and not factor.masked
        ]
        return [
            row for row in rows if row[1] is not None and {type(at) for at in (*row[0], row[1])} <= {int, type(None)}
        ]

    def opaque(
        self, key: Any, values: Sequence[Array], indices: Sequence[tuple[Sequence[Any], int]], shape: Sequence[int]
    ) -> Array:
        """A function without laws of whole operands, or of their elements along ``indices``."""
        lead, digests, inner = self.lead, [np.zeros([1] * (self.lead + len(indices)), np.uint64)], []
        for slot, value in enumerate(values):
            rows, sizes = laid(value, lead, [row[slot] for row, _ in indices])
            digests.append(self.total(self.times(rows, self.drawn(rows.shape[-1:], "weights")), -1))
            inner.append(sizes)
        outer = [dim for _, dim in indices]
        rest = [dim for dim in range(len(shape)) if dim not in outer]
        seed = key, inner, [shape[dim] for dim in rest]
        whole = self.hashed(seed, *np.broadcast_arrays(*digests))
        whole = np.broadcast_to(whole, (*whole.shape[:lead], *(shape[dim] for dim in outer)))
        value = self.hashed(seed, whole[..., None], np.arange(prod(shape[dim] for dim in rest), dtype=np.uint64))
        value = value.reshape(*whole.shape, *(shape[dim] for dim in rest))
        return np.transpose(value, (*range(lead), *(lead + [*outer, *rest].index(dim) for dim in range(len(shape)))))

    def _product(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[int], values: Sequence[Array],
        shape: Sequence[int],
    ) -> Array | None:  # fmt: skip
        """A contraction by the indices of the record; None for one with further indices."""
        lead, record, dims = self.lead, operator(op), operator(op).dims
        addend = values[2:] if record.scale else []
        values = values[: len(values) - len(addend)]
        assert dims is not None
        factors: list[Any] = list(dims(self.use(op, attributes, operands[: len(values)], shape)))
        outer = sorted((of for of in factors if of.results[0] is not None), key=lambda of: of.results[0])
        inner, end = [of for of in factors if of.results[0] is None], lead + len(outer)
        rows = [
            laid(value, lead, [of.operands[slot] for of in (*outer, *inner)])[0] for slot, value in enumerate(values)
        ]
        if any(row.shape[-1] != 1 for row in rows) or [of.results[0] for of in outer] != list(range(len(shape))):
            return None
        sizes = np.broadcast_shapes(*(row.shape[end:] for row in rows))
        rows = [np.broadcast_to(row, (*row.shape[:end], *sizes)).reshape(*row.shape[:end], prod(sizes)) for row in rows]
        result = np.zeros([1] * end, np.uint64)
        for at in range(prod(sizes)):
            result = self.plus(result, reduce(self.times, (row[..., at] for row in rows)))
        alpha, beta = (self.element(simplest(np.float32(attributes.get(name, 1.0)))) for name in (record.scale, "beta"))
        result = self.times(self.filled(result, shape), alpha)
        return self.plus(result, self.filled(self.times(addend[0], beta), shape)) if addend else result

    # --- exponentials ---

    def exponential(self, at: int, cut: Cut = (), use: Any = None, factor: Fraction = Fraction(1)) -> Array:
        """The exponential of a multiple: of a sum, a product of exponentials; a power where the factor is whole."""
        op, attributes, operands, shape = self.forms[at]
        if self.moves(at):
            return self._carried(at, [self.exponential(of, cut, None, factor) for of in operands], self.lead)
        if op == "linear" and operands:
            rows = [self.exponential(of, cut, None, factor * Fraction(x)) for of, x in zip(operands, attributes)]
            return self.filled(reduce(self.times, [wide(r, self.lead, len(shape or ())) for r in rows]), shape or ())
        times = 1 if factor.denominator == 1 else abs(factor)
        return self.power(self.hashed(EXP, self.times(self.value(at, cut), self.element(times))), int(factor / times))

    def logarithm(self, at: int, cut: Cut = (), use: Any = None) -> Array:
        """The logarithm of a product with exponentials is a sum."""
        op, attributes, operands, shape = self.forms[at]
        if self.moves(at):
            return self._carried(at, [self.logarithm(of, cut) for of in operands], self.lead)
        rest, terms = list[Array](), list[Array]()
        for of, exponent in zip(operands, attributes) if op == "product" else ():
            base, rank = of, len(shape or ())
            while self.forms[base].op == "view":
                (base,) = self.forms[base].operands
            if self.forms[base].op == EXP:
                value = self.value(self.forms[base].operands[0], cut)
                value = value.reshape(*value.shape[: self.lead], *self.shape(of))
                terms.append(wide(self.times(value, self.element(exponent)), self.lead, rank))
            else:
                rest.append(wide(self.power(self.value(of, cut), exponent), self.lead, rank))
        if not terms:
            return self.hashed(LOG, self.value(at, cut))
        terms += [self.hashed(LOG, reduce(self.times, rest))] if rest else []
        return self.filled(reduce(self.plus, terms), shape or ())

    def softmax(self, at: int, cut: Cut, use: OperatorUse) -> Array:
        """exp(x) / sum(exp(x)), or x - log(sum(exp(x))), where a term common to a row stands in front of the sum."""
        value, dims = self.exponential(at, cut), tuple(self.lead + axis for axis in softmax_axes(use))
        if use.op_type == SOFTMAX:
            return self.times(value, self.power(self.total(value, dims, keep=True), -1))
        form, whole = self.forms[at], self.value(at, cut)
        rank, common = whole.ndim - self.lead, np.zeros([1] * whole.ndim, np.uint64)
        for of, factor in zip(form.operands, form.attributes) if form.op == "linear" else ():
            row = wide(self.value(of, cut), self.lead, rank)
            if all(row.shape[dim] == 1 for dim in dims):
                common = self.plus(common, self.times(row, self.element(factor)))
                value = self.times(value, wide(self.exponential(of, cut, None, -Fraction(factor)), self.lead, rank))
        log = self.plus(common, self.hashed(LOG, self.total(value, dims, keep=True)))
        return self.plus(whole, self.times(log, self.element(-1)))

    # --- types ---

    def rounded(self, value: Array, to: str) -> Array:
        """A value rounded to a type: what is rounded stays."""
        flat = value.reshape(-1)
        if flat.size and (flat == flat[0]).all() and int(flat[0]) in self.exact:
            with np.errstate(all="ignore"):
                short = simplest(np.float64(self.exact[int(flat[0])]).astype(numpy_dtype(to))[()])
            self.exact[int(self.element(short))] = short
            return np.full_like(value, self.element(short))
        images = self.images.get(to, flat[:0])
        result = np.where(np.isin(value, images), value, self.hashed(("round", to), value))
        self.images[to] = np.union1d(images, result)
        return result

    def looked_up(self, width: int, values: Sequence[Array], shape: Any) -> Array:
        """Rows of a table, by number, as a Gather."""
        table, chosen = (
            value.reshape(*value.shape[: self.lead], *size) for value, size in zip(values, ((-1, width), (-1,)))
        )
        return self.opaque(self.key("Gather", {}, (0, 0)), [table, chosen], [((1, None), 1), ((None, 0), 0)], shape)


FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    EXP: PointValues.exponential,
    LOG: PointValues.logarithm,
    **dict.fromkeys(SMOOTH_MAXIMA, PointValues.softmax),
}
"""Operators with laws that read the expression of the operand."""
FORMS: Mapping[str, Any] = {
    **dict.fromkeys(("linear", "product", "times zero", *CARRIED)),
    "one": lambda self, attributes, values, shape: np.full([1] * self.lead, self.element(1)),
    "inverse": lambda self, attributes, values, shape: self.power(values[0], -1),
    "total": PointValues.summed,
    "sum along": lambda self, attributes, values, shape: self.total(values[0], tuple(attributes), keep=True),
    "reduced": lambda self, attributes, values, shape: self.over(values[0], attributes[1]),
    "gathered": PointValues.gathered,
    "in a row": lambda self, axis, values, shape: joined(values, self.lead + axis),
    "iterated": PointValues.iterated,
    "counted": lambda self, attributes, values, shape: self.hashed("counted", values[0]),
    "weight": lambda self, attributes, values, shape: values[0],
    "digits": lambda self, attributes, values, shape: self.hashed(("digits", attributes), values[0]),
    "round": lambda self, to, values, shape: self.rounded(values[0], to),
    "cast": lambda self, types, values, shape: self.hashed(("cast", *types), values[0]),
    "rows": PointValues.looked_up,
}
"""Forms that are no operators: the checker, attributes, values of operands, shape -> the value."""

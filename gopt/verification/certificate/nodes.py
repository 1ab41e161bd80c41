"""Rules of nodes and calls: from the values of operands to the value of a result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from gopt.collectives.table import COLLECTIVES
from gopt.ir.constant_folding import as_folded, constant_array, measured
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.types import FLOATS, dtype_name, numpy_dtype
from gopt.operators.fits import misfit
from gopt.operators.kinds import CASTS, CONVOLUTIONS, COPIES, GATHERS, PARTS, PRODUCTS, SIZES
from gopt.operators.operator import Slope
from gopt.verification.certificate.field import Array
from gopt.verification.certificate.lines import LEMMA, OPERATOR, operator_name
from gopt.verification.certificate.values import (
    EXTREMES,
    FUNCTIONS,
    JOINED,
    MOVES,
    WIDER,
    PointValues,
    WrongLine,
    full,
    joined,
    simplest,
    wide,
)

CONSTANTS = ("constant", "filled", "linear", "one", "lowest", "highest")
LAWS = MOVES - GATHERS | COPIES | SIZES | PARTS | PRODUCTS | JOINED.keys() | FUNCTIONS.keys()
"""Operators with a law, beside constants, sums, products and reductions."""
MEANS = ("sum", "mean", "l2")
STRIDED = ("ConvTranspose",)  # with rows of zeros between the rows of a stride


def rule_of(node: Node) -> str:
    """The rule for a node whose result is not the operator itself."""
    record = record_of(node)
    if node.domain == COMM:
        return "call"
    lawful = record.name in LAWS or not node.inputs or record.shape == 0 or record.signs or record.exponents
    return "law" if lawful or record.pieces in MEANS else LEMMA + node.op_type


@dataclass
class CheckedProgram:
    """A graph, expression and rule of each value; ``widened``: value behind a cast to a wider type -> type before."""

    head: Mapping[str, Any]
    graph: Graph
    values: dict[str, int] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    widened: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    at: int = 0

    def dtype(self, name: str) -> str:
        return self.graph.type_of(name).dtype


class NodeChecker(PointValues):
    """The rules of nodes."""

    def __init__(self, extents: Mapping[str, int], seed: str) -> None:
        super().__init__(extents, seed)
        self.checked: set[Any] = set()
        self.apart = frozenset(extents)
        """The axes along which members draw apart."""

    def due(self, number: int, value: Array, what: str, lemma: str = "", member: Mapping[str, int] = {}) -> None:
        """Raise WrongLine unless an expression has a value, in row-major order; ``member``: where it is read."""
        actual, lead = self.on(self.value(number), member.items()), self.lead
        if prod(actual.shape[lead:]) != prod(value.shape[lead:]):
            raise WrongLine(f"shape {actual.shape[lead:]}", f"shape {value.shape[lead:]}")
        one, two = (of.reshape(*of.shape[:lead], prod(of.shape[lead:])) for of in (actual, value))
        if not (one == two).all():
            raise WrongLine(str(self.forms[number]), what, lemma)

    def equal(self, number: int, due: int) -> bool:
        """Return whether two expressions are equal."""
        if number != due and self.shape(number) == self.shape(due):
            self.due(number, self.value(due), str(self.forms[due]))
        return number == due or self.shape(number) == self.shape(due)

    def node(self, program: CheckedProgram, node: Node) -> None:
        """Raise WrongLine unless the results of a node follow from the operands."""
        numbers = [program.values[name] if name else None for name in (*node.inputs, *node.captures)]
        results = [program.values[name] for name in node.outputs if name]
        rule = program.rules[next(filter(None, node.outputs))]
        if node.is_in(COPIES) and self._to(program, node) in WIDER.get(source := program.dtype(node.inputs[0]), ()):
            program.widened[node.outputs[0]] = program.widened.get(node.inputs[0]) or source
        key = (node.encoded or id(node), rule, *numbers, None, *results)
        if key in self.checked and not node.is_in(CASTS):
            return
        for name, number in zip(filter(None, node.outputs), results):
            type, shape = program.graph.type_of(name), self.forms[number].shape
            if program.rules[name] != rule or (type.static and shape != type.shape):
                raise WrongLine(f"{program.rules[name]}, shape {shape}", f"{rule}, shape {type.shape}")
        if rule not in (OPERATOR, rule_of(node)):
            raise WrongLine(f"rule {rule}", f"{OPERATOR} or {rule_of(node)}")
        shapes, named = [of if of is None else self.forms[of].shape for of in numbers], record_of(node).indices
        fault = misfit(node.op_type, node.attributes, shapes, self.array(numbers[1]) if named else None)
        if fault and node.domain in ("", "ai.onnx"):
            raise WrongLine(f"{node.op_type}: {fault}", "shapes that fit the operator")
        written = rule == OPERATOR and self._written(node, numbers, results)
        if not written and not self._constant(node, numbers, results):
            for slot, name in (pair for pair in enumerate(node.outputs) if pair[1]):
                self._result(program, node, numbers, slot, program.values[name], rule)
        self.checked.add(key)

    def _to(self, program: CheckedProgram, node: Node) -> str:
        return dtype_name(node.attributes["to"]) if "to" in node.attributes else program.dtype(node.outputs[0])

    def _written(self, node: Node, numbers: Sequence[int | None], results: Sequence[int]) -> bool:
        """Return whether results are the operator on the same expressions, whatever the shapes."""
        absent = tuple(index for index, number in enumerate(numbers) if number is None)
        present = tuple(number for number in numbers if number is not None)
        for slot, number in enumerate(results):
            op, attributes, operands, _ = self.forms[number]
            if op != operator_name(node) or operands != present or draws(node):
                return False
            if not record_of(node).elementwise:
                attributes, index = attributes
                if index != [at for at, name in enumerate(node.outputs) if name][slot]:
                    return False
            attributes, missing = attributes if absent else (attributes, ())
            if missing != absent or full(op, dict(attributes), self.opset) != full(op, node.attributes, self.opset):
                return False
        return True

    def _constant(self, node: Node, numbers: Sequence[int | None], results: Sequence[int]) -> bool:
        """Return whether a node makes a constant, and the result is its value."""
        arrays = [constant for number in numbers if (constant := self.array(number)) is not None]
        root = next(of for of in (results[0], *self.forms[results[0]].operands) if self.forms[of].op != "view")
        array = None if node.inputs else constant_array(node.attributes)
        if node.is_in(SIZES) and numbers[0] is not None:
            array = measured(node, self.shape(numbers[0]))
        elif len(arrays) == len(numbers) and len(results) == 1 and arrays and self.forms[root].op in CONSTANTS:
            if record_of(node).shape == 0:  # a number in every element, however many
                array = np.broadcast_to(as_folded(node, [np.ones(0, np.int64)]), arrays[0])  # type: ignore[arg-type]
            else:
                to = dtype_name(node.attributes["to"]) if "to" in node.attributes else ""
                array = arrays[0].astype(numpy_dtype(to)) if to and node.is_in(CASTS) else as_folded(node, arrays)
        if array is not None:
            self.constant(results[0], np.asarray(array))
        return array is not None

    def constant(self, number: int, array: np.ndarray) -> None:
        """Raise WrongLine unless an expression is a constant."""
        op, _, operands, shape = self.forms[number]
        kind, flat = array.dtype.kind, array.reshape(-1)
        if shape != array.shape:
            raise WrongLine(f"a constant of shape {shape}", f"shape {array.shape}")
        if op == "view":
            return self.constant(operands[0], array.reshape(self.shape(operands[0])))
        empty = not array.size and (array.dtype.name in FLOATS or op == "linear")
        if empty or (array.dtype.name in FLOATS and (flat == flat[0]).all() and np.isfinite(float(flat[0]))):
            self.fits(number)
            exact = self.element(simplest(flat[0]) if array.size else 0)
            return self.due(number, np.full([1] * self.lead + [array.size], exact), "the stored number")
        data = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        data = data if len(data) <= 64 else hashlib.sha256(data).digest()
        due: tuple[str, Any] = "constant", (array.dtype.name, data)
        if array.size == 1 and kind in "if":
            limits = (-np.inf, np.inf) if kind == "f" else (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
            bound = {limits[0]: "lowest", limits[1]: "highest"}.get(flat[0])
            due = (bound, array.dtype.name) if bound else due
        elif array.size and (flat == flat[0]).all() and op == "filled":
            due = "filled", (array.dtype.name, flat[:1].tobytes())
        if operands or self.forms[number][:2] != due:
            raise WrongLine(str(self.forms[number]), f"the stored {array.dtype.name} values")
        if kind in "iub":
            self.arrays[number] = array

    # --- nodes ---

    def _result(
        self, program: CheckedProgram, node: Node, numbers: Sequence[int | None], slot: int, number: int, rule: str
    ) -> None:
        """Raise WrongLine unless a result of a node is an expression."""
        present, lemma = [of for of in numbers if of is not None], rule.removeprefix(LEMMA) if LEMMA in rule else ""
        for of in (number, *present):
            op = self.forms[self.forms[of].operands[0] if self.forms[of].op == "take" else of].op
            named = {"digits": "places of maxima"}.get(op, op if op in STRIDED and record_of(node).joins else "")
            lemma = lemma or ("counts that are not negative" if self.counted[of] else named)
        self.fits(number)
        record, what, shape = record_of(node), f"{node.op_type} of the operands", self.shape(number)
        lawful = record.signs or record.exponents or record.pieces in MEANS
        lawful = lawful and program.dtype(node.outputs[slot]) in FLOATS
        if lawful:
            value = self._reduced(node, present, shape) if record.pieces else self._arithmetic(node, present)
        elif node.is_in(COPIES):
            source, to = program.dtype(node.inputs[0]), self._to(program, node)
            value = self.cast(self.value(present[0]), source, to, program.widened.get(node.inputs[0], ""))
            lemma = lemma or ("any flag" if to == "bool" else "")
        elif node.is_in(PARTS) and len(node.outputs) > 1:
            value = self._split(program, node, present, slot)
        else:
            if draws(node):
                drawn = self.forms[number].operands[-1:]
                if [(*self.forms[of][:2], self.varies[of]) for of in drawn] != [("draw", node.outputs[0], self.apart)]:
                    raise WrongLine(str(self.forms[number]), "what a node draws")
                numbers = [*numbers, drawn[0]]
            op, biases = operator_name(node), [of for of in numbers[2:] if of is not None and node.is_in(CONVOLUTIONS)]
            value = self.result(op, node.attributes, slot, numbers[: len(numbers) - len(biases)], shape)
            for bias in map(self.value, biases):  # of each channel
                value = self.plus(value, bias.reshape(*bias.shape[: self.lead], 1, -1, *[1] * (len(shape) - 2)))
        if value.shape[self.lead :] != shape:
            raise WrongLine(f"shape {shape}", f"shape {value.shape[self.lead :]}")
        self.due(number, value, what, lemma)
        if lawful and any(self.risks[of] & ~self.risks[number] for of in (present[:1] if record.pieces else present)):
            raise WrongLine("", "", "what may be no number")

    def _arithmetic(self, node: Node, numbers: Sequence[int]) -> Array:
        """A sum of the operands with signs, or a product of powers."""
        record, rank = record_of(node), max(len(self.shape(of)) for of in numbers)
        rows = [wide(self.value(of), self.lead, rank) for of in numbers]
        if record.signs:
            return reduce(self.plus, (self.times(row, self.element(record.sign(at))) for at, row in enumerate(rows)))
        return reduce(self.times, map(self.power, rows, record.exponents))

    def _reduced(self, node: Node, numbers: Sequence[int], shape: tuple[int, ...]) -> Array:
        """A sum or a mean along dimensions, also of squares or of absolute values."""
        record, value = record_of(node), self.value(numbers[0])
        if record.slope(0) is Slope.BENT:
            value = self.elementwise(self.key("Abs", {}), [value])
        if record.slope(0) is Slope.CURVED:
            value = self.times(value, value)
        value = self.reduced(value, self.use(node.op_type, node.attributes, numbers, shape), shape)
        if record.pieces == "mean":
            value = self.times(value, self.element(Fraction(prod(shape), prod(self.shape(numbers[0])))))
        return self.elementwise(self.key("Sqrt", {}), [value]) if record.pieces == "l2" else value

    def _split(self, program: CheckedProgram, node: Node, numbers: Sequence[int], slot: int) -> Array:
        shape = self.shape(numbers[0])
        axis = node.attributes.get("axis", 0) % len(shape)
        named = self.array(numbers[1]) if len(numbers) > 1 else node.attributes.get("split")
        sizes = [self.shape(program.values[name])[axis] for name in node.outputs]
        if (len(numbers) > 1 or len(set(sizes[:-1])) > 1) if named is None else list(named) != sizes:
            raise WrongLine(f"parts of {sizes}", f"{named}")
        start, axis = sum(sizes[:slot]), axis + self.lead
        return np.take(self.value(numbers[0]), range(start, start + sizes[slot]), axis)

    def cast(self, value: Array, source: str, to: str, widened: str = "") -> Array:
        """A value in another type."""
        if to in (source, widened) or to in WIDER.get(source, ()):
            return value
        floats = source in FLOATS and to in FLOATS
        return self.rounded(value, to) if floats else self.hashed(("cast", source, to), value)

    # --- calls ---

    def call(
        self, op: str, attributes: Mapping[str, Any], coordinates: Sequence[Mapping[str, int]],
        operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        """Raise WrongLine unless the results of all members of a call follow, by the reference for arrays of places."""
        record, lead, how = COLLECTIVES[op], self.lead, ""
        attributes = record.resolve(attributes)
        members = [
            [self.on(self.value(of), member.items()) for of in row] for row, member in zip(operands, coordinates)
        ]
        if record.reduces:
            how = attributes["reduce"]
            members = [[self._met([row[at] for row in operands], coordinates, how) for at, _ in enumerate(operands[0])]]
            attributes["reduce"] = "max"
        attributes |= {"dtype": "int64"} if "dtype" in attributes else {}
        flat = [value for row in members for value in row]
        ends = list(accumulate((prod(value.shape[lead:]) for value in flat), initial=0))
        positions = iter(np.arange(*pair).reshape(value.shape[lead:]) for value, pair in zip(flat, pairwise(ends)))
        contributions = [[next(positions) for _ in row] for row in members]
        contributions = contributions * len(operands) if record.reduces else contributions
        outputs = record.execute(attributes, contributions, "int64")
        whole = joined([value.reshape(*value.shape[:lead], -1) for value in flat], -1)
        for row, numbers, member in zip(outputs, results, coordinates):
            for at, number in zip(row, numbers, strict=True) if row is not None else ():
                if self.shape(number) != at.shape:
                    raise WrongLine(f"shape {self.shape(number)}", f"shape {at.shape}")
                self.due(number, np.take(whole, at, -1), f"the {how or 'elements'} of {op}", member=member)

    def _met(self, numbers: Sequence[int], coordinates: Sequence[Mapping[str, int]], how: str) -> Array:
        """The reduction of a value of each member."""
        pairs = list(zip(numbers, (member.items() for member in coordinates)))
        if how in EXTREMES:
            form = EXTREMES[how]
            return self.distinct(form, joined([self.on(self.spread(of, form), at, 1) for of, at in pairs], 0))
        value = reduce(self.plus, (self.on(self.value(of), at) for of, at in pairs))
        return self.times(value, self.element(Fraction(1, len(numbers)))) if how == "mean" else value

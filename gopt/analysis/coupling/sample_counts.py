"""Numbers of samples in values that follow no sample: sizes read from shapes, and constants that may be such sizes.

A value that nodes make of constants and of shapes is computed as the file says, and as it were with more samples. What
grows as they do counts samples, whatever operators lie between; what stays is a constant of the model, unless the file
wrote the number of samples out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isclose

import numpy as np
import onnx

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import REDUCED, Relation, products
from gopt.analysis.training import State
from gopt.ir.constant_folding import Constants, constant_array
from gopt.ir.graph import Node
from gopt.ir.graph_index import ancestors, copied_from
from gopt.ir.node_kinds import control_flow, elementwise, record_of, value_reads
from gopt.ir.nodes import nested
from gopt.ir.scopes import bodies
from gopt.operators.kinds import LAYOUT, SCALES, VIEWS

_MOST = 64
"""Elements of a constant that are looked at."""
_TOLERANCE = 1e-5
"""Relative; a 32-bit constant that a program computed from a size is off by less."""


@dataclass(frozen=True, slots=True)
class SizesBehind:
    """Numbers of samples behind a value that follows no sample.

    ``counts``: values, this value among them, in proportion to the number of samples; ``divisors``: values that only
    multiply or divide sums over samples. ``term``: a constant that is added or divided, and may be a function of the
    number, or a stand-in for such a constant: a state that no step changes, a choice; ``factor``: a constant factor.
    ``lost``: a value that follows the number of samples in a way unknown to gopt.
    """

    counts: frozenset[str] = frozenset()
    divisors: frozenset[str] = frozenset()
    term: str = ""
    factor: str = ""
    lost: str = ""

    def joined(self, other: SizesBehind) -> SizesBehind:
        if other in (_NOTHING, self):
            return self
        return SizesBehind(
            self.counts | other.counts,
            self.divisors | other.divisors,
            self.term or other.term,
            self.factor or other.factor,
            self.lost or other.lost,
        )


_NOTHING = SizesBehind()


OPEN = 7
"""Samples of a batch whose number the file leaves open."""
_TIMES = (2, 3, 64)
"""Batches that are tried: a bound on a size shows in a large one."""


class Multiplied(Constants):
    """The constants of a step with so many times the samples; ``counted``: the user's counts of samples."""

    def __init__(self, context: CouplingContext, times: int, counted: Iterable[str] = ()) -> None:
        known = {name: value for name in counted if (value := context.constant(name)) is not None}
        given = {name: np.asarray(value * times).astype(value.dtype) for name, value in known.items()}
        super().__init__(context.index.graph, context.index.producers, given)
        self.context, self.times = context, times

    def sizes(self, name: str) -> tuple[int, ...] | None:
        mark, shape = self.context.samples(name), self.context.index.graph.type_of(name).shape
        if mark is None or shape is None:
            return super().sizes(name)
        sizes = list(shape)
        own = sizes[mark.axis]
        sizes[mark.axis] = self.times * (own if isinstance(own, int) else OPEN * mark.outer * mark.inner)
        known = tuple(size for size in sizes if isinstance(size, int))
        return known if len(known) == len(sizes) else None


@dataclass(slots=True)
class SampleCounts:
    """Finds the numbers of samples behind values that follow no sample, and behind the factors and terms that reduced
    values have met since they were reduced; results are kept."""

    context: CouplingContext
    states: Sequence[State] = ()
    counted: frozenset[str] = frozenset()
    """Values that the user says count samples."""
    _kept: set[str] = field(init=False)
    """States that no step changes."""
    _once: Multiplied = field(init=False)
    _multiplied: list[Multiplied] = field(init=False)
    _known: dict[str, SizesBehind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        index = self.context.index
        self._kept = {each.tensor for each in self.states if copied_from(index, each.updated) == each.tensor}
        self._once = Multiplied(self.context, 1, self.counted)
        self._multiplied = [Multiplied(self.context, times, self.counted) for times in _TIMES]

    def of(self, name: str) -> SizesBehind:
        """The numbers of samples behind a value; those behind its operands are found first, without recursion."""
        stack = [name]
        while stack:
            value = stack[-1]
            if value in self._known:
                stack.pop()
                continue
            node = self.context.index.producers.get(value)
            rest = self._operands(value, node)
            open_ = [each for each in rest if each not in self._known]
            if open_:
                stack += open_
                continue
            self._known[value] = self._of(value, node, rest)
            stack.pop()
        return self._known[name]

    def counts_samples(self, name: str) -> bool:
        """Return whether a value is proportional to the number of samples, by a shape that it is made of."""
        return name in self.of(name).counts

    def _operands(self, name: str, node: Node | None) -> list[str]:
        """The operands whose numbers of samples lie behind a value."""
        mark = self.context.marks.get(name)
        if node is None or name in self.context.origins or (mark is not None and mark.kind not in REDUCED):
            return []
        if mark is None and (self._count(name) is not None or self._sized(node)):
            return []
        return [each for each in (node.reads if mark is None else value_reads(node)) if each]

    def _divides(self, node: Node, name: str) -> bool:
        """Return whether an operand divides a sum over samples, or multiplies it."""
        marks = self.context.marks
        summed = (each in marks and marks[each].kind is Relation.SUM for each in node.inputs)
        return name not in marks and node.is_in(SCALES) and any(summed)

    def _of(self, name: str, node: Node | None, operands: list[str]) -> SizesBehind:
        if name in self.counted and self._count(name):
            return SizesBehind(frozenset([name]))
        if node is None:
            return SizesBehind(term=name) if name in self._kept and self._may_be_held(name) else _NOTHING
        follows = name in self.context.marks
        proportional = None if follows else self._count(name)
        if proportional is not None:
            return SizesBehind(frozenset([name])) if proportional else _NOTHING
        if not follows and self._sized(node):
            return SizesBehind(lost=name)
        found = SizesBehind(term=name) if not follows and self._may_choose(node) else _NOTHING
        flags = self.context.index.graph.type_of(name).dtype == "bool"
        for each in operands:
            behind = self._known[each]
            if flags or chooses(node, each):
                behind = replace(behind, term="", factor="")  # it says which value, not how much
            if follows and behind.counts and self._divides(node, each):
                behind = replace(behind, counts=frozenset(), divisors=behind.counts)
            found = found.joined(behind)
            if follows and self._multiplies_mean(node, each):
                found = found.joined(SizesBehind(term=each))
            if not follows and not flags and self.written_out(node, each):
                scales = node.is_in(SCALES) and (record_of(node).exponent(1) > 0 or each == node.inputs[1])
                found = found.joined(SizesBehind(factor=each) if scales else SizesBehind(term=each))
        if found.counts and not follows and not (elementwise(node) or node.is_in(LAYOUT)):
            return SizesBehind(lost=name)  # it may be a size of something else
        return found

    def _multiplies_mean(self, node: Node, name: str) -> bool:
        """Return whether a constant makes a sum of a mean over samples."""
        marks, by = self.context.marks, self.context.scalar(name)
        if not by or name in marks or not node.is_in(SCALES) or self.context.batch < 2:
            return False
        means = any(each in marks and marks[each].kind is Relation.MEAN for each in node.inputs)
        by = 1 / by if record_of(node).exponent(1) < 0 else by
        return means and self._count(name) is False and isclose(abs(by), self.context.batch, rel_tol=_TOLERANCE)

    def _count(self, name: str) -> bool | None:
        """Return whether a constant grows with the samples; None where it is no constant, or does otherwise."""
        here = self.context.constant(name)
        here = self._once.value(name) if here is None and not self.context.batch else here
        if here is None or here.dtype.kind not in "fiubV":
            return None
        found = set()
        for constants, times in zip(self._multiplied, _TIMES):
            there = constants.value(name)
            if there is None or there.shape != here.shape:
                return None
            grown = here.dtype.kind != "b" and np.allclose(there, times * here.astype(np.float64), rtol=1e-6)
            found.add(False if bool((here == there).all()) else True if grown else None)
        return found.pop() if len(found) == 1 else None

    def _sized(self, node: Node) -> bool:
        """Return whether a node reads the size of a value of samples, directly."""
        return any(name in self.context.marks for name in node.reads)

    def _may_be_held(self, name: str) -> bool:
        """Return whether a state that no step changes may hold a function of the number of samples."""
        tensor = self.context.index.graph.initializers.get(name)
        return tensor is None or self._may_count(np.asarray(tensor.numpy()), "fiuV")

    def _may_choose(self, node: Node) -> bool:
        """Return whether bodies of control flow may make a function of the number of samples: they hold such a
        constant, or compute."""
        proto = node.proto if control_flow(node) else None
        inner = list(nested(body for each in bodies(proto) for body in each.node)) if proto is not None else []
        stored = [each for owner in (proto, *inner) if owner is not None for body in bodies(owner)
                  for each in body.initializer]  # fmt: skip
        values = [constant_array({each.name: onnx.helper.get_attribute_value(each) for each in made.attribute})
                  for made in inner if not made.input]  # fmt: skip
        values += [onnx.numpy_helper.to_array(each) for each in stored]
        computes = any(each.op_type not in VIEWS | {"Constant"} for each in inner)
        return computes or any(each is None or self._may_count(each, "fiuV") for each in values)

    def _may_count(self, value: np.ndarray, kinds: str) -> bool:
        sizes = self.sizes()
        return any(may_count(each, self.context.batch, sizes) for each in few_elements(value, kinds))

    def told(self, name: str) -> str:
        """Say in words which value stands for a number of samples."""
        node = self.context.index.producers.get(name)
        if node is not None and control_flow(node):
            return f"{name!r}, which is chosen by {node.op_type},"
        if name in self._kept:
            return f"the state {name!r}, which no step changes,"
        return f"the constant {name!r} ({self.context.scalar(name):.6g})"

    def written_out(self, node: Node, name: str) -> bool:
        """Return whether an operand is a constant that may be a function of the number of samples."""
        exponent = record_of(node).raised_to is not None and name != node.inputs[0]
        if exponent or chooses(node, name) or name in self.context.marks or self._count(name) is not False:
            return False
        needed = ancestors(self.context.index, [name])[1]
        value = self.context.constant(name)
        if value is None or any(each in self.context.marks for each in needed):
            return False  # a dimension that follows no sample, read from a shape
        return self._may_count(value, "fiuV" if elementwise(node) else "fV")

    def sizes(self) -> tuple[int, ...]:
        """Dimensions of the batch's inputs beside the samples' dimension."""
        types, marks = self.context.index.graph.inputs, self.context.marks
        of_batch = [type for name, type in types.items() if name in marks and marks[name].kind is Relation.SAMPLES]
        return tuple({size for type in of_batch for size in (type.shape or ())[1:] if isinstance(size, int)})


def chooses(node: Node, name: str) -> bool:
    """Return whether a node reads an operand as a condition or as places alone."""
    choosers = record_of(node).choosers
    return bool(choosers) and {at for at, each in enumerate(node.inputs) if each == name} <= {*choosers}


def few_elements(value: np.ndarray, kinds: str) -> set[float]:
    """The different elements of a constant; none of a large one, or of another type than NumPy's ``kinds``."""
    if value.size > _MOST or value.dtype.kind not in kinds:
        return set()
    return {float(each) for each in value.reshape(-1).tolist()}


def corrects_variance(number: float, count: int) -> bool:
    """Return whether a number is n / (n - 1), the factor of an unbiased variance of n = ``count`` elements; float32
    does not tell the factor of more than a million elements from 1."""
    return 1 < count < 1 << 20 and isclose(number, count / (count - 1), rel_tol=3e-7)


def may_count(number: float, batch: int, sizes: tuple[int, ...] = ()) -> bool:
    """Return whether a number may be one of samples, one less, or the reciprocal, square, root or logarithm of
    such a number.

    ``sizes``: other dimensions that may be counted with the samples.
    """
    if batch < 2 or not number or not np.isfinite(number):
        return False
    number = abs(float(number))
    forms = [number, 1 / number, number**2, number**-2, number**0.5, number**-0.5]
    forms += [exp(number)] if number < 40 else []
    for many in products(sizes):
        count = batch * many
        if any(isclose(each, count, rel_tol=_TOLERANCE) for each in forms):
            return True
        if count > 2 and any(isclose(each, count - 1, rel_tol=_TOLERANCE) for each in forms[:2]):
            return True
    return False

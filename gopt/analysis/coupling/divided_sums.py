"""Sums over samples that may be means: a factor of the sum may be one over the number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import Mark, Relation, products
from gopt.analysis.coupling.open_statistics import Unclear
from gopt.analysis.coupling.sample_counts import SampleCounts, few_elements, may_count
from gopt.analysis.training import Phase
from gopt.ir.graph import Node
from gopt.ir.node_kinds import record_of, scale
from gopt.operators.kinds import PRODUCTS, SCALES

_FAR = 128
"""Values of an update that are searched for its rates."""


@dataclass(frozen=True, slots=True)
class DividedSums:
    """Judges the sums that a statistic, whose new value is ``updated``, takes of the samples."""

    context: CouplingContext
    counts: SampleCounts
    updated: str

    def rule(self, name: str, mark: Mark, old: float | None) -> str:
        """A sum over samples times a constant, which may divide by their number."""
        if mark.doubt or self.context.batch == 1:
            raise Unclear(f"{name!r} may be a sum or a mean over the samples of a batch of this size")
        self._refuse_weights(name, mark)
        self._refuse_factors(name, mark)
        first = self.context.marks.get(mark.origin, mark)
        inside, factor = abs(first.factor), abs(mark.factor / first.factor) if first.factor else 0.0
        rate = 1 - old if old is not None else 0.0
        sizes = [self.context.batch * size for size in products(mark.sizes)]
        if factor and any(_is_rate(factor * size, old) for size in sizes):
            return "mean"
        known = [1.0, rate, *self._rates()]
        plain = old == 1.0 or any(isclose(factor, each, rel_tol=1e-5) for each in known)
        if factor and (not plain or (inside != 1.0 and may_count(inside, self.context.batch))):
            raise Unclear(f"{name!r} is a sum over samples times {factor:.6g}, which may divide by their number")
        apart = [] if factor == rate or _is_rate(factor, old) else [factor, *([factor / rate] if rate else [])]
        for by in (inside, *apart):
            one = any(isclose(by * (n - less), 1, rel_tol=1e-5) for n in sizes for less in (0, 1) if n - less > 1)
            root = by != 1 and any(
                _digits(by / each) > 4 and may_count(by / each, self.context.batch) for each in known if each
            )
            if one or root or any(_is_rounder(by * size, by) or (by < 1 and _is_power(size)) for size in sizes):
                raise Unclear(
                    f"{name!r} is a sum over {self.context.batch} samples times {by:.6g}, which may divide by their "
                    "number"
                )
        return "sum"

    def _refuse_weights(self, name: str, mark: Mark) -> None:
        """Raise Unclear for a sum that a product takes, with weights that follow no batch: a vector of one over the
        number of samples makes it a mean."""
        node = self.context.origins.get(mark.origin)
        if node is None or not node.is_in(PRODUCTS):
            return
        weights = next((each for each in node.inputs[:2] if each not in self.context.marks), None)
        if weights is not None:
            raise Unclear(f"{name!r} is a sum over samples weighted by {weights!r}, which may divide by their number")

    def _rates(self) -> list[float]:
        """The constants by which the update multiplies what is no sum over samples, such as the old value, and one less
        each."""
        index, marks = self.context.index, self.context.marks
        stack, seen, found = [self.updated], {self.updated}, []
        while stack and len(seen) < _FAR:
            node = index.producers.get(stack.pop())
            if node is None:
                continue
            summed = (each in marks and marks[each].kind is Relation.SUM for each in node.inputs)
            if node.is_in(SCALES) and not any(summed):
                found += [abs(by) for each in node.inputs if (by := self.context.scalar(each))]
            fresh = [each for each in node.reads if each not in seen and each not in self.context.origins]
            seen.update(fresh)
            stack += fresh
        return [*found, *(1 - each for each in found)]

    def _refuse_factors(self, name: str, mark: Mark) -> None:
        """Raise Unclear for constants around the reduction that may be one over the number of samples: vectors and
        matrices that the sum is multiplied by, and what is chosen or bounded by constants before it is summed."""
        marks, producers = self.context.marks, self.context.index.producers
        stack, seen = [name], {name}
        while stack:
            value = stack.pop()
            node, kind = producers.get(value), marks[value].kind
            if node is None or (kind is Relation.SAMPLES and node.phase is Phase.FORWARD):
                continue
            alpha = scale(node)
            if alpha != 1.0 and may_count(alpha, self.context.batch, mark.sizes):
                raise Unclear(f"{value!r} is multiplied by {alpha:.6g}, which may divide by the number of samples")
            for each in node.reads:
                if each not in marks:
                    behind = self.counts.of(each)
                    literal = behind.term or behind.factor or (each if self._may_divide(node, each) else "")
                    if literal:
                        raise Unclear(
                            f"{self.counts.told(literal)} in front of {name!r}, a sum over samples, may divide by "
                            "their number", literal=literal,
                        )  # fmt: skip
                elif each not in seen and marks[each].kind in (Relation.SUM, Relation.SAMPLES):
                    seen.add(each)
                    stack.append(each)

    def _may_divide(self, node: Node, name: str) -> bool:
        """Return whether elements of a constant may be one over the number of samples; factors of one element are
        judged with their sum."""
        value = self.context.constant(name)
        if value is None or (value.size == 1 and node.is_in(SCALES)):
            return False
        sizes = [self.context.batch * size for size in products(self.counts.sizes())]
        found = {abs(each) for each in few_elements(value, "fV")} - {0.0}
        times = [(each, each * size) for each in found for size in sizes]
        return any(isclose(after, 1, rel_tol=1e-5) or _digits(after) < min(_digits(each), 3) for each, after in times)

    def refuse_rate(self, name: str, old: float | None) -> None:
        """Raise Unclear for a sum times a number that is one over the batch as well as a rate: of a running average, or
        a tenth, a hundredth."""
        node = self.context.index.producers.get(name)
        if node is None or not node.is_in(SCALES):
            return
        for value, constant in (node.inputs, node.inputs[::-1]):
            mark, by = self.context.marks.get(value), self.context.scalar(constant)
            divides = record_of(node).exponent(1) < 0
            by = 1 / by if by and divides else by
            tenth = not divides and abs(by) < 1 and _is_power(abs(by))
            if mark is not None and mark.kind is Relation.SUM and by and (tenth or _is_rate(abs(by), old)):
                raise Unclear(f"{name!r} is a sum over samples times {by:.6g}: a rate, or one over their number")


def _is_rate(factor: float, old: float | None) -> bool:
    """Return whether a factor and the old value's factor make a running average."""
    return old is not None and isclose(factor, 1 - old, rel_tol=1e-5)


def _is_rounder(number: float, before: float) -> bool:
    """Return whether a number is rounder than ``before``: a tenth than a twentieth, a twentieth than a fortieth."""
    return (_digits(number), not _is_power(number)) < (_digits(before), not _is_power(before))


def _is_power(number: float) -> bool:
    """Return whether a number is a power of ten."""
    return f"{number:.5e}".startswith("1.00000")


def _digits(number: float) -> int:
    """Significant digits of a number as a 32-bit constant has them."""
    return len(f"{number:.5e}".partition("e")[0].replace(".", "").rstrip("0")) or 1

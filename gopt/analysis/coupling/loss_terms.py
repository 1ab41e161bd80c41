"""The terms of a loss: the constant that each multiplies the values of single samples by, and whether it is a mean."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose, prod

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import REDUCED, Mark, Relation, division
from gopt.analysis.coupling.uniform_factors import UniformFactor, UniformFactors
from gopt.ir.graph import Node
from gopt.ir.node_kinds import divisor_of, in_proportion, record_of
from gopt.operators.kinds import CLASS_LOSSES, MEANS, SCALES, SUMS, UNMOVED

MOST = 64
"""Terms, and paths to them, that are looked at."""
_COPIES = UNMOVED | {"Neg"}


@dataclass(frozen=True, slots=True)
class LossTerm:
    """``factor``: the derivative of the loss by one sample's value; ``degree``: 1 of a mean, 0 of a sum over samples.

    ``sure``: whether its constants tell the one from the other.
    """

    factor: float
    degree: int
    sure: bool = True
    doubt: bool = False
    """Whether its constant divides by the number of samples, or by others."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """All terms of the losses of a step; ``batch``: the number of samples, 0 where it is not a number."""

    terms: tuple[LossTerm, ...]
    batch: int
    values: frozenset[str] = frozenset()
    """The values of single samples that the terms are sums of."""

    @property
    def common(self) -> int | None:
        """The common degree of all terms; None for terms of several degrees, and without terms."""
        degrees = {term.degree for term in self.terms if term.sure}
        return next(iter(degrees)) if len(degrees) == 1 else None

    @property
    def differ(self) -> bool:
        """Whether some terms are means and others sums, for certain."""
        return len({term.degree for term in self.terms if term.sure}) > 1

    def degree(self, factor: float, lone: bool | None, sizes: tuple[int, ...]) -> tuple[int, bool]:
        """The power of 1 / N that a constant holds with which the backward starts, and whether that is certain.

        ``lone``: the derivative of a square, written with one product: its constant holds a two.
        ``sizes``: the other dimensions of the value that it is multiplied by.
        """
        if not self.batch:
            return 0, True
        factor = abs(factor)
        seen = self.common is None or lone is not None or all(term.factor != 1.0 for term in self.terms)
        readings = [self._as_a_term(factor / times) for times in ((2.0, 1.0) if lone else (1.0, 2.0))]
        contrary = readings[0] not in (None, self.common)
        fits = self.common in readings or (self.common is not None and self._but_for_two(factor))
        if self.common is not None and fits and not (contrary and lone is not None):
            return self.common, not contrary
        if matches := [reading for reading in readings if reading is not None]:
            written = readings[0] is not None or lone is None  # a sum of two products has no two
            return matches[0], seen and written and not any(term.doubt for term in self.terms)
        for times in (2.0,) if lone else (1.0,):
            says = division(factor / times, self.batch, sizes)
            if says.by_batch != says.by_others:
                return int(says.by_batch), self.common is None or lone is not None
        return self.common or 0, False

    def begun(self, factor: float, lone: bool = False) -> bool:
        """Return whether a constant is a term's own, or twice that where ``lone``, and not 1."""
        known = (factor, factor / 2) if lone else (factor,)
        return factor != 1.0 and any(isclose(n, term.factor, rel_tol=2e-6) for term in self.terms for n in known)

    def is_mean(self, factor: float) -> bool:
        """Return whether a constant is, for certain, the factor of terms that are means, or twice the factor."""
        near = [term for term in self.terms if any(isclose(factor, two * term.factor, rel_tol=2e-6) for two in (1, 2))]
        return bool(near) and factor != 1.0 and all(term.degree == 1 and term.sure for term in near)

    def _but_for_two(self, factor: float) -> bool:
        """Return whether a constant is a term's own but for a two of the model, and the number of samples explains no
        other difference."""
        if any(term.degree != self.common for term in self.terms):
            return False
        ratios = [factor / term.factor for term in self.terms if term.factor]
        known = [ratio / two for ratio in ratios for two in (0.5, 1.0, 2.0)]
        batch = float(self.batch)
        near = [any(isclose(each, batch**shift, rel_tol=2e-6) for each in known) for shift in (0, -1, 1)]
        return near == [True, False, False]

    def _as_a_term(self, factor: float) -> int | None:
        """The degree of a constant that is a term's own, or differs from it by the number of samples alone."""
        for shift in (0, -1, 1):
            shifted = factor * float(self.batch) ** shift
            degrees = {term.degree + shift for term in self.terms if isclose(shifted, term.factor, rel_tol=2e-6)}
            if len(degrees) == 1 and min(degrees) in (0, 1):
                return degrees.pop()
        return None


def loss_terms(context: CouplingContext, factors: UniformFactors, losses: list[str], trained: set[str]) -> LossTerms:
    """Walk back from the losses to the values of single samples; ``trained``: values that depend on parameters."""
    terms: list[LossTerm] = []
    values: set[str] = set()
    stack: list[tuple[str, UniformFactor, Mark | None]] = [(name, UniformFactor(), None) for name in losses]
    steps = 0
    while stack and len(terms) < MOST and steps < 64 * MOST:
        steps += 1
        name, factor, top = stack.pop()
        mark, node = context.marks.get(name), context.index.producers.get(name)
        if mark is None or (mark.kind not in REDUCED and mark.kind is not Relation.SAMPLES):
            continue
        if top is None and mark.kind in (Relation.MEAN, Relation.SUM):
            top = mark
        following = _following(context, factors, node, mark, trained) if node is not None else []
        stack += [(operand, factor.times(times), top) for operand, times in following]
        if not following and top is not None:
            says = division(top.factor, context.batch, top.sizes) if context.batch else None
            sized = factor.batches  # a size read from a shape divides
            sure = bool(sized) or (not top.doubt and (top.kind is not Relation.SUM or says is None or says.by_others))
            number = factor.number * float(context.batch or 1) ** sized * _of_operator(context, node, mark)
            values.add(name)
            terms.append(LossTerm(number, int(top.kind is Relation.MEAN) - sized, sure, top.doubt and not sized))
    return LossTerms(tuple(dict.fromkeys(terms)), context.batch, frozenset(values))


def _following(
    context: CouplingContext, factors: UniformFactors, node: Node, mark: Mark, trained: set[str]
) -> list[tuple[str, UniformFactor]]:  # fmt: skip
    """The operands that a value is linear in, as far as a loss is made of them, with their constants; weights of
    samples, such as a mask, are no constants."""
    marked = [name for name in node.inputs if name in context.marks]
    if node.is_in(_COPIES):
        return [(name, UniformFactor()) for name in marked[:1]]
    if node.is_in(SUMS) and mark.kind is not Relation.SAMPLES:
        return [(name, UniformFactor()) for name in marked]
    if node.is_in(SCALES) and len(marked) == 1 and node.inputs.count(marked[0]) == 1:
        if not in_proportion(node, marked[0]):
            return []
        other = next(name for name in node.inputs if name != marked[0])
        factor = factors.written(other)
        if not factor.uniform:
            return []
        return [(marked[0], UniformFactor().times(factor, record_of(node).exponent(1)))]
    if record_of(node).multiplies and mark.kind is Relation.SAMPLES and len({*marked}) == 2:
        weighed = [name for name in marked if name in trained]
        maker = context.index.producers.get(weighed[0]) if len(weighed) == 1 else None
        reduces = maker is not None and (maker.is_in(MEANS) or len({*maker.inputs}) < len(maker.inputs))
        return [(weighed[0], UniformFactor())] if reduces else []  # what else the model makes is not of the loss
    if divisor_of(node) and len(marked) == 2 and mark.kind is Relation.WEIGHTED:
        return [(marked[0], UniformFactor())]
    if node.is_in(MEANS) and len(marked) == 1:
        return [(marked[0], UniformFactor(1.0 if record_of(node).pieces == "sum" else _share(context, node)))]
    return []


def _of_operator(context: CouplingContext, node: Node | None, mark: Mark) -> float:
    """One over the number of labels that a loss operator takes the mean of; 1 for any other node."""
    if node is None or mark.kind is not Relation.MEAN:
        return 1.0
    if not node.is_in(CLASS_LOSSES):
        return 1.0
    return 1.0 / (context.index.graph.type_of(node.inputs[1]).elements or 1)


def _share(context: CouplingContext, node: Node) -> float:
    """One over the number of elements that a ReduceMean takes the mean of; 1 where that is not a number."""
    before, after = context.shape(node.inputs[0]), context.shape(node.outputs[0])
    sizes = [size for size in (*before, *after) if not isinstance(size, int)]
    if sizes:
        return 1.0
    return max(prod(after), 1) / max(prod(before), 1)  # type: ignore[arg-type]

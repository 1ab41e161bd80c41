"""The unit of a value of the backward, and what constants say of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.loss_terms import LossTerms
from gopt.analysis.coupling.marks import division
from gopt.analysis.coupling.uniform_factors import UniformFactor, UniformFactors
from gopt.ir.graph import Node
from gopt.ir.node_kinds import in_proportion, record_of
from gopt.operators.kinds import SCALES, SUMS, UNMOVED

MIXED = "?"
"""Of ``Unit.mixed``, where terms are not all means."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Ratio between a value of the large batch and the rank's: 1 / R to the power of ``degree``, R ranks of one size,
    times the rank's share of ``by`` over all ranks. A reduced value of the large batch is the sum of the ranks' values
    times this ratio.

    ``start``: no operator of the model was passed yet, and ``factor`` holds constants of the loss alone. ``lone``: the
    value is one product with the value that the loss squares, and not (False) the sum of two. ``sure``: whether
    constants tell the degree. ``coupled``: a factor that is reduced over samples, hence a statistic;
    or a function of a derivative that the number of samples divides. ``sizes``: other dimensions that were summed.
    ``over``: constants that a reduced value was multiplied by since. ``mixed``: terms of different units were added:
    the count that divides some where all others are means, else MIXED. ``model``: a value of the forward alone, no
    constant of a loss in it. ``scattered``: a sum that samples were scattered to, such as of the rows of a table.
    """

    degree: int = 0
    by: str = ""
    factor: float = 1.0
    start: bool = False
    lone: bool | None = None
    sure: bool = True
    coupled: str = ""
    sizes: tuple[int, ...] = ()
    over: float = 1.0
    mixed: str = ""
    model: bool = False
    scattered: bool = False
    root: str = ""
    """The value of the forward, reduced over samples, that it is alone a linear function of."""
    explicit: bool = False
    """Whether a size read from a shape stands in it, so that its constants hold none."""


@dataclass(slots=True)
class UnitConstants:
    """Tells constants of the loss, which may divide by the number of samples, from constants of the model."""

    context: CouplingContext
    factors: UniformFactors
    terms: LossTerms

    def settled(self, unit: Unit, samples: str = "") -> Unit:
        """The unit behind the start of the backward. ``samples``: a value with the other dimensions, if any."""
        if not unit.start:
            return unit
        if unit.explicit or (unit.by and unit.degree >= 0):
            return replace(unit, start=False)
        more, sure = self.terms.degree(unit.factor, unit.lone, self.sizes(samples))
        return replace(unit, degree=unit.degree + more, start=False, sure=unit.sure and sure)

    def is_adjoint(self, name: str, unit: Unit) -> bool:
        """Return whether a value without samples holds a term's own constant, as an adjoint does."""
        number = self.factors.of(name).number
        return self.terms.begun(number) and self.terms.degree(number, None, ()) == (unit.degree, True) and not unit.by

    def all_sure(self, units: list[Unit]) -> bool:
        """Return whether constants tell the degree of added values: of some, where all are as the losses."""
        sure = [unit for unit in units if unit.sure]
        alike = bool(sure) and {(unit.degree, unit.by) for unit in units} == {(self.terms.common, "")}
        return len(sure) == len(units) or alike

    def whole(self, unit: Unit) -> Unit:
        """A reduced value whose constants divide it by the number of samples is a mean."""
        if unit.degree or unit.by or unit.explicit or not self.context.batch:
            return unit
        says = division(unit.over, self.context.batch, unit.sizes)
        return replace(unit, degree=1, over=1.0) if says.by_batch and not says.by_others else unit

    def by_batch(self, number: float, sizes: tuple[int, ...]) -> bool:
        batch = self.context.batch
        return bool(batch) and number != 1.0 and division(number, batch, sizes).by_batch

    def over(self, unit: Unit, number: float, sizes: tuple[int, ...]) -> float:
        """The constants of a reduced value with one more: the one that divides by the number of samples is kept."""
        if self.by_batch(unit.over, sizes):
            return unit.over
        return number if self.by_batch(number, sizes) else unit.over * number

    def sizes(self, name: str) -> tuple[int, ...]:
        """The known dimensions of a value beside the samples' own, and the sizes in one dimension with samples."""
        mark = self.context.samples(name)
        if mark is None:
            return ()
        beside = (size for place, size in enumerate(self.context.shape(name)) if place != mark.axis)
        return tuple(size for size in (*beside, mark.outer, mark.inner) if isinstance(size, int))

    def adjoint_first(self, left: Unit, right: Unit, name: str) -> tuple[Unit, Unit]:
        """Two multiplied values of samples: a factor with a constant of the loss, or behind such a constant, is the
        adjoint, and constants of the other factor are of the model's derivative."""
        pair, derivative = (left, right), Unit(start=True, model=True)
        clear = not any(unit.by or unit.explicit for unit in pair)
        if clear and (left.lone is None) != (right.lone is None):
            square, other = (left, right) if right.lone is None else (right, left)
            if square.start and not square.degree and (other.start or not square.model):
                return (left, derivative) if square is left else (derivative, right)
        plain = [unit.start and not (unit.model or unit.by or unit.degree or unit.explicit) for unit in pair]
        if all(plain):
            begun = (unit for unit in pair if self.terms.begun(unit.factor, bool(unit.lone)))
            settled = [self.settled(unit, name) for unit in begun]
            alike = len({(unit.degree, unit.sure) for unit in settled}) == 1
            return (settled[0], derivative) if alike else pair
        behind = [not (unit.start or unit.model) for unit in pair]
        if left.degree == right.degree == 1 and all(behind) and not (left.explicit or right.explicit):
            return left, derivative  # no gradient is a product of two adjoints
        return (derivative if plain[0] and behind[1] else left), (derivative if plain[1] and behind[0] else right)

    def multiplied(self, unit: Unit, node: Node, name: str, sign: int, samples: str, *, reduced: bool) -> Unit:
        """Multiply by an operand without samples, or divide by it; ``samples``: an operand of samples, if any."""
        if not node.is_in(SCALES):
            factor = self.factors.of(name)
            if reduced and samples and factor.uniform:  # the derivative by each sample, alike for all of them
                unit = replace(
                    unit, degree=unit.degree - sign * factor.batches,
                    factor=unit.factor * (factor.number**sign if unit.start else 1.0),
                    explicit=unit.explicit or bool(factor.batches),
                )  # fmt: skip
            elif samples and unit.start and unit.model:
                return self._adjoint(unit, factor, sign, samples, summed=reduced)
            unit = replace(unit, model=False, start=unit.start and bool(samples))
            return self.settled(unit, samples)
        factor = self.factors.of(name)
        unit = replace(unit, degree=unit.degree - sign * factor.batches, explicit=unit.explicit or bool(factor.batches))
        if samples:
            if self.terms.begun(unit.factor, bool(unit.lone)):  # what follows is of the model
                unit = self.settled(unit, samples)
            elif unit.start and unit.lone is None and self.terms.begun(factor.number**sign):
                unit = replace(unit, factor=1.0, sure=True)  # as is what stands before
            if unit.start and not factor.uniform:
                seeded = replace(unit, factor=unit.factor * factor.number**sign, model=False)
                return self.seeded(seeded, self.settled(unit, samples), factor, samples)
            number = unit.factor * (factor.number**sign if unit.start else 1.0)
            return replace(unit, factor=number, model=unit.model and not factor.uniform)
        return replace(unit, over=self.over(unit, factor.number**sign, unit.sizes))

    def _adjoint(self, unit: Unit, factor: UniformFactor, sign: int, samples: str, *, summed: bool) -> Unit:
        """A product of values of the forward and a matrix that no sample enters: the derivative of a loss that is
        linear in them, or weights of the model. ``summed``: over the samples, as no weights are."""
        tried = self.settled(
            replace(
                unit, degree=unit.degree - sign * factor.batches, factor=unit.factor * factor.number**sign,
                model=False, explicit=unit.explicit or bool(factor.batches),
            ),
            samples,
        )  # fmt: skip
        otherwise = self.settled(replace(unit, model=False), samples)
        if summed and not (factor.literal or tried.explicit):
            return replace(otherwise, degree=self.terms.common or 0, sure=False)
        apart = factor.number != 1.0 or factor.batches
        return tried if apart and (tried.sure or summed) else otherwise

    def seeded(self, unit: Unit, otherwise: Unit, factor: UniformFactor, samples: str) -> Unit:
        """The start of a backward behind a factor that holds values of the model beside the derivative of the loss;
        ``otherwise``: what it is where the constants of the factor do not tell."""
        tried = self.settled(unit, samples)
        return tried if (factor.number != 1.0 or factor.batches) and tried.sure else otherwise

    def behind(self, gradient: str, unit: Unit) -> Unit:
        """The unit of a gradient with the factors of its readers, among them a division by the number of samples."""
        unit = self.whole(unit)
        if unit.degree or unit.by:
            return unit
        name, total, joined = gradient, UniformFactor(), False
        for _ in range(6):
            readers = self.context.index.users.get(name, [])
            found = {self._only_factor(reader, name) for reader in readers}
            factor = found.pop() if len(found) == 1 else None
            if factor is None and len(readers) == 1 and readers[0].is_in(SUMS | {"Clip"}):
                factor, joined = UniformFactor(), True  # a noise, a decay, a bound: in no proportion to it
            if factor is None:
                break
            total = total.times(factor)
            if total.batches:
                return replace(unit, sure=False) if joined else replace(unit, degree=unit.degree - total.batches)
            if self.context.batch and division(total.number, self.context.batch, unit.sizes).by_batch:
                more, sure = self.terms.degree(unit.factor * total.number, bool(unit.lone), unit.sizes)
                if more == 1 or not sure or joined:
                    return replace(unit, degree=int(not joined), sure=False)
            if len(readers) > 1:
                break
            name = readers[0].outputs[0]
        return unit

    def _only_factor(self, node: Node, name: str) -> UniformFactor | None:
        """The constant factor by which a node multiplies ``name``; None for any other node."""
        if node.is_in(UNMOVED):
            return UniformFactor()
        if not node.is_in(SCALES) or node.inputs.count(name) != 1 or not in_proportion(node, name):
            return None
        other = next(each for each in node.inputs if each != name)
        factor = self.factors.of(other)
        return UniformFactor().times(factor, record_of(node).exponent(1)) if factor.uniform else None

"""Tells for each gradient whether it is a sum over samples, a mean, or a quotient by a count of the rank's own batch.

A value of the backward has a unit: how the value of one large batch differs from the rank's. The derivative by a
sample's own value is divided by the number of samples where the backward divides by it, once: in a constant at its
start, by a size read from a shape, or in a mean over samples at its end. Units multiply where values do; values that
are added have one unit. What a backward multiplies behind its start are derivatives of the model: their constants say
nothing of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from math import isclose, prod

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.loss_terms import loss_terms
from gopt.analysis.coupling.marks import REDUCED, UNKNOWN, Mark, Relation, products
from gopt.analysis.coupling.reduced import unguarded
from gopt.analysis.coupling.uniform_factors import UniformFactors
from gopt.analysis.coupling.units import MIXED, Unit, UnitConstants
from gopt.ir.graph import COMM, Node
from gopt.ir.graph_index import ancestors, descendants, walk
from gopt.ir.node_kinds import record_of, scale
from gopt.ir.types import FLOATS
from gopt.operators.kinds import (
    CASTS,
    CONTRACTIONS,
    COPIES,
    ELEMENTWISE,
    FLOAT_TESTS,
    LINEAR_IN_FIRST,
    QUOTIENTS,
    SCALES,
    SCATTERS,
    SUMS,
    TERMS,
)
from gopt.operators.operator import Slope
from gopt.operators.table import operator

FACTORS = CONTRACTIONS | SCALES | QUOTIENTS
_TERMS = TERMS | SCATTERS
_KEEPING = LINEAR_IN_FIRST | CASTS
LINEAR = _KEEPING | {"Pad"}
"""Operators that are linear in their first operand."""


@dataclass(slots=True)
class GradientUnits:
    """Units of the values of a backward, node by node in topological order, behind the marks."""

    context: CouplingContext
    losses: list[str]
    trained: set[str]
    """Values that depend on parameters."""
    gradients: InitVar[Iterable[str]] = ()
    proportional: set[str] = field(init=False)
    """Values that a gradient is in proportion to."""
    constants: UnitConstants = field(init=False)
    units: dict[str, Unit | None] = field(default_factory=dict)
    statistics: set[str] = field(init=False)
    """Reduced values of the forward that single samples read."""
    squared: set[str] = field(default_factory=set)
    zeros: set[str] = field(default_factory=set)
    """Values of samples times zero, as of a recurrence's first state, and linear functions of such values."""
    _squares: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    _behind: set[str] = field(default_factory=set)
    """Values that statistics are made of."""
    _started: set[str] = field(init=False)
    """Functions of the values in the terms of the losses, as derivatives by samples are."""

    def __post_init__(self, gradients: Iterable[str]) -> None:
        moving = descendants(self.context.index, self.context.marks)
        self.proportional = set(walk(gradients, partial(_followed, self.context, moving)))
        factors = UniformFactors(self.context)
        self.constants = UnitConstants(
            self.context, factors, loss_terms(self.context, factors, self.losses, self.trained)
        )
        self.statistics = set(self.context.fed)
        self._behind = ancestors(self.context.index, self.statistics)[1]
        producers = self.context.index.producers
        ends = [producers[name] for name in self.constants.terms.values if name in producers]
        made_of = [name for node in ends for name in node.inputs if name in self.context.marks]
        self._started = descendants(self.context.index, made_of)
        for node in ends:
            if _is_square(self.context, node):
                self.squared.update(node.inputs if record_of(node).exponent(1) else node.inputs[:1])
        self._squares = {(producers[n].op_type, tuple(producers[n].inputs)) for n in self.squared if n in producers}

    def visit(self, node: Node) -> None:
        """Find the unit of what a node of the backward makes."""
        marks = self.context.marks
        if not any(name in marks for name in node.outputs):
            return
        record = record_of(node)
        if (node.op_type, tuple(node.inputs)) in self._squares or (
            (node.is_in(COPIES) or record.raised_to) and node.inputs[0] in self.squared
        ):
            self.squared.update(node.outputs)
        product = record.zero and record.exponent(1) > 0
        factors = node.inputs if product else node.inputs[:1] if node.is_in(_KEEPING) else []
        if any(name in self.zeros or self.context.index.constants.zero(name) for name in factors):
            self.zeros.update(node.outputs)
        for name in node.outputs:
            if name in marks and not self._is_count_of(node, name):
                self.units[name] = self._coupled(node, self._unit(node, marks[name]))
                if self._reads_scattered(node, marks[name]):
                    marks[name] = UNKNOWN  # what was scattered to are places of samples, no rows of a table

    def _reads_scattered(self, node: Node, mark: Mark) -> bool:
        """Return whether values of single samples, and sums that samples were scattered to, meet in a node."""
        known = (self.units.get(name) for name in node.inputs)
        scattered = any(unit is not None and unit.scattered for unit in known)
        read = any(self.context.samples(name) is not None for name in node.inputs)
        return scattered and (read or mark.kind is Relation.SAMPLES)

    def _coupled(self, node: Node, unit: Unit | None) -> Unit | None:
        """Return the unit with a statistic that enters, and note a statistic that is compared with samples."""
        if unit is None or unit.coupled:
            return unit
        marks, known = self.context.marks, (self.units.get(name) for name in node.inputs)
        coupled = next((each.coupled for each in known if each is not None and each.coupled), "")
        if not coupled and self.context.index.graph.type_of(node.outputs[0]).dtype not in FLOATS:
            compared = (name for name in node.inputs if name in marks and marks[name].kind in REDUCED)
            coupled = next((name for name in compared if name not in self.statistics), "")
        coupled = coupled or next(filter(self._decides, self._gates(node)), "")
        return replace(unit, coupled=coupled) if coupled else unit

    def _gates(self, reader: Node) -> Iterable[str]:
        """The reduced values by which gates that a node reads are set."""
        marks, producers = self.context.marks, self.context.index.producers

        def following(name: str) -> Iterable[str]:
            node = producers.get(name)
            if node is None or marks[name].kind is not Relation.GATE or node.is_in(FLOAT_TESTS):
                return ()
            return filter(marks.__contains__, node.inputs)

        return walk((name for name in reader.inputs if name in marks and marks[name].kind is Relation.GATE), following)

    def _decides(self, name: str) -> bool:
        """Return whether a gate by a reduced value is no matter of counts or statistics."""
        gate = self.context.marks[name].kind is Relation.GATE
        return not gate and name in self.trained and name not in self._behind

    def _is_count_of(self, node: Node, name: str) -> bool:
        """Return whether a value is a sum or a mean over samples that no parameter enters, such as a count, but
        not the gradient of a linear model."""
        counts = self.context.marks[name].kind in (Relation.SUM, Relation.MEAN)
        return counts and not (name in self.trained or name in self.proportional) and not node.is_in(FACTORS)

    def of(self, name: str) -> Unit | None:
        """The unit of a marked value; None for a value without a unit."""
        if name in self.units:
            return self.units[name]
        mark = self.context.marks[name]
        if mark.kind is Relation.SAMPLES:
            return Unit(start=True, model=True)
        if mark.kind not in REDUCED:
            return None
        unit = self._reduced_of(mark)
        return unit if name in self._behind else replace(unit, root=name)

    # --- by operator ------------------------------------------------------------------------------------------------

    def _unit(self, node: Node, mark: Mark) -> Unit | None:
        context = self.context
        types, marks = context.index.graph.types, context.marks
        if mark.kind in (Relation.UNKNOWN, Relation.DRAWN, Relation.GATE) or node.captures:
            return None
        marked = [name for name in node.inputs if name in marks and marks[name].kind is not Relation.DRAWN]
        moving = [n for n in marked if n in types and types[n].dtype in FLOATS and n not in self.zeros]
        if mark.kind is Relation.SAMPLES and (bent := self._bent(node, moving)):
            return bent
        if types[node.outputs[0]].dtype not in FLOATS:
            return Unit(start=True)
        if not moving:
            if mark.kind is Relation.SAMPLES:
                return self._placed(node)
            if node.is_in(SCATTERS) and len(marked) == 1:
                return replace(self._over_samples(node, self._placed(node), marked), scattered=True)
            return self._reduced_of(mark)
        if any(self.of(name) is None for name in moving):
            return None
        if node.domain == COMM:
            return self.of(moving[0])
        if any(marks[name].kind is Relation.SAMPLES for name in moving) or not self.units.keys().isdisjoint(moving):
            pass
        elif mark.kind in (Relation.SUM, Relation.MEAN) and not node.is_in(FACTORS):
            roots = (unit.root for unit in map(self.of, moving) if unit is not None and unit.root)
            return replace(self._reduced_of(mark), root=next(roots, ""))  # a count that is kept from being zero
        if node.is_in(FACTORS):
            return self._product(node, mark, moving)
        if node.is_in(_TERMS):
            return self._sum(node, mark, moving)
        if node.is_in(LINEAR) and node.inputs[0] in moving:
            return self._linear(node, mark, node.inputs[0])
        return self._function(node, mark, moving)

    def _reduced_of(self, mark: Mark) -> Unit:
        """The unit of a reduced value of the forward."""
        if mark.kind is Relation.WEIGHTED and mark.by:
            return Unit(0, mark.by)
        others = (mark.count // self.context.batch,) if self.context.batch and mark.count else ()
        return Unit(0 if mark.kind is Relation.SUM else 1, sizes=mark.sizes or others)

    def _placed(self, node: Node) -> Unit:
        """Constants that samples choose or place: a derivative is zero elsewhere."""
        names = [name for name in node.inputs if name and name not in self.context.marks and name not in self.zeros]
        names = [name for name in names if self.context.index.graph.type_of(name).dtype in FLOATS]
        placed = [name for name in names if not self.context.index.constants.zero(name)]
        if len(placed) > 1:  # a maximum's has a half of it where two values are equal
            own = [name for name in placed if self.constants.terms.begun(abs(self.constants.factors.of(name).number))]
            placed = own[:1]
        if not node.is_in(_TERMS) or len(placed) != 1:
            return Unit(start=True)
        factor = self.constants.factors.of(placed[0])
        found = Unit(-factor.batches, factor=factor.number, start=True, explicit=bool(factor.batches))
        where = next((name for name in node.inputs if self.context.samples(name) is not None), "")
        return found if factor.uniform else self.constants.seeded(found, Unit(), factor, where)

    def _function(self, node: Node, mark: Mark, moving: list[str]) -> Unit | None:
        """Any other function: of values that are alike in the large batch."""
        reduced = mark.kind is not Relation.SAMPLES
        units = self._beside(moving, reduced=reduced) or []
        alike = bool(units) and all(not unit.by and unit.degree == int(reduced) for unit in units)
        if not alike or (reduced and self.context.marks[moving[0]].kind is Relation.SAMPLES):
            return None
        if reduced:
            return Unit(1, coupled=next((unit.root for unit in units if unit.root), ""))
        factor = 1.0 if node.is_in(ELEMENTWISE) else units[0].factor
        start = all(unit.start for unit in units) and factor == 1.0
        return Unit(start=start, sure=all(unit.sure for unit in units), model=all(unit.model for unit in units))

    def _bent(self, node: Node, moving: list[str]) -> Unit | None:
        """The unit of a nonlinear function of derivatives divided by the number of samples: a power of theirs, or
        coupled where no multiple; None of any other values."""
        shares = list(filter(None, map(self._derivative, moving)))
        square = _is_square(self.context, node)
        if not shares or (node.is_in(FACTORS | LINEAR | CASTS) and not square):
            return None
        share, index = shares[0], self.context.index
        added = [name for name in {*node.inputs} - {"", *moving} - self.zeros if not index.constants.zero(name)]
        added = [name for name in added if index.graph.type_of(name).dtype in FLOATS and not square]
        if node.is_in(_TERMS) and all(self.constants.is_adjoint(name, share) for name in added):
            return None
        power = 2.0 if square else operator(node.op_type).power
        alike = len(shares) == len(moving) and len({(unit.degree, unit.by) for unit in shares}) == 1 and not added
        if not alike or power is None or share.degree * power % 1 or (share.by and power not in (0, 1)):
            return Unit(coupled=node.outputs[0]) if share.sure else Unit(sure=False)
        return replace(share, degree=int(share.degree * power), by=share.by if power else "", lone=None)

    def _derivative(self, name: str) -> Unit | None:
        """The unit of a derivative by a sample, divided by the number of samples or by a count, or maybe divided where
        its constant is the loss's own; None of any other value."""
        unit = self.units.get(name)
        if unit is None or unit.model or unit.coupled or name not in self._started or not self.context.samples(name):
            return None
        settled = self.constants.settled(unit, name)
        if not (settled.sure or self.constants.terms.begun(unit.factor, bool(unit.lone))):
            return None
        return settled if settled.degree > 0 or settled.by or not settled.sure else None

    def _linear(self, node: Node, mark: Mark, name: str) -> Unit | None:
        unit = self.of(name)
        assert unit is not None
        before, pieces = self.context.marks[name], record_of(node).pieces
        if before.kind is not Relation.SAMPLES:
            return replace(unit, sizes=(*unit.sizes, round(1 / self._share(node)))) if pieces == "sum" else unit
        if mark.kind is Relation.SAMPLES:
            if pieces == "sum" and name in self.trained:
                return self.constants.settled(unit, name)  # behind a broadcast of the model
            if pieces == "mean" and unit.start:
                return replace(unit, factor=unit.factor * self._share(node))
            return unit
        return self._over_samples(node, unit, [name])

    def _over_samples(self, node: Node, unit: Unit, names: list[str]) -> Unit:
        """The unit of what is summed over samples, or is their mean."""
        among = [name for name in names if self.context.samples(name) is not None]
        made = [name for name in among if (u := self.units.get(name)) and not u.model and name in self.trained]
        samples = (made or among)[-1] if among else ""
        unit = self.constants.settled(unit, samples)
        if record_of(node).pieces == "mean":
            return replace(unit, degree=unit.degree + 1, start=False, explicit=True, sizes=())
        return replace(unit, sizes=self.context.marks[node.outputs[0]].sizes or self.constants.sizes(samples))

    def _share(self, node: Node) -> float:
        before, after = self.context.shape(node.inputs[0]), self.context.shape(node.outputs[0])
        if not all(isinstance(size, int) for size in (*before, *after)):
            return 1.0
        return max(prod(after), 1) / max(prod(before), 1)  # type: ignore[arg-type]

    def _sum(self, node: Node, mark: Mark, moving: list[str]) -> Unit | None:
        """Values that are added, joined or chosen from have one unit."""
        context = self.context
        reduced = mark.kind is not Relation.SAMPLES
        values = [name for slot, name in enumerate(node.inputs) if slot not in record_of(node).choosers]
        among = [name for name in values if name in moving]
        units = self._beside(among, reduced=reduced)
        if not units:
            return None if among else Unit(start=not reduced)
        squares = any(unit.lone is not None for unit in units) or not self.squared.isdisjoint(among)
        lone = units[0].lone if len(units) == 1 else False if squares else None
        free = [name for name in values if name and name not in moving and name not in self.zeros]
        free = [name for name in free if not context.index.constants.zero(name)]
        if all(unit.model for unit in units):
            return Unit(start=True, model=True, lone=lone)
        if len(units) == len(free) == 1 and units[0].start and not reduced and node.is_in(SUMS):
            number = self.constants.factors.of(free[0]).number
            ratios = products(self.constants.sizes(among[0]))
            if self.constants.terms.begun(number) or any(isclose(units[0].factor, number * n) for n in ratios):
                units = [replace(units[0], factor=number)]  # an adjoint, too, such as of a log-softmax
            else:
                return Unit(start=True, model=True, lone=lone)  # no adjoint has another constant added to it
        alike = len({(unit.degree, unit.by) for unit in units}) == 1 and all(u.factor == 1.0 for u in units if u.start)
        if alike and not all(unit.start for unit in units):
            units = [replace(unit, start=False) for unit in units]
        elif any((unit.start, unit.factor) != (units[0].start, units[0].factor) for unit in units):
            settled = [self.constants.settled(unit, name) for unit, name in zip(units, among)]
            degrees = {unit.degree for unit in settled} | ({self.constants.terms.common} - {None})
            contrary = not self.constants.terms.differ and len(degrees) > 1
            begun = any(u.explicit or self.constants.terms.begun(u.factor, bool(u.lone)) for u in units)
            sure = begun and not contrary and self.constants.all_sure(settled)
            if all(unit.start for unit in units) and not sure:
                # terms of a derivative of the model, such as an error function's derivative
                return Unit(start=True, sure=not contrary)
            units = settled
        first, sure = units[0], self.constants.all_sure(units)
        coupled = next((unit.coupled for unit in units if unit.coupled), "")
        if any((unit.degree, unit.by) != (first.degree, first.by) for unit in units):
            of_one_kind = len({self.context.marks[name].kind is Relation.SAMPLES for name in among}) == 1
            if not (coupled or self.constants.terms.differ or any(unit.by for unit in units)):
                return replace(first, degree=self.constants.terms.common or 0, sure=False, start=False)
            if not coupled and not (sure and of_one_kind):
                return None
            counts = {unit.by for unit in units} - {""}
            means = len(counts) == 1 and all(unit.degree == int(not unit.by) for unit in units)
            return replace(first, coupled=coupled, mixed=counts.pop() if means else MIXED, start=False)
        linear = first.degree == int(reduced and not first.by) and (reduced or not first.by)
        if not linear and not all(self.constants.is_adjoint(name, first) for name in free):
            return replace(first, mixed=MIXED, start=False) if sure and reduced else None
        unit = replace(
            first, sure=sure, lone=lone, coupled=coupled,
            mixed=next((unit.mixed for unit in units if unit.mixed), ""), model=all(unit.model for unit in units),
            over=first.over if len({u.over for u in units}) == 1 else 1.0,
        )  # fmt: skip
        if reduced and context.marks[moving[0]].kind is Relation.SAMPLES:
            return replace(self._over_samples(node, unit, moving), scattered=node.is_in(SCATTERS))
        return unit

    def _beside(self, names: Iterable[str], *, reduced: bool) -> list[Unit] | None:
        """The units of values joined by a node, in the form of its result: of samples, or reduced over samples."""
        found = []
        for name in names:
            unit = self.of(name)
            if unit is not None and self.context.marks[name].kind is not Relation.SAMPLES:
                coupled = unit.coupled or ("" if reduced else unit.root)
                rootless = replace(unit, coupled=coupled, root="")
                unit = self.constants.whole(unit) if reduced else self._at_samples(name, rootless)
            if unit is None:
                return None
            found.append(unit)
        return found

    def _at_samples(self, name: str, unit: Unit) -> Unit | None:
        """The unit of a reduced value where single samples read it, such as a statistic: about alike on all ranks."""
        if unit.scattered:
            return None
        degree = unit.degree + int(self.constants.by_batch(unit.over, unit.sizes))
        start = degree == 1 and not unit.by and unit.factor == 1.0
        if not unit.by or degree > 0:
            return replace(unit, degree=degree - 1, start=start, over=1.0, sizes=())
        return replace(unit, by="", start=start, over=1.0, sizes=()) if name in self.statistics else None

    def _product(self, node: Node, mark: Mark, moving: list[str]) -> Unit | None:
        context = self.context
        reduced = mark.kind is not Relation.SAMPLES
        samples = [name for name in moving if context.marks[name].kind is Relation.SAMPLES]
        found = Unit(degree=0 if samples else 1, start=True, model=bool(samples))
        record = record_of(node)
        factors = [(place, name) for place, name in enumerate(node.inputs) if record.exponent(place)]
        ordered = sorted(factors, key=lambda each: each[1] not in moving)
        signs = [record.exponent(place) for place, _ in ordered]
        counts = [self._is_count(name, sign) for (_, name), sign in zip(ordered, signs) if name in moving]
        single = not samples and counts.count(False) == 1
        for (_, name), sign in zip(ordered, signs):
            if name in moving:
                multiplied = self._multiplied(
                    found, name, sign, samples=bool(samples), elementwise=node.is_in(SCALES), single=single
                )
                if multiplied is None:
                    return None
                found = multiplied
            elif name not in context.marks:
                found = self.constants.multiplied(found, node, name, sign, next(iter(samples), ""), reduced=reduced)
        added = [name for place, name in enumerate(node.inputs) if name and not record.exponent(place)]
        if any(name in moving or not context.index.constants.zero(name) for name in added):
            return None if found.degree else replace(found, start=False)
        alpha = scale(node)
        if reduced and samples:
            made = self._over_samples(node, found, samples)
            return made if alpha == 1 else replace(made, over=self.constants.over(made, alpha, made.sizes))
        factor = found.factor * (alpha if found.start and samples else 1.0)
        return replace(found, factor=factor, start=found.start and bool(samples))

    def _multiplied(
        self, found: Unit, name: str, sign: int, *, samples: bool, elementwise: bool, single: bool
    ) -> Unit | None:  # fmt: skip
        """Multiply by a marked operand, or divide by it."""
        context = self.context
        unit, kind = self.of(name), context.marks[name].kind
        assert unit is not None
        sure, coupled, mixed = found.sure and unit.sure, found.coupled or unit.coupled, found.mixed or unit.mixed
        if kind is Relation.SAMPLES:
            if unit.by and (found.by or sign < 0):
                return None
            pair = found, unit
            if sign > 0:
                pair = self.constants.adjoint_first(*pair, name)
            elif self._derivative(name) and not found.model:  # a derivative by another, such as the norm of its row
                pair = self.constants.settled(found, name), self.constants.settled(unit, name)
            found, unit = pair
            sure, mixed = found.sure and unit.sure, found.mixed or unit.mixed
            lone = unit.lone if found.lone is None else found.lone and unit.lone is not False
            if lone is None and elementwise and name in self.squared and sign > 0:
                lone = True
            first = found.start if unit.model else unit.start if found.model else found.start and unit.start
            return Unit(
                found.degree + sign * unit.degree, found.by or unit.by, found.factor * unit.factor**sign,
                first, lone, sure, coupled, mixed=mixed, model=found.model and unit.model,
                explicit=found.explicit or unit.explicit,
            )  # fmt: skip
        if self._is_count(name, sign):
            if found.by:
                return None
            factor = found.factor * unit.factor**sign
            return replace(
                found, degree=found.degree - unit.degree, by=unguarded(context, name), factor=factor, sure=sure,
                coupled=coupled, mixed=mixed, sizes=found.sizes or unit.sizes, model=False,
            )  # fmt: skip
        if not (single and sign > 0 and kind in (Relation.SUM, Relation.MEAN)):
            coupled = coupled or unit.root
        over, sizes = unit.over**sign, found.sizes or unit.sizes
        read = self._at_samples(name, unit) if samples else replace(unit, degree=unit.degree - 1)
        if samples:
            over, sizes = 1.0, found.sizes
        if read is None or (read.by and (found.by or sign < 0)):
            return None
        unit = read
        return replace(
            found, degree=found.degree + sign * unit.degree, by=found.by or unit.by, sure=sure, coupled=coupled,
            sizes=sizes, over=self.constants.over(found, over, sizes), mixed=mixed, root=unit.root,
            start=found.start and not (samples and unit.degree),
            factor=found.factor * (unit.factor**sign if unit.by else 1.0),
            scattered=found.scattered or unit.scattered, model=found.model and name not in self.units,
        )  # fmt: skip

    def _is_count(self, name: str, sign: int) -> bool:
        """Return whether a divisor is a scalar sum or mean over the rank's batch that is no statistic."""
        mark = self.context.marks[name]
        one = self.context.index.graph.type_of(name).elements == 1
        return sign < 0 and one and mark.kind in (Relation.SUM, Relation.MEAN) and name not in self.statistics


def _followed(context: CouplingContext, moving: set[str], name: str) -> Iterable[str]:
    """The operands that a value is in proportion to, but for sums over samples that multiply others."""
    node = context.index.producers.get(name)
    if node is None:
        return ()
    record = operator(node.op_type)
    found = [each for n, each in enumerate(node.inputs) if each in moving and record.slope(n) is Slope.LINEAR]
    if len(found) == 1 or node.is_in(_TERMS):
        return found
    return [each for each in found if each not in context.marks or context.samples(each) is not None]


def _is_square(context: CouplingContext, node: Node) -> bool:
    """Return whether a node squares a value of samples."""
    if not node.inputs or context.samples(node.inputs[0]) is None:
        return False
    if not record_of(node).multiplies:
        return context.index.constants.power(node) == 2.0
    left, right = node.inputs
    producers = context.index.producers
    one, other = producers.get(left), producers.get(right)
    return left == right or (
        one is not None and other is not None and (one.op_type, one.inputs) == (other.op_type, other.inputs)
    )

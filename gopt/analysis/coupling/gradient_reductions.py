"""How the gradients of a step combine over ranks, and what is told where they are combined otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.ignored_labels import counts_labels, drops_uncounted
from gopt.analysis.coupling.joint_gradients import BackwardReading
from gopt.analysis.coupling.marks import REDUCED, Coupling, CouplingKind, Relation
from gopt.analysis.coupling.units import MIXED, Unit
from gopt.analysis.linearity import Linearity
from gopt.analysis.loss_reduction import LossReduction, LossRule
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph_index import ancestors

SHOWN = 3
"""Parameters that a note names."""
_RULES = {Relation.MEAN: LossRule.MEAN, Relation.SUM: LossRule.SUM, Relation.WEIGHTED: LossRule.WEIGHTED}
_KINDS = {
    Relation.SUM: CouplingKind.SUMMED, Relation.WEIGHTED: CouplingKind.WEIGHTED, Relation.JOINT: CouplingKind.NONLINEAR,
    Relation.MEAN: CouplingKind.REDUCTION,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GradientReading:
    """Relation of a gradient to the samples: MEAN, SUM, WEIGHTED ``by`` a count, JOINT (no linear function of such
    sums; ``by``: the count of some terms beside means), UNKNOWN (cannot be followed).

    ``sure``: whether constants tell a sum from a mean. ``cause``: a statistic that makes the gradient JOINT, ''
    where a sum of differently reduced terms does. ``labels``: whether the count is the number of labels not ignored;
    ``bent``: whether the cause is a function of single derivatives. ``unmasked``: whether samples may
    count where the count is zero, as no mask drops them.
    """

    relation: Relation
    by: str = ""
    sure: bool = True
    cause: str = ""
    labels: bool = False
    bent: bool = False
    unmasked: bool = False

    def fits(self, rule: LossRule, by: str) -> bool:
        """Return whether ranks that combine it by a rule get the gradient of one large batch."""
        return _RULES.get(self.relation) is rule and (rule is not LossRule.WEIGHTED or self.by == by)


Readings = Mapping[str, GradientReading]
"""Parameter -> the reading of its gradient."""


def read_gradients(context: CouplingContext, training: TrainingGraph, backward: BackwardReading) -> Readings:
    """The reading of every gradient; empty where none can be followed.

    One that cannot be followed itself is as all others are where there is one loss, since all begin at its derivative.
    """
    states = {state.tensor for state in training.parameters}
    trained: dict[str, bool] = {}
    dropping: dict[str, bool] = {}
    known: dict[str, GradientReading | None] = {}
    for value in dict.fromkeys(training.gradients.values()):
        mark, unit = context.marks.get(value), backward.units.get(value)
        if mark is None or mark.kind not in REDUCED:
            known[value] = None
        elif unit is None:
            known[value] = GradientReading(Relation.UNKNOWN)
        else:
            if unit.by and unit.by not in trained:
                trained[unit.by] = not ancestors(context.index, [unit.by])[1].isdisjoint(states)
            found = _reading(unit, trained.get(unit.by, False))
            counted = found.by and found.relation in (Relation.WEIGHTED, Relation.JOINT)
            labels = bool(counted) and counts_labels(context.index, training.batch, found.by)
            bent = found.cause in context.marks and context.samples(found.cause) is not None
            if counted and not labels and found.by not in dropping:
                dropping[found.by] = drops_uncounted(context.index, found.by)
            unmasked = not dropping.get(found.by, True)
            known[value] = replace(found, labels=labels, bent=bent, unmasked=unmasked)
    plain = {each for each in known.values() if each is not None and each.relation in _RULES}
    if not any(known.values()):
        return {}
    alone = len(plain) == 1 and len(training.losses) == 1
    rest = plain.pop() if alone else GradientReading(Relation.UNKNOWN)
    none = {*backward.counts, *(name for name, how in backward.levels.items() if how is Linearity.NONLINEAR)}
    """Parameters with a mistaken gradient, a value that a sharded step lacks."""
    return {name: known[value] or rest for name, value in training.gradients.items() if name not in none}


def _reading(unit: Unit, trained: bool) -> GradientReading:
    if unit.coupled or trained or unit.mixed:
        cause = unit.coupled or (unit.by if trained else "")
        return GradientReading(Relation.JOINT, by="" if cause or unit.mixed == MIXED else unit.mixed, cause=cause)
    if unit.by and unit.degree == 0:
        return GradientReading(Relation.WEIGHTED, unit.by, unit.sure)
    if not unit.by and unit.degree in (0, 1):
        return GradientReading(Relation.MEAN if unit.degree else Relation.SUM, sure=unit.sure)
    return GradientReading(Relation.UNKNOWN)


def exact_reduction(readings: Readings) -> str:
    """The value of ``--loss-reduction`` that is exact for all gradients; '' where none is, or gopt cannot tell."""
    found = {(each.relation, each.by) for each in readings.values()}
    if not readings or not all(each.sure and each.relation in _RULES for each in readings.values()):
        return ""
    if len(found) == 1:
        rule = rule_for(next(iter(readings.values())))
        return str(rule) if rule is not None else ""
    return "auto" if {relation for relation, _ in found} == {Relation.MEAN, Relation.SUM} else ""


def unfit(readings: Readings, asked: LossReduction) -> dict[GradientReading, list[str]]:
    """The parameters whose gradients a rule does not combine exactly, or may not, by what these are."""
    groups: dict[GradientReading, list[str]] = {}
    for name, reading in readings.items():
        if not reading.sure or not reading.fits(asked.rule_of(name), asked.value):
            groups.setdefault(reading, []).append(name)
    return groups


def rule_for(reading: GradientReading) -> LossReduction | None:
    """The rule that combines a gradient exactly; None without an exact rule, or where gopt cannot tell."""
    rule = _RULES.get(reading.relation)
    if rule is None or not reading.sure or (rule is LossRule.WEIGHTED and not reading.by):
        return None
    return LossReduction(rule, reading.by)


def couplings_of(
    training: TrainingGraph, readings: Readings, asked: LossReduction, *, joint: bool
) -> Iterator[Coupling]:  # fmt: skip
    """The differences from the step of one large batch in how gradients are combined.

    ``joint``: also gradients without an exact rule, and gradients that gopt cannot follow.
    """
    exact = exact_reduction(readings)
    groups = unfit(readings, asked)
    producers = {name: node.op_type for node in training.graph.nodes for name in node.outputs}
    for reading, names in groups.items():
        if reading.relation in (Relation.JOINT, Relation.UNKNOWN) and not joint:
            continue
        kind, what, hint = _told(reading, _who(names, readings), asked.rule_of(names[0]), asked.value, exact)
        value = training.gradients[names[0]]
        yield Coupling(kind, value, producers.get(value, ""), what, hint)


def told_of(reading: GradientReading, names: Sequence[str], readings: Readings, asked: LossReduction) -> str:
    """The sentence on the gradients of some parameters."""
    return _told(reading, _who(names, readings), asked.rule_of(names[0]), asked.value, "")[1]


def _who(names: Sequence[str], readings: Readings) -> str:
    return "the gradients" if len(names) == len(readings) else _named(names, len(readings))


def _told(reading: GradientReading, who: str, rule: LossRule, weight: str, exact: str) -> tuple[CouplingKind, str, str]:
    hint = f"--loss-reduction {exact} is exact" if exact else ""
    ranks = {
        LossRule.MEAN: "ranks average them", LossRule.SUM: "ranks add them",
        LossRule.WEIGHTED: f"ranks weight them by {weight!r}",
    }[rule]  # fmt: skip
    if reading.relation is Relation.UNKNOWN:
        return CouplingKind.UNKNOWN, f"gopt cannot follow the samples to {who}, and {ranks}", ""
    if reading.bent:
        why = f"{reading.cause!r} is no multiple of the derivative by a sample, which the number of samples divides"
        return CouplingKind.NONLINEAR, f"{who} are no sums over samples of one kind: {why}", ""
    if reading.relation is Relation.JOINT:
        why = f"{reading.cause!r}, taken over a rank's own samples, enters them" if reading.cause else (
            "terms that are reduced differently are added"
        )  # fmt: skip
        what = f"{who} are no sums over samples of one kind: {why}"
        if reading.labels:
            return (
                CouplingKind.IGNORED,
                f"{what}, some divided by the number of the rank's own labels {reading.by!r}",
                "",
            )
        return CouplingKind.NONLINEAR, what, "--statistics sync may make it exact" if reading.cause else ""
    if not reading.sure:
        other = LossRule.SUM if rule is LossRule.MEAN else LossRule.MEAN
        return (
            CouplingKind.UNKNOWN,
            f"gopt cannot tell whether a constant divides {who} by the number of samples, and {ranks}",
            f"--loss-reduction {other.value} is exact where it does{' not' if rule is LossRule.MEAN else ''}",
        )
    kind = CouplingKind.REDUCTION if rule is not LossRule.MEAN else _KINDS[reading.relation]
    if reading.relation is Relation.WEIGHTED:
        by = f" {reading.by!r}" if reading.by else ", which the operator does not output"
        equal = "all ranks have equal weight" if rule is LossRule.MEAN else ranks
        hint = hint or ("" if reading.by else "write the division out in the model")
        hint += " unless samples without a mask meet a count of zero" * (reading.unmasked and hint.endswith("exact"))
        if reading.labels and kind is CouplingKind.WEIGHTED:
            what = f"{who} are divided by the number of the rank's own labels that are not ignored{by}: {equal}"
            return CouplingKind.IGNORED, f"{what}, also where these numbers differ", hint
        return kind, f"{who} are divided by a count of the rank's own batch{by}: {equal}", hint
    what = "sums" if reading.relation is Relation.SUM else "means"
    return kind, f"{who} are {what} over the samples, and {ranks}", hint


def _named(names: Sequence[str], total: int) -> str:
    more = ", …" if len(names) > SHOWN else ""
    return f"the gradients of {len(names)} of {total} parameters ({', '.join(map(repr, names[:SHOWN]))}{more})"

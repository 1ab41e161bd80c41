"""How statistics follow the batch: by sums, means or extremes over samples, which ranks combine each in its own way.

The walk goes back from a new value to the first values for which the marks derive the large batch's value from the
ranks' values. Ranks reduce these values, and compute everything behind these values alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.divided_sums import DividedSums
from gopt.analysis.coupling.gathered_rows import gathered_rows
from gopt.analysis.coupling.marks import REDUCED, CouplingKind, Mark, Relation
from gopt.analysis.coupling.open_statistics import GATHERED, INTEGERS, ROWS, OpenStatistic, StatisticRules, Unclear
from gopt.analysis.coupling.propagate import propagate
from gopt.analysis.coupling.sample_counts import SampleCounts, SizesBehind, chooses
from gopt.analysis.statistic_points import StatisticPoint, StatisticReduction, path_nodes
from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, ancestors, descendants
from gopt.ir.node_kinds import divisor_of, record_of
from gopt.ir.types import FLOATS
from gopt.operators.kinds import AVERAGES, LAYOUT, SCALES, SUMS, WRITES

_REDUCE = {Relation.MEAN: "mean", Relation.SUM: "sum", Relation.MAX: "max", Relation.MIN: "min"}
_JOINS = WRITES | {"Concat"}
_OF_STATISTICS = (CouplingKind.STATISTICS, CouplingKind.IN_BATCH, CouplingKind.PLACE)
"""Kinds that are told of nodes between the forward and a statistic; the rest has its own refusal."""
_EPSILON = 1e-2
"""Of one sample: a smaller constant beside a sum keeps it from zero."""


def statistic_rules(context: CouplingContext, training: TrainingGraph) -> StatisticRules:
    """How the statistics of a step are combined over ranks.

    ``context`` has the marks of the forward. What is told of the nodes behind it is told of the statistic.
    """
    states = [
        replace(state, updated=training.chosen.get(state.tensor, state.updated))
        for state in training.states if state.kind is StateKind.STATISTIC
    ]  # fmt: skip
    found = StatisticRules()
    if not states:
        return found
    behind, _ = ancestors(context.index, [state.updated for state in states])
    known, context.found = context.found, []
    propagate(context, (n for n in training.graph.nodes if id(n) in behind and n.phase is not Phase.FORWARD))
    context.found = known + [fact for fact in context.found if fact.kind in _OF_STATISTICS]
    made = _made_by_backward(training) if training.reductions else set()
    counts = SampleCounts(context, training.states, frozenset(training.counted.values()))
    for state in states:
        name, stated = state.tensor, training.reductions.get(state.tensor, "")
        try:
            if name in training.counted:
                point = StatisticPoint(training.counted[name], "sum")
                found.followed[name] = StatisticReduction(name, "sum", (point,))
            else:
                followed = _followed(context, counts, state, "")
                found.followed[name] = _past_backward(followed, state.updated, made if stated else set())
        except Unclear as error:
            likely = _likely_first(context, counts, state, error.statistic)
            found.unclear[name] = _or_gathered(context, counts, training, state, likely)
        if name in found.followed and stated in ("", found.followed[name].rule):
            found.known[name] = found.followed[name]
        elif stated:
            try:
                found.known[name] = _stated(context, counts, training, state, stated)
                found.unclear.pop(name, None)
            except Unclear as error:
                found.unclear[name] = _or_gathered(context, counts, training, state, error.statistic)
    written = _written(training, found.known)
    context.found = [fact for fact in context.found if fact in known or fact.value not in written]
    return found


def _made_by_backward(training: TrainingGraph) -> set[str]:
    """The values behind derivatives by single samples, which hold the number of samples where the loss is a mean."""
    backward = [name for node in training.graph.nodes if node.phase is Phase.BACKWARD for name in node.outputs]
    reduced = {*training.gradients.values()}
    return descendants(GraphIndex(training.graph), (name for name in backward if name not in reduced))


def _past_backward(reduction: StatisticReduction, updated: str, made: set[str]) -> StatisticReduction:
    """The reduction; raises Unclear where it is of values that the backward makes."""
    values = [point.value for point in reduction.points] or [updated]
    name = next((value for value in values if value in made), "")
    if name:
        raise Unclear(f"{name!r} is made of derivatives, which hold the number of samples")
    return reduction


def _likely_first(
    context: CouplingContext, counts: SampleCounts, state: State, why: OpenStatistic
) -> OpenStatistic:  # fmt: skip
    """The same with the rule first that holds where the constants are no numbers of samples."""
    try:
        rule = _followed(context, counts, state, "", counting=False).rule if why.literal else ""
    except Unclear:
        return why
    if rule not in why.rules:
        return why
    return replace(why, rules=(rule, *(each for each in why.rules if each != rule)))


def _or_gathered(
    context: CouplingContext, counts: SampleCounts, training: TrainingGraph, state: State, why: OpenStatistic
) -> OpenStatistic:
    """The same where its rows can be gathered: that comes first among the rules."""
    try:
        gathered_rows(context, counts, training, state)
    except Unclear:
        return why
    return replace(why, rules=GATHERED)


def _written(training: TrainingGraph, found: Mapping[str, StatisticReduction]) -> set[str]:
    """The values behind gathered rows, with the samples of all ranks."""
    rows = [each for each in found.values() if each.rule == "gather"]
    producers, updated = training.graph.producers() if rows else {}, training.state_of()
    paths = [path_nodes(training.graph.nodes, producers, [p.value for p in each.points], updated[each.tensor].updated)
             for each in rows]  # fmt: skip
    return {name for path in paths for node in path for name in node.outputs}


def _stated(
    context: CouplingContext, counts: SampleCounts, training: TrainingGraph, state: State, stated: str
) -> StatisticReduction:
    """How a statistic is combined, as the user says."""
    if stated in ("root", "local"):
        return StatisticReduction(state.tensor, stated)
    if stated == "gather":
        return gathered_rows(context, counts, training, state)
    return _followed(context, counts, state, stated)


def _followed(
    context: CouplingContext, counts: SampleCounts, state: State, stated: str, *, counting: bool = True
) -> StatisticReduction:  # fmt: skip
    """How a statistic is combined; ``counting``: whether constants may be numbers of samples."""
    dtype = context.index.graph.types[state.tensor].dtype
    if stated == "mean" and dtype in FLOATS:
        return StatisticReduction(state.tensor, stated)
    points = _Walk(context, counts, state, stated, counting).points()
    types = context.index.graph.types
    if any(point.reduce == "mean" and types[point.value].dtype not in FLOATS for point in points):
        raise Unclear(f"it is {dtype}, and ranks cannot agree on integers by a mean", INTEGERS)
    rules = "+".join(dict.fromkeys(point.reduce for point in points)) or "mean"  # none: a size alone, equal on ranks
    if not points or ([point.value for point in points] == [state.updated] and rules == "mean"):
        return StatisticReduction(state.tensor, rules)
    return StatisticReduction(state.tensor, rules, tuple(points))


class _Walk:
    """One walk back from a new value; ``stated``: the user's own word for every value that is reduced."""

    def __init__(
        self, context: CouplingContext, counts: SampleCounts, state: State, stated: str, counting: bool
    ) -> None:
        self.context, self.counts, self.state, self.stated = context, counts, state, stated
        self.counting = counting
        self.sums = DividedSums(context, counts, state.updated)
        self.found: dict[str, str] = {}
        self.literal = ""
        """A constant behind reduced values that may be a number of samples."""

    def points(self) -> list[StatisticPoint]:
        stack: list[tuple[str, float | None]] = [(self.state.updated, None)]
        seen: set[str] = set()
        while stack:
            name, old = stack.pop()
            mark = self.context.marks.get(name)
            if name in seen:
                continue
            seen.add(name)
            if mark is None:
                self._count(name)
                continue
            rule = self._rule(name, mark, old) if not self._counted(name, mark) else ""
            if rule:
                self.found[name] = rule
                continue
            node = self.context.index.producers[name]
            self._note_literal(node, old)
            old = self._old_factor(node)
            stack += [(each, old) for each in node.reads if not self._only_chooses(node, each)]
        if self.literal and "sum" in self.found.values():
            self._refuse_literal(self.literal, "is read behind a sum over samples")
        order = self.context.index.defined_at
        return [StatisticPoint(name, self.found[name]) for name in sorted(self.found, key=order)]

    def _only_chooses(self, node: Node, name: str) -> bool:
        """Return whether a node takes a value that follows no sample as a condition or as places, and no number of
        samples is in it that a shape says."""
        if name in self.context.marks or not chooses(node, name):
            return False
        behind = self.counts.of(name)
        return not (behind.counts or behind.lost)

    def _counted(self, name: str, mark: Mark) -> bool:
        """Return whether numbers of samples stand between a value and those in which samples were reduced."""
        if mark.kind not in REDUCED or name in self.context.origins:
            return False
        behind = self._sizes(name)
        return bool(behind.counts) or (bool(behind.divisors) and mark.kind is not Relation.MEAN)

    def _count(self, name: str) -> None:
        """Let ranks add up the numbers of samples behind a value that follows no sample."""
        if not self._decays(self.context.index.producers.get(name)):
            behind = self._sizes(name)
            self.literal = self.literal or behind.factor
            self.found |= dict.fromkeys(behind.counts, "sum")

    def _decays(self, node: Node | None) -> bool:
        """Return whether a node multiplies the old value by a constant."""
        if node is None or not node.is_in(SCALES) or self.state.tensor not in node.inputs:
            return False
        return all(each == self.state.tensor or self.context.scalar(each) for each in node.inputs)

    def _sizes(self, name: str) -> SizesBehind:
        """The numbers of samples behind a value. Raises Unclear for one that cannot be followed."""
        behind = self.counts.of(name)
        if behind.lost:
            raise Unclear(f"it is computed from the size of a batch in {behind.lost!r}, which gopt cannot follow")
        if behind.term:
            self._refuse_literal(behind.term, f"stands behind {name!r}")
        return behind

    def _note_literal(self, node: Node, old: float | None) -> None:
        """Keep the first constant of a node that may be a number of samples; one beside a bare sum may be of any
        value."""
        marks = self.context.marks
        bare = node.is_in(SUMS) and any(name in marks and marks[name].kind is Relation.SUM for name in node.inputs)
        for name in node.inputs if not self.literal else ():
            by = abs(self.context.scalar(name))
            if name in marks or (old is not None and isclose(by, 1 - old, rel_tol=1e-5)):
                continue
            beside = bare and by >= _EPSILON and not self.counts.counts_samples(name)
            if beside or self.counts.written_out(node, name):
                self.literal = name

    def _refuse_literal(self, name: str, where: str) -> None:
        if not self.stated and self.counting:
            raise Unclear(f"{self.counts.told(name)} {where}, and may be a number of samples", literal=name)

    def _rule(self, name: str, mark: Mark, old: float | None) -> str:
        """How ranks combine a value; '' where what it is made of must say. Raises Unclear."""
        node = self.context.index.producers.get(name)
        if mark.kind is Relation.SAMPLES:
            raise Unclear(f"{name!r} keeps values of single samples", ROWS)
        if mark.kind is Relation.UNKNOWN and (self.stated or node is None or not self._averages(name)):
            if self.stated in ("max", "min") and name == self.state.updated:
                return self.stated
            joined = self._joins_rows(name)
            if joined is not None and joined.attributes.get("reduction", "none") == "add":
                to = joined.inputs[0]
                raise Unclear(
                    f"{joined.op_type} {joined.label!r} adds samples to {to!r}: let it add them to zeros, and add "
                    f"{to!r} behind it",
                    ROWS,
                )
            if joined is not None:
                raise Unclear(f"{name!r} keeps rows of single samples, by {joined.op_type} {joined.label!r}", ROWS)
            where = f" ({node.op_type})" if node is not None else ""
            raise Unclear(f"the samples cannot be followed to {name!r}{where}")
        if mark.kind not in REDUCED and mark.kind is not Relation.UNKNOWN:
            raise Unclear(f"{name!r} is random")
        if self.stated:
            return self.stated if mark.kind in _REDUCE or name in self.context.origins else ""
        if mark.kind is Relation.UNKNOWN:
            return "mean"
        if mark.kind in (Relation.SUM, Relation.MEAN) and not mark.even and name not in self.context.origins:
            return ""  # a count that is kept from being zero: of the large batch's, not of each rank's
        if mark.kind is Relation.SUM:
            return self.sums.rule(name, mark, old)
        if mark.kind is Relation.MEAN:
            self.sums.refuse_rate(name, old)
            if node is not None and name not in self.context.origins:
                inner = self._old_factor(node)
                for each in node.inputs:
                    self.sums.refuse_rate(each, inner)
        elif mark.kind not in _REDUCE and name in self.context.origins:
            raise Unclear(f"{name!r} ({self.context.origins[name].op_type}) is no sum, mean or extreme over samples")
        return _REDUCE.get(mark.kind, "")

    def _joins_rows(self, name: str) -> Node | None:
        """The node that puts rows of single samples among others, where what cannot be followed is made there."""
        marks, producers = self.context.marks, self.context.index.producers
        while (node := producers.get(name)) is not None:
            if node.is_in(_JOINS):
                return node if any(map(self.context.samples, node.inputs)) else None
            unknown = [each for each in node.reads if (m := marks.get(each)) and m.kind is Relation.UNKNOWN]
            if len(unknown) != 1:
                return None
            name = unknown[0]
        return None

    def _averages(self, name: str) -> bool:
        """Return whether all that a value takes of the batch comes from means, where samples cannot be followed."""
        stack, seen = [name], set()
        while stack:
            value = stack.pop()
            node = self.context.index.producers.get(value)
            if value in seen or value not in self.context.marks:
                continue
            seen.add(value)
            if node is None or len(seen) > 64:
                return False
            if not node.is_in(AVERAGES) and not self._divides_sum(node):
                if node.phase is Phase.FORWARD:
                    return False
                stack.extend(node.reads)
        return True

    def _divides_sum(self, node: Node) -> bool:
        """Return whether a node divides a sum by the number of elements in it."""
        types = self.context.index.graph.type_of
        summed = self.context.index.producers.get(node.inputs[0]) if divisor_of(node) else None
        while summed is not None and summed.is_in(LAYOUT):
            summed = self.context.index.producers.get(summed.inputs[0])
        if summed is None or not record_of(summed).sums:
            return False
        made = types(summed.outputs[0]).elements
        return bool(made) and self.context.scalar(node.inputs[-1]) * made == types(summed.inputs[0]).elements

    def _old_factor(self, node: Node) -> float | None:
        """The factor of the old value in a sum; None where the old value is no term of the sum."""
        if not node.is_in(SUMS):
            return None
        for name in node.inputs:
            made = self.context.index.producers.get(name)
            if name == self.state.tensor:
                return 1.0
            factors = made.inputs if made is not None and record_of(made).multiplies else []
            if self.state.tensor in factors and len(factors) == 2:
                return self.context.scalar(factors[factors[0] == self.state.tensor]) or None
        return None

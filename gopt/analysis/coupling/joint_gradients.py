"""Reads what the values taken for gradients are: sums or means over samples, or no linear function of such sums.

The walk back from an update ends at the value through which all of it depends on the batch. Where an update multiplies
two gradients, clips each of several losses' gradients, or divides gradients that stand in one row, that value is no
gradient any more, and its mean over ranks is not the value of the large batch. A walk follows the samples through the
backward: every value behind a sum over samples must be linear in the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.gradient_units import GradientUnits
from gopt.analysis.coupling.marks import REDUCED, CouplingKind, Mark, Relation
from gopt.analysis.coupling.propagate import propagate
from gopt.analysis.coupling.units import Unit
from gopt.analysis.linearity import CONSTANT, Linearity, level
from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.graph import COMM, Node
from gopt.ir.graph_index import descendants
from gopt.ir.node_kinds import record_of


@dataclass(frozen=True, slots=True)
class BackwardReading:
    """Facts of the backward that the marks tell.

    ``levels``: parameter -> how the value taken for its gradient depends on sums over samples, where it is not in
    proportion. ``counts``: parameter -> a sum over samples that divides its gradient behind the sum that this is, and
    that neither the forward knows nor a parameter changes. ``units``: gradient -> unit, of gradients with a unit.
    ``second``: a value made of sums over samples by more than proportion, such as a weight moved along a gradient, and
    the node of single samples that reads it.
    """

    levels: Mapping[str, Linearity] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, Unit] = field(default_factory=dict)
    second: tuple[str, Node] | None = None


def read_backward(context: CouplingContext, training: TrainingGraph) -> BackwardReading:
    """Follow the samples through the backward; ``context`` has the marks of the forward.

    Nothing is found where samples meet samples in the forward, or cannot be followed. What the forward itself reduces
    counts as a constant.
    """
    if any(each.kind is CouplingKind.IN_BATCH for each in context.found):
        return BackwardReading()
    trained = descendants(context.index, [state.tensor for state in training.parameters])
    units = GradientUnits(context, list(training.losses), trained, training.gradients.values())
    levels: dict[str, Linearity] = {}
    second: tuple[str, Node] | None = None
    counts: dict[str, str] = {}
    known = trained | {name for node in training.graph.nodes if node.phase is Phase.FORWARD for name in node.outputs}
    for node in training.graph.nodes:
        if node.phase is not Phase.BACKWARD:
            continue
        propagate(context, [node])
        units.visit(node)
        second = second or _second(context, node, levels)
        count = _count(context, node, known, counts)
        if count:
            counts.update(dict.fromkeys(node.outputs, count))
        for name in node.outputs:
            mark = context.marks.get(name)
            if mark is not None and name in trained:
                found = _level(context, node, mark, levels)
                if found is not None:
                    levels[name] = found
    all_of = {name: levels.get(value, Linearity.HOMOGENEOUS) for name, value in training.gradients.items()}
    unlike = {name: each for name, each in all_of.items() if each > Linearity.SCALED}
    divided = {name: counts[value] for name, value in training.gradients.items() if value in counts}
    each = {name: units.of(name) for name in training.gradients.values() if name in context.marks}
    behind = {name: units.constants.behind(name, unit) for name, unit in each.items() if unit is not None}
    return BackwardReading(unlike, divided, behind, second)


def _second(context: CouplingContext, node: Node, levels: Mapping[str, Linearity]) -> tuple[str, Node] | None:
    """A value that is more than proportional to sums over samples, where single samples read it."""
    if not any(context.samples(name) is not None for name in node.outputs):
        return None
    return next(((name, node) for name in node.inputs if levels.get(name, CONSTANT) > Linearity.SCALED), None)


def _count(context: CouplingContext, node: Node, known: AbstractSet[str], counts: Mapping[str, str]) -> str:
    """The count that divides the sum made by a node, or a sum held by its operands; '' for no such count."""
    marks = [context.marks.get(name) for name in node.inputs]
    if any(mark is not None and mark.kind not in REDUCED for mark in (*marks, context.marks.get(node.outputs[0]))):
        return ""
    if len(marks) == 2 and None not in marks and record_of(node).exponent(1) < 0 and node.inputs[1] not in known:
        return node.inputs[1]
    return next((counts[name] for name in node.inputs if name in counts), "")


def _level(context: CouplingContext, node: Node, mark: Mark, levels: dict[str, Linearity]) -> Linearity | None:
    """How a result depends on sums over samples; None for a result without such sums, or where nothing is known."""
    if mark.kind not in REDUCED or mark.mixed:
        return None
    marks = [context.marks.get(name) for name in node.inputs]
    if any(each is not None and each.kind is Relation.SAMPLES for each in marks):
        summed = mark.kind in (Relation.SUM, Relation.MEAN, Relation.WEIGHTED)
        return Linearity.HOMOGENEOUS if summed else None
    if levels.keys().isdisjoint(node.reads):
        return None
    if node.domain == COMM:  # the source's own: sums and moves of parts
        return max(levels[name] for name in node.inputs if name in levels)
    return level(context.index, node, [levels.get(name, CONSTANT) for name in node.inputs if name])

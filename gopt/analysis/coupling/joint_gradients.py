"""Values taken for gradients that are no linear function of sums over samples: made of several gradients.

The walk back from an update ends at the value through which all of it depends on the batch. Where an update multiplies
two gradients, clips each of several losses' gradients, or divides gradients that stand in one row, that value is no
gradient any more, and its mean over ranks is not that of the step. The samples are followed through the backward: what
is made of values summed over them must be linear in these.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import REDUCED, CouplingKind, Mark, Relation
from gopt.analysis.coupling.propagate import propagate
from gopt.analysis.graph_walks import descendants
from gopt.analysis.linearity import CONSTANT, Linearity, level
from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.graph import COMM, Node


@dataclass(frozen=True, slots=True)
class UnlikeGradients:
    """Parameters whose values taken for gradients are none.

    ``levels``: how they depend on sums over samples, where that is not in proportion. ``counts``: a sum over samples
    that divides them behind the sum that they are, and that neither the forward knows nor a parameter changes.
    """

    levels: Mapping[str, Linearity] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)


def unlike_gradients(context: CouplingContext, training: TrainingGraph) -> UnlikeGradients:
    """The parameters of a step whose gradients are none by what they are made of.

    ``context`` has the marks of the forward; it follows the backward from there. Nothing is found where samples meet
    samples in the forward, or cannot be followed. What the forward itself reduces counts as a constant.
    """
    if any(each.kind is CouplingKind.IN_BATCH for each in context.found):
        return UnlikeGradients()
    trained = descendants(context.index, [state.tensor for state in training.parameters])
    levels: dict[str, Linearity] = {}
    counts: dict[str, str] = {}
    known = trained | {name for node in training.graph.nodes if node.phase is Phase.FORWARD for name in node.outputs}
    for node in training.graph.nodes:
        if node.phase is not Phase.BACKWARD:
            continue
        propagate(context, [node])
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
    return UnlikeGradients(
        {name: each for name, each in all_of.items() if each > Linearity.SCALED},
        {name: counts[value] for name, value in training.gradients.items() if value in counts},
    )


def _count(context: CouplingContext, node: Node, known: AbstractSet[str], counts: Mapping[str, str]) -> str:
    """The count that divides the sum which a node makes, or one that its operands hold; '' where there is none."""
    marks = [context.marks.get(name) for name in node.inputs]
    if any(mark is not None and mark.kind not in REDUCED for mark in (*marks, context.marks.get(node.outputs[0]))):
        return ""
    if node.is_a("Div") and None not in marks and node.inputs[1] not in known:
        return node.inputs[1]
    return next((counts[name] for name in node.inputs if name in counts), "")


def _level(context: CouplingContext, node: Node, mark: Mark, levels: dict[str, Linearity]) -> Linearity | None:
    """How a result depends on sums over samples; None where it is none of them, or nothing is known."""
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

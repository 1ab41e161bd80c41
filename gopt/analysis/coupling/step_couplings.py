"""All couplings of a step: those of its forward, its loss, and what the update reads of the batch itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.joint_gradients import UnlikeGradients, unlike_gradients
from gopt.analysis.coupling.marks import Coupling, CouplingKind, Mark, Relation, division
from gopt.analysis.coupling.propagate import UNDECIDED, propagate, start
from gopt.analysis.coupling.statistics import statistic_reductions
from gopt.analysis.graph_walks import ancestors
from gopt.analysis.linearity import Linearity
from gopt.analysis.loss_reduction import LossReduction, LossRule
from gopt.analysis.operators import reads_value
from gopt.analysis.role_map import RoleMap
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.mesh import AxisKind
from gopt.program import SpmdProgram

COUPLINGS = "couplings"
"""The question of ``TrainingGraph.once``."""


@dataclass(frozen=True, slots=True)
class CouplingSummary:
    """All couplings of a step, and the kind of its loss: a mean, a sum, or a mean weighted ``by`` a value.

    ``loss`` is None when the loss cannot be traced or is of no such kind.
    """

    couplings: tuple[Coupling, ...]
    loss: Relation | None
    by: str = ""
    unlike: UnlikeGradients = field(default_factory=UnlikeGradients)
    statistics: Mapping[str, StatisticReduction] = field(default_factory=dict)
    """Statistic -> how it is combined over ranks."""
    unclear: Mapping[str, str] = field(default_factory=dict)
    """The other statistics -> why gopt does not know."""


def analyse_couplings(training: TrainingGraph) -> CouplingSummary:
    """Every place where the step is not that of one large batch, or may not be; one sweep, kept with the step."""

    def find() -> CouplingSummary:
        graph = training.graph
        forward = [node for node in graph.nodes if node.phase is Phase.FORWARD]
        context = start(graph, training.batch)
        read = {name for node in forward for name in node.reads}
        context.found = [fact for fact in context.found if fact.value in read]
        propagate(context, forward)
        for loss in training.losses:
            _loss(context, training, loss)
        _driven(context, training)
        known = statistic_reductions(context, training)
        marks = [context.marks.get(loss) for loss in training.losses]
        mark = marks[0]
        plain = mark is not None and mark.kind in (Relation.MEAN, Relation.SUM, Relation.WEIGHTED) and not mark.doubt
        plain = plain and all(each is not None and _alike(each, mark) for each in marks)
        found = tuple(context.found)
        unlike = unlike_gradients(context, training)
        if mark is not None and plain:
            return CouplingSummary(found, mark.kind, mark.by, unlike, *known)
        return CouplingSummary(found, None, "", unlike, *known)

    return training.once(COUPLINGS, find)


def refuse_unlike(training: TrainingGraph, roles: RoleMap, reduction: LossReduction) -> None:
    """Raise UnsupportedError for a value taken for a gradient that is none: one that is nonlinear in several gradients,
    unless the user named it, or one to which something is added where gradients are summed."""
    unlike = analyse_couplings(training).unlike
    for name, count in unlike.counts.items():
        if not roles.params.get(name):
            value = training.gradients[name]
            raise UnsupportedError(
                f"no gradient of {name!r} was found: all of its update that depends on the batch runs through "
                f"{value!r}, which is divided by {count!r}, a count of the batch that the loss does not know",
                f"if {name} is a statistic, say that ranks add up what it takes of the batch: --statistics {name}=sum; "
                f"if it is a parameter, name its gradient: --params {name}=VALUE",
            )
    for name, how in unlike.levels.items():
        value = training.gradients[name]
        if how is Linearity.NONLINEAR and not roles.params.get(name):
            raise UnsupportedError(
                f"no gradient of {name!r} was found: its update depends on the batch through {value!r}, which is made "
                "of several gradients, and not linear in them",
                f"name its gradient: --params {name}=VALUE; an update of several losses' gradients, each clipped or "
                "projected by itself, is not supported",
            )
        if how is Linearity.AFFINE and reduction.rule is LossRule.SUM:
            raise UnsupportedError(
                f"{value!r}, the gradient of {name!r}, holds a term that no sample enters, such as the derivative of a "
                "penalty: --loss-reduction sum would count it once for every rank",
                f"add the term behind the gradient, and name the gradient without it: --params {name}=VALUE",
            )


def find_couplings(training: TrainingGraph) -> tuple[Coupling, ...]:
    """Every place where the step is not that of one large batch, or may not be."""
    return analyse_couplings(training).couplings


def open_couplings(step: SpmdProgram) -> tuple[Coupling, ...]:
    """The couplings that a sharded step still has; none where one micro-step of one rank sees all the data."""
    group = step.mesh.data_group
    if (group is None or step.mesh.size(group) == 1) and step.micro_steps == 1:
        return ()
    reading, asked = analyse_couplings(step.source), step.loss_reduction
    found = list(reading.couplings)
    fits = {LossRule.SUM: Relation.SUM, LossRule.MEAN: Relation.MEAN, LossRule.WEIGHTED: Relation.WEIGHTED}[asked.rule]
    if asked.rule is not LossRule.MEAN and reading.loss in (fits, None):
        found = [each for each in found if each.kind not in (CouplingKind.SUMMED, CouplingKind.WEIGHTED)]
    if step.synchronised != SynchronisedValues():
        settled = (CouplingKind.STATISTICS, CouplingKind.NONLINEAR, CouplingKind.WEIGHTED)
        found = [each for each in found if each.kind not in settled]
    if asked.rule is not LossRule.MEAN and reading.loss not in (fits, None):
        found.append(_contrary(step, reading))
    elif reading.by and asked.value and reading.by != asked.value:
        what = f"gradients are weighted by {asked.value!r}, the loss is a mean weighted by {reading.by!r}"
        found.append(_of_loss(step, what, f"--loss-reduction weighted:{reading.by} is exact"))
    return tuple(found if _may_synchronise(step) else [_without_sync(each) for each in found])


def _may_synchronise(step: SpmdProgram) -> bool:
    """Return whether ``--statistics sync`` may be taken: not with micro-steps, not with another reduction of gradients,
    and not where ranks have parts of samples."""
    parts = any(size > 1 and step.mesh.kind(name) is AxisKind.PART for name, size in step.mesh.axes)
    return step.micro_steps == 1 and step.loss_reduction.rule is LossRule.MEAN and not parts


def _without_sync(each: Coupling) -> Coupling:
    return replace(each, exact="") if "--statistics sync" in each.exact else each


def _contrary(step: SpmdProgram, reading: CouplingSummary) -> Coupling:
    """The user asked for a reduction that the loss does not have."""
    assert reading.loss is not None
    kinds = {Relation.MEAN: "a mean over the samples", Relation.SUM: "a sum over the samples"}
    what = kinds.get(reading.loss, f"a mean weighted by {reading.by!r}")
    return _of_loss(step, f"--loss-reduction is {step.loss_reduction}, and the loss is {what}", "")


def _of_loss(step: SpmdProgram, what: str, exact: str) -> Coupling:
    training = step.source
    producer = next((node.op_type for node in training.graph.nodes if training.loss in node.outputs), "")
    return Coupling(CouplingKind.REDUCTION, training.loss, producer, what, exact)


def notes(couplings: Sequence[Coupling]) -> list[str]:
    """One line for each kind of coupling: the first of it, and how many more there are."""
    by_kind: dict[CouplingKind, list[Coupling]] = {}
    for each in couplings:
        by_kind.setdefault(each.kind, []).append(each)
    more = {kind: f"; {len(facts) - 1} more like it" if len(facts) > 1 else "" for kind, facts in by_kind.items()}
    return [facts[0].note + more[kind] for kind, facts in by_kind.items()]


def _alike(mark: Mark, other: Mark | None) -> bool:
    """Return whether two losses are both means, sums, or means weighted by the same value."""
    return other is not None and (mark.kind, mark.by, mark.doubt) == (other.kind, other.by, other.doubt)


def _loss(context: CouplingContext, training: TrainingGraph, loss: str) -> None:
    """Record a coupling unless the loss is a mean over samples."""
    it = "the loss" if len(training.losses) == 1 else f"the loss {loss!r}"
    mark, node = context.marks.get(loss), context.index.producers.get(loss)
    if node is None or mark is None or mark.kind in (Relation.UNKNOWN, Relation.MEAN) or mark.mixed:
        if node is not None and mark is None:
            context.couple(CouplingKind.UNKNOWN, node, f"the loss {loss!r} does not follow the samples: {UNDECIDED}")
        return
    if mark.kind is Relation.WEIGHTED and not _trained(context, training, mark.by):
        by = f" {mark.by!r}" if mark.by else ", which the operator does not output"
        exact = f"--loss-reduction weighted:{mark.by} is exact" if mark.by else "write the division out in the model"
        context.couple(
            CouplingKind.WEIGHTED, node,
            f"{it} is divided by a count of the rank's own batch{by}: all ranks have equal weight",
            exact, loss,
        )  # fmt: skip
    elif mark.kind is Relation.SUM:
        _sum(context, loss, node, it)
    elif mark.kind is Relation.SAMPLES:
        context.couple(CouplingKind.UNKNOWN, node, f"{it} is that of one sample, no sum and no mean: {UNDECIDED}")
    else:
        origin = context.index.producers.get(mark.origin) or node
        context.couple(
            CouplingKind.NONLINEAR, node,
            f"{it} is not a mean over samples: {mark.origin!r} ({origin.op_type}) is a function of what they "
            "have in common", "--statistics sync may make it exact", loss,
        )  # fmt: skip


def _sum(context: CouplingContext, loss: str, node: Node, it: str) -> None:
    """A loss that is a sum over samples, as far as the constants in it tell; ``it``: what a note calls it."""
    mark = context.marks[loss]
    known = not context.batch or division(mark.factor, context.batch, mark.sizes).by_others
    if context.batch == 1 or mark.doubt:
        why = "a batch of one sample" if context.batch == 1 else "dimensions of equal size"
        context.couple(
            CouplingKind.UNKNOWN, node, f"{why} cannot tell a summed loss from a mean one: {UNDECIDED}", "", loss
        )
    elif known:
        context.couple(
            CouplingKind.SUMMED, node, f"{it} is summed over the samples, and gradients are averaged over ranks",
            "--loss-reduction sum is exact", loss,
        )  # fmt: skip
    else:
        times = f"times {abs(mark.factor):.6g}" if mark.factor else "times a value that is not a constant"
        context.couple(
            CouplingKind.UNKNOWN, node,
            f"{it} is summed over {context.batch} samples, {times}: "
            "gopt cannot tell whether that divides by their number",
            "--loss-reduction sum is exact where it does not", loss,
        )  # fmt: skip


def _driven(context: CouplingContext, training: TrainingGraph) -> None:
    """Values of a rank's own batch, other than gradients, that the update reads, such as the loss."""
    producers, marks = context.index.producers, context.marks
    forward = [node for node in training.graph.nodes if node.phase is Phase.FORWARD]
    own = {*training.batch, *(name for node in forward for name in node.outputs)}
    meant = {*training.gradients.values(), *training.shared}
    """Values that the update reads as means over the ranks."""
    stack = [state.updated for state in training.states if state.kind is not StateKind.STATISTIC]
    if _reads_gradients_alone(training, own, meant, stack):
        return
    seen: set[int] = set()
    while stack:
        node = producers.get(stack.pop())
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        for name in node.reads:
            if name in own:
                if name in marks and reads_value(node, name):
                    context.couple(
                        CouplingKind.LOSS_DRIVEN, node,
                        f"the update reads {name!r}, a value of the rank's own batch, at {node.label!r}",
                        f"--shared {name} lets it read the mean over the ranks", name,
                    )  # fmt: skip
            elif name not in meant:
                stack.append(name)


def _reads_gradients_alone(training: TrainingGraph, own: set[str], meant: set[str], updated: list[str]) -> bool:
    """Return whether the update reads nothing of forward and backward but what is ``meant``: as nearly all do."""
    nodes = training.graph.nodes
    backward = {name for node in nodes if node.phase is Phase.BACKWARD for name in node.outputs}
    local = own | (backward - meant)
    return local.isdisjoint(updated) and all(
        local.isdisjoint(node.inputs) and local.isdisjoint(node.captures)
        for node in nodes if node.phase is Phase.UPDATE
    )  # fmt: skip


def _trained(context: CouplingContext, training: TrainingGraph, value: str) -> bool:
    """Return whether a value depends on a parameter."""
    return not ancestors(context.index, [value])[1].isdisjoint(state.tensor for state in training.parameters)

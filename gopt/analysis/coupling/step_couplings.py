"""All couplings of a step: of the forward, of the loss, and of values of the batch that the update reads itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.gradient_reductions import (
    Readings,
    couplings_of,
    exact_reduction,
    read_gradients,
    rule_for,
    told_of,
    unfit,
)
from gopt.analysis.coupling.joint_gradients import BackwardReading, read_backward
from gopt.analysis.coupling.loss_terms import loss_terms
from gopt.analysis.coupling.marks import Coupling, CouplingKind, Relation, division
from gopt.analysis.coupling.open_statistics import StatisticRules, statistic_couplings
from gopt.analysis.coupling.propagate import UNDECIDED, propagate
from gopt.analysis.coupling.samples_axis import forward_swept
from gopt.analysis.coupling.statistics import statistic_rules
from gopt.analysis.coupling.uniform_factors import UniformFactors
from gopt.analysis.layout_aliases import find_aliases
from gopt.analysis.linearity import Linearity
from gopt.analysis.loss_reduction import AUTO, LossReduction, LossRule
from gopt.analysis.role_hints import states_hints
from gopt.analysis.role_map import RoleMap
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import ancestors
from gopt.ir.node_kinds import reads_value

COUPLINGS = "couplings"
"""The question of ``TrainingGraph.once``."""


@dataclass(frozen=True, slots=True)
class CouplingSummary:
    """All couplings of a step but how its gradients are combined; ``readings`` tells that for each gradient.

    Where no gradient can be followed, ``couplings`` holds what the loss tells.
    """

    couplings: tuple[Coupling, ...]
    readings: Readings = field(default_factory=dict)
    unlike: BackwardReading = field(default_factory=BackwardReading)
    statistics: StatisticRules = field(default_factory=StatisticRules)

    def combined(self, training: TrainingGraph, asked: LossReduction) -> tuple[Coupling, ...]:
        """All couplings where ranks combine the gradients by a rule."""
        told = {each.kind for each in self.couplings}
        joint = told.isdisjoint((CouplingKind.STATISTICS, CouplingKind.IN_BATCH, CouplingKind.PLACE))
        return (*self.couplings, *couplings_of(training, self.readings, asked, joint=joint))


def analyse_couplings(training: TrainingGraph) -> CouplingSummary:
    """Every place where the step differs from one large batch's, or may differ; one sweep, kept with the step."""

    def find() -> CouplingSummary:
        context = forward_swept(training)
        _driven(context, training)
        rules = statistic_rules(context, training)
        forward_facts, context.found = context.found, list(context.found)
        backward = read_backward(context, training)
        context.found = forward_facts
        readings = read_gradients(context, training, backward)
        if not readings:
            for loss in training.losses:
                _loss(context, training, loss)
        _second_pass(context, backward)
        _shared(context, training)
        return CouplingSummary(tuple(context.found), readings, backward, rules)

    return training.once(COUPLINGS, find)


def _shared(context: CouplingContext, training: TrainingGraph) -> None:
    """Record values that the update reads as their mean over the ranks, and that are no means over samples."""
    if not training.shared:
        return
    behind, _ = ancestors(context.index, training.shared.values())
    propagate(context, (n for n in training.graph.nodes if id(n) in behind and n.phase is not Phase.FORWARD))
    for name in training.shared.values():
        mark, node = context.marks.get(name), context.index.producers.get(name)
        if mark is not None and node is not None and mark.kind not in (Relation.MEAN, Relation.WEIGHTED):
            context.couple(
                CouplingKind.LOSS_DRIVEN, node,
                f"the update reads the mean over ranks of {name!r}, and it is no mean over samples", "", name,
            )  # fmt: skip


def _second_pass(context: CouplingContext, backward: BackwardReading) -> None:
    """Record a point that depends on gradients of the rank's own samples, and that samples are evaluated at."""
    if backward.second is None:
        return
    name, node = backward.second
    context.couple(
        CouplingKind.STATISTICS, node,
        f"{name!r} is moved by a gradient of a rank's own samples, and single samples depend on it, such as in "
        "sharpness-aware minimisation", "--statistics sync takes it over all ranks' samples", name,
    )  # fmt: skip


def settled_reduction(training: TrainingGraph, text: str) -> LossReduction:
    """The rule that ``--loss-reduction`` names; ``auto`` is each gradient's own. Raises UnsupportedError where that is
    not known."""
    if text != AUTO:
        found = LossReduction.parse(text)
        found.check(training)
        return found
    readings = analyse_couplings(training).readings
    exact = exact_reduction(readings)
    if exact == AUTO:
        names = [name for name, reading in readings.items() if reading.relation is Relation.SUM]
        return LossReduction(summed=tuple(names))
    if exact:
        return LossReduction.parse(exact)
    facts = [each.what for each in couplings_of(training, readings, LossReduction(), joint=True)]
    why = facts[0] if facts else "gopt cannot follow the samples to the gradients"
    raise UnsupportedError(
        f"--loss-reduction auto: {why}", "say mean, sum, weighted:VALUE or sum:PARAMETER,PARAMETER"
    )  # fmt: skip


def refuse_unlike(training: TrainingGraph, roles: RoleMap, reduction: LossReduction) -> None:
    """Raise UnsupportedError for a value wrongly taken for a gradient: nonlinear in several gradients, and not named by
    the user, or with a term added beside a sum of gradients."""
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
            named = states_hints(_pieces(training, unlike.levels), "gradient", "params")
            raise UnsupportedError(
                f"no gradient of {name!r} was found: its update depends on the batch through {value!r}, which is made "
                "of several gradients, and not linear in them",
                *named or [f"name its gradient: --params {name}=VALUE; an update of several losses' gradients, each "
                           "clipped or projected by itself, is not supported"],
            )  # fmt: skip
        if how is Linearity.AFFINE and reduction.rule_of(name) is LossRule.SUM:
            raise UnsupportedError(
                f"{value!r}, the gradient of {name!r}, holds a term that no sample enters, such as the derivative of a "
                "penalty: --loss-reduction sum would count it once for every rank",
                f"add the term behind the gradient, and name the gradient without it: --params {name}=VALUE",
            )


def _pieces(training: TrainingGraph, levels: Mapping[str, Linearity]) -> dict[str, str]:
    """Parameter -> its gradient, where the values taken for gradients and not linear in several are pieces of a row
    that these were joined in, scaled as a whole; nothing where one is no such piece."""
    aliases, types = find_aliases(training.graph, scaled=True), training.graph.type_of
    bent = {name: training.gradients[name] for name, how in levels.items() if how is Linearity.NONLINEAR}
    found = {name: aliases.get(value, value) for name, value in bent.items()}
    whole = all(value != bent[name] and types(value).shape == types(name).shape for name, value in found.items())
    return found if whole else {}


def refuse_other_sums(training: TrainingGraph, asked: LossReduction) -> None:
    """Raise UnsupportedError where ``--statistics sync`` would average gradients that are sums, or add means."""
    readings = analyse_couplings(training).readings
    name = next(other_sums(readings, asked), None)
    if name is None:
        return
    facts = couplings_of(training, {name: readings[name]}, asked, joint=True)
    sums = [each for each, one in readings.items() if one.relation is Relation.SUM]
    exact = LossRule.SUM.value if len(sums) == len(readings) else str(LossReduction(summed=tuple(sums)))
    what = next((f"{name!r}: {fact.what}" for fact in facts), f"the gradient of {name!r} is added")
    raise UnsupportedError(
        f"--statistics sync cannot give the step of one large batch: {what}", f"say --loss-reduction {exact}"
    )


def other_sums(readings: Readings, asked: LossReduction) -> Iterator[str]:
    """The parameters whose gradients are sums and averaged, or are no sums and added."""
    for name, reading in readings.items():
        is_sum = reading.relation is Relation.SUM
        known = reading.sure and reading.relation is not Relation.UNKNOWN
        if known and is_sum != (asked.rule_of(name) is LossRule.SUM):
            yield name


def unfit_reductions(training: TrainingGraph, asked: LossReduction) -> list[tuple[LossReduction, list[str], str]]:
    """The gradients that a rule does not combine exactly: the exact rule, the parameters, and the text for the user.
    Ignored labels give no entry, as in ``notes``."""
    readings = analyse_couplings(training).readings
    found = []
    for reading, names in unfit(readings, asked).items():
        exact = rule_for(reading)
        usual = reading.labels and all(asked.rule_of(name) is LossRule.MEAN for name in names)
        if exact is not None and not usual:
            found.append((exact, names, told_of(reading, names, readings, asked)))
    return found


def find_couplings(training: TrainingGraph) -> tuple[Coupling, ...]:
    """Every place where the step of ranks that average gradients differs from one large batch's, or may differ."""
    return analyse_couplings(training).combined(training, LossReduction())


def couplings_as_run(
    training: TrainingGraph, reduction: LossReduction, shared: SynchronisedValues,
    statistics: Iterable[StatisticReduction],
) -> tuple[Coupling, ...]:  # fmt: skip
    """The couplings that a step still has where ranks reduce its gradients, values and statistics so."""
    known = analyse_couplings(training)
    found = known.combined(training, reduction)
    if shared != SynchronisedValues():
        settled = (CouplingKind.STATISTICS, CouplingKind.NONLINEAR, CouplingKind.WEIGHTED, CouplingKind.IGNORED)
        found = tuple(each for each in found if each.kind not in settled)
    if reduction.rule is not LossRule.MEAN and not known.readings:
        found = tuple(each for each in found if each.kind not in (CouplingKind.SUMMED, CouplingKind.WEIGHTED))
    return (*found, *statistic_couplings(training, known.statistics, statistics))


def without_advice(couplings: Sequence[Coupling], option: str) -> tuple[Coupling, ...]:
    """The couplings without the advice of an option that cannot be taken."""
    return tuple(replace(each, exact="") if option in each.exact else each for each in couplings)


def notes(couplings: Sequence[Coupling]) -> list[str]:
    """One line for each kind of coupling: the first of it, and how many more there are. Ignored labels are no
    coupling: every data-parallel trainer takes a mean over a rank's own labels."""
    kinds = dict.fromkeys(each.kind for each in couplings if each.kind is not CouplingKind.IGNORED)
    return [line for kind in kinds for line in of_kind(couplings, kind)]


def of_kind(couplings: Iterable[Coupling], kind: CouplingKind) -> list[str]:
    """The line for the couplings of a kind, if there is one."""
    found = [each for each in couplings if each.kind is kind]
    return [found[0].note + (f"; {len(found) - 1} more like it" if len(found) > 1 else "")] if found else []


def _loss(context: CouplingContext, training: TrainingGraph, loss: str) -> None:
    """Record a coupling unless the loss is a mean over samples."""
    it = "the loss" if len(training.losses) == 1 else f"the loss {loss!r}"
    own = " if the gradients belong to this loss" if training.gradients else ""
    mark, node = context.marks.get(loss), context.index.producers.get(loss)
    if node is None or mark is None or mark.kind in (Relation.UNKNOWN, Relation.MEAN) or mark.mixed:
        if node is not None and mark is None:
            context.couple(CouplingKind.UNKNOWN, node, f"the loss {loss!r} does not follow the samples: {UNDECIDED}")
        return
    if mark.kind is Relation.WEIGHTED and not _trained(context, training, mark.by):
        by = f" {mark.by!r}" if mark.by else ", which the operator does not output"
        exact = (
            f"--loss-reduction weighted:{mark.by} is exact{own}" if mark.by else "write the division out in the model"
        )
        context.couple(
            CouplingKind.WEIGHTED, node,
            f"{it} is divided by a count of the rank's own batch{by}: all ranks have equal weight",
            exact, loss,
        )  # fmt: skip
    elif mark.kind is Relation.SUM:
        _sum(context, loss, node, it, own)
    elif mark.kind is Relation.SAMPLES:
        context.couple(CouplingKind.UNKNOWN, node, f"{it} is one sample's, no sum and no mean: {UNDECIDED}")
    else:
        origin = context.index.producers.get(mark.origin) or node
        context.couple(
            CouplingKind.NONLINEAR, node,
            f"{it} is not a mean over samples: {mark.origin!r} ({origin.op_type}) is a function of what they "
            "have in common", "--statistics sync may make it exact", loss,
        )  # fmt: skip


def _sum(context: CouplingContext, loss: str, node: Node, it: str, own: str) -> None:
    """A loss that is a sum over samples, as far as the constants in it tell; ``it``: what a note calls it; ``own``: the
    condition of its advice."""
    mark = context.marks[loss]
    if loss_terms(context, UniformFactors(context), [loss], {loss}).common == 1:
        return  # a size read from a shape divides it
    known = not context.batch or division(mark.factor, context.batch, mark.sizes).by_others
    if context.batch == 1 or mark.doubt:
        why = {1: "a batch of one sample", 2: "a half over two samples"}.get(context.batch, "dimensions of equal size")
        context.couple(
            CouplingKind.UNKNOWN, node, f"{why} cannot tell a summed loss from a mean one: {UNDECIDED}", "", loss
        )
    elif known:
        context.couple(
            CouplingKind.SUMMED, node, f"{it} is summed over the samples, and gradients are averaged over ranks",
            f"--loss-reduction sum is exact{own}", loss,
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

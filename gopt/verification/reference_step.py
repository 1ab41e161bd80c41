"""Computes the expected step: local gradients of every batch by the source, then its own update of their mean."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gopt.analysis.loss_reduction import LossReduction, LossRule
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.records.mesh import Mesh
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache
from gopt.verification.compare import Values, same_bits
from gopt.verification.conditions import Condition, condition_outputs
from gopt.verification.lazy_tables import LazyTable, with_kept_rows
from gopt.verification.lockstep import run_in_lockstep, with_reduced_statistics, with_shared_means
from gopt.verification.piecewise import pieces
from gopt.verification.reference_graphs import local_graph, update_graph
from gopt.verification.source_members import Feeds, SourceMembers, run_source
from gopt.verification.variants import PLAIN, Variant

Batches = Sequence[Sequence[Values]]
"""Inputs by micro-step and by data rank."""


@dataclass(frozen=True, slots=True)
class LocalResults:
    """Results of the batches before any reduction, by micro-step and data rank.

    ``gradients``: by name, as the variant wants them; ``statistics``: the new ones of each data rank at the end;
    ``weights`` (``--loss-reduction``) and ``shown`` (values that the update reads as a mean) of all batches in turn.
    """

    losses: list[list[Values]]
    gradients: list[list[Values]]
    statistics: list[Values]
    weights: list[float] = field(default_factory=list)
    shown: list[Values] = field(default_factory=list)
    touched: dict[str, np.ndarray] = field(default_factory=dict)
    """Row ids that were pushed, by table with lazy updates."""


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """A step of the source: its new ``states``, what the batches gave, and what the update's ``conditions`` showed."""

    states: Values
    local: LocalResults
    means: Values
    conditions: Values


class ReferenceProgram:
    """The source cut at its gradients; ``call`` answers the collectives that it holds itself."""

    def __init__(
        self, training: TrainingGraph, mesh: Mesh, cache: SessionCache, conditions: Sequence[Condition] = (),
        reduction: LossReduction = LossReduction(), shared: SynchronisedValues = SynchronisedValues(),
        statistics: str = "mean", reductions: Sequence[StatisticReduction] = (), lazy: Sequence[LazyTable] = (),
    ) -> None:  # fmt: skip
        """``statistics``: the ranks of which new statistics are: their ``mean``, or those of the ``root``;
        ``reductions``: of single statistics.

        ``lazy``: tables whose rows stay unchanged unless they were pushed.
        """
        self.training = training
        self.reduction = reduction
        self.shared = shared
        self.statistics_rule, self.lazy = statistics, lazy
        self.rules = {each.tensor: each.rule for each in reductions if not each.points}
        met = [each for each in reductions if each.points]
        self.rules |= dict.fromkeys((each.tensor for each in met), "root")  # the same on all ranks
        self.meeting = bool(met) or shared != SynchronisedValues()
        self.call = SourceMembers(mesh)
        self.mesh, self.cache = mesh, cache
        self.gradients = set(training.gradients.values())
        self.apart: Sequence[Values] = ()
        """For each batch, the values of statistics that its ranks hold apart; none: as in the states."""
        self._kept: tuple[list[Values], LocalResults] | None = None
        self.marked = next(iter(training.gradients.values()))
        """The gradient that an infinity is put into."""
        self.statistics = [state for state in training.states if state.kind is StateKind.STATISTIC]
        self.made = {s.tensor: training.chosen.get(s.tensor, s.updated) for s in self.statistics}
        """Statistic -> what a rank makes of it, which a condition of the update may leave out."""
        self.condition_outputs = condition_outputs(update_graph(training), conditions)
        local = local_graph(training, reduction.value, [name for table in lazy for name in table.ids])
        if shared != SynchronisedValues():
            local = with_shared_means(local, shared)
        if met:
            local = with_reduced_statistics(local, met, self.made, mesh.data_ranks)
        self._local = Executor(local, cache)
        self._update = Executor(update_graph(training, self.condition_outputs), cache)

    def combined_by(self, reduction: LossReduction) -> ReferenceProgram:
        """The same source with its gradients combined by another rule."""
        return ReferenceProgram(self.training, self.mesh, self.cache, (), reduction, self.shared)

    @property
    def local_inputs(self) -> Collection[str]:
        """Names of the values that forward and backward read."""
        return self._local.graph.inputs

    def refuse_inputs(self, drawn: Iterable[str]) -> None:
        """Raise UnsupportedError where the update draws random numbers of its own: ranks could not agree on them."""
        name = next((name for name in drawn if name in self._update.graph.inputs), None)
        if name is not None:
            raise UnsupportedError(
                f"the update reads {name.removesuffix('.drawn')!r}, which is random: no reference has its draws",
                "make the random numbers an input of the step",
            )

    def step(self, variant: Variant, states: Values, settings: Values, batches: Batches) -> ReferenceStep:
        """One step of the source on the mean gradient of all batches."""
        local = self.local(variant, states, settings, batches)
        return self.finish(states, settings, local)

    def forget(self) -> None:
        """Let ``kept`` begin elsewhere."""
        self._kept = None

    def kept(self, variant: Variant, states: Values, settings: Values, batches: Batches) -> LocalResults:
        """As ``local``; where forward and backward read what they read when this was called first, they run once."""
        names = {*self.local_inputs, *(state.tensor for state in self.statistics)}
        fixed = {name: value for name, value in {**states, **settings}.items() if name in names}
        read = [fixed, *self.apart, *(batch for turn in batches for batch in turn)]
        if self._kept is None:
            self._kept = read, self.local(PLAIN, states, settings, batches)
        if len(read) == len(self._kept[0]) and all(map(_same, read, self._kept[0])):
            return self.as_varied(variant, self._kept[1])
        return self.local(variant, states, settings, batches)

    def local(self, variant: Variant, states: Values, settings: Values, batches: Batches) -> LocalResults:
        """Losses, gradients and statistics of every batch; micro-steps hand their statistics on."""
        fixed = self._local.hold({**states, **settings})
        held = [dict(self.apart[place]) if self.apart else Values() for place, _ in enumerate(batches[0])]
        names = self.training.losses
        losses, gradients, weights, shown = [], [], [], []
        ids: list[Values] = []
        for turn in batches:
            outputs = self._locals([{**fixed, **own, **batch} for own, batch in zip(held, turn)])
            losses.append([{name: np.asarray(out[name], np.float64) for name in names} for out in outputs])
            weights += [float(np.asarray(out[self.reduction.value]).item()) for out in outputs if self.reduction.value]
            ids += [{name: np.asarray(out[name]) for each in self.lazy for name in each.ids} for out in outputs]
            shown += [{made: np.asarray(out[own]) for made, own in self.training.shared.items()} for out in outputs]
            for own, out in zip(held, outputs):
                own.update({tensor: np.asarray(out[made]) for tensor, made in self.made.items()})
            gradients.append([self.varied(variant, out, r == len(turn) - 1) for r, out in enumerate(outputs)])
        statistics = [{s.tensor: own.get(s.tensor, states[s.tensor]) for s in self.statistics} for own in held]
        weighed = self.reduction.rule is LossRule.WEIGHTED
        pushed = [each for number, each in enumerate(ids) if not weighed or weights[number]]
        touched = {table.parameter: table.touched(pushed) for table in self.lazy}
        return LocalResults(losses, gradients, statistics, weights, shown, touched)

    def varied(self, variant: Variant, made: Values, last: bool) -> Values:
        """Return the gradients among some values, modified by the variant; ``last``: they are of the last data rank."""
        return {
            name: variant.vary(np.asarray(made[name]), name == self.marked and last)
            for name in dict.fromkeys(self.training.gradients.values())
            if name in made
        }

    def as_varied(self, variant: Variant, plain: LocalResults) -> LocalResults:
        """The results of the plain variant, with gradients as ``variant`` has them."""
        return replace(
            plain,
            gradients=[
                [self.varied(variant, values, r == len(turn) - 1) for r, values in enumerate(turn)]
                for turn in plain.gradients
            ],
        )

    def finish(
        self, states: Values, settings: Values, local: LocalResults, means: Values | None = None
    ) -> ReferenceStep:
        """The source's own update of the mean of all gradients, or of ``means``."""
        if means is None:
            means = self.means(local)
        means = means | {name: mean_of([each[name] for each in local.shown]) for name in self.training.shared}
        new = {}
        for state in self.statistics:
            each = [own[state.tensor] for own in local.statistics]
            rule = self.rules.get(state.tensor, self.statistics_rule)
            new[state.tensor] = each[0] if rule == "root" else mean_of(each)
        chosen = {made: new[tensor] for tensor, made in self.training.chosen.items()}
        updated = self._run(self._update, {**states, **settings, **means, **chosen})
        for state in self.training.states:
            if state.kind is not StateKind.STATISTIC or state.tensor in self.training.chosen:
                new[state.tensor] = np.asarray(updated[state.updated])
        new = with_kept_rows(self.lazy, states, new, local.touched)
        return ReferenceStep(new, local, means, {name: np.asarray(updated[name]) for name in self.condition_outputs})

    def means(self, local: LocalResults) -> Values:
        """Return the operand of the update for every gradient: the mean over all batches, or as ``--loss-reduction``
        defines.
        """
        every = [values for turn in local.gradients for values in turn]
        summed = self.reduction.summed_gradients(self.training)
        rules = {name: LossRule.SUM if name in summed else self.reduction.rule for name in every[0]}
        return {
            name: _put_together(rule, [values[name] for values in every], local.weights) for name, rule in rules.items()
        }

    def _locals(self, values: Sequence[Feeds]) -> list[Values]:
        """Run the local part of every data rank: one by one, or together where they share values on the way."""
        if not self.meeting:
            return [self._run(self._local, each) for each in values]
        inputs = self._local.graph.inputs
        feeds = [{name: value for name, value in each.items() if name in inputs} for each in values]
        return run_in_lockstep(self._local, feeds, self.call)

    def _run(self, program: Executor, values: Feeds) -> Values:
        """Run the source, as one rank, on those of the values that it reads."""
        return run_source(program, {name: values[name] for name in program.graph.inputs if name in values}, self.call)


def _same(ours: Values, theirs: Values) -> bool:
    """Return whether values have the same names and bits."""
    return ours.keys() == theirs.keys() and all(
        value is theirs[name] or same_bits(value.ravel(), theirs[name].ravel()) for name, value in ours.items()
    )


def _put_together(rule: LossRule, values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Combine the gradients of all ranks and micro-steps; terms of weight zero are left out. What weighs nothing is
    left out.
    """
    if rule is LossRule.MEAN:
        return mean_of(values)
    if rule is LossRule.SUM:
        weights = [1.0] * len(values)
    with np.errstate(all="ignore"):
        terms = [weight * each.astype(np.float64) for each, weight in zip(values, weights) if weight]
        total = np.sum(terms, axis=0) if terms else np.zeros(values[0].shape)
        over = sum(weights) if rule is LossRule.WEIGHTED else 1.0
        result: np.ndarray = np.asarray(total / (over or 1.0)).astype(values[0].dtype)
    return result


def mean_of(values: Sequence[np.ndarray]) -> np.ndarray:
    """In float64, rounded once."""
    mean: np.ndarray = np.empty(values[0].shape, values[0].dtype)
    with np.errstate(all="ignore"):
        for mine, *each in pieces(mean, *values):
            mine[:] = np.mean([np.asarray(one, np.float64) for one in each], axis=0)
    return mean

"""Computes the expected step: local gradients of every batch by the source, then the source's update of their mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from gopt.analysis.gradient_terms import gradient_terms
from gopt.analysis.loss_reduction import LossReduction, LossRule
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.types import LOW_PRECISION, numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.executor import Executor
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.session import SessionCache
from gopt.verification.compare import Values, floating, same_values
from gopt.verification.conditions import Condition, condition_outputs
from gopt.verification.lazy_tables import LazyTable, with_kept_rows
from gopt.verification.lockstep import run_in_lockstep, with_reduced_statistics, with_shared_means
from gopt.verification.piecewise import pieces
from gopt.verification.reference_graphs import combined, local_graph, metric_graph, update_graph
from gopt.verification.side_by_side import side_by_side
from gopt.verification.source_members import Feeds, Program, SourceMembers, read_by, run_source
from gopt.verification.variants import PLAIN, Variant

KEPT = 1 << 30
"""Bytes of local gradients up to which the results of more than one step are kept, and the ranks' results."""
Batches = Sequence[Sequence[Values]]
"""Inputs by micro-step and by data rank."""
ORDERS = 8
"""Orders of summation that are measured, at most."""


@dataclass(frozen=True, slots=True)
class LocalResults:
    """Results of the batches before any reduction, by micro-step and data rank.

    ``outputs``: losses, and metrics of the forward; ``gradients``: by name, as varied; ``statistics``: the new values
    of each data rank at the end; ``weights`` (``--loss-reduction``) and ``shown`` (values read by the update as a mean)
    of all batches in turn."""

    outputs: list[list[Values]]
    gradients: list[list[Values]]
    statistics: list[Values]
    weights: list[float] = field(default_factory=list)
    shown: list[Values] = field(default_factory=list)
    touched: dict[str, np.ndarray] = field(default_factory=dict)
    """Row ids that were pushed, by table with lazy updates."""
    first_results: Values = field(default_factory=dict)
    """All results of the first batch."""
    read: list[Values] = field(default_factory=list)
    """Values of the last batch of each data rank that metrics of the update read; one empty entry without any."""

    def rounded(self, dtype: str) -> LocalResults:
        """With the mean of the gradients of each data rank's micro-steps rounded to a narrower type."""
        turns, type = self.gradients, numpy_dtype(dtype)
        result = [[dict(values) for values in turn] for turn in turns]
        for rank, values in enumerate(turns[0]):
            for name, value in values.items():
                if value.dtype.itemsize > type.itemsize:
                    mean = mean_of([turn[rank][name] for turn in turns])
                    with np.errstate(all="ignore"):
                        for turn in result:
                            turn[rank][name] = turn[rank][name] + (mean.astype(type).astype(mean.dtype) - mean)
        return replace(self, gradients=result)


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """A step of the source: the new ``states``, the results of the batches, and the values of the update's
    ``conditions``. ``metrics``: the update's metrics, by data rank, or of all."""

    states: Values
    local: LocalResults
    means: Values
    conditions: Values
    metrics: list[Values]

    def shown(self, rank: int) -> Values:
        """The metrics of the update on a data rank."""
        return self.metrics[min(rank, len(self.metrics) - 1)] if self.metrics else {}


class ReferenceProgram:
    """The source cut at its gradients; ``call`` answers the source's own collectives."""

    def __init__(
        self, training: TrainingGraph, mesh: Mesh, cache: SessionCache, conditions: Sequence[Condition] = (),
        reduction: LossReduction = LossReduction(), shared: SynchronisedValues = SynchronisedValues(),
        statistics: str = "mean", reductions: Sequence[StatisticReduction] = (), lazy: Sequence[LazyTable] = (),
    ) -> None:  # fmt: skip
        """``statistics``: the ranks' rule for new statistics: the ``mean``, or the value of the ``root``;
        ``reductions``: of single statistics.

        ``lazy``: tables with unchanged rows unless pushed."""
        self.training = training
        self.reduction = reduction
        self.shared = shared
        self.statistics_rule, self.lazy = statistics, lazy
        self.rules = {reduction.tensor: reduction.rule for reduction in reductions if not reduction.points}
        met = [reduction for reduction in reductions if reduction.points]
        self.rules |= dict.fromkeys((reduction.tensor for reduction in met), "root")  # the same on all ranks
        self.meeting = bool(met) or shared != SynchronisedValues()
        self.call = SourceMembers(mesh)
        self.mesh, self.cache = mesh, cache
        self.gradients = set(training.gradients.values())
        self.apart: Sequence[Values] = ()
        """For each batch, the values of statistics that its ranks hold apart; none: as in the states."""
        self.pulled: Mapping[str, str] = {}
        """State -> the halves in which trainers have the state, by the wire alone."""
        self._kept: list[tuple[list[Values], LocalResults]] = []
        self.marked = next(iter(training.gradients.values()))
        """The gradient that an infinity is put into."""
        self.terms = gradient_terms(training)
        """Term of a gradient in the source -> the gradient: ranks may sum each term over micro-batches first."""
        self.statistics = [state for state in training.states if state.kind is StateKind.STATISTIC]
        self.made = {s.tensor: training.chosen.get(s.tensor, s.updated) for s in self.statistics}
        """Statistic -> what a rank makes of it, which a condition of the update may leave out."""
        self.condition_outputs = condition_outputs(update_graph(training), conditions)
        self.outputs = (*training.losses, *training.forward_metrics)
        """Losses and metrics of a batch."""
        metrics = metric_graph(training)
        self._metrics: Program | None = None if metrics is None else Executor(metrics, cache)
        known = {*combined(training), *training.hyper, *(state.tensor for state in training.states)}
        self._read = [] if metrics is None else [name for name in metrics.inputs if name not in known]
        """The values of forward and backward, and the batch, that metrics of the update read."""
        more = [*self.outputs, *(name for name in self._read if name not in training.batch)]
        more += [name for table in lazy for name in table.ids]
        local = inlined(local_graph(training, reduction.value, more))  # before calls are put in
        if shared != SynchronisedValues():
            local = with_shared_means(local, shared)
        if met:
            local = with_reduced_statistics(local, met, self.made, mesh.data_ranks)
        self._local: Program = Executor(local, cache)
        self._update: Program = Executor(update_graph(training, self.condition_outputs), cache)

    def combined_by(self, reduction: LossReduction) -> ReferenceProgram:
        """The same source with gradients combined by another rule."""
        other = ReferenceProgram(self.training, self.mesh, self.cache, (), reduction, self.shared)
        other.pulled = self.pulled
        return other

    @property
    def local_inputs(self) -> Collection[str]:
        """Names of the values read by forward and backward."""
        return self._local.graph.inputs

    def refuse_inputs(self, drawn: Iterable[str]) -> None:
        """Raise UnsupportedError for random numbers in the update: ranks could not agree on them."""
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
        self._kept.clear()

    def keeps(self, steps: int, parts: int) -> bool:
        """Return whether the gradients of so many steps on so many batches take at most KEPT bytes."""
        types = self.training.graph.types
        return sum(types[name].nbytes for name in self.training.gradients) * steps * parts <= KEPT

    def kept(
        self, variant: Variant, states: Values, settings: Values, batches: Batches, again: bool = False
    ) -> LocalResults:  # fmt: skip
        """As ``local``; for the same operands as in the first call, or in one whose results are asked for ``again``,
        forward and backward run once."""
        names = {*self.local_inputs, *(state.tensor for state in self.statistics)}
        fixed = {name: value for name, value in {**states, **settings}.items() if name in names}
        read = [fixed, *self.apart, *(batch for turn in batches for batch in turn)]
        for known, results in self._kept:
            if len(read) == len(known) and all(map(same_values, read, known)):
                return self.as_varied(variant, results)
        if self._kept and not (again and self.keeps(len(self._kept) + 1, len(batches) * len(batches[0]))):
            return self.local(variant, states, settings, batches)
        self._kept.append((read, self.local(PLAIN, states, settings, batches)))
        return self.as_varied(variant, self._kept[-1][1])

    def known(self, point: Values) -> Values | None:
        """All results up to the gradients at a point, if it was the first batch of kept results."""
        read = {name: value for name, value in point.items() if name in self.local_inputs}
        for (fixed, *batches), results in self._kept if not (self.meeting or self.pulled) else ():
            point_read = dict(fixed)
            for values in reversed(batches):  # statistics of ranks, then batches: the first of each is read
                point_read |= values
            if same_values(read, {name: value for name, value in point_read.items() if name in read}):
                return results.first_results
        return None

    def local(self, variant: Variant, states: Values, settings: Values, batches: Batches) -> LocalResults:
        """Losses, gradients and statistics of every batch; micro-steps hand statistics on."""
        with np.errstate(over="ignore"):
            narrow = {name: states[name].astype(numpy_dtype(dtype)) for name, dtype in self.pulled.items()}
        sent = {name: value.astype(states[name].dtype) for name, value in narrow.items()}
        fixed = self._local.hold({**states, **sent, **settings})
        current = [dict(self.apart[index]) if self.apart else Values() for index, _ in enumerate(batches[0])]
        made, gradients, weights, shown = [], [], [], []
        ids: list[Values] = []
        first_results: Values = {}
        for turn in batches:
            outputs = self._locals([{**fixed, **statistics, **batch} for statistics, batch in zip(current, turn)])
            first_results = first_results or outputs[0]
            made.append([{name: as_shown(out[name]) for name in self.outputs} for out in outputs])
            weights += [float(np.asarray(out[self.reduction.value]).item()) for out in outputs if self.reduction.value]
            ids += [{name: np.asarray(out[name]) for table in self.lazy for name in table.ids} for out in outputs]
            shown += [
                {shared: np.asarray(out[local]) for shared, local in self.training.shared.items()} for out in outputs
            ]
            for newest, out in zip(current, outputs):
                newest.update({tensor: np.asarray(out[output]) for tensor, output in self.made.items()})
            gradients.append([self.varied(variant, out, r == len(turn) - 1) for r, out in enumerate(outputs)])
        statistics = [
            {s.tensor: statistics.get(s.tensor, states[s.tensor]) for s in self.statistics} for statistics in current
        ]
        weighed = self.reduction.rule is LossRule.WEIGHTED
        pushed = [pushes for number, pushes in enumerate(ids) if not weighed or weights[number]]
        touched = {table.parameter: table.touched(pushed) for table in self.lazy}
        read = [
            {name: np.asarray(out[name] if name in out else batch[name]) for name in self._read}
            for batch, out in zip(batches[-1], outputs)
        ]
        return LocalResults(
            made, gradients, statistics, weights, shown, touched, first_results, read if self._read else [{}]
        )

    def varied(self, variant: Variant, values: Values, last: bool) -> Values:
        """Return the gradients among some values, modified by the variant; ``last``: of the last data rank."""
        return {
            name: variant.vary(np.asarray(values[name]), name == self.marked and last)
            for name in dict.fromkeys(self.training.gradients.values())
            if name in values
        }

    def as_varied(self, variant: Variant, plain: LocalResults) -> LocalResults:
        """The results of the plain variant, with gradients changed by ``variant``."""
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
        means = means | {name: mean_of([shown[name] for shown in local.shown]) for name in self.training.shared}
        new = {}
        for state in self.statistics:
            new_values = [statistic[state.tensor] for statistic in local.statistics]
            rule = self.rules.get(state.tensor, self.statistics_rule)
            new[state.tensor] = new_values[0] if rule == "root" else mean_of(new_values)
        chosen = {output: new[tensor] for tensor, output in self.training.chosen.items()}
        fed = {**states, **settings, **means, **chosen}
        updated = run_source(self._update, fed, self.call)
        for state in self.training.states:
            if state.kind is not StateKind.STATISTIC or state.tensor in self.training.chosen:
                new[state.tensor] = np.asarray(updated[state.updated])
        new = with_kept_rows(self.lazy, states, new, local.touched)
        metrics = [] if self._metrics is None else [
            {name: as_shown(value) for name, value in run_source(self._metrics, fed | read, self.call).items()}
            for read in local.read
        ]  # fmt: skip
        conditions = {name: np.asarray(updated[name]) for name in self.condition_outputs}
        return ReferenceStep(new, local, means, conditions, metrics)

    def means(self, local: LocalResults) -> Values:
        """Return the operand of the update for every gradient: the mean over all batches, or as ``--loss-reduction``
        defines.
        """
        return {name: _put_together(*terms, local.weights) for name, terms in self._terms(local).items()}

    def by(self, compiled: Callable[[Program], Program]) -> ReferenceProgram:
        """The same source, computed by other programs."""
        other = copy(self)
        other._kept = []
        other._local, other._update = compiled(self._local), compiled(self._update)
        other._metrics = self._metrics and compiled(self._metrics)
        return other

    def rounding(self, local: LocalResults, wire: float = 0.0) -> Values:
        """Return how far each element of ``means`` moves at most where it is summed in its own type, as ranks do, from
        one batch or another on; halves are left out. ``wire``: the unit of a narrower type on the way."""
        moved = {}
        for name, (rule, values) in self._terms(local).items():
            if values[0].dtype.name in LOW_PRECISION:
                continue
            exact, count = _put_together(rule, values, local.weights), len(values)
            shares = _put_together(rule, [*np.eye(count)], local.weights)
            with np.errstate(all="ignore"):
                terms = [(share * value).astype(value.dtype) for share, value in zip(shares, values)]
                sums = (sum(terms[k:] + terms[:k], np.zeros_like(exact)) for k in range(0, count, -(-count // ORDERS)))
                unit = max(float(np.finfo(exact.dtype).eps), wire) * np.mean(np.abs(values), axis=0)
                most = np.max([unit, *(np.abs(total - exact) for total in sums)], axis=0)
            moved[name] = np.where(np.isfinite(most), most, 0)
        return moved

    def _terms(self, local: LocalResults) -> dict[str, tuple[LossRule, list[np.ndarray]]]:
        """Return the rule for every gradient, and the gradients of all batches."""
        every = [values for turn in local.gradients for values in turn]
        summed = self.reduction.summed_gradients(self.training)
        return {
            name: (LossRule.SUM if name in summed else self.reduction.rule, [values[name] for values in every])
            for name in every[0]
        }

    def _locals(self, values: Sequence[Feeds]) -> list[Values]:
        """Run the local part of every data rank: each by itself, or together for values shared on the way."""
        if not self.meeting:
            return side_by_side(lambda value: run_source(self._local, value, self.call), values)
        return run_in_lockstep(self._local, [read_by(self._local, value) for value in values], self.call)


def _put_together(rule: LossRule, values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Combine the gradients of all ranks and micro-steps; terms of weight zero are left out."""
    if rule is LossRule.MEAN:
        return mean_of(values)
    if rule is LossRule.SUM:
        weights = [1.0] * len(values)
    with np.errstate(all="ignore"):
        terms = [weight * value.astype(np.float64) for value, weight in zip(values, weights) if weight]
        total = np.sum(terms, axis=0) if terms else np.zeros(values[0].shape)
        over = sum(weights) if rule is LossRule.WEIGHTED else 1.0
        result: np.ndarray = np.asarray(total / (over or 1.0)).astype(values[0].dtype)
    return result


def as_shown(value: np.ndarray) -> np.ndarray:
    """A loss or metric in a type in which two have a distance: counts and flags in float64."""
    array = np.asarray(value)
    return array if floating(array) else array.astype(np.float64)


def mean_of(values: Sequence[np.ndarray]) -> np.ndarray:
    """In float64, rounded once."""
    mean: np.ndarray = np.empty(values[0].shape, values[0].dtype)
    with np.errstate(all="ignore"):
        for mine, *arrays in pieces(mean, *values):
            total = np.array(arrays[0], np.float64)
            for one in arrays[1:]:
                total += np.asarray(one, np.float64)
            mine[:] = total / len(arrays)
    return mean

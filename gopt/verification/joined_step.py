"""One step of the source on the batches of all ranks, joined, beside the step that the ranks make of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf

import numpy as np

from gopt import limits
from gopt.analysis.coupling import Coupling, CouplingKind, couplings_as_run, notes
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.training import State
from gopt.errors import GoptError, RunError
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.runtime.executor import Executor
from gopt.verification.compare import Values, allowance, distance, finite, floating
from gopt.verification.joined_graph import ASKED, JoinedGraph, NotComparableError
from gopt.verification.large_batch import LargeBatch, LargeBatchCheck, StateDistance
from gopt.verification.reference_step import Batches, ReferenceProgram, ReferenceStep
from gopt.verification.sensitivity import MULTIPLE, Measurement, norm
from gopt.verification.source_members import run_source

ROOM = 1e-3
"""Of a state's change, at least: sums over all samples round otherwise than sums of sums."""

WAYS = 24
"""Ways to take constants for numbers of samples that are tried."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The first step of the ranks' batches by the source, made when it is asked for, and how far rounding moves it.
    ``noise``: states that are nothing else."""

    step: Callable[[], ReferenceStep]
    moved: Measurement
    noise: Collection[str]


def check_large_batch(
    reference: ReferenceProgram, made: MeasuredStep, states: Values, settings: Values, batches: Batches,
    tolerance: float, statistics: Iterable[StatisticReduction],
) -> LargeBatchCheck:  # fmt: skip
    """Compare the step that ranks make of ``batches`` with the source's step of these joined; ``statistics``: how
    ranks combine them."""
    try:
        return _Joined(reference, made, states, settings, batches, tolerance, list(statistics)).check()
    except NotComparableError as error:
        return _not(str(error))
    except RunError:
        return _not(
            "the source does not run on the batches of all ranks at once: it holds the size of one rank's batch"
        )
    except GoptError as error:
        return _not(error.message)


@dataclass(slots=True)
class _Joined:
    reference: ReferenceProgram
    made: MeasuredStep
    states: Values
    settings: Values
    batches: Batches
    tolerance: float
    statistics: Sequence[StatisticReduction]

    def check(self) -> LargeBatchCheck:
        training = self.reference.training
        every = [values for turn in self.batches for values in turn]
        updated = {state.tensor: state.updated for state in training.states if self._meant(state)}
        if len(self.batches) > 1 and self.reference.statistics:
            return _not(f"{self.reference.statistics[0].tensor!r} moves in each micro-step")
        if not updated:
            return _not("no state is meant to follow all samples")
        size = len(every) * sum(type.nbytes for type in training.graph.types.values())
        if size > limits.LARGE_BATCH_BYTES:
            return _not(f"its values take {size} bytes; {limits.hint('LARGE_BATCH_BYTES', size)}")
        joined = JoinedGraph(training, len(every), list(updated.values()))
        feeds = {**self.states, **self.settings, **joined.joined(every)}
        found = couplings_as_run(
            self.reference.training, self.reference.reduction, self.reference.shared, self.statistics
        )
        told = self._told_of(found)
        apart, taken = self._nearest(joined, feeds, updated, {each.kind for each in found}, told)
        if lost := next((each.name for each in apart if isinf(each.error)), None):
            raise NotComparableError(f"{lost!r} is not finite")
        if not apart:
            return LargeBatchCheck(LargeBatch.EQUAL, len(updated), taken=taken)
        apart = tuple(replace(each, noted=updated[each.name] in told) for each in apart)
        open_ = [updated[each.name] for each in apart if not each.noted]
        if open_ and joined.context.batch < 2:
            return _not("a batch of one sample does not tell a constant from their number")
        if open_ and (own := joined.dividers(open_)):
            return _not(f"the constant {next(iter(own[0].written))!r} may be a number of samples, or one over it")
        if open_ and (unsettled := joined.unsettled(open_)):
            return _not(f"{unsettled} may be a number of samples")
        return LargeBatchCheck(LargeBatch.DIFFERENT, len(updated), apart=apart, notes=tuple(notes(found)), taken=taken)

    def _meant(self, state: State) -> bool:
        """Return whether ranks are meant to have a state of the large batch, and rounding is not all of it."""
        apart = {each.tensor for each in self.statistics if each.rule in ("root", "local")}
        return state.tensor not in apart and state.tensor not in self.made.noise

    def _told_of(self, found: Sequence[Coupling]) -> set[str]:
        """The values that depend on what a note tells of; what is told of gradients is told of all of them."""
        training, values = self.reference.training, {each.value for each in found}
        gradients = {*training.gradients.values()}
        if not values.isdisjoint(gradients | {*training.losses}):
            values |= gradients
        return values | descendants(GraphIndex(training.graph), values)

    def _nearest(
        self, joined: JoinedGraph, feeds: Values, updated: Mapping[str, str], kinds: Collection[CouplingKind],
        told: set[str],
    ) -> tuple[tuple[StateDistance, ...], tuple[str, ...]]:  # fmt: skip
        """The states that differ, with the constants that are taken for numbers of samples; of several ways to take
        them, the one with fewest such states: of two, where notes tell of all of these. ``kinds``: of what a note
        tells."""
        asked = [] if CouplingKind.SUMMED in kinds else joined.dividers(updated.values())
        program = Executor(joined.asking(name for each in asked for name in each.written), self.reference.cache)
        tried: dict[frozenset[int], tuple[StateDistance, ...]] = {}

        def distances(way: frozenset[int]) -> tuple[int, float]:
            """Of a way to take constants: those of the places in it for numbers of samples."""
            constants = [each.larger if place in way else each.written for place, each in enumerate(asked)]
            more = {f"{name}{ASKED}": value for each in constants for name, value in each.items()}
            tried[way] = self._apart(program, feeds | more, updated)
            return len(tried[way]), sum(each.error for each in tried[way])

        best = frozenset(range(len(asked)))
        least = distances(best)
        others = [] if CouplingKind.REDUCTION in kinds or not asked else [frozenset[int]()]
        while others and tried[best] and len(tried) < WAYS:
            way = others.pop(0)
            found = distances(way)
            if found < least:
                best, least = way, found
            noted = told.issuperset(updated[each.name] for each in tried[best])
            if not others and not noted:  # those in which one constant of the best is taken otherwise
                others = [near for each in range(len(asked)) if (near := best ^ {each}) not in tried]
        return tried[best], tuple(name for place in sorted(best) for name in asked[place].written)

    def _apart(self, program: Executor, feeds: Values, updated: Mapping[str, str]) -> tuple[StateDistance, ...]:
        """The states that differ by more than rounding, the furthest first."""
        given = {name: feeds[name] for name in program.graph.inputs if name in feeds}
        made = run_source(program, given, self.reference.call)
        kinds = {state.tensor: state.kind.value for state in self.reference.training.states}
        found = []
        for name, output in updated.items():
            value, own, before = np.asarray(made[output]), self.made.step().states[name], self.states[name]
            if value.shape != own.shape:
                raise NotComparableError(f"{name!r} has another shape with more samples")
            if not finite(own):
                raise NotComparableError(f"{name!r} is not finite")
            off = distance(own, value) if finite(value) else inf
            room = allowance(value, before, max(self.tolerance, ROOM)) if floating(value) else 0.0
            if (
                off > room and off > room + MULTIPLE * self.made.moved.measured().states[name]
            ):  # it is measured where it counts
                moved = np.asarray(value, np.float64) - np.asarray(before, np.float64)
                found.append(StateDistance(name, kinds[name], off if isinf(off) else off / (norm(moved) or 1.0)))
        return tuple(sorted(found, key=lambda each: -each.error))


def _not(why: str) -> LargeBatchCheck:
    return LargeBatchCheck(LargeBatch.NOT_COMPARABLE, why=why)

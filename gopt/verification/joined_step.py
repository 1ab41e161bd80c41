"""One step of the source on the joined batches of all ranks, beside the ranks' step on these batches."""

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
    """The source's first step of the ranks' batches, made on request, and the movement by rounding. ``noise``: states
    of rounding alone."""

    step: Callable[[], ReferenceStep]
    moved: Measurement
    noise: Collection[str]


def check_large_batch(
    reference: ReferenceProgram, measured: MeasuredStep, states: Values, settings: Values, batches: Batches,
    tolerance: float, statistics: Iterable[StatisticReduction],
) -> LargeBatchCheck:  # fmt: skip
    """Compare the ranks' step on ``batches`` with the source's step on the joined batches; ``statistics``: the ranks'
    rules of combining."""
    try:
        return _Joined(reference, measured, states, settings, batches, tolerance, list(statistics)).check()
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
    measured: MeasuredStep
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
        couplings = couplings_as_run(
            self.reference.training, self.reference.reduction, self.reference.shared, self.statistics
        )
        noted = self._told_of(couplings)
        apart, constants = self._nearest(joined, feeds, updated, {coupling.kind for coupling in couplings}, noted)
        if lost := next((state.name for state in apart if isinf(state.error)), None):
            raise NotComparableError(f"{lost!r} is not finite")
        if not apart:
            told = tuple(notes(couplings))
            return LargeBatchCheck(LargeBatch.EQUAL, len(updated), notes=told, taken=constants)
        apart = tuple(replace(state, noted=updated[state.name] in noted) for state in apart)
        open_ = [updated[state.name] for state in apart if not state.noted]
        if open_ and 1 <= joined.context.batch <= 2:  # over two samples the two of a square leaves no constant
            return _not("a batch of one or two samples does not tell a constant from their number")
        if open_ and (dividers := joined.dividers(open_)):
            return _not(f"the constant {next(iter(dividers[0].written))!r} may be a number of samples, or one over it")
        if open_ and (unsettled := joined.unsettled(open_)):
            return _not(f"{unsettled} may be a number of samples")
        return LargeBatchCheck(
            LargeBatch.DIFFERENT, len(updated), apart=apart, notes=tuple(notes(couplings)), taken=constants
        )

    def _meant(self, state: State) -> bool:
        """Return whether ranks should have a state of the large batch, and rounding is not all of it."""
        apart = {statistic.tensor for statistic in self.statistics if statistic.rule in ("root", "local")}
        return state.tensor not in apart and state.tensor not in self.measured.noise

    def _told_of(self, couplings: Sequence[Coupling]) -> set[str]:
        """The values that depend on a note's subject, or on a result beside it; a note on gradients covers all
        gradients."""
        training, values = self.reference.training, {coupling.value for coupling in couplings}
        values.update(*(node.outputs for node in training.graph.nodes if not values.isdisjoint(node.outputs)))
        gradients = {*training.gradients.values()}
        if not values.isdisjoint(gradients | {*training.losses}):
            values |= gradients
        return values | descendants(GraphIndex(training.graph), values)

    def _nearest(
        self, joined: JoinedGraph, feeds: Values, updated: Mapping[str, str], kinds: Collection[CouplingKind],
        excused: set[str],
    ) -> tuple[tuple[StateDistance, ...], tuple[str, ...]]:  # fmt: skip
        """The states that differ, with the constants taken for numbers of samples; of several choices, the one with
        fewest such states: of two, where notes cover all of these. ``kinds``: the subjects of notes."""
        dividers = [] if CouplingKind.SUMMED in kinds else joined.dividers(updated.values())
        program = Executor(
            joined.asking(name for divider in dividers for name in divider.written), self.reference.cache
        )
        tried: dict[frozenset[int], tuple[StateDistance, ...]] = {}

        def distances(way: frozenset[int]) -> tuple[int, float]:
            """The distances for a choice of constants: those at the chosen places count samples."""
            constants = [divider.larger if index in way else divider.written for index, divider in enumerate(dividers)]
            more = {f"{name}{ASKED}": value for constant in constants for name, value in constant.items()}
            tried[way] = self._apart(program, feeds | more, updated)
            return len(tried[way]), sum(state.error for state in tried[way])

        best = frozenset(range(len(dividers)))
        least = distances(best)
        ways = [] if CouplingKind.REDUCTION in kinds or not dividers else [frozenset[int]()]
        while ways and tried[best] and len(tried) < WAYS:
            way = ways.pop(0)
            total = distances(way)
            if total < least:
                best, least = way, total
            noted = excused.issuperset(updated[state.name] for state in tried[best])
            if not ways and not noted:  # those in which one constant of the best is taken otherwise
                ways = [near for index in range(len(dividers)) if (near := best ^ {index}) not in tried]
        return tried[best], tuple(name for index in sorted(best) for name in dividers[index].written)

    def _apart(self, program: Executor, feeds: Values, updated: Mapping[str, str]) -> tuple[StateDistance, ...]:
        """The states that differ by more than rounding, the furthest first."""
        outputs = run_source(program, feeds, self.reference.call)
        kinds = {state.tensor: state.kind.value for state in self.reference.training.states}
        distances = []
        for name, output in updated.items():
            value, expected, before = np.asarray(outputs[output]), self.measured.step().states[name], self.states[name]
            if value.shape != expected.shape:
                raise NotComparableError(f"{name!r} has another shape with more samples")
            if not finite(expected):
                raise NotComparableError(f"{name!r} is not finite")
            off = distance(expected, value) if finite(value) else inf
            room = allowance(value, before, max(self.tolerance, ROOM)) if floating(value) else 0.0
            if (
                off > room and off > room + MULTIPLE * self.measured.moved.measured().states[name]
            ):  # it is measured where it counts
                moved = np.asarray(value, np.float64) - np.asarray(before, np.float64)
                distances.append(StateDistance(name, kinds[name], off if isinf(off) else off / (norm(moved) or 1.0)))
        return tuple(sorted(distances, key=lambda state: -state.error))


def _not(why: str) -> LargeBatchCheck:
    return LargeBatchCheck(LargeBatch.NOT_COMPARABLE, why=why)

"""Start values for the other outcome of a schedule's conditions: counters beyond thresholds, flags."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache
from gopt.text.sanitize import and_more
from gopt.verification.compare import Values
from gopt.verification.conditions import Coverage
from gopt.verification.reference_graphs import refuse_call, subgraph

MOST_STARTS = 8
"""Most additional repetitions for conditions."""


@dataclass(frozen=True, slots=True)
class StartOverride:
    """States or hyper-parameters of one kind with another start, all at one number."""

    values: Values

    def __str__(self) -> str:
        name, value = next(iter(self.values.items()))
        number = value.reshape(-1)[0]
        return f"{name}{and_more(len(self.values) - 1)} = {number if value.dtype == bool else f'{float(number):g}'}"


class ScheduledPart:
    """The part of a step on counters, flags and hyper-parameters alone."""

    def __init__(self, training: TrainingGraph, coverage: Coverage, cache: SessionCache) -> None:
        self.types, self.coverage = training.graph.types, coverage
        self.conditions = [condition for condition in coverage.conditions if condition.scheduled]
        index = GraphIndex(training.graph)
        moved = descendants(index, training.batch)
        leaves = {name for condition in self.conditions for name in condition.leaves}
        self.follows = {s.tensor: s.updated for s in training.states if s.tensor in leaves and s.updated not in moved}
        outputs = [name for condition in self.conditions for name in (condition.output, condition.operand)]
        wanted = [name for name in dict.fromkeys([*outputs, *self.follows.values()]) if name in index.producers]
        self.graph = subgraph(training.graph, training.graph.nodes, wanted, ())
        self.program = Executor(self.graph, cache) if wanted else None

    def starts(self, states: Values, settings: Values, steps: int, fixed: Collection[str]) -> list[StartOverride]:
        """Other starts with outcomes missing in ``steps`` steps from these states; ``fixed`` stay unchanged."""
        if not self.conditions:
            return []
        values = {**states, **settings}
        for _ in range(steps):
            computed = self._run(values)
            self.coverage.record({**values, **computed})
            values |= {name: computed[new] for name, new in self.follows.items() if new in computed}
        starts: list[StartOverride] = []
        for start in self._candidates(fixed):
            if len(starts) < MOST_STARTS and self.coverage.one_sided(scheduled=True):
                feeds = {**states, **settings, **start.values}
                if self.coverage.record({**feeds, **self._run(feeds)}):
                    starts.append(start)
        return starts

    def _run(self, values: Values) -> Values:
        if self.program is None:  # flags that are inputs themselves
            return {}
        return self.program.run({name: values[name] for name in self.graph.inputs if name in values}, refuse_call)

    def _candidates(self, fixed: Collection[str]) -> Iterator[StartOverride]:
        """Values that may change the outcome of conditions, thresholds first. Leaves with the same thresholds, such as
        a counter for every parameter, move together."""
        numbers: dict[str, set[float]] = {}
        for condition in self.conditions:
            for leaf in condition.leaves:
                numbers.setdefault(leaf, set()).update(condition.constants)
        alike: dict[tuple[str, tuple[float, ...]], list[str]] = {}
        for leaf, constants in numbers.items():
            if leaf not in fixed:
                alike.setdefault((self.types[leaf].dtype, tuple(sorted(constants))), []).append(leaf)
        for (dtype, thresholds), leaves in alike.items():
            for value in _tries(dtype, thresholds):
                yield StartOverride(
                    {leaf: np.full(self.types[leaf].dims, value, numpy_dtype(dtype)) for leaf in leaves}
                )


def _tries(dtype: str, constants: Sequence[float]) -> list[float]:
    """Numbers around the constants, not below zero."""
    if dtype == "bool":
        return [0.0, 1.0]
    around = [
        candidate for number in dict.fromkeys(constants) for candidate in (number, number - 1, number + 1, 2 * number)
    ]
    if dtype in FLOATS:
        around += [number / 2 for number in constants]
    else:
        around = [float(np.floor(number)) for number in around]
    most = 3e4 if dtype in FLOATS else min(float(np.iinfo(numpy_dtype(dtype)).max), 2.0**53)
    return [number for number in dict.fromkeys([*around, 0.0, 1.0, 2.0, 3.0]) if 0 <= number <= most]

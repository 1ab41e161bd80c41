"""Start values at which the gates of a schedule stand the other way: counters on both sides of a threshold, flags."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.analysis.sweeps import Index
from gopt.analysis.training import Training
from gopt.errors import RunError
from gopt.graph.model import Graph
from gopt.graph.types import FLOATS, TensorType, numpy_dtype
from gopt.runtime.program import Program
from gopt.runtime.proof.compare import Values
from gopt.runtime.proof.gates import Coverage
from gopt.runtime.proof.reference import no_call, part_of
from gopt.runtime.session import SessionCache

MOST_STARTS = 8
"""Repetitions that gates may cost beside the others."""


@dataclass(frozen=True, slots=True)
class Start:
    """A state or hyper-parameter that begins elsewhere."""

    name: str
    value: np.ndarray

    def __str__(self) -> str:
        return f"{self.name} = {self.value.reshape(-1)[0]}"


class Schedule:
    """The part of a step that follows counters, flags and hyper-parameters alone."""

    def __init__(self, training: Training, coverage: Coverage, cache: SessionCache) -> None:
        self.training, self.coverage = training, coverage
        self.gates = [gate for gate in coverage.gates if gate.scheduled]
        names = [name for gate in self.gates for name in (gate.output, gate.operand) if name]
        made = Index(training.graph).producer
        leaves = {name for gate in self.gates for name in gate.leaves}
        graph = _part(training, [name for name in dict.fromkeys(names) if name in made])
        self.follows = {s.tensor: s.updated for s in training.states if s.tensor in leaves and s.updated in graph.types}
        follows = _part(training, list(self.follows.values()))
        scalar = all(type.elements == 1 for type in follows.inputs.values())
        wanted = [*graph.outputs, *(self.follows.values() if scalar else ())]
        self.graph = _part(training, list(dict.fromkeys(wanted)))
        self.program = Program(self.graph, cache) if wanted else None

    def starts(self, states: Values, settings: Values, steps: int, fixed: Collection[str]) -> list[Start]:
        """Other starts that show what ``steps`` steps from these states do not; ``fixed`` stay as they are."""
        if not self.gates:
            return []
        values = {**states, **settings}
        for _ in range(steps):
            made = self._look(values)
            values |= {name: made[new] for name, new in self.follows.items() if new in made}
        found: list[Start] = []
        for start in self._candidates(values | states, fixed):
            if len(found) < MOST_STARTS and self.coverage.one_sided(scheduled=True):
                shown = len(found)
                try:
                    if self._news({**states, **settings, start.name: start.value}):
                        found.append(start)
                except RunError:
                    del found[shown:]
        return found

    def _news(self, values: Values) -> bool:
        return self.coverage.look({**values, **self._run(values)})

    def _look(self, values: Values) -> Values:
        made = self._run(values)
        self.coverage.look({**values, **made})
        return made

    def _run(self, values: Values) -> Values:
        if self.program is None:  # flags that are inputs themselves
            return {}
        return self.program.run({name: values[name] for name in self.graph.inputs if name in values}, no_call)

    def _candidates(self, values: Values, fixed: Collection[str]) -> Iterator[Start]:
        """Values of each leaf that may turn one of its gates, thresholds first."""
        numbers: dict[str, list[float]] = {}
        for gate in self.gates:
            for leaf in gate.leaves:
                numbers.setdefault(leaf, []).extend(gate.constants)
        for leaf, constants in numbers.items():
            if leaf not in fixed:
                type = self.training.graph.types[leaf]
                for value in _tries(type, constants):
                    yield Start(leaf, np.full(type.dims, value, numpy_dtype(type.dtype)))


def _part(training: Training, wanted: Sequence[str]) -> Graph:
    return part_of(training.graph, training.graph.nodes, wanted, ())


def _tries(type: TensorType, constants: Sequence[float]) -> list[float]:
    """Numbers around the constants, none below zero."""
    if type.dtype == "bool":
        return [0.0, 1.0]
    around = [each for number in dict.fromkeys(constants) for each in (number, number - 1, number + 1, 2 * number)]
    if type.dtype in FLOATS:
        around += [number / 2 for number in constants]
    else:
        around = [float(np.floor(each)) for each in around]
    most = 3e4 if type.dtype in FLOATS else min(float(np.iinfo(numpy_dtype(type.dtype)).max), 2.0**53)
    return [each for each in dict.fromkeys([*around, 0.0, 1.0, 2.0, 3.0]) if 0 <= each <= most]

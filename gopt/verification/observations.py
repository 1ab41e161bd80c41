"""Records the observations of a verification: states that changed, gradients that differ between ranks, outcomes.

Two equal zeros prove nothing, and a gradient that is equal on all ranks cannot reveal a missing reduction."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.verification.compare import Values, floating
from gopt.verification.conditions import Coverage
from gopt.verification.reference_step import LocalResults, ReferenceStep
from gopt.verification.result import Verification
from gopt.verification.sensitivity import apart, norm


@dataclass(slots=True)
class Observations:
    """``tolerance``: gradients closer than this count as equal; ``parts``: the number of ranks with different data;
    ``shared``: values that ranks have as a mean already: values that follow the batch through these alone are equal."""

    training: TrainingGraph
    coverage: Coverage
    tolerance: float
    parts: int
    shared: frozenset[str] = frozenset()
    changed: set[str] = field(default_factory=set)
    alive: set[str] = field(default_factory=set)
    """Gradients that were not zero."""
    apart: set[str] = field(default_factory=set)
    """Gradients that were not the same on all ranks."""
    numbers: set[str] = field(default_factory=set)
    """Metrics that were numbers in the source."""

    def enter(self, before: Values, step: ReferenceStep, settings: Values) -> None:
        """Take in one step of the reference."""
        for name, new in step.states.items():
            if name not in self.changed and _moved(new, before[name]):
                self.changed.add(name)
        self._gradients(step.local)
        for outputs in (*step.metrics, *(outputs for turn in step.local.outputs for outputs in turn)):
            self.numbers.update(name for name, value in outputs.items() if not np.isnan(value).any())
        self.coverage.record({**before, **settings, **step.means, **step.conditions})

    def _gradients(self, local: LocalResults) -> None:
        every = [values for turn in local.gradients for values in turn]
        for name in every[0]:
            sizes = max(norm(values[name]) for values in every)
            if sizes > 0:
                self.alive.add(name)
            if self.parts > 1 and name not in self.apart and sizes > 0:
                for turn in local.gradients:
                    if any(apart(values[name], turn[0][name]) > self.tolerance * sizes for values in turn[1:]):
                        self.apart.add(name)

    def doubt(self, result: Verification) -> None:
        """Add a doubt for each expected event without an observation; states of noise need not change."""
        followers = self._own()
        for parameter, gradient in self.training.gradients.items():
            if gradient not in self.alive:
                result.doubt(parameter, f"its gradient {gradient} was zero in every step: zero against zero")
            elif self.parts > 1 and gradient in followers and gradient not in self.apart:
                result.doubt(
                    parameter, f"its gradient {gradient} was the same on every rank's batch: no reduction is seen"
                )
        for name in self.still(result):
            result.doubt(name, "it never changed: zero against zero")
        for name in self.training.metrics:
            if name not in self.numbers:
                result.doubt(name, "no number in the source in any step: nothing can be compared with it")

    def still(self, result: Verification) -> list[str]:
        """States that should follow the batch, and never changed."""
        open_ = [
            state
            for state in self.training.states
            if state.tensor not in self.changed
            and state.kind is not StateKind.SCALAR
            and state.tensor not in result.noise
        ]
        if not open_:
            return []
        follows = descendants(
            GraphIndex(self.training.graph), [*self.training.batch, *self.training.gradients.values()]
        )
        return [state.tensor for state in open_ if state.updated in follows]

    def _own(self) -> set[str]:
        """Values that follow a rank's own batch, and not only values shared by ranks."""
        tainted = set(self.training.batch)
        for node in self.training.graph.nodes:
            if not tainted.isdisjoint(node.reads):
                tainted.update(name for name in node.outputs if name not in self.shared)
        return tainted


def _moved(new: np.ndarray, old: np.ndarray) -> bool:
    """Return whether a finite element changed."""
    if not floating(new):
        return not np.array_equal(new, old)
    difference = np.asarray(new, np.float64) - np.asarray(old, np.float64)
    return bool((np.isfinite(difference) & (difference != 0)).any())

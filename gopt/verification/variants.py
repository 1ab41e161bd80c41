"""Repetitions of a verification: gradients unchanged, small, large, and infinite."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.analysis.look_through import spans_data_axes
from gopt.analysis.training import Phase, TrainingGraph
from gopt.collectives.messages import PUSH_ROWS
from gopt.ir.graph import Graph, Node
from gopt.ir.types import FLOATS
from gopt.operators.kinds import COMPARISONS, FLOAT_TESTS
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.executor import EarlyResults
from gopt.verification.compare import Values, same_values
from gopt.verification.reference_graphs import PROBE
from gopt.verification.source_members import Program


@dataclass(frozen=True, slots=True)
class Variant:
    """One repetition: local gradients are multiplied by ``scale``; ``infinite`` puts one infinity on the last rank.

    ``extra``: the step was changed, so that a reference outside the numbers says nothing of the step."""

    name: str
    scale: float = 1.0
    infinite: bool = False
    extra: bool = True

    def vary(self, value: np.ndarray, marked: bool) -> np.ndarray:
        """A local gradient changed by the variant; ``marked``: may turn infinite."""
        varied = value
        if self.scale != 1:
            with np.errstate(over="ignore"):
                wide = value if value.dtype == np.float64 else value.astype(np.float32)
                varied = (wide * self.scale).astype(value.dtype)
        if self.infinite and marked:
            varied = varied.copy()
            varied.reshape(-1)[:1] = np.inf
        return varied


PLAIN = Variant("gradients as they are", extra=False)
CLIP_INACTIVE = Variant("gradients × 1/64", scale=1 / 64)
CLIP_ACTIVE = Variant("gradients × 64", scale=64.0)
CLIP_ACTIVE_SMALL = Variant("gradients × 4", scale=4.0)
"""Factor for a source that overflows with a larger one."""
CLIP_INACTIVE_LARGE = Variant("gradients × 1/4096", scale=1 / 4096)
CLIP_ACTIVE_LARGE = Variant("gradients × 4096", scale=4096.0)
INFINITE = Variant("one infinite gradient", infinite=True)


@dataclass(slots=True)
class FirstRun:
    """Results of a rank's program before its calls, in its first run: later runs on equal feeds take them."""

    feeds: Values = field(default_factory=dict)
    results: EarlyResults = field(default_factory=dict)

    def results_for(self, program: Program, feeds: Values) -> EarlyResults | None:
        read = {name: np.asarray(feeds[name]) for name in program.early_inputs if name in feeds}
        if not self.results:
            self.feeds = read
        return self.results if same_values(read, self.feeds) else None


@dataclass(frozen=True, slots=True)
class VariantProgram:
    """A rank's program with local ``gradients`` changed on the way into a call, and all operands of a probe;
    values of ``marked`` may turn infinite."""

    program: Program
    variant: Variant
    gradients: set[str]
    marked: Collection[str]
    data: Collection[str]
    """Axes that see different data: calls over others belong to the model."""
    of: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> its gradient, for tables whose gradients are pushed row by row."""
    first_run: FirstRun | None = None

    def run(self, feeds: Values, call: CollectiveCallback) -> Values:
        def varied(index: int, node: Node, inputs: list[np.ndarray]) -> Any:
            if node.op_type == PUSH_ROWS.name:
                return call(index, node, self._rows(self.of[node.attributes["parameter"]], inputs))
            if node.op_type == PROBE:
                return [self.variant.vary(value, node.name in self.marked) for value in inputs]
            if not spans_data_axes(node, self.data):
                return call(index, node, inputs)
            operands = [
                self.variant.vary(value, name in self.marked) if name in self.gradients else value
                for name, value in zip(node.inputs, inputs)
            ]
            return call(index, node, operands)

        early = self.first_run.results_for(self.program, feeds) if self.first_run is not None else None
        return self.program.run(feeds, varied, early)

    def _rows(self, gradient: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Return the pushed rows of a table; to make the gradient infinite, row 0 is pushed as well."""
        if gradient not in self.gradients:
            return inputs
        *operands, ids, rows = inputs
        rows = self.variant.vary(rows, False)
        if self.variant.infinite and gradient in self.marked:
            ids = np.concatenate([ids, np.zeros(1, ids.dtype)])
            marked_row = self.variant.vary(np.zeros((1, *rows.shape[1:]), rows.dtype), True)
            rows = np.concatenate([rows, marked_row])
        return [*operands, ids, rows]


def has_finite_check(training: TrainingGraph) -> bool:
    """Return whether an update looks for infinities: a test on gradients with a result that conditions a state."""
    gradient_values = set(training.gradients.values())
    behind = set(gradient_values)
    tested = False
    for node in training.graph.nodes:
        if node.phase is not Phase.UPDATE or not any(name in behind for name in node.reads):
            continue
        behind.update(node.outputs)
        infinite = any(_is_infinity(training.graph, name) for name in node.inputs)
        tested = tested or node.op_type in FLOAT_TESTS or (node.is_in(COMPARISONS) and infinite)
    return tested


def _is_infinity(graph: Graph, name: str) -> bool:
    tensor = graph.initializers.get(name)
    if tensor is None or tensor.type.dtype not in FLOATS or tensor.type.elements != 1:
        return False
    return bool(np.isinf(np.asarray(tensor.numpy(), np.float64)).all())

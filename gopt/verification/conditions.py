"""Conditions of a step: comparisons and clips. A proof needs each condition with both outcomes.

A *schedule* condition follows counters, flags and hyper-parameters alone, so that start values can be chosen for both
outcomes; a condition on gradients is moved by their size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import GraphIndex, ancestors, descendants
from gopt.operators.kinds import CASTS, COMPARISONS, CONTROL_FLOW, EXTREMES, LOGIC
from gopt.verification.compare import Values

BOUND = EXTREMES | {"Clip"}
CHOOSE = LOGIC | CASTS | CONTROL_FLOW | {"Where"}


@dataclass(frozen=True, slots=True)
class Condition:
    """``output``: the value with the outcome; ``operand``: the clipped value, or '' for a truth value.

    ``leaves``: one-element states and hyper-parameters before the condition; ``scheduled``: no other values come
    before."""

    label: str
    output: str
    operand: str
    leaves: tuple[str, ...]
    constants: tuple[float, ...]
    scheduled: bool

    def outcomes(self, values: Mapping[str, np.ndarray]) -> set[bool]:
        """Return the observed outcomes: True for a true flag, or for an element left unchanged by a clip.

        Empty if the values of the condition are missing.
        """
        if self.output not in values or (self.operand and self.operand not in values):
            return set()
        outputs = np.asarray(values[self.output])
        if self.operand:
            outputs = outputs == np.asarray(values[self.operand])
        return {bool(outcome) for outcome in np.unique(outputs.astype(bool))}


def find_conditions(training: TrainingGraph) -> list[Condition]:
    """All conditions on scalars alone, and conditions behind the gradients."""
    index = GraphIndex(training.graph)
    free = descendants(index, [*training.batch, *(name for node in training.random for name in node.outputs)])
    reduced = descendants(index, training.gradients.values())
    inputs = {*training.hyper, *(state.tensor for state in training.states)}
    conditions = []
    for node in training.graph.nodes:
        pair = _condition_output(index, node, inputs)
        if pair is None:
            continue
        output, operand = pair
        behind = output in reduced
        if (output in free and not behind) or not (index.one_element(output) or (behind and operand)):
            continue
        _, read = ancestors(index, [output]) if not behind else (set(), set())
        leaves = tuple(name for name in training.graph.inputs if name in read)
        if not behind and not (leaves and all(name in inputs and index.one_element(name) for name in leaves)):
            continue
        conditions.append(Condition(node.label, output, operand, leaves, _constants(index, read), not behind))
    return conditions


def _condition_output(index: GraphIndex, node: Node, inputs: Collection[str]) -> tuple[str, str] | None:
    """Return the value with the outcome of a condition, and the clipped value; None for other nodes."""
    types = index.graph.types
    if node.is_in(COMPARISONS):
        return node.outputs[0], ""
    if node.is_in(BOUND):
        wide = [name for name in node.reads if not index.one_element(name)]
        moved = wide or [name for name in node.reads if name in index.producers or name in inputs]
        bounded = len(wide) < 2 and len(node.reads) > 1
        return (node.outputs[0], moved[0]) if moved and bounded else None
    flag = node.inputs[0] if node.inputs else ""
    if node.is_in(CHOOSE) and flag in inputs and types[flag].dtype == "bool":
        return flag, ""
    return None


def _constants(index: GraphIndex, read: Iterable[str]) -> tuple[float, ...]:
    """Numbers on the way to a condition's value: thresholds are among them, or near."""
    numbers = {index.constants.number(name) for name in read}
    return tuple(sorted(number for number in numbers if number is not None and np.isfinite(number)))


def condition_outputs(update: Graph, conditions: Sequence[Condition]) -> list[str]:
    """The values of an update, besides the results, with the outcomes of conditions."""
    computed = {name for node in update.nodes for name in node.outputs if name in update.types}
    names = [
        name for condition in conditions if not condition.scheduled for name in (condition.output, condition.operand)
    ]
    return [name for name in dict.fromkeys(names) if name in computed]


class Coverage:
    """The observed outcomes of each condition."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.conditions = conditions
        self.seen: dict[str, set[bool]] = {condition.output: set() for condition in conditions}

    def record(self, values: Values) -> bool:
        """Enter the outcomes in some values; returns whether any was new."""
        before = sum(map(len, self.seen.values()))
        for condition in self.conditions:
            self.seen[condition.output] |= condition.outcomes(values)
        return sum(map(len, self.seen.values())) > before

    def one_sided(self, scheduled: bool) -> list[Condition]:
        """Conditions with one observed outcome only."""
        alike = [condition for condition in self.conditions if condition.scheduled is scheduled]
        return [condition for condition in alike if len(self.seen[condition.output]) == 1]

"""Conditions of a step: comparisons and clips. A proof is to see each of them with both outcomes.

A *schedule* condition follows counters, flags and hyper-parameters alone, so that start values can be chosen for both
outcomes; one that follows gradients is moved by their size.
"""

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
    """``output``: the value that tells; ``operand``: what a clip works on, or '' where the output is a truth value.

    ``leaves``: one-element states and hyper-parameters that it follows; ``scheduled``: it follows nothing else.
    """

    label: str
    output: str
    operand: str
    leaves: tuple[str, ...]
    constants: tuple[float, ...]
    scheduled: bool

    def outcomes(self, values: Mapping[str, np.ndarray]) -> set[bool]:
        """Return the observed outcomes: True for a true flag, or for an element that a clip left unchanged.

        Empty if the values of the condition are missing.
        """
        if self.output not in values or (self.operand and self.operand not in values):
            return set()
        made = np.asarray(values[self.output])
        if self.operand:
            made = made == np.asarray(values[self.operand])
        return {bool(each) for each in np.unique(made.astype(bool))}


def find_conditions(training: TrainingGraph) -> list[Condition]:
    """All conditions that follow scalars alone, and those behind the gradients."""
    index = GraphIndex(training.graph)
    free = descendants(index, [*training.batch, *(name for node in training.random for name in node.outputs)])
    reduced = descendants(index, training.gradients.values())
    inputs = {*training.hyper, *(state.tensor for state in training.states)}
    found = []
    for node in training.graph.nodes:
        told = _condition_output(index, node, inputs)
        if told is None:
            continue
        output, operand = told
        behind = output in reduced
        if (output in free and not behind) or not (index.one_element(output) or (behind and operand)):
            continue
        _, read = ancestors(index, [output]) if not behind else (set(), set())
        leaves = tuple(name for name in training.graph.inputs if name in read)
        if not behind and not (leaves and all(name in inputs and index.one_element(name) for name in leaves)):
            continue
        found.append(Condition(node.label, output, operand, leaves, _constants(index, read), not behind))
    return found


def _condition_output(index: GraphIndex, node: Node, inputs: Collection[str]) -> tuple[str, str] | None:
    """Return the value that shows the outcome of a condition, and the value that it clips; None if the node is none."""
    types = index.graph.types
    if node.is_a(*COMPARISONS):
        return node.outputs[0], ""
    if node.is_a(*BOUND):
        wide = [name for name in node.reads if not index.one_element(name)]
        moved = wide or [name for name in node.reads if name in index.producers or name in inputs]
        held = len(wide) < 2 and len(node.reads) > 1
        return (node.outputs[0], moved[0]) if moved and held else None
    flag = node.inputs[0] if node.inputs else ""
    if node.is_in(CHOOSE) and flag in inputs and types[flag].dtype == "bool":
        return flag, ""
    return None


def _constants(index: GraphIndex, read: Iterable[str]) -> tuple[float, ...]:
    """Numbers that a condition's value is made with: thresholds are among them, or near."""
    found = {index.constants.number(name) for name in read}
    return tuple(sorted(number for number in found if number is not None and np.isfinite(number)))


def condition_outputs(update: Graph, conditions: Sequence[Condition]) -> list[str]:
    """The values of an update, besides its results, that show the outcomes of its conditions."""
    made = {name for node in update.nodes for name in node.outputs if name in update.types}
    names = [
        name for condition in conditions if not condition.scheduled for name in (condition.output, condition.operand)
    ]
    return [name for name in dict.fromkeys(names) if name in made]


class Coverage:
    """The outcomes with which each condition was seen."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.conditions = conditions
        self.seen: dict[str, set[bool]] = {condition.output: set() for condition in conditions}

    def record(self, values: Values) -> bool:
        """Enter what values show; whether that was new."""
        before = sum(map(len, self.seen.values()))
        for condition in self.conditions:
            self.seen[condition.output] |= condition.outcomes(values)
        return sum(map(len, self.seen.values())) > before

    def one_sided(self, scheduled: bool) -> list[Condition]:
        """Conditions that were seen with one outcome only."""
        alike = [each for each in self.conditions if each.scheduled is scheduled]
        return [each for each in alike if len(self.seen[each.output]) == 1]

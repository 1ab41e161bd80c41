"""Predicates: conditions under which a state keeps its old value."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.offline.optimizer.probe_harness import ProbeHarness


@dataclass(frozen=True, slots=True)
class Predicate:
    """A condition that lets a state keep its old value."""

    condition: str
    advances: bool
    """The value of the condition for which the state gets its new value."""


def strip_predicates(harness: ProbeHarness, state: State) -> tuple[str, list[Predicate]]:
    """The state's new value before its predicates, and these predicates."""
    name, predicates = state.updated, []
    while (node := harness.producers.get(name)) is not None:
        if node.is_a("Identity"):
            name = node.inputs[0]
        elif node.is_a("Where") and state.tensor in node.inputs[1:] and harness.single(node.inputs[0]):
            advances = node.inputs[2] == state.tensor
            predicates.append(Predicate(node.inputs[0], advances))
            name = node.inputs[1] if advances else node.inputs[2]
        else:
            break
    return name, predicates


def find_predicates(training: TrainingGraph, harness: ProbeHarness) -> dict[str, list[tuple[State, bool]]]:
    """Condition -> the states that it controls, and the value for which they change."""
    found: dict[str, list[tuple[State, bool]]] = {}
    for state in training.states:
        if state.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE):
            for predicate in strip_predicates(harness, state)[1]:
                found.setdefault(predicate.condition, []).append((state, predicate.advances))
    return found

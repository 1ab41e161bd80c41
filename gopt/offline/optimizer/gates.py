"""Conditions under which a state keeps its old value."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.offline.optimizer.trial import Trial


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition that lets a state keep its old value."""

    condition: str
    advances: bool
    """The value of the condition for which the state gets its new value."""


def ungated(trial: Trial, state: State) -> tuple[str, list[Gate]]:
    """The state's new value before the gates that may hold it back, and these gates."""
    name, gates = state.updated, []
    while (node := trial.producers.get(name)) is not None:
        if node.is_a("Identity"):
            name = node.inputs[0]
        elif node.is_a("Where") and state.tensor in node.inputs[1:] and trial.single(node.inputs[0]):
            advances = node.inputs[2] == state.tensor
            gates.append(Gate(node.inputs[0], advances))
            name = node.inputs[1] if advances else node.inputs[2]
        else:
            break
    return name, gates


def find_gates(training: TrainingGraph, trial: Trial) -> dict[str, list[tuple[State, bool]]]:
    """Condition -> the states it gates, and the value for which they advance."""
    found: dict[str, list[tuple[State, bool]]] = {}
    for state in training.states:
        if state.kind in (StateKind.PARAMETER, StateKind.OPTIMIZER_STATE):
            for gate in ungated(trial, state)[1]:
                found.setdefault(gate.condition, []).append((state, gate.advances))
    return found

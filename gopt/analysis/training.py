"""What a training step is made of: the record every pass reads, recovered once and never guessed again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from gopt.ir.graph import Graph, Node
from gopt.ir.phase import Phase

__all__ = ["Phase", "State", "StateKind", "TrainingGraph"]
T = TypeVar("T")


class StateKind(str, Enum):
    """The kinds of state (contract section 1)."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    STATISTIC = "statistic"
    SCALAR = "scalar"
    ACCUMULATOR = "accumulator"


@dataclass(slots=True)
class State:
    """A graph input and the output that replaces it after the step; ``of`` is the parameter it belongs to."""

    tensor: str
    updated: str
    kind: StateKind
    of: str | None = None


@dataclass(slots=True)
class TrainingGraph:
    """A source graph with its roles.

    ``gradients`` maps a parameter's input name to the value that is its gradient; nodes carry their phase.
    ``batch`` and ``hyper`` are the inputs that are no states; ``metrics`` the other outputs.
    """

    graph: Graph
    loss: str
    states: list[State]
    gradients: dict[str, str]
    batch: list[str]
    hyper: list[str]
    metrics: list[str]
    random: list[Node]
    notes: list[str] = field(default_factory=list)
    looked_through: list[Node] = field(default_factory=list)
    """Nodes of the file that change nothing in the update: their readers read their root."""
    shared: dict[str, str] = field(default_factory=dict)
    """What the update reads of the forward as a mean over the ranks: the value that it reads -> the rank's own."""
    _found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return (
            f"<Training {self.graph.name}: {len(self.graph.nodes)} nodes, {len(self.states)} states, loss {self.loss}>"
        )

    def once(self, question: Hashable, find: Callable[[], T]) -> T:
        """The answer to a question about the source alone: it stays true, since passes rewrite a copy.

        Found on first asking, and shared from then on: who changes it, changes it for all who ask.
        """
        if question not in self._found:
            self._found[question] = find()
        found: T = self._found[question]
        return found

    def weights_of(self, gradient: str) -> list[str]:
        """The parameters that have a value as their gradient."""

        def find() -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for name, value in self.gradients.items():
                found.setdefault(value, []).append(name)
            return found

        return self.once("weights of gradients", find).get(gradient, [])

    @property
    def parameters(self) -> list[State]:
        return [state for state in self.states if state.kind is StateKind.PARAMETER]

    @property
    def new_statistics(self) -> set[str]:
        """What replaces the running statistics."""
        return {state.updated for state in self.states if state.kind is StateKind.STATISTIC}

    def state_of(self) -> dict[str, State]:
        """States by input name."""
        return {state.tensor: state for state in self.states}

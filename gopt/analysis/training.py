"""The training step: roles of all values, recovered once and read by every pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.phase import Phase
from gopt.system import background
from gopt.system.background import Task

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
    """A graph input and the output that replaces the input after the step; ``of``: the parameter of the state."""

    tensor: str
    updated: str
    kind: StateKind
    of: str | None = None


@dataclass(slots=True)
class TrainingGraph:
    """A source graph with roles.

    ``gradients`` maps a parameter's input name to the gradient's value name; nodes carry their phase. ``losses`` are
    the scalar outputs at the start of a backward. ``batch`` and ``hyper`` are the inputs outside of the states;
    ``metrics`` the other outputs."""

    graph: Graph
    losses: tuple[str, ...]
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
    """Value that the update reads as a mean over the ranks -> the value of the forward on each rank."""
    sources: dict[str, frozenset[str]] = field(default_factory=dict)
    """With several losses: gradient -> those whose own values its backward reads; none where that does not tell."""
    reductions: dict[str, str] = field(default_factory=dict)
    """Statistic -> how the user says that it is combined over ranks."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Statistic that a condition on gradients keeps as it was -> its new value where it does not."""
    counted: dict[str, str] = field(default_factory=dict)
    """Statistic that counts samples -> the value that each step adds to it."""
    doubted: dict[str, str] = field(default_factory=dict)
    """State that ranks do not add up -> why it may count samples all the same."""
    draws: Mapping[str, Draw] = field(default_factory=dict)
    """Batch input of random numbers -> what it is drawn from."""
    defaults: Mapping[str, DefaultValue] = field(default_factory=dict)
    """Hyper-parameter -> its value where a run sets none."""
    _answers: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _begun: dict[Hashable, Task[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        counts = f"{len(self.graph.nodes)} nodes, {len(self.states)} states"
        return f"<Training {self.graph.name}: {counts}, loss {', '.join(self.losses)}>"

    def once(self, question: Hashable, find: Callable[[], T]) -> T:
        """Return the cached result of ``find`` for ``question``, which must concern the source graph only.

        Results stay valid because passes rewrite a copy. The returned object is shared: callers must not change the
        object."""
        if question not in self._answers:
            begun = self._begun.pop(question, None)
            self._answers[question] = find() if begun is None else begun.result()
        answer: T = self._answers[question]
        return answer

    def begin(self, questions: Mapping[Hashable, Callable[[], Any]]) -> None:
        """Begin to answer questions of ``once``, in this order in a separate process; without a process, ``once``
        answers."""
        self._begun.update(zip(questions, background.begin_all(questions.values(), len(self.graph.nodes))))

    def weights_of(self, gradient: str) -> list[str]:
        """The parameters of a gradient."""

        def find() -> dict[str, list[str]]:
            names: dict[str, list[str]] = {}
            for name, value in self.gradients.items():
                names.setdefault(value, []).append(name)
            return names

        return self.once("weights of gradients", find).get(gradient, [])

    @property
    def loss(self) -> str:
        """The first loss, which stands for all losses where one number is shown; '' of a server's part of a step."""
        return self.losses[0] if self.losses else ""

    @property
    def shown(self) -> tuple[str, ...]:
        """The outputs that replace no state: losses, then metrics."""
        return (*self.losses, *self.metrics)

    @property
    def forward_metrics(self) -> list[str]:
        """The metrics of a batch alone: no node of the update makes them."""
        nodes = self.graph.nodes if self.metrics else ()
        updated = {name for node in nodes if node.phase is Phase.UPDATE for name in node.outputs}
        return [name for name in self.metrics if name not in updated]

    @property
    def parameters(self) -> list[State]:
        return [state for state in self.states if state.kind is StateKind.PARAMETER]

    @property
    def calls(self) -> list[Node]:
        """The collectives of the source, in order."""
        return self.once("calls", lambda: [node for node in self.graph.nodes if node.domain == COMM])

    @property
    def new_statistics(self) -> set[str]:
        """The new values of the running statistics."""
        return {state.updated for state in self.states if state.kind is StateKind.STATISTIC}

    def state_of(self) -> dict[str, State]:
        """States by input name."""
        return {state.tensor: state for state in self.states}

"""The comparison of a step of ranks with the step of one large batch: the joined batches of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from gopt.text.sanitize import and_more, listed


class LargeBatch(str, Enum):
    """Outcome of the comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class StateDistance:
    """A state, and the distance from the large batch's state over the size of the change; ``noted``: a note of
    ``shard`` covers a value on the way to the state."""

    name: str
    kind: str
    error: float
    noted: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "error": self.error, "noted": self.noted}


@dataclass(frozen=True, slots=True)
class LargeBatchCheck:
    """A step of the source on the batches of all ranks and micro-steps, joined, beside the step of the ranks.

    ``states``: the number of compared states; ``apart``: states that differ by more than rounding, the furthest first;
    ``why``: why nothing can be compared, or for which batches the step is equal. ``notes``: notes of ``shard`` on such
    differences. ``taken``: constants of the source taken for numbers of samples, or one over them."""

    outcome: LargeBatch
    states: int = 0
    why: str = ""
    apart: tuple[StateDistance, ...] = ()
    notes: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()

    @property
    def unnoted(self) -> bool:
        """Whether the ranks differ from one large batch, without a note at their making."""
        return any(not state.noted for state in self.apart)

    def reason(self) -> str:
        """The difference, in one line."""
        worst = min(self.apart, key=lambda state: state.noted)
        return f"NOT the step of one large batch: {worst.kind} {worst.name!r} is {worst.error:.2g} of its change off"

    def line(self) -> str:
        """The outcome, in one line."""
        if self.outcome is LargeBatch.NOT_COMPARABLE:
            return f"one large batch: not comparable: {self.why}"
        if self.outcome is LargeBatch.EQUAL:
            assumed = f" ({listed(self.taken)} taken for numbers of samples)" if self.taken else ""
            noted = " on these batches" if self.notes and not self.why else ""
            return f"one large batch: equal{noted}, {self.states} states{f', {self.why}' if self.why else ''}{assumed}"
        more = and_more(len(self.apart) - 1)
        return f"{self.reason()}{more}{', and no note said so' if self.unnoted else ', as noted'}"

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome.value, "line": self.line(), "states": self.states, "why": self.why,
            "apart": [state.to_json() for state in self.apart], "notes": list(self.notes), "taken": list(self.taken),
        }  # fmt: skip

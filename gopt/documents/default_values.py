"""Hyper-parameters with values in a step: fed by a run if the user sets none."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL, Positive


@dataclass(frozen=True, slots=True)
class DefaultValue:
    """The value of an unset hyper-parameter."""

    schedule: str = field(default="", metadata=OPTIONAL)
    """The value is this number, or follows this formula of the step, as gopt run --set takes them; the key is absent
    beside a table."""
    table: tuple[float, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the value of each step from the first; the key is absent beside a schedule."""
    steps: Positive | None = field(default=None, metadata=OPTIONAL)
    """A formula was compared with the scheduler for this many steps; the key is absent where it holds for any."""

    def __str__(self) -> str:
        if not self.table:
            return self.schedule
        return f"a table of {len(self.table)} steps, {self.table[0]:g} to {self.table[-1]:g}"

"""Hyper-parameters that a step has values for: what a run feeds where the user sets none."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL


@dataclass(frozen=True, slots=True)
class DefaultValue:
    """The value of a hyper-parameter where none is set.

    ``schedule``: a number or a formula of the step, as ``--set`` takes them; ``table``: in its place, the value of each
    step from the first. ``steps``: how many steps a formula was compared for; None: it holds for any.
    """

    schedule: str = field(default="", metadata=OPTIONAL)
    table: tuple[float, ...] = field(default=(), metadata=OPTIONAL)
    steps: int | None = field(default=None, metadata=OPTIONAL)

    def __str__(self) -> str:
        if not self.table:
            return self.schedule
        return f"a table of {len(self.table)} steps, {self.table[0]:g} to {self.table[-1]:g}"

"""Records of pass runs, collected by the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gopt.records.pass_facts import PassRecord, figures_of

if TYPE_CHECKING:
    from gopt.ir.rewriter import Removal


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass: the removed parts of the source, and the pass's own facts."""

    removed: Sequence[Removal] = field(default=(), repr=False)
    facts: Any = field(default_factory=dict, repr=False)
    """A record of facts (``gopt/records/pass_facts.py``), or a table like it."""
    note: str = ""

    @property
    def figures(self) -> Mapping[str, Any]:
        """The facts as the report has them."""
        return figures_of(self.facts)


@dataclass(frozen=True, slots=True)
class PassRun:
    """A pass that ran: its facts for the report, and the nodes it removed."""

    record: PassRecord
    result: PassResult

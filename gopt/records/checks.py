"""The invariants of contract section 6 as the report lists them."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.records.pass_facts import Figure


@dataclass(frozen=True, slots=True)
class Check:
    """A checked invariant, and the number of checked things."""

    name: str
    """The invariant has this name."""
    what: str
    """The sentence says what held."""
    count: Figure
    """The invariant was checked on this many things; 0 means that there was none, or that not all ranks were made."""

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "what": self.what, "count": self.count}

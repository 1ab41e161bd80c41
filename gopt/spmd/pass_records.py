"""Records of pass runs, collected by the pipeline, and short texts of the records."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gopt.documents.records import OPTIONAL, to_document

if TYPE_CHECKING:
    from gopt.ir.rewriter import Removal

T = TypeVar("T", bound=Hashable)


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
        return to_document(self.facts) if is_dataclass(self.facts) else self.facts


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass run: the options as resolved, and the figures."""

    name: str
    """The pass has this name."""
    options: Mapping[str, Any]
    """The table has the options of the pass as resolved; its keys depend on the pass, and null means that none was
    given."""
    facts: Mapping[str, Any] = field(repr=False)
    """The table has the figures of the pass; its keys depend on the pass, and it is empty when the pass did nothing."""
    note: str = field(default="", metadata=OPTIONAL)
    """The note says in words what is special, mostly why the pass did nothing; the key is absent when nothing is."""


@dataclass(frozen=True, slots=True)
class PassRun:
    """A pass that ran: its facts for the report, and the nodes it removed."""

    record: PassRecord
    result: PassResult


def rank_ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2,5``."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:  # in order, and no rank twice
        return f"{ranks[0]}-{ranks[-1]}"
    parts: list[str] = []
    start = 0
    for index in range(1, len(ranks) + 1):
        if index == len(ranks) or ranks[index] != ranks[index - 1] + 1:
            start_rank, last = ranks[start], ranks[index - 1]
            parts.append(str(start_rank) if start_rank == last else f"{start_rank}-{last}")
            start = index
    return ",".join(parts)


def group_ranks(rows: Sequence[tuple[int, T]]) -> list[tuple[list[int], T]]:
    """Return groups of ranks with equal values, in the order of the first rank."""
    groups: dict[T, list[int]] = {}
    for rank, value in rows:
        groups.setdefault(value, []).append(rank)
    return [(ranks, value) for value, ranks in groups.items()]


def balance(values: Sequence[int]) -> float:
    """Return the maximum over the mean; 1 for equal or zero values."""
    total = sum(values)
    return round(max(values) * len(values) / total, 6) if total else 1.0


def format_bytes(nbytes: float) -> str:
    """Bytes for people: powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"

"""Frozen records of what was done: each pass hands in a card, the pipeline collects them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class OpRecord:
    """An operator removed or added, and on which ranks."""

    name: str
    op_type: str
    pass_name: str
    reason: str
    ranks: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "op_type": self.op_type, "pass": self.pass_name, "reason": self.reason,
            "ranks": self.ranks,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class VarRecord:
    """A value removed or added, and on which ranks."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    nbytes: int
    pass_name: str
    reason: str
    ranks: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "dtype": self.dtype, "shape": None if self.shape is None else list(self.shape),
            "bytes": self.nbytes, "pass": self.pass_name, "reason": self.reason, "ranks": self.ranks,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did: reasons by removed node or value label, and its own figures."""

    removed: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Label of a removed source node -> why."""
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    note: str = ""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass as it ran: its options as resolved, and its figures."""

    name: str
    options: Mapping[str, Any]
    facts: Mapping[str, Any] = field(repr=False)
    note: str

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"name": self.name, "options": dict(self.options), "facts": dict(self.facts)}
        if self.note:
            record["note"] = self.note
        return record


@dataclass(frozen=True, slots=True)
class PassRun:
    """A pass that ran: what the report says of it, and which nodes it removed."""

    record: PassRecord
    result: PassResult


def rank_ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2,5``."""
    parts: list[str] = []
    start = 0
    for place in range(1, len(ranks) + 1):
        if place == len(ranks) or ranks[place] != ranks[place - 1] + 1:
            first, last = ranks[start], ranks[place - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = place
    return ",".join(parts)


def group_ranks(rows: Sequence[tuple[int, T]]) -> list[tuple[list[int], T]]:
    """Ranks with what is told of each -> the ranks of which the same is told, in the order of their first."""
    found: dict[T, list[int]] = {}
    for rank, told in rows:
        found.setdefault(told, []).append(rank)
    return [(ranks, told) for told, ranks in found.items()]


def format_bytes(nbytes: float) -> str:
    """Bytes for people: powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"

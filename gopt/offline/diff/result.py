"""The result of a comparison: one line for each difference, and the verdict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from gopt.offline.diff.sections import Section, kind_sections
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class FileDifference:
    """One difference. ``kind``: added, removed, op, attribute, rewired, input, output, value, state, bytes, model,
    record; ``where``: the file, '' for a pair of models."""

    kind: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} {self.text}" if self.where else f"{self.kind} {self.text}"


@dataclass(frozen=True, slots=True)
class Diff(HtmlTable):
    """All differences between ``a`` and ``b``; ``renamed`` counts inner values with a new name only."""

    a: str
    b: str
    lines: tuple[FileDifference, ...]
    renamed: int
    notes: tuple[str, ...] = ()
    review: tuple[Section, ...] = ()
    """Of two output folders whose records differ: the cause, and what follows from it."""

    def __repr__(self) -> str:
        return f"<Diff {self.a}, {self.b}: {len(self.lines)} differences>"

    @property
    def equal(self) -> bool:
        return not self.lines

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    @property
    def sections(self) -> tuple[Section, ...]:
        """The review, or without a review the differences as a table for each kind."""
        return self.review or kind_sections((line.kind, line.where, line.text) for line in self.lines)

    @property
    def verdict(self) -> str:
        """Whether both are equal, and how many differences of each kind there are."""
        count = len(self.lines)
        counts = ", ".join(f"{number} {kind}" for kind, number in self.to_json()["counts"].items())
        return "equal" if self.equal else f"not equal: {count} difference{'s' * (count != 1)} ({counts})"

    def without(self, kinds: Collection[str]) -> Diff:
        """The same comparison without differences of these kinds."""
        lines = tuple(line for line in self.lines if line.kind not in kinds)
        return replace(self, lines=lines, review=self.review if lines else ())

    def to_json(self) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for line in self.lines:
            counts[line.kind] = counts.get(line.kind, 0) + 1
        return {
            "format": "gopt-diff/1", "a": self.a, "b": self.b, "equal": self.equal, "renamed": self.renamed,
            "counts": counts, "notes": list(self.notes),
            "sections": [section.to_json() for section in self.sections],
            "lines": [{"kind": line.kind, "where": line.where, "text": line.text} for line in self.lines],
        }  # fmt: skip

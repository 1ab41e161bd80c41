"""The result of a comparison: one line for each difference, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gopt.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. ``kind``: added, removed, op, attribute, rewired, input, output, value, state, bytes, model,
    record; ``where``: the file it is in, '' for a pair of models."""

    kind: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} {self.text}" if self.where else f"{self.kind} {self.text}"


@dataclass(frozen=True, slots=True)
class Diff(HtmlTable):
    """All differences between ``a`` and ``b``; ``renamed`` counts inner values that only changed their names."""

    a: str
    b: str
    lines: tuple[Difference, ...]
    renamed: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Diff {self.a}, {self.b}: {len(self.lines)} differences>"

    @property
    def equal(self) -> bool:
        return not self.lines

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def to_json(self) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for line in self.lines:
            counts[line.kind] = counts.get(line.kind, 0) + 1
        return {
            "format": "gopt-diff/1", "a": self.a, "b": self.b, "equal": self.equal, "renamed": self.renamed,
            "counts": counts, "notes": list(self.notes),
            "lines": [{"kind": line.kind, "where": line.where, "text": line.text} for line in self.lines],
        }  # fmt: skip

"""The result of ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gopt.documents.records import to_document
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: the subject, the sentence, and the names inside, each with a story."""

    about: str
    text: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Story(HtmlTable):
    """All facts of an output folder about one name. ``kind`` is the primary kind of the name."""

    folder: str
    name: str
    kind: str
    facts: tuple[Fact, ...]

    def __repr__(self) -> str:
        return f"<Story of {self.name}, {self.kind}: {len(self.facts)} facts>"

    def __str__(self) -> str:
        width = max(len(fact.about) for fact in self.facts)
        return "\n".join([self.name, *(f"  {fact.about:{width}}  {fact.text}" for fact in self.facts)])

    def to_json(self) -> dict[str, Any]:
        """The record as ``gopt explain --json`` prints it."""
        return {"format": "gopt-explanation/1"} | to_document(self)

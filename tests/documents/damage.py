"""Every key of a document × every kind of damage: for tests that no reader ends in a defect."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Place = tuple[str | int, ...]
GONE = object()
DEEP = "deep"
HUGE = "huge"
KINDS: dict[str, Any] = {
    "gone": GONE, "null": None, "true": True, "zero": 0, "one": 1, "minus": -4, "large": 2**62, "half": 0.5,
    "whole float": 2.0, "text": "nix", "empty": "", "escape": "a\x1b[31m\u202e\x9b2Jb", "path": "../../etc/passwd",
    "markup": "[/nix] [bold", "nul": "a\0b", "surrogate": "\ud800", "list": [], "nested": [[], {}], "table": {},
    "named": {"nix": 1}, "long": "x" * 5000, "digits": HUGE, "deep": DEEP, "nan": float("nan"), "infinite": 1e999,
    "twice": "twice",
}  # fmt: skip
"""Kind of damage -> what stands in the place of the value."""


@dataclass(frozen=True)
class Damage:
    """One damaged document."""

    place: Place
    kind: str
    text: str


def places(document: Any, place: Place = ()) -> Iterator[Place]:
    """Every value of a document; of a list's entries, whose keys are alike, the first and the last."""
    if place:
        yield place
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*place, key))
    elif isinstance(document, list):
        for number in sorted({0, len(document) - 1}) if document else ():
            yield from places(document[number], (*place, number))


def damaged(document: Any, place: Place, kind: str) -> str:
    """The document's text with one value damaged."""
    made = copy.deepcopy(document)
    owner = made
    for key in place[:-1]:
        owner = owner[key]
    if kind == "gone":
        del owner[place[-1]]
        return json.dumps(made)
    given = KINDS[kind]
    mark = "\ue000mark"
    if kind == "twice":
        given = owner[place[-1]]
        owner[place[-1]] = mark
        value = json.dumps(given)
        if isinstance(place[-1], str):
            return json.dumps(made).replace(json.dumps(mark), f"{value}, {json.dumps(place[-1])}: {value}")
        return json.dumps(made).replace(json.dumps(mark), f"{value}, {value}")
    if given in (DEEP, HUGE):
        owner[place[-1]] = mark
        text = "[" * 5000 + "]" * 5000 if given == DEEP else "9" * 5000
        return json.dumps(made).replace(json.dumps(mark), text)
    owner[place[-1]] = given
    return json.dumps(made)


def every(document: Any) -> Iterator[Damage]:
    for place in places(document):
        for kind in KINDS:
            yield Damage(place, kind, damaged(document, place, kind))

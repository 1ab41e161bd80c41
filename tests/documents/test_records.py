"""Dataclasses as documents and back."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from gopt.documents.records import OPTIONAL, from_document, is_optional, key, key_of, to_document


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Leaf:
    nbytes: int = field(metadata=key("bytes"))
    note: str = field(default="", metadata=OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Tree:
    format: str = "tree/1"
    leaves: tuple[Leaf, ...] = field(default=(), metadata=OPTIONAL)
    pair: tuple[str, int]
    pairs: tuple[tuple[str, int], ...]
    shape: tuple[int | str | None, ...] | None
    colour: Colour
    by_name: Mapping[str, Leaf]
    shares: dict[str, float]
    first: Leaf | None
    last: Leaf | None = field(default=None, metadata=OPTIONAL)
    free: Mapping[str, Any]


FULL = {
    "format": "tree/1", "leaves": [{"bytes": 1}, {"bytes": 2, "note": "n"}], "pair": ["a", 1], "pairs": [["b", 2]],
    "shape": [2, "n", None], "colour": "red", "by_name": {"x": {"bytes": 3}}, "shares": {"y": 0.5},
    "first": {"bytes": 4}, "last": {"bytes": 5}, "free": {"any": [{"thing": None}]},
}  # fmt: skip
SHORT = {key: FULL[key] for key in FULL if key not in ("leaves", "last")} | {"shape": None, "first": None}


@pytest.mark.parametrize("document", [FULL, SHORT])
def test_writing_undoes_reading(document):
    written = to_document(from_document(Tree, document))
    assert json.dumps(written) == json.dumps({key: document[key] for key in FULL if key in document})


def test_a_record_of_a_document():
    tree = from_document(Tree, FULL)
    assert tree.leaves == (Leaf(1), Leaf(2, "n")) and tree.pair == ("a", 1) and tree.pairs == (("b", 2),)
    assert tree.shape == (2, "n", None) and tree.colour is Colour.RED
    assert tree.by_name == {"x": Leaf(3)} and tree.first == Leaf(4) and tree.free == {"any": [{"thing": None}]}


def test_absent_keys_are_defaults():
    assert from_document(Tree, SHORT).leaves == () and from_document(Tree, SHORT).last is None
    with pytest.raises(KeyError, match="bytes"):
        from_document(Leaf, {"note": "n"})


def test_a_document_shares_no_list_with_another():
    tree = from_document(Tree, FULL)
    to_document(tree)["leaves"].clear()
    assert to_document(tree) == FULL


def test_keys_of_fields():
    assert [(key_of(each), is_optional(each)) for each in fields(Leaf)] == [("bytes", False), ("note", True)]

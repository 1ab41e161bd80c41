"""The schemas of documents are made of the records, and take all that earlier schemas took."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pytest
from helpers import ROOT, script_of

from gopt.documents.records import NULLABLE, OPTIONAL, Bounds, Count, Open, key, one_of

OLD = json.loads((ROOT / "tests/docs/old_schemas.json").read_text(encoding="utf-8"))
"""The schemas that were written by hand, without descriptions, with definitions in the place of references to them, and
without keys whose values are as those of any other key of their table."""
MEANT = (
    "[shard].facts.parameters",
    "[overlap].facts.by_kind",
    ".pipeline[items]: pipeline",
    ".pipeline[items]: stage-transfers",
    ".pipeline[items]: recompute",
    ".pipeline[items]: offload",
)
"""Tables in which every value is a number now; before, only those of the keys that gopt writes.
Passes that are new."""
NAMES = sorted(OLD)

schemas = script_of("docs/schemas.py")


def shipped(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"gopt/schemas/{name}.schema.json").read_text(encoding="utf-8"))
    return found


# --- files and records ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schemas.DOCUMENTS)
def test_a_schema_is_what_its_record_says(name):
    text = (ROOT / f"gopt/schemas/{name}.schema.json").read_text(encoding="utf-8")
    assert text == schemas.text_of(name), "run python docs/schemas.py"


def test_every_schema_has_a_title():
    assert sorted(schemas.DOCUMENTS) == sorted(path.name.partition(".")[0] for path in schemas.SCHEMAS.glob("*.json"))


@pytest.mark.parametrize("name", schemas.DOCUMENTS)
def test_every_field_of_every_record_is_described(name):
    record = schemas.record_of(name)
    records = [each for each in {record, *schemas.inner_records(record)} if dataclasses.is_dataclass(each)]
    missing = [
        f"{each.__name__}.{field.name}"
        for each in records
        for field in dataclasses.fields(each)
        if not schemas.descriptions(each).get(field.name)
    ]
    assert missing == []


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Leaf(Open):
    """A leaf."""

    colour: Colour | None
    """The colour of the leaf; null
    stands for none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plant:
    """A plant.

    More of it.
    """

    format: str = "gopt-plant/1"
    """The format."""
    leaves: tuple[Leaf, ...]
    """The leaves."""
    size: tuple[Count, float] | None = dataclasses.field(default=None, metadata=NULLABLE)
    """The size."""
    names: Mapping[str, Annotated[str, one_of("a", "b")]] | None = dataclasses.field(default=None, metadata=OPTIONAL)
    """The names."""
    first: Leaf | None = dataclasses.field(default=None, metadata={**key("from"), **OPTIONAL})
    """The first leaf."""
    note: str | tuple[str, ...] = dataclasses.field(default="", metadata=OPTIONAL)
    """The notes."""
    code: Annotated[str, Bounds(pattern="^x$")] = dataclasses.field(default="x", metadata=OPTIONAL)
    """The code."""
    rest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The rest."""


def test_a_record_gives_its_schema():
    leaf = {"$ref": "#/$defs/Leaf"}
    size = {
        "type": ["array", "null"], "prefixItems": [{"type": "integer", "minimum": 0}, {"type": "number"}],
        "minItems": 2, "maxItems": 2,
    }  # fmt: skip
    made = schemas.schema_of(Plant, "Plants")
    assert (made["title"], made["description"], made["additionalProperties"]) == ("Plants", "A plant.", False)
    assert made["required"] == ["format", "leaves", "rest"]
    assert made["properties"] == {
        "format": {"description": "The format.", "const": "gopt-plant/1"},
        "leaves": {"description": "The leaves.", "type": "array", "items": leaf},
        "size": {"description": "The size.", **size},
        "names": {"description": "The names.", "type": "object", "additionalProperties": {"enum": ["a", "b"]}},
        "from": {"description": "The first leaf.", **leaf},
        "note": {"description": "The notes.", "type": ["string", "array"], "items": {"type": "string"}},
        "code": {"description": "The code.", "type": "string", "pattern": "^x$"},
        "rest": {"description": "The rest.", "type": "object"},
    }
    colour = {"description": "The colour of the leaf; null stands for none.", "enum": ["red", "blue", None]}
    assert made["$defs"]["Leaf"] == {
        "description": "A leaf.", "type": "object", "properties": {"colour": colour}, "required": ["colour"],
    }  # fmt: skip


# --- old documents --------------------------------------------------------------------------------------------------


def plain(schema: Any, root: dict[str, Any]) -> Any:
    """A schema without words for readers, with definitions in the place of references, and lists of words sorted."""
    if isinstance(schema, list):
        return [plain(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    found = {word: each for word, each in schema.items() if word not in ("title", "description", "$defs")}
    for word, each in found.items():
        if word in ("type", "enum", "required"):
            found[word] = sorted([each] if isinstance(each, str) else each, key=str)
        elif word == "properties":
            found[word] = {name: plain(one, root) for name, one in each.items()}
        else:
            found[word] = plain(each, root)
    return {word: each for word, each in found.items() if word not in ("$schema", "$comment")}


def refused(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Where one schema may refuse what another takes; a new key that may be absent is none."""
    for word in sorted({*old, *new}):
        a, b = old.get(word, {}), new.get(word, {})
        if word == "properties":
            yield from (f"{place}.{name} is gone" for name in a if name not in b)
            for name in a.keys() & b.keys():
                yield from refused(a[name], b[name], f"{place}.{name}")
        elif word == "required":
            yield from (f"{place}.{name} is required" for name in b if name not in a)
        elif word == "allOf":
            before, now = ({each["if"]["properties"]["name"]["const"]: each["then"] for each in x} for x in (a, b))
            yield from (f"{place}: {name}" for name in before.keys() ^ now.keys())
            for name in before.keys() & now.keys():
                yield from refused(before[name], now[name], f"{place}[{name}]")
        elif isinstance(a, dict) and isinstance(b, dict):
            yield from refused(a, b, f"{place}[{word}]")
        elif a != b:
            yield f"{place}: {word}: {a} is now {b}"


@pytest.mark.parametrize("name", NAMES)
def test_documents_of_earlier_versions_are_taken(name):
    """But for added keys the schemas are the same, so that they refuse the same, in the same words, at the same place:
    the order of their keys makes no difference to the validator."""
    found = refused(OLD[name], plain(shipped(name), shipped(name)))
    assert [each for each in found if not any(place in each for place in MEANT)] == []


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        (("properties", "step"), {"type": ["string"]}, ".step: type: ['integer'] is now ['string']"),
        (("properties", "step"), {"minimum": 1}, ".step: minimum: 0 is now 1"),
        (("properties", "last"), {"enum": ["carry"]}, ".last: enum: ['carry', 'drop', 'pad'] is now ['carry']"),
        (("properties", "manifest"), {"pattern": "^x$"}, ".manifest: pattern: ^[0-9a-f]{64}$ is now ^x$"),
        (("properties", "best"), {"properties": {}}, ".best.metric is gone"),
        (("properties", "best"), {"required": ["nix"]}, ".best.nix is required"),
        (
            ("properties", "files", "additionalProperties"),
            {"maxProperties": 1},
            ".files[additionalProperties]: maxProp",
        ),
    ],
)
def test_a_schema_that_refuses_more_is_seen(path, change, said):
    new = json.loads(json.dumps(OLD["index"]))
    place = new
    for word in path:
        place = place[word]
    place.update(change)
    assert any(each.startswith(said) for each in refused(OLD["index"], new))


def test_a_new_key_that_may_be_absent_is_taken():
    new = json.loads(json.dumps(OLD["index"]))
    new["properties"]["nix"] = {"type": ["string"]}
    assert list(refused(OLD["index"], new)) == []

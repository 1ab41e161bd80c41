"""Manifest, report and checkpoint index: records and schemas say the same, and reading undoes writing."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from helpers import FIXTURES, NAMES, ROOT
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gopt
from gopt import documents
from gopt.artifact.checkpoint_index import CheckpointIndex
from gopt.artifact.manifest import Manifest
from gopt.artifact.pass_facts import BucketFacts, OperatorFacts
from gopt.artifact.report_record import ProofEntry, Report
from gopt.documents.records import from_document, is_optional, key_of, to_document
from gopt.errors import GoptError
from gopt.records.mesh import AxisKind

SCHEMAS = {
    name: json.loads((ROOT / f"gopt/schemas/{name}.schema.json").read_text(encoding="utf-8"))
    for name in ("manifest", "report", "index")
}
RECORDS: dict[str, tuple[Any, documents.DocumentKind]] = {
    "manifest": (Manifest, documents.MANIFEST),
    "report": (Report, documents.REPORT),
    "index": (CheckpointIndex, documents.INDEX),
}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


# --- records against schemas ---------------------------------------------------------------------------------------


def differences(hint: Any, schema: dict[str, Any], root: dict[str, Any], place: str = "") -> Iterator[str]:
    """Where a record's type and a schema differ: keys, types, and which keys may be absent."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    given = schema.get("type")
    names = {given} if isinstance(given, str) else set(given or ())
    if dataclasses.is_dataclass(hint):
        yield from record_differences(hint, schema, root, place)
    elif isinstance(hint, enum.EnumMeta):
        values = {each.value for each in hint} - ({AxisKind.PART.value} if hint is AxisKind else set())
        if values != set(schema["enum"]):
            yield f"{place}: {sorted(values)} are not {schema['enum']}"
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = typing.get_args(hint)
        nullable = type(None) in parts and "null" in names
        inner = [each for each in parts if each is not type(None)]
        if len(inner) == 1 and nullable:
            yield from differences(inner[0], schema | {"type": sorted(names - {"null"})}, root, place)
        elif len(inner) == 1:  # the key is absent for None
            yield from differences(inner[0], schema, root, place)
        elif names != {TYPES[each] for each in parts}:
            yield f"{place}: {names} is not {hint}"
    elif typing.get_origin(hint) is tuple:
        yield from tuple_differences(typing.get_args(hint), schema, root, place)
    elif issubclass(typing.get_origin(hint) or object, Mapping):
        rest = schema.get("additionalProperties")
        for key, each in {**schema.get("properties", {}), **({"*": rest} if isinstance(rest, dict) else {})}.items():
            yield from differences(typing.get_args(hint)[1], each, root, f"{place}.{key}")
        if names != {"object"}:
            yield f"{place}: {names} is not a table"
    elif hint is not Any and names != {TYPES[hint]} and not _all_are(hint, schema):
        yield f"{place}: {names} is not {hint}"


def _all_are(hint: type, schema: dict[str, Any]) -> bool:
    """Whether a schema lists its values, and all are of this type."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return bool(values) and all(isinstance(each, hint) for each in values)


def record_differences(hint: Any, schema: dict[str, Any], root: dict[str, Any], place: str) -> Iterator[str]:
    hints, listed = typing.get_type_hints(hint), schema.get("properties", {})
    fields = {key_of(each): each for each in dataclasses.fields(hint)}
    if set(fields) != set(listed):
        yield f"{place}: keys {sorted(set(fields) ^ set(listed))} are in one of {hint.__name__} and schema alone"
    needed = {key for key, each in fields.items() if not is_optional(each)}
    if needed != set(schema.get("required", ())):
        yield f"{place}: {sorted(needed ^ set(schema.get('required', ())))} are required in one alone"
    if schema.get("additionalProperties") is not False:
        yield f"{place}: the schema lets other keys in"
    for key in set(fields) & set(listed):
        yield from differences(hints[fields[key].name], listed[key], root, f"{place}.{key}")


def tuple_differences(arguments: tuple[Any, ...], schema: dict[str, Any], root: dict[str, Any], place: str) -> Any:
    if "array" not in (schema.get("type"), *(schema.get("type") or ())):
        yield f"{place}: {schema.get('type')} is not a list"
    elif arguments[1:] == (...,):
        yield from differences(arguments[0], schema["items"], root, f"{place}[]")
    else:
        if not schema["minItems"] == schema["maxItems"] == len(schema["prefixItems"]) == len(arguments):
            yield f"{place}: it has another length"
        for number, (argument, each) in enumerate(zip(arguments, schema["prefixItems"])):
            yield from differences(argument, each, root, f"{place}[{number}]")


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_keys_and_types_of_its_schema(name):
    assert list(differences(RECORDS[name][0], SCHEMAS[name], SCHEMAS[name])) == []


def facts_of(name: str) -> dict[str, Any]:
    cases = SCHEMAS["report"]["properties"]["pipeline"]["items"]["allOf"]
    case = next(each for each in cases if each["if"]["properties"]["name"]["const"] == name)
    found: dict[str, Any] = case["then"]["properties"]["facts"]["properties"]
    return found


@pytest.mark.parametrize(
    ("hint", "owner", "key"), [(BucketFacts, "shard", "buckets"), (OperatorFacts, "refold-optimizers", "operators")]
)
def test_facts_have_the_keys_and_types_of_the_schema(hint, owner, key):
    """Facts are open: other versions may say more or less, so that their schema requires no key."""
    found = [
        line
        for line in differences(hint, facts_of(owner)[key]["items"], SCHEMAS["report"])
        if "lets other keys in" not in line and "are required in one" not in line
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        (("properties",), {"nix": {"type": "string"}}, "['nix'] are in one"),
        (("properties", "loss"), {"type": "integer"}, ".loss: {'integer'} is not <class 'str'>"),
        (("properties", "states", "items"), {"required": ["tensor"]}, "are required in one alone"),
        (("properties", "ranks", "items"), {"additionalProperties": True}, ".ranks[]: the schema lets other keys in"),
        (("$defs", "Piece", "properties", "stop"), {"type": "number"}, ".pieces[].stop: {'number'} is not"),
        (("properties", "states", "items", "properties", "kind"), {"enum": ["parameter"]}, ".states[].kind:"),
    ],
)
def test_a_planted_difference_is_found(path, change, said):
    schema = json.loads(json.dumps(SCHEMAS["manifest"]))
    table = schema
    for key in path:
        table = table[key]
    table.update(change)
    found = list(differences(Manifest, schema, schema))
    assert found and all(said in line for line in found), found


# --- reading undoes writing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_shard_writes_is_read_as_it_was(name):
    source = gopt.load(FIXTURES / f"{name}.onnx")
    for stage, micro_steps, mesh in ((0, 1, "shard=2"), (3, 1, "dp=2,shard=2"), (2, 2, "shard=2")):
        try:
            made = gopt.shard(source, gopt.Mesh.parse(mesh), stage=stage, accumulate=micro_steps)
        except GoptError:
            assert micro_steps == 2 and name == "mlp_adamw_accum"  # it accumulates by itself
            continue
        for record, kind in ((made.manifest(), documents.MANIFEST), (made.report(), documents.REPORT)):
            read = from_document(type(record), documents.parse_json(record.text(), kind, "text"))
            assert read.text() == record.text()
            assert read.to_json() == record.to_json()


PRINTED = st.characters(codec="utf-8", exclude_categories=["C", "Z"])
"""The readers of schemas take a dot for any character but ends of lines, of which there are several."""


def strategy(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Documents of a schema. Keys that may be absent have no value that stands for absence."""
    if "$ref" in schema:
        return strategy(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    given = schema.get("type", "object")
    if not isinstance(given, str):
        return st.one_of([strategy(schema | {"type": each}, root) for each in given])
    if given == "object":
        return table(schema, root)
    if given == "array" and "prefixItems" in schema:
        return st.tuples(*(strategy(each, root) for each in schema["prefixItems"])).map(list)
    if given == "array":
        return st.lists(strategy(schema["items"], root), min_size=schema.get("minItems", 0), max_size=2)
    if given == "string":
        text = st.text(st.characters(codec="utf-8"), max_size=4)
        return st.from_regex(schema["pattern"], fullmatch=True, alphabet=PRINTED) if "pattern" in schema else text
    low, high = schema.get("minimum"), schema.get("maximum")
    whole = st.integers(-(1 << 62) if low is None else low, (1 << 62) if high is None else high)
    if given == "integer":
        return whole
    fraction = st.floats(low, high, allow_nan=False, allow_infinity=False).filter(lambda value: value % 1)
    return {"number": whole | fraction, "boolean": st.booleans(), "null": st.none()}[given]


ABSENT = (False, [], "", "mean", "dense", "round", "rank", {"values": [], "constants": []})
"""Values that some record leaves out of its document; 1 is another."""


def stated(value: Any) -> bool:
    """Return whether no record leaves a value out."""
    return value not in ABSENT and (isinstance(value, bool) or value != 1)


def table(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    listed = {key: strategy(each, root) for key, each in schema.get("properties", {}).items()}
    needed = {key: each for key, each in listed.items() if key in schema.get("required", ())}
    others = {key: each.filter(stated) for key, each in listed.items() if key not in needed}
    rest = schema.get("additionalProperties")
    if isinstance(rest, dict):
        more = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), strategy(rest, root), max_size=2)
        return st.builds(lambda left, right: right | left, st.fixed_dictionaries(needed, optional=others), more)
    return st.fixed_dictionaries(needed, optional=others)


@pytest.mark.parametrize("name", RECORDS)
@settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_a_document_of_the_schema_is_read_and_written_as_it_was(name, data):
    cls, kind = RECORDS[name]
    document = data.draw(strategy(SCHEMAS[name], SCHEMAS[name]))
    read = from_document(cls, documents.parse_json(json.dumps(document), kind, "drawn"))
    assert json.dumps(to_document(read), sort_keys=True) == json.dumps(document, sort_keys=True)
    assert from_document(cls, to_document(read)) == read


def test_a_value_that_stands_for_absence_is_left_out():
    made = gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), 2)
    document = made.manifest().to_json()
    for state in document["common"]["state"]:
        state |= {"local": False, "copy": False}
    for rank in document["ranks"]:
        rank["accumulators"] = []
    document["synchronised"] = {"values": [], "constants": []}
    read = from_document(Manifest, documents.parse_json(json.dumps(document), documents.MANIFEST, "text"))
    assert read == made.manifest() and read.digest() == made.manifest().digest()


def test_an_unfinished_proof_names_the_value():
    entry = ProofEntry("unproven", 85, ("seen",), "statistic 'seen' is unproven", "")
    assert entry.line().startswith("NOT proven: statistic 'seen' is unproven; 85 of 86 new states")
    assert ProofEntry("unproven", 0, (), "no graph", "").line() == "NOT proven: no graph"

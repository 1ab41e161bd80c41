"""Write gopt/schemas/ from the records of documents: ``python docs/schemas.py``.

A field of a record gives a key of the document: its type and bounds come from the annotation, its description from the
docstring below the field. The description of a record is the first paragraph of its docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import json
import operator
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from gopt.artifact.pass_facts import SPLIT_PASS, SplitFacts, SplitSettings
from gopt.documents.records import BY_PASS, Loose, Open, is_nullable, is_optional, key_of
from gopt.passes import PASSES

SCHEMAS = Path(__file__).parents[1] / "gopt/schemas"
DOCUMENTS = {
    "manifest": ("manifest.json", "gopt.artifact.manifest:Manifest"),
    "report": ("report.json", "gopt.artifact.report_record:Report"),
    "index": ("index.json of a checkpoint", "gopt.artifact.checkpoint_index:CheckpointIndex"),
    "roles": ("Roles of a kept source", "gopt.documents.roles:RolesRecord"),
    "torch": ("Names of PyTorch", "gopt.documents.torch_record:TorchRecord"),
    "config": ("gopt.toml", "gopt.documents.config:GoptConfig"),
    "servers": ("Server map", "gopt.parameter_server.server_map:ServerMap"),
    "golden": ("gopt-golden.toml", "gopt.offline.goldens.golden_files:GoldenConfig"),
    "reproducer": ("reproducer.json", "gopt.offline.reproducer.record:Reproducer"),
    "rank_message": ("Messages of the first rank to its launcher", "gopt.runtime.training.job:StepMessage"),
    "header": ("Header of a safetensors file", "gopt.ir.external_data:SafetensorsHeader"),
    "record": ("Record of a run", "gopt.runtime.parameter_server.run_record:RunRecord"),
    "trace": ("Trace of a run", "gopt.documents.trace_record:TraceFile"),
    "relation": ("Relation", "gopt.verification.proof.relation_file:RelationFile"),
    "device": ("Device", "gopt.offline.device:DeviceFigures"),
    "verification": ("Result of gopt verify", "gopt.offline.html_report.verification_record:VerificationRecord"),
}
"""Schema -> its title, and the record that it is made of."""
MADE = "python docs/schemas.py makes this file of records in gopt"
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def record_of(name: str) -> Any:
    """The record of a schema."""
    module, _, cls = DOCUMENTS[name][1].partition(":")
    return getattr(importlib.import_module(module), cls)


def schema_of(record: Any, title: str) -> dict[str, Any]:
    """The JSON Schema of a record, or of a type with a description. A record that occurs several times is an entry of
    ``$defs``."""
    repeated = [each for each, count in Counter(inner_records(record)).items() if count > 1]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": MADE, "title": title}
    whole = record_schema(record, repeated) if is_record(record) else value_schema(record, repeated)
    defs = {each.__name__: record_schema(each, repeated) for each in repeated}
    return head | whole | ({"$defs": defs} if defs else {})


def inner_records(hint: Any) -> Iterator[Any]:
    """Every record inside a type, once for each place."""
    if is_record(hint):
        inner = list(hints_of(hint).values())
    else:
        inner = list(typing.get_args(hint))
        inner += [each for kinds in passes().values() for each in kinds.values()] if BY_PASS in inner else []
    for each in inner:
        if is_record(each):
            yield each
        yield from inner_records(each)


def is_record(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def record_schema(record: Any, repeated: list[Any]) -> dict[str, Any]:
    hints, said = hints_of(record), descriptions(record)
    properties, required = {}, []
    for each in dataclasses.fields(record):
        hint, label = hints[each.name], key_of(each)
        if is_optional(each) and each.default is None and not is_nullable(each):
            hint = without_none(hint)
        hint = of_values(hint) if issubclass(record, Loose) else hint
        value = {"const": each.default} if each.name == "format" else value_schema(hint, repeated)
        properties[label] = {"description": said.get(each.name, "")} | value
        required += [] if is_optional(each) else [label]
    schema = {"description": said[""], "type": "object", "properties": properties, "required": required}
    loose = [word for word in ("required",) if issubclass(record, Loose)]
    closed = {} if issubclass(record, Open) else {"additionalProperties": False}
    return {word: each for word, each in schema.items() if each != [] and word not in loose} | closed


def value_schema(hint: Any, repeated: list[Any]) -> dict[str, Any]:
    """The schema of a type, without a description of its own."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    inner = functools.partial(value_schema, repeated=repeated)
    if hint in repeated:
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if is_record(hint):
        return {key: each for key, each in record_schema(hint, repeated).items() if key != "description"}
    if isinstance(hint, enum.EnumMeta):
        return {"enum": [each.value for each in hint]}
    if origin is typing.Annotated:
        return functools.reduce(bounded, map(words_of, arguments[1:]), inner(arguments[0]))
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        apart = [each for each in repeated if each not in arguments]  # a reference has no room for None
        return functools.reduce(either, [value_schema(each, apart) for each in arguments])
    if origin is tuple and arguments[1:] == (...,):
        return {"type": "array", "items": inner(arguments[0])}
    if origin is tuple:
        return {
            "type": "array", "prefixItems": [inner(each) for each in arguments], "minItems": len(arguments),
            "maxItems": len(arguments),
        }  # fmt: skip
    if isinstance(origin, type) and issubclass(origin, Mapping):
        allowed = value_schema(arguments[0], []).get("enum", ())
        if allowed:
            listed = {name: {"description": f"The value is for {name}."} | inner(arguments[1]) for name in allowed}
            return {"type": "object", "properties": listed, "additionalProperties": False}
        return {"type": "object"} | ({} if arguments[1] is Any else {"additionalProperties": inner(arguments[1])})
    return {} if hint is Any else {"type": TYPES[hint]}


def words_of(given: Any) -> dict[str, Any]:
    """The words of a schema that a part of a type gives: its bounds, its description, or its cases."""
    if given != BY_PASS:
        return {"description": given} if isinstance(given, str) else given.words()
    cases = [
        {"if": {"properties": {"name": {"const": name}}}, "then": {"properties": made}}
        for name, kinds in passes().items()
        if (made := {key: record_schema(each, []) for key, each in kinds.items() if dataclasses.fields(each)})
    ]
    return {"allOf": cases}


def passes() -> dict[str, dict[str, Any]]:
    """Pass -> the records of its options and facts."""
    split = {"options": SplitSettings, "facts": SplitFacts}
    told = {each.name: {"options": each.options, "facts": each.facts} for each in PASSES.values() if each.facts}
    return {SPLIT_PASS: split} | told


def bounded(schema: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """A schema with the words of bounds; a list of all values needs no type."""
    return words if "enum" in words else schema | words


def either(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value of one of two types, or None: each type has words of its own."""
    if "enum" in a:
        return {"enum": [*a["enum"], *b.get("enum", [None])]}
    both = [given for each in (a, b) for given in ([each["type"]] if isinstance(each["type"], str) else each["type"])]
    return a | b | {"type": list(dict.fromkeys(both))}


def of_values(hint: Any) -> Any:
    """The type of the values of an enum, for documents of versions with other members."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return Annotated[(of_values(arguments[0]), *arguments[1:])]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(of_values, arguments))
    return type(next(iter(hint)).value) if isinstance(hint, enum.EnumMeta) else hint


def without_none(hint: Any) -> Any:
    """The type of a key that is absent for None."""
    parts = [each for each in typing.get_args(hint) if each is not type(None)]
    return functools.reduce(operator.or_, parts)


def hints_of(record: Any) -> dict[str, Any]:
    return typing.get_type_hints(record, include_extras=True)


@functools.cache
def descriptions(record: Any) -> dict[str, str]:
    """The docstring below each field, and under an empty name the first paragraph of the class's own."""
    found = {}
    for cls in reversed([each for each in record.__mro__ if dataclasses.is_dataclass(each)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found | {"": " ".join(inspect.getdoc(record).partition("\n\n")[0].split())}


def text_of(name: str) -> str:
    """The text of a schema's file."""
    return json.dumps(schema_of(record_of(name), DOCUMENTS[name][0]), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in DOCUMENTS:
        (SCHEMAS / f"{name}.schema.json").write_text(text_of(name), encoding="utf-8")

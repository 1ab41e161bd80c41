"""Damaged manifests, reports and indexes: the schema and the records decide alike, wherever types can tell."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import KINDS, damaged, places
from gopt.cli.main import main
from helpers import FIXTURES
from products import fewer, spread

from gopt import documents
from gopt.artifact.checkpoint_index import CheckpointIndex
from gopt.artifact.manifest import Manifest
from gopt.artifact.report_record import Report
from gopt.documents.records import from_document, is_optional, key_of, to_document
from gopt.errors import InputError
from gopt.runtime.parameter_server.run_record import RunRecord

RECORDS: dict[str, tuple[Callable[..., Any], documents.DocumentKind]] = {
    "manifest": (Manifest, documents.MANIFEST),
    "split": (Manifest, documents.MANIFEST),
    "report": (Report, documents.REPORT),
    "index": (CheckpointIndex, documents.INDEX),
    "record": (RunRecord, documents.RECORD),
}
OF_VALUES = re.compile(
    r"is less than|is greater than|does not match|is not one of|was expected|has less than|has more than"
    r"|by_kind: there is no key|should be non-empty|is not valid under"
    r"|is shorter than|is longer than|has non-unique|too (small|large|long|short)"
)
"""What a schema says of values: no type of a record can."""
OF_TEXT = ("surrogate", "digits", "deep", "nan", "infinite", "twice")
"""Damage of the text: no schema sees it."""


@functools.cache
def fields_of(record: type) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    """A record's fields by their keys in a document, and their types by name."""
    return {key_of(each): each for each in dataclasses.fields(record)}, typing.get_type_hints(record)


def conforms(hint: Any, value: Any) -> bool:
    """Whether a document's value has the type of a record's field: independent of schema and reader."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if dataclasses.is_dataclass(hint):
        fields, hints = fields_of(hint)
        return (
            isinstance(value, dict)
            and value.keys() <= fields.keys()
            and all(is_optional(each) or key in value for key, each in fields.items())
            and all(conforms(hints[fields[key].name], each) for key, each in value.items())
            and not any(value[key] is None for key, each in fields.items() if is_optional(each) and key in value)
        )
    if isinstance(hint, enum.EnumMeta):
        return any(type(value) is type(each.value) and value == each.value for each in hint)
    if origin in (typing.Union, types.UnionType):
        return any(conforms(each, value) for each in arguments)
    if origin is tuple and arguments[1:] == (...,):
        return isinstance(value, list) and all(conforms(arguments[0], each) for each in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(conforms, arguments, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(conforms(arguments[1], each) for each in value.values())
    if hint is float and type(value) is int:
        return True
    return type(value) is (type(None) if hint is None else hint)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("written")
    ranks, data = str(folder / "ranks"), str(folder / "data.npz")
    np.savez(data, x=np.zeros((64, 32), np.float32), y=np.zeros(64, np.int64))
    more = ["--mesh", "dp=2,shard=2", "--stage", "3", "--accumulate", "2"]
    assert main(["shard", str(FIXTURES / "mlp_adamw.onnx"), *more, "-o", ranks]) == 0
    run = ["run", ranks, "--data", data, "--set", "lr=1e-3", "--steps", "1", "--checkpoint", str(folder / "kept")]
    assert main(run) == 0
    split = ["split", str(FIXTURES / "emb_adamw.onnx"), "--trainers", "2", "--servers", "2"]
    assert main([*split, "-o", str(folder / "split")]) == 0
    step, late, record = str(FIXTURES / "mlp_adamw.onnx"), str(folder / "late"), folder / "run.json"
    assert main(["split", step, "--trainers", "2", "--servers", "1", "--mode", "async", "-o", late]) == 0
    run = ["run", late, "--data", data, "--set", "lr=1e-3", "--steps", "1", "--record", str(record)]
    assert main(run) == 0
    files = {"record": record, "split": folder / "split/manifest.json", "manifest": Path(ranks, "manifest.json"),
             "report": Path(ranks, "report.json"),
             "index": folder / "kept/step_00000001/index.json"}  # fmt: skip
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()}


@pytest.mark.parametrize(("kind", "name"), fewer(spread([each for each in KINDS if each not in OF_TEXT], RECORDS), 10))
def test_schema_reader_and_writer_decide_alike(name, kind, written):
    cls, format = RECORDS[name]
    for place in places(written[name]):
        if {"options", "facts"} & {*place[:-1]}:
            continue  # of passes: the schema has types for them, and the record keeps them as they are
        text = damaged(written[name], place, kind)
        document, where = json.loads(text), f"{kind} at {place}"
        try:
            found = documents.parse_json(text, format, "drawn")
        except InputError as error:
            by_values = bool(OF_VALUES.search(error.message))
            fits = conforms(cls, document)
            assert not fits or by_values, f"{where}: {error.message}"
            continue
        fits = conforms(cls, document)
        assert fits, f"{where}: the schema takes what is no {cls.__name__}"
        record = from_document(cls, found)
        again = to_document(record)
        undone, same = from_document(cls, again) == record, again == document  # pytest would compare line by line
        assert undone, where
        assert same or kind in ("gone", "false", "empty", "one", "list", "table"), where  # of a default

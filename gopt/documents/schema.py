"""Whether a document fits its schema, and the first violation."""

from __future__ import annotations

import decimal  # noqa: F401  jsonschema_rs panics where an interrupt ends its own import of it
import functools
import json
from importlib import resources
from itertools import islice
from typing import Any, NamedTuple

from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean

VALUE = "\0value\0"
"""Placeholder for a value in a message: the value may be long, or have control characters."""


class Violation(NamedTuple):
    """A violation of the schema: the keys down to the place, the fault, and a nearer key."""

    place: list[str | int]
    message: str
    hint: str | None = None


def first_error(schema: str, document: Any) -> Violation | None:
    """The first violation, or None. Validity is checked first, without copies."""
    validator = _validator(schema)
    if validator.is_valid(document):
        return None
    if (wrong := _violation(schema, _slim(document))) is not None or not isinstance(document, dict):
        return wrong
    for key, value in document.items():
        if isinstance(value, list) and not validator.is_valid({**_slim(document), key: value}):
            return _in_list(schema, document, key)
    return Violation([], "it does not fit its schema")


def _in_list(schema: str, document: dict[str, Any], key: str) -> Violation:
    """Like ``first_error``, for an error inside a long list."""
    validator = _validator(schema)
    rest, value = _slim(document), document[key]
    good, bad = 0, len(value)  # the first ``good`` ones are as they should be, the first ``bad`` ones are not
    while bad - good > 1:
        middle = (good + bad) // 2
        if validator.is_valid({**rest, key: value[good:middle]}):
            good = middle
        else:
            bad = middle
    wrong = _violation(schema, {**rest, key: [_slim(value[good])]})
    if wrong is None or wrong.place[:2] != [key, 0]:
        return Violation([key, good], "it does not fit its schema")
    return wrong._replace(place=[key, good, *wrong.place[2:]])


def _violation(schema: str, document: Any) -> Violation | None:
    """The first violation, or None. Makes two copies of the document."""
    from jsonschema_rs import ValidationError, ValidationErrorKind

    try:
        _validator(schema).validate(document)
    except ValidationError as error:
        position, kind = list(error.instance_path), error.kind
        if isinstance(kind, ValidationErrorKind.AdditionalProperties):
            unknown = kind.unexpected[0]
            hint = did_you_mean(unknown, _known_keys(schema, error.schema_path[:-1]))
            return Violation(position, f"there is no key {show(unknown)}", hint)
        if isinstance(kind, ValidationErrorKind.Required):
            return Violation(position, f"the key {show(kind.property)} is missing")
        return Violation(position, error.message)
    return None


def _known_keys(schema: str, path: list[str | int]) -> list[str]:
    """The keys of a table; ``path``: the table's place in the schema."""
    at = json.loads(_text(schema))
    for key in path:
        at = at[key]
    return list(at.get("properties", ()))


def _slim(document: Any) -> Any:
    """A copy with the beginning of every list and of every long table."""
    left = _SLIM

    def cut(value: Any) -> Any:
        nonlocal left
        left -= 1
        if isinstance(value, list):
            return [cut(item) for item in value[: _FEW if left > 0 else 0]]
        if isinstance(value, dict):
            most = _MANY if left > 0 else _FEW if left > -_SLIM else 0
            return {key: cut(item) for key, item in islice(value.items(), most)}
        return value

    return cut(document)


_FEW, _MANY, _SLIM = 64, 1000, 50_000
"""Maximum numbers of items of a list, of a table and of all values that the copy keeps."""


def _text(schema: str) -> str:
    return resources.files("gopt").joinpath("schemas", f"{schema}.schema.json").read_text(encoding="utf-8")


@functools.cache
def _validator(schema: str) -> Any:
    import jsonschema_rs

    return jsonschema_rs.validator_for(json.loads(_text(schema)), mask=VALUE)

"""Whether a document fits its schema, and the first place where it does not."""

from __future__ import annotations

import decimal  # noqa: F401  jsonschema_rs panics where an interrupt ends its own import of it
import functools
import json
from importlib import resources
from itertools import islice
from typing import Any

VALUE = "\0value\0"
"""Placeholder for a value in a message: the value may be long, or have control characters."""


def first_error(schema: str, found: Any) -> tuple[list[str | int], str] | None:
    """The place and message of the first violation, or None. Validity is checked first: that copies nothing."""
    validator = _validator(schema)
    if validator.is_valid(found):
        return None
    if (wrong := _violation(validator, _slim(found))) is not None or not isinstance(found, dict):
        return wrong
    for key, value in found.items():
        if isinstance(value, list) and not validator.is_valid({**_slim(found), key: value}):
            return _in_list(validator, found, key)
    return [], "it does not fit its schema"


def _in_list(validator: Any, found: dict[str, Any], key: str) -> tuple[list[str | int], str]:
    """Like ``first_error``, for an error inside a long list."""
    rest, value = _slim(found), found[key]
    good, bad = 0, len(value)  # the first ``good`` ones are as they should be, the first ``bad`` ones are not
    while bad - good > 1:
        middle = (good + bad) // 2
        if validator.is_valid({**rest, key: value[good:middle]}):
            good = middle
        else:
            bad = middle
    wrong = _violation(validator, {**rest, key: [_slim(value[good])]})
    if wrong is None or wrong[0][:2] != [key, 0]:
        return [key, good], "it does not fit its schema"
    return [key, good, *wrong[0][2:]], wrong[1]


def _violation(validator: Any, found: Any) -> tuple[list[str | int], str] | None:
    """Place and message of the first violation, or None. It makes two copies of the document."""
    from jsonschema_rs import ValidationError

    try:
        validator.validate(found)
    except ValidationError as error:
        return list(error.instance_path), error.message
    return None


def _slim(found: Any) -> Any:
    """A copy with the beginning of every list and of every long table."""
    left = _SLIM

    def cut(value: Any) -> Any:
        nonlocal left
        left -= 1
        if isinstance(value, list):
            return [cut(each) for each in value[: _FEW if left > 0 else 0]]
        if isinstance(value, dict):
            most = _MANY if left > 0 else _FEW if left > -_SLIM else 0
            return {key: cut(each) for key, each in islice(value.items(), most)}
        return value

    return cut(found)


_FEW, _MANY, _SLIM = 64, 1000, 50_000
"""Maximum numbers of items of a list, of a table and of all values that the copy keeps."""


@functools.cache
def _validator(schema: str) -> Any:
    import jsonschema_rs

    text = resources.files("gopt").joinpath("schemas", f"{schema}.schema.json").read_text(encoding="utf-8")
    return jsonschema_rs.validator_for(json.loads(text), mask=VALUE)

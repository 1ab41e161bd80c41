"""Manifest and report as text that reads and diffs well."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def pretty_json(document: Mapping[str, Any]) -> str:
    """Stable JSON that reads and diffs well: one line a key, and one line an entry in a list of tables."""
    return "".join(json_pieces(document.items()))


def json_pieces(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The same text piece by piece. A value may be an iterator of tables, which is read as the text is."""
    yield "{\n"
    separator = ""
    for key, value in items:
        yield f"{separator}{_line(key)}: "
        if isinstance(value, Iterator):
            yield from _rows(value)
        else:
            yield _value(value)
        separator = ",\n"
    yield "\n}\n"


def _rows(rows: Iterator[Any]) -> Iterator[str]:
    first = next(rows, None)
    if first is None:
        yield "[]"
        return
    yield "[\n" + _line(first)
    for row in rows:
        yield ",\n" + _line(row)
    yield "\n]"


def _value(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(each, list) and each for each in value.values()):
        return "{\n" + ",\n".join(f"{_line(key)}: {_value(each)}" for key, each in value.items()) + "\n}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(_line, value)) + "\n]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

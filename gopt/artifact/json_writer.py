"""Manifest and report as readable text with small diffs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_ROWS = 64
"""Rows of a table that are written in one go."""
_END = "\n}\n"
"""The end of a document: of its table, and of its last line."""
_BETWEEN = '}, {"'


def pretty_json(document: Mapping[str, Any]) -> str:
    """Stable, readable JSON with small diffs: a line per key, and a line per entry in a list of tables."""
    return "".join(json_pieces(document.items()))


def appended(text: str, key: str, value: Any) -> str:
    """The text of ``pretty_json`` for the same document with a further key at the end."""
    return without_end(text) + ",\n" + "".join([f"{_line(key)}: ", *_value(value)]) + _END


def appended_table(text: str, key: str, table: Mapping[str, Any]) -> str:
    """As ``appended``, with a line per key of a table."""
    return without_end(text) + ",\n" + "".join([f"{_line(key)}: ", *_table(table.items())]) + _END


def without_end(text: str) -> str:
    """The text of ``pretty_json`` without the last line."""
    return text.removesuffix(_END)


def json_pieces(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The same text piece by piece. A value may be an iterator of tables, read while writing; so may a value of these
    tables."""
    yield from _table(items)
    yield _END[-1]


def _table(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    yield "{\n"
    separator = ""
    for key, value in items:
        yield f"{separator}{_line(key)}: "
        yield from _value(value)
        separator = ",\n"
    yield _END[:-1]


def _value(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and any(isinstance(part, list) and part for part in value.values()):
        yield from _table(value.items())
    elif isinstance(value, Iterator):
        yield from _rows(value)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from _rows(iter(value))
    else:
        yield _line(value)


def _rows(rows: Iterator[Any]) -> Iterator[str]:
    separator = "[\n"
    while chunk := [*itertools.islice(rows, _ROWS)]:
        if isinstance(chunk[0], dict) and any(isinstance(value, Iterator) for value in chunk[0].values()):
            for row in chunk:
                yield separator
                yield from _long_row(row)
                separator = ",\n"
        else:
            yield separator + _lines(chunk)
        separator = ",\n"
    yield "[]" if separator == "[\n" else "\n]"


def _long_row(row: Mapping[str, Any]) -> Iterator[str]:
    """Write a table with a line per item of each iterator."""
    separator = "{"
    for key, value in row.items():
        yield f"{separator}{_line(key)}: "
        if isinstance(value, Iterator):
            yield from _rows(value)
        else:
            yield _line(value)
        separator = ", "
    yield "}"


def _lines(rows: list[Any]) -> str:
    """Tables on a line each. Written in one go, tables are cut at their borders: a text has no unescaped quote, so only
    inner tables look the same."""
    text = _line(rows)[1:-1]
    if all(row and isinstance(row, dict) for row in rows) and text.count(_BETWEEN) == len(rows) - 1:
        return text.replace(_BETWEEN, '},\n{"')
    return ",\n".join(map(_line, rows))


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

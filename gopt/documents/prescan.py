"""Limits of a JSON text, checked before parsing in linear time and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gopt import limits
from gopt.errors import InputError

_BLOCK = 1 << 20
_LONG = re.compile(rb"(?<![0-9.])[0-9]{%d}" % (limits.NUMBER_DIGITS + 1))
_DIGITS = bytes(ord("0") if chr(item).isdigit() and item < 128 else item for item in range(256))
_TWENTY = b"0" * (limits.NUMBER_DIGITS + 1)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_prescan(data: bytes, name: str) -> None:
    """Refuse a text beyond a limit: depth, number of values, of tables and of keys, length of texts, digits of numbers.
    Raises InputError."""
    bare = b"".join(_outside(data, name))
    containers = bare.count(b"[") + bare.count(b"{")
    _check(name, "values", "DOCUMENT_VALUES", bare.count(b",") + containers)
    brackets = bare.translate(_BRACKETS, _NO_BRACKETS)
    nested = brackets if 2 * brackets.count(b"[") == len(brackets) else b"?"
    for _ in range(limits.DOCUMENT_DEPTH):
        nested = nested.replace(b"[]", b"")
    if nested and _is_deep(brackets):
        raise InputError(f"{name} is nested more than {limits.DOCUMENT_DEPTH} levels deep")
    _check(name, "tables and lists", "DOCUMENT_TABLES", containers)
    _check(name, "keys", "DOCUMENT_KEYS", bare.count(b":"))
    if _TWENTY in bare.translate(_DIGITS) and _LONG.search(bare):
        raise InputError(f"{name} has a number of more than {limits.NUMBER_DIGITS} digits")


def _check(name: str, what: str, limit: str, count: int) -> None:
    most = limits.value(limit)
    if count > most:
        raise InputError(f"{name} has more than {most} {what} ({limit})", limits.hint(limit, count))


def _outside(data: bytes, name: str) -> Iterator[bytes]:
    """The bytes outside of JSON strings, block by block; an unterminated string extends to the end. Raises InputError
    where a string is too long."""
    _check(name, "values", "DOCUMENT_VALUES", data.count(b'"') // 4)
    if b"\\" in data:  # escapes become letters: the quotes that are left begin and end texts
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    inside, length = 0, 0
    for position in range(0, len(data), _BLOCK):
        parts = data[position : position + _BLOCK].split(b'"')
        texts = parts[1 - inside :: 2]
        yield b"".join(parts[inside::2])
        open_first, ends_inside = inside, (inside + len(parts) - 1) % 2
        if texts:
            lengths = [*map(len, texts)]
            lengths[0] += length if open_first else 0
            if max(lengths) > limits.DOCUMENT_TEXT:
                raise InputError(
                    f"{name} has a text of more than {limits.DOCUMENT_TEXT} bytes (DOCUMENT_TEXT)",
                    limits.hint("DOCUMENT_TEXT", len(data)),
                )
            length = lengths[-1] if ends_inside else 0
        inside = ends_inside


def _is_deep(brackets: bytes) -> bool:
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket == ord("[") else -1
        if depth > limits.DOCUMENT_DEPTH:
            return True
        if depth < 0:  # not JSON
            return False
    return False

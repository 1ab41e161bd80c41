"""Small values exchanged by processes, as JSON and the bytes of arrays. Types are a closed list: no data of another
process is unpickled, or runs."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from gopt.collectives.layout import ITEM_BYTES
from gopt.errors import InvariantError, RunError
from gopt.ir.types import numpy_dtype
from gopt.runtime.host_value import array_dtype

T = TypeVar("T")

_RECORDS: dict[str, type] = {}
_SIZE = struct.Struct("<q")
_TUPLE, _SET, _TABLE, _COUNTS, _BYTES, _ARRAY, _RECORD = "tuple", "set", "table", "counts", "bytes", "array", "record"
"""Tags of what JSON has not: an object with the one key, and the parts."""


def exchanged(kind: type[T]) -> type[T]:
    """A frozen dataclass whose records processes may exchange."""
    _RECORDS[kind.__name__] = kind
    return kind


def encode(value: Any) -> bytes:
    """The bytes of a value. Raises InvariantError for a type outside the list."""
    arrays: list[np.ndarray] = []
    text = json.dumps(to_json(value, arrays)).encode()
    return b"".join([_SIZE.pack(len(text)), text, *(array.tobytes() for array in arrays)])


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value of these bytes; raises RunError for bytes not made by ``encode``."""
    view = memoryview(data)
    try:
        (size,) = _SIZE.unpack(view[: _SIZE.size])
        text, rest = view[_SIZE.size :][:size], view[_SIZE.size :][size:]
        value, remainder = _value(json.loads(bytes(text)), rest)
    except (ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise RunError(f"another process sent bytes that gopt cannot read: {type(error).__name__}") from error
    if len(remainder):
        raise RunError("another process sent bytes that gopt cannot read: some are left behind the value")
    return value


def to_json(value: Any, arrays: list[np.ndarray] | None = None) -> Any:
    """A value in JSON; arrays are added to the list, and need one."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)

    def parts(items: Any) -> list[Any]:
        return [to_json(part, arrays) for part in items]

    if isinstance(value, list):
        return parts(value)
    if isinstance(value, np.ndarray) and arrays is not None:
        arrays.append(value)
        return {_ARRAY: [array_dtype(value), list(value.shape)]}
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        return {_RECORD: [name, parts(getattr(value, field.name) for field in fields(_RECORDS[name]))]}
    for tag, kinds, items in _TAGS:
        if isinstance(value, kinds):
            return {tag: parts(items(value))}
    raise InvariantError(f"processes do not exchange values of {name}")


def from_json(value: Any) -> Any:
    """The value given to ``to_json`` without a list of arrays; raises RunError for other JSON."""
    try:
        return _value(value, memoryview(b""))[0]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(f"another process sent bytes that gopt cannot read: {type(error).__name__}") from error


_TAGS: list[tuple[str, Any, Callable[[Any], Any]]] = [
    (_TUPLE, tuple, list),
    (_SET, (set, frozenset), list),
    (_COUNTS, Counter, lambda value: value.items()),
    (_TABLE, dict, lambda value: value.items()),
    (_BYTES, bytes, list),
]


def _value(node: Any, rest: memoryview) -> tuple[Any, memoryview]:
    """A value, and the bytes of further arrays."""
    if not isinstance(node, list | dict):
        return node, rest
    (tag, content), *more = [("", node)] if isinstance(node, list) else node.items()
    if more:
        raise ValueError(tag)
    if tag == _ARRAY:
        dtype, shape = content
        size = math.prod(shape) * ITEM_BYTES[dtype]
        if any(type(size) is not int or size < 0 for size in shape) or size > len(rest):
            raise ValueError(tag)
        return np.frombuffer(bytearray(rest[:size]), numpy_dtype(dtype)).reshape(shape), rest[size:]
    name, parts = content if tag == _RECORD else ("", content)
    values = []
    for part in parts:
        item, rest = _value(part, rest)
        values.append(item)
    return _MAKE[tag](values) if tag != _RECORD else _RECORDS[name](*values), rest


def _pairs(values: list[Any]) -> dict[Hashable, Any]:
    return dict(values)


_MAKE: dict[str, Callable[[list[Any]], Any]] = {
    "": list, _TUPLE: tuple, _SET: set, _TABLE: _pairs, _COUNTS: lambda values: Counter(_pairs(values)), _BYTES: bytes,
}  # fmt: skip

"""Converts frozen dataclasses to documents and back: the fields of a record define the keys and types of the document.

``from_document`` takes a document conforming to the schema, ``to_document`` returns input for ``json``. A field is a
key of the same name, or named by ``key``; fields with the metadata ``OPTIONAL`` are absent for default values. Fields
may be numbers, texts, booleans, enums, records, tuples and mappings from text of such values, and None as an
alternative; a field of type Any keeps its value.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
Convert = Callable[[Any], Any]


OPTIONAL = {"optional": True}
"""Metadata of a dataclass field whose key is absent where the value is the field's default."""

NULLABLE = {"optional": True, "nullable": True}
"""The same, of a field whose key may stand there for None too."""

LINES = {"lines": True}
"""Metadata of a field whose records are written one per line if their own record is an item of a list."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a value, as part of the type of a field: ``Annotated[int, Bounds(minimum=0)]``. ``allowed``: all
    possible values. The fields are JSON Schema's."""

    minimum: int | None = None
    maximum: int | None = None
    pattern: str | None = None
    min_length: int | None = None
    min_items: int | None = None
    allowed: tuple[str, ...] | None = None

    def words(self) -> dict[str, Any]:
        """The bounds in JSON Schema."""
        words = {
            "minimum": self.minimum, "maximum": self.maximum, "pattern": self.pattern, "minLength": self.min_length,
            "minItems": self.min_items, "enum": self.allowed and list(self.allowed),
        }  # fmt: skip
        return {name: item for name, item in words.items() if item is not None}


def one_of(*allowed: str) -> Bounds:
    """The bounds of a text out of a few."""
    return Bounds(allowed=allowed)


Count = Annotated[int, Bounds(minimum=0)]
Positive = Annotated[int, Bounds(minimum=1)]
Amount = Annotated[float, Bounds(minimum=0)]
Name = Annotated[str, Bounds(min_length=1)]
"""A text that is not empty."""
Digest = Annotated[str, Bounds(pattern="^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal digits."""
RunIdentity = Annotated[str, Bounds(pattern="^[0-9a-f]{32}$")]
Dimension = Annotated[int, Bounds(minimum=0, maximum=63)]
WholeNumber = Annotated[int, Bounds(minimum=0, maximum=(1 << 53) - 1)]
"""An integer that a reader with floats alone keeps."""


class Open:
    """A record with a document that may have further keys."""

    __slots__ = ()


class Loose(Open):
    """A record with a document that may also lack keys, and have other words for an enum: written by another
    version."""

    __slots__ = ()


BY_PASS = "by pass"
"""Part of the type of a record whose keys ``options`` and ``facts`` depend on the pass of its key ``name``."""


def key(name: str) -> dict[str, Any]:
    """Metadata of a dataclass field with the key ``name``, if the field has another name."""
    return {"key": name}


def key_of(entry: Field[Any]) -> str:
    """The key of a record's field in the document."""
    name: str = entry.metadata.get("key", entry.name)
    return name


def is_optional(entry: Field[Any]) -> bool:
    """Return whether the key of a record's field may be absent."""
    return bool(entry.metadata.get("optional", False))


def is_nullable(entry: Field[Any]) -> bool:
    """Return whether null is allowed for the key of an optional field."""
    return bool(entry.metadata.get("nullable", False))


def from_document(cls: Callable[..., T], document: Mapping[str, Any]) -> T:
    """The record of type ``cls`` of a document already checked against the schema."""
    record: T = _record_reader(cls)(document)
    return record


def to_document(record: Any) -> dict[str, Any]:
    """The document of a record: new dicts and lists, with keys in the order of the fields."""
    cls: Any = type(record)
    document: dict[str, Any] = _record_writer(cls)(record)
    return document


def document_items(record: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of a record's document in order; a list of records is an iterator over documents."""
    for name, label, convert, default in _plan(type(record), _lazy_writer):
        value = getattr(record, name)
        if default is MISSING or value != default:
            yield label, value if convert is None else convert(value)


def _plan(cls: Any, convert: Callable[[Any], Convert | None]) -> list[tuple[str, str, Convert | None, Any]]:
    """Return each field's name, key, converter, and its default if the key may be absent."""
    hints = typing.get_type_hints(cls)
    return [
        (field.name, key_of(field), convert(hints[field.name]), field.default if is_optional(field) else MISSING)
        for field in fields(cls)
    ]


@functools.cache
def _record_reader(cls: Hashable) -> Convert:
    plan = _plan(cls, _reader)

    def read(document: Mapping[str, Any]) -> Any:
        values = {}
        for name, label, convert, default in plan:
            if default is MISSING or label in document:
                value = document[label]
                values[name] = value if convert is None else convert(value)
            else:
                values[name] = default
        return cls(**values)  # type: ignore[operator]

    return read


@functools.cache
def _record_writer(cls: Hashable) -> Convert:
    plan = _plan(cls, _writer)

    def write(record: Any) -> dict[str, Any]:
        document = {}
        for name, label, convert, default in plan:
            value = getattr(record, name)
            if default is MISSING or value != default:
                document[label] = value if convert is None else convert(value)
        return document

    return write


def _is_record(hint: Any) -> bool:
    return is_dataclass(hint)


def _reader(hint: Any) -> Convert | None:
    """Return the converter of a document's value to type ``hint``; None without conversion."""
    if _is_record(hint):
        return _record_reader(hint)
    if isinstance(hint, enum.EnumMeta):
        return lambda value: hint(value)
    return _container(hint, _reader, tuple)


def _writer(hint: Any) -> Convert | None:
    """The inverse of ``_reader``."""
    if _is_record(hint):
        return _record_writer(hint)
    if isinstance(hint, enum.EnumMeta):
        return lambda value: value.value
    return _container(hint, _writer, list)


def _lazy_writer(hint: Any) -> Convert | None:
    """The same, but for a tuple of records: an iterator of the documents."""
    item: Any = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    if not _is_record(item):
        return _writer(hint)
    write = _line_writer(item) if any("lines" in field.metadata for field in fields(item)) else _record_writer(item)
    return lambda records: map(write, records)


def _line_writer(cls: Any) -> Convert:
    """Like ``_record_writer``, but a field with ``LINES`` is an iterator."""
    write = _record_writer(cls)
    lazy = [(field.name, key_of(field)) for field in fields(cls) if "lines" in field.metadata]
    hints = typing.get_type_hints(cls)
    items = {name: _record_writer(typing.get_args(hints[name])[0]) for name, _ in lazy}

    def write_lines(record: Any) -> dict[str, Any]:
        whole = {name: getattr(record, name) for name, _ in lazy}
        document: dict[str, Any] = write(replace(record, **dict.fromkeys(whole, ())))
        document.update((label, map(items[name], whole[name])) for name, label in lazy)
        return document

    return write_lines


def _container(hint: Any, inner: Callable[[Any], Convert | None], sequence: type) -> Convert | None:
    """A union with None, a tuple or a mapping, with parts converted by ``inner``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        converts = [(_kind(argument), convert) for argument in arguments if (convert := inner(argument)) is not None]
        if len(converts) == 1 and len(arguments) == 2 and type(None) in arguments:
            convert = converts[0][1]
            return lambda value: None if value is None else convert(value)
        return functools.partial(_converted, converts) if converts else None
    if origin is tuple:
        whole = _item(inner, arguments)
        return sequence if whole is None else lambda value: sequence(map(whole, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        read = inner(arguments[1])
        return dict if read is None else lambda value: {name: read(item) for name, item in value.items()}
    return None


def _kind(hint: Any) -> Any:
    """The types of values a part of a union may have, in a document or in a record."""
    origin = typing.get_origin(hint)
    return (list, tuple) if origin is tuple else Mapping if origin is not None else object


def _converted(converts: Sequence[tuple[Any, Convert]], value: Any) -> Any:
    """A value of a union, by the first converter for values of the kind."""
    return next((convert(value) for kind, convert in converts if isinstance(value, kind)), value)


def _item(inner: Callable[[Any], Convert | None], arguments: tuple[Any, ...]) -> Convert | None:
    """Return the converter of the items of a tuple; all have the same type, or need no conversion."""
    if arguments[1:] == (...,):
        return inner(arguments[0])
    assert all(inner(argument) is None for argument in arguments)
    return None

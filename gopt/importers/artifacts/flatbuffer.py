"""Reads tables of a FlatBuffer by the numbers of the fields, and trusts no offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatbuffers import encode, number_types
from flatbuffers.table import Table

MOST = 1 << 20
"""Entries of a list of tables: more are taken for damage."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of bytes in the file."""

    start: int
    length: int


class Fields:
    """A table. Raises ValueError, IndexError or struct.error for contradictory bytes."""

    def __init__(self, data: bytes, start: int) -> None:
        if not 0 <= start < len(data):
            raise ValueError(f"a table at byte {start} of {len(data)}")
        self._data, self._table = data, Table(data, start)

    @classmethod
    def root(cls, data: bytes) -> Fields:
        """The table the file begins with."""
        return cls(data, encode.Get(number_types.UOffsetTFlags.packer_type, data, 0))

    def number(self, field: int, flags: Any, default: Any = 0) -> Any:
        """A number; ``default`` if not stored."""
        offset = self._place(field)
        return self._table.Get(flags, offset) if offset else default

    def text(self, field: int) -> str:
        """A string, '' if not stored."""
        offset = self._place(field)
        return self._table.String(offset).decode("utf-8") if offset else ""

    def table(self, field: int) -> Fields | None:
        """A table, None if not stored."""
        offset = self._place(field)
        return Fields(self._data, self._table.Indirect(offset)) if offset else None

    def tables(self, field: int) -> Iterator[Fields]:
        """A list of tables."""
        for offset in self._items(field, 4):
            yield Fields(self._data, self._table.Indirect(offset))

    def numbers(self, field: int, flags: Any) -> list[int]:
        """A list of numbers."""
        return [self._table.Get(flags, offset) for offset in self._items(field, flags.bytewidth)]

    def byte_range(self, field: int) -> ByteRange | None:
        """The range of a list of bytes, None if not stored; the bytes are not read."""
        offset = self._table.Offset(4 + 2 * field)
        if not offset:
            return None
        count, start = self._table.VectorLen(offset), self._table.Vector(offset)
        if start + count > len(self._data):
            raise ValueError(f"a list of {count} bytes does not fit")
        return ByteRange(start, count)

    def _place(self, field: int) -> int:
        offset = self._table.Offset(4 + 2 * field)
        return self._table.Pos + offset if offset else 0

    def _items(self, field: int, width: int) -> Iterator[int]:
        offset = self._table.Offset(4 + 2 * field)
        if not offset:
            return
        count, start = self._table.VectorLen(offset), self._table.Vector(offset)
        if count > MOST or start + count * width > len(self._data):
            raise ValueError(f"a list of {count} entries does not fit")
        yield from range(start, start + count * width, width)

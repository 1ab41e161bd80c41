"""Messages: a kind, the sender, two numbers, a small note and arrays; and the encoding as bytes."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from gopt.collectives.layout import ITEM_BYTES
from gopt.errors import InvariantError
from gopt.ir.types import numpy_dtype
from gopt.runtime.host_value import dtype_word
from gopt.runtime.session import Array

NOTE_BYTES = 1 << 20
"""Most that a note takes as JSON: it travels with the header, outside the receiver's limit of bytes."""
_DESCRIPTIONS = 4096
"""Descriptions of arrays that are kept: the same keys travel in every step."""
_NO_NOTE = b", null]"
_FIXED = struct.Struct("<qqqqqqq")
"""Kind, source, key, round, bytes of the description, number of the message, and whether its arrays follow it."""


class Kind(IntEnum):
    """Purpose of a message."""

    HELLO = 1
    """A role reports its identity and the files it was started from."""
    WELCOME = 2
    """The answer to HELLO: the role belongs to the job."""
    REFUSED = 3
    """A request or a HELLO is refused; the note says why."""
    PUSH = 4
    """Arrays of one key or bucket go to the one that holds it."""
    PULL = 5
    """Asks for the values of one key or bucket."""
    VALUES = 6
    """The answer to PULL."""
    PUSH_ROWS = 7
    """Ids and rows of a table go to the one that holds them."""
    PULL_ROWS = 8
    """Asks for rows of a table by their ids."""
    ROWS = 9
    """The answer to PULL_ROWS."""
    PARTIAL = 10
    """Partial results of a reduction, among those that hold its parts."""
    TOTAL = 11
    """The result of that reduction."""
    BARRIER = 12
    """A role has come to a barrier."""
    RELEASE = 13
    """All have come to it."""
    SAVE = 14
    """Asks for what a checkpoint takes."""
    SAVED = 15
    """The answer to SAVE."""
    BYE = 16
    """A role sends nothing more."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Type and shape of a sent array; ``dtype`` is a type name of the manifest, such as ``bfloat16``."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        """The specification of an array. Raises InvariantError for an unsupported type."""
        return _spec(array.dtype, array.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def empty(self) -> Array:
        """An uninitialised array of this type and shape."""
        return np.empty(self.shape, numpy_dtype(self.dtype))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@functools.lru_cache(_DESCRIPTIONS)
def _spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> ArraySpec:
    word = dtype_word(dtype)
    if word not in ITEM_BYTES:
        raise InvariantError(f"arrays of {word} cannot be sent")
    return ArraySpec(word, shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A message without arrays, known to the receiver before the arrays arrive."""

    kind: Kind
    source: int
    key: int
    round: int
    arrays: tuple[ArraySpec, ...] = ()
    note: Any = None

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(spec.nbytes for spec in self.arrays)

    def __str__(self) -> str:
        return f"{self.kind.name} of key {self.key} in round {self.round}"


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message. ``source``: number of the sending endpoint. ``key`` and ``round``: numbers with a meaning agreed on by
    sender and receiver. ``note``: a small JSON value."""

    kind: Kind
    source: int
    key: int = 0
    round: int = 0
    arrays: tuple[Array, ...] = ()
    note: Any = None

    @property
    def header(self) -> Header:
        specs = tuple(ArraySpec.of(array) for array in self.arrays)
        return Header(self.kind, self.source, self.key, self.round, specs, self.note)

    @classmethod
    def from_header(cls, header: Header, arrays: Sequence[Array]) -> Message:
        return cls(header.kind, header.source, header.key, header.round, tuple(arrays), header.note)


def encode(header: Header, inline: Sequence[Array] | None, number: int = 0) -> bytes:
    """A header as bytes.

    ``inline``: arrays with bytes after the header. ``number``: identifies a message with separately sent arrays. Raises
    InvariantError where the note is too large or not JSON."""
    try:
        text = _described(header.arrays) if header.note is None else _description(header.arrays, header.note)
    except (TypeError, ValueError) as error:
        raise InvariantError(f"the note of {header} is not JSON: {error}") from error
    if len(text) > NOTE_BYTES:
        raise InvariantError(f"the note of {header} takes {len(text)} bytes, {NOTE_BYTES} are the most")
    numbers = header.kind, header.source, header.key, header.round, len(text), number, inline is not None
    return b"".join([_FIXED.pack(*numbers), text, *(array.tobytes() for array in inline or ())])


def _description(specs: Sequence[ArraySpec], note: Any) -> bytes:
    return json.dumps([[(spec.dtype, spec.shape) for spec in specs], note]).encode()


@functools.lru_cache(_DESCRIPTIONS)
def _described(specs: tuple[ArraySpec, ...]) -> bytes:
    """The encoded description of arrays without a note."""
    return _description(specs, None)


def _parsed(text: bytes) -> tuple[tuple[ArraySpec, ...], Any]:
    """The inverse of ``_description``."""
    specs, note = json.loads(text)
    return tuple(ArraySpec(dtype, tuple(shape)) for dtype, shape in specs), note


@functools.lru_cache(_DESCRIPTIONS)
def _specs_of(text: bytes) -> tuple[ArraySpec, ...]:
    """The arrays in a description without a note."""
    return _parsed(text)[0]


def decode(data: bytes | bytearray) -> tuple[Header, list[Array] | None, int]:
    """The header, the arrays with bytes after the header, and the message's number."""
    kind, source, key, turn, length, number, inline = _FIXED.unpack_from(data)
    text = bytes(data[_FIXED.size : _FIXED.size + length])
    specs, note = (_specs_of(text), None) if text.endswith(_NO_NOTE) else _parsed(text)
    header = Header(Kind(kind), source, key, turn, specs, note)
    if not inline:
        return header, None, number
    arrays, offset = [], _FIXED.size + length
    for spec in header.arrays:
        part = np.frombuffer(data, np.uint8, spec.nbytes, offset)
        arrays.append(part.copy().view(numpy_dtype(spec.dtype)).reshape(spec.shape))  # a copy is aligned
        offset += spec.nbytes
    return header, arrays, number

"""ONNX Runtime's training checkpoint: a FlatBuffer of parameters, optimizer states and properties.

Layout after ``onnxruntime/core/flatbuffers/schema/ort_training_checkpoint.fbs`` and ``ort.fbs``; fields are numbered in
the order of the schema. Values are not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatbuffers import encode, number_types
from flatbuffers.table import Table

from gopt import limits
from gopt.documents.records import to_document
from gopt.errors import InputError
from gopt.ir.types import TensorType, dtype_name
from gopt.notebook import HtmlTable
from gopt.offline.inspect import NamedValue
from gopt.offline.kinds.candidate import Candidate

IDENTIFIER = b"ODTC"
MOST = 1 << 20
"""Entries of a list: more are taken for damage."""
NEXT = "it holds values for the training_model.onnx beside it: gopt inspect FOLDER shows both"


@dataclass(frozen=True, slots=True)
class OrtGroup:
    """Parameters of one optimizer. ``states``: how many tensors each has, ``bytes`` of them all."""

    name: str
    step: int
    learning_rate: float
    parameters: int
    states: int
    bytes: int


@dataclass(frozen=True, slots=True)
class OrtCheckpointInspection(HtmlTable):
    """A checkpoint.

    ``nominal``: it names tensors without values; ``external``: the values are in a file beside it.
    """

    file: str
    file_bytes: int
    version: int
    trainable: tuple[NamedValue, ...]
    frozen: tuple[NamedValue, ...]
    groups: tuple[OrtGroup, ...]
    properties: dict[str, int | float | str]
    nominal: bool
    external: bool
    next: str = NEXT

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "ort_checkpoint"} | to_document(self)


def is_ort_checkpoint(candidate: Candidate) -> bool:
    return candidate.head[4:8] == IDENTIFIER


def inspect_ort_checkpoint(candidate: Candidate) -> OrtCheckpointInspection:
    """Describe a checkpoint; raises InputError for a damaged one."""
    if candidate.size > limits.DOCUMENT_BYTES * 64:
        raise InputError(f"{candidate.path} is too long for a FlatBuffer: {candidate.size} bytes")
    data = candidate.path.read_bytes()
    try:
        return _checkpoint(candidate, _Fields(data, encode.Get(number_types.UOffsetTFlags.packer_type, data, 0)))
    except (struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{candidate.path} is a damaged checkpoint of ONNX Runtime: {error}") from None


class _Fields:
    """A table of a FlatBuffer, its fields by number."""

    def __init__(self, data: bytes, place: int) -> None:
        if not 0 <= place < len(data):
            raise ValueError(f"a table at byte {place} of {len(data)}")
        self._data, self._table = data, Table(data, place)

    def number(self, field: int, flags: Any) -> Any:
        """A number, 0 where it is not stored."""
        place = self._place(field)
        return self._table.Get(flags, place) if place else 0

    def text(self, field: int) -> str:
        place = self._place(field)
        return self._table.String(place).decode("utf-8") if place else ""

    def table(self, field: int) -> _Fields | None:
        place = self._place(field)
        return _Fields(self._data, self._table.Indirect(place)) if place else None

    def tables(self, field: int) -> Iterator[_Fields]:
        for place in self._items(field, 4):
            yield _Fields(self._data, self._table.Indirect(place))

    def numbers(self, field: int, flags: Any) -> list[int]:
        return [self._table.Get(flags, place) for place in self._items(field, flags.bytewidth)]

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


def _checkpoint(candidate: Candidate, root: _Fields) -> OrtCheckpointInspection:
    module, bag = root.table(1), root.table(3)
    properties: dict[str, int | float | str] = {}
    if bag is not None:
        properties |= {each.text(0): each.number(1, number_types.Int64Flags) for each in bag.tables(0)}
        properties |= {each.text(0): each.number(1, number_types.Float32Flags) for each in bag.tables(1)}
        properties |= {each.text(0): each.text(1) for each in bag.tables(2)}
    return OrtCheckpointInspection(
        file=candidate.path.name,
        file_bytes=candidate.size,
        version=root.number(0, number_types.Int32Flags),
        trainable=() if module is None else tuple(map(_tensor, module.tables(0))),
        frozen=() if module is None else tuple(map(_tensor, module.tables(1))),
        groups=tuple(map(_group, root.tables(2))),
        properties=properties,
        nominal=module is not None and bool(module.number(2, number_types.BoolFlags)),
        external=module is not None and bool(module.number(3, number_types.BoolFlags)),
    )


def _tensor(fields: _Fields) -> NamedValue:
    code = fields.number(3, number_types.Int32Flags)
    shape = tuple(fields.numbers(2, number_types.Int64Flags))
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    dtype = dtype_name(code) if code else "undefined"
    return NamedValue(fields.text(0), dtype, shape, TensorType(dtype, shape).nbytes if code else 0)


def _group(fields: _Fields) -> OrtGroup:
    states = [list(map(_tensor, each.tables(1))) for each in fields.tables(3)]
    return OrtGroup(
        fields.text(0), fields.number(1, number_types.Int64Flags), fields.number(2, number_types.Float32Flags),
        len(states), max(map(len, states), default=0), sum(tensor.bytes for each in states for tensor in each),
    )  # fmt: skip

"""The bytes of a model file, and the protobuf message while needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto

from gopt.errors import InputError

if TYPE_CHECKING:
    from gopt.ir.chunked_inference import KnownTypes

_NO_MEMORY, _DEPTH = "alloc failed", "MaxDepth"


def parse_model(data: bytes) -> ModelProto:
    """Raise DecodeError for bytes of no model; InputError for graphs nested too deeply, and MemoryError, which protobuf
    reports as the same."""
    try:
        model: ModelProto = ModelProto.FromString(data)
    except DecodeError as error:
        if _NO_MEMORY in str(error):
            raise MemoryError from None
        if _DEPTH in str(error):
            raise InputError(
                "nests graphs in graphs deeper than protobuf reads, which is about 30", "unroll some of its If and Loop"
            ) from None
        raise
    return model


def refill(field: Any, entries: Iterable[Any]) -> None:
    """Replace the entries of a repeated field of a message; old entries may be among the new."""
    rest = list(entries)
    del field[:]
    field.extend(rest)


class ModelFile:
    """``data``: the file's bytes; ``model``: the message, parsed again after a release; ``known_types``: of
    results in earlier files of a kind.

    A parsed message takes about six times the memory of the bytes, and lives as long as any part.
    """

    def __init__(self, data: bytes, known_types: KnownTypes | None = None) -> None:
        self.data, self.known_types = data, known_types
        self._model: ModelProto | None = None

    @property
    def model(self) -> ModelProto:
        """Raise DecodeError for bytes of no model, MemoryError."""
        if self._model is None:
            self._model = parse_model(self.data)
        return self._model

    def release(self) -> None:
        """Free the message unless another object refers to a part."""
        self._model = None

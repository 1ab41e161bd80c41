"""Reads ONNX Runtime's training checkpoint: a FlatBuffer of parameters, optimizer states and properties.

Layout after ``onnxruntime/core/flatbuffers/schema/ort_training_checkpoint.fbs`` and ``ort.fbs``; fields are numbered in
the order of the schema. Values are not read: a tensor says where they lie.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flatbuffers import number_types

from gopt import limits
from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.flatbuffer import ByteRange, Fields
from gopt.importers.artifacts.hints import SAVE_AGAIN
from gopt.ir.external_data import check_dims, naming, regular_size, show
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, dtype_name

IDENTIFIER = b"ODTC"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint. ``byte_range``: of its value in the file, or None."""

    name: str
    type: TensorType
    byte_range: ByteRange | None

    @property
    def nbytes(self) -> int:
        return 0 if self.type.dtype == "undefined" else self.type.nbytes


@dataclass(frozen=True, slots=True)
class ParameterStates:
    """The optimizer states of a parameter, named ``momentum0`` and so on."""

    parameter: str
    states: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """Parameters of an optimizer after ``step`` updates, with the rate ``learning_rate``."""

    name: str
    step: int
    learning_rate: float
    parameters: tuple[ParameterStates, ...]


@dataclass(frozen=True, slots=True)
class OrtCheckpoint:
    """A checkpoint. ``nominal``: with names of tensors only; ``external``: values are in a file beside."""

    path: Path
    version: int
    trainable: tuple[Stored, ...]
    frozen: tuple[Stored, ...]
    groups: tuple[OptimizerGroup, ...]
    properties: dict[str, int | float | str]
    nominal: bool
    external: bool

    def value(self, stored: Stored) -> Tensor | None:
        """The value of a tensor, left in the file; None without a value. Raises InputError."""
        if stored.byte_range is None:
            if self.external:
                raise UnsupportedError(
                    f"the value of {show(stored.name)} is in a file beside the checkpoint",
                    "save the checkpoint in one file: onnxruntime does below 1.8 GB",
                )
            return None
        if stored.byte_range.length != stored.type.nbytes:
            raise InputError(
                f"{show(stored.name)} has {stored.byte_range.length} bytes in the checkpoint, and {stored.type} takes "
                f"{stored.type.nbytes}",
                SAVE_AGAIN,
            )
        return Tensor(stored.type, path=str(self.path.absolute()), offset=stored.byte_range.start)


def read_checkpoint(path: Path) -> OrtCheckpoint:
    """Read a checkpoint; raises InputError for a damaged or too long file."""
    with naming(str(path)):
        size = regular_size(str(path))
        if size > limits.CHECKPOINT_BYTES:
            most = limits.CHECKPOINT_BYTES
            raise InputError(
                f"is too long for a FlatBuffer: {size} bytes, at most {most} are read (CHECKPOINT_BYTES)",
                limits.hint("CHECKPOINT_BYTES", size),
            )
        data = path.read_bytes()
        try:
            return _checkpoint(path, Fields.root(data))
        except (struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"is a damaged checkpoint of ONNX Runtime: {error}", SAVE_AGAIN) from None


def _checkpoint(path: Path, root: Fields) -> OrtCheckpoint:
    module, bag = root.table(1), root.table(3)
    properties: dict[str, int | float | str] = {}
    if bag is not None:
        properties |= {table.text(0): table.number(1, number_types.Int64Flags) for table in bag.tables(0)}
        properties |= {table.text(0): table.number(1, number_types.Float32Flags) for table in bag.tables(1)}
        properties |= {table.text(0): table.text(1) for table in bag.tables(2)}
    return OrtCheckpoint(
        path=path,
        version=root.number(0, number_types.Int32Flags),
        trainable=() if module is None else _tensors(module.tables(0)),
        frozen=() if module is None else _tensors(module.tables(1)),
        groups=tuple(map(_group, root.tables(2))),
        properties=properties,
        nominal=module is not None and bool(module.number(2, number_types.BoolFlags)),
        external=module is not None and bool(module.number(3, number_types.BoolFlags)),
    )


def _tensors(tables: Iterable[Fields]) -> tuple[Stored, ...]:
    tensors = tuple(map(_tensor, tables))
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"it has {show(tensor.name)} twice")
        names.add(tensor.name)
    return tensors


def _tensor(fields: Fields) -> Stored:
    name, code = fields.text(0), fields.number(3, number_types.Int32Flags)
    shape = tuple(fields.numbers(2, number_types.Int64Flags))
    dtype = dtype_name(code) if code else "undefined"
    check_dims(shape, dtype, f"tensor {show(name)}")
    return Stored(name, TensorType(dtype, shape), fields.byte_range(4))


def _group(fields: Fields) -> OptimizerGroup:
    parameters = tuple(ParameterStates(table.text(0), _tensors(table.tables(1))) for table in fields.tables(3))
    return OptimizerGroup(
        fields.text(0), fields.number(1, number_types.Int64Flags), fields.number(2, number_types.Float32Flags),
        parameters,
    )  # fmt: skip

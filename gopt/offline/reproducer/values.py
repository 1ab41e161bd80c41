"""Models without values: large stored values are taken out of a model, and others drawn instead.

Values of at most ``limits.CHECKED_BYTES`` stay: shapes, axes and scalars, which define the graph."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from gopt import limits
from gopt.errors import InputError
from gopt.ir.external_data import DataFolder, show
from gopt.ir.types import FLOATS, TensorType, dtype_name, nbytes, numpy_dtype

LEFT_OUT = "gopt: value left out"
"""The doc_string of a tensor whose value was taken out of the model file."""
_DATA = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def model_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every stored tensor of a model: initializers and attributes, in bodies and functions too."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _graph_tensors(attribute.g)
            for body in attribute.graphs:
                yield from _graph_tensors(body)


def is_external(tensor: TensorProto) -> bool:
    """Return whether the value is in another file."""
    return tensor.data_location == TensorProto.EXTERNAL


def tensor_bytes(tensor: TensorProto) -> int:
    """Bytes of the value; raises InputError for sizes that no tensor has."""
    if any(size < 0 for size in tensor.dims) or len(tensor.dims) > limits.DIMENSIONS:
        raise InputError(f"tensor {show(tensor.name)} has no valid shape")
    return nbytes(dtype_name(tensor.data_type), math.prod(tensor.dims))


def leave_out_values(model: ModelProto) -> None:
    """Take every embedded value above ``limits.CHECKED_BYTES`` out of the model file."""
    for tensor in model_tensors(model):
        _leave_out(tensor)


def _leave_out(tensor: TensorProto) -> None:
    if is_external(tensor) or tensor_bytes(tensor) <= limits.CHECKED_BYTES:
        return
    for name in _DATA:
        tensor.ClearField(name)
    tensor.doc_string = LEFT_OUT


def move_external(model: ModelProto, folder: DataFolder, location: str) -> list[tuple[Path, int, int]]:
    """Give external values new places, one after the other in one file ``location``; small ones move into the model.

    Returns path, offset and bytes of each value in the order of the new file. Raises InputError as ``load`` does.
    """
    moved, offset = [], 0
    for tensor in model.graph.initializer:
        if not is_external(tensor):
            continue
        kind = TensorType(dtype_name(tensor.data_type), tuple(tensor.dims))
        external = folder.tensor(tensor, kind)
        tensor.ClearField("external_data")
        if kind.nbytes <= limits.CHECKED_BYTES:
            tensor.ClearField("data_location")
            tensor.raw_data = external.numpy().tobytes()
            continue
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(kind.nbytes))):
            tensor.external_data.add(key=key, value=value)
        moved.append((Path(external.path), external.offset, kind.nbytes))
        offset += kind.nbytes
    return moved


def draw(tensor: TensorProto) -> bytes:
    """A value for a tensor without a value: small positive numbers by name; zeros for other types than floats."""
    kind, count = dtype_name(tensor.data_type), math.prod(tensor.dims)
    if kind not in FLOATS:
        return bytes(tensor_bytes(tensor))
    drawn = np.random.default_rng(zlib.crc32(tensor.name.encode())).uniform(0.01, 0.1, count)
    data: bytes = drawn.astype(numpy_dtype(kind)).tobytes()
    return data


def fill_values(model: ModelProto) -> bool:
    """Draw the values taken out of a model; says whether any were missing.

    Raises InputError for values of more than ``limits.REPRODUCER_VALUES``."""
    missing = [tensor for tensor in model_tensors(model) if tensor.doc_string == LEFT_OUT and not is_external(tensor)]
    total = sum(map(tensor_bytes, missing))
    if total > limits.REPRODUCER_VALUES:
        raise InputError(
            f"its values would take {total} bytes, at most {limits.REPRODUCER_VALUES} are drawn (REPRODUCER_VALUES)",
            limits.hint("REPRODUCER_VALUES", total),
        )
    for tensor in missing:
        tensor.raw_data = draw(tensor)
        tensor.ClearField("doc_string")
    return bool(missing)


def write_external(model: ModelProto, path: Path) -> None:
    """Make the missing file of external values: drawn, or all zeros if many.

    Raises InputError for places beyond ``limits.REPRODUCER_FILE``, OSError.
    """
    ranges = []
    for tensor in model.graph.initializer:
        if is_external(tensor):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            offset, size = entries.get("offset", "0"), tensor_bytes(tensor)
            if len(offset) > limits.NUMBER_DIGITS or not offset.isdecimal():
                raise InputError(f"the offset of tensor {show(tensor.name)} is not a number")
            ranges.append((int(offset), size, tensor))
    end = max((offset + size for offset, size, _ in ranges), default=0)
    if end > limits.REPRODUCER_FILE:
        raise InputError(
            f"its values would take {end} bytes, at most {limits.REPRODUCER_FILE} (REPRODUCER_FILE)",
            limits.hint("REPRODUCER_FILE", end),
        )
    drawn = sum(size for _, size, _ in ranges) <= limits.REPRODUCER_VALUES
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(max(end, path.stat().st_size))
        for offset, _, tensor in ranges if drawn else ():
            file.seek(offset)
            file.write(draw(tensor))

"""Inputs, outputs and initializers of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

import onnx
from onnx import GraphProto, TensorProto

from gopt import limits
from gopt.errors import InputError, UnsupportedError
from gopt.ir.external_data import DataFolder, check_dims, show
from gopt.ir.symbol_table import SymbolTable, text
from gopt.ir.tensor import Tensor
from gopt.ir.tensor_proto import check_data, stored_type
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType, dtype_name, known

_COPIED_BYTES = 16 << 20
"""Maximum size of stored values, in bytes, that are copied so that the message of the file can be freed."""

_SIZES = frozenset({"int32", "int64"})
"""The types of shapes and axes."""


def read_inputs(body: GraphProto, symbols: SymbolTable) -> dict[str, TensorType]:
    """Return the graph's inputs by name; InputError for a repeated name, or for an input without type and value."""
    stored = {tensor.name for tensor in body.initializer}
    result: dict[str, TensorType] = {}
    for name, kind in decoded(body.input, lambda info: _io_type(info, "input")):
        if name in result:
            raise InputError(f"two graph inputs are named {show(name)}")
        symbols.define(name, "a graph input")
        if not known(kind.dtype) and name not in stored:
            raise InputError(f"input {show(name)} has no element type")
        result[name] = kind
    return result


def read_outputs(body: GraphProto, symbols: SymbolTable) -> dict[str, TensorType]:
    """Return the graph's outputs by name, after reading all nodes: InputError for an output made by no node."""
    result: dict[str, TensorType] = {}
    decode = TypeDecoder(lambda info: _io_type(info, "output"))
    for info in body.output:
        if info.name in result:
            raise InputError(f"two graph outputs are named {show(info.name)}", "list each output once")
        if not info.name or info.name not in symbols.defined:
            raise InputError(f"graph output {show(info.name)} is undefined: no node makes it")
        result[info.name] = decode(info)
    return result


def _io_type(info: onnx.ValueInfoProto, what: str) -> TensorType:
    owner = f"{what} {show(info.name)}"
    kind = info.type.WhichOneof("value")
    if kind not in (None, "tensor_type"):
        article = "an" if kind[0] in "aeiou" else "a"
        raise UnsupportedError(
            f"{owner} is {article} {kind.removesuffix('_type')}, not a dense tensor",
            "give its tensors as inputs and outputs of their own",
        )
    code = info.type.tensor_type.elem_type
    if code and dtype_name(code) == "undefined":
        raise UnsupportedError(f"{owner} has element type {code}, which gopt does not know")
    return declared(info, owner)


def declared(info: onnx.ValueInfoProto, owner: str) -> TensorType:
    """Return the type of a value in the file, of sane sizes; InputError naming the ``owner`` for others."""
    kind = read_type(info.type)
    check_dims(kind.shape or (), kind.dtype, owner)
    for size in kind.shape or ():
        if isinstance(size, bytes):
            text(size)
    return kind


def read_initializers(
    body: GraphProto, inputs: dict[str, TensorType], symbols: SymbolTable, folder: DataFolder
) -> dict[str, Tensor]:
    """Return stored values by name; an input of open type gets the value's type."""
    result: dict[str, Tensor] = {}
    for proto in body.initializer:
        name = proto.name
        if name in result:
            raise InputError(f"two initializers are named {show(name)}")
        if name not in inputs:
            symbols.define(name, "an initializer")
        kind = stored_type(proto, f"initializer {show(name)}")
        if name in inputs:
            inputs[name] = _agreed(name, inputs[name], kind)
        if proto.data_location == TensorProto.EXTERNAL:
            result[name] = folder.tensor(proto, kind)
            if name not in inputs and kind.dtype in _SIZES and kind.nbytes <= limits.CHECKED_BYTES:
                result[name] = _inside(name, result[name])
        else:
            check_data(proto, kind, f"initializer {show(name)}")
            result[name] = Tensor(kind, proto=proto)
    _detach(result.values())
    return result


def _inside(name: str, tensor: Tensor) -> Tensor:
    """Return a small constant of a data file as a constant of the model: shape inference may read a shape or axes."""
    return Tensor(tensor.type, proto=onnx.numpy_helper.from_array(tensor.numpy(), name))


def _detach(tensors: Iterable[Tensor]) -> None:
    """Give stored values new messages, unless large: a part keeps the whole file's message alive."""
    copied = [tensor for tensor in tensors if tensor.proto is not None]
    if sum(tensor.nbytes for tensor in copied) > _COPIED_BYTES:
        return
    for tensor in copied:
        copy = deepcopy(tensor.proto)
        tensor.proto = copy


def _agreed(name: str, declared: TensorType, stored: TensorType) -> TensorType:
    """The type of an input with a stored value. A symbol stays a symbol: another value may be fed."""
    if declared.shape is None or not known(declared.dtype):
        shape = stored.shape if declared.shape is None else declared.shape
        declared = TensorType(declared.dtype if known(declared.dtype) else stored.dtype, shape)
    if declared.dtype != stored.dtype or not declared.may_have_shape_of(stored):
        raise InputError(f"input {show(name)} is {declared}, but its initializer is {stored}")
    return declared


def refuse_sparse(body: GraphProto) -> None:
    """Raises UnsupportedError for a body storing a sparse tensor."""
    if body.sparse_initializer:
        name = show(body.sparse_initializer[0].values.name)
        raise UnsupportedError(f"initializer {name} is sparse", "store it as a dense tensor")


class TypeDecoder:
    """The types values are declared with. A graph has few distinct types: each is decoded, and held, once."""

    def __init__(self, decode: Callable[[onnx.ValueInfoProto], TensorType]) -> None:
        self._decode = decode
        self._seen: dict[bytes, TensorType] = {}

    def __call__(self, info: onnx.ValueInfoProto) -> TensorType:
        key = info.type.SerializeToString()
        kind = self._seen.get(key)
        if kind is None:
            kind = self._seen[key] = self._decode(info)
        return kind


def decoded(
    infos: Iterable[onnx.ValueInfoProto], decode: Callable[[onnx.ValueInfoProto], TensorType]
) -> Iterator[tuple[str, TensorType]]:
    """Names and types of values."""
    decoder = TypeDecoder(decode)
    for info in infos:
        yield info.name, decoder(info)

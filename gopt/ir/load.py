"""Loads an ONNX file as a Graph, or refuses it with a one-line message.

Later code relies on the checks here: every value is defined once and read afterwards, sizes are sane, stored bytes
match their shapes, and external data lies inside the model's folder. Large values are not copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import onnx.defs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto, OperatorSetIdProto, ValueInfoProto

from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.ir.chunked_inference import KnownTypes, header_for_chunks
from gopt.ir.external_data import DataFolder, naming, regular_size, show
from gopt.ir.functions import check_functions
from gopt.ir.graph import Graph
from gopt.ir.graph_io import read_initializers, read_inputs, read_outputs, refuse_sparse
from gopt.ir.inference import add_types, declared_types
from gopt.ir.model_file import ModelFile
from gopt.ir.node_reader import read_nodes
from gopt.ir.nodes import captures, name_apart
from gopt.ir.onnx_checker import check_legal, merge_fields
from gopt.ir.scopes import name_bodies_apart
from gopt.ir.symbol_table import SymbolTable, text
from gopt.ir.tensor import Tensor
from gopt.ir.tensor_proto import stored_type
from gopt.ir.topological_order import check_order
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType, known
from gopt.ir.wire_format import check_parts, encoded_nodes
from gopt.system.garbage import gc_paused
from gopt.text.suggestions import files_with_suffix

_PROTOBUF_LIMIT = 2**31 - 1
_OWN_VALUES = 4
"""Version of the file format since which stored values need not be inputs, as those that gopt adds are not."""


def load(path: str | os.PathLike[str], *, own: bool = False) -> Graph:
    """Return the graph in an ONNX file.

    Initializers keep their TensorProto or a reference to external data; no value is read. ``own`` permits names
    beginning with ``gopt.``, for reading gopt's own output.

    Raises InputError if the file is missing, malformed, truncated or hostile, and for a model refused by the full check
    of ``onnx.checker``; UnsupportedError for training_info, the Gradient operator, sparse initializers, and inputs or
    outputs other than dense tensors.
    """
    name = os.fsdecode(path)
    with naming(name), gc_paused():
        return checked_graph(read_file(name), name, own=own)


def load_first(path: str, types: KnownTypes) -> Graph:
    """Return the graph in a file of gopt's own, and add the types of results to ``types``, for further files of a kind;
    raises as ``load`` does."""
    with naming(path), gc_paused():
        file = read_file(path)
        file.known_types = types
        return checked_graph(file, path, own=True)


def checked_graph(file: ModelFile, path: str, *, own: bool = False) -> Graph:
    """Return the graph of a model with external data, if any, beside ``path``.

    Raises InputError and UnsupportedError as ``load`` does, without a file's name.
    """
    check_functions(file.model)
    try:
        return _graph(file, DataFolder(path), own)
    except UnsupportedError:
        check_legal(file)  # a file that is not a valid ONNX is refused as that
        raise


def outline(path: str | os.PathLike[str], refusal: GoptError) -> Graph:
    """Return the graph of a valid file ``load`` refuses, to show the file: a graph without nodes, or with values that
    are no tensors, typed by the name of the kind. Sparse values are left out, no type is inferred.

    Raises ``refusal`` for any other cause, and InputError for a file refused by onnx's checker.
    """
    name = os.fsdecode(path)
    with naming(name), gc_paused():
        file = read_file(name)
        check_legal(file)
        if isinstance(refusal, InputError) and file.model.graph.node:
            raise refusal
        model, body, symbols = file.model, file.model.graph, SymbolTable(None)
        inputs, outputs = ({info.name: _shown(info) for info in values} for values in (body.input, body.output))
        initializers = {value.name: Tensor(stored_type(value, value.name), proto=value) for value in body.initializer}
        nodes = read_nodes(body.node, encoded_nodes(file.data), symbols, own=True)
        types = {info.name: _shown(info) for info in body.value_info} | inputs | outputs
        types |= {name: tensor.type for name, tensor in initializers.items()}
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        return Graph(body.name, nodes, inputs, outputs, initializers, types, header_of(model), metadata)


def _shown(info: ValueInfoProto) -> TensorType:
    kind = info.type.WhichOneof("value") or "tensor_type"
    return read_type(info.type) if kind == "tensor_type" else TensorType(kind.removesuffix("_type"), None)


def graph_of(model: ModelProto, path: str | os.PathLike[str] = "the model") -> Graph:
    """Return the graph of a model in memory, checked like a file; external data lie beside ``path``."""
    name = os.fsdecode(path)
    with naming(name), gc_paused():
        return checked_graph(ModelFile(model.SerializeToString(deterministic=True)), name)


def read_bytes(path: str) -> bytes:
    """Return the bytes of a file that may be a model: neither too long nor of too many parts."""
    data = uncounted_bytes(path)
    check_parts(data)
    return data


def uncounted_bytes(path: str) -> bytes:
    """Return the bytes of a file that may be a model, of any number of parts."""
    check_model_size(regular_size(path))
    try:
        with open(path, "rb") as stream:
            if stream.peek(1)[:1] == b"\0":  # no field of any message begins so
                raise InputError("is not an ONNX model: it begins with a zero")
            data = stream.read()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}") from error
    return data


def read_file(path: str) -> ModelFile:
    """Return the file as a model with at least a version, an operator set and a graph."""
    data = read_bytes(path)
    file = ModelFile(data)
    try:
        model = file.model
    except DecodeError:
        raise _not_onnx(data, path) from None
    if not (model.ir_version > 0 and (model.HasField("graph") or model.opset_import)):
        raise _not_onnx(data, path)  # some text parses as protobuf by accident
    if not model.HasField("graph"):
        raise InputError("holds no graph")
    if not model.opset_import:
        raise InputError("names no operator set (opset_import is empty)")
    return file


def check_model_size(size: int) -> None:
    """Raises InputError for more bytes than a model file has."""
    if size > _PROTOBUF_LIMIT:
        raise InputError(f"{size} bytes: a protobuf file has at most 2 GiB", "keep the values in external data")


def _not_onnx(data: bytes, path: str) -> InputError:
    head = data[:4096]
    if head.startswith(b"version https://git-lfs"):
        return InputError("is a Git LFS pointer, not an ONNX model", "git lfs pull fetches the file itself")
    try:
        text = head.decode("utf-8") if len(head) == len(data) else head.decode("utf-8", "ignore")
        if all(char.isprintable() or char in "\n\r\t\f" for char in text):
            script = path.endswith(".py")
            hints = [f"gopt export {show(path)} -o step.onnx makes a step of PyTorch code"] if script else []
            return InputError("is a text file, not an ONNX model", *hints)
    except UnicodeDecodeError:
        pass
    if data[:1] == b"\x08":  # the tag of ir_version, which every exporter writes first
        return InputError("is truncated or damaged: it begins like an ONNX model, but the rest is not valid")
    models = files_with_suffix(os.path.dirname(path), ".onnx")
    hints = [f"if it holds values of a model, give the model, such as {show(models[0])}"] if models else []
    return InputError("is not an ONNX model", *hints)


def _graph(file: ModelFile, folder: DataFolder, from_gopt: bool) -> Graph:
    model, body = file.model, file.model.graph
    _refuse_forms(model)
    header = header_of(model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    symbols = SymbolTable(None if from_gopt else _reserved_hint(metadata))
    inputs = read_inputs(body, symbols)
    initializers = read_initializers(body, inputs, symbols, folder)
    nodes = read_nodes(body.node, encoded_nodes(file.data), symbols, from_gopt)
    if symbols.bodies or model.functions:
        apart = _apart(file)
        if apart is not None:
            return _graph(apart, folder, from_gopt)
    check_order(nodes, {"", *inputs, *initializers})
    name_apart(nodes)
    outputs = read_outputs(body, symbols)
    graph = Graph(body.name, nodes, inputs, outputs, initializers, {}, header, metadata)
    graph.types = declared_types(body, symbols.defined)
    chunk_header = header_for_chunks(model, nodes, file.known_types, flat=not symbols.bodies)
    del model, body, symbols  # the message of a long graph is freed before types are inferred
    add_types(graph, file, chunk_header)
    for name, kind in outputs.items():
        if not known(kind.dtype):
            outputs[name] = graph.types.get(name, kind)
    return graph


def _apart(file: ModelFile) -> ModelFile | None:
    """Return the file with names of bodies unlike the names around; None if unlike already. Raises as ``check_legal``,
    because a body may not redefine earlier names."""
    model = file.model
    if not name_bodies_apart(model):
        return None
    check_legal(ModelFile(file.data))
    return ModelFile(model.SerializeToString(deterministic=True))


def _refuse_forms(model: ModelProto) -> None:
    body = model.graph
    schema_versions = onnx.defs.C.schema_version_map()
    for imports in (model.opset_import, *(function.opset_import for function in model.functions)):
        _refuse_two_versions(imports)
    for entry in (*model.opset_import, *(opset for function in model.functions for opset in function.opset_import)):
        newest = schema_versions.get("" if entry.domain == "ai.onnx" else entry.domain, (0, entry.version))[1]
        if entry.version > newest:
            what = f"operator set {entry.version} of domain {show(entry.domain or 'ai.onnx')}"
            raise InputError(
                f"needs {what}, and the installed onnx supports them up to {newest}",
                f"install a newer onnx, or export for operator set {newest}",
            )
    if model.training_info:
        count = len(model.training_info)
        raise UnsupportedError(
            f"training_info holds {count} training {'step' if count == 1 else 'steps'}, and this reads plain graphs",
            "gopt shard, inspect, verify and diff read them",
        )
    idle = any(entry.key == "gopt.role" for entry in model.metadata_props)  # a server that owns nothing
    if not body.node and not idle:
        raise InputError("its graph has no nodes")
    refuse_sparse(body)
    for function in model.functions:
        for node in function.node:
            captures(node, SymbolTable(None, function=True))


def _refuse_two_versions(imports: Iterable[OperatorSetIdProto]) -> None:
    versions: dict[str, int] = {}
    for entry in imports:
        domain = entry.domain or "ai.onnx"
        if versions.setdefault(domain, entry.version) != entry.version:
            raise InputError(
                f"imports two versions of domain {show(domain)}: {versions[domain]} and {entry.version}",
                "keep only the one in opset_import that the nodes were written for",
            )


def header_of(model: ModelProto) -> ModelProto:
    """The model without the graph; raises InputError for texts that are not UTF-8."""
    header = ModelProto()
    for field, value in model.ListFields():
        if isinstance(value, bytes):
            raise InputError(f"{field.name} is {show(value)}, which is not UTF-8")
    merge_fields(header, model, ("graph",))
    header.ir_version = max(header.ir_version, _OWN_VALUES)
    for each in (model.graph.name, *(part for entry in model.metadata_props for part in (entry.key, entry.value))):
        text(each)
    return header


def _reserved_hint(metadata: dict[str, str]) -> str:
    if "gopt.format" in metadata:
        return "this file is already an output of gopt; start from the graph it was made of"
    return "rename it in the export"

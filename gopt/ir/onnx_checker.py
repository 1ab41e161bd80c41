"""gopt refuses every model refused by onnx's own checker, and names the node or value.

The checker reads the file as it is, unless values are large or external: large values become inputs of a copy, after
gopt has checked the types and sizes.
"""

from __future__ import annotations

import re
from copy import deepcopy

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped,unused-ignore]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from gopt import limits
from gopt.errors import InputError
from gopt.ir.external_data import show
from gopt.ir.model_file import ModelFile
from gopt.ir.nodes import nested
from gopt.ir.type_proto import value_info
from gopt.ir.types import TensorType, dtype_name

_NEXT = "onnx.checker.check_model(MODEL, full_check=True) says more"
_HEAD = re.compile(r"^\[\w+\]\s*(Inference error\(s\):\s*)?")
_NODE = re.compile(r"Bad node spec for node\. Name: (.*?) OpType: (\S+)")


def check_legal(file: ModelFile) -> None:
    """Raise InputError for a model ``onnx.checker`` refuses with the full check."""
    error = _error(file)
    if error is not None:
        raise InputError(f"is not a valid ONNX model: {error}", _NEXT)


def check_structure(file: ModelFile) -> None:
    """Check without shape inference, for callers with shape inference in strict mode."""
    slim = _slim(file.model)
    if not accepts(file.data if slim is None else slim.SerializeToString(), full=False):
        check_legal(file)


def accepts(data: bytes, *, full: bool) -> bool:
    """Return whether ``onnx.checker`` accepts a serialized model; ``full``: with shape inference."""
    return _said(data, full=full) is None


def _error(file: ModelFile) -> str | None:
    model = file.model
    slim = _slim(model)
    if _said(file.data if slim is None else slim.SerializeToString()) is None:
        return None
    # Check again with a name for every node: most exporters omit names, and the checker identifies nodes by name only.
    named = deepcopy(model if slim is None else slim)
    for node in nested(named.graph.node):
        if not node.name:
            node.name = next((name for name in node.output if name), "")
    text = _said(named.SerializeToString()) or "the checker does not say why"
    line = _line(text)
    owner = "" if "node name: " in line else _node(text, line) or _value(model)
    line = f"{owner}: {line}" if owner else line
    return line if len(line) <= limits.REASON else f"{line[: limits.REASON]}…"


def _said(data: bytes, *, full: bool = True) -> str | None:
    """Return the checker's message about a model; None for an accepted model."""
    try:
        onnx.checker.check_model(data, full_check=full)
    except UnicodeDecodeError:
        return "what is wrong with it cannot be said: some text in it is not UTF-8"
    except MemoryError:
        raise
    except Exception as error:  # its exceptions have no common base
        return str(error) or type(error).__name__
    return None


def _line(text: str) -> str:
    """Return the checker's message on one line, without the path through its code."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("==>")]
    message = _HEAD.sub("", " ".join(lines))
    return "".join(char if char.isprintable() else "?" for char in message)


def _node(text: str, line: str) -> str:
    """Return the node named by the checker's message, if any."""
    match = _NODE.search(text)
    if match is None or not match.group(1):
        return ""
    operator, name = match.group(2), match.group(1)
    if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", line):
        return ""
    return f"{operator if operator.isidentifier() else show(operator)} {show(name)}"


def _value(model: ModelProto) -> str:
    """Return the value with a faulty declared or stored type, if the checker names no value."""
    body = model.graph
    stored = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in body.initializer}
    bodies = [value for function in model.functions for value in function.value_info]
    for info in (*body.input, *body.output, *body.value_info, *bodies):
        kind = info.type.tensor_type
        declared_here = stored.get(info.name)
        declared = (kind.elem_type, tuple(dim.dim_value for dim in kind.shape.dim))
        if not _sound(info) or (declared_here is not None and declared_here != declared):
            return f"value {show(info.name)}"
    return ""


def _sound(info: onnx.ValueInfoProto) -> bool:
    """Return whether a declared type is valid."""
    try:
        onnx.checker.check_value_info(info)
    except MemoryError:
        raise
    except Exception:  # as above
        return False
    kind = info.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or dtype_name(info.type.tensor_type.elem_type) != "undefined")


# --- without large values ---------------------------------------------------------------------------------------------


def _slim(model: ModelProto) -> ModelProto | None:
    """Return a copy with large values as inputs; None for a model without large values."""
    body = model.graph
    stored = {tensor.name for tensor in body.initializer if _large(tensor)}
    constants = {node.output[0] for node in body.node if _large_constant(node)}
    if not stored and not constants:
        return None
    copy = ModelProto()
    merge_fields(copy, model, ("graph",))
    merge_fields(copy.graph, body, ("initializer", "node"))
    _store(copy.graph, body, stored)
    for node in body.node:
        if constants and node.output and node.output[0] in constants:
            attribute = node.attribute[0]
            value = attribute.t if attribute.name == "value" else TensorProto(data_type=7, dims=[len(attribute.ints)])
            copy.graph.input.append(_as_input(node.output[0], value))
        else:
            copy.graph.node.append(node)
    return copy


def without_nodes(model: ModelProto) -> ModelProto:
    """Return a copy without nodes and results, with large values as inputs."""
    copy, body = ModelProto(), model.graph
    merge_fields(copy, model, ("graph",))
    merge_fields(copy.graph, body, ("initializer", "node", "output", "value_info"))
    _store(copy.graph, body, {tensor.name for tensor in body.initializer if _large(tensor)})
    stored = {tensor.name for tensor in body.initializer}
    copy.graph.value_info.extend(info for info in body.value_info if info.name in stored)
    stored.update(info.name for info in body.input)
    copy.graph.output.extend(info for info in body.output if info.name in stored)
    return copy


def merge_fields(copy: Message, source: Message, skipped: tuple[str, ...]) -> None:
    """Copy all fields but ``skipped``."""
    for field, value in source.ListFields():
        if field.name in skipped:
            continue
        if isinstance(value, (int, str, bytes)):
            setattr(copy, field.name, value)
        else:
            getattr(copy, field.name).MergeFrom(value)


def _store(copy: GraphProto, body: GraphProto, large: set[str]) -> None:
    """Copy the initializers; those in ``large`` become inputs."""
    declared = {info.name for info in body.input}
    for tensor in body.initializer:
        if tensor.name not in large:
            copy.initializer.append(tensor)
        elif tensor.name not in declared:
            copy.input.append(_as_input(tensor.name, tensor))


def _as_input(name: str, tensor: TensorProto) -> onnx.ValueInfoProto:
    return value_info(name, TensorType(dtype_name(tensor.data_type), tuple(tensor.dims)))


def _large(tensor: TensorProto) -> bool:
    if tensor.data_location == TensorProto.EXTERNAL:
        return True
    size = 1
    for dim in tensor.dims:
        size *= dim
    if size * 16 <= limits.CHECKED_BYTES:
        return False
    # To tell its size, protobuf serializes a message, in twice the memory; of bytes it hands out one copy.
    return len(tensor.raw_data) > limits.CHECKED_BYTES or tensor.ByteSize() > limits.CHECKED_BYTES


def _large_constant(node: NodeProto) -> bool:
    """Return whether a node is a plain Constant with a large value, checked by gopt."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.output) != 1 or node.input:
        return False
    if len(node.attribute) != 1 or node.attribute[0].ref_attr_name:
        return False
    (attribute,) = node.attribute
    if attribute.name == "value_ints" and attribute.type == AttributeProto.INTS:
        return len(attribute.ints) * 8 > limits.CHECKED_BYTES
    return attribute.name == "value" and attribute.type == AttributeProto.TENSOR and _large(attribute.t)

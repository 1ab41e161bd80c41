"""What onnx's own checker refuses, gopt refuses: with the name of the node or value, before anything else is done.

The checker sees the file as it is, unless values in it are large or lie outside: those become mere inputs of a copy,
once gopt has looked at their types and sizes itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from gopt import limits
from gopt.errors import InputError
from gopt.graph.external import show
from gopt.graph.types import TensorType, dtype_name
from gopt.graph.model import value_info

_NEXT = "onnx.checker.check_model(MODEL, full_check=True) says more"
_HEAD = re.compile(r"^\[\w+\]\s*(Inference error\(s\):\s*)?")
_NOISE = re.compile(r"\s*(==> Context:.*|Stacktrace:.*|\[\w*Error\])\s*")


def check_legal(model: ModelProto, data: bytes) -> None:
    """Raise InputError for a model that ``onnx.checker`` refuses with its full check; ``data``: the file's bytes."""
    found = _error(model, data)
    if found is not None:
        raise InputError(f"is no valid ONNX model: {found}", _NEXT)


def _error(model: ModelProto, data: bytes) -> str | None:
    slim = _slim(model)
    try:
        onnx.checker.check_model(data if slim is None else slim.SerializeToString(), full_check=True)
    except Exception as error:  # its exceptions have no common base
        return _line(str(error) or type(error).__name__)
    return None


def _line(text: str) -> str:
    """The checker's message on one line, without the path through its own code."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("==>")]
    context = re.search(r"Bad node spec for node\. Name: (.*?) OpType: (\S+)", text)
    said = _HEAD.sub("", " ".join(lines))
    if context is not None and context.group(1) and context.group(1) not in said:
        said = f"{context.group(2)} {show(context.group(1))}: {said}"
    return said if len(said) <= limits.REASON else f"{said[: limits.REASON]}…"


# --- without large values ---------------------------------------------------------------------------------------------


def _slim(model: ModelProto) -> ModelProto | None:
    """A copy in which large values are inputs; None where the model has none."""
    body = model.graph
    stored = {tensor.name for tensor in body.initializer if _large(tensor)}
    made = {node.output[0] for node in body.node if _large_constant(node)}
    if not stored and not made:
        return None
    copy = ModelProto()
    for field, value in model.ListFields():
        if field.name == "graph":
            _fill(copy.graph, body, stored, made)
        elif isinstance(value, (int, str, bytes)):
            setattr(copy, field.name, value)
        else:
            getattr(copy, field.name).MergeFrom(value)
    return copy


def _fill(copy: GraphProto, body: GraphProto, stored: set[str], made: set[str]) -> None:
    for field, value in body.ListFields():
        if field.name == "initializer":
            copy.initializer.extend(tensor for tensor in value if tensor.name not in stored)
        elif field.name == "node":
            copy.node.extend(node for node in value if not (made and node.output and node.output[0] in made))
        elif isinstance(value, (str, bytes)):
            setattr(copy, field.name, value)
        else:
            getattr(copy, field.name).MergeFrom(value)
    declared = {info.name for info in body.input}
    for tensor in body.initializer:
        if tensor.name in stored and tensor.name not in declared:
            copy.input.append(_as_input(tensor.name, tensor))
    for node in body.node:
        if node.output and node.output[0] in made:
            copy.input.append(_as_input(node.output[0], node.attribute[0].t))


def _as_input(name: str, tensor: TensorProto) -> onnx.ValueInfoProto:
    return value_info(name, TensorType(dtype_name(tensor.data_type), tuple(tensor.dims)))


def _large(tensor: TensorProto) -> bool:
    if tensor.data_location == TensorProto.EXTERNAL:
        return True
    size = 1
    for dim in tensor.dims:
        size *= dim
    return size * 16 > limits.CHECKED_BYTES and tensor.ByteSize() > limits.CHECKED_BYTES


def _large_constant(node: NodeProto) -> bool:
    """Whether a node is a plain Constant with a large tensor, which gopt has looked at itself."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.output) != 1 or node.input:
        return False
    if len(node.attribute) != 1:
        return False
    (attribute,) = node.attribute
    plain = attribute.type == AttributeProto.TENSOR and attribute.name == "value" and not attribute.ref_attr_name
    return plain and _large(attribute.t)

"""A graph as text: one node a line, the same for two equal graphs, made for golden files and for reading in a diff.

Left out: doc strings, metadata, node names, tensors' storage. Kept: everything a runtime would see.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx

from gopt.analysis.training import TrainingGraph
from gopt.ir.attributes import attribute_value
from gopt.ir.graph import Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType, dtype_name
from gopt.records.placements import FlatShard, OnMember, Sharding

TINY = 8
"""Tensors of at most this many elements are written out; larger ones as a digest."""
_PLAIN = re.compile(r"[^\s,()\[\]{}=%\"';]+")
_CHUNK = 1 << 24


def canonical_text(graph: Graph, training: TrainingGraph | None = None) -> str:
    """The text of a graph; with ``training``, inputs, outputs and nodes carry the role as a trailing comment."""
    roles = _Roles(training)
    lines = ["gopt text 1", *_header(graph)]
    lines += ["", "inputs"]
    lines += [_noted(f"  {ref(name)} : {type}", roles.inputs.get(name, "")) for name, type in graph.inputs.items()]
    lines += ["", "initializers"]
    lines += [f"  {ref(name)} = {tensor_text(graph.initializers[name])}" for name in sorted(graph.initializers)]
    lines += ["", "nodes"]
    for node in graph.nodes:
        types = ", ".join(str(graph.type_of(name)) for name in node.outputs)
        notes = [node.phase.value] if training is not None and graph is training.graph and node.phase else []
        notes += [roles.values[name] for name in node.outputs if name in roles.values]
        notes += [f"by {node.made_by}"] if node.made_by else []
        notes += sharding_notes(node.sharding)
        lines.append(_noted(f"  {node_text(node)} : {types}", ", ".join(notes)))
    lines += ["", "outputs"]
    lines += [_noted(f"  {ref(name)} : {type}", roles.outputs.get(name, "")) for name, type in graph.outputs.items()]
    return "\n".join(lines) + "\n"


class _Roles:
    """Remarks about inputs, inner values and outputs."""

    def __init__(self, training: TrainingGraph | None) -> None:
        self.inputs: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.values: dict[str, str] = {}
        if training is None:
            return
        self.inputs = dict.fromkeys(training.batch, "batch") | dict.fromkeys(training.hyper, "hyper")
        self.outputs = dict.fromkeys(training.metrics, "metric") | dict.fromkeys(training.losses, "loss")
        for state in training.states:
            owner = f" of {ref(state.of)}" if state.of else ""
            self.inputs[state.tensor] = f"{state.kind.value}{owner} -> {ref(state.updated)}"
            self.outputs[state.updated] = f"new {ref(state.tensor)}"
        for parameter, gradient in training.gradients.items():
            text = self.values.get(gradient)
            self.values[gradient] = f"{text}, {ref(parameter)}" if text else f"gradient of {ref(parameter)}"


def _noted(line: str, note: str) -> str:
    return f"{line}  ; {note}" if note else line


def sharding_notes(sharding: Sharding) -> list[str]:
    """Return a note per axis on the members that run a node or hold a state; none for all members."""
    notes = []
    for axis, placement in sharding.by_axis:
        if isinstance(placement, OnMember):
            notes.append(f"on member {placement.member} of {axis}")
        elif isinstance(placement, FlatShard):
            notes.append(f"on [{placement.start}, {placement.stop}) of cuts {list(placement.cuts)} along {axis}")
        else:
            notes.append(f"{placement} along {axis}")
    return notes


def opsets(graph: Graph) -> dict[str, int]:
    """Domain -> version of the operator set."""
    return {entry.domain or "ai.onnx": entry.version for entry in graph.header.opset_import}


def operators(graph: Graph) -> dict[str, int]:
    """Operator with its domain -> number of nodes, most frequent first."""
    return dict(Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.nodes).most_common())


def _header(graph: Graph) -> Iterator[str]:
    yield "opset " + ", ".join(f"{domain} {version}" for domain, version in sorted(opsets(graph).items()))
    for function in sorted(graph.header.functions, key=lambda f: (f.domain, f.name, f.overload)):
        name = f"{function.domain}.{function.name}" + (f":{function.overload}" if function.overload else "")
        yield ""
        yield f"function {name}({', '.join(map(ref, function.input))}) -> ({', '.join(map(ref, function.output))})"
        yield from (f"  {_proto_text(node)}" for node in function.node)


def ref(name: str) -> str:
    """A value's name with a leading %; quoted if the name has a character of the text's syntax."""
    if not name:
        return "_"
    return f"%{name}" if _PLAIN.fullmatch(name) else f"%{json.dumps(name, ensure_ascii=False)}"


def node_text(node: Node) -> str:
    """``%out = Op(%a, %b) {attribute=value}``."""
    return _call(node.outputs, node.domain, node.op_type, node.inputs, node.attributes)


def _proto_text(proto: onnx.NodeProto) -> str:
    attributes = {
        a.name: f"@{a.ref_attr_name}" if a.ref_attr_name else attribute_value(a) for a in proto.attribute
    }  # fmt: skip
    return _call(proto.output, proto.domain, proto.op_type, proto.input, attributes)


def _call(
    outputs: Iterable[str], domain: str, op_type: str, inputs: Iterable[str], attributes: Mapping[str, Any]
) -> str:
    results = ", ".join(map(ref, outputs))
    called = f"{domain}.{op_type}" if domain not in ("", "ai.onnx") else op_type
    text = f"{called}({', '.join(map(ref, inputs))})"
    if attributes:
        text += " {" + ", ".join(f"{key}={attribute_text(attributes[key])}" for key in sorted(attributes)) + "}"
    return f"{results} = {text}" if results else text


def attribute_text(value: Any) -> str:
    """An attribute's value on one line."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(attribute_text, value))}]"
    if isinstance(value, float):
        return number_text(np.float32(value))
    if isinstance(value, onnx.TensorProto):
        type = TensorType(dtype_name(value.data_type), tuple(value.dims))
        return tensor_text(Tensor(type, proto=value))
    if isinstance(value, onnx.GraphProto):
        return _body_text(value)
    if isinstance(value, onnx.TypeProto):
        return str(read_type(value))
    if isinstance(value, bytes):
        return json.dumps(value.decode("utf-8", "replace"), ensure_ascii=False)
    return str(value)


def _body_text(body: onnx.GraphProto) -> str:
    """A body of control flow, in one line."""
    inputs = ", ".join(f"{ref(info.name)} : {read_type(info.type)}" for info in body.input)
    parts = [
        f"{ref(t.name)} = {attribute_text(t)}" for t in sorted(body.initializer, key=lambda tensor: tensor.name)
    ] + [_proto_text(node) for node in body.node]  # fmt: skip
    return f"({inputs}) -> ({', '.join(ref(info.name) for info in body.output)}) {{{'; '.join(parts)}}}"


def tensor_text(tensor: Tensor) -> str:
    """Type, then the elements if few, else a digest of the elements."""
    type = tensor.type
    if not type.static:
        return str(type)
    if type.elements <= TINY or type.dtype == "string":
        values = [number_text(number) for number in np.asarray(tensor.numpy()).ravel()]
        return f"{type} {values[0] if type.shape == () else '[' + ', '.join(values) + ']'}"
    return f"{type} #{digest(tensor)}"


def number_text(value: Any) -> str:
    """The shortest text that reads back as the same number of the type."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (bytes, str)):
        return json.dumps(value.decode("utf-8", "replace") if isinstance(value, bytes) else value, ensure_ascii=False)
    if isinstance(value, np.floating) and np.isfinite(value):
        if value == 0 or 1e-4 <= abs(float(value)) < 1e7:
            return np.format_float_positional(value, trim="0")
        return np.format_float_scientific(value, trim="0", exp_digits=1)
    return str(value)


def digest(tensor: Tensor) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the raw elements."""
    return sha256_of(tensor)[:12]


def sha256_of(tensor: Tensor) -> str:
    """The SHA-256 of the raw elements; a file is read piece by piece."""
    if tensor.type.dtype == "string":
        return hashlib.sha256(repr(tensor.numpy().tolist()).encode()).hexdigest()
    sha, read = hashlib.sha256(), tensor.flat()
    for start in range(0, tensor.type.elements, _CHUNK):
        sha.update(np.ascontiguousarray(read(start, min(start + _CHUNK, tensor.type.elements))).view(np.uint8).data)
    return sha.hexdigest()

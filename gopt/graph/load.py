"""The hall: an ONNX file becomes a Graph, or is refused in one line.

Everything later trusts what passes here: every value is defined once and read after it is made, sizes are sane,
stored bytes match their shapes, and external data lies where it may. Values are neither copied nor read.
"""

from __future__ import annotations

import gc
import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from gopt.errors import InputError, UnsupportedError
from gopt.graph.external import DataFolder, check_dims, naming, regular_size, show
from gopt.graph.model import MADE_BY, Graph, Node, Tensor, read_type, value_info
from gopt.graph.types import TensorType, dtype_name, known

OWN = "gopt."
"""How every name begins that gopt makes."""
_PROTOBUF_LIMIT = 2**31 - 1
_LONG = 1 << 16
_SMALL = 1024
"""Bytes up to which an initializer takes part in shape inference: enough for every shape, axis and pad."""
_FUNCTION_NODES, _FUNCTION_DEPTH = 1_000_000, 100
"""Beyond this, expanding the model's functions, as shape inference does, takes forever or ends the process."""
_TENSOR_ATTRIBUTES = {AttributeProto.TENSOR, AttributeProto.TENSORS}
_GRAPH_ATTRIBUTES = {AttributeProto.GRAPH, AttributeProto.GRAPHS}
_SPARSE_ATTRIBUTES = {AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS}
_LOOKED_AT = _TENSOR_ATTRIBUTES | _GRAPH_ATTRIBUTES | _SPARSE_ATTRIBUTES | {AttributeProto.UNDEFINED}
_TYPED_DATA = {  # dtype -> (field, entries per element); everything else lies in int32_data
    "float32": ("float_data", 1.0), "complex64": ("float_data", 2.0), "float64": ("double_data", 1.0),
    "complex128": ("double_data", 2.0), "int64": ("int64_data", 1.0), "uint64": ("uint64_data", 1.0),
    "uint32": ("uint64_data", 1.0), "string": ("string_data", 1.0),
    "uint4": ("int32_data", 0.5), "int4": ("int32_data", 0.5), "float4e2m1": ("int32_data", 0.5),
}  # fmt: skip


def load(path: str | os.PathLike[str], *, own: bool = False) -> Graph:
    """The graph in an ONNX file, its nodes in an order in which they can run.

    Initializers keep their TensorProto, or say where their external data lies; none is read. ``own`` admits names
    that begin with ``gopt.``, for reading gopt's own output back.

    Raises InputError if the file is missing, malformed, truncated or hostile; UnsupportedError for training_info,
    the Gradient operator, sparse initializers, and inputs or outputs that are not dense tensors.
    """
    name = os.fsdecode(path)
    with naming(name), _without_collection():
        return _graph(_read(name), DataFolder(name), own)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection: a fifth of the time at 100,000 nodes goes into walking objects that are all alive."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read(path: str) -> ModelProto:
    """The file as a model that has at least a version, an operator set and a graph."""
    size = regular_size(path)
    if size > _PROTOBUF_LIMIT:
        raise InputError(f"{size} bytes: a protobuf file ends at 2 GiB", "keep the values in external data")
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}") from error
    try:
        model: ModelProto = ModelProto.FromString(data)
    except DecodeError:
        raise _not_onnx(data) from None
    if not (model.ir_version > 0 and (model.HasField("graph") or model.opset_import)):
        raise _not_onnx(data)  # some text parses as protobuf by accident
    if not model.HasField("graph"):
        raise InputError("holds no graph")
    if not model.opset_import:
        raise InputError("names no operator set (opset_import is empty)")
    return model


def _not_onnx(data: bytes) -> InputError:
    head = data[:4096]
    if head.startswith(b"version https://git-lfs"):
        return InputError("is a Git LFS pointer, not an ONNX model", "git lfs pull fetches the file itself")
    try:
        text = head.decode("utf-8") if len(head) == len(data) else head.decode("utf-8", "ignore")
        if all(char.isprintable() or char in "\n\r\t\f" for char in text):
            return InputError("is a text file, not an ONNX model")
    except UnicodeDecodeError:
        pass
    if data[:1] == b"\x08":  # the tag of ir_version, which every exporter writes first
        return InputError("is truncated or damaged: it begins like an ONNX model, but does not go on like one")
    return InputError("is not an ONNX model")


def _graph(model: ModelProto, folder: DataFolder, own: bool) -> Graph:
    body = model.graph
    _refuse_forms(model)
    header = _header(model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    scope = _Scope(None if own else _reserved_hint(metadata))
    inputs = _inputs(body, scope)
    initializers = _initializers(body, inputs, scope, folder)
    constants: dict[str, TensorType] = {}
    nodes = [_node(proto, scope, constants, own) for proto in body.node]
    nodes = _ordered(nodes, {"", *inputs, *initializers})
    outputs = _outputs(body, scope)
    types = _types(model, nodes, inputs, initializers, constants)
    for name, kind in outputs.items():
        if not known(kind.dtype):
            outputs[name] = types.get(name, kind)
    return Graph(body.name, nodes, inputs, outputs, initializers, types, header, metadata)


def _refuse_forms(model: ModelProto) -> None:
    body = model.graph
    if model.training_info:
        count = len(model.training_info)
        raise UnsupportedError(
            f"training_info holds {count} training {'step' if count == 1 else 'steps'}, which gopt cannot read yet",
            "export the step as one plain graph: forward, backward and update, new states as outputs",
        )
    if not body.node:
        raise InputError("its graph has no nodes")
    _refuse_sparse(body)
    for function in model.functions:
        for node in function.node:
            _captures(node, _Scope(None))


def _refuse_sparse(body: GraphProto) -> None:
    if body.sparse_initializer:
        name = show(body.sparse_initializer[0].values.name)
        raise UnsupportedError(f"initializer {name} is sparse", "store it as a dense tensor")


def _header(model: ModelProto) -> ModelProto:
    header = ModelProto()
    for field, value in model.ListFields():
        if field.name == "graph":
            continue
        if isinstance(value, (int, str)):
            setattr(header, field.name, value)
        elif isinstance(value, bytes):
            raise InputError(f"{field.name} is {show(value)}, which is not UTF-8")
        else:
            getattr(header, field.name).MergeFrom(value)
    for text in (model.graph.name, *(text for entry in model.metadata_props for text in (entry.key, entry.value))):
        _text(text)
    return header


def _reserved_hint(metadata: dict[str, str]) -> str:
    if "gopt.format" in metadata:
        return "this file is already an output of gopt; start from the graph it was made of"
    return "rename it in the export"


def _text(name: str) -> str:
    if not isinstance(name, str):  # what protobuf gives for bytes that are no UTF-8
        raise InputError(f"the name {show(name)} is not UTF-8")
    return name


class _Scope:
    """The values that one body defines, each once."""

    def __init__(self, reserved_hint: str | None) -> None:
        self.reserved_hint = reserved_hint
        """What to say of a name that is gopt's own; None admits such names."""
        self.defined: set[str] = {""}

    def define(self, name: str, what: str) -> None:
        if name in self.defined:
            raise InputError(f"value {show(name)} is defined twice" if name else f"{what} without a name")
        if name[: len(OWN)] == OWN or type(name) is not str:  # once per value: a call for each would show
            self.allow(name, "value")
        self.defined.add(name)

    def allow(self, name: str, what: str) -> None:
        if _text(name).startswith(OWN) and self.reserved_hint is not None:
            raise InputError(f"{what} {show(name)}: names that begin with {OWN!r} are gopt's own", self.reserved_hint)


# --- values at the border -------------------------------------------------------------------------------------------


def _inputs(body: GraphProto, scope: _Scope) -> dict[str, TensorType]:
    stored = {tensor.name for tensor in body.initializer}
    result: dict[str, TensorType] = {}
    for name, kind in _decoded(body.input, lambda info: _border_type(info, "input")):
        if name in result:
            raise InputError(f"two graph inputs are named {show(name)}")
        scope.define(name, "a graph input")
        if not known(kind.dtype) and name not in stored:
            raise InputError(f"input {show(name)} has no element type")
        result[name] = kind
    return result


def _outputs(body: GraphProto, scope: _Scope) -> dict[str, TensorType]:
    result: dict[str, TensorType] = {}
    for info in body.output:
        if info.name in result:
            raise InputError(f"two graph outputs are named {show(info.name)}")
        if not info.name or info.name not in scope.defined:
            raise InputError(f"graph output {show(info.name)} is undefined: no node makes it")
        result[info.name] = _border_type(info, "output")
    return result


def _border_type(info: onnx.ValueInfoProto, what: str) -> TensorType:
    owner = f"{what} {show(info.name)}"
    kind = info.type.WhichOneof("value")
    if kind not in (None, "tensor_type"):
        raise UnsupportedError(f"{owner} is a {kind.removesuffix('_type')}, not a dense tensor")
    code = info.type.tensor_type.elem_type
    if code and dtype_name(code) == "undefined":
        raise UnsupportedError(f"{owner} has element type {code}, which gopt does not know")
    return _declared(info, owner)


def _declared(info: onnx.ValueInfoProto, owner: str) -> TensorType:
    kind = read_type(info.type)
    check_dims(kind.shape or (), kind.dtype, owner)
    for size in kind.shape or ():
        if isinstance(size, bytes):
            _text(size)
    return kind


def _initializers(
    body: GraphProto, inputs: dict[str, TensorType], scope: _Scope, folder: DataFolder
) -> dict[str, Tensor]:
    """Stored values by name; an input whose type the file leaves open takes it from its value."""
    result: dict[str, Tensor] = {}
    for proto in body.initializer:
        name = proto.name
        if name in result:
            raise InputError(f"two initializers are named {show(name)}")
        if name not in inputs:
            scope.define(name, "an initializer")
        kind = _tensor_type(proto, f"initializer {show(name)}")
        if name in inputs:
            inputs[name] = _agreed(name, inputs[name], kind)
        if proto.data_location == TensorProto.EXTERNAL:
            result[name] = folder.tensor(proto, kind)
        else:
            _check_data(proto, kind, f"initializer {show(name)}")
            result[name] = Tensor(kind, proto=proto)
    return result


def _agreed(name: str, declared: TensorType, stored: TensorType) -> TensorType:
    """The type of an input that has a stored value. A symbol in it stays one: another value may be fed."""
    if declared.shape is None or not known(declared.dtype):
        shape = stored.shape if declared.shape is None else declared.shape
        declared = TensorType(declared.dtype if known(declared.dtype) else stored.dtype, shape)
    assert declared.shape is not None
    sizes_agree = len(declared.shape) == len(stored.dims) and all(
        size == held for size, held in zip(declared.shape, stored.dims, strict=True) if isinstance(size, int)
    )
    if declared.dtype != stored.dtype or not sizes_agree:
        raise InputError(f"input {show(name)} is {declared}, but its initializer is {stored}")
    return declared


# --- stored tensors -------------------------------------------------------------------------------------------------


def _tensor_type(proto: TensorProto, owner: str) -> TensorType:
    dtype = dtype_name(proto.data_type)
    if dtype == "undefined":
        if proto.data_type:
            raise UnsupportedError(f"{owner} has element type {proto.data_type}, which gopt does not know")
        raise InputError(f"{owner} has no element type")
    if proto.HasField("segment"):
        raise UnsupportedError(f"{owner} is stored in segments")
    dims = tuple(proto.dims)
    check_dims(dims, dtype, owner)
    return TensorType(dtype, dims)


def _check_data(proto: TensorProto, kind: TensorType, owner: str) -> None:
    """Raises InputError unless the tensor holds as many bytes or entries as its dimensions say."""
    if proto.HasField("raw_data"):
        if kind.dtype == "string":
            raise InputError(f"{owner} stores strings as raw data")
        # Protobuf tells a length only by handing out a copy, which goes at once.
        held = len(proto.raw_data)
        if held != kind.nbytes:
            raise InputError(f"{owner} holds {held} bytes, but {kind} takes {kind.nbytes}")
        return
    field, per_element = _TYPED_DATA.get(kind.dtype, ("int32_data", 1.0))
    held = len(getattr(proto, field))
    # Whole numbers only: a float would round above 2**53.
    due = (kind.elements + 1) // 2 if per_element == 0.5 else kind.elements * int(per_element)
    if held != due:
        raise InputError(f"{owner} holds {held} entries of {field}, but {kind} takes {due}")


# --- nodes ----------------------------------------------------------------------------------------------------------


def _node(proto: NodeProto, scope: _Scope, constants: dict[str, TensorType], own: bool) -> Node:
    node = Node(proto.op_type, proto.input, proto.output, domain=proto.domain, name=proto.name, proto=proto)
    for name in node.outputs:
        if name:
            scope.define(name, "a node output")
    if node.name[: len(OWN)] == OWN or type(node.name) is not str:
        scope.allow(node.name, "node")
    if proto.attribute:
        node.captures = tuple(_captures(proto, scope))
        if node.op_type == "Constant":
            _note_constant(proto, constants)
    elif type(node.op_type) is not str or type(node.domain) is not str or node.op_type in ("Gradient", ""):
        _check_operator(proto)
    if own:
        node.made_by = next((entry.value for entry in proto.metadata_props if entry.key == MADE_BY), "")
    return node


def _note_constant(proto: NodeProto, constants: dict[str, TensorType]) -> None:
    """Keeps in mind the large constants, which shape inference is spared."""
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.TENSOR and attribute.name == "value" and len(proto.output) == 1:
            kind = TensorType(dtype_name(attribute.t.data_type), tuple(attribute.t.dims))
            if kind.nbytes > _SMALL:
                constants[proto.output[0]] = kind


def _check_operator(proto: NodeProto) -> None:
    if _text(proto.op_type) == "Gradient" and proto.domain == "ai.onnx.preview.training":
        value = show(proto.output[0] if proto.output else proto.name)
        raise UnsupportedError(
            f"{value} comes from a Gradient operator, which says what to differentiate and not how",
            "export the step with its backward pass written out in standard operators",
        )
    _text(proto.domain)
    if not proto.op_type:
        raise InputError(f"node {show(proto.name)} has no operator type")


def _captures(proto: NodeProto, scope: _Scope) -> dict[str, None]:
    """What the bodies in a node's attributes read from outside, in order; looks at the attributes on the way."""
    _check_operator(proto)
    found: dict[str, None] = {}
    for attribute in proto.attribute:
        kind = attribute.type
        if kind not in _LOOKED_AT:
            continue
        owner = f"attribute {show(attribute.name)} of node {show(proto.name or ''.join(proto.output[:1]))}"
        if kind in _TENSOR_ATTRIBUTES:
            _check_attribute_tensors(attribute, owner)
        elif kind in _GRAPH_ATTRIBUTES:
            for body in (attribute.g,) if kind == AttributeProto.GRAPH else attribute.graphs:
                found.update(_body_captures(body, scope.reserved_hint))
        elif kind in _SPARSE_ATTRIBUTES:
            raise UnsupportedError(f"{owner} is a sparse tensor", "store it as a dense tensor")
        elif not attribute.ref_attr_name:
            raise InputError(f"{owner} has no type")
    return found


def _check_attribute_tensors(attribute: AttributeProto, owner: str) -> None:
    for tensor in (attribute.t,) if attribute.type == AttributeProto.TENSOR else attribute.tensors:
        if attribute.ref_attr_name:
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            raise UnsupportedError(f"{owner} lies in external data", "make it an initializer of the graph")
        _check_data(tensor, _tensor_type(tensor, owner), owner)


def _body_captures(body: GraphProto, reserved_hint: str | None) -> dict[str, None]:
    """What a body of control flow reads from outside, its outputs included.

    Read in file order, so that a value used in the body before it is made there counts as one from outside, and
    is found undefined.
    """
    scope = _Scope(reserved_hint)
    found: dict[str, None] = {}
    _refuse_sparse(body)
    for info in body.input:
        scope.define(info.name, "an input of a body")
        _declared(info, f"value {show(info.name)}")
    for tensor in body.initializer:
        if tensor.name not in {info.name for info in body.input}:
            scope.define(tensor.name, "an initializer")
        owner = f"initializer {show(tensor.name)}"
        if tensor.data_location == TensorProto.EXTERNAL:
            raise UnsupportedError(f"{owner} of a body lies in external data", "make it one of the outer graph")
        _check_data(tensor, _tensor_type(tensor, owner), owner)
    for node in body.node:
        inner = _captures(node, scope)
        found.update((name, None) for name in (*node.input, *inner) if name not in scope.defined)
        scope.allow(node.name, "node")
        for name in node.output:
            if name:
                scope.define(name, "a node output")
    found.update((info.name, None) for info in body.output if info.name not in scope.defined)
    return found


# --- order ----------------------------------------------------------------------------------------------------------


def _ordered(nodes: list[Node], given: set[str]) -> list[Node]:
    """The nodes in file order if that runs, as ONNX demands; else sorted, as close to file order as it goes."""
    made = set(given)
    for node in nodes:
        if not (made.issuperset(node.inputs) and made.issuperset(node.captures)):
            return _sorted(nodes, given)
        made.update(node.outputs)
    return nodes


def _sorted(nodes: list[Node], given: set[str]) -> list[Node]:
    maker = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    waits = [0] * len(nodes)
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.reads:
            if name in given:
                continue
            if name not in maker:
                raise InputError(f"value {show(name)} is undefined: node {show(node.label)} reads it, nothing makes it")
            waits[index] += 1
            readers.setdefault(maker[name], []).append(index)
    ready = [index for index, count in enumerate(waits) if not count]
    result: list[Node] = []
    while ready:
        index = heapq.heappop(ready)
        result.append(nodes[index])
        for reader in readers.get(index, ()):
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(result) < len(nodes):
        raise InputError(f"value {show(_on_cycle(nodes, maker, waits))} depends on itself: the graph has a cycle")
    return result


def _on_cycle(nodes: Sequence[Node], maker: dict[str, int], waits: Sequence[int]) -> str:
    """A value on a cycle: back from any node that never became ready, until one comes round again."""
    index = next(index for index, count in enumerate(waits) if count)
    seen: set[int] = set()
    name = ""
    while index not in seen:
        seen.add(index)
        name = next(name for name in nodes[index].reads if name in maker and waits[maker[name]])
        index = maker[name]
    return name


# --- types ----------------------------------------------------------------------------------------------------------


def _types(
    model: ModelProto,
    nodes: Sequence[Node],
    inputs: dict[str, TensorType],
    initializers: dict[str, Tensor],
    constants: dict[str, TensorType],
) -> dict[str, TensorType]:
    """Every type that is declared, stored or can be inferred. The file's own word gives way to a closer one."""
    body = model.graph
    types = dict(_decoded(body.value_info, lambda info: _declared(info, f"value {show(_text(info.name))}")))
    types.update((info.name, read_type(info.type)) for info in body.output)
    # Where every shape is declared in numbers, as some exporters do, inference takes half the time to add nothing.
    static = {name for name, kind in types.items() if kind.static and known(kind.dtype)}
    if not all(name in static for node in nodes for name in node.outputs if name):
        found = _decoded(_inferred(model, nodes, inputs, initializers, constants), _sane)
        types.update((name, kind) for name, kind in found if known(kind.dtype))
    types.update(constants)
    types.update((name, tensor.type) for name, tensor in initializers.items())
    types.update(inputs)
    return types


def infer_types(graph: Graph) -> None:
    """Infer types once more, after nodes were replaced by others or operators were registered; only adds to them."""
    model = ModelProto()
    model.CopyFrom(graph.header)
    for table, border in ((graph.inputs, model.graph.input), (graph.outputs, model.graph.output)):
        border.extend(value_info(name, kind) for name, kind in table.items())
    shown = {*graph.inputs, *graph.outputs, *graph.initializers}
    static = {name: kind for name, kind in graph.types.items() if kind.static and name not in shown}
    model.graph.value_info.extend(value_info(name, kind) for name, kind in static.items())
    for name, kind in _decoded(_inferred(model, graph.nodes, graph.inputs, graph.initializers, {}), _sane):
        if known(kind.dtype) and not graph.type_of(name).static:
            graph.types[name] = kind


def _decoded(
    infos: Iterable[onnx.ValueInfoProto], decode: Callable[[onnx.ValueInfoProto], TensorType]
) -> Iterator[tuple[str, TensorType]]:
    """Names and types. A graph has few distinct types: each is decoded, and held, once."""
    seen: dict[bytes, TensorType] = {}
    for info in infos:
        key = info.type.SerializeToString()
        if key not in seen:
            seen[key] = decode(info)
        yield info.name, seen[key]


def _sane(info: onnx.ValueInfoProto) -> TensorType:
    """An inferred type; nothing, where inference itself went below zero."""
    kind = read_type(info.type)
    negative = any(isinstance(size, int) and size < 0 for size in kind.shape or ())
    return TensorType("undefined", None) if negative else kind


def _inferred(
    model: ModelProto,
    nodes: Sequence[Node],
    inputs: dict[str, TensorType],
    initializers: dict[str, Tensor],
    constants: dict[str, TensorType],
) -> Iterable[onnx.ValueInfoProto]:
    """What ONNX's shape inference says of a copy in which large values are mere inputs; nothing if it fails."""
    if not _functions_expand(model):
        return ()
    copy = ModelProto(ir_version=model.ir_version)
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    body = copy.graph
    body.name = model.graph.name or "graph"
    body.input.extend(model.graph.input)
    body.input.extend(value_info(name, kind) for name, kind in constants.items())
    for name, tensor in initializers.items():
        if tensor.proto is not None and tensor.type.dtype != "string" and tensor.nbytes <= _SMALL:
            body.initializer.append(tensor.proto)
        elif name not in inputs:
            body.input.append(value_info(name, tensor.type))
    body.output.extend(model.graph.output)
    body.value_info.extend(model.graph.value_info)
    body.node.extend(
        node.proto for node in nodes if node.proto and not (constants and constants.keys() & set(node.outputs))
    )
    try:
        graph = onnx.shape_inference.infer_shapes(copy, strict_mode=False).graph
        found = (*graph.value_info, *graph.output)
        open_ends = any(not read_type(info.type).static for info in found) or len(found) < len(copy.graph.node)
        if open_ends and not any(map(_long, (*found, *body.input))):
            graph = onnx.shape_inference.infer_shapes(copy, data_prop=True, strict_mode=False).graph
            found = (*graph.value_info, *graph.output)
    except Exception:  # its exceptions have no common base, and no type is worth a refusal: what needs one will say so
        return ()
    return found


def _long(info: onnx.ValueInfoProto) -> bool:
    """Whether a value is one long row: following its data would make a dimension of each of its elements."""
    shape = read_type(info.type).shape
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > _LONG


def _functions_expand(model: ModelProto) -> bool:
    """Whether the model's own functions expand to a size that inference can take.

    Raises InputError if they call one another in a circle.
    """
    bodies = {(f.domain, f.name, f.overload): f.node for f in model.functions}
    sizes, calls = {}, {}
    for key, nodes in bodies.items():
        called = [(n.domain, n.op_type, n.overload) for n in _nested(nodes)]
        sizes[key], calls[key] = len(called), [callee for callee in called if callee in bodies]
    extent: dict[tuple[str, str, str], tuple[int, int]] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            inner = [extent[callee] for callee in calls[key]]
            size = sizes[key] + sum(size for size, _ in inner)
            # Capped: a hostile chain of doublings would make an endless number.
            extent[key] = min(size, _FUNCTION_NODES + 1), 1 + max((depth for _, depth in inner), default=0)
    except CycleError as error:
        raise InputError(f"function {show(error.args[1][0][1])} calls itself") from None
    if not extent:
        return True
    total = sum(extent.get((n.domain, n.op_type, n.overload), (0, 0))[0] for n in _nested(model.graph.node))
    return total <= _FUNCTION_NODES and max(depth for _, depth in extent.values()) <= _FUNCTION_DEPTH


def _nested(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    """Nodes, and those in the bodies of their control flow."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type in _GRAPH_ATTRIBUTES:
                for body in (attribute.g, *attribute.graphs):
                    yield from _nested(body.node)

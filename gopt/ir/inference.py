"""The type of every value: declared or stored in the file, or added by ONNX's shape inference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto

from gopt import limits
from gopt.ir.chunked_inference import ModelHeader, types_by_chunk
from gopt.ir.constant_folding import fold_small, for_inference
from gopt.ir.external_data import check_dims, show
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_io import declared, decoded
from gopt.ir.model_file import ModelFile
from gopt.ir.onnx_checker import check_legal, check_structure
from gopt.ir.symbol_table import text
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType, dtype_name, known, overflows

_LONG = 1 << 16


def declared_types(body: GraphProto, names: Mapping[str, str]) -> dict[str, TensorType]:
    """The types the file itself gives values, of sane sizes; raises InputError for others.

    ``names``: each name as the object the nodes have.
    """
    declared_infos = decoded(body.value_info, lambda info: declared(info, f"value {show(text(info.name))}"))
    types = {names.get(name, name): kind for name, kind in declared_infos}
    types.update(decoded(body.output, lambda info: read_type(info.type)))
    return types


def add_types(graph: Graph, file: ModelFile, header: ModelHeader | None) -> None:
    """Add stored and inferred types to the declared types in ``graph.types``; the more exact type is kept.

    ``header``: of a long graph, the parts of the model kept for chunks; the message is released. Raises InputError for
    a model refused by onnx's checker: inference is most of the full check, and is done once.
    """
    constants, types = _large_constants(graph.nodes), graph.types
    chunk = None
    if header is not None:
        file.release()
        chunk = types_by_chunk(graph, header, constants, fold_small(graph.nodes, graph.initializers, graph.inputs))
    types.update(_types_at_once(graph, file, constants) if chunk is None else chunk)
    types.update(constants)
    types.update((name, tensor.type) for name, tensor in graph.initializers.items())
    types.update(graph.inputs)
    _refuse_overflow(graph)


def _refuse_overflow(graph: Graph) -> None:
    """Raise InputError for an inferred value with more elements than a file or a manifest can describe."""
    large = {kind for kind in set(graph.types.values()) if overflows(kind.shape)}
    for name, kind in graph.types.items() if large else ():
        if kind in large:
            check_dims(kind.shape or (), kind.dtype, f"value {show(name)}")


def _types_at_once(graph: Graph, file: ModelFile, constants: dict[str, TensorType]) -> dict[str, TensorType]:
    """Return the types from onnx's shape inference of the whole graph; the model is checked at the same time."""
    nodes, inputs, initializers = graph.nodes, graph.inputs, graph.initializers
    # Where every shape is declared in numbers, as some exporters do, inference adds nothing.
    static = {name for name, kind in graph.types.items() if kind.static and known(kind.dtype)}
    if all(name in static for node in nodes for name in node.outputs if name):
        check_legal(file)
        return {}
    check_structure(file)
    strict = _copy(file.model, nodes, inputs, initializers, constants, {})
    types = {**inputs, **{name: tensor.type for name, tensor in initializers.items()}}
    try:
        inferred = onnx.shape_inference.infer_shapes(strict, check_type=True, strict_mode=True).graph
        types.update(decoded((*inferred.value_info, *inferred.output), _sane))
    except MemoryError:
        raise
    except Exception:  # its exceptions have no common base
        check_legal(file)
        inferred = None
    settled = all(kind.static for kind in types.values())
    folded = fold_small(nodes, initializers, inputs, {} if settled else types)
    again = strict if not folded else _copy(file.model, nodes, inputs, initializers, constants, folded)
    inferred_types = decoded(_inferred(again, None if folded else inferred), _sane)
    return {name: kind for name, kind in inferred_types if known(kind.dtype)}


def infer_types(graph: Graph) -> None:
    """Infer types once more, after nodes were replaced by others or operators were registered; only adds types."""
    model = deepcopy(graph.header)
    for table, border in ((graph.inputs, model.graph.input), (graph.outputs, model.graph.output)):
        border.extend(value_info(name, kind) for name, kind in table.items())
    shown = {*graph.inputs, *graph.outputs, *graph.initializers}
    static = {name: kind for name, kind in graph.types.items() if kind.static and name not in shown}
    model.graph.value_info.extend(value_info(name, kind) for name, kind in static.items())
    folded = fold_small(graph.nodes, graph.initializers, graph.inputs)
    copy = _copy(model, graph.nodes, graph.inputs, graph.initializers, {}, folded)
    for name, kind in decoded(_inferred(copy), _sane):
        if known(kind.dtype) and not graph.type_of(name).static:
            graph.types[name] = kind


def _large_constants(nodes: Iterable[Node]) -> dict[str, TensorType]:
    """Return the constants hidden from inference, with the types."""
    types = {}
    for node in nodes:
        if node.op_type != "Constant" or len(node.outputs) != 1 or (proto := node.proto) is None:
            continue
        for attribute in proto.attribute:
            if attribute.type == AttributeProto.TENSOR and attribute.name == "value":
                kind = TensorType(dtype_name(attribute.t.data_type), tuple(attribute.t.dims))
                if kind.nbytes > limits.CHECKED_BYTES:
                    types[node.outputs[0]] = kind
            elif attribute.name == "value_ints" and len(attribute.ints) * 8 > limits.CHECKED_BYTES:
                types[node.outputs[0]] = TensorType("int64", (len(attribute.ints),))
    return types


def _sane(info: onnx.ValueInfoProto) -> TensorType:
    """An inferred type; nothing, where inference itself went below zero."""
    kind = read_type(info.type)
    negative = any(isinstance(size, int) and size < 0 for size in kind.shape or ())
    return TensorType("undefined", None) if negative else kind


def _copy(
    model: ModelProto,
    nodes: Sequence[Node],
    inputs: dict[str, TensorType],
    initializers: dict[str, Tensor],
    constants: dict[str, TensorType],
    folded: Mapping[str, np.ndarray],
) -> ModelProto:
    """Return a copy with large values as inputs, and ``folded`` values as constants."""
    copy = ModelProto(ir_version=model.ir_version)
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    body = copy.graph
    body.name = model.graph.name or "graph"
    body.input.extend(model.graph.input)
    body.input.extend(value_info(name, kind) for name, kind in constants.items())
    for name, tensor in initializers.items():
        if tensor.proto is not None and tensor.type.dtype != "string" and tensor.nbytes <= limits.CHECKED_BYTES:
            body.initializer.append(tensor.proto)
        elif name not in inputs:
            body.input.append(value_info(name, tensor.type))
    body.output.extend(model.graph.output)
    body.value_info.extend(model.graph.value_info)
    for node in nodes:
        if node.encoded is not None and not (constants and constants.keys() & set(node.outputs)):
            body.node.add().ParseFromString(for_inference(node, folded))
    return copy


def _inferred(copy: ModelProto, graph: GraphProto | None = None) -> Iterable[onnx.ValueInfoProto]:
    """Return the value infos from shape inference of a model, or in ``graph``; none if inference fails."""
    try:
        if graph is None:
            graph = onnx.shape_inference.infer_shapes(copy, strict_mode=False).graph
        infos = (*graph.value_info, *graph.output)
        types = decoded(infos, lambda info: read_type(info.type))
        open_ends = not all(type.static for _, type in types) or len(infos) < len(copy.graph.node)
        if open_ends and not any(map(_long, (*infos, *copy.graph.input))):
            graph = onnx.shape_inference.infer_shapes(copy, data_prop=True, strict_mode=False).graph
            infos = (*graph.value_info, *graph.output)
    except MemoryError:
        raise
    except Exception:  # its exceptions have no common base; code that needs a missing type reports it
        return ()
    return infos


def _long(info: onnx.ValueInfoProto) -> bool:
    """Return whether a value is a long row: following the data would make a dimension of each element."""
    shape = read_type(info.type).shape
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > _LONG

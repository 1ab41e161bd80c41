"""Reads a forward model and prepares it for differentiation: functions inlined, one operator set, static shapes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

from gopt import limits
from gopt.autodiff.shapes import fold_integers, settle_shapes
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.frontends.derive.branches import take_branches
from gopt.frontends.derive.conversion import check_conversion, mend_pools, mend_resizes
from gopt.frontends.derive.functions import OPSET
from gopt.frontends.derive.options import BATCHES
from gopt.ir.constant_folding import constant_of
from gopt.ir.functions import inline_functions
from gopt.ir.graph import ROLES, Graph
from gopt.ir.load import graph_of, load
from gopt.ir.model_file import refill
from gopt.ir.opset import opset_of
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import FLOATS, TensorType, dtype_name
from gopt.runtime.capacity import check_batches_fit
from gopt.text.sanitize import show

_INSIDE = 1 << 12
"""Bytes up to which a constant stands in the model that is differentiated: axes, shapes, scales."""


@dataclass(frozen=True, slots=True)
class ForwardModel:
    """A forward model. Every stored value is an input of ``model``, which stays small. ``stored``: constants by name.

    ``literals``: former Constant nodes. ``inputs``: inputs fed by a run. ``types``: types of values, as far as inferred
    by onnx. ``values``: weights are stored values, no inputs.
    """

    model: ModelProto
    stored: dict[str, Tensor]
    literals: frozenset[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: dict[str, TensorType]
    values: bool

    @property
    def weights(self) -> dict[str, Tensor]:
        """Stored values, or the inputs where weights have no values."""
        return self.stored if self.values else {name: Tensor(self.types[name]) for name in self.inputs}


def read_forward(path: str | os.PathLike[str], dims: Mapping[str, int], *, values: bool = True) -> ForwardModel:
    """Read a model and set its symbolic dimensions to sizes.

    Raises InputError for a damaged file, OptionError for a dimension without a size or an unknown dimension,
    UnsupportedError for a model not convertible to operator set 20.
    """
    graph = load(path)
    if ROLES in graph.metadata:
        raise InputError(
            f"{show(os.fspath(path))} is a training step, not a forward model", "gopt shard takes it as it is"
        )
    for name in graph.initializers:
        graph.inputs.pop(name, None)  # values that may be fed: here they are constants
    source = _inlined(_bare(graph))
    model = _converted(source)
    stored = {name: _apart(tensor) for name, tensor in graph.initializers.items()}
    del graph  # and the message that held the values
    for constant in model.graph.initializer:  # the converter's
        stored[constant.name] = Tensor(TensorType(dtype_name(constant.data_type), tuple(constant.dims)), proto=constant)
        model.graph.input.append(value_info(constant.name, stored[constant.name].type))
    del model.graph.initializer[:]
    literals = _lift_constants(model, stored)
    _bind(model, dims)
    _without_repeated_imports(model)
    inputs = tuple(value.name for value in model.graph.input if value.name not in stored)
    outputs = tuple(value.name for value in model.graph.output)
    forward = ForwardModel(model, stored, literals, inputs, outputs, {}, values)
    mend_pools(model, lambda: with_constants(forward, ()))
    _settle_outputs(forward)
    _fold(forward)
    while _take_branches(forward):
        forward = replace(forward, literals=forward.literals | _lift_constants(model, stored))
        _fold(forward)
    inferred = onnx.shape_inference.infer_shapes(with_constants(forward, ()), data_prop=True).graph
    types = {value.name: read_type(value.type) for value in (*inferred.input, *inferred.value_info, *inferred.output)}
    if values:
        check_batches_fit(types, inputs, BATCHES)
    if values and model is not source:
        arrays = {name: np.asarray(tensor.numpy()) for name, tensor in stored.items()}
        check_conversion(source, model, arrays, {name: types[name] for name in inputs})
    return replace(forward, types=types)


def unknown_shape(forward: ForwardModel, name: str) -> UnsupportedError:
    """The refusal of a value of unknown shape, naming the first operator without inferred shapes."""
    types = forward.types
    needed, makers = {name}, {value: node for node in forward.model.graph.node for value in node.output}
    stack, maker = [name], makers.get(name)
    while stack:
        node = makers.get(stack.pop())
        open_inputs = [name for name in (node.input if node else ()) if name and not types[name].static] if node else []
        maker = node if node is not None and not open_inputs else maker
        stack += [name for name in open_inputs if name not in needed]
        needed.update(open_inputs)
    what = f": onnx infers none for the result of {maker.op_type} {show(maker.output[0])}" if maker else ""
    return UnsupportedError(
        f"the shape of {show(name)} is unknown{what}",
        "export the model with fixed shapes, or without that operator: a step has fixed shapes",
    )


def _without_repeated_imports(model: ModelProto) -> None:
    """Keep an import of each domain: onnx converts only one of repeated imports."""
    versions = {opset.domain.removeprefix("ai.onnx") if opset.domain == "ai.onnx" else opset.domain: opset.version
                for opset in reversed(model.opset_import)}  # fmt: skip
    refill(model.opset_import, (onnx.helper.make_opsetid(domain, version) for domain, version in versions.items()))


def _settle_outputs(forward: ForwardModel) -> None:
    """Give outputs the shapes following from the sizes: declared shapes may hold for other sizes alone."""
    bare = with_constants(forward, ())
    for info in bare.graph.output:
        info.type.tensor_type.ClearField("shape")
    outputs = {value.name: value for value in onnx.shape_inference.infer_shapes(bare, data_prop=True).graph.output}
    for info in forward.model.graph.output:
        kind = read_type(outputs[info.name].type)
        if kind.static and kind.dtype != "undefined":
            info.CopyFrom(value_info(info.name, kind))


def _fold(forward: ForwardModel) -> None:
    """Store small whole numbers computed from constants and shapes: exporters compute axes and bounds so."""
    graph = graph_of(with_constants(forward, ()))
    fold_integers(graph)
    settle_shapes(graph)
    refill(forward.model.graph.node, (node.to_proto() for node in graph.nodes))
    for name, tensor in graph.initializers.items():
        if name not in forward.stored:
            forward.stored[name] = tensor
            forward.model.graph.input.append(value_info(name, tensor.type))


def _take_branches(forward: ForwardModel) -> bool:
    """Replace each If with a stored condition by its branch; returns whether any was replaced."""
    conditions = {
        name: bool(np.asarray(tensor.numpy()).reshape(-1)[0])
        for name, tensor in forward.stored.items()
        if tensor.type.dtype == "bool" and tensor.type.elements == 1
    }
    constants = take_branches(forward.model, conditions)
    for value in constants or ():
        forward.stored[value.name] = Tensor(TensorType(dtype_name(value.data_type), tuple(value.dims)), proto=value)
        forward.model.graph.input.append(value_info(value.name, forward.stored[value.name].type))
    return constants is not None


def with_constants(forward: ForwardModel, trained: Collection[str]) -> ModelProto:
    """The model with constants of up to 4 KiB as initializers, except ``trained`` ones, because the derivatives of a
    Slice or a Pad need axes. Larger constants stay inputs."""
    model = deepcopy(forward.model)
    inside = {name for name, tensor in forward.stored.items() if tensor.nbytes <= _INSIDE and name not in trained}
    refill(model.graph.input, [value for value in model.graph.input if value.name not in inside])
    for name in forward.stored:
        if name in inside:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(forward.stored[name].numpy()), name))
    return model


def _bare(graph: Graph) -> ModelProto:
    """The model with every stored value as an input, small for any size of values."""
    model = deepcopy(graph.header)
    del model.metadata_props[:]
    body = model.graph
    body.name = graph.name or "forward"
    body.node.extend(node.to_proto() for node in graph.nodes)
    body.input.extend(value_info(name, kind) for name, kind in graph.inputs.items())
    body.input.extend(value_info(name, tensor.type) for name, tensor in graph.initializers.items())
    body.output.extend(value_info(name, kind) for name, kind in graph.outputs.items())
    return model


def _apart(tensor: Tensor) -> Tensor:
    """A value in its own message: a part keeps the whole file's message alive, and each read copies it."""
    if tensor.proto is None:
        return tensor
    if tensor.nbytes > limits.CHECKED_BYTES:
        return replace(tensor, proto=None, array=tensor.numpy())
    return replace(tensor, proto=TensorProto.FromString(tensor.proto.SerializeToString()))


def _inlined(model: ModelProto) -> ModelProto:
    """The model without functions of its own."""
    if not model.functions:
        return model
    return inline_functions(model)


def _converted(model: ModelProto) -> ModelProto:
    """In operator set 20 or later."""
    version = opset_of(model)
    if version >= OPSET:
        return model
    try:
        converted = onnx.version_converter.convert_version(model, OPSET)
    except MemoryError:
        raise
    except Exception as error:  # the converter's own have no common base
        line = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UnsupportedError(
            f"the model is of operator set {version}, and onnx cannot convert it to {OPSET}: {show(line[:200])}",
            f"export it for operator set {OPSET}",
        ) from None
    mend_resizes(model, converted)
    return converted


def _lift_constants(model: ModelProto, stored: dict[str, Tensor]) -> frozenset[str]:
    """Turn floating-point tensors of several elements in Constant nodes into stored values; returns the names."""
    nodes, lifted = [], set()
    for node in model.graph.node:
        array = constant_of(node)
        if array is None or array.dtype.name not in FLOATS or array.size < 2:
            nodes.append(node)
            continue
        name, kind = node.output[0], TensorType(array.dtype.name, array.shape)
        stored[name] = Tensor(kind, array=array)
        lifted.add(name)
        model.graph.input.append(value_info(name, kind))
    refill(model.graph.node, nodes)
    return frozenset(lifted)


def _bind(model: ModelProto, dims: Mapping[str, int]) -> None:
    """Set symbolic dimensions to sizes; ``NAME.AXIS`` names a dimension without a symbol."""
    unused, open_ = set(dims), {}
    for info in model.graph.input:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                continue
            name = dim.dim_param or f"{info.name}.{axis}"
            if name in dims:
                dim.dim_value = dims[name]
                unused.discard(name)
            else:
                open_[name] = info.name
        if not info.type.tensor_type.HasField("shape"):
            raise InputError(f"input {show(info.name)} has no shape", "export the model with the shape of its inputs")
    if open_:
        example = " ".join(f"--dim {name}=16" for name in open_)
        raise OptionError(
            f"dimension {show(next(iter(open_)))} of input {show(next(iter(open_.values())))} is open: gopt derive "
            "writes steps of fixed shapes",
            f"give sizes, such as {example}",
        )
    if unused:
        raise OptionError(f"--dim {show(min(unused))}: no input has this open dimension", "leave it out")
    del model.graph.value_info[:]
    for info in model.graph.output:
        kind = info.type.tensor_type
        for dim in kind.shape.dim:
            if not dim.HasField("dim_value"):
                size = dims.get(dim.dim_param)
                dim.Clear()  # another symbol: inference finds the size, or nobody knows it
                if size is not None:
                    dim.dim_value = size

"""Operators written in other words, for which onnx-ad has a derivative: slices with steps, pads repeating values, pools
with automatic pads, products of zeros, reductions over an empty list of axes, operands of two types.

A rewrite changes no result. Rewrites need shapes, and constant axes, bounds or pads; otherwise the operator stays, and
onnx-ad refuses the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import numpy as np
import onnx.inliner
from onnx import ModelProto, NodeProto, helper, numpy_helper

from gopt.autodiff.operators import ForwardOperator, between, types_of
from gopt.ir.constant_folding import constant_of
from gopt.ir.model_file import refill
from gopt.ir.opset import opset_of
from gopt.ir.tape import ProtoTape
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.operators.kinds import ALL_REDUCTIONS, POOLS

Constants = Mapping[str, np.ndarray]
Rewrite = Callable[[ForwardOperator, Constants, ProtoTape], "str | None"]
"""(operator, known values, emitter) -> the value that equals the first result; None to leave the operator."""


def rewrite(model: ModelProto, scalar: str, inputs: Sequence[str], prefix: str) -> ModelProto:
    """The model with the operators between ``inputs`` and ``scalar`` rewritten. ``prefix``: of names of new values."""
    if not any(node.op_type in REWRITES and node.domain in ("", "ai.onnx") for node in model.graph.node):
        return model
    types, constants = types_of(model), constants_of(model)
    behind, ahead = between(model, inputs, scalar, types)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        rule = REWRITES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        static = all(name not in types or types[name].static for name in (*node.input, *node.output))
        used = not behind.isdisjoint(node.input) and not ahead.isdisjoint(node.output)
        emit = ProtoTape(f"{prefix}{node.output[0]}", opset_of(model))
        new = rule(ForwardOperator.of(node, types), constants, emit) if rule is not None and used and static else None
        if new is None:
            nodes.append(node)
            continue
        last = emit.nodes[-1]
        last.output[:] = node.output if last.op_type == node.op_type else node.output[:1]
        nodes += emit.nodes
    rewritten = deepcopy(model)
    refill(rewritten.graph.node, nodes)
    return rewritten


def expand(model: ModelProto) -> ModelProto:
    """Write out functions of the standard with an operator in RULES."""
    names = {node.op_type for node in model.graph.node if node.domain in ("", "ai.onnx")} & EXPANDED
    if not names:
        return model
    typed, fed = ModelProto(), {value.name for value in model.graph.input}
    typed.CopyFrom(model)
    for tensor in model.graph.initializer:  # the inliner takes the types of inputs alone
        if tensor.name not in fed:
            typed.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    chosen = [("", name) for name in sorted(names)]
    inlined = onnx.inliner.inline_selected_functions(typed, chosen, inline_schema_functions=True)
    refill(inlined.graph.input, model.graph.input)
    return inlined


def constants_of(model: ModelProto) -> dict[str, np.ndarray]:
    """The values of a model's initializers and Constant nodes."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if (value := constant_of(node)) is not None:
            arrays[node.output[0]] = value
    return arrays


def _integers(operator: ForwardOperator, constants: Constants, index: int) -> list[int] | None:
    """Return a constant operand of whole numbers; None if absent or computed."""
    inputs = operator.node.input
    if index >= len(inputs) or inputs[index] not in constants:
        return None
    return [int(number) for number in constants[inputs[index]].reshape(-1)]


def _given(operator: ForwardOperator, index: int) -> bool:
    return index < len(operator.node.input) and operator.node.input[index] != ""


def _gathered(emit: ProtoTape, value: str, axis: int, indices: np.ndarray) -> str:
    return emit.op("Gather", value, emit.ints(indices), axis=axis)


def _slice(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Elements at steps are gathered."""
    starts, ends, axes, steps = (_integers(operator, constants, index) for index in range(1, 5))
    if starts is None or ends is None or steps is None or set(steps) == {1} or (axes is None and _given(operator, 3)):
        return None
    value, shape = str(operator.node.input[0]), operator.shape(operator.node.input[0])
    for axis, start, end, step in zip(axes or range(len(starts)), starts, ends, steps):
        value = _gathered(emit, value, axis % len(shape), np.arange(shape[axis])[start:end:step])
    return value


def _pad(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Gather edge values, reflected or repeated."""
    mode, pads, axes = operator.attributes.get("mode", "constant"), *(_integers(operator, constants, i) for i in (1, 3))
    if not pads or (min(pads) < 0) != (mode == "constant") or (axes is None and _given(operator, 3)):
        return None
    value, shape = str(operator.node.input[0]), operator.shape(operator.node.input[0])
    chosen = list(range(len(shape))) if axes is None else [axis % len(shape) for axis in axes]
    if 0 in shape or not any(pads):
        return None
    if mode == "constant":
        return _cropped(operator, emit, chosen, pads)
    for index, axis in enumerate(chosen):
        around = pads[index], pads[len(chosen) + index]
        if any(around):
            value = _gathered(emit, value, axis, np.pad(np.arange(shape[axis]), around, mode=mode))
    return value


def _cropped(operator: ForwardOperator, emit: ProtoTape, axes: Sequence[int], pads: Sequence[int]) -> str:
    """Emit a Slice for negative pads, and a Pad for the rest."""
    value, count = operator.node.input[0], len(axes)
    shape = operator.shape(value)
    starts = [max(-pad, 0) for pad in pads[:count]]
    ends = [shape[axis] - max(-pad, 0) for axis, pad in zip(axes, pads[count:])]
    value = emit.op("Slice", value, emit.ints(starts), emit.ints(ends), emit.ints(axes))
    rest = [*operator.node.input[2:3], *[""] * (3 - len(operator.node.input)), emit.ints(axes)]
    return emit.op("Pad", value, emit.ints(max(pad, 0) for pad in pads), *rest)


def _pool(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Write automatic pads, and windows beyond the end, as pads in numbers."""
    attrs, padding = dict(operator.attributes), operator.attributes.get("auto_pad", "NOTSET")
    ceils = attrs.get("ceil_mode", 0) and operator.node.op_type != "MaxPool" and not attrs.get("count_include_pad", 0)
    if len(operator.node.output) > 1 or not (padding.startswith("SAME") or ceils):
        return None
    kernel, rank = attrs["kernel_shape"], len(attrs["kernel_shape"])
    sizes, pooled = (operator.shape(name)[2:] for name in (operator.node.input[0], operator.node.output[0]))
    strides, dilations = (attrs.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = list(attrs.get("pads") or [0] * 2 * rank)
    for axis in range(rank):
        total = strides[axis] * (pooled[axis] - 1) + dilations[axis] * (kernel[axis] - 1) + 1 - sizes[axis]
        if padding.startswith("SAME"):
            total = max(total, 0)
            pads[axis] = total // 2 if padding == "SAME_UPPER" else total - total // 2
        pads[rank + axis] = max(total - pads[axis], 0 if padding.startswith("SAME") else pads[rank + axis])
    if any(pad >= size for pad, size in zip(pads, [*kernel, *kernel])):
        return None
    attrs.pop("auto_pad", None)
    attrs.pop("ceil_mode", None)
    return emit.op(operator.node.op_type, *operator.node.input, **{**attrs, "pads": pads})


def _reduction(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Leave out an empty list of axes, which stands for all; write a product as products of halves."""
    node, attributes = operator.node, operator.attributes
    axes, noop = _integers(operator, constants, 1), attributes.get("noop_with_empty_axes", 0)
    of_all = axes == [] and not noop
    if node.op_type != "ReduceProd":
        return emit.op(node.op_type, node.input[0], keepdims=attributes.get("keepdims", 1)) if of_all else None
    if not of_all and ((axes is None and _given(operator, 1)) or (noop and not axes)):
        return None
    shape = operator.shape(node.input[0])
    if 0 in shape or not shape:
        return None
    chosen = sorted({axis % len(shape) for axis in axes or attributes.get("axes") or range(len(shape))})
    value = node.input[0]
    for axis in chosen:
        value = _product(emit, value, axis, shape[axis])
    if attributes.get("keepdims", 1):
        return emit.op("Identity", value)
    return emit.reshape(value, [size for axis, size in enumerate(shape) if axis not in chosen])


def _product(emit: ProtoTape, value: str, axis: int, size: int) -> str:
    """Return the product along an axis, of length 1 then. No quotient: an element may be zero."""
    while size > 1:
        half = size // 2
        product = emit.op("Mul", emit.slice(value, 0, half, axis), emit.slice(value, half, 2 * half, axis))
        rest = [emit.slice(value, 2 * half, size, axis)] if size % 2 else []
        value = emit.op("Concat", product, *rest, axis=axis) if rest else product
        size = half + size % 2
    return value


def _cumulative_product(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Multiply each element by all elements in front, in doubling distances. No quotient: an element may be zero."""
    axes, value = _integers(operator, constants, 1), operator.node.input[0]
    kind = operator.types.get(value)
    if axes is None or kind is None:
        return None
    shape, attributes = operator.shape(value), operator.attributes
    axis = axes[0] % len(shape)
    size, back = shape[axis], np.arange(shape[axis])[::-1]
    if not size:
        return None
    if attributes.get("reverse", 0):
        value = _gathered(emit, value, axis, back)
    if attributes.get("exclusive", 0):
        ones = [1 if index == axis else size for index, size in enumerate(shape)]
        one = emit.constant(np.ones(ones, numpy_dtype(kind.dtype)))
        value = emit.op("Concat", one, emit.slice(value, 0, size - 1, axis), axis=axis)
    distance = 1
    while distance < size:
        before_it, later = emit.slice(value, 0, distance, axis), emit.slice(value, distance, size, axis)
        before = emit.slice(value, 0, size - distance, axis)
        value = emit.op("Concat", before_it, emit.op("Mul", later, before), axis=axis)
        distance *= 2
    return _gathered(emit, value, axis, back) if attributes.get("reverse", 0) else emit.op("Identity", value)


def _space_to_depth(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Blocks behind channels: two regroupings around a transposition."""
    if operator.attributes.get("mode", "DCR") != "CRD":
        return None
    block = operator.attributes["blocksize"]
    samples, channels, height, width = operator.shape(operator.node.input[0])
    value = emit.reshape(operator.node.input[0], [samples, channels, height // block, block, width // block, block])
    value = emit.op("Transpose", value, perm=[0, 1, 3, 5, 2, 4])
    return emit.reshape(value, [samples, channels * block * block, height // block, width // block])


def _batch_norm(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Operands of two types, as in a model in half precision, are brought into the type of the statistics."""
    node, kinds = operator.node, [operator.dtype(name) for name in operator.node.input]
    if len(set(kinds)) == 1 or "undefined" in kinds or any(node.output[1:]):
        return None
    names = [emit.cast(name, kinds[3], kind) for name, kind in zip(node.input, kinds)]
    normalized = emit.op("BatchNormalization", *names, **operator.attributes)
    return emit.cast(normalized, kinds[0])


def _power(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Cast a whole exponent to the type of the base."""
    base, exponent = operator.node.input
    kinds = operator.dtype(base), operator.dtype(exponent)
    if kinds[0] not in FLOATS or kinds[1] in (*FLOATS, "undefined"):
        return None
    return emit.op("Pow", base, emit.cast(exponent, kinds[0]))


def _gru(operator: ForwardOperator, constants: Constants, emit: ProtoTape) -> str | None:
    """Add a bias of zeros: without a bias, onnx-ad applies the reset gate before the product, whatever the attribute
    says."""
    node = operator.node
    if _given(operator, 3) or not operator.attributes.get("linear_before_reset", 0):
        return None
    directions, rows, _ = operator.shape(node.input[2])
    bias = emit.constant(np.zeros((directions, 2 * rows), numpy_dtype(operator.dtype(node.input[0]))))
    return emit.op("GRU", *node.input[:3], bias, *node.input[4:], **operator.attributes)


EXPANDED = frozenset({"CausalConvWithState"})
"""Functions with a convolution in groups."""

REWRITES: Mapping[str, Rewrite] = {
    "Slice": _slice,
    "Pad": _pad,
    **dict.fromkeys(sorted(POOLS), _pool),
    **dict.fromkeys(
        sorted(ALL_REDUCTIONS),
        _reduction,
    ),
    "CumProd": _cumulative_product,
    "SpaceToDepth": _space_to_depth,
    "BatchNormalization": _batch_norm,
    "Pow": _power,
    "GRU": _gru,
}  # fmt: skip
"""By operator."""

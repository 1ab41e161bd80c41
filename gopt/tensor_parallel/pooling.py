"""Rewrites operators over sharded spatial places: batch statistics, global pools, and means that do not count
padding."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import LOW_PRECISION, TensorType, dtype_code, numpy_dtype
from gopt.operators.dims.windows import mean_counts, sliding
from gopt.operators.kinds import GLOBAL_POOLS
from gopt.spmd.links import OperatorUse
from gopt.tensor_parallel.builder import ExpansionBuilder


def global_pool(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write a global pool as a reduction over all places."""
    axes = range(2, operator.rank(0))
    build.reduction(GLOBAL_POOLS[node.op_type], node.inputs[0], axes, node.outputs[0])


def batch_normalization(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write (x - mean) / sqrt(variance + epsilon) * scale + offset with statistics over all samples and places, and the
    running statistics, with ``momentum`` as the share of the old."""
    out = node.outputs[0]
    root, type = f"gopt.tensor-parallel.{out}", build.graph.types[out]
    value = _cast(build, node.inputs[0], "float32" if type.dtype in LOW_PRECISION else type.dtype, f"{root}.wide")
    wide = build.graph.types[value]
    axes = [dim for dim in range(len(type.dims)) if dim != 1]
    shape = tuple(size if dim == 1 else 1 for dim, size in enumerate(type.dims))
    row = TensorType(wide.dtype, shape)

    def of_channel(name: str, role: str) -> str:
        wide_name = _cast(build, name, wide.dtype, f"{root}.{role}.wide")
        return build.add("Reshape", [wide_name, build.ints(shape)], f"{root}.{role}", row)

    mean = build.reduction("ReduceMean", value, axes, f"{root}.mean")
    moved = build.add("Sub", [value, mean], f"{root}.moved", wide)
    squares = build.add("Mul", [moved, moved], f"{root}.squares", wide)
    variance = build.reduction("ReduceMean", squares, axes, f"{root}.variance")
    _normalised(build, node, moved, variance, of_channel)
    for role, statistic, index in (("mean", mean, 1), ("variance", variance, 2)):
        if index < len(node.outputs) and node.outputs[index]:
            _running(build, node, statistic, index, f"{root}.running_{role}")


def _running(build: ExpansionBuilder, node: Node, statistic: str, index: int, root: str) -> None:
    """Write a running statistic: momentum * old + (1 - momentum) * new."""
    old, out = node.inputs[index + 2], node.outputs[index]
    type, momentum = build.graph.types[out], float(node.attributes.get("momentum", 0.9))
    kind = build.graph.types[statistic].dtype
    flat = TensorType(kind, type.shape)
    new = build.add("Reshape", [statistic, build.ints(type.dims)], f"{root}.flat", flat)
    carried = _cast(build, old, kind, f"{root}.wide")
    carried = build.add("Mul", [carried, build.number(momentum, kind)], f"{root}.kept", flat)
    new = build.add("Mul", [new, build.number(1 - momentum, kind)], f"{root}.new", flat)
    if kind == type.dtype:
        build.add("Add", [carried, new], out, type)
        return
    added = build.add("Add", [carried, new], f"{root}.added", flat)
    build.add("Cast", [added], out, type, to=dtype_code(type.dtype))


def group_normalization(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write (x - mean) / sqrt(variance + epsilon) * scale + offset with statistics over all places of the channels of a
    group; of each channel alone for InstanceNormalization."""
    out = node.outputs[0]
    root, type = f"gopt.tensor-parallel.{out}", build.graph.types[out]
    value = _cast(build, node.inputs[0], "float32" if type.dtype in LOW_PRECISION else type.dtype, f"{root}.wide")
    wide, (samples, channels, *sizes) = build.graph.types[value], type.dims
    groups = int(node.attributes.get("num_groups", channels))
    shape = (samples, channels, *[1] * len(sizes))

    def mean(of: str, role: str) -> str:
        """Return a statistic of each group, repeated for each of its channels."""
        level = build.reduction("ReduceMean", of, range(2, len(type.dims)), f"{root}.{role}.places")
        if groups == channels:
            return level
        apart = (samples, groups, channels // groups)
        level = build.add("Reshape", [level, build.ints(apart)], f"{root}.{role}.apart", TensorType(wide.dtype, apart))
        level = build.reduction("ReduceMean", level, [2], f"{root}.{role}.group")
        level = build.add("Expand", [level, build.ints(apart)], f"{root}.{role}.all", TensorType(wide.dtype, apart))
        return build.add("Reshape", [level, build.ints(shape)], f"{root}.{role}", TensorType(wide.dtype, shape))

    def of_channel(name: str, role: str) -> str:
        """Return scale or offset for each channel: before operator set 21 it has one element for each group."""
        output, kind = _cast(build, name, wide.dtype, f"{root}.{role}.wide"), wide.dtype
        count = build.graph.types[name].dims[0]
        if count != channels:
            apart = (count, channels // count)
            output = build.add(
                "Reshape", [output, build.ints((count, 1))], f"{root}.{role}.one", TensorType(kind, (count, 1))
            )
            output = build.add("Expand", [output, build.ints(apart)], f"{root}.{role}.all", TensorType(kind, apart))
        row = (channels, *[1] * len(sizes))
        return build.add("Reshape", [output, build.ints(row)], f"{root}.{role}", TensorType(kind, row))

    moved = build.add("Sub", [value, mean(value, "mean")], f"{root}.moved", wide)
    variance = mean(build.add("Mul", [moved, moved], f"{root}.squares", wide), "variance")
    _normalised(build, node, moved, variance, of_channel)


def _normalised(
    build: ExpansionBuilder, node: Node, moved: str, variance: str, of_channel: Callable[[str, str], str]
) -> None:
    """Write moved / sqrt(variance + epsilon) * scale + offset; ``of_channel`` reshapes scale and offset."""
    out = node.outputs[0]
    root = f"gopt.tensor-parallel.{out}"
    type, wide, row = (build.graph.types[name] for name in (out, moved, variance))
    epsilon = build.number(float(node.attributes.get("epsilon", 1e-5)), wide.dtype)
    added = build.add("Add", [variance, epsilon], f"{root}.added", row)
    deviation = build.add("Sqrt", [added], f"{root}.deviation", row)
    normal = build.add("Div", [moved, deviation], f"{root}.normal", wide)
    scaled = build.add("Mul", [normal, of_channel(node.inputs[1], "scale")], f"{root}.scaled", wide)
    narrow = wide.dtype != type.dtype
    name = f"{root}.result" if narrow else out
    build.add("Add", [scaled, of_channel(node.inputs[2], "offset")], name, wide)
    if narrow:
        build.add("Cast", [name], out, type, to=dtype_code(type.dtype))


def _cast(build: ExpansionBuilder, value: str, dtype: str, name: str) -> str:
    type = build.graph.types[value]
    if type.dtype == dtype:
        return value
    return build.add("Cast", [value], name, TensorType(dtype, type.shape), to=dtype_code(dtype))


def mean_pool(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write a mean that counts the padding too, times a factor that corrects the count."""
    out = node.outputs[0]
    type, root = build.graph.types[out], f"gopt.tensor-parallel.{out}"
    counts = mean_counts(operator)
    assert counts is not None
    factor = f"{root}.factor"
    counted = Tensor(TensorType(type.dtype, counts.shape), array=counts.astype(numpy_dtype(type.dtype)))
    build.graph.initializers[factor], build.graph.types[factor] = counted, counted.type
    attributes = {**node.attributes, "count_include_pad": 1}
    mean = build.add("AveragePool", node.inputs, f"{root}.padded", type, **attributes)
    build.add("Mul", [mean, factor], out, type)


def is_training(operator: OperatorUse) -> bool:
    """Return whether a BatchNormalization computes batch statistics in a form that is supported here."""
    return operator.opset >= 14 and bool(operator.attributes.get("training_mode", 0))


def padded_mean(operator: OperatorUse, dim: int) -> bool:
    """Return whether means along a spatial dimension have unequal counts and can be rewritten."""
    slide = sliding(operator, dim)
    if slide is None or slide.inside or operator.attributes.get("count_include_pad", 0):
        return False
    counts = mean_counts(operator)
    return counts is not None and bool(np.isfinite(counts).all()) and prod(counts.shape) <= 2**20

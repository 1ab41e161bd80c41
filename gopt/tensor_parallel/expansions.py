"""Rewrites operators acting along a sharded dimension as splittable operators.

An operator is rewritten only for such operands. The formulas come from the ONNX operators; softmax first subtracts
the largest value of all members. Half precision is computed in float32, as runtimes do inside the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from gopt.ir.graph import Node
from gopt.ir.node_kinds import record_of
from gopt.ir.types import LOW_PRECISION, TensorType, dtype_code
from gopt.operators.kinds import CLASS_LOSSES, CONVOLUTIONS, GLOBAL_POOLS, PART_NORMS, SMOOTH_MAXIMA
from gopt.records.placements import Placement, Shard
from gopt.spmd.links import OperatorUse, Slot, axes_of, softmax_axes
from gopt.tensor_parallel.builder import ExpansionBuilder
from gopt.tensor_parallel.forward import has_bias, summing
from gopt.tensor_parallel.losses import loss, normalised
from gopt.tensor_parallel.pooling import (
    batch_normalization,
    global_pool,
    group_normalization,
    is_training,
    mean_pool,
    padded_mean,
)

Expansion = Callable[[ExpansionBuilder, Node, OperatorUse], None]


def expansion(node: Node, operator: OperatorUse, placements: Sequence[Placement]) -> Expansion | None:
    """Return the rewrite of a node with operands in these placements; None if the node stays."""
    shard = placements[0] if placements else None
    if not isinstance(shard, Shard) or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in SMOOTH_MAXIMA:
        return softmax if shard.dim in softmax_axes(operator) else None
    if node.op_type in CLASS_LOSSES:
        return loss if shard.dim == 1 else None
    if has_bias(operator):
        return biased if summing(operator, Slot(0), shard) else None
    expand = _places(operator, shard)
    if expand is not None:
        return expand
    axes = axes_of(operator) if node.op_type in _REDUCED else None
    if axes is None or shard.dim not in axes:
        return None
    if record_of(node).pieces == "mean" and len(set(shard.sizes)) == 1:
        return None
    return _REDUCED[node.op_type]


def _places(operator: OperatorUse, shard: Shard) -> Expansion | None:
    """Return the rewrite of an operator over split spatial places."""
    kind, spatial = operator.op_type, shard.dim >= 2
    if kind in GLOBAL_POOLS and spatial:
        return global_pool
    if kind in PART_NORMS and spatial:
        return group_normalization
    if kind == "BatchNormalization" and shard.dim != 1 and is_training(operator):
        return batch_normalization
    return mean_pool if kind == "AveragePool" and spatial and padded_mean(operator, shard.dim) else None


def softmax(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write exp(x - max) / sum(exp(x - max)), or the logarithm."""
    out, type = node.outputs[0], operator.results[0]
    assert isinstance(type, TensorType)
    root = f"gopt.tensor-parallel.{out}"
    value = _wide(build, node.inputs[0], root)
    logs = node.op_type == "LogSoftmax"
    normal = normalised(build, value, softmax_axes(operator), root, logs=logs, out=_inner(build, out, type, root))
    _narrow(build, normal, out, type)


def biased(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write the product, and add its bias after the sum over members."""
    out = node.outputs[0]
    type = build.graph.types[out]
    root = f"gopt.tensor-parallel.{out}"
    attributes = {key: value for key, value in node.attributes.items() if key != "beta"}
    product = build.add(node.op_type, node.inputs[:2], f"{root}.product", type, **attributes)
    added, beta = node.inputs[2], float(node.attributes.get("beta", 1.0))
    if beta != 1.0:
        factor = build.number(beta, type.dtype)
        added = build.add("Mul", [added, factor], f"{root}.scaled", build.graph.types[added])
    if node.is_in(CONVOLUTIONS):
        shape = (type.dims[1], *[1] * (len(type.dims) - 2))
        added = build.add("Reshape", [added, build.ints(shape)], f"{root}.bias", TensorType(type.dtype, shape))
    build.add("Add", [product, added], out, type)


def norm(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write the root of the sum of squares."""
    root = f"gopt.tensor-parallel.{node.outputs[0]}"
    value = _wide(build, node.inputs[0], root)
    squares = build.add("Mul", [value, value], f"{root}.squares", build.graph.types[value])
    _finish(build, node, operator, "Sqrt", squares)


def log_sum(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write the logarithm of the sum."""
    _finish(build, node, operator, "Log", _wide(build, node.inputs[0], f"gopt.tensor-parallel.{node.outputs[0]}"))


def log_sum_exp(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write max + log(sum(exp(x - max)))."""
    out, axes = node.outputs[0], axes_of(operator) or ()
    type, root = build.graph.types[out], f"gopt.tensor-parallel.{out}"
    value = _wide(build, node.inputs[0], root)
    largest = build.reduction("ReduceMax", value, axes, f"{root}.max")
    moved = build.add("Sub", [value, largest], f"{root}.moved", build.graph.types[value])
    powers = build.add("Exp", [moved], f"{root}.exp", build.graph.types[value])
    kind = build.graph.types[largest]
    total = build.reduction("ReduceSum", powers, axes, f"{root}.sum")
    logs = build.add("Log", [total], f"{root}.log", kind)
    flat = TensorType(kind.dtype, type.shape)
    if node.attributes.get("keepdims", 1):
        _narrow(build, build.add("Add", [largest, logs], _inner(build, out, type, root), flat), out, type)
        return
    added = build.add("Add", [largest, logs], f"{root}.kept", kind)
    _narrow(
        build, build.add("Reshape", [added, build.ints(type.dims)], _inner(build, out, type, root), flat), out, type
    )


def mean(build: ExpansionBuilder, node: Node, operator: OperatorUse) -> None:
    """Write the sum divided by the number of elements, because members hold unequal numbers."""
    value = _wide(build, node.inputs[0], f"gopt.tensor-parallel.{node.outputs[0]}")
    count = prod(operator.size(0, axis) for axis in axes_of(operator) or ())
    _finish(build, node, operator, "Div", value, build.number(count, build.graph.types[value].dtype))


def _finish(build: ExpansionBuilder, node: Node, operator: OperatorUse, kind: str, value: str, *more: str) -> None:
    """Write the sum over the axes of a reduction, and a final operator."""
    out, keep = node.outputs[0], node.attributes.get("keepdims", 1)
    type, root = build.graph.types[out], f"gopt.tensor-parallel.{out}"
    total = build.reduction("ReduceSum", value, axes_of(operator) or (), f"{root}.sum", keepdims=keep)
    wide = build.graph.types[total]
    _narrow(build, build.add(kind, [total, *more], _inner(build, out, type, root), wide), out, type)


def _wide(build: ExpansionBuilder, value: str, root: str) -> str:
    """Return a value in the dtype of the computation: float32 for half precision."""
    type = build.graph.types[value]
    if type.dtype not in LOW_PRECISION:
        return value
    return build.add("Cast", [value], f"{root}.wide", TensorType("float32", type.shape), to=dtype_code("float32"))


def _inner(build: ExpansionBuilder, out: str, type: TensorType, root: str) -> str:
    """Return the name of a result before a cast back; the final name without a cast."""
    return f"{root}.result" if type.dtype in LOW_PRECISION else out


def _narrow(build: ExpansionBuilder, value: str, out: str, type: TensorType) -> None:
    if value != out:
        build.add("Cast", [value], out, type, to=dtype_code(type.dtype))


_REDUCED: dict[str, Expansion] = {
    "ReduceL2": norm, "ReduceMean": mean, "ReduceLogSum": log_sum, "ReduceLogSumExp": log_sum_exp,
}  # fmt: skip

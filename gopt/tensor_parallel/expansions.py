"""Operators that act along a sharded dimension, written as operators that can be split there.

Each is written only where its operand is sharded so. The formulas are those of the ONNX operators; softmax subtracts
the largest value of all members first. Halves are computed in float32, as runtimes do inside the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gopt.ir.graph import Node
from gopt.ir.types import LOW_PRECISION, TensorType, dtype_code
from gopt.sharding.links import Operator, axes_of
from gopt.sharding.placements import Placement, Shard
from gopt.tensor_parallel.builder import Builder

Expansion = Callable[[Builder, Node, Operator], None]


def expansion(node: Node, operator: Operator, placements: Sequence[Placement]) -> Expansion | None:
    """How to write a node whose operands are placed so; None where it stays as it is."""
    first = placements[0] if placements else None
    if not isinstance(first, Shard) or node.domain not in ("", "ai.onnx"):
        return None
    rank = operator.rank(0)
    if node.op_type in ("Softmax", "LogSoftmax"):
        return softmax if node.attributes.get("axis", -1) % rank == first.dim else None
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2]:
        contracted = 0 if node.attributes.get("transA", 0) else 1
        return biased if first.dim == contracted else None
    axes = axes_of(operator) if node.op_type in ("ReduceL2", "ReduceMean") else None
    if axes is not None and first.dim in axes:
        if node.op_type == "ReduceL2":
            return norm
        return mean if len(set(first.sizes)) > 1 else None
    return None


def softmax(build: Builder, node: Node, operator: Operator) -> None:
    """exp(x - max) / sum(exp(x - max)), or its logarithm."""
    value, out = node.inputs[0], node.outputs[0]
    type = build.graph.types[value]
    axis = node.attributes.get("axis", -1) % len(type.dims)
    wide = TensorType("float32" if type.dtype in LOW_PRECISION else type.dtype, type.shape)
    one = TensorType(wide.dtype, (*type.dims[:axis], 1, *type.dims[axis + 1 :]))
    root = f"gopt.tensor-parallel.{out}"
    if wide != type:
        value = build.add("Cast", [value], f"{root}.wide", wide, to=dtype_code(wide.dtype))
    axes = build.ints([axis])
    largest = build.add("ReduceMax", [value, axes], f"{root}.max", one, keepdims=1)
    moved = build.add("Sub", [value, largest], f"{root}.moved", wide)
    powers = build.add("Exp", [moved], f"{root}.exp", wide)
    total = build.add("ReduceSum", [powers, axes], f"{root}.sum", one, keepdims=1)
    last = out if wide == type else f"{root}.result"
    if node.op_type == "Softmax":
        build.add("Div", [powers, total], last, wide)
    else:
        build.add("Sub", [moved, build.add("Log", [total], f"{root}.log", one)], last, wide)
    if wide != type:
        build.add("Cast", [last], out, type, to=dtype_code(type.dtype))


def biased(build: Builder, node: Node, operator: Operator) -> None:
    """The product, and what is added to it behind the sum over members."""
    out = node.outputs[0]
    type, dtype = build.graph.types[out], build.graph.types[out].dtype
    root = f"gopt.tensor-parallel.{out}"
    attributes = {key: value for key, value in node.attributes.items() if key != "beta"}
    product = build.add("Gemm", node.inputs[:2], f"{root}.product", type, **attributes)
    added, beta = node.inputs[2], float(node.attributes.get("beta", 1.0))
    if beta != 1.0:
        scalar = TensorType("float32", ())
        factor = build.add("Constant", [], f"{root}.beta32", scalar, value_float=beta)
        factor = build.add("Cast", [factor], f"{root}.beta", TensorType(dtype, ()), to=dtype_code(dtype))
        added = build.add("Mul", [added, factor], f"{root}.scaled", build.graph.types[added])
    build.add("Add", [product, added], out, type)


def norm(build: Builder, node: Node, operator: Operator) -> None:
    """The root of the sum of squares."""
    out = node.outputs[0]
    type, root = build.graph.types[out], f"gopt.tensor-parallel.{out}"
    attributes = {key: value for key, value in node.attributes.items() if key != "axes"}
    axes = axes_of(operator) or ()
    given = [node.inputs[0], build.ints(axes)] if axes else [node.inputs[0]]
    squares = build.add("Mul", [node.inputs[0]] * 2, f"{root}.squares", build.graph.types[node.inputs[0]])
    total = build.add("ReduceSum", [squares, *given[1:]], f"{root}.sum", type, **attributes)
    build.add("Sqrt", [total], out, type)


def mean(build: Builder, node: Node, operator: Operator) -> None:
    """The sum over the number of elements, where members have unequal parts of them."""
    out = node.outputs[0]
    type, root = build.graph.types[out], f"gopt.tensor-parallel.{out}"
    attributes = {key: value for key, value in node.attributes.items() if key != "axes"}
    axes = axes_of(operator) or ()
    count = 1
    for axis in axes:
        count *= operator.size(0, axis)
    given = [node.inputs[0], build.ints(axes)] if axes else [node.inputs[0]]
    total = build.add("ReduceSum", given, f"{root}.sum", type, **attributes)
    number = build.add("Constant", [], f"{root}.count32", TensorType("float32", ()), value_float=float(count))
    if type.dtype != "float32":
        number = build.add("Cast", [number], f"{root}.count", TensorType(type.dtype, ()), to=dtype_code(type.dtype))
    build.add("Div", [total, number], out, type)

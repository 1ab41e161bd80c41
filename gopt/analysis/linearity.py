"""How a value follows another one, with everything else held: in proportion, affinely, or not linearly.

A mean over ranks passes through what is linear. Backward operators are homogeneous-linear in the adjoint that flows
through them, so the first operator that is affine or nonlinear in a gradient belongs to the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np
import onnx

from gopt.analysis.sweeps import Index
from gopt.graph.model import Node
from gopt.graph.types import FLOATS


class Follows(IntEnum):
    """How a value follows a candidate, the simplest first."""

    HOMOGENEOUS = 0
    """Linear, and zero where the candidate is zero."""
    SCALED = 1
    """Homogeneous, with a factor that is this rank's own and not made of the candidate: a token count."""
    AFFINE = 2
    NONLINEAR = 3


CONSTANT = -1
"""An operand that does not depend on the batch."""
OUTSIDE = -2
"""An operand that depends on the batch past the candidate."""

_ZERO_BYTES = 1 << 20
_FROM_FIRST = frozenset(
    [
        "Neg", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand", "Tile",
        "Split", "ReduceSum", "ReduceMean", "Gather", "GatherND", "GatherElements", "CumSum", "Trilu", "DepthToSpace",
        "SpaceToDepth", "AveragePool", "GlobalAveragePool", "ReverseSequence",
    ]
)  # fmt: skip
"""Linear in the first operand; the others are places, axes and sizes."""
_BILINEAR = frozenset(["Mul", "MatMul", "Einsum", "Conv", "ConvTranspose"])


def follow(index: Index, nodes: Iterable[Node], start: str, tainted: set[str]) -> dict[str, Follows]:
    """How each value that ``nodes`` (in their order) make of ``start`` follows it; others are left out."""
    found = {start: Follows.HOMOGENEOUS}
    for node in nodes:
        if start in node.outputs:
            continue
        levels = [found.get(name, OUTSIDE if name in tainted else CONSTANT) for name in node.inputs if name]
        if not any(level >= 0 for level in levels) or "" in node.inputs[:1]:
            continue
        level = _level(index, node, levels)
        found.update((name, level) for name in node.outputs if name)
    return found


def _level(index: Index, node: Node, levels: list[int]) -> Follows:
    moving = [level for level in levels if level >= 0]
    highest = Follows(max(moving))
    if highest is Follows.NONLINEAR or node.captures:
        return Follows.NONLINEAR
    if node.is_a(*_FROM_FIRST):
        return highest if levels[0] >= 0 and all(level == CONSTANT for level in levels[1:]) else Follows.NONLINEAR
    if node.is_a("Cast", "CastLike"):
        return highest if index.graph.type_of(node.outputs[0]).dtype in FLOATS else Follows.NONLINEAR
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is not None:
        return rule(index, node, levels)
    if node.is_a(*_BILINEAR):
        return _product(levels) if node.is_a("Mul") or len(levels) == 2 else Follows.NONLINEAR
    return Follows.NONLINEAR


def _product(levels: list[int]) -> Follows:
    moving = [level for level in levels if level >= 0]
    if len(moving) != 1:
        return Follows.NONLINEAR
    return Follows(max(moving[0], Follows.SCALED)) if OUTSIDE in levels else Follows(moving[0])


def _quotient(index: Index, node: Node, levels: list[int]) -> Follows:
    return _product(levels) if levels[0] >= 0 else Follows.NONLINEAR


def _sum(index: Index, node: Node, levels: list[int]) -> Follows:
    if OUTSIDE in levels:
        return Follows.NONLINEAR
    highest = max(levels)
    names = [name for name in node.inputs if name]
    shifted = any(level == CONSTANT and not is_zero(index, name) for name, level in zip(names, levels))
    return Follows(max(highest, Follows.AFFINE)) if shifted else Follows(highest)


def _chosen(index: Index, node: Node, levels: list[int]) -> Follows:
    """``Where``: a choice that does not follow the candidate."""
    if levels[0] >= 0:
        return Follows.NONLINEAR
    summed = _sum(index, Node("Sum", node.inputs[1:], node.outputs), levels[1:])
    if levels[0] == CONSTANT:
        return summed
    return Follows.SCALED if summed <= Follows.SCALED else Follows.NONLINEAR


def _gemm(index: Index, node: Node, levels: list[int]) -> Follows:
    if OUTSIDE in levels[2:] or not any(level >= 0 for level in levels[:2]):
        return Follows.NONLINEAR
    product = _product(levels[:2])
    if len(levels) < 3 or is_zero(index, node.inputs[2]):
        return product
    return Follows(max(product, levels[2], Follows.AFFINE))


def _padded(index: Index, node: Node, levels: list[int]) -> Follows:
    constant = node.attributes.get("mode", "constant") == "constant"
    if levels[0] < 0 or any(level >= 0 for level in levels[1:]) or not constant:
        return Follows.NONLINEAR
    fill = node.inputs[2] if len(node.inputs) > 2 else ""
    return Follows(levels[0]) if not fill or is_zero(index, fill) else Follows(max(levels[0], Follows.AFFINE))


def _scattered(index: Index, node: Node, levels: list[int]) -> Follows:
    """Scatter: places that do not follow the candidate, summed or put over what is there."""
    if len(levels) != 3 or levels[1] >= 0 or node.attributes.get("reduction", "none") not in ("none", "add"):
        return Follows.NONLINEAR
    names = [node.inputs[0], node.inputs[2]]
    summed = _sum(index, Node("Sum", names, node.outputs), [levels[0], levels[2]])
    return summed if levels[1] == CONSTANT or summed is Follows.NONLINEAR else Follows(max(summed, Follows.SCALED))


_RULES: dict[str, Callable[[Index, Node, list[int]], Follows]] = {
    "Add": _sum, "Sub": _sum, "Sum": _sum, "Mean": _sum, "Concat": _sum, "Div": _quotient, "Where": _chosen,
    "Gemm": _gemm, "Pad": _padded, "ScatterND": _scattered, "ScatterElements": _scattered,
}  # fmt: skip


def is_zero(index: Index, name: str) -> bool:
    """Whether a value is a constant of the file that is zero everywhere."""
    for _ in range(8):
        node = index.producer.get(name)
        if node is None:
            break
        if node.is_a("Constant"):
            return all(not np.any(_array(value)) for value in node.attributes.values())
        if node.is_a("ConstantOfShape"):
            return "value" not in node.attributes or not np.any(_array(node.attributes["value"]))
        if not node.is_a("Expand", "Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze", "Neg"):
            return False
        name = node.inputs[0]
    tensor = index.graph.initializers.get(name)
    if tensor is None or name in index.graph.inputs or tensor.nbytes > _ZERO_BYTES or tensor.type.dtype == "string":
        return False
    return not np.any(np.asarray(tensor.numpy()))


def _array(value: object) -> np.ndarray:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)

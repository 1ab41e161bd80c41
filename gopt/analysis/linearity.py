"""Classifies how one value depends on another: in proportion, affinely, or nonlinearly, all else being constant.

A mean over ranks passes through what is linear. Backward operators are homogeneous-linear in the adjoint that flows
through them, so the first operator that is affine or nonlinear in a gradient belongs to the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum

from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CONTRACTIONS, LINEAR_IN_FIRST


class Linearity(IntEnum):
    """How a value depends on a candidate, the simplest relation first."""

    HOMOGENEOUS = 0
    """Linear, and zero where the candidate is zero."""
    SCALED = 1
    """Homogeneous, with a rank-local factor that does not depend on the candidate, such as a token count."""
    AFFINE = 2
    NONLINEAR = 3


_LEVELS = tuple(Linearity)
"""The levels by number."""
CONSTANT = -1
"""An operand that does not depend on the batch."""
OUTSIDE = -2
"""An operand that depends on the batch past the candidate."""

_BILINEAR = CONTRACTIONS - {"Gemm"} | {"Mul"}


def propagate_linearity(
    index: GraphIndex, nodes: Iterable[Node], start: str, tainted: set[str], enough: Linearity = Linearity.NONLINEAR
) -> dict[str, Linearity]:
    """Return value -> linearity in ``start``, for each value that ``nodes`` (in topological order) compute from it.

    ``enough``: values behind the first that is less simple are left out; none that is made of it is simpler.
    """
    found = {start: Linearity.HOMOGENEOUS}
    moving = found.keys()
    for node in nodes:
        if moving.isdisjoint(node.inputs) or start in node.outputs or not node.inputs[0]:
            continue
        levels = [found.get(name, OUTSIDE if name in tainted else CONSTANT) for name in node.inputs if name]
        reached = level(index, node, levels)
        for name in node.outputs:
            if name:
                found[name] = reached
        if reached > enough:
            break
    return found


def level(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    """Return how results depend on the operands that move; ``levels``: of each operand, or CONSTANT or OUTSIDE."""
    moving = [level for level in levels if level >= 0]
    highest = _LEVELS[max(moving)]
    if highest is Linearity.NONLINEAR or node.captures:
        return Linearity.NONLINEAR
    if node.is_in(LINEAR_IN_FIRST):
        return highest if levels[0] >= 0 and all(level == CONSTANT for level in levels[1:]) else Linearity.NONLINEAR
    if node.is_a("Cast", "CastLike"):
        return highest if index.graph.type_of(node.outputs[0]).dtype in FLOATS else Linearity.NONLINEAR
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is not None:
        return rule(index, node, levels)
    if node.is_in(_BILINEAR):
        return _product(levels) if node.is_a("Mul") or len(levels) == 2 else Linearity.NONLINEAR
    return Linearity.NONLINEAR


def _product(levels: list[int]) -> Linearity:
    moving = [level for level in levels if level >= 0]
    if len(moving) != 1:
        return Linearity.NONLINEAR
    return _LEVELS[max(moving[0], Linearity.SCALED)] if OUTSIDE in levels else _LEVELS[moving[0]]


def _quotient(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    return _product(levels) if levels[0] >= 0 else Linearity.NONLINEAR


def _sum(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    if OUTSIDE in levels:
        return Linearity.NONLINEAR
    highest = max(levels)
    names = [name for name in node.inputs if name]
    shifted = any(level == CONSTANT and not index.constants.zero(name) for name, level in zip(names, levels))
    return _LEVELS[max(highest, Linearity.AFFINE)] if shifted else _LEVELS[highest]


def _chosen(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    """``Where``: a choice that does not follow the candidate."""
    if levels[0] >= 0:
        return Linearity.NONLINEAR
    summed = _sum(index, Node("Sum", node.inputs[1:], node.outputs), levels[1:])
    if levels[0] == CONSTANT:
        return summed
    return Linearity.SCALED if summed <= Linearity.SCALED else Linearity.NONLINEAR


def _gemm(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    if OUTSIDE in levels[2:] or not any(level >= 0 for level in levels[:2]):
        return Linearity.NONLINEAR
    product = _product(levels[:2])
    if len(levels) < 3 or index.constants.zero(node.inputs[2]):
        return product
    return Linearity(max(product, levels[2], Linearity.AFFINE))


def _padded(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    constant = node.attributes.get("mode", "constant") == "constant"
    if levels[0] < 0 or any(level >= 0 for level in levels[1:]) or not constant:
        return Linearity.NONLINEAR
    fill = node.inputs[2] if len(node.inputs) > 2 else ""
    zeros = not fill or index.constants.zero(fill)
    return Linearity(levels[0] if zeros else max(levels[0], Linearity.AFFINE))


def _scattered(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    """Scatter: places that do not follow the candidate, summed or put over what is there."""
    if len(levels) != 3 or levels[1] >= 0 or node.attributes.get("reduction", "none") not in ("none", "add"):
        return Linearity.NONLINEAR
    names = [node.inputs[0], node.inputs[2]]
    summed = _sum(index, Node("Sum", names, node.outputs), [levels[0], levels[2]])
    return (
        summed if levels[1] == CONSTANT or summed is Linearity.NONLINEAR else Linearity(max(summed, Linearity.SCALED))
    )


_RULES: dict[str, Callable[[GraphIndex, Node, list[int]], Linearity]] = {
    "Add": _sum, "Sub": _sum, "Sum": _sum, "Mean": _sum, "Concat": _sum, "Div": _quotient, "Where": _chosen,
    "Gemm": _gemm, "Pad": _padded, "ScatterND": _scattered, "ScatterElements": _scattered,
}  # fmt: skip

"""Classifies how one value depends on another: in proportion, affinely, or nonlinearly, all else being constant.

A mean over ranks passes through linear operators. Backward operators are homogeneous-linear in the adjoint, so the
first operator that is affine or nonlinear in a gradient belongs to the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from gopt.ir.constant_folding import fills
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS, SCATTERS, TERMS
from gopt.operators.operator import Slope
from gopt.operators.table import UNKNOWN, operator


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
_SUMS = TERMS | SCATTERS | {"Pad"}


def propagate_linearity(
    index: GraphIndex, nodes: Iterable[Node], start: str, tainted: set[str], enough: Linearity = Linearity.NONLINEAR
) -> dict[str, Linearity]:
    """Return value -> linearity in ``start``, for each value that ``nodes`` (in topological order) compute from
    ``start``.

    ``enough``: values behind the first less simple value are left out; no value made of that value is simpler."""
    levels_of = {start: Linearity.HOMOGENEOUS}
    moving = levels_of.keys()
    for node in nodes:
        if moving.isdisjoint(node.inputs) or start in node.outputs or not node.inputs[0]:
            continue
        levels = [levels_of.get(name, OUTSIDE if name in tainted else CONSTANT) for name in node.inputs if name]
        reached = level(index, node, levels)
        for name in node.outputs:
            if name:
                levels_of[name] = reached
        if reached > enough:
            break
    return levels_of


def level(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    """Return the dependence of results on the moving operands; ``levels``: of each operand, or CONSTANT or OUTSIDE."""
    highest = _LEVELS[max(levels)]
    record = operator(node.op_type) if node.domain in ("", "ai.onnx") and not node.captures else UNKNOWN
    slots = [slot for slot, name in enumerate(node.inputs) if name]
    levels = [CONSTANT if slot in record.by_type else level for slot, level in zip(slots, levels)]
    slopes = [record.slope(slot) for slot in slots]
    moving = {slope for slope, level in zip(slopes, levels) if level >= 0}
    if node.is_in(SCATTERS) and node.attributes.get("reduction", "none") in ("none", "add"):
        slopes, moving = [Slope.AFFINE, Slope.NONE, Slope.AFFINE], moving - {Slope.BENT, Slope.CURVED}
    cut = node.is_in(CASTS) and index.graph.type_of(node.outputs[0]).dtype not in FLOATS
    if highest is Linearity.NONLINEAR or cut or not moving <= {Slope.LINEAR, Slope.AFFINE}:
        return Linearity.NONLINEAR
    if fills(node):
        return Linearity.NONLINEAR if OUTSIDE in levels else _LEVELS[max(highest, Linearity.AFFINE)]
    if record.work is not None and Slope.AFFINE in slopes:
        return _with_bias(index, node, levels)
    if node.is_in(_SUMS):
        terms = [(name, level) for name, slope, level in zip(filter(None, node.inputs), slopes, levels) if slope]
        return _sum(index, terms, OUTSIDE in levels)
    if record.linear_in_first:
        return highest if all(level == CONSTANT for level in levels[1:]) else Linearity.NONLINEAR
    return _product(levels) if moving == {Slope.LINEAR} else Linearity.NONLINEAR


def _product(levels: list[int]) -> Linearity:
    moving = [level for level in levels if level >= 0]
    if len(moving) != 1:
        return Linearity.NONLINEAR
    return _LEVELS[max(moving[0], Linearity.SCALED)] if OUTSIDE in levels else _LEVELS[moving[0]]


def _sum(index: GraphIndex, terms: Sequence[tuple[str, int]], chosen: bool) -> Linearity:
    """A sum of terms; ``chosen``: a condition, or indices, that follow the batch past the candidate."""
    if any(level == OUTSIDE for _, level in terms):
        return Linearity.NONLINEAR
    highest = max(level for _, level in terms)
    if any(level == CONSTANT and not index.constants.zero(name) for name, level in terms):
        return Linearity.NONLINEAR if chosen else _LEVELS[max(highest, Linearity.AFFINE)]
    if chosen:
        return Linearity.SCALED if highest <= Linearity.SCALED else Linearity.NONLINEAR
    return _LEVELS[highest]


def _with_bias(index: GraphIndex, node: Node, levels: list[int]) -> Linearity:
    """A product of two operands, plus a term."""
    if OUTSIDE in levels[2:] or not any(level >= 0 for level in levels[:2]):
        return Linearity.NONLINEAR
    product = _product(levels[:2])
    if len(levels) < 3 or index.constants.zero(node.inputs[2]):
        return product
    return Linearity(max(product, levels[2], Linearity.AFFINE))

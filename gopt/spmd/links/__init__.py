"""The ways to split an operator along a dimension of an operand or result: by the record, or in windows."""

from __future__ import annotations

from gopt.operators.dims.elements import axes_of, in_front, softmax_axes
from gopt.operators.dims.link import OLDEST, DimFactor, Index, OperatorUse, Rule, Slot, Strategy, linked
from gopt.operators.dims.moves import reshape
from gopt.operators.kinds import RESHAPES
from gopt.operators.table import OPERATORS
from gopt.records.placements import Shard, Window
from gopt.spmd.links.windows import WINDOWED

__all__ = ["RULES", "DimFactor", "Index", "OperatorUse", "Slot", "Strategy", "axes_of", "softmax_axes", "strategies"]


def strategies(operator: OperatorUse, slot: Slot, shard: Shard | Window) -> list[Strategy]:
    """Return the ways to split an operator with an operand or result sharded so, if any."""
    rule, windowed = RULES.get(operator.op_type), WINDOWED.get(operator.op_type)
    types = (*operator.operands, *operator.results)
    if operator.opset < OLDEST or not all(type is None or type.static for type in types):
        return []
    chosen = list(rule(operator, slot, shard)) if rule is not None and isinstance(shard, Shard) else []
    if windowed is not None:
        chosen += windowed(operator, slot, shard)
    return list(dict.fromkeys(chosen))


RULES: dict[str, Rule] = {
    **{name: linked(operator.dims) for name, operator in OPERATORS.items() if operator.dims is not None},
    **dict.fromkeys(sorted(RESHAPES), reshape),
    "SimplifiedLayerNormalization": linked(in_front),
}
"""Operator -> how it is split: by its record, but for what splits and joins dimensions, and for one of ONNX Runtime."""

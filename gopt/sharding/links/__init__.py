"""Links: the dimensions of an operator's operands and results that are split together, one rule per operator family.

A *link* is one index of an operator: a dimension of some operands, and of the results or summed away in them. To split
an operator is to split one link: each member computes its part of the index with the operator itself. Links are read
in both directions: what operands give, and what a result asks of operands. Types are logical: those of whole values.
An operator without a rule has no links: members compute it whole.
"""

from __future__ import annotations

from gopt.operators.kinds import (
    ARG_EXTREMES,
    CLASS_LOSSES,
    CONVOLUTIONS,
    DEPTH_MOVES,
    ELEMENTWISE,
    GLOBAL_POOLS,
    LAYER_NORMS,
    POOLS,
    QUANTISED,
    RESHAPES,
    SOFTMAXES,
)
from gopt.records.placements import Shard, Window
from gopt.sharding.links import choices, elements, moves, normalise, products
from gopt.sharding.links.elements import axes_of, softmax_axes
from gopt.sharding.links.link import DimFactor, Index, OperatorUse, Rule, Slot, Strategy, beside, linked
from gopt.sharding.links.windows import WINDOWED
from gopt.sharding.rules import FULL_REDUCTIONS

__all__ = ["RULES", "DimFactor", "Index", "OperatorUse", "Slot", "Strategy", "axes_of", "softmax_axes", "strategies"]

OLDEST = 7
"""Lowest opset whose operators broadcast by these rules."""


def strategies(operator: OperatorUse, slot: Slot, shard: Shard | Window) -> list[Strategy]:
    """The ways to split an operator of which one operand or result is sharded so; none where it has no such link."""
    rule, windowed = RULES.get(operator.op_type), WINDOWED.get(operator.op_type)
    types = (*operator.operands, *operator.results)
    if operator.opset < OLDEST or not all(type is None or type.static for type in types):
        return []
    found = list(rule(operator, slot, shard)) if rule is not None and isinstance(shard, Shard) else []
    if windowed is not None:
        found += windowed(operator, slot, shard)
    return list(dict.fromkeys(found))


_NORMS = LAYER_NORMS | {"SimplifiedLayerNormalization"}
_POOLS = POOLS | GLOBAL_POOLS

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, linked(elements.elementwise)),
    "Dropout": linked(elements.dropout),
    **dict.fromkeys(sorted(QUANTISED), linked(elements.quantised)),
    # --- along one dimension ---
    **dict.fromkeys(FULL_REDUCTIONS, linked(elements.reduction)),
    **dict.fromkeys(sorted(ARG_EXTREMES), linked(elements.arg)),
    **dict.fromkeys(sorted(SOFTMAXES), linked(elements.softmax)),
    "TopK": linked(beside()),
    "LpNormalization": linked(beside()),
    **dict.fromkeys(_NORMS, linked(elements.in_front)),
    "CumSum": linked(elements.running),
    "OneHot": linked(elements.one_hot),
    "ReverseSequence": linked(elements.reverse_sequence),
    "Trilu": linked(elements.triangle),
    # --- over channels and places ---
    **dict.fromkeys(_POOLS, linked(normalise.pool)),
    "BatchNormalization": linked(normalise.batch_normalization),
    "InstanceNormalization": linked(normalise.instance_normalization),
    "GroupNormalization": linked(normalise.group_normalization),
    "MeanVarianceNormalization": linked(normalise.mean_variance),
    "LRN": linked(normalise.across_channels),
    **dict.fromkeys(sorted(DEPTH_MOVES), linked(normalise.depth_space)),
    "Resize": linked(normalise.resize),
    **dict.fromkeys(sorted(CLASS_LOSSES), linked(normalise.loss)),
    # --- products ---
    "MatMul": linked(products.matmul),
    "Gemm": linked(products.gemm),
    "Einsum": linked(products.einsum),
    **dict.fromkeys(sorted(CONVOLUTIONS), linked(products.convolution)),
    "Attention": linked(products.attention),
    "RotaryEmbedding": linked(products.rotary),
    # --- elements moved ---
    **dict.fromkeys(sorted(RESHAPES), moves.reshape),
    "Transpose": linked(moves.transpose),
    "Expand": linked(moves.expand),
    "Tile": linked(moves.tile),
    "Slice": linked(moves.sliced),
    "Pad": linked(moves.padded),
    "Concat": linked(moves.concat),
    "Split": linked(moves.split),
    # --- elements chosen ---
    "Gather": linked(choices.gather),
    "GatherElements": linked(choices.gather_elements),
    "GatherND": linked(choices.gather_nd),
    "ScatterElements": linked(choices.scatter_elements),
    "ScatterND": linked(choices.scatter_nd),
}
"""Operator of ONNX -> how it is split. To split another family is to add a row."""

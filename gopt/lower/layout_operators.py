"""The layout operators of ``gopt.spmd`` on a rank: as standard nodes, which ranks alike share, and constants.

Each function lowers a node on a rank. Nodes depend on the *variant* alone: ranks of a variant share nodes; offsets are
constants of the rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import TensorType, numpy_dtype
from gopt.lower.lowered import Lowered, LoweringContext, bounds, make
from gopt.lower.member_operators import MEMBER_OPERATORS
from gopt.lower.stage_operators import transfer
from gopt.spmd.layouts import identity
from gopt.tensor_parallel.builder import inner

__all__ = ["FLAT", "LOWERED", "Lowered", "LoweringContext"]

FLAT = "gopt.shard.scalars.flat"
"""The shape [-1], which all slices of a rank share."""


def local_slice(node: Node, context: LoweringContext) -> Lowered:
    """The rank's elements of a run, cut out of whole tensors."""
    start, stop = node.sharding.part(context.coordinates)
    starts, sizes = node.attributes["starts"], node.attributes["sizes"]
    firsts = node.attributes.get("firsts", [0] * len(starts))
    wholes = node.attributes.get("wholes", sizes)
    lowest, last = bisect_right(starts, start) - 1, bisect_right(starts, stop - 1)
    ranges = [
        (firsts[at] + max(start - starts[at], 0), firsts[at] + min(stop - starts[at], sizes[at]))
        for at in range(lowest, last)
    ]
    cut = tuple(bound != (0, wholes[at]) for at, bound in zip(range(lowest, last), ranges))
    output = node.outputs[0]
    names = [output] if len(cut) == 1 else [inner(output, str(number)) for number in range(len(cut))]
    constants = {FLAT: np.array([-1], np.int64)}
    for name, (low, high), is_cut in zip(names, ranges, cut):
        constants |= bounds(name, low, high) if is_cut else {}

    def nodes() -> list[Node]:
        chosen = []
        for at, name, is_cut in zip(range(lowest, last), names, cut):
            chosen.append(make(node, "Reshape", [node.inputs[at], FLAT], inner(name, "whole") if is_cut else name))
            if is_cut:
                chosen.append(make(node, "Slice", [inner(name, role) for role in ("whole", "start", "stop")], name))
        return chosen if len(names) == 1 else [*chosen, make(node, "Concat", names, output, axis=0)]

    return Lowered((lowest, cut), nodes, constants)


def shard_slice(node: Node, context: LoweringContext) -> Lowered:
    """Return the rank's elements of a run, cut out of the part of the bucket; the part itself if that is all."""
    assert node.sharding.flat is not None
    axis, span = node.sharding.flat
    member = context.coordinates[axis]
    base, end = span.cuts[member], span.cuts[member + 1]
    start, stop = span.part(member)
    source, output = node.inputs[0], node.outputs[0]
    if (start, stop) == (base, end):
        return Lowered("all", list, alias=source)
    constants = bounds(output, start - base, stop - base)
    return Lowered("part", lambda: [make(node, "Slice", [source, *constants], output)], constants)


def local_concat(node: Node, context: LoweringContext) -> Lowered:
    """Concatenate the rank's operands; an empty tensor without operands."""
    names, output = [name for name in node.inputs if name in context.present], node.outputs[0]
    if not names:
        type = TensorType(context.types[output].dtype, (0,))
        return Lowered("none", list, {output: np.zeros(0, numpy_dtype(type.dtype))}, {output: type})
    if len(names) == 1:
        return Lowered(tuple(names), lambda: [make(node, "Identity", names, output)])
    return Lowered(tuple(names), lambda: [make(node, "Concat", names, output, axis=0)])


def select(node: Node, context: LoweringContext) -> Lowered:
    """Return the operand if the rank has it, else the neutral element of the reduction."""
    source, output = node.inputs[0], node.outputs[0]
    if source in context.present:
        return Lowered("present", lambda: [make(node, "Identity", [source], output)])
    dtype = context.types[source].dtype
    neutral = identity(node.attributes["reduce"], dtype)
    return Lowered("absent", list, {output: np.array(neutral, numpy_dtype(dtype))})


LOWERED: dict[str, Callable[[Node, LoweringContext], Lowered]] = {
    "LocalSlice": local_slice, "ShardSlice": shard_slice, "LocalConcat": local_concat, "Select": select,
    "Transfer": transfer, **MEMBER_OPERATORS,
}  # fmt: skip

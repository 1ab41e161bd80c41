"""Mappings of other axes as one axis sees them: moves and sums of whole values, which keep its own placements.

Types are logical, so a mapping along another axis makes a value of the same type from the same elements. Its result has
the operand's placement along this axis, as long as the parts of both axes nest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.operator_use import use_of
from gopt.operators.kinds import GATHERS, SCATTERS
from gopt.records.placements import PARTS, Partial, Placement
from gopt.spmd.links import OperatorUse
from gopt.spmd.rules import Mismatch, Operand

MASKED = {name: f"Member{name}" for name in sorted(GATHERS - {"GatherND"} | SCATTERS - {"Scatter"})}
"""Operators that index along a sharded dimension -> the operator that a member runs instead."""
_UNMASKED = {masked: plain for plain, masked in MASKED.items()} | {"MemberMaxPool": "MaxPool"}
HALO = ("HaloStrips", "HaloJoin", "HaloSum")
"""Operators of ``gopt.spmd`` that make up a halo, beside the call that gathers strips."""
_MOVES = ("AllGather", "AllToAll", "DimSlice", *HALO)
_SUMS = ("sum", "mean")


def is_mapping(node: Node, axes: Collection[str]) -> bool:
    """Return whether a node is a mapping along one of the axes splitting the computation."""
    maps = node.op_type in (*_MOVES, "AllReduce", "ReduceScatter") and node.domain in (COMM, SPMD)
    return maps and node.attributes.get("group") in axes and (len(node.inputs) == 1 or node.op_type in HALO)


def beside(node: Node, operand: Operand) -> Placement:
    """Return the placement along this axis of the result of another axis's mapping. Raises Mismatch for partial sums of
    another kind than the mapping completes, and for a dimension that has windows along the other axis."""
    placement = operand.placement
    if node.op_type in HALO:
        if isinstance(placement, PARTS) and placement.dim == node.attributes["axis"]:
            raise Mismatch(operand, "another dimension than the windows are of")
        if isinstance(placement, Partial) and (placement.op not in _SUMS or node.attributes.get("border") == "lowest"):
            raise Mismatch(operand, "a value without terms: windows add zeros to them")
    if isinstance(placement, Partial) and node.op_type not in _MOVES:
        op = str(node.attributes.get("reduce", "sum"))
        if op != placement.op and not (op in _SUMS and placement.op in _SUMS):
            raise Mismatch(operand, f"terms of a {op}, or a value without terms")
    return placement


def described_as(node: Node, graph: Graph, constants: Constants) -> OperatorUse | None:
    """Return a node as the rules see the node; None for a node that neither is nor replaces a standard operator."""
    if node.domain in ("", "ai.onnx"):
        return use_of(node, graph, constants)
    if node.domain == SPMD and node.op_type in _UNMASKED:
        return replace(use_of(node, graph, constants), op_type=_UNMASKED[node.op_type])
    return None

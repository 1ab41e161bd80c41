"""Layout operators on a member's part of a dimension: the part cut out, and choices along the dimension.

A choice runs on the part. Indices count through the whole dimension; for indices into another member's part, a gather
gives zeros, and a scatter drops updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import numpy_dtype
from gopt.lower.halo_operators import HALO_OPERATORS
from gopt.lower.lowered import Lowered, LoweringContext, bounds, make, stand_in
from gopt.spmd.layouts import identity
from gopt.tensor_parallel.builder import inner


@dataclass(frozen=True, slots=True)
class _Part:
    """The shared out dimension of operand 0, and the member's range."""

    node: Node
    context: LoweringContext
    axis: int
    start: int
    stop: int
    length: int

    @classmethod
    def of(cls, node: Node, context: LoweringContext) -> _Part:
        sizes, member = node.attributes["sizes"], context.coordinates[node.attributes["group"]]
        start, rank = sum(sizes[:member]), len(context.types[node.inputs[0]].dims)
        return cls(node, context, int(node.attributes["axis"]) % rank, start, start + sizes[member], sum(sizes))

    def name(self, role: str) -> str:
        return inner(self.node.outputs[0], role)

    def dims(self, index: int) -> tuple[int, ...]:
        return self.context.types[self.node.inputs[index]].dims

    def constants(self, elsewhere: int = 0) -> dict[str, np.ndarray]:
        """Numbers for shifting indices of the whole dimension into the part; ``elsewhere``: for all others."""
        dtype = numpy_dtype(self.context.types[self.node.inputs[1]].dtype)
        values = {
            "length": self.length, "offset": self.start, "count": self.stop - self.start, "none": 0,
            "elsewhere": elsewhere,
        }  # fmt: skip
        return {self.name(role): np.array(value, dtype) for role, value in values.items()}

    def places(self) -> list[Node]:
        """Nodes making ``inside``: whether an index is in the part; and ``safe``: the index, or ``elsewhere``."""
        indices = self.node.inputs[1]
        rows: list[tuple[str, list[str], str]] = [
            ("Less", [indices, self.name("none")], "negative"),  # counted from the end
            ("Add", [indices, self.name("length")], "turned"),
            ("Where", [self.name("negative"), self.name("turned"), indices], "place"),
            ("Sub", [self.name("place"), self.name("offset")], "own"),
            ("Less", [self.name("own"), self.name("count")], "below"),
            ("Less", [self.name("own"), self.name("none")], "before"),
            ("Not", [self.name("before")], "behind"),
            ("And", [self.name("below"), self.name("behind")], "inside"),
            ("Where", [self.name("inside"), self.name("own"), self.name("elsewhere")], "safe"),
        ]
        return [make(self.node, kind, inputs, self.name(role)) for kind, inputs, role in rows]

    def seen(self, shape: Sequence[int], like: Sequence[int]) -> tuple[dict[str, np.ndarray], list[Node], str]:
        """``inside`` in another shape of as many elements, if different: constants, nodes, name."""
        if list(shape) == list(like):
            return {}, [], self.name("inside")
        constants = {self.name("seen_shape"): np.array(shape, np.int64)}
        node = make(self.node, "Reshape", [self.name("inside"), self.name("seen_shape")], self.name("seen"))
        return constants, [node], self.name("seen")


def dim_slice(node: Node, context: LoweringContext) -> Lowered:
    """The member's part of a dimension."""
    part, output = _Part.of(node, context), node.outputs[0]
    constants = bounds(output, part.start, part.stop) | {inner(output, "axis"): np.array([part.axis], np.int64)}
    return Lowered("part", lambda: [make(node, "Slice", [node.inputs[0], *constants], output)], constants)


def member_gather(node: Node, context: LoweringContext) -> Lowered:
    """Return the selected elements the member has, and zeros for the others."""
    part, (data, indices), output = _Part.of(node, context), node.inputs, node.outputs[0]
    zero = {part.name("zero"): np.zeros((), numpy_dtype(context.types[data].dtype))}
    if part.start == part.stop:  # nothing to choose from
        constants = zero | {part.name("shape"): np.array(context.types[output].dims, np.int64)}
        return Lowered("none", lambda: [stand_in(node, "Expand", list(constants), output)], constants)
    elements = node.op_type == "MemberGatherElements"
    behind = 0 if elements else len(part.dims(0)) - part.axis - 1
    shape = (*context.types[indices].dims, *[1] * behind)
    more, seeing, inside = part.seen(shape, part.dims(1))

    def nodes() -> list[Node]:
        kind = "GatherElements" if elements else "Gather"
        rows = stand_in(node, kind, [data, part.name("safe")], part.name("rows"), axis=part.axis)
        chosen = make(node, "Where", [inside, part.name("rows"), part.name("zero")], output)
        return [*part.places(), rows, *seeing, chosen]

    return Lowered("some", nodes, part.constants() | zero | more)


def member_scatter(node: Node, context: LoweringContext) -> Lowered:
    """The member's part with updates inside."""
    part = _Part.of(node, context)
    if part.start == part.stop:
        return Lowered("none", lambda: [stand_in(node, "Identity", [node.inputs[0]], node.outputs[0])])
    reduction = node.attributes.get("reduction", "none")
    return _replaced(part) if reduction == "none" else _reduced(part, reduction)


def _reduced(part: _Part, reduction: str) -> Lowered:
    """Others' updates change nothing: replaced by the neutral element of the reduction."""
    node, dtype = part.node, part.context.types[part.node.inputs[0]].dtype
    neutral = np.array(_NEUTRAL[reduction](dtype), numpy_dtype(dtype))
    count = part.dims(1)
    updates = part.dims(2)
    shape = count if node.op_type == "MemberScatterElements" else (*count[:-1], *[1] * (len(updates) - len(count) + 1))
    more, seeing, inside = part.seen(shape, count)

    def nodes() -> list[Node]:
        masked = make(node, "Where", [inside, node.inputs[2], part.name("neutral")], part.name("updates"))
        inputs = [node.inputs[0], part.name("safe"), part.name("updates")]
        return [*part.places(), *seeing, masked, _scatter(part, inputs, node.outputs[0], reduction)]

    return Lowered(reduction, nodes, part.constants() | more | {part.name("neutral"): neutral})


def _replaced(part: _Part) -> Lowered:
    """Others' updates go to an extra row behind the part, cut off again."""
    node, rank, count = part.node, len(part.dims(0)), part.stop - part.start
    pads = [0] * (2 * rank)
    pads[rank + part.axis] = 1
    cut = bounds(part.name("kept"), 0, count) | {part.name("kept.axis"): np.array([part.axis], np.int64)}
    constants = part.constants(elsewhere=count) | cut | {part.name("pads"): np.array(pads, np.int64)}

    def nodes() -> list[Node]:
        longer = make(node, "Pad", [node.inputs[0], part.name("pads")], part.name("longer"))
        inputs = [part.name("longer"), part.name("safe"), node.inputs[2]]
        written = _scatter(part, inputs, part.name("written"), "none")
        return [*part.places(), longer, written, make(node, "Slice", [part.name("written"), *cut], node.outputs[0])]

    return Lowered("none replaced", nodes, constants)


def _scatter(part: _Part, inputs: Sequence[str], output: str, reduction: str) -> Node:
    attributes: dict[str, object] = {} if reduction == "none" else {"reduction": reduction}
    if part.node.op_type == "MemberScatterElements":
        attributes["axis"] = part.axis
    return stand_in(part.node, part.node.op_type.removeprefix("Member"), inputs, output, **attributes)


_NEUTRAL: dict[str, Callable[[str], float]] = {
    "add": lambda dtype: 0,
    "mul": lambda dtype: 1,
    "max": lambda dtype: identity("max", dtype),
    "min": lambda dtype: identity("min", dtype),
}
MEMBER_OPERATORS: dict[str, Callable[[Node, LoweringContext], Lowered]] = {
    "DimSlice": dim_slice,
    "MemberGather": member_gather,
    "MemberGatherElements": member_gather,
    "MemberScatterElements": member_scatter,
    "MemberScatterND": member_scatter,
    **HALO_OPERATORS,
}
"""Operator of ``gopt.spmd`` on a dimension -> what it becomes on a rank."""

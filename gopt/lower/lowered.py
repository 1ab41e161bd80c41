"""Lowering of a layout operator on a rank, and the rank's context."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import TensorType
from gopt.records.mesh import Mesh
from gopt.records.placements import Sharding
from gopt.tensor_parallel.builder import PASS, inner

SEND, RECEIVE, AHEAD_SEND, AHEAD_RECEIVE, SHOWN = "send", "receive", "ahead send", "ahead receive", "shown"
"""The halves of a transfer between stages: an action sends, and a later action receives. A value for all stages goes
ahead to later stages in the forward, and is shown by the backward of the last stage of each member."""
ONE_RANK = Mesh((("dp", 1),))


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """Context of a layout operator on a rank: coordinates, available values, types."""

    coordinates: Mapping[str, int]
    present: Set[str]
    types: Mapping[str, TensorType]
    mesh: Mesh = ONE_RANK
    sharded: Mapping[str, Sharding] = field(default_factory=dict)
    """The shardings of values that ranks have parts of."""
    rank: int = 0
    """The number of the rank, for peers alone: ranks alike but for this number have the same nodes."""


@dataclass(slots=True)
class Lowered:
    """An operator on a rank. ``nodes`` builds the nodes of the ``variant``; ``alias`` is the operand equal to the
    result, without any node; ``types`` are the local types of results without nodes."""

    variant: Hashable
    nodes: Callable[[], Sequence[Node]]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    alias: str = ""
    absent: bool = False
    """The rank does not have the result."""


def bounds(name: str, start: int, stop: int) -> dict[str, np.ndarray]:
    """Return the bounds of a Slice as constants."""
    return {inner(name, role): np.array([at], np.int64) for role, at in (("start", start), ("stop", stop))}


def make(like: Node, op_type: str, inputs: Sequence[str], output: str, **attributes: object) -> Node:
    """Return a node of the pass behind the layout operator."""
    node = Node(op_type, inputs, [output], attributes=attributes, made_by=like.made_by or PASS)
    node.phase = like.phase
    return node


def stand_in(like: Node, op_type: str, inputs: Sequence[str], *outputs: str, **attributes: object) -> Node:
    """Return the source's node on the member's part, with the same name."""
    node = Node(op_type, inputs, outputs, name=like.name, attributes=attributes, made_by=like.made_by)
    node.phase = like.phase
    return node

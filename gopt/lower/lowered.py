"""Lowering of a layout operator on one rank, and the rank's context that it may use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import TensorType
from gopt.tensor_parallel.builder import PASS, inner


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """Context of a layout operator on a rank: its coordinates, the values it has, the types of values."""

    coordinates: Mapping[str, int]
    present: Set[str]
    types: Mapping[str, TensorType]


@dataclass(slots=True)
class Lowered:
    """An operator on one rank. ``nodes`` builds the nodes of the ``variant``; ``alias`` is the operand whose name the
    result has where nothing needs to be done; ``types`` are the local types of results without nodes."""

    variant: Hashable
    nodes: Callable[[], Sequence[Node]]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    alias: str = ""


def bounds(name: str, start: int, stop: int) -> dict[str, np.ndarray]:
    """The constants between which a Slice cuts."""
    return {inner(name, role): np.array([at], np.int64) for role, at in (("start", start), ("stop", stop))}


def make(like: Node, op_type: str, inputs: Sequence[str], output: str, **attributes: object) -> Node:
    """A node of the pass that made the layout operator, or that put it in the place of the source's node."""
    node = Node(op_type, inputs, [output], attributes=attributes, made_by=like.made_by or PASS)
    node.phase = like.phase
    return node


def stand_in(like: Node, op_type: str, inputs: Sequence[str], *outputs: str, **attributes: object) -> Node:
    """The node that does what the source's node does, on the member's part: it keeps that one's name."""
    node = Node(op_type, inputs, outputs, name=like.name, attributes=attributes, made_by=like.made_by)
    node.phase = like.phase
    return node

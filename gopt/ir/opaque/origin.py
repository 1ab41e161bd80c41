"""The origin of the nodes of an expanded operator: frozen records on ``Node.origin``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gopt.ir.graph import Node
from gopt.ir.opaque.body_builder import SHARED
from gopt.ir.opaque.operator_schema import OperatorSchema, SlotValues

__all__ = ["SHARED", "OpaqueCall", "Origin"]


@dataclass(frozen=True, eq=False, slots=True)
class OpaqueCall:
    """An expanded node. ``operator`` is the record, None for a model function. ``slot_values``: the slots' values in
    the expanded graph (no sequences); for a model function, all in a table under the operands' names."""

    number: int
    node: Node
    operator: OperatorSchema | None
    slot_values: SlotValues
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.node.label

    @property
    def op_type(self) -> str:
        domain = self.node.domain
        return f"{domain}.{self.node.op_type}" if domain else self.node.op_type


@dataclass(frozen=True, slots=True)
class Origin:
    """The call a node was written for, the weight, and the node's place in the body."""

    call: OpaqueCall
    weight: int
    place: int

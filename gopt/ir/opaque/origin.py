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
    """One node that was expanded. ``operator`` is its record, None for a function of the model.

    ``slot_values``: the values of its slots in the expanded graph (no sequence is among them); for a function of the
    model, all in one table under the names of its operands.
    """

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
    """The call a node was written for, which weight of it, and the node's place in the body."""

    call: OpaqueCall
    weight: int
    place: int

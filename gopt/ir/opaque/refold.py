"""Opaque operators put back in the rank-independent graph, and the form on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import FunctionProto

from gopt.ir.graph import Node
from gopt.ir.opaque.operator_schema import Arrangement, SchemaSlot, SlotValues, Values
from gopt.ir.opaque.origin import OpaqueCall
from gopt.ir.opaque.table_body import table_body
from gopt.ir.types import TensorType
from gopt.records.placements import Sharding

REFOLD = "Refold"
"""The operator of ``gopt.spmd`` that represents a refolded one; ``specialise`` resolves it."""


@dataclass(frozen=True, slots=True)
class CoveredRange:
    """A source tensor updated by a member, and its elements in the member's bucket."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RefoldedWeight:
    """A weight, or a run of weights of a class, in a refolded operator: sharding, and values by slot."""

    sharding: Sharding
    weight: int
    inputs: Values
    outputs: Values
    covers: tuple[CoveredRange, ...]

    def holds(self, tensor: CoveredRange, coordinates: Mapping[str, int]) -> bool:
        """Return whether a rank updates elements of a tensor."""
        if self.sharding.flat is None:
            return self.sharding.covers(coordinates)
        start, stop = self.sharding.part(coordinates)
        return max(start, tensor.start) < min(stop, tensor.stop)


@dataclass(frozen=True, eq=False, slots=True)
class RefoldedCall:
    """One refolded operator: its source call, scalars, results and weights; inner names extend ``name``."""

    call: OpaqueCall
    scalars: Values
    results: Values
    members: tuple[RefoldedWeight, ...]
    name: str

    def on(
        self, coordinates: Mapping[str, int], types: Mapping[str, TensorType], version: int, made_by: str
    ) -> tuple[list[Node], FunctionProto | None, tuple[str, ...]]:
        """The nodes of a rank, the body, and the results; nothing without a weight. ``version``: of the standard
        operators."""
        present = [member for member in self.members if member.sharding.covers(coordinates)]
        results = (*self.results.values(), *(name for weight in present for name in weight.outputs.values()))
        if not present:
            return [], None, ()
        if self.call.operator is None:
            return [self._call(present[0], made_by)], None, results
        operator = self.call.operator
        values = SlotValues(
            self.scalars, [weight.inputs for weight in present], self.results, [weight.outputs for weight in present]
        )
        attributes = dict(self.call.attributes)
        for name in operator.lists & set(attributes):
            attributes[name] = [attributes[name][weight.weight] for weight in present]
        tables, news, before, after = values.weights, values.updated, list[Node](), list[Node]()
        if operator.arrangement is Arrangement.SEQUENCE:
            tables, before = self._pack_sequences(operator.inputs, values.weights, made_by)
            news, after = self._unpack_sequences(operator.outputs, values.updated, made_by)
        node = Node(
            operator.op_type, operator.arrange(operator.inputs, self.scalars, tables),
            operator.arrange(operator.outputs, self.results, news),
            domain=operator.domain, name=self.call.node.name, attributes=attributes, made_by=made_by,
        )  # fmt: skip
        function, _ = table_body(operator, node, values, types, version)
        return [*before, node, *after], function, results

    def _call(self, member: RefoldedWeight, made_by: str) -> Node:
        """A call of the model's own function."""
        source = self.call.node
        inputs, outputs = {**self.scalars, **member.inputs}, {**self.results, **member.outputs}
        values = self.call.slot_values
        return Node(
            source.op_type, _in_call_order(source.inputs, values.weights[0], inputs),
            _in_call_order(source.outputs, values.updated[0], outputs),
            domain=source.domain, name=source.name, made_by=made_by, encoded=source.encoded,
        )  # fmt: skip

    def _pack_sequences(
        self, slots: tuple[SchemaSlot, ...], weights: list[Values], made_by: str
    ) -> tuple[list[Values], list[Node]]:
        names = {slot.name: f"{self.name}.{slot.name}" for slot in slots if slot.each}
        nodes = [
            Node("SequenceConstruct", [table[slot] for table in weights], [name], made_by=made_by)
            for slot, name in names.items()
        ]
        return [names], nodes

    def _unpack_sequences(
        self, slots: tuple[SchemaSlot, ...], weights: list[Values], made_by: str
    ) -> tuple[list[Values], list[Node]]:
        names = {slot.name: f"{self.name}.{slot.name}" for slot in slots if slot.each and slot.name in weights[0]}
        nodes = []
        for index, table in enumerate(weights):
            at = f"{self.name}.at{index}"
            nodes.append(Node("Constant", [], [at], attributes={"value_int": index}, made_by=made_by))
            nodes += [
                Node("SequenceAt", [name, at], [table[slot]], made_by=made_by)
                for slot, name in names.items()
                if slot in table
            ]
        return [names], nodes


def _in_call_order(names: list[str], slots_of: Values, now: Values) -> list[str]:
    """The operands of a call in the call's order, under the present names."""
    slots = {name: slot for slot, name in slots_of.items()}
    return [now.get(slots.get(name, ""), "") for name in names]

"""Writes the body of an optimizer operator: standard operators, weight by weight.

Values depending on scalars alone are written once and shared by all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto

from gopt.errors import UnsupportedError
from gopt.ir.opaque.operator_schema import Arrangement, OperatorSchema, SlotValues
from gopt.ir.tape import Tape

SHARED = -1
"""In place of a weight: what belongs to the node and to no single weight."""


class BodyBuilder(Tape):
    """Builds the body of a node. Names inside are local: slots and numbers.

    All arithmetic is in ``compute``: float32, or float64 with a weight of float64; narrower values are widened on
    reading and rounded once on writing, as in the kernels.
    """

    def __init__(
        self, operator: OperatorSchema, attributes: Mapping[str, Any], values: SlotValues, dtypes: Mapping[str, str]
    ):
        self.operator, self.slot_values = operator, values
        self._attributes, self._dtypes = attributes, dtypes
        self.nodes: list[NodeProto] = []
        self.weight_of: list[int] = []
        """For every node the weight it belongs to, or SHARED."""
        self.weight = SHARED
        self.compute = "float32"
        self._shared: dict[str, str] = {}
        self._made: dict[str, str] = {}

    # --- what a node has ----------------------------------------------------------------------------------------

    def has(self, slot: str) -> bool:
        """Return whether an input slot has a value."""
        return slot in self.slot_values.scalars or slot in self.slot_values.weights[self.weight]

    def attribute(self, name: str) -> Any:
        value = self._attributes[name]
        return value[self.weight] if name in self.operator.lists else value

    def dtype(self, slot: str) -> str:
        """The element type of an input slot."""
        table = self.slot_values.scalars if slot in self.slot_values.scalars else self.slot_values.weights[self.weight]
        return self._dtypes[table[slot]]

    def formal(self, slot: str) -> str:
        """The name inside the body of an input slot's value."""
        return slot if slot in self.slot_values.scalars else f"{slot}_{self.weight}"

    # --- writing ------------------------------------------------------------------------------------------------

    def append(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any]) -> None:
        self.nodes.append(onnx.helper.make_node(op_type, inputs, outputs, **attributes))
        self.weight_of.append(self.weight)

    def new_name(self) -> str:
        return f"v{len(self.nodes)}"

    def const(self, value: float, dtype: str = "") -> str:
        return self.number(value, dtype or self.compute)

    def shared(self, key: str, write: Callable[[], str]) -> str:
        """Return a value shared by all weights; only the first weight writes the value."""
        if key not in self._shared:
            weight, self.weight = self.weight, SHARED
            self._shared[key] = write()
            self.weight = weight
        return self._shared[key]

    def attribute_value(self, name: str) -> str:
        """Return a floating attribute as a constant, shared unless each weight has its own."""
        value = float(self.attribute(name))
        if name in self.operator.lists:
            return self.const(value)
        return self.shared(f"attribute {name}", lambda: self.const(value))

    def scalar(self, slot: str, dtype: str = "") -> str:
        """Return a scalar input without its dimensions, so the rank of a weight does not rise."""
        have, want = self.dtype(slot), dtype or self.compute
        plain = self.shared(f"plain {slot}", lambda: self.op("Squeeze", slot))
        return self.shared(f"{want} {slot}", lambda: self.cast(plain, want, have))

    def full(self, slot: str) -> str:
        """A weight's input in the type of the arithmetic."""
        return self.cast(self.formal(slot), self.compute, self.dtype(slot))

    def result(self, slot: str, value: str) -> None:
        """Set the value of an output slot; a scalar slot is set once."""
        by_weight = next(output for output in self.operator.outputs if output.name == slot).each
        self._made[f"{slot}_{self.weight}" if by_weight else slot] = value

    def write(self) -> None:
        """The bodies of all weights in order."""
        for weight, table in enumerate(self.slot_values.weights):
            self.weight = weight
            self.compute = "float64" if self.dtype("weight") == "float64" else "float32"
            if weight and self.compute != self._first_compute():
                raise UnsupportedError(
                    f"{self.operator.op_type} updates weights of float64 and others ({table['weight']!r}) in one node",
                    "give each element type a node of its own",
                )
            self.operator.body(self)
        self.weight = SHARED

    def _first_compute(self) -> str:
        return "float64" if self._dtypes[self.slot_values.weights[0]["weight"]] == "float64" else "float32"

    # --- the body as a function ---------------------------------------------------------------------------------

    def function(self, attributes: Sequence[str], opset: int) -> tuple[FunctionProto, list[int]]:
        """The body as a function of the model, for a node carrying ``attributes``; and every node's weight."""
        head, tail = self._border()
        function = FunctionProto(domain=self.operator.domain, name=self.operator.op_type)
        function.opset_import.add(domain="", version=opset)
        function.input.extend(self._names(self.operator.inputs, self.slot_values.scalars, self.slot_values.weights))
        function.output.extend(self._names(self.operator.outputs, self.slot_values.results, self.slot_values.updated))
        function.attribute.extend(sorted(attributes))
        results = {name for node in (*self.nodes, *tail) for name in node.output}
        # A result that the node leaves out keeps its place in the list, and a function must make what it lists.
        tail += [
            onnx.helper.make_node("Constant", [], [name], value_float=0.0)
            for name in function.output
            if name not in results
        ]
        function.node.extend([*head, *self.nodes, *tail])
        tags = [SHARED] * len(head) + self.weight_of + [SHARED] * len(tail)
        return function, tags

    def _names(self, slots: Sequence[Any], scalars: Mapping[str, str], weights: Sequence[Mapping[str, str]]) -> Any:
        """Formal names in the order of the node; an absent value keeps its place under an unused name."""
        operator = self.operator
        one = {slot.name: slot.name for slot in slots if not slot.each}
        if operator.arrangement is Arrangement.SEQUENCE:
            tables = [{slot.name: f"{slot.name}_all" for slot in slots if slot.each}]
        else:
            tables = [
                {slot.name: f"{slot.name}_{index}" for slot in slots if slot.each} for index in range(len(weights))
            ]
        names = operator.arrange(slots, one, tables)
        arranged = operator.arrange(slots, dict(scalars), [dict(table) for table in weights])
        return names[: len(arranged)]

    def _border(self) -> tuple[list[NodeProto], list[NodeProto]]:
        """Return nodes that unpack and build sequences, and nodes that name the results."""
        make = onnx.helper.make_node
        head: list[NodeProto] = []
        tail: list[NodeProto] = []
        sequences = self.operator.arrangement is Arrangement.SEQUENCE
        for slot in self.operator.inputs if sequences else ():
            for number, table in enumerate(self.slot_values.weights):
                if slot.each and slot.name in table:
                    at = onnx.numpy_helper.from_array(np.array(number, np.int64))
                    index = f"{slot.name}_{number}_at"
                    head.append(make("Constant", [], [index], value=at))
                    head.append(make("SequenceAt", [f"{slot.name}_all", index], [f"{slot.name}_{number}"]))
        named = self._name_results(tail)
        for slot in self.operator.outputs if sequences else ():
            parts = [f"{slot.name}_{index}" for index in range(len(self.slot_values.weights))]
            if slot.each and named.issuperset(parts):
                tail.append(make("SequenceConstruct", parts, [f"{slot.name}_all"]))
        return head, tail

    def _name_results(self, tail: list[NodeProto]) -> set[str]:
        """Name results by the slots; an input, or a value with two slots, goes through an Identity."""
        producers = {node.output[0]: node for node in self.nodes}
        new: dict[str, str] = {}
        for formal, value in self._made.items():
            if value in producers and value not in new:
                new[value] = formal
            else:
                tail.append(onnx.helper.make_node("Identity", [new.get(value, value)], [formal]))
        for node in self.nodes:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
        return set(self._made)

    def missing(self) -> str:
        """Return an output slot of the node missing in this body, or ''."""
        for index, table in enumerate(self.slot_values.updated):
            for slot in table:
                if f"{slot}_{index}" not in self._made:
                    return slot
        return next((slot for slot in self.slot_values.results if slot not in self._made), "")

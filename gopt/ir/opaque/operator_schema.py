"""The record of an opaque optimizer operator: slots, repetition per weight, and the body for a weight.

A node lists values in one of four arrangements; ``SlotValues`` holds the values by slot and weight, so other code is
independent of the arrangement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from gopt.errors import InputError, UnsupportedError
from gopt.text.sanitize import show

if TYPE_CHECKING:
    from gopt.ir.opaque.body_builder import BodyBuilder

Values = dict[str, str]
"""Slot -> its value; absent slots are left out."""


class Arrangement(str, Enum):
    """Order of several weights' values in a node."""

    SINGLE = "one weight a node"
    GROUPED = "scalars, then one group of slots per weight"
    VARIADIC = "scalars, then slot by slot, each for all weights"
    SEQUENCE = "a sequence of tensors in each slot of a weight"


@dataclass(frozen=True, slots=True)
class SchemaSlot:
    """An input or output; ``each``: a full-shaped value per weight, else a scalar per node."""

    name: str
    each: bool = False
    optional: bool = False


@dataclass(slots=True)
class SlotValues:
    """The values of a node by slot: scalars, and a table per weight."""

    scalars: Values = field(default_factory=dict)
    weights: list[Values] = field(default_factory=list)
    results: Values = field(default_factory=dict)
    updated: list[Values] = field(default_factory=list)

    def only(self, weight: int) -> SlotValues:
        """The values of a single weight, as if the node had no other."""
        return SlotValues(self.scalars, [self.weights[weight]], self.results, [self.updated[weight]])


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """A row of the table. ``body`` writes the operator on a weight; ``attributes`` are the defaults.

    ``lists``: attributes with a number per weight. ``pairs``: weight slot in -> replacing output.
    """

    domain: str
    op_type: str
    arrangement: Arrangement
    inputs: tuple[SchemaSlot, ...]
    outputs: tuple[SchemaSlot, ...]
    body: Callable[[BodyBuilder], None]
    pairs: Mapping[str, str]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    lists: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    """Attributes that have no default."""

    @property
    def name(self) -> str:
        return f"{self.domain}.{self.op_type}"

    # --- from a node to slots -----------------------------------------------------------------------------------

    def read(self, label: str, inputs: Sequence[str], outputs: Sequence[str]) -> SlotValues:
        """The values of a node by slot. Sequences stay whole, under weight 0, until ``sequences`` takes them apart.

        Raises InputError for a missing slot, or uneven lists.
        """
        values = SlotValues()
        values.scalars, values.weights = self._read(label, self.inputs, inputs)
        values.results, values.updated = self._read(label, self.outputs, outputs)
        if len(values.weights) != len(values.updated):
            raise InputError(
                f"{self.op_type} {label!r} has {len(values.weights)} weights, but {len(values.updated)} new",
                "give one new value for each weight",
            )
        for slot in self.inputs:
            for table in values.weights if slot.each else [values.scalars]:
                if slot.name not in table and not slot.optional:
                    raise InputError(
                        f"{self.op_type} {label!r} has no {slot.name}",
                        "gopt help optimizers lists the operators that gopt knows",
                    )
        return values

    def _read(self, label: str, slots: Sequence[SchemaSlot], names: Sequence[str]) -> tuple[Values, list[Values]]:
        if self.arrangement in (Arrangement.SINGLE, Arrangement.SEQUENCE):
            if len(names) > len(slots):
                raise InputError(
                    f"{self.op_type} {label!r} has {len(names)} values, it takes {len(slots)}",
                    "gopt help optimizers lists the operators that gopt knows",
                )
            table = {slot.name: name for slot, name in zip(slots, names) if name}
            many = {slot.name for slot in slots if slot.each}
            return {k: v for k, v in table.items() if k not in many}, [{k: v for k, v in table.items() if k in many}]
        scalars_only = [slot for slot in slots if not slot.each]
        many = [slot.name for slot in slots if slot.each]  # type: ignore[assignment]
        scalars = {slot.name: name for slot, name in zip(scalars_only, names) if name}
        rest = list(names[len(scalars_only) :])
        if self.arrangement is Arrangement.GROUPED:
            rest += [""] * (-len(rest) % len(many))  # an exporter may leave out absent values at the end
        if not rest or len(rest) % len(many):
            raise InputError(
                f"{self.op_type} {label!r} lists {len(rest)} values in groups of {len(many)}",
                "list as many values of each kind as there are weights",
            )
        count = len(rest) // len(many)
        if self.arrangement is Arrangement.GROUPED:
            groups: Iterable[Sequence[str]] = (rest[i * len(many) : (i + 1) * len(many)] for i in range(count))
        else:
            groups = zip(*(rest[i * count : (i + 1) * count] for i in range(len(many))))
        return scalars, [{slot: name for slot, name in zip(many, group) if name} for group in groups]

    # --- from slots to a node -----------------------------------------------------------------------------------

    def arrange(self, slots: Sequence[SchemaSlot], scalars: Values, weights: Sequence[Values]) -> list[str]:
        """Return a node's list for these values; for sequences, ``weights[0]`` must have the names of the tensors by
        slot."""
        if self.arrangement in (Arrangement.SINGLE, Arrangement.SEQUENCE):
            names = [(weights[0] if slot.each else scalars).get(slot.name, "") for slot in slots]
        else:
            repeated = [slot.name for slot in slots if slot.each]
            names = [scalars.get(slot.name, "") for slot in slots if not slot.each]
            if self.arrangement is Arrangement.GROUPED:
                return names + [table.get(slot, "") for table in weights for slot in repeated]
            return names + [table.get(slot, "") for slot in repeated for table in weights]
        while names and not names[-1]:
            names.pop()
        return names

    # --- attributes ---------------------------------------------------------------------------------------------

    def resolve_attributes(self, label: str, attributes: Mapping[str, Any], weights: int) -> dict[str, Any]:
        """The attributes with the defaults; lists hold exactly one number per weight."""
        unknown = set(attributes) - set(self.attributes) - self.required
        if unknown:
            raise UnsupportedError(
                f"{self.op_type} {label!r} has attribute {min(unknown)!r}, which gopt does not know",
                "leave it out, or write the update in standard operators",
            )
        missing = self.required - set(attributes)
        if missing:
            raise InputError(
                f"{self.op_type} {label!r} has no attribute {min(missing)!r}",
                "set the attribute: the operator needs it",
            )
        for name, value in attributes.items():
            if not self._fits(name, value):
                wanted = "text" if name == "mode" else "a whole number" if self._is_whole(name) else "a number"
                raise InputError(
                    f"{self.op_type} {label!r}: {name} is {show(value)}, and must be {wanted}",
                    "correct it in the program that wrote the model",
                )
        settled = {**self.attributes, **attributes}
        for name in self.lists:
            value_set = settled[name]
            values = list(value_set) if isinstance(value_set, (list, tuple)) else [value_set] * weights
            if len(values) < weights:
                raise InputError(
                    f"{self.op_type} {label!r}: {name} has {len(values)} numbers for {weights} weights",
                    "give one number for each weight",
                )
            settled[name] = values[:weights]
        return settled

    def _is_whole(self, name: str) -> bool:
        return isinstance(self.attributes.get(name), int)

    def _fits(self, name: str, value: object) -> bool:
        """Return whether an attribute has the default's type; without a default, a number is expected, but for
        ``mode``."""
        if name == "mode":
            return isinstance(value, str)
        kind = int if self._is_whole(name) else (int, float)
        if name in self.lists and isinstance(value, (list, tuple)):
            return all(isinstance(member, kind) for member in value)
        return isinstance(value, kind)

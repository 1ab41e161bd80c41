"""Specification of a collective: one frozen record with types, numerics, traffic and checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gopt.collectives.call import Array, Attribute, Call, PartialType, Results, Type
from gopt.collectives.layout import FLOATS, INTEGERS, ITEM_BYTES, total_elements
from gopt.errors import InputError, InvariantError, UnsupportedError

DOMAIN = "gopt.comm"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: schema, shape rule, cost and reference execution.

    ``forms``: sets of attributes, exactly one given as a whole. ``shape_rule`` gives a member's outputs, with unknown
    dimensions for unknown operands. ``payload_rule`` gives the tensors moved together by the group, equal on every
    member: B of the cost formulas counts their bytes. ``cost_rule`` takes a call and B and gives bytes. ``pairwise``:
    between two ranks, and only the sender has inputs. ``rounds``: of a ring; a member sends (n-1)/n·B in each.
    ``shares``: each member gets a part of its own, in place of the same results."""

    name: str
    doc: str
    attributes: tuple[Attribute, ...]
    shape_rule: Callable[[Call], list[PartialType]]
    payload_rule: Callable[[Call], list[PartialType]]
    cost_rule: Callable[[Call, int], int]
    reference: Callable[[Call, Sequence[Sequence[Array]]], Results]
    forms: tuple[frozenset[str], ...] = ()
    min_inputs: int = 1
    max_inputs: int | None = None
    min_outputs: int = 1
    max_outputs: int | None = None
    pairwise: bool = False
    rounds: int = 1
    shares: bool = False

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, not only moved."""
        return any(attribute.name == "reduce" for attribute in self.attributes)

    def added(self, sent: float) -> float:
        """Bytes that a member combines in a call with so many bytes sent: as many as in one round."""
        return sent / self.rounds if self.reduces else 0.0

    def resolve(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes read, lists as tuples, defaults filled in, in the record's order.

        Raises InputError for an unknown, missing or mistyped attribute, or an incomplete form."""
        return resolve_attributes(self.name, self.attributes, self.forms, attributes)

    def infer(
        self, attributes: Mapping[str, Any], input_types: Sequence[PartialType], size: int | None = None,
        index: int | None = None,
    ) -> list[PartialType]:  # fmt: skip
        """Output types as far as determined. Raises as ``outputs`` does."""
        return self.shape_rule(self._call(attributes, input_types, size, index))

    def outputs(self, attributes: Mapping[str, Any], input_types: Sequence[Type], size: int, index: int) -> list[Type]:
        """Concrete output types on member ``index`` of a group of ``size``.

        Raises InputError on contradictory attributes or inputs, UnsupportedError on an element type that cannot travel
        or be reduced so, InvariantError on an index outside the group. Undefined outputs of a member (Reduce off the
        root) get their declared types all the same."""
        return _concrete(self.name, self.infer(attributes, input_types, size, index))

    def payload(self, attributes: Mapping[str, Any], input_types: Sequence[Type]) -> list[Type]:
        """The tensors moved by the whole group in one call, equal for every member."""
        return self._payload(self._call(attributes, input_types, None, None))

    def bytes_sent(self, attributes: Mapping[str, Any], input_types: Sequence[Type], size: int, index: int) -> int:
        """Bytes sent by member ``index`` under a bandwidth-optimal ring (contract section 4); 0 in a group of one.

        Fractions are rounded to the nearest integer, halves up. Raises as ``outputs`` does.
        """
        call = self._call(attributes, input_types, size, index)
        self.shape_rule(call)
        if size == 1:
            return 0
        elements = total_elements(shape for _, shape in self._payload(call))
        return self.cost_rule(call, elements * ITEM_BYTES[call.dtype])

    def execute(self, attributes: Mapping[str, Any], contributions: list[list[Array]], dtype: str) -> Results:
        """Run the call for all members at once: inputs in group order in, outputs in group order out.

        Reductions combine in group order; halves are summed in float32 and rounded once; integers wrap around. Outputs
        are fresh memory of each member's own. The entry of a member with undefined outputs (Reduce off the root) is
        None. Of a Send or Recv ``contributions`` are the two ends in rank order: the sender's tensors and an empty
        list; either record gives the whole transfer. Raises as ``outputs`` does, and InvariantError where an array is
        not of ``dtype`` or the members' calls differ."""
        result = sorted({_dtype_name(array) for arrays in contributions for array in arrays} - {dtype})
        if result:
            raise InvariantError(f"{self.name} of {dtype} was given {result[0]}")
        size = len(contributions)
        types = [[(dtype, array.shape) for array in arrays] for arrays in contributions]
        if self.pairwise:
            givers = [operands for operands in types if operands]
            if size != 2 or len(givers) != 1:
                raise InvariantError(f"{self.name} joins one sender and one receiver, not {len(givers)} of {size}")
            call = self._call(attributes, givers[0] if self.max_inputs != 0 else [], size, None)
            if self._payload(call) != givers[0]:
                raise InvariantError(f"{self.name} expects {self._payload(call)} and was sent {givers[0]}")
            return self.reference(call, contributions)
        calls = [self._call(attributes, operands, size, index) for index, operands in enumerate(types)]
        for call in calls:
            self.shape_rule(call)
            if self._payload(call) != self._payload(calls[0]):
                raise InvariantError(
                    f"{self.name}: member {call.index} moves {self._payload(call)}, member 0 {self._payload(calls[0])}"
                )
        return self.reference(calls[0], contributions)

    def _payload(self, call: Call) -> list[Type]:
        return _concrete(self.name, self.payload_rule(call))

    def _call(
        self, attributes: Mapping[str, Any], input_types: Sequence[PartialType], size: int | None, index: int | None
    ) -> Call:
        """The call, with all checks common to collectives."""
        if size is not None and (size < 1 or not 0 <= (index or 0) < size):
            raise InvariantError(f"{self.name}: no member {index} in a group of {size}")
        call = Call(self.name, self.resolve(attributes), tuple(input_types), size, index)
        count = len(call.inputs)
        if count < self.min_inputs or (self.max_inputs is not None and count > self.max_inputs):
            raise InputError(f"{self.name} does not take {count} inputs")
        if not all(axis.isidentifier() for axis in call["group"].split("+")):
            raise InputError(f"{self.name}: {call['group']!r} is not a group", "write it as shard or dp+shard")
        dtypes = {dtype for dtype, _ in call.inputs} | ({call["dtype"]} if call.has("dtype") else set())
        if len(dtypes) > 1:
            raise InputError(f"{self.name}: all tensors of one call have one type, not {' and '.join(sorted(dtypes))}")
        self._check_dtype(call)
        root = call["root"] if call.has("root") else 0
        if root < 0 or (size is not None and root >= size):
            raise InputError(f"{self.name}: root {root} is outside the group of {size or 'any size'}")
        if call.has("peer") and call["peer"] < 0:
            raise InputError(f"{self.name}: peer {call['peer']} is not a rank")
        return call

    def _check_dtype(self, call: Call) -> None:
        if call.dtype not in ITEM_BYTES:
            raise UnsupportedError(
                f"{self.name}: tensors of {call.dtype} cannot be sent", "cast to a number type first"
            )
        if not self.reduces:
            return
        how = call["reduce"]
        fits = FLOATS if how == "mean" else FLOATS | INTEGERS if how == "sum" else FLOATS | INTEGERS | {"bool"}
        if call.dtype not in fits:
            raise UnsupportedError(f"{self.name}: no {how} of {call.dtype}")


def resolve_attributes(
    name: str, declared: Sequence[Attribute], forms: Sequence[frozenset[str]], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """The attributes of an operator called ``name``, as in ``Collective.resolve``."""
    unknown = sorted(set(attributes) - {attribute.name for attribute in declared})
    if unknown:
        raise InputError(f"{name} has no attribute {unknown[0]!r}")
    missing = [a.name for a in declared if a.required and a.name not in attributes]
    if missing:
        raise InputError(f"{name} needs the attribute {missing[0]!r}")
    names = {key for form in forms for key in form if key in attributes}
    if forms and names not in forms:
        wanted = " or ".join(" and ".join(sorted(form)) for form in forms)
        raise InputError(f"{name} needs {wanted}, not {' and '.join(sorted(names)) or 'none of them'}")
    result = {}
    for attribute in declared:
        if attribute.name in attributes:
            result[attribute.name] = attribute.read(name, attributes[attribute.name])
        elif attribute.default is not None:
            result[attribute.name] = attribute.default
    return result


def _concrete(op: str, types: Sequence[PartialType]) -> list[Type]:
    result = []
    for dtype, shape in types:
        dims = _dims(shape)
        if dims is None:
            raise InvariantError(f"{op}: the shape {shape} is not static")
        result.append((dtype, dims))
    return result


@functools.lru_cache(4096)
def _dims(shape: tuple[int | str | None, ...] | None) -> tuple[int, ...] | None:
    """A static shape, or None."""
    dims = tuple(size for size in shape or () if isinstance(size, int))
    return dims if shape is not None and len(dims) == len(shape) else None


def _dtype_name(array: Array) -> str:
    """The manifest's word for an array's type: NumPy's add-on types are spelled float8_e4m3fn there."""
    name = np.dtype(array.dtype).name.replace("_", "")
    return "float8e8m0" if name == "float8e8m0fnu" else name

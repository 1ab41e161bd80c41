"""Reading a collective node: shapes and cuts as text, and the call as seen by other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gopt.collectives.call import Type
from gopt.collectives.layout import ITEM_BYTES, flat_cuts, format_shape, parse_shapes, total_elements
from gopt.collectives.table import COLLECTIVES
from gopt.errors import InputError

__all__ = ["CallSignature", "call_signature", "flat_cuts", "format_shape", "parse_shapes"]

_ELSEWHERE = frozenset({"group", "reduce", "dtype", "shapes", "peer"})
"""Attributes that have a field of their own, show in the tensors' shapes, or rightly differ between the ends."""


class CallSignature(NamedTuple):
    """Properties of a call that must be equal on all members of a group.

    Hashable, and prints as one line.
    """

    op: str
    group: str
    reduce: str
    """Reduction operator; '' if elements are only moved."""
    layout: tuple[tuple[str, Any], ...]
    """``tensors`` = the payload's shapes as text, then root, tag, cuts, axis and sizes where there are any."""
    dtype: str
    nbytes: int
    """Bytes of the payload: of the whole bucket, not of one rank's shard."""

    def __str__(self) -> str:
        layout = " ".join(f"{name}={value!r}" for name, value in self.layout)
        return " ".join(filter(None, [self.op, self.group, self.reduce, f"{self.dtype} {self.nbytes} bytes", layout]))


def call_signature(op_type: str, attributes: Mapping[str, Any], input_types: Sequence[Type]) -> CallSignature:
    """The call of every member of a group, from one member's node.

    Equal on all members, whatever their shards. A Send and its Recv differ in ``op`` alone: the peer is left out.
    Raises InputError on an unknown operator or malformed attributes, UnsupportedError on an element type that cannot
    travel or be reduced so."""
    record = COLLECTIVES.get(op_type)
    if record is None:
        raise InputError(f"gopt.comm has no operator {op_type!r}", f"it has {', '.join(COLLECTIVES)}")
    resolved = record.resolve(attributes)
    payload = record.payload(attributes, input_types)
    shapes = [shape for _, shape in payload]
    dtype = payload[0][0]
    layout: list[tuple[str, Any]] = [("tensors", tuple(format_shape(shape) for shape in shapes))]
    layout += [(name, value) for name, value in resolved.items() if name not in _ELSEWHERE]
    nbytes = total_elements(shapes) * ITEM_BYTES[dtype]
    return CallSignature(op_type, resolved["group"], resolved.get("reduce", ""), tuple(layout), dtype, nbytes)

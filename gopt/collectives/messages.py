"""Messages between trainers and servers: operators of ``gopt.comm``, one record each. The only list of messages.

Collectives join members of a group with the same call. A message has a sender and a receiver, with different graphs.
Every message operator reads the number of the round as its first operand; a trainer's operators return the number, so
that each can read it from the one before: this token orders them under any sort of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gopt.collectives.call import Attribute, CallKind, PartialType
from gopt.collectives.layout import ITEM_BYTES, parse_shapes
from gopt.collectives.spec import resolve_attributes
from gopt.errors import InputError, UnsupportedError

ROUND = ("int64", ())
"""The type of the number of a round, which is the ordering token."""
ROUND_INPUT = "gopt.round"
"""The input of every file of a split that is the number of the round, from 0."""
WEIGHT = ("float32", ())
"""The type of a trainer's weight in a merge."""

_SERVER = Attribute("server", CallKind.INT, "Number of the server at the other end.", required=True)
_BUCKET = Attribute("bucket", CallKind.INT, "Number of the bucket: what travels in one message.", required=True)
_KEYS = Attribute("keys", CallKind.STRINGS, "Names of the keys in the bucket, in order.", required=True)
_TABLE = Attribute("table", CallKind.INT, "Number of the table.", required=True)
_NAME = Attribute("parameter", CallKind.STRING, "Name of the parameter that the table is.", required=True)
_DTYPE = Attribute("dtype", CallKind.STRING, "Element type of the results, such as float16.", required=True)
_SHAPES = Attribute(
    "shapes", CallKind.STRINGS, 'Shapes of the results, such as "64,32"; a scalar is "".', required=True
)
_WIDTH = Attribute("width", CallKind.INT, "Elements of a row; 0: rows are scalars.", required=True)
_VERSION = Attribute(
    "version", CallKind.STRING, "Whether values are those before or after the update of the round.",
    required=True, choices=("before", "after"),
)  # fmt: skip
_REDUCE = Attribute(
    "reduce", CallKind.STRING, "How the contributions of trainers are merged, in the order of trainers.",
    required=True, choices=("mean", "sum", "weighted"),
)  # fmt: skip

TypeRule = Callable[[Mapping[str, Any], Sequence[PartialType]], list[PartialType]]

WITHOUT_ABSENT = "weighted"
"""The attribute of a message whose absent operands verify has left out: whether the message has a weight."""


@dataclass(frozen=True, slots=True)
class MessageOperator:
    """A message operator. ``type_rule``: attributes and operands behind the round -> types of all results.

    ``weighed``: the operand behind the round is this trainer's weight, a float32 scalar, or absent. ``ids``: the next
    operand holds row numbers, int64. ``token``: the only result is the round.
    """

    name: str
    doc: str
    attributes: tuple[Attribute, ...]
    type_rule: TypeRule
    min_inputs: int = 0
    max_inputs: int | None = 0
    """Operands behind the round and the weight."""
    weighed: bool = False
    ids: bool = False
    token: bool = False
    min_outputs: int = 1
    max_outputs: int | None = 1

    def resolve(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes read, lists as tuples; raises InputError for an unknown, missing or mistyped attribute."""
        return resolve_attributes(self.name, self.attributes, (), attributes)

    def infer(self, attributes: Mapping[str, Any], input_types: Sequence[PartialType]) -> list[PartialType]:
        """Types of the results. Raises InputError for operands that do not fit, UnsupportedError for types that cannot
        travel."""
        values = self.resolve(attributes)
        if not input_types or input_types[0][0] != ROUND[0] or input_types[0][1] not in (None, ()):
            raise InputError(f"{self.name} reads the number of the round, an int64 scalar, as its first operand")
        moved = list(input_types[2 if self.weighed else 1 :])
        if self.weighed and len(input_types) > 1 and input_types[1] not in (("", None), WEIGHT, (WEIGHT[0], None)):
            raise InputError(f"{self.name}: a weight is a float32 scalar, not {input_types[1]}")
        if len(moved) < self.min_inputs or (self.max_inputs is not None and len(moved) > self.max_inputs):
            raise InputError(f"{self.name} does not take {len(moved)} inputs behind the round")
        if self.ids and moved[0][0] != "int64":
            raise InputError(f"{self.name}: row numbers are int64, not {moved[0][0]}")
        results = self.type_rule(values, moved)
        for dtype, _ in (*moved, *results):
            if dtype not in ITEM_BYTES:
                raise UnsupportedError(
                    f"{self.name}: tensors of {dtype} cannot be sent", "cast the value to a number type first"
                )
        return results


def _token(attributes: Mapping[str, Any], moved: Sequence[PartialType]) -> list[PartialType]:
    return [ROUND]


def _stated(attributes: Mapping[str, Any], moved: Sequence[PartialType]) -> list[PartialType]:
    return [(attributes["dtype"], shape) for shape in parse_shapes(attributes["shapes"])]


def _row_shape(attributes: Mapping[str, Any], rows: int | str | None) -> tuple[int | str | None, ...]:
    return (rows, attributes["width"]) if attributes["width"] else (rows,)


def _rows(attributes: Mapping[str, Any], moved: Sequence[PartialType]) -> list[PartialType]:
    """One row for each number."""
    shape = moved[0][1]
    if shape is not None and len(shape) != 1:
        raise InputError(f"PullRows: row numbers are a list, not of shape {shape}")
    return [(attributes["dtype"], _row_shape(attributes, shape[0] if shape is not None else None))]


def _row_sums(attributes: Mapping[str, Any], moved: Sequence[PartialType]) -> list[PartialType]:
    return [("int64", (None,)), (attributes["dtype"], _row_shape(attributes, None))]


PUSH = MessageOperator(
    name="Push",
    doc="Sends the X of a bucket to a server, as this trainer's contribution to the round. X may be pieces of keys, in "
    "order.",
    attributes=(_SERVER, _BUCKET, _KEYS),
    type_rule=_token,
    min_inputs=1,
    max_inputs=None,
    weighed=True,
    token=True,
)

PULL = MessageOperator(
    name="Pull",
    doc="Receives the values of a bucket from a server, as they are before or after the update of the round.",
    attributes=(_SERVER, _BUCKET, _KEYS, _DTYPE, _SHAPES, _VERSION),
    type_rule=_stated,
    max_outputs=None,
)

PUSH_ROWS = MessageOperator(
    name="PushRows",
    doc="Sends gradients of rows of a table, row ids[i] = X[i], to the servers that hold them. Rows that are listed "
    "several times are added up first.",
    attributes=(_TABLE, _NAME),
    type_rule=_token,
    min_inputs=2,
    max_inputs=2,
    weighed=True,
    ids=True,
    token=True,
)

PULL_ROWS = MessageOperator(
    name="PullRows",
    doc="Receives rows ids[i] of a table from the servers that hold them, as they are before the update of the round.",
    attributes=(_TABLE, _NAME, _DTYPE, _WIDTH),
    type_rule=_rows,
    min_inputs=1,
    max_inputs=1,
    ids=True,
)

AGGREGATE = MessageOperator(
    name="Aggregate",
    doc="What trainers pushed of a bucket in this round, merged in the order of trainers: one value for each key.",
    attributes=(_BUCKET, _KEYS, _DTYPE, _SHAPES, _REDUCE),
    type_rule=_stated,
    max_outputs=None,
)

PULLED = MessageOperator(
    name="Pulled",
    doc="What the trainer that pushed a bucket had pulled of it last: one value for each key, the start value where "
    "it pulled none.",
    attributes=(_BUCKET, _KEYS, _DTYPE, _SHAPES),
    type_rule=_stated,
    max_outputs=None,
)

AGGREGATE_ROWS = MessageOperator(
    name="AggregateRows",
    doc="What trainers pushed of a table in this round: the local rows of this server, each once and in ascending "
    "order, and their merged gradients.",
    attributes=(_TABLE, _NAME, _DTYPE, _WIDTH, _REDUCE),
    type_rule=_row_sums,
    min_outputs=2,
    max_outputs=2,
)

_ALL = (PUSH, PULL, PUSH_ROWS, PULL_ROWS, AGGREGATE, PULLED, AGGREGATE_ROWS)

MESSAGES: MappingProxyType[str, MessageOperator] = MappingProxyType({record.name: record for record in _ALL})
"""Operator type -> its record; read-only."""

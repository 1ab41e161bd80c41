"""Entries of a manifest for trainers and servers: the keys of each server, and the messages with keys.

Endpoints are numbered like ranks: trainers first, then servers. A key is pushed and pulled as a unit: a run of pieces
with equal updates in synchronous modes, a piece of a tensor in asynchronous modes. A bucket is the set of a server's
keys sharing a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from gopt.artifact.pieces import Piece
from gopt.documents.records import OPTIONAL, Bounds, Count, Positive, one_of
from gopt.records.mesh import AxisKind, Mesh
from gopt.records.roles import RolesEntry


class Mode(StrEnum):
    """The moment at which servers apply pushes."""

    SYNC = "sync"
    """Once a round, what all trainers pushed."""
    ASYNC = "async"
    """Each message as it comes."""
    HALF_ASYNC = "half-async"
    """Each message as it comes; trainers wait for one another behind every step."""
    GEO = "geo"
    """Trainers update on their own, and push what has changed every few steps."""

    @property
    def rounds(self) -> bool:
        """Whether servers wait for all trainers."""
        return self is Mode.SYNC


class PullAt(StrEnum):
    """When trainers pull."""

    START = "start"
    END = "end"


class KeyKind(StrEnum):
    """Kind of a key."""

    PARAMETER = "parameter"
    """Trainers push gradients and pull parameters."""
    SCALAR = "scalar"
    """Trainers pull a state of one element that the forward reads, such as a loss scale."""
    STATE = "state"
    """Trainers pull a state of several elements that the forward reads, such as the weights of a target network, or one
    that a single server has."""
    VALUE = "value"
    """Trainers push a number of their forward; servers read the merged one."""
    METRIC = "metric"
    """Trainers pull an output that servers compute."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key. The block is the part of the server's graph from ``gradient`` and ``inputs`` to ``outputs``.

    A state has a server if updated with a whole parameter there. ``dtype`` and ``shape``: of the pulled value, or of
    the pushed value if nothing is pulled.
    """

    name: str
    """The name is for readers; a key is known by its place in the list."""
    kind: KeyKind
    """Of a parameter trainers push gradients and pull values; of a scalar they pull a state of one element that the
    forward reads, of a state one of several elements or one that a single server has; of a value they push a number of
    their forward, and servers read the merged one; of a metric they pull an output that servers compute."""
    server: Count | None
    """The number of the server that has the key; null means that every server has it, and that trainers pull it from
    server 0."""
    bucket: Count
    """Keys with the same number travel in one message."""
    dtype: str
    """The elements of the key have this type on the server."""
    wire: str
    """The elements of the key travel in this type."""
    shape: tuple[Count, ...]
    """The shape is the list of the lengths of the dimensions, in elements. Each item is the length of a dimension."""
    pieces: tuple[Piece, ...]
    """The key is these pieces of tensors of the source, flattened, one behind the other; the list is empty where the
    key is of no tensor."""
    gradient: str
    """The value of this name in the server's graph is what trainers pushed, merged; the text is empty where nothing is
    pushed."""
    inputs: tuple[str, ...]
    """The inputs of the server's graph in this list are the states of the key's block; the first is what trainers
    pull."""
    outputs: tuple[str, ...]
    """The outputs of the server's graph in this list replace the inputs, in the same order; of a metric it is the
    output itself."""

    @property
    def elements(self) -> int:
        """Number of elements in a message."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class TablePartStates:
    """All states with rows of a part of a table, the table first: before and after the update."""

    inputs: tuple[str, ...]
    """The inputs of its graph that are these states, the part of the table first."""
    outputs: tuple[str, ...]
    """The output of its graph that replaces each of them."""


@dataclass(frozen=True, slots=True)
class RowInitEntry:
    """The initializer of a tensor with rows of a table."""

    tensor: str
    """The tensor has this name in the source."""
    rows: str
    """Rows are made by this rule, such as normal(0,0.02)@seed=7."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table whose rows are distributed over servers: trainers pull and push rows by number, and never the whole.

    ``layout``, ``servers``, ``cuts``: as in ``TableLayout``.
    """

    parameter: str
    """The table is the parameter of this name of the source."""
    layout: Annotated[str, one_of("whole", "modulo", "range", "columns")]
    """With whole one server has the table, with modulo part k of P has the rows whose numbers leave k when divided by
    P, with range each part has neighbouring rows, and with columns each part has some columns of all rows."""
    rows: Count
    """The number of rows of the table."""
    width: Positive
    """The number of elements of a row."""
    dtype: str
    """The elements of the table have this type."""
    servers: tuple[Count, ...]
    """The server that has each part, in the order of parts."""
    cuts: tuple[Count, ...]
    """The first row or column of each part, and the end of the last; the list is empty for other layouts than range and
    columns."""
    inputs: tuple[str, ...]
    """The input of the graph of each of these servers that is its part of the table, flattened."""
    outputs: tuple[str, ...]
    """The output of the graph of each of these servers that replaces its part."""
    gradients: tuple[str, ...]
    """The value in the graph of each of these servers that has the merged gradients of rows."""
    update: Annotated[str, one_of("dense", "lazy")] = field(default="dense", metadata=OPTIONAL)
    """With dense an update runs on all rows of a part, with lazy on those that were pushed; without the key it is
    dense."""
    ids: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The value in the graph of each of these servers that has the numbers of the merged rows."""
    states: tuple[TablePartStates, ...] = field(default=(), metadata=OPTIONAL)
    """The states that each of these servers has of the table."""
    init: tuple[RowInitEntry, ...] = field(default=(), metadata=OPTIONAL)
    """The tensors with rows of the table whose start values are in no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlanEntry:
    """Division of work between trainers and servers."""

    servers: Positive
    """The number of servers."""
    mode: Mode
    """With sync servers update once a round from what all trainers pushed, with async they apply each message as it
    comes, with half-async trainers also wait for one another behind every step, and with geo trainers update on their
    own and push what has changed."""
    pull: PullAt
    """Trainers pull at the start of a step or at its end."""
    fixed_trainers: bool = field(default=False, metadata=OPTIONAL)
    """The value is true where a run must have as many trainers as the mesh; the key is absent when it may have any
    number."""
    every: Annotated[int, Bounds(minimum=2)] = field(default=1, metadata=OPTIONAL)
    """In mode geo trainers push after this many steps; the key is absent when that is one."""
    compensation: float | None = field(default=None, metadata=OPTIONAL)
    """The strength of delay compensation; the key is absent without it."""
    count: Annotated[str, one_of("push", "chief")] = field(default="round", metadata=OPTIONAL)
    """In asynchronous modes this advances the counters of a key by one: push is each push of it, and chief is a push of
    trainer 0; the key is absent when it is one push for each trainer."""
    roles: RolesEntry | None = field(default=None, metadata=OPTIONAL)
    """The record says which ranks of a launcher are which trainers and servers; the key is absent where trainers are
    the first ranks and servers those behind them."""
    slicing: Annotated[str, one_of("off", "classic", "balanced")]
    """Parameters were cut into pieces by this rule."""
    minimum: Positive
    """A piece was asked to have as many elements at least."""
    placement: Annotated[str, one_of("round-robin", "hash", "bytes")]
    """Pieces were placed on servers by this rule."""
    keys: tuple[KeyEntry, ...]
    """The list has all that is pushed and pulled. Each item is one key: what is pushed and pulled as one."""
    tables: tuple[TableEntry, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the tables whose rows lie on servers; the key is absent without such tables. Each item is one table;
    a table is known by its place in the list."""

    @property
    def mesh(self) -> Mesh:
        """The servers, as members of the group for calls among servers."""
        return Mesh((("server", self.servers),), (("server", AxisKind.DATA),))

    @property
    def buckets(self) -> dict[int, list[KeyEntry]]:
        """Bucket -> its keys in order."""
        buckets: dict[int, list[KeyEntry]] = {}
        for key in self.keys:
            buckets.setdefault(key.bucket, []).append(key)
        return buckets

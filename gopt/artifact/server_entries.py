"""Entries of a manifest for trainers and servers: the keys of each server, and the messages that carry them.

Endpoints are numbered like ranks: trainers first, then servers. A key is pushed and pulled as one: in synchronous modes
it is a run of pieces of equal updates, in asynchronous ones a piece of one tensor. A bucket is the set of keys of one
server that share one message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gopt.artifact.pieces import Piece
from gopt.documents.records import OPTIONAL
from gopt.records.roles import RolesEntry


class Mode(StrEnum):
    """When servers apply what trainers push."""

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
    """A key. Its block is the part of the server's graph from ``gradient`` and ``inputs`` to ``outputs``.

    ``server``: the number of the server, None where every server has it; trainers then pull from server 0. A state has
    a server where it is updated with a parameter that lies there whole.
    ``pieces``: what it is of, one behind the other. ``gradient``: what the server's graph calls the merged
    contributions, '' where nothing is pushed. ``inputs`` and ``outputs``: states of the block before and after the
    update, the value that is pulled first; of a metric, the output alone. ``dtype`` and ``shape`` are those of the
    value that is pulled, or of what is pushed where nothing is pulled; ``wire``: the type in which both travel.
    """

    name: str
    kind: KeyKind
    server: int | None
    bucket: int
    dtype: str
    wire: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    gradient: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Elements that travel."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class TablePartStates:
    """All states with rows of a part of a table, the table first: before and after the update."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowInitEntry:
    """Initializer of a tensor with rows of a table; ``rows``: in the format of ``RowInit.parse``."""

    tensor: str
    rows: str


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table whose rows are distributed over servers: trainers pull and push rows by number, and never have the whole.

    ``layout``, ``servers``, ``cuts``: as in ``TableLayout``. ``inputs`` and ``outputs``: for each of ``servers``, the
    name of its part, rows x columns flattened, before and after the update. ``gradients``: the name of the merged rows,
    and ``ids`` of their numbers. ``update``: an update runs on all rows (``dense``), or on those that were pushed
    (``lazy``). ``states``: for each of ``servers``, all tensors it has of the table. ``init``: tensors whose start
    values are in no file.
    """

    parameter: str
    layout: str
    rows: int
    width: int
    dtype: str
    servers: tuple[int, ...]
    cuts: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    update: str = field(default="dense", metadata=OPTIONAL)
    ids: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    states: tuple[TablePartStates, ...] = field(default=(), metadata=OPTIONAL)
    init: tuple[RowInitEntry, ...] = field(default=(), metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlanEntry:
    """Division of work between trainers and servers.

    ``fixed_trainers``: a run must have as many trainers as the manifest. ``every``: in mode geo, steps between pushes.
    ``compensation``: the strength of delay compensation, None without it. ``count``: in asynchronous modes, the event
    that advances the counters of a key by one: each push of it, a push by each trainer, or a push by trainer 0.
    """

    servers: int
    mode: Mode
    pull: PullAt
    fixed_trainers: bool = field(default=False, metadata=OPTIONAL)
    every: int = field(default=1, metadata=OPTIONAL)
    compensation: float | None = field(default=None, metadata=OPTIONAL)
    count: str = field(default="round", metadata=OPTIONAL)
    roles: RolesEntry | None = field(default=None, metadata=OPTIONAL)
    """The user's map from ranks of a launcher to roles; None: trainers first, servers behind them."""
    slicing: str
    minimum: int
    placement: str
    keys: tuple[KeyEntry, ...]
    tables: tuple[TableEntry, ...] = field(default=(), metadata=OPTIONAL)

    @property
    def buckets(self) -> dict[int, list[KeyEntry]]:
        """Bucket -> its keys in order."""
        found: dict[int, list[KeyEntry]] = {}
        for key in self.keys:
            found.setdefault(key.bucket, []).append(key)
        return found

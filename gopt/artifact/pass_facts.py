"""The facts of passes as records, for code that needs a number of another pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL, from_document, key
from gopt.pass_records import PassRecord


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """A bucket of the pass ``shard``: its parameters in order, bytes of their gradients, why it ends there."""

    name: str
    mode: str
    tensors: tuple[str, ...]
    nbytes: int = field(metadata=key("bytes"))
    dtype: str
    closed_because: str
    classes: int | None = field(default=None, metadata=OPTIONAL)
    reasons: tuple[str, ...] = field(default=(), metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class ExpandedWeights:
    """Weights of an opaque optimizer whose updates stay written out in standard operators, and why."""

    weights: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """An opaque optimizer behind the pass ``refold-optimizers``: ``kept`` counts the weights that it still updates."""

    name: str
    operator: str
    kept: int
    merged: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    expanded: tuple[ExpandedWeights, ...] = field(default=(), metadata=OPTIONAL)


def buckets(passes: Iterable[PassRecord]) -> list[BucketFacts]:
    """The buckets of a step."""
    facts = [each.facts for each in passes if each.name != SPLIT_PASS]  # a split counts its buckets
    return [from_document(BucketFacts, row) for each in facts for row in each.get("buckets", ())]


def bucket_cap(passes: Iterable[PassRecord]) -> int | None:
    """Return the maximum size of a bucket in bytes, from the records of the packing passes; None without one."""
    return max((each.facts["bucket_cap_bytes"] for each in passes if "bucket_cap_bytes" in each.facts), default=None)


def operators(passes: Iterable[PassRecord]) -> list[OperatorFacts]:
    """The opaque optimizers of a step."""
    return [from_document(OperatorFacts, row) for each in passes for row in each.facts.get("operators", ())]


SPLIT_PASS = "parameter-server"
"""The pass that the report of a split names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSettings:
    """The options of a split as the report has them; a manifest and these make the same split again."""

    trainers: int
    servers: int
    mode: str
    pull: str
    slicing: str
    minimum: int
    placement: str
    server_map: Mapping[str, int] = field(default_factory=dict)
    loss_reduction: str
    accumulate: int
    wire: str
    bucket_bytes: int
    every: int
    compensation: float | None
    count: str
    fixed_trainers: bool
    tables: Mapping[str, str] = field(default_factory=dict)
    tables_off: bool = False
    table_memory: int | None = None
    rows: Mapping[str, str] = field(default_factory=dict, metadata=OPTIONAL)
    init: Mapping[str, str] = field(default_factory=dict, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSize:
    """The source, a trainer or the fullest server: bytes, except for ``nodes`` and ``calls``, the messages and calls of
    one step. ``traffic``: bytes that it sends in one step."""

    role: str
    nodes: int
    parameters: int
    optimizer_states: int
    gradients: int
    initializers: int
    calls: int
    traffic: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFacts:
    """The figures of a split. ``pushed_by_server`` and ``pulled_by_server``: bytes between one trainer and each server
    in one step, without rows of tables. ``rows_by_server``: an estimate of those, both ways (``row_traffic``)."""

    parameters: int
    pieces: int
    keys: int
    buckets: int
    pieces_by_server: tuple[int, ...]
    pushed_by_server: tuple[int, ...]
    pulled_by_server: tuple[int, ...]
    rows_by_server: tuple[int, ...] = field(default=(), metadata=OPTIONAL)
    sizes: tuple[RoleSize, ...] = field(default=(), metadata=OPTIONAL)


def split_records(passes: Iterable[PassRecord]) -> tuple[SplitSettings, SplitFacts] | None:
    """Options and figures of a split; None for the report of sharded ranks."""
    for each in passes:
        if each.name == SPLIT_PASS:
            return from_document(SplitSettings, each.options), from_document(SplitFacts, each.facts)
    return None

"""The facts of passes as records, for code needing a number of another pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from gopt.documents.records import OPTIONAL, Amount, Count, Positive, from_document, one_of
from gopt.records.pass_facts import BucketFacts as BucketFacts
from gopt.records.pass_facts import OperatorFacts, PassRecord


def buckets(passes: Iterable[PassRecord]) -> list[BucketFacts]:
    """The buckets of a step."""
    facts = [record.facts for record in passes if record.name != SPLIT_PASS]  # a split counts its buckets
    return [from_document(BucketFacts, row) for fact in facts for row in fact.get("buckets", ())]


def bucket_cap(passes: Iterable[PassRecord]) -> int | None:
    """Return the maximum size of a bucket in bytes, from the records of the packing passes; None without packing."""
    return max((run.facts["bucket_cap_bytes"] for run in passes if "bucket_cap_bytes" in run.facts), default=None)


def operators(passes: Iterable[PassRecord]) -> list[OperatorFacts]:
    """The opaque optimizers of a step."""
    return [from_document(OperatorFacts, row) for record in passes for row in record.facts.get("operators", ())]


SPLIT_PASS = "parameter-server"
"""The pass that the report of a split names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSettings:
    """The options of a split in the report; with a manifest, the options give the same split again."""

    trainers: Positive
    """This many trainers share the work."""
    servers: Positive
    """This many servers share the parameters."""
    mode: Annotated[str, one_of("sync", "async", "half-async", "geo")]
    """Servers update at these times: see the manifest."""
    pull: Annotated[str, one_of("start", "end")]
    """Trainers pull at the start of a step or at its end."""
    slicing: Annotated[str, one_of("off", "classic", "balanced")]
    """Parameters were cut into pieces by this rule."""
    minimum: Positive
    """A piece was asked to have as many elements at least."""
    placement: Annotated[str, one_of("round-robin", "hash", "bytes")]
    """Pieces were placed on servers by this rule."""
    server_map: Mapping[str, Count] = field(default_factory=dict)
    """The table is the user's server map in its order; it is empty without one. The value is the number of the server
    of what the key names."""
    loss_reduction: str
    """The gradients of the trainers become the step's gradient in this way: mean, sum or weighted:VALUE."""
    accumulate: Positive
    """This many micro-steps make one push."""
    wire: Annotated[str, one_of("", "float16", "bfloat16")]
    """Gradients and parameters travel in this type; the text is empty where they keep their own."""
    bucket_bytes: Positive
    """A message that carries several keys has at most this many bytes."""
    every: Positive
    """In mode geo trainers push after this many steps."""
    compensation: Amount | None
    """The number is the strength of delay compensation; null means without it."""
    count: Annotated[str, one_of("round", "push", "chief")]
    """In asynchronous modes this advances step counters by one: see the manifest."""
    fixed_trainers: bool
    """The value is true where a run must have as many trainers as the mesh."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """The table is what the user asked of tables whose rows lie on servers; it is empty where nothing was asked. The
    value is the layout of the parameters that the key fits."""
    tables_off: bool = False
    """The value is true where every parameter is pulled whole."""
    table_memory: Count | None = None
    """A server has this many bytes for tables; null means without a limit."""
    rows: Mapping[str, Annotated[str, one_of("dense", "lazy")]] = field(default_factory=dict, metadata=OPTIONAL)
    """The rows that updates of these tables, or of those that fit a pattern, run on: dense or lazy; the first entry
    that fits counts."""
    init: Mapping[str, str] = field(default_factory=dict, metadata=OPTIONAL)
    """These rules, such as normal(0,0.02)@seed=7, make the start values of these tables, or of states with their rows,
    or of those that fit a pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSize:
    """The source, a trainer or the fullest server."""

    role: str
    """This is source, trainer, or the server that holds most, such as server 1."""
    nodes: Count
    """It runs this many nodes."""
    parameters: Count
    """It holds this many bytes of parameters."""
    optimizer_states: Count
    """It holds this many bytes of optimizer states."""
    gradients: Count
    """It holds this many bytes of gradients at once."""
    initializers: Count
    """Its files refer to this many bytes of initial values."""
    calls: Count
    """It sends this many messages in one step; of the source, its collectives."""
    traffic: Count
    """It sends this many bytes in one step, without rows of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFacts:
    """The figures of a split; bytes between a trainer and servers are without rows of tables."""

    parameters: Count
    """Servers hold this many parameters."""
    pieces: Count
    """They are cut into this many pieces."""
    keys: Count
    """This many keys are pushed and pulled."""
    buckets: Count
    """The gradients of all keys travel in this many messages, those to every server counted once."""
    pieces_by_server: tuple[Count, ...]
    """The list has the number of pieces of each server. Each item is of the server of this number."""
    pushed_by_server: tuple[Count, ...]
    """The list has the bytes that one trainer pushes to each server in one step. Each item is of the server of this
    number."""
    pulled_by_server: tuple[Count, ...]
    """The list has the bytes that one trainer pulls from each server in one step. Each item is of the server of this
    number."""
    rows_by_server: tuple[Count, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the bytes of rows of tables and of their numbers that travel between one trainer and each server in
    one step, both ways, if a batch looks up no row twice and its look-ups are spread evenly over the rows: an estimate.
    Each item is of the server of this number."""
    sizes: tuple[RoleSize, ...] = field(default=(), metadata=OPTIONAL)
    """The list compares the source, a trainer, and the server that holds most. Each item is the source or one role."""


def split_records(passes: Iterable[PassRecord]) -> tuple[SplitSettings, SplitFacts] | None:
    """Options and figures of a split; None for the report of sharded ranks."""
    for record in passes:
        if record.name == SPLIT_PASS:
            return from_document(SplitSettings, record.options), from_document(SplitFacts, record.facts)
    return None

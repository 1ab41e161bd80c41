"""The facts of passes as records, for code that needs a number of another pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gopt.artifact.report import PassRecord
from gopt.documents.records import OPTIONAL, from_document, key


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
    return [from_document(BucketFacts, row) for each in passes for row in each.facts.get("buckets", ())]


def bucket_cap(passes: Iterable[PassRecord]) -> int | None:
    """Bytes of a bucket at most, as the passes that pack them say; None without one."""
    return max((each.facts["bucket_cap_bytes"] for each in passes if "bucket_cap_bytes" in each.facts), default=None)


def operators(passes: Iterable[PassRecord]) -> list[OperatorFacts]:
    """The opaque optimizers of a step."""
    return [from_document(OperatorFacts, row) for each in passes for row in each.facts.get("operators", ())]

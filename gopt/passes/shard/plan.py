"""Decide who owns what: buckets of gradients, classes of cones inside them, cuts. No graph is touched."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from gopt.analysis.cones import Classes, Cone, Mode, Updates
from gopt.analysis.partition import (
    Bucket,
    Item,
    assign_largest_first,
    default_cap,
    offsets,
    plan_buckets,
)  # fmt: skip
from gopt.analysis.sweeps import Index
from gopt.analysis.training import Training
from gopt.collectives.layout import flat_cuts
from gopt.graph.place import Span
from gopt.graph.types import TensorType


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tensors of one class inside a bucket, from element ``start`` to ``stop`` of it."""

    cones: tuple[Cone, ...]
    starts: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class SplitBucket:
    """Tensors whose updates are cut anywhere."""

    name: str
    cones: tuple[Cone, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    segments: tuple[Segment, ...]
    whole_gradient: bool
    why: str


@dataclass(frozen=True, slots=True)
class WholeBucket:
    """Tensors whose updates run where they are whole; cuts stand on tensor boundaries."""

    name: str
    cones: tuple[Cone, ...]
    owners: tuple[int, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class ReplicatedBucket:
    """Tensors whose gradients are reduced on every rank and whose updates every rank runs."""

    name: str
    cones: tuple[Cone, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All buckets in the order their gradients are complete, and the cap that shaped them."""

    buckets: tuple[SplitBucket | WholeBucket | ReplicatedBucket, ...]
    cap: int


def make_plan(training: Training, updates: Updates, ranks: int, cap: int | None) -> Plan:
    """Place every parameter of a step on ``ranks`` members; ``cap`` in bytes, None for the default."""
    index, types = Index(training.graph), training.graph.types
    total = sum(types[gradient].nbytes for gradient in set(training.gradients.values()))
    cap = default_cap(total) if cap is None else cap
    cones = list(updates.cones.values())
    owner = _owners(cones, types, ranks)
    items, seen = [], set()
    for cone in cones:
        if cone.gradient in seen:
            continue  # shared gradients are replicated, and reduced once
        seen.add(cone.gradient)
        gradient, parameter = types[cone.gradient], types[cone.parameter.tensor]
        key = (cone.mode.value, cone.whole_gradient, gradient.dtype, parameter.dtype)
        place = index.made_at(cone.gradient)
        items.append(Item(cone.parameter.tensor, gradient.elements, gradient.nbytes, key, place))
    classes = Classes(training, updates)
    buckets: list[SplitBucket | WholeBucket | ReplicatedBucket] = []
    for number, bucket in enumerate(plan_buckets(items, cap)):
        name = f"b{number}"
        members = [updates.cones[item.name] for item in bucket.items]
        mode = members[0].mode
        if mode is Mode.SPLIT:
            buckets.append(_split(name, bucket, members, classes, ranks))
        elif mode is Mode.WHOLE:
            buckets.append(_whole(name, bucket, members, owner, ranks))
        else:
            buckets.append(ReplicatedBucket(name, tuple(members), bucket.why))
    return Plan(tuple(buckets), cap)


def _owners(cones: list[Cone], types: dict[str, TensorType], ranks: int) -> dict[str, int]:
    """Owners of the whole tensors, balanced over all buckets, largest first."""
    whole = [cone.parameter.tensor for cone in cones if cone.mode is Mode.WHOLE]
    return dict(zip(whole, assign_largest_first([types[name].elements for name in whole], ranks)))


def _split(name: str, bucket: Bucket, members: list[Cone], classes: Classes, ranks: int) -> SplitBucket:
    sizes = {item.name: item.elements for item in bucket.items}
    by_class: dict[int, list[Cone]] = {}
    for cone in members:
        by_class.setdefault(classes.cone(cone), []).append(cone)
    ordered = [cone for group in by_class.values() for cone in group]
    starts = offsets([sizes[cone.parameter.tensor] for cone in ordered])
    cuts = tuple(flat_cuts(starts[-1], ranks))
    segments, place = [], 0
    for group in by_class.values():
        stop = place + len(group)
        span = Span(cuts, starts[place], starts[stop])
        segments.append(Segment(tuple(group), tuple(starts[place:stop]), span))
        place = stop
    return SplitBucket(
        name, tuple(ordered), tuple(starts), cuts, tuple(segments), members[0].whole_gradient, bucket.why
    )


def _whole(name: str, bucket: Bucket, members: list[Cone], owner: dict[str, int], ranks: int) -> WholeBucket:
    sizes = {item.name: item.elements for item in bucket.items}
    ordered = sorted(members, key=lambda cone: owner[cone.parameter.tensor])
    owners = [owner[cone.parameter.tensor] for cone in ordered]
    starts = offsets([sizes[cone.parameter.tensor] for cone in ordered])
    cuts = [starts[bisect_left(owners, rank)] for rank in range(ranks)] + starts[-1:]
    return WholeBucket(name, tuple(ordered), tuple(owners), tuple(starts), tuple(cuts), bucket.why)

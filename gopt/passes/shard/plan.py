"""Decide who owns what: buckets of gradients, classes of cones inside them, cuts. No graph is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from gopt.analysis.cones import Classes, Cone, Mode, Updates
from gopt.analysis.partition import (
    Bucket,
    Item,
    Partition,
    assign_largest_first,
    default_cap,
    offsets,
    owner_cuts,
    plan_buckets,
    row_cuts,
)
from gopt.analysis.spmd import Holding
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


def make_plan(
    training: Training,
    updates: Updates,
    ranks: int,
    cap: int | None,
    partition: Partition,
    copies: Mapping[str, Holding],
) -> Plan:
    """Place every parameter of a step on ``ranks`` members; ``cap`` in bytes, None for the default."""
    index, types = Index(training.graph), training.graph.types
    total = sum(types[gradient].nbytes for gradient in set(training.gradients.values()))
    cap = default_cap(total) if cap is None else cap
    cones = list(updates.cones.values())
    owner = _owners(cones, types, ranks, partition)
    items, seen = [], set()
    for cone in cones:
        if cone.gradient in seen:
            continue  # shared gradients are replicated, and reduced once
        seen.add(cone.gradient)
        gradient, parameter = types[cone.gradient], types[cone.parameter.tensor]
        copy = copies.get(cone.parameter.tensor)
        travels = copy.dtype if copy is not None else parameter.dtype
        key = (cone.mode.value, cone.whole_gradient, gradient.dtype, parameter.dtype, travels)
        place = index.made_at(cone.gradient)
        items.append(Item(cone.parameter.tensor, gradient.elements, gradient.nbytes, key, place))
    classes = Classes(training, updates)
    buckets: list[SplitBucket | WholeBucket | ReplicatedBucket] = []
    for number, bucket in enumerate(plan_buckets(items, cap)):
        name = f"b{number}"
        members = [updates.cones[item.name] for item in bucket.items]
        mode = members[0].mode
        if mode is Mode.SPLIT:
            buckets.append(_split(name, members, classes, _Cutter(partition, ranks, types, owner), bucket.why))
        elif mode is Mode.WHOLE:
            buckets.append(_whole(name, bucket, members, owner, ranks))
        else:
            buckets.append(ReplicatedBucket(name, tuple(members), bucket.why))
    return Plan(tuple(buckets), cap)


def _owners(cones: list[Cone], types: dict[str, TensorType], ranks: int, partition: Partition) -> dict[str, int]:
    """Owners of the tensors that stay whole, balanced over all buckets, largest first."""
    modes = {Mode.WHOLE, Mode.SPLIT} if partition is Partition.WHOLE else {Mode.WHOLE}
    whole = [cone.parameter.tensor for cone in cones if cone.mode in modes]
    return dict(zip(whole, assign_largest_first([types[name].elements for name in whole], ranks)))


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Orders the tensors of a bucket and shares it out."""

    partition: Partition
    ranks: int
    types: dict[str, TensorType]
    owner: dict[str, int]

    def order(self, cones: list[Cone]) -> list[Cone]:
        if self.partition is Partition.WHOLE:
            return sorted(cones, key=lambda cone: self.owner[cone.parameter.tensor])
        return cones

    def cuts(self, cones: list[Cone]) -> list[int]:
        shapes = [self.types[cone.parameter.tensor] for cone in cones]
        sizes = [shape.elements for shape in shapes]
        if self.partition is Partition.WHOLE:
            return owner_cuts(sizes, [self.owner[cone.parameter.tensor] for cone in cones], self.ranks)
        if self.partition is Partition.ROWS:
            return row_cuts(sizes, [shape.elements // max(shape.dims[0], 1) or 1 for shape in shapes], self.ranks)
        return flat_cuts(sum(sizes), self.ranks)


def _split(name: str, members: list[Cone], classes: Classes, cutter: _Cutter, why: str) -> SplitBucket:
    numbers = {id(cone): classes.cone(cone) for cone in members}
    by_class: dict[int, list[Cone]] = {}
    for cone in members:
        by_class.setdefault(numbers[id(cone)], []).append(cone)
    ordered = cutter.order([cone for group in by_class.values() for cone in group])
    starts = offsets([cutter.types[cone.parameter.tensor].elements for cone in ordered])
    cuts = tuple(cutter.cuts(ordered))
    segments, place = [], 0
    for _, run in groupby(ordered, key=lambda cone: numbers[id(cone)]):
        group = tuple(run)
        stop = place + len(group)
        segments.append(Segment(group, tuple(starts[place:stop]), Span(cuts, starts[place], starts[stop])))
        place = stop
    return SplitBucket(name, tuple(ordered), tuple(starts), cuts, tuple(segments), members[0].whole_gradient, why)


def _whole(name: str, bucket: Bucket, members: list[Cone], owner: dict[str, int], ranks: int) -> WholeBucket:
    sizes = {item.name: item.elements for item in bucket.items}
    ordered = sorted(members, key=lambda cone: owner[cone.parameter.tensor])
    owners = [owner[cone.parameter.tensor] for cone in ordered]
    starts = offsets([sizes[cone.parameter.tensor] for cone in ordered])
    cuts = owner_cuts([sizes[cone.parameter.tensor] for cone in ordered], owners, ranks)
    return WholeBucket(name, tuple(ordered), tuple(owners), tuple(starts), tuple(cuts), bucket.why)

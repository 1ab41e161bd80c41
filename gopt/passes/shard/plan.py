"""Plan buckets of gradients, with classes of subgraphs, owners and cuts. The graph is not changed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from itertools import groupby

from gopt.analysis.partition import (
    LEAST_PIECE,
    Item,
    Owners,
    Partition,
    PartitionRule,
    assign,
    ceil_pieces,
    choose_cap,
    default_cap,
    lightest_window,
    offsets,
    owner_cuts,
    plan_buckets,
    row_cuts,
    window_cuts,
)
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.updates import UpdateMode, Updates, UpdateSubgraph
from gopt.collectives.layout import flat_cuts
from gopt.ir.types import TensorType
from gopt.records.placements import FlatShard, OnMember, Sharding
from gopt.spmd.program import BucketSlice, ShardedState


class TransferStyle(str, Enum):
    """The transfer of whole tensors: a bucket in one call with uneven shards, or each tensor to and from the owner."""

    GATHER = "gather"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Neighbouring tensors of one class inside a bucket; ``starts``: the offset of each.

    ``ranges``: the elements of each tensor in the bucket; () for all of each."""

    subgraphs: tuple[UpdateSubgraph, ...]
    starts: tuple[int, ...]
    sharding: Sharding
    ranges: tuple[tuple[int, int], ...] = ()

    def slices(self, tensors: Sequence[str], types: Mapping[str, TensorType]) -> tuple[BucketSlice, ...]:
        """Return the bucket slice of each tensor, one per subgraph, with the parameter's shape."""
        ranges = self.ranges or [(0, types[tensor].elements) for tensor in tensors]
        return tuple(
            BucketSlice(tensor, offset, stop - start, start)
            for tensor, offset, (start, stop) in zip(tensors, self.starts, ranges)
        )


@dataclass(frozen=True, slots=True)
class SplitBucket:
    """Tensors with updates that are cut anywhere."""

    name: str
    subgraphs: tuple[UpdateSubgraph, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    groups: tuple[ParameterGroup, ...]
    whole_gradient: bool
    why: str


@dataclass(frozen=True, slots=True)
class WholeBucket:
    """Tensors with updates on whole tensors; cuts are on tensor boundaries."""

    name: str
    axis: str
    subgraphs: tuple[UpdateSubgraph, ...]
    owners: tuple[int, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    why: str

    def owned(self, position: int) -> Sharding:
        """Return the sharding of the tensor at a place of the bucket."""
        return Sharding.along(self.axis, OnMember(self.owners[position]))

    def run(self, position: int) -> Sharding:
        """The elements of one tensor in the bucket."""
        return Sharding.along(self.axis, FlatShard(self.cuts, self.offsets[position], self.offsets[position + 1]))


@dataclass(frozen=True, slots=True)
class ReplicatedBucket:
    """Tensors with gradients reduced, and updates run, on every rank."""

    name: str
    subgraphs: tuple[UpdateSubgraph, ...]
    why: str


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All buckets in the order of complete gradients, and the cap."""

    buckets: tuple[SplitBucket | WholeBucket | ReplicatedBucket, ...]
    cap: int

    def __repr__(self) -> str:
        return f"<Plan of {len(self.buckets)} buckets, at most {self.cap} bytes each>"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Rules that place a step's tensors on the ``ranks`` members of an axis.

    ``overrides``: (pattern of parameter names, partition), the first match counts. ``least``: minimum elements of a
    piece. ``cap``: in bytes, None for the default.
    """

    axis: str
    ranks: int
    partition: Partition = Partition.FLAT
    owners: Owners = Owners.LARGEST_FIRST
    rule: PartitionRule = PartitionRule.BALANCED
    least: int | None = None
    overrides: tuple[tuple[str, Partition], ...] = ()
    cap: int | None = None
    by_use: bool = False
    """Whether buckets follow the order in which parameters are used, not that in which gradients are complete."""
    persist: int = 0
    """Parameters of fewer elements are a kind of their own."""
    split_along: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter -> other axes along which its dimensions are sharded already: a kind of their own as well."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> its stage of a pipeline: the parameters of a stage share no bucket with others."""

    def of(self, name: str) -> Partition:
        """The partition asked for a parameter."""
        return next((kind for pattern, kind in self.overrides if fnmatchcase(name, pattern)), self.partition)

    @property
    def least_piece(self) -> int:
        return self.least if self.least is not None else LEAST_PIECE if self.rule is PartitionRule.CEIL else 1


def make_plan(
    training: TrainingGraph,
    updates: Updates,
    layout: StateLayout,
    copies: Mapping[str, ShardedState],
    weighed: Mapping[str, TensorType],
) -> ShardPlan:
    """Place every parameter of a step. ``weighed``: the types for packing; cuts follow the tensors' own types."""
    total = sum(weighed[gradient].nbytes for gradient in set(training.gradients.values()))
    placer = _Placer(layout, training.graph.types, weighed, updates)
    items = _items(training, updates, placer, copies)
    cap = _fitting(items, default_cap(total)) if layout.cap is None else layout.cap
    buckets: list[SplitBucket | WholeBucket | ReplicatedBucket] = []
    for number, bucket in enumerate(plan_buckets(items, cap)):
        name = f"b{number}"
        members = [updates.subgraphs[item.name] for item in bucket.items]
        mode = members[0].mode
        if mode is UpdateMode.SPLIT:
            buckets.append(_split(name, members, placer, bucket.why))
        elif mode is UpdateMode.WHOLE:
            buckets.append(_whole(name, members, placer, bucket.why))
        else:
            buckets.append(ReplicatedBucket(name, tuple(members), bucket.why))
    return ShardPlan(tuple(buckets), cap)


def _fitting(items: Sequence[Item], base: int) -> int:
    """The default cap, or a cap a little above at which the tensors of the commonest kind pack as well as they can."""
    kinds: dict[Hashable, list[int]] = {}
    for item in sorted(items, key=lambda item: item.order):
        if not item.unshared:
            kinds.setdefault(item.key, []).append(item.nbytes)
    return choose_cap(max(kinds.values(), key=sum), base) if kinds else base


def _items(
    training: TrainingGraph, updates: Updates, placer: _Placer, copies: Mapping[str, ShardedState]
) -> list[Item]:
    types, layout = placer.weighed, placer.layout
    makers = _made(training)
    used = _first_uses(training) if layout.by_use else {}
    items, gradients = [], set()
    for subgraph in updates.subgraphs.values():
        if subgraph.gradient in gradients:
            continue  # shared gradients are replicated, and reduced once
        gradients.add(subgraph.gradient)
        name = subgraph.parameter.tensor
        gradient, parameter = types[subgraph.gradient], types[name]
        travels = copies[name].dtype if name in copies else parameter.dtype
        persists = parameter.elements < layout.persist
        key = (
            subgraph.mode.value,
            placer.kind(name),
            subgraph.whole_gradient,
            gradient.dtype,
            parameter.dtype,
            travels,
            persists,
            layout.split_along.get(name, ()),
            layout.stages.get(name),
        )
        ready = makers.get(subgraph.gradient, -1)
        # Last used, first packed: as gradients are ready, whatever a tied tensor waits for.
        order = -used.get(name, -1) if layout.by_use else ready
        items.append(Item(name, gradient.elements, gradient.nbytes, key, ready, order, name in placer.sliced))
    return items


def _made(training: TrainingGraph) -> dict[str, int]:
    """Gradient -> place of the gradient's node."""
    wanted = set(training.gradients.values())
    nodes = enumerate(training.graph.nodes)
    return {name: position for position, node in nodes for name in node.outputs if name in wanted}


def _first_uses(training: TrainingGraph) -> dict[str, int]:
    """Parameter -> place of the first reader in the forward, or else in the backward."""
    names = {state.tensor for state in training.parameters}
    result: dict[str, int] = {}
    for position, node in enumerate(training.graph.nodes):
        for name in node.reads if node.phase is not Phase.UPDATE else ():
            if name in names:
                result.setdefault(name, position)
    return result


@dataclass(slots=True)
class _Placer:
    """Assigns owners of whole tensors and cuts of tensors sliced alone; then orders and cuts buckets."""

    layout: StateLayout
    types: Mapping[str, TensorType]
    weighed: Mapping[str, TensorType]
    updates: Updates
    owner: dict[str, int] = field(default_factory=dict)
    sliced: dict[str, list[int]] = field(default_factory=dict)
    """Parameter -> the cuts of its own that the ``ceil`` rule gives it."""

    def __post_init__(self) -> None:
        load = [0] * self.layout.ranks
        whole = []
        for name, subgraph in self.updates.subgraphs.items():
            pieces = self._pieces(self.weighed[name], name) if subgraph.mode is UpdateMode.SPLIT else []
            if len(pieces) > 1:
                begin = lightest_window(load, len(pieces))
                shares = self._pieces(self.types[name], name)
                self.sliced[name] = window_cuts(shares, begin, self.layout.ranks)
                for position, piece in enumerate(pieces):
                    load[begin + position] += piece
            elif subgraph.mode is UpdateMode.WHOLE or (
                subgraph.mode is UpdateMode.SPLIT and self.kind(name) is Partition.WHOLE
            ):
                whole.append(name)
        sizes = [self.weighed[name].elements for name in whole]
        self.owner = dict(zip(whole, assign(whole, sizes, load, self.layout.owners)))

    def _pieces(self, type: TensorType, name: str) -> list[int]:
        if self.layout.rule is not PartitionRule.CEIL or self.layout.of(name) is not Partition.ROWS:
            return []
        return ceil_pieces(type.dims, self.layout.ranks, self.layout.least_piece)

    def kind(self, name: str) -> Partition:
        """Return the partition of a tensor; under the ``ceil`` rule a tensor of a single piece is whole."""
        partition = self.layout.of(name)
        by_itself = partition is Partition.ROWS and self.layout.rule is PartitionRule.CEIL
        return Partition.WHOLE if by_itself and name not in self.sliced else partition

    def order(self, subgraphs: Sequence[UpdateSubgraph]) -> list[UpdateSubgraph]:
        if self.kind(subgraphs[0].parameter.tensor) is Partition.WHOLE:
            return sorted(subgraphs, key=lambda subgraph: self.owner[subgraph.parameter.tensor])
        return list(subgraphs)

    def cuts(self, subgraphs: Sequence[UpdateSubgraph]) -> list[int]:
        names = [subgraph.parameter.tensor for subgraph in subgraphs]
        if names[0] in self.sliced:
            return self.sliced[names[0]]
        shapes = [self.types[name] for name in names]
        sizes, ranks = [shape.elements for shape in shapes], self.layout.ranks
        kind = self.kind(names[0])
        if kind is Partition.WHOLE:
            return owner_cuts(sizes, [self.owner[name] for name in names], ranks)
        if kind is Partition.ROWS:
            rows = [shape.elements // max(shape.dims[0], 1) or 1 for shape in shapes]
            return row_cuts(sizes, rows, ranks, self.layout.least_piece)
        return flat_cuts(sum(sizes), ranks)


def _split(name: str, members: list[UpdateSubgraph], placer: _Placer, why: str) -> SplitBucket:
    by_class: dict[int, list[UpdateSubgraph]] = {}
    for subgraph in members:
        by_class.setdefault(subgraph.equivalence_class, []).append(subgraph)
    ordered = placer.order([subgraph for group in by_class.values() for subgraph in group])
    starts = offsets([placer.types[subgraph.parameter.tensor].elements for subgraph in ordered])
    cuts = tuple(placer.cuts(ordered))
    groups, position = [], 0
    for _, run in groupby(ordered, key=lambda subgraph: subgraph.equivalence_class):
        group = tuple(run)
        stop = position + len(group)
        whole = Sharding.along(placer.layout.axis, FlatShard(cuts, starts[position], starts[stop]))
        groups.append(ParameterGroup(group, tuple(starts[position:stop]), whole))
        position = stop
    return SplitBucket(name, tuple(ordered), tuple(starts), cuts, tuple(groups), members[0].whole_gradient, why)


def _whole(name: str, members: list[UpdateSubgraph], placer: _Placer, why: str) -> WholeBucket:
    sizes = {member.parameter.tensor: placer.types[member.gradient].elements for member in members}
    ordered = sorted(members, key=lambda subgraph: placer.owner[subgraph.parameter.tensor])
    owners = [placer.owner[subgraph.parameter.tensor] for subgraph in ordered]
    starts = offsets([sizes[subgraph.parameter.tensor] for subgraph in ordered])
    cuts = owner_cuts([sizes[subgraph.parameter.tensor] for subgraph in ordered], owners, placer.layout.ranks)
    return WholeBucket(name, placer.layout.axis, tuple(ordered), tuple(owners), tuple(starts), tuple(cuts), why)

"""Chooses the calls to fuse: keys, caps, and next-fit in the order in which calls are ready.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from gopt.analysis.look_through import data_axes, spans_data_axes
from gopt.analysis.partition import choose_cap, packing_bound
from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.passes.fuse_collectives.order import CallOrder
from gopt.records.pass_facts import FusedCalls
from gopt.records.placements import Sharding
from gopt.spmd.traffic import made_again

PACKED = ("AllReduce", "Reduce", "Broadcast")
"""Take any number of tensors as they are."""
ALONG_AXIS = ("ReduceScatter", "AllGather")
"""Along an axis they take one tensor, and become one call with cuts."""


@dataclass(frozen=True, slots=True)
class Key:
    """Properties shared by fused calls; ``root`` is -1 and ``reduce`` '' if absent."""

    kind: str
    group: str
    root: int
    dtype: str
    reduce: str
    sharding: Sharding
    """The members that make the call: one owner, or all."""
    stage: int = -1
    """The pipeline stage that makes the call in each of several micro-steps, 0 without stages; -1 for a call of the
    whole step. A member runs the stages of a micro-step in separate actions."""

    @classmethod
    def of(cls, graph: Graph, node: Node) -> Key:
        attributes = COLLECTIVES[node.op_type].resolve(node.attributes)
        dtype = attributes.get("dtype") or graph.type_of((*node.inputs, *node.outputs)[0]).dtype
        return cls(
            node.op_type,
            attributes["group"],
            attributes.get("root", -1),
            dtype,
            attributes.get("reduce", ""),
            node.sharding,
        )


@dataclass(frozen=True, slots=True)
class PackedItem:
    """A call that may be fused: the place in the order, and the place of the first reader."""

    node: Node
    key: Key
    nbytes: int
    place: int
    due: tuple[int, str]


@dataclass(slots=True)
class PackedBucket:
    """Calls that become one, and why the next call was left out."""

    items: list[PackedItem] = field(default_factory=list)
    nbytes: int = 0
    tensors: int = 0
    due: tuple[float, str] = (float("inf"), "")
    """The place of the first reader of any, and the value it reads."""
    why: str = ""
    alone: bool = False

    def add(self, item: PackedItem) -> None:
        self.items.append(item)
        self.nbytes += item.nbytes
        self.tensors += len(item.node.outputs)
        self.due = min(self.due, item.due)


@dataclass(frozen=True, slots=True)
class PackLimits:
    """Caps in bytes of a bucket and of a key's first bucket, and the most tensors; None: any number."""

    cap: int
    first: int
    tensors: int | None


@dataclass(frozen=True, slots=True)
class Packing:
    """The buckets of one key in the order they are ready, and the limits behind them."""

    key: Key
    limits: PackLimits
    buckets: tuple[PackedBucket, ...]

    @property
    def facts(self) -> FusedCalls:
        sizes, named = [item.nbytes for bucket in self.buckets for item in bucket.items], self.key
        return FusedCalls(
            named.kind, named.group, named.dtype, self.limits.cap, len(sizes), len(self.buckets),
            packing_bound(sizes, self.limits.cap), root=named.root if named.root >= 0 else None, reduce=named.reduce,
        )  # fmt: skip


class BoundCalls:
    """The calls of a graph that must not be fused. ``parts``: the values that ranks have in parts."""

    def __init__(self, graph: Graph, parts: Container[str]) -> None:
        self._graph, self._parts = graph, parts
        self._again = made_again(graph.nodes)

    def why(self, node: Node) -> str:
        """Return the reason why a call must not be fused, or ''."""
        if COLLECTIVES[node.op_type].pairwise:
            return "pairwise call"
        if "cuts" in node.attributes:
            return "cut bucket: planned with the cap of shard"
        if node.op_type not in (*PACKED, *ALONG_AXIS):
            return f"{node.op_type} calls are not packed"
        if not node.inputs or not all((*node.inputs, *node.outputs)):
            return "absent value"
        if id(node) in self._again:
            return "made again for later readers, so that no value lives until then"
        if node.op_type in ALONG_AXIS and node.made_by == "tensor-parallel":
            return "a mapping of a dimension: a packed call would not be a mapping of it"
        if node.op_type == "AllGather" and node.made_by == "statistics":
            return "rows of samples: ranks hold no parts of them"
        if node.op_type == "ReduceScatter" and not spans_data_axes(node, data_axes(self._graph)):
            return "a mapping of the source: members have parts of a dimension"
        return self._unlike(node)

    def _unlike(self, node: Node) -> str:
        """Return a reason that follows from the values of a call, or ''."""
        graph, parts = self._graph, self._parts
        unknown = [name for name in (*node.inputs, *node.outputs) if name in parts or not graph.type_of(name).static]
        if unknown:
            return f"the shape of {unknown[0]} is not the same on every rank, or unknown"
        if node.op_type in ALONG_AXIS and len(set(node.attributes["sizes"])) > 1:
            return "its members' slices differ"
        return ""


def item(graph: Graph, node: Node, order: CallOrder, weighed: Mapping[str, TensorType]) -> PackedItem:
    """A call as an item to pack; the size is the larger side's, in bytes of the types ``weighed``."""
    sides = [
        sum(weighed.get(name, graph.type_of(name)).nbytes for name in names) for names in (node.inputs, node.outputs)
    ]
    return PackedItem(node, Key.of(graph, node), max(sides), order.place[id(node)], order.due[id(node)])


def pack(items: Sequence[PackedItem], cap: int | None, initial: int | None, tensors: int | None) -> list[Packing]:
    """Buckets by key; ``cap`` None chooses a cap for each key from the sizes of its tensors."""
    ordered = sorted(items, key=lambda packed: (_first(packed), packed.place))
    result = []
    for _, run in groupby(ordered, key=_first):
        group = list(run)
        limit = choose_cap([packed.nbytes for packed in group]) if cap is None else cap
        limits = PackLimits(limit, limit if initial is None else min(initial, limit), tensors)
        result.append(Packing(group[0].key, limits, tuple(_next_fit(group, limits))))
    return result


def _first(packed: PackedItem) -> tuple[str, str, int, str, str, str, int]:
    key = packed.key
    return key.kind, key.group, key.root, key.dtype, key.reduce, str(key.sharding), key.stage


def _next_fit(items: Sequence[PackedItem], limits: PackLimits) -> list[PackedBucket]:
    """Fill one bucket at a time; a call of at least the cap goes alone, and the open bucket stays open."""
    done: list[PackedBucket] = []
    bucket, limit = PackedBucket(), limits.first
    for packed in items:
        if packed.nbytes >= limits.cap:
            why = "one tensor a call" if limits.cap == 0 else f"at least the cap of {limits.cap} bytes by itself"
            done.append(PackedBucket(why=f"{why}: {packed.node.outputs[0]}", alone=True))
            done[-1].add(packed)
            continue
        why = _full(bucket, packed, limit, limits.tensors) if bucket.items else ""
        if why:
            bucket.why, bucket, limit = why, PackedBucket(), limits.cap
        if not bucket.items:
            done.append(bucket)
        bucket.add(packed)
    return done


def _full(bucket: PackedBucket, packed: PackedItem, cap: int, tensors: int | None) -> str:
    """Return the reason why a call cannot join the open bucket, or ''."""
    due, value = bucket.due
    if due <= packed.place:
        # Every later call follows that reader too: nothing more can join this bucket.
        return f"one waits for the other: {value} is read before {packed.node.inputs[0]} is ready"
    if tensors is not None and bucket.tensors + len(packed.node.outputs) > tensors:
        return f"count cap: more than {tensors} tensors"
    if bucket.nbytes + packed.nbytes > cap:
        return f"cap: more than {cap} bytes"
    return ""

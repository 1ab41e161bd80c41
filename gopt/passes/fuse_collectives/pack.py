"""Chooses the calls that are fused: keys, caps, and next-fit in the order in which the calls are ready.

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

PACKED = ("AllReduce", "Reduce", "Broadcast")
"""Take any number of tensors as they are."""
ALONG_AXIS = ("ReduceScatter", "AllGather")
"""Along an axis they take one tensor, and become one call with cuts."""


@dataclass(frozen=True, slots=True)
class Key:
    """Properties that calls must share to be fused; ``root`` is -1 and ``reduce`` '' if there is none."""

    kind: str
    group: str
    root: int
    dtype: str
    reduce: str
    sharding: Sharding
    """The members that make the call: one owner, or all."""
    micro: bool = False
    """The call is made in each of several micro-steps."""

    @classmethod
    def of(cls, graph: Graph, node: Node) -> Key:
        known = COLLECTIVES[node.op_type].resolve(node.attributes)
        dtype = known.get("dtype") or graph.type_of((*node.inputs, *node.outputs)[0]).dtype
        return cls(node.op_type, known["group"], known.get("root", -1), dtype, known.get("reduce", ""), node.sharding)


@dataclass(frozen=True, slots=True)
class PackedItem:
    """A call that may be fused: its place in the order, and the place of its first reader."""

    node: Node
    key: Key
    nbytes: int
    place: int
    due: tuple[int, str]


@dataclass(slots=True)
class PackedBucket:
    """Calls that become one, and why the next one was not taken in."""

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
    """Caps in bytes of a bucket and of the first one of a key, and how many tensors it may hold; None: any number."""

    cap: int
    first: int
    tensors: int | None


@dataclass(frozen=True, slots=True)
class Packing:
    """The buckets of one key in the order they are ready, and the limits that shaped them."""

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


def bound_by(graph: Graph, node: Node, parts: Container[str]) -> str:
    """Return the reason why a call must not be fused; '' if it may be.

    ``parts``: the values of which ranks have parts.
    """
    if COLLECTIVES[node.op_type].pairwise:
        return "pairwise call"
    if "cuts" in node.attributes:
        return "cut bucket: planned with the cap of shard"
    if node.op_type not in (*PACKED, *ALONG_AXIS):
        return f"{node.op_type} calls are not packed"
    if not node.inputs or not all((*node.inputs, *node.outputs)):
        return "absent value"
    if node.op_type in ALONG_AXIS and node.made_by == "tensor-parallel":
        return "a mapping of a dimension: a packed call would not be a mapping of it"
    if node.op_type == "AllGather" and node.made_by == "statistics":
        return "rows of samples: ranks hold no parts of them"
    if node.op_type == "ReduceScatter" and not spans_data_axes(node, data_axes(graph)):
        return "a mapping of the source: members have parts of a dimension"
    unknown = [name for name in (*node.inputs, *node.outputs) if name in parts or not graph.type_of(name).static]
    if unknown:
        return f"the shape of {unknown[0]} is not the same on every rank, or unknown"
    if node.op_type in ALONG_AXIS and len(set(node.attributes["sizes"])) > 1:
        return "its members' slices differ"
    return ""


def item(graph: Graph, node: Node, order: CallOrder, weighed: Mapping[str, TensorType]) -> PackedItem:
    """A call as something to pack; its size is that of the larger side, in bytes of the types ``weighed``."""
    sides = [
        sum(weighed.get(name, graph.type_of(name)).nbytes for name in names) for names in (node.inputs, node.outputs)
    ]
    return PackedItem(node, Key.of(graph, node), max(sides), order.place[id(node)], order.due[id(node)])


def pack(items: Sequence[PackedItem], cap: int | None, first: int | None, tensors: int | None) -> list[Packing]:
    """Buckets by key; ``cap`` None chooses one for each key from the sizes of its tensors."""
    ordered = sorted(items, key=lambda each: (_first(each), each.place))
    result = []
    for _, run in groupby(ordered, key=_first):
        group = list(run)
        own = choose_cap([each.nbytes for each in group]) if cap is None else cap
        limits = PackLimits(own, own if first is None else min(first, own), tensors)
        result.append(Packing(group[0].key, limits, tuple(_next_fit(group, limits))))
    return result


def _first(each: PackedItem) -> tuple[str, str, int, str, str, str, bool]:
    key = each.key
    return key.kind, key.group, key.root, key.dtype, key.reduce, str(key.sharding), key.micro


def _next_fit(items: Sequence[PackedItem], limits: PackLimits) -> list[PackedBucket]:
    """Fill one bucket at a time; a call of at least the cap goes alone, and the open bucket stays open."""
    done: list[PackedBucket] = []
    held, limit = PackedBucket(), limits.first
    for each in items:
        if each.nbytes >= limits.cap:
            why = "one tensor a call" if limits.cap == 0 else f"at least the cap of {limits.cap} bytes by itself"
            done.append(PackedBucket(why=f"{why}: {each.node.outputs[0]}", alone=True))
            done[-1].add(each)
            continue
        why = _full(held, each, limit, limits.tensors) if held.items else ""
        if why:
            held.why, held, limit = why, PackedBucket(), limits.cap
        if not held.items:
            done.append(held)
        held.add(each)
    return done


def _full(held: PackedBucket, each: PackedItem, cap: int, tensors: int | None) -> str:
    """Return the reason why a call cannot join the open bucket; '' if it can."""
    due, value = held.due
    if due <= each.place:
        # Every later call follows that reader too: nothing more can join this bucket.
        return f"one waits for the other: {value} is read before {each.node.inputs[0]} is ready"
    if tensors is not None and held.tensors + len(each.node.outputs) > tensors:
        return f"count cap: more than {tensors} tensors"
    if held.nbytes + each.nbytes > cap:
        return f"cap: more than {cap} bytes"
    return ""

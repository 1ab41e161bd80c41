"""Buckets and cuts: tensors that share a call, and the rank that owns each element.

Pure functions; no graph is changed.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

MIB = 1 << 20
LEAST_PIECE = 8192
"""Default minimum size of a piece under the ``ceil`` rule, in elements."""


class Partition(str, Enum):
    """Positions at which a bucket of elementwise updates may be cut (contract section 1)."""

    FLAT = "flat"
    ROWS = "rows"
    WHOLE = "whole"


class Owners(str, Enum):
    """Rule for the owner of each uncut tensor."""

    LARGEST_FIRST = "largest-first"
    ROUND_ROBIN = "round-robin"
    IN_ORDER = "in-order"
    HASH = "hash"


class PartitionRule(str, Enum):
    """Rule for the positions of cuts.

    ``balanced``: near equal shares of the bucket. ``ceil``: each tensor separately, in equal pieces of whole rows, as
    parameter servers slice."""

    BALANCED = "balanced"
    CEIL = "ceil"


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to place.

    ``key``: only tensors with equal keys may share a bucket. ``ready``: when the tensor is complete. ``order``: the
    turn in packing. ``unshared``: the tensor shares no bucket."""

    name: str
    elements: int
    nbytes: int
    key: Hashable
    ready: int
    order: int
    unshared: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors in one flat array, in order, and why the bucket ended there."""

    items: tuple[Item, ...]
    why: str

    @property
    def elements(self) -> int:
        return sum(item.elements for item in self.items)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def default_cap(total: int) -> int:
    """Return the default bucket size in bytes: an eighth of the gradients, between 1 and 25 MiB."""
    return min(max(total // 8, MIB), 25 * MIB)


TRIES = 8
"""Caps that ``choose_cap`` weighs: from the default one up to less than twice as much."""


def choose_cap(sizes: Sequence[int], base: int | None = None) -> int:
    """Bytes of a bucket for tensors of these sizes, in order of readiness.

    The first of a few caps from ``base`` (the default cap) upwards under which the tensors fit into as few calls as any
    packing; ``base`` without such a cap, or for ``base`` 0. Linear in the number of tensors."""
    base = default_cap(sum(sizes)) if base is None else base
    caps = [base + base * step // TRIES for step in range(TRIES)] if base else []
    return next((cap for cap in caps if next_fit(sizes, cap) == packing_bound(sizes, cap)), base)


def packing_bound(sizes: Sequence[int], cap: int) -> int:
    """Calls needed by any packing of uncut tensors: the tensors of at least ``cap``, and ⌈rest / cap⌉."""
    if cap == 0:
        return len(sizes)
    rest = [size for size in sizes if size < cap]
    # A tensor without elements still has to travel with some call.
    return len(sizes) - len(rest) + max(-(-sum(rest) // cap), min(len(rest), 1))


def next_fit(sizes: Sequence[int], cap: int) -> int:
    """Calls when buckets are filled in order, and a tensor of at least ``cap`` goes alone without closing a bucket."""
    calls, filled = 0, -1
    for size in sizes:
        if size >= cap:
            calls += 1
        elif filled < 0 or filled + size > cap:
            calls, filled = calls + 1, size
        else:
            filled += size
    return calls


def plan_buckets(items: Sequence[Item], cap: int) -> list[Bucket]:
    """Fill buckets in the tensors' ``order``; a tensor of at least ``cap`` bytes goes alone.

    ``cap`` 0 puts every tensor in a bucket of its own. Buckets come back in order of completion."""
    done: list[Bucket] = []
    open_: dict[Hashable, list[Item]] = {}
    filled: dict[Hashable, int] = {}
    for item in sorted(items, key=lambda item: item.order):
        if cap == 0 or item.nbytes >= cap or item.unshared:
            why = "one tensor a call" if cap == 0 else f"at least the cap of {cap} bytes by itself"
            why = "cut by itself" if item.unshared else why
            done.append(Bucket((item,), why))
            continue
        waiting = open_.setdefault(item.key, [])
        if waiting and filled[item.key] + item.nbytes > cap:
            done.append(Bucket(tuple(waiting), f"the next tensor would exceed the cap of {cap} bytes"))
            waiting.clear()
        filled[item.key] = item.nbytes + (filled[item.key] if waiting else 0)
        waiting.append(item)
    done += [Bucket(tuple(items), "last bucket of its kind") for items in open_.values() if items]
    return sorted(done, key=lambda bucket: max(item.ready for item in bucket.items))


def assign(names: Sequence[str], sizes: Sequence[int], load: Sequence[int], rule: Owners) -> list[int]:
    """Owner of each tensor, for ranks that hold ``load`` elements already.

    ``largest-first``: largest first, each to the least loaded rank (ties: the lowest); at most 4/3 - 1/(3N) of the
    optimum. ``round-robin``: one after the other. ``in-order``: neighbours stay together, on to the next rank when a
    rank's share is full. ``hash``: by a stable digest of the tensor's name.
    """
    return _ASSIGN[rule](names, sizes, load)


def _largest_first(names: Sequence[str], sizes: Sequence[int], load: Sequence[int]) -> list[int]:
    heap = [(total, rank) for rank, total in enumerate(load)]
    heapq.heapify(heap)
    owner = [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda position: (-sizes[position], position)):
        lightest, owner[tensor] = heapq.heappop(heap)
        heapq.heappush(heap, (lightest + sizes[tensor], owner[tensor]))
    return owner


def _round_robin(names: Sequence[str], sizes: Sequence[int], load: Sequence[int]) -> list[int]:
    return [position % len(load) for position in range(len(names))]


def _in_order(names: Sequence[str], sizes: Sequence[int], load: Sequence[int]) -> list[int]:
    total, before, owner = sum(sizes), 0, []
    for size in sizes:
        # The rank whose equal share contains the middle of the tensor.
        owner.append(int((before + size / 2) * len(load) / total) if total else 0)
        before += size
    return [min(rank, len(load) - 1) for rank in owner]


def _hash(names: Sequence[str], sizes: Sequence[int], load: Sequence[int]) -> list[int]:
    digests = (hashlib.sha256(name.encode()).digest()[:8] for name in names)
    return [int.from_bytes(digest, "big") % len(load) for digest in digests]


_ASSIGN: dict[Owners, Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]]] = {
    Owners.LARGEST_FIRST: _largest_first,
    Owners.ROUND_ROBIN: _round_robin,
    Owners.IN_ORDER: _in_order,
    Owners.HASH: _hash,
}


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the start of each tensor in the bucket, followed by the end of the last tensor."""
    result = [0]
    for size in sizes:
        result.append(result[-1] + size)
    return result


def row_cuts(sizes: Sequence[int], rows: Sequence[int], ranks: int, least: int = 1) -> list[int]:
    """Cuts on row boundaries, each as near as possible to an equal share.

    ``rows`` holds the elements of one row (a slice of the first axis) of each tensor. A shard is off an equal share by
    at most one row at either end. No cut leaves fewer than ``least`` elements of a tensor on one side: the cut moves to
    the nearer end of the tensor instead."""
    starts = offsets(sizes)
    cuts = [0]
    for rank in range(1, ranks):
        wanted = starts[-1] * rank / ranks
        position = max(bisect_right(starts, wanted) - 1, 0)
        if position == len(sizes):
            cuts.append(starts[-1])
            continue
        start, stop = starts[position], starts[position + 1]
        cut = start + round((wanted - start) / rows[position]) * rows[position]
        if cut not in (start, stop) and min(cut - max(start, cuts[-1]), stop - cut) < least:
            cut = start if wanted - start < stop - wanted else stop
        cuts.append(max(cut, cuts[-1]))
    return [*cuts, starts[-1]]


def ceil_pieces(shape: Sequence[int], pieces: int, least: int) -> list[int]:
    """Elements of each piece of one tensor under the ``ceil`` rule (parameter servers' slicing).

    With E elements: k = max(1, min(pieces, E // least)), a piece has ceil(E / k) elements, rounded up to whole rows
    where there are at least two axes; the last is what is left. A scalar and an empty tensor are one piece.
    """
    elements = math.prod(shape)
    wanted = max(1, min(pieces, elements // max(least, 1)))
    size = -(-elements // wanted)
    if len(shape) > 1 and elements:
        row = elements // shape[0]
        size = -(-size // row) * row
    if not elements:
        return [0]
    return [min(size, elements - start) for start in range(0, elements, size)]


def window_cuts(pieces: Sequence[int], start: int, ranks: int) -> list[int]:
    """Cuts with the pieces on the ranks from ``start`` on, and nothing on the others."""
    ends = offsets(pieces)
    return [0] * (start + 1) + ends[1:] + [ends[-1]] * (ranks - start - len(pieces))


def lightest_window(load: Sequence[int], pieces: int) -> int:
    """Return the first of ``pieces`` neighbouring ranks with the least total load (ties: the lowest)."""
    totals = offsets(load)
    return min(range(len(load) - pieces + 1), key=lambda start: (totals[start + pieces] - totals[start], start))


def owner_cuts(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """Return cuts on tensor boundaries; the tensors must be in the order of their owners."""
    starts = offsets(sizes)
    return [*(starts[bisect_left(owners, rank)] for rank in range(ranks)), starts[-1]]

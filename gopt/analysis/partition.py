"""Buckets and cuts: which tensors travel together and who owns which elements. Pure; no graph is touched."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

MIB = 1 << 20


class Partition(str, Enum):
    """Where a bucket of elementwise updates may be cut (contract section 1)."""

    FLAT = "flat"
    ROWS = "rows"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to place: ``key`` says with which others it may share a bucket, ``ready`` when it is complete."""

    name: str
    elements: int
    nbytes: int
    key: Hashable
    ready: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel as one flat array, in order, and why the bucket ended where it did."""

    items: tuple[Item, ...]
    why: str

    @property
    def elements(self) -> int:
        return sum(item.elements for item in self.items)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def default_cap(total: int) -> int:
    """Bytes of a bucket when the user says nothing: an eighth of the gradients, between 1 and 25 MiB."""
    return min(max(total // 8, MIB), 25 * MIB)


TRIES = 8
"""Caps that ``choose_cap`` weighs: from the default one up to less than twice as much."""


def choose_cap(sizes: Sequence[int], base: int | None = None) -> int:
    """Bytes of a bucket for tensors of these sizes, in the order they are ready.

    The first of a few caps from ``base`` (the default cap) upwards under which the tensors fit into as few calls as
    any packing could hope for; ``base`` when there is none, or it is 0. Linear in the number of tensors.
    """
    base = default_cap(sum(sizes)) if base is None else base
    caps = [base + base * step // TRIES for step in range(TRIES)] if base else []
    return next((cap for cap in caps if next_fit(sizes, cap) == packing_bound(sizes, cap)), base)


def packing_bound(sizes: Sequence[int], cap: int) -> int:
    """Calls that no packing of uncut tensors can do without: those of at least ``cap``, and ⌈rest / cap⌉."""
    if cap == 0:
        return len(sizes)
    rest = [size for size in sizes if size < cap]
    # A tensor without elements still has to travel with some call.
    return len(sizes) - len(rest) + max(-(-sum(rest) // cap), min(len(rest), 1))


def next_fit(sizes: Sequence[int], cap: int) -> int:
    """Calls when buckets are filled in order, and a tensor of at least ``cap`` goes alone without closing one."""
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
    """Fill buckets in the order the tensors are ready; one of at least ``cap`` bytes goes alone.

    ``cap`` 0 puts every tensor in a bucket of its own. Buckets come back in the order they are complete.
    """
    done: list[Bucket] = []
    open_: dict[Hashable, list[Item]] = {}
    filled: dict[Hashable, int] = {}
    for item in sorted(items, key=lambda item: item.ready):
        if cap == 0 or item.nbytes >= cap:
            why = "one tensor a call" if cap == 0 else f"at least the cap of {cap} bytes by itself"
            done.append(Bucket((item,), why))
            continue
        held = open_.setdefault(item.key, [])
        if held and filled[item.key] + item.nbytes > cap:
            done.append(Bucket(tuple(held), f"the next tensor would pass the cap of {cap} bytes"))
            held.clear()
        filled[item.key] = item.nbytes + (filled[item.key] if held else 0)
        held.append(item)
    done += [Bucket(tuple(held), "no tensor of its kind is left") for held in open_.values() if held]
    return sorted(done, key=lambda bucket: max(item.ready for item in bucket.items))


def assign_largest_first(sizes: Sequence[int], ranks: int) -> list[int]:
    """Owner of each tensor: largest first, each to the least loaded rank (ties: the lowest)."""
    load = [0] * ranks
    owner = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        rank = min(range(ranks), key=lambda rank: (load[rank], rank))
        owner[place] = rank
        load[rank] += sizes[place]
    return owner


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each tensor starts in the bucket, and its end."""
    result = [0]
    for size in sizes:
        result.append(result[-1] + size)
    return result


def row_cuts(sizes: Sequence[int], rows: Sequence[int], ranks: int) -> list[int]:
    """Cuts on row boundaries, each as near as possible to an equal share.

    ``rows`` holds the elements of one row (a slice of the first axis) of each tensor. A shard is off an equal share by
    at most one row at either end.
    """
    starts = offsets(sizes)
    cuts = [0]
    for rank in range(1, ranks):
        wanted = starts[-1] * rank / ranks
        place = max(bisect_right(starts, wanted) - 1, 0)
        if place == len(sizes):
            cuts.append(starts[-1])
            continue
        cut = starts[place] + round((wanted - starts[place]) / rows[place]) * rows[place]
        cuts.append(max(cut, cuts[-1]))
    return [*cuts, starts[-1]]


def owner_cuts(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """Cuts on tensor boundaries for tensors that stand in the order of their owners."""
    starts = offsets(sizes)
    return [*(starts[bisect_left(owners, rank)] for rank in range(ranks)), starts[-1]]

"""Selections: ranges of each dimension of a tensor, also in another shape.

Sizes are known, and positions are counted in row-major order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of positions, in order."""
Selection: TypeAlias = tuple[Runs | None, ...]
"""For each dimension the selected ranges; None for all positions."""
Sizes: TypeAlias = tuple[int, ...]
MOST = 1 << 14
"""Ranges of a dimension up to which a selection is computed in another shape."""


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Ranges in order, neighbours as a single range."""
    result: list[tuple[int, int]] = []
    for start, stop in runs:
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return tuple(result)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The positions in any of some ranges, ascending."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return tuple(result)


def positions(runs: Runs) -> list[int]:
    """All positions of ranges, in order."""
    return [at for start, stop in runs for at in range(start, stop)]


def nth(runs: Runs, indices: np.ndarray) -> np.ndarray:
    """The positions of ranges at some places in a row, negative ones counted from the end; in the indices' type."""
    starts, stops = np.array(runs, np.int64).T
    behind = np.cumsum(stops - starts)
    counted = np.where(indices < 0, indices + behind[-1], indices)
    at = np.searchsorted(behind, counted, side="right")
    return np.asarray(stops[at] - (behind[at] - counted)).astype(indices.dtype)


def replaced(selection: Selection, dim: int, runs: Runs | None = None) -> Selection:
    """A selection with other ranges in a dimension, or with all positions."""
    return (*selection[:dim], runs, *selection[dim + 1 :])


def along(dim: int, runs: Runs, rank: int) -> Selection:
    """Ranges of a single dimension."""
    return replaced((None,) * rank, dim, runs)


def length(runs: Runs | None, size: int) -> int:
    """The number of selected positions of a dimension."""
    return size if runs is None else sum(stop - start for start, stop in runs)


def sizes_of(selection: Selection, shape: Sequence[int]) -> Sizes:
    """The shape of the selected elements."""
    return tuple(map(length, selection, shape))


def normal(selection: Iterable[Runs | None], shape: Sequence[int]) -> Selection:
    """A selection with None for whole dimensions."""
    return tuple(None if runs == ((0, size),) or not size else runs for runs, size in zip(selection, shape))


def inside(outer: Runs | None, inner: Runs | None) -> Runs | None:
    """A selection of selected positions, in positions of the whole dimension."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    result = []
    for low, high in inner:
        position = 0
        for start, stop in outer:
            begin, last = max(low - position, 0), min(high - position, stop - start)
            if begin < last:
                result.append((start + begin, start + last))
            position += stop - start
    return joined(result)


def shifted(runs: Runs | None, size: int, by: int) -> Runs:
    """Ranges of a dimension, counted from another start."""
    return joined((start + by, stop + by) for start, stop in (((0, size),) if runs is None else runs))


def within(outer: Runs | None, inner: Runs | None, size: int) -> Runs | None:
    """Selected positions of a dimension, counted in ``outer``."""
    if outer is None:
        return ((0, size),) if inner is None else inner
    if any(second[0] < first[1] for first, second in pairwise(sorted(outer))):
        return _within_repeats(outer, ((0, size),) if inner is None else inner)
    result = []
    for low, high in ((0, size),) if inner is None else inner:
        position, overlaps = 0, []
        for start, stop in outer:
            begin, last = max(low, start), min(high, stop)
            if begin < last:
                overlaps.append((begin, position + begin - start, position + last - start))
            position += stop - start
        result += [ends for _, *ends in sorted(overlaps)]
    exact = sum(stop - start for start, stop in result) == length(inner, size)
    return joined((start, stop) for start, stop in result) if exact else None


def _within_repeats(outer: Runs, inner: Runs) -> Runs | None:
    """Selected positions, counted in ``outer`` with repeated positions: ascending as far as possible."""
    if max(length(outer, 0), length(inner, 0)) > MOST:
        return None
    counts: dict[int, list[int]] = {}
    for count, at in enumerate(positions(outer)):
        counts.setdefault(at, []).append(count)
    result, last = list[tuple[int, int]](), -1
    for at in positions(inner):
        if at not in counts:
            return None
        behind = bisect_right(counts[at], last)
        last = counts[at][behind if behind < len(counts[at]) else 0]
        result.append((last, last + 1))
    return joined(result)


def flattened(selection: Selection, shape: Sequence[int]) -> Runs | None:
    """Selected elements in row-major order."""
    runs: list[tuple[int, int]] = [(0, 1)]
    for chosen, size in zip(selection, shape):
        if chosen is None:
            runs = [(start * size, stop * size) for start, stop in runs]
            continue
        if sum(stop - start for start, stop in runs) * len(chosen) > MOST:
            return None
        runs = [
            (row * size + low, row * size + high)
            for start, stop in runs for row in range(start, stop) for low, high in chosen
        ]  # fmt: skip
    return joined(runs)


def unflattened(runs: Runs, shape: Sequence[int]) -> Selection | None:
    """The selection of a shape with given elements in row-major order."""
    result: list[Runs | None] = []
    for size in reversed(shape[1:]):
        if all(start % size == 0 and stop % size == 0 for start, stop in runs):
            result.append(None)
            runs = joined((start // size, stop // size) for start, stop in runs)
            continue
        if sum((stop - 1) // size - start // size + 1 for start, stop in runs) > MOST:
            return None
        rows: dict[int, list[tuple[int, int]]] = {}
        for start, stop in runs:
            for row in range(start // size, (stop - 1) // size + 1):
                if row in rows and row != next(reversed(rows)):
                    return None  # elements of another row stand between
                rows.setdefault(row, []).append((max(start - row * size, 0), min(stop - row * size, size)))
        if len(set(map(tuple, rows.values()))) != 1:
            return None
        result.append(joined(next(iter(rows.values()))))
        runs = joined((row, row + 1) for row in rows)
    return normal((runs, *reversed(result)), shape) if shape else None


def groups(before: Sequence[int], after: Sequence[int], *, ones: bool = False) -> Iterator[tuple[slice, slice]]:
    """Dimensions of two shapes of as many elements, joined or divided together; ``ones``: dimensions of
    length 1 belong to dimensions in front, not to dimensions behind."""
    at = to = 0
    while at < len(before) or to < len(after):
        begin, second = at, to
        product_before = right = 1
        while product_before != right or at == begin or to == second:
            if to == len(after) or (at < len(before) and (at == begin or product_before < right)):
                if at == len(before):
                    break
                product_before, at = product_before * before[at], at + 1
            else:
                right, to = right * after[to], to + 1
        while at < len(before) and before[at] == 1 and (ones or to == len(after)):
            at += 1
        while to < len(after) and after[to] == 1 and (ones or at == len(before)):
            to += 1
        yield slice(begin, at), slice(second, to)


@lru_cache(1 << 12)
def through(before: Sequence[int], selection: Selection, after: Sequence[int]) -> Selection | None:
    """The selection of the same elements in another shape."""
    if 0 in before or prod(before) != prod(after):
        return None
    result: list[Runs | None] = []
    for old, new in groups(before, after):
        if all(runs is None for runs in selection[old]):
            result += [None] * (new.stop - new.start)
            continue
        runs = flattened(selection[old], before[old])
        moved = None if runs is None or not after[new] else unflattened(runs, after[new])
        if moved is None:
            return None
        result += moved
    return tuple(result)


@lru_cache(1 << 12)
def wholes(before: Sizes, selection: Selection, part: Sizes) -> tuple[tuple[Sizes, Selection], ...]:
    """The shapes of a tensor in which selected elements have the shape ``part``, each with the selection, the fewest
    ranges first. Ranks ask the same again and again."""
    return tuple(_wholes_of(before, selection, part))


def _wholes_of(before: Sizes, selection: Selection, part: Sizes) -> Iterator[tuple[Sizes, Selection]]:
    local = sizes_of(selection, before)
    if 0 in local or 0 in before or prod(local) != prod(part):
        return
    behind, front = (list(groups(local, part, ones=ones)) for ones in (False, True))
    yield from _wholes(before, selection, part, behind)
    if front != behind:
        yield from _wholes(before, selection, part, front)
    for at, ((old, new), (old_behind, new_behind)) in enumerate(pairwise(behind)):
        if prod(local[old]) == 1 and any(runs is not None for runs in selection[old]):
            both = slice(old.start, old_behind.stop), slice(new.start, new_behind.stop)
            yield from _wholes(before, selection, part, [*behind[:at], both, *behind[at + 2 :]])


def _wholes(
    before: Sequence[int], selection: Selection, part: Sequence[int], pairs: Sequence[tuple[slice, slice]]
) -> Iterator[tuple[Sizes, Selection]]:
    rows: list[list[tuple[Sizes, Selection]]] = []
    for old, new in pairs:
        sizes = tuple(part[new])
        if all(runs is None for runs in selection[old]):
            rows.append([(sizes, (None,) * len(sizes))])
            continue
        runs, choices = flattened(selection[old], before[old]), []
        whole, count = prod(before[old]), prod(sizes)
        for dim in sorted(range(len(sizes)), key=lambda dim: sizes[dim] == 1) if runs is not None else ():
            if sizes[dim] * whole % count:
                continue
            shape = (*sizes[:dim], sizes[dim] * whole // count, *sizes[dim + 1 :])
            moved = unflattened(runs, shape) if runs is not None else None
            if moved is not None and sizes_of(moved, shape) == sizes:
                choices.append((shape, moved))
        rows.append(sorted(choices, key=lambda choice: sum(len(runs) for runs in choice[1] if runs is not None)))
    stack: list[tuple[int, Sizes, Selection]] = [(0, (), ())]
    while stack:
        at, shape, chosen = stack.pop()
        if at == len(rows):
            yield shape, chosen
            continue
        stack += [(at + 1, (*shape, *sizes), (*chosen, *moved)) for sizes, moved in reversed(rows[at])]

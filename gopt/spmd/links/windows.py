"""Operators that slide along a dimension of places: convolutions, their gradients, pools.

To make some places of the result, a member needs a window of the operand: from the first place read for the first of
them to the last place read for the last. What is beside the dimension is in the window, so that no member pads: all of
them run the operator without pads along that dimension.

A transposed convolution is the dual: each operand place adds to a window of the result, so a member makes terms. The
gradient of a weight is a convolution with the (split) gradient of the result as kernel: each member has terms of a sum,
from the same operand window as in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gopt.operators.dims.link import OperatorUse, Slot, Strategy
from gopt.operators.dims.windows import Sliding, paddings, plain_mean, slices, sliding
from gopt.records.placements import REPLICATED, Partial, Placement, Shard, Window, WindowTerms
from gopt.spmd.halo import shared_like, window

_LOWEST = frozenset({"float16", "float32", "float64", "int8", "uint8"})
"""Types with a lowest number that a border may hold."""


def _placed(slot: Slot, placement: Shard | Window, count: int) -> int | None:
    """Return the spatial dimension in which an operand or result is split; None for other dimensions."""
    if placement.dim < 2 or (isinstance(placement, Shard) and placement.runs > 1):
        return None
    return placement.dim


def _first(operator: OperatorUse, placement: Placement, second: Placement = REPLICATED) -> tuple[Placement, ...]:
    return (placement, second, *[REPLICATED] * (len(operator.operands) - 2))[: len(operator.operands)]


def _shares(slide: Sliding, slot: Slot, placement: Shard | Window) -> list[tuple[int, ...]]:
    """Return possible sizes of the result for the placement of an operand, or of the result."""
    if slot.result:
        return [placement.sizes]
    if isinstance(placement, Window):
        sizes = slide.sizes(placement.ranges)
        return [] if sizes is None else [sizes]
    exact = slide.sizes(tuple(map(placement.part, range(len(placement.sizes)))))
    near = shared_like(placement.sizes, slide.made)
    return list(dict.fromkeys(share for share in (exact, near) if share is not None))


def _filled(sizes: Sequence[int]) -> bool:
    return min(sizes) > 0


def _slid(operator: OperatorUse, slot: Slot, placement: Shard | Window, dim: int, border: str) -> Iterator[Strategy]:
    """Places of the result, each member's from its window of operand 0."""
    slide = sliding(operator, dim)
    if slide is None or (slot.place and not slot.result):
        return
    for sizes in _shares(slide, slot, placement):
        if _filled(sizes):
            read = window(dim, slide.ranges(sizes), slide.length, border)
            shard = Shard(dim, sizes)
            results = tuple(shard if type is not None else REPLICATED for type in operator.results)
            masked = len(operator.results) > 1 and operator.results[1] is not None
            yield Strategy(_first(operator, read), results, masked)


def convolution(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Places of the result; and, where the kernel is split, terms of a sum."""
    dim = _placed(slot, placement, operator.rank(0))
    if dim is None:
        return
    if slot.result or slot.place == 0:
        yield from _slid(operator, slot, placement, dim, "zeros")
    slide = sliding(operator, dim)
    if slide is None or operator.has(2) or slot.result:
        return
    turned = slide.turned
    shares: list[tuple[int, ...]] = []
    if slot.place == 1 and isinstance(placement, Shard):
        shares = [placement.sizes]
    elif slot.place == 0:
        shares = _shares(turned, slot, placement)
    for sizes in shares:
        if _filled(sizes):
            read = window(dim, turned.ranges(sizes), slide.length)
            yield Strategy(_first(operator, read, Shard(dim, sizes)), (Partial("sum"),))


def transposed(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Split by places of operand 0, each adding to a window of the result."""
    dim = _placed(slot, placement, operator.rank(0))
    slide = sliding(operator, dim) if dim is not None else None
    if dim is None or slide is None or operator.has(2) or slot.result or slot.place or not _filled(placement.sizes):
        return
    if isinstance(placement, Shard):
        yield Strategy(_first(operator, placement), (WindowTerms(dim, slide.ranges(placement.sizes), slide.length),))


def max_pool(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Places of the result; padding is never the largest, as long as the window contains other elements.

    Places of the selected elements are counted in row-major order only.
    """
    dim, type = _placed(slot, placement, operator.rank(0)), operator.operands[0]
    if dim is None or type is None or type.dtype not in _LOWEST or operator.attributes.get("storage_order", 0):
        return
    slides = [sliding(operator, axis) for axis in range(2, operator.rank(0))]
    if all(slide is not None and (slide.inside or slide.seeing) for slide in slides):
        yield from _slid(operator, slot, placement, dim, "lowest")


def average_pool(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Split by places of the result, if padding is not read, or is counted as zeros."""
    dim = _placed(slot, placement, operator.rank(0))
    slide = sliding(operator, dim) if dim is not None else None
    if dim is None or slide is None or not plain_mean(operator, slide):
        return
    yield from _slid(operator, slot, placement, dim, "zeros")


def norm_pool(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """LpPool: zeros beside the operand add nothing to a sum of powers."""
    dim = _placed(slot, placement, operator.rank(0))
    if dim is not None:
        yield from _slid(operator, slot, placement, dim, "zeros")


def transpose(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Move a window to another dimension: the operand of a weight's gradient is a window."""
    if isinstance(placement, Window) and not slot.result:
        perm = list(operator.attributes.get("perm") or reversed(range(operator.rank(0))))
        yield Strategy((placement,), (replace(placement, dim=perm.index(placement.dim)),))


def sliced(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Slice: each result place is an operand place, on the member with this place."""
    rows = slices(operator)
    if rows is not None and placement.dim in rows and not slot.place:
        start, step = rows[placement.dim]
        yield from _taken(operator, slot, placement, step, -start)


def padded(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Pad with zeros: the windows of the first and the last member contain the padding."""
    added = paddings(operator)
    if added is not None and not slot.place:
        yield from _taken(operator, slot, placement, 1, added[placement.dim][0])


def _taken(operator: OperatorUse, slot: Slot, placement: Shard | Window, step: int, pad: int) -> Iterator[Strategy]:
    """Split by places of the result, each a place of the operand, or padding."""
    dim, length, result = placement.dim, operator.size(0, placement.dim), operator.made()[placement.dim]
    if (isinstance(placement, Shard) and placement.runs > 1) or not result or not length:
        return
    slide = Sliding(1, step, 1, pad, 0, length, result)
    shares = _shares(slide, slot, placement)
    if isinstance(placement, Shard) and not slot.result:
        shares = [slide.there(placement), *shares]
    for sizes in dict.fromkeys(shares):
        yield Strategy(_first(operator, window(dim, slide.ranges(sizes), length)), (Shard(dim, sizes),))


WINDOWED = {
    "Conv": convolution, "ConvTranspose": transposed, "MaxPool": max_pool, "AveragePool": average_pool,
    "LpPool": norm_pool, "Transpose": transpose, "Slice": sliced, "Pad": padded,
}  # fmt: skip
"""Operator -> how it is split along a dimension of places."""

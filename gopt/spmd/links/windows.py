"""Operators that slide along a dimension of places: convolutions, their gradients, pools.

Result place ``o`` reads places ``o * stride - pad + t * dilation`` of the operand, for ``t`` below ``kernel``. To make
some places of the result, a member needs a window of the operand: from the first place read for the first of them to
the last place read for the last. What is beside the dimension is in the window, so that no member pads: all of them run
the operator without pads along that dimension.

A transposed convolution is the dual: each operand place adds to a window of the result, so a member makes terms. The
gradient of a weight is a convolution with the (split) gradient of the result as kernel: each member has terms of a sum,
from the same operand window as in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gopt.operators.dims.link import OperatorUse, Slot, Strategy
from gopt.operators.kinds import CONVOLUTIONS
from gopt.records.placements import REPLICATED, Partial, Placement, Ranges, Shard, Window, WindowTerms
from gopt.spmd.halo import shared_like, window

_LOWEST = frozenset({"float16", "float32", "float64", "int8", "uint8"})
"""Types with a lowest number that a border may hold."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding of an operator along a dimension; ``made``: places of the result, ``length``: of the operand."""

    kernel: int
    stride: int
    dilation: int
    pad: int
    behind: int
    length: int
    made: int

    def read(self, start: int, stop: int) -> tuple[int, int]:
        """The places that result places ``[start, stop)`` read."""
        return start * self.stride - self.pad, (stop - 1) * self.stride - self.pad + self.extent

    @property
    def extent(self) -> int:
        """Return the number of operand places from the first to the last read for a result place, both included."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def inside(self) -> bool:
        """Whether nothing beside the dimension is read."""
        start, stop = self.read(0, self.made)
        return start >= 0 and stop <= self.length

    @property
    def seeing(self) -> bool:
        """Whether each result place reads some place that there is."""
        for start in range(-self.pad, self.made * self.stride - self.pad, self.stride):
            step = max(-(start // self.dilation), 0)  # the first that is not in front
            if step >= self.kernel or start + step * self.dilation >= self.length:
                return False
        return True

    @property
    def turned(self) -> Sliding:
        """Exchange kernel and result, for the gradient of a weight."""
        return replace(self, kernel=self.made, made=self.kernel, stride=self.dilation, dilation=self.stride)

    def ranges(self, sizes: Sequence[int]) -> Ranges:
        """The windows for result places shared out in ``sizes``; empty for none."""
        ranges, start = [], 0
        for size in sizes:
            low = start * self.stride - self.pad
            ranges.append(self.read(start, start + size) if size else (low, low))
            start += size
        return tuple(ranges)

    def there(self, shard: Shard) -> tuple[int, ...]:
        """Return how many result places each member can compute from its part alone, if each result place reads one
        place."""
        ends = [-((-stop - self.pad) // self.stride) for _, stop in map(shard.part, range(len(shard.sizes)))]
        ends = [0, *(min(max(end, 0), self.made) for end in ends[:-1]), self.made]
        return tuple(stop - start for start, stop in pairwise(ends))

    def sizes(self, ranges: Ranges) -> tuple[int, ...] | None:
        """Return the result places of windows, the inverse of ``ranges``; None unless they are windows of parts."""
        counts = []
        for start, stop in ranges:
            steps, rest = divmod(stop - start - self.extent, self.stride)
            counts.append(steps + 1 if start < stop else 0)
            if rest and start < stop:
                return None
        sizes = tuple(counts)
        return sizes if sum(sizes) == self.made and min(sizes) >= 0 and self.ranges(sizes) == ranges else None


def sliding(operator: OperatorUse, dim: int) -> Sliding | None:
    """Return how an operator slides along a spatial dimension; None if not expressible."""
    attributes, at, transposed = operator.attributes, dim - 2, operator.op_type == "ConvTranspose"
    length, result = operator.size(0, dim), operator.made()[dim]
    weights = operator.dims(1) if operator.op_type in CONVOLUTIONS else ()
    kernel = weights[dim] if weights else attributes["kernel_shape"][at]
    stride, dilation = (_each(attributes, key, at, 1) for key in ("strides", "dilations"))
    if transposed:
        if attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or attributes.get("output_shape"):
            return None
        length, result = result, length
    extent = (kernel - 1) * dilation + 1
    before, behind = pads(operator, dim, stride, extent, length, result)
    slide = Sliding(kernel, stride, dilation, before, behind, length, result)
    if min(length, result, kernel) < 1 or min(before, behind) < 0:
        return None
    if transposed:  # its result is cropped on the last side, or padded
        return slide
    rounded = attributes.get("ceil_mode", 0)
    if not rounded and result != (length + before + behind - extent) // stride + 1:
        return None
    return slide if (result - 1) * stride < length + before else None


def pads(operator: OperatorUse, dim: int, stride: int, extent: int, length: int, result: int) -> tuple[int, int]:
    """Return the padding before and after a dimension."""
    attributes, at, dims = operator.attributes, dim - 2, operator.rank(0) - 2
    auto = attributes.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        total = max((result - 1) * stride + extent - length, 0)
        return (total // 2, total - total // 2) if auto == "SAME_UPPER" else (total - total // 2, total // 2)
    amounts = attributes.get("pads") if auto == "NOTSET" else None
    return (amounts[at], amounts[at + dims]) if amounts else (0, 0)


def _each(attributes: object, key: str, at: int, default: int) -> int:
    values = attributes.get(key) if isinstance(attributes, dict) else None
    return int(values[at]) if values else default


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


def plain_mean(operator: OperatorUse, slide: Sliding) -> bool:
    """Return whether all means are of equally many numbers, along a dimension."""
    counted = operator.op_type == "AveragePool" and operator.attributes.get("count_include_pad", 0)
    padded = slide.read(0, slide.made)[1] <= slide.length + slide.behind
    return slide.inside or (bool(counted) and padded)


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


def slices(operator: OperatorUse) -> dict[int, tuple[int, int]] | None:
    """Return dimension -> start and step of a Slice; None if unknown, or backwards."""
    attributes, rank = operator.attributes, operator.rank(0)
    rows: list[Sequence[int] | None] = []
    for index, key in enumerate(("starts", "ends", "axes", "steps"), 1):
        value = operator.constant(index) if operator.has(index) else None
        if operator.has(index) and value is None:
            return None
        rows.append(value.tolist() if value is not None else attributes.get(key))
    starts, ends, axes, steps = rows
    if starts is None or ends is None:
        return None
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    cuts = {}
    for axis, start, step in zip(axes, starts, steps):
        length = operator.size(0, axis % rank)
        if step < 1:
            return None
        cuts[axis % rank] = (min(max(start + length if start < 0 else start, 0), length), step)
    return cuts


def padded(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Pad with zeros: the windows of the first and the last member contain the padding."""
    added = paddings(operator)
    if added is not None and not slot.place:
        yield from _taken(operator, slot, placement, 1, added[placement.dim][0])


def paddings(operator: OperatorUse) -> list[tuple[int, int]] | None:
    """Return the padding of a Pad before and after each dimension; None if unknown or not zeros."""
    rank, attrs = operator.rank(0), operator.attributes
    arrays = [operator.constant(index) if operator.has(index) else None for index in range(1, 4)]
    if any(operator.has(index) and value is None for index, value in enumerate(arrays, 1)):
        return None
    number, chosen = arrays[1], arrays[2]
    if attrs.get("mode", "constant") != "constant" or attrs.get("value", 0.0) or (number is not None and number.any()):
        return None
    pads = attrs["pads"] if arrays[0] is None else arrays[0].tolist()
    axes = range(rank) if chosen is None else [int(axis) % rank for axis in chosen.reshape(-1)]
    amounts = [(0, 0)] * rank
    for at, axis in enumerate(axes):
        amounts[axis] = (int(pads[at]), int(pads[at + len(axes)]))
    return amounts


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

"""Operators that slide along a dimension of places: convolutions, their gradients, pools.

Result place ``o`` reads places ``o * stride - pad + t * dilation`` of the operand, for ``t`` below ``kernel``. To make
some places of the result, a member needs a window of the operand: from the first place that the first of them reads to
the last that the last reads. What is beside the dimension is in the window, so that no member pads: all of them run
the operator without pads along that dimension.

A transposed convolution is the dual: what it reads in one place it adds to a window of the result, so that a member
makes terms. The gradient of a weight is a convolution whose kernel is the gradient of the result, which is split: each
member has terms of a sum, from the same window of the operand as in the forward.
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
    """Sliding of an operator along one dimension; ``made``: places of the result, ``length``: of the operand."""

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
        """Places from the first to the last that one result place reads."""
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
        """Kernel and result exchanged: the gradient of a weight is made by them."""
        return replace(self, kernel=self.made, made=self.kernel, stride=self.dilation, dilation=self.stride)

    def ranges(self, sizes: Sequence[int]) -> Ranges:
        """The windows for result places that are shared out in ``sizes``; empty for none."""
        found, start = [], 0
        for size in sizes:
            low = start * self.stride - self.pad
            found.append(self.read(start, start + size) if size else (low, low))
            start += size
        return tuple(found)

    def there(self, shard: Shard) -> tuple[int, ...]:
        """Return how many result places each member can compute from its part alone, if each reads one place."""
        ends = [-((-stop - self.pad) // self.stride) for _, stop in map(shard.part, range(len(shard.sizes)))]
        ends = [0, *(min(max(end, 0), self.made) for end in ends[:-1]), self.made]
        return tuple(stop - start for start, stop in pairwise(ends))

    def sizes(self, ranges: Ranges) -> tuple[int, ...] | None:
        """The inverse: which result places have these windows; None where they are not windows of parts."""
        found = []
        for start, stop in ranges:
            steps, rest = divmod(stop - start - self.extent, self.stride)
            found.append(steps + 1 if start < stop else 0)
            if rest and start < stop:
                return None
        sizes = tuple(found)
        return sizes if sum(sizes) == self.made and min(sizes) >= 0 and self.ranges(sizes) == ranges else None


def sliding(operator: OperatorUse, dim: int) -> Sliding | None:
    """Return how an operator slides along a spatial dimension; None if that cannot be expressed."""
    given, at, transposed = operator.attributes, dim - 2, operator.op_type == "ConvTranspose"
    length, made = operator.size(0, dim), operator.made()[dim]
    weights = operator.dims(1) if operator.op_type in CONVOLUTIONS else ()
    kernel = weights[dim] if weights else given["kernel_shape"][at]
    stride, dilation = (_each(given, key, at, 1) for key in ("strides", "dilations"))
    if transposed:
        if given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or given.get("output_shape"):
            return None
        length, made = made, length
    extent = (kernel - 1) * dilation + 1
    before, behind = pads(operator, dim, stride, extent, length, made)
    found = Sliding(kernel, stride, dilation, before, behind, length, made)
    if min(length, made, kernel) < 1 or min(before, behind) < 0:
        return None
    if transposed:  # its result is cropped on the last side, or padded
        return found
    rounded = given.get("ceil_mode", 0)
    if not rounded and made != (length + before + behind - extent) // stride + 1:
        return None
    return found if (made - 1) * stride < length + before else None


def pads(operator: OperatorUse, dim: int, stride: int, extent: int, length: int, made: int) -> tuple[int, int]:
    """Return the padding before and after a dimension."""
    given, at, places = operator.attributes, dim - 2, operator.rank(0) - 2
    auto = given.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        total = max((made - 1) * stride + extent - length, 0)
        return (total // 2, total - total // 2) if auto == "SAME_UPPER" else (total - total // 2, total // 2)
    found = given.get("pads") if auto == "NOTSET" else None
    return (found[at], found[at + places]) if found else (0, 0)


def _each(given: object, key: str, at: int, default: int) -> int:
    found = given.get(key) if isinstance(given, dict) else None
    return int(found[at]) if found else default


def _placed(slot: Slot, placement: Shard | Window, count: int) -> int | None:
    """Return the spatial dimension in which an operand or result is split; None if it is another one."""
    if placement.dim < 2 or (isinstance(placement, Shard) and placement.runs > 1):
        return None
    return placement.dim


def _first(operator: OperatorUse, first: Placement, second: Placement = REPLICATED) -> tuple[Placement, ...]:
    return (first, second, *[REPLICATED] * (len(operator.operands) - 2))[: len(operator.operands)]


def _shares(slide: Sliding, slot: Slot, placement: Shard | Window) -> list[tuple[int, ...]]:
    """Sizes of the result that go with what one operand, or the result, has."""
    if slot.result:
        return [placement.sizes]
    if isinstance(placement, Window):
        found = slide.sizes(placement.ranges)
        return [] if found is None else [found]
    exact = slide.sizes(tuple(map(placement.part, range(len(placement.sizes)))))
    near = shared_like(placement.sizes, slide.made)
    return list(dict.fromkeys(each for each in (exact, near) if each is not None))


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
            made = Shard(dim, sizes)
            results = tuple(made if type is not None else REPLICATED for type in operator.results)
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
    """Places of operand 0, each of which adds to a window of the result."""
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
    slides = [sliding(operator, each) for each in range(2, operator.rank(0))]
    if all(slide is not None and (slide.inside or slide.seeing) for slide in slides):
        yield from _slid(operator, slot, placement, dim, "lowest")


def average_pool(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Places of the result, where those beside the operand are not read, or are counted as zeros."""
    dim = _placed(slot, placement, operator.rank(0))
    slide = sliding(operator, dim) if dim is not None else None
    if dim is None or slide is None or not plain_mean(operator, slide):
        return
    yield from _slid(operator, slot, placement, dim, "zeros")


def plain_mean(operator: OperatorUse, slide: Sliding) -> bool:
    """Return whether every mean is one of as many numbers, along a dimension."""
    counted = operator.op_type == "AveragePool" and operator.attributes.get("count_include_pad", 0)
    padded = slide.read(0, slide.made)[1] <= slide.length + slide.behind
    return slide.inside or (bool(counted) and padded)


def norm_pool(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """LpPool: zeros beside the operand add nothing to a sum of powers."""
    dim = _placed(slot, placement, operator.rank(0))
    if dim is not None:
        yield from _slid(operator, slot, placement, dim, "zeros")


def transpose(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """A window, where its dimension goes: the operand of a weight's gradient is one."""
    if isinstance(placement, Window) and not slot.result:
        perm = list(operator.attributes.get("perm") or reversed(range(operator.rank(0))))
        yield Strategy((placement,), (replace(placement, dim=perm.index(placement.dim)),))


def sliced(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Slice: each place of the result is one of the operand, on the member that has it."""
    rows = slices(operator)
    if rows is not None and placement.dim in rows and not slot.place:
        start, step = rows[placement.dim]
        yield from _taken(operator, slot, placement, step, -start)


def slices(operator: OperatorUse) -> dict[int, tuple[int, int]] | None:
    """Dimension -> the first place that a Slice takes and how far the next is; None where that is not known, or where
    it goes backwards."""
    given, rank = operator.attributes, operator.rank(0)
    rows: list[Sequence[int] | None] = []
    for place, key in enumerate(("starts", "ends", "axes", "steps"), 1):
        value = operator.constant(place) if operator.has(place) else None
        if operator.has(place) and value is None:
            return None
        rows.append(value.tolist() if value is not None else given.get(key))
    starts, ends, axes, steps = rows
    if starts is None or ends is None:
        return None
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    found = {}
    for axis, start, step in zip(axes, starts, steps):
        length = operator.size(0, axis % rank)
        if step < 1:
            return None
        found[axis % rank] = (min(max(start + length if start < 0 else start, 0), length), step)
    return found


def padded(operator: OperatorUse, slot: Slot, placement: Shard | Window) -> Iterator[Strategy]:
    """Pad with zeros: what is added is beside the windows of the first and the last member."""
    added = paddings(operator)
    if added is not None and not slot.place:
        yield from _taken(operator, slot, placement, 1, added[placement.dim][0])


def paddings(operator: OperatorUse) -> list[tuple[int, int]] | None:
    """Return the padding of a Pad before and after each dimension; None if it is unknown or not zeros."""
    rank, given = operator.rank(0), operator.attributes
    known = [operator.constant(place) if operator.has(place) else None for place in range(1, 4)]
    if any(operator.has(place) and value is None for place, value in enumerate(known, 1)):
        return None
    number, chosen = known[1], known[2]
    if given.get("mode", "constant") != "constant" or given.get("value", 0.0) or (number is not None and number.any()):
        return None
    pads = given["pads"] if known[0] is None else known[0].tolist()
    axes = range(rank) if chosen is None else [int(axis) % rank for axis in chosen.reshape(-1)]
    found = [(0, 0)] * rank
    for place, axis in enumerate(axes):
        found[axis] = (int(pads[place]), int(pads[place + len(axes)]))
    return found


def _taken(operator: OperatorUse, slot: Slot, placement: Shard | Window, step: int, pad: int) -> Iterator[Strategy]:
    """Places of the result, each of which is one place of the operand, or one beside it."""
    dim, length, made = placement.dim, operator.size(0, placement.dim), operator.made()[placement.dim]
    if (isinstance(placement, Shard) and placement.runs > 1) or not made or not length:
        return
    slide = Sliding(1, step, 1, pad, 0, length, made)
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

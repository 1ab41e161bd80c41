"""How operators slide along a dimension: convolutions, their gradients, pools, paddings and slices.

Result place ``o`` reads places ``o * stride - pad + t * dilation`` of the operand, for ``t`` below ``kernel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gopt.operators.dims.link import OperatorUse
from gopt.operators.kinds import CONVOLUTIONS
from gopt.records.placements import Ranges, Shard


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
    def still(self) -> bool:
        """Whether results stand where the operand stands."""
        return (self.kernel, self.stride, self.pad, self.length) == (1, 1, 0, self.made)

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


def plain_mean(operator: OperatorUse, slide: Sliding) -> bool:
    """Return whether all means are of equally many numbers, along a dimension."""
    counted = operator.op_type == "AveragePool" and operator.attributes.get("count_include_pad", 0)
    padded = slide.read(0, slide.made)[1] <= slide.length + slide.behind
    return slide.inside or (bool(counted) and padded)


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


def mean_counts(operator: OperatorUse) -> np.ndarray | None:
    """Return the correction factor of a mean that counts zeros, for each place of the result; None where windows reach
    beyond the padding the operator names."""
    dims = range(2, operator.rank(0))
    slides = [sliding(operator, dim) for dim in dims]
    factors = np.ones((1, 1), np.float64)
    for slide in slides:
        if slide is None or slide.read(0, slide.made)[1] > slide.length + slide.behind:
            return None
        with np.errstate(divide="ignore"):  # a window beside the operand alone has a mean of nothing
            factors = factors[..., None] * (slide.kernel / _counted(slide))
    return factors


def _counted(slide: Sliding) -> np.ndarray:
    positions = np.arange(slide.made)[:, None] * slide.stride - slide.pad + np.arange(slide.kernel) * slide.dilation
    counts: np.ndarray = ((positions >= 0) & (positions < slide.length)).sum(1)
    return counts

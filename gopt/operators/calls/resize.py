"""Resize by PyTorch: along an axis, each result is a sum of a few elements with weights known before the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gopt.operators.torch_call import NodeSettings, numbers


@dataclass(frozen=True, slots=True)
class _Axis:
    """``length`` -> ``size`` elements, at ``scale``; ``begin``, ``end``: the region of interest, as shares."""

    length: int
    size: int
    scale: float
    begin: float = 0.0
    end: float = 1.0

    def source(self, mode: str, at: int) -> float:
        """The place among the operand's elements of a result."""
        length, scale, whole = self.length, self.scale, self.scale * self.length
        if mode == "asymmetric":
            return at / scale
        if mode == "align_corners":
            return at * (length - 1) / (self.size - 1) if self.size > 1 else 0.0
        if mode == "tf_crop_and_resize":
            low, high = self.begin * (length - 1), self.end * (length - 1)
            return low + at * (high - low) / (whole - 1) if whole > 1 else (low + high) / 2
        if mode == "pytorch_half_pixel" and self.size == 1:
            return -0.5
        moved = length / 2 * (1 - self.size / whole) if mode == "half_pixel_symmetric" else 0.0
        return moved + (at + 0.5) / scale - 0.5


def _nearest(a: NodeSettings, source: float) -> dict[int, float]:
    mode, floor = a.get("nearest_mode", "round_prefer_floor"), math.floor(source)
    part = source - floor
    up = {"floor": False, "ceil": part > 0, "round_prefer_ceil": part >= 0.5}.get(mode, part > 0.5)
    return {floor + up: 1.0}


def _linear(distance: float) -> float:
    return max(1 - abs(distance), 0.0)


def _cubic(a: NodeSettings) -> Callable[[float], float]:
    def weight(distance: float) -> float:
        curve, x = float(a.get("cubic_coeff_a", -0.75)), abs(distance)
        if x <= 1:
            return ((curve + 2) * x - (curve + 3)) * x * x + 1
        return ((curve * x - 5 * curve) * x + 8 * curve) * x - 4 * curve if x < 2 else 0.0

    return weight


def _weights(a: NodeSettings, axis: _Axis, source: float) -> dict[int, float]:
    """Places of elements -> weights with the sum 1; places beside the axis stand for the ends."""
    mode = a.get("mode", "nearest")
    if mode == "nearest":
        weights = _nearest(a, source)
    else:
        weight, reach = (_linear, 1) if mode == "linear" else (_cubic(a), 2)
        shrink = min(axis.scale, 1.0) if a.get("antialias", 0) else 1.0
        wide = reach / shrink
        span = range(math.floor(source - wide) + 1, math.ceil(source + wide))
        weights = {at: weight((at - source) * shrink) for at in span}
        if a.get("exclude_outside", 0):
            weights = {at: number for at, number in weights.items() if 0 <= at < axis.length}
        total = sum(weights.values()) or 1.0
        weights = {at: number / total for at, number in weights.items()}
    inside: dict[int, float] = {}
    for at, number in weights.items():
        at = min(max(at, 0), axis.length - 1)
        inside[at] = inside.get(at, 0.0) + number
    return {at: number for at, number in inside.items() if number}


def _along(t: Any, a: NodeSettings, x: Any, dim: int, axis: _Axis) -> Any:
    mode = a.get("coordinate_transformation_mode", "half_pixel")
    sources = [axis.source(mode, at) for at in range(axis.size)]
    rows = [_weights(a, axis, point) for point in sources]
    if all(len(row) == 1 for row in rows):
        y = x.index_select(dim, t.tensor([next(iter(row)) for row in rows], dtype=t.int64, device=x.device))
    else:
        y, most = 0, max(map(len, rows))
        column = [-1 if at == dim else 1 for at in range(x.ndim)]
        for number in range(most):
            terms = [([*row.items()] + [(0, 0.0)] * most)[number] for row in rows]
            factors = t.tensor([term[1] for term in terms], dtype=x.dtype, device=x.device).reshape(column)
            at = t.tensor([term[0] for term in terms], dtype=t.int64, device=x.device)
            y = y + x.index_select(dim, at) * factors
    outside = [mode == "tf_crop_and_resize" and not 0 <= point <= axis.length - 1 for point in sources]
    if any(outside):
        flags = t.tensor(outside, device=x.device).reshape([-1 if at == dim else 1 for at in range(x.ndim)])
        y = t.where(flags, a.get("extrapolation_value", 0.0), y)
    return y


def resize(t: Any, a: NodeSettings, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    dims = [int(axis) % x.ndim for axis in a.get("axes") or range(x.ndim)]
    ends, steps = numbers(sizes) if sizes is not None else [], numbers(scales) if scales is not None else []
    region = numbers(roi) if roi is not None else []
    if ends:
        steps = [end / x.shape[dim] for end, dim in zip(ends, dims)]
        policy = a.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            steps = [(min if policy == "not_larger" else max)(steps)] * len(dims)
            ends = [math.floor(steps[0] * x.shape[dim] + 0.5) for dim in dims]
    else:
        ends = [math.floor(step * x.shape[dim]) for step, dim in zip(steps, dims)]
    wide = x if not x.is_floating_point() or x.dtype.itemsize >= 4 else x.float()
    for number, (dim, size, scale) in enumerate(zip(dims, ends, steps)):
        part = (region[number], region[number + len(dims)]) if region else (0.0, 1.0)
        axis = _Axis(x.shape[dim], int(size), scale, *part)
        if axis.length != axis.size or scale != 1 or (a.get("coordinate_transformation_mode") or "").startswith("tf_"):
            wide = _along(t, a, wide, dim, axis)
    return wide.to(x.dtype)


def upsample(t: Any, a: NodeSettings, x: Any, scales: Any = None) -> Any:
    """An Upsample, and a Resize before operator set 11."""
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", "mode": a.get("mode", "nearest")}
    return resize(t, NodeSettings(how, a.opset, a.results), x, None, a.get("scales") if scales is None else scales)


def resize_of_any_version(t: Any, a: NodeSettings, x: Any, *rest: Any) -> Any:
    return (resize if a.opset >= 11 else upsample)(t, a, x, *rest)

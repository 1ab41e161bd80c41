"""Convolutions and pooling in NumPy, in the precision of the inputs: for types without a kernel in ONNX Runtime.

A window is a view of dims [N, C, out₁…, k₁…]. Products are matrix products, computed by BLAS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, Any]
_PIECE = 1 << 19
"""Elements of windows that are copied at a time: they stay in the cache."""


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """How a kernel moves, with one number per spatial axis. ``begin``, ``end``: padding. ``out``: output size."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Elements between the first and the last covered by a kernel, inclusive."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations))

    def of(self, x: Array, fill: float = 0.0) -> Array:
        """The windows of x[N, C, …], padded with ``fill``: [N, C, out₁…, k₁…]. Only padding copies."""
        axes = tuple(range(2, x.ndim))
        if any(self.begin) or any(self.end):
            x = np.pad(x, [(0, 0), (0, 0), *zip(self.begin, self.end)], constant_values=fill)
        views = sliding_window_view(x, self.reach, axes)
        starts = tuple(slice(0, (n - 1) * s + 1, s) for n, s in zip(self.out, self.strides))
        return views[(slice(None), slice(None), *starts, *(slice(None, None, d) for d in self.dilations))]


def window(
    dims: Sequence[int], kernel: Sequence[int], strides: Sequence[int] | None, dilations: Sequence[int] | None,
    pads: Sequence[int] | None, auto_pad: str | None, ceil: bool = False,
) -> WindowSizes:  # fmt: skip
    """The window of an operator's attributes over spatial ``dims``; None stands for an absent attribute."""
    rank = len(dims)
    steps, holes = tuple(strides or (1,) * rank), tuple(dilations or (1,) * rank)
    begin, end = tuple((pads or (0,) * 2 * rank)[:rank]), tuple((pads or (0,) * 2 * rank)[rank:])
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, holes)]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        lack = [max((math.ceil(n / s) - 1) * s + r - n, 0) for n, s, r in zip(dims, steps, reach)]
        less, more = tuple(length // 2 for length in lack), tuple(length - length // 2 for length in lack)
        begin, end = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
    elif auto_pad == "VALID":
        begin = end = (0,) * rank
    out = []
    for axis, (n, r, s) in enumerate(zip(dims, reach, steps)):
        free = n + begin[axis] + end[axis] - r
        count = (-(-free // s) if ceil else free // s) + 1
        # A window that would begin in the padding behind is left out.
        out.append(count - 1 if ceil and (count - 1) * s >= n + begin[axis] else count)
    if ceil:
        need = [(m - 1) * s + r - n - b for m, s, r, n, b in zip(out, steps, reach, dims, begin)]
        end = tuple(max(have, due) for have, due in zip(end, need))
    return WindowSizes(tuple(kernel), steps, holes, begin, end, tuple(out))


def conv(
    x: Array, w: Array, bias: Array | None = None, *, auto_pad: str | None = None,
    dilations: Sequence[int] | None = None, group: int | None = None, kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
) -> Array:  # fmt: skip
    """ONNX Conv: x[N, C, …], w[M, C / group, k…] -> [N, M, out…]."""
    if x.ndim == 2:
        x = x[:, :, None]
    sizes = window(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad)
    y = _correlate(x, w, sizes, group or 1)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2))


def _correlate(x: Array, w: Array, sizes: WindowSizes, group: int) -> Array:
    """Products of windows and kernels, in pieces of about ``_PIECE`` elements."""
    views = sizes.of(x)
    n, c, m, rank = x.shape[0], x.shape[1], w.shape[0], x.ndim - 2
    size, inner = math.prod(sizes.out), math.prod(w.shape[1:])
    kernel = w.reshape(group, m // group, inner)
    y = np.empty((n, m, *sizes.out), np.result_type(x, w))
    if math.prod(sizes.kernel) > size:
        # Windows are longer than the result, as where a kernel is differentiated by: each is a row.
        transposed = np.ascontiguousarray(kernel.transpose(0, 2, 1))
        step = max(1, _PIECE // max(group * inner * size, 1))
        for start in range(0, n, step):
            part = views[start : start + step]
            split = part.reshape(len(part), group, c // group, *sizes.out, *sizes.kernel)
            rows = split.transpose(1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
            product = rows.reshape(group, len(part) * size, inner) @ transposed
            spread = product.reshape(group, len(part), *sizes.out, m // group)
            y[start : start + step] = spread.transpose(1, 0, 2 + rank, *range(2, 2 + rank)).reshape(
                len(part), m, *sizes.out
            )
        return y
    lines, across = sizes.out[0], math.prod(sizes.out[1:])
    step = max(1, _PIECE // max(c * math.prod(sizes.kernel) * across, 1))
    for sample in range(n):
        for start in range(0, lines, step):
            part = views[sample, :, start : start + step]
            columns = part.transpose(0, *range(1 + rank, 1 + 2 * rank), *range(1, 1 + rank))
            count = part.shape[1]
            product = kernel @ columns.reshape(group, inner, count * across)
            y[sample, :, start : start + step] = product.reshape(m, count, *sizes.out[1:])
    return y


def conv_transpose(
    x: Array, w: Array, bias: Array | None = None, *, auto_pad: str | None = None,
    dilations: Sequence[int] | None = None, group: int | None = None, kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None, output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
) -> Array:  # fmt: skip
    """ONNX ConvTranspose: x[N, C, …], w[C, M / group, k…] -> [N, M, out…]. For each place in the kernel a product,
    added at the windows' places."""
    rank, groups = x.ndim - 2, group or 1
    steps, holes = tuple(strides or (1,) * rank), tuple(dilations or (1,) * rank)
    extra = tuple(output_padding or (0,) * rank)
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], holes)]
    whole = [(n - 1) * s + e + r for n, s, e, r in zip(x.shape[2:], steps, extra, reach)]
    begin, end = (pads or (0,) * 2 * rank)[:rank], (pads or (0,) * 2 * rank)[rank:]
    if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        due = list(output_shape or [n * s for n, s in zip(x.shape[2:], steps)])[-rank:]
        over = [max(have - want, 0) for have, want in zip(whole, due)]
        half = [length // 2 for length in over]
        rest = [length - length // 2 for length in over]
        begin, end = (half, rest) if auto_pad == "SAME_UPPER" else (rest, half)
    c, m = w.shape[:2]
    split = w.reshape(groups, c // groups, m, *w.shape[2:])
    data = x.reshape(x.shape[0], groups, c // groups, -1)
    y = np.zeros((x.shape[0], groups, m, *whole), np.result_type(x, w))
    for offset in np.ndindex(*w.shape[2:]):
        product = split[(slice(None),) * 3 + offset].transpose(0, 2, 1) @ data
        reached = [slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in zip(offset, holes, x.shape[2:], steps)]
        y[(slice(None),) * 3 + tuple(reached)] += product.reshape(*y.shape[:3], *x.shape[2:])
    y = _padded_or_cut(y.reshape(x.shape[0], groups * m, *whole), [-b for b in begin], [-e for e in end])
    return y if bias is None else y + bias.reshape(-1, *(1,) * rank)


def _padded_or_cut(x: Array, before: Sequence[int], after: Sequence[int]) -> Array:
    """x with zeros around its spatial axes; a negative number removes elements."""
    x = np.pad(x, [(0, 0), (0, 0), *((max(b, 0), max(a, 0)) for b, a in zip(before, after))])
    cuts = (slice(max(-b, 0), n - max(-a, 0)) for b, a, n in zip(before, after, x.shape[2:]))
    return x[(slice(None), slice(None), *cuts)]


def average_pool(
    x: Array, *, auto_pad: str | None = None, ceil_mode: int | None = None, count_include_pad: int | None = None,
    dilations: Sequence[int] | None = None, kernel_shape: Sequence[int] = (), pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:  # fmt: skip
    """ONNX AveragePool. Padding counts if ``count_include_pad`` is set; elements added by ``ceil_mode`` never count."""
    sizes = window(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    over = tuple(range(-len(sizes.kernel), 0))
    inside = np.ones((1, 1, *x.shape[2:]), x.dtype)
    if count_include_pad:
        rank = len(sizes.kernel)
        declared = tuple((pads or (0,) * 2 * rank)[rank:])
        ends = sizes.end if auto_pad in ("SAME_UPPER", "SAME_LOWER") else declared
        inside = np.ones((1, 1, *(n + b + e for n, b, e in zip(x.shape[2:], sizes.begin, ends))), x.dtype)
        rest = tuple(e - stop for e, stop in zip(sizes.end, ends))
        counts = WindowSizes(sizes.kernel, sizes.strides, sizes.dilations, (0,) * rank, rest, sizes.out).of(inside)
        inside = counts
    else:
        inside = sizes.of(inside)
    mean: Array = sizes.of(x).sum(over) / inside.sum(over)
    return mean


def lp_pool(
    x: Array, *, auto_pad: str | None = None, ceil_mode: int | None = None, dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] = (), p: int | None = None, pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:  # fmt: skip
    """ONNX LpPool."""
    sizes = window(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    power = p or 2
    result: Array = (np.abs(sizes.of(x)) ** power).sum(tuple(range(-len(sizes.kernel), 0))) ** (1.0 / power)
    return result


def global_average_pool(x: Array) -> Array:
    mean: Array = x.mean(tuple(range(2, x.ndim)), keepdims=True)
    return mean


def global_max_pool(x: Array) -> Array:
    largest: Array = x.max(tuple(range(2, x.ndim)), keepdims=True)
    return largest

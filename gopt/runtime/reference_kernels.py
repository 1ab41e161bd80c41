"""Operators in NumPy that onnx's reference evaluator computes wrongly, by the standard.

Its MaxPool mistakes pads that differ, its LRN takes the batch for the channels, its LpNormalization forgets absolute
values, its older BatchNormalization is always one of training, its Softmax takes one axis where that of older operator
sets takes all from it on, and its logarithms of shares are infinite where a share is too small for its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gopt.runtime.windows import Array, window


def _max_pool(
    x: Array, *, auto_pad: str | None = None, ceil_mode: int | None = None, dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] = (), pads: Sequence[int] | None = None, storage_order: int | None = None,
    strides: Sequence[int] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The first of equal elements is the maximum."""
    rank = x.ndim - 2
    place = window(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    least = -np.inf if x.dtype.kind not in "iu" else float(np.iinfo(x.dtype).min)
    views = place.of(x, least).reshape(*x.shape[:2], *place.out, -1)
    first = views.argmax(-1)
    made = np.take_along_axis(views, first[..., None], -1)[..., 0]
    inside = np.unravel_index(first, place.kernel)
    flat = np.zeros(first.shape, np.int64)
    for axis in range(rank):
        starts = np.arange(place.out[axis]).reshape(-1, *(1,) * (rank - 1 - axis)) * place.strides[axis]
        at = starts + inside[axis] * place.dilations[axis] - place.begin[axis]
        before, behind = x.shape[2 : 2 + axis], x.shape[3 + axis :]
        flat += at * math.prod(before if storage_order else behind)
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * rank)
    return made, flat + planes * math.prod(x.shape[2:])


def _batch_normalization(
    x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, epsilon: float | None = None,
    momentum: float | None = None, training_mode: int | None = None, spatial: int | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    column, more = (-1, *(1,) * (x.ndim - 2)), tuple[Array, ...]()
    if training_mode:
        over, kept = (0, *range(2, x.ndim)), 0.9 if momentum is None else momentum
        running, spread = mean, var
        mean, var = x.mean(over), x.var(over)
        more = (running * kept + mean * (1 - kept), spread * kept + var * (1 - kept))
    factor = scale / np.sqrt(var + (1e-5 if epsilon is None else epsilon))
    made = (x - mean.reshape(column)) * factor.reshape(column) + bias.reshape(column)
    return (made.astype(x.dtype), *(each.astype(mean.dtype) for each in more))


def _lrn(
    x: Array, *, size: int, alpha: float | None = None, beta: float | None = None, bias: float | None = None
) -> Array:
    before, behind = (size - 1) // 2, size // 2
    squares = np.pad(np.square(x), [(0, 0), (before, behind), *((0, 0),) * (x.ndim - 2)])
    sums = np.sum([squares[:, k : k + x.shape[1]] for k in range(size)], axis=0)
    scale = 0.0001 if alpha is None else alpha
    made: Array = x / ((1.0 if bias is None else bias) + scale / size * sums) ** (0.75 if beta is None else beta)
    return made.astype(x.dtype)


def _lp_normalization(x: Array, *, axis: int | None = None, p: int | None = None) -> Array:
    power = 2 if p is None else p
    norm = (np.abs(x) ** power).sum(-1 if axis is None else axis, keepdims=True) ** (1 / power)
    made: Array = np.where(norm == 0, np.zeros((), x.dtype), x / np.where(norm == 0, 1, norm))
    return made.astype(x.dtype)


def _rows(x: Array, axis: int | None, opset: int) -> tuple[Array, int]:
    """Numbers to be normalised, in float32 at least, and the axis over which: before operator set 13 all dimensions
    from ``axis`` on are one."""
    wide = x.astype(np.result_type(x.dtype if x.dtype.kind == "f" else np.float32, np.float32), copy=False)
    if opset >= 13:
        return wide, -1 if axis is None else axis
    place = (1 if axis is None else axis) % x.ndim
    return wide.reshape(math.prod(x.shape[:place]), math.prod(x.shape[place:])), 1


def _log_softmax(x: Array, *, opset: int, axis: int | None = None) -> Array:
    if not x.size:
        return x
    rows, over = _rows(x, axis, opset)
    rows = rows - rows.max(over, keepdims=True)
    made: Array = rows - np.log(np.exp(rows).sum(over, keepdims=True))
    return made.reshape(x.shape).astype(x.dtype)


def _softmax(x: Array, *, opset: int, axis: int | None = None) -> Array:
    if not x.size:
        return x
    rows, over = _rows(x, axis, opset)
    rows = np.exp(rows - rows.max(over, keepdims=True))
    made: Array = rows / rows.sum(over, keepdims=True)
    return made.reshape(x.shape).astype(x.dtype)


def _hardmax(x: Array, *, opset: int, axis: int | None = None) -> Array:
    if not x.size:
        return x
    rows, over = _rows(x, axis, opset)
    made = np.zeros(rows.shape, x.dtype)
    np.put_along_axis(made, rows.argmax(over, keepdims=True), 1, over)
    return made.reshape(x.shape)


def _cross_entropy(
    x: Array, labels: Array, weights: Array | None = None, *, ignore_index: int | None = None,
    reduction: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The loss and the logarithms of the shares. ``x``: [samples, classes, ...]; ``labels``: [samples, ...]."""
    logs = _log_softmax(x, opset=13, axis=1)
    kept = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    inside = np.where(kept, labels, 0)
    factors = kept.astype(x.dtype) if weights is None else weights[inside] * kept
    each = -np.take_along_axis(logs, inside[:, None], 1)[:, 0] * factors
    if reduction == "none":
        return each.astype(x.dtype), logs
    total = each.sum() if reduction == "sum" else each.sum() / factors.sum()
    return np.asarray(total, x.dtype), logs


REFERENCE_KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "BatchNormalization": _batch_normalization, "Hardmax": _hardmax, "LRN": _lrn,
    "LogSoftmax": _log_softmax, "LpNormalization": _lp_normalization, "MaxPool": _max_pool, "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
})  # fmt: skip
"""As ``fallback_kernels.FALLBACK_KERNELS``; ``opset``: the number of the operator set."""

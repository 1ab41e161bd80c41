"""Operators in NumPy, by the standard, for the wrong results of onnx's reference evaluator.

The evaluator's MaxPool mistakes unequal pads, LRN takes the batch for the channels, LpNormalization forgets absolute
values, an older BatchNormalization is always in training, Softmax takes one axis where older operator sets take all
from the axis on, NegativeLogLikelihoodLoss counts labels that ignore_index = -1 leaves out, and logarithms of shares
are infinite where a share is too small for the type."""

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
    sizes = window(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    least = -np.inf if x.dtype.kind not in "iu" else float(np.iinfo(x.dtype).min)
    views = sizes.of(x, least).reshape(*x.shape[:2], *sizes.out, -1)
    indices = views.argmax(-1)
    maxima = np.take_along_axis(views, indices[..., None], -1)[..., 0]
    inside = np.unravel_index(indices, sizes.kernel)
    flat = np.zeros(indices.shape, np.int64)
    for axis in range(rank):
        starts = np.arange(sizes.out[axis]).reshape(-1, *(1,) * (rank - 1 - axis)) * sizes.strides[axis]
        at = starts + inside[axis] * sizes.dilations[axis] - sizes.begin[axis]
        before, behind = x.shape[2 : 2 + axis], x.shape[3 + axis :]
        flat += at * math.prod(before if storage_order else behind)
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * rank)
    return maxima, flat + planes * math.prod(x.shape[2:])


def _batch_normalization(
    x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, epsilon: float | None = None,
    momentum: float | None = None, training_mode: int | None = None, spatial: int | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    column, more = (-1, *(1,) * (x.ndim - 2)), tuple[Array, ...]()
    if training_mode:
        over, share = (0, *range(2, x.ndim)), 0.9 if momentum is None else momentum
        running, spread = mean, var
        mean, var = x.mean(over), x.var(over)
        more = (running * share + mean * (1 - share), spread * share + var * (1 - share))
    factor = scale / np.sqrt(var + (1e-5 if epsilon is None else epsilon))
    normal = (x - mean.reshape(column)) * factor.reshape(column) + bias.reshape(column)
    return (normal.astype(x.dtype), *(statistic.astype(mean.dtype) for statistic in more))


def _lrn(
    x: Array, *, size: int, alpha: float | None = None, beta: float | None = None, bias: float | None = None
) -> Array:
    before, behind = (size - 1) // 2, size // 2
    squares = np.pad(np.square(x), [(0, 0), (before, behind), *((0, 0),) * (x.ndim - 2)])
    sums = np.sum([squares[:, k : k + x.shape[1]] for k in range(size)], axis=0)
    scale = 0.0001 if alpha is None else alpha
    result: Array = x / ((1.0 if bias is None else bias) + scale / size * sums) ** (0.75 if beta is None else beta)
    return result.astype(x.dtype)


def _lp_normalization(x: Array, *, axis: int | None = None, p: int | None = None) -> Array:
    power = 2 if p is None else p
    norm = (np.abs(x) ** power).sum(-1 if axis is None else axis, keepdims=True) ** (1 / power)
    result: Array = np.where(norm == 0, np.zeros((), x.dtype), x / np.where(norm == 0, 1, norm))
    return result.astype(x.dtype)


def _rows(x: Array, axis: int | None, opset: int) -> tuple[Array, int]:
    """Numbers to be normalised, in float32 at least, and the axis of the normalisation: before operator set 13 all
    dimensions from ``axis`` on are one."""
    wide = x.astype(np.result_type(x.dtype if x.dtype.kind == "f" else np.float32, np.float32), copy=False)
    if opset >= 13:
        return wide, -1 if axis is None else axis
    split = (1 if axis is None else axis) % x.ndim
    return wide.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:])), 1


def _log_softmax(x: Array, *, opset: int, axis: int | None = None) -> Array:
    if not x.size:
        return x
    rows, over = _rows(x, axis, opset)
    rows = rows - rows.max(over, keepdims=True)
    result: Array = rows - np.log(np.exp(rows).sum(over, keepdims=True))
    return result.reshape(x.shape).astype(x.dtype)


def _softmax(x: Array, *, opset: int, axis: int | None = None) -> Array:
    if not x.size:
        return x
    rows, over = _rows(x, axis, opset)
    rows = np.exp(rows - rows.max(over, keepdims=True))
    result: Array = rows / rows.sum(over, keepdims=True)
    return result.reshape(x.shape).astype(x.dtype)


def _hardmax(x: Array, *, opset: int, axis: int | None = None) -> Array:
    if not x.size:
        return x
    rows, over = _rows(x, axis, opset)
    result = np.zeros(rows.shape, x.dtype)
    np.put_along_axis(result, rows.argmax(over, keepdims=True), 1, over)
    return result.reshape(x.shape)


def _log_likelihood(
    logs: Array, labels: Array, weights: Array | None = None, *, ignore_index: int | None = None,
    reduction: str | None = None,
) -> Array:  # fmt: skip
    """The loss. ``logs``: [samples, classes, ...]; ``labels``: [samples, ...]."""
    counted = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    inside = np.where(counted, labels, 0)
    factors = counted.astype(logs.dtype) if weights is None else weights[inside] * counted
    losses = -np.take_along_axis(logs, inside[:, None], 1)[:, 0] * factors
    if reduction == "none":
        return np.asarray(losses, logs.dtype)
    return np.asarray(losses.sum() if reduction == "sum" else losses.sum() / factors.sum(), logs.dtype)


def _cross_entropy(x: Array, *rest: Array | None, **attributes: Any) -> tuple[Array, Array]:
    """The loss and the logarithms of the shares."""
    logs = _log_softmax(x, opset=13, axis=1)
    return _log_likelihood(logs, *rest, **attributes), logs  # type: ignore[arg-type]


REFERENCE_KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "BatchNormalization": _batch_normalization, "Hardmax": _hardmax, "LRN": _lrn,
    "LogSoftmax": _log_softmax, "LpNormalization": _lp_normalization, "MaxPool": _max_pool, "Softmax": _softmax,
    "NegativeLogLikelihoodLoss": _log_likelihood, "SoftmaxCrossEntropyLoss": _cross_entropy,
})  # fmt: skip
"""As ``fallback_kernels.FALLBACK_KERNELS``; ``opset``: the number of the operator set."""

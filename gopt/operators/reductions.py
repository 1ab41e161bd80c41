"""Operators that reduce along axes, normalise along them, and pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gopt.operators.calls import layouts, losses, windows
from gopt.operators.calls import normalise as norms
from gopt.operators.dims import elements, normalise
from gopt.operators.dims.link import beside
from gopt.operators.moves import axes_of
from gopt.operators.operator import Array, Attributes, Kernel, Operator, Slope, TorchCall

NONE, STEP, LINEAR, AFFINE, BENT, CURVED = Slope


def _over(function: Callable[..., Any]) -> Kernel:
    """A reduction by a NumPy function of an array, ``axis`` and ``keepdims``."""

    def kernel(attributes: Attributes, operands: Sequence[Any]) -> Array:
        axes = axes_of(attributes, operands) or (() if attributes.get("noop_with_empty_axes", 0) else None)
        result = function(operands[0], axis=axes, keepdims=bool(attributes.get("keepdims", 1)))
        return np.asarray(result, operands[0].dtype)

    return kernel


def _over_tensor(function: Callable[..., Any]) -> TorchCall:
    """A reduction by a function of a tensor, dimensions and ``keepdim``."""

    def call(torch: Any, attributes: Attributes, *operands: Any) -> Any:
        data, axes = operands[0], axes_of(attributes, operands)
        if not axes:
            axes = () if attributes.get("noop_with_empty_axes", 0) else tuple(range(data.ndim))
        if not axes:  # PyTorch takes no dimensions for all
            return function(data.unsqueeze(-1), [-1], False).to(data.dtype)
        return function(data, list(axes), bool(attributes.get("keepdims", 1))).to(data.dtype)

    return call


def _product(x: Any, dims: Sequence[int], keep: bool) -> Any:
    for dim in sorted((dim % x.ndim for dim in dims), reverse=True):
        x = x.prod(dim, keep)
    return x


def _place_of(name: str) -> TorchCall:
    """The place of an extreme by a function of PyTorch."""

    def call(torch: Any, attributes: Attributes, data: Any) -> Any:
        axis, keep = attributes.get("axis", 0), bool(attributes.get("keepdims", 1))
        last = attributes.get("select_last_index", 0)
        index = getattr(torch, name)(data.flip(axis) if last else data, axis, keep)
        return data.shape[axis] - 1 - index if last else index

    return call


def _reduction(
    name: str, slope: Slope, pieces: str, function: Callable[..., Any], torch: Callable[..., Any], *, zero: bool = True,
    power: float | None = None,
) -> Operator:  # fmt: skip
    return Operator(
        name, (slope, NONE), zero=zero, total=True, settings=(1,), pieces=pieces, power=power,
        dims=elements.reduction(pieces), kernel=_over(function), torch=_over_tensor(torch),
    )  # fmt: skip


def _logarithm(x: Array, **how: Any) -> Array:
    return np.asarray(np.log(np.sum(x, **how)))


def _softmax_sum(x: Array, **how: Any) -> Array:
    top = np.max(x, axis=how["axis"], keepdims=True)
    rest = np.log(np.sum(np.exp(x - top), axis=how["axis"], keepdims=True)) + top
    return np.asarray(rest if how["keepdims"] else np.squeeze(rest, how["axis"]))


_BATCH_NORM = (CURVED, AFFINE, AFFINE, AFFINE, CURVED)
OPERATORS = (
    _reduction("ReduceSum", LINEAR, "sum", np.sum, lambda x, *by: x.sum(*by)),
    _reduction(
        "ReduceMean", LINEAR, "mean", np.mean, lambda x, *by: (x if x.is_floating_point() else x.double()).mean(*by)
    ),
    _reduction(
        "ReduceSumSquare", CURVED, "sum", lambda x, **how: np.sum(x * x, **how), lambda x, *by: (x * x).sum(*by),
        power=2,
    ),
    _reduction(
        "ReduceL1", BENT, "sum", lambda x, **how: np.sum(np.abs(x), **how), lambda x, *by: x.abs().sum(*by), power=1
    ),
    _reduction(
        "ReduceL2", CURVED, "l2", lambda x, **how: np.sqrt(np.sum(x * x, **how)),
        lambda x, *by: (x * x).sum(*by).sqrt(), power=1,
    ),
    _reduction("ReduceMax", BENT, "max", np.max, lambda x, *by: x.amax(*by), power=1),
    _reduction("ReduceMin", BENT, "min", np.min, lambda x, *by: x.amin(*by), power=1),
    _reduction("ReduceProd", CURVED, "", np.prod, _product),
    _reduction("ReduceLogSum", CURVED, "", _logarithm, lambda x, *by: x.sum(*by).log(), zero=False),
    _reduction("ReduceLogSumExp", CURVED, "", _softmax_sum, lambda x, *by: x.logsumexp(*by), zero=False),
    Operator("ArgMax", (NONE,), total=True, dims=elements.arg, power=0, torch=_place_of("argmax")),
    Operator("ArgMin", (NONE,), total=True, dims=elements.arg, power=0, torch=_place_of("argmin")),
    Operator("TopK", (BENT, NONE), lengths=(1,), zero=True, dims=beside(), power=1, torch=layouts.top),
    Operator(
        "Softmax", (CURVED,), total=True, dims=elements.softmax,
        torch=norms.shares(lambda t, x, axis: x.softmax(axis)),
    ),
    Operator(
        "LogSoftmax", (CURVED,), total=True, dims=elements.softmax,
        torch=norms.shares(lambda t, x, axis: x.log_softmax(axis)),
    ),
    Operator("Hardmax", (STEP,), total=True, dims=elements.softmax, power=0, torch=norms.shares(norms.hardmax)),
    Operator("LpNormalization", (CURVED,), total=True, zero=True, dims=beside(), power=0, torch=norms.lp),
    Operator("LayerNormalization", (CURVED, AFFINE), total=True, dims=elements.in_front, torch=norms.layer),
    Operator(
        "RMSNormalization", (CURVED, LINEAR), total=True, zero=True, dims=elements.in_front,
        torch=norms.root_mean_square,
    ),
    Operator(
        "BatchNormalization", _BATCH_NORM, total=True, running=(3, 4), dims=normalise.batch_normalization,
        torch=norms.batch,
    ),
    Operator(
        "InstanceNormalization", (CURVED, AFFINE), total=True, dims=normalise.instance_normalization,
        torch=norms.instance,
    ),
    Operator("GroupNormalization", (CURVED, AFFINE), total=True, dims=normalise.group_normalization, torch=norms.group),
    Operator(
        "MeanVarianceNormalization", (CURVED,), total=True, zero=True, dims=normalise.mean_variance,
        torch=norms.mean_variance,
    ),
    Operator("LRN", (CURVED,), total=True, zero=True, dims=normalise.across_channels, torch=norms.local_response),
    Operator("AveragePool", (LINEAR, NONE), total=True, zero=True, dims=normalise.pool, torch=windows.average_pool),
    Operator("MaxPool", (BENT,), total=True, zero=True, dims=normalise.pool, power=1, torch=windows.max_pool),
    Operator("LpPool", (CURVED,), total=True, zero=True, dims=normalise.pool, power=1, torch=windows.lp_pool),
    Operator(
        "GlobalAveragePool", (LINEAR, NONE), total=True, zero=True, dims=normalise.pool,
        torch=windows.over_all_places(lambda a, x: x.mean(-1)),
    ),
    Operator(
        "GlobalMaxPool", (BENT,), total=True, zero=True, dims=normalise.pool, power=1,
        torch=windows.over_all_places(lambda a, x: x.amax(-1)),
    ),
    Operator(
        "GlobalLpPool", (CURVED,), total=True, zero=True, dims=normalise.pool, power=1,
        torch=windows.over_all_places(lambda a, x: x.norm(a.get("p", 2), -1)),
    ),
    Operator(
        "SoftmaxCrossEntropyLoss", (CURVED, NONE, CURVED), aside=(2,), dims=normalise.loss,
        torch=losses.cross_entropy,
    ),
    Operator(
        "NegativeLogLikelihoodLoss", (LINEAR, NONE, CURVED), aside=(2,), zero=True, dims=normalise.loss,
        torch=losses.log_likelihood,
    ),
)  # fmt: skip

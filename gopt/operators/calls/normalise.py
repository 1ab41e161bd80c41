"""Normalisation and shares of a sum by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gopt.operators.torch_call import NodeSettings


def _wide(x: Any) -> Any:
    """Halves as float32."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


def shares(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor and an axis; before operator set 13 all dimensions from the axis on are joined."""

    def call(t: Any, a: NodeSettings, x: Any) -> Any:
        if a.opset >= 13:
            return function(t, x, a.get("axis", -1))
        split = a.get("axis", 1) % x.ndim
        return function(t, x.reshape(math.prod(x.shape[:split]), -1), 1).reshape(x.shape)

    return call


def hardmax(t: Any, x: Any, axis: int) -> Any:
    return t.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


def _standard(t: Any, x: Any, dims: Sequence[int], epsilon: float) -> tuple[Any, Any, Any]:
    """Numbers less the mean, times the inverse deviation; the mean; the inverse deviation."""
    spread, mean = t.var_mean(x, list(dims), correction=0, keepdim=True)
    inverse = (spread + epsilon).rsqrt()
    return (x - mean) * inverse, mean, inverse


def layer(t: Any, a: NodeSettings, x: Any, scale: Any, bias: Any = None) -> tuple[Any, ...]:
    wide = _wide(x) if a.get("stash_type", 1) == 1 else x
    normal, *rest = _standard(t, wide, range(a.get("axis", -1) % x.ndim, x.ndim), a.get("epsilon", 1e-5))
    y = normal.to(x.dtype) * scale
    return y if bias is None else y + bias, *rest


def root_mean_square(t: Any, a: NodeSettings, x: Any, scale: Any) -> Any:
    wide = _wide(x) if a.get("stash_type", 1) == 1 else x
    dims = list(range(a.get("axis", -1) % x.ndim, x.ndim))
    normal = wide * (wide.square().mean(dims, keepdim=True) + a.get("epsilon", 1e-5)).rsqrt()
    return (normal.to(x.dtype) * scale).to(scale.dtype)


def group(t: Any, a: NodeSettings, x: Any, scale: Any, bias: Any) -> Any:
    """Before operator set 21 there is a scale for each group."""
    groups, channels = a["num_groups"], x.shape[1]
    wide = _wide(x) if a.get("stash_type", 1) == 1 else x
    normal = _standard(t, wide.reshape(x.shape[0], groups, -1), [2], a.get("epsilon", 1e-5))[0]
    scale, bias = (
        factor.repeat_interleave(channels // factor.shape[0]).reshape(-1, *[1] * (x.ndim - 2))
        for factor in (scale, bias)
    )
    return normal.reshape(x.shape).to(x.dtype) * scale + bias


def instance(t: Any, a: NodeSettings, x: Any, scale: Any, bias: Any) -> Any:
    column = (-1, *[1] * (x.ndim - 2))
    normal = _standard(t, _wide(x), range(2, x.ndim), a.get("epsilon", 1e-5))[0]
    return normal.to(x.dtype) * scale.reshape(column) + bias.reshape(column)


def batch(t: Any, a: NodeSettings, x: Any, scale: Any, bias: Any, mean: Any, spread: Any) -> tuple[Any, ...]:
    """In training, running statistics follow the batch; before operator set 14 a second result says so, and statistics
    of the batch are results as well."""
    column, wide, share = (-1, *[1] * (x.ndim - 2)), _wide(x), a.get("momentum", 0.9)
    more: tuple[Any, ...] = ()
    if a.get("training_mode", 0) or (a.opset < 14 and a.results > 1):
        now_spread, now_mean = t.var_mean(wide, [0, *range(2, x.ndim)], correction=0)
        now = (now_mean.to(mean.dtype), now_spread.to(spread.dtype))
        more = tuple(old * share + new * (1 - share) for old, new in zip((mean, spread), now))
        more, mean, spread = (*more, *now), now_mean, now_spread
    factor = scale * (spread + a.get("epsilon", 1e-5)).rsqrt()
    normal = (wide - mean.reshape(column)) * factor.reshape(column) + bias.reshape(column)
    return normal.to(x.dtype), *more


def mean_variance(t: Any, a: NodeSettings, x: Any) -> Any:
    spread, mean = t.var_mean(x, list(a.get("axes", (0, 2, 3))), correction=0, keepdim=True)
    return (x - mean) / (spread.sqrt() + 1e-9)


def lp(t: Any, a: NodeSettings, x: Any) -> Any:
    power = a.get("p", 2)
    norm = x.abs().pow(power).sum(a.get("axis", -1), keepdim=True).pow(1 / power)
    return t.where(norm == 0, 0, x / t.where(norm == 0, 1, norm))


def local_response(t: Any, a: NodeSettings, x: Any) -> Any:
    size = a["size"]
    squares = t.nn.functional.pad(x.square(), [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size // 2])
    sums = squares.unfold(1, size, 1).sum(-1)
    return x / (a.get("bias", 1.0) + a.get("alpha", 0.0001) / size * sums).pow(a.get("beta", 0.75))

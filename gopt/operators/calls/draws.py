"""Random numbers by PyTorch.

Without a seed, PyTorch's generator of the device draws. With a seed, numbers are a function of the seed: a node draws
the same in every run, on every device, traced or not."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from gopt.operators.torch_call import TYPES, NodeSettings, numbers

_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))
"""Shift and factor of each round of a hash of 32 bits: factors below 2^31, so that products fit int64."""
_WORD = (1 << 32) - 1


def _mixed(word: Any) -> Any:
    for shift, factor in _ROUNDS:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> 15)


def _key(seed: float) -> int:
    (bits,) = struct.unpack("<Q", struct.pack("<d", seed))
    return int(_mixed((_mixed(bits & _WORD) + (bits >> 32)) & _WORD))


def uniform(t: Any, a: NodeSettings, shape: Sequence[int], device: Any, *, stream: int = 0) -> Any:
    """Numbers of float32 from 0 to below 1. ``stream``: numbers apart from another stream's."""
    if "seed" not in a:
        return t.rand(shape, device=device)
    words = t.arange(math.prod(shape), dtype=t.int64, device=device)
    words = _mixed((_mixed(words & _WORD) + (words >> 32) + stream * 0x632BE5AB ^ _key(a["seed"])) & _WORD)
    return ((words >> 8).to(t.float32) * 2.0**-24).reshape(list(shape))


def normal(t: Any, a: NodeSettings, shape: Sequence[int], device: Any) -> Any:
    if "seed" not in a:
        return t.randn(shape, device=device)
    radius = (-2 * (1 - uniform(t, a, shape, device)).log()).sqrt()
    return radius * (2 * math.pi * uniform(t, a, shape, device, stream=1)).cos()


def _typed(t: Any, a: NodeSettings, like: Any, drawn: Any) -> Any:
    if a.get("dtype"):
        return drawn.to(getattr(t, TYPES[a["dtype"]]))
    return drawn if like is None else drawn.to(like.dtype)


def _where(t: Any, a: NodeSettings, like: Any) -> tuple[Sequence[int], Any]:
    return (a["shape"], None) if like is None else (like.shape, like.device)


def random_uniform(t: Any, a: NodeSettings, like: Any = None) -> Any:
    low, high = a.get("low", 0.0), a.get("high", 1.0)
    return _typed(t, a, like, uniform(t, a, *_where(t, a, like)) * (high - low) + low)


def random_normal(t: Any, a: NodeSettings, like: Any = None) -> Any:
    return _typed(t, a, like, normal(t, a, *_where(t, a, like)) * a.get("scale", 1.0) + a.get("mean", 0.0))


def bernoulli(t: Any, a: NodeSettings, odds: Any) -> Any:
    return _typed(t, a, odds, uniform(t, a, odds.shape, odds.device) < odds)


def multinomial(t: Any, a: NodeSettings, logs: Any) -> Any:
    """As many classes lie below a uniform number as have a smaller sum of shares."""
    shares = logs.float().softmax(-1).cumsum(-1).unsqueeze(1)
    drawn = uniform(t, a, [logs.shape[0], a.get("sample_size", 1)], logs.device).unsqueeze(2)
    classes = (shares <= drawn).sum(2).clamp(max=logs.shape[1] - 1)
    return classes.to(getattr(t, TYPES[a.get("dtype", 6)]))


def dropout(t: Any, a: NodeSettings, x: Any, ratio: Any = None, training: Any = None) -> tuple[Any, Any]:
    """Before operator set 12, nothing is dropped."""
    if training is None or not numbers(training)[0]:
        return x, t.ones(x.shape, dtype=t.bool if a.opset >= 10 else x.dtype, device=x.device)
    ratio = 0.5 if ratio is None else ratio
    mask = uniform(t, a, x.shape, x.device) >= ratio
    return t.where(mask, x / (1 - ratio), 0).to(x.dtype), mask

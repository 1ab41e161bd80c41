"""Operators without a float64 kernel in ONNX Runtime, computed by NumPy. Results have the precision of the inputs.

Operators missing here run in onnx's reference evaluator. The evaluator has every operator but is slow, and rounds some
intermediate results to float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from gopt.runtime import recurrent_layers, windows
from gopt.runtime.reference_kernels import REFERENCE_KERNELS
from gopt.runtime.resize import resize, upsample
from gopt.runtime.windows import Array

Kernel = Callable[..., Any]


def _erf(x: Array) -> Any:
    return _by_element(math.erf, x)


def _by_element(function: Callable[[float], float], x: Array) -> Any:
    return np.asarray(np.frompyfunc(function, 1, 1)(np.asarray(x, np.float64))).astype(x.dtype)


def _gelu(x: Array, *, approximate: str | None = None) -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _softplus(x: Array) -> Any:
    return np.logaddexp(x, np.zeros((), x.dtype))


def _mish(x: Array) -> Any:
    return x * np.tanh(_softplus(x))


def _elu(x: Array, *, alpha: float | None = None) -> Any:
    return np.where(x < 0, _or(alpha, 1.0) * np.expm1(np.minimum(x, 0)), x)


def _celu(x: Array, *, alpha: float | None = None) -> Any:
    a = _or(alpha, 1.0)
    return np.maximum(x, 0) + np.minimum(a * np.expm1(np.minimum(x, 0) / a), 0)


def _selu(x: Array, *, alpha: float | None = None, gamma: float | None = None) -> Any:
    a, g = _or(alpha, 1.67326319217681884765625), _or(gamma, 1.05070102214813232421875)
    return g * np.where(x > 0, x, a * np.expm1(np.minimum(x, 0)))


def _leaky_relu(x: Array, *, alpha: float | None = None) -> Any:
    return np.where(x < 0, _or(alpha, 0.01) * x, x)


def _hard_sigmoid(x: Array, *, alpha: float | None = None, beta: float | None = None) -> Any:
    return np.clip(_or(alpha, 0.2) * x + _or(beta, 0.5), 0, 1)


def _hard_swish(x: Array) -> Any:
    return x * np.clip(x / 6 + 0.5, 0, 1)


def _thresholded_relu(x: Array, *, alpha: float | None = None) -> Any:
    return np.where(x > _or(alpha, 1.0), x, np.zeros((), x.dtype))


def _prelu(x: Array, slope: Array) -> Any:
    return np.where(x < 0, slope * x, x)


def _swish(x: Array, *, alpha: float | None = None) -> Any:
    return x / (1 + np.exp(-_or(alpha, 1.0) * x))


def _mean(*terms: Array) -> Any:
    return functools.reduce(np.add, terms) / len(terms)


def _instance_normalization(x: Array, scale: Array, bias: Array, *, epsilon: float | None = None) -> Any:
    axes = tuple(range(2, x.ndim))
    column = (-1, *(1,) * (x.ndim - 2))
    centred = x - x.mean(axes, keepdims=True)
    spread = np.sqrt(np.square(centred).mean(axes, keepdims=True) + _or(epsilon, 1e-5))
    return scale.reshape(column) * centred / spread + bias.reshape(column)


def _layer_normalization(
    x: Array, scale: Array, bias: Array | None = None, *, axis: int | None = None, epsilon: float | None = None,
    stash_type: int | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    over = tuple(range(_or(axis, -1) % x.ndim, x.ndim))
    mean = x.mean(over, keepdims=True)
    inverse = 1 / np.sqrt(np.square(x - mean).mean(over, keepdims=True) + _or(epsilon, 1e-5))
    y = (x - mean) * inverse * scale
    return y if bias is None else y + bias, mean, inverse


def _rms_normalization(
    x: Array, scale: Array, *, axis: int | None = None, epsilon: float | None = None, stash_type: int | None = None
) -> Any:
    over = tuple(range(_or(axis, -1) % x.ndim, x.ndim))
    return x / np.sqrt(np.square(x).mean(over, keepdims=True) + _or(epsilon, 1e-5)) * scale


def _mean_variance(x: Array, *, axes: Any = None) -> Any:
    over = tuple(_or(axes, (0, 2, 3)))
    centred = x - x.mean(over, keepdims=True)
    # 1e-9 as ONNX defines it.
    return centred / (np.sqrt(np.square(centred).mean(over, keepdims=True)) + 1e-9)


def _one_hot(indices: Array, depth: Array, values: Array, *, axis: int | None = None) -> Any:
    count = int(np.asarray(depth).reshape(-1)[0])
    dims = np.expand_dims(np.asarray(indices).astype(np.int64) % count, _or(axis, -1))
    line = np.arange(count).reshape(-1, *(1,) * (np.ndim(indices) - _or(axis, -1) % (np.ndim(indices) + 1)))
    outside = np.expand_dims((indices < -count) | (indices >= count), _or(axis, -1))
    return np.where((dims == line) & ~outside, values[1], values[0])


def _non_zero(x: Array) -> Any:
    return np.array(np.nonzero(np.atleast_1d(x)), np.int64)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


FALLBACK_KERNELS: Mapping[str, Kernel] = MappingProxyType({
    "AveragePool": windows.average_pool, "Conv": windows.conv, "ConvTranspose": windows.conv_transpose,
    "GlobalAveragePool": windows.global_average_pool, "GlobalMaxPool": windows.global_max_pool,
    "LpPool": windows.lp_pool,
    "Acos": np.arccos, "Acosh": np.arccosh, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan,
    "Atanh": np.arctanh, "Cosh": np.cosh, "Sinh": np.sinh, "Tan": np.tan,
    "Celu": _celu, "Elu": _elu, "Erf": _erf, "Gelu": _gelu, "HardSigmoid": _hard_sigmoid, "HardSwish": _hard_swish,
    "LeakyRelu": _leaky_relu, "Mish": _mish, "PRelu": _prelu, "Selu": _selu, "Softplus": _softplus,
    "Softsign": lambda x: x / (1 + np.abs(x)), "Swish": _swish, "ThresholdedRelu": _thresholded_relu,
    "InstanceNormalization": _instance_normalization, "LayerNormalization": _layer_normalization,
    "Mean": _mean, "MeanVarianceNormalization": _mean_variance,
    "NonZero": _non_zero, "OneHot": _one_hot, "RMSNormalization": _rms_normalization,
    "Resize": lambda x, *rest, **named: (upsample if len(rest) == 1 else resize)(x, *rest, **named),
    "Upsample": upsample,
    "RNN": recurrent_layers.rnn, "GRU": recurrent_layers.gru, "LSTM": recurrent_layers.lstm,
})  # fmt: skip
"""Operator of the standard domain -> its function: inputs in order, attributes by name, None for what is absent."""


@functools.cache
def operators(more: tuple[tuple[str, Kernel], ...] = ()) -> tuple[type, ...]:
    """Both tables, and ``more`` kernels, as classes for onnx's reference evaluator."""
    from onnx.reference.op_run import OpRun

    from gopt.runtime.fallback_loop import Loop

    kernels = {**FALLBACK_KERNELS, **REFERENCE_KERNELS, **dict(more)}.items()
    return (Loop, *(type(name, (OpRun,), {"op_domain": "", "_run": _method(kernel)}) for name, kernel in kernels))


def _method(kernel: Kernel) -> Callable[..., tuple[Any, ...]]:
    by_opset = "opset" in getattr(getattr(kernel, "__code__", None), "co_varnames", ())

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        options = {name: value for name, value in attributes.items() if value is not None}
        inputs = tuple(None if operand is None else np.asarray(operand) for operand in inputs)
        if by_opset:  # onnx takes the defaults of the newest operator set
            names = {attribute.name for attribute in self.onnx_node.attribute}
            options = {n: v for n, v in options.items() if n in names} | {"opset": self.run_params["opsets"][""]}
        results = kernel(*inputs, **options)
        return results if isinstance(results, tuple) else (np.asarray(results),)

    return run

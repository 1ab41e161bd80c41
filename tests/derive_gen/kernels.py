"""Operators in float64 that onnx's evaluator computes in float32, or not at all, or wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class LayerNormalization(OpRun):
    def _run(self, x: np.ndarray, scale: np.ndarray, bias: Any = None, axis: int = -1, epsilon: float = 1e-5,
             stash_type: int = 1) -> tuple[np.ndarray, ...]:  # fmt: skip
        axes = tuple(range(axis % x.ndim, x.ndim))
        mean = x.mean(axes, keepdims=True)
        var = ((x - mean) ** 2).mean(axes, keepdims=True)
        made = (x - mean) / np.sqrt(var + epsilon) * scale
        return (made if bias is None else made + bias, mean, 1 / np.sqrt(var + epsilon))[: len(self.onnx_node.output)]


class RMSNormalization(OpRun):
    def _run(self, x: np.ndarray, scale: np.ndarray, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
             ) -> tuple[np.ndarray]:  # fmt: skip
        axes = tuple(range(axis % x.ndim, x.ndim))
        return (x / np.sqrt((x * x).mean(axes, keepdims=True) + epsilon) * scale,)


class Gelu(OpRun):
    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        from math import erf

        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2))),)


class Erf(OpRun):
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        from math import erf

        return (np.vectorize(erf, otypes=[np.float64])(x),)


class GlobalMaxPool(OpRun):
    """onnx's keeps one dimension where it should keep all of them."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class LpNormalization(OpRun):
    """onnx's takes no absolute values."""

    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2) -> tuple[np.ndarray]:
        return (x / (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p),)


KERNELS = [GlobalMaxPool, LpNormalization, LayerNormalization, RMSNormalization, Gelu, Erf]

"""Products of float64 that ONNX Runtime does not compute, because large matrices are float32: an operand is widened in
pieces, or else the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from gopt.runtime.memory import give_back

Array = np.ndarray[Any, Any]
LARGE = 1 << 22
"""Elements from which on a matrix is large."""
_PIECE = 1 << 20
"""Elements that are widened at a time."""


def matmul(a: Array, b: Array) -> Array:
    """ONNX MatMul of a matrix, or of several, and a matrix."""
    if b.ndim == 2:
        return _product(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    product: Array = np.matmul(a, b)
    return product


def gemm(
    a: Array, b: Array, c: Array | None = None, *, alpha: float | None = None, beta: float | None = None,
    transA: int | None = None, transB: int | None = None,
) -> Array:  # fmt: skip
    """ONNX Gemm."""
    y = _product(a.T if transA else a, b.T if transB else b)
    if alpha is not None and alpha != 1:
        y *= y.dtype.type(alpha)
    if c is not None:
        y += c if beta is None else beta * c
    return y


KERNELS = (("MatMul", matmul), ("Gemm", gemm))
"""Operators with their kernels for operands of two types, and for a result in another type than both."""


def _product(a: Array, b: Array) -> Array:
    """a[m, k] times b[k, n] in pieces of the largest matrix. Of two operands in float64 the result is not."""
    (m, k), n = a.shape, b.shape[1]
    wide = np.float64
    if a.dtype == b.dtype == wide:
        give_back()
        y = np.empty((m, n), np.float32)
        for rows in _pieces(m, max(n, k)):
            y[rows] = a[rows] @ b
        return y
    if a.size > b.size:
        return np.ascontiguousarray(_product(b.T, a.T).T)
    y = np.zeros((m, n), wide)
    if b.flags.c_contiguous:
        for rows in _pieces(k, n):
            y += a[:, rows].astype(wide) @ b[rows].astype(wide)
    else:
        for columns in _pieces(n, k):
            y[:, columns] = a.astype(wide) @ b[:, columns].astype(wide)
    return y


def _pieces(count: int, length: int) -> list[slice]:
    step = max(1, _PIECE // max(length, 1))
    return [slice(start, start + step) for start in range(0, count, step)]

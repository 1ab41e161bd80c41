"""Grids, transforms and windows of signals by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gopt.operators.torch_call import TYPES, NodeSettings, numbers


def window(name: str, **factors: float) -> Callable[..., Any]:
    """A window function of PyTorch by its name."""

    def call(t: Any, a: NodeSettings, size: Any) -> Any:
        values = getattr(t, name)(int(numbers(size)[0]), bool(a.get("periodic", 1)), **factors, dtype=t.float64)
        return values.to(getattr(t, TYPES[a.get("output_datatype", 1)]))

    return call


def grid_sample(t: Any, a: NodeSettings, x: Any, grid: Any) -> Any:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(a.get("mode", "linear"), a.get("mode", "linear"))
    padding, ends = a.get("padding_mode", "zeros"), bool(a.get("align_corners", 0))
    wide = x if x.dtype.itemsize >= 4 else x.float()
    return t.nn.functional.grid_sample(wide, grid.to(wide.dtype), mode, padding, ends).to(x.dtype)


def determinant(t: Any, a: NodeSettings, x: Any) -> Any:
    return t.linalg.det(x if x.dtype.itemsize >= 4 else x.float()).to(x.dtype)


def identity(t: Any, a: NodeSettings, like: Any) -> Any:
    rows, columns = (t.arange(size, device=like.device) for size in like.shape)
    dtype = getattr(t, TYPES[a["dtype"]]) if a.get("dtype") else like.dtype
    return (columns - rows.unsqueeze(1) == a.get("k", 0)).to(dtype)


def written(t: Any, a: NodeSettings, cache: Any, new: Any, starts: Any = None) -> Any:
    """A TensorScatter: for each sample, elements in a row from a place on."""
    axis, size = a.get("axis", -2) % cache.ndim, new.shape[a.get("axis", -2)]
    at = t.arange(size, device=cache.device).reshape([-1 if dim == axis else 1 for dim in range(cache.ndim)])
    if starts is not None:
        at = at + starts.reshape(-1, *[1] * (cache.ndim - 1))
    at = at % cache.shape[axis] if a.get("mode", "linear") == "circular" else at
    return cache.scatter(axis, at.expand(new.shape), new)


def product_of_steps(t: Any, a: NodeSettings, x: Any, y: Any, *zeros: Any) -> Any:
    """A MatMulInteger: zero points of all, of rows or of columns."""
    left, right = [*zeros, None, None][:2]
    x, y = x.double(), y.double()
    x = x if left is None else x - (left.double() if left.numel() == 1 or left.ndim > 1 else left.double().unsqueeze(1))
    return (x @ (y if right is None else y - right.double())).to(t.int32)

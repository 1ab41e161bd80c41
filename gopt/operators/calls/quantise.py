"""Quantisation by PyTorch."""

from __future__ import annotations

from typing import Any

from gopt.operators.torch_call import TYPES, NodeSettings


def _spread(a: NodeSettings, value: Any, x: Any) -> Any:
    """A scale or a zero point beside the elements: of all, of an axis, or of blocks along an axis."""
    axis, block = a.get("axis", 1), a.get("block_size", 0)
    if value.numel() == 1:
        return value.reshape(())
    if block:
        return value.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return value.reshape([-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)])


def quantise(t: Any, a: NodeSettings, x: Any, scale: Any, zero: Any = None) -> Any:
    type_ = getattr(t, TYPES[a.get("output_dtype", 0) or 2]) if zero is None else zero.dtype
    precision = getattr(t, TYPES[a["precision"]]) if a.get("precision") else t.promote_types(x.dtype, scale.dtype)
    precision = precision if precision.is_floating_point else t.float32
    shares = x.to(precision) / _spread(a, scale.to(precision), x)
    if type_.is_floating_point:
        edge = t.finfo(type_).max
        return (shares.clamp(-edge, edge) if a.get("saturate", 1) else shares).to(type_)
    edges = t.iinfo(type_)
    steps = shares.double().round() + (0 if zero is None else _spread(a, zero.double(), x))
    return steps.clamp(edges.min, edges.max).to(type_)


def restore(t: Any, a: NodeSettings, x: Any, scale: Any, zero: Any = None) -> Any:
    steps = x.float() if zero is None or x.is_floating_point() else x.float() - _spread(a, zero.float(), x)
    type_ = getattr(t, TYPES[a["output_dtype"]]) if a.get("output_dtype") else scale.dtype
    return (steps * _spread(a, scale, x)).to(type_)


def quantise_by_range(t: Any, a: NodeSettings, x: Any) -> tuple[Any, Any, Any]:
    """The result, the scale and the zero point of a DynamicQuantizeLinear."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    scale = t.where(scale == 0, 1, scale)
    zero = (-low / scale).clamp(0, 255).round()
    return ((x / scale).round() + zero).clamp(0, 255).to(t.uint8), scale, zero.to(t.uint8)

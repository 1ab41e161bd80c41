"""Operators that move, choose, join and cut elements, and those that make values of a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx

from gopt import limits
from gopt.operators.calls import layouts, resize
from gopt.operators.dims import choices, elements, moves, normalise
from gopt.operators.dims.link import DimFactors
from gopt.operators.operator import (
    Array,
    Attributes,
    Indices,
    Kernel,
    Operator,
    Slope,
    TorchCall,
    of_operands,
)
from gopt.operators.torch_call import TYPES, numbers, tensor_of

NONE, STEP, LINEAR, AFFINE, BENT, CURVED = Slope
_FIRST, _WRITTEN = (LINEAR, NONE), (BENT, NONE, CURVED)


def axes_of(attributes: Attributes, operands: Sequence[Any]) -> tuple[int, ...] | None:
    """The axes named by an attribute or the second operand; None if none."""
    named = operands[1] if len(operands) > 1 else None
    axes = attributes.get("axes") if named is None else numbers(named)
    return None if axes is None else tuple(int(axis) for axis in axes)


def _reshape(attributes: Attributes, value: Any, shape: Any = None) -> Any:
    old, wanted = value.shape, [int(size) for size in (attributes["shape"] if shape is None else numbers(shape))]
    if not attributes.get("allowzero", 0):
        wanted = [old[dim] if size == 0 else size for dim, size in enumerate(wanted)]
    return value.reshape(wanted)


def _flatten(attributes: Attributes, value: Any) -> Any:
    shape, axis = value.shape, attributes.get("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return value.reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))


def _squeezed(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.asarray(np.squeeze(operands[0], axes_of(attributes, operands)))


def _unsqueezed(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.expand_dims(operands[0], axes_of(attributes, operands) or ())


def _squeezed_tensor(torch: Any, attributes: Attributes, *operands: Any) -> Any:
    axes = axes_of(attributes, operands)
    return operands[0].squeeze() if axes is None else operands[0].squeeze(axes)


def _unsqueezed_tensor(torch: Any, attributes: Attributes, *operands: Any) -> Any:
    axes = axes_of(attributes, operands) or ()
    return reduce(torch.unsqueeze, sorted(axis % (operands[0].ndim + len(axes)) for axis in axes), operands[0])


def _transposed(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.asarray(np.transpose(operands[0], attributes.get("perm")))


def _dims(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.array(operands[0].shape[attributes.get("start", 0) : attributes.get("end")], np.int64)


def _expanded(attributes: Attributes, operands: Sequence[Any]) -> Array:
    shape = np.broadcast_shapes(operands[0].shape, tuple(operands[1].tolist()))
    return np.broadcast_to(operands[0], shape)


def _joined(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.concatenate(operands, int(attributes["axis"]))


def _gathered(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.asarray(np.take(operands[0], operands[1], int(attributes.get("axis", 0))))


def _picked(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.take_along_axis(operands[0], operands[1], int(attributes.get("axis", 0)))


def _cuts(attributes: Attributes, operands: Sequence[Any]) -> tuple[slice, ...]:
    if "starts" in attributes:
        operands = [*operands, *(attributes.get(name) for name in ("starts", "ends", "axes"))]
    data, starts, ends, axes, steps = [*operands, None, None][:5]
    starts, ends = numbers(starts), numbers(ends)
    along = range(len(starts)) if axes is None else numbers(axes)
    by = [1] * len(starts) if steps is None else numbers(steps)
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(along, starts, ends, by, strict=True):
        cut[axis] = slice(start, None if step < 0 and end < -data.shape[axis] else end, step)
    return tuple(cut)


def _sliced(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.asarray(operands[0][_cuts(attributes, operands)])


def _sliced_tensor(torch: Any, attributes: Attributes, *operands: Any) -> Any:
    data, cuts = operands[0], _cuts(attributes, operands)
    backward = [dim for dim, cut in enumerate(cuts) if (cut.step or 1) < 0]  # PyTorch has no negative step
    for dim in backward:
        steps = torch.tensor(range(data.shape[dim])[cuts[dim]], dtype=torch.int64, device=data.device)
        data = data.index_select(dim, steps)
    return data[tuple(slice(None) if dim in backward else cut for dim, cut in enumerate(cuts))]


def _bounded(count: int) -> None:
    """Raise ValueError for a result of more elements than are worth to be computed."""
    if count > limits.FOLDED_ELEMENTS:
        raise ValueError("large")


def filled(attributes: Attributes, operands: Sequence[Any]) -> Array:
    """The result of a ConstantOfShape."""
    sizes = [int(size) for size in numbers(operands[0])]
    _bounded(math.prod(sizes))
    value = attributes.get("value")
    number = np.float32(0) if value is None else onnx.numpy_helper.to_array(value).reshape(-1)[0]
    return np.full(sizes, number)


def _filled_tensor(torch: Any, attributes: Attributes, shape: Any) -> Any:
    value, sizes = attributes.get("value"), [int(size) for size in numbers(shape)]
    if value is None:
        return torch.zeros(sizes, dtype=torch.float32)
    number = onnx.numpy_helper.to_array(value).reshape(-1)[0].item()
    return torch.full(sizes, number, dtype=getattr(torch, TYPES[value.data_type]))


def _range(attributes: Attributes, operands: Sequence[Any]) -> Array:
    start, limit, step = (operand.reshape(-1)[0] for operand in operands)
    count = max(math.ceil((float(limit) - float(start)) / float(step)), 0) if step else 0
    _bounded(count)
    return np.asarray(start + step * np.arange(count, dtype=start.dtype), start.dtype)


def _constant(torch: Any, attributes: Attributes) -> Any:
    for name, value in attributes.items():
        if name == "value":
            return tensor_of(torch, value)
        if name.startswith(("value_float", "value_int")):
            return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)
    raise NotImplementedError("a constant of text, or a sparse one")


def _range_tensor(torch: Any, attributes: Attributes, *ends: Any) -> Any:
    dtype = getattr(ends[0], "dtype", None) or (torch.int64 if isinstance(ends[0], int) else torch.float32)
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.name)
    return torch.arange(*(numbers(end)[0] for end in ends), dtype=dtype)


def _tiled(attributes: Attributes, operands: Sequence[Any]) -> Array:
    repeats = operands[1].tolist()
    _bounded(operands[0].size * math.prod(max(times, 1) for times in repeats))  # NumPy repeats axis by axis
    return np.asarray(np.tile(operands[0], repeats))


def _from_start(torch: Any, indices: Any, length: int) -> Any:
    return torch.where(indices < 0, indices + length, indices).to(torch.int64)


def _gathered_tensor(torch: Any, attributes: Attributes, data: Any, indices: Any) -> Any:
    axis = attributes.get("axis", 0) % data.ndim
    rows = data.index_select(axis, _from_start(torch, indices, data.shape[axis]).reshape(-1))
    return rows.reshape((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]))


def _picked_tensor(torch: Any, attributes: Attributes, data: Any, indices: Any) -> Any:
    axis = attributes.get("axis", 0)
    return data.gather(axis, _from_start(torch, indices, data.shape[axis]))


def _rows(torch: Any, data: Any, indices: Any, batch: int = 0) -> tuple[Any, Any, tuple[int, ...]]:
    """The data as rows, the row of each tuple, and the shape of a row."""
    lines = [torch.arange(data.shape[dim], device=indices.device) for dim in range(batch)]
    lines = [line.reshape(-1, *[1] * (indices.ndim - 2 - dim)) for dim, line in enumerate(lines)]
    row, dim = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=indices.device), 0
    for dim, index in enumerate((*lines, *indices.unbind(-1)), 1):
        row = row * data.shape[dim - 1] + _from_start(torch, index, data.shape[dim - 1])
    rest = tuple(data.shape[dim:])
    return data.reshape(-1, *rest), row.reshape(-1), rest


def _gathered_rows(torch: Any, attributes: Attributes, data: Any, indices: Any) -> Any:
    rows, at, rest = _rows(torch, data, indices, attributes.get("batch_dims", 0))
    return rows.index_select(0, at).reshape(*indices.shape[:-1], *rest)


def _written(torch: Any, attributes: Attributes, data: Any, indices: Any, new: Any) -> Any:
    """Elements in the places of others, or joined with them."""
    axis, how = attributes.get("axis", 0), attributes.get("reduction", "none")
    at = _from_start(torch, indices, data.shape[axis])
    if how in _WAYS:
        return data.scatter_reduce(axis, at, new, _WAYS[how])
    return (data.scatter_add if how == "add" else data.scatter)(axis, at, new)


def _written_rows(torch: Any, attributes: Attributes, data: Any, indices: Any, new: Any) -> Any:
    (rows, at, rest), how = _rows(torch, data, indices), attributes.get("reduction", "none")
    new = new.reshape(-1, *rest)
    if how in _WAYS:
        return rows.index_reduce(0, at, new, _WAYS[how]).reshape(data.shape)
    return (rows.index_add if how == "add" else rows.index_copy)(0, at, new).reshape(data.shape)


_WAYS = {"mul": "prod", "max": "amax", "min": "amin"}


def _running_sum(torch: Any, attributes: Attributes, data: Any, axis: Any) -> Any:
    dim, reverse = int(numbers(axis)[0]), attributes.get("reverse", 0)
    data = data.flip(dim) if reverse else data
    result = data.cumsum(dim, dtype=data.dtype)
    result = result - data if attributes.get("exclusive", 0) else result
    return result.flip(dim) if reverse else result


def _one_hot(torch: Any, attributes: Attributes, indices: Any, depth: Any, values: Any) -> Any:
    count, axis = int(numbers(depth)[0]), attributes.get("axis", -1)
    axis += indices.ndim + 1 if axis < 0 else 0
    line = torch.arange(count, device=indices.device).reshape(-1, *[1] * (indices.ndim - axis))
    return torch.where(_from_start(torch, indices, count).unsqueeze(axis) == line, values[1], values[0])


def _chosen(
    name: str, indices: Indices, dims: DimFactors, kernel: Kernel | None = None, torch: TorchCall | None = None
) -> Operator:
    return Operator(name, _FIRST, choosers=(1,), indices=indices, zero=True, kernel=kernel, dims=dims, torch=torch)


OPERATORS = (
    Operator(
        "Reshape", _FIRST, total=True, shape=1, zero=True, kernel=lambda a, xs: _reshape(a, *xs),
        torch=lambda t, a, *xs: _reshape(a, *xs),
    ),
    Operator(
        "Flatten", _FIRST, total=True, zero=True, kernel=lambda a, xs: _flatten(a, *xs),
        torch=lambda t, a, x: _flatten(a, x),
    ),
    Operator("Squeeze", _FIRST, total=True, zero=True, settings=(1,), kernel=_squeezed, torch=_squeezed_tensor),
    Operator("Unsqueeze", _FIRST, total=True, zero=True, settings=(1,), kernel=_unsqueezed, torch=_unsqueezed_tensor),
    Operator(
        "Transpose", _FIRST, total=True, order="perm", zero=True, kernel=_transposed, dims=moves.transpose,
        torch=lambda t, a, x: x.permute(a.get("perm", [*range(x.ndim)][::-1])),
    ),
    Operator(
        "Expand", _FIRST, total=True, shape=1, zero=True, kernel=_expanded, dims=moves.expand,
        torch=lambda t, a, x, shape: x.broadcast_to(t.broadcast_shapes(x.shape, numbers(shape))),
    ),
    Operator(
        "Tile", _FIRST, zero=True, settings=(1,), kernel=_tiled, dims=moves.tile,
        torch=lambda t, a, x, repeats: x.tile(numbers(repeats)),
    ),
    Operator(
        "Slice", _FIRST, total=True, lengths=(1, 2), settings=(3, 4), zero=True, kernel=_sliced, dims=moves.sliced,
        torch=_sliced_tensor,
    ),
    Operator("Split", _FIRST, total=True, lengths=(1,), zero=True, dims=moves.split, torch=layouts.split),
    Operator(
        "Concat", (AFFINE,), total=True, joins=True, kernel=_joined, dims=moves.concat,
        torch=lambda t, a, *xs: t.cat(xs, a["axis"]),
    ),
    Operator("Pad", (AFFINE, NONE, AFFINE, NONE), aside=(2,), dims=moves.padded, settings=(1, 3), torch=layouts.pad),
    Operator(
        "Trilu", _FIRST, total=True, zero=True, settings=(1,), dims=elements.triangle,
        torch=lambda t, a, x, k=0: (t.triu if a.get("upper", 1) else t.tril)(x, int(numbers(k)[0])),
    ),
    Operator("ReverseSequence", _FIRST, zero=True, dims=elements.reverse_sequence, torch=layouts.reverse_sequence),
    Operator("DepthToSpace", _FIRST, total=True, zero=True, dims=normalise.depth_space, torch=layouts.depth_to_space),
    Operator("SpaceToDepth", _FIRST, total=True, zero=True, dims=normalise.depth_space, torch=layouts.space_to_depth),
    Operator("CenterCropPad", _FIRST, lengths=(1,), zero=True, torch=layouts.centred),
    Operator(
        "Resize", _FIRST, shape=3, aside=(1, 2), zero=True, dims=normalise.resize,
        settings=(1, 2), torch=resize.resize_of_any_version,
    ),
    Operator("Upsample", _FIRST, aside=(1,), zero=True, settings=(1,), torch=resize.upsample),
    _chosen("Gather", Indices.SLICE, choices.gather, _gathered, _gathered_tensor),
    _chosen("GatherElements", Indices.ELEMENT, choices.gather_elements, _picked, _picked_tensor),
    _chosen(
        "GatherND", Indices.TUPLE, choices.gather_nd, torch=_gathered_rows
    ),
    Operator("Compress", _FIRST, choosers=(1,), zero=True, settings=(1,), torch=layouts.compress),
    Operator(
        "ScatterElements", _WRITTEN, choosers=(1,), indices=Indices.ELEMENT, dims=choices.scatter_elements,
        torch=_written,
    ),
    Operator(
        "ScatterND", _WRITTEN, choosers=(1,), indices=Indices.TUPLE, dims=choices.scatter_nd, torch=_written_rows
    ),
    Operator(
        "OneHot", (NONE, NONE, LINEAR), lengths=(1,), choosers=(0,), aside=(2,), dims=elements.one_hot, torch=_one_hot
    ),
    Operator("CumSum", _FIRST, zero=True, settings=(1,), dims=elements.running, torch=_running_sum),
    Operator("Constant", total=True, torch=_constant),
    Operator(
        "ConstantOfShape", (NONE,), total=True, shape=0, kernel=filled,
        torch=_filled_tensor,
    ),
    Operator(
        "Range", (NONE,), lengths=(0, 1, 2), kernel=_range,
        torch=_range_tensor,
    ),
    Operator(
        "Shape", (NONE,), total=True, by_type=(0,), kernel=_dims,
        torch=lambda t, a, x: t.tensor(x.shape[a.get("start", 0) : a.get("end")], dtype=t.int64, device="cpu"),
    ),
    Operator(
        "Size", (NONE,), total=True, by_type=(0,), kernel=of_operands(lambda x: np.array(x.size, np.int64)),
        torch=lambda t, a, x: t.tensor(x.numel(), device="cpu"),
    ),
)  # fmt: skip

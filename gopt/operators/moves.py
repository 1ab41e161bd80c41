"""Operators that move, choose, join and cut elements, and those that make values of a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from gopt import limits
from gopt.operators.dims import choices, elements, moves, normalise
from gopt.operators.dims.link import DimFactors
from gopt.operators.operator import Array, Attributes, Indices, Kernel, Operator, Slope, of_operands

NONE, STEP, LINEAR, AFFINE, BENT, CURVED = Slope
_FIRST, _WRITTEN = (LINEAR, NONE), (BENT, NONE, CURVED)


def axes_of(attributes: Attributes, operands: Sequence[Any]) -> tuple[int, ...] | None:
    """The axes named by an attribute or the second operand; None if none."""
    named = operands[1] if len(operands) > 1 else None
    axes = attributes.get("axes") if named is None else named.reshape(-1).tolist()
    return None if axes is None else tuple(int(axis) for axis in axes)


def _reshaped(attributes: Attributes, operands: Sequence[Any]) -> Array:
    old, wanted = operands[0].shape, [int(size) for size in operands[1]]
    if not attributes.get("allowzero", 0):
        wanted = [old[dim] if size == 0 else size for dim, size in enumerate(wanted)]
    return np.asarray(operands[0].reshape(wanted))


def _flattened(attributes: Attributes, operands: Sequence[Any]) -> Array:
    shape, axis = operands[0].shape, attributes.get("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return np.asarray(operands[0].reshape(math.prod(shape[:axis]), -1 if operands[0].size else math.prod(shape[axis:])))


def _squeezed(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.asarray(np.squeeze(operands[0], axes_of(attributes, operands)))


def _unsqueezed(attributes: Attributes, operands: Sequence[Any]) -> Array:
    return np.expand_dims(operands[0], axes_of(attributes, operands) or ())


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


def _sliced(attributes: Attributes, operands: Sequence[Any]) -> Array:
    if "starts" in attributes:
        named = [np.asarray(attributes[name]) for name in ("starts", "ends", "axes") if name in attributes]
        operands = [*operands, *named]
    data, starts, ends, axes, steps = [*operands, None, None][:5]
    along = range(len(starts)) if axes is None else axes.tolist()
    by = np.ones(len(starts), np.int64) if steps is None else steps
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(along, starts.tolist(), ends.tolist(), by.tolist(), strict=True):
        cut[axis] = slice(start, None if step < 0 and end < -data.shape[axis] else end, step)
    return np.asarray(data[tuple(cut)])


def _bounded(count: int) -> None:
    """Raise ValueError for a result of more elements than are worth to be computed."""
    if count > limits.FOLDED_ELEMENTS:
        raise ValueError("large")


def filled(attributes: Attributes, operands: Sequence[Any]) -> Array:
    """The result of a ConstantOfShape."""
    value, sizes = attributes.get("value"), [int(size) for size in operands[0].reshape(-1)]
    _bounded(math.prod(sizes))
    number = np.float32(0) if value is None else onnx.numpy_helper.to_array(value).reshape(-1)[0]
    return np.full(sizes, number)


def _range(attributes: Attributes, operands: Sequence[Any]) -> Array:
    start, limit, step = (operand.reshape(-1)[0] for operand in operands)
    count = max(math.ceil((float(limit) - float(start)) / float(step)), 0) if step else 0
    _bounded(count)
    return np.asarray(start + step * np.arange(count, dtype=start.dtype), start.dtype)


def _tiled(attributes: Attributes, operands: Sequence[Any]) -> Array:
    repeats = operands[1].tolist()
    _bounded(operands[0].size * math.prod(max(times, 1) for times in repeats))  # NumPy repeats axis by axis
    return np.asarray(np.tile(operands[0], repeats))


def _chosen(name: str, indices: Indices, dims: DimFactors, kernel: Kernel | None = None) -> Operator:
    return Operator(name, _FIRST, choosers=(1,), indices=indices, zero=True, kernel=kernel, dims=dims)


OPERATORS = (
    Operator("Reshape", _FIRST, total=True, shape=1, zero=True, kernel=_reshaped),
    Operator("Flatten", _FIRST, total=True, zero=True, kernel=_flattened),
    Operator("Squeeze", _FIRST, total=True, zero=True, kernel=_squeezed),
    Operator("Unsqueeze", _FIRST, total=True, zero=True, kernel=_unsqueezed),
    Operator("Transpose", _FIRST, total=True, order="perm", zero=True, kernel=_transposed, dims=moves.transpose),
    Operator("Expand", _FIRST, total=True, shape=1, zero=True, kernel=_expanded, dims=moves.expand),
    Operator("Tile", _FIRST, zero=True, kernel=_tiled, dims=moves.tile),
    Operator("Slice", _FIRST, total=True, lengths=(1, 2), zero=True, kernel=_sliced, dims=moves.sliced),
    Operator("Split", _FIRST, total=True, lengths=(1,), zero=True, dims=moves.split),
    Operator("Concat", (AFFINE,), total=True, joins=True, kernel=_joined, dims=moves.concat),
    Operator("Pad", (AFFINE, NONE, AFFINE, NONE), aside=(2,), dims=moves.padded),
    Operator("Trilu", _FIRST, total=True, zero=True, dims=elements.triangle),
    Operator("ReverseSequence", _FIRST, zero=True, dims=elements.reverse_sequence),
    Operator("DepthToSpace", _FIRST, total=True, zero=True, dims=normalise.depth_space),
    Operator("SpaceToDepth", _FIRST, total=True, zero=True, dims=normalise.depth_space),
    Operator("CenterCropPad", _FIRST, lengths=(1,), zero=True),
    Operator("Resize", _FIRST, shape=3, aside=(1, 2), zero=True, dims=normalise.resize),
    Operator("Upsample", _FIRST, aside=(1,), zero=True),
    _chosen("Gather", Indices.SLICE, choices.gather, _gathered),
    _chosen("GatherElements", Indices.ELEMENT, choices.gather_elements, _picked),
    _chosen("GatherND", Indices.TUPLE, choices.gather_nd),
    Operator("Compress", _FIRST, choosers=(1,), zero=True),
    Operator("ScatterElements", _WRITTEN, choosers=(1,), indices=Indices.ELEMENT, dims=choices.scatter_elements),
    Operator("ScatterND", _WRITTEN, choosers=(1,), indices=Indices.TUPLE, dims=choices.scatter_nd),
    Operator("OneHot", (NONE, NONE, LINEAR), lengths=(1,), choosers=(0,), aside=(2,), dims=elements.one_hot),
    Operator("CumSum", _FIRST, zero=True, dims=elements.running),
    Operator("Constant", total=True),
    Operator("ConstantOfShape", (NONE,), total=True, shape=0, kernel=filled),
    Operator("Range", (NONE,), lengths=(0, 1, 2), kernel=_range),
    Operator("Shape", (NONE,), total=True, by_type=(0,), kernel=_dims),
    Operator("Size", (NONE,), total=True, by_type=(0,), kernel=of_operands(lambda x: np.array(x.size, np.int64))),
)

"""Constants as functions of the batch size: nodes computing, at any size, a constant known at two sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper


def affine(a: int, b: int, sizes: tuple[int, int]) -> tuple[int, int] | None:
    """``factor``, ``offset`` of factor * size + offset, equal to ``a`` and ``b`` at the two sizes."""
    factor, rest = divmod(b - a, sizes[1] - sizes[0])
    return None if rest else (factor, a - factor * sizes[0])


@dataclass(slots=True)
class SizedConstants:
    """Nodes and constants computing with the size. ``sizes``: the two sizes. ``sized``: an input with the size as
    dimension ``axis``."""

    sizes: tuple[int, int]
    sized: str
    axis: int = 0
    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    _size: str = ""

    def function(self, one: np.ndarray, two: np.ndarray, name: str, infers: bool) -> str | None:
        """The value equal to ``one`` and ``two`` at the two sizes; None without a fitting form. ``infers``: whether
        this is the shape of a Reshape, which infers a dimension."""
        if one.dtype != two.dtype or one.ndim != two.ndim:
            return None
        if one.shape != two.shape:
            return self._sized_tensor(one, two, name)
        if one.dtype.kind == "i" and one.ndim <= 1:
            return self._integers(one, two, name, infers)
        if one.dtype.kind == "f":
            return self._floats(one, two, name)
        return None

    def _integers(self, one: np.ndarray, two: np.ndarray, name: str, infers: bool) -> str | None:
        lines = [affine(int(a), int(b), self.sizes) for a, b in zip(one.ravel(), two.ravel())]
        if None in lines:
            return None
        moving = [index for index, line in enumerate(lines) if line and line[0]]
        if infers and len(moving) == 1 and (one > 0).all() and lines[moving[0]][1] == 0:  # type: ignore[index]
            fixed = one.copy()
            fixed[moving[0]] = -1
            return self._constant(fixed, name)
        parts = [self._line(*line, f"{name}.{index}") for index, line in enumerate(lines) if line]
        if one.ndim == 0:
            joined = self._add("Squeeze", [parts[0]], name)
        else:
            joined = parts[0] if len(parts) == 1 else self._add("Concat", parts, name, axis=0)
        return joined if one.dtype == np.int64 else self._add("Cast", [joined], f"{name}.cast", to=_onnx(one.dtype))

    def _line(self, factor: int, offset: int, name: str) -> str:
        """factor * size + offset, of shape [1]."""
        if factor == 0:
            return self._constant(np.array([offset], np.int64), name)
        line = self._batch()
        if factor != 1:
            line = self._add(
                "Mul", [line, self._constant(np.array([factor], np.int64), f"{name}.factor")], f"{name}.mul"
            )
        if offset:
            line = self._add(
                "Add", [line, self._constant(np.array([offset], np.int64), f"{name}.offset")], f"{name}.add"
            )
        return line

    def _floats(self, one: np.ndarray, two: np.ndarray, name: str) -> str | None:
        """c * size, c / size, or n / (n - 1) of n = k * size, the unbiased variance."""
        wide, wide_two = one.astype(np.float64), two.astype(np.float64)
        near = 4 * float(np.finfo(one.dtype).eps)
        a, b = self.sizes
        for op, constant, expected in (("Mul", wide / a, wide / a * b), ("Div", wide * a, wide * a / b)):
            if np.allclose(wide_two, expected, rtol=near, atol=0):
                size = self._float(1, one.dtype, name)
                fixed = self._constant(constant.astype(one.dtype), f"{name}.constant")
                return self._add(op, [size, fixed] if op == "Mul" else [fixed, size], name)
        if one.ndim or wide <= 1:
            return None
        factor = round(float(wide / (wide - 1)) / a)
        if factor and np.allclose([wide, wide_two], [factor * a / (factor * a - 1), factor * b / (factor * b - 1)],
                                  rtol=near, atol=0):  # fmt: skip
            count = self._float(factor, one.dtype, name)
            less = self._add("Sub", [count, self._constant(np.array(1, one.dtype), f"{name}.one")], f"{name}.less")
            return self._add("Div", [count, less], name)
        return None

    def _float(self, factor: int, dtype: np.dtype, name: str) -> str:
        """factor * size as a float scalar."""
        size = self._add("Squeeze", [self._line(factor, 0, f"{name}.count")], f"{name}.size")
        return self._add("Cast", [size], f"{name}.float", to=_onnx(dtype))

    def _sized_tensor(self, one: np.ndarray, two: np.ndarray, name: str) -> str | None:
        """Equal rows, or integers with row i as the first row plus i times a step."""
        axes = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape)) if a != b]
        if not one.size or not two.size:
            return None
        row = one[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(one.ndim))]
        if (one == row).all() and (two == row).all():
            shape = self._integers(np.array(one.shape, np.int64), np.array(two.shape, np.int64), f"{name}.shape", False)
            return shape and self._add("Expand", [self._constant(row, f"{name}.row"), shape], name)
        axis = axes[0]
        if len(axes) != 1 or one.dtype.kind != "i" or one.shape[axis] < 2:
            return None
        step = one.take([1], axis).astype(np.int64) - row
        if any((array != row + _counted(array, axis) * step).any() for array in (one, two)):
            return None
        line = affine(one.shape[axis], two.shape[axis], self.sizes)
        return line and self._rows(row, step, axis, line, name)

    def _rows(self, row: np.ndarray, step: np.ndarray, axis: int, line: tuple[int, int], name: str) -> str:
        """row + i * step for each i below factor * size + offset, along the axis."""
        stop = self._add("Squeeze", [self._line(*line, f"{name}.count")], f"{name}.stop")
        start, by = (self._constant(np.array(number, np.int64), f"{name}.{number}") for number in (0, 1))
        numbers = self._add("Range", [start, stop, by], f"{name}.range")
        along = np.array([-1 if dim == axis else 1 for dim in range(row.ndim)], np.int64)
        numbers = self._add("Reshape", [numbers, self._constant(along, f"{name}.along")], f"{name}.numbers")
        numbers = self._add("Mul", [numbers, self._constant(step, f"{name}.step")], f"{name}.moved")
        numbers = self._add("Add", [numbers, self._constant(row.astype(np.int64), f"{name}.row")], f"{name}.rows")
        return self._add("Cast", [numbers], name, to=_onnx(row.dtype))

    def _batch(self) -> str:
        """The size, of shape [1]."""
        if not self._size:
            self._size = self._add("Shape", [self.sized], "batch_size", start=self.axis, end=self.axis + 1)
        return self._size

    def _constant(self, value: np.ndarray, name: str) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def _add(self, op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name


def _counted(value: np.ndarray, axis: int) -> np.ndarray:
    """The number of each row along an axis."""
    return np.arange(value.shape[axis]).reshape([-1 if dim == axis else 1 for dim in range(value.ndim)])


def _onnx(dtype: np.dtype) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype))

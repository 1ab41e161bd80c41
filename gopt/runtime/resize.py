"""Resize in any precision: a matrix per axis, with the reference's results for unit vectors as rows.

The reference interpolates element by element in Python. A matrix per axis is computed once and is exact for every mode.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gopt.runtime.windows import Array


def resize(
    x: Array, roi: Array | None = None, scales: Array | None = None, sizes: Array | None = None, **attributes: Any
) -> Array:
    """ONNX Resize of version 11 and later."""
    axes = [int(axis) % x.ndim for axis in attributes.pop("axes", None) or range(x.ndim)]
    policy = attributes.pop("keep_aspect_ratio_policy", None) or "stretch"
    mode = attributes.get("coordinate_transformation_mode")
    if mode == "tf_crop_and_resize" or policy != "stretch":
        return _reference(x, roi, scales, sizes, axes=axes, keep_aspect_ratio_policy=policy, **attributes)
    steps = [float(scale) for scale in scales] if scales is not None and scales.size else [None] * len(axes)
    ends = [int(size) for size in sizes] if sizes is not None and sizes.size else [None] * len(axes)
    if mode == "align_corners":  # goes by the lengths, which are whole
        ends = [end or int(x.shape[axis] * (step or 1)) for axis, step, end in zip(axes, steps, ends)]
        steps = [None] * len(axes)
    for axis, step, end in zip(axes, steps, ends):
        if step == 1 or end == x.shape[axis]:
            continue
        matrix = _matrix(x.shape[axis], step, end, tuple(sorted(attributes.items())))
        x = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix.astype(x.dtype), -1, axis)
    return x


def upsample(x: Array, scales: Array | None = None, **attributes: Any) -> Array:
    """ONNX Upsample, and Resize of version 10."""
    attribute = attributes.pop("scales", None)
    scales = np.asarray(attribute if scales is None else scales)
    mode = attributes.get("mode") or "nearest"
    return resize(
        x, None, scales, None, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip


@functools.lru_cache(256)
def _matrix(length: int, step: float | None, end: int | None, attributes: tuple[tuple[str, Any], ...]) -> Array:
    scales = None if step is None else np.array([1.0, step])
    sizes = None if end is None else np.array([length, end])
    return _reference(np.eye(length), None, scales, sizes, keep_aspect_ratio_policy="stretch", **dict(attributes))


def _reference(x: Array, roi: Array | None, scales: Array | None, sizes: Array | None, **attributes: Any) -> Array:
    from onnx.reference.ops.op_resize import Resize

    result: Array = Resize._run(None, x, roi, scales, sizes, **attributes)[0]  # type: ignore[arg-type]
    return result

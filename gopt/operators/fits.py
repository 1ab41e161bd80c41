"""Operands with ranks and sizes against the definition of an operator, also where onnx's shape inference is silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gopt.operators.operator import Indices
from gopt.operators.table import OPERATORS

Sizes: TypeAlias = tuple[Any, ...]
"""A shape: integers, and names or None for unknown sizes."""
Shapes: TypeAlias = Sequence[Sizes | None]
"""The shapes of operands; None for an absent or an unknown one."""
SINGLE = frozenset({"OneHot", "Range", "Trilu", "CumSum", "STFT", "SplitToSequence", "SequenceAt", "SequenceInsert",
                    "SequenceErase", "Unsqueeze", "BlackmanWindow", "HammingWindow", "HannWindow"})  # fmt: skip
"""Operators set up by single numbers."""
FREE_AXIS = frozenset({"Flatten", "OneHot", "QuantizeLinear", "DequantizeLinear", "ConcatFromSequence"})
"""Operators with an ``axis`` that may be no dimension of the first operand."""
ROWS = {
    name: tuple(slot for slot in (record.shape, *record.lengths, *record.settings) if slot is not None)
    for name, record in OPERATORS.items()
    if name not in SINGLE
}
"""Operator -> operands of one dimension."""


def misfit(op_type: str, attributes: Mapping[str, Any], shapes: Shapes, index: np.ndarray | None = None) -> str:
    """The shapes of operands in contradiction to the operator; '' if all fit. ``index``: the second operand, of a
    constant."""
    if index is not None and len(shapes) > 1 and None not in shapes[:2] and _beyond(op_type, attributes, shapes, index):
        return f"an index is beyond {list(shapes[0] or ())}"
    rule, rank = RULES.get(op_type), len(shapes[0] or ()) if shapes else 0
    open_sizes = rule in SIZED and not all(isinstance(size, int) for shape in shapes for size in shape or ())
    due = None if open_sizes or None in shapes[:2] else rule
    axes = attributes.get("axes", ()) if op_type != "Unsqueeze" else ()
    axes = (*axes, *([attributes["axis"]] if "axis" in attributes and op_type not in FREE_AXIS else ()))
    inside = not rank or all(-rank <= axis < rank for axis in axes)
    rows = (len(shapes[slot] or ()) == 1 for slot in ROWS.get(op_type, ()) if _has(shapes, slot))
    if inside and all(rows) and (due is None or due(attributes, shapes)):
        return ""
    return f"their shapes are {', '.join(str(list(shape)) for shape in shapes if shape is not None)}"


def _beyond(op_type: str, attributes: Mapping[str, Any], shapes: Shapes, index: np.ndarray) -> bool:
    """Return whether an index names elements that are not in the first operand."""
    data, record = _dims(shapes, 0), OPERATORS.get(op_type)
    if record is None or record.indices is None or not data or not index.size:
        return False
    axis, rows = attributes.get("axis", 0) % len(data), index.reshape(1, -1)
    if record.indices is Indices.TUPLE:
        axis, rows = attributes.get("batch_dims", 0), index.reshape(-1, index.shape[-1]).T
    sizes = zip(data[axis:], rows)
    return any(isinstance(size, int) and (row.min() < -size or row.max() >= size) for size, row in sizes)


def _has(shapes: Shapes, slot: int) -> bool:
    return slot < len(shapes) and shapes[slot] is not None


def _dims(shapes: Shapes, slot: int) -> Sizes:
    """The shape of an operand; () for an absent one."""
    return (shapes[slot] or ()) if slot < len(shapes) else ()


def _alike(one: Sizes, two: Sizes) -> bool:
    """Return whether two shapes may be equal."""
    sizes = [(front, back) for front, back in zip(one, two) if isinstance(front, int) and isinstance(back, int)]
    return len(one) == len(two) and all(front == back for front, back in sizes)


def _are(shapes: Shapes, slots: Sequence[int], due: Sizes) -> bool:
    return all(_alike(_dims(shapes, slot), due) for slot in slots if _has(shapes, slot))


def _spread(shapes: Shapes, slots: Sequence[int], whole: Sizes) -> bool:
    """Return whether operands broadcast to a shape."""
    parts = [_dims(shapes, slot) for slot in slots if _has(shapes, slot)]
    pairs = [pair for part in parts for pair in zip(part[::-1], whole[::-1])]
    return all(len(part) <= len(whole) for part in parts) and all(one in (1, size) for one, size in pairs)


def _transposed(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    data = _dims(shapes, 0)
    return len(attributes.get("perm", data)) == len(data)


def _sliced(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    counts = {_dims(shapes, slot) for slot in range(1, 5) if _has(shapes, slot)}
    return len(counts) < 2 and (_has(shapes, 3) or all(count <= len(_dims(shapes, 0)) for (count,) in counts))


def _along_axes(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    """A row, or a number as well, as in runtimes."""
    return len(_dims(shapes, 1)) < 2


def _by_elements(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    data, indices = _dims(shapes, 0), _dims(shapes, 1)
    axis = attributes.get("axis", 0) % max(len(data), 1)
    inner = all(one <= size for dim, (one, size) in enumerate(zip(indices, data)) if dim != axis)
    return len(data) == len(indices) and inner and _are(shapes, (2,), indices)


def _by_tuples(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    data, indices, batch = _dims(shapes, 0), _dims(shapes, 1), attributes.get("batch_dims", 0)
    if not data or not indices or not _alike(indices[:batch], data[:batch]):
        return False
    *lead, count = indices
    if not isinstance(count, int):
        return True
    return count <= len(data) - batch and _are(shapes, (2,), (*lead, *data[count:]))


def _multiplied(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    front, back = _dims(shapes, 0), _dims(shapes, 1)
    rows, columns = (bool(attributes.get(name, 0)) for name in ("transA", "transB"))
    return len(front) == len(back) == 2 and _spread(shapes, (2,), (front[rows], back[not columns]))


def _convolved(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    return _slides(shapes, attributes.get("group", 1), turned=False)


def _turned(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    return _slides(shapes, attributes.get("group", 1), turned=True)


def _slides(shapes: Shapes, group: int, *, turned: bool) -> bool:
    """Return whether channels of an image, a kernel and a bias fit; ``turned``: of a transposed convolution."""
    image, kernel = _dims(shapes, 0), _dims(shapes, 1)
    if len(image) < 3 or len(image) != len(kernel) or kernel[0] % group:
        return False
    rows, columns = kernel[0], kernel[1] * group
    return image[1] == (rows if turned else columns) and _are(shapes, (2,), (columns if turned else rows,))


def _of_channels(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    return len(_dims(shapes, 0)) > 1 and _are(shapes, range(1, 5), _dims(shapes, 0)[1:2])


def _of_last(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    return _spread(shapes, (1, 2), _dims(shapes, 0))


def _of_classes(attributes: Mapping[str, Any], shapes: Shapes) -> bool:
    scores = _dims(shapes, 0)
    targets = scores[:1] + scores[2:]
    return len(scores) > 1 and _are(shapes, (1,), targets) and _are(shapes, (2,), scores[1:2])


RULES: Mapping[str, Callable[[Mapping[str, Any], Shapes], bool]] = {
    "Transpose": _transposed,
    "Slice": _sliced,
    "CumSum": _along_axes,
    "Unsqueeze": _along_axes,
    "PRelu": _of_last,
    "Gemm": _multiplied,
    "Conv": _convolved,
    "ConvTranspose": _turned,
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), _of_channels),
    **dict.fromkeys(("GatherElements", "ScatterElements"), _by_elements),
    **dict.fromkeys(("GatherND", "ScatterND"), _by_tuples),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _of_last),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), _of_classes),
}
"""Operator -> whether its operands fit."""
SIZED = frozenset(RULES.values()) - {_transposed, _along_axes, _by_tuples}
"""Rules of known sizes."""

"""Gradients of lookups and slices: what was read gets its gradient, added up, everything else zero."""

from __future__ import annotations

from gopt.importers.artifacts.lowering.builder import Builder


def gather_grad(b: Builder, shape: str, indices: str, dy: str, *, axis: int) -> str:
    """Rows of dY added to zeros at the indices, along ``axis``."""
    dims = _dims(b, shape)
    axis, count = axis % len(dims), b.rank(indices)
    rows, wide = dy, list(dims)
    if axis:  # the looked up dimensions come first
        looked_up = list(range(axis, axis + count))
        rest = [axis_left for axis_left in range(len(dims) - 1 + count) if axis_left not in looked_up]
        rows = b.op("Transpose", dy, perm=[*looked_up, *rest])
        wide = [dims[axis], *dims[:axis], *dims[axis + 1 :]]
    positions = b.op("Unsqueeze", b.cast(indices, "int64"), b.array([-1]))
    output = b.op("ScatterND", b.zeros(wide, b.dtype(dy)), positions, rows, reduction="add")
    return b.op("Transpose", output, perm=[*range(1, axis + 1), 0, *range(axis + 1, len(dims))]) if axis else output


def gather_elements_grad(b: Builder, dy: str, shape: str, indices: str, *, axis: int) -> str:
    zeros = b.zeros(_dims(b, shape), b.dtype(dy))
    return b.op("ScatterElements", zeros, indices, dy, axis=axis, reduction="add")


def gather_nd_grad(b: Builder, shape: str, indices: str, dy: str, *, batch_dims: int) -> str:
    if batch_dims:
        raise b.refusal(f"it has batch_dims {batch_dims}", "export the lookup without batch dimensions")
    return b.op("ScatterND", b.zeros(_dims(b, shape), b.dtype(dy)), indices, dy, reduction="add")


def slice_grad(b: Builder, dy: str, shape: str, starts: str, ends: str, axes: str = "", steps: str = "") -> str:
    """dY with zeros before and after it: of a slice of step 1 with constant ends."""
    dims = _dims(b, shape)
    starts_at, last = b.integers(starts), b.integers(ends)
    along = b.integers(axes) if axes else list(range(len(starts_at)))
    if steps and set(b.integers(steps)) != {1}:
        raise b.refusal("it has steps other than 1", "export the slice as an operator without steps")
    before, after = [0] * len(dims), [0] * len(dims)
    for axis, start, stop in zip(along, starts_at, last, strict=True):
        size = dims[axis]
        low, high = (min(max(bound + size if bound < 0 else bound, 0), size) for bound in (start, stop))
        before[axis], after[axis] = low, size - max(high, low)
    return b.op("Pad", dy, b.array([*before, *after]))


def _dims(b: Builder, shape: str) -> tuple[int, ...]:
    """The shape a value holds: the shape of a Shape's operand, or a constant."""
    maker = b.makers.get(shape)
    if maker is not None and maker.op_type == "Shape" and not any(attribute.i for attribute in maker.attribute):
        return b.dims(maker.input[0])
    return tuple(b.integers(shape))

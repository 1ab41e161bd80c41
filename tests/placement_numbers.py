"""What placements mean, in numbers: parts of members, windows and their terms, and the whole of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from onnx import helper

from gopt.collectives.reference import reduced
from gopt.ir.types import TensorType, dtype_name
from gopt.records.placements import Partial, Placement, Replicated, Shard, Window, WindowTerms

Array = np.ndarray


def windowed(whole: Array, window: Window, member: int) -> Array:
    """A member's window, and what its border says beside the dimension: not contiguous where that is possible."""
    low, high = window.ranges[member]
    fill = 0
    if window.border == "lowest":
        fill = -np.inf if whole.dtype.kind == "f" else np.iinfo(whole.dtype).min
    before, behind = max(-low, 0), max(high - whole.shape[window.dim], 0)
    pads = [(before, behind) if dim == window.dim else (0, 0) for dim in range(whole.ndim)]
    padded = np.pad(whole, pads, constant_values=fill)
    return np.asfortranarray(padded.take(range(low + before, high + before), window.dim))


def summed(parts: Sequence[Array], terms: WindowTerms) -> Array:
    """The sum of members' terms, each in its places; what is beside the dimension belongs to nothing."""
    shape = [terms.length if dim == terms.dim else size for dim, size in enumerate(parts[0].shape)]
    made = np.zeros(shape, parts[0].dtype)
    front = np.moveaxis(made, terms.dim, 0)
    for (start, stop), part in zip(terms.ranges, parts):
        low, high = max(start, 0), max(min(stop, terms.length), start, 0)
        front[low:high] += np.moveaxis(part, terms.dim, 0)[low - start : high - start]
    return made


def terms_of(whole: Array, terms: WindowTerms, generator: np.random.Generator) -> list[Array]:
    """Some terms whose sum is the value, where anybody has terms."""
    made = []
    left = np.moveaxis(whole, terms.dim, 0).copy()
    for member, (low, high) in enumerate(terms.ranges):
        mine = generator.integers(-4, 4, (high - low, *left.shape[1:])).astype(whole.dtype)
        for place in range(max(low, 0), min(high, terms.length)):
            if not any(start <= place < stop for start, stop in terms.ranges[member + 1 :]):
                mine[place - low] = left[place]
            left[place] -= mine[place - low]
        made.append(np.moveaxis(mine, 0, terms.dim))
    return made


def type_of(array: Array) -> TensorType:
    return TensorType(dtype_name(helper.np_dtype_to_tensor_dtype(array.dtype)), array.shape)


def cut(whole: Array, placement: Placement, member: int) -> Array:
    """What a member has of an operand: not contiguous where that is possible."""
    if isinstance(placement, Replicated):
        return whole
    if isinstance(placement, Window):
        return windowed(whole, placement, member)
    assert isinstance(placement, Shard)
    assert placement.length == whole.shape[placement.dim], "parts of another length"
    parts = [whole.take(range(*part), placement.dim) for part in placement.parts(member)]
    return np.asfortranarray(np.concatenate(parts, placement.dim))


def joined(parts: Sequence[Array], placement: Placement) -> Iterator[Array]:
    """The whole value; of a replicated one that of every member."""
    if isinstance(placement, Shard):
        apart = [np.split(each, placement.runs, placement.dim) for each in parts]
        runs = [each[number] for number in range(placement.runs) for each in apart]
        yield np.concatenate(runs, placement.dim)
    elif isinstance(placement, Partial):
        yield reduced(parts, placement.op)
    elif isinstance(placement, WindowTerms):
        yield summed(parts, placement)
    else:
        assert isinstance(placement, Replicated)
        yield from parts

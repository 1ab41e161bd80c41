"""Elements moved, padded and chosen by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gopt.operators.torch_call import NodeSettings, numbers


def split(t: Any, a: NodeSettings, x: Any, sizes: Any = None) -> tuple[Any, ...]:
    axis = a.get("axis", 0)
    named = a.get("split") if sizes is None else numbers(sizes)
    if named is None:
        length = -(-x.shape[axis] // a.get("num_outputs", a.results))
        return tuple(x.split(length, axis)) if length else tuple(x for _ in range(a.results))
    return tuple(x.split([int(size) for size in named], axis))


def pad(t: Any, a: NodeSettings, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    sides = [int(side) for side in numbers(a.get("pads", a.get("paddings")) if pads is None else pads)]
    dims = list(range(x.ndim)) if axes is None else [int(axis) % x.ndim for axis in numbers(axes)]
    before, behind = [0] * x.ndim, [0] * x.ndim
    for dim, low, high in zip(dims, sides, sides[len(dims) :]):
        before[dim], behind[dim] = low, high
    mode = a.get("mode", "constant")
    if mode != "constant":
        for dim in range(x.ndim):
            if before[dim] or behind[dim]:
                at = [_FOLDS[mode](step, x.shape[dim]) for step in range(-before[dim], x.shape[dim] + behind[dim])]
                x = x.index_select(dim, t.tensor(at, dtype=t.int64, device=x.device))
        return x
    around = [side for dim in reversed(range(x.ndim)) for side in (before[dim], behind[dim])]
    if value is None or not hasattr(value, "dtype"):
        return t.nn.functional.pad(x, around, value=a.get("value", 0) if value is None else numbers(value)[0])
    inside = t.nn.functional.pad(t.ones(x.shape, dtype=t.bool, device=x.device), around, value=False)
    return t.where(inside, t.nn.functional.pad(x, around, value=0), t.as_tensor(value, device=x.device).reshape(()))


def _reflected(step: int, length: int) -> int:
    folded = step % max(2 * (length - 1), 1)
    return min(folded, 2 * (length - 1) - folded) if length > 1 else 0


_FOLDS: dict[str, Callable[[int, int], int]] = {
    "reflect": _reflected, "edge": lambda step, length: min(max(step, 0), length - 1),
    "wrap": lambda step, length: step % length,
}  # fmt: skip
"""Mode of a Pad -> from a place beside a dimension and the length, the place inside."""


def top(t: Any, a: NodeSettings, x: Any, k: Any = None) -> tuple[Any, Any]:
    """The largest or smallest elements; of equal elements the lowest index stands in front."""
    axis, count = a.get("axis", -1), int(a["k"] if k is None else numbers(k)[0])
    values, at = x.sort(dim=axis, descending=bool(a.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, count), at.narrow(axis, 0, count)


def reverse_sequence(t: Any, a: NodeSettings, x: Any, lengths: Any) -> Any:
    time, batch = a.get("time_axis", 0), a.get("batch_axis", 1)
    steps = t.arange(x.shape[time], device=x.device)
    steps = steps.reshape([-1 if dim == time else 1 for dim in range(x.ndim)])
    ends = lengths.to(t.int64).reshape([-1 if dim == batch else 1 for dim in range(x.ndim)])
    return x.gather(time, t.where(steps < ends, ends - 1 - steps, steps).expand(x.shape))


def depth_to_space(t: Any, a: NodeSettings, x: Any) -> Any:
    (count, depth, high, wide), block = x.shape, a["blocksize"]
    if a.get("mode", "DCR") == "DCR":
        x = x.reshape(count, block, block, depth // block**2, high, wide).permute(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(count, depth // block**2, block, block, high, wide).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(count, depth // block**2, high * block, wide * block)


def space_to_depth(t: Any, a: NodeSettings, x: Any) -> Any:
    (count, depth, high, wide), block = x.shape, a["blocksize"]
    x = x.reshape(count, depth, high // block, block, wide // block, block).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(count, depth * block**2, high // block, wide // block)


def centred(t: Any, a: NodeSettings, x: Any, shape: Any) -> Any:
    """A CenterCropPad: the odd element is cut or added behind."""
    sizes = [int(size) for size in numbers(shape)]
    for axis, size in zip(a.get("axes", range(x.ndim)), sizes):
        length, dim = x.shape[axis], axis % x.ndim
        if size < length:
            x = x.narrow(dim, (length - size) // 2, size)
        elif size > length:
            low = (size - length) // 2
            x = t.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [low, size - length - low])
    return x


def compress(t: Any, a: NodeSettings, x: Any, condition: Any) -> Any:
    axis = a.get("axis")
    x = x.reshape(-1) if axis is None else x
    at = [index for index, flag in enumerate(numbers(condition)) if flag]
    return x.index_select(axis or 0, t.tensor(at, dtype=t.int64, device=x.device))

"""Draws of operators that move elements, and of reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .sketch import Rejected, Sketch


def transpose(s: Sketch) -> str:
    x = s.pick(2, 3, 4)
    rank = len(s.shape(x))
    return s.op("Transpose", [x], **({} if s.chance(0.2) else {"perm": s.random.permutation(rank).tolist()}))


def factors(s: Sketch, size: int) -> list[int]:
    made: list[int] = []
    for prime in (2, 2, 3, 3, 5):
        if size % prime == 0 and s.chance(0.6):
            made.append(prime)
            size //= prime
    made.insert(s.below(len(made) + 1), size)
    return made[:4] if len(made) <= 4 else [*made[:3], int(np.prod(made[3:]))]


def reshape(s: Sketch) -> str:
    x = s.pick()
    target = factors(s, s.values[x].size)
    if s.chance(0.3):
        target[s.below(len(target))] = -1
    if s.chance(0.2) and len(s.shape(x)) >= len(target) and target[0] == s.shape(x)[0]:
        target[0] = 0
    if s.chance(0.2):
        return s.op("Reshape", [x, computed_shape(s, x, target)])
    return s.op("Reshape", [x, s.ints(target)])


def computed_shape(s: Sketch, x: str, target: list[int]) -> str:
    """The target where it keeps the first dimension, as exporters write it."""
    if not s.shape(x) or target[0] != s.shape(x)[0]:
        raise Rejected
    first = s.op("Gather", [s.op("Shape", [x]), s.ints([0])], axis=0)
    return s.op("Concat", [first, s.ints(target[1:])], axis=0) if target[1:] else first


def flatten(s: Sketch) -> str:
    x = s.pick(2, 3, 4)
    return s.op("Flatten", [x], axis=s.below(len(s.shape(x)) + 1, -len(s.shape(x))))


def squeeze(s: Sketch) -> str:
    x = s.pick()
    ones = [axis for axis, size in enumerate(s.shape(x)) if size == 1]
    rank = len(s.shape(x))
    if ones and s.chance(0.5) and rank > 1:
        return s.op("Squeeze", [x]) if s.chance(0.3) and len(ones) < rank else s.op("Squeeze", [x, s.ints(ones[:1])])
    axes = sorted({s.below(rank + 1), s.below(rank + 1)} if s.chance(0.3) and rank < 3 else {s.below(rank + 1)})
    return s.op("Unsqueeze", [x, s.ints(axes)])


def concat(s: Sketch) -> str:
    x = s.pick(1, 2, 3, 4)
    axis = s.below(len(s.shape(x)))
    given = [x]
    for _ in range(s.below(3, 1)):
        size = list(s.shape(x))
        size[axis] = s.below(4, 1)
        alike = [each for each in s.floats if _alike(s.shape(each), s.shape(x), axis)]
        given.append(s.one_of(*alike) if s.chance(0.5) else s.weight(*size))
    s.random.shuffle(given)
    return s.op("Concat", given, axis=axis - (len(s.shape(x)) if s.chance(0.3) else 0))


def _alike(one: tuple[int, ...], two: tuple[int, ...], axis: int) -> bool:
    return len(one) == len(two) and all(a == b for place, (a, b) in enumerate(zip(one, two)) if place != axis)


def split(s: Sketch) -> str:
    x = s.pick(1, 2, 3, 4)
    axis = s.below(len(s.shape(x)))
    size = s.shape(x)[axis]
    parts = s.below(4, 2)
    if size < parts:
        raise Rejected
    if s.opset >= 18 and s.chance(0.4):
        made = s.ops("Split", [x], parts, axis=axis, num_outputs=parts)
    elif size % parts == 0 and s.opset < 18 and s.chance(0.4):
        made = s.ops("Split", [x], parts, axis=axis)
    else:
        cuts = sorted(s.random.choice(np.arange(1, size), parts - 1, replace=False).tolist())
        made = s.ops("Split", [x, s.ints(np.diff([0, *cuts, size]))], parts, axis=axis)
    for each in made[1:]:
        if s.chance(0.6):
            s.use(each)
    return made[0]


def slice_(s: Sketch) -> str:
    x = s.pick(1, 2, 3, 4)
    rank = len(s.shape(x))
    axes = s.random.permutation(rank)[: s.below(rank + 1, 1)].tolist()
    starts, ends, steps = [], [], []
    for axis in axes:
        step = s.one_of(1, 1, 1, 2, -1, -2)
        size = s.shape(x)[axis]
        start, end = (s.below(size), s.one_of(size, 2**31 - 1, size - 1)) if step > 0 else (size - 1, -size - 1)
        starts.append(start - size if s.chance(0.2) and step > 0 else start)
        ends.append(end), steps.append(step)
    shown = [axis - rank if s.chance(0.3) else axis for axis in axes]
    given = [x, s.ints(starts), s.ints(ends), s.ints(shown)]
    return s.op("Slice", [*given, s.ints(steps)] if set(steps) != {1} or s.chance(0.5) else given)


def gather(s: Sketch) -> str:
    x = s.pick(1, 2, 3, 4)
    axis = s.below(len(s.shape(x)))
    size = s.shape(x)[axis]
    places = s.random.integers(-size, size, s.one_of((), (2,), (3,), (2, 2)))
    return s.op("Gather", [x, s.ints(places)], axis=axis)


def embedding(s: Sketch) -> str:
    """Rows of a table by ids that are fed."""
    table = s.weight(s.below(7, 3), s.below(4, 2))
    ids = s.input(s.random.integers(0, s.shape(table)[0], s.one_of((s.batch,), (s.batch, 2))).astype(np.int64))
    return s.op("Gather", [table, ids], axis=0)


def gather_elements(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    axis = s.below(len(s.shape(x)))
    size = list(s.shape(x))
    bound, size[axis] = size[axis], s.below(4, 1)
    return s.op("GatherElements", [x, s.ints(s.random.integers(-bound, bound, size))], axis=axis)


def gather_nd(s: Sketch) -> str:
    x = s.pick(2, 3)
    batch = s.below(2)
    width = s.below(len(s.shape(x)) - batch + 1, 1)
    lead = s.shape(x)[:batch]
    columns = [s.random.integers(0, bound, (*lead, 3)) for bound in s.shape(x)[batch : batch + width]]
    return s.op("GatherND", [x, s.ints(np.stack(columns, -1))], batch_dims=batch)


def scatter(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    shape = s.shape(x)
    axis = s.below(len(shape))
    count = s.below(shape[axis] + 1, 1)
    moved = np.stack([s.random.permutation(shape[axis])[:count] for _ in range(int(np.prod(shape)) // shape[axis])])
    rest = [size for place, size in enumerate(shape) if place != axis]
    places = np.moveaxis(moved.reshape(*rest, count), -1, axis)
    reduction = s.one_of("none", "add", "none", "mul", "max") if s.opset >= 16 else "none"
    given = {} if reduction == "none" else {"reduction": reduction}
    updates = s.weight(*places.shape)
    if reduction == "max" and s.opset < 18:
        raise Rejected
    return s.op("ScatterElements", [x, s.ints(places), updates], axis=axis, **given)


def scatter_nd(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    count = s.below(s.shape(x)[0] + 1, 1)
    rows = s.random.permutation(s.shape(x)[0])[:count].reshape(-1, 1)
    given = {"reduction": s.one_of("add", "none", "mul")} if s.opset >= 16 and s.chance(0.6) else {}
    return s.op("ScatterND", [x, s.ints(rows), s.weight(count, *s.shape(x)[1:])], **given)


def pad(s: Sketch) -> str:
    x = s.pick(1, 2, 3, 4)
    rank, mode = len(s.shape(x)), s.one_of("constant", "constant", "reflect", "edge", "wrap")
    if mode == "wrap" and s.opset < 19:
        mode = "edge"
    pads = s.random.integers(0, 2, 2 * rank)
    if mode == "constant" and s.chance(0.3):
        pads = pads - s.random.integers(0, 2, 2 * rank)
    if mode == "reflect":
        pads = np.minimum(pads, np.tile(np.array(s.shape(x)) - 1, 2))
    given = [x, s.ints(pads)] + ([s.scalar(0.4)] if mode == "constant" and s.chance(0.5) else [])
    return s.op("Pad", given, mode=mode)


def expand(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    target = [s.below(4, 1) if size == 1 else s.one_of(size, 1) for size in s.shape(x)]
    return s.op("Expand", [x, s.ints([s.below(3, 1), *target] if s.chance(0.4) else target)])


def tile(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    return s.op("Tile", [x, s.ints(s.random.integers(1, 3, len(s.shape(x))))])


def trilu(s: Sketch) -> str:
    if s.opset < 14:
        raise Rejected
    k = [s.ints(s.below(2, -1))] if s.chance(0.5) else []
    return s.op("Trilu", [s.pick(2, 3), *k], upper=s.below(2))


def compress(s: Sketch) -> str:
    x = s.pick(2, 3)
    axis = s.below(len(s.shape(x)))
    keep = s.random.random(s.shape(x)[axis]) < 0.6
    keep[0] = True
    test = s.op("Cast", [s.ints(keep)], to=9)
    return s.op("Compress", [x, test], axis=axis)


def depth(s: Sketch) -> str:
    x = s.pick(4)
    if s.shape(x)[1] % 4 == 0:
        return s.op("DepthToSpace", [x], blocksize=2, mode=s.one_of("DCR", "CRD"))
    return s.op("SpaceToDepth", [x], blocksize=1 if any(size % 2 for size in s.shape(x)[2:]) else 2)


def reverse(s: Sketch) -> str:
    x = s.pick(2, 3)
    lengths = s.random.integers(1, s.shape(x)[0] + 1, s.shape(x)[1])
    return s.op("ReverseSequence", [x, s.ints(lengths)], batch_axis=1, time_axis=0)


# --- reductions -----------------------------------------------------------------------------------------------------

REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
              "ReduceLogSumExp", "ReduceSumSquare", "ReduceLogSum", "ReduceSum", "ReduceMean")  # fmt: skip


def reduction(s: Sketch) -> str:
    x, name = s.pick(), str(s.one_of(*REDUCTIONS))
    rank = len(s.shape(x))
    if name in ("ReduceMax", "ReduceMin"):
        s.distinct(s.values[x])
    if name == "ReduceL1":
        s.apart(s.values[x], np.zeros(s.shape(x)))
    if name == "ReduceLogSum":
        x = s.op("Add", [s.op("Mul", [x, x]), s.scalar(0.2)])
    axes = sorted(s.random.permutation(rank)[: s.below(rank + 1)].tolist()) if rank else []
    axes = [axis - rank if s.chance(0.3) else axis for axis in axes]
    given: dict[str, Any] = {"keepdims": s.below(2)} if s.chance(0.8) else {}
    as_input = s.opset >= 18 or name == "ReduceSum"
    if as_input and s.chance(0.15):
        given["noop_with_empty_axes"] = s.below(2)
    if not axes:
        empty = [s.ints(np.zeros(0, np.int64))] if as_input and s.chance(0.5) else []
        return s.op(name, [x, *empty], **given)
    return s.op(name, [x, s.ints(axes)], **given) if as_input else s.op(name, [x], axes=axes, **given)


def cumulative(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    axis = s.below(len(s.shape(x)), -len(s.shape(x)))
    return s.op("CumSum", [x, s.ints(axis)], exclusive=s.below(2), reverse=s.below(2))


def softmax(s: Sketch) -> str:
    x = s.pick(1, 2, 3, 4)
    return s.op(s.one_of("Softmax", "LogSoftmax"), [x], axis=s.below(len(s.shape(x)), -len(s.shape(x))))


def top(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    axis = s.below(len(s.shape(x)))
    s.distinct(s.values[x], axis)
    values, _ = s.ops("TopK", [x, s.ints([s.below(s.shape(x)[axis] + 1, 1)])], 2, axis=axis, largest=s.below(2))
    return values


def arg(s: Sketch) -> str:
    """Rows of a table by the place of the largest element."""
    x = s.pick(2, 3)
    axis = s.below(len(s.shape(x)))
    s.distinct(s.values[x], axis)
    return s.op("Gather", [s.weight(s.shape(x)[axis], 2), s.op("ArgMax", [x], axis=axis, keepdims=s.below(2))], axis=0)


def lp(s: Sketch) -> str:
    x = s.pick(1, 2, 3)
    s.apart(s.values[x], np.zeros(s.shape(x)))
    return s.op("LpNormalization", [x], axis=s.below(len(s.shape(x))), p=s.below(3, 1))


DRAWS: dict[Callable[[Sketch], str], float] = {
    transpose: 4, reshape: 5, flatten: 1, squeeze: 3, concat: 4, split: 3, slice_: 4, gather: 3, embedding: 2,
    gather_elements: 1, gather_nd: 1, scatter: 1.5, scatter_nd: 1, pad: 2.5, expand: 2, tile: 1, trilu: 1,
    compress: 0.5, depth: 0.5, reverse: 0.5, reduction: 6, cumulative: 1, softmax: 3, top: 1, arg: 0.6, lp: 0.5,
}  # fmt: skip
"""Draw -> how often."""

"""Draws of layers: products, convolutions, pools, norms, recurrence, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .sketch import Rejected, Sketch


def matmul(s: Sketch) -> str:
    x = s.pick(1, 2, 3, 4)
    rows = s.shape(x)[-1]
    kind = s.below(10)
    if kind < 5:
        return s.op("MatMul", [x, s.weight(rows, s.below(6, 1))])
    if kind == 5:
        return s.op("MatMul", [s.weight(s.below(5, 1), s.shape(x)[-2]), x]) if len(s.shape(x)) > 1 else s.op(
            "MatMul", [s.weight(3, rows), x])  # fmt: skip
    if kind == 6:
        return s.op("MatMul", [x, s.weight(rows)])
    if kind == 7 and len(s.shape(x)) > 2:
        return s.op("MatMul", [x, s.weight(s.one_of(1, s.shape(x)[-3]), rows, 2)])
    if kind == 8 and len(s.shape(x)) > 1:
        turned = list(range(len(s.shape(x))))
        turned[-2:] = turned[-1], turned[-2]
        return s.op("MatMul", [x, s.op("Transpose", [x], perm=turned)])
    fitting = [each for each in s.floats if len(s.shape(each)) == 2 and s.shape(each)[0] == rows]
    return s.op("MatMul", [x, s.one_of(*fitting)])


def gemm(s: Sketch) -> str:
    x = s.pick(2)
    left, right = s.below(2), s.below(2)
    rows, inner = s.shape(x)[::-1] if left else s.shape(x)
    columns = s.below(6, 1)
    weight = s.weight(*((columns, inner) if right else (inner, columns)))
    given = [x, weight]
    if s.chance(0.7):
        given.append(s.weight(*s.one_of((columns,), (1, columns), (rows, 1), (rows, columns), (1,))))
    more = {"alpha": 0.7} if s.chance(0.3) else {}
    more |= {"beta": 1.5} if s.chance(0.3) else {}
    return s.op("Gemm", given, transA=left, transB=right, **more)


EINSUMS = ("ij,jk->ik", "ij,kj->ki", "ij,ij->i", "ij,jk->", "ij,j->ij", "ij,jk", "ji,jk->ki")
WIDE_EINSUMS = ("bij,jk->bik", "bij,bjk->bki", "...j,jk->...k", "bij,bij->b", "bij,kj->kbi", "bij,ik->bkj")


def einsum(s: Sketch) -> str:
    x = s.pick(2, 3)
    equation = str(s.one_of(*(EINSUMS if len(s.shape(x)) == 2 else WIDE_EINSUMS)))
    first, second = equation.split("->")[0].split(",")
    first = first.replace("...", "bi") if len(s.shape(x)) == 3 else first
    sizes = dict(zip(first, s.shape(x)))
    weight = s.weight(*(sizes.get(letter) or s.below(4, 1) for letter in second))
    return s.op("Einsum", [x, weight], equation=equation)


def window(s: Sketch, rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Strides, dilations and pads."""
    given: dict[str, Any] = {}
    if s.chance(0.4):
        given["strides"] = [s.below(3, 1) for _ in range(rank)]
    if s.chance(0.3):
        given["dilations"] = [s.below(3, 1) for _ in range(rank)]
    if s.chance(0.3):
        given["auto_pad"] = s.one_of("SAME_UPPER", "SAME_LOWER", "VALID")
    elif s.chance(0.6):
        given["pads"] = [s.below(2) for _ in range(2 * rank)]
    return given


def conv(s: Sketch) -> str:
    x = s.pick(3, 4)
    channels, rank = s.shape(x)[1], len(s.shape(x)) - 2
    group = s.one_of(1, 1, *[each for each in (2, 3, 4) if channels % each == 0])
    made = group * s.below(3, 1)
    given = window(s, rank, s.shape(x)[2:])
    if given.get("auto_pad", "").startswith("SAME"):
        given.pop("dilations", None)
    kernel = [s.below(4, 1) for _ in range(rank)]
    weights = [s.weight(made, channels // group, *kernel)] + ([s.weight(made)] if s.chance(0.6) else [])
    more = {"kernel_shape": kernel} if s.chance(0.7) else {}
    return s.op("Conv", [x, *weights], group=group, **given, **more)


def conv_transpose(s: Sketch) -> str:
    x = s.pick(3, 4)
    channels, rank = s.shape(x)[1], len(s.shape(x)) - 2
    group = s.one_of(1, 1, *[each for each in (2, 3) if channels % each == 0])
    kernel = [s.below(4, 1) for _ in range(rank)]
    given: dict[str, Any] = {"strides": [s.below(3, 1) for _ in range(rank)]} if s.chance(0.6) else {}
    if s.chance(0.3) and "strides" in given:
        given["output_padding"] = [s.below(stride) for stride in given["strides"]]
    if s.chance(0.4):
        given["pads"] = [min(s.below(2), size - 1) for size in (*kernel, *kernel)]
    outs = s.below(3, 1)
    weights = [s.weight(channels, outs, *kernel)] + ([s.weight(group * outs)] if s.chance(0.5) else [])
    return s.op("ConvTranspose", [x, *weights], group=group, **given)


def pool(s: Sketch) -> str:
    x, name = s.pick(3, 4, 5), s.one_of("MaxPool", "AveragePool", "MaxPool", "LpPool")
    rank = len(s.shape(x)) - 2
    given = window(s, rank, s.shape(x)[2:])
    if name == "MaxPool":
        s.distinct(s.values[x])
    elif s.opset < 19:
        given.pop("dilations", None)
    if name == "AveragePool" and s.chance(0.5):
        given["count_include_pad"] = 1
    if name != "LpPool" and s.chance(0.3) and "auto_pad" not in given:
        given["ceil_mode"] = 1
    if name == "LpPool":
        x = s.op("Add", [s.op("Abs", [x]), s.scalar(0.2)])
        if s.opset < 18:
            given.pop("ceil_mode", None)
    kernel = [min(s.below(4, 1), size) for size in s.shape(x)[2:]]
    if "pads" in given:
        given["pads"] = [min(pad, size - 1) for pad, size in zip(given["pads"], [*kernel, *kernel])]
    return s.op(name, [x], kernel_shape=kernel, **given)


def global_pool(s: Sketch) -> str:
    x, name = s.pick(3, 4), s.one_of("GlobalAveragePool", "GlobalMaxPool")
    if name == "GlobalMaxPool":
        s.distinct(s.values[x])
    return s.op(name, [x])


def norm(s: Sketch) -> str:
    kind = s.below(7)
    if kind < 2:
        x = s.pick(2, 3, 4)
        axis = s.below(len(s.shape(x)), -len(s.shape(x)))
        size = s.shape(x)[axis % len(s.shape(x)) :]
        if np.prod(size) < 3 or s.opset < 17:
            raise Rejected
        scale = [s.weight(*size)] + ([s.weight(*size)] if s.chance(0.7) else [])
        if s.opset >= 23 and s.chance(0.4):
            return s.op("RMSNormalization", [x, scale[0]], axis=axis)
        return s.op("LayerNormalization", [x, *scale], axis=axis, epsilon=1e-3)
    x = s.pick(3, 4)
    channels = s.shape(x)[1]
    if kind == 2:
        mean, var = (s.one_of(s.weight(channels), s.weight(channels)), s.weight(channels, positive=True))
        s.weights.pop(mean, None), s.weights.pop(var, None)
        if mean not in s.stored or var not in s.stored or mean in s.narrow or var in s.narrow:
            raise Rejected
        return s.op("BatchNormalization", [x, s.weight(channels), s.weight(channels), mean, var], epsilon=1e-2)
    if np.prod(s.shape(x)[2:]) < 3:
        raise Rejected
    if kind == 3:
        return s.op("InstanceNormalization", [x, s.weight(channels), s.weight(channels)], epsilon=1e-2)
    if kind == 4 and s.opset >= 21 and channels % 2 == 0:
        return s.op("GroupNormalization", [x, s.weight(channels), s.weight(channels)], num_groups=2, epsilon=1e-2)
    if kind == 5:
        return s.op("LRN", [x], size=3, alpha=0.3)
    return s.op("MeanVarianceNormalization", [x], axes=[0, *range(2, len(s.shape(x)))])


def resize(s: Sketch) -> str:
    x = s.pick(4)
    mode = s.one_of("nearest", "linear", "nearest")
    transform = s.one_of("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
    given = {"mode": mode, "coordinate_transformation_mode": transform}
    if mode == "nearest":
        given["nearest_mode"] = s.one_of("floor", "round_prefer_floor")
    sizes = [*s.shape(x)[:2], *(s.below(6, 1) for _ in range(2))]
    return s.op("Resize", [x, "", "", s.ints(sizes)], **given)


def recurrent(s: Sketch) -> str:
    x, name = s.pick(3), s.one_of("RNN", "GRU", "LSTM")
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[name]
    direction = s.one_of("forward", "reverse", "bidirectional")
    ways, hidden = 2 if direction == "bidirectional" else 1, s.below(4, 1)
    given = [x, s.weight(ways, gates * hidden, s.shape(x)[2]), s.weight(ways, gates * hidden, hidden)]
    if s.chance(0.7):
        given.append(s.weight(ways, 2 * gates * hidden))
    more = {"linear_before_reset": s.below(2)} if name == "GRU" else {}
    made = s.ops(name, given, 2, hidden_size=hidden, direction=direction, **more)
    if s.chance(0.5):
        s.use(made[1])
        return made[0]
    return made[1]


def attention(s: Sketch) -> str:
    if s.opset < 23:
        return written_attention(s)
    x = s.pick(3)
    _, length, width = s.shape(x)
    heads = s.below(3, 1)
    query, key, value = (s.op("MatMul", [x, s.weight(width, heads * 2)]) for _ in range(3))
    given: dict[str, Any] = {"is_causal": s.below(2)}
    mask = []
    if s.chance(0.4):
        mask = [s.weight(length, length)]
        s.weights.pop(mask[0], None)
        if mask[0] not in s.stored or mask[0] in s.narrow:
            raise Rejected
    return s.op("Attention", [query, key, value, *mask], q_num_heads=heads, kv_num_heads=heads, **given)


def written_attention(s: Sketch) -> str:
    """As exporters write it."""
    x = s.pick(3)
    width = s.shape(x)[2]
    query, key, value = (s.op("MatMul", [x, s.weight(width, 2)]) for _ in range(3))
    scores = s.op("Div", [s.op("MatMul", [query, s.op("Transpose", [key], perm=[0, 2, 1])]), s.scalar(1.4)])
    return s.op("MatMul", [s.op("Softmax", [scores], axis=-1), value])


DRAWS: dict[Callable[[Sketch], str], float] = {
    matmul: 8, gemm: 5, einsum: 3, conv: 6, conv_transpose: 3, pool: 4, global_pool: 0.7, norm: 4, resize: 1.5,
    recurrent: 2, attention: 2,
}  # fmt: skip
"""Draw -> how often."""

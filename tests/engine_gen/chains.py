"""Draws of operators that rewrites of ONNX Runtime look for; ``derive_gen`` has the others.

Weights are stored, so that a rewrite may fold them. Nothing needs a derivative: maxima may tie.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from derive_gen import elementwise, layers, layout
from derive_gen.sketch import Rejected, Sketch
from onnx import ModelProto, TensorProto, helper, numpy_helper

OLDEST, NEWEST = 13, 23
SHAPES = ((4, 4), (3, 3), (3, 4), (4, 4), (2, 3, 4), (3, 3, 3), (2, 3, 4, 4), (2, 3, 3, 3), (1, 2, 5, 3), (4, 1, 3, 3))
"""Lengths are often equal: a rewrite may take one dimension for another."""
NARROW = (TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.BOOL)


def pad(s: Sketch) -> str:
    """Zeros or another number, more often of the spatial dimensions alone."""
    x = s.pick(3, 4)
    rank = len(s.shape(x))
    fixed = 2 if s.chance(0.8) else 0
    ends = [[0] * fixed + [s.below(3) for _ in range(rank - fixed)] for _ in range(2)]
    mode = s.one_of("constant", "constant", "constant", "edge", "reflect")
    given = [x, s.ints([*ends[0], *ends[1]])]
    if mode == "constant" and s.chance(0.5):
        given.append(s.scalar(s.one_of(0.0, 0.0, 0.4, -3.0)))
    return s.op("Pad", given, mode=mode)


def pool(s: Sketch) -> str:
    x, name = s.pick(3, 4), s.one_of("MaxPool", "MaxPool", "AveragePool", "LpPool")
    rank = len(s.shape(x)) - 2
    kernel = [min(s.below(4, 1), size) for size in s.shape(x)[2:]]
    given = {"kernel_shape": kernel, "strides": [s.below(3, 1) for _ in range(rank)]}
    if s.chance(0.4):
        given["pads"] = [min(s.below(2), size - 1) for size in (*kernel, *kernel)]
    if name == "AveragePool" and s.chance(0.5):
        given["count_include_pad"] = 1
    return s.op(name, [x], **given)


def conv(s: Sketch) -> str:
    """One whose pads a Pad in front can join."""
    x = s.pick(3, 4)
    channels, rank = s.shape(x)[1], len(s.shape(x)) - 2
    group = s.one_of(1, 1, channels)
    made = group * s.below(3, 1)
    kernel = [min(s.below(4, 1), size) for size in s.shape(x)[2:]]
    given = [x, constant(s, made, channels // group, *kernel)] + ([constant(s, made)] if s.chance(0.6) else [])
    return s.op("Conv", given, group=group, pads=[s.below(2) for _ in range(2 * rank)])


def constant(s: Sketch, *shape: int, positive: bool = False) -> str:
    """A stored value: rewrites fold no others."""
    name, array = s.name("w"), s.numbers(shape)
    s.stored[name] = s.values[name] = np.abs(array) + 0.3 if positive else array
    return name


def batch_norm(s: Sketch) -> str:
    """Behind a product of any kind; half of the time of a matrix, whose columns are its channels."""
    x = s.pick(2, 3, 4)
    size = s.shape(x)[1]
    given = [constant(s, size), constant(s, size), constant(s, size), constant(s, size, positive=True)]
    return s.op("BatchNormalization", [x, *given], epsilon=1e-2)


def product(s: Sketch) -> str:
    x = s.pick(2, 3, 4)
    rows = s.shape(x)[-1]
    columns = s.one_of(rows, rows, rows, s.below(5, 1))
    if len(s.shape(x)) == 2 and s.chance(0.25):
        left = s.below(2)
        inner = s.shape(x)[0 if left else 1]
        more = [constant(s, *s.one_of((columns,), (1, columns), (s.shape(x)[1 if left else 0], 1), (1,)))]
        given = [x, constant(s, inner, columns), *(more if s.chance(0.6) else [])]
        return s.op("Gemm", given, transA=left, alpha=s.one_of(1.0, 0.5), beta=s.one_of(1.0, 2.0))
    return s.op("MatMul", [x, constant(s, rows, columns)])


def turned(s: Sketch) -> str:
    x = s.pick(2, 3, 4)
    perm = [int(axis) for axis in s.random.permutation(len(s.shape(x)))]
    return s.op("Transpose", [x], perm=perm if len(perm) > 2 else [1, 0])


def term(s: Sketch) -> str:
    """A constant of any shape that broadcasts, added to, times or below a value."""
    x = s.pick(1, 2, 3, 4)
    shape = [s.one_of(size, 1) for size in s.shape(x)][s.below(len(s.shape(x))) :]
    other = s.scalar(s.one_of(0.0, 1.0, 2.0)) if s.chance(0.3) else constant(s, *shape, positive=True)
    given = [x, other] if s.chance(0.7) or s.values[other].ndim == 0 else [other, x]
    return s.op(s.one_of("Add", "Mul", "Sub", "Div", "Max", "Min"), given)


def clipped(s: Sketch) -> str:
    x = s.pick()
    low, high = sorted(s.numbers((2,), 1.0).tolist())
    kind = s.below(4)
    if kind == 0:
        return s.op("Relu", [x])
    bounds = [s.scalar(low) if kind != 1 else "", s.scalar(high) if kind != 2 else ""]
    return s.op("Clip", [x, *bounds])


def cast_chain(s: Sketch) -> str:
    """To another type and back; twice, half of the time."""
    x = s.op("Clip", [s.op("Mul", [s.pick(), s.scalar(8.0)]), s.scalar(-100.0), s.scalar(100.0)])
    for _ in range(s.below(3, 1)):
        x = s.op("Cast", [x], to=s.one_of(*NARROW))
    return s.op("Cast", [x], to=TensorProto.FLOAT)


def nothing(s: Sketch) -> str:
    """An operator that changes nothing, or almost nothing."""
    x = s.pick(1, 2, 3, 4)
    shape, kind = s.shape(x), s.below(8)
    if kind == 0:
        return s.op("Identity", [x])
    if kind == 1:
        return s.op("Dropout", [x])
    if kind == 2:
        return s.op("Slice", [x, s.ints([0]), s.ints([s.one_of(shape[0], 2**31, shape[0] - 1 or 1)]), s.ints([0])])
    if kind == 3:
        return s.op("Expand", [x, s.ints([1] * len(shape))])
    if kind == 4:
        return s.op("Reshape", [x, s.op("Shape", [x])])
    if kind == 5:
        flat = s.op("Unsqueeze", [x, s.ints([s.below(len(shape) + 1)])])
        return s.op("Squeeze", [flat])
    if kind == 6:
        return s.op("Pad", [x, s.ints([0] * (2 * len(shape)))])
    return s.op("Concat", [x], axis=0)


def by_shape(s: Sketch) -> str:
    """Reshaped to lengths of its own that are computed, as exporters write it."""
    x = s.pick(2, 3, 4)
    place = s.below(len(s.shape(x)))
    length = s.op("Gather", [s.op("Shape", [x]), s.ints([place])])
    whole = s.ints([-1])
    return s.op("Reshape", [x, s.op("Concat", [length, whole] if s.chance(0.6) else [whole, length], axis=0)])


def gathered(s: Sketch) -> str:
    x = s.pick(2, 3, 4)
    axis = s.below(len(s.shape(x)))
    place = s.below(s.shape(x)[axis], -s.shape(x)[axis])
    return s.op("Gather", [x, s.ints(s.one_of(place, [place]))], axis=axis)


def chosen(s: Sketch) -> str:
    x = s.pick()
    mask = s.op("Greater", [x, s.scalar(0.1)])
    mask = s.op("Not", [mask]) if s.chance(0.6) else mask
    return s.op("Where", [mask, x, s.scalar(0.3)] if s.chance(0.5) else [mask, s.scalar(0.3), x])


def quantised(s: Sketch) -> str:
    """Quantised and back, once or twice: pools, reshapes and Relus move past it."""
    x = s.pick()
    for _ in range(s.below(3, 1)):
        zero, scale = s.name("z"), s.scalar(s.one_of(0.25, 0.25, 0.1))
        s.values[zero] = np.array(s.one_of(0, 0, 7), np.int8)
        s.nodes.append(helper.make_node("Constant", [], [zero], value=numpy_helper.from_array(s.values[zero], zero)))
        x = s.op("DequantizeLinear", [s.op("QuantizeLinear", [x, scale, zero]), scale, zero])
    return x


def summed(s: Sketch) -> str:
    x = s.pick()
    same = [name for name in s.floats if s.shape(name) == s.shape(x)]
    return s.op(s.one_of("Sum", "Add", "Mul", "Sub"), [x, s.one_of(*same)])


OWN: dict[Callable[[Sketch], str], float] = {
    pad: 7, pool: 7, conv: 6, batch_norm: 7, product: 7, turned: 7, term: 8, clipped: 4, cast_chain: 3, nothing: 8,
    by_shape: 3, gathered: 3, chosen: 3, quantised: 2, summed: 3,
}  # fmt: skip
TABLES = ((OWN, 1.0), (elementwise.DRAWS, 0.35), (layout.DRAWS, 0.35), (layers.DRAWS, 0.35))
FOLDED = (pad, pool, conv, batch_norm, product, turned, term)
"""Draws that most rewrites join; half of the chains begin with them, each once, in any order."""
DRAWS, SHARES = zip(*((draw, share * times) for table, times in TABLES for draw, share in table.items()))


def chain(seed: int, least: int = 2, most: int = 4) -> tuple[ModelProto, dict[str, np.ndarray], str]:
    """A model of so many draws, each on what the last one made where it can; its inputs; and the draws in words."""
    random = np.random.default_rng([seed, 31])
    while True:
        try:
            return _chain(Sketch(random, int(random.integers(OLDEST, NEWEST + 1)), 2), least, most)
        except Rejected:
            continue


def _chain(s: Sketch, least: int, most: int) -> tuple[ModelProto, dict[str, np.ndarray], str]:
    s.use(s.input(s.numbers(s.one_of(*SHAPES), 0.9)))
    told, wanted, shares = [], s.below(most + 1, least), np.array(SHARES) / sum(SHARES)
    folded = list(s.random.permutation(len(FOLDED))) if s.chance(0.5) else []
    for _ in range(20 * wanted):
        if len(told) == wanted:
            break
        draw = FOLDED[folded.pop()] if folded else DRAWS[s.random.choice(len(DRAWS), p=shares)]
        place = s.place()
        try:
            made = draw(s)
        except (Rejected, ValueError, IndexError):  # operands that do not fit
            s.back(place)
            continue
        if s.values[made].dtype != np.float64:
            raise Rejected
        # Mostly the last value alone, so that what was drawn is one chain.
        s.floats = [*s.floats, made] if s.chance(0.2) else [made]
        told.append(draw.__name__)
    if len(told) < least or not set(s.fed) & {name for node in s.nodes for name in node.input}:
        raise Rejected
    return _model(s), {name: value.astype(np.float32) for name, value in s.fed.items()}, " ".join(told)


def _model(s: Sketch) -> ModelProto:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in s.fed.items()]
    outputs = [helper.make_tensor_value_info(s.floats[-1], TensorProto.FLOAT, None)]
    stored = [_stored(name, value, s.narrow.get(name)) for name, value in s.stored.items()]
    graph = helper.make_graph(s.nodes, "chain", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", s.opset)], ir_version=8)


def _stored(name: str, value: np.ndarray, kind: int | None) -> TensorProto:
    dtype = value.dtype if value.dtype != np.float64 else np.dtype(np.float32)
    if kind is not None:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    return numpy_helper.from_array(np.asarray(value, dtype), name)

"""Nodes that change nothing, put behind values of a step at random: it must give the same, or be refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from whole_gen.writer import Writer

FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64, TensorProto.FLOAT16: np.float16}


@dataclass
class Place:
    """A value ``old``, which is to be ``new``, and constants for it."""

    model: ModelProto
    random: random.Random
    old: str
    new: str
    code: int
    shape: tuple[int, ...]

    def constant(self, role: str, value: object, dtype: object = np.int64) -> str:
        name = f"{self.new}.{role}"
        array = np.asarray(value, dtype)
        if self.random.random() < 0.5:
            self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        else:
            self.more.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return name

    def number(self, role: str, value: float) -> str:
        return self.constant(role, value, FLOATS[self.code])

    def inner(self, role: str) -> str:
        return f"{self.new}.{role}"

    def __post_init__(self) -> None:
        self.more: list[NodeProto] = []


Way = Callable[[Place], list[NodeProto]]
node = helper.make_node


def identity(p: Place) -> list[NodeProto]:
    return [node("Identity", [p.old], [p.new])]


def dropout(p: Place) -> list[NodeProto]:
    """Without training, or with a ratio of zero."""
    how = p.random.randrange(5)
    if how == 0:
        return [node("Dropout", [p.old], [p.new])]
    if how == 1:
        off = p.constant("off", False, np.bool_)
        return [node("Dropout", [p.old, "", off], [p.new])]
    if how == 2:
        ratio, off = p.number("ratio", 0.5), p.constant("off", False, np.bool_)
        return [node("Dropout", [p.old, ratio, off], [p.new, p.inner("mask")])]
    if how == 3:
        return [node("Dropout", [p.old, p.number("ratio", 0.0), p.constant("on", True, np.bool_)], [p.new])]
    return [node("Dropout", [p.old, p.number("ratio", 0.7)], [p.new], seed=3)]


def batch_norm(p: Place) -> list[NodeProto]:
    """By running statistics of zero and one."""
    if len(p.shape) < 2 or p.code == TensorProto.FLOAT16:
        return identity(p)
    channels, dtype = p.shape[1], FLOATS[p.code]
    one, zero = (p.constant(str(v), np.full(channels, v), dtype) for v in (1, 0))
    return [node("BatchNormalization", [p.old, one, zero, zero, one], [p.new], epsilon=0.0)]


def optional(p: Place) -> list[NodeProto]:
    made = p.inner("optional")
    return [node("Optional", [p.old], [made]), node("OptionalGetElement", [made], [p.new])]


def sequence(p: Place) -> list[NodeProto]:
    made, at = p.inner("sequence"), p.constant("at", p.random.choice([0, -1]))
    return [node("SequenceConstruct", [p.old], [made]), node("SequenceAt", [made, at], [p.new])]


def reshape(p: Place) -> list[NodeProto]:
    return [node("Reshape", [p.old, p.constant("shape", p.shape)], [p.new])]


def flat_pair(p: Place) -> list[NodeProto]:
    flat = p.inner("flat")
    return [node("Reshape", [p.old, p.constant("one", [-1])], [flat]),
            node("Reshape", [flat, p.constant("shape", p.shape)], [p.new])]  # fmt: skip


def transpose_pair(p: Place) -> list[NodeProto]:
    if not p.shape:
        return identity(p)
    order = list(range(len(p.shape)))
    p.random.shuffle(order)
    back = [order.index(axis) for axis in range(len(order))]
    turned = p.inner("turned")
    return [node("Transpose", [p.old], [turned], perm=order), node("Transpose", [turned], [p.new], perm=back)]


def lifted(p: Place) -> list[NodeProto]:
    up, axes = p.inner("up"), p.constant("axes", [p.random.randrange(len(p.shape) + 1)])
    return [node("Unsqueeze", [p.old, axes], [up]), node("Squeeze", [up, axes], [p.new])]


def cast(p: Place) -> list[NodeProto]:
    return [node("Cast", [p.old], [p.new], to=p.code)]


def wide_pair(p: Place) -> list[NodeProto]:
    wide = p.inner("wide")
    return [node("Cast", [p.old], [wide], to=TensorProto.DOUBLE), node("Cast", [wide], [p.new], to=p.code)]


def times_one(p: Place) -> list[NodeProto]:
    pair = [p.old, p.number("one", 1.0)]
    return [node("Mul", pair[:: p.random.choice([1, -1])], [p.new])]


def by_one(p: Place) -> list[NodeProto]:
    return [node("Div", [p.old, p.number("one", 1.0)], [p.new])]


def plus_zero(p: Place) -> list[NodeProto]:
    pair = [p.old, p.number("zero", 0.0)]
    return [node("Add", pair[:: p.random.choice([1, -1])], [p.new])]


def to_the_first(p: Place) -> list[NodeProto]:
    return [node("Pow", [p.old, p.number("one", 1.0)], [p.new])]


def twice_negative(p: Place) -> list[NodeProto]:
    return [node("Neg", [p.old], [p.inner("neg")]), node("Neg", [p.inner("neg")], [p.new])]


def of_one(p: Place) -> list[NodeProto]:
    return [node(p.random.choice(["Sum", "Max", "Min"]), [p.old], [p.new])]


def of_two(p: Place) -> list[NodeProto]:
    return [node(p.random.choice(["Max", "Min"]), [p.old, p.old], [p.new])]


def where(p: Place) -> list[NodeProto]:
    how = p.random.randrange(2)
    if how:
        return [node("Where", [p.constant("yes", True, np.bool_), p.old, p.number("other", 7.0)], [p.new])]
    return [node("Where", [p.constant("no", False, np.bool_), p.number("other", 7.0), p.old], [p.new])]


def expand(p: Place) -> list[NodeProto]:
    return [node("Expand", [p.old, p.constant("shape", p.shape)], [p.new])]


def split_pair(p: Place) -> list[NodeProto]:
    if not p.shape or p.shape[0] < 2:
        return identity(p)
    one = p.random.randrange(1, p.shape[0])
    sizes = p.constant("sizes", [one, p.shape[0] - one])
    parts = [p.inner("first"), p.inner("second")]
    return [node("Split", [p.old, sizes], parts, axis=0), node("Concat", parts, [p.new], axis=0)]


def joined_alone(p: Place) -> list[NodeProto]:
    return [node("Concat", [p.old], [p.new], axis=0)] if p.shape else identity(p)


def whole_slice(p: Place) -> list[NodeProto]:
    if not p.shape:
        return identity(p)
    axis = p.random.randrange(len(p.shape))
    start, stop = p.constant("start", [0]), p.constant("stop", [p.random.choice([p.shape[axis], 2**40])])
    return [node("Slice", [p.old, start, stop, p.constant("axes", [axis])], [p.new])]


def every_row(p: Place) -> list[NodeProto]:
    if not p.shape:
        return identity(p)
    return [node("Gather", [p.old, p.constant("rows", np.arange(p.shape[0]))], [p.new], axis=0)]


def no_pad(p: Place) -> list[NodeProto]:
    return [node("Pad", [p.old, p.constant("pads", [0] * 2 * len(p.shape))], [p.new])] if p.shape else identity(p)


def tiled_once(p: Place) -> list[NodeProto]:
    return [node("Tile", [p.old, p.constant("times", [1] * len(p.shape))], [p.new])] if p.shape else identity(p)


def over_nothing(p: Place) -> list[NodeProto]:
    """A reduction over no axis."""
    axes = p.constant("axes", np.zeros(0))
    return [node("ReduceSum", [p.old, axes], [p.new], noop_with_empty_axes=1)]


def over_a_one(p: Place) -> list[NodeProto]:
    up, axes = p.inner("up"), p.constant("axes", [0])
    kind = p.random.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"])
    return [node("Unsqueeze", [p.old, axes], [up]), node(kind, [up, axes], [p.new], keepdims=0)]


def in_if(p: Place) -> list[NodeProto]:
    bodies = []
    for place in range(2):
        made = p.inner(f"branch{place}")
        shown = helper.make_tensor_value_info(made, p.code, p.shape)
        kind = node("Identity", [p.old], [made]) if not place else node("Neg", [p.old], [made])
        bodies.append(helper.make_graph([kind], f"b{place}", [], [shown]))
    yes = p.constant("yes", True, np.bool_)
    return [node("If", [yes], [p.new], then_branch=bodies[0], else_branch=bodies[1])]


WAYS: list[Way] = [
    identity, dropout, dropout, batch_norm, batch_norm, optional, sequence, reshape, flat_pair, transpose_pair, lifted,
    cast, wide_pair, times_one, by_one, plus_zero, to_the_first, twice_negative, of_one, of_two, where, expand,
    split_pair, joined_alone, whole_slice, every_row, no_pad, tiled_once, over_nothing, over_a_one, in_if,
]  # fmt: skip


def with_idle(model: ModelProto, seed: int, share: float = 0.05, ways: list[Way] | None = None) -> tuple[
    ModelProto, list[str]
]:  # fmt: skip
    """The same with idle nodes behind a share of its floating values; what was put where."""
    r, said = random.Random(seed), []
    made = ModelProto.FromString(model.SerializeToString())
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    infos = {each.name: each.type.tensor_type for each in (*graph.input, *graph.output, *graph.value_info)}
    outputs = {each.name for each in made.graph.output}
    nodes: list[NodeProto] = []
    behind: dict[str, str] = {}

    def follow(name: str, real: str) -> list[NodeProto]:
        """Idle nodes from ``real`` to a new name of a value, or to its own where that was taken away."""
        about = infos[name]
        place = Place(made, r, real, name if real != name else f"{name}.idle", about.elem_type,
                      tuple(each.dim_value for each in about.shape.dim))  # fmt: skip
        way = r.choice(ways or WAYS)
        found = way(place)
        said.append(f"{way.__name__}@{name}")
        return [*place.more, *found]

    def fits(name: str) -> bool:
        about = infos.get(name)
        return (
            about is not None and about.elem_type in FLOATS and about.HasField("shape")
            and all(each.HasField("dim_value") for each in about.shape.dim) and r.random() < share
        )  # fmt: skip

    for each in made.graph.input:
        if fits(each.name):
            nodes += follow(each.name, each.name)
            behind[each.name] = f"{each.name}.idle"
    for each in made.graph.node:
        each = NodeProto.FromString(each.SerializeToString())
        if not any(a.HasField("g") for a in each.attribute):
            each.input[:] = [behind.get(name, name) for name in each.input]
        added: list[NodeProto] = []
        for number, name in enumerate(each.output):
            if name in outputs and fits(name):
                each.output[number] = f"{name}.early"
                added += follow(name, f"{name}.early")
            elif name and name not in outputs and fits(name):
                added += follow(name, name)
                behind[name] = f"{name}.idle"
        nodes += [each, *added]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made, said


def idle_step(w: Writer, seed: int, share: float = 0.05) -> Writer:
    """A writer whose model has idle nodes."""
    made, said = with_idle(w.model(), seed, share)
    w.model = lambda: made  # type: ignore[method-assign]
    w.idle = said  # type: ignore[attr-defined]
    return w

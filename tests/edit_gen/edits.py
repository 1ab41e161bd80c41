"""One edit of rank files, which may be wrong: of a node's operator, operands or attributes, of stored numbers, of calls
and their order, of bodies; and edits that change nothing but the form."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from corpus.plants import in_order
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, defs, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor
from other_shapes import other_shape

ALIKE = [
    "Relu Neg Exp Tanh Sigmoid Abs Sqrt Log Reciprocal Floor Ceil Round Softplus Sign Erf Sin Cos Identity Elu Selu "
    "Softsign HardSigmoid HardSwish LeakyRelu Celu Gelu Mish Sinh Cosh Atan",
    "Add Sub Mul Div Max Min Pow Mean Sum Mod", "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL2 "
    "ReduceSumSquare ReduceL1 ReduceLogSumExp ReduceLogSum", "Softmax LogSoftmax Hardmax",
    "Less Greater LessOrEqual GreaterOrEqual Equal", "And Or Xor", "ArgMax ArgMin", "MaxPool AveragePool LpPool",
    "GlobalAveragePool GlobalMaxPool", "Gather GatherElements", "ScatterElements ScatterND", "IsNaN IsInf",
    "AllReduce Reduce", "BitwiseAnd BitwiseOr BitwiseXor", "Tril Triu", "Squeeze Unsqueeze",
]  # fmt: skip
ALIKES = {name: [other for other in names.split() if other != name] for names in ALIKE for name in names.split()}
TEXTS = [
    "sum mean max min", "none add mul max min", "constant reflect edge wrap", "NOTSET SAME_UPPER SAME_LOWER VALID",
    "forward reverse bidirectional", "none tanh", "none mean sum", "nearest linear cubic", "DCR CRD", "LEFT RIGHT",
    "half_pixel asymmetric align_corners pytorch_half_pixel half_pixel_symmetric",
    "round_prefer_floor round_prefer_ceil floor ceil", "bilinear nearest", "zeros border reflection",
]  # fmt: skip
OF_FLOAT8 = {"saturate", "round_mode"}
"""Attributes that ONNX Runtime takes of casts to 8 bits alone."""
Site = tuple[Any, NodeProto]
"""A graph, a body or a function, and a node of it."""


@dataclass
class Work:
    """A file on its way: the model, what draws, and the nodes that an edit may be of."""

    model: ModelProto
    draw: random.Random
    folder: Path
    axes: Sequence[tuple[str, int]]

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.types = {each.name: each.type.tensor_type for each in (*graph.value_info, *graph.input, *graph.output)}
        self.stored = {each.name: each for each in graph.initializer}

    def like(self, name: str) -> list[str]:
        """Values of the graph of a value's type."""
        mine = self._kind(name)
        return [] if mine is None else [o for o in (*self.types, *self.stored) if o != name and self._kind(o) == mine]

    def _kind(self, name: str) -> object:
        if name in self.types:
            type = self.types[name]
            return type.elem_type, tuple((d.dim_value, d.dim_param) for d in type.shape.dim)
        if name in self.stored:
            return self.stored[name].data_type, tuple((size, "") for size in self.stored[name].dims)
        return None

    def type_of(self, name: str) -> tuple[int, list[int]] | None:
        """The type and the shape of a value, where all sizes are numbers."""
        if name in self.stored:
            return self.stored[name].data_type, list(self.stored[name].dims)
        type = self.types.get(name)
        if type is None or not type.HasField("shape") or any(not d.HasField("dim_value") for d in type.shape.dim):
            return None
        return type.elem_type, [each.dim_value for each in type.shape.dim]

    def schema(self, node: NodeProto) -> defs.OpSchema:
        version = next((each.version for each in self.model.opset_import if each.domain in ("", "ai.onnx")), 1)
        return defs.get_schema(node.op_type, version, "")

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"edit.{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def floating(self, name: str) -> bool:
        return name in self.types and self.types[name].elem_type == TensorProto.FLOAT

    def array(self, tensor: TensorProto) -> np.ndarray:
        if tensor.data_location == TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(self.folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
        return np.array(numpy_helper.to_array(tensor))


def sites(model: ModelProto) -> list[Site]:
    """All nodes, of bodies and functions too."""
    found: list[Site] = []

    def walk(holder: Any) -> None:
        for node in holder.node:
            found.append((holder, node))
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():
                    walk(body)

    walk(model.graph)
    for function in model.functions:
        walk(function)
    return found


def name_of(site: Site) -> str:
    holder, node = site
    return f"{holder.name}/{next(filter(None, node.output), node.name)}/{node.op_type if not node.output else ''}"


# --- edits of a node: each returns whether something was done ---------------------------------------------------------


def operand(work: Work, site: Site) -> bool:
    holder, node = site
    places = [(at, other) for at, name in enumerate(node.input) if name for other in work.like(name)]
    if holder is not work.model.graph:
        names = [name for each in holder.node for name in (*each.input, *each.output) if name]
        places = [(at, other) for at, name in enumerate(node.input) for other in names if other != name]
    behind = _behind(work.model.graph, node)
    places = [(at, other) for at, other in places if other not in behind]
    if places:
        at, node.input[at] = work.draw.choice(places)
    return bool(places)


def _behind(graph: Any, node: NodeProto) -> set[str]:
    """The values that a node makes, and that follow from them."""
    names = set(node.output)
    for each in graph.node:
        if not names.isdisjoint(each.input):
            names.update(each.output)
    return names


def turned_operands(work: Work, site: Site) -> bool:
    """Two operands exchanged."""
    _, node = site
    if len(set(node.input)) < 2:
        return False
    one, two = work.draw.sample(range(len(node.input)), 2)
    node.input[one], node.input[two] = node.input[two], node.input[one]
    return True


def exchanged(work: Work, site: Site) -> bool:
    """An operand exchanged with another node's of the same operator."""
    holder, node = site
    others = [each for each in holder.node if each.op_type == node.op_type and each.output != node.output]
    if not others or not node.input:
        return False
    other = work.draw.choice(others)
    at = work.draw.randrange(min(len(node.input), len(other.input)) or 1)
    if at >= len(other.input) or other.input[at] == node.input[at]:
        return False
    node.input[at], other.input[at] = other.input[at], node.input[at]
    return True


def turned_results(work: Work, site: Site) -> bool:
    _, node = site
    if len(node.output) < 2:
        return False
    one, two = work.draw.sample(range(len(node.output)), 2)
    node.output[one], node.output[two] = node.output[two], node.output[one]
    return True


def sibling(work: Work, site: Site) -> bool:
    _, node = site
    others = ALIKES.get(node.op_type)
    if not others:
        return False
    node.op_type = work.draw.choice(others)
    if node.domain == "":
        known = set(work.schema(node).attributes)
        kept = [each for each in node.attribute if each.name in known]
        del node.attribute[:]
        node.attribute.extend(kept)
    return True


def attribute(work: Work, site: Site) -> bool:
    """Another value of an attribute, or of one left out."""
    _, node = site
    draw = work.draw
    names = {each.name for each in node.attribute}
    absent = []
    if node.domain == "":
        try:
            absent = [a for a in work.schema(node).attributes.values() if a.name not in names | OF_FLOAT8]
        except defs.SchemaError:
            return False
    plain = [each for each in node.attribute if each.type not in (5, 10)]
    if plain and (not absent or draw.random() < 0.75):
        return other_value(work, draw.choice(plain))
    if not absent:
        return False
    record = draw.choice(absent)
    usual = record.default_value
    if usual.type:
        made = node.attribute.add()
        made.CopyFrom(usual)
        return other_value(work, made)
    made_of = {
        defs.OpSchema.AttrType.INT: lambda: draw.choice([0, 1, -1, 2]), defs.OpSchema.AttrType.FLOAT: lambda: 0.5,
        defs.OpSchema.AttrType.INTS: lambda: [draw.choice([0, 1, -1, 2]) for _ in range(draw.choice([1, 2, 4]))],
    }  # fmt: skip
    if record.type not in made_of:
        return False
    node.attribute.append(helper.make_attribute(record.name, made_of[record.type]()))
    return True


def other_value(work: Work, value: AttributeProto) -> bool:
    draw = work.draw
    if value.type == AttributeProto.INT:
        value.i = draw.choice([value.i + 1, value.i - 1, 1 - value.i, -value.i - 1, 0, 1, 2])
    elif value.type == AttributeProto.FLOAT:
        bit = float(_other_bit(draw, np.array([value.f], np.float32), 0)[0])
        value.f = draw.choice([value.f * 2, value.f + 0.25, -value.f, 1 - value.f, value.f * 1000, bit])
    elif value.type == AttributeProto.INTS and value.ints:
        _other_list(draw, value.ints, lambda old: draw.choice([old + 1, old - 1, 0, 1, -1]))
    elif value.type == AttributeProto.STRINGS and value.strings:
        others = [*value.strings]
        _other_list(draw, value.strings, lambda old: draw.choice([*others, b"Tanh", b"Relu", b"Sigmoid"]))
    elif value.type == AttributeProto.STRING:
        value.s = _other_text(work, value.name, value.s.decode()).encode()
    elif value.type == AttributeProto.TENSOR:
        value.t.CopyFrom(numpy_helper.from_array(other_array(draw, work.array(value.t)), value.t.name))
    else:
        return False
    return True


def _other_list(draw: random.Random, items: Any, other: Callable[[Any], Any]) -> None:
    at = draw.randrange(len(items))
    if len(items) > 1 and draw.random() < 0.6:
        one, two = draw.sample(range(len(items)), 2)
        if draw.random() < 0.3 and isinstance(items[one], int):
            items[one], items[two] = items[one] + 1, items[two] - 1
        else:
            items[one], items[two] = items[two], items[one]
    else:
        items[at] = other(items[at])


def _other_text(work: Work, name: str, text: str) -> str:
    draw = work.draw
    if name == "group":
        axes = [axis for axis, _ in work.axes]
        chosen = draw.sample(axes, draw.randint(1, len(axes)))
        return "+".join(chosen if draw.random() < 0.3 else sorted(chosen, key=axes.index))
    if name == "equation":
        letters = sorted({each for each in text if each.isalpha()})
        one, two = draw.sample(letters, 2) if len(letters) > 1 else (text, text)
        front, arrow, behind = text.partition("->")
        if draw.random() < 0.5:
            return front + arrow + behind.translate(str.maketrans({one: two, two: one}))
        return front.translate(str.maketrans({one: two, two: one})) + arrow + behind
    for row in TEXTS:
        if text in row.split():
            return draw.choice([other for other in row.split() if other != text])
    return text


def other_array(draw: random.Random, array: np.ndarray) -> np.ndarray:
    """Other numbers: an element, two exchanged, or all."""
    flat = np.array(array).reshape(-1)
    if not flat.size:
        return array
    at = draw.randrange(flat.size)
    kind = draw.choice(["element", "element", "two", "all", "roll", "bit"])
    if flat.dtype == bool:
        flat[at] = not flat[at]
    elif kind == "bit" and flat.dtype.kind in "fiu":
        flat = _other_bit(draw, flat, at)
    elif kind == "two" and flat.size > 1:
        other = draw.randrange(flat.size)
        flat[[at, other]] = flat[[other, at]]
    elif kind == "roll" and flat.size > 1:
        flat = np.roll(flat, 1)
    elif flat.dtype.kind in "iu":
        change = draw.choice([1, -1, 2])
        if kind == "all":
            flat = (flat + change if draw.random() < 0.7 else -flat - 1).astype(flat.dtype)
        else:
            flat[at] = draw.choice([flat[at] + change, flat[at] + change, 0, 1, -1 if flat.dtype.kind == "i" else 3])
    elif kind == "all":
        flat = (flat * draw.choice([2, 0.5, -1])).astype(flat.dtype)
    else:
        flat[at] = draw.choice([flat[at] * 2, flat[at] + 0.5, -flat[at], 0])
    return flat.reshape(array.shape)


HIGH = 12
"""Bits of a float that numbers show."""


def _other_bit(draw: random.Random, flat: np.ndarray, at: int) -> np.ndarray:
    """An element with another bit: of a float one of the first, of a whole number one of the last."""
    width = flat.dtype.itemsize * 8
    bits = flat.view(np.dtype(f"u{flat.dtype.itemsize}"))
    low, high = (max(width - HIGH, 0), width) if flat.dtype.kind == "f" else (0, min(width, HIGH))
    bits[at] ^= bits.dtype.type(1 << draw.randrange(low, high))
    return flat


def stored(work: Work, site: Site) -> bool:
    """Other numbers in a constant that a node reads; a copy for the node alone, half of the time."""
    holder, node = site
    own = {each.name: each for each in getattr(holder, "initializer", ())} | work.stored
    fed = {each.name for each in work.model.graph.input}
    names = [name for name in dict.fromkeys(node.input) if name in own and name not in fed]
    if not names:
        return False
    name = work.draw.choice(names)
    array = work.array(own[name])
    changed = other_array(work.draw, array)
    if work.draw.random() < 0.5:
        own[name].CopyFrom(numpy_helper.from_array(changed, name))
    else:
        new = work.constant(changed, changed.dtype)
        node.input[:] = [new if each == name else each for each in node.input]
    return not np.array_equal(array, changed)


def scaled(work: Work, site: Site) -> bool:
    _, node = site
    names = [name for name in node.output if work.floating(name)]
    if not names:
        return False
    return insert(work, site, work.draw.choice(names), ["Mul"], lambda: [work.constant(work.draw.choice([2, 0.5, -1]))])


def rounded(work: Work, site: Site) -> bool:
    """Rounded on its way: in another type, and back."""
    _, node = site
    names = {name: work.types[name].elem_type for name in node.output if name in work.types}
    ways = {
        TensorProto.FLOAT: [10, 16, 10, 16, 6, 7, 9],
        TensorProto.INT64: [6, 3, 9, 10],
        TensorProto.INT32: [7, 3, 9],
    }
    fit = [name for name, type in names.items() if type in ways]
    if not fit:
        return False
    to = work.draw.choice(ways[names[fit[0]]])
    _put(work, site, fit[0], [("Cast", [], {"to": to}), ("Cast", [], {"to": names[fit[0]]})])
    return True


def shifted(work: Work, site: Site) -> bool:
    """A number more or less; another flag."""
    _, node = site
    kinds = {name: kind for name in node.output if name and (kind := work.type_of(name)) is not None}
    fit = [name for name, (type, _) in kinds.items() if type in (TensorProto.BOOL, *NUMBERS)]
    if not fit:
        return False
    name, draw = work.draw.choice(fit), work.draw
    if kinds[name][0] == TensorProto.BOOL:
        return insert(work, site, name, ["Not"], list)
    dtype = NUMBERS[kinds[name][0]]
    return insert(work, site, name, ["Add"], lambda: [work.constant(draw.choice([1, -1]), dtype)])


NUMBERS = {TensorProto.FLOAT: np.float32, TensorProto.INT64: np.int64, TensorProto.INT32: np.int32}


def reordered(work: Work, site: Site) -> bool:
    """Elements in another order along a dimension, or two dimensions of one length exchanged."""
    _, node = site
    kinds = {name: kind[1] for name in node.output if name and (kind := work.type_of(name)) is not None}
    fit = [name for name, dims in kinds.items() if max(dims, default=0) > 1]
    if not fit:
        return False
    draw, name = work.draw, work.draw.choice(fit)
    dims = kinds[name]
    pairs = [(a, b) for a in range(len(dims)) for b in range(a) if dims[a] == dims[b] > 1]
    if pairs and draw.random() < 0.4:
        one, two = draw.choice(pairs)
        perm = [{one: two, two: one}.get(dim, dim) for dim in range(len(dims))]
        _put(work, site, name, [("Transpose", [], {"perm": perm})])
        return True
    axis = draw.choice([at for at, size in enumerate(dims) if size > 1])
    rows = [*range(dims[axis])]
    half = draw.choice([1, len(rows) // 2, len(rows) - 1])
    rows = draw.choice([rows[::-1], rows[half:] + rows[:half], rows[:1] + rows[:-1], rows[1:] + rows[-1:]])
    _put(work, site, name, [("Gather", [work.constant(rows, np.int64)], {"axis": axis})])
    return True


def repeated(work: Work, site: Site) -> bool:
    """A node once more, on its own result where that fits; a call once more."""
    holder, node = site
    places = [at for at, name in enumerate(node.input) if len(node.output) == 1 and name in work.like(node.output[0])]
    again = NodeProto.FromString(node.SerializeToString())
    again.name = ""
    if places and node.output[0]:
        (name,) = node.output
        node.output[:] = [f"{name}.once"]
        again.input[work.draw.choice(places)] = f"{name}.once"
    elif node.domain:
        again.output[:] = [name and f"{name}.again" for name in node.output]
    else:
        return False
    place = next(at for at, each in enumerate(holder.node) if each is node or each == node)
    holder.node.insert(place + 1, again)
    for name in (*node.output, *again.output):
        like = name.removesuffix(".once").removesuffix(".again")
        if name and name not in work.types and like in work.types and isinstance(holder, GraphProto):
            work.model.graph.value_info.add(name=name).type.tensor_type.CopyFrom(work.types[like])
    return True


def left_out(work: Work, site: Site) -> bool:
    """A call that is not made: zeros are in the place of its results."""
    holder, node = site
    kinds = [work.type_of(name) for name in node.output]
    if None in kinds or holder is not work.model.graph:
        return False
    for name, (type, dims) in zip(node.output, filter(None, kinds)):
        work.model.graph.initializer.append(helper.make_tensor(name, type, dims, np.zeros(dims).reshape(-1)))
    if any(name in {each.name for each in work.model.graph.output} for name in node.output):
        return False
    holder.node.remove(node)
    return True


def insert(work: Work, site: Site, name: str, kinds: Sequence[str], more: Callable[[], list[str]]) -> bool:
    _put(work, site, name, [(kind, more(), {}) for kind in kinds])
    return True


def _put(work: Work, site: Site, name: str, steps: Sequence[tuple[str, list[str], dict[str, Any]]]) -> None:
    """Nodes between a value as it was and all that read it."""
    holder, node = site
    value = f"{name}.right"
    node.output[:] = [value if each == name else each for each in node.output]
    place = next(at for at, each in enumerate(holder.node) if each.output == node.output)
    made, now = [], value
    for number, (kind, more, facts) in enumerate(steps):
        result = name if number == len(steps) - 1 else f"{name}.step{number}"
        made.append(helper.make_node(kind, [now, *more], [result], **facts))
        now = result
    nodes = [NodeProto.FromString(each.SerializeToString()) for each in holder.node]
    del holder.node[:]
    holder.node.extend([*nodes[: place + 1], *made, *nodes[place + 1 :]])
    if name in work.types and isinstance(holder, GraphProto):
        info = work.model.graph.value_info.add(name=value)
        info.type.tensor_type.CopyFrom(work.types[name])


def viewed(work: Work, site: Site) -> bool:
    """An operand in another shape, or another type of whole numbers, for a node alone."""
    holder, node = site
    if holder is not work.model.graph:
        return False
    draw, kinds = work.draw, {name: work.type_of(name) for name in node.input}
    fit = [at for at, name in enumerate(node.input) if kinds[name] is not None and node.input[at]]
    if not fit:
        return False
    at = draw.choice(fit)
    name = node.input[at]
    dtype, dims = kinds[name] or (0, [])
    new = f"{name}.view{len(holder.node)}"
    whole = dtype in (TensorProto.INT64, TensorProto.INT32)
    if whole and draw.random() < 0.3:
        other = TensorProto.INT32 if dtype == TensorProto.INT64 else TensorProto.INT64
        view = helper.make_node("Cast", [name], [new], to=other)
    elif len(dims) > 1 and draw.random() < 0.3:
        view = helper.make_node("Transpose", [name], [new], perm=draw.sample(range(len(dims)), len(dims)))
    else:
        view = helper.make_node("Reshape", [name, work.constant(other_shape(draw, dims), np.int64)], [new])
    node.input[at] = new
    nodes = [NodeProto.FromString(each.SerializeToString()) for each in holder.node]
    place = next(index for index, each in enumerate(nodes) if each.output == node.output)
    made = [view, nodes[place]]
    result = next(filter(None, node.output), "")
    kind = work.type_of(result)
    if kind is not None and all(kind[1]) and draw.random() < 0.5:
        made[1].output[list(made[1].output).index(result)] = f"{result}.viewed"
        made.append(helper.make_node("Reshape", [f"{result}.viewed", work.constant(kind[1], np.int64)], [result]))
    del holder.node[:]
    holder.node.extend([*nodes[:place], *made, *nodes[place + 1 :]])
    return True


def bypass(work: Work, site: Site) -> bool:
    _, node = site
    if len(node.output) != 1:
        return False
    same = [name for name in node.input if name in work.like(node.output[0])]
    if not same:
        return False
    node.CopyFrom(helper.make_node("Identity", [work.draw.choice(same)], list(node.output)))
    return True


def same_form(work: Work, site: Site) -> bool:
    """Another form of the same value."""
    _, node = site
    names = [name for name in node.output if work.floating(name)]
    if not names:
        return False
    name, draw = work.draw.choice(names), work.draw
    dims = [each.dim_value for each in work.types[name].shape.dim]
    rank, axis = len(dims), draw.randrange(len(dims)) if dims else 0
    perm = draw.sample(range(rank), rank)
    back = [perm.index(at) for at in range(rank)]

    def ints(*values: int) -> list[str]:
        return [work.constant(values, np.int64)]

    ways: list[Callable[[], list[tuple[str, list[str], dict[str, Any]]]]] = [
        lambda: [("Identity", [], {})], lambda: [("Mul", [work.constant(1)], {})],
        lambda: [("Add", [work.constant(0)], {})], lambda: [("Neg", [], {}), ("Neg", [], {})],
        lambda: [("Mul", [work.constant(4)], {}), ("Mul", [work.constant(0.25)], {})],
        lambda: [("Cast", [], {"to": 11}), ("Cast", [], {"to": 1})],
        lambda: [("Max", [name_right], {})], lambda: [("Div", [work.constant(1)], {})],
        lambda: [("Add", [name_right], {}), ("Mul", [work.constant(0.5)], {})],
    ]  # fmt: skip
    name_right = f"{name}.right"
    if rank and all(dims):
        ways += [
            lambda: [("Transpose", [], {"perm": perm}), ("Transpose", [], {"perm": back})],
            lambda: [("Unsqueeze", ints(axis), {}), ("Squeeze", ints(axis), {})],
            lambda: [("Reshape", ints(-1), {}), ("Reshape", ints(*dims), {})],
            lambda: [("Expand", ints(*dims), {})], lambda: [("Tile", ints(*[1] * rank), {})],
            lambda: [("Gather", [work.constant(range(dims[axis]), np.int64)], {"axis": axis})],
            lambda: [("Gather", [work.constant([*range(dims[axis])][::-1], np.int64)], {"axis": axis})] * 2,
            lambda: [("Slice", [*ints(0), *ints(dims[axis]), *ints(axis)], {})],
            lambda: [("Slice", [*ints(-1), *ints(-(1 << 60)), *ints(axis), *ints(-1)], {})] * 2,
            lambda: [("Tile", ints(*[1 + (at == axis) for at in range(rank)]), {}),
                     ("Slice", [*ints(dims[axis]), *ints(2 * dims[axis]), *ints(axis)], {})],
            lambda: [("Pad", ints(*[int(at == axis) for at in range(rank)] * 2), {}),
                     ("Slice", [*ints(1), *ints(1 + dims[axis]), *ints(axis)], {})],
            lambda: [("Concat", [name_right], {"axis": axis}),
                     ("Slice", [*ints(dims[axis]), *ints(2 * dims[axis]), *ints(axis)], {})],
            lambda: [("Unsqueeze", ints(0), {}), ("ReduceSum", ints(0), {"keepdims": 0})],
            lambda: [("Unsqueeze", ints(0), {}), ("Expand", ints(3, *dims), {}),
                     ("ReduceMean", ints(0), {"keepdims": 0})],
        ]  # fmt: skip
    _put(work, site, name, draw.choice(ways)())
    return True


def call_order(work: Work, site: Site) -> bool:
    """A call in front of, or behind, another one."""
    graph = work.model.graph
    calls = [at for at, node in enumerate(graph.node) if node.domain == "gopt.comm"]
    if len(calls) < 2:
        return False
    at = work.draw.randrange(len(calls) - 1)
    one, two = calls[at], calls[at + work.draw.choice([1] * (at + 1 < len(calls)))]
    nodes = [NodeProto.FromString(each.SerializeToString()) for each in graph.node]
    first = nodes[one]
    behind, moved = set(first.output), [first]
    rest = []
    for node in nodes[one + 1 : two + 1]:
        if behind.isdisjoint(node.input):
            rest.append(node)
        else:
            behind.update(node.output)
            moved.append(node)
    if nodes[two] in moved:
        return False
    del graph.node[:]
    graph.node.extend([*nodes[:one], *rest, *moved, *nodes[two + 1 :]])
    return True


def exchanged_operators(work: Work, site: Site) -> bool:
    """Two nodes of one signature, with each other's operators and attributes."""
    holder, node = site
    kind = (len(node.input), len(node.output), node.domain)
    others = [each for each in holder.node if (len(each.input), len(each.output), each.domain) == kind]
    others = [each for each in others if each.op_type != node.op_type and each.op_type in ALIKES.get(node.op_type, ())]
    if not others:
        return False
    other = work.draw.choice(others)
    one, two = NodeProto(), NodeProto()
    one.CopyFrom(node)
    two.CopyFrom(other)
    for each, like in ((node, two), (other, one)):
        each.op_type = like.op_type
        del each.attribute[:]
        each.attribute.extend(like.attribute)
    return True


def exchanged_results(work: Work, site: Site) -> bool:
    """Two results of one type, each under the other's name for those that read it."""
    holder, node = site
    if holder is not work.model.graph:
        return False
    made = {name for each in holder.node for name in each.output}
    pairs = [(name, other) for name in node.output for other in work.like(name) if other in made]
    if not pairs:
        return False
    one, two = work.draw.choice(pairs)
    swap = {one: two, two: one}
    for each in holder.node:
        each.output[:] = [swap.get(name, name) for name in each.output]
    return True


EDITS: dict[str, tuple[Callable[[Work, Site], bool], float, Callable[[Site], bool]]] = {
    "operand": (operand, 2, lambda site: bool(site[1].input)),
    "turned operands": (turned_operands, 1, lambda site: len(site[1].input) > 1),
    "exchanged operands": (exchanged, 1, lambda site: bool(site[1].input)),
    "turned results": (turned_results, 0.5, lambda site: len(site[1].output) > 1),
    "exchanged results": (exchanged_results, 1, lambda site: bool(site[1].output)),
    "exchanged operators": (exchanged_operators, 0.5, lambda site: site[1].op_type in ALIKES),
    "sibling": (sibling, 1.5, lambda site: site[1].op_type in ALIKES),
    "attribute": (attribute, 3, lambda site: site[1].domain == "" and bool(site[1].attribute)),
    "default": (attribute, 0.7, lambda site: site[1].domain == ""),
    "call": (attribute, 2, lambda site: site[1].domain == "gopt.comm"),
    "stored": (stored, 4, lambda site: bool(site[1].input)),
    "scale": (scaled, 0.7, lambda site: bool(site[1].output)),
    "shift": (shifted, 1, lambda site: bool(site[1].output)),
    "reorder": (reordered, 1, lambda site: bool(site[1].output)),
    "repeat": (repeated, 1, lambda site: site[1].domain == "gopt.comm" or bool(site[1].output)),
    "left out": (left_out, 0.5, lambda site: site[1].domain == "gopt.comm"),
    "round": (rounded, 0.4, lambda site: bool(site[1].output)),
    "view": (viewed, 1.5, lambda site: bool(site[1].input)),
    "bypass": (bypass, 1, lambda site: bool(site[1].input)),
    "same": (same_form, 2.5, lambda site: bool(site[1].output)),
    "call order": (call_order, 0.7, lambda site: site[1].domain == "gopt.comm"),
}
"""Kind -> what does it, how often, and the nodes that it may be of."""
INNER = 0.3
"""How often a node of a body or a function is chosen, where there are such."""


@dataclass(frozen=True)
class Edit:
    """A kind of edit of a node, by name; ``seed``: of all that is drawn in it."""

    kind: str
    place: str
    seed: int

    def of(self, path: Path, axes: Sequence[tuple[str, int]]) -> bool:
        """Edit a file, and return whether there was something to edit."""
        try:
            model = onnx.shape_inference.infer_shapes(onnx.load(str(path), load_external_data=False))
        except onnx.shape_inference.InferenceError:  # of an edit before
            return False
        site = next((each for each in sites(model) if name_of(each) == self.place), None)
        if site is None:
            return False
        before = model.SerializeToString(deterministic=True)
        work = Work(model, random.Random(self.seed), path.parent, axes)
        old = {each.name for each in onnx.load(str(path), load_external_data=False).graph.value_info}
        if not EDITS[self.kind][0](work, site):
            return False
        try:
            in_order(model)
        except StopIteration:
            return False
        if model.SerializeToString(deterministic=True) == before:
            return False
        _retyped(model, site, old)
        path.write_bytes(model.SerializeToString(deterministic=True))
        return True


def _retyped(model: ModelProto, site: Site, old: set[str]) -> None:
    """The types of values that are stored, and that calls take; inferred anew behind an edit."""
    graph = model.graph
    copy = ModelProto()
    copy.CopyFrom(model)
    names: set[str] = set(site[1].output)
    for node in graph.node:
        if node.domain == "" and not names.isdisjoint(node.input):
            names.update(node.output)
    kept = [each for each in copy.graph.value_info if each.name not in names]
    del copy.graph.value_info[:]
    copy.graph.value_info.extend(kept)
    try:
        found = {each.name: each for each in onnx.shape_inference.infer_shapes(copy, data_prop=True).graph.value_info}
    except Exception:  # the model is wrong: types stay
        return
    calls = {name for node in graph.node if node.domain for name in node.input}
    typed = [each for each in graph.value_info if each.name not in names]
    typed += [each for name, each in found.items() if name in names]
    kept = [
        onnx.ValueInfoProto.FromString(each.SerializeToString())
        for each in typed
        if each.name in calls or each.name in old
    ]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def drawn(path: Path, draw: random.Random, only: str = "") -> Edit | None:
    """An edit of a file; None where there is nothing of the kind."""
    model = onnx.load(str(path), load_external_data=False)
    every = sites(model)
    kinds = [only] if only else list(EDITS)
    kind = draw.choices(kinds, [EDITS[each][1] for each in kinds])[0]
    fit = [each for each in every if EDITS[kind][2](each)]
    inner = [each for each in fit if each[0] is not model.graph]
    outer = [each for each in fit if each[0] is model.graph]
    among = inner if inner and (not outer or draw.random() < INNER) else outer
    if not among:
        return None
    return Edit(kind, name_of(draw.choice(among)), draw.randrange(1 << 30))


def in_turn(draw: random.Random, files: Sequence[Path]) -> Iterator[list[Path]]:
    """Files that are edited alike: one, all, or some."""
    yield [draw.choice(files)]
    yield list(files)
    yield draw.sample(list(files), draw.randint(1, len(files)))

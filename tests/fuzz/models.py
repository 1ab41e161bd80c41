"""Mutations of ONNX models: of any field of any message, and those that files in the wild were seen to have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

_INTEGERS = (0, 1, -1, 2, 3, 7, 16, 64, 127, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-38, 3e38, float("inf"), float("nan"))
_TEXTS = (
    "", "x", "gopt.x", "gopt.spmd", "gopt.comm", "ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training",
    "\x1b[31m", "a\nb", "../../etc/passwd", "/dev/zero", "é" * 40, "n" * 5000, "then_branch", "axis", "value", "to",
)  # fmt: skip
_OPERATORS = (
    "Add", "Mul", "MatMul", "Reshape", "If", "Loop", "Scan", "Constant", "ConstantOfShape", "Range", "Tile", "Expand",
    "Split", "Concat", "Gather", "Slice", "Identity", "Cast", "Shape", "Where", "ReduceSum", "RandomNormal", "Nope",
    "LocalSlice", "ShardSlice", "LocalConcat", "Select", "AllReduce", "AllGather", "ReduceScatter", "SequenceAt",
    "Optional", "Dropout",
)  # fmt: skip


def mutated(base: bytes, dice: random.Random) -> bytes:
    """The model with one to three faults, or changed into another legal one, whose roles may be none."""
    model = ModelProto.FromString(base)
    edits = _LEGAL if dice.random() < 0.5 else _EDITS
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        try:
            dice.choice(edits)(model, dice)
        except (ValueError, TypeError, IndexError, OverflowError, KeyError):
            continue  # the edit does not fit this model
    data: bytes = model.SerializeToString()
    return _bytes(data, dice) if dice.random() < 0.1 else data


def _bytes(data: bytes, dice: random.Random) -> bytes:
    from fuzz.bytes import damaged

    return damaged(data, dice)


# --- any field --------------------------------------------------------------------------------------------------------


def _messages(message: Any) -> list[Any]:
    found, stack = [], [message]
    while stack:
        top = stack.pop()
        found.append(top)
        for field, value in top.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                stack.extend(value if field.is_repeated else [value])
    return found


def _pick(model: ModelProto, dice: random.Random) -> Any:
    """A message of the model; kinds that are rare are as likely as those that are many."""
    kinds: dict[str, list[Any]] = {}
    for message in _messages(model):
        kinds.setdefault(message.DESCRIPTOR.name, []).append(message)
    return dice.choice(kinds[dice.choice(sorted(kinds))])


def _scalar(field: FieldDescriptor, model: ModelProto, dice: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return dice.choice([*(each.number for each in field.enum_type.values), 99])
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return dice.choice(_FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return dice.choice((b"", b"\xff\xfe", b"mean", bytes(dice.randrange(64))))
    if field.type == FieldDescriptor.TYPE_STRING:
        names = [name for node in model.graph.node for name in (*node.input, *node.output)]
        return dice.choice((*_TEXTS, *dice.sample(names, min(10, len(names)))))
    unsigned = field.type == FieldDescriptor.TYPE_UINT64
    number = dice.choice(_INTEGERS)
    number = abs(number) if unsigned else number
    return max(-(2**31), min(number, 2**31 - 1)) if field.type == FieldDescriptor.TYPE_INT32 else number


def any_field(model: ModelProto, dice: random.Random) -> None:
    """Set, clear, add to, or take from one field of one message."""
    message = _pick(model, dice)
    field = dice.choice([*message.DESCRIPTOR.fields, *(field for field, _ in message.ListFields())])
    if field.is_repeated:
        _repeated(message, field, model, dice)
    elif dice.random() < 0.3:
        message.ClearField(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _spliced(getattr(message, field.name), model, dice)
    else:
        setattr(message, field.name, _scalar(field, model, dice))


def _repeated(message: Any, field: FieldDescriptor, model: ModelProto, dice: random.Random) -> None:
    held = getattr(message, field.name)
    place = dice.randrange(len(held)) if held else 0
    what = dice.choice(("remove", "twice", "add", "set", "clear", "move"))
    if what == "clear":
        message.ClearField(field.name)
    elif what == "remove":
        del held[place]
    elif what == "add" and field.type == FieldDescriptor.TYPE_MESSAGE:
        _spliced(held.add(), model, dice)
    elif what == "add":
        held.append(_scalar(field, model, dice))
    elif what == "set" and field.type != FieldDescriptor.TYPE_MESSAGE:
        held[place] = _scalar(field, model, dice)
    elif what == "move" and len(held) > 1:
        other = dice.randrange(len(held))
        items = list(held)
        items[place], items[other] = items[other], items[place]
        items = [_copy(item) for item in items]
        message.ClearField(field.name)
        getattr(message, field.name).extend(items)
    else:
        held.append(_copy(held[place]))


def _copy(item: Any) -> Any:
    if not hasattr(item, "CopyFrom"):
        return item
    made = type(item)()
    made.CopyFrom(item)
    return made


def _spliced(target: Any, model: ModelProto, dice: random.Random) -> None:
    """Another message of the same kind, from anywhere in the model."""
    alike = [each for each in _messages(model) if each.DESCRIPTOR is target.DESCRIPTOR and each is not target]
    target.CopyFrom(_copy(dice.choice(alike))) if alike else target.SetInParent()


# --- faults seen in files ---------------------------------------------------------------------------------------------


def _node(model: ModelProto, dice: random.Random, having: Callable[[NodeProto], bool] = lambda node: True) -> NodeProto:
    return dice.choice([node for node in model.graph.node if having(node)])


def another_operator(model: ModelProto, dice: random.Random) -> None:
    _node(model, dice).op_type = dice.choice(_OPERATORS)


def own_domain(model: ModelProto, dice: random.Random) -> None:
    node = _node(model, dice)
    node.domain, node.op_type = dice.choice(("gopt.spmd", "gopt.comm")), dice.choice(_OPERATORS)
    if dice.random() < 0.7:
        model.opset_import.add(domain=node.domain, version=1)
    if dice.random() < 0.5:
        node.attribute.append(helper.make_attribute("group", dice.choice(("shard", "dp", "", "é"))))


def attribute_twice(model: ModelProto, dice: random.Random) -> None:
    node = _node(model, dice, lambda node: bool(node.attribute))
    node.attribute.append(_copy(node.attribute[0]))


def attribute_type(model: ModelProto, dice: random.Random) -> None:
    attribute = dice.choice(_node(model, dice, lambda node: bool(node.attribute)).attribute)
    attribute.type = dice.choice(list(AttributeProto.AttributeType.values()))


def referring(model: ModelProto, dice: random.Random) -> None:
    dice.choice(_node(model, dice, lambda node: bool(node.attribute)).attribute).ref_attr_name = "alpha"


def reads_another(model: ModelProto, dice: random.Random) -> None:
    node = _node(model, dice, lambda node: bool(node.input))
    names = [name for each in model.graph.node for name in each.output] + [each.name for each in model.graph.input]
    node.input[dice.randrange(len(node.input))] = dice.choice(names)


def no_output_name(model: ModelProto, dice: random.Random) -> None:
    node = _node(model, dice, lambda node: bool(node.output))
    node.output[dice.randrange(len(node.output))] = ""


def another_shape(model: ModelProto, dice: random.Random) -> None:
    infos = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    dims = dice.choice([info for info in infos if info.type.tensor_type.shape.dim]).type.tensor_type.shape.dim
    dim = dice.choice(dims)
    if dice.random() < 0.3:
        dim.dim_param = "n"
    else:
        dim.dim_value = dice.choice((0, 1, 2, 5, 2**20, 2**40, -1))


def another_type(model: ModelProto, dice: random.Random) -> None:
    infos = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    dice.choice(infos).type.tensor_type.elem_type = dice.randrange(26)


def two_data_fields(model: ModelProto, dice: random.Random) -> None:
    tensor = dice.choice([each for each in _messages(model) if isinstance(each, TensorProto)])
    field = dice.choice(("float_data", "int32_data", "int64_data", "double_data"))
    getattr(tensor, field).append(1)


def outside(model: ModelProto, dice: random.Random) -> None:
    tensor = dice.choice([each for each in _messages(model) if isinstance(each, TensorProto)])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=dice.choice(("/dev/zero", "../x", "model.onnx", "m.onnx", "")))


def branch(model: ModelProto, dice: random.Random) -> None:
    """A node becomes one of control flow, with a body made of another node."""
    place = dice.randrange(len(model.graph.node))
    node = model.graph.node[place]
    output = [helper.make_tensor_value_info(name, 1, None) for name in node.output]
    body = helper.make_graph([_copy(node)], "body", [], output)
    kind = dice.choice(("If", "Loop", "Scan"))
    names = {"If": ["then_branch", "else_branch"][: dice.choice((1, 2))], "Loop": ["body"], "Scan": ["body"]}[kind]
    made = helper.make_node(kind, [dice.choice(["", *node.input])], list(node.output), **dict.fromkeys(names, body))
    model.graph.node[place].CopyFrom(made)


def deep_bodies(model: ModelProto, dice: random.Random) -> None:
    for _ in range(dice.choice((3, 12, 30))):
        branch(model, dice)


def doubling_functions(model: ModelProto, dice: random.Random) -> None:
    version = model.opset_import[0].version
    opsets = [helper.make_opsetid("", version), helper.make_opsetid("user", 1)]
    levels = dice.choice((3, 17, 40))
    for place in range(levels):
        kind, domain = (f"F{place - 1}", "user") if place else ("Identity", "")
        nodes = [helper.make_node(kind, [a], [b], domain=domain) for a, b in (("a", "m"), ("m", "z"))]
        model.functions.append(helper.make_function("user", f"F{place}", ["a"], ["z"], nodes, opsets))
    model.opset_import.add(domain="user", version=1)
    node = _node(model, dice, lambda node: len(node.input) == len(node.output) == 1)
    node.op_type, node.domain = f"F{dice.randrange(levels)}", "user"
    del node.attribute[:]


def versions(model: ModelProto, dice: random.Random) -> None:
    if dice.random() < 0.5:
        model.ir_version = dice.choice((0, 1, 3, 4, 8, 11, 13, 14, 99, 2**40))
    else:
        dice.choice(model.opset_import).version = dice.choice((-1, 0, 1, 5, 7, 13, 18, 25, 99, 2**40))


def new_values_swapped(model: ModelProto, dice: random.Random) -> None:
    """Two outputs change names: a state gets another's new value."""
    first, second = dice.sample(list(model.graph.output), 2)
    first.name, second.name = second.name, first.name


# --- other steps, which are legal -------------------------------------------------------------------------------------

_BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
_UNARY = ("Tanh", "Exp", "Neg", "Abs", "Sqrt", "Identity", "Sigmoid", "Relu", "Sign", "Floor", "Reciprocal", "IsNaN")


def reads_alike(model: ModelProto, dice: random.Random) -> None:
    """A node reads another value of the same type, made before it: the step is another one, and legal."""
    known = onnx.shape_inference.infer_shapes(model).graph
    types = {each.name: each.type.SerializeToString() for each in (*known.value_info, *known.input, *known.output)}
    place = dice.randrange(len(model.graph.node))
    node = model.graph.node[place]
    slot = dice.randrange(len(node.input))
    before = [each.name for each in model.graph.input] + [
        name for each in model.graph.node[:place] for name in each.output
    ]
    alike = [name for name in before if name != node.input[slot] and types.get(name) == types[node.input[slot]]]
    node.input[slot] = dice.choice(alike)


def operator_alike(model: ModelProto, dice: random.Random) -> None:
    node = _node(model, dice, lambda node: node.op_type in _BINARY + _UNARY)
    node.op_type = dice.choice(_BINARY if node.op_type in _BINARY else _UNARY)


def other_values(model: ModelProto, dice: random.Random) -> None:
    tensor = dice.choice([each for each in model.graph.initializer if each.data_location != TensorProto.EXTERNAL])
    array = numpy_helper.to_array(tensor).copy()
    whole = array.dtype.kind in "iu"
    array.flat[dice.randrange(array.size)] = dice.choice((0, 1, 2, 3) if whole else (0, -1, 1e30, np.inf, np.nan))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def through_identity(model: ModelProto, dice: random.Random) -> None:
    """An output of a node passes through one more node."""
    place = dice.randrange(len(model.graph.node))
    node = model.graph.node[place]
    slot = dice.randrange(len(node.output))
    name, node.output[slot] = node.output[slot], f"{node.output[slot]}.before"
    made = helper.make_node(dice.choice(("Identity", "Neg", "Abs", "Relu")), [node.output[slot]], [name])
    rest = [_copy(each) for each in model.graph.node[place + 1 :]]
    del model.graph.node[place + 1 :]
    model.graph.node.extend([made, *rest])


def fewer_borders(model: ModelProto, dice: random.Random) -> None:
    """A value is shown no more, or is shown as well; or an input loses its stored value."""
    what = dice.choice(("hide", "show", "unstored"))
    if what == "hide":
        del model.graph.output[dice.randrange(len(model.graph.output))]
    elif what == "unstored":
        del model.graph.initializer[dice.randrange(len(model.graph.initializer))]
    else:
        known = onnx.shape_inference.infer_shapes(model).graph.value_info
        model.graph.output.append(dice.choice(known))


_LEGAL = (reads_alike, reads_alike, operator_alike, other_values, through_identity, fewer_borders, new_values_swapped)
_EDITS: tuple[Callable[[ModelProto, random.Random], None], ...] = (
    any_field, any_field, any_field, any_field, any_field, any_field, any_field, any_field,
    another_operator, own_domain, attribute_twice, attribute_type, referring, reads_another, reads_another,
    no_output_name, another_shape, another_shape, another_type, two_data_fields, outside, branch, deep_bodies,
    doubling_functions, versions, new_values_swapped,
)  # fmt: skip

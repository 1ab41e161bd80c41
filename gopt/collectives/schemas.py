"""ONNX schemas of the collectives, for the checker and for shape inference.

Importing this module is cheap; ``register`` imports onnx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gopt.collectives.call import Attribute, PartialType
from gopt.collectives.layout import FLOATS, INTEGERS, ITEM_BYTES
from gopt.collectives.messages import MESSAGES, WITHOUT_ABSENT, MessageOperator
from gopt.collectives.spec import DOMAIN, VERSION, Collective
from gopt.collectives.table import COLLECTIVES
from gopt.errors import InputError

if TYPE_CHECKING:
    import onnx
    from onnx.defs import OpSchema

_ONNX_WORDS = {"float32": "float", "float64": "double"}
"""Element types whose ONNX name differs from that in the manifest."""
_MANIFEST_WORDS = {word: name for name, word in _ONNX_WORDS.items()}


def register() -> None:
    """Register every collective with onnx, once per process; a second call does nothing.

    A node's group is a name, and the index in the group is no part of the node, so a dimension that depends on the rank
    is inferred only if equal on all ranks. Inference of a malformed node raises as the record does."""
    import onnx.defs

    for record in COLLECTIVES.values():
        if not onnx.defs.has(record.name, DOMAIN):
            onnx.defs.register_schema(schema(record))
    for message in MESSAGES.values():
        if not onnx.defs.has(message.name, DOMAIN):
            onnx.defs.register_schema(message_schema(message))


def schema(record: Collective) -> OpSchema:
    """The ONNX schema of a record, with shape inference."""
    from onnx.defs import OpSchema

    def parameters(name: str, low: int, high: int | None) -> list[OpSchema.FormalParameter]:
        if high is None:
            many = OpSchema.FormalParameterOption.Variadic
            return [OpSchema.FormalParameter(name, "T", param_option=many, min_arity=low)]
        return [OpSchema.FormalParameter(name, "T")] * high

    moved = FLOATS | INTEGERS | {"bool"} if record.reduces else ITEM_BYTES
    inputs = parameters("X", record.min_inputs, record.max_inputs)
    return _declared(record, inputs, parameters("Y", record.min_outputs, record.max_outputs), moved, "call")


def _declared(
    record: Collective | MessageOperator,
    inputs: list[OpSchema.FormalParameter],
    outputs: list[OpSchema.FormalParameter],
    moved: Iterable[str],
    what: str,
) -> OpSchema:
    """The schema with shape inference. ``moved``: types that tensors may have; ``what``: has tensors of one type."""
    from onnx.defs import OpSchema

    types = sorted(f"tensor({_ONNX_WORDS.get(name, name)})" for name in moved)
    used = any(parameter.type_str == "T" for parameter in (*inputs, *outputs))
    result = OpSchema(
        record.name, DOMAIN, VERSION, record.doc, inputs=inputs, outputs=outputs,
        type_constraints=[("T", types, f"All tensors of one {what} have one type.")] if used else [],
        attributes=[_attribute(attribute) for attribute in record.attributes],
    )  # fmt: skip
    result.set_type_and_shape_inference_function(_inference(record))
    return result


def message_schema(record: MessageOperator) -> OpSchema:
    """The ONNX schema of a message operator, with shape inference."""
    from onnx.defs import OpSchema

    def many(name: str, type: str, low: int, high: int | None) -> list[OpSchema.FormalParameter]:
        if high is None:
            option = OpSchema.FormalParameterOption.Variadic
            return [OpSchema.FormalParameter(name, type, param_option=option, min_arity=low)]
        single, optional = OpSchema.FormalParameterOption.Single, OpSchema.FormalParameterOption.Optional
        options = [single] * low + [optional] * (high - low)
        return [
            OpSchema.FormalParameter(f"{name}{position}", type, param_option=option)
            for position, option in enumerate(options)
        ]

    number = "tensor(int64)"
    inputs = [OpSchema.FormalParameter("round", number)]
    if record.weighed:
        optional = OpSchema.FormalParameterOption.Optional
        inputs.append(OpSchema.FormalParameter("weight", "tensor(float)", param_option=optional))
    if record.ids:
        inputs.append(OpSchema.FormalParameter("ids", number))
    skipped = int(record.ids)
    high = None if record.max_inputs is None else record.max_inputs - skipped
    inputs += many("X", "T", record.min_inputs - skipped, high) if high != 0 else []
    if record.token:
        outputs = [OpSchema.FormalParameter("token", number)]
    elif record.name == "AggregateRows":
        outputs = [OpSchema.FormalParameter("ids", number), OpSchema.FormalParameter("Y", "T")]
    else:
        outputs = many("Y", "T", record.min_outputs, record.max_outputs)
    return _declared(record, inputs, outputs, ITEM_BYTES, "message")


def _attribute(attribute: Attribute) -> OpSchema.Attribute:
    from onnx import helper
    from onnx.defs import OpSchema

    if attribute.default is not None:
        default = helper.make_attribute(attribute.name, attribute.default)
        return OpSchema.Attribute(attribute.name, default, attribute.doc)
    kind: OpSchema.AttrType = getattr(OpSchema.AttrType, attribute.kind.value)
    # Not saying so means required.
    return OpSchema.Attribute(attribute.name, kind, attribute.doc, required=attribute.required)


def _inference(record: Collective | MessageOperator) -> Callable[[Any], None]:
    def infer(context: Any) -> None:
        if context.get_attribute(WITHOUT_ABSENT) is not None:
            return
        attributes = {}
        for attribute in record.attributes:
            proto = context.get_attribute(attribute.name)
            if proto is not None:
                attributes[attribute.name] = _value(proto)
        inputs = _input_types(context) if isinstance(record, Collective) else _message_types(context)
        if inputs is None:
            return
        types = record.infer(attributes, inputs)
        if len(types) != context.get_num_outputs():
            raise InputError(f"{record.name} gives {len(types)} outputs, the node has {context.get_num_outputs()}")
        for position, (dtype, shape) in enumerate(types):
            context.set_output_type(position, _type_proto(dtype, shape))

    return infer


def _value(proto: onnx.AttributeProto) -> Any:
    from onnx import helper

    value = helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (int, float)):
        return value
    return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in value]


def _input_type(proto: onnx.TypeProto) -> PartialType | None:
    """Dtype and shape of an input; None for an unknown dtype."""
    import onnx

    code = proto.tensor_type.elem_type
    if not code:
        return None
    name = onnx.TensorProto.DataType.Name(code).lower()
    shape = None
    if proto.tensor_type.HasField("shape"):
        shape = tuple(
            size.dim_value if size.HasField("dim_value") else size.dim_param or None
            for size in proto.tensor_type.shape.dim
        )
    return _MANIFEST_WORDS.get(name, name), shape


def _input_types(context: Any) -> list[PartialType] | None:
    """Types of the inputs; an unknown input has the dtype of the others. None: all unknown."""
    result: list[PartialType | None] = []
    for position in range(context.get_num_inputs()):
        proto = context.get_input_type(position)
        result.append(_input_type(proto) if proto is not None else None)
    present = [type for type in result if type is not None]
    if result and not present:
        return None
    return [(present[0][0], None) if type is None else type for type in result]


def _message_types(context: Any) -> list[PartialType] | None:
    """Types of the inputs of a message, ("", None) if absent; None for an unknown type."""
    result: list[PartialType] = []
    for position in range(context.get_num_inputs()):
        proto = context.get_input_type(position)
        if proto is None:
            result.append(("", None))
            continue
        type = _input_type(proto)
        if type is None:
            return None
        result.append(type)
    return result


def _type_proto(dtype: str, shape: tuple[int | str | None, ...] | None) -> onnx.TypeProto:
    import onnx

    code = onnx.TensorProto.DataType.Value(_ONNX_WORDS.get(dtype, dtype).upper())
    return onnx.helper.make_tensor_type_proto(code, shape)

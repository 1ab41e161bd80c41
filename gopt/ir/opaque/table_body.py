"""The body of a node with an operator of the table."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from onnx import FunctionProto

from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.opaque.body_builder import BodyBuilder
from gopt.ir.opaque.operator_schema import OperatorSchema, SlotValues
from gopt.ir.types import FLOATS, TensorType, known


def table_body(
    operator: OperatorSchema, node: Node, values: SlotValues, types: Mapping[str, TensorType], version: int
) -> tuple[FunctionProto, list[int]]:
    """Return the body of a table operator as a function for a node, and the weight of each body node."""
    dtypes = {}
    for table in (values.scalars, *values.weights):
        for slot, name in table.items():
            type = types.get(name)
            if type is None or not known(type.dtype):
                raise UnsupportedError(
                    f"the type of {name!r}, the {slot} of {node.op_type} {node.label!r}, is unknown",
                    "declare it in the file (value_info)",
                )
            if slot in ("weight", "gradient", "rate") and type.dtype not in FLOATS:
                raise InputError(
                    f"{name!r}, the {slot} of {node.op_type} {node.label!r}, is {type.dtype}",
                    "cast it to a floating type in front of the operator",
                )
            dtypes[name] = type.dtype
    attributes = operator.resolve_attributes(node.label, node.attributes, len(values.weights))
    body = BodyBuilder(operator, attributes, values, dtypes)
    body.write()
    if body.missing():
        raise InputError(
            f"{node.op_type} {node.label!r} has {body.missing()}, but not the input that it replaces",
            "give the operator this input as well",
        )
    return body.function(list(node.attributes), version)


def same_body(stored: FunctionProto, written: FunctionProto) -> bool:
    """Return whether a function of the file equals the body of the table."""
    copy = deepcopy(stored)
    for field in ("overload", "doc_string"):
        copy.ClearField(field)
    del copy.metadata_props[:]
    return bool(copy.SerializeToString(deterministic=True) == written.SerializeToString(deterministic=True))

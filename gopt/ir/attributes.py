"""Attributes of nodes as Python values, and back."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import AttributeProto


def attribute_value(attribute: AttributeProto) -> Any:
    """The value of an attribute: text is decoded, lists are Python lists."""
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.STRING:
        return value.decode("utf-8", "replace")
    if attribute.type == AttributeProto.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def make_attribute(name: str, value: Any) -> AttributeProto:
    """Return an attribute with a Python value; an empty list is a list of integers, but for ``shapes``."""
    if isinstance(value, (list, tuple)) and not value:
        # An empty list has no element to tell its type by: ours are cuts and shapes.
        kind = AttributeProto.STRINGS if name == "shapes" else AttributeProto.INTS
        return AttributeProto(name=name, type=kind)
    return onnx.helper.make_attribute(name, value)

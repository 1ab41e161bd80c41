"""Attributes of nodes, for comparing."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import onnx

from gopt.ir.graph import Node


def frozen(node: Node, apart: Collection[str] = ()) -> Hashable:
    """The attributes of a node, for comparing: without defaults and without names in ``apart``."""
    defaults = _defaults(node.op_type) if node.domain in ("", "ai.onnx") else {}
    pairs = ((name, _frozen(value)) for name, value in node.attributes.items() if name not in apart)
    return tuple(sorted(pair for pair in pairs if defaults.get(pair[0]) != pair))


@cache
def _schemas() -> Mapping[str, Sequence[onnx.defs.OpSchema]]:
    """The schemas of all versions of each operator."""
    result: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        result.setdefault(schema.name, []).append(schema)
    return result


@cache
def _defaults(op_type: str) -> dict[str, tuple[str, Hashable]]:
    """The common defaults of attributes of all versions of an operator."""
    result: dict[str, tuple[str, Hashable]] = {}
    for schema in _schemas().get(op_type, ()):
        for name, attribute in schema.attributes.items():
            value = onnx.helper.get_attribute_value(attribute.default_value) if attribute.default_value.name else None
            pair = name, _frozen(value.decode() if isinstance(value, bytes) else value)
            if result.setdefault(name, pair) != pair:
                result[name] = name, object()
    return {name: pair for name, pair in result.items() if pair[1] is not None}


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    hashable: Hashable = value.SerializeToString(deterministic=True) if hasattr(value, "SerializeToString") else value
    return hashable

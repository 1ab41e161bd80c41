"""Lines of a certificate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from gopt.ir.graph import Graph, Node

FORMAT = "gopt-certificate/1"
OPERATOR, LEMMA, MICRO = "operator", "lemma ", "micro-steps"


def encoded(value: Any) -> Any:
    """A part of an expression as JSON."""
    if isinstance(value, (tuple, list)):
        return [encoded(item) for item in value]
    if isinstance(value, frozenset):
        return {"axes": sorted(value)}
    if isinstance(value, Fraction):
        return {"fraction": str(value)}
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def decoded(value: Any) -> Any:
    """The part of an expression behind JSON."""
    if isinstance(value, list):
        return tuple(map(decoded, value))
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    if kind == "axes":
        return frozenset(text)
    return Fraction(text) if kind == "fraction" else bytes.fromhex(text)


def sealed(lines: Sequence[Mapping[str, Any]]) -> str:
    """The text of lines, with the digest of all in the first."""
    rows = [json.dumps(line, sort_keys=True) for line in lines]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    return "\n".join([json.dumps({**lines[0], "digest": digest}, sort_keys=True), *rows[1:], ""])


def order_of(graph: Graph) -> Iterator[str]:
    """The values of a graph in the order of lines."""
    yield from graph.inputs
    yield from (name for name in graph.initializers if name not in graph.inputs)
    yield from (name for node in graph.nodes for name in node.outputs if name)


def operator_name(node: Node) -> str:
    """An operator, as an expression names it."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"

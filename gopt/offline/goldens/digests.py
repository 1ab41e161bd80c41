"""Digests of a graph by structure: neither names of inner values nor the order of the file count."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from gopt.ir.graph import Graph
from gopt.offline.text import digest, tensor_text

LENGTH = 12
"""Hexadecimal digits of a digest."""


def short_digest(parts: Iterable[str]) -> str:
    """The first digits of the SHA-256 of texts in order."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode())
        sha.update(b"\0")
    return sha.hexdigest()[:LENGTH]


def node_digests(graph: Graph) -> list[str]:
    """A digest for every node, in order: the operator, the attributes, and all that the node depends on.

    Inputs count by name and type, constants by value, inner values by their node. One walk over the graph."""
    values: dict[str, str] = {name: f"input {name} {type}" for name, type in graph.inputs.items()}
    for name, tensor in graph.initializers.items():
        if name not in values:
            values[name] = f"constant {tensor_text(tensor)}"
    digests: list[str] = []
    for node in graph.nodes:
        reads = [values.get(name, "") for name in node.reads]
        attributes = sorted(part.hex() for part in node.attribute_bytes())
        value = short_digest(
            [node.domain, node.op_type, str(len(node.outputs)), str(node.sharding), *attributes, *reads]
        )
        digests.append(value)
        values.update({name: f"{value}:{index}" for index, name in enumerate(node.outputs) if name})
    return digests


def phase_digests(graph: Graph, phases: Mapping[int, str]) -> dict[str, tuple[int, str]]:
    """Phase -> the number of nodes, and their digest; ``phases``: the phase by ``id`` of a node."""
    parts: dict[str, list[str]] = {}
    for node, value in zip(graph.nodes, node_digests(graph)):
        parts.setdefault(phases.get(id(node), "other"), []).append(value)
    return {phase: (len(digests), short_digest(sorted(digests))) for phase, digests in sorted(parts.items())}


def scalar_uses(graph: Graph, phases: Mapping[int, str]) -> Counter[tuple[str, str]]:
    """(phase, text of a one-element constant) -> the number of reading node inputs: a changed beta is seen by value."""
    texts = {
        name: tensor_text(tensor)
        for name, tensor in graph.initializers.items()
        if name not in graph.inputs and tensor.type.static and tensor.type.elements == 1
    }
    uses: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        for name in node.inputs:
            if name in texts:
                uses[phases.get(id(node), "other"), texts[name]] += 1
    return uses


def values_digest(graph: Graph) -> str:
    """The digest of all initial values of inputs, by name."""
    names = (name for name in sorted(graph.inputs) if name in graph.initializers)
    return short_digest(
        f"{name} {digest(graph.initializers[name])}" for name in names if graph.initializers[name].type.static
    )

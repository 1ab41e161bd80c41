"""Digests of a graph by its structure: neither names of inner values nor the order of the file count."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from gopt.ir.graph import Graph
from gopt.offline.text import digest, tensor_text

LENGTH = 12
"""Hexadecimal digits of a digest."""


def short_digest(parts: Iterable[str]) -> str:
    """The first digits of the SHA-256 of texts, in their order."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode())
        sha.update(b"\0")
    return sha.hexdigest()[:LENGTH]


def node_digests(graph: Graph) -> list[str]:
    """A digest for every node, in order: its operator, its attributes, and all that it depends on.

    Inputs go by name and type, constants by value, inner values by the node that makes them. One walk over the graph.
    """
    values: dict[str, str] = {name: f"input {name} {type}" for name, type in graph.inputs.items()}
    for name, tensor in graph.initializers.items():
        if name not in values:
            values[name] = f"constant {tensor_text(tensor)}"
    found: list[str] = []
    for node in graph.nodes:
        reads = [values.get(name, "") for name in node.reads]
        attributes = sorted(part.hex() for part in node.attribute_bytes())
        own = short_digest([node.domain, node.op_type, str(len(node.outputs)), str(node.sharding), *attributes, *reads])
        found.append(own)
        values.update({name: f"{own}:{place}" for place, name in enumerate(node.outputs) if name})
    return found


def phase_digests(graph: Graph, phases: Mapping[int, str]) -> dict[str, tuple[int, str]]:
    """Phase -> how many nodes it has, and the digest of them; ``phases`` is the phase by ``id`` of a node."""
    parts: dict[str, list[str]] = {}
    for node, own in zip(graph.nodes, node_digests(graph)):
        parts.setdefault(phases.get(id(node), "other"), []).append(own)
    return {phase: (len(each), short_digest(sorted(each))) for phase, each in sorted(parts.items())}


def scalar_uses(graph: Graph, phases: Mapping[int, str]) -> Counter[tuple[str, str]]:
    """(phase, text of a one-element constant) -> how many inputs of nodes read it: a changed beta is seen by value."""
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
    """The digest of the initial values of all inputs that have one, by name."""
    held = (name for name in sorted(graph.inputs) if name in graph.initializers)
    return short_digest(
        f"{name} {digest(graph.initializers[name])}" for name in held if graph.initializers[name].type.static
    )

"""Differences of nodes and constants between two graphs with matched nodes."""

from __future__ import annotations

from collections.abc import Iterator

from gopt.ir.graph import Node
from gopt.offline.diff.pairing import ComparedGraph, Pairing, domain, same_signature
from gopt.offline.diff.result import FileDifference
from gopt.offline.text import attribute_text, node_text, ref, tensor_text


def node_lines(pairing: Pairing) -> Iterator[FileDifference]:
    """Changed constants; removed, changed and added nodes; outputs with another value."""
    for name, new in pairing.changed.items():
        shown = ref(name) if name == new else f"{ref(name)} (now {ref(new)})"
        old = tensor_text(pairing.a.constants[name])
        yield FileDifference("value", f"{shown}: {old} -> {tensor_text(pairing.b.constants[new])}")
    for node in pairing.a.graph.nodes:
        partner = pairing.match.get(id(node))
        if partner is None:
            yield FileDifference("removed", node_text(node))
        elif not pairing.equal(node):
            yield from _pair_lines(pairing, node, partner)
    for node in pairing.b.open(pairing.back):
        yield FileDifference("added", node_text(node))
    for name in pairing.a.graph.outputs:
        if name in pairing.b.graph.outputs and not pairing.same(name, name):
            makers = [index.producers.get(name) for index in (pairing.a, pairing.b)]
            texts = [ref(name) if node is None else node_text(node) for node in makers]
            yield FileDifference("output", f"{ref(name)} is another value: {texts[0]} -> {texts[1]}")


def _pair_lines(pairing: Pairing, node: Node, partner: Node) -> Iterator[FileDifference]:
    label = ref(next((name for name in node.outputs if name), "")) if any(node.outputs) else node.label
    if not same_signature(node, partner):
        yield FileDifference("op", f"{label}: {_called(node)} -> {_called(partner)}")
    label = f"{label} = {partner.op_type}"
    for key in sorted({*node.attributes, *partner.attributes}):
        texts = [attribute_text(n.attributes[key]) if key in n.attributes else "unset" for n in (node, partner)]
        if texts[0] != texts[1]:
            yield FileDifference("attribute", f"{label}: {key} {texts[0]} -> {texts[1]}")
    for index in range(max(len(node.inputs), len(partner.inputs))):
        old, new = (n.inputs[index] if index < len(n.inputs) else "" for n in (node, partner))
        if not pairing.same(old, new):
            texts = [_shown(old, pairing.a), _shown(new, pairing.b)]
            yield FileDifference("rewired", f"{label}: input {index} {texts[0]} -> {texts[1]}")
    if len(node.outputs) != len(partner.outputs):
        yield FileDifference("op", f"{label}: {len(node.outputs)} outputs -> {len(partner.outputs)}")


def _shown(name: str, index: ComparedGraph) -> str:
    if name in index.constants and index.constants[name].type.static and index.constants[name].type.elements <= 1:
        return f"{ref(name)} ({tensor_text(index.constants[name])})"
    return ref(name)


def _called(node: Node) -> str:
    return f"{node.domain}.{node.op_type}" if domain(node) else node.op_type

"""Reads the nodes of a file, from the bytes for nodes ending like an earlier node. Nodes of a long graph differ in
names and end alike:

operator, attributes, domain. The first node with an end is read and checked as a message, which takes three times as
long.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from gopt import limits
from gopt.ir.graph import NO_ATTRIBUTES, Node, clone
from gopt.ir.nodes import read_node
from gopt.ir.symbol_table import RESERVED, SymbolTable
from gopt.ir.wire_format import split_node

_MOST_ENDS = 10_000
"""Ends that are kept: metadata may give each node one of its own."""


def read_nodes(protos: Sequence[NodeProto], encoded: Sequence[bytes], symbols: SymbolTable, own: bool) -> list[Node]:
    """Convert nodes in order and define their outputs in ``symbols``; ``own``: nodes may name gopt passes.

    ``encoded``: the bytes of each in the file; empty if unknown.
    """
    if len(encoded) != len(protos):
        return [read_node(proto, symbols, own) for proto in protos]
    texts = {name.encode(): name for name in symbols.defined}
    alike: dict[tuple[bytes, int], Node] = {}
    """End of a node and number of its outputs -> a node that has all but its names."""
    nodes: list[Node] = []
    defined, longest, prefix = symbols.defined, limits.NAME_LENGTH, len(RESERVED)
    for index, data in enumerate(encoded):
        inputs, outputs, name, end = split_node(data, texts)
        pattern = alike.get((end, len(outputs)))
        if pattern is None:
            bodies = symbols.bodies
            node = read_node(protos[index], symbols, own)
            texts.update((name.encode(), name) for name in node.outputs)
            # Where protobuf would write other bytes, and where a body may read any value, nodes are read one by one.
            if end and node.encoded == data and symbols.bodies == bodies and len(alike) < _MOST_ENDS:
                attributes = None if protos[index].attribute else NO_ATTRIBUTES
                pattern = Node(node.op_type, (), (), domain=node.domain, made_by=node.made_by, attributes=attributes)
                alike[end, len(outputs)] = pattern
        else:
            for out in outputs:
                if out:
                    if out in defined or out[:prefix] == RESERVED or len(out) > longest:  # what ``define`` looks at
                        symbols.define(out, "a node output")
                    defined[out] = out
            if name[:prefix] == RESERVED or len(name) > longest:
                symbols.allow(name, "node")
            node = clone(pattern)
            node.inputs, node.outputs, node.name, node.encoded = inputs, outputs, name, data
        nodes.append(node)
    return nodes

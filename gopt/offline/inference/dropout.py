"""Dropout in evaluation: the identity.

Written out, dropout is x times a mask times 1/p, where a comparison of uniform numbers with a constant makes the mask,
and p is the kept share. The kept share is measured; where scale and share do not fit, the nodes are no dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.node_kinds import chosen_by, record_of
from gopt.offline.inference.forward_subgraph import ForwardSubgraph, evaluate
from gopt.operators.kinds import COMPARISONS, STEPWISE, UNIFORM

_SAMPLES = 20_000
_TOLERANCE = 1e-3
_COMPARE = COMPARISONS | STEPWISE


def as_identities(subgraph: ForwardSubgraph, draws: Iterable[str]) -> Iterator[Node]:
    """Nodes that make, under the old names, dropout's values in evaluation. ``draws``: values that may be uniform
    random numbers, of inputs or of nodes; a draw with another use as well gives nothing."""
    for node in subgraph.graph.nodes:
        if id(node) in subgraph.nodes and record_of(node).switch is not None:
            yield _identity(node.inputs[0], node.outputs[0])
    for draw in draws:
        masks = _masks(subgraph, draw)
        ends = [
            (mask, reader) for mask in masks for reader in subgraph.readers(mask) if not masks >= set(reader.outputs)
        ]
        scaled = [_scaled(subgraph, draw, mask, reader) for mask, reader in ends]
        if scaled and None not in scaled:
            yield from filter(None, scaled)


def _identity(value: str, output: str) -> Node:
    return Node("Identity", [value], [output], name=f"{output}.dropout")


def _masks(subgraph: ForwardSubgraph, draw: str) -> set[str]:
    """Values computed from a draw and constants alone, through one comparison or floor."""
    if any(not _steps(subgraph, node, draw) for node in subgraph.readers(draw)):
        return set()
    return set(_levels(subgraph, draw))


def _steps(subgraph: ForwardSubgraph, node: Node, draw: str) -> bool:
    return node.op_type in _COMPARE or (record_of(node).adds and _rest(subgraph, node, draw) is not None)


def _levels(subgraph: ForwardSubgraph, draw: str) -> Iterator[str]:
    reached, front = {draw}, [draw]
    while front:
        name = front.pop()
        for node in subgraph.readers(name):
            operands = [name for name in node.inputs if name and name not in reached]
            name = node.outputs[0]
            constant = all(subgraph.constants.number(operand) is not None for operand in operands)
            if len(node.outputs) == 1 and constant and name not in reached:
                reached.add(name)
                front.append(name)
                yield name


def _rest(subgraph: ForwardSubgraph, node: Node, name: str) -> float | None:
    """The constant scalar beside ``name`` among two operands of a node."""
    operands = [operand for operand in node.inputs if operand != name]
    return subgraph.constants.number(operands[0]) if len(operands) == 1 else None


def _scaled(subgraph: ForwardSubgraph, draw: str, mask: str, reader: Node) -> Node | None:
    """The node of an identity where a reader of the mask is dropout, or None."""
    share, height = _measured(subgraph, draw, mask)
    if not share or len(reader.outputs) != 1:
        return None
    if record_of(reader).multiplies:
        (value,) = [name for name in reader.inputs if name != mask] or [""]
    elif chosen_by(reader) and reader.inputs[0] == mask and subgraph.constants.number(reader.inputs[2]) == 0:
        value = reader.inputs[1]
    else:
        return None
    output = reader.outputs[0]
    if _fits(share * height):
        return _identity(value, output)
    before, after = subgraph.index.producers.get(value), subgraph.readers(output)
    scale = subgraph.constants.multiple(before) if before is not None else None
    if scale is not None and _fits(share * height * scale[1]):
        return _identity(scale[0], output)
    scale = subgraph.constants.multiple(after[0]) if len(after) == 1 else None
    if scale is not None and scale[0] == output and _fits(share * height * scale[1]):
        return _identity(value, after[0].outputs[0])
    return None


def _fits(scale: float) -> bool:
    return abs(scale - 1) < _TOLERANCE


def _measured(subgraph: ForwardSubgraph, draw: str, mask: str) -> tuple[float, float]:
    """The share of uniform numbers kept by a mask, and the value there; 0 for a value that is no mask."""
    numbers = ((np.arange(_SAMPLES) + 0.5) / _SAMPLES).astype(np.float32)
    try:
        values = np.asarray(evaluate(subgraph, mask, {draw: numbers}), np.float64)
    except MemoryError:
        raise
    except Exception:  # whatever the reference evaluator has no rule for
        return 0.0, 0.0
    levels = np.unique(values)
    if values.shape != numbers.shape or not 1 <= len(levels) <= 2 or (len(levels) == 2 and levels[0] != 0):
        return 0.0, 0.0
    return float(np.mean(values != 0)), float(levels[-1])


def uniform_draws(subgraph: ForwardSubgraph, batch: Iterable[str]) -> list[str]:
    """Inputs of floats and outputs of random nodes that may be numbers from 0 to 1."""
    nodes = [
        node.outputs[0]
        for node in subgraph.graph.nodes
        if node.is_in(UNIFORM) and (node.attributes.get("low", 0.0), node.attributes.get("high", 1.0)) == (0.0, 1.0)
    ]
    return [*nodes, *(name for name in batch if subgraph.graph.type_of(name).dtype.startswith("float"))]

"""Outputs that could be the new value of a state already paired with another output: metrics, or the state's own.

A step may show the momentum before the clip, or a rate beside the rate's step counter. The order of the two outputs
does not settle the pair."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gopt.analysis.name_hints import one_of_two
from gopt.analysis.state_matching import FACTOR_COST, reaches
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, copied_from, walk
from gopt.ir.node_kinds import divisor_of
from gopt.operators.kinds import ELEMENTWISE
from gopt.operators.operator import Slope
from gopt.operators.table import names

_CURVES = names(lambda record: record.elementwise and record.slope(0) is Slope.CURVED)
"""Operators of schedules and bias corrections, which no counter or scale goes through from step to step."""


def refuse_rivals(index: GraphIndex, reach: Mapping[str, Mapping[str, int]], pairs: Mapping[str, str]) -> None:
    """Raise UnsupportedError where an output without a pair reads a paired input as the pair's own output does.

    ``reach``: output -> {input: distance}; ``pairs``: output -> input. Told apart are: a copy of the paired output; an
    output with the input as a factor alone; of tensors, a join of the paired output with a gradient or another state,
    as an update made of a momentum; of single elements, a curve over the paired output."""
    outputs = {name: output for output, name in pairs.items()}
    rivals: dict[str, tuple[str, str]] = {}  # state -> its output, and the first that could replace it as well
    for output, depths in reach.items():
        if output in pairs:
            continue
        for name, depth in depths.items():
            rival = outputs.get(name)
            if rival is None or _factor(reach, name, rival, depth) or _made_of(index, outputs, name, rival, output):
                continue
            rivals.setdefault(name, (rival, output))
    if rivals:
        raise one_of_two(index.graph, rivals)


def _factor(reach: Mapping[str, Mapping[str, int]], name: str, rival: str, depth: int) -> bool:
    """Return whether the input is a factor alone for one output, and more than a factor for the ``rival``."""
    return depth >= FACTOR_COST > reach.get(rival, {}).get(name, 0)


def _made_of(index: GraphIndex, outputs: Collection[str], name: str, rival: str, output: str) -> bool:
    """Return whether ``output`` is a copy of ``rival``, or made of ``rival`` and of more."""
    if copied_from(index, output) == copied_from(index, rival):
        return True
    if reaches(index, output, name, {name, rival}):
        return False
    nodes, leaves = _slice(index, output, rival)
    if index.one_element(name):
        initializers = index.graph.initializers
        return any(node.is_in(_CURVES) or divisor_of(node) not in {"", *initializers} for node in nodes)
    shape = index.graph.types[name].shape
    whole = [leaf for leaf in leaves - {rival} if index.graph.type_of(leaf).shape == shape]
    return any(leaf in outputs or not _constant(index, leaf) for leaf in whole)


def _constant(index: GraphIndex, name: str) -> bool:
    node = index.producers.get(name)
    return node is None or node.is_a("Constant", "ConstantOfShape")


def _slice(index: GraphIndex, output: str, rival: str) -> tuple[list[Node], set[str]]:
    """The nodes that make ``output`` element by element of ``rival`` and of leaves, and these leaves."""
    nodes: dict[str, Node] = {}

    def following(name: str) -> Sequence[str]:
        node = index.producers.get(name)
        if name == rival or node is None or not node.is_in(ELEMENTWISE):
            return ()
        nodes[name] = node
        return node.inputs

    reached = set(walk([output], following))
    return [*nodes.values()], reached - nodes.keys()

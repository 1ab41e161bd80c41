"""Weights of losses: the factor beside a parameter in the loss is the gradient, though no backward made the value.

The derivative of s * l + r by s is l. Where all ways from a parameter to the losses run through such products and are
linear from there on, the gradient takes only the other factor from the batch."""

from __future__ import annotations

from collections.abc import Iterator

from gopt import limits
from gopt.analysis.analysis_context import AnalysisContext
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import in_proportion
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS, LAYOUT, MEANS, SCALES, TERMS

_SUMS = TERMS - {"Where"} | MEANS | {"Neg"}


def is_weighed(context: AnalysisContext, parameter: str, value: str) -> bool:
    """Return whether the losses take ``value`` times a batch-independent function of the parameter, and nothing else of
    the batch beside the parameter."""
    factors = _factors(context, parameter)
    return factors is not None and bool(factors) and _is_made_of(context, value, factors)


def _factors(context: AnalysisContext, parameter: str) -> set[str] | None:
    """The values of the batch by which the losses multiply functions of a parameter; None for any other use."""
    index, tainted = context.index, context.tainted
    factors: set[str] = set()
    stack, visited = [parameter], {parameter}
    while stack:
        name = stack.pop()
        for node in index.users.get(name, ()):
            if id(node) not in context.forward:
                continue
            met = [name for name in node.reads if name in tainted]
            if met and not _is_linear(context, node, name):
                return None
            if name not in tainted and node.is_in(SCALES):
                factors.update(met)
            fresh = [output for output in node.outputs if output not in visited]
            visited.update(fresh)
            stack += fresh
        if len(visited) > limits.UPDATE_VALUES:
            return None
    return factors if factors.isdisjoint(visited) else None


def _is_linear(context: AnalysisContext, node: Node, name: str) -> bool:
    """Return whether a node that reads values of the batch is linear in one operand, with a factor that either follows
    no batch or is the only value of the batch."""
    if node.is_in(_SUMS) or _moves(context.index, node):
        return True
    follows = [operand for operand in node.inputs if operand in context.tainted]
    return len(follows) == 1 and in_proportion(node, follows[0])


def _moves(index: GraphIndex, node: Node) -> bool:
    return node.is_in(LAYOUT) or (node.is_in(CASTS) and index.graph.type_of(node.outputs[0]).dtype in FLOATS)


def _is_made_of(context: AnalysisContext, value: str, factors: set[str]) -> bool:
    """Return whether a value follows the batch linearly through some factors alone."""
    stack, visited = [value], set[str]()
    while stack:
        name = stack.pop()
        if name in visited or name in factors or name not in context.tainted:
            continue
        visited.add(name)
        node = context.index.producers.get(name)
        if node is None or len(visited) > limits.UPDATE_VALUES:
            return False
        follows = list(_following(context, node))
        scales = len(follows) == 1 and in_proportion(node, follows[0])
        if not (scales or node.is_in(_SUMS) or _moves(context.index, node)):
            return False
        stack += follows
    return True


def _following(context: AnalysisContext, node: Node) -> Iterator[str]:
    return (name for name in node.inputs if name in context.tainted)

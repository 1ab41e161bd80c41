"""Values through which an update's whole dependence on the batch runs: the update's dominators.

A walk goes back from a new parameter value over batch-dependent values, latest value first. Whenever a single value is
left to visit, every path runs through it.

One-element operands (a clip coefficient, a finite flag) are not followed; ``local_taint`` checks afterwards whether
each is the same on every rank."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from gopt import limits
from gopt.analysis.analysis_context import AnalysisContext
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import ancestors
from gopt.ir.node_kinds import elementwise
from gopt.ir.types import FLOATS
from gopt.operators.kinds import RELAYS


@dataclass(slots=True)
class UpdateWalk:
    """Values that all paths from the batch to an update run through, latest first; and the visited nodes, with their
    positions."""

    dominators: list[str]
    nodes: list[Node]
    positions: list[int]


def walk_update(context: AnalysisContext, updated: str, ends: str = "") -> UpdateWalk:
    """Walk back from the new value ``updated`` to the batch; raises UnsupportedError beyond UPDATE_VALUES.

    ``ends``: the last value of the backward, where known."""
    index, types, tainted_values = context.index, context.index.graph.types, context.tainted
    producers, definitions, scalars = index.producers, index.definitions, index.scalars
    forward, later, barrier = context.forward, context.later, context.barrier
    elements = types[updated].elements
    single = elements == 1
    walk = UpdateWalk([], [], [])
    heap = [(-index.defined_at(updated), updated)]
    queued = {updated}
    backward = {ends}
    """Values in front of nodes that are known to belong to the backward."""
    for _ in range(limits.UPDATE_VALUES):
        if not heap:
            break
        position, name = heapq.heappop(heap)
        node = producers.get(name)
        if node is None or id(node) in forward:
            break
        tainted = [operand for operand in node.reads if operand in tainted_values]
        local = not later.issuperset(tainted) and context.starts_in_forward(tainted)
        if not heap and name != updated and not (local and _moves(node)):
            type = types.get(name)
            if type is not None and type.elements == elements and type.dtype in FLOATS:
                walk.dominators.append(name)
        walk.nodes.append(node)
        walk.positions.append(-position)
        if local:
            break
        if single:  # a flag over all gradients is not a gradient
            if context.masks_locally(node):
                break
            tainted = context.adjoints([o for o in tainted if index.graph.type_of(o).dtype != "bool"])
            # A clip coefficient looks like a gradient: it is the operand that knows other gradients.
            derived = _derived(context, tainted)
            tainted = [operand for operand in tainted if operand not in derived] or tainted
        elif name in backward or (barrier and id(node) in barrier):
            backward.update(tainted)  # no clip stands there: a sum of an adjoint is a factor of its other part
        elif elementwise(node) and not scalars.isdisjoint(tainted):
            tainted = [operand for operand in tainted if operand not in scalars]
        for operand in tainted:
            if operand not in queued:
                queued.add(operand)
                heapq.heappush(heap, (-definitions.get(operand, -1), operand))
    else:
        raise UnsupportedError(
            f"the update that makes {updated!r} has more than {limits.UPDATE_VALUES} values (UPDATE_VALUES): its "
            "gradient was not reached",
            limits.hint("UPDATE_VALUES", len(index.graph.nodes)),
            "or name the gradient of its parameter: --params PARAMETER=VALUE",
        )
    return walk


def _moves(node: Node) -> bool:
    """Return whether a node passes an operand on: a value of the forward in another layout is one operand of a
    contraction whose other operand has one element."""
    return node.is_in(RELAYS)


def _derived(context: AnalysisContext, operands: list[str]) -> set[str]:
    """Return the operands that depend on other gradients.

    Before any gradient is known: operands computed from another operand, such as the norm that clips a gradient.
    """
    if context.of_other_gradients or len(operands) < 2:
        return context.of_other_gradients
    distinct = set(operands)
    return {name for name in distinct if not distinct.isdisjoint(ancestors(context.index, [name])[1] - {name})}

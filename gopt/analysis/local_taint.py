"""Values that depend on one rank's own batch past the gradients: an update with such a read would part the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.analysis_context import AnalysisContext
from gopt.ir.graph import Node
from gopt.ir.node_kinds import random
from gopt.operators.kinds import MAY_DRAW


@dataclass(slots=True)
class LocalTaint:
    """The values after the gradients that are still rank-local, and the values that depend on (reduced) gradients."""

    rank_local: set[str]
    reduced: set[str]
    mixed: list[Node]
    """Nodes where the two first meet: an update that would read a value of one rank alone."""


def local_taint(context: AnalysisContext, gradients: set[str], backward: set[int]) -> LocalTaint:
    """One sweep over the nodes behind the gradients. A gradient read by the update counts as reduced."""
    rank_local: set[str] = set()
    reduced = set(gradients)
    """The gradients, and what is made of them: no node behind them makes one."""
    mixed: list[Node] = []
    producers, tainted = context.index.producers, context.tainted
    for node in context.index.graph.nodes:
        if id(node) in context.forward or id(node) in backward:
            continue
        holds_rank_local, holds_reduced, met = node.op_type in MAY_DRAW and random(node), False, False
        for name in node.reads:
            is_reduced, is_rank_local = name in reduced, name in rank_local
            if not is_rank_local and not is_reduced and name in tainted:
                producer = producers.get(name)
                is_rank_local = producer is None or id(producer) in context.forward or id(producer) in backward
            met = met or (is_rank_local and is_reduced)
            holds_rank_local, holds_reduced = holds_rank_local or is_rank_local, holds_reduced or is_reduced
        if holds_rank_local and holds_reduced and not met:
            mixed.append(node)
        if holds_rank_local:
            rank_local.update(node.outputs)
        if holds_reduced:
            reduced.update(node.outputs)
    return LocalTaint(rank_local, reduced - gradients, mixed)

"""The types in which trainers have what they pull from servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gopt.artifact.server_entries import ServerPlanEntry
from gopt.collectives.messages import PULL_ROWS
from gopt.ir.graph import Graph


def pulled_types(plan: ServerPlanEntry | None, graphs: Iterable[Graph]) -> Mapping[str, tuple[str, str]]:
    """Tensor -> type on servers, and another type on the way to trainers; ``graphs``: of a trainer."""
    if plan is None:
        return {}
    pairs = {piece.tensor: (key.dtype, key.wire) for key in plan.keys for piece in key.pieces}
    for node in (node for graph in graphs for node in graph.nodes if node.op_type == PULL_ROWS.name):
        table = plan.tables[node.attributes["table"]]
        pairs[table.parameter] = table.dtype, str(node.attributes["dtype"])
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

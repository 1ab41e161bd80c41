"""One message for all values that the update of a stage hands to another stage together, such as norms of gradients."""

from __future__ import annotations

from gopt.analysis.training import Phase
from gopt.ir.graph import SPMD, TRANSFER, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.passes.stage_transfers.place import NAME
from gopt.records.placements import Sharding
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers


def pack(program: SpmdProgram) -> int:
    """Join transfers of the update between the same two stages; return the number of transfers left out.

    Joined are values of one type of elements and one sharding, with equally many transfers of the update on the longest
    way to the value: none of the values then waits for another, so that no cycle appears.
    """
    behind: dict[str, int] = {}
    """Value -> the most transfers of the update on a way to the value."""
    packs: dict[tuple[int, int, int, str, Sharding], list[Node]] = {}
    for node in program.graph.nodes:
        depth = max([behind.get(name, 0) for name in node.reads], default=0)
        if transfers(node) and node.phase is Phase.UPDATE:
            home, stage = node.attributes["stages"]
            if stage >= 0:
                dtype = program.graph.type_of(node.inputs[0]).dtype
                packs.setdefault((depth, home, stage, dtype, node.sharding), []).append(node)
            depth += 1
        if depth:
            behind.update(dict.fromkeys(node.outputs, depth))
    rewriter = GraphRewriter(program.graph, NAME)
    together = [nodes for nodes in packs.values() if len(nodes) > 1]
    for nodes in together:
        for node in nodes:
            rewriter.discard(node.first_output)
        last, first = rewriter.between(nodes)
        packed = rewriter.add(
            TRANSFER, [node.inputs[0] for node in nodes],
            {node.first_output: program.graph.type_of(node.first_output) for node in nodes}, domain=SPMD,
            attributes=nodes[0].attributes, sharding=nodes[0].sharding, after=last, before=first,
        )  # fmt: skip
        packed.phase = Phase.UPDATE
    rewriter.finish()
    return sum(map(len, together)) - len(together)

"""Drop unread values: nodes left behind by other passes."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.ir.rewriter import GraphRewriter
from gopt.passes.base import Pass
from gopt.records.pass_facts import PassOptions, PruneFacts
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram


@dataclass(frozen=True, kw_only=True)
class PruneOptions(PassOptions):
    """Nothing to choose."""


def prune(program: SpmdProgram, options: PruneOptions) -> PassResult:
    """Remove nodes and calls whose results are never read; outputs and states are always kept.

    Guarantees: every remaining value is an output or has a reader. On the wire: unused calls disappear.
    """
    graph = program.graph
    needed = program.results()
    rewriter = GraphRewriter(graph, "prune")
    count = 0
    for node in reversed(graph.nodes):
        if any(name in needed for name in node.outputs):
            needed.update(node.reads)
        else:
            rewriter.remove(node, "nothing reads it any more")
            count += 1
    rewriter.finish()
    return PassResult(removed=rewriter.removed, facts=PruneFacts(count))


_AFTER = ("shard", "refold-optimizers", "statistics", "fuse-collectives", "overlap")
PASS = Pass("prune", PruneOptions, prune, after=_AFTER, facts=PruneFacts)

"""Drop what nothing reads any more: nodes left behind by other passes."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.graph.edit import Draft
from gopt.passes.base import Pass
from gopt.program import SpmdProgram
from gopt.report import PassResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """Nothing to choose."""


def prune(program: SpmdProgram, options: Options) -> PassResult:
    """Remove nodes whose results nobody reads; outputs, states and calls are always kept.

    Guarantees: every value that is left is an output or has a reader. On the wire: nothing.
    """
    graph = program.graph
    needed = program.results()
    draft = Draft(graph, "prune")
    count = 0
    for node in reversed(graph.nodes):
        if any(name in needed for name in node.outputs):
            needed.update(node.reads)
        else:
            draft.remove(node, "nothing reads it any more")
            count += 1
    draft.finish()
    return PassResult(removed=draft.reasons, facts={"nodes": count})


_AFTER = ("shard", "refold-optimizers", "statistics", "fuse-collectives", "overlap")
PASS = Pass("prune", Options, prune, after=_AFTER)

"""Statistics left unchanged by a step that overflows: Where(finite, new, old), by a condition on gradients.

The new value comes from the forward and ranks combine it; the condition comes from the update and is equal on all
ranks."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.analysis.local_taint import LocalTaint
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, copied_from, copy_chain, descendants
from gopt.ir.node_kinds import chosen_by


def branch_of(index: GraphIndex, name: str, updated: str, check: LocalTaint) -> str:
    """The value chosen beside the old value ``name`` by a condition on gradients; '' without such a choice."""
    node = index.producers.get(copied_from(index, updated))
    if node is None or name not in chosen_by(node):
        return ""
    condition, *values = node.inputs
    branch = values[values[0] == name]
    apart = condition in check.reduced and condition not in check.rank_local and branch not in check.reduced
    return branch if apart and branch != name else ""


def without_choices(step: StepSkeleton, mixed: Sequence[Node], check: LocalTaint) -> list[Node]:
    """The nodes where an update reads a value of one rank alone, without choices of a statistic that no other state
    reads."""
    chosen: set[int] = set()
    for name, updated in step.updated.items() if mixed else ():
        if name in step.forward_values or not branch_of(step.index, name, updated, check):
            continue
        copies = copy_chain(step.index.producers, updated)
        node = step.index.producers[copies[-1]]
        if descendants(step.index, node.outputs).isdisjoint({*step.updated.values()}.difference(copies)):
            chosen.add(id(node))
    return [node for node in mixed if id(node) not in chosen]

"""Divisions that can be 0/0: by the square root of a non-negative state, with nothing added.

Adam without its epsilon, above all: exporters that simplify delete a + 1e-8. Rows that no sample touches then divide
zero by zero.
"""

from __future__ import annotations

from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import divisor_of, elementwise, in_proportion
from gopt.operators.kinds import QUOTIENTS, RELAYS, SCALES

NOTE = (
    "{label}{more} divides by the square root of {state} with no epsilon: where that is zero, as in an embedding row "
    "that no batch has used, the update is 0/0"
)


def unguarded_roots(training: TrainingGraph, index: GraphIndex | None = None) -> list[str]:
    """A note on such divisions of the update, if any. One walk a division, as long as its chain of scalings."""
    index = index or GraphIndex(training.graph)
    states = {name: state.tensor for state in training.states for name in (state.tensor, state.updated)}
    unguarded: list[tuple[str, str]] = []
    for node in training.graph.nodes:
        if node.op_type not in QUOTIENTS or node.phase is not Phase.UPDATE:
            continue
        divisor = divisor_of(node)
        if divisor and not index.one_element(divisor):
            state = _rooted(index, divisor, states)
            if state:
                unguarded.append((node.label, state))
    if not unguarded:
        return []
    more = f" (as do {len(unguarded) - 1} more)" if len(unguarded) > 1 else ""
    return [NOTE.format(label=unguarded[0][0], state=unguarded[0][1], more=more)]


def _rooted(index: GraphIndex, name: str, states: dict[str, str]) -> str:
    """The state whose square root equals a value up to scalar factors; '' where an addend stands on the way."""
    rooted = False
    while True:
        if rooted and name in states:
            return states[name]
        node = index.producers.get(name)
        if node is None:
            return ""
        if elementwise(node) and index.constants.power(node) == 0.5:
            rooted, name = True, node.inputs[0]
        elif node.is_in(RELAYS):
            name = node.inputs[0]
        elif node.is_in(SCALES):
            tensors = [name for name in node.inputs if not index.one_element(name)]
            if len(tensors) != 1 or not in_proportion(node, tensors[0]):
                return ""
            name = tensors[0]
        else:
            return ""

"""Find each parameter's gradient: the value nearest the data through which its whole update depends on the batch.

From a new parameter value a walk goes back over what depends on the batch, latest value first. Whenever a single
value is left to visit, every path runs through it: it is a candidate. One-element operands (a clip coefficient, a
finite flag) are not followed; whether they are the same on every rank is checked afterwards by ``rawness``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from gopt.analysis.operators import LAYOUT, LINEAR, elementwise, random
from gopt.analysis.sweeps import Index, ancestors
from gopt.graph.model import Node

BUDGET = 2000
"""Values one walk may visit: an update is some tens of nodes, a Newton-Schulz iteration some hundreds."""


@dataclass(slots=True)
class Facts:
    """What the walks need to know of the graph: what depends on the batch, and what belongs to the forward."""

    index: Index
    tainted: set[str]
    forward: set[int]
    barrier: set[int] = field(default_factory=set)
    """Nodes known to belong to the backward although they look like update."""
    update_only: set[str] = field(default_factory=set)
    """Values that depend on optimizer states or hyper-parameters: what reads them is update."""
    model: set[str] = field(default_factory=set)
    """What the forward reads or makes, and all that depends on parameters: a factor of it is no optimizer's mask."""
    clean: set[str] = field(default_factory=set)
    """Values that depend on other parameters' gradients: not followed when the parameter has one element."""

    def starts_in_forward(self, node: Node) -> bool:
        """Whether a node reads a batch-dependent value of the forward: it computes local gradients."""
        producer = self.index.producer
        for name in node.reads:
            if name in self.tainted:
                maker = producer.get(name)
                if maker is None or id(maker) in self.forward:
                    return True
        return False


@dataclass(slots=True)
class Candidate:
    """A value that all paths run through, and whether the way from it to the next one is elementwise, and linear."""

    value: str
    elementwise: bool
    linear: bool


def find_gradient(facts: Facts, updated: str) -> str | None:
    """The gradient behind the new value ``updated``, or None when the update does not depend on the batch."""
    chosen: str | None = None
    for candidate in _candidates(facts, updated):
        # Latest first. A way that is linear but cannot be cut ends the search: the mean passes through it, and what
        # lies behind it would only spoil an elementwise update.
        if chosen is not None and candidate.linear and not candidate.elementwise:
            break
        chosen = candidate.value
    return chosen


def _candidates(facts: Facts, updated: str) -> list[Candidate]:
    index, types = facts.index, facts.index.graph.types
    shape = types[updated].shape
    single = types[updated].elements == 1
    found: list[Candidate] = []
    heap = [(-index.made_at(updated), updated)]
    queued = {updated}
    pure, linear = True, True
    for _ in range(BUDGET):
        if not heap:
            break
        _, name = heapq.heappop(heap)
        node = index.producer.get(name)
        if node is None or id(node) in facts.forward:
            break
        type = types.get(name)
        if not heap and name != updated and type is not None and type.shape == shape and type.dtype != "bool":
            found.append(Candidate(name, pure, linear))
            pure, linear = True, True
        if id(node) in facts.barrier or facts.starts_in_forward(node):
            break
        pure = pure and elementwise(node) and not _scales(facts, node)
        pure = pure and all(_fits(index, operand, shape) for operand in node.inputs)
        linear = linear and _linear(facts, node)
        tainted = [operand for operand in node.reads if operand in facts.tainted]
        if single:  # a flag over all gradients is no gradient
            tainted = [operand for operand in tainted if index.graph.type_of(operand).dtype != "bool"]
        # With one element, a clip coefficient looks like a gradient: it is the operand that knows other gradients.
        clean = _derived(facts, tainted) if single else set()
        local = any(operand not in clean for operand in tainted)
        for operand in tainted:
            if operand in queued or (local and operand in clean) or (not single and index.one_element(operand)):
                continue
            queued.add(operand)
            heapq.heappush(heap, (-index.made_at(operand), operand))
    return found


def _derived(facts: Facts, operands: list[str]) -> set[str]:
    """Those operands that know other gradients. Before the first of them is known: that are made of another operand,
    as the norm that clips a gradient is made of it."""
    if facts.clean or len(operands) < 2:
        return facts.clean
    distinct = set(operands)
    return {name for name in distinct if not distinct.isdisjoint(ancestors(facts.index, [name])[1] - {name})}


def _fits(index: Index, operand: str, shape: object) -> bool:
    type = index.graph.types.get(operand)
    return not operand or index.one_element(operand) or (type is not None and type.shape == shape)


def _scales(facts: Facts, node: Node) -> bool:
    """Whether the node multiplies or masks by a full-shaped value of the model itself: a step of the backward."""
    others = [name for name in node.inputs if name and name not in facts.tainted]
    return node.is_a("Mul", "Div", "Where") and any(
        name in facts.model and name not in facts.update_only and not facts.index.one_element(name) for name in others
    )


def _linear(facts: Facts, node: Node) -> bool:
    """Whether the node is affine in the one operand of it that depends on the batch."""
    tainted = [name for name in node.inputs if name in facts.tainted]
    if any(name in facts.update_only for name in node.inputs if name not in facts.tainted):
        return False
    return len(tainted) == 1 and (
        node.is_a(*LAYOUT, *LINEAR)
        or (node.is_a("Div", "Gather", "GatherND", "GatherElements") and node.inputs[0] in facts.tainted)
        or (node.is_a("Where") and node.inputs[0] not in facts.tainted)
        or (node.is_a("ScatterND", "ScatterElements") and node.inputs[1] not in facts.tainted)
    )


@dataclass(slots=True)
class Rawness:
    """Which values after the gradients still hold this rank's own data, and which hold (reduced) gradients."""

    raw: set[str]
    reduced: set[str]
    mixed: list[Node]
    """Nodes where the two meet: an update that would read a value of one rank alone."""


def rawness(facts: Facts, gradients: set[str], backward: set[int]) -> Rawness:
    """One sweep over the nodes behind the gradients. A gradient read by the update counts as reduced."""
    raw: set[str] = set()
    reduced: set[str] = set()
    mixed: list[Node] = []
    producer = facts.index.producer
    for node in facts.index.graph.nodes:
        if id(node) in facts.forward or id(node) in backward:
            continue
        holds_raw, holds_reduced = random(node), False
        for name in node.reads:
            if name in gradients or name in reduced:
                holds_reduced = True
            if name in raw:
                holds_raw = True
            elif name in facts.tainted and name not in gradients:
                maker = producer.get(name)
                if maker is None or id(maker) in facts.forward or id(maker) in backward:
                    holds_raw = True
        if holds_raw and holds_reduced:
            mixed.append(node)
        if holds_raw:
            raw.update(node.outputs)
        if holds_reduced:
            reduced.update(node.outputs)
    return Rawness(raw, reduced, mixed)

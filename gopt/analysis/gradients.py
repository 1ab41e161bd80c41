"""Find each parameter's gradient: the value nearest the data through which its whole update depends on the batch.

From a new parameter value a walk goes back over what depends on the batch, latest value first. Whenever a single
value is left to visit, every path runs through it: it dominates the update. The dominator nearest the data is exact,
whatever lies behind it: the backward is homogeneous-linear in the adjoint that flows through it, so all that is affine
or nonlinear in that dominator belongs to the update, and a mean over ranks passes through the rest. Of the dominators
that follow it in proportion, the last one that the backward makes is called the gradient.

One-element operands (a clip coefficient, a finite flag) are not followed; whether they are the same on every rank is
checked afterwards by ``local_taint``.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from functools import cached_property

from gopt.analysis.graph_walks import GraphIndex, ancestors
from gopt.analysis.linearity import Linearity, is_zero, propagate_linearity
from gopt.analysis.operators import LAYOUT, MAY_DRAW, elementwise, random
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.types import FLOATS

MAX_VISITED = 4000
"""Values one walk may visit: an update is some tens of nodes, a Newton-Schulz iteration some hundreds."""


@dataclass(slots=True)
class AnalysisContext:
    """Facts about the graph that the walks need: which values depend on the batch, and which belong to the forward."""

    index: GraphIndex
    tainted: set[str]
    forward: set[int]
    barrier: set[int] = field(default_factory=set)
    """Nodes known to belong to the backward although they look like update."""
    update_only: set[str] = field(default_factory=set)
    """Values that depend on optimizer states: what reads them is update."""
    settings: set[str] = field(default_factory=set)
    """Inputs that neither the batch nor the forward has: hyper-parameters."""
    model: set[str] = field(default_factory=set)
    """Values that the forward reads or computes, and all that depends on parameters: a factor among them is no
    optimizer mask.
    """
    computed: set[str] = field(default_factory=set)
    """Values that the forward computes from parameters alone."""
    clean: set[str] = field(default_factory=set)
    """Values that depend on other parameters' gradients: not followed when the parameter has one element."""
    divisors: set[str] = field(default_factory=set)
    """Values of the forward by which something of the forward is divided, such as a token count."""
    of_loss: set[str] = field(default_factory=set)
    """The loss and what depends on it."""

    later: set[str] = field(init=False)
    """Values computed after the forward."""

    def __post_init__(self) -> None:
        nodes = self.index.graph.nodes
        self.later = {name for node in nodes if id(node) not in self.forward for name in node.outputs}

    def starts_in_forward(self, held: list[str]) -> bool:
        """Return whether a node reads a batch-dependent value of the forward, so that it computes a local gradient.

        ``held``: what it reads of the batch. A factor computed from the loss does not count next to a value of the
        backward: no backward of a mean reads it there.
        """
        later = self.later
        if later.issuperset(held):
            return False
        local = [name for name in held if name not in later]
        if len(local) == len(held):
            return True
        return any(not (name in self.of_loss and self.index.one_element(name)) for name in local)

    def masks_locally(self, node: Node) -> bool:
        """Return whether a node keeps a value or zero by a flag of the forward, as the backward of a ReLU does."""
        if not node.is_a("Where") or not any(is_zero(self.index, name) for name in node.inputs[1:]):
            return False
        producer = self.index.producers.get(node.inputs[0])
        held = [name for name in producer.reads if name in self.tainted] if producer is not None else []
        return bool(held) and self.later.isdisjoint(held)

    def adjoints(self, operands: list[str]) -> list[str]:
        """Return those one-element operands that may be gradients: they depend on the model and not on the loss.

        If no operand qualifies, all are returned. A rate that follows the loss, or a count of the batch, is a factor of
        a gradient.
        """
        operands = [name for name in operands if name not in self.of_loss] or operands
        return [name for name in operands if name in self.model or name not in self.tainted] or operands


@dataclass(slots=True)
class Walk:
    """Values that all paths from the batch to an update run through, latest first; and the visited nodes, with their
    places."""

    dominators: list[str]
    nodes: list[Node]
    places: list[int]


def find_gradient(context: AnalysisContext, parameter: str, updated: str) -> str | None:
    """The gradient behind the new value ``updated``, or None when the update does not depend on the batch.

    Raises UnsupportedError where the data flow leaves open which value is the gradient.
    """
    walk = _walk(context, updated)
    if not walk.dominators:
        return None
    return _Choice(context, parameter, walk).gradient()


def _walk(context: AnalysisContext, updated: str) -> Walk:
    index, types, tainted_values = context.index, context.index.graph.types, context.tainted
    producers, places, scalars = index.producers, index.definitions, index.scalars
    forward, later, barrier = context.forward, context.later, context.barrier
    elements = types[updated].elements
    single = elements == 1
    walk = Walk([], [], [])
    heap = [(-index.defined_at(updated), updated)]
    queued = {updated}
    backward: set[str] = set()
    """Values in front of nodes that are known to belong to the backward."""
    for _ in range(MAX_VISITED):
        if not heap:
            break
        place, name = heapq.heappop(heap)
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
        walk.places.append(-place)
        if local:
            break
        if single:  # a flag over all gradients is not a gradient
            if context.masks_locally(node):
                break
            tainted = context.adjoints([o for o in tainted if index.graph.type_of(o).dtype != "bool"])
            # A clip coefficient looks like a gradient: it is the operand that knows other gradients.
            clean = _derived(context, tainted)
            tainted = [operand for operand in tainted if operand not in clean] or tainted
        elif name in backward or (barrier and id(node) in barrier):
            backward.update(tainted)  # no clip stands there: a sum of an adjoint is a factor of its other part
        elif elementwise(node) and not scalars.isdisjoint(tainted):
            tainted = [operand for operand in tainted if operand not in scalars]
        for operand in tainted:
            if operand not in queued:
                queued.add(operand)
                heapq.heappush(heap, (-places.get(operand, -1), operand))
    else:
        raise UnsupportedError(
            f"the update that makes {updated!r} has more than {MAX_VISITED} values: its gradient was not reached",
            "name the gradient of its parameter: --params PARAMETER=VALUE",
        )
    return walk


def _moves(node: Node) -> bool:
    """Return whether a node passes its operand on: a value of the forward in another layout is one operand of a
    contraction whose other operand has one element."""
    return node.is_in(LAYOUT) or node.is_a("Cast")


def _derived(context: AnalysisContext, operands: list[str]) -> set[str]:
    """Return the operands that depend on other gradients.

    Before any gradient is known: operands computed from another operand, such as the norm that clips a gradient.
    """
    if context.clean or len(operands) < 2:
        return context.clean
    distinct = set(operands)
    return {name for name in distinct if not distinct.isdisjoint(ancestors(context.index, [name])[1] - {name})}


class _Choice:
    """Selects the dominator of a walk that is the gradient."""

    def __init__(self, context: AnalysisContext, parameter: str, walk: Walk) -> None:
        self.context, self.parameter = context, parameter
        self.index, self.types = context.index, context.index.graph.types
        self.nearest = walk.dominators[-1]
        start = self.index.defined_at(self.nearest)
        rising = [(node, place) for node, place in zip(walk.nodes, walk.places) if place > start][::-1]
        self.nodes = [node for node, _ in rising]
        self.place = {id(node): place for node, place in rising}
        self.rising = walk.dominators[::-1]
        self.held_back = [node for node in self.nodes if id(node) in context.barrier] if context.barrier else []

    @cached_property
    def linearity(self) -> dict[str, Linearity]:
        """Of all values of the walk in the nearest one; most choices look at the dominators alone."""
        return propagate_linearity(self.index, self.nodes, self.nearest, self.context.tainted)

    def gradient(self) -> str | None:
        stretch = self._stretch()
        bounds = [self.index.defined_at(name) for name in stretch]
        if any(self.place[id(node)] > bounds[-1] for node in self.held_back):
            return None  # the backward would go on behind something that no backward does
        first = 0
        seen_elsewhere = False
        for number, (low, high) in enumerate(itertools.pairwise(bounds), 1):
            part = [node for node in self.nodes if low < self.place[id(node)] <= high]
            held = any(id(node) in self.context.barrier for node in part)
            seen_elsewhere = seen_elsewhere or self._read_elsewhere(stretch[number - 1])
            if held or (not seen_elsewhere and self._backward(part)):
                first = number
        shape = self.types[self.parameter].shape
        chosen = next((name for name in stretch[first:] if self.types[name].shape == shape), None)
        if chosen is None:
            raise UnsupportedError(
                f"no gradient of {self.parameter!r} was found: the nearest value, {self.nearest!r}, has the shape "
                f"{self.types[self.nearest]}, and the parameter is {self.types[self.parameter]}",
                f"give the update a gradient of the parameter's shape, or name it: --params {self.parameter}=VALUE",
            )
        self._refuse_open(stretch[-1])
        return chosen

    def _stretch(self) -> list[str]:
        """Return the nearest dominator and those that follow it in proportion.

        The first value that does not ends the stretch: the next dominator is made of it.
        """
        allowed = Linearity.SCALED if self.held_back else Linearity.HOMOGENEOUS
        linearity = propagate_linearity(self.index, self.nodes, self.nearest, self.context.tainted, allowed)
        ends = (linearity.get(name, Linearity.NONLINEAR) > allowed for name in self.rising)
        return self.rising[: next((number for number, end in enumerate(ends) if end), None)]

    def _read_elsewhere(self, name: str) -> bool:
        """Return whether a node outside the walk uses the value nonlinearly or reduces it to one element, such as a
        gradient norm.
        """
        walked = {id(node) for node in self.nodes}
        for node in self.index.users.get(name, ()):
            if id(node) not in walked and not self._linear_in(node, name):
                return True
        return False

    def _linear_in(self, node: Node, name: str) -> bool:
        found = propagate_linearity(self.index, [node], name, self.context.tainted)
        return all(
            found.get(output, Linearity.NONLINEAR) < Linearity.NONLINEAR and not self.index.one_element(output)
            for output in node.outputs
            if output
        )

    def _backward(self, nodes: list[Node]) -> bool:
        """Return whether some node mixes elements or reads the model, as a backward does, and none reads a state.

        Where a way is linear, the mean passes through it whichever side it belongs to. What cannot be cut is left to
        the backward, so that the update can.
        """
        context = self.context
        if any(name in context.update_only for node in nodes for name in node.reads):
            return False
        return any(self._mixes(node) or any(map(self._of_model, node.reads)) for node in nodes)

    def _mixes(self, node: Node) -> bool:
        """Return whether the node is not elementwise, so that it cannot run on a piece of the parameter."""
        if node.is_in(LAYOUT) and not node.is_a("Slice", "Expand"):
            return False
        return not elementwise(node) or not all(map(self._fits, node.inputs))

    def _fits(self, operand: str) -> bool:
        elements = self.types[self.parameter].elements
        return not operand or self.index.graph.type_of(operand).elements in (1, elements)

    def _of_model(self, name: str) -> bool:
        """Return whether a value belongs to the model: a weight of a later layer, a mask, a scale computed by the
        forward.

        A scalar input does not count: a loss scale is a factor of every gradient.
        """
        context = self.context
        if name not in context.model or name in context.tainted:
            return False
        if self.index.one_element(name):
            return name in context.computed
        return self.index.graph.type_of(name).dtype in (*FLOATS, "bool")

    def _refuse_open(self, last: str) -> None:
        """Raise if the part after ``last`` may still be the backward: it is nonlinear and reads values of the forward
        only.

        1/y² is the gradient of -1/y as well as an update by the inverse of the gradient y². Nothing in the graph says
        which, unless a state or a setting takes part, or the gradient comes from a contraction over an adjoint.
        """
        behind = self.rising[self.rising.index(last) + 1 :]
        end = self.index.defined_at(behind[0]) if behind else len(self.index.graph.nodes)
        start = self.index.defined_at(last)
        part = [node for node in self.nodes if start < self.place[id(node)] <= end]
        update_only, settings = self.context.update_only, self.context.settings
        if not all(update_only.isdisjoint(node.reads) and settings.isdisjoint(node.reads) for node in part):
            return
        bent = [node for node in part if self.linearity.get(node.outputs[0]) is Linearity.NONLINEAR]
        if not bent or any(self._aside(name) for node in part for name in node.reads) or not self._of_forward_alone():
            return
        raise UnsupportedError(
            f"{self.nearest!r} may be the gradient of {self.parameter!r}, or a part of its backward: "
            f"{bent[0].op_type} {bent[0].label!r} is not linear in it",
            f"name the gradient: --params {self.parameter}={self.nearest}",
        )

    def _aside(self, name: str) -> bool:
        """Return whether an operand depends on the batch past the walk: a scalar over gradients."""
        return name in self.context.tainted and name not in self.linearity

    def _of_forward_alone(self) -> bool:
        """Return whether the nearest value is made element by element of values of the forward."""
        stack, seen = [self.nearest], set()
        while stack:
            name = stack.pop()
            if name in seen or name not in self.context.tainted:
                continue
            seen.add(name)
            node = self.index.producers.get(name)
            if node is None or id(node) in self.context.forward:
                continue
            if not (elementwise(node) or node.is_in(LAYOUT)) or len(seen) > MAX_VISITED:
                return False
            stack.extend(node.inputs)
        return True


@dataclass(slots=True)
class LocalTaint:
    """The values after the gradients that are still rank-local, and those that depend on (reduced) gradients."""

    rank_local: set[str]
    reduced: set[str]
    mixed: list[Node]
    """Nodes where the two first meet: an update that would read a value of one rank alone."""


def local_taint(context: AnalysisContext, gradients: set[str], backward: set[int]) -> LocalTaint:
    """One sweep over the nodes behind the gradients. A gradient read by the update counts as reduced."""
    rank_local: set[str] = set()
    held = set(gradients)
    """The gradients, and what is made of them: no node behind them makes one."""
    mixed: list[Node] = []
    producers, tainted = context.index.producers, context.tainted
    for node in context.index.graph.nodes:
        if id(node) in context.forward or id(node) in backward:
            continue
        holds_rank_local, holds_reduced, met = node.op_type in MAY_DRAW and random(node), False, False
        for name in node.reads:
            is_reduced, is_rank_local = name in held, name in rank_local
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
            held.update(node.outputs)
    return LocalTaint(rank_local, held - gradients, mixed)

"""The inputs upstream of every gradient: a state whose update lacks such an input is a statistic, however it is made.

A backward multiplies derivatives along a path from the loss to a parameter, and each operator on the path adds the
operands of its own derivative: a product the other factors, a curved function the operand. Two sweeps give a lower
bound of these inputs: forwards, the inputs upstream of each value; backwards, the inputs read on every path from the
loss. An update that lacks such an input holds no gradient. The bound is certain where a backward differentiates the
loss; stopping gradients on some paths, or passing gradients straight through, only makes a backward read more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import in_proportion, record_of
from gopt.ir.types import FLOATS
from gopt.operators.kinds import (
    ARG_EXTREMES,
    ATTENTION,
    CASTS,
    CLASS_LOSSES,
    EXTREMES,
    MOVES,
    POOLS,
    PRODUCTS,
    RECURRENT,
    SCALES,
    SCATTERS,
    STEPWISE,
    SUMS,
    UNMOVED,
)
from gopt.operators.operator import Slope
from gopt.operators.table import names

_CURVED = names(lambda record: record.slope(0) is Slope.CURVED) - POOLS - RECURRENT - ATTENTION - {"BatchNormalization"}
"""Functions whose derivative follows their first operand smoothly, in every form."""
_BENT = names(lambda record: record.slope(0) is Slope.BENT) - EXTREMES - SCATTERS - {"Clip"}
"""Functions whose derivative follows comparisons of their first operand. Behind a Clip it may be passed straight
through."""
_TERMS = UNMOVED | SUMS | {"Neg"}
_FACTORS = SCALES | PRODUCTS | CASTS | MOVES | {"Neg"}
_CHAIN = 16
_MOST = 256
"""Groups of leaves: more would make the masks of a deep network grow with its depth."""


def without_needs(
    index: GraphIndex, forward: set[int], losses: Iterable[str], batch: Iterable[str], updated: Mapping[str, str]
) -> dict[str, str]:
    """Floating states whose new value cannot hold a gradient of the losses -> a lacking input.

    ``updated``: state -> new value; ``forward``: nodes upstream of the losses, by id."""
    read = [name for node in index.graph.nodes if id(node) in forward for name in node.reads]
    leaves = _groups([name for name in dict.fromkeys([*batch, *read]) if name in updated or name in index.graph.inputs])
    losses, live = list(losses), set(read)
    sweep = _Dependence(index, forward, leaves, _only_added(index, forward, losses, updated))
    needs = _needs(sweep, losses, smooth=True)
    if any(name in live and name not in needs for name in updated):  # a selection alone leads from it to the loss
        needs = _needs(sweep, losses, smooth=False) | needs
    leaf_of: dict[str, str] = {}
    for name, output in updated.items():
        lacking = needs.get(name, 0) & ~sweep.of.get(output, 0)
        if lacking:
            leaf_of[name] = leaves[(lacking.bit_length() - 1) % len(leaves)][-1]
    return leaf_of


def multiplied(index: GraphIndex, value: str) -> str:
    """The product made by the readers of a value, in sequence: a derivative's last factors stand there."""
    for _ in range(_CHAIN):
        users = index.users.get(value, [])
        if len(users) != 1 or not users[0].is_in(_FACTORS):
            break
        value = users[0].outputs[0]
    return value


def _groups(leaves: Sequence[str]) -> Sequence[Sequence[str]]:
    """The leaves in order, each in a group of its own, or in as many groups as a mask may have bits.

    An update that lacks a whole group lacks each leaf of the group, needed leaves included: with groups a statistic may
    be taken for a gradient, and no gradient for a statistic."""
    singles, several = (leaves, ()) if len(leaves) <= _MOST else (leaves[: _MOST // 2], leaves[_MOST // 2 :])
    size = -(-len(several) // (_MOST // 2)) or 1
    return [*([name] for name in singles), *(several[at : at + size] for at in range(0, len(several), size))]


def _only_added(index: GraphIndex, forward: set[int], losses: Iterable[str], updated: Mapping[str, str]) -> set[str]:
    """The losses, and the numbers that reach a loss as terms of sums alone: no derivative of a loss reads such a
    number, so that values that follow the batch through such a number are shown, or are statistics."""
    terms_of: set[str] = set()
    inside: set[int] = set()
    stack = list(losses)
    while stack:
        name = stack.pop()
        users = (node for node in index.users.get(name, ()) if id(node) in forward)
        if name in terms_of or not index.one_element(name) or not all(id(node) in inside for node in users):
            continue
        terms_of.add(name)
        node = index.producers.get(name)
        if node is None or not (node.is_in(_TERMS) or node.is_in(SCALES)):
            continue
        terms = list(node.inputs)
        if node.is_in(SCALES):
            terms = [term for term in terms if not _fixed(index, term, updated)]
            if len(terms) != 1 or not in_proportion(node, terms[0]):
                continue
        inside.add(id(node))
        stack += terms
    return terms_of


def _fixed(index: GraphIndex, name: str, updated: Mapping[str, str]) -> bool:
    """Return whether a factor is a constant, or a fed number."""
    fed = name in index.graph.inputs and name not in updated and index.one_element(name)
    return fed or index.constants.number(name) is not None


class _Dependence:
    """Value -> leaves upstream, as bits: along any path, and above these bits through smooth functions alone.

    Behind the forward an update may take signs and comparisons of a gradient: there only a place is no smooth function.
    ``leaves``: in groups, of one bit each, so that masks stay short in a large network. ``added``: values of the
    forward that no backward reads; values made of these behind the forward depend on nothing."""

    def __init__(self, index: GraphIndex, forward: set[int], leaves: Sequence[Sequence[str]], added: set[str]) -> None:
        self.index, self.forward, graph = index, forward, index.graph
        self.loose = (1 << len(leaves)) - 1
        self.of: dict[str, int] = {}
        for position, group in enumerate(leaves):
            for name in group:
                self.of[name] = 1 << position | (1 << position + len(leaves)) * self.smooth(name)
        masks = {mask: mask for mask in self.of.values()}
        """One object for each mask: a network has far fewer than values."""
        mask_of = self.of.get
        for node in graph.nodes:
            mask, inside = 0, id(node) in forward
            for name in node.reads:
                mask |= mask_of(name, 0) if inside or name not in added else 0
            if not mask:
                continue
            steps = node.is_in(ARG_EXTREMES) or (inside and node.is_in(STEPWISE))
            for name in node.outputs:
                reduced = mask & self.loose if steps or (inside and not self.smooth(name)) else mask
                self.of[name] = masks.setdefault(reduced, reduced)

    def smooth(self, name: str) -> bool:
        dtype = self.index.graph.type_of(name).dtype
        return dtype in FLOATS or dtype == "undefined" or dtype.startswith("float")


def _needs(sweep: _Dependence, losses: Iterable[str], *, smooth: bool) -> dict[str, int]:
    """Value of the forward -> leaves upstream of the derivatives on every path from a loss to the value; ``smooth``:
    along paths of floating values."""
    needs = dict.fromkeys(losses, 0)
    for node in reversed(sweep.index.graph.nodes):
        behind = [needs[name] for name in node.outputs if name in needs]
        if not behind or id(node) not in sweep.forward:
            continue
        least = behind[0]
        for mask in behind[1:]:
            least &= mask
        for name, more in _derivatives(sweep, node):
            if not smooth or sweep.smooth(name):
                needs[name] = needs.get(name, least | more) & (least | more)
    return needs


def _derivatives(sweep: _Dependence, node: Node) -> Iterator[tuple[str, int]]:
    """Each operand, with a lower bound of the leaves upstream of the derivative by that operand.

    Functions of one number are left out: the shown loss may be a multiple or a function of the loss at the start of the
    backward."""
    shown = all(map(sweep.index.one_element, filter(None, node.outputs)))
    masks = [sweep.of.get(name, 0) for name in node.inputs]
    record = record_of(node)
    exponents = [record.exponent(slot) for slot in range(len(masks))]
    for slot, name in enumerate(node.inputs):
        if not name:
            continue
        more = 0
        if shown and sweep.index.one_element(name):
            pass
        elif exponents[slot]:
            for operand, (mask, exponent) in enumerate(zip(masks, exponents)):
                more |= mask if exponent and (operand, exponent) != (slot, 1) else 0
        elif record.choosers and record.slope(slot) and not node.is_in(SCATTERS):
            more = masks[record.choosers[0]]
        elif node.is_in(_CURVED) and slot == 0:
            more = masks[0] | (masks[1] if node.is_in(CLASS_LOSSES) else 0)
        elif node.is_in(_BENT) and slot == 0:
            more = masks[0] & sweep.loose
        yield name, more
    for name in node.captures:
        yield name, 0

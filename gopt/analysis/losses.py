"""The losses of a step: scalars at the start of a backward, found by the values upstream of gradients.

The forward contains the scalars outside of backward and update, losses and shown scalars, and everything upstream. A
loss is the source of a gradient: the backward reads values upstream of this scalar and of no other. A loss that ends in
sums and means alone has no such value in the backward; such a scalar counts as a loss if some gradient has no other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gopt.analysis.layout_aliases import LAYOUT_OPERATORS
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, ancestors, depth, descendants, parts_of, walk
from gopt.ir.node_kinds import elementwise, value_reads
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CONTRACTIONS, LAYOUT, SCALES, STEPWISE

_STEPS = STEPWISE | {"ArgMax"}
"""Operators of floating values through which no gradient comes."""
_SMOOTH = FLOATS | {"undefined"}


def loss_candidates(index: GraphIndex, pairs: Mapping[str, str]) -> list[str]:
    """One-element floating outputs with a differentiable path from a state; outputs that tensors of a batch reach
    first, then the shallowest first."""
    graph = index.graph
    single = [
        name
        for name, type in graph.outputs.items()
        if name not in pairs and index.one_element(name) and type.dtype in FLOATS
    ]
    makers, paired = ancestors(index, single)[0], set(pairs.values())
    smooth, moving = set(paired), {name for name in graph.inputs if name not in paired}
    for node in graph.nodes:
        if id(node) not in makers:
            continue
        if not smooth.isdisjoint(node.reads) and not node.is_in(_STEPS):
            smooth.update([name for name in node.outputs if graph.type_of(name).dtype in _SMOOTH])
        if not moving.isdisjoint(node.reads):
            moving.update(node.outputs)
    outputs = [name for name in single if name in smooth and name in moving]
    if len(outputs) > 1:
        steps, fed = depth(index), _fed(index, paired)
        outputs.sort(key=lambda name: (name not in fed, steps.get(name, 0)))
    return outputs


def _fed(index: GraphIndex, paired: Iterable[str]) -> set[str]:
    """Return the values that depend on fed tensors: neither states nor stored values."""
    graph = index.graph
    inputs = graph.inputs.keys() - graph.initializers.keys() - set(paired)
    return descendants(index, [name for name in inputs if graph.inputs[name].shape != ()])


def further_roots(step: StepSkeleton, gradients: Iterable[str], candidates: Sequence[str]) -> tuple[str, ...]:
    """Other scalars of the forward: dependent on the batch, and on no gradient.

    Behind the first scalar that reads a further state there may be gradients of that state, and behind any scalar where
    a state of the forward holds no gradient of the losses so far: later scalars wait for the next look."""
    index = step.index
    rest = [name for name in candidates if name not in step.roots and name not in step.replaces]
    if not rest:
        return ()

    def unscaled(name: str) -> Iterable[str]:
        """The row, view or multiple that a gradient is a part of, such as all gradients in one clipped row."""
        operands = [operand for operand in index.operands(name, _by_row) if not index.one_element(operand)]
        return operands if len(operands) == 1 or index.operands(name, _of_layout) else ()

    behind, fed = descendants(index, walk(gradients, unscaled)), _fed(index, step.updated)
    roots: list[str] = []
    visited, open_ = set(step.forward_values), not step.forward_values.isdisjoint(step.lacking)
    for name in rest:
        if name in behind or name not in fed:
            continue
        roots.append(name)
        new = _read_beyond(index, name, visited)
        if open_ or not new.isdisjoint(step.updated):
            break
    return tuple(roots)


def before_updates(index: GraphIndex, pairs: Mapping[str, str], candidates: Sequence[str]) -> list[str]:
    """The candidates from the first possible loss on.

    Where each tensor among a scalar's states is made anew, element by element, of a value upstream of the scalar, the
    gradient is upstream too: the scalar may be a norm of gradients, shown without a loss. A loss without products of
    the batch with the batch may be such a norm as well."""
    fed = _fed(index, pairs.values())
    products = {
        name for node in index.graph.nodes if node.is_in(CONTRACTIONS) and fed.issuperset(node.inputs[:2])
        for name in node.outputs
    }  # fmt: skip
    of = parts_of(index.graph.nodes, {name: 1 << position for position, name in enumerate(candidates)})
    with_products = 0
    for name in products:
        with_products |= of.get(name, 0)
    moving = [(output, of.get(state, 0)) for output, state in pairs.items()
              if output in fed and not index.one_element(state)]  # fmt: skip
    for number in range(len(candidates)):
        one = 1 << number
        tensors = [output for output, bits in moving if bits & one]
        if not tensors or not with_products & one or not all(_meets(index, tensor, of, one, fed) for tensor in tensors):
            return list(candidates[number:])
    return []


def _of_layout(node: Node) -> bool:
    return node.is_in(LAYOUT_OPERATORS)


def _by_row(node: Node) -> bool:
    return _of_layout(node) or node.is_in(SCALES)


def _by_element(node: Node) -> bool:
    return elementwise(node) or node.is_in(LAYOUT)


def _meets(index: GraphIndex, output: str, of: Mapping[str, int], one: int, fed: set[str]) -> bool:
    """Return whether a new value is made element by element of a computed value moved by the batch and upstream of the
    candidate ``one``."""
    elements = index.graph.type_of(output).elements

    def moved(name: str) -> bool:
        return name in fed and name in index.producers and index.graph.type_of(name).elements == elements

    def following(name: str) -> Iterable[str]:
        return filter(moved, index.operands(name, _by_element))

    return any(of.get(name, 0) & one for name in walk(filter(moved, [output]), following))


def apart_from_updates(step: StepSkeleton, candidates: Sequence[str]) -> tuple[str, ...]:
    """Other scalars that depend on the batch, and not on any value from which a new value is made element by element:
    no gradient is upstream of such a scalar. Without such a scalar, values made of scalars alone do not count: the
    gradients of learned weights of losses are the losses."""
    index, fed = step.index, _fed(step.index, step.updated)
    rest = [name for name in candidates if name not in step.roots and name not in step.replaces and name in fed]
    for moving in (fed, fed - _made_of_scalars(index, fed)) if rest else ():
        behind = descendants(index, _made_into_updates(step, moving))
        if apart := tuple(name for name in rest if name not in behind):
            return apart
    return ()


def _made_of_scalars(index: GraphIndex, fed: set[str]) -> set[str]:
    """Return the values that follow the batch through values of one element alone, and these values."""
    scalars: set[str] = set()
    for node in index.graph.nodes:
        combines = scalars.issuperset(fed.intersection(node.reads))
        scalars.update(name for name in node.outputs if name in fed and (combines or index.one_element(name)))
    return scalars


def _made_into_updates(step: StepSkeleton, fed: set[str]) -> set[str]:
    """Return the values that follow the batch and become new values of states element by element."""
    index = step.index

    def moved(name: str) -> bool:
        return name in fed and name in index.producers and id(index.producers[name]) not in step.forward

    def following(name: str) -> Iterable[str]:
        operands = index.operands(name, _by_element)
        return (read for read in operands if moved(read) and (not index.one_element(read) or index.one_element(name)))

    return set(walk(filter(moved, step.replaces), following))


def _read_beyond(index: GraphIndex, value: str, visited: set[str]) -> set[str]:
    """Return a value and all values upstream, without the values in ``visited``, and add each to ``visited``."""

    def following(name: str) -> Iterable[str]:
        return (operand for operand in index.operands(name) if operand not in visited)

    reached = set(walk([value] if value not in visited else [], following))
    visited |= reached
    return reached


class LossRoots:
    """The scalars at the ends of a forward. ``ends``: scalars upstream of no other scalar, except for a function of the
    scalar alone (a perplexity): losses, or only shown."""

    def __init__(self, step: StepSkeleton) -> None:
        self.step, self.index = step, step.index
        self._bit = {name: 1 << position for position, name in enumerate(step.roots)}
        self.ends = self._ends()

    @cached_property
    def of(self) -> dict[str, int]:
        """Value of the forward -> roots downstream of the value, a bit for each; one backward sweep."""
        return parts_of([node for node in self.index.graph.nodes if id(node) in self.step.forward], self._bit)

    def leads(self, value: str, root: str) -> bool:
        """Return whether a root is made of a value, or is the value."""
        return bool(self.of.get(value, 0) & self._bit[root])

    def _ends(self) -> tuple[str, ...]:
        roots = self.step.roots
        if len(roots) == 1:
            return roots
        parts = {name for name in roots if self.of[name] != self._bit[name]}
        moving = self._moving()
        ends = {self._same_before(name, moving) for name in roots if name not in parts}
        return tuple(name for name in self.index.graph.outputs if name in ends)

    def _moving(self) -> set[str]:
        """Return the values that depend on the batch or on tensors among the states."""
        tensors = [name for name in self.step.updated if not self.index.one_element(name)]
        return descendants(self.index, [*self.step.batch, *tensors])

    def _same_before(self, name: str, moving: set[str]) -> str:
        """The first root behind ``name``, with no other moving operand."""
        root = name
        while (node := self.index.producers.get(name)) is not None:
            read = [name for name in dict.fromkeys(node.reads) if name in moving]
            if len(read) != 1 or not self.index.one_element(read[0]):
                break
            name = read[0]
            root = name if name in self._bit else root
        return root

    def alone(self, value: str) -> str:
        """The single end to which a value of the forward leads; else ''."""
        bits = self.of.get(value, 0)
        ends = [name for name in self.ends if self._of_end[name] & bits]
        return ends[0] if len(ends) == 1 else ""

    @cached_property
    def _of_end(self) -> dict[str, int]:
        """End -> bit of the end, joined with bits of roots that are functions of the end alone."""
        moving = self._moving()
        masks = {name: self._bit[name] for name in self.ends}
        for name in self.step.roots:
            end = self._same_before(name, moving)
            if end in masks:
                masks[end] |= self._bit[name]
        return masks


@dataclass(frozen=True, slots=True)
class Losses:
    """``names``: the losses. ``of``: gradient -> ends of the forward whose own values the backward reads."""

    names: tuple[str, ...]
    of: Mapping[str, frozenset[str]]


def settle_losses(
    step: StepSkeleton, gradients: Mapping[str, str], backward: set[int], named: Sequence[str], carried: Collection[str]
) -> Losses:
    """The losses of a step with known gradients; raises where ``named``, the user's losses, are incomplete.

    ``carried``: scalars that may be new values of states: losses only where a gradient has no other."""
    behind = next((name for name in named if name not in step.roots), None)
    if behind is not None:
        raise OptionError(
            f"{behind!r} cannot be a loss: it is computed from gradients, or from no batch",
            f"leave it out: --loss {','.join(name for name in named if name != behind) or 'OUTPUT'}",
        )
    roots = LossRoots(step)
    if len(step.roots) == 1:
        return Losses(step.roots, {})
    of = _sources(step, roots, gradients, backward)
    if named:
        _refuse_unnamed(roots, gradients, of, named)
        return Losses(tuple(named), of)
    claimed = set[str]().union(*of.values())
    for parameter in (name for name, gradient in gradients.items() if not of[gradient]):
        ends = {name for name in roots.ends if roots.leads(parameter, name)} or set(roots.ends)
        claimed |= ends.difference(carried) or ends
    return Losses(tuple(name for name in roots.ends if name in claimed), of)


def _sources(
    step: StepSkeleton, roots: LossRoots, gradients: Mapping[str, str], backward: set[int]
) -> dict[str, frozenset[str]]:
    """Gradient -> ends whose own values the backward reads; one sweep."""
    bit = {name: 1 << position for position, name in enumerate(roots.ends)}
    seeds: dict[str, int] = {}
    masks: dict[str, int] = {}
    for node in step.index.graph.nodes:
        if id(node) in step.forward:
            for name in node.outputs:
                end = roots.alone(name) if name in step.tainted else ""
                if end:
                    seeds[name] = bit[end]
        elif id(node) in backward:
            bits = 0
            for name in value_reads(node):
                bits |= seeds.get(name, 0) | masks.get(name, 0)
            masks.update((name, bits) for name in node.outputs)
    return {
        gradient: frozenset(name for name, one in bit.items() if masks.get(gradient, 0) & one)
        for gradient in gradients.values()
    }


def _refuse_unnamed(
    roots: LossRoots, gradients: Mapping[str, str], of: Mapping[str, frozenset[str]], named: Sequence[str]
) -> None:
    """Raise UnsupportedError for a gradient from no loss named by the user."""
    covered = {end for end in roots.ends if any(roots.leads(end, name) or roots.leads(name, end) for name in named)}
    for parameter, gradient in gradients.items():
        sources = of[gradient] or {end for end in roots.ends if roots.leads(parameter, end)}
        if not sources or not sources.isdisjoint(covered):
            continue
        unnamed = [name for name in roots.ends if name in sources]
        raise UnsupportedError(
            f"{gradient!r}, the gradient of {parameter!r}, does not come from {' or '.join(map(repr, named))}, but "
            f"from {' or '.join(map(repr, unnamed))}",
            f"name all losses: --loss {','.join([*named, *unnamed])}, or leave --loss out",
        )

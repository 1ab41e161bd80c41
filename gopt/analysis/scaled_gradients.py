"""Outputs equal to a factor times a gradient, or times a statistic of the batch: shown, or the factor's new value?

The product of a pruning mask and a gradient has the mask's type, and is made of the mask element by element. As the
mask's new value, the product would replace the mask in the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from gopt.analysis.open_pairs import OpenPairsError
from gopt.analysis.role_hints import others
from gopt.analysis.state_matching import FACTOR_COST, reachable_states
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.node_kinds import chosen_by, elementwise, record_of
from gopt.ir.types import FLOATS
from gopt.operators.kinds import EXTREMES, LAYOUT, TERMS
from gopt.operators.operator import Slope

_TERMS = TERMS | EXTREMES


def refuse_scaled(step: StepSkeleton, training: TrainingGraph) -> None:
    """Raise UnsupportedError for a state, not named by the user, that may be a factor of the shown output.

    A new value that is zero wherever a gradient is zero keeps nothing of the old value. A running statistic adds to the
    old value; a product of the old value with values of the batch is no statistic."""
    pairs: dict[str, str] = {}
    behind = _vanishing(step.index, frozenset(training.gradients.values()))
    for state in training.states:
        name, output = state.tensor, state.updated
        if name in step.roles.states or step.index.one_element(name) or output not in step.tainted:
            continue
        if state.kind is StateKind.STATISTIC:
            factor = _never_added(step, output, name)
        else:
            factor = output in behind and _masks(step, output, name)
        if factor:
            pairs[name] = output
    if pairs:
        raise _open(step, pairs)


def _open(step: StepSkeleton, products: Mapping[str, str]) -> OpenPairsError:
    """The refusal of all pairs of one kind with the first, fed or stored. ``products``: state -> output."""
    name, output = next(iter(products.items()))
    fed = _fed(step, name)
    pairs = {output: shown for output, shown in products.items() if _fed(step, output) is fed}
    if len(pairs) > 1:
        stay = "if the factors stay as they are, make them outputs of Constant nodes"
    else:
        stay = f"if it stays as it is, make {name} the output of a Constant node"
    return OpenPairsError(
        f"output {output!r}{others(len(pairs) - 1, 'output')} is a product of {name!r} and values of the batch: the "
        f"data flow does not say whether it replaces {name!r}",
        pairs,
        *([] if fed else [stay]),
        shown=pairs.values(),
        fed=pairs if fed else (),
    )


def _fed(step: StepSkeleton, name: str) -> bool:
    """Return whether a value is an input without a stored value."""
    return name in step.index.graph.inputs and name not in step.index.graph.initializers


def _vanishing(index: GraphIndex, gradients: AbstractSet[str]) -> set[str]:
    """Return the gradients and all values that are zero wherever the gradients are. One sweep in order."""
    vanishing = set(gradients)
    for node in index.graph.nodes:
        if vanishing.isdisjoint(node.inputs) or node.captures or len(node.outputs) != 1:
            continue
        if _vanishes(index, node, vanishing):
            vanishing.add(node.outputs[0])
    return vanishing


def _vanishes(index: GraphIndex, node: Node, vanishing: AbstractSet[str]) -> bool:
    if not elementwise(node) and not node.is_in(LAYOUT):
        return False
    if node.is_in(_TERMS):
        terms = chosen_by(node) or node.inputs
        return all(name in vanishing or index.constants.zero(name) for name in terms)
    record = record_of(node)
    linear = any(name in vanishing and record.slope(slot) is Slope.LINEAR for slot, name in enumerate(node.inputs))
    return linear or (record.zero and node.inputs[0] in vanishing)


def _masks(step: StepSkeleton, output: str, state: str) -> bool:
    """Return whether values of the batch are scaled or chosen by the state, or by a value made of the state alone."""
    index = step.index

    def following(name: str) -> Iterable[str]:
        operands = index.operands(name, elementwise) if name == output or name in step.tainted else ()
        return (value for value in operands if value not in step.tainted or index.graph.type_of(value).dtype in FLOATS)

    apart = (name for name in walk([output], following) if name != output and name not in step.tainted)
    return any(_made_of(step, name, state) for name in apart)


def _made_of(step: StepSkeleton, value: str, state: str) -> bool:
    """Return whether a batch-independent value is made of a state element by element."""
    return state in walk([value], lambda name: step.index.operands(name, elementwise))


def _never_added(step: StepSkeleton, output: str, state: str) -> bool:
    """Return whether the old value is in the new value as a factor alone."""
    return reachable_states(step.index, output, {state}, step.tainted).get(state, 0) >= FACTOR_COST

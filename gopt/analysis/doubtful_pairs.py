"""Pairs of an optimizer state that another reading of the step would contradict, once gradients and batch are known.

A state that keeps a gradient is made anew in each step. Where weight decay or a fed anchor enters that gradient, the
walk reaches the parameter and the anchor, and pairs the output with one of them. Pairing knows no batch yet, and no
gradient: what depends on the batch is told here from what is fed, as a mask is.
"""

from __future__ import annotations

from collections.abc import Iterator

from gopt.analysis.operators import elementwise
from gopt.analysis.state_matching import JOIN_COST, walk_to_states
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.types import FLOATS, TensorType


def refuse_doubtful(step: StepSkeleton, training: TrainingGraph) -> None:
    """Raise UnsupportedError for a state, not named by the user, that may be no state, or that of another output."""
    left = _left(step)
    shown = _shown(step, training)
    for state in training.states:
        name, type = state.tensor, step.index.graph.types[state.tensor]
        if name in step.roles.states or step.index.one_element(name) or type.dtype not in FLOATS:
            continue
        if name not in training.gradients:
            _refuse_nearer(step, state, left.get(type))
            _refuse_fed(step, state, training)
        if state.updated not in step.tainted or (name not in training.gradients and _only_shown(step, state)):
            _refuse_shown(step, state, shown.get(type, []))


def _left(step: StepSkeleton) -> dict[TensorType, str]:
    """An input of each type that is neither a state nor part of the batch."""
    taken = {*step.updated, *step.batch, *step.roles.batch}
    return {type: name for name, type in step.index.graph.inputs.items() if name not in taken}


def _shown(step: StepSkeleton, training: TrainingGraph) -> dict[TensorType, list[str]]:
    """Metrics of each type that depend on the batch."""
    found: dict[TensorType, list[str]] = {}
    for output in training.metrics:
        if output in step.tainted and not step.index.one_element(output):
            found.setdefault(step.index.graph.types[output], []).append(output)
    return found


def _refuse_nearer(step: StepSkeleton, state: State, left: str | None) -> None:
    """Refuse a state whose new value is nearer to another state, or as near where an input could be the state."""
    read = {name: depth // JOIN_COST for name, depth in _reads(step, state.updated)}
    own = read.pop(state.tensor, None)
    if own is None:
        return
    for name, joins in read.items():
        if joins < own or (joins == own and left is not None and left not in read):
            others = [name] if left is None else [left, name]
            raise _open(state, state.tensor, *others)


def _reads(step: StepSkeleton, output: str) -> Iterator[tuple[str, int]]:
    return walk_to_states(step.index, output, set(step.updated), step.tainted)


def _refuse_shown(step: StepSkeleton, state: State, shown: list[str]) -> None:
    """Refuse a state that nothing reads anew where a metric of its type follows the batch, and may be its new value."""
    for output in shown if state.kind is not StateKind.STATISTIC else ():
        raise UnsupportedError(
            f"outputs {state.updated!r} and {output!r} may each be the new value of {state.tensor!r}: "
            "the data flow does not say which",
            f"name the pair: --states {state.tensor}={state.updated}, or leave the other output out of the step",
        )


def _refuse_fed(step: StepSkeleton, state: State, training: TrainingGraph) -> None:
    """Refuse a constant, or an input without a stored value, that other states have, where the output may show it."""
    graph, name = step.index.graph, state.tensor
    if state.kind not in (StateKind.OPTIMIZER_STATE, StateKind.ACCUMULATOR):
        return
    others = [each for each in training.states if each is not state and not step.index.one_element(each.tensor)]
    if name not in graph.inputs:
        if any(each.tensor in graph.inputs for each in others) and _only_shown(step, state):
            raise _no_state(state, "is a constant", f"make {name} the output of a Constant node if it stays as it is")
    elif name not in graph.initializers:
        held = [each for each in others if each.tensor in graph.initializers]
        moments = any(each.kind is StateKind.OPTIMIZER_STATE for each in held)
        if moments or (held and (state.updated not in step.tainted or _only_shown(step, state))):
            raise _no_state(
                state, "has no stored value, as other states have", f"leave {state.updated} out of the step"
            )


def _only_shown(step: StepSkeleton, state: State) -> bool:
    """Return whether nothing reads the new value, and other values than it are made of the old one."""
    index = step.index
    if index.users.get(state.updated):
        return False
    nodes: dict[int, Node] = {}
    stack = [state.updated]
    while stack:
        node = index.producers.get(stack.pop())
        if node is not None and id(node) not in nodes and elementwise(node):
            nodes[id(node)] = node
            stack.extend(node.inputs)
    stack, seen = [state.tensor], set()
    while stack:
        value = stack.pop()
        for user in index.users.get(value, ()):
            if id(user) not in nodes:
                return True
            if id(user) not in seen:
                seen.add(id(user))
                stack.extend(user.outputs)
    return False


def _no_state(state: State, why: str, hint: str) -> UnsupportedError:
    name, output = state.tensor, state.updated
    return UnsupportedError(
        f"{name!r} {why}, and output {output!r} has the type of its new value: the data flow does not say whether it "
        "is a state",
        f"{hint}, or say --states {name}={output}",
    )


def _open(state: State, *names: str) -> UnsupportedError:
    shown = ", ".join(map(repr, names))
    return UnsupportedError(
        f"output {state.updated!r} may replace any of {shown}: the data flow does not say which",
        f"name the pair: --states {names[0]}={state.updated}",
    )

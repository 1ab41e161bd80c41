"""Pairs of an optimizer state that another reading of the step would contradict, once gradients and batch are known.

A state that keeps a gradient is made anew in each step. Where weight decay or a fed anchor enters that gradient, the
walk reaches the parameter and the anchor, and pairs the output with either. Pairing knows neither batch nor gradient
yet; this module tells batch-dependent values from fed values such as a mask."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.name_hints import one_of_two
from gopt.analysis.open_pairs import OpenPairsError
from gopt.analysis.state_matching import JOIN_COST, reachable_states, refuse_open
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.graph_index import copied_from, walk
from gopt.ir.node_kinds import elementwise, record_of
from gopt.ir.types import FLOATS, TensorType


def refuse_doubtful(step: StepSkeleton, training: TrainingGraph) -> None:
    """Raise UnsupportedError for a state, not named by the user, that may be no state, or another output's state."""
    free_inputs, states = _left(step), set(step.updated)
    shown, stored = _shown(step, training), _held(step, training)
    paired_alike = not step.roles.states and states <= step.index.graph.inputs.keys()
    for state in training.states:
        name, type = state.tensor, step.index.graph.types[state.tensor]
        if name in step.roles.states or step.index.one_element(name) or type.dtype not in FLOATS:
            continue
        if name not in training.gradients:
            if not (
                paired_alike and type.elements and step.reach.get(state.updated, {}).keys() == {name}
            ):  # pairing has seen no other state
                _refuse_nearer(step, state, states, free_inputs.get(type))
            _refuse_fed(step, state, stored)
        if state.updated not in step.tainted or (name not in training.gradients and _only_shown(step, state)):
            _refuse_shown(step, state, shown.get(type, []))


@dataclass(frozen=True, slots=True)
class _StoredValues:
    """Whether tensors among the states are inputs, and whether any input or optimizer state has a stored value."""

    inputs: bool
    any: bool
    moments: bool


def _held(step: StepSkeleton, training: TrainingGraph) -> _StoredValues:
    graph = step.index.graph
    inputs = [
        state for state in training.states if state.tensor in graph.inputs and not step.index.one_element(state.tensor)
    ]
    stored = [state for state in inputs if state.tensor in graph.initializers]
    return _StoredValues(bool(inputs), bool(stored), any(state.kind is StateKind.OPTIMIZER_STATE for state in stored))


def _left(step: StepSkeleton) -> dict[TensorType, str]:
    """An input of each type that is neither a state nor part of the batch."""
    paired = {*step.updated, *step.batch, *step.roles.batch}
    return {type: name for name, type in step.index.graph.inputs.items() if name not in paired}


def _shown(step: StepSkeleton, training: TrainingGraph) -> dict[TensorType, list[str]]:
    """Metrics of each type that depend on the batch."""
    shown: dict[TensorType, list[str]] = {}
    for output in training.metrics:
        if output in step.tainted and not step.index.one_element(output):
            shown.setdefault(step.index.graph.types[output], []).append(output)
    return shown


def _refuse_nearer(step: StepSkeleton, state: State, states: set[str], free_input: str | None) -> None:
    """Refuse a state whose new value is nearer to another state, or as near where an input could be the state."""
    depths = reachable_states(step.index, state.updated, states, step.tainted)
    read = {name: depth // JOIN_COST for name, depth in depths.items()}
    joins_own = read.pop(state.tensor, None)
    if joins_own is None:
        return
    for name, joins in read.items():
        if joins < joins_own or (joins == joins_own and free_input is not None and free_input not in read):
            rivals = [name] if free_input is None else [free_input, name]
            refuse_open(step.index, {state.updated: [state.tensor, *rivals]})


def _refuse_shown(step: StepSkeleton, state: State, shown: list[str]) -> None:
    """Refuse a state, other than a statistic, where a metric of the same type follows the batch, and may be the new
    value."""
    for output in shown if state.kind is not StateKind.STATISTIC else ():
        raise one_of_two(step.index.graph, {state.tensor: (state.updated, output)})


def _refuse_fed(step: StepSkeleton, state: State, stored: _StoredValues) -> None:
    """Refuse constants, fed inputs beside stored states, and batch-independent masks: the output may show the input."""
    graph, name, updated = step.index.graph, state.tensor, state.updated
    if state.kind not in (StateKind.OPTIMIZER_STATE, StateKind.ACCUMULATOR):
        return
    if name not in graph.inputs:
        if stored.inputs:
            stays = f"if it stays as it is, make {name} the output of a Constant node"
            raise _no_state(state, "is a constant", stays)
    elif name not in graph.initializers:
        doubted = stored.moments or (stored.any and (updated not in step.tainted or _only_shown(step, state)))
        if doubted and (state.of is None or state.of in graph.initializers):  # a table without values has none for both
            raise _no_state(state, "has no stored value, as other states have")
    elif updated not in step.tainted and copied_from(step.index, updated) != name and _only_shown(step, state):
        raise _no_state(state, "follows no batch")


def _only_shown(step: StepSkeleton, state: State) -> bool:
    """Return whether no node reads the new value, and values other than the new value are made of the old value."""
    index = step.index
    if index.users.get(state.updated) or _averages(step, state):
        return False
    behind = set(walk([state.updated], lambda name: index.operands(name, elementwise)))
    return any(
        behind.isdisjoint(user.outputs) or not elementwise(user) or _others_shown(step, state, user)
        for value in walk([state.tensor], index.results) for user in index.users.get(value, ())
    )  # fmt: skip


def _averages(step: StepSkeleton, state: State) -> bool:
    """Return whether the new value adds a term to the scaled old value, as a moment of Lion does."""
    producers = step.index.producers
    node = producers.get(state.updated)
    for name in node.inputs if node is not None and record_of(node).adds else ():
        factor = producers.get(name)
        if factor is not None and record_of(factor).multiplies and state.tensor in factor.inputs:
            return any(step.index.one_element(name) for name in factor.inputs)
    return False


def _others_shown(step: StepSkeleton, state: State, node: Node) -> bool:
    return any(name in step.index.graph.outputs and name != state.updated for name in node.outputs)


def _no_state(state: State, why: str, *hints: str) -> OpenPairsError:
    name, output = state.tensor, state.updated
    return OpenPairsError(
        f"{name!r} {why}, and output {output!r} has the type of its new value: the data flow does not say whether it "
        "is a state",
        {name: output},
        *hints,
        shown=[] if hints else [output],
    )

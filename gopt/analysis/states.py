"""Assigns kind and owner to each state once the gradients are known, and refuses states that would pass for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from gopt.analysis.chosen_statistics import branch_of
from gopt.analysis.counters import added_constant
from gopt.analysis.dropped_states import refuse_dropped
from gopt.analysis.epsilon import unguarded_roots
from gopt.analysis.gradient_fixpoint import GradientMap, reads_new_statistic
from gopt.analysis.local_taint import LocalTaint
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, descendants, walk
from gopt.ir.node_kinds import chosen_by, record_of
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS, COPIES, LAYOUT, SCALES
from gopt.text.sanitize import listed


def assemble(step: StepSkeleton, mapping: GradientMap, losses: tuple[str, ...]) -> TrainingGraph:
    """The training step; raises InputError without a parameter, UnsupportedError for a state of no kind we know."""
    graph = step.index.graph
    gradients = frozenset(mapping.gradients.values())
    states = [_state(step, name, mapping, gradients, mapping.check) for name in step.updated]
    _refuse_loose(step, states, mapping)
    _own(step, states, mapping)
    hyper = [name for name in graph.inputs if name not in step.updated and name not in step.batch]
    hyper = [name for name in hyper if name not in graph.initializers]
    for node in graph.nodes:
        backward = Phase.BACKWARD if id(node) in mapping.backward else Phase.UPDATE
        node.phase = Phase.FORWARD if id(node) in step.forward else backward
    paired = set(step.updated.values())
    metrics = [name for name in graph.outputs if name not in paired and name not in losses]
    training = TrainingGraph(graph, losses, states, mapping.gradients, step.batch, hyper, metrics, step.random)
    for state in states:
        if state.kind is StateKind.STATISTIC and (
            branch := branch_of(step.index, state.tensor, state.updated, mapping.check)
        ):
            training.chosen[state.tensor] = branch
    training.reductions = {name: rule for name, rule in step.roles.statistics.items() if rule}
    refuse_dropped(step, training, mapping)
    _refuse_no_state(step, training)
    training.notes = _notes(step, training) + unguarded_roots(training, step.index)
    if not mapping.gradients:
        raise InputError(
            "no parameter found: no state that the loss depends on is updated through a gradient",
            "name parameters with --params INPUT",
        )
    return training


def _refuse_no_state(step: StepSkeleton, training: TrainingGraph) -> None:
    """Raise OptionError where the user gives a combination rule for a value that no output replaces."""
    for name, rule in training.reductions.items():
        if name not in step.updated:
            raise OptionError(
                f"--statistics {name}={rule}: {name!r} is no state, no output is its new value",
                f"leave it out, or name its new value: --states {name}=OUTPUT",
            )


def _state(step: StepSkeleton, name: str, mapping: GradientMap, gradients: frozenset[str], check: LocalTaint) -> State:
    graph = step.index.graph
    output = step.updated[name]
    producers = step.index.producers.get(output)
    is_rank_local = output in check.rank_local or (
        output in step.tainted
        and output not in check.reduced
        and (producers is None or id(producers) in step.forward or id(producers) in mapping.backward)
    )
    type = graph.types[name]
    if name in mapping.gradients:
        kind = StateKind.PARAMETER
    elif output in gradients:
        kind = StateKind.OPTIMIZER_STATE  # it keeps the gradient, as every other reader behind the backward sees it
    elif is_rank_local or (name in step.roles.statistics and not _is_counter(step, name, output)):
        kind = StateKind.STATISTIC
        _check_statistic(step, name)
    elif name in step.forward_values and type.shape != ():
        kind = StateKind.PARAMETER
    else:
        kind = StateKind.OPTIMIZER_STATE
    return State(name, output, kind)


def _is_counter(step: StepSkeleton, name: str, output: str) -> bool:
    """Return whether a state follows no batch, and may count samples: the user's rule decides."""
    if output in step.tainted:
        return False
    return step.roles.statistics[name] == "mean" or bool(added_constant(step.index, name, output))


def _check_statistic(step: StepSkeleton, name: str) -> None:
    """Raise for a state of unknown kind: dependent on the batch without a gradient, and upstream of the loss."""
    type = step.index.graph.types[name]
    if step.updated[name] not in step.tainted:
        raise UnsupportedError(
            f"statistic {name!r} does not follow the batch: its new value depends on none of "
            f"{', '.join(map(repr, step.batch[:8]))}",
            f"leave {name!r} out of the statistics, or say which inputs are the batch: --batch INPUT",
        )
    if name in step.forward_values and type.dtype in FLOATS and not step.is_statistic(name):
        raise reads_new_statistic(step, name) or UnsupportedError(
            f"state {name!r} follows the batch without a gradient that could be found, and the loss depends on it",
            f"if it is a parameter, name its gradient: --params {name}=VALUE; if it is a statistic, say how the ranks' "
            f"values are combined: --statistics {name}=mean, sum, max or min, or gather where it keeps rows of samples",
        )


def _refuse_loose(step: StepSkeleton, states: list[State], mapping: GradientMap) -> None:
    """Raise for a running statistic that depends on the backward; statistics must belong to the forward.

    Such a value is usually a moment of a parameter whose new value is no output: the mean over ranks would differ from
    the moment of the large batch."""
    statistics = [state for state in states if state.kind is StateKind.STATISTIC]
    if not statistics:
        return
    behind = descendants(step.index, _made_by_backward(step, mapping))
    for state in statistics:
        branch = branch_of(step.index, state.tensor, state.updated, mapping.check) or state.updated
        if branch in behind and state.tensor not in step.roles.statistics:
            raise UnsupportedError(
                f"state {state.tensor!r} follows the backward, but belongs to no parameter that is updated",
                "make the new value of its parameter an output, or take the state out of the step",
                f"or let all ranks take the first rank's: --statistics {state.tensor}=root",
            )


def _made_by_backward(step: StepSkeleton, mapping: GradientMap) -> list[str]:
    """Values of the batch computed by the backward; a copy of a value of the forward, in another type or layout, is
    left out: a normalisation's backward reads copies of the means read by the running statistics. So are sizes of the
    batch and what is made of sizes alone: a number of samples may divide a gradient and a statistic."""
    outputs: list[str] = []
    copies: set[str] = set()
    moving = step.tainted - step.sizes
    for node in step.index.graph.nodes:
        tainted = [name for name in node.outputs if name in moving] if id(node) in mapping.backward else ()
        if not tainted:
            continue
        source = node.inputs[0] if node.is_in(LAYOUT) or node.is_in(CASTS) else ""
        producer = step.index.producers.get(source)
        if source in copies or (source in step.tainted and (producer is None or id(producer) in step.forward)):
            copies.update(tainted)
        else:
            outputs += tainted
    return outputs


def _own(step: StepSkeleton, states: list[State], mapping: GradientMap) -> None:
    """Give each optimizer state a parameter: the parameter whose gradient the new value holds element by element."""
    owner: dict[str, str] = {}
    shared = {gradient for gradient, count in Counter(mapping.gradients.values()).items() if count > 1}
    for parameter, gradient in mapping.gradients.items():
        if gradient not in shared:
            owner.setdefault(gradient, parameter)
        owner.setdefault(parameter, parameter)
    skip = step.forward | mapping.backward
    nodes = [node for node in step.index.graph.nodes if id(node) not in skip]
    open_ = [state for state in states if state.kind is StateKind.OPTIMIZER_STATE]
    state_of = {state.updated: state.tensor for state in open_}
    for parameter, gradient in mapping.gradients.items():
        if gradient in shared:
            _claim(step, parameter, gradient, state_of, owner)
    for parameter, gradient in mapping.gradients.items():
        owner.setdefault(gradient, parameter)
    while open_:
        _spread(step, nodes, owner)
        settled = [state for state in open_ if state.updated in owner]
        for state in settled:
            state.of = owner[state.updated]
            # A state that reads another state's old value has the same owner.
            owner.setdefault(state.tensor, state.of)
        tensors = [state for state in open_ if state.of is None and not step.index.one_element(state.tensor)]
        open_ = tensors if settled else []
    for state in states:
        if state.kind is not StateKind.OPTIMIZER_STATE:
            continue
        if state.of is not None and _accumulates(step.index, state, mapping.gradients[state.of]):
            state.kind = StateKind.ACCUMULATOR
        elif state.of is None and step.index.one_element(state.tensor):
            state.kind = StateKind.SCALAR


def _claim(step: StepSkeleton, parameter: str, gradient: str, olds: Mapping[str, str], owner: dict[str, str]) -> None:
    """Give a parameter with a shared gradient the states read by the parameter's own update, old or new; ``olds``: new
    value -> state."""
    index, types = step.index, step.index.graph.types
    shape = types[parameter].shape

    def following(name: str) -> Iterable[str]:
        operands = index.operands(name)
        return (value for value in operands if value != gradient and value in types and types[value].shape == shape)

    for name in walk([step.updated[parameter]], following):
        if name in olds and name not in owner:
            owner[name] = owner[olds[name]] = parameter


def _spread(step: StepSkeleton, nodes: list[Node], owner: dict[str, str]) -> None:
    """Let the results of update nodes have the owner of the operands; one sweep in order."""
    types, scalars = step.index.graph.types, step.index.scalars
    for node in nodes:
        of = None
        for name in node.inputs:
            if name in owner:
                if name not in scalars:  # a tensor counts before a scalar
                    of = owner[name]
                    break
                of = of or owner[name]
        if of is None:
            continue
        for name in node.outputs:
            if name not in scalars or types[of].elements == 1:
                owner.setdefault(name, of)


def _notes(step: StepSkeleton, training: TrainingGraph) -> list[str]:
    graph, notes = step.index.graph, []
    for node in training.random:
        notes.append(f"{node.label} ({node.op_type}) draws random numbers: each rank draws its own")
    for name in graph.inputs:
        if name not in step.index.users and name not in graph.outputs:
            notes.append(f"input {name} is read by nothing")
    for name in training.hyper:
        if not step.index.one_element(name) and name not in step.forward_values and name in step.index.users:
            notes.append(
                f"input {name} is read by the update alone, and replaced by no output: all ranks are fed the same"
            )
    tensors = [name for name in training.metrics if not step.index.one_element(name)]
    if tensors:
        verbs = "replace no input and are taken as metrics" if len(tensors) > 1 else (
            "replaces no input and is taken as a metric"
        )  # fmt: skip
        notes.append(f"output{'s' * (len(tensors) > 1)} {listed(tensors)} {verbs}")
    for name in training.metrics:
        if name not in tensors and name not in step.tainted:
            notes.append(f"output {name} follows no batch, replaces no input, and is taken as a metric")
    return notes


def _accumulates(index: GraphIndex, state: State, gradient: str) -> bool:
    """Return whether the state's new value is old + gradient, up to a gate (``Where``), casts and factors of one."""
    stack, visited = [(state.updated, 1.0)], set()
    while stack:
        name, factor = stack.pop()
        node = index.producers.get(name)
        if node is None or (name, factor) in visited:
            continue
        visited.add((name, factor))
        if branches := chosen_by(node):
            stack += [(branch, factor) for branch in branches]
        elif record_of(node).adds and len(node.inputs) == 2 and state.tensor in node.inputs and factor == 1:
            return _scaled(index, next((name for name in node.inputs if name != state.tensor), ""), gradient)
        elif (multiple := index.constants.multiple(node)) is not None:
            stack.append((multiple[0], factor * multiple[1]))
    return False


def _scaled(index: GraphIndex, name: str, gradient: str) -> bool:
    """Return whether a value is the gradient times a scalar, behind at most casts."""
    while name != gradient:
        producer = index.producers.get(name)
        if producer is None:
            return False
        scaled = producer.is_in(SCALES) and any(map(index.one_element, producer.inputs))
        if not scaled and not producer.is_in(COPIES | {"Neg"}):
            return False
        rest = [operand for operand in producer.inputs if not scaled or not index.one_element(operand)]
        if len(rest) != 1:
            return False
        name = rest[0]
    return True

"""Recover the roles of a functional step from its data flow: loss, states, gradients, phases (contract section 2).

Names decide nothing here, and may only raise a doubt; a user's own map goes first and settles what is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gopt.analysis.aliases import without_aliases
from gopt.analysis.batch_checks import refuse_state_batches
from gopt.analysis.doubtful_pairs import refuse_doubtful
from gopt.analysis.fed_inputs import without_fed
from gopt.analysis.gradient_fixpoint import GradientMap, find_gradients
from gopt.analysis.graph_walks import GraphIndex, ancestors, depth, descendants
from gopt.analysis.hidden_draws import refuse_hidden_draws
from gopt.analysis.look_through import look_through
from gopt.analysis.name_hints import refuse_contradicted
from gopt.analysis.open_pairs import settle_pairs
from gopt.analysis.open_shapes import refuse_dynamic, refuse_open_shapes
from gopt.analysis.paired_past_gradients import paired_anew
from gopt.analysis.reshapes import in_parameter_shape
from gopt.analysis.rival_outputs import refuse_rivals
from gopt.analysis.role_hints import MOST, others
from gopt.analysis.role_map import RoleMap
from gopt.analysis.scaled_gradients import refuse_scaled
from gopt.analysis.shared_values import recover_shared
from gopt.analysis.state_matching import (
    match_copies,
    match_states,
    reachable_states,
    reaches,
    refuse_contested,
    refuse_crossed,
    refuse_open,
)
from gopt.analysis.states import assemble
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.analysis.training import TrainingGraph
from gopt.analysis.unchanged_outputs import refuse_unchanged, refuse_unvalued
from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.types import FLOATS

_STEPS = frozenset({"ArgMax", "Sign", "Round", "Floor", "Ceil"})
"""Operators of floating values through which no gradient comes."""
_SMOOTH = FLOATS | {"undefined"}


def recover(graph: Graph, roles: RoleMap = RoleMap()) -> TrainingGraph:
    """The training step in ``graph``; collectives, and layout operators that change nothing, are looked through.

    Updates in another layout than their parameter's are brought into it.

    Raises InputError when there is no loss or no state, UnsupportedError when the data flow leaves a role open.
    """
    roles.check(graph)
    if roles.shared:
        rest = replace(roles, shared=())
        return recover_shared(graph, roles.shared, lambda apart: recover(apart, rest))
    return settle_pairs(roles, lambda told: _past_aliases(graph, told))


def _past_aliases(graph: Graph, roles: RoleMap) -> TrainingGraph:
    roles.check(graph)
    graph = in_parameter_shape(graph)
    view = without_aliases(graph, [value for value in roles.params.values() if value])
    if view is None:
        return _past_calls(graph, roles)
    return view.restore(_past_calls(view.graph, view.roles(roles)))


def _past_calls(graph: Graph, roles: RoleMap) -> TrainingGraph:
    through = look_through(graph)
    return _recover(graph, roles) if through is None else through.restore(_recover(through.graph, roles), graph)


def _recover(graph: Graph, roles: RoleMap) -> TrainingGraph:
    index = GraphIndex(graph)
    moving = _surely_moving(index, roles)
    pairs, reach = _pair_tensors(index, roles, moving)
    losses = [roles.loss] if roles.loss else _loss_candidates(index, pairs)
    if not losses:
        scalars, _ = match_states(_scalar_reach(index, pairs, "", roles, moving))
        losses = _loss_candidates(index, pairs | scalars)
    if not losses:
        _refuse_unpaired(index, pairs)
        if not pairs and graph.header.functions:
            name = graph.header.functions[0].name
            raise UnsupportedError(
                f"no state found, and the step calls functions of its own ({name!r}): gopt does not look inside them",
                "inline them first: onnx.inliner.inline_local_functions(model)",
            )
        if not pairs:
            raise InputError(
                "this is not a training step: no output replaces an input, and no output is a loss",
                "gopt reads one step as a graph: forward, backward and update with states as inputs and outputs",
                "gopt derive makes one from a forward model, gopt export from PyTorch",
            )
        raise InputError(
            "no loss found: no output of one floating element depends on the batch and the parameters",
            "name it with --loss OUTPUT",
        )
    loss = losses[0]
    pairs |= _pair_scalars(index, pairs, loss, roles, moving)
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    pairs |= match_copies(index, {output: name for output, name in pairs.items() if output != loss}, free)
    if not pairs:
        raise InputError(
            "no state found: no output is the new value of an input", "name the pairs with --states INPUT=OUTPUT"
        )
    refuse_unchanged(index, pairs, roles)
    _refuse_texts(graph)
    refuse_hidden_draws(graph)
    step = StepSkeleton(index, pairs, loss, roles, reach)
    refuse_state_batches(step)
    refuse_open_shapes(step)
    _refuse_through_forward(step, roles)
    try:
        found = find_gradients(step)
    except UnsupportedError as error:
        raise _of_another_loss(error, losses, pairs) from error
    anew = paired_anew(step, found.gradients.values())
    if anew:
        return _recover(graph, replace(roles, states={**roles.states, **anew}))
    _settle_losses(index, losses, found, pairs, roles)
    try:
        training = assemble(step, found)
    except (InputError, UnsupportedError):
        refuse_contradicted(index, pairs, roles)  # it may be the reason: of two outputs each has the other's state
        raise
    refuse_unvalued(training, roles)
    refuse_scaled(step, training)
    refuse_doubtful(step, training)
    refuse_contradicted(index, pairs, roles)
    return training


def _of_another_loss(error: UnsupportedError, losses: list[str], pairs: Mapping[str, str]) -> UnsupportedError:
    """The refusal of a step whose gradients were not found, which may be those of another output."""
    others = [name for name in losses[1:] if name not in pairs]
    hints = (
        [f"gopt took {losses[0]} for the loss: if it is another output, name it: --loss {others[-1]}"] if others else []
    )
    return UnsupportedError(error.message, *error.hints, *hints)


def _refuse_texts(graph: Graph) -> None:
    """Raise UnsupportedError where a step takes or gives strings: a launcher has no numbers to feed or to reduce."""
    for what, table in (("input", graph.inputs), ("output", graph.outputs)):
        for name, type in table.items():
            if type.dtype == "string":
                raise UnsupportedError(
                    f"{what} {name!r} holds strings, and steps take and give numbers",
                    "leave it out of the step, or turn it into numbers before"
                    if what == "input"
                    else "leave it out of the step",
                )


def shows_states(graph: Graph, roles: RoleMap) -> bool:
    """Return whether some output replaces an input or an initializer, by data flow.

    Raises UnsupportedError if several pairings are possible.
    """
    index = GraphIndex(graph)
    return bool(_pair_tensors(index, roles, _surely_moving(index, roles))[0])


def _pair_tensors(
    index: GraphIndex, roles: RoleMap, moving: set[str]
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Update pairs of more than rank 0, output -> input, the user's first; and the inputs that each other output reads
    element by element, with their distances."""
    graph = index.graph
    pairs = {output: name for name, output in roles.states.items()}
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    reach = {
        output: reachable_states(index, output, free, moving)
        for output, type in graph.outputs.items()
        if output not in pairs and type.shape != ()
    }
    reach = without_fed(graph, reach)
    found, unsettled = match_states(reach)
    refuse_open(index, unsettled)
    refuse_crossed(index, reach, found)
    refuse_rivals(index, reach, found)
    pairs |= found
    pairs |= match_copies(index, pairs, free - set(pairs.values()))
    # States held as initializers only, with a matching updated output, count too.
    constants = {name for name, tensor in graph.initializers.items() if name not in graph.inputs and tensor.type.shape}
    rest = {
        output: reachable_states(index, output, constants, moving)
        for output, type in graph.outputs.items()
        if output not in pairs and type.shape != () and type.dtype in FLOATS
    }
    found, unsettled = match_states(rest)
    refuse_open(index, unsettled)
    pairs |= found
    refuse_dynamic(index, pairs)
    return pairs, reach


def _refuse_through_forward(step: StepSkeleton, roles: RoleMap) -> None:
    """Raise when an output reaches the input that it was paired with through batch-dependent values of the forward.

    A state that keeps the gradient of an elementwise step is made of the batch element by element: the batch is not
    its old value.
    """
    index = step.index
    local = {
        name for node in index.graph.nodes if id(node) in step.forward for name in node.outputs if name in step.tainted
    }
    for name, output in step.updated.items():
        if name in roles.states or name not in step.forward_values or output not in step.tainted:
            continue
        if name not in index.graph.inputs:
            continue
        local.add(name)  # one set for all: it has the size of the forward
        beside = reaches(index, output, name, local)
        local.remove(name)
        if not beside and reaches(index, output, name, {name}):
            refuse_open(index, {output: [name]})


def _refuse_unpaired(index: GraphIndex, pairs: Mapping[str, str]) -> None:
    """Raise when outputs look like new states and replace no input: without states no output looks like a loss."""
    graph = index.graph
    free = {type for name, type in graph.inputs.items() if name not in pairs.values() and type.elements > 1}
    lost = [name for name, type in graph.outputs.items() if name not in pairs and type in free and type.dtype in FLOATS]
    if lost:
        producer = index.producers.get(lost[0])
        raise UnsupportedError(
            f"{len(lost)} {'output replaces' if len(lost) == 1 else 'outputs replace'} no input by what the data flow "
            f"shows, though inputs of that type are there: {lost[0]!r}"
            + (f" is made by {producer.op_type} {producer.label!r}" if producer is not None else ""),
            f"name the pairs: --states INPUT={lost[0]}",
        )


def _surely_moving(index: GraphIndex, roles: RoleMap) -> set[str]:
    """Return the values that depend on inputs that no output can replace, because no output has their type.

    Such inputs belong to the batch.
    """
    graph = index.graph
    kept = set(graph.outputs.values())
    batch = [name for name, type in graph.inputs.items() if type not in kept and type.shape != ()]
    return descendants(index, [name for name in (*batch, *roles.batch) if name not in graph.initializers])


def _loss_candidates(index: GraphIndex, pairs: Mapping[str, str]) -> list[str]:
    """One-element floating outputs with a differentiable path from a state; the shallowest first."""
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
        steps = depth(index)
        outputs.sort(key=lambda name: steps.get(name, 0))
    return outputs


def _pair_scalars(
    index: GraphIndex, pairs: Mapping[str, str], loss: str, roles: RoleMap, moving: set[str]
) -> dict[str, str]:
    """Update pairs of rank 0, output -> input; the loss takes no part."""
    reach = _scalar_reach(index, pairs, loss, roles, moving)
    found, unsettled = match_states(reach)
    refuse_open(index, unsettled)
    refuse_contested(index, reach, found)
    refuse_crossed(index, reach, found)
    refuse_rivals(index, reach, found)
    return found


def _scalar_reach(
    index: GraphIndex, pairs: Mapping[str, str], loss: str, roles: RoleMap, moving: set[str]
) -> dict[str, dict[str, int]]:
    graph = index.graph
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    return {
        output: reachable_states(index, output, free, moving)
        for output, type in graph.outputs.items()
        if output not in pairs and output != loss and type.shape == ()
    }


def _settle_losses(
    index: GraphIndex, losses: list[str], found: GradientMap, pairs: Mapping[str, str], roles: RoleMap
) -> None:
    """Refuse when another output could be the loss as well: neither paired nor computed from gradients."""
    if roles.loss or len(losses) == 1:
        return
    behind = descendants(index, found.gradients.values())
    rivals = [name for name in losses[1:] if name not in pairs and name not in behind]
    if rivals:
        if len(rivals) == 1:
            raise UnsupportedError(
                f"two outputs could be the loss: {losses[0]!r} and {rivals[0]!r}",
                f"name the one that the gradients belong to: --loss {losses[0]}",
            )
        names = ", ".join(map(repr, [losses[0], *rivals[: MOST - 1]]))
        raise UnsupportedError(
            f"several outputs could be the loss: {names}{others(max(0, len(rivals) - MOST + 1), 'output')}",
            f"name the one that the gradients belong to: --loss {rivals[-1]}",
        )

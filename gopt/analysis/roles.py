"""Recover the roles of a functional step from its data flow: loss, states, gradients, phases (contract section 2).

Names decide nothing here, and may only raise a doubt; a user's own map goes first and settles open roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gopt.analysis.aliases import mark_rewritten, without_aliases
from gopt.analysis.batch_checks import refuse_state_batches
from gopt.analysis.coupling.ring_places import settle_rings
from gopt.analysis.doubtful_pairs import refuse_doubtful
from gopt.analysis.dropped_states import refuse_states_for_losses
from gopt.analysis.fed_inputs import without_fed
from gopt.analysis.gradient_fixpoint import GradientMap, find_gradients
from gopt.analysis.gradients import LayoutError
from gopt.analysis.hidden_draws import refuse_hidden_draws
from gopt.analysis.look_through import look_through
from gopt.analysis.losses import (
    Losses,
    apart_from_updates,
    before_updates,
    further_roots,
    loss_candidates,
    settle_losses,
)
from gopt.analysis.name_hints import names_first, pairs_by_name, propose, refuse_contradicted
from gopt.analysis.open_pairs import OpenPairsError, settle_pairs
from gopt.analysis.open_shapes import refuse_dynamic, refuse_open_shapes
from gopt.analysis.other_forwards import refuse_hidden_forward, refuse_second_forward
from gopt.analysis.paired_past_gradients import paired_anew
from gopt.analysis.reshapes import in_parameter_shape
from gopt.analysis.rival_outputs import refuse_rivals
from gopt.analysis.role_hints import states_option
from gopt.analysis.role_map import RoleMap
from gopt.analysis.sample_counters import settle_counters
from gopt.analysis.scalar_pairs import may_be_carried, pair_scalars, pair_shown, scalar_reach
from gopt.analysis.scaled_gradients import refuse_scaled
from gopt.analysis.shared_values import recover_shared
from gopt.analysis.state_matching import (
    match_copies,
    match_states,
    only_by_way_of,
    reachable_states,
    refuse_crossed,
    refuse_displaced,
    refuse_open,
)
from gopt.analysis.states import assemble
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.analysis.training import TrainingGraph
from gopt.analysis.unchanged_outputs import refuse_unchanged, refuse_unvalued
from gopt.errors import GoptError, InputError, OptionError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.graph_index import GraphIndex, ancestors, copied_from, descendants
from gopt.ir.types import FLOATS, TensorType


def recover(graph: Graph, roles: RoleMap = RoleMap()) -> TrainingGraph:
    """The training step in ``graph``; collectives, and layout operators without effect, are looked through.

    Updates in another layout than the parameter's are brought into the parameter's layout.

    Raises InputError when there is no loss or no state, UnsupportedError when the data flow leaves a role open.
    """
    roles.check(graph)
    if roles.draws:
        roles = replace(roles, batch=tuple(dict.fromkeys([*roles.batch, *roles.draws])))
    if roles.shared:
        rest = replace(roles, shared=())
        training = recover_shared(graph, roles.shared, lambda apart: recover(apart, rest))
    else:
        training = settle_pairs(roles, lambda extended: _past_aliases(graph, extended))
    training.draws = dict(roles.draws)
    settle_counters(training, settle_rings(training))
    training.defaults = {name: value for name, value in roles.hyper.items() if name in training.hyper}
    return training


def _past_aliases(graph: Graph, roles: RoleMap) -> TrainingGraph:
    roles.check(graph)
    graph = in_parameter_shape(graph)
    gradients = [value for value in roles.params.values() if value]
    while True:
        view = without_aliases(graph, gradients)
        if view is None:
            return mark_rewritten(_past_calls(graph, roles))
        try:
            return mark_rewritten(view.restore(_past_calls(view.graph, view.roles(roles))))
        except LayoutError as error:  # an update that turns the gradient back is to read it as the parameter is
            turned = [name for name in error.turned if name not in gradients]
            if not turned:
                raise
            gradients += turned


def _past_calls(graph: Graph, roles: RoleMap) -> TrainingGraph:
    through = look_through(graph)
    return _recover(graph, roles) if through is None else through.restore(_recover(through.graph, roles), graph)


def _recover(graph: Graph, roles: RoleMap) -> TrainingGraph:
    index = GraphIndex(graph)
    moving = _surely_moving(index, roles)
    pairs, reach = _pair_tensors(index, roles, moving)
    named = roles.losses(graph)
    scalars = loss_candidates(index, pairs)
    if not scalars and not named:
        matched, _ = match_states(scalar_reach(index, pairs, (), roles, moving))
        scalars = loss_candidates(index, pairs | matched)
    candidates = before_updates(index, pairs, scalars)
    losses = [*named, *(name for name in candidates if name not in named)]
    if not losses:
        refuse_displaced(index, reach, pairs)
        _refuse_unpaired(index, pairs)
        raise _without_loss(graph, pairs, scalars)
    shown = named or (losses[0],)
    pairs |= _pair_rest(index, pairs, shown, losses, roles, moving)
    roots = _first(index, pairs, roles, candidates, shown, reach)
    try:
        step, mapping = _gradients(index, pairs, roles, losses, roots, reach)
    except (UnsupportedError, OptionError):
        rest = [name for name in losses if name not in roots]
        carried = pair_shown(index, pairs, () if named else roots, rest[:1], losses, roles, moving) if rest else {}
        if not carried:
            raise
        return _recover(graph, _with_states(roles, carried))
    anew = paired_anew(step, mapping.gradients.values())
    if anew:
        return _recover(graph, _with_states(roles, anew))
    doubtful = may_be_carried(index, pairs, step.roots, roles, moving)
    settled = settle_losses(step, mapping.gradients, mapping.backward, named, doubtful)
    carried = pair_shown(index, pairs, doubtful.difference(settled.names), settled.names, losses, roles, moving)
    if carried:
        return _recover(graph, _with_states(roles, carried))
    if not named:
        refuse_states_for_losses(step, mapping, settled.names)
    return _assembled(step, mapping, settled, pairs, roles)


def _with_states(roles: RoleMap, pairs: Mapping[str, str]) -> RoleMap:
    return replace(roles, states={**roles.states, **pairs})


def _without_loss(graph: Graph, pairs: Mapping[str, str], norms: Sequence[str]) -> GoptError:
    """The refusal of a graph in which no output may be a loss; ``norms``: scalars that depend on gradients."""
    if not pairs and graph.header.functions:
        name = graph.header.functions[0].name
        return UnsupportedError(
            f"no state found, and the step calls functions of its own ({name!r}): gopt does not look inside them",
            "inline them first: onnx.inliner.inline_local_functions(model)",
        )
    if not pairs:
        return InputError(
            "this is not a training step: no output replaces an input, and no output is a loss",
            "gopt reads one step as a graph: forward, backward and update with states as inputs and outputs",
            "gopt derive makes one from a forward model, gopt export from PyTorch",
        )
    several = next((name for name, type in graph.outputs.items() if name not in pairs and type.dtype in FLOATS), "")
    return InputError(
        f"no loss found: output {norms[0]!r} is computed from gradients" if norms
        else "no loss found: no output of one floating element depends on the batch and the parameters",
        "make the loss an output of the step, one floating number"
        + (f", such as the mean of {several!r}" if several and not norms else ""),
    )  # fmt: skip


def _pair_rest(
    index: GraphIndex, pairs: dict[str, str], shown: tuple[str, ...], losses: list[str], roles: RoleMap,
    moving: set[str],
) -> dict[str, str]:  # fmt: skip
    """The pairs of scalars and of copies beside the pairs so far; raises the refusals of steps without a state, and
    with other than numbers."""
    graph = index.graph
    pairs = pairs | pair_scalars(index, pairs, shown, losses, roles, moving)
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    pairs |= match_copies(index, {output: name for output, name in pairs.items() if output not in shown}, free)
    if not pairs:
        say = states_option(pairs_by_name(graph) or {"INPUT": "OUTPUT"})
        raise InputError("no state found: no output is the new value of an input", f"name the pairs: {say}")
    with names_first(index, pairs, roles):
        refuse_unchanged(index, pairs, roles)
    _refuse_texts(graph)
    refuse_hidden_draws(graph)
    return pairs


def _assembled(
    step: StepSkeleton, mapping: GradientMap, settled: Losses, pairs: Mapping[str, str], roles: RoleMap
) -> TrainingGraph:
    """The training step with all roles; raises the refusals of doubtful ones."""
    index = step.index
    if len(settled.names) < len(step.roots):  # what is only shown asks nothing of a gradient
        step.lacking = step.lacking_of(settled.names)
        if not step.lacking.keys().isdisjoint(mapping.gradients):
            mapping = find_gradients(step)
    if none := step.without_backward(settled.names, mapping.gradients):
        step.lacking = {**step.lacking, **none}
        mapping = find_gradients(step)
    try:
        training = assemble(step, mapping, settled.names)
    except (InputError, UnsupportedError):
        refuse_displaced(index, step.reach, pairs)
        refuse_contradicted(index, pairs, roles)  # it may be the reason: of two outputs each has the other's state
        raise
    training.sources = dict(settled.of)
    with names_first(index, pairs, roles):
        refuse_unvalued(training, roles)
        refuse_scaled(step, training)
        refuse_doubtful(step, training)
    refuse_contradicted(index, pairs, roles)
    return training


def _first(
    index: GraphIndex, pairs: Mapping[str, str], roles: RoleMap, candidates: list[str], shown: tuple[str, ...],
    reach: Mapping[str, Mapping[str, int]],
) -> tuple[str, ...]:  # fmt: skip
    """The first losses of the forward: scalars of ``shown`` without an update upstream."""
    if not candidates or shown == (candidates[0],):
        return shown
    step = StepSkeleton(index, pairs, (candidates[0],), roles, reach)
    refuse_second_forward(step, candidates)
    apart = {candidates[0], *apart_from_updates(step, shown)}
    return tuple(name for name in shown if name in apart) or shown


def _gradients(
    index: GraphIndex, pairs: Mapping[str, str], roles: RoleMap, losses: list[str], ends: tuple[str, ...],
    reach: Mapping[str, Mapping[str, int]],
) -> tuple[StepSkeleton, GradientMap]:  # fmt: skip
    """The forward of all losses, and the gradients; ``losses``: outputs that may be losses, most likely first.

    The forward grows from ``ends``: values that depend on gradients of the losses so far stay outside. Where such a
    forward explains no gradients, scalars without an update upstream are taken in."""
    roots = ends
    refusal: GoptError | None = None
    while True:
        step = StepSkeleton(index, pairs, roots, roles, reach)
        refuse_state_batches(step)
        _refuse_through_forward(step, roles)
        refuse_second_forward(step, losses)
        step.roles = _of_forward(step, roles)
        try:
            mapping = find_gradients(step)
            more = further_roots(step, mapping.gradients.values(), losses)
            if not more and step.roles is not roles:
                step.roles = roles
                mapping = find_gradients(step)
        except (UnsupportedError, OptionError) as error:  # an option may name a gradient of another loss
            refusal = refusal or (error if roles.loss else _of_another_loss(error, losses, pairs))
            more = apart_from_updates(step, losses)[:1]
            if not more:
                refuse_open_shapes(step)
                refuse_hidden_forward(step)
                if isinstance(refusal, LayoutError) and isinstance(error, LayoutError):
                    refusal.turned += error.turned
                raise refusal from error
        else:
            if not more:
                refuse_open_shapes(step)
                refuse_hidden_forward(step)
                return step, mapping
        roots += more


def _of_forward(step: StepSkeleton, roles: RoleMap) -> RoleMap:
    """The user's map without gradients of parameters that another forward may read."""
    if step.forward_values.issuperset(roles.params):
        return roles
    return replace(roles, params={name: value for name, value in roles.params.items() if name in step.forward_values})


def _of_another_loss(error: GoptError, losses: list[str], pairs: Mapping[str, str]) -> GoptError:
    """The refusal of a step without any gradient found: the loss may be another output."""
    further = [name for name in losses[1:] if name not in pairs]
    if not further or type(error) not in (UnsupportedError, LayoutError):
        return error
    choice = f"gopt took {losses[0]} for the loss: if it is another output, name it: --loss {further[-1]}"
    return LayoutError(error.message, *error.hints, choice, turned=getattr(error, "turned", ()))


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


def carried_states(graph: Graph) -> dict[str, str]:
    """Output -> replaced input or initializer, by data flow; raises UnsupportedError for an open pair."""
    index = GraphIndex(graph)
    return _pair_tensors(index, RoleMap(), _surely_moving(index, RoleMap()))[0]


def trained_outputs(graph: Graph, pairs: Mapping[str, str] | None) -> list[str]:
    """Outputs that look like the new parameters of a step: floats beside a loss that does not depend on the outputs.

    ``pairs``: output -> input, None where the data flow leaves pairs open. A copy of an input is no such output, and
    neither is a state that the loss does not read."""
    index = GraphIndex(graph)
    losses = loss_candidates(index, pairs) if pairs else []
    if not pairs:
        losses = [name for name, type in graph.outputs.items() if index.one_element(name) and type.dtype in FLOATS]
    inputs = {type for type in graph.inputs.values() if type.dtype in FLOATS}
    outputs = []
    for loss in losses:
        behind = ancestors(index, [loss])[1]
        for name, type in graph.outputs.items():
            copied = name not in index.producers or copied_from(index, name) != name
            if name in behind or type.dtype not in FLOATS or type.shape == () or copied:
                continue
            if pairs.get(name) in behind if pairs else type in inputs:
                outputs.append(name)
    return list(dict.fromkeys(outputs))


def _pair_tensors(
    index: GraphIndex, roles: RoleMap, moving: set[str]
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Update pairs of more than rank 0, output -> input, the user's first; and the inputs that each other output reads
    element by element, with distances."""
    graph = index.graph
    pairs = {output: name for name, output in roles.states.items()}
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    reach = {
        output: reachable_states(index, output, free, moving)
        for output, type in graph.outputs.items()
        if output not in pairs and type.shape != ()
    }
    reach = without_fed(graph, reach)
    matched, unsettled = match_states(reach)
    refuse_open(index, unsettled)
    refuse_crossed(index, reach, matched)
    refuse_rivals(index, reach, matched)
    pairs |= matched
    pairs |= match_copies(index, pairs, free - set(pairs.values()))
    # States held as initializers only, with a matching updated output, count too.
    constants = {name for name, tensor in graph.initializers.items() if name not in graph.inputs and tensor.type.shape}
    rest = {
        output: reachable_states(index, output, constants, moving)
        for output, type in graph.outputs.items()
        if output not in pairs and type.shape != () and type.dtype in FLOATS
    }
    matched, unsettled = match_states(rest)
    refuse_open(index, unsettled)
    pairs |= matched
    refuse_dynamic(index, pairs)
    return pairs, reach


def _refuse_through_forward(step: StepSkeleton, roles: RoleMap) -> None:
    """Raise when an output reaches the paired input through batch-dependent values of the forward.

    A state that keeps the gradient of an elementwise step is made of the batch element by element: the batch is not the
    old value."""
    index = step.index
    local = {
        name for node in index.graph.nodes if id(node) in step.forward for name in node.outputs if name in step.tainted
    }
    for name, output in step.updated.items():
        if name in roles.states or name not in step.forward_values or output not in step.tainted:
            continue
        if name not in index.graph.inputs:
            continue
        if only_by_way_of(index, output, name, local):
            refuse_open(index, {output: [name]})


def _refuse_unpaired(index: GraphIndex, pairs: Mapping[str, str]) -> None:
    """Raise when outputs look like new states and replace no input: without states no output looks like a loss."""
    graph, paired = index.graph, set(pairs.values())
    free: dict[TensorType, list[str]] = {}
    for name, type in graph.inputs.items():
        if name not in paired and type.elements > 1 and type.dtype in FLOATS:
            free.setdefault(type, []).append(name)
    lost = {name: free[type] for name, type in graph.outputs.items() if name not in pairs and type in free}
    if lost:
        output = next(iter(lost))
        producer = index.producers.get(output)
        raise OpenPairsError(
            f"{len(lost)} {'output replaces' if len(lost) == 1 else 'outputs replace'} no input by what the data flow "
            f"shows, though inputs of that type are there: {output!r}"
            + (f" is made by {producer.op_type} {producer.label!r}" if producer is not None else ""),
            propose(graph, lost),
            shown=lost,
        )


def _surely_moving(index: GraphIndex, roles: RoleMap) -> set[str]:
    """Return the values that depend on inputs that no output can replace, for lack of an output of the same type.

    Such inputs belong to the batch.
    """
    graph = index.graph
    types = set(graph.outputs.values())
    batch = [name for name, type in graph.inputs.items() if type not in types and type.shape != ()]
    return descendants(index, [name for name in (*batch, *roles.batch) if name not in graph.initializers])

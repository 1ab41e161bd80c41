"""Finds all gradients of a step, and repeats until no update reads a rank-local value besides its gradients.

When an update does read one, the node that combines the two belongs to the backward, and the next walks stop after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from gopt.analysis.analysis_context import AnalysisContext, build_context
from gopt.analysis.chosen_statistics import without_choices
from gopt.analysis.gradients import LayoutError, find_gradient
from gopt.analysis.layout_aliases import KEEP_ORDER
from gopt.analysis.local_taint import LocalTaint, local_taint
from gopt.analysis.name_hints import pairs_by_name, propose
from gopt.analysis.role_hints import others, states_option
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import ancestors, descendants, walk
from gopt.ir.node_kinds import record_of
from gopt.ir.types import FLOATS
from gopt.operators.kinds import PARTS, RELAYS, SCALES

_FAR = 32
"""Values upstream of a value of one rank, or of a gradient, that are looked at."""
_ROWS = RELAYS | PARTS | SCALES | {"Concat"}
"""Keep rows apart."""
MAX_ITERATIONS = 8
"""Maximum number of times a gradient is moved towards the update because a rank-local value was found in it."""


@dataclass(slots=True)
class GradientMap:
    """Parameter -> gradient, the nodes of the backward (by id), and the findings on the way."""

    context: AnalysisContext
    gradients: dict[str, str]
    backward: set[int]
    check: LocalTaint
    """Taint of the values that the update reads after the gradients."""


def find_gradients(step: StepSkeleton) -> GradientMap:
    """The gradient of every parameter with a gradient; raises UnsupportedError where an update reads more of the
    batch."""
    context = build_context(step)
    wanted = _parameter_candidates(step)
    _refuse_drawn_late(step, wanted)
    for _ in range(MAX_ITERATIONS):
        gradients = _walk(step, context, wanted)
        backward = ancestors(step.index, gradients.values())[0] - step.forward
        check = local_taint(context, set(gradients.values()), backward)
        bad = without_choices(step, _reaching_states(step, check.mixed), check)
        _refuse_loss(step, context, bad)
        _refuse_factor(step, context, bad, check.reduced, gradients)
        local = [name for name in gradients if not _reads_reduced(step, name, check)]
        fresh = {id(node) for node in bad}
        if local:
            # Nodes between a gradient and another parameter's gradient belong to the backward.
            fresh |= _behind(step, gradients, backward)
        fresh -= context.barrier
        if not fresh:
            break
        context.barrier |= fresh
    if local:
        raise reads_new_statistic(step, local[0]) or UnsupportedError(
            f"the update of {local[0]!r} reads a local gradient: {gradients[local[0]]!r} feeds other gradients too",
            *(_pair_hints(step, descendants(step.index, [gradients[local[0]]]))
              or [f"name its gradient: --params {local[0]}=VALUE"]),
        )  # fmt: skip
    if bad:
        raise _own_value(step, _culprit(step, bad[0].inputs, check.rank_local), bad[0], gradients)
    _refuse_found(step, context, gradients)
    _refuse_drawn(step, backward)
    return GradientMap(context, gradients, backward, check)


def reads_new_statistic(step: StepSkeleton, name: str) -> UnsupportedError | None:
    """The refusal of an update that reads a statistic's new value before the ranks combine it; None for any other."""
    behind = ancestors(step.index, [step.updated[name]])[1]
    trained = step.updated.keys() & step.forward_values
    for state, new in step.updated.items():
        if state != name and new in behind and new not in step.forward_values:
            counted = new in step.tainted and trained.isdisjoint(ancestors(step.index, [new])[1])
            if counted or step.is_statistic(state):
                return _reads_new(name, state, new)
    return None


def _reads_new(name: str, read: str, new: str) -> UnsupportedError:
    return UnsupportedError(
        f"the update of {name!r} reads {new!r}, the new value of the statistic {read!r}: each rank has made it of its "
        "own batch",
        f"let the update read the old value {read!r}, as the next step reads the new one",
    )


def _own_value(step: StepSkeleton, value: str, node: Node, gradients: Mapping[str, str]) -> LayoutError:
    """The refusal of a value that a node reads; ``gradients``: parameter -> gradient.

    Where the node leads to no parameter's new value, the result may be shown, and taken for a constant's new value."""
    made_values = descendants(step.index, node.outputs)
    name, new = next(((name, new) for name, new in step.updated.items() if new in made_values), ("", ""))
    shown = [f"if {new} does not replace {name}, leave it out of the step"] if name and name not in gradients else []
    shown += _pair_hints(step, made_values)
    behind = {value, *ancestors(step.index, [value])[1]}
    makers = {name: step.index.producers[name] for name in gradients.values()}
    return LayoutError(
        f"the update reads {value!r}, a value of one rank's own batch, beside a gradient (in {node.label!r})",
        "an update may depend on the batch through gradients alone",
        *_shared_hint(step, value),
        *shown,
        turned=[name for name, maker in makers.items() if maker.is_in(KEEP_ORDER) and maker.inputs[0] in behind],
    )


def _pair_hints(step: StepSkeleton, outputs: Collection[str]) -> list[str]:
    """The hint to pair inputs without a new value with dependent graph outputs of the same type among ``outputs``."""
    inputs = {name: type for name, type in step.index.graph.inputs.items() if name not in step.updated}
    candidates: dict[str, list[str]] = {}
    for new, type in step.index.graph.outputs.items():
        if new in outputs and new not in step.replaces:
            behind = ancestors(step.index, [new])[1]
            candidates[new] = [name for name, kind in inputs.items() if kind == type and name in behind]
    pairs = propose(step.index.graph, candidates)
    if not pairs:
        return []
    name, new = next(iter(pairs.items()))
    return [f"if {new} is the new value of {name}{others(len(pairs) - 1, 'pair')}, say {states_option(pairs)}"]


def _shared_hint(step: StepSkeleton, value: str) -> list[str]:
    """The hint to let an update read the means over the batch upstream of a scalar as means over all ranks."""
    stack, leaves = [value], dict[str, None]()
    for name in stack:
        node = step.index.producers.get(name)
        if node is None or name not in step.tainted:
            continue
        if not step.index.one_element(name) or len(stack) > _FAR:
            return []
        if record_of(node).pieces == "mean" and not all(map(step.index.one_element, node.inputs[:1])):
            leaves[name] = None
        else:
            stack += node.reads
    scalars = all(step.index.graph.type_of(name).shape == () for name in leaves)
    return [f"let all ranks read the mean over all of them: --shared {','.join(leaves)}"] if leaves and scalars else []


def _refuse_factor(
    step: StepSkeleton, context: AnalysisContext, mixed: list[Node], reduced: set[str], gradients: Mapping[str, str]
) -> None:
    """Refuse a one-element value of one rank that no backward would multiply by.

    A backward behind a contraction scales by the forward's divisor, a token count, or by a size of the batch. Any other
    factor, such as a count unknown to the loss, would be a rate of a single rank."""
    for node in mixed:
        for name in node.reads:
            if not step.index.one_element(name) or name in reduced or name not in step.tainted:
                continue
            if name not in step.sizes and not _of_divisors(step, context, name):
                raise _own_value(step, name, node, gradients)


def _of_divisors(step: StepSkeleton, context: AnalysisContext, name: str) -> bool:
    """Return whether a value is computed from divisors of the forward only."""
    producers = step.index.producers

    def following(value: str) -> Iterable[str]:
        return () if value in context.divisors else step.tainted.intersection(producers[value].reads)

    return all(
        value in context.divisors or (value in producers and id(producers[value]) not in step.forward)
        for value in walk([name], following)
    )


def _refuse_loss(step: StepSkeleton, context: AnalysisContext, mixed: list[Node]) -> None:
    """Refuse an update that reads the loss, or a value computed from the loss: the loss differs between ranks."""
    for node in mixed:
        if any(name in context.of_loss for name in node.reads):
            read = [name for name in node.reads if name in context.of_loss]
            culprit = _culprit(step, read, context.of_loss)
            raise UnsupportedError(
                f"the update reads {culprit!r}, "
                f"which depends on the loss of one rank's own batch, beside a gradient (in {node.label!r})",
                *_shared_hint(step, culprit),
                "feed what follows the loss as an input, such as a learning rate, equal on all ranks",
            )


def _refuse_found(step: StepSkeleton, context: AnalysisContext, gradients: Mapping[str, str]) -> None:
    """Hold the gradients found against the conditions that a named gradient must meet."""
    for name, gradient in gradients.items():
        why = _disqualified(step, context, name, gradient)
        if why:
            late = _late(step, gradient) if gradient in context.update_only else ""
            raise reads_new_statistic(step, name) or UnsupportedError(
                f"no gradient of {name!r} was found: all of its update that depends on the batch runs through "
                f"{gradient!r}, but {_reads_late(late) or why}",
                _late_hint(step, late) if late else f"name its gradient: --params {name}=VALUE",
            )


def _late(step: StepSkeleton, gradient: str) -> str:
    """A state that follows the batch, or a fed tensor, that a gradient reads and the forward does not; '' without any.

    A state whose new value is upstream of the gradient belongs to the optimizer."""
    cone = ancestors(step.index, [gradient])[1] - set(step.batch) | {gradient}
    late = (
        name for name in step.index.graph.inputs
        if name in cone and name not in step.forward_values and not step.index.one_element(name)
        and step.updated.get(name, "") not in cone
    )  # fmt: skip
    return next((name for name in late if step.updated.get(name, "") in step.tainted or name not in step.updated), "")


def _reads_late(late: str) -> str:
    return f"it reads {late!r}, which no loss depends on" if late else ""


def _late_hint(step: StepSkeleton, late: str) -> str:
    if late not in step.updated and late not in pairs_by_name(step.index.graph):
        return f"if {late} is fed with each batch, say so: --batch {late}; or show the loss that depends on it"
    return (
        f"if {late} is a statistic that the backward reads, say how ranks combine it: --statistics {late}=max, where "
        "max may be mean, sum or min"
    )


def _reads_reduced(step: StepSkeleton, name: str, check: LocalTaint) -> bool:
    """Return whether a parameter's new value holds the gradient as reduced, and nothing of one rank alone."""
    updated = step.updated[name]
    return updated in check.reduced and updated not in check.rank_local


def _refuse_drawn(step: StepSkeleton, backward: set[int]) -> None:
    """Refuse gradients mixed with random numbers unknown to the forward."""
    for node in step.random:
        if id(node) in backward:
            raise UnsupportedError(
                f"{node.op_type} {node.label!r} draws random numbers between the gradients and their update: "
                "every rank would draw its own",
                "feed them as an input, equal on all ranks",
            )


def _refuse_drawn_late(step: StepSkeleton, parameters: Sequence[str]) -> None:
    """Refuse random numbers drawn by updates themselves, apart from all batch-dependent values."""
    late = [node for node in step.random if id(node) not in step.forward and _unmoved(step, node)]
    behind = descendants(step.index, (name for node in late for name in node.outputs)) if late else set[str]()
    for name in parameters:
        if step.updated[name] in behind and name not in step.roles.params:
            needed = ancestors(step.index, [step.updated[name]])[0]
            node = next(node for node in late if id(node) in needed)
            raise UnsupportedError(
                f"{node.op_type} {node.label!r} draws random numbers in the update of {name!r}: every rank would draw "
                "its own",
                "feed them as an input, equal on all ranks",
            )


def _unmoved(step: StepSkeleton, node: Node) -> bool:
    """Return whether a drawing node reads no batch-dependent value, except for a shape."""
    return not any(name in step.tainted and node.is_a("Bernoulli", "Dropout") for name in node.inputs)


def _behind(step: StepSkeleton, gradients: Mapping[str, str], backward: set[int]) -> set[int]:
    """Nodes of the backward that depend on a value chosen as a gradient."""
    behind, reached = set(gradients.values()), set()
    for node in step.index.graph.nodes:
        if id(node) in backward and any(name in behind for name in node.reads):
            behind.update(node.outputs)
            reached.add(id(node))
    return reached


def _culprit(step: StepSkeleton, inputs: Sequence[str], rank_local: set[str]) -> str:
    return next((name for name in inputs if name in rank_local), None) or next(
        name for name in inputs if name in step.tainted
    )


def _parameter_candidates(step: StepSkeleton) -> list[str]:
    """Floating states upstream of the loss whose new value depends on the batch; scalars last."""
    types = step.index.graph.types
    lost = [name for name in step.roles.params if name not in step.updated]
    if lost:
        raise OptionError(
            f"{lost[0]!r} is not a state: no output is its new value",
            *(_pair_hints(step, descendants(step.index, [step.roles.params[lost[0]]]))
              or [f"name one: --states {lost[0]}=OUTPUT"]),
        )  # fmt: skip
    named = [name for name in step.updated if name in step.roles.params]
    candidates = [
        name
        for name, output in step.updated.items()
        if name not in step.roles.params
        and name in step.forward_values
        and output in step.tainted
        and types[name].dtype in FLOATS
        and not step.is_statistic(name)
    ]
    return sorted(named + candidates, key=lambda name: types[name].elements == 1)


def _walk(step: StepSkeleton, context: AnalysisContext, wanted: list[str]) -> dict[str, str]:
    types = step.index.graph.types
    gradients: dict[str, str] = {}
    chosen: set[str] = set()
    derived: set[str] = set()
    context.of_other_gradients = set()
    _check_named(step, context, wanted)
    for name in wanted:
        if types[name].elements == 1 and not context.of_other_gradients and gradients:
            context.of_other_gradients = descendants(step.index, chosen) - chosen
            derived = _of_gradients_alone(step, chosen)
        named = step.roles.params.get(name, "")
        try:
            gradient = named or find_gradient(context, name, step.updated[name])
        except LayoutError as error:
            near = error.nearest
            if near and (step.may_average(name, near) or _joins_rows(step, name, near)):
                continue  # rows that a queue holds in columns
            raise
        single = types[name].elements == 1 and not named
        if gradient is None or (single and (gradient in derived or gradient in chosen)):
            continue
        if not named and _joins_rows(step, name, gradient):
            continue
        gradients[name] = gradient
        chosen.add(gradient)
    return gradients


def _of_gradients_alone(step: StepSkeleton, gradients: set[str]) -> set[str]:
    """The gradients, and values that depend on the batch through gradients alone: a backward goes on with the
    forward."""
    values = set(gradients)
    for node in step.index.graph.nodes:
        moving = step.tainted.intersection(node.reads)
        if moving and moving <= values:
            values.update(node.outputs)
    return values


def _check_named(step: StepSkeleton, context: AnalysisContext, wanted: Sequence[str]) -> None:
    """Raise OptionError for a value that the user names and that cannot be the gradient of the parameter; first for a
    value without dependence on the batch, for any choice of losses."""
    named = {name: step.roles.params[name] for name in wanted if step.roles.params.get(name)}
    for name, gradient in sorted(named.items(), key=lambda item: item[1] in step.tainted):
        why = _disqualified(step, context, name, gradient)
        if why:
            late = _late(step, gradient) if gradient in context.update_only else ""
            raise OptionError(
                f"{gradient!r} cannot be the gradient of {name!r}: {_reads_late(late) or why}",
                _late_hint(step, late) if late
                else f"leave {name!r} out of the map of parameters, and gopt looks for its gradient",
            )  # fmt: skip


def _disqualified(step: StepSkeleton, context: AnalysisContext, name: str, gradient: str) -> str:
    """Return the reason why a value cannot be the gradient of a parameter; '' if it can."""
    types = step.index.graph.types
    producer = step.index.producers.get(gradient)
    if producer is None or gradient not in types:
        return "no node makes it"
    if not types[gradient].may_have_shape_of(types[name]):  # behind a loop the types of values are not known
        return f"it is {types[gradient]}, the parameter {types[name]}"
    if gradient not in step.tainted or id(producer) in step.forward:
        return "it does not come from the backward"
    if gradient in context.update_only or _made_of_its_old(step, gradient):
        return "it is a part of the update"
    return ""


def _made_of_its_old(step: StepSkeleton, value: str) -> bool:
    """Return whether a value is the new value of a state and depends on the old value (states may keep gradients)."""
    state = step.replaces.get(value)
    return state is not None and state in ancestors(step.index, [value])[1]


def _joins_rows(step: StepSkeleton, name: str, value: str) -> bool:
    """Return whether a value holds rows of a state beside others, as a queue does and no gradient."""
    producers, joined = step.index.producers, set[str]()

    def following(each: str) -> Iterable[str]:
        node = producers.get(each)
        if node is None or not node.is_in(_ROWS):
            return ()
        operands = node.inputs if node.is_in(SCALES | {"Concat"}) else node.inputs[:1]
        if each in joined or record_of(node).joins:
            joined.update(operands)
        return operands

    return any(each == name and each in joined for each in islice(walk([value], following), _FAR))


def _reaching_states(step: StepSkeleton, nodes: list[Node]) -> list[Node]:
    """Return the nodes upstream of the new value of some state."""
    if not nodes:
        return []
    needed = ancestors(step.index, step.updated.values())[0]
    return [node for node in nodes if id(node) in needed]

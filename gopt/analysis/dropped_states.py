"""Outputs without a pair that may be new values of inputs without a pair: no state may pass as a metric or
a loss.

A state need not be made of the old value element by element: 8-bit moments are unpacked, scaled and packed again, a
queue is shifted, the last gradient norm is made anew. Where the data flow leaves an input and an output no partner but
each other, the names settle whether both are a pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gopt.analysis.gradient_fixpoint import GradientMap, find_gradients
from gopt.analysis.name_hints import propose, says_new
from gopt.analysis.open_pairs import OpenPairsError
from gopt.analysis.role_hints import MOST, others
from gopt.analysis.state_matching import DOUBT_COST, refuse_open, walk_to_states
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph_index import GraphIndex, ancestors, descendants, walk
from gopt.ir.types import FLOATS, TensorType

_WALKED = 64
"""Inputs whose readers are followed, to tell those apart that have one type."""


@dataclass(frozen=True, slots=True)
class _Dropped:
    """An output that may be the new value of an input in ``names``."""

    output: str
    names: tuple[str, ...]
    stored: bool = False
    """Whether it is not made of any of them, which the file stores: they may be constants."""


def refuse_dropped(step: StepSkeleton, training: TrainingGraph, mapping: GradientMap) -> None:
    """Raise OpenPairsError for metrics that may be states whose update does not read the old value by elements."""
    for output in training.metrics:
        if step.index.graph.types.get(output) is None or step.index.one_element(output):
            _refuse_doubted(step, output)
    dropped = list(_dropped(step, training, mapping))
    if not dropped:
        return
    narrow = _narrowed(step, dropped)
    named = _by_name(step, {drop.output: narrow[drop.output] for drop in dropped})
    open_ = [drop for drop in dropped if drop.output not in named.values()]
    surely = [drop for drop in open_ if not drop.stored]
    if named:
        raise _error(step, narrow, dropped, named)
    raise _error(step, narrow, surely or open_, {})


def refuse_states_for_losses(step: StepSkeleton, mapping: GradientMap, losses: Sequence[str]) -> None:
    """Raise UnsupportedError for losses with an unpaired stored number of equal type upstream, so perhaps new values
    of the number, where other scalars of the forward explain all gradients."""
    graph = step.index.graph
    free = [name for name in graph.inputs if name in graph.initializers and name not in step.updated]
    unsettled: dict[str, list[str]] = {}
    for loss in losses if free else ():
        read = ancestors(step.index, (loss,))[1]
        if names := [name for name in free if name in read and graph.inputs[name] == graph.outputs[loss]]:
            unsettled[loss] = names
    others = tuple(name for name in step.roots if name not in losses)
    if not unsettled or not others:
        return
    try:
        alone = find_gradients(StepSkeleton(step.index, step.replaces, others, step.roles, step.reach))
    except (UnsupportedError, OptionError):
        return  # some gradients come from the losses alone
    if alone.gradients.keys() >= mapping.gradients.keys():
        which = "they are losses" if len(unsettled) > 1 else "it is a loss"
        refuse_open(step.index, unsettled, f"if {which}, say so: --loss {','.join(losses)}")


def _error(
    step: StepSkeleton, narrow: Mapping[str, Sequence[str]], dropped: Sequence[_Dropped], named: Mapping[str, str]
) -> OpenPairsError:
    drop = dropped[0]
    pairs = named or propose(step.index.graph, {entry.output: narrow[entry.output] for entry in dropped})
    more = others(len(dropped) - 1, "output")
    if drop.stored:
        names = drop.names
        message = (
            f"output {drop.output!r}{more} may be the new value of {', '.join(map(repr, names[:MOST]))}"
            f"{others(max(0, len(names) - MOST), 'input')}, which the file stores: the data flow does not say"
        )
        fixed = (
            f"if {names[0]} is a constant, make it an initializer that is no input; if it is fed, leave its value out"
        )
        return OpenPairsError(message, pairs, fixed, by_name=bool(named))
    candidate = next(iter(pairs), drop.names[0])
    initializers = step.index.graph.initializers
    fed = dict.fromkeys(name for drop in dropped for name in drop.names)
    return OpenPairsError(
        f"output {drop.output!r}{more} may be the new value of input {candidate!r}: the data flow does not say",
        pairs,
        shown=[drop.output for drop in dropped],
        fed=fed if initializers.keys().isdisjoint(fed) else (),
        by_name=bool(named),
    )


def _dropped(step: StepSkeleton, training: TrainingGraph, mapping: GradientMap) -> Iterator[_Dropped]:
    types, batch, reduced = step.index.graph.types, set(training.batch), mapping.check.reduced
    free: dict[tuple[TensorType, bool], list[str]] = {}
    for name in step.index.graph.inputs:
        if name not in step.updated and name not in step.roles.batch and not step.index.one_element(name):
            free.setdefault((types[name], name in batch), []).append(name)
    gradients = frozenset(mapping.gradients.values())
    scalars = _StoredScalars(step)
    for output in training.metrics:
        type = types.get(output)
        if type is None or step.index.one_element(output):
            if output not in mapping.check.rank_local and (output in reduced or output not in step.tainted):
                yield from scalars.dropped(output)
            elif name := scalars.named(output):
                yield _Dropped(output, (name,), stored=True)
            continue
        producer = step.index.producers.get(output)
        inside = producer is not None and (id(producer) in step.forward or id(producer) in mapping.backward)
        updates = output in reduced or output not in step.tainted or not inside
        names = free.get((type, False), []) if updates or output in gradients else []
        names = names + free.get((type, True), []) if updates else names
        if names:
            yield _Dropped(output, tuple(names))


class _StoredScalars:
    """Inputs of one element with a stored value and without a paired output: a counter in a loop, a value made anew in
    each step."""

    def __init__(self, step: StepSkeleton) -> None:
        self.index, graph = step.index, step.index.graph
        named = {*step.updated, *step.roles.batch}
        self.names: dict[TensorType, list[str]] = {}
        for name in graph.inputs:
            if name in graph.initializers and name not in named and step.index.one_element(name):
                self.names.setdefault(graph.types[name], []).append(name)
        self.behind: dict[TensorType, set[str]] = {}

    def named(self, output: str) -> str:
        """The only input with the type of an output and a name that pairs both, such as a scale that each step makes
        anew of the batch alone; '' for no such input."""
        names = [name for name in self.names.get(self.index.graph.type_of(output), []) if says_new(name, output)]
        return names[0] if len(names) == 1 and names[0] in self.index.users else ""

    def dropped(self, output: str) -> Iterator[_Dropped]:
        """The output, where a stored scalar has the same type.

        The new value need not read the old value at its size: the rate of an averaged SGD follows the step counter, the
        scale of 8-bit moments the moments, and a bound for norms may be the last norm. A norm shown beside a stored
        rate looks the same."""
        type = self.index.graph.type_of(output)
        names, scalars = self.names.get(type, []), type.dtype in FLOATS
        if not names:
            return
        if type not in self.behind:
            self.behind[type] = _made_of(self.index, names, scalars=scalars)
        if output in self.behind[type]:
            sources = [name for name in names if output in _made_of(self.index, [name], scalars=scalars)]
            yield _Dropped(output, tuple(sources))
            return
        read = tuple(name for name in names if name in self.index.users)
        if read:
            yield _Dropped(output, read, stored=True)


def _made_of(index: GraphIndex, names: list[str], *, scalars: bool) -> set[str]:
    """Return all values that depend on given values; ``scalars``: through one-element values alone."""
    if not scalars:
        return descendants(index, names)
    return set(walk(names, lambda name: filter(index.one_element, index.results(name))))


def _refuse_doubted(step: StepSkeleton, output: str) -> None:
    """Refuse a one-element output, chosen among batch values by comparisons with an input, as a possible new value."""
    free = {name for name in step.index.graph.inputs if name not in step.updated and name not in step.batch}
    for name, depth in walk_to_states(step.index, output, free, step.tainted):
        if depth >= DOUBT_COST:
            refuse_open(step.index, {output: [name]})


def _narrowed(step: StepSkeleton, dropped: Iterable[_Dropped]) -> dict[str, list[str]]:
    """For each output the inputs that the output may replace: stored inputs first, and of several the inputs upstream
    of the output."""
    stored, batch = step.index.graph.initializers, set(step.batch)
    options = {drop.output: [name for name in drop.names if name in stored] or list(drop.names) for drop in dropped}
    several = dict.fromkeys(name for names in options.values() if len(names) > 1 for name in names if name not in batch)
    behind = {name: descendants(step.index, [name]) for name in list(several)[:_WALKED]}
    for output, names in options.items():
        sources = [name for name in names if output in behind.get(name, ())]
        if sources and len(names) > 1:
            options[output] = sources
    return options


def _by_name(step: StepSkeleton, narrow: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Input -> output where the data flow leaves each as the other's only candidate, and the names form a pair.

    An input without a stored value, as other states have one, may be fed.
    """
    graph = step.index.graph
    outputs: dict[str, list[str]] = {}
    for output, names in narrow.items():
        for name in names:
            outputs.setdefault(name, []).append(output)
    stores_state = any(name in graph.initializers for name in step.updated)
    return {
        names[0]: output
        for output, names in narrow.items()
        if len(names) == 1 == len(outputs[names[0]])
        and says_new(names[0], output)
        and (names[0] in graph.initializers or (not stores_state and names[0] not in step.batch))
    }

"""Checks of values carried between steps: sums over micro-steps add up, and states follow their old values.

Shardings see neither: a state with the new value of another state is sharded correctly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gopt.analysis.look_through import spans_data_axes
from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.collectives.messages import MESSAGES
from gopt.errors import InvariantError
from gopt.ir.constant_folding import Constants
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.graph_index import walk
from gopt.ir.node_kinds import record_of
from gopt.spmd.program import Accumulator, SpmdProgram

FOLLOWED = "old values that new values follow"
"""The question of ``TrainingGraph.once``."""
_NONE: frozenset[str] = frozenset()


def check_carried_values(program: SpmdProgram) -> None:
    """Raise InvariantError for an accumulator that does not sum, or a state with the new value of another state."""
    producers = program.graph.producers()
    for accumulator in program.accumulators:
        _check_accumulator(program, accumulator, producers)
    _check_averages(program, producers)
    _check_names(program)
    if not any(node.domain == COMM and node.op_type in MESSAGES for node in program.graph.nodes):
        _check_old_values(program, producers)  # a role of a split has pieces of tensors, and some of the states


# --- sums over micro-steps ----------------------------------------------------------------------------------------


def _check_accumulator(program: SpmdProgram, sums: Accumulator, producers: Mapping[str, Node]) -> None:
    """Check that an accumulator is the sum before a micro-step plus one term, and zero again after the update."""
    if program.micro_steps == 1:
        raise InvariantError(f"accumulator {sums.input!r} is in a step without micro-steps: nothing adds up in it")
    types, node = program.graph.types, producers.get(sums.added)
    if node is None or not record_of(node).adds or node.inputs.count(sums.input) != 1:
        raise InvariantError(
            f"accumulator {sums.input!r} does not add up: {sums.added!r} is not what it was plus one term"
        )
    if sums.output not in producers or not Constants(program.graph, producers).zero(sums.output):
        raise InvariantError(f"accumulator {sums.input!r} is not zero again behind the update: {sums.output!r}")
    for name in (sums.added, sums.output):
        if types[name] != types[sums.input]:
            raise InvariantError(f"accumulator {sums.input!r} is {types[sums.input]}, and {name!r} is {types[name]}")


def _check_averages(program: SpmdProgram, producers: Mapping[str, Node]) -> None:
    """Check that each statistic made by a call over data after the micro-steps has its own value in each micro-step.

    A call along an axis splitting the computation belongs to each micro-step.
    """
    if program.micro_steps == 1:
        return
    statistics = {state.tensor for state in program.training.states if state.kind is StateKind.STATISTIC}
    for state in program.states:
        maker = producers.get(state.output)
        lost = state.input in statistics and state.input not in program.loop_carried
        if lost and maker is not None and maker.domain == COMM and spans_data_axes(maker, program.mesh.data_axes):
            raise InvariantError(
                f"statistic {state.input!r} is made by a call after the micro-steps, and by none of them",
                "over micro-steps loop_carried names what each of them makes of it",
            )


# --- states -----------------------------------------------------------------------------------------------------------


def _check_names(program: SpmdProgram) -> None:
    """Check that a state with source names for its values has the names of its own tensor."""
    values = {name: state.tensor for state in program.training.states for name in (state.tensor, state.updated)}
    types = program.training.graph.types
    for state in program.states:
        tensor = state.slices[0].tensor
        for name in (state.input, state.output):
            if values.get(name, tensor) != tensor:
                raise InvariantError(f"state {tensor!r} is held as {name!r}, a value of state {values[name]!r}")
        if state.output in types and state.output not in values and not state.copy:
            raise InvariantError(f"state {tensor!r} takes {state.output!r}, which is not its new value in the source")


def _check_old_values(program: SpmdProgram, producers: Mapping[str, Node]) -> None:
    """Check that a new value made by passes follows the states read by the source's update, and a low-precision copy
    its master.

    Scalar states are skipped: any update may read a scalar made of all others. Linear in the graphs: a value follows
    few states, and a bucket is a single state.
    """
    added = [state for state in program.states if state.output in producers and producers[state.output].added]
    if not added:
        return
    training = program.training
    states, tensors, source = training.state_of(), _tensors(training), followed_states(training)
    records = [state for state in program.states if not state.copy]
    holders_of: dict[str, set[str]] = {}
    """Tensor of the source -> the inputs that hold it or parts of it."""
    for state in records:
        for tensor in {part.tensor for part in state.slices} & tensors:
            holders_of.setdefault(tensor, set()).add(state.input)
    masters = {part.tensor: row.output for row in records for part in row.slices}
    sources = _follow(training, program.graph, {row.input for row in records}, {row.output for row in records})
    for state in added:
        tensor = state.slices[0].tensor
        if tensor not in tensors:
            continue
        if state.copy:
            wanted = {master: {master} for master in (masters.get(tensor),) if master}
        else:
            wanted = {name: holders_of.get(name, set()) for name in source[states[tensor].updated]}
        missing = next((name for name, holders in wanted.items() if not sources.follows(state.output, holders)), "")
        if missing:
            raise InvariantError(
                f"the new value {state.output!r} of state {tensor!r} does not follow {missing!r}, as in the source"
            )


def followed_states(training: TrainingGraph) -> dict[str, tuple[str, ...]]:
    """Return new value of a state -> the non-scalar states with old values read for it by the update, sorted; cached
    for a training."""
    return training.once(FOLLOWED, lambda: find_followed(training))


def find_followed(training: TrainingGraph) -> dict[str, tuple[str, ...]]:
    """The same, found anew."""
    sources = _follow(training, training.graph, _tensors(training))
    return {state.updated: tuple(sorted(sources.of(state.updated))) for state in training.states}


def _tensors(training: TrainingGraph) -> set[str]:
    return {state.tensor for state in training.states if training.graph.types[state.tensor].elements != 1}


@dataclass(slots=True)
class _StateSources:
    """Value -> the states read for it in the update, but not through gradients and scalars.

    New values of states stand for their own sources: every tensor of a bucket follows the whole bucket.
    """

    read: dict[str, frozenset[str]]
    made: dict[str, frozenset[str]] = field(default_factory=dict)
    """New value of a state -> what it follows."""
    _all: dict[frozenset[str], set[str]] = field(default_factory=dict)
    """Set that a value follows -> the same, and what it follows through new values: one for all values of a bucket."""

    def of(self, name: str) -> frozenset[str]:
        return self.made.get(name) or self.read.get(name, _NONE)

    def follows(self, name: str, any_of: Collection[str]) -> bool:
        """Return whether a value follows one of some values."""
        sources = self.of(name)
        if sources not in self._all:
            self._all[sources] = self._through(sources)
        return not self._all[sources].isdisjoint(any_of)

    def _through(self, start: frozenset[str]) -> set[str]:
        """Return some states, and the states followed by new values among them."""
        return set(walk(start, lambda name: self.made.get(name, _NONE)))


def _follow(training: TrainingGraph, graph: Graph, states: Collection[str], new: Collection[str] = ()) -> _StateSources:
    """Follow ``states`` and the ``new`` values through a graph; a sweep in order."""
    gradients = set(training.gradients.values())
    sources = _StateSources({name: frozenset((name,)) for name in (*states, *new)})
    shared = {names: names for names in sources.read.values()}
    """One object for each set: an update has few, and many values."""
    read, types, followed = sources.read, graph.types, sources.read.get
    for node in graph.nodes:
        if node.phase is not Phase.UPDATE and not node.added:
            continue
        behind = None
        for name in node.reads:
            more = followed(name)
            if more is None or more is behind:
                continue
            behind = more if behind is None or behind <= more else behind if more <= behind else behind | more
        if behind is None:
            continue
        behind = shared.setdefault(behind, behind)
        for name in node.outputs:
            if name in new:
                sources.made[name] = behind
            elif name not in gradients and (name not in types or types[name].elements != 1):
                read[name] = behind
    return sources

"""The invariant by which ranks stay together: common values never follow a single rank's data.

Every node obeys the rules of sharding, and every state equal on ranks, and every shard, depends on batches and random
numbers only through reductions over all ranks with different data, whatever passes made the graph. See ``gopt.spmd``.
"""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.training import Phase, StateKind
from gopt.errors import GoptError, InvariantError, UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.ir.node_kinds import reads_value
from gopt.records.placements import PerMember, Placement, Placements, Replicated, Shard, holder
from gopt.spmd.program import ShardedState, SpmdProgram
from gopt.spmd.shardings import Shardings
from gopt.text.sanitize import and_more


def check_placements(program: SpmdProgram, shardings: Shardings) -> int:
    """Raise InvariantError for a state on which ranks would part, UnsupportedError if the source itself parts ranks;
    returns the number of checked values."""
    statistics = {state.tensor for state in program.training.states if state.kind is StateKind.STATISTIC}
    for state in program.states:
        if state.local and state.input not in statistics:
            raise InvariantError(f"state {state.input!r} is held as each rank's own, and is not a statistic")
        wanted = shardings.state(state)
        if not _fits(shardings.of(state.output), wanted):
            raise _ErrorBuilder(program, shardings).state(state)
    for accumulator in program.accumulators:
        wanted = shardings.accumulator(accumulator)
        if not _fits(shardings.of(accumulator.added), wanted):
            what = "in shards" if accumulator.sharding.by_axis else "by every rank"
            raise _ErrorBuilder(program, shardings).error(
                f"accumulator {accumulator.input!r} is held {what}", accumulator.added, wanted
            )
    _check_statistics(program)
    return len(program.states) + len(program.accumulators)


def _fits(placements: Placements, wanted: Placements) -> bool:
    """Return whether a placement is at most as dependent as required, or on the same single member."""
    return all(
        one == placement
        or (isinstance(placement, PerMember) and isinstance(one, Replicated))
        or (holder(one) is not None and holder(one) == holder(placement))
        for one, placement in zip(placements, wanted)
    )


def _check_statistics(program: SpmdProgram) -> None:
    """Check that every running statistic depends on the batch, or counts it, in each micro-step through the previous
    result."""
    statistics = {state.tensor for state in program.training.states if state.kind is StateKind.STATISTIC}
    states = [state for state in program.states if state.input in statistics]
    if not states:
        return
    summed = [accumulator.input for accumulator in program.accumulators]
    roots = {*program.training.batch, *program.training.counted.values(), *program.loop_carried, *summed}
    index = GraphIndex(program.graph)
    following = descendants(index, roots)
    if not {*(state.output for state in states), *program.loop_carried.values()} <= following:
        following = descendants(index, roots | _sizes(program))
    for state in states:
        for name in (program.loop_carried.get(state.input), state.output):
            if name is not None and name not in following:
                raise InvariantError(
                    f"statistic {state.input!r} follows no batch: nothing of its new value {name!r} depends on one",
                    "over micro-steps loop_carried names what each of them makes of it",
                )


def _sizes(program: SpmdProgram) -> set[str]:
    """Return the source's shapes of values made of the batch: for a split value, the shape is a constant by now."""
    source = GraphIndex(program.source.graph)
    fed = descendants(source, program.training.batch)
    users = ((node, name) for name in fed for node in source.users.get(name, ()))
    return {output for node, name in users if not reads_value(node, name) for output in node.outputs}


@dataclass(slots=True)
class _ErrorBuilder:
    """Builds the error for a failing state, naming the origin of the fault."""

    program: SpmdProgram
    shardings: Shardings

    def state(self, state: ShardedState) -> GoptError:
        parts = state.slices
        name = repr(parts[0].tensor) + and_more(len(parts) - 1)
        kinds = {state.tensor: state.kind for state in self.program.training.states}
        kind = "statistic" if kinds[parts[0].tensor] is StateKind.STATISTIC else "state"
        manner = "in shards" if state.sharded else "equal on all ranks"
        return self.error(f"{kind} {name} is held {manner}", state.output, self.shardings.state(state))

    def error(self, what: str, output: str, wanted: Placements) -> GoptError:
        """Return the refusal of a value not sharded as ``wanted``, by the differing axes."""
        result = self.shardings.of(output)
        wrong = {axis: one for axis, one, due in zip(self.shardings.axes, result, wanted) if not _fits((one,), (due,))}
        ours = (*self.program.mesh.data_axes, *self.program.split)
        apart = [axis for axis, one in wrong.items() if axis not in ours and isinstance(one, (PerMember, Shard))]
        if apart:
            value, reader = self._source(output, apart)
            of = next((name for name, item in self.program.training.gradients.items() if item == value), "")
            axes = "+".join(apart)
            what = f"state {of!r} is held equal along {axes}" if of else what  # a bucket has many
            return UnsupportedError(
                f"{what}, but in the source these ranks compute values that differ: {reader} {value!r}",
                f"let the source reduce it over {axes}",
            )
        local_axes = [axis for axis, one in wrong.items() if isinstance(one, PerMember)]
        if local_axes:
            group = "+".join(local_axes)
            value, reader = self._source(output, local_axes)
            why = f"{reader} {value!r}, which differs from rank to rank along {group}"
            return InvariantError(
                f"{what}, and its new value {output!r} follows each rank's own data: {why}",
                f"a reduction over {group} is missing in front of it",
            )
        axis, due = next(iter(wrong.items()))
        expected = wanted[self.shardings.axes.index(axis)]
        return InvariantError(f"{what}, and its new value {output!r} is {due} along {axis}", f"it must be {expected}")

    def _source(self, name: str, axes: list[str]) -> tuple[str, str]:
        """Back along operands differing along some axes: to the first value of forward or backward, such as a gradient,
        or to the start value."""
        training, producers = self.program.training, self.program.graph.producers()
        local = {
            output for node in training.graph.nodes if node.phase is not Phase.UPDATE
            for output in node.outputs
        }  # fmt: skip
        reader: Node | None = None
        while name in producers and (reader is None or name not in local):
            behind = next((name for name in producers[name].reads if self._differs(name, axes)), None)
            if behind is None:
                break
            reader, name = producers[name], behind
        return name, f"{reader.op_type} {reader.label!r} reads" if reader is not None else "it is"

    def _differs(self, name: str, axes: list[str]) -> bool:
        result: dict[str, Placement] = dict(zip(self.shardings.axes, self.shardings.of(name)))
        return any(isinstance(result[axis], (PerMember, Shard)) for axis in axes)

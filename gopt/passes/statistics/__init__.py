"""Keep statistics (BatchNorm's running mean and variance) equal on all ranks, or take them over all ranks' samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

import numpy as np

from gopt.analysis.coupling import analyse_couplings, refuse_other_sums
from gopt.analysis.coupling.open_statistics import GATHERED, ROWS, RULES, WHOLE, OpenStatistic
from gopt.analysis.coupling.synchronise import synchronise
from gopt.analysis.loss_reduction import LossRule
from gopt.analysis.statistic_points import StatisticPoint, StatisticReduction
from gopt.analysis.synchronised_values import as_read
from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.collectives.node import format_shape
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import COMM, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.passes.base import Pass
from gopt.passes.statistics.calls import StatisticCalls, readers_in_update, refuse_apart
from gopt.records.mesh import format_axes
from gopt.records.pass_facts import STATISTICS, PassOptions, StatisticsFacts
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.text.sanitize import show


class StatisticPolicy(str, Enum):
    """Policy for the ranks' statistics."""

    AUTO = "auto"
    MEAN = "mean"
    ROOT = "root"
    LOCAL = "local"
    SYNC = "sync"


@dataclass(frozen=True, kw_only=True)
class StatisticsOptions(PassOptions):
    """The option of statistics says how new statistics are combined over the ranks."""

    statistics: Annotated[StatisticPolicy, STATISTICS] = StatisticPolicy.AUTO
    """The word auto combines each statistic as it follows the batch, by mean, sum, maximum or minimum over the ranks
    that see different data; mean averages all, root takes the first rank's, local leaves each rank its own, and
    sync takes every value over samples over the samples of all ranks, in forward and backward."""


def statistics(program: SpmdProgram, options: StatisticsOptions) -> PassResult:
    """Combine the new statistics over the ranks that see different data.

    Guarantees: replicated statistics are equal after every step, or marked local in the manifest. ``auto`` refuses
    a statistic without a known rule of combination. On the wire: means of new values go in one packed call per dtype,
    2(N-1)/N of their bytes; sums and extremes of what a statistic takes of the batch one call each, in every
    micro-step; ``root``, a broadcast from the group's first rank: (N-1)/N. ``sync``: values that
    single samples read of other samples are averaged at their source, so that the step is the step of one large batch:
    2(N-1)/N of the bytes of these values, as many calls behind one another as normalisations stand behind one another,
    forward and backward. Refused where the average would not be exact.
    """
    group = program.mesh.data_group
    states = [state for state in program.training.states if state.kind is StateKind.STATISTIC]
    update = readers_in_update(program.source)
    apart = _read_apart(program, update)
    if group is None or program.mesh.size(group) == 1:
        return _on_one_rank(program, states, apart)
    if options.statistics is StatisticPolicy.SYNC:
        return _synchronised(program, group)
    if not states:
        return PassResult(note="no statistics")
    program.reductions = _reductions(program.source, options.statistics)
    _refuse_chosen(program)
    by_rule: dict[str, list[State]] = {}
    for state in states:
        reduction = program.reductions[state.tensor]
        if reduction.rule == "mean" and state.tensor in apart and not reduction.points:
            point = StatisticPoint(state.updated, "mean")  # the update reads it: equal on ranks in each micro-step
            program.reductions[state.tensor] = reduction = replace(reduction, points=(point,))
        by_rule.setdefault("points" if reduction.points else reduction.rule, []).append(state)
    local = {state.tensor for state in by_rule.get("local", ())}
    refuse_apart(by_rule.get("local", ()), update, "--statistics local")
    refuse_apart(by_rule.get("root", ()), apart, "--statistics root over micro-steps")
    rewriter = GraphRewriter(program.graph, "statistics")
    local_names: dict[str, str] = {}
    calls = sum(_alike(program, rewriter, group, by_rule.get(rule, []), rule, local_names) for rule in ("mean", "root"))
    emitted = StatisticCalls(program, group, rewriter, local_names)
    emitted.emit(by_rule.get("points", ()), apart)
    rewriter.finish()
    program.set_states([replace(h, local=True) if h.input in local else h for h in program.states])
    calls += emitted.calls
    program.statistics_of_root = options.statistics is StatisticPolicy.ROOT
    figures = {"averaged": "mean", "of_root": "root", "local": "local", "reduced": "points"}
    facts = {name: len(by_rule[rule]) for name, rule in figures.items() if rule in by_rule}
    return PassResult(facts=StatisticsFacts(**facts, calls=calls or None))


def _on_one_rank(program: SpmdProgram, states: Sequence[State], readers: Mapping[str, Sequence[Node]]) -> PassResult:
    """Let the update read old values of statistics moved by the micro-steps of one rank."""
    read = [state for state in states if state.tensor in readers]
    if not read:
        return PassResult(note="one rank" if states else "no statistics")
    program.reductions = {
        state.tensor: StatisticReduction(state.tensor, "mean", points=(StatisticPoint(state.updated, "mean"),))
        for state in read
    }  # fmt: skip
    rewriter = GraphRewriter(program.graph, "statistics")
    emitted = StatisticCalls(program, "", rewriter, {})
    emitted.emit(read, readers)
    rewriter.finish()
    program.set_states(program.states)
    return PassResult(note="one rank")


def _read_apart(program: SpmdProgram, update: Mapping[str, list[Node]]) -> Mapping[str, list[Node]]:
    """Statistic moved by micro-steps, read as before by the update -> the readers. Raises UnsupportedError where
    ranks share samples: the reader may be split, or on another stage."""
    apart = update if program.micro_steps > 1 else {}
    mesh = program.mesh
    shared = [(axis, size) for axis, size in mesh.axes if axis not in mesh.data_axes and size > 1]
    if apart and shared:
        name, readers = next(iter(apart.items()))
        others = {axis: size for axis, size in mesh.axes if (axis, size) not in shared}
        others["dp"] = others.get("dp", 1) * mesh.ranks // mesh.data_ranks
        raise UnsupportedError(
            f"the update of parameters reads the statistic {show(name)} as it was before the micro-steps, which move "
            f"it, by {readers[0].op_type} {show(readers[0].label)}: ranks along {format_axes(shared)} share samples, "
            "and gopt does not follow the old value to where they read it",
            "leave --accumulate (or --micro-batches) out, or let these ranks see other samples: "
            f"--mesh {format_axes(others.items())}",
        )
    return apart


def _reductions(training: TrainingGraph, policy: StatisticPolicy) -> dict[str, StatisticReduction]:
    """How each statistic is combined: as the user says, and the others by the policy."""
    states = [state.tensor for state in training.states if state.kind is StateKind.STATISTIC]
    result = analyse_couplings(training).statistics
    rings = {p.ring.pointer for item in result.known.values() for p in item.points if p.ring is not None}
    chosen = states
    if policy is not StatisticPolicy.AUTO:
        chosen = [name for name in states if name in training.reductions or name in rings]
    unclear = [name for name in chosen if name in result.unclear]
    if unclear:
        raise _unclear(training, {name: result.unclear[name] for name in unclear})
    if policy is StatisticPolicy.MEAN:
        _refuse_integers(training, set(states).difference(chosen))
    plain = {name: StatisticReduction(name, policy.value) for name in states}
    return plain | {name: result.known[name] for name in chosen}


def _refuse_chosen(program: SpmdProgram) -> None:
    """Raise UnsupportedError where a statistic kept by a condition of the update is not combined at its end."""
    for name, branch in program.source.chosen.items():
        rule = program.reductions[name].rule
        if program.micro_steps > 1 or rule in ("root", "local", "gather"):
            why = "with --accumulate" if program.micro_steps > 1 else f"with --statistics {rule}"
            raise UnsupportedError(
                f"a condition on gradients keeps the statistic {name!r} as it was: {why} gopt does not combine it",
                f"let {branch!r} be its new value, whatever the gradients are",
            )


def _refuse_integers(training: TrainingGraph, states: set[str]) -> None:
    for name in states:
        dtype = training.graph.types[name].dtype
        if dtype not in FLOATS:
            raise UnsupportedError(
                f"--statistics mean: {name!r} is {dtype}, and ranks cannot agree on integers by a mean",
                f"say how ranks combine it: --statistics mean,{name}=sum, where sum may be max, min, root or local",
            )


def _unclear(training: TrainingGraph, unclear: Mapping[str, OpenStatistic]) -> UnsupportedError:
    """The refusal of all statistics without a rule for combining; the hint settles it."""
    example, why = next(iter(unclear.items()))
    rule = training.reductions.get(example, "")
    hints = []
    if why.literal:
        hints.append("write the number of samples as the size (Shape) of a batch input, and ranks add it up")
    rules = WHOLE if rule and why.rules == RULES else why.rules
    named = ",".join(f"{name}={rules[0] if name == example else item.rules[0]}" for name, item in unclear.items())
    if why.rules == GATHERED:
        hints.append(
            f"--statistics {named}: ranks gather the rows of all; local keeps each rank's own, and root the first "
            "rank's"
        )
    elif why.rules == ROWS:
        hints.append(f"--statistics {named}: local keeps each rank's own, and root the first rank's")
    else:
        choices = f"{', '.join(rules[1:-1])} or {rules[-1]}"
        hints.append(f"say how: --statistics {named}, where {rules[0]} may be {choices}")
    return UnsupportedError(
        f"--statistics {example}={rule} is not supported: {why.reason}"
        if rule
        else f"gopt cannot tell how ranks combine the statistic {example!r}: {why.reason}",
        *hints,
    )


def _alike(
    program: SpmdProgram,
    rewriter: GraphRewriter,
    group: str,
    states: list[State],
    rule: str,
    local_names: dict[str, str],
) -> int:
    """Let all ranks hold the mean of new statistics, or the values of the group's first rank; returns the number of
    calls.

    ``local_names`` gets the names of each rank's own values."""
    stages = program.stages.states if program.stages is not None else {}
    stage_of = {state.updated: stages.get(state.tensor) for state in program.training.states}
    by_kind: dict[tuple[str, int | None], list[State]] = {}
    for state in states:
        by_kind.setdefault((program.graph.types[state.updated].dtype, stage_of[state.updated]), []).append(state)
    producers, users = program.graph.producers(), program.graph.users()
    start = len({(program.graph.types[name].dtype, stage_of[name]) for name in local_names})
    for number, alike in enumerate(by_kind.values()):
        inputs = []
        for position, state in enumerate(alike):
            name, local = state.updated, f"gopt.statistics.b{start + number}.local{position}"
            rewriter.rename_output(producers[name], name, local)
            local_names[name] = local
            for reader in users.get(name, ()):
                rewriter.rewire(reader, name, local)
            if program.micro_steps > 1:
                program.loop_carried[state.tensor] = local  # the mean is taken of what the last micro-step left
            inputs.append(state.tensor if program.micro_steps > 1 else local)
        types = {state.updated: program.graph.types[state.updated] for state in alike}
        if rule == "root":
            shapes = [format_shape(type.dims) for type in types.values()]
            attributes = {"group": group, "root": 0, "dtype": next(iter(types.values())).dtype, "shapes": shapes}
            rewriter.add("Broadcast", inputs, types, domain=COMM, attributes=attributes)
        else:
            rewriter.add("AllReduce", inputs, types, domain=COMM, attributes={"group": group, "reduce": "mean"})
    return len(by_kind)


def _synchronised(program: SpmdProgram, group: str) -> PassResult:
    if program.micro_steps > 1:
        raise OptionError(
            "--statistics sync with --accumulate: samples of different micro-steps never meet",
            "leave one of them out",
        )
    if program.loss_reduction.rule is LossRule.WEIGHTED:
        raise OptionError(
            f"--statistics sync with --loss-reduction {program.loss_reduction}: it takes counts over all ranks itself",
            "leave --loss-reduction out",
        )
    shared = synchronise(program.source, program.mesh.size(group))
    refuse_other_sums(program.source, program.loss_reduction)
    _refuse_whole(program, shared.points)
    rewriter = GraphRewriter(program.graph, "statistics")
    producers, users = program.graph.producers(), program.graph.users()
    for number, name in enumerate(as_read(program.training.graph, shared.points)):
        _share(program, rewriter, group, number, name, producers, users)
    for number, item in enumerate(shared.corrected):
        type = program.graph.types[item.constant]
        fixed = f"gopt.statistics.sync.constant{number}"
        rewriter.constant(fixed, np.full(type.dims, item.value, numpy_dtype(type.dtype)))
        rewriter.rewire(producers[item.output], item.constant, fixed)
    rewriter.finish()
    program.synchronised = shared
    return PassResult(facts=StatisticsFacts(synchronised=len(shared.points)))


def _refuse_whole(program: SpmdProgram, points: Sequence[str]) -> None:
    """Raise UnsupportedError for a gradient added by ranks, and made of means over all ranks alone."""
    source, reduction = program.source, program.loss_reduction
    local, shared = set(source.batch), set(points)
    for node in source.graph.nodes:
        if not local.isdisjoint(node.reads):
            local.update(name for name in node.outputs if name not in shared)
    for parameter, value in source.gradients.items():
        if reduction.rule_of(parameter) is LossRule.SUM and value not in local | shared:
            raise UnsupportedError(
                f"--statistics sync with --loss-reduction {reduction}: {value!r}, the gradient of {parameter!r}, is "
                "made of values over all ranks' samples, and ranks would add it",
                "write the loss as a mean over samples, or leave --statistics sync out",
            )


def _share(
    program: SpmdProgram,
    rewriter: GraphRewriter,
    group: str,
    number: int,
    name: str,
    producers: dict[str, Node],
    users: dict[str, list[Node]],
) -> None:
    """Let every reader of the source see a value's mean over the ranks; values sent by a pass stay the rank's own.

    A new state with this value is the mean as well."""
    producer, type = producers[name], program.graph.types[name]
    local, mean = f"gopt.statistics.sync{number}.local", f"gopt.statistics.sync{number}.mean"
    if producer.added:  # a call that later passes join with others
        rewriter.add("Identity", [name], {local: type}, after=producer)
    else:
        rewriter.rename_output(producer, name, local)
        rewriter.add("Identity", [local], {name: type}, after=producer)
    rewriter.add(
        "AllReduce", [local], {mean: type}, domain=COMM, attributes={"group": group, "reduce": "mean"}, after=producer
    )
    for reader in users.get(name, ()):
        if not reader.added:
            rewriter.rewire(reader, name, mean)
    layout: Node | None = producer
    while layout is not None and layout.added and layout.phase is Phase.UPDATE:  # the call may meet one of the forward
        layout.phase, layout = None, producers.get(layout.inputs[0])


def needed(program: SpmdProgram) -> str:
    """Return the reason why a step needs this pass, or ''."""
    statistic = next((state.tensor for state in program.training.states if state.kind is StateKind.STATISTIC), None)
    if statistic is not None and program.mesh.data_ranks > 1:
        return f"statistic {statistic!r} follows each rank's own data, and nothing else averages it or marks it local"
    read = next(iter(readers_in_update(program.source)), None) if program.micro_steps > 1 else None
    return "" if read is None else f"the update reads statistic {read!r} as it was before the micro-steps"


PASS = Pass("statistics", StatisticsOptions, statistics, needed=needed, facts=StatisticsFacts)

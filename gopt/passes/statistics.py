"""Keep statistics (BatchNorm's running mean and variance) equal on all ranks, or take them over all ranks' samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import onnx

from gopt.analysis.coupling import refuse_other_sums
from gopt.analysis.coupling.synchronise import synchronise
from gopt.analysis.loss_reduction import LossRule
from gopt.analysis.training import State, StateKind
from gopt.artifact.report import PassResult
from gopt.collectives.node import format_shape
from gopt.errors import OptionError
from gopt.ir.graph import COMM, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, numpy_dtype
from gopt.passes.base import Pass
from gopt.program import SpmdProgram


class StatisticPolicy(str, Enum):
    """Policy for the ranks' statistics."""

    MEAN = "mean"
    ROOT = "root"
    LOCAL = "local"
    SYNC = "sync"


@dataclass(frozen=True, kw_only=True)
class Options:
    """``mean`` averages new statistics over the ranks that see different data, ``root`` takes those of the first of
    them, ``local`` leaves them apart, ``sync`` takes every value over samples over the samples of all ranks, in forward
    and backward."""

    statistics: StatisticPolicy = StatisticPolicy.MEAN


def statistics(program: SpmdProgram, options: Options) -> PassResult:
    """Average the new statistics over the ranks that see different data, in one packed call per dtype.

    Guarantees: replicated statistics are equal after every step, or marked local in the manifest. On the wire:
    2(N-1)/N of their bytes; ``root``, a broadcast from the group's first rank: (N-1)/N. ``sync``: what single samples
    read of other samples is averaged where it is made, so that the step is that of one large batch: 2(N-1)/N of
    the bytes of those values, as many calls behind one another as normalisations stand behind one another, forward and
    backward. Refused where that would not be exact.
    """
    group = program.mesh.data_group
    states = [state for state in program.training.states if state.kind is StateKind.STATISTIC]
    if group is None or program.mesh.size(group) == 1:
        return PassResult(note="one rank" if states else "no statistics")
    if options.statistics is StatisticPolicy.SYNC:
        return _synchronised(program, group)
    if not states:
        return PassResult(note="no statistics")
    if options.statistics is StatisticPolicy.LOCAL:
        names = {state.tensor for state in states}
        program.set_states([replace(h, local=True) if h.input in names else h for h in program.states])
        return PassResult(facts={"local": len(states)})
    return _alike(program, group, states, options.statistics)


def _alike(program: SpmdProgram, group: str, states: list[State], policy: StatisticPolicy) -> PassResult:
    """Let all ranks hold the mean of the new statistics, or those of the group's first rank."""
    rewriter = GraphRewriter(program.graph, "statistics")
    by_dtype: dict[str, list[State]] = {}
    for state in states:
        by_dtype.setdefault(program.graph.types[state.updated].dtype, []).append(state)
    producers, users = program.graph.producers(), program.graph.users()
    for number, held in enumerate(by_dtype.values()):
        inputs = []
        for place, state in enumerate(held):
            name, local = state.updated, f"gopt.statistics.b{number}.local{place}"
            rewriter.rename_output(producers[name], name, local)
            for reader in users.get(name, ()):
                rewriter.rewire(reader, name, local)
            if program.micro_steps > 1:
                program.loop_carried[state.tensor] = local  # the mean is taken of what the last micro-step left
            inputs.append(state.tensor if program.micro_steps > 1 else local)
        types = {state.updated: program.graph.types[state.updated] for state in held}
        if policy is StatisticPolicy.ROOT:
            shapes = [format_shape(type.dims) for type in types.values()]
            attributes = {"group": group, "root": 0, "dtype": next(iter(types.values())).dtype, "shapes": shapes}
            rewriter.add("Broadcast", inputs, types, domain=COMM, attributes=attributes)
        else:
            rewriter.add("AllReduce", inputs, types, domain=COMM, attributes={"group": group, "reduce": "mean"})
    rewriter.finish()
    program.statistics_of_root = policy is StatisticPolicy.ROOT
    return PassResult(
        facts={"of_root" if policy is StatisticPolicy.ROOT else "averaged": len(states), "calls": len(by_dtype)}
    )


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
    shared = synchronise(program.training, program.mesh.size(group))
    refuse_other_sums(program.source, program.loss_reduction)
    rewriter = GraphRewriter(program.graph, "statistics")
    producers, users = program.graph.producers(), program.graph.users()
    for number, name in enumerate(shared.points):
        _share(program, rewriter, group, number, name, producers, users)
    for number, each in enumerate(shared.corrected):
        type = program.graph.types[each.constant]
        fixed = f"gopt.statistics.sync.constant{number}"
        value = onnx.numpy_helper.from_array(np.full(type.dims, each.value, numpy_dtype(type.dtype)))
        rewriter.add("Constant", [], {fixed: TensorType(type.dtype, type.shape)}, attributes={"value": value})
        rewriter.rewire(producers[each.output], each.constant, fixed)
    rewriter.finish()
    program.synchronised = shared
    return PassResult(facts={"synchronised": len(shared.points)})


def _share(
    program: SpmdProgram,
    rewriter: GraphRewriter,
    group: str,
    number: int,
    name: str,
    producers: dict[str, Node],
    users: dict[str, list[Node]],
) -> None:
    """Let every reader of the source see a value's mean over the ranks; what a pass sends stays the rank's own.

    A new state that is such a value is the mean as well.
    """
    producer, type = producers[name], program.graph.types[name]
    own, mean = f"gopt.statistics.sync{number}.local", f"gopt.statistics.sync{number}.mean"
    rewriter.rename_output(producer, name, own)
    rewriter.add("Identity", [own], {name: type}, after=producer)
    rewriter.add(
        "AllReduce", [own], {mean: type}, domain=COMM, attributes={"group": group, "reduce": "mean"}, after=producer
    )
    for reader in users.get(name, ()):
        if not reader.added:
            rewriter.rewire(reader, name, mean)


def needed(program: SpmdProgram) -> str:
    """Return the reason why a step needs this pass; '' if it does not."""
    held = next((state.tensor for state in program.training.states if state.kind is StateKind.STATISTIC), None)
    if held is None or program.mesh.data_ranks == 1:
        return ""
    return f"statistic {held!r} follows each rank's own data, and nothing else averages it or marks it local"


PASS = Pass("statistics", Options, statistics, needed=needed)
